"""Positions in streams as data: taken at any element, and gone on from in another process.

An arrangement says nothing of it. Its cursor is told by its fields: numbers, arrays, random generators, runs and
queues of elements, and further cursors. Fields whose names begin with ``_``, and what is of another kind, are as
they are where a cursor is opened; a field that gathers things of another kind is an error. Blocks are told by how they
can be made again (`Lineage`): going on makes those of which rows are still to come, and no others.

Two methods are there for cursors that hold what is no data: ``saved()`` gives what is to be kept of it, and
``resumed(saved)`` goes on from that.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from daskdist.core.failures import FailedElement
from daskdist.core.primitive import Arrange, Epoch, Primitive
from daskdist.core.ragged import Ragged
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.permutation import Permutation
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import RunQueue, Zipped
from daskdist.core.selection.shuffle_buffer import BatchBuffer, RowBuffer, buffer_of
from daskdist.core.structure import Nested
from daskdist.execute.stream.bundle_builder import BundleBuilder, Lane, StepBundle
from daskdist.execute.stream.cursors import CarryHandle, StreamCursor
from daskdist.execute.stream.interpreter import Interpreter
from daskdist.execute.stream.lineage import (
    HasExtraState,
    Lineage,
    OpenedCursor,
    Path,
    PathKey,
    Resumable,
    lineage_of,
    with_blocks,
)

_PLAIN: Final = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    # What NumPy makes of times where it makes Python's own values of them.
    datetime.date,
    datetime.timedelta,
    np.generic,
    Permutation,
    Ragged,
    Nested,
    FailedElement,
)
_CONTAINERS: Final[dict[type[Any], Callable[[list[Any]], Any]]] = {list: list, tuple: tuple, deque: deque, set: set}


@dataclass(frozen=True, slots=True)
class SavedValue:
    """Something that is put together again where a position is gone on from.

    Parameters
    ----------
    kind
        What it is.
    content
        What it takes.
    """

    kind: str
    content: Any


@dataclass(frozen=True, slots=True)
class SavedCursor:
    """A cursor.

    Parameters
    ----------
    path, epoch
        What was opened, and for which pass.
    cursor_type
        The class of the cursor.
    fields
        Its fields that are data.
    extra
        What its ``saved()`` gave.
    """

    path: Path
    epoch: Epoch
    cursor_type: type[Any]
    fields: dict[str, Any]
    extra: Any


class _NotSavableError(Exception):
    """Something is of no kind that a position is told by."""


class StateRecorder:
    """Tells a position."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._caller = interpreter.caller
        self._plain_lineages: dict[int, tuple[Lineage, Lineage]] = {}

    def builder(self, builder: BundleBuilder) -> dict[str, Any]:
        """A builder's, from what it has not handed out yet on."""
        return {
            "source": self.of(builder.source),
            "waiting": self.of(builder.waiting),
            "ready": [self.bundle(bundle) for bundle in builder.ready],
            "num_steps": builder.num_steps,
            "is_over": builder.is_over,
            "failure": None if builder.failure is None else FailedElement(builder.failure),
        }

    def bundle(self, bundle: StepBundle, first: int = 0) -> list[tuple[Lineage | None, list[int]]]:
        """A bundle's from a step on: of each lane the lineage of its block, and the places there."""
        return [
            (None if lane.ref is None else self._plain(lineage_of(lane.ref)), list(lane.places[first:]))
            for lane in bundle.lanes
        ]

    def of(self, value: Any) -> Any:
        """Anything's that a cursor holds."""
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, np.random.Generator):
            return SavedValue("generator", value.bit_generator.state)
        if isinstance(value, BlockRef):
            return SavedValue("block", self._plain(lineage_of(value)))
        if isinstance(value, (Selection, Groups, Zipped)):
            return SavedValue("run", with_blocks(value, lambda ref: self._plain(lineage_of(ref))))
        if isinstance(value, RunQueue):
            return SavedValue("queue", [self.of(run) for run in value.runs])
        if isinstance(value, (RowBuffer, BatchBuffer)):
            return SavedValue("buffer", self.of(value.rest()))
        if isinstance(value, dict):
            return SavedValue("dict", [(key, self.of(each)) for key, each in value.items()])
        if isinstance(value, (list, tuple, deque, set)):
            return SavedValue("container", (type(value), [self.of(each) for each in value]))
        if isinstance(value, OpenedCursor):
            return self._cursor(value)
        if dataclasses.is_dataclass(value) and not _is_frozen(value):
            return SavedValue("object", (type(value), self._fields(value)))
        raise _NotSavableError

    def _cursor(self, cursor: Any) -> SavedCursor:
        path, epoch = cursor.opened_at
        extra = self.of(cursor.saved()) if isinstance(cursor, HasExtraState) else None
        return SavedCursor(path, epoch, type(cursor), self._fields(cursor), extra)

    def _fields(self, value: Any) -> dict[str, Any]:
        fields = {}
        for name, each in vars(value).items():
            if not name.startswith("_") and name not in ("opened_at", "path", "epoch"):
                try:
                    fields[name] = self.of(each)
                except _NotSavableError:
                    if each and isinstance(each, (list, deque, set, dict)):
                        # What was gathered on the way would be missing.
                        raise TypeError(f"{type(value).__name__}.{name} is no data that a position can have") from None
        return fields

    def _plain(self, lineage: Lineage) -> Lineage:
        # A copy that holds on to nothing that is no data. One for each, so that a block is made again once.
        known = self._plain_lineages.get(id(lineage))
        if known is None:
            run = None if lineage.run is None else with_blocks(lineage.run, self._plain)
            extent = lineage.extent
            if isinstance(extent, CarryHandle):
                extent = self._caller.result(extent.handle)
            plain = Lineage(lineage.path, lineage.epoch, extent, run)
            plain.num_rows, plain.nbytes = lineage.num_rows, lineage.nbytes
            known = self._plain_lineages[id(lineage)] = lineage, plain
        return known[1]


