"""Gathering on a device: each block is uploaded once as a whole, and its rows are picked there.

The blocks of one pipeline have columns of the same shapes and dtypes. On the device their rows are stored one block
after the other in a few long arrays per column. So one call per column picks the rows of a bundle, whatever the number
of its blocks, and one array of row numbers serves all columns. Order and bits of the result are those of `gather`.

A live block is on the device once. When it is dropped, its rows there become free for other blocks, and arrays without
blocks are freed. If the host compacts blocks of which few rows are left, the device does the same with its copies, and
the new block is not uploaded again: otherwise a few rows would keep many times their memory.

If rows are in the order of a large permutation, the device computes a bundle's row numbers itself.

Memory that a consumer releases may still be read by its stream. So consumers get the memory with a callback: before it
is written again, the writing stream waits for the work that their streams had when they released it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

import numpy as np

from daskdist.core.block import Batches, Block, Rows
from daskdist.core.cardinality import counted
from daskdist.core.primitive import Arrange, Primitive, Read, ReadingToDevices
from daskdist.core.ragged import Ragged
from daskdist.core.selection.intervals import Index
from daskdist.core.selection.permutation import Permutation
from daskdist.core.spec import ElementSpec, RaggedTensorSpec
from daskdist.core.structure import Leaves, Structure
from daskdist.devices import Device, Event, device_of, name_of, named
from daskdist.devices.profiling import profiled
from daskdist.errors import DeviceMemoryError
from daskdist.execute.stream.gather import Empty, Joins, Picks, gather
from daskdist.execute.transfer.copier import channel_of
from daskdist.execute.transfer.layout import bytes_of
from daskdist.execute.transfer.order_on_device import OrderOnDevice, is_device_order
from daskdist.execute.transfer.uploads import ALIGNED_BYTES, Uploads
from daskdist.tables.device_column import DeviceColumn

# A new segment is half as large as all existing ones, so that segments are few and little memory is unused. Its size is
# within these limits, unless a single block is larger.
_LEAST_BYTES: Final = 2**20
_MOST_BYTES: Final = 256 * 2**20

# Kinds of dtypes that devices support.
_NUMBERS: Final = "biufc"

# For each leaf the shape of a row and the dtype; None for a leaf that stays on the host.
ColumnKinds = tuple[tuple[tuple[int, ...], Any] | None, ...]


class RowsOnDevice:
    """Elements with some leaves on a device, as gathered by `DeviceGather`.

    Parameters
    ----------
    host
        The same elements with the leaves that are on the host; the others are arrays without bytes.
    columns
        The rows of each column on the device, by the number of its leaf.
    device
        The device.
    event
        The event at the end of gathering.
    """

    __slots__ = ("_columns", "_device", "_event", "_host", "skipped")

    def __init__(self, host: Block | Batches, columns: dict[int, Any], device: Device, event: Event) -> None:
        self._host = host
        self._columns = columns
        self._device = device
        self._event = event
        self.skipped = host.skipped

    @property
    def structure(self) -> Structure:
        return self._host.structure

    @property
    def label(self) -> str:
        return self._host.label

    def __len__(self) -> int:
        return len(self._host)

    @property
    def nbytes(self) -> int:
        return self._host.nbytes + bytes_of(list(self._columns.values()))

    def item(self, index: int) -> Leaves:
        """Return views of the leaves of one element; the current stream waits until they are gathered."""
        device = self._device
        stream = device.current_stream()
        stream.wait(self._event)
        channel_of(name_of(device)).add_consumer(stream)
        host, reshape = self._host, device.namespace.reshape
        leaves = list(host.item(index))
        for number, column in self._columns.items():
            if isinstance(host, Batches):
                cut = column[host.bounds[index] : host.bounds[index + 1], ...]
                # If the elements are batches themselves, the inner shape is that of the array without bytes.
                inner = leaves[number].shape[:-1]
                leaves[number] = cut if host.inners is None else reshape(cut, (*inner, *column.shape[1:]))
            else:
                leaves[number] = column[index, ...]
        return tuple(leaves)

    def elements(self, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """Return the elements from ``start`` to ``stop``, in order."""
        pack = self.structure.pack
        return (pack(self.item(index)) for index in range(*slice(start, stop).indices(len(self))))

    def where(self, index: int) -> str:
        """Return the name of one element for messages."""
        return self._host.where(index)

    def __repr__(self) -> str:
        return (
            f"<{counted(len(self), 'element')} on {name_of(self._device)}{' from ' + self.label if self.label else ''}>"
        )


class _Segment:
    # Memory for rows of several blocks, with one array per column.
    def __init__(self, device: Device, layout: ColumnKinds, num_rows: int) -> None:
        self.num_rows = num_rows
        self.offsets, num_bytes = _offsets(layout, num_rows)
        self.buffer = device.empty((num_bytes,), np.uint8)
        self.columns = _columns(device, layout, num_rows, self.offsets, self.buffer)
        self._free = [(0, num_rows)] if num_rows else []
        # Blocks may be dropped in any thread, even in the middle of a method here, and so only append to a deque.
        self.given_back: deque[tuple[int, int]] = deque()

    def place(self, num_rows: int) -> int | None:
        """Reserve rows and return the first; None if there is no room for them."""
        spans = self._free
        if self.given_back:
            while self.given_back:
                spans.append(self.given_back.popleft())
            spans.sort()
            self._free = spans = _merged(spans)
        for number, (start, stop) in enumerate(spans):
            if stop - start >= num_rows:
                spans[number : number + 1] = [(start + num_rows, stop)] if stop - start > num_rows else []
                return start
        return None


class _Resident:
    # The rows of a live block in a segment, which it keeps alive.
    __slots__ = ("num_rows", "segment", "start")

    def __init__(self, segment: _Segment, start: int, num_rows: int) -> None:
        self.segment = segment
        self.start = start
        self.num_rows = num_rows

    def __del__(self) -> None:
        if self.num_rows:
            self.segment.given_back.append((self.start, self.start + self.num_rows))


class DeviceGather:
    """A function that gathers on a device as `gather` does on the host; it may be called from any thread.

    It computes in a separate stream, which `RowsOnDevice.item` makes the current stream wait for.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        # The number of uploaded blocks, by which tests check that each is uploaded once.
        self.num_uploads = 0
        self._stream = device.stream()
        self._uploads = Uploads(device, self._stream)
        self._residents: weakref.WeakKeyDictionary[Block, _Resident] = weakref.WeakKeyDictionary()
        self._segments: dict[ColumnKinds, weakref.WeakSet[_Segment]] = {}
        # The permutations in use and the segment of their rows. The segment is kept by its blocks and not from here.
        self._orders: weakref.WeakKeyDictionary[Permutation, tuple[OrderOnDevice, weakref.ref[_Segment]]] = (
            weakref.WeakKeyDictionary()
        )
        self._channel = channel_of(name_of(device))
        self._lock = threading.Lock()

    def __call__(
        self,
        blocks: Sequence[Rows],
        picks: Picks | Joins,
        function: Callable[[Rows], Any] | None = None,
        unstacked: bool = False,
        empty: Empty | None = None,
    ) -> Any:
        """Gather as `gather` does: on the device if rows of columns are only picked, otherwise on the host.

        Raises
        ------
        DeviceMemoryError
            The device has no room for the blocks, or for the picked rows.
        """
        if function is not None or isinstance(picks, Joins):
            return gather(blocks, picks, function, unstacked, empty)
        known_order = self._order_of(blocks, picks.rows)
        columnar = [block for block in blocks if isinstance(block, Block)]
        are_alike = len(columnar) == len(blocks) and (known_order or all(map(columnar[0].is_like, columnar)))
        layout = self._layout(columnar[0]) if are_alike else ()
        if not any(layout):
            return gather(blocks, picks, function, unstacked, empty)
        host = _gathered_on_host(columnar, picks, layout, empty)
        with self._exclusive(), profiled("gather"):
            order_and_segment = known_order or self._new_order(columnar, picks.rows, layout)
            needs_residents = picks.num_rows and not order_and_segment
            residents = [self._resident(block, layout) for block in columnar] if needs_residents else []
            columns = self._allocated_columns(layout, picks.num_rows)
            if order_and_segment:
                order, segment = order_and_segment
                self._take(columns, segment, order.rows(picks.rows))  # type: ignore[arg-type]  # which are `LazyPermutation`
            else:
                self._fill(columns, residents, *picks.by_row())
            end = self._stream.record()
            # A consumer that waits for copies to the device waits for this too.
            self._channel.stream.wait(end)
            return RowsOnDevice(host, columns, self.device, end)

    def compact(self, blocks: Sequence[Rows], picks: Picks, compacted: Block) -> None:
        """Create the copy of a compacted block on the device from the copies of its blocks, if there are any."""
        with self._exclusive():
            columnar = [block for block in blocks if isinstance(block, Block)]
            if not len(compacted) or not any(block in self._residents for block in columnar):
                return
            layout = self._layout(compacted)
            # A block that is not on the device yet is uploaded: its remaining rows are needed soon.
            resident, _ = self._compacted(columnar, picks, layout)
            self._residents[compacted] = resident

    def compact_there(self, blocks: Sequence[Rows], picks: Picks) -> Block | None:
        """Compact blocks whose columns are on this device without the host; return None if there are none."""
        columnar = [block for block in blocks if isinstance(block, Block)]
        if len(columnar) < len(blocks) or not all(map(columnar[0].is_like, columnar)) or not picks.num_rows:
            return None
        columns_there = [leaf for block in columnar for leaf in block.leaves if type(leaf) is DeviceColumn]
        if not any(device_of(column.array) == self.device for column in columns_there):
            return None
        layout = self._layout(columnar[0])
        compacted = _gathered_on_host(columnar, picks, layout, None)
        with self._exclusive():
            resident, columns = self._compacted(columnar, picks, layout)
            ready = self._stream.record()
            compacted.leaves = tuple(  # type: ignore[union-attr]
                leaf if kind is None else DeviceColumn(columns[number], kind[1], ready)
                for number, (leaf, kind) in enumerate(zip(compacted.leaves, layout, strict=True))  # type: ignore[union-attr]
            )
            self._residents[compacted] = resident  # type: ignore[index]
        return compacted  # type: ignore[return-value]

    def _compacted(
        self, blocks: Sequence[Block], picks: Picks, layout: ColumnKinds
    ) -> tuple[_Resident, dict[int, Any]]:
        # Copy picked rows to new ones on the device; return their place, and their columns.
        residents = [self._resident(block, layout) for block in blocks]
        resident = self._reserved(layout, picks.num_rows)
        stop = resident.start + resident.num_rows
        columns = {leaf: column[resident.start : stop, ...] for leaf, column in resident.segment.columns.items()}
        self._fill(columns, residents, *picks.by_row())
        return resident, columns

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        # Let one thread at a time use the stream, and explain errors of memory.
        device = self.device
        with self._lock, device.using(self._stream, for_user=False):
            try:
                yield
            except device.out_of_memory as error:
                free_bytes, all_bytes = device.memory_info()
                raise DeviceMemoryError(
                    f"{name_of(device)} has no room to put rows in order ({error}): of {all_bytes} bytes {free_bytes} "
                    f"are free, and this process holds {device.held_bytes()}. Whole blocks are kept there: make the "
                    "shuffle's buffer, blocks or batches smaller, or leave out Options(shuffle_on_device=True)"
                ) from None

    def _layout(self, block: Block) -> ColumnKinds:
        return tuple([self._kind(leaf) for leaf in block.leaves])

    def _kind(self, leaf: Any) -> tuple[tuple[int, ...], Any] | None:
        if isinstance(leaf, Ragged) or self.device.lacks(leaf.dtype) or not leaf.dtype.isnative:
            return None
        return leaf.shape[1:], leaf.dtype

    def _order_of(self, blocks: Sequence[Rows], rows: Any) -> tuple[OrderOnDevice, _Segment] | None:
        # Return the device's permutation of these blocks, if it has one already.
        if not is_device_order(rows):
            return None
        order, place = self._orders.get(rows.order, (None, None))
        segment = None if place is None else place()
        return (order, segment) if order and segment and order.is_of(blocks) else None

    def _new_order(
        self, blocks: Sequence[Block], rows: Any, layout: ColumnKinds
    ) -> tuple[OrderOnDevice, _Segment] | None:
        # Create the device's permutation of these blocks, if all are in one segment.
        if not is_device_order(rows):
            return None
        residents = self._in_one_piece(blocks, layout)
        segment = residents[0].segment
        if any(resident.segment is not segment for resident in residents):
            return None
        # A device that computes on the host's threads, unlike a GPU, has to wait for the uploads.
        self._stream.await_queued()
        order = OrderOnDevice(self.device, blocks, rows, [resident.start for resident in residents])
        self._orders[rows.order] = order, weakref.ref(segment)
        return order, segment

    def _in_one_piece(self, blocks: Sequence[Block], layout: ColumnKinds) -> list[_Resident]:
        # Place blocks that are not on the device yet next to each other, if there is room for that.
        missing = {block: len(block) for block in blocks if block not in self._residents}
        places: dict[Block, _Resident] = {}
        if missing:
            with contextlib.suppress(self.device.out_of_memory):
                room = self._reserved(layout, sum(missing.values()))
                for block, stop in zip(missing, accumulate(missing.values()), strict=True):
                    places[block] = _Resident(room.segment, room.start + stop - len(block), len(block))
                room.num_rows = 0
        return [self._resident(block, layout, places.get(block)) for block in blocks]

    def _resident(self, block: Block, layout: ColumnKinds, place: _Resident | None = None) -> _Resident:
        resident = self._residents.get(block)
        if resident is not None:
            return resident
        resident = place or self._reserved(layout, len(block))
        segment = resident.segment
        for number, kind in enumerate(layout):
            if kind is not None:
                leaf = block.leaves[number]
                if type(leaf) is DeviceColumn:
                    stop = resident.start + resident.num_rows
                    self._uploads.copy_on_device(leaf, segment.columns[number][resident.start : stop, ...])
                    continue
                at = segment.offsets[number] + resident.start * _row_bytes(kind)
                self._uploads.copy(leaf, segment.buffer, at)
        self.num_uploads += 1
        self._residents[block] = resident
        return resident

    def _reserved(self, layout: ColumnKinds, num_rows: int) -> _Resident:
        segments = self._segments.setdefault(layout, weakref.WeakSet())
        existing = list(segments)
        for segment in existing:
            start = segment.place(num_rows)
            if start is not None:
                return _Resident(segment, start, num_rows)
        row_bytes = max(sum(map(_row_bytes, filter(None, layout))), 1)
        half_bytes = sum(segment.num_rows for segment in existing) * row_bytes // 2
        segment_rows = min(max(half_bytes, _LEAST_BYTES), _MOST_BYTES) // row_bytes
        try:
            segment = _Segment(self.device, layout, max(num_rows, segment_rows))
        except self.device.out_of_memory:
            # A smaller segment may fit.
            self.device.free_unused()
            segment = _Segment(self.device, layout, num_rows)
        # Forget layouts without segments.
        self._segments = {kinds: group for kinds, group in self._segments.items() if group or kinds == layout}
        segments.add(segment)
        return _Resident(segment, segment.place(num_rows) or 0, num_rows)

    def _allocated_columns(self, layout: ColumnKinds, num_rows: int) -> dict[int, Any]:
        offsets, num_bytes = _offsets(layout, num_rows)
        buffer = self._channel.allocate(self.device, self._stream, num_bytes)
        # A device that computes on the host's threads, unlike a GPU, has to wait for the memory's previous consumers.
        self._stream.await_queued()
        return _columns(self.device, layout, num_rows, offsets, buffer)

    def _fill(
        self, columns: dict[int, Any], residents: Sequence[_Resident], rows: range | Index, block_index: Index | None
    ) -> None:
        # Copy rows of residents to columns, in the stream and so after the uploads. A device that computes on the
        # host's threads, unlike a GPU, has to wait for those.
        if not len(rows):
            return
        if isinstance(rows, range):
            (resident,) = residents
            self._stream.await_queued()
            start = resident.start + rows.start
            for leaf, column in columns.items():
                column[...] = resident.segment.columns[leaf][start : start + len(rows), ...]
            return
        places = np.zeros(1, np.intp) if block_index is None else block_index
        at = rows + np.array([resident.start for resident in residents])[places]
        segments = list({id(resident.segment): resident.segment for resident in residents}.values())
        numbers = {id(segment): number for number, segment in enumerate(segments)}
        row_segments = np.array([numbers[id(resident.segment)] for resident in residents])[places]
        take, concat = self.device.namespace.take, self.device.namespace.concat
        if len(segments) == 1:
            self._take(columns, segments[0], self._index(at))
            return
        # Take the rows of each segment in turn, then put all of them in order.
        order = np.argsort(row_segments, kind="stable")
        inverse = np.empty(len(order), np.intp)
        inverse[order] = np.arange(len(order))
        index = self._index(np.concatenate([at[order], inverse]))
        cuts = [0, *np.cumsum(np.bincount(row_segments, minlength=len(segments))).tolist()]
        for leaf, column in columns.items():
            parts = [
                take(segment.columns[leaf], index[cuts[number] : cuts[number + 1]], axis=0)
                for number, segment in enumerate(segments)
            ]
            self.device.take(concat(parts), index[len(order) :], column)

    def _take(self, columns: dict[int, Any], segment: _Segment, index: Any) -> None:
        for leaf, column in columns.items():
            self.device.take(segment.columns[leaf], index, column)

    def _index(self, index: Index) -> Any:
        # Copy row numbers to the device.
        index = index.astype(np.int32 if index.max() < 2**31 else np.int64, copy=False)
        buffer = self.device.empty((index.nbytes,), np.uint8)
        self._uploads.copy(index, buffer, 0)
        self._stream.await_queued()
        return self.device.view(buffer, 0, index.shape, index.dtype)


