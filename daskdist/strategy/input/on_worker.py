"""Datasets that are created and read on the worker whose replicas they feed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskdist.core.block import Bundle, Rows
from daskdist.core.dataset_base import element_spec_of, node_of, primitive_of
from daskdist.core.failing.origin import Skipped
from daskdist.core.finalizer import Finalizer
from daskdist.core.node import CountingNode, Facts, Source
from daskdist.core.primitive import Arrange, Chain, Compute, Epoch, Fact, Primitive, Stream
from daskdist.core.randomness.pass_numbers import PassNumber
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import LONE, Leaves, Structure
from daskdist.dataset import Dataset, spec_by
from daskdist.display.plan import tree
from daskdist.errors import ArgumentError
from daskdist.execute.caller import Handle
from daskdist.execute.callers.choose import local_caller
from daskdist.execute.stream.interpreter import Interpreter
from daskdist.execute.stream.local_iterator import rows_by
from daskdist.ops.with_options import Options
from daskdist.strategy.input.device_maps import DeviceMaps, SuppliedDataset
from daskdist.strategy.input.options import InputContext
from daskdist.strategy.values.error_context import add_context


@dataclass(frozen=True)
class DatasetSummary:
    """The spec, cardinality, options and plan of a dataset on a worker."""

    spec: ElementSpec
    cardinality: int
    options: Options
    plan: str
    device_maps: DeviceMaps


def summary_of(dataset: SuppliedDataset) -> DatasetSummary:
    """Return the summary of a dataset; if its spec depends on a function, its first element is computed."""

    def caller() -> Any:
        return local_caller(node_of(dataset), dataset.options().num_threads)

    spec, options = spec_by(dataset, caller), dataset.options()
    return DatasetSummary(spec, dataset.cardinality(), options, tree(node_of(dataset)), dataset.device_maps)


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
    """One pass over a dataset, in this process."""

    def __init__(self, dataset: Dataset, epoch: Epoch) -> None:
        caller = local_caller(node_of(dataset), dataset.options().num_threads)
        self._interpreter = _SkipCollector(caller, budget_bytes=dataset.options().memory_budget_bytes)
        self._rows = rows_by(self._interpreter, primitive_of(dataset), epoch, lambda: _without_rows(dataset))
        self._rest: Rows | None = None
        # Whether later elements depend on the earlier ones.
        self.carries_state = _has_chain(primitive_of(dataset))
        Finalizer(self, self._interpreter.close)

    def pull(self, num_rows: int) -> Rows:
        """Return the next elements, at most ``num_rows``; none at the end."""
        rows = next(self._rows, None) if self._rest is None else self._rest
        if rows is None:
            return Bundle(LONE, [])
        self._rest = rows.slice(num_rows, len(rows)) if len(rows) > num_rows else None
        rows = rows.slice(0, min(num_rows, len(rows)))
        rows.skipped = self._interpreter.take_notes()
        return rows


def _has_chain(primitive: Primitive) -> bool:
    match primitive:
        case Chain():
            return True
        case Arrange():
            return any(map(_has_chain, primitive.inputs))
        case Compute() | Fact():
            return _has_chain(primitive.source)
    return False


def _without_rows(dataset: Dataset) -> tuple[Structure, Leaves]:
    return element_spec_of(dataset).structure, tuple(leaf.zeros() for leaf in element_spec_of(dataset).leaves)


@dataclass(frozen=True)
class BeginWorkerPass:
    """A function that begins passes over a dataset."""

    passes: PassNumber

    def __call__(self, values: Sequence[Dataset], epoch: Epoch) -> WorkerPass:
        return WorkerPass(values[0], self.passes.of(epoch))


class _SkipCollector(Interpreter):
    # Collects notes of skipped elements, which travel with the rows.
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._notes: list[Skipped] = []

    def note_skipped(self, notes: Sequence[Skipped]) -> None:
        self._notes += notes

    def take_notes(self) -> tuple[Skipped, ...]:
        notes, self._notes = tuple(self._notes), []
        return notes


@dataclass(frozen=True, eq=False)
class OnWorker(CountingNode, Source):
    """A source of the elements of a dataset on a worker."""

    held: Handle = field(repr=False)
    worker: str
    known: DatasetSummary = field(repr=False)

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
        return Stream(_nothing_here, self.name, self.held, BeginWorkerPass(self.passes))

    def __str__(self) -> str:
        return f"dataset_fn on {self.worker}:\n" + "\n".join(f"  {line}" for line in self.known.plan.splitlines())


def _nothing_here() -> Any:
    raise ArgumentError("a dataset on a worker can only be read there")
