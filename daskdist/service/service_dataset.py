"""Datasets that are read from the service, as by ``Dataset.serve``."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import cloudpickle

from daskdist.config import in_bytes, to_send
from daskdist.core.arguments import whole_number
from daskdist.core.cardinality import INFINITE, UNKNOWN
from daskdist.core.node import CountingNode, Facts, Node, Source, walk
from daskdist.core.primitive import Epoch, Primitive, Stream
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import LONE
from daskdist.errors import ArgumentError, ShardingError
from daskdist.execute.messages.pickling import describe_unpicklable
from daskdist.execute.stream.local_iterator import first_elements
from daskdist.ops.with_options import Options, WithOptions, merged_options
from daskdist.passes.autoshard import autoshard
from daskdist.passes.independent_pieces import pieces_of
from daskdist.passes.numbering import epoch_of_contents
from daskdist.passes.plan import plan
from daskdist.passes.seed import drawn_seeds
from daskdist.service.address import ServiceAddress
from daskdist.service.consumer.consumer import ServiceReader
from daskdist.service.dispatcher.commands import DatasetEntry, IterationDraws, JobOptions, Join
from daskdist.service.request import ServiceRequest
from daskdist.service.sharding_policy import ShardingPolicy
from daskdist.sharding import AutoShardPolicy

# The elements that are sent ahead in coordinated reads, where each consumer gets one element at a time.
_AHEAD_IN_ROUNDS: Final = 16
# For rounds of batches of similar lengths: the elements that are sorted together, for each consumer.
_SORTED_FOR_A_CONSUMER: Final = 1024
# The policies by which each element is produced once, so that one worker may also assemble all of them in order.
_IN_ORDER: Final = (ShardingPolicy.DYNAMIC, ShardingPolicy.DATA)
_BY_FILE: Final = (ShardingPolicy.FILE, ShardingPolicy.FILE_OR_DATA)


class IterationNumbers:
    """A counter of the iterations of a served dataset, where each repetition counts as one.

    A pickled copy counts separately.
    """

    def __init__(self) -> None:
        self._numbers: dict[Epoch, int] = {}
        self._next = 0
        self._lock = threading.Lock()

    def of(self, epoch: Epoch, first: int) -> int:
        """Return the number of a pass, at least ``first``, which is the same for all callers."""
        with self._lock:
            if epoch not in self._numbers:
                self._numbers[epoch] = number = max(self._next, first)
                self._next = number + 1
            return self._numbers[epoch]

    def __reduce__(self) -> tuple[Any, ...]:
        return IterationNumbers, ()

    def __dask_tokenize__(self) -> object:
        return "IterationNumbers"


@dataclass(frozen=True, eq=False)
class Served(CountingNode, Source):
    """The node of a dataset whose elements come from the service.

    Parameters
    ----------
    request
        The options of the reader.
    address
        The address of the service.
    dataset_id
        The id of the dataset in the service.
    fingerprint
        The fingerprint of the pipeline that produces it.
    known_spec, known_cardinality
        The spec and cardinality of the dataset.
    pipeline
        The pipeline to register if the service does not know it; None if only the id is known.
    file_objection
        Why workers cannot each read a share of the files, if only the id is known; None if they can.
    """

    request: ServiceRequest = field(repr=False)
    address: ServiceAddress
    dataset_id: str = field(repr=False)
    fingerprint: str = field(repr=False)
    known_spec: ElementSpec = field(repr=False)
    known_cardinality: int = field(repr=False)
    pipeline: Node | None = field(default=None, repr=False)
    file_objection: str | None = field(default=None, repr=False)
    numbers: IterationNumbers = field(default_factory=IterationNumbers, repr=False)

    name = "serve"
    facts = Facts()
    is_listed = False
    is_cheap = False
    is_repeatable = False

    @property
    def spec(self) -> ElementSpec:
        return self.known_spec

    @property
    def cardinality(self) -> int:
        return INFINITE if self.known_cardinality == INFINITE else UNKNOWN

    @property
    def may_have_ragged_rows(self) -> bool:
        return self.known_spec.has_ragged_rows

    @property
    def in_order(self) -> bool:
        return self.request.mode is ShardingPolicy.DATA and not self.why_in_no_order

    @property
    def why_in_no_order(self) -> str:
        request = self.request
        if request.job_name is not None:
            return f"consumers of the job {request.job_name!r} get the elements that others do not take"
        if request.mode not in _IN_ORDER:
            return f"workers send their elements as they come, with the sharding policy {request.mode.name}"
        return "its elements are endless" if self.known_cardinality == INFINITE else ""

    @property
    def draws(self) -> bool:
        return self.pipeline is None or any(node.draws for node in walk(self.pipeline))

    @property
    def contents(self) -> tuple[Node, ...]:
        return () if self.pipeline is None else (self.pipeline,)

    def with_contents(self, contents: tuple[Node, ...]) -> Node:
        (pipeline,) = contents
        return replace(self, pipeline=pipeline)

    def for_looks(self) -> Node:
        if self.request.job_name is None:
            return self
        if self.pipeline is None:
            raise ArgumentError(
                f"a look would take elements from the other consumers of the job {self.request.job_name!r}; look at "
                "the dataset that was registered, or at one that is served without job_name"
            )
        return self.pipeline

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Stream(_never, self.name, read=self._read)

    def _read(self, epoch: Epoch, in_order: bool) -> ServiceReader:
        request, pipeline = self.request, self.pipeline
        passes, entry = self.passes.of(epoch), None
        draws = IterationDraws(passes)
        if pipeline is not None:
            entry = partial(entry_of, self.dataset_id, self.fingerprint, pipeline, self.known_spec)
            draws = IterationDraws(epoch_of_contents(pipeline, epoch), tuple(drawn_seeds(pipeline)))
        joining = {
            "window_bytes": in_bytes("service.window-bytes"),
            "index": request.consumer_index or 0,
            "trainer": "" if request.cross_trainer_cache is None else request.cross_trainer_cache.trainer_id,
        }
        iteration = self.numbers.of(passes, self.passes.start)
        in_turn = request.num_consumers is not None
        return ServiceReader(
            self.address,
            self.dataset_id,
            entry,
            partial(self._join, iteration, draws, in_order),
            joining,
            most=request.max_outstanding_requests or (_AHEAD_IN_ROUNDS if in_turn else None),
            in_turn=in_turn,
            compression=request.compression,
        )

    def _join(self, iteration: int, draws: IterationDraws, in_order: bool, name: str, host: str) -> Join:
        request = self.request
        cache = None if request.cross_trainer_cache is None else in_bytes("service.cache-bytes")
        options = JobOptions(
            ShardingPolicy.DATA if in_order and not self.why_in_no_order else self._mode(),
            request.num_consumers,
            cache,
            "LOCAL" if request.target_workers == "LOCAL" else "ANY",
            request.on_consumer_loss == "redeliver",
        )
        index, settings = request.consumer_index, to_send()
        return Join(name, self.dataset_id, request.job_name, iteration, options, draws, host, index, settings=settings)

    def _mode(self) -> ShardingPolicy:
        mode = self.request.mode
        if mode not in _BY_FILE:
            return mode
        objection = self.file_objection if self.pipeline is None else file_objection(self.pipeline)
        if objection is None:
            return ShardingPolicy.FILE
        if mode is ShardingPolicy.FILE:
            raise ShardingError(objection)
        return ShardingPolicy.DATA


def _never(epoch: Epoch) -> Any:
    raise ArgumentError("the elements of a served dataset are read as rows")


def file_objection(node: Node) -> str | None:
    """Return why workers cannot each read a share of a dataset's files; None if they can."""
    try:
        # Otherwise one worker would read everything.
        autoshard(node, AutoShardPolicy.FILE, 2, lambda names, number: first_elements(plan(names), number))
    except ShardingError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class DatasetFacts:
    """The facts of a dataset that the service sends to readers who know only its id."""

    spec: ElementSpec
    cardinality: int
    fingerprint: str
    file_objection: str | None
    compression: str | None


