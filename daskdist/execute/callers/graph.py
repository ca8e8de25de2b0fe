"""Conversion of a pipeline to a Dask graph and back: the only module that uses Dask's task classes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dask import threaded

# Dask's task classes are private to Dask, so that only this module uses them.
from dask._task_spec import GraphNode, List, Task, TaskRef

from daskdist.core.block import Bundle, Rows
from daskdist.core.failing.packed_error import raising_packed
from daskdist.core.failing.try_each import TryEachRead
from daskdist.core.node import Source
from daskdist.core.primitive import Arrange, Chain, Compute, EndlessSplits, Fact, Primitive, Read, Split, Stream
from daskdist.core.spec import ElementSpec
from daskdist.errors import UnknownLengthError
from daskdist.execute.caller import Graph, Handle, LocalCaller, Report
from daskdist.execute.callers.compute_key import FutureResult, is_future
from daskdist.execute.resume.position import StreamPosition
from daskdist.execute.stream.bundle_builder import BundleBuilder
from daskdist.execute.stream.interpreter import Interpreter
from daskdist.execute.stream.local_iterator import rows_of
from daskdist.watched_calls import Watched


class RecordCaller(LocalCaller):
    """A caller that writes each call as a task of a graph; a handle is a reference to the task.

    Parameters
    ----------
    token
        A part of every key, so that keys of different pipelines differ.
    """

    # Each task has one chunk, so that each chunk has a key.
    bundle_chunks = 1
    compacts = False
    reports_freely = False
    # Splits are not divided, as a graph of whole splits is smaller.
    divides = False

    def __init__(self, token: str) -> None:
        self.token = token
        self.graph: Graph = {}

    def call(self, function: Callable[..., Any], handles: Sequence[Handle], *args: Any, name: str, **_: Any) -> Handle:
        return self.write_task(name, Watched(name, function), List(*handles), *args)

    def source(self, function: Callable[..., Rows], *args: Any, name: str, **_: Any) -> Handle:
        return self.write_task(name, Watched(name, function), *args)

    def upstream(self, graph: Callable[[], Graph], key: Any, worker: str | None = None) -> Handle:
        # The collection's own graph is merged unchanged: its tasks and ours form one graph.
        if key not in self.graph:
            self.graph.update(graph())
        return TaskRef(key)

    def write_task(self, name: str, function: Callable[..., Any], *args: Any) -> TaskRef:
        """Add the task ``function(*args)`` to the graph and return a reference to it."""
        key = (f"{name}-{self.token}", len(self.graph))
        self.graph[key] = Task(key, function, *args)
        return TaskRef(key)

    def stream(self, take: Callable[[], Rows], worker: str | None = None, *, name: str) -> Handle:
        raise UnknownLengthError(f"the number of elements of {name} is known only when it has run")

    def is_done(self, handle: Handle) -> bool:
        return False

    def report(self, handle: Handle, *, wait: bool) -> Report | None:
        if not wait:
            return None
        raise UnknownLengthError("the number of rows is known only when they are read")

    def result(self, handle: Handle) -> Any:
        raise UnknownLengthError("a recorded call has no result yet")


@dataclass(frozen=True)
class Recorded:
    """A finite pipeline as a graph.

    Parameters
    ----------
    graph
        Tasks by key.
    keys
        The keys whose values are the elements in order: one per element if ``is_split``, otherwise a single key
        whose value is the list of elements.
    is_split
        Whether there is a key for each element.
    """

    graph: Graph
    keys: list[tuple[str, int]]
    is_split: bool

    def split(self, num_elements: int) -> Recorded:
        """Return a graph with a key for each of ``num_elements`` elements, from one whose single key holds them all."""
        (key,) = self.keys
        name = f"{key[0]}-element"
        graph = dict(self.graph)
        for number in range(num_elements):
            graph[name, number] = Task((name, number), operator.getitem, TaskRef(key), number)
        return Recorded(graph, [(name, number) for number in range(num_elements)], is_split=True)


def record(primitive: Primitive, name: str) -> Recorded:
    """Return the graph of the first pass over a pipeline.

    If row counts are known, each element has a key ``(name, i)``. Otherwise there is one task per split, which reads
    it and applies the operations fused with reading, and a final task whose value is the list of all elements.
    """
    token = name.rpartition("-")[2]
    caller = RecordCaller(token)
    try:
        keys = list(_record_elements(primitive, name, caller))
    except UnknownLengthError:
        caller = RecordCaller(token)
        sources: list[TaskRef] = []
        rest = _with_reads(primitive, partial(_of_blocks_read, caller, sources))
        key = (name, 0)
        caller.graph[key] = Task(key, Watched(name, _arrange_all), List(*sources), rest)
        return Recorded(caller.graph, [key], is_split=False)
    return Recorded(caller.graph, keys, is_split=True)


def _record_elements(primitive: Primitive, name: str, caller: RecordCaller) -> Iterator[tuple[str, int]]:
    number = 0
    for bundle in BundleBuilder(Interpreter(caller), primitive, StreamPosition((0,), [])):
        (lane,) = bundle.lanes
        for place in lane.places:
            key = (name, number)
            caller.graph[key] = Task(key, _element, lane.ref.handle, place)  # type: ignore[union-attr]
            yield key
            number += 1


@raising_packed
def _element(rows: Rows, place: int) -> Any:
    return rows.structure.pack(rows.item(place))


def _with_reads(primitive: Primitive, change: Callable[[Read], Read]) -> Primitive:
    # Return the stream with its reads changed.
    if isinstance(primitive, Arrange):
        return replace(primitive, inputs=tuple(_with_reads(source, change) for source in primitive.inputs))
    if isinstance(primitive, (Compute, Chain, Fact)):
        return replace(primitive, source=_with_reads(primitive.source, change))
    return primitive if isinstance(primitive, Stream) else change(primitive)


def _of_blocks_read(caller: RecordCaller, sources: list[TaskRef], read: Read) -> Read:
    # Return a read of blocks that tasks have read; `_arrange_all` supplies those.
    if read.splits_of is not None or isinstance(splits := read.splits(), EndlessSplits):
        # The final task reads it: its splits differ in each pass, or have no end.
        return read
    first, function = len(sources), TryEachRead(read.function)
    for split in splits:
        if read.graph is None:
            sources.append(caller.source(function, split, name=read.name))
        else:
            value = caller.upstream(read.graph, split.payload)
            sources.append(caller.write_task(read.name, function, split, value))
    return Read(ReadBlocks(range(first, len(sources))), operator.attrgetter("payload"), read.name)


@dataclass(frozen=True)
class ReadBlocks:
    """Splits whose payloads are blocks that tasks have read.

    Parameters
    ----------
    numbers
        The numbers of the blocks.
    blocks
        All blocks; None until the final task supplies them.
    """

    numbers: range
    blocks: tuple[Rows, ...] | None = None

    def __call__(self) -> Sequence[Split]:
        if self.blocks is None:
            raise UnknownLengthError("the blocks are not read yet")
        return [Split(f"block {k}", self.blocks[k], len(self.blocks[k])) for k in self.numbers]


@raising_packed
def _arrange_all(blocks: list[Rows], primitive: Primitive) -> list[Any]:
    def with_blocks(read: Read) -> Read:
        splits = read.splits
        return replace(read, splits=replace(splits, blocks=tuple(blocks))) if isinstance(splits, ReadBlocks) else read

    return [element for rows in rows_of(_with_reads(primitive, with_blocks)) for element in rows.elements()]


@dataclass(frozen=True, eq=False)
class FromGraph(Source):
    """A source of elements that keys of a graph hold; ``persist`` returns it."""

    recorded: Recorded
    known_spec: ElementSpec
    known_cardinality: int

    name = "persisted"
    background = True
    is_cheap = False

    @property
    def may_have_ragged_rows(self) -> bool:
        return self.known_spec.has_ragged_rows

    @property
    def spec(self) -> ElementSpec:
        return self.known_spec

    @property
    def cardinality(self) -> int:
        return self.known_cardinality

    def count(self) -> int:
        """Return the number of elements; wait for them if they are being computed."""
        if self.recorded.is_split:
            return len(self.recorded.keys)
        value = self.recorded.graph[self.recorded.keys[0]]
        if is_future(value):
            return int(FutureResult(value.client.submit(len, value))())
        return self.known_cardinality if is_unfinished_task(value) else len(value)

    def splits(self) -> Sequence[Split]:
        num_rows = 1 if self.recorded.is_split else None
        return [Split(f"persisted part {key[1]}", key, num_rows) for key in self.recorded.keys]

    def graph(self) -> Graph:
        return self.recorded.graph

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        function = AsBundle(self.known_spec, self.recorded.is_split)
        return Read(self.splits, function, self.name, graph=self.graph)


@dataclass(frozen=True)
class AsBundle:
    """A reader that returns the value of a key, one element or a list of them, as a bundle."""

    spec: ElementSpec
    is_one: bool

    def __call__(self, split: Split, value: Any) -> Rows:
        elements = [value] if self.is_one else value
        flatten = self.spec.structure.flatten
        return Bundle(self.spec.structure, [flatten(element)[0] for element in elements], split.label)


def one_task(key: Any, function: Callable[..., Any], handles: Sequence[Handle], *args: Any) -> Graph:
    """Return a graph with a task ``function(results of the handles, *args)``; handles are futures of a cluster."""
    return {**{handle.key: handle for handle in handles}, key: Task(key, function, List(*handles), *args)}


def is_unfinished_task(task: Any) -> bool:
    """Return whether a value of a graph is a task still to be run, rather than a result or a future."""
    return isinstance(task, GraphNode) and not is_future(task)


def scheduler_of(graph: Graph) -> Callable[..., Any]:
    """Return the default scheduler of a graph: the cluster that already holds part of it, or else threads."""
    for task in graph.values():
        if is_future(task):
            get: Callable[..., Any] = task.client.get
            return get
    return threaded.get  # type: ignore[no-any-return]