class StateRestorer:
    """Goes on from a position.

    Parameters
    ----------
    interpreter
        Runs the stream.
    primitive
        What the stream is of: the same as where the position was taken.
    """

    def __init__(self, interpreter: Interpreter, primitive: Primitive) -> None:
        self._interpreter = interpreter
        self._root = primitive
        self._blocks: dict[int, BlockRef] = {}
        self._cursors: dict[tuple[Any, Epoch], Any] = {}

    def streams(self, position: Any) -> None:
        """Make the blocks of streams that a position holds, those of one stream in order: it runs once."""
        found: dict[int, Lineage] = {}
        for lineage in _lineages_in(position):
            if lineage.path is not None and isinstance(self._opened(lineage), StreamCursor):
                found[id(lineage)] = lineage
        for lineage in sorted(found.values(), key=lambda each: each.extent):
            self.block(lineage)

    def builder(self, builder: BundleBuilder, position: dict[str, Any]) -> None:
        """Have a builder go on from a position."""
        builder.source = self.of(position["source"], builder.source)
        builder.waiting = self.of(position["waiting"], None)
        builder.ready = deque(self.bundle(each) for each in position["ready"])
        builder.num_steps, builder.is_over = position["num_steps"], position["is_over"]
        # Older positions have none.
        failed = position.get("failure")
        builder.failure = None if failed is None else failed.error

    def bundle(self, lanes: Sequence[tuple[Lineage | None, list[int]]]) -> StepBundle:
        """A bundle."""
        return StepBundle([Lane(None if lineage is None else self.block(lineage), places) for lineage, places in lanes])

    def of(self, value: Any, opened: Any) -> Any:
        """Anything; ``opened`` is what stands in its place where nothing has been pulled yet."""
        if isinstance(value, SavedCursor):
            return self._cursor(value)
        if not isinstance(value, SavedValue):
            return value.copy() if isinstance(value, np.ndarray) else value
        content = value.content
        match value.kind:
            case "generator":
                bits = getattr(np.random, content["bit_generator"])()
                bits.state = content
                return np.random.Generator(bits)
            case "block":
                return self.block(content)
            case "run":
                return with_blocks(content, self.block)
            case "queue":
                queue = RunQueue()
                for run in content:
                    queue.push(self.of(run, None))
                return queue
            case "buffer":
                return buffer_of(self.of(content, None))
            case "dict":
                return {key: self.of(each, None) for key, each in content}
            case "container":
                kind, items = content
                made = [self.of(each, None) for each in items]
                return _CONTAINERS[kind](made) if kind in _CONTAINERS else kind(*made)
        kind, fields = content
        made = object.__new__(kind)
        made.__dict__.update(vars(opened) if isinstance(opened, kind) else {})
        self._set(made, fields, opened)
        return made

    def block(self, lineage: Lineage) -> BlockRef:
        """The block of a lineage; made once."""
        ref = self._blocks.get(id(lineage))
        if ref is None:
            run: Any = None if lineage.run is None else with_blocks(lineage.run, self.block)
            if lineage.path is None:
                interpreter = self._interpreter
                worker = interpreter.near(run)
                ref = interpreter.gather(run, worker=worker, name="gather", windows=interpreter.bundles)
            else:
                ref = self._opened(lineage).remake(lineage.extent, run)
                if lineage.num_rows >= 0:
                    ref.num_rows = lineage.num_rows
            self._blocks[id(lineage)] = ref
        return ref

    def _cursor(self, saved: SavedCursor) -> Any:
        cursor = self._cursors.get(_key(saved))
        if not isinstance(cursor, StreamCursor):
            # A stream's runs already; others are used but for their way of making blocks.
            cursor = self._open(saved)
        self._set(cursor, saved.fields, cursor)
        if isinstance(cursor, Resumable):
            cursor.resumed(self.of(saved.extra, None))
        return cursor

    def _set(self, made: Any, fields: dict[str, Any], opened: Any) -> None:
        for name, each in fields.items():
            setattr(made, name, self.of(each, getattr(opened, name, None)))

    def _opened(self, lineage: Lineage) -> Any:
        key = _key(lineage)
        if key not in self._cursors:
            self._cursors[key] = self._open(lineage)
        return self._cursors[key]

    def _open(self, place: Lineage | SavedCursor) -> Any:
        path = place.path or ()
        return self._interpreter.open(primitive_at(self._root, path), path)(place.epoch)


