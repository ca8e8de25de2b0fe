"""Copies of a worker's batches to a replica's device: several small ones at a time, and one copy ahead of use."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any, Final, NamedTuple

from daskdist.core.block import Rows
from daskdist.devices import Device, name_of, named
from daskdist.errors import OutOfRangeError
from daskdist.execute.caller import Caller
from daskdist.execute.stream.step_cursors import Mark, StepCursor, without_blocks
from daskdist.execute.transfer.copier import Copier, NoRoomError, ReplicaPart, UnitLifetime
from daskdist.execute.transfer.copy_stats import CopyStats, CopyTimer
from daskdist.execute.transfer.layout import MOST_UNIT_STEPS, UNIT_BYTES, copied_bytes, layout_of
from daskdist.execute.transfer.prefetch import DevicePrefetch
from daskdist.strategy.input.options import InputOptions

logger: Final = logging.getLogger("daskdist")

# After an allocation for several batches fails, this many batches are copied one by one, as failing again would be
# slow.
_NUM_ALONE: Final = 32
# Blocks of rows whose last copies stay on the device, in case they are used again.
_MOST_ROWS: Final = 4


class StagedRows(NamedTuple):
    """The elements of some rows, on a device."""

    rows: Rows
    copies: _StagedCopies

    def item(self, place: int) -> Any:
        """Return the leaves of an element, on the device; arrays of dtypes that the device lacks stay on the host.

        Raises
        ------
        DeviceMemoryError
            The device has no memory left for it.
        """
        return self.copies.item(self.rows, place)


class _StagedCopies:
    # Copies of rows to a device; it does not keep the rows alive.
    def __init__(self, queue: _CopyQueue) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        # (start, stop, part) of each copy: the one in use, and the one after it.
        self._parts: list[tuple[int, int, ReplicaPart]] = []
        self._last: tuple[int, Any] = -1, None

    def item(self, rows: Rows, place: int) -> Any:
        with self._lock:
            if self._last[0] != place:
                start, stop, part = self._part_of(rows, place)
                if place == start:
                    self._queue.note_use(part)
                self._last = place, part.leaves(place - start)
                if place == start and stop < len(rows):
                    # If there is no memory for the next batches, they are copied at their first use.
                    with contextlib.suppress(NoRoomError):
                        self._parts = [(start, stop, part), self._queue.begin(rows, stop)]
            return self._last[1]

    def _part_of(self, rows: Rows, place: int) -> tuple[int, int, ReplicaPart]:
        for part in self._parts:
            if part[0] <= place < part[1]:
                return part
        # The previous copies have been used: free their memory first.
        self._parts, self._last = [], (-1, None)
        with self._queue.timer.stalled():
            self._parts = [self._begin(rows, place)]
        return self._parts[0]

    def _begin(self, rows: Rows, place: int) -> tuple[int, int, ReplicaPart]:
        # After the first failure, the queue tries a single element.
        for _ in range(2):
            with contextlib.suppress(NoRoomError):
                return self._queue.begin(rows, place)
        # Free unused objects first.
        gc.collect()
        try:
            return self._queue.begin(rows, place)
        except NoRoomError as error:
            raise error.as_user_error() from None


class _CopyQueue:
    # All copies to one device, through one set of pinned buffers.
    def __init__(self, device: Device) -> None:
        self._device = device
        self._copier = Copier(device, 2)
        self._lock = threading.Lock()
        self._has_said = False
        # The number of batches that are still to be copied one by one, after an allocation failed.
        self._num_alone = 0
        self._alive: set[UnitLifetime] = set()
        self.timer = CopyTimer()

    def begin(self, rows: Rows, start: int) -> tuple[int, int, ReplicaPart]:
        """Begin to copy elements from ``start`` on; raise `NoRoomError` without memory."""
        most = MOST_UNIT_STEPS
        if self._num_alone:
            self._num_alone -= 1
            most = 1
        steps: list[Any] = []
        num_bytes = 0
        for place in range(start, min(len(rows), start + most)):
            leaves = rows.item(place)
            num_bytes += copied_bytes(self._device, leaves)
            if steps and num_bytes > UNIT_BYTES:
                break
            steps.append(leaves)
        with self._lock:
            self._copier.record_arrival()
            layout = layout_of(self._device, steps)
            part = ReplicaPart(layout.steps, self._device, UnitLifetime(self._alive))
            try:
                buffer = self._copier.buffer(layout.num_bytes)
            except NoRoomError as error:
                self._num_alone = _NUM_ALONE
                self._say(error)
                raise error.with_traceback(None) from None
            # Each of the kept rows has one copy in use and one ahead.
            if len(self._alive) > 2 * _MOST_ROWS + 1:
                self.timer.note_growth()
            self._copier.copy(layout, buffer, part)
            self.timer.add_bytes(part.num_bytes)
        return start, start + len(steps), part

    def note_use(self, part: ReplicaPart) -> None:
        """Record that a copied part was used."""
        self.timer.add_times([part.times(self._copier.record_arrival())])

    def _say(self, error: NoRoomError) -> None:
        if not self._has_said:
            self._has_said = True
            self.timer.note_shrinkage()
            logger.warning(
                "%s has no memory for another %d bytes: batches are copied when they are used, not ahead; make them "
                "smaller, or keep fewer of them",
                name_of(error.device),
                error.num_bytes,
            )


class DeviceStaging:
    """Copies, on a replica's device, of the rows that it used last."""

    def __init__(self, device: Device) -> None:
        self._queue = _CopyQueue(device)
        self._lock = threading.Lock()
        self._found: OrderedDict[int, tuple[weakref.ref[Rows], _StagedCopies]] = OrderedDict()

    def __call__(self, result: Any) -> Any:
        """Return rows as `StagedRows`, and any other result unchanged."""
        if not isinstance(result, Rows):
            return result
        key = id(result)
        with self._lock:
            known = self._found.pop(key, None)
            if known is None or known[0]() is not result:
                # The copy is dropped with the rows, or when newer rows take its place.
                known = weakref.ref(result, lambda _: self._found.pop(key, None)), _StagedCopies(self._queue)
            self._found[key] = known
            if len(self._found) > _MOST_ROWS:
                self._found.popitem(last=False)
        return StagedRows(result, known[1])

    def stats(self) -> CopyStats:
        """Return statistics of the copies so far."""
        return self._queue.timer.stats()


