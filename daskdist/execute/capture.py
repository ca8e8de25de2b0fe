"""The caller of steps: calls that go to a cluster together, as one graph, with as few tasks as their order allows.

Calls of one replica that need nothing from another are one task. Where one needs what another replica made, a new
stage begins: a task for each replica again, which waits for those of the stage before that it needs.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from distributed import Future
from distributed.client import FuturesCancelledError, _wait

from daskdist.config import setting
from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.callers import Handle
from daskdist.execute.fused import (
    OWN,
    Call,
    Failure,
    Input,
    Outputs,
    PickOutput,
    pickled_calls,
    run_calls,
    some_outputs,
)
from daskdist.execute.graph import Placed, placed_graph
from daskdist.execute.pickling import culprit
from daskdist.execute.session import Sent, Session, current_session, sending_because, sent_because
from daskdist.execute.submit import Picks, Submit

_NOT_HERE: Final = object()
# Outputs of a task that are brought here together with the one that is asked for, if they are no larger.
_TOGETHER_BYTES: Final = 64 * 2**10
# Tasks that a result may be made of. Dask keeps note of all of them for as long as the result is there; one that is
# made of more is sent anew.
_MOST_ANCESTORS: Final = 400
# Graphs under way beyond which calls wait for one to be over: one that is worked on, one to go on with.
_MOST_GRAPHS: Final = 2


class Deferred:
    """What a call will give that goes to the cluster with others."""

    __slots__ = ("__weakref__", "depth", "error", "group", "place", "task", "value")

    def __init__(self, group: Group, place: int) -> None:
        # Until it is sent, the calls it will be one of; then the task they are.
        self.group: Group | None = group
        self.task: SentTask | None = None
        # The number of the call in its task; None where the task gives the value itself.
        self.place: int | None = place
        # Why it could not be sent.
        self.error: Exception | None = None
        # About how many tasks Dask keeps note of for as long as it is there: those it is made of.
        self.depth = 0
        # What it gave, where that came here along with something else.
        self.value: Any = _NOT_HERE

    @property
    def future(self) -> Future:
        """The future of its task."""
        if self.task is None:
            raise self.error or ClusterError("this was never sent to the cluster")
        return self.task.future


@dataclass(frozen=True, eq=False)
class SentTask:
    """A task that was sent.

    Parameters
    ----------
    future
        Of its `Outputs`.
    worker
        The address of the worker it is to run on; None for any.
    results
        Of each of its calls, for as long as somebody has it.
    num_outputs
        The calls whose results are kept.
    """

    future: Future
    worker: str | None = None
    results: Sequence[weakref.ref[Deferred]] = ()
    num_outputs: int = 1


@dataclass(eq=False)
class Group:
    """Calls that will be one task.

    Parameters
    ----------
    name
        What its key begins with.
    worker
        The address of the worker it is to run on; None for any.
    lane
        What its calls have in common, other than that.
    stage
        How many tasks of the same graph come before it at least.
    """

    capture: Capture
    name: str
    worker: str | None
    lane: Hashable
    is_pinned: bool
    stage: int
    calls: list[Call] = field(default_factory=list)
    # Futures, and groups of the same graph.
    needs: list[Any] = field(default_factory=list)
    results: list[weakref.ref[Deferred]] = field(default_factory=list)
    # The numbers of calls whose results other groups take.
    taken: set[int] = field(default_factory=set)
    deepest: int = 0
    _numbers: dict[int, int] = field(default_factory=dict)

    def number_of(self, need: Any) -> int:
        """The place of a future or a group in what the task is given."""
        needs = self.needs
        place = len(needs)
        number = self._numbers.setdefault(id(need), place)
        if number == place:
            needs.append(need)
        return number

    @property
    def depth(self) -> int:
        """What a result of it has for its own depth."""
        return self.deepest + len(self.needs)

    def wanted(self) -> list[int]:
        """The numbers of the calls whose results somebody has a use for."""
        return [number for number, ref in enumerate(self.results) if number in self.taken or ref() is not None]


class Capture:
    """Calls that have not been sent yet.

    Parameters
    ----------
    caller
        Who sends them.
    session
        What they are captured in; None for calls outside of sessions.
    """

    def __init__(self, caller: Capturing, session: Session | None = None) -> None:
        self.caller = caller
        self._session = session
        self._groups: dict[Hashable, Group] = {}
        # Of each lane on each worker, the stage it has come to.
        self._last: dict[Hashable, int] = {}
        # Others may need what is noted here, and so send it.
        self._lock = threading.RLock()
        # Calls of `run` among them.
        self.num_steps = 0

    def add(
        self,
        function: Callable[..., Any],
        handles: Sequence[Handle],
        args: tuple[Any, ...],
        on: str | None,
        lane: Hashable,
        name: str,
        *,
        is_pinned: bool,
    ) -> Deferred:
        """Note a call, to be made in one task with others of its lane where that can be."""
        for each in handles:
            if type(each) is Deferred:
                group = each.group
                if group is None:
                    self.caller.renew(each)
                elif group.capture is not self:
                    # Captured in another thread, or before a function that is captured.
                    group.capture.send()
        with self._lock:
            group = self._group(handles, on, lane, name, is_pinned=is_pinned)
            deferred = Deferred(group, len(group.calls))
            inputs = tuple([self._input(group, each) for each in handles])
            group.calls.append(Call(function, inputs, args))
            group.results.append(weakref.ref(deferred))
            return deferred

    def _group(self, handles: Sequence[Handle], on: str | None, lane: Hashable, name: str, *, is_pinned: bool) -> Group:
        # Of what is not sent yet, that which comes last.
        stage, latest, is_one = 0, None, True
        for each in handles:
            needed = each.group if type(each) is Deferred else None
            if needed is None or (latest is not None and needed.stage < stage):
                continue
            is_one = latest is None or needed is latest or needed.stage > stage
            stage, latest = needed.stage, needed
        # Calls of a lane are made in their order.
        place = (on, lane, is_pinned)
        last = 0 if lane is None else self._last.get(place, 0)
        if latest is not None:
            if is_one and (on is None or on == latest.worker) and lane in (None, latest.lane) and stage >= last:
                # With what it needs last, where it may be made too.
                return latest
            stage += 1
        stage = max(stage, last)
        found = self._groups.get((place, stage))
        if found is None:
            found = self._groups[place, stage] = Group(self, name, on, lane, is_pinned, stage)
            self._last[place] = stage
        return found

    def _input(self, group: Group, handle: Handle) -> Input:
        if type(handle) is not Deferred:
            return group.number_of(handle), None
        own = handle.group
        if own is group:
            return OWN, handle.place
        if own is not None:
            # Of this capture too.
            own.taken.add(handle.place)  # type: ignore[arg-type]
            group.deepest = max(group.deepest, own.depth)
            return group.number_of(own), handle.place
        if handle.depth > group.deepest:
            group.deepest = handle.depth
        return group.number_of(handle.future), handle.place

    def send(self) -> None:
        """Send what there is; what is noted later goes with what is sent next."""
        with self._lock:
            groups, self._groups, self._last = list(self._groups.values()), {}, {}
            num_steps, self.num_steps = self.num_steps, 0
            if groups:
                self.caller.send(groups, num_steps, self._session)


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
    """

    defers = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting = Capture(self)
        self._own = _OfThread()
        # Graphs under way, the oldest first: the tasks of each that are not over, and its calls of `run`. Those whose
        # results nobody keeps are to be made all the same; once they are, Dask may forget them.
        self._under_way: deque[tuple[set[Future], int]] = deque()
        self._lock = threading.Lock()
        # Its thread sends what waits when something is over.
        self._sender = ThreadPoolExecutor(1, "daskdist-sender")

    @contextlib.contextmanager
    def together(self) -> Iterator[Capture]:
        """Send the calls made in a ``with`` block together, or with those of the session there is."""
        current = current_session()
        if current is not None:
            yield self._captured(current)
            return
        own = self._own
        own.depth += 1
        try:
            yield self._waiting
        finally:
            own.depth -= 1
        if not own.depth:
            if self._num_under_way() < _MOST_GRAPHS:
                self._waiting.send()
            self.hold_back()

    def _captured(self, current: Session) -> Capture:
        capture: Capture | None = current.captures.get(id(self))
        if capture is None:
            # What was called before is made before.
            self._waiting.send()
            capture = current.captures[id(self)] = Capture(self, current)
        return capture

    def call(
        self,
        function: Callable[..., Any],
        handles: Sequence[Handle],
        *args: Any,
        on: str | None = None,
        is_pinned: bool = False,
        is_light: bool = False,
        lane: Hashable = None,
        name: str,
    ) -> Handle:
        self._check_open()
        if (current := current_session()) is not None:
            return self._captured(current).add(function, handles, args, on, lane, name, is_pinned=is_pinned)
        with self.together() as capture:
            return capture.add(function, handles, args, on, lane, name, is_pinned=is_pinned)

    def send(self, groups: Sequence[Group], num_steps: int, session: Session | None) -> None:
        """Send the tasks of some groups as one graph; what hinders that is raised by whoever asks for a result."""
        failure: Exception | None = None
        try:
            self._send(groups, num_steps, session)
        except Exception as error:
            failure = error
        for group in groups:
            for ref in group.results:
                deferred = ref()
                if deferred is not None:
                    deferred.group, deferred.error = None, failure

    def _send(self, groups: Sequence[Group], num_steps: int, session: Session | None) -> None:
        self._check_open()
        keys = {id(group): self.key_of(group.name) for group in groups}
        wanted = [group.wanted() for group in groups]
        tasks = []
        for group, numbers in zip(groups, wanted, strict=True):
            try:
                pickled = pickled_calls(group.calls)
            except Exception as error:
                raise ArgumentError(
                    f"{group.name}: what it is called with does not pickle{culprit(group.calls)}: {error}"
                ) from error
            needs = [keys[id(need)] if isinstance(need, Group) else need for need in group.needs]
            key = keys[id(group)]
            tasks.append(Placed(key, needs, run_calls, (pickled, numbers), group.worker, group.is_pinned))
        found = self.client.get(placed_graph(tasks), list(keys.values()), sync=False, fifo_timeout=0)
        for group, future, numbers in zip(groups, found, wanted, strict=True):
            self.futures.add(future)
            task = SentTask(future, group.worker, group.results, len(numbers))
            for ref in group.results:
                deferred = ref()
                if deferred is not None:
                    deferred.task, deferred.depth = task, group.depth
        if session is not None:
            num_stages = 1 + max(group.stage for group in groups)
            reason = sent_because() if session is current_session() else "another thread needed it"
            session.sent.append(Sent(num_steps, len(groups), num_stages, reason))
        self._keep_until_done(found, num_steps)

    def _keep_until_done(self, futures: Sequence[Future], num_steps: int) -> None:
        tasks = set(futures)
        with self._lock:
            self._under_way.append((tasks, num_steps))
        self.client.loop.add_callback(self._go_on_after, tasks)

    async def _go_on_after(self, tasks: set[Future]) -> None:
        # Not `Future.add_done_callback`, which complains at the end of a program that does not wait.
        with contextlib.suppress(FuturesCancelledError):
            await _wait(list(tasks))
        tasks.clear()
        # Not here, in the client's own thread: what pickles may look at results. Refused at the end of a program.
        with contextlib.suppress(RuntimeError):
            self._sender.submit(self._waiting.send)

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
            num_graphs = self._num_under_way() + bool(self._waiting.num_steps)
            with self._lock:
                num_steps = self._waiting.num_steps + sum(number for _, number in self._under_way)
                if num_graphs <= _MOST_GRAPHS or num_steps <= most or not self._under_way:
                    return
                oldest, _ = self._under_way.popleft()
            super().wait(list(oldest))
            self._waiting.send()

    def finish(self) -> None:
        """Send what waits, and wait until all is over."""
        self._waiting.send()
        while True:
            with self._lock:
                if not self._under_way:
                    return
                tasks, _ = self._under_way.popleft()
            super().wait(list(tasks))

    def renew(self, handle: Deferred) -> None:
        """Send a result to its worker anew if it is made of too many others."""
        if handle.depth >= _MOST_ANCESTORS and handle.task is not None:
            # What failed, fails where it is used.
            with contextlib.suppress(Exception):
                placed = self.place(self.result(handle), handle.task.worker)
                handle.task, handle.place, handle.depth = SentTask(placed), None, 0

    def is_to_be_had(self, handle: Handle) -> bool:
        """Whether a result is there, or will be unless its call fails."""
        if isinstance(handle, Deferred):
            if handle.group is not None:
                return True
            if handle.task is None:
                return False
            handle = handle.task.future
        return handle.status in ("pending", "finished")

    # --- what is known of results ---

    def sent(self, handles: Sequence[Handle], reason: str | None = None) -> list[Future]:
        """The futures that results are part of, sent now if they were not."""
        if any(isinstance(handle, Deferred) and handle.group is not None for handle in handles):
            with sending_because(reason):
                for handle in handles:
                    group = handle.group if isinstance(handle, Deferred) else None
                    if group is not None:
                        group.capture.send()
        return [handle.future if isinstance(handle, Deferred) else handle for handle in handles]

    def results(self, handles: Sequence[Handle]) -> list[Any]:
        futures = self.sent(handles, "a result was looked at")
        there = self._fetched([handle for handle in handles if not _is_here(handle)])
        return [
            _value_of(handle) if _is_here(handle) else _part_of(there[future.key], handle)
            for handle, future in zip(handles, futures, strict=True)
        ]

    def _fetched(self, handles: Sequence[Handle]) -> dict[str, Any]:
        # By key, what tasks gave; of those that gave much, what is asked for.
        asked: dict[str, Future] = {}
        wanted: dict[str, list[int]] = {}
        for handle in handles:
            if isinstance(handle, Deferred) and handle.task is not None:
                asked[handle.future.key] = handle.future
                if handle.task.num_outputs > 1 and handle.place is not None:
                    wanted.setdefault(handle.future.key, []).append(handle.place)
            else:
                asked[handle.key] = handle
        for key, numbers in wanted.items():
            asked[key] = self._submit("pick", None, some_outputs, [asked[key]], sorted(set(numbers)), _TOGETHER_BYTES)
        found = dict(zip(asked, super().results(list(asked.values())), strict=True))
        for handle in handles:
            if isinstance(handle, Deferred) and handle.task is not None and handle.future.key in wanted:
                for ref in handle.task.results:
                    other = ref()
                    if other is not None and other.place in found[handle.future.key].made:
                        other.value = found[handle.future.key].made[other.place]
        return found

    def wait(self, handles: Sequence[Handle]) -> None:
        super().wait(self.sent(handles, "a result was waited for"))

    def as_futures(self, handles: Sequence[Handle], picks: Picks) -> tuple[Sequence[Future], Picks]:
        futures, _ = super().as_futures(self.sent(handles, "a result was made part of a Dask graph"), picks)
        places = [handle.place if isinstance(handle, Deferred) else None for handle in handles]
        found = []
        for number, pick in picks:
            place = places[number]
            found.append((number, pick if place is None else PickOutput(place, pick)))
        return futures, found

    def is_done(self, handle: Handle) -> bool:
        return super().is_done(self.sent([handle], "a result was asked after")[0])

    def close(self) -> None:
        super().close()
        self._sender.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._under_way.clear()


def _is_here(handle: Handle) -> bool:
    return isinstance(handle, Deferred) and handle.value is not _NOT_HERE


def _value_of(handle: Deferred) -> Any:
    if isinstance(handle.value, Failure):
        raise handle.value.error()
    return handle.value


def _part_of(result: Any, handle: Handle) -> Any:
    if not isinstance(handle, Deferred) or handle.place is None:
        return result
    if isinstance(result, Outputs):
        return result[handle.place]
    return _value_of(handle)