def primitive_at(primitive: Primitive, path: Path) -> Primitive:
    """The primitive that a path leads to from the end of a pipeline."""
    for step in path:
        if isinstance(step, PathKey):
            primitive = primitive.arrangement.primitive_of(step.value)  # type: ignore[union-attr]
        elif isinstance(primitive, Arrange):
            primitive = primitive.inputs[step]
        else:
            primitive = primitive.source  # type: ignore[union-attr]
    return primitive


def _is_frozen(value: Any) -> bool:
    return bool(value.__dataclass_params__.frozen)


def _key(place: Lineage | SavedCursor) -> tuple[Any, Epoch]:
    # Elements in a path are told apart by being this one.
    path = tuple(id(step) if isinstance(step, PathKey) else step for step in place.path or ())
    return path, place.epoch


def _lineages_in(value: Any) -> Iterator[Lineage]:
    if isinstance(value, Lineage):
        yield value
        yield from _lineages_in(value.run)
    elif isinstance(value, (Selection, Groups, Zipped)):
        parts = value.parts if isinstance(value, Zipped) else (value,)
        for part in parts:
            for lineage in part.blocks if isinstance(part, Selection) else part.flat.blocks:
                yield from _lineages_in(lineage)
    elif isinstance(value, SavedValue):
        yield from _lineages_in(value.content)
    elif isinstance(value, SavedCursor):
        yield from _lineages_in(value.fields)
        yield from _lineages_in(value.extra)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _lineages_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _lineages_in(each)