# Name of a device -> its staging in this process.
_stagings: Final[dict[str, DeviceStaging]] = {}


def staging_of(name: str) -> DeviceStaging:
    """Return the staging of a device of this process, by its name."""
    staging = _stagings.get(name)
    # Of two threads that ask first at the same time, both get that of one.
    return _stagings.setdefault(name, DeviceStaging(named(name))) if staging is None else staging


def copy_stats_on_worker(names: dict[str, list[str]], dask_worker: Any) -> CopyStats:
    """Return statistics of the copies to this worker's devices; ``names`` are the devices by worker address."""
    return CopyStats.of(staging_of(name).stats() for name in names[dask_worker.address])


class HostSteps(Iterator[Any]):
    """The steps of a pass in this process, as each replica's leaves on the host; keeps no reference to its iterator."""

    def __init__(self, cursor: StepCursor, caller: Caller, empty: Sequence[Any]) -> None:
        self._cursor = cursor
        self._caller = caller
        self._empty = empty
        # Held while a step is read, and by `state_dict` while it copies positions.
        self.reading = Lock()
        # The position after each step that was read but not handed out yet.
        self.marks: deque[Mark] = deque()

    def __next__(self) -> list[Sequence[Any]]:
        with self.reading:
            try:
                run, step = self._cursor.next()
            except OutOfRangeError:
                raise StopIteration from None
            self.marks.append(without_blocks(self._cursor.mark))
        return [
            self._empty if place < 0 else self._caller.result(lane.ref.handle).item(place)  # type: ignore[union-attr]
            for lane, place in zip(run.lanes, step.places, strict=True)
        ]

    def close(self) -> None:
        """Stop reading ahead, and drop the data that was read."""
        self._cursor.close()
        self._caller.close()


def ahead_of(source: Iterator[Any], devices: Sequence[Device], options: InputOptions, **when: Any) -> DevicePrefetch:
    """Return an iterator that copies steps to devices ahead of use, according to the options."""
    return DevicePrefetch(
        source,
        devices,
        num_units=options.device_buffer_size,
        num_bytes=options.device_buffer_bytes,
        locks=options.pin_arrays,
        **when,
    )
