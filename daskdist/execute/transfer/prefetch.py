"""Steps put on the devices of replicas ahead of use, while those compute.

A thread takes steps of a source, some of them together as a **unit**, and copies each replica's part of a unit to its
device at once, in a stream of its own. Whoever takes the steps gets arrays that are cut from what was copied.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition, Lock, RLock, Thread, current_thread
from typing import Any, Final

from daskdist.config import num_threads
from daskdist.core.finalizer import Finalizer
from daskdist.devices import Device, name_of
from daskdist.execute.transfer.copier import Copier, CopyUnit, NoRoomError, ReplicaPart, UnitLifetime
from daskdist.execute.transfer.copy_stats import CopyTimer
from daskdist.execute.transfer.layout import MIB, bytes_of, layout_of

logger: Final = logging.getLogger("daskdist")

# Steps of a unit, however small.
_MOST_STEPS: Final = 64
# A consumer that waits for so long takes what there is, although the unit is not full.
_STARVED_S: Final = 0.002
# Somebody who waits looks so often whether it is all over.
_LOOK_S: Final = 0.5
# A source that gives nothing for so long after it was told to end ends by itself later.
_PATIENCE_S: Final = 2.0
_MOST_THREADS: Final = 8


class _PrefetchState:
    """State shared by the copying thread and the consumer.

    It holds no reference to its `DevicePrefetch`, so that one the program drops is collected while the thread runs.
    """

    def __init__(
        self, source: Iterator[Any], devices: Sequence[Device], num_units: int, num_bytes: int | None, unit_bytes: int
    ) -> None:
        self.source = source
        self.devices = devices
        self.num_units = num_units
        self.most_bytes = float("inf") if num_bytes is None else num_bytes
        # So many have room together.
        self.unit_bytes = min(unit_bytes, self.most_bytes / num_units)
        self.slot_bytes = unit_bytes
        self.copiers: list[Copier | None] = []
        self.thread: Thread | None = None
        # Iterators are let go of by the garbage collector too, in the middle of anything.
        self.turn = Condition(RLock())
        # Held while a unit is made of what is pending.
        self.sending = Lock()
        # Steps, and how many bytes each has for a device.
        self.pending: list[tuple[Any, int]] = []
        self.pending_bytes = 0
        self.queue: deque[CopyUnit] = deque()
        self.failure: BaseException | None = None
        self.is_reading = self.is_starving = self.is_shrunk = self.is_stopping = self.is_over = False
        self.then: list[Callable[[], Any]] = []
        self.alive: set[UnitLifetime] = set()
        self._threads: ThreadPoolExecutor | None = None
        self.timer = CopyTimer()

    # --- the thread ---

    def run(self) -> None:
        """Read the source to its end, and close it."""
        try:
            self._read()
        except BaseException as error:
            self.failure = error
        finally:
            try:
                self._finish()
            except BaseException as error:
                self.failure = self.failure or error
            with self.turn:
                self.is_over = True
                self.turn.notify_all()
                then, self.then = self.then, []
            for each in then:
                each()

    def _read(self) -> None:
        num_steps = 1
        while not self.is_stopping:
            self.is_reading = True
            try:
                step = next(self.source)
            except StopIteration:
                break
            except BaseException as error:
                # What came before it is handed out first.
                self.failure = error
                break
            finally:
                self.is_reading = False
            pairs = zip(self.devices, step, strict=True)
            step_bytes = max(0 if device.is_host else bytes_of(leaves) for device, leaves in pairs)
            if self.pending_bytes + step_bytes > self.unit_bytes:
                self._send_all()
            with self.turn:
                self.pending.append((step, step_bytes))
                self.pending_bytes += step_bytes
                if self.is_starving:
                    self.turn.notify_all()
            del step, pairs
            if len(self.pending) >= num_steps or self.is_shrunk or self.pending_bytes >= self.unit_bytes:
                self._send_all()
                num_steps = min(2 * num_steps, _MOST_STEPS)
        self._send_all()

    def _send_all(self) -> None:
        while self.pending and self._waited(self._has_room):
            was_shrunk = self.is_shrunk
            with self.sending:
                missing = self._send()
            if missing is None or not was_shrunk:
                continue
            # What the consumer has, it lets go of at the latest when it has come for more.
            if not self._waited(lambda: self.is_starving and not self.queue):
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

    def _waited(self, condition: Callable[[], bool]) -> bool:
        # Whether it has come true; not where all is to end.
        with self.turn:
            while not self.is_stopping:
                if condition():
                    return True
                self.turn.wait(_LOOK_S)
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
                if self._threads is not None:
                    self._threads.shutdown()

    # --- the thread, or the consumer ---

    def _send(self) -> NoRoomError | None:
        # One unit of what is pending; what there is no room for stays pending, and there are fewer ahead from then on.
        with self.turn:
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
                    "%s has no memory for %d bytes more: from here on one step is copied to it ahead of use, and no "
                    "more; make batches smaller, or give InputOptions(device_buffer_bytes=...)",
                    name_of(error.device),
                    error.num_bytes,
                )
            return error.with_traceback(None)
        with self.turn:
            del self.pending[: len(pending)]
            self.pending_bytes -= num_bytes
            if not self.is_stopping:
                self.queue.append(unit)
            self.turn.notify_all()
        return None

    def _unit(self, steps: list[Any], num_bytes: int) -> CopyUnit:
        parts: list[ReplicaPart] = []
        life = UnitLifetime(self.alive)
        copies = []
        for number, copier in enumerate(self.copiers):
            own = [step[number] for step in steps]
            if copier is None:
                parts.append(ReplicaPart(own))
                continue
            layout = layout_of(copier.device, own)
            parts.append(ReplicaPart(layout.steps, copier.device, life))
            copies.append((copier, layout, copier.buffer(layout.num_bytes), parts[-1]))
        # One besides those ahead is what the consumer computes with, another one what it has come for.
        if len(self.alive) > self.num_units + 2:
            self.timer.note_growth()
        for copier, layout, buffer, part in copies:
            copier.copy(layout, buffer, part, self._with_threads)
            self.timer.add_bytes(part.num_bytes)
        return CopyUnit(parts, len(steps), num_bytes)

    def _with_threads(self) -> tuple[ThreadPoolExecutor, int]:
        number = min(num_threads(), _MOST_THREADS)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(number, thread_name_prefix="daskdist-copy")
        return self._threads, number

    # --- the consumer ---

    def begin(self) -> None:
        """Start the thread."""
        slots = max(self.num_units, 2)
        self.copiers = [None if each.is_host else Copier(each, slots, self.slot_bytes) for each in self.devices]
        # What callers, seeds and replicas are found by is the consumer's.
        run = functools.partial(contextvars.copy_context().run, self.run)
        self.thread = Thread(target=run, name="daskdist-feed", daemon=True)
        self.thread.start()

    def take(self) -> CopyUnit:
        """The next unit.

        Raises
        ------
        StopIteration
            There is none.
        """
        events = [[] if copier is None else copier.come() for copier in self.copiers]
        begun_s = None
        while True:
            with self.turn:
                if self.queue:
                    unit = self.queue.popleft()
                    self.is_starving = False
                    self.turn.notify_all()
                    break
                if self.is_over or self.is_stopping:
                    # Not kept: its traceback refers to all this.
                    failure, self.failure = self.failure, None
                    try:
                        raise failure or StopIteration
                    finally:
                        del failure
                begun_s = begun_s or time.perf_counter()
                if not self.is_starving:
                    self.is_starving = True
                    self.turn.notify_all()
                is_stuck = self.is_reading and bool(self.pending)
                came = self.turn.wait(_STARVED_S if is_stuck else _LOOK_S)
            if is_stuck and not came:
                self._send_instead()
        if begun_s is not None:
            self.timer.add_stall(time.perf_counter() - begun_s)
        self.timer.add_times([part.ask(asked) for part, asked in zip(unit.parts, events, strict=True) if asked])
        return unit

    def _send_instead(self) -> None:
        # The thread waits for the source, and may do so for long: what it has of that is not to wait too.
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
        """Have the thread end; it is not waited for."""
        self.is_stopping = True
        # Whoever waits looks again anyway: another thread that is being let go of may have the turn, and wait for this.
        if self.turn.acquire(timeout=0.1):
            try:
                self.queue.clear()
                self.turn.notify_all()
            finally:
                self.turn.release()


class DevicePrefetch(Iterator[list[Any]]):
    """Steps of a source, put on the devices of replicas ahead of use.

    What devices lack, and rows of different lengths, stay on the host. What is handed out is the consumer's for as long
    as it keeps it.

    Parameters
    ----------
    source
        Gives for each step a sequence of leaves for each replica. From the first step on it is used by one thread of
        its own only, and closed by that, at its end or when this is closed or dropped.
    devices
        Of the replicas; what is for the host is handed out as it is.
    num_units
        Units that are copied ahead of use, at the most.
    num_bytes
        Bytes of each device that they may take, at the most, but for one unit; any if None.
    unit_bytes
        The most that several steps are copied together for.
    interrupt
        Has the source wait for nothing any more, from another thread.
    """

    def __init__(
        self,
        source: Iterator[Any],
        devices: Sequence[Device],
        *,
        num_units: int = 2,
        num_bytes: int | None = None,
        unit_bytes: int = 4 * MIB,
        interrupt: Callable[[], None] | None = None,
    ) -> None:
        self._state = _PrefetchState(source, devices, num_units, num_bytes, unit_bytes)
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
            # Its memory goes with the last of its steps.
            self._unit = None
        return step

    def close(self, then: Callable[[], None] | None = None) -> None:
        """End the thread, and let go of what was copied; nothing comes after it.

        A thread whose source gives nothing ends when that does, and is not waited for. ``then`` is called once the
        source is closed.
        """
        state = self._state
        self._unit = None
        _let_go(state)
        with state.turn:
            if then is not None and not state.is_over:
                state.then.append(then)
                then = None
        if self._interrupt is not None and not state.is_over:
            self._interrupt()
        if state.thread is not None and state.thread is not current_thread():
            state.thread.join(_PATIENCE_S)
        if then is not None:
            then()

    def stats(self) -> dict[str, Any]:
        """What came of the copies so far: see `Figures.told`."""
        return self._state.timer.stats().as_dict()


def _let_go(state: _PrefetchState) -> None:
    state.stop()
    if state.thread is None and not state.is_over:
        # Nobody else would.
        state.is_over = True
        if hasattr(state.source, "close"):
            state.source.close()
