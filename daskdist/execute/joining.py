"""Tasks of calls that were noted apart: what is made in the same place, one after the other, is one task."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed import Future

from daskdist.execute.deferred import SentTask
from daskdist.execute.fused import Segment, run_calls
from daskdist.execute.graph import Placed
from daskdist.execute.noting import Group, Part, Pickled


@dataclass(eq=False)
class Joined:
    """Groups of several captures that are one task on each lane.

    Parameters
    ----------
    keys
        Of each lane.
    """

    keys: list[str]
    groups: list[Group] = field(default_factory=list)
    # For each of them its calls, pickled, by lane; and how many calls come before.
    pickled: list[Sequence[bytes]] = field(default_factory=list)
    begins: dict[int, int] = field(default_factory=dict)
    num_calls: int = 0

    def add(self, group: Group, pickled: Sequence[bytes]) -> None:
        """Have a group one more."""
        self.groups.append(group)
        self.pickled.append(pickled)
        self.begins[id(group)] = self.num_calls
        self.num_calls += len(group.calls)

    def tasks(self, joined_of: Mapping[int, Joined], before: Joined | None) -> Iterator[Placed]:
        """The task of each lane.

        Parameters
        ----------
        joined_of
            For each group there is, by identity, what it is joined to.
        before
            What is to be made before it, though it need not have what that gives.
        """

        def source(need: Any, lane: int) -> tuple[Any, int]:
            # A future, a key of the same graph, or nothing; and where in what it gives that which is meant begins.
            if type(need) is Part:
                need, lane = need
            if type(need) is not Group:
                return need, 0
            joined = joined_of[id(need)]
            return joined.keys[lane], joined.begins[id(need)]

        first = self.groups[0]
        self._wanted = [group.wanted() for group in self.groups]
        for lane, (key, worker, own) in enumerate(zip(self.keys, first.lanes.workers, first.lanes.args, strict=True)):
            needs: list[Any] = []
            segments = []
            for group, pickled, wanted in zip(self.groups, self.pickled, self._wanted, strict=True):
                begins = []
                for place, need in enumerate(group.needs):
                    found, begin = source(need[lane] if type(need) is tuple else need, lane)
                    needs.append(found)
                    if begin:
                        begins.append((place, begin))
                segments.append(Segment(pickled[lane], len(group.calls), wanted, len(group.needs), begins))
            if before is not None:
                needs.append(before.keys[lane])
            needs += self._after(joined_of, lane)
            yield Placed(key, needs, run_calls, (segments, own), worker, first.is_pinned)

    @property
    def steps(self) -> list[int]:
        """Which calls on all lanes somebody is to know of that were not made."""
        return [step for group in self.groups for step in group.steps]

    def _after(self, joined_of: Mapping[int, Joined], lane: int) -> Iterator[Any]:
        # What is to be over before it; nothing of that is given to its calls.
        for group in self.groups:
            for noted in group.after:
                joined = None if noted.group is None else joined_of.get(id(noted.group))
                if joined is not None and joined is not self:
                    yield joined.keys[lane]
                elif joined is None and noted.tasks:
                    yield noted.tasks[lane].future

    def set_sent(self, futures: Sequence[Future]) -> None:
        """Tell what was noted of its tasks."""
        calls = [ref for group in self.groups for ref in group.noted]
        num_outputs = sum(map(len, self._wanted))
        workers = self.groups[0].lanes.workers
        sent = tuple([SentTask(*each, calls, num_outputs) for each in zip(futures, workers, strict=True)])
        num_tasks = sum(len(group.needs) + len(group.after) + 1 for group in self.groups)
        depth = max(group.deepest for group in self.groups) + num_tasks
        for group in self.groups:
            for noted in group.there():
                noted.tasks, noted.depth = sent, depth
                noted.place += self.begins[id(group)]  # type: ignore[operator]


def join(parts: Sequence[Pickled], key_of: Callable[[str], str]) -> tuple[list[Joined], list[Placed]]:
    """What makes the calls of several captures, in their order, and its tasks."""
    joined_of: dict[int, Joined] = {}
    found: dict[tuple[Hashable, int], Joined] = {}
    before: dict[int, Joined | None] = {}
    # Of calls on all lanes, which each makes in their order, the last that cannot fail as a whole.
    last: dict[Hashable, Joined] = {}
    first_stage = last_stage = 0
    for part in parts:
        is_certain = part.is_certain
        if not is_certain:
            first_stage = last_stage + bool(found)
        own = dict(last)
        for group, pickled in sorted(zip(part.taken.groups, part.pickled, strict=True), key=lambda each: each[0].stage):
            stage = first_stage + group.stage
            joined = found.get((group.place, stage))
            if joined is None:
                joined = found[group.place, stage] = Joined([key_of(group.name) for _ in group.lanes.workers])
                before[id(joined)] = own.get(group.place)
            joined.add(group, pickled)
            joined_of[id(group)] = joined
            if group.place is group.lanes:
                own[group.place] = joined
            last_stage = max(last_stage, stage)
        if is_certain:
            last = own
            first_stage = max([first_stage, *(stage for (place, stage) in found if place in last)])
        else:
            first_stage = last_stage + 1
    every = list(found.values())
    return every, [task for joined in every for task in joined.tasks(joined_of, before[id(joined)])]