class CompactOnDevices:
    """A function that compacts blocks on the host, and their copies on devices."""

    def __init__(self, device_gathers: Sequence[DeviceGather]) -> None:
        self._device_gathers = tuple(device_gathers)

    def __call__(self, blocks: Sequence[Rows], picks: Picks) -> Any:
        there = ((device_gather, device_gather.compact_there(blocks, picks)) for device_gather in self._device_gathers)
        done_by, compacted = next(((by, block) for by, block in there if block is not None), (None, None))
        if compacted is None:
            compacted = gather(blocks, picks)
        if isinstance(compacted, Block):
            for device_gather in self._device_gathers:
                if device_gather is not done_by:
                    device_gather.compact(blocks, picks, compacted)
        return compacted


# Name of a device -> its gather function in this process.
_device_gathers: Final[dict[str, DeviceGather]] = {}


def device_gather_of(device: Device) -> DeviceGather:
    """Return the gather function of a device in this process."""
    device_gather = _device_gathers.get(name := name_of(device))
    # Of two threads that ask first at the same time, both get that of one: others would have blocks of their own.
    return _device_gathers.setdefault(name, DeviceGather(named(name))) if device_gather is None else device_gather


def with_device_gathers(
    devices: Sequence[Device | None], primitive: Primitive, is_wanted: bool | None
) -> tuple[Primitive, list[DeviceGather | None]]:
    """Return a pipeline, whose blocks may then stay on devices, and the gather functions of its consumers.

    By default, rows are gathered on devices if they are known to be on devices when they are read.

    Returns
    -------
    primitive, device_gathers
        The functions are None for consumers on the host or elsewhere. There are none if no consumer is on a device
        here, or if elements are computed after their order is known, which is done on the host.
    """
    are_picked = isinstance(primitive, Arrange) and (is_on_devices(primitive) if is_wanted is None else is_wanted)
    if not are_picked or all(device is None or device.is_host for device in devices):
        return primitive, []
    gathers = [None if device is None or device.is_host else device_gather_of(device) for device in devices]
    return _kept_on_devices(primitive), gathers


