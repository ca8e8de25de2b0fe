"""Gathering on a device: blocks go up whole and once each, and their rows are picked there.

What the blocks of one pipeline have in common is columns of the same shapes and dtypes. Their rows lie one block
after the other in a few long arrays a column, so that the rows of a bundle are picked by one call a column however
many blocks they are of, and one array of row numbers serves all columns. The order and the bits are those of `gather`.

A block that is alive is on the device once; when it is let go of its rows there are free for others, and arrays in
which no block is left are freed. A block of the few rows left of others, which is made here to give up memory, is made
there of what is there already, and does not go up again: without it some rows would keep many times their memory.

Of an order of many rows that is worked out where they are gathered, the device works out a bundle's rows itself.

Memory that a consumer lets go of may still be read from in its stream. So what consumers are given is lent: before it
is written to again, what they had been given to do when they let go of it is waited for.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np

from daskdist.core.block import Batches, Block, Rows
from daskdist.core.primitive import Arrange, Primitive
from daskdist.core.ragged import Ragged
from daskdist.core.selection.intervals import Index
from daskdist.core.selection.permutation import Permutation
from daskdist.core.spec import ElementSpec, RaggedTensorSpec
from daskdist.core.structure import Leaves, Structure
from daskdist.devices import Device, DeviceStream, Event, name_of, named
from daskdist.errors import DeviceMemoryError
from daskdist.execute.stream.gather import Empty, Joins, Picks, gather
from daskdist.execute.transfer.copier import channel_of
from daskdist.execute.transfer.layout import bytes_of
from daskdist.execute.transfer.order_on_device import OrderOnDevice, is_device_order

# Columns of one bundle or of several blocks lie in one piece of memory, each from a multiple of this on.
_ALIGNED_BYTES: Final = 256
# Pinned memory that blocks go through, in two halves: while one is filled the other is copied from.
_HALF_BYTES: Final = 4 * 2**20
# Memory is asked for at a time as half of what there is, so that there are few pieces of it and little of it is unused,
# but not less and not more than this, unless one block takes more.
_LEAST_BYTES: Final = 2**20
_MOST_BYTES: Final = 256 * 2**20

# Kinds of dtypes that devices have.
_NUMBERS: Final = "biufc"

# Of each leaf the shape of a row and the dtype; None for one that stays on the host.
ColumnKinds = tuple[tuple[tuple[int, ...], Any] | None, ...]

_making: Final = threading.RLock()


class RowsOnDevice:
    """Elements of which some leaves are on a device: what `DeviceGather` makes.

    Parameters
    ----------
    host
        The same elements with the leaves that are on the host; in the places of the others, arrays without bytes.
    columns
        By the number of its leaf, the rows of each column that is on the device.
    device
        Which it is.
    event
        When they are there.
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
        """The leaves of one element: views. What the current stream does from now on is done after they are there."""
        device = self._device
        stream = device.current_stream()
        stream.wait(self._event)
        channel_of(name_of(device)).mind(stream)
        host, reshape = self._host, device.namespace.reshape
        leaves = list(host.item(index))
        for number, column in self._columns.items():
            if isinstance(host, Batches):
                cut = column[host.bounds[index] : host.bounds[index + 1], ...]
                # Of an inner shape where its elements are batches themselves, as the array without bytes is.
                inner = leaves[number].shape[:-1]
                leaves[number] = cut if host.inners is None else reshape(cut, (*inner, *column.shape[1:]))
            else:
                leaves[number] = column[index, ...]
        return tuple(leaves)

    def elements(self, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        """The elements from ``start`` to ``stop``, in order."""
        pack = self.structure.pack
        return (pack(self.item(index)) for index in range(*slice(start, stop).indices(len(self))))

    def where(self, index: int) -> str:
        """What a message calls one element."""
        return self._host.where(index)

    def __repr__(self) -> str:
        return f"<{len(self)} elements on {name_of(self._device)}{' from ' + self.label if self.label else ''}>"


class _Segment:
    # Rows of several blocks, one array a column.
    def __init__(self, device: Device, layout: ColumnKinds, num_rows: int) -> None:
        self.num_rows = num_rows
        self.offsets, num_bytes = _offsets(layout, num_rows)
        self.buffer = device.empty((num_bytes,), np.uint8)
        self.columns = _columns(device, layout, num_rows, self.offsets, self.buffer)
        self._free = [(0, num_rows)] if num_rows else []
        # Blocks are let go of in any thread, even in the midst of what is done here.
        self.given_back: deque[tuple[int, int]] = deque()

    def place(self, num_rows: int) -> int | None:
        """Where so many rows go; None where there is no room for them."""
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
    # The rows of a block, for as long as it is alive. It is what keeps its segment.
    __slots__ = ("num_rows", "segment", "start")

    def __init__(self, segment: _Segment, start: int, num_rows: int) -> None:
        self.segment = segment
        self.start = start
        self.num_rows = num_rows

    def __del__(self) -> None:
        if self.num_rows:
            self.segment.given_back.append((self.start, self.start + self.num_rows))


class _Uploads:
    # Copies from the host in a stream, by way of pinned memory.
    def __init__(self, device: Device, stream: DeviceStream) -> None:
        self._device = device
        self._stream = stream
        self._halves: list[Any] = [None, None]
        self._events: list[Event | None] = [None, None]
        self._half = self._used = 0

    def copy(self, array: Any, buffer: Any, offset: int) -> None:
        """Copy an array of the host to bytes of the device from ``offset`` on; it may be changed after that."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        done = 0
        while done < len(data):
            if self._used == _HALF_BYTES:
                self._turn()
            if self._halves[self._half] is None:
                self._halves[self._half] = self._device.pinned(_HALF_BYTES)
            number = min(len(data) - done, _HALF_BYTES - self._used)
            pinned = self._halves[self._half][self._used : self._used + number]
            pinned[...] = data[done : done + number]
            self._device.copy(pinned, self._device.view(buffer, offset + done, (number,), np.uint8), self._stream)
            done += number
            self._used = min(-(-(self._used + number) // _ALIGNED_BYTES) * _ALIGNED_BYTES, _HALF_BYTES)

    def _turn(self) -> None:
        self._events[self._half] = self._stream.record()
        self._half, self._used = 1 - self._half, 0
        event = self._events[self._half]
        if event is not None:
            event.synchronize()


class DeviceGather:
    """Gathers on a device, as `gather` does on the host; from any thread.

    It computes in a stream of its own: of what it gives, `RowsOnDevice.item` makes the current stream wait.

    Parameters
    ----------
    device
        Which it is.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        # Blocks that went up so far, by which tests see that each does once.
        self.num_uploads = 0
        self._stream = device.stream()
        self._uploads = _Uploads(device, self._stream)
        self._residents: weakref.WeakKeyDictionary[Block, _Resident] = weakref.WeakKeyDictionary()
        self._segments: dict[ColumnKinds, weakref.WeakSet[_Segment]] = {}
        # Orders that rows are asked for in, and the segment that they are in: which their blocks keep.
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
        """As `gather`; here only where rows of columns are picked and nothing is made of them, else on the host.

        Raises
        ------
        DeviceMemoryError
            The device has no room for blocks, or for what is picked of them.
        """
        if function is not None or isinstance(picks, Joins):
            return gather(blocks, picks, function, unstacked, empty)
        known = self._order_of(blocks, picks.rows)
        columnar = [block for block in blocks if isinstance(block, Block)]
        are_alike = len(columnar) == len(blocks) and (known or all(map(columnar[0].is_like, columnar)))
        layout = self._layout(columnar[0]) if are_alike else ()
        if not any(layout):
            return gather(blocks, picks, function, unstacked, empty)
        host = _gathered_here(columnar, picks, layout, empty)
        with self._alone():
            found = known or self._put_in_order(columnar, picks.rows, layout)
            residents = [self._resident(block, layout) for block in columnar] if picks.num_rows and not found else []
            columns = self._made_for_consumers(layout, picks.num_rows)
            if found:
                order, segment = found
                self._take(columns, segment, order.rows(picks.rows))  # type: ignore[arg-type]  # which are `LazyPermutation`
            else:
                self._fill(columns, residents, *picks.by_row())
            over = self._stream.record()
            # Whoever waits for copies to the device waits for this too.
            self._channel.stream.wait(over)
            return RowsOnDevice(host, columns, self.device, over)

    def compacted(self, blocks: Sequence[Rows], picks: Picks, made: Block) -> None:
        """Make a block that was made of others be on the device too, if some of those are."""
        with self._alone():
            columnar = [block for block in blocks if isinstance(block, Block)]
            if not len(made) or not any(block in self._residents for block in columnar):
                return
            layout = self._layout(made)
            # One that is not there yet has rows that are asked for soon.
            residents = [self._resident(block, layout) for block in columnar]
            resident = self._placed(layout, len(made))
            stop = resident.start + resident.num_rows
            columns = {leaf: each[resident.start : stop, ...] for leaf, each in resident.segment.columns.items()}
            self._fill(columns, residents, *picks.by_row())
            self._residents[made] = resident

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        # One thread at a time, in the stream.
        device = self.device
        with self._lock, device.using(self._stream):
            try:
                yield
            except device.out_of_memory as error:
                free_bytes, all_bytes = device.memory_info()
                raise DeviceMemoryError(
                    f"{name_of(device)} has no room to put rows in order ({error}): of {all_bytes} bytes there are "
                    f"{free_bytes} free, and this process holds {device.held_bytes()}. Blocks are there whole: make "
                    "the shuffle's buffer, blocks or batches smaller, or leave Options(shuffle_on_device=True) out"
                ) from None

    def _layout(self, block: Block) -> ColumnKinds:
        return tuple([self._kind(leaf) for leaf in block.leaves])

    def _kind(self, leaf: Any) -> tuple[tuple[int, ...], Any] | None:
        if isinstance(leaf, Ragged) or self.device.lacks(leaf.dtype) or not leaf.dtype.isnative:
            return None
        return leaf.shape[1:], leaf.dtype

    def _order_of(self, blocks: Sequence[Rows], rows: Any) -> tuple[OrderOnDevice, _Segment] | None:
        # What the device works out of these blocks already.
        if not is_device_order(rows):
            return None
        order, place = self._orders.get(rows.order, (None, None))
        segment = None if place is None else place()
        return (order, segment) if order and segment and order.is_of(blocks) else None

    def _put_in_order(
        self, blocks: Sequence[Block], rows: Any, layout: ColumnKinds
    ) -> tuple[OrderOnDevice, _Segment] | None:
        # What the device works out from now on, where all is in one segment.
        if not is_device_order(rows):
            return None
        residents = self._in_one_piece(blocks, layout)
        segment = residents[0].segment
        if any(resident.segment is not segment for resident in residents):
            return None
        # What computes at once, as a GPU does not, has to wait for what went up.
        self._stream.wait(self._stream.record())
        order = OrderOnDevice(self.device, blocks, rows, [resident.start for resident in residents])
        self._orders[rows.order] = order, weakref.ref(segment)
        return order, segment

    def _in_one_piece(self, blocks: Sequence[Block], layout: ColumnKinds) -> list[_Resident]:
        # With those that are not there yet one after the other, if there is room for that.
        missing = {block: len(block) for block in blocks if block not in self._residents}
        places: dict[Block, _Resident] = {}
        if missing:
            with contextlib.suppress(self.device.out_of_memory):
                room = self._placed(layout, sum(missing.values()))
                for block, stop in zip(missing, accumulate(missing.values()), strict=True):
                    places[block] = _Resident(room.segment, room.start + stop - len(block), len(block))
                room.num_rows = 0
        return [self._resident(block, layout, places.get(block)) for block in blocks]

    def _resident(self, block: Block, layout: ColumnKinds, place: _Resident | None = None) -> _Resident:
        resident = self._residents.get(block)
        if resident is not None:
            return resident
        resident = place or self._placed(layout, len(block))
        segment = resident.segment
        for number, kind in enumerate(layout):
            if kind is not None:
                at = segment.offsets[number] + resident.start * _row_bytes(kind)
                self._uploads.copy(block.leaves[number], segment.buffer, at)
        self.num_uploads += 1
        self._residents[block] = resident
        return resident

    def _placed(self, layout: ColumnKinds, num_rows: int) -> _Resident:
        segments = self._segments.setdefault(layout, weakref.WeakSet())
        there = list(segments)
        for segment in there:
            start = segment.place(num_rows)
            if start is not None:
                return _Resident(segment, start, num_rows)
        row_bytes = max(sum(map(_row_bytes, filter(None, layout))), 1)
        half_bytes = sum(segment.num_rows for segment in there) * row_bytes // 2
        at_once = min(max(half_bytes, _LEAST_BYTES), _MOST_BYTES) // row_bytes
        try:
            segment = _Segment(self.device, layout, max(num_rows, at_once))
        except self.device.out_of_memory:
            # Less may do.
            self.device.free_unused()
            segment = _Segment(self.device, layout, num_rows)
        # What no block is left of is no layout of anybody's any more.
        self._segments = {each: there for each, there in self._segments.items() if there or each == layout}
        segments.add(segment)
        return _Resident(segment, segment.place(num_rows) or 0, num_rows)

    def _made_for_consumers(self, layout: ColumnKinds, num_rows: int) -> dict[int, Any]:
        offsets, num_bytes = _offsets(layout, num_rows)
        buffer = self._channel.lend(self.device, self._stream, num_bytes)
        # What computes at once, as a GPU does not, has to wait for those that had the memory before.
        self._stream.wait(self._stream.record())
        return _columns(self.device, layout, num_rows, offsets, buffer)

    def _fill(
        self, columns: dict[int, Any], residents: Sequence[_Resident], rows: range | Index, block_index: Index | None
    ) -> None:
        # Rows of residents to columns; in the order of the stream, and so after what went up in it. What computes at
        # once, as a GPU does not, has to wait for that.
        if not len(rows):
            return
        if isinstance(rows, range):
            (resident,) = residents
            self._stream.wait(self._stream.record())
            start = resident.start + rows.start
            for leaf, column in columns.items():
                column[...] = resident.segment.columns[leaf][start : start + len(rows), ...]
            return
        places = np.zeros(1, np.intp) if block_index is None else block_index
        at = rows + np.array([resident.start for resident in residents])[places]
        segments = list({id(resident.segment): resident.segment for resident in residents}.values())
        numbers = {id(segment): number for number, segment in enumerate(segments)}
        of_row = np.array([numbers[id(resident.segment)] for resident in residents])[places]
        take, concat = self.device.namespace.take, self.device.namespace.concat
        if len(segments) == 1:
            self._take(columns, segments[0], self._index(at))
            return
        # Of each segment the rows that are of it, one after the other; then put in order.
        order = np.argsort(of_row, kind="stable")
        inverse = np.empty(len(order), np.intp)
        inverse[order] = np.arange(len(order))
        index = self._index(np.concatenate([at[order], inverse]))
        cuts = [0, *np.cumsum(np.bincount(of_row, minlength=len(segments))).tolist()]
        for leaf, column in columns.items():
            parts = [
                take(segment.columns[leaf], index[cuts[number] : cuts[number + 1]], axis=0)
                for number, segment in enumerate(segments)
            ]
            column[...] = take(concat(parts), index[len(order) :], axis=0)

    def _take(self, columns: dict[int, Any], segment: _Segment, index: Any) -> None:
        for leaf, column in columns.items():
            column[...] = self.device.namespace.take(segment.columns[leaf], index, axis=0)

    def _index(self, index: Index) -> Any:
        # Row numbers on the device, by one copy.
        index = index.astype(np.int32 if index.max() < 2**31 else np.int64, copy=False)
        buffer = self.device.empty((index.nbytes,), np.uint8)
        self._uploads.copy(index, buffer, 0)
        self._stream.wait(self._stream.record())
        return self.device.view(buffer, 0, index.shape, index.dtype)


class CompactOnDevices:
    """Blocks made of the few rows that are left of others, on the host and on devices that have those.

    Parameters
    ----------
    device_gathers
        What gathers there.
    """

    def __init__(self, device_gathers: Sequence[DeviceGather]) -> None:
        self._device_gathers = tuple(device_gathers)

    def __call__(self, blocks: Sequence[Rows], picks: Picks) -> Any:
        made = gather(blocks, picks)
        if isinstance(made, Block):
            for each in self._device_gathers:
                each.compacted(blocks, picks, made)
        return made


def device_gather_of(device: Device) -> DeviceGather:
    """What gathers on a device, in this process."""
    # Two threads that are the first to ask share it, and what is on the device.
    with _making:
        return _device_gather_of(name_of(device))


@functools.lru_cache(maxsize=256)
def _device_gather_of(name: str) -> DeviceGather:
    return DeviceGather(named(name))


def device_gathers(devices: Sequence[Device | None], primitive: Primitive) -> list[DeviceGather | None]:
    """For consumers on devices what gathers there, as `Delivery` takes it: None for each on the host or elsewhere.

    Without any, nothing; and where elements are made after their order is known, which is done on the host.
    """
    if not isinstance(primitive, Arrange):
        return []
    found = [None if device is None or device.is_host else device_gather_of(device) for device in devices]
    return found if any(each is not None for each in found) else []


def describe_row_order(primitive: Primitive, spec: ElementSpec) -> str:
    """What plans say of which rows are put in order on devices."""
    if not isinstance(primitive, Arrange):
        return f"rows are put in order on the host, as {primitive.name} makes elements of them after that"
    paths = [
        path or "(the element)"
        for path, leaf in zip(spec.structure.paths, spec.leaves, strict=True)
        if isinstance(leaf, RaggedTensorSpec) or getattr(leaf.dtype, "kind", "O") not in _NUMBERS
    ]
    beside = f"; but for {', '.join(paths)}, which is on the host" if paths else ""
    return f"rows are put in order on the devices{beside}"


def _gathered_here(blocks: Sequence[Block], picks: Picks, layout: ColumnKinds, empty: Empty | None) -> Block | Batches:
    # The elements, with arrays without bytes in the places of leaves that are on the device.
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
    # Of each column, where in one piece of memory it begins; and how long that is.
    found, end = {}, 0
    for number, kind in enumerate(layout):
        if kind is not None:
            found[number] = end
            end += -(-num_rows * _row_bytes(kind) // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return found, end


def _columns(
    device: Device, layout: ColumnKinds, num_rows: int, offsets: dict[int, int], buffer: Any
) -> dict[int, Any]:
    # Columns of so many rows, in one piece of memory.
    columns = {}
    for number, offset in offsets.items():
        shape, dtype = layout[number]  # type: ignore[misc]
        columns[number] = device.view(buffer, offset, (num_rows, *shape), dtype)
    return columns


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return found
