"""Datasets that are created and read on the worker whose replicas they feed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Final

from daskdist.core.block import Bundle, Rows
from daskdist.core.dataset_base import element_spec_of, node_of, pipeline_fingerprint, primitive_of
from daskdist.core.failing.origin import Skipped
from daskdist.core.finalizer import Finalizer
from daskdist.core.node import CountingNode, Facts, Node, Source, counting, walk
from daskdist.core.primitive import Epoch, Primitive, Stream
from daskdist.core.randomness.pass_numbers import PassNumber
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import LONE, Leaves, Structure
from daskdist.dataset import Dataset, spec_by
from daskdist.display.plan import tree
from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.caller import Handle
from daskdist.execute.callers.choose import local_caller
from daskdist.execute.resume.packing import pack, unpack
from daskdist.execute.resume.position import PipelineIdentity, StreamPosition
from daskdist.execute.resume.recorded_answers import Answers
from daskdist.execute.stream.calls import pulled_exactly
from daskdist.execute.stream.interpreter import Interpreter
from daskdist.execute.stream.local_iterator import rows_by
from daskdist.ops.with_options import Options, comes_in_any_order
from daskdist.passes.numbering import first_pass, from_first_pass
from daskdist.passes.seed import drawn_seeds, with_drawn
from daskdist.strategy.input.device_maps import DeviceMaps, SuppliedDataset
from daskdist.strategy.input.options import InputContext
from daskdist.strategy.values.error_context import add_context

# The error if a lost dataset cannot be created again.
CREATES_ANOTHER: Final = (
    "datasets of a function were lost with their workers, and the function, called again, has created other "
    "ones: a pass continues only over datasets of the same operations, functions and data; begin another pass"
)


@dataclass(frozen=True)
class DatasetSummary:
    """The facts about a dataset on a worker that the program needs.

    Parameters
    ----------
    spec, cardinality, options, plan, device_maps
        Its spec, cardinality, options, plan, and the functions that replicas call on their devices.
    seeds
        The seeds that its operations have drawn.
    identity
        Its identity, independent of these.
    moves_elements
        Whether another run of a pass may have elements in other places, so that a position needs what this run knows.
    obstacle
        Why a pass cannot continue once this dataset is lost, even with the same one on another worker; "" if it can.
    first_pass
        The number that `Dataset.at_epoch` gave to its first pass, or None.
    """

    spec: ElementSpec
    cardinality: int
    options: Options
    plan: str
    device_maps: DeviceMaps
    seeds: tuple[int, ...]
    identity: PipelineIdentity
    moves_elements: bool
    obstacle: str
    first_pass: int | None


def summary_of(dataset: SuppliedDataset) -> DatasetSummary:
    """Return the summary of a dataset; if its spec depends on a function, its first element is computed."""

    def caller() -> Any:
        return local_caller(node_of(dataset), dataset.options().num_threads)

    spec, options = spec_by(dataset, caller), dataset.options()
    node = node_of(dataset)
    moves = _why_elements_move(node, options)
    return DatasetSummary(
        spec,
        dataset.cardinality(),
        options,
        tree(node),
        dataset.device_maps,
        tuple(drawn_seeds(node)),
        _identity_of(dataset),
        bool(moves),
        moves or _why_not_repeatable(node),
        first_pass(node),
    )


def _identity_of(dataset: Dataset) -> PipelineIdentity:
    node = node_of(dataset)
    unseeded = with_drawn(node, [0] * len(drawn_seeds(node)))
    return PipelineIdentity.of(unseeded, pipeline_fingerprint(dataset), primitive_of(dataset))


def _why_elements_move(node: Node, options: Options) -> str:
    if options.on_error == "skip" or any(part.facts.leaves_out_failed for part in walk(node)):
        return "elements that fail are left out, and others may fail now"
    if comes_in_any_order(node) and not _why_not_repeatable(node):
        return "elements come in any order (deterministic=False)"
    names = [part.name for part in walk(node) if part.replays_first_pass and any(counting(part))]
    return f"{', '.join(names)} replays the random order of an earlier pass" if names else ""


def _why_not_repeatable(node: Node) -> str:
    names = [part.name for part in walk(node) if not part.is_repeatable]
    return f"{', '.join(names)} may not give the same elements again" if names else ""


def make_dataset(
    dataset_fn: Callable[[InputContext], Any], context: InputContext, worker: str | None = None
) -> SuppliedDataset:
    """Create the dataset of an input pipeline with a user's function.

    Raises
    ------
    ArgumentError
        The function returned something else.
    """
    where = f"input pipeline {context.input_pipeline_id}" + (f" on worker {worker}" if worker else "")
    try:
        dataset = dataset_fn(context)
    except Exception as error:
        add_context(error, f"raised by the dataset_fn of {where}")
        raise
    if not isinstance(dataset, Dataset):
        raise ArgumentError(
            f"distribute_datasets_from_function: {getattr(dataset_fn, '__qualname__', dataset_fn)} returned "
            f"{type(dataset).__name__} for {where}; it is to return a daskdist Dataset"
        )
    return SuppliedDataset(dataset)


def make_on_worker(
    _: Sequence[Any], dataset_fn: Callable[..., Any], context: InputContext, worker: str
) -> SuppliedDataset:
    """Create a dataset with `make_dataset`, as a task: the dataset stays on the worker."""
    return make_dataset(dataset_fn, context, worker)


def summary_on_worker(values: Sequence[SuppliedDataset]) -> DatasetSummary:
    """Return the summary of a dataset, on the worker that has it."""
    return summary_of(values[0])


class WorkerPass:
    """One pass over a dataset, in this process.

    Parameters
    ----------
    dataset, epoch
        The dataset and the pass.
    position
        What `position` returned for an earlier run of the pass, or None.
    """

    def __init__(self, dataset: Dataset, epoch: Epoch, position: bytes | None = None) -> None:
        self._dataset, self._epoch, self._position = dataset, epoch, position
        self._primitive = primitive_of(dataset)
        self._identity = PipelineIdentity.of(node_of(dataset), "", self._primitive)
        self._lock = RLock()
        self._interpreter: _SkipCollector | None = None
        # The number of the next element.
        self._number = 0
        self._finalizer: Finalizer | None = None

    def _open(self, first: int) -> _SkipCollector:
        dataset, answers = self._dataset, None
        if self._finalizer is not None:
            self._finalizer()
        caller = local_caller(node_of(dataset), dataset.options().num_threads)
        interpreter = _SkipCollector(caller, budget_bytes=dataset.options().memory_budget_bytes)
        if self._position is not None:
            content = unpack(self._position)
            self._identity.check(content)
            answers = Answers.of_plain(content["answers"])
        start = StreamPosition(self._epoch, [], first, answers)
        self._rows = rows_by(interpreter, self._primitive, start, lambda: _without_rows(dataset))
        self._rest: Rows | None = None
        self._interpreter, self._number = interpreter, first
        self._finalizer = Finalizer(self, interpreter.close)
        return interpreter

    def pull(self, num_rows: int, first_needed: int | None = None) -> Rows:
        """Return the next elements, at most ``num_rows``; none at the end.

        Positions before the element ``first_needed`` will not be requested; None if there will be no positions.
        """
        with self._lock:
            interpreter = self._interpreter or self._open(0)
            interpreter.first_needed = first_needed
            rows = next(self._rows, None) if self._rest is None else self._rest
            if rows is None:
                return Bundle(LONE, [])
            self._rest = rows.slice(num_rows, len(rows)) if len(rows) > num_rows else None
            rows = rows.slice(0, min(num_rows, len(rows)))
            rows.skipped = interpreter.take_notes()
            self._number += len(rows)
            return rows

    def pull_from(self, first: int, num_rows: int) -> Rows:
        """Return elements from a number on that were pulled before the answers were taken."""
        with self._lock:
            if self._interpreter is not None and first < self._number:
                # Another thread may make the previous call later.
                return WorkerPass(self._dataset, self._epoch, self._position).pull_from(first, num_rows)
            if self._interpreter is None or first > self._number:
                self._open(first)
            return pulled_exactly([self], num_rows, first)

    def position(self, first: int) -> bytes | None:
        """Return a position from which another run yields the same elements, from a number on."""
        with self._lock:
            interpreter = self._interpreter
            if interpreter is None:
                return self._position
            interpreter.first_needed = first
            interpreter.drop_answers_before(first)
            *_, answers = interpreter.position_at(first)
            return pack({"fingerprint": "", "order": self._identity.order, "answers": answers})


def position_on_worker(values: Sequence[WorkerPass], first: int) -> Any:
    """Return the position of a pass, on the worker that has it."""
    return values[0].position(first)


def _without_rows(dataset: Dataset) -> tuple[Structure, Leaves]:
    return element_spec_of(dataset).structure, tuple(leaf.zeros() for leaf in element_spec_of(dataset).leaves)


@dataclass(frozen=True)
class BeginWorkerPass:
    """A function that begins passes over a dataset.

    Parameters
    ----------
    passes
        The numbers of the passes.
    seeds
        The seeds to use in place of those that the dataset has drawn.
    identity
        The identity of the dataset, which may have been created again.
    """

    passes: PassNumber
    seeds: tuple[int, ...]
    identity: PipelineIdentity

    def __call__(self, values: Sequence[Dataset], epoch: Epoch, position: bytes | None) -> WorkerPass:
        """Begin a pass.

        Raises
        ------
        ClusterError
            The function has created another dataset than before.
        """
        (dataset,) = values
        if not _identity_of(dataset).is_like(self.identity):
            raise ClusterError(CREATES_ANOTHER)
        node = node_of(dataset)
        if drawn_seeds(node) != list(self.seeds):
            dataset = Dataset(with_drawn(node, self.seeds))
        return WorkerPass(dataset, from_first_pass(node, self.passes.of(epoch)), position)


class _SkipCollector(Interpreter):
    # Collect notes of skipped elements, which are sent with the rows.
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._notes: list[Skipped] = []
        self.first_needed: int | None = None

    def drop_answers_before(self, num_elements: int) -> None:
        # The program pulls elements before it takes earlier positions.
        super().drop_answers_before(num_elements if self.first_needed is None else min(num_elements, self.first_needed))

    def note_skipped(self, notes: Sequence[Skipped]) -> None:
        self._notes += notes

    def take_notes(self) -> tuple[Skipped, ...]:
        notes, self._notes = tuple(self._notes), []
        return notes


@dataclass(frozen=True, eq=False)
class OnWorker(CountingNode, Source):
    """A source of the elements of a dataset on a worker.

    Parameters
    ----------
    held
        The dataset.
    worker
        The address of the worker.
    known
        The summary of the dataset.
    seeds
        The seeds of a position from which it continues; none before.
    """

    held: Handle = field(repr=False)
    worker: str
    known: DatasetSummary = field(repr=False)
    seeds: tuple[int, ...] = field(default=(), repr=False)

    name = "dataset_fn"
    facts = Facts()
    is_listed = False
    is_cheap = False

    @property
    def spec(self) -> ElementSpec:
        return self.known.spec

    @property
    def cardinality(self) -> int:
        return self.known.cardinality

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        known = self.known
        begin = BeginWorkerPass(self.passes, self.seeds or known.seeds, known.identity)
        position = position_on_worker if known.moves_elements else None
        return Stream(_nothing_here, self.name, self.held, begin, position, is_repeatable=not known.obstacle)

    def __str__(self) -> str:
        return f"dataset_fn on {self.worker}:\n" + "\n".join(f"  {line}" for line in self.known.plan.splitlines())


def _nothing_here(epoch: Epoch) -> Any:
    raise ArgumentError("a dataset on a worker can only be read there")
