"""Positions in streams as data: they can be taken at any element, and resumed in another process.

An arrangement contains no code for this. The state of its cursor is the cursor's fields: numbers, arrays, random
generators, runs and queues of elements, and further cursors. Fields whose names begin with ``_``, and values of other
types, keep the values that a newly opened cursor has; a non-empty container of values of other types is an error.
Blocks are stored as their `Lineage`: resuming makes those blocks again whose rows are still needed, and no others.

Cursors with state that is not data have two methods: ``saved()`` returns the part of it to store, and
``resumed(saved)`` continues from that.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from daskdist.core.failing.failed_elements import FailedElement
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
    # NumPy returns times as these types when it converts them to Python values.
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
    """A value that has to be rebuilt when a position is resumed.

    Parameters
    ----------
    kind
        The kind of value.
    content
        The data to rebuild it from.
    """

    kind: str
    content: Any


@dataclass(frozen=True, slots=True)
class SavedCursor:
    """The stored state of a cursor.

    Parameters
    ----------
    path, epoch
        The path of the primitive that it was opened for, and the pass.
    cursor_type
        The class of the cursor.
    fields
        Its fields that are data.
    extra
        The result of its ``saved()``.
    """

    path: Path
    epoch: Epoch
    cursor_type: type[Any]
    fields: dict[str, Any]
    extra: Any


class _NotSavableError(Exception):
    """A value is of no type that a position can store."""


class StateRecorder:
    """The recorder of a position: it converts a stream's state to data."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._caller = interpreter.caller
        self._plain_lineages: dict[int, tuple[Lineage, Lineage]] = {}

    def builder(self, builder: BundleBuilder) -> dict[str, Any]:
        """Return the state of a builder, starting with the first bundle that it has not handed out."""
        return {
            "source": self.value(builder.source),
            "waiting": self.value(builder.waiting),
            "ready": [self.bundle(bundle) for bundle in builder.ready],
            "num_steps": builder.num_steps,
            "is_over": builder.is_over,
            "failure": None if builder.failure is None else FailedElement(builder.failure),
        }

    def bundle(self, bundle: StepBundle, first: int = 0) -> list[tuple[Lineage | None, list[int]]]:
        """Return the state of a bundle from step ``first``: for each lane the lineage of its block, and the places."""
        return [
            (None if lane.ref is None else self._plain(lineage_of(lane.ref)), list(lane.places[first:]))
            for lane in bundle.lanes
        ]

    def value(self, value: Any) -> Any:
        """Return a value of a cursor's field as data."""
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
            return SavedValue("queue", [self.value(run) for run in value.runs])
        if isinstance(value, (RowBuffer, BatchBuffer)):
            return SavedValue("buffer", self.value(value.rest()))
        if isinstance(value, dict):
            return SavedValue("dict", [(key, self.value(item)) for key, item in value.items()])
        if isinstance(value, (list, tuple, deque, set)):
            return SavedValue("container", (type(value), [self.value(item) for item in value]))
        if isinstance(value, OpenedCursor):
            return self._cursor(value)
        if dataclasses.is_dataclass(value) and not _is_frozen(value):
            return SavedValue("object", (type(value), self._fields(value)))
        raise _NotSavableError

    def _cursor(self, cursor: Any) -> SavedCursor:
        path, epoch = cursor.opened_at
        extra = self.value(cursor.saved()) if isinstance(cursor, HasExtraState) else None
        return SavedCursor(path, epoch, type(cursor), self._fields(cursor), extra)

    def _fields(self, owner: Any) -> dict[str, Any]:
        fields = {}
        for name, field in vars(owner).items():
            if not name.startswith("_") and name not in ("opened_at", "path", "epoch"):
                try:
                    fields[name] = self.value(field)
                except _NotSavableError:
                    if field and isinstance(field, (list, deque, set, dict)):
                        # Leaving out collected values would lose them silently.
                        raise TypeError(f"{type(owner).__name__}.{name} is no data that a position can have") from None
        return fields

    def _plain(self, lineage: Lineage) -> Lineage:
        # Return a copy that refers only to data: one per lineage, so that a block is made again only once.
        copied = self._plain_lineages.get(id(lineage))
        if copied is None:
            run = None if lineage.run is None else with_blocks(lineage.run, self._plain)
            extent = lineage.extent
            if isinstance(extent, CarryHandle):
                extent = self._caller.result(extent.handle)
            plain = Lineage(lineage.path, lineage.epoch, extent, run)
            plain.num_rows, plain.nbytes = lineage.num_rows, lineage.nbytes
            copied = self._plain_lineages[id(lineage)] = lineage, plain
        return copied[1]


