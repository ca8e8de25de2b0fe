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
from typing import Any, Final, NamedTuple, TypeAlias

from distributed import Future
from distributed.client import FuturesCancelledError, _wait

from daskdist.config import setting
from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.callers import Handle
from daskdist.execute.fused import (
    OWN,
    Call,
    Failure,
    Outputs,
    PickOutput,
    pickled_calls,
    run_calls,
    some_outputs,
)
from daskdist.execute.graph import Placed, placed_graph
from daskdist.execute.pickling import culprit
from daskdist.execute.session import Sent, Session, current_session, sending_because, sent_because
from daskdist.execute.submit import LOOK_EVERY_S, Picks, Submit

# What calls on all lanes are given: a handle for all, a tuple of one for each, or the `Results` of another call.
Column: TypeAlias = Any
# The `Input` of a call; a list of them where that differs from lane to lane.
Inputs: TypeAlias = Any
# Outputs of a task that are brought here together with the one that is asked for, if they are no larger.
_TOGETHER_BYTES: Final = 64 * 2**10
# Tasks that a result may be made of. Dask keeps note of all of them for as long as the result is there; one that is
# made of more is sent anew.
_MOST_ANCESTORS: Final = 400
# Graphs under way beyond which calls wait for one to be over: one that is worked on, one to go on with.
_MOST_GRAPHS: Final = 2


class Noted:
    """A call that was noted, on all its lanes."""

    __slots__ = ("__weakref__", "depth", "error", "group", "place", "tasks", "values")

    def __init__(self, group: Group, place: int) -> None:
        # Until it is sent, the calls it will be one of; then the tasks those are, one a lane.
        self.group: Group | None = group
        self.tasks: tuple[SentTask, ...] = ()
        # The number of the call in its task; None where the task gives the value itself.
        self.place: int | None = place
        # Why it could not be sent.
        self.error: Exception | None = None
        # About how many tasks Dask keeps note of for as long as it is there: those it is made of.
        self.depth = 0
        # By lane, what it gave, where that came here along with something else.
        self.values: dict[int, Any] = {}

    def task(self, lane: int) -> SentTask:
        """The task it is a call of."""
        if not self.tasks:
            raise self.error or ClusterError("this was never sent to the cluster")
        return self.tasks[lane]


class Deferred:
    """What a call will give on one lane, which goes to the cluster with others."""

    __slots__ = ("lane", "noted")

    def __init__(self, noted: Noted, lane: int = 0) -> None:
        self.noted = noted
        self.lane = lane

    @property
    def task(self) -> SentTask:
        """The task it comes of."""
        return self.noted.task(self.lane)

    @property
    def future(self) -> Future:
        """The future of its task."""
        return self.task.future


class Results(Sequence[Deferred]):
    """What a call will give, by lane."""

    __slots__ = ("_found", "_size", "noted")

    def __init__(self, noted: Noted, size: int) -> None:
        self.noted = noted
        self._size = size
        # Not kept by what is noted: that goes when nobody has a result of it any more.
        self._found: tuple[Deferred, ...] | None = None

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, lane: Any) -> Any:
        if self._found is None:
            self._found = tuple([Deferred(self.noted, each) for each in range(self._size)])
        return self._found[lane]


@dataclass(frozen=True)
class SentTask:
    """A task that was sent.

    Parameters
    ----------
    future
        Of its `Outputs`.
    worker
        The address of the worker it is to run on; None for any.
    calls
        What was noted of each of its calls, for as long as somebody has a result of it.
    num_outputs
        The calls whose results are kept.
    """

    future: Future
    worker: str | None = None
    calls: Sequence[weakref.ref[Noted]] = ()
    num_outputs: int = 1


@dataclass(frozen=True, eq=False)
class Lanes:
    """Where calls are made: the same ones on each, in their order.

    Parameters
    ----------
    workers
        The address of the worker of each; None for any.
    args
        Of each, what its calls are given after their own arguments.
    """

    workers: tuple[str | None, ...]
    args: tuple[tuple[Any, ...], ...]


