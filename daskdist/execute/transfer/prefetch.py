"""Prefetching of steps to the devices of replicas, while these compute.

A thread takes steps from a source, several of them together as a **unit**, and copies each replica's part of a unit to
its device in one operation, in a separate stream. The consumer gets arrays that are views of the copied memory.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Condition, Lock, RLock, Thread, current_thread
from typing import Any, Final

from daskdist.core.finalizer import Finalizer
from daskdist.devices import Device, name_of
from daskdist.execute.transfer.copier import Copier, CopyUnit, NoRoomError, ReplicaPart, UnitLifetime
from daskdist.execute.transfer.copy_stats import CopyTimer
from daskdist.execute.transfer.layout import MOST_UNIT_STEPS, UNIT_BYTES, bytes_of, layout_of

logger: Final = logging.getLogger("daskdist")

# Seconds after which a waiting consumer takes the available steps, although the unit is not full.
_STARVED_S: Final = 0.002
# Seconds between two checks of a waiting thread for the end of prefetching.
_CHECK_EVERY_S: Final = 0.5
# Seconds to wait for the thread to end after it was stopped: a blocked source ends it later.
_JOIN_TIMEOUT_S: Final = 2.0


class _PrefetchState:
    """State shared by the copying thread and the consumer.

    It has no reference to its `DevicePrefetch`, which so is collected when the program drops it, while the thread runs.
    """

    def __init__(
        self,
        source: Iterator[Any],
        devices: Sequence[Device],
        num_units: int,
        num_bytes: int | None,
        unit_bytes: int,
        locks: bool,
    ) -> None:
        self.source = source
        self.locks = locks
        self.devices = devices
        self.num_units = num_units
        self.most_bytes = float("inf") if num_bytes is None else num_bytes
        # At this size ``num_units`` units fit within the limit together.
        self.unit_bytes = min(unit_bytes, self.most_bytes / num_units)
        self.copiers: list[Copier | None] = []
        self.thread: Thread | None = None
        # Reentrant, because the garbage collector may close an iterator in the middle of any code.
        self.changed = Condition(RLock())
        # Held while a unit is made of pending steps.
        self.sending = Lock()
        # Steps to be copied, each with its bytes on the device that takes most.
        self.pending: list[tuple[Any, int]] = []
        self.pending_bytes = 0
        self.queue: deque[CopyUnit] = deque()
        self.failure: BaseException | None = None
        self.is_reading = self.is_starving = self.is_shrunk = self.is_stopping = self.is_over = False
        self.callbacks: list[Callable[[], Any]] = []
        self.alive: set[UnitLifetime] = set()
        self.timer = CopyTimer()

    # --- the thread ---

    def run(self) -> None:
        """Read the source to its end, and close it."""
        try:
            for copier in self.copiers:
                if copier is not None:
                    copier.begin_ahead()
            self._read()
        except BaseException as error:
            self.failure = error
        finally:
            try:
                self._finish()
            except BaseException as error:
                self.failure = self.failure or error
            with self.changed:
                self.is_over = True
                self.changed.notify_all()
                callbacks, self.callbacks = self.callbacks, []
            for callback in callbacks:
                callback()

    def _read(self) -> None:
        num_steps = 1
        while not self.is_stopping:
            self.is_reading = True
            try:
                step = next(self.source)
            except StopIteration:
                break
            except BaseException as error:
                # Steps before the error are handed out first.
                self.failure = error
                break
            finally:
                self.is_reading = False
            pairs = zip(self.devices, step, strict=True)
            step_bytes = max(0 if device.is_host else bytes_of(leaves) for device, leaves in pairs)
            if self.pending_bytes + step_bytes > self.unit_bytes:
                self._send_all()
            with self.changed:
                self.pending.append((step, step_bytes))
                self.pending_bytes += step_bytes
                if self.is_starving:
                    self.changed.notify_all()
            del step, pairs
            if len(self.pending) >= num_steps or self.is_shrunk or self.pending_bytes >= self.unit_bytes:
                self._send_all()
                num_steps = min(2 * num_steps, MOST_UNIT_STEPS)
        self._send_all()

    def _send_all(self) -> None:
        while self.pending and self._wait_for(self._has_room):
            was_shrunk = self.is_shrunk
            with self.sending:
                missing = self._send()
            if missing is None or not was_shrunk:
                continue
            # The consumer releases its current step at the latest when it asks for the next one.
            if not self._wait_for(lambda: self.is_starving and not self.queue):
                return
            gc.collect()
            with self.sending:
                missing = self._send()
            if missing is not None:
                raise missing.as_user_error()

    def _has_room(self) -> bool:
        if not self.queue:
            return True
        if len(self.queue) >= (1 if self.is_shrunk else self.num_units):
            return False
        return sum(unit.num_bytes for unit in self.queue) + self.pending_bytes <= self.most_bytes

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        # Wait until the condition is true, and return True; return False if prefetching is stopped.
        with self.changed:
            while not self.is_stopping:
                if condition():
                    return True
                self.changed.wait(_CHECK_EVERY_S)
        return False

    def _finish(self) -> None:
        with self.sending:
            try:
                if hasattr(self.source, "close"):
                    self.source.close()
            finally:
                del self.source
                self.pending.clear()
                self.pending_bytes = 0
                for copier in self.copiers:
                    if copier is not None:
                        copier.close()

    # --- the thread, or the consumer ---

    def _send(self) -> NoRoomError | None:
        # Copy the pending steps as one unit. If there is no room, they stay pending, and from then on only single steps
        # are copied ahead.
        with self.changed:
            pending = self.pending[:1] if self.is_shrunk else list(self.pending)
        if not pending:
            return None
        try:
            num_bytes = sum(num_bytes for _, num_bytes in pending)
            unit = self._unit([step for step, _ in pending], num_bytes)
        except NoRoomError as error:
            if not self.is_shrunk:
                self.is_shrunk = True
                self.timer.note_shrinkage()
                logger.warning(
                    "%s has no memory for %d more bytes: from here on only one step is copied to it ahead of use; "
                    "make batches smaller, or give InputOptions(device_buffer_bytes=...)",
                    name_of(error.device),
                    error.num_bytes,
                )
            return error.with_traceback(None)
        with self.changed:
            del self.pending[: len(pending)]
            self.pending_bytes -= num_bytes
            if not self.is_stopping:
                self.queue.append(unit)
            self.changed.notify_all()
        return None

    def _unit(self, steps: list[Any], num_bytes: int) -> CopyUnit:
        parts: list[ReplicaPart] = []
        lifetime = UnitLifetime(self.alive)
        copies = []
        for number, copier in enumerate(self.copiers):
            replica_steps = [step[number] for step in steps]
            if copier is None:
                parts.append(ReplicaPart(replica_steps))
                continue
            layout = layout_of(copier.device, replica_steps, locks=self.locks)
            parts.append(ReplicaPart(layout.steps, copier.device, lifetime))
            copies.append((copier, layout, copier.buffer(layout.num_bytes), parts[-1]))
        # Besides the units ahead there are two more: the one that the consumer computes with, and the one that it
        # requests.
        if len(self.alive) > self.num_units + 2:
            self.timer.note_growth()
        for copier, layout, buffer, part in copies:
            copier.copy(layout, buffer, part)
            self.timer.add_bytes(part.num_bytes)
        return CopyUnit(parts, len(steps), num_bytes)

    # --- the consumer ---

    def begin(self) -> None:
        """Start the thread."""
        num_sources = max(self.num_units, 2)
        self.copiers = [None if device.is_host else Copier(device, num_sources) for device in self.devices]
        # The thread runs in the consumer's context, which holds the current caller, seed and replica.
        run = functools.partial(contextvars.copy_context().run, self.run)
        # An interrupt may come while the thread starts: a second one would take steps of the same source.
        self.thread = Thread(target=run, name="daskdist-feed", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:
            # The system has no more threads; a later call may begin.
            self.thread = None
            raise

    def take(self) -> CopyUnit:
        """Return the next unit.

        Raises
        ------
        StopIteration
            There are no more.
        """
        arrivals = [[] if copier is None else copier.record_arrival() for copier in self.copiers]
        start_s = None
        while True:
            with self.changed:
                if self.queue:
                    unit = self.queue.popleft()
                    self.is_starving = False
                    self.changed.notify_all()
                    break
                if self.is_over or self.is_stopping:
                    # The error must not stay referenced here: its traceback refers to this state.
                    failure, self.failure = self.failure, None
                    try:
                        raise failure or StopIteration
                    finally:
                        del failure
                start_s = start_s or time.perf_counter()
                if not self.is_starving:
                    self.is_starving = True
                    self.changed.notify_all()
                is_stuck = self.is_reading and bool(self.pending)
                was_notified = self.changed.wait(_STARVED_S if is_stuck else _CHECK_EVERY_S)
            if is_stuck and not was_notified:
                self._send_instead()
        if start_s is not None:
            self.timer.add_stall(time.perf_counter() - start_s)
        self.timer.add_times([part.times(events) for part, events in zip(unit.parts, arrivals, strict=True) if events])
        return unit

    def _send_instead(self) -> None:
        # The thread may be blocked in the source for long: copy the pending steps here, so that they need not wait.
        if not self.sending.acquire(blocking=False):
            return
        try:
            for is_last in (False, False, True):
                if is_last:
                    gc.collect()
                missing = self._send() if self.is_reading and not self.queue else None
                if missing is None:
                    return
                if is_last:
                    raise missing.as_user_error()
        finally:
            self.sending.release()

    def stop(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self.is_stopping = True
        # If the lock is not free at once, give up: its holder may be waiting for this thread, and waiting threads check
        # regularly anyway.
        if self.changed.acquire(timeout=0.1):
            try:
                self.queue.clear()
                self.changed.notify_all()
            finally:
                self.changed.release()


class DevicePrefetch(Iterator[list[Any]]):
    """An iterator that copies the steps of a source to the devices of replicas ahead of use.

    Arrays of dtypes that a device does not support, and ragged rows, stay on the host. Arrays handed out stay valid for
    as long as the consumer keeps them.

    Parameters
    ----------
    source
        Yields for each step a sequence of leaves for each replica. From the first step on only one separate thread
        uses it, and closes it at its end, or when this iterator is closed or dropped.
    devices
        The devices of the replicas; leaves for the host are handed out unchanged.
    num_units
        The most units to copy ahead of use.
    num_bytes
        The most bytes that they may take on each device, except that one unit is always allowed; unlimited if None.
    unit_bytes
        The largest size of a unit of more than one step.
    locks
        Whether large arrays on the host that leaves are views of become pinned memory.
    interrupt
        Called from another thread to make a blocked source stop waiting.
    """

    def __init__(
        self,
        source: Iterator[Any],
        devices: Sequence[Device],
        *,
        num_units: int = 2,
        num_bytes: int | None = None,
        unit_bytes: int = UNIT_BYTES,
        locks: bool = False,
        interrupt: Callable[[], None] | None = None,
    ) -> None:
        self._state = _PrefetchState(source, devices, num_units, num_bytes, unit_bytes, locks)
        self._interrupt = interrupt
        self._unit: CopyUnit | None = None
        Finalizer(self, _let_go, self._state)

    def __next__(self) -> list[Any]:
        state, unit = self._state, self._unit
        if state.thread is None and not state.is_over:
            state.begin()
        if unit is None:
            unit = self._unit = state.take()
        step = unit.next()
        if unit.num_handed_out == unit.num_steps:
            # The unit's memory is released with the last of its steps.
            self._unit = None
        return step

    def close(self, on_closed: Callable[[], None] | None = None) -> None:
        """Stop the thread and drop the copied steps; no step can be taken afterwards.

        A thread that is blocked in its source ends when the source returns, and is not waited for. ``on_closed`` is
        called once the source is closed.
        """
        state = self._state
        self._unit = None
        _let_go(state)
        with state.changed:
            if on_closed is not None and not state.is_over:
                state.callbacks.append(on_closed)
                on_closed = None
        if self._interrupt is not None and not state.is_over:
            self._interrupt()
        # Another thread may be about to start it.
        if state.thread is not None and state.thread is not current_thread() and state.thread.is_alive():
            state.thread.join(_JOIN_TIMEOUT_S)
        if on_closed is not None:
            on_closed()

    def stats(self) -> dict[str, Any]:
        """Return statistics of the copies so far; see `CopyStats.as_dict`."""
        return self._state.timer.stats().as_dict()


def _let_go(state: _PrefetchState) -> None:
    state.stop()
    if state.thread is None and not state.is_over:
        # Without a thread, the source has to be closed here.
        state.is_over = True
        if hasattr(state.source, "close"):
            state.source.close()
