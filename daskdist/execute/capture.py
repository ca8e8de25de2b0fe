"""The caller of steps: calls that go to a cluster together, as one graph."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from typing import Any, Final, TypeAlias

from distributed import Future
from distributed.client import FuturesCancelledError, _wait

from daskdist.config import setting
from daskdist.execute.callers import Handle
from daskdist.execute.deferred import Deferred, Noted, SentTask
from daskdist.execute.fused import (
    Failure,
    OfLane,
    Outputs,
    PickOutput,
    failure_of,
    some_outputs,
)
from daskdist.execute.graph import placed_graph
from daskdist.execute.joining import join
from daskdist.execute.noting import Capture, Group, Pickled, Taken
from daskdist.execute.session import Sent, Session, current_session, sending_because, sent_because
from daskdist.execute.submit import LOOK_EVERY_S, Picks, Submit

# Outputs of a task that are brought here together with the one that is asked for, if they are no larger.
_TOGETHER_BYTES: Final = 64 * 2**10
# Who is told of calls on a lane that were not made.
Tell: TypeAlias = Callable[[tuple[OfLane, ...], Sequence[int], Exception], Awaitable[Any]]
# Tasks that a result may be made of. Dask keeps note of all of them for as long as the result is there; one that is
# made of more is sent anew.
_MOST_ANCESTORS: Final = 400
# Steps of sessions that wait for others, beyond which no more are made though a graph under way has as many: so many,
# or as many as are done in so many seconds.
_MOST_TOGETHER: Final = 256
_TOGETHER_S: Final = 0.25
# What no graph takes less than, for the clock's sake.
_LEAST_S: Final = 1e-3
# Sessions that wait for others.
_MOST_OVER: Final = 64
# Of calls in one graph: Dask warns of graphs of 10 MiB.
_LARGE_GRAPH_BYTES: Final = 4 * 2**20
# Who waits for some calls looks for failures among others after so long, and again and again; and for workers that are
# lost, every so many times.
_PATIENCE_S: Final = 0.5
_LOOK_EVERY: Final = 4
# Graphs under way beyond which calls wait for one to be over: one that is worked on, one to go on with.
_MOST_GRAPHS: Final = 2


class _OfThread(threading.local):
    # How many blocks of calls that go together it is in.
    depth = 0


class Capturing(Submit):
    """Calls that go together: those of a session, or those that come while others are under way.

    A handle is a `Deferred`. A call that raises does not end the others of its task: what it raised is raised by
    whoever asks for its result, or for one that was to be made of that.

    Outside of sessions a call is sent at once if there is little under way. If not, it waits until some of that is
    over or its result is asked for, and goes with those that have come since: the more there is to do, the fewer tasks
    it is done in.

    Parameters
    ----------
    tell
        Called where the task of a lane could not be run, as what it was to be given failed, with what the lane gives to
        its calls, the steps of which calls of it were not made, and the error. Of calls that were given a step.
    """

    defers = True

    def __init__(self, *args: Any, tell: Tell | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tell = tell
        self._waiting = Capture(self)
        self._own = _OfThread()
        # Graphs under way, the oldest first: the tasks of each that are not over, and its calls of `run`. Those whose
        # results nobody keeps are to be made all the same; once they are, Dask may forget them.
        self._under_way: deque[tuple[set[Future], int]] = deque()
        # Steps a second of the graph that was over last, and when that was.
        self._pace, self._last_over = 0.0, 0.0
        # Told of when something is over.
        self._lock = threading.Condition()
        # Of sessions that are over, what waits.
        self._over: list[Capture] = []
        self._sending = threading.RLock()
        # Its thread sends what waits when something is over.
        self._sender = ThreadPoolExecutor(1, "daskdist-sender")
        self._last_send: ThreadFuture[None] | None = None

    def together(self) -> contextlib.AbstractContextManager[Capture]:
        """Send the calls noted in a ``with`` block together, or with those of the session there is."""
        self._check_open()
        current = current_session()
        return self._together() if current is None else contextlib.nullcontext(self._captured(current))

    @contextlib.contextmanager
    def _together(self) -> Iterator[Capture]:
        own = self._own
        own.depth += 1
        if self._over:
            # What was called before is made before.
            self.send_over()
        try:
            yield self._waiting
        finally:
            own.depth -= 1
        if not own.depth:
            if self._num_under_way() < _MOST_GRAPHS:
                self._waiting.send()
            self.hold_back()

    def _captured(self, current: Session) -> Capture:
        found = current.captures.get(id(self))
        if found is None:
            # What was called before is made before.
            self._waiting.send()
            found = current.captures.setdefault(id(self), (self, Capture(self, current)))
        capture: Capture = found[1]
        return capture

    def call(
        self,
        function: Callable[..., Any],
        handles: Sequence[Handle],
        *args: Any,
        on: str | None = None,
        is_pinned: bool = False,
        is_light: bool = False,
        is_apart: bool = False,
        name: str,
    ) -> Deferred:
        with self.together() as capture:
            return capture.add(function, handles, args, on, name, is_pinned=is_pinned, is_apart=is_apart)

    def send(self, parts: Sequence[Taken]) -> None:
        """Send what was noted, as one graph if that is not too large; what fails is raised by who asks for a result."""
        ready: list[Pickled] = []
        try:
            for part in parts:
                pickled = part.pickled(self._refused)
                if ready and sum(each.nbytes for each in ready) + pickled.nbytes > _LARGE_GRAPH_BYTES:
                    self._send_pickled(ready)
                    ready = []
                if pickled.taken.groups:
                    ready.append(pickled)
            if ready:
                self._send_pickled(ready)
        except BaseException as error:
            # At an interrupt too nothing is left that would wait for ever.
            for part in parts:
                part.let_go(error)
            raise

    def _refused(self, group: Group) -> Exception | None:
        # Noted before it was known that a worker is lost: there it would wait without end.
        lost = self.roster.lost
        if lost:
            is_there = group.is_pinned and not set(lost).isdisjoint(group.lanes.workers)
            if is_there or any(future.cancelled() for future in group.futures_needed()):
                return self.without_lost(group.name)
        return None

    def _send_pickled(self, parts: Sequence[Pickled]) -> None:
        failure: Exception | None = None
        try:
            self._send(parts)
        except Exception as error:
            failure = error
        for part in parts:
            part.taken.let_go(failure)

    def _send(self, parts: Sequence[Pickled]) -> None:
        self._check_open()
        joined, tasks = join(parts, self.key_of)
        found = self.client.get(placed_graph(tasks), [task.key for task in tasks], sync=False, fifo_timeout=0)
        self.futures.update(found)
        futures = iter(found)
        lanes: dict[Future, tuple[Any, list[int]]] = {}
        for each in joined:
            own = [next(futures) for _ in each.keys]
            each.set_sent(own)
            if self._tell is not None and (steps := each.steps):
                lanes |= {
                    future: (of_lane, steps) for future, of_lane in zip(own, each.groups[0].lanes.args, strict=True)
                }
        num_steps = sum(part.taken.num_steps for part in parts)
        for (groups, num_own, session), _ in parts:
            if session is not None:
                reason = sent_because() if session is current_session() else "another thread needed it"
                num_tasks = sum(len(group.lanes.workers) for group in groups)
                num_stages = 1 + max(group.stage for group in groups)
                session.sent.append(
                    Sent(num_own, num_tasks, num_stages, None if session.is_over else reason, num_steps - num_own)
                )
        self._keep_until_done(found, num_steps, lanes, [group.kept for each in joined for group in each.groups])

    def end(self, capture: Capture) -> None:
        """Send what a session has noted that is over; if there is enough under way, with what others will have."""
        with self._sending:
            capture.is_over = True
            self._over.append(capture)
        if self._is_time() or len(self._over) >= _MOST_OVER:
            self.send_over()
        self.hold_back()

    def _is_time(self) -> bool:
        # Whether sessions that are over are to be sent. Next to a graph of many steps one of fewer is not worth its
        # tasks: more of them come soon, or that one ends.
        num_graphs = self._num_under_way()
        if not num_graphs or num_graphs >= _MOST_GRAPHS:
            return not num_graphs
        num_over = sum(capture.num_steps for capture in tuple(self._over))
        with self._lock:
            return num_over >= max((number for tasks, number in self._under_way if tasks), default=0)

    def send_over(self) -> None:
        """Send what sessions have noted that are over, in their order."""
        with self._sending:
            over, self._over = self._over, []
            taken = [part for part in (capture.take() for capture in over) if part.groups]
            if taken:
                self.send(taken)

    def _send_waiting(self) -> None:
        if self._is_time():
            self.send_over()
        self._waiting.send()

    def _keep_until_done(
        self, futures: Sequence[Future], num_steps: int, lanes: dict[Future, tuple[Any, list[int]]], kept: list[Any]
    ) -> None:
        tasks = set(futures)
        with self._lock:
            self._under_way.append((tasks, num_steps))
        self.client.loop.add_callback(self._go_on_after, tasks, num_steps, lanes, kept, time.monotonic())

    async def _go_on_after(
        self,
        tasks: set[Future],
        num_steps: int,
        lanes: dict[Future, tuple[Any, list[int]]],
        kept: list[Any],
        sent_at: float,
    ) -> None:
        # Not `Future.add_done_callback`, which complains at the end of a program that does not wait.
        rest = [future for future in tasks if future not in lanes]
        await asyncio.gather(_until_over(rest), *[self._of_lane(future, *each) for future, each in lanes.items()])
        lanes.clear()
        kept.clear()
        with self._lock:
            tasks.clear()
            # One goes on where the one before it ends.
            begun, self._last_over = max(sent_at, self._last_over), time.monotonic()
            if num_steps:
                self._pace = num_steps / max(self._last_over - begun, _LEAST_S)
            self._lock.notify_all()
        # Not here, in the client's own thread: what pickles may look at results. Refused at the end of a program.
        with contextlib.suppress(RuntimeError):
            self._last_send = self._sender.submit(self._send_waiting)

    async def _of_lane(self, future: Future, of_lane: tuple[OfLane, ...], steps: list[int]) -> None:
        await _until_over([future])
        why: Exception | None = None
        if future.status == "error":
            try:
                await self.client.gather(future, asynchronous=True)
            except Exception as error:
                why = error
        elif future.status == "cancelled" and self.roster.lost:
            why = self.without_lost(future.key)
        if why is not None and self._tell is not None:
            # Others may wait for what this one was to do. With its worker lost there is nobody to tell.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._tell(of_lane, steps, why), LOOK_EVERY_S)

    def _num_under_way(self) -> int:
        with self._lock:
            while self._under_way and not self._under_way[0][0]:
                self._under_way.popleft()
            return sum(bool(tasks) for tasks, _ in self._under_way)

    def hold_back(self) -> None:
        """Wait until no more calls of `run` are under way than ``daskdist.max-steps-in-flight``.

        A graph of more than that has another one behind it all the same.
        """
        most = setting("max-steps-in-flight")
        while True:
            num_over = sum(capture.num_steps for capture in tuple(self._over))
            num_graphs = self._num_under_way() + bool(self._waiting.num_steps)
            with self._lock:
                largest = max((number for _, number in self._under_way), default=0)
                together = most
                if largest > most:
                    together = max(most, min(largest, _MOST_TOGETHER), self._pace * _TOGETHER_S)
                num_graphs += num_over > together
                num_steps = self._waiting.num_steps + num_over + sum(number for _, number in self._under_way)
                if num_graphs <= _MOST_GRAPHS or num_steps <= most or not self._under_way:
                    return
                # It stays there, for others who wait for all that is under way.
                oldest, _ = self._under_way[0]
            self._wait_until_over(oldest)
            self._send_waiting()

    def finish(self) -> None:
        """Send what waits, and wait until all is over."""
        self.send_over()
        self._waiting.send()
        while True:
            with self._lock:
                oldest = next((tasks for tasks, _ in self._under_way if tasks), None)
            if oldest is None:
                return
            self._wait_until_over(oldest)

    def _wait_until_over(self, tasks: set[Future]) -> None:
        while True:
            with self._lock:
                if self._lock.wait_for(lambda: not tasks, LOOK_EVERY_S):
                    return
            self._check_workers()

    def go_on(self) -> None:
        """Have all that is under way come to an end where workers were lost: what needs them fails."""
        self._check_workers()
        self.finish()

    def see_there(self, futures: Iterable[Future]) -> None:
        """Refuse what needs a worker that is lost, when it is given to a call: later others of its task would fail."""
        if self.roster.lost:
            for future in futures:
                if future.cancelled():
                    raise self._gone(future.key)

    def renew(self, noted: Noted) -> None:
        """Send results to their workers anew if they are made of too many others."""
        if noted.depth >= _MOST_ANCESTORS and noted.tasks:
            # What failed, fails where it is used.
            with contextlib.suppress(Exception):
                found = self.results([Deferred(noted, lane) for lane in range(len(noted.tasks))])
                workers = [task.worker for task in noted.tasks]
                placed = [self.place(value, worker) for value, worker in zip(found, workers, strict=True)]
                noted.tasks = tuple([SentTask(*each) for each in zip(placed, workers, strict=True)])
                noted.place, noted.depth = None, 0

    def shorten(self, noted: Noted) -> None:
        """Wait for a call that was sent if it is made of too many others."""
        if noted.depth >= _MOST_ANCESTORS:
            # What failed, or is lost, is no more to be waited for either.
            with contextlib.suppress(Exception):
                super().wait([task.future for task in noted.tasks])

    def is_to_be_had(self, handle: Handle) -> bool:
        """Whether a result is there, or will be unless its call fails."""
        if isinstance(handle, Deferred):
            noted = handle.noted
            if noted.group is not None:
                return True
            if not noted.tasks:
                return False
            handle = noted.tasks[handle.lane].future
        return handle.status in ("pending", "finished")

    # --- what is known of results ---

    def sent(self, handles: Sequence[Handle], reason: str | None = None) -> list[Future]:
        """The futures that results are part of, sent now if they were not."""
        if any(isinstance(handle, Deferred) and handle.noted.group is not None for handle in handles):
            with sending_because(reason):
                for handle in handles:
                    group = handle.noted.group if isinstance(handle, Deferred) else None
                    if group is not None:
                        group.capture.send()
        return [handle.future if isinstance(handle, Deferred) else handle for handle in handles]

    def see(self, handles: Sequence[Handle], step: Sequence[Handle]) -> None:
        """See that there are results, of one step as a whole: what one call of it has raised is raised at once."""
        asked = [self.call(_see, [handle], name="see") for handle in handles]
        self.sent(asked, "a result was looked at")
        self._until_over_or_failed(step)
        self.results(asked)

    def results(self, handles: Sequence[Handle]) -> list[Any]:
        try:
            return self._results(handles)
        except BaseException:
            # A lost worker may be what it comes of.
            self.roster.in_doubt = True
            raise

    def _results(self, handles: Sequence[Handle]) -> list[Any]:
        futures = self.sent(handles, "a result was looked at")
        self._until_over_or_failed(handles)
        there = self._fetched([handle for handle in handles if not _is_here(handle)])
        return [
            _value_of(handle) if _is_here(handle) else _part_of(there[future.key], handle)
            for handle, future in zip(handles, futures, strict=True)
        ]

    def _until_over_or_failed(self, handles: Sequence[Handle]) -> None:
        # A task is over for Dask, too, where what it called has raised. Who waits for others looks into what is there.
        futures = dict(zip(handles, self.sent(handles), strict=True))
        if len(futures) < 2 or not any(future.status == "pending" for future in futures.values()):
            return
        # What is no longer there is told of by who waits for the rest.
        with contextlib.suppress(FuturesCancelledError), self.waiting(list(futures.values())) as are_over:
            self._look_for_failures(futures, are_over)

    def _look_for_failures(self, futures: dict[Handle, Future], are_over: Callable[[float], bool]) -> None:
        # Of each task, in one look, the calls that are meant.
        places: dict[str, list[int]] = {}
        for handle, future in futures.items():
            if isinstance(handle, Deferred) and handle.noted.place is not None:
                places.setdefault(future.key, []).append(handle.noted.place)
        looks: dict[str, Future] = {}
        seen: set[str] = set()
        num_waits = 0
        while not are_over(_PATIENCE_S):
            num_waits += 1
            if num_waits % _LOOK_EVERY == 0:
                self._check_workers()
            for future in futures.values():
                if future.status == "error":
                    future.result()
                if future.status == "finished" and future.key in places and future.key not in looks:
                    looks[future.key] = self._submit("failure", None, failure_of, future, places[future.key])
            for key, look in looks.items():
                if look.status == "finished" and key not in seen:
                    seen.add(key)
                    if (failure := super().results([look])[0]) is not None:
                        raise failure.error()

    def _fetched(self, handles: Sequence[Handle]) -> dict[str, Any]:
        # By key, what tasks gave; of those that gave much, what is asked for.
        asked: dict[str, Future] = {}
        wanted: dict[str, list[int]] = {}
        for handle in handles:
            if isinstance(handle, Deferred):
                asked[handle.future.key] = handle.future
                if handle.task.num_outputs > 1 and handle.noted.place is not None:
                    wanted.setdefault(handle.future.key, []).append(handle.noted.place)
            else:
                asked[handle.key] = handle
        for key, numbers in wanted.items():
            asked[key] = self._submit("pick", None, some_outputs, [asked[key]], sorted(set(numbers)), _TOGETHER_BYTES)
        found = dict(zip(asked, super().results(list(asked.values())), strict=True))
        for handle in handles:
            if isinstance(handle, Deferred) and handle.future.key in wanted:
                made = found[handle.future.key].made
                for ref in handle.task.calls:
                    other = ref()
                    if other is not None and other.place in made:
                        other.values[handle.lane] = made[other.place]
        return found

    def wait(self, handles: Sequence[Handle]) -> None:
        super().wait(self.sent(handles, "a result was waited for"))

    def as_futures(self, handles: Sequence[Handle], picks: Picks) -> tuple[Sequence[Future], Picks]:
        futures, _ = super().as_futures(self.sent(handles, "a result was made part of a Dask graph"), picks)
        places = [handle.noted.place if isinstance(handle, Deferred) else None for handle in handles]
        found = []
        for number, pick in picks:
            place = places[number]
            found.append((number, pick if place is None else PickOutput(place, pick)))
        return futures, found

    def is_done(self, handle: Handle) -> bool:
        return super().is_done(self.sent([handle], "a result was asked after")[0])

    def stop_sending(self, within_s: float) -> None:
        """Send nothing more by itself; what is being sent just now is waited for, so many seconds at most."""
        self._sender.shutdown(wait=False, cancel_futures=True)
        if self._last_send is not None:
            futures_wait([self._last_send], within_s)

    def close(self) -> None:
        super().close()
        self._sender.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._under_way.clear()


def _see(results: Sequence[Any]) -> None:
    """See that there is a result."""


async def _until_over(futures: Sequence[Future]) -> None:
    with contextlib.suppress(FuturesCancelledError):
        await _wait(list(futures))


def _is_here(handle: Handle) -> bool:
    return isinstance(handle, Deferred) and handle.lane in handle.noted.values


def _value_of(handle: Deferred) -> Any:
    value = handle.noted.values[handle.lane]
    if isinstance(value, Failure):
        raise value.error()
    return value


def _part_of(result: Any, handle: Handle) -> Any:
    if not isinstance(handle, Deferred) or handle.noted.place is None:
        return result
    if isinstance(result, Outputs):
        return result[handle.noted.place]
    return _value_of(handle)