@dataclass(eq=False)
class Group:
    """Calls that will be one task, or one on each lane.

    Parameters
    ----------
    name
        What the keys begin with.
    stage
        How many tasks of the same graph come before it at least.
    """

    capture: Capture
    name: str
    lanes: Lanes
    is_pinned: bool
    stage: int
    # Those that differ from lane to lane are lists.
    calls: list[Call | list[Call]] = field(default_factory=list)
    # Futures, parts of groups of the same graph, or all parts of one; and tuples of one of those, or None, a lane.
    needs: list[Any] = field(default_factory=list)
    noted: list[weakref.ref[Noted]] = field(default_factory=list)
    # The numbers of calls whose results other groups take.
    taken: set[int] = field(default_factory=set)
    deepest: int = 0
    # By identity, what calls were given, and where it comes from.
    inputs: dict[Any, tuple[Any, Inputs]] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """What a result of it has for its own depth."""
        return self.deepest + len(self.needs)

    def note(self, call: Call | list[Call]) -> Noted:
        """Have one call more."""
        noted = Noted(self, len(self.calls))
        self.calls.append(call)
        self.noted.append(weakref.ref(noted))
        return noted

    def need(self, need: Any) -> int:
        """The place of something in what the task is given."""
        self.needs.append(need)
        return len(self.needs) - 1

    def wanted(self) -> list[int]:
        """The numbers of the calls whose results somebody has a use for."""
        return [number for number, ref in enumerate(self.noted) if number in self.taken or ref() is not None]

    def pickled(self) -> Sequence[bytes]:
        """The calls of each lane, as `run_calls` takes them."""
        num_lanes = len(self.lanes.workers)
        if not any(type(call) is list for call in self.calls):
            return [pickled_calls(self.calls)] * num_lanes  # type: ignore[arg-type]
        return [
            pickled_calls([call[lane] if type(call) is list else call for call in self.calls])  # type: ignore[misc]
            for lane in range(num_lanes)
        ]


