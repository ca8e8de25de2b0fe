"""The streams of one strategy to all of its workers, and the program's records of the calls that it sent."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from distributed import Client
from tornado.ioloop import PeriodicCallback

from daskdist.config import in_bytes, setting
from daskdist.errors import ClusterError
from daskdist.execute.callers.cluster_requests import ask_workers, closed_error, root_cause
from daskdist.execute.callers.compute_key import lost_data_error
from daskdist.execute.callers.live_workers import LiveWorkers, give_up
from daskdist.execute.callers.submit import workers_of
from daskdist.execute.messages.failure import Failure
from daskdist.execute.messages.link import RunClock
from daskdist.execute.paused_workers import add_reason, ended_for_memory
from daskdist.strategy.backend import GenerationEndedError
from daskdist.strategy.calls.call_arguments import last_reference
from daskdist.strategy.calls.call_messages import (
    AskRunning,
    CallOver,
    ChangeGroup,
    DropResults,
    FailData,
    FailResult,
    KeepObject,
    Leaving,
    LoseWorkers,
    NeedsData,
    NotPassedOn,
    PassOn,
    Running,
)
from daskdist.strategy.calls.calls import Call, Record, future_of, note_lost
from daskdist.strategy.calls.outcomes import Failed, StaysOnWorker
from daskdist.strategy.calls.recovery.call_log import CallLog
from daskdist.strategy.calls.recovery.scheduler_connection import SchedulerConnection
from daskdist.strategy.calls.sent_objects import SentObject
from daskdist.strategy.calls.stream import StepStream, close_all, close_all_soon, in_background
from daskdist.strategy.calls.unobserved_failures import UnobservedFailures
from daskdist.strategy.calls.worker_statuses import check_running_calls, names_of, worker_statuses
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.status import WorkerStatus
from daskdist.strategy.values.refs import TaskResults

logger: Final = logging.getLogger("daskdist")

# Seconds between checks of the streams.
_BEAT_S: Final = 1.0
# With this many dropped handles, workers are sent their numbers even if nothing else is sent.
_MANY_DROPPED: Final = 64
# Seconds between a waiter's checks of the connection.
_LOOK_EVERY_S: Final = 1.0
# Held while the record of a call changes: the event loop notes results, and program threads calls and losses. One lock
# for all strategies, as each step takes it several times.
_recording: Final = threading.Lock()


class StreamSet:
    """Streams to workers: calls are sent in the program's order, and their outcomes are received.

    Parameters
    ----------
    client
        The connection to the cluster.
    live_workers
        The workers that take part.
    log
        The log of calls, which refers to the strategy and so is not kept alive by calls under way.

    Threads of the program send calls and wait; the event loop receives outcomes, and notices losses. What both change
    says below how. Locks are taken in this order: `lock`, `_recording`, that of `failures`.
    """

    def __init__(self, client: Client, live_workers: LiveWorkers, log: weakref.ref[CallLog]) -> None:
        self.client = client
        self.connection = SchedulerConnection(client)
        self.live_workers = live_workers
        self._log = log
        # Held while messages are appended, so that all workers get them in the same order.
        self.lock = threading.RLock()
        # The replicas that the workers know of; replaced under the lock, with the messages that announce others.
        self.group: ReplicaGroup | None = None
        # Appended to in any thread, also by the garbage collector, and emptied under the lock.
        self.dropped_objects: deque[int] = deque()
        self.dropped_variables: deque[int] = deque()
        self._dropped: deque[Record] = deque()
        # The numbers of calls, and of the moments at which streams were opened; in any thread.
        self._numbers = itertools.count(1)
        # Replaced as a whole in the event loop. The streams to lost workers stay, until others have their addresses.
        self._streams: dict[str, StepStream] = {}
        # The calls that are not over, and how many of them are steps; changed under `_recording`.
        self._under_way: dict[int, Record] = {}
        self.num_steps = 0
        self.failures = UnobservedFailures()
        # What the threads wait for: each thread adds and removes its own, and the event loop looks at a copy.
        self._changed = threading.Condition()
        self._waiting: list[Callable[[], bool]] = []
        # Set in any thread; the event loop resets the first, and nothing the others.
        self._is_flush_due = self._is_closed = self.has_broken = False
        # Those of the event loop's pings, and what it does after each; the function is set in any thread.
        self._clock = RunClock(_BEAT_S)
        self._after_beat: asyncio.Future[Any] | None = None
        self.on_beat: Callable[[], Callable[[], Any] | None] = lambda: None
        # The time at which a call was last over or lost; set in any thread.
        self._ended_at = time.monotonic()
        self._loop: Any = client.loop.asyncio_loop

    # --- open and close ---

    def open(self, group: ReplicaGroup, workers: Sequence[str]) -> None:
        """Open streams to workers of a group, all or those that were added.

        Raises
        ------
        OSError
            A worker cannot be reached, or does not answer.
        """
        ask_workers(self.client, self._open, group, workers, workers=workers)

    async def _open(self, group: ReplicaGroup, workers: Sequence[str]) -> None:
        reference = weakref.ref(self)

        def receive(stream: StepStream, messages: list[Any]) -> None:
            streams = reference()
            if streams is not None:
                streams._receive(stream, messages)

        def broken(stream: StepStream, why: str) -> None:
            streams = reference()
            if streams is not None:
                streams._broken(stream, why)

        opening = (StepStream.open(address, group, self.client, receive, broken) for address in workers)
        results = await asyncio.gather(*opening, return_exceptions=True)
        opened = [result for result in results if isinstance(result, StepStream)]
        for result in results:
            if isinstance(result, BaseException):
                close_all(opened)
                raise result
        if not self._streams:
            self._beating = PeriodicCallback(partial(StreamSet._beat, reference), 1000 * _BEAT_S)
            self._beating.start()
        # Close the streams when nothing refers to them or to their results.
        weakref.finalize(self, close_all_soon, opened, self._beating, self._loop).atexit = False
        for stream in opened:
            stream.opened_after = next(self._numbers)
        # A new dict, as other threads go through the old one.
        self._streams = {**self._streams, **{stream.address: stream for stream in opened}}
        relayed = [stream.address for stream in opened if stream.is_relayed]
        if relayed:
            self.live_workers.is_direct = False
            logger.info("steps go by way of the scheduler to %s", ", ".join(relayed))

    def close(self) -> None:
        """Close all streams: the workers free everything of the strategy."""
        self._is_closed = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(close_all, list(self._streams.values()))
        failed = Failed(Failure.of(ClusterError("the strategy is closed")), None)
        with self.lock:
            for address in self._streams:
                self._fail_calls(address, failed)
        self._wake()

    def become(self, group: ReplicaGroup) -> None:
        """Continue with the replicas that are left, once all earlier calls are over."""
        self.announce(group, group.workers)
        # The calls that failed are made again.
        self.failures.forget_lost(next(self._numbers))
        self.flush()

    def announce(self, group: ReplicaGroup, workers: Sequence[str] = ()) -> None:
        """Continue with other replicas; some workers are told, once all calls are over, and the others know of them."""
        is_announced = False
        while not is_announced:
            if workers:
                self.finish()
            with self.lock:
                # Another thread may have sent a call meanwhile, during which replicas must keep their numbers.
                is_announced = not (workers and self._under_way)
                if is_announced:
                    self.group = group
                    for address in workers:
                        self._streams[address].link.append(ChangeGroup(group))

    def end_waiting_for(self, lost: Sequence[str], *, notes: bool = True) -> None:
        """End all waiting for workers that are lost; it ``notes`` the calls that they were making."""
        error = ClusterError(f"lost {', '.join(lost)}, which a call needs; {self.live_workers.advice}")
        why = Failed(Failure.of(root_cause(self.client, error)), None)
        with self.lock:
            for address, stream in self._streams.items():
                if stream.is_open and address not in lost:
                    stream.link.append(LoseWorkers(list(lost), why, "it has left the cluster"))
                elif address in lost:
                    # The scheduler has dropped the worker, which may still be running.
                    if notes:
                        note_lost(list(self._under_way.values()), address)
                    self._fail_calls(address, why)
        self._wake()
        self.flush()

    def abandon(self, lost: Sequence[str]) -> None:
        """Close the streams to workers that are lost, and end the calls that need them."""
        self.end_waiting_for(lost, notes=False)
        self._loop.call_soon_threadsafe(close_all, [self._streams[address] for address in self._streams.keys() & lost])
        self.failures.forget_lost(next(self._numbers))

    # --- what is sent ---

    def new_call(self, workers: Sequence[str], needs: Any, name: str, **about: Any) -> Call:
        """Return the handle of a call that is going to be sent; see `Record`."""
        record = Record(next(self._numbers), workers, needs, name, **about)
        with _recording:
            self._under_way[record.number] = record
            self.num_steps += record.is_step
        return Call(record, self._dropped)

    def stream_with(self, address: str, objects: Iterable[SentObject]) -> StepStream:
        """Return the stream to a worker, after sending it those of the objects that it lacks."""
        stream = self._streams[address]
        for sent_object in objects:
            if sent_object.number not in stream.objects:
                message = KeepObject(sent_object.number, sent_object.value)
                stream.link.append(message, num_bytes=sent_object.num_bytes)
                stream.objects.add(sent_object.number)
        return stream

    def result_reference(self, address: str, record: Record, place: int) -> tuple[Any, ...]:
        """Return the reference to a result in the next message to a worker, a call, as in `MakeCall`."""
        workers = record.workers
        origin, target = workers[place], self._streams[address]
        if origin == address and target.opened_after < record.number:
            return "r", record.number, place, None
        passed_on = record.passed_on
        if not passed_on or (place, target) not in zip(passed_on[::2], passed_on[1::2], strict=True):
            if not self.is_there(origin, record.number):
                return last_reference(record, place, self.live_workers.lost_error("a result"))
            record.passed_on = (*passed_on, place, target)
            message = PassOn(record.number, place, address, target.link.state.num_sent + 1)
            self._streams[origin].link.append(message)
        return "r", record.number, place, origin

    def check_open(self, workers: Iterable[str], sources: Sequence[Any] = ()) -> None:
        """Raise a `ClusterError` if the stream to one of the workers is closed, or data that a call needs is gone."""
        if self._is_closed or self.client.status != "running":
            self.live_workers.in_doubt = True
            raise closed_error(self.client)
        if self.has_broken and not all(map(self.is_open, workers)):
            self.live_workers.in_doubt = True
            lost = self.lost()
            raise self.lost_error(lost, ended_for_memory(self.client, lost))
        for source in sources:
            for future in source.futures if type(source) is TaskResults else ():
                if future is not None and future.cancelled():
                    raise self.live_workers.lost_error(future.key)

    def changed_error(self) -> GenerationEndedError:
        """Return the error of a call for other replicas than take part now."""
        # So the caller waits for the thread that changes the replicas.
        self.live_workers.in_doubt = True
        return GenerationEndedError("the replicas of the strategy have changed meanwhile; make the call again")

    def is_open(self, worker: str) -> bool:
        """Return whether the stream to a worker is open."""
        return (stream := self._streams.get(worker)) is not None and stream.is_open

    def is_there(self, worker: str, number: int) -> bool:
        """Return whether the worker to which a call was sent, by its number, is still there."""
        return (stream := self._streams.get(worker)) is not None and stream.is_open and stream.opened_after < number

    def lost(self) -> list[str]:
        """Return the workers that take part and whose streams are broken."""
        return [address for address in self.live_workers.present if self.has_broken and not self.is_open(address)]

    def lost_error(self, lost: Sequence[str], why: str = "") -> BaseException:
        """Return the error of workers that are lost."""
        rest = "no worker is left, create a new strategy"
        if len(self.lost()) < len(self.live_workers.present):
            rest = "calls that need them fail, and the next call continues with the remaining replicas"
        return root_cause(self.client, ClusterError(f"lost {', '.join(lost)}, which had replicas{why}; {rest}"))

    def flush(self) -> None:
        """Send all messages that wait."""
        if not self._is_flush_due:
            self._is_flush_due = True
            # The client may be closed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._flush_in_loop)

    def _flush_in_loop(self) -> None:
        self._is_flush_due = False
        self._send_drops()
        # Send to the first worker last: it combines reductions, whose parts the other workers then send already.
        for stream in reversed(self._streams.values()):
            if stream.is_open:
                stream.link.flush()

    def _send_drops(self) -> None:
        if not (self._dropped or self.dropped_objects or self.dropped_variables):
            return
        with self.lock:
            # After closing, calls on workers may still need dropped results, and end with their streams.
            if self._is_closed:
                return
            numbers: dict[str, list[int]] = {}
            while self._dropped:
                record = self._dropped.popleft()
                record.is_dropped = True
                self.failures.drop(record)
                for address in record.holders:
                    numbers.setdefault(address, []).append(record.number)
            objects = [self.dropped_objects.popleft() for _ in range(len(self.dropped_objects))]
            variables = [self.dropped_variables.popleft() for _ in range(len(self.dropped_variables))]
            for address, stream in self._streams.items():
                if not stream.is_open:
                    continue
                known = stream.objects.intersection(objects)
                stream.objects -= known
                if address in numbers or known or variables:
                    stream.link.append(DropResults(numbers.get(address, ()), known, variables))

    # --- answers ---

    def _receive(self, stream: StepStream, messages: list[Any]) -> None:
        try:
            self._handle(stream, messages)
        except Exception:
            # The stream was closed because of this error.
            logger.exception("a message of %s could not be handled", stream.address)
            raise

    def _handle(self, stream: StepStream, messages: list[Any]) -> None:
        now = time.monotonic()
        for message in messages:
            kind = type(message)
            if kind is CallOver:
                self._ended_at = now
                number, place, structure, payload = message
                record = self._under_way.get(number)
                if record is not None:
                    self._record_outcome(record, place, structure, payload)
            elif kind is Running:
                stream.running_at, stream.running = message
            elif kind is NeedsData and message.key not in stream.needed:
                stream.needed.add(message.key)
                task = in_background(self._report_lost_data(stream, message.key))
                task.add_done_callback(lambda _, key=message.key: stream.needed.discard(key))  # type: ignore[misc]
            elif kind is Leaving:
                self.live_workers.note_leaving(stream.address, *(() if message.values is None else (message.values,)))
            elif kind is NotPassedOn:
                why = ClusterError(f"{stream.address} cannot reach {message.target}: {message.why}")
                with self.lock:
                    if self._streams[message.target].is_open:
                        result = FailResult(message.number, message.replica, Failed(Failure.of(why), None))
                        self._streams[message.target].link.append(result)
                self.flush()
        if len(self._dropped) >= _MANY_DROPPED:
            self._flush_in_loop()
        self._wake()

    async def _report_lost_data(self, stream: StepStream, key: Any) -> None:
        # A worker waits for a task's result, and does not know if the task failed elsewhere, or is gone.
        future = future_of(key, list(self._under_way.values()))
        error = None if future is None else await self.live_workers.error_of(self.client, future)
        with self.lock:
            # Calls are sent under the lock: none needs it any more.
            if future is None and future_of(key, list(self._under_way.values())) is None:
                error = lost_data_error(key)
            if error is not None and stream.is_open:
                stream.link.append(FailData(key, Failed(Failure.of(error), None)))
        self.flush()

    def _record_outcome(self, record: Record, place: int, structure: Any, payload: Any) -> None:
        with _recording:
            outcomes = record.outcomes
            if outcomes[place] is not None:
                return
            if type(payload) is Failed and payload.origin is None and record.is_final and record.is_step:
                # No other replica does what this one was to do.
                payload = payload._replace(origin=None if self._is_closed else record.number)
            is_new = type(payload) is Failed and all(failure.origin != payload.origin for failure in record.failures())
            record.has_failed |= type(payload) is Failed
            outcomes[place] = structure, payload
            record.num_left -= 1
            if is_new:
                self.failures.add(record, payload)
            if record.num_left:
                return
            record.needs, record.outcomes = None, tuple(outcomes)
            if not record.has_failed and not (record.is_of_tasks and type(payload) is StaysOnWorker):
                # Otherwise a total would keep all that was added.
                record.again = None
            if self._under_way.pop(record.number, None) is not None and record.is_step:
                self.num_steps -= 1
            are_all_over = not self._under_way
        if are_all_over and (log := self._log()) is not None:
            log.rest()

    def _broken(self, stream: StepStream, why: str) -> None:
        self.has_broken = True
        if self._is_closed or self._streams.get(stream.address, stream) is not stream:
            return
        if stream.address in self.live_workers.present:
            self.live_workers.has_lost = True
        failed = Failed(Failure.of(self.lost_error([stream.address], f" ({why})")), None)
        with self.lock:
            note_lost(list(self._under_way.values()), stream.address)
            self._fail_calls(stream.address, failed)
            # End all waiting for messages of that worker.
            for other in self._streams.values() if stream.address in self.live_workers.present else ():
                if other.is_open:
                    other.link.append(LoseWorkers([stream.address], failed, why))
        self._wake()
        self.flush()

    def _fail_calls(self, address: str, why: Failed) -> None:
        self._ended_at = time.monotonic()
        for record in list(self._under_way.values()):
            for place, worker in enumerate(record.workers):
                if worker == address:
                    self._record_outcome(record, place, None, why)

    def _wake(self) -> None:
        if any(is_over() for is_over in list(self._waiting)):
            with self._changed:
                self._changed.notify_all()

    # --- waiting ---

    def wait(self, is_over: Callable[[], bool], within_s: float = math.inf) -> None:
        """Send queued messages, then wait until ``is_over()``, or for ``within_s`` seconds."""
        self.flush()
        self._waiting.append(is_over)
        try:
            begun_at = time.monotonic()
            while time.monotonic() <= begun_at + within_s:
                # The event loop, which answers the queries of waiters below, acquires the condition's lock, too.
                with self._changed:
                    if self._changed.wait_for(is_over, min(_LOOK_EVERY_S, within_s)):
                        return
                self.check_open(())
                self._check_hung(begun_at)
        finally:
            self._waiting.remove(is_over)

    def _check_hung(self, begun_at: float) -> None:
        silent_s = time.monotonic() - max(begun_at, self._ended_at)
        is_loop = check_running_calls(self._streams.values(), self._under_way, silent_s)
        if silent_s > 2 * _LOOK_EVERY_S and not is_loop:
            self.live_workers.paused_workers.check(self.client, workers_of(self.client))

    def _ping(self) -> None:
        # A ping between a reference and its call would change the call's number, which another worker is sent.
        with self.lock:
            now = time.monotonic()
            passed_s = self._clock.beat(now)
            for stream in self._streams.values():
                if stream.is_open and stream.beat(passed_s):
                    # Otherwise other workers would wait for tasks on it.
                    in_background(give_up(self.client, [stream.address]))
                elif stream.is_open and self._under_way:
                    # Whether its replicas continue; a worker that is lost does not acknowledge it.
                    stream.link.append(AskRunning(now))
                    stream.link.flush()

    def status(self, group: ReplicaGroup, *, asks: bool) -> tuple[WorkerStatus, ...]:
        """Return the status of each worker, lost ones included; the others are asked, for a second at most."""
        with self.lock:
            now = time.monotonic()
            asked = [stream for stream in self._streams.values() if stream.is_open and asks and not self._is_closed]
            for stream in asked:
                stream.link.append(AskRunning(now))
        with contextlib.suppress(ClusterError):
            if asked:
                self.wait(
                    lambda: all(stream.running_at >= now or not stream.is_open for stream in asked), _LOOK_EVERY_S
                )
        return worker_statuses(
            self._streams.values(), [*self._under_way.values()], group, is_closed=self._is_closed, tells_running=asks
        )

    def wait_for_room(self) -> None:
        """Wait until fewer than ``daskdist.max-steps-in-flight`` steps are under way, and few bytes are unsent."""
        most = max(setting("max-steps-in-flight"), 1)
        while self.num_steps >= most:
            self.wait(lambda: self.num_steps <= most // 2 or (bool(self.failures) and not self.lost()))
            self.raise_unobserved()
        for stream in self._streams.values():
            if stream.link.num_sent_bytes != stream.link.num_over_bytes:
                self._wait_for_bytes(in_bytes("step-bytes"))
                return

    def _wait_for_bytes(self, most: int) -> None:
        streams = self._streams.values()
        self.wait(lambda: all(stream.link.num_bytes <= most or not stream.is_open for stream in streams))

    @property
    def is_busy(self) -> bool:
        """Return whether calls are under way."""
        return bool(self._under_way)

    def names_under_way(self) -> list[str]:
        """Return the names of the calls that are under way."""
        return names_of(list(self._under_way.values()))

    def finish(self, within_s: float | None = None) -> None:
        """Send all queued messages, and wait until all calls are over, or for some seconds."""
        self.wait(lambda: not self._under_way, math.inf if within_s is None else within_s)

    def lost_with(self, worker: str) -> ClusterError:
        """Return the error of a result that is requested from a lost worker."""
        self.live_workers.in_doubt = True
        why = ended_for_memory(self.client, (worker,))
        return ClusterError(f"lost {worker}, which has a requested result{why}; {self.live_workers.advice}")

    def raise_first(self, failures: Sequence[Failed]) -> None:
        """Raise the first of failures whose results were read together; the others are not raised separately later."""
        for failure in failures:
            self.failures.mark_observed(failure)
        if failures:
            raise self._cause_of(failures[0].failure.error())

    def note_final(self, error: BaseException) -> None:
        """Add the calls that are not made again to the error of another that is lost; they are not reported later."""
        if names := self.failures.take_final():
            error.add_note(f"also failed with a lost worker, and not made again: {', '.join(names)}")

    def _cause_of(self, error: BaseException) -> BaseException:
        # A lost worker may be the cause. Another worker may report it before its stream breaks.
        self.live_workers.in_doubt = True
        if lost := [worker for worker in self._streams if f"lost {worker}," in str(error)]:
            self.wait(lambda: True not in map(self.is_open, lost), 5 * _LOOK_EVERY_S)
            add_reason(error, self.client, lost, is_last=len(self.lost()) == len(self.live_workers.present))
        return root_cause(self.client, error)

    def raise_unobserved(self) -> None:
        """Raise the first failure whose results can no longer be read, if there is one."""
        if self._dropped:
            self._send_drops()
        if not (self.failures.unraised and self.failures):
            return
        if error := self.failures.first_error():
            self._cause_of(error)
        if self.lost():
            # Failures because of the loss are not reported, since the calls are made again.
            self.failures.forget_lost()
        elif error := self.take_unobserved():
            raise root_cause(self.client, error)

    def take_unobserved(self) -> BaseException | None:
        """Forget the failures whose results can no longer be read; return the error of the first, if any."""
        self._send_drops()
        return self.failures.take_error()

    def validate(self) -> None:
        """Check what holds between the attributes; called in the event loop."""
        with self.lock, _recording:
            records = list(self._under_way.values())
            workers = () if self.group is None else self.group.workers
            if self.num_steps != sum(record.is_step for record in records) or not set(workers) <= self._streams.keys():
                raise AssertionError(f"{self.num_steps} steps are under way of {records}; streams to {self._streams}")
            for address, stream in self._streams.items():
                stream.link.validate()
                if stream.address != address:
                    raise AssertionError(f"the stream to {stream.address} is that to {address}")
            for number, record in self._under_way.items():
                if record.number != number:
                    raise AssertionError(f"call {record.number} is under way as {number}")
                record.validate()
        self.failures.validate()
        if (log := self._log()) is not None:
            log.validate()

    @staticmethod
    def _beat(reference: weakref.ref[StreamSet]) -> None:
        if (streams := reference()) is not None:
            if streams.connection.is_lost:
                streams.live_workers.has_lost = True
            streams._flush_in_loop()
            streams._ping()
            after, before = streams.on_beat(), streams._after_beat
            if after is not None and (before is None or before.done()):
                streams._after_beat = in_background(after())