class StateRestorer:
    """The restorer of a position: it rebuilds a stream's state from data.

    Parameters
    ----------
    interpreter
        Runs the stream.
    primitive
        The primitive that is streamed: the same as when the position was taken.
    """

    def __init__(self, interpreter: Interpreter, primitive: Primitive) -> None:
        self._interpreter = interpreter
        self._root = primitive
        self._blocks: dict[int, BlockRef] = {}
        self._cursors: dict[tuple[Any, Epoch], Any] = {}

    def make_stream_blocks(self, position: Any) -> None:
        """Make the blocks of streams in a position, in the order of each stream, so that a stream runs only once."""
        lineages: dict[int, Lineage] = {}
        for lineage in _lineages_in(position):
            if lineage.path is not None and isinstance(self._opened(lineage), StreamCursor):
                lineages[id(lineage)] = lineage
        for lineage in sorted(lineages.values(), key=lambda lineage: lineage.extent):
            self.block(lineage)

    def restore_builder(self, builder: BundleBuilder, position: dict[str, Any]) -> None:
        """Set a builder to the state in a position."""
        builder.source = self.value(position["source"], builder.source)
        builder.waiting = self.value(position["waiting"], None)
        builder.ready = deque(self.bundle(lanes) for lanes in position["ready"])
        builder.num_steps, builder.is_over = position["num_steps"], position["is_over"]
        # Older positions have no failure.
        failed = position.get("failure")
        builder.failure = None if failed is None else failed.error

    def bundle(self, lanes: Sequence[tuple[Lineage | None, list[int]]]) -> StepBundle:
        """Rebuild a bundle."""
        return StepBundle([Lane(None if lineage is None else self.block(lineage), places) for lineage, places in lanes])

    def value(self, value: Any, opened: Any) -> Any:
        """Rebuild a value; ``opened`` is the value that the field has in a newly opened cursor."""
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
                    queue.push(self.value(run, None))
                return queue
            case "buffer":
                return buffer_of(self.value(content, None))
            case "dict":
                return {key: self.value(item, None) for key, item in content}
            case "container":
                container_type, items = content
                values = [self.value(item, None) for item in items]
                make = _CONTAINERS.get(container_type)
                return container_type(*values) if make is None else make(values)
        object_type, fields = content
        instance = object.__new__(object_type)
        instance.__dict__.update(vars(opened) if isinstance(opened, object_type) else {})
        self._set_fields(instance, fields, opened)
        return instance

    def block(self, lineage: Lineage) -> BlockRef:
        """Request the block of a lineage; the same block each time."""
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
            # A `StreamCursor` that made blocks is already running. Other cursors only lent their `remake`.
            cursor = self._open(saved)
        self._set_fields(cursor, saved.fields, cursor)
        if isinstance(cursor, Resumable):
            cursor.resumed(self.value(saved.extra, None))
        return cursor

    def _set_fields(self, target: Any, fields: dict[str, Any], opened: Any) -> None:
        for name, field in fields.items():
            setattr(target, name, self.value(field, getattr(opened, name, None)))

    def _opened(self, lineage: Lineage) -> Any:
        key = _key(lineage)
        if key not in self._cursors:
            self._cursors[key] = self._open(lineage)
        return self._cursors[key]

    def _open(self, place: Lineage | SavedCursor) -> Any:
        path = place.path or ()
        return self._interpreter.open(primitive_at(self._root, path), path)(place.epoch)


def primitive_at(primitive: Primitive, path: Path) -> Primitive:
    """Return the primitive at a path from the end of a pipeline."""
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
    # Keys in a path are compared by identity: their values may not be hashable.
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
        for item in value.values():
            yield from _lineages_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _lineages_in(item)