class Part(NamedTuple):
    """The task of one lane of a group."""

    group: Group
    lane: int


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
        self._clear()
        # Others may need what is noted here, and so send it.
        self._lock = threading.RLock()
        # Calls of `run` among them.
        self.num_steps = 0

    def _clear(self) -> None:
        self._groups: list[Group] = []
        # Of single calls, by where they are made and their stage.
        self._single: dict[Hashable, Group] = {}
        # Of calls on all lanes, the stage those have come to.
        self._newest: dict[Lanes, Group] = {}

    def add(
        self,
        function: Callable[..., Any],
        handles: Sequence[Handle],
        args: tuple[Any, ...],
        on: str | None,
        name: str,
        *,
        is_pinned: bool,
        is_apart: bool,
    ) -> Deferred:
        """Note a call, to be made in one task with others where that can be and it is not to be apart."""
        for each in handles:
            self._get_ready(each)
        with self._lock:
            group = self._group(handles, on, name, is_pinned=is_pinned, is_apart=is_apart)
            inputs = tuple([self._inputs(group, each) for each in handles])
            return Deferred(group.note(Call(function, inputs, args)))

    def add_to_all(
        self,
        function: Callable[..., Any],
        columns: Sequence[Column],
        args: tuple[Any, ...],
        own: Sequence[tuple[Any, ...]] | None,
        lanes: Lanes,
        name: str,
    ) -> Results:
        """Note a call on all lanes; ``own`` is what it is given on each, after ``args``, where that differs."""
        newest = self._newest.get(lanes)
        known = newest.inputs if newest is not None else {}
        for column in columns:
            if id(column) not in known:
                self._get_ready(column)
        num_lanes = len(lanes.workers)
        with self._lock:
            group = self._group_of_all(columns, lanes, name)
            inputs = [self._inputs(group, column) for column in columns]
            call: Call | list[Call]
            if own is None and not any(type(each) is list for each in inputs):
                call = Call(function, tuple(inputs), args, True)
            else:
                call = [
                    Call(
                        function,
                        tuple([each[lane] if type(each) is list else each for each in inputs]),
                        args if own is None else (*args, *own[lane]),
                        True,
                    )
                    for lane in range(num_lanes)
                ]
            return Results(group.note(call), num_lanes)

    def _get_ready(self, column: Column) -> None:
        kind = type(column)
        if kind is tuple:
            for each in column:
                self._get_ready(each)
        elif kind is Deferred or kind is Results:
            noted = column.noted
            if noted.group is None:
                self.caller.renew(noted)
            elif noted.group.capture is not self:
                # Captured in another thread, or before a function that is captured.
                noted.group.capture.send()

    def _group(self, handles: Sequence[Handle], on: str | None, name: str, *, is_pinned: bool, is_apart: bool) -> Group:
        # Of what is not sent yet, that which comes last.
        stage, latest, is_one = 0, None, True
        for each in handles:
            needed = each.noted.group if type(each) is Deferred else None
            if needed is None or (latest is not None and needed.stage < stage):
                continue
            is_one = latest is None or needed is latest or needed.stage > stage
            stage, latest = needed.stage, needed
        if latest is not None:
            workers = latest.lanes.workers
            if is_one and not is_apart and len(workers) == 1 and (on is None or on == workers[0]):
                # With what it needs last, where it may be made too.
                return latest
            stage += 1
        place = (on, is_pinned, stage)
        found = None if is_apart else self._single.get(place)
        if found is None:
            found = self._new_group(name, Lanes((on,), ((),)), stage, is_pinned=is_pinned)
            if not is_apart:
                self._single[place] = found
        return found

    def _group_of_all(self, columns: Sequence[Column], lanes: Lanes, name: str) -> Group:
        newest = self._newest.get(lanes)
        known = newest.inputs if newest is not None else {}
        stage = 0
        for column in columns:
            if id(column) not in known:
                stage = max(stage, _stage_after(column, lanes))
        if newest is not None and newest.stage >= stage:
            # Calls of a lane are made in their order.
            return newest
        found = self._newest[lanes] = self._new_group(name, lanes, stage, is_pinned=True)
        return found

    def _new_group(self, name: str, lanes: Lanes, stage: int, *, is_pinned: bool) -> Group:
        found = Group(self, name, lanes, is_pinned, stage)
        self._groups.append(found)
        return found

    def _inputs(self, group: Group, column: Column) -> Inputs:
        known = group.inputs.get(id(column))
        if known is not None:
            return known[1]
        kind = type(column)
        if kind is Results:
            noted = column.noted
            own = noted.group
            if own is group:
                return OWN, noted.place
            if own is not None and own.lanes is group.lanes:
                found: Inputs = group.need(_taken(group, own, noted)), noted.place
            else:
                found = self._inputs_of_lanes(group, tuple(column))
        elif kind is tuple:
            found = self._inputs_of_lanes(group, column)
            if any(type(each) is Deferred and each.noted.group is group for each in column):
                # What is kept here counts as wanted.
                return found
        else:
            need, place = _source(group, column, 0 if len(group.lanes.workers) == 1 else None)
            if need is group:
                return OWN, place
            # A part of one task is given by many handles.
            key = (id(need.group), need.lane) if type(need) is Part else id(need)
            there = group.inputs.get(key)
            number = group.need(need) if there is None else there[1][0]
            group.inputs[key] = need, (number, None)
            return number, place
        # With the column, so that nothing else comes to be at its address.
        group.inputs[id(column)] = column, found
        return found

    def _inputs_of_lanes(self, group: Group, column: Sequence[Handle]) -> Inputs:
        sources = [_source(group, each, lane) for lane, each in enumerate(column)]
        number = None
        if any(need is not group for need, _ in sources):
            number = group.need(tuple([None if need is group else need for need, _ in sources]))
        found = [(OWN if need is group else number, place) for need, place in sources]
        return found if any(each != found[0] for each in found) else found[0]

    def send(self) -> None:
        """Send what there is; what is noted later goes with what is sent next."""
        with self._lock:
            groups = self._groups
            self._clear()
            num_steps, self.num_steps = self.num_steps, 0
            if groups:
                self.caller.send(groups, num_steps, self._session)


def _stage_after(column: Column, lanes: Lanes) -> int:
    # The first stage in which calls on all lanes can have it.
    kind = type(column)
    if kind is Results or kind is Deferred:
        group = column.noted.group
        if group is None:
            return 0
        is_own = group.lanes is lanes and (kind is Results or len(lanes.workers) == 1)
        return group.stage + (not is_own)  # type: ignore[no-any-return]
    if kind is tuple:
        return max((_stage_of_lane(each, lane, lanes) for lane, each in enumerate(column)), default=0)
    return 0


def _stage_of_lane(handle: Handle, lane: int, lanes: Lanes) -> int:
    group = handle.noted.group if type(handle) is Deferred else None
    if group is None:
        return 0
    return group.stage + (group.lanes is not lanes or handle.lane != lane)


def _source(group: Group, handle: Handle, lane: int | None) -> tuple[Any, int | None]:
    # What a task needs to have a result, and its place in that; the group itself, if that makes it on the lane.
    if type(handle) is not Deferred:
        return handle, None
    noted = handle.noted
    own = noted.group
    if own is None:
        group.deepest = max(group.deepest, noted.depth)
        return handle.future, noted.place
    if own is group and handle.lane == lane:
        return group, noted.place
    return Part(_taken(group, own, noted), handle.lane), noted.place