def is_on_devices(primitive: Primitive) -> bool:
    """Return whether the rows of a source are known to be on devices, and are only picked afterwards."""
    if isinstance(primitive, Arrange):
        return any(map(is_on_devices, primitive.inputs))
    function: Any = primitive.function if isinstance(primitive, Read) else None
    return isinstance(function, ReadingToDevices) and function.is_on_device


def _kept_on_devices(primitive: Primitive) -> Primitive:
    # Columns that are on a device when they are read stay there.
    if isinstance(primitive, Arrange):
        return replace(primitive, inputs=tuple(map(_kept_on_devices, primitive.inputs)))
    if not isinstance(primitive, Read):
        return primitive
    function: Any = primitive.function
    return replace(
        primitive, function=function.kept_on_device() if isinstance(function, ReadingToDevices) else function
    )


def describe_row_order(primitive: Primitive, spec: ElementSpec) -> str:
    """Return the line of a plan that says which leaves are put in order on devices."""
    if not isinstance(primitive, Arrange):
        return f"rows are put in order on the host, because {primitive.name} then computes elements from them"
    paths = [
        path or "(the element)"
        for path, leaf in zip(spec.structure.paths, spec.leaves, strict=True)
        if isinstance(leaf, RaggedTensorSpec) or getattr(leaf.dtype, "kind", "O") not in _NUMBERS
    ]
    exceptions = f", except {', '.join(paths)}, on the host" if paths else ""
    return f"rows are put in order on the devices{exceptions}"


