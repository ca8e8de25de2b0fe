"""Calls that are noted, to go to a cluster together: with as few tasks as their order allows.

Calls of one replica that need nothing from another are one task. Where one needs what another replica made, a new
stage begins: a task for each replica again, which waits for those of the stage before that it needs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from distributed import Future

from daskdist.config import to_send
from daskdist.errors import ArgumentError
from daskdist.execute.callers import Handle
from daskdist.execute.deferred import NOTED, Deferred, Noted, Results
from daskdist.execute.fused import OWN, Call, OfLane, pickled_calls
from daskdist.execute.pickling import culprit
from daskdist.execute.session import Session

# What calls on all lanes are given: a handle for all, a tuple of one for each, or the `Results` of another call.
Column: TypeAlias = Any
# The `Input` of a call; a list of them where that differs from lane to lane.
Inputs: TypeAlias = Any


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
    args: tuple[tuple[OfLane, ...], ...]


@dataclass(eq=False)
class Group:
    """Calls that will be one task, or one on each lane.

    Parameters
    ----------
    name
        What the keys begin with.
    place
        What groups have in common that can be one.
    stage
        How many tasks of the same graph come before it at least.
    """

    capture: Capture
    name: str
    place: Hashable
    lanes: Lanes
    stage: int
    is_pinned: bool
    # Those that differ from lane to lane are lists.
    calls: list[Call | list[Call]] = field(default_factory=list)
    # Futures, parts of groups of the same graph, or all parts of one; and tuples of one of those, or None, a lane.
    needs: list[Any] = field(default_factory=list)
    noted: list[weakref.ref[Noted]] = field(default_factory=list)
    # What calls on all lanes are told apart by, where somebody is to know that they were not made.
    steps: list[int] = field(default_factory=list)
    # What is to live until they are over.
    kept: list[Any] = field(default_factory=list)
    # Calls on all lanes of other groups that are made before its own, which are given nothing of them.
    after: list[Noted] = field(default_factory=list)
    # The numbers of calls whose results other groups take.
    taken: set[int] = field(default_factory=set)
    deepest: int = 0
    # By identity, what calls were given, and where it comes from.
    inputs: dict[Any, tuple[Any, Inputs]] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """What a result of it has for its own depth."""
        return self.deepest + len(self.needs) + len(self.after)

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

    def there(self) -> list[Noted]:
        """What was noted of the calls of which somebody has a result."""
        return [noted for ref in self.noted if (noted := ref()) is not None]

    def wanted(self) -> list[int]:
        """The numbers of the calls whose results somebody has a use for."""
        return [number for number, ref in enumerate(self.noted) if number in self.taken or ref() is not None]

    def let_go(self, failure: BaseException | None) -> None:
        """Have it sent, or fail."""
        for noted in self.there():
            noted.group, noted.error = None, failure

    def groups_needed(self) -> Iterator[Group]:
        """Groups of the same graph of which it needs results."""
        for need in self.needs:
            for each in need if type(need) is tuple else (need,):
                if type(each) is Part:
                    yield each.group
                elif type(each) is Group:
                    yield each

    def futures_needed(self) -> Iterator[Future]:
        """What it needs of other graphs."""
        for need in self.needs:
            for each in need if type(need) is tuple else (need,):
                if isinstance(each, Future):
                    yield each

    def has_its_needs(self) -> bool:
        """Whether what it needs of other graphs is there."""
        return all(each.status == "finished" for each in self.futures_needed())

    def pickled(self) -> Sequence[bytes]:
        """The calls of each lane, as `run_calls` takes them."""
        num_lanes = len(self.lanes.workers)
        try:
            if not any(type(call) is list for call in self.calls):
                return [pickled_calls(self.calls)] * num_lanes  # type: ignore[arg-type]
            return [
                pickled_calls([call[lane] if type(call) is list else call for call in self.calls])  # type: ignore[misc]
                for lane in range(num_lanes)
            ]
        except Exception as error:
            raise ArgumentError(
                f"{self.name}: what it is called with does not pickle{culprit(self.calls)}: {error}"
            ) from error


class Part(NamedTuple):
    """The task of one lane of a group."""

    group: Group
    lane: int


class Taken(NamedTuple):
    """What was noted until it is sent.

    Parameters
    ----------
    groups
        The calls.
    num_steps
        Calls of `run` among them.
    session
        What they were captured in; None for calls outside of sessions.
    """

    groups: list[Group]
    num_steps: int
    session: Session | None

    def let_go(self, failure: BaseException | None) -> None:
        """Have it sent, or fail."""
        for group in self.groups:
            group.let_go(failure)

    def pickled(self, refused: Callable[[Group], Exception | None]) -> Pickled:
        """What can be sent of it; what is refused or does not pickle fails, and what was to be made of that."""
        failed: dict[int, Exception] = {}
        found: dict[int, Sequence[bytes]] = {}
        for group in sorted(self.groups, key=lambda each: each.stage):
            try:
                if (why := refused(group)) is not None:
                    raise why
                for need in group.groups_needed():
                    if id(need) in failed:
                        raise failed[id(need)]
                found[id(group)] = group.pickled()
            except Exception as error:
                failed[id(group)] = error
                group.let_go(error)
        groups = [group for group in self.groups if id(group) in found]
        return Pickled(self._replace(groups=groups), [found[id(group)] for group in groups])


class Pickled(NamedTuple):
    """What is sent.

    Parameters
    ----------
    taken
        The calls.
    pickled
        Of each group those of each lane.
    """

    taken: Taken
    pickled: list[Sequence[bytes]]

    @property
    def nbytes(self) -> int:
        """The size of it."""
        return sum(sum(map(len, set(lanes))) for lanes in self.pickled)

    @property
    def is_certain(self) -> bool:
        """Whether all is there that its calls need: what fails to come would fail all that is in one task with them."""
        return all(group.has_its_needs() for group in self.taken.groups)


class Sender(Protocol):
    """Who sends what is noted."""

    def send(self, parts: Sequence[Taken]) -> None:
        """Send it as one graph."""

    def send_over(self) -> None:
        """Send what sessions have noted that are over."""

    def see_there(self, futures: Iterable[Future]) -> None:
        """Refuse what needs a worker that is lost."""

    def renew(self, noted: Noted) -> None:
        """Send results anew if they are made of too many others."""

    def shorten(self, noted: Noted) -> None:
        """Wait for a call that was sent if it is made of too many others."""


class Capture:
    """Calls that have not been sent yet.

    Parameters
    ----------
    sender
        Who sends them.
    session
        What they are captured in; None for calls outside of sessions.
    """

    def __init__(self, sender: Sender, session: Session | None = None) -> None:
        self._sender = sender
        self._session = session
        # Whether it waits for others, to be sent with them.
        self.is_over = False
        self._clear()
        # Others may need what is noted here, and so send it.
        self._lock = threading.RLock()
        # Calls of `run` among them.
        self.num_steps = 0

    def _clear(self) -> None:
        self._groups: list[Group] = []
        # Of single calls, by where they are made and their stage.
        self._single: dict[tuple[Hashable, int], Group] = {}
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
        """Note a call, to be made in one task with others where that can be and it is not to be apart.

        `Results` among the handles stand for those of all their lanes, in order.
        """
        for each in handles:
            self._get_ready(each)
        with self._lock:
            group = self._group(handles, on, name, is_pinned=is_pinned, is_apart=is_apart)
            inputs: list[Any] = []
            for each in handles:
                if type(each) is Results:
                    inputs += self._inputs_of_all(group, each)
                else:
                    inputs.append(self._inputs(group, each))
            return Deferred(group.note(Call(function, tuple(inputs), args)))

    def add_to_all(
        self,
        function: Callable[..., Any],
        columns: Sequence[Column],
        *args: Any,
        own: Sequence[tuple[Any, ...]] | None = None,
        lanes: Lanes,
        name: str,
        step: int | None = None,
        after: Sequence[Results] = (),
        kept: Sequence[Any] = (),
    ) -> Results:
        """Note a call on all lanes, which is made on the worker of each or not at all.

        Parameters
        ----------
        function
            Called as ``function(results, *args, *args of the lane)``.
        columns
            Each a result for all lanes, a tuple of one for each, or what an earlier such call gave.
        own
            For each lane, what is given after ``args``, where that differs.
        step
            What `Capturing`'s ``tell`` is told where it is not made; None where nobody is to know.
        after
            What earlier such calls gave: it is made after those, though it is given nothing of them. It fails where one
            of their tasks does.
        kept
            What is to live until it is over.
        """
        newest = self._newest.get(lanes)
        known = newest.inputs if newest is not None else {}
        for column in columns:
            if id(column) not in known:
                self._get_ready(column)
        for each in after:
            self._get_ready_before(each.noted)
        num_lanes = len(lanes.workers)
        with self._lock:
            group = self._group_of_all(columns, lanes, name)
            for each in after:
                if self._is_to_wait_for(each.noted) and each.noted not in group.after:
                    group.after.append(each.noted)
                    group.deepest = max(group.deepest, each.noted.depth)
            if step is not None:
                group.steps.append(step)
            group.kept += kept
            inputs = [self._inputs(group, column) for column in columns]
            # Who waits for others there does so for as long as the program has it.
            settings = None if step is None else to_send()
            call: Call | list[Call]
            if own is None and not any(type(each) is list for each in inputs):
                call = Call(function, tuple(inputs), args, True, settings)
            else:
                call = [
                    Call(
                        function,
                        tuple([each[lane] if type(each) is list else each for each in inputs]),
                        args if own is None else (*args, *own[lane]),
                        True,
                        settings,
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
            # Another thread may send it now.
            group = column.noted.group
            if group is None:
                tasks = column.noted.tasks
                own = tasks if kind is Results else tasks[column.lane : column.lane + 1]
                self._sender.see_there(task.future for task in own)
                self._sender.renew(column.noted)
            elif group.capture is not self:
                # Captured in another thread, or before a function that is captured.
                group.capture.send()
        elif isinstance(column, Future):
            self._sender.see_there((column,))

    def _get_ready_before(self, noted: Noted) -> None:
        group = noted.group
        if group is None:
            self._sender.shorten(noted)
        elif group.capture is not self and (self._session is None or not group.capture.is_over):
            # What is over is sent before what is noted in a session, or with it.
            group.capture.send()

    def _is_to_wait_for(self, noted: Noted) -> bool:
        # Of calls on all lanes, whether one that comes after it has to say so. What is noted here is not being sent:
        # that takes the lock.
        group = noted.group
        if group is None:
            return any(task.future.status == "pending" for task in noted.tasks)
        # Those of a lane are made in their order.
        return group.capture is not self

    def _group(self, handles: Sequence[Handle], on: str | None, name: str, *, is_pinned: bool, is_apart: bool) -> Group:
        # Of what is not sent yet, that which comes last.
        stage, is_one = 0, True
        latest: Group | None = None
        for each in handles:
            needed: Group | None = each.noted.group if type(each) in NOTED else None
            if needed is None or (latest is not None and needed.stage < stage):
                continue
            if latest is None or needed.stage > stage:
                is_one = True
            elif needed is not latest:
                is_one = False
            stage, latest = needed.stage, needed
        if latest is not None:
            workers = latest.lanes.workers
            if is_one and not is_apart and len(workers) == 1 and (on is None or on == workers[0]):
                # With what it needs last, where it may be made too.
                return latest
            stage += 1
        place = object() if is_apart else (on, is_pinned)
        found = self._single.get((place, stage))
        if found is None:
            found = Group(self, name, place, Lanes((on,), ((),)), stage, is_pinned=is_pinned)
            self._single[place, stage] = found
            self._groups.append(found)
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
        found = self._newest[lanes] = Group(self, name, lanes, lanes, stage, is_pinned=True)
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
            return self._number(group, need), place
        # With the column, so that nothing else comes to be at its address.
        group.inputs[id(column)] = column, found
        return found

    def _inputs_of_all(self, group: Group, results: Results) -> list[Inputs]:
        # Of a single call, those of the results of all lanes.
        noted = results.noted
        own, place = noted.group, noted.place
        if own is None or own is group:
            return [self._inputs(group, each) for each in results]
        _taken(group, own, noted)
        known = group.inputs.get(id(own))
        if known is None:
            known = own, [self._number(group, Part(own, lane)) for lane in range(len(results))]
            group.inputs[id(own)] = known
        return [(number, place) for number in known[1]]

    def _number(self, group: Group, need: Any) -> int:
        # A part of one task is given by many handles.
        key = (id(need.group), need.lane) if type(need) is Part else id(need)
        there = group.inputs.get(key)
        if there is None:
            there = group.inputs[key] = need, (group.need(need), None)
        return there[1][0]

    def _inputs_of_lanes(self, group: Group, column: Sequence[Handle]) -> Inputs:
        sources = [_source(group, each, lane) for lane, each in enumerate(column)]
        number = None
        if any(need is not group for need, _ in sources):
            number = group.need(tuple([None if need is group else need for need, _ in sources]))
        found = [(OWN if need is group else number, place) for need, place in sources]
        return found if any(each != found[0] for each in found) else found[0]

    def send(self) -> None:
        """Send what there is; what is noted later goes with what is sent next."""
        if self._session is not None:
            # What was captured before is made before.
            self._sender.send_over()
        with self._lock:
            taken = self.take()
            if taken.groups:
                self._sender.send([taken])

    def take(self) -> Taken:
        """What there is, to be sent."""
        with self._lock:
            taken = Taken(self._groups, self.num_steps, self._session)
            self._clear()
            self.num_steps = 0
            return taken


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