def _taken(group: Group, own: Group, noted: Noted) -> Group:
    own.taken.add(noted.place)  # type: ignore[arg-type]
    group.deepest = max(group.deepest, own.depth)
    return own


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
        # Told of when something is over.
        self._lock = threading.Condition()
        # Its thread sends what waits when something is over.
        self._sender = ThreadPoolExecutor(1, "daskdist-sender")

    def together(self) -> contextlib.AbstractContextManager[Capture]:
        """Send the calls made in a ``with`` block together, or with those of the session there is."""
        current = current_session()
        return self._together() if current is None else contextlib.nullcontext(self._captured(current))

    @contextlib.contextmanager
    def _together(self) -> Iterator[Capture]:
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
        is_apart: bool = False,
        name: str,
    ) -> Deferred:
        self._check_open()
        with self.together() as capture:
            return capture.add(function, handles, args, on, name, is_pinned=is_pinned, is_apart=is_apart)

    def call_on_all(
        self,
        function: Callable[..., Any],
        columns: Sequence[Column],
        *args: Any,
        own: Sequence[tuple[Any, ...]] | None = None,
        lanes: Lanes,
        name: str,
    ) -> Results:
        """Make a call on all lanes, each on its worker or not at all.

        Parameters
        ----------
        function
            Called as ``function(results, *args, *args of the lane)``.
        columns
            Each a result for all lanes, a tuple of one for each, or what an earlier such call gave.
        own
            For each lane, what is given after ``args``.
        """
        self._check_open()
        with self.together() as capture:
            return capture.add_to_all(function, columns, args, own, lanes, name)

    def send(self, groups: Sequence[Group], num_steps: int, session: Session | None) -> None:
        """Send the tasks of some groups as one graph; what hinders that is raised by whoever asks for a result."""
        failure: Exception | None = None
        try:
            self._send(groups, num_steps, session)
        except Exception as error:
            failure = error
        for group in groups:
            for ref in group.noted:
                noted = ref()
                if noted is not None:
                    noted.group, noted.error = None, failure

    def _send(self, groups: Sequence[Group], num_steps: int, session: Session | None) -> None:
        self._check_open()
        keys = {id(group): [self.key_of(group.name) for _ in group.lanes.workers] for group in groups}
        wanted = [group.wanted() for group in groups]
        tasks = []
        for group, numbers in zip(groups, wanted, strict=True):
            try:
                pickled = group.pickled()
            except Exception as error:
                raise ArgumentError(
                    f"{group.name}: what it is called with does not pickle{culprit(group.calls)}: {error}"
                ) from error
            for lane, (worker, own) in enumerate(zip(group.lanes.workers, group.lanes.args, strict=True)):
                needs = [_on_lane(need, lane, keys) for need in group.needs]
                args = (pickled[lane], numbers, own)
                tasks.append(Placed(keys[id(group)][lane], needs, run_calls, args, worker, group.is_pinned))
        found = self.client.get(placed_graph(tasks), [task.key for task in tasks], sync=False, fifo_timeout=0)
        self.futures.update(found)
        futures = iter(found)
        for group, numbers in zip(groups, wanted, strict=True):
            sent = tuple([SentTask(next(futures), each, group.noted, len(numbers)) for each in group.lanes.workers])
            for ref in group.noted:
                noted = ref()
                if noted is not None:
                    noted.tasks, noted.depth = sent, group.depth
        if session is not None:
            num_stages = 1 + max(group.stage for group in groups)
            reason = sent_because() if session is current_session() else "another thread needed it"
            session.sent.append(Sent(num_steps, len(tasks), num_stages, reason))
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
        with self._lock:
            tasks.clear()
            self._lock.notify_all()
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
            self._wait_until_over(oldest)
            self._waiting.send()

    def finish(self) -> None:
        """Send what waits, and wait until all is over."""
        self._waiting.send()
        while True:
            with self._lock:
                if not self._under_way:
                    return
                tasks, _ = self._under_way.popleft()
            self._wait_until_over(tasks)

    def _wait_until_over(self, tasks: set[Future]) -> None:
        while True:
            with self._lock:
                if self._lock.wait_for(lambda: not tasks, LOOK_EVERY_S):
                    return
            self._check_workers()

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

    def close(self) -> None:
        super().close()
        self._sender.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._under_way.clear()


def _on_lane(need: Any, lane: int, keys: dict[int, list[str]]) -> Any:
    # What the task of a lane needs: a future, a key of the same graph, or nothing.
    if type(need) is tuple:
        need = need[lane]
    if type(need) is Group:
        return keys[id(need)][lane]
    return keys[id(need.group)][need.lane] if type(need) is Part else need


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