def entry_of(
    dataset_id: str, fingerprint: str, node: Node, spec: ElementSpec, compression: str | None = "AUTO"
) -> DatasetEntry:
    """Return the entry under which a dataset is registered.

    Raises
    ------
    ArgumentError
        The dataset cannot be sent to workers.
    """
    facts = cloudpickle.dumps(DatasetFacts(spec, node.cardinality, fingerprint, file_objection(node), compression))
    # Leases are produced in any order.
    pieces = None if merged_options(node).deterministic else pieces_of(node)
    leased = (pieces.num_units, pieces.grain) if pieces is not None and pieces.num_units else None
    return DatasetEntry(dataset_id, fingerprint, _pickled(node), facts, leased)


def _pickled(node: Node) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(node)
    except Exception as error:
        raise ArgumentError(
            f"serve: the dataset cannot be sent to workers: {type(error).__name__}: {error}{describe_unpicklable(node)}"
        ) from error
    return pickled


def served(node: Node, spec: ElementSpec, fingerprint: str, request: ServiceRequest, address: ServiceAddress) -> Node:
    """Return the node of a dataset that the service is to produce.

    Raises
    ------
    ArgumentError
        The dataset does not allow an option of the request.
    """
    check_endless(request, node.cardinality)
    return shared_out(Served(request, address, fingerprint, fingerprint, spec, node.cardinality, node))


def rounds_by_size(
    spec: ElementSpec, tokens_per_consumer: Any, length_fn: Any, request: ServiceRequest
) -> dict[str, Any]:
    """Return the arguments of ``batch_by_size`` for rounds of batches of similar lengths, one for each consumer.

    Raises
    ------
    ArgumentError
        An argument cannot be combined with others or with the dataset.
    """
    whole_number("serve", "tokens_per_consumer", tokens_per_consumer, at_least=1)
    num_consumers = request.num_consumers
    if num_consumers is None:
        raise ArgumentError("tokens_per_consumer is for consumers that read in rounds; give num_consumers as well")
    if length_fn is None:
        if spec.structure != LONE or not spec.leaves[0].shape:
            raise ArgumentError(
                f"tokens_per_consumer needs a length_fn if elements are not single arrays; the spec is {spec.packed}"
            )
        length_fn = len
    return {
        "budget": tokens_per_consumer,
        "length_fn": length_fn,
        "buffer_size": _SORTED_FOR_A_CONSUMER * num_consumers,
        "round_size": num_consumers,
    }


def shared_out(node: Served) -> Node:
    """Return the node with options by which strategies let a named job divide its elements among readers."""
    off = Options(auto_shard_policy=AutoShardPolicy.OFF)
    return node if node.request.job_name is None else WithOptions(node, off)


def check_endless(request: ServiceRequest, cardinality: int) -> None:
    """Refuse a finite dataset for readers that would wait for each other at its end.

    Raises
    ------
    ArgumentError
        The dataset has an end.
    """
    if cardinality == INFINITE:
        return
    if request.num_consumers is not None:
        raise ArgumentError("consumers that read in rounds need a dataset without end; call repeat() before serve()")
    if request.cross_trainer_cache is not None:
        raise ArgumentError("cross_trainer_cache needs a dataset without end; call repeat() before serve()")
