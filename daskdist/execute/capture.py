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
from dataclasses import dataclass, field
from typing import Any, Final

import cloudpickle
from distributed import Future

from daskdist.config import setting
from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.callers import Handle
from daskdist.execute.fused import OWN, Call, Failure, Input, Outputs, PickOutput, run_calls, some_outputs
from daskdist.execute.graph import Placed, placed_graph
from daskdist.execute.session import Sent, current_session, sending_because, sent_because
from daskdist.execute.submit import Picks, Submit

_NOT_HERE: Final = object()
# Outputs of a task that are brought here together with the one that is asked for, if they are no larger.
_TOGETHER_BYTES: Final = 64 * 2**10
# Tasks that a result may be made of, one after the other. Dask keeps note of all of them for as long as the result is
# there; one that is made of more is sent anew.
_MOST_ANCESTORS: Final = 200


class Deferred:
    """What a call will give that goes to the cluster with others."""

    __slots__ = ("__weakref__", "depth", "group", "place", "task", "value")

    def __init__(self, group: Group, place: int) -> None:
        # Until it is sent, the calls it will be one of; then the task they are.
        self.group: Group | None = group
        self.task: SentTask | None = None
        # The number of the call in its task; None where the task gives the value itself.
        self.place: int | None = place
        # Tasks it is made of, one after the other.
        self.depth = 0
        # What it gave, where that came here along with something else.
        self.value: Any = _NOT_HERE

    @property
    def future(self) -> Future:
        """The future of its task."""
        if self.task is None:
            raise ClusterError("this was never sent to the cluster, as what it was to be called with does not pickle")
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
    stage
        How many tasks of the same graph come before it at least.
    """

    capture: Capture
    name: str
    worker: str | None
    is_pinned: bool
    stage: int
    calls: list[Call] = field(default_factory=list)
    # Futures, and groups of the same graph.
    needs: list[Any] = field(default_factory=list)
    results: list[weakref.ref[Deferred]] = field(default_factory=list)
    # The numbers of calls whose results other groups take.
    taken: set[int] = field(default_factory=set)
    depth: int = 1
    _numbers: dict[int, int] = field(default_factory=dict)

    def number_of(self, need: Any) -> int:
        """The place of a future or a group in what the task is given."""
        number = self._numbers.setdefault(id(need), len(self.needs))
        if number == len(self.needs):
            self.needs.append(need)
        return number

    def wanted(self) -> list[int]:
        """The numbers of the calls whose results somebody has a use for."""
        return [number for number, ref in enumerate(self.results) if number in self.taken or ref() is not None]


class Capture:
    """Calls that have not been sent yet.

    Parameters
    ----------
    caller
        Who sends them.
    """

    def __init__(self, caller: Capturing) -> None:
        self._caller = caller
        self._groups: dict[Hashable, Group] = {}
        # Others may need what is noted here, and so send it.
        self._lock = threading.RLock()
        # Calls of `run` among them.
        self.num_steps = 0

    def add(
        self,
        function: Callable[..., Any],
        handles: Sequence[Handle],
        args: tuple[Any, ...],
        *,
        on: str | None,
        is_pinned: bool,
        lane: Hashable,
        name: str,
    ) -> Deferred:
        """Note a call, to be made in one task with others of its lane where that can be."""
        handles = [self._caller.renewed(handle) for handle in handles]
        for each in handles:
            if isinstance(each, Deferred) and each.group is not None and each.group.capture is not self:
                # Captured in another thread, which goes on with what it has.
                each.group.capture.send()
        with self._lock:
            group = self._group(handles, on, is_pinned, lane, name)
            call = Call(function, tuple(self._input(group, each) for each in handles), args)
            deferred = Deferred(group, len(group.calls))
            group.calls.append(call)
            group.results.append(weakref.ref(deferred))
            return deferred

    def _group(self, handles: Sequence[Handle], on: str | None, is_pinned: bool, lane: Hashable, name: str) -> Group:
        needed = [each.group for each in handles if isinstance(each, Deferred) and each.group is not None]
        last = max((group.stage for group in needed), default=0)
        latest = {id(group): group for group in needed if group.stage == last}
        if lane is None and len(latest) == 1:
            # With what it needs last, if that is where it may be made.
            (group,) = latest.values()
            if on in (None, group.worker):
                return group
        place = (on, lane, is_pinned)
        own = self._groups.get((*place, last))
        stage = last + any(group is not own for group in latest.values())
        found = self._groups.get((*place, stage))
        if found is None:
            found = self._groups[*place, stage] = Group(self, name, on, is_pinned, stage)
        return found

    def _input(self, group: Group, handle: Handle) -> Input:
        if not isinstance(handle, Deferred):
            return group.number_of(handle), None
        if handle.group is group:
            return OWN, handle.place
        if handle.group is not None:
            # Of this capture too.
            handle.group.taken.add(handle.place)  # type: ignore[arg-type]
            group.depth = max(group.depth, handle.group.depth + 1)
            return group.number_of(handle.group), handle.place
        group.depth = max(group.depth, handle.depth + 1)
        return group.number_of(handle.future), handle.place

    def send(self) -> None:
        """Send what there is; what is noted later goes with what is sent next."""
        with self._lock:
            groups, self._groups = list(self._groups.values()), {}
            num_steps, self.num_steps = self.num_steps, 0
            if groups:
                self._caller.send(groups, num_steps)


class _OfThread(threading.local):
    # The calls that go together in this thread.
    capture: Capture | None = None


class Capturing(Submit):
    """Calls that go together: those of a session, or those that are made inside `together`.

    A handle is a `Deferred`. A call that raises does not end the others of its task: what it raised is raised by
    whoever asks for its result, or for one that was to be made of that.
    """

    defers = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._own = _OfThread()
        # Tasks under way, the oldest first, and the calls of `run` they are for. Those whose results nobody keeps are
        # to be made all the same; once they are, Dask may forget them.
        self._under_way: deque[tuple[set[Future], int]] = deque()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def together(self) -> Iterator[Capture]:
        """Send the calls made in a ``with`` block together, or with those of the session there is."""
        current = current_session()
        if current is not None:
            capture = current.captures.get(id(self))
            if capture is None:
                capture = current.captures[id(self)] = Capture(self)
            yield capture
            return
        if self._own.capture is not None:
            yield self._own.capture
            return
        capture = self._own.capture = Capture(self)
        try:
            yield capture
        finally:
            self._own.capture = None
            capture.send()

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
        with self.together() as capture:
            return capture.add(function, handles, args, on=on, is_pinned=is_pinned, lane=lane, name=name)

    def send(self, groups: Sequence[Group], num_steps: int) -> None:
        """Send the tasks of some groups as one graph."""
        try:
            self._send(groups, num_steps)
        finally:
            # Where it could not be, nobody is to wait for it.
            for group in groups:
                for ref in group.results:
                    deferred = ref()
                    if deferred is not None:
                        deferred.group = None

    def _send(self, groups: Sequence[Group], num_steps: int) -> None:
        self._check_open()
        keys = {id(group): self.key_of(group.name) for group in groups}
        wanted = [group.wanted() for group in groups]
        tasks = []
        for group, numbers in zip(groups, wanted, strict=True):
            try:
                pickled = cloudpickle.dumps(group.calls)
            except Exception as error:
                raise ArgumentError(f"{group.name}: what it is called with does not pickle: {error}") from error
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
        self._note(groups, num_steps)
        self._keep_until_done(found, num_steps)

    def _note(self, groups: Sequence[Group], num_steps: int) -> None:
        current = current_session()
        if current is not None:
            num_stages = 1 + max(group.stage for group in groups)
            current.sent.append(Sent(num_steps, len(groups), num_stages, sent_because()))

    def _keep_until_done(self, futures: Sequence[Future], num_steps: int) -> None:
        tasks = set(futures)
        for future in futures:
            future.add_done_callback(tasks.discard)
        too_early: list[Future] = []
        with self._lock:
            under_way = self._under_way
            under_way.append((tasks, num_steps))
            while under_way and not under_way[0][0]:
                under_way.popleft()
            # A graph of many steps has another one behind it all the same.
            if len(under_way) > 2 and sum(number for _, number in under_way) > setting("max-steps-in-flight"):
                too_early = list(under_way.popleft()[0])
        if too_early:
            super().wait(too_early)

    def renewed(self, handle: Handle) -> Handle:
        """The handle, of a result that is sent to its worker anew if it is made of too many others."""
        if isinstance(handle, Deferred) and handle.depth >= _MOST_ANCESTORS and handle.task is not None:
            # What failed, fails where it is used.
            with contextlib.suppress(Exception):
                placed = self.place(self.result(handle), handle.task.worker)
                handle.task, handle.place, handle.depth = SentTask(placed), None, 0
        return handle

    @property
    def is_capturing(self) -> bool:
        """Whether calls go together with later ones."""
        return current_session() is not None or self._own.capture is not None

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
                    if isinstance(handle, Deferred) and handle.group is not None:
                        handle.group.capture.send()
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
                    if other is not None and other.place in found[handle.future.key]:
                        other.value = found[handle.future.key][other.place]
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