def _gathered_on_host(
    blocks: Sequence[Block], picks: Picks, layout: ColumnKinds, empty: Empty | None
) -> Block | Batches:
    # Gather the elements, with arrays without bytes in the places of leaves that are on the device.
    if None in layout:
        return gather([_without(block, layout) for block in blocks], picks, empty=empty)  # type: ignore[no-any-return]
    label = blocks[0].label
    rows = Block(blocks[0].structure, [np.empty((picks.num_rows, 0), np.uint8)] * len(layout), label)
    return rows if picks.bounds is None else Batches(rows, picks.bounds.tolist(), picks.inners)


def _without(block: Block, layout: ColumnKinds) -> Block:
    nothing = np.empty((len(block), 0), np.uint8)
    leaves = [leaf if kind is None else nothing for leaf, kind in zip(block.leaves, layout, strict=True)]
    return Block(block.structure, leaves, block.label, block.origin)


def _row_bytes(kind: tuple[tuple[int, ...], Any]) -> int:
    shape, dtype = kind
    return int(np.prod(shape, dtype=np.int64)) * int(dtype.itemsize)


def _offsets(layout: ColumnKinds, num_rows: int) -> tuple[dict[int, int], int]:
    # Return the offset of each column in one allocation, and the size of that.
    offsets, end = {}, 0
    for number, kind in enumerate(layout):
        if kind is not None:
            offsets[number] = end
            end += -(-num_rows * _row_bytes(kind) // ALIGNED_BYTES) * ALIGNED_BYTES
    return offsets, end


def _columns(
    device: Device, layout: ColumnKinds, num_rows: int, offsets: dict[int, int], buffer: Any
) -> dict[int, Any]:
    # Return the columns in one allocation.
    columns = {}
    for number, offset in offsets.items():
        shape, dtype = layout[number]  # type: ignore[misc]
        columns[number] = device.view(buffer, offset, (num_rows, *shape), dtype)
    return columns


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return merged
