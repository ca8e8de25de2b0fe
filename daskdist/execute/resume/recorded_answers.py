"""The answers that a stream's arithmetic got from calls, which a position needs besides the number of elements.

The order of a stream's elements is arithmetic on numbers of rows, and on facts that operations such as
``group_by_window`` ask for. Where these come from calls, they are recorded, in one `AnswerLog` for each opened cursor.
A stream that is opened again with the same answers has the same elements without making those calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np

from daskdist.core.primitive import Epoch
from daskdist.core.structure import FIXED_SIZE_KINDS
from daskdist.execute.resume.packing import is_plain, narrowed

# The path from the end of a pipeline to a primitive: the numbers of inputs, and the keys of streams that arrangements
# opened.
Path = tuple[Any, ...]
# The key of a log: the primitive's path, the pass, and the number of earlier logs with both.
LogKey = tuple[Path, Epoch, int]

# The most bytes per element of a recorded fact; larger facts are computed again.
_MOST_FACT_BYTES: Final = 64
_SMALL_FACT_BYTES: Final = 1024
# The most values carried through a chain that are kept; if there are more, some earlier ones are dropped.
_MOST_CARRIED: Final = 32
_MOST_POINTS: Final = 64


class PathKey(NamedTuple):
    """A step of a path: a primitive that an arrangement opened by itself, in a pass, as its ``number``-th."""

    epoch: Epoch
    number: int


@dataclass(eq=False, slots=True)
class AnswerLog:
    """The answers for one cursor, in the order in which it got them.

    Parameters
    ----------
    cuts
        For each call how much of the input it took, in a unit that the cursor defines. Of an arrangement, the numbers
        of the streams that could not be opened.
    rows
        For each block that was handed out its number of rows, with those that failed. Of facts, `FAILED` for an element
        that has none; of a generator, `FAILED` after the number of its elements if the last one failed.
    order
        For each block that was handed out the number of its call, if blocks come in any order.
    facts
        For each call its fact; None if that is to be computed again.
    carried
        For some calls of a chain, by number, a handle of the value that the call got, or ``Known`` of the value.
    values
        Values that an arrangement recorded.
    points
        States of an arrangement, each with its place.
    num_lengths
        The number of recorded lengths.
    """

    cuts: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    facts: list[Any] = field(default_factory=list)
    carried: dict[int, Any] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)
    points: list[tuple[int, Any]] = field(default_factory=list)
    num_lengths: int = 0

    def __len__(self) -> int:
        parts = (self.cuts, self.rows, self.order, self.facts, self.carried, self.values, self.points)
        return sum(map(len, parts))

    def note_fact(self, fact: Any, num_elements: int) -> None:
        """Record the fact of a call if it is small."""
        is_small = _size_of(fact) <= _MOST_FACT_BYTES * num_elements + _SMALL_FACT_BYTES
        if is_small and isinstance(fact, np.ndarray):
            # A copy: a fact may be a view of a whole block.
            # Keys and lengths are mostly small numbers of 8 bytes. Operations take them as integers of any width.
            fact = narrowed(fact) if fact.dtype.kind in "iu" and fact.size else fact.copy()
        self.facts.append(fact if is_small else None)

    def note_carried(self, number: int, handle: Any) -> None:
        """Record a handle of a carried value; if there are many, some of the earlier ones are dropped."""
        self.carried[number] = handle
        if len(self.carried) > _MOST_CARRIED:
            numbers = sorted(self.carried)
            for place in numbers[1 : _MOST_CARRIED // 2 : 2]:
                del self.carried[place]

    def note_point(self, place: int, state: Any) -> None:
        """Record a state at a place after the last one; if there are many, some of the earlier ones are dropped."""
        if not self.points or self.points[-1][0] < place:
            self.points.append((place, state))
            if len(self.points) > _MOST_POINTS:
                del self.points[: _MOST_POINTS // 2 : 2]

    def point_before(self, place: int) -> tuple[int, Any] | None:
        """Return the last recorded state at ``place`` or before it, with its place."""
        return next((point for point in reversed(self.points) if point[0] <= place), None)

    def with_facts(self, calls: range) -> AnswerLog:
        """Return the log with the facts of some calls only, and nothing of calls after them."""
        facts = [*([None] * calls.start), *self.facts[calls.start : calls.stop]]
        return replace(self, cuts=self.cuts[: calls.stop], rows=self.rows[: calls.stop], facts=facts)

    def with_points(self, points: Sequence[tuple[int, Any]]) -> AnswerLog:
        """Return the log with these points only."""
        return replace(self, points=sorted(points, key=itemgetter(0)))

    def value(self, number: int, make: Callable[[], Any]) -> Any:
        """Return a recorded value; if it is not recorded, record what ``make`` returns."""
        if number == len(self.values):
            self.values.append(make())
        return self.values[number]

    def note_length(self, number: int, length: int) -> None:
        """Record the length of a repetition; equal consecutive lengths take no more space."""
        if number < self.num_lengths:
            return
        self.num_lengths += 1
        if self.rows[-2:-1] == [length]:
            self.rows[-1] += 1
        else:
            self.rows += [length, 1]

    def lengths(self) -> Iterator[tuple[int, int]]:
        """Yield the lengths that `note_length` recorded, each with the number of its repetitions."""
        return zip(self.rows[::2], self.rows[1::2], strict=True)


class UsedAnswers:
    """The facts and points that a stream uses while it is advanced to a position, by the identity of their log."""

    def __init__(self) -> None:
        self.calls: dict[int, range] = {}
        self.points: dict[int, list[tuple[int, Any]]] = {}

    def note_point(self, log: AnswerLog, point: tuple[int, Any] | None) -> None:
        """Record that a point is used; None if the stream looked for one and found none."""
        self.points.setdefault(id(log), []).extend([] if point is None else [point])

    def note_calls(self, log: AnswerLog, start: int, stop: int) -> None:
        """Record that the facts of some calls are used; none if ``start`` equals ``stop``, where new calls begin."""
        before = self.calls.get(id(log), range(start, stop))
        self.calls[id(log)] = range(min(before.start, start), max(before.stop, stop))


class Known(NamedTuple):
    """A carried value that is known, rather than the handle of one."""

    value: Any


class Answers:
    """The logs of one stream's cursors."""

    def __init__(self) -> None:
        self.logs: dict[LogKey, AnswerLog] = {}
        self._num_opened: Counter[tuple[Path, Epoch]] = Counter()

    def open(self, path: Path, epoch: Epoch) -> AnswerLog:
        """Return the log of a cursor, which is empty unless it was recorded before this stream was opened again."""
        number = self._num_opened[path, epoch]
        self._num_opened[path, epoch] += 1
        return self.logs.setdefault((path, epoch, number), AnswerLog())

    def again(self) -> Answers:
        """Return the same logs for another stream of the same elements."""
        other = Answers()
        other.logs = self.logs
        return other

    def only(self, used: UsedAnswers) -> Answers:
        """Return the logs without facts and points that are not used."""
        other = Answers()
        for key, log in self.logs.items():
            calls = used.calls.get(id(log))
            kept = log if calls is None else log.with_facts(calls)
            other.logs[key] = kept.with_points(used.points[id(log)]) if id(log) in used.points else kept
        return other

    def add(self, others: Answers, path: Path) -> None:
        """Add the logs of another stream, which is part of this one at a path."""
        for (its_path, epoch, number), log in others.logs.items():
            self.logs[(*path, *its_path), epoch, number] = log

    def drop(self, path: Path, epoch: Epoch, num_passes: int) -> None:
        """Drop the logs of the first passes over the input of a repetition at ``path``, which it has finished.

        If a log is needed after all, to fill a cache again, its calls are made again.
        """

        def is_over(key: LogKey) -> bool:
            its_path, its_epoch, _ = key
            if its_path[: len(path)] != path or len(its_path) <= len(path) or self.logs[key].order:
                # The log has the order in which blocks finished, which another pass would not repeat.
                return False
            # The epoch of the nearest nested stream below the repetition, or that of the log itself.
            inner = next((step.epoch for step in its_path[len(path) :] if isinstance(step, PathKey)), its_epoch)
            return inner[: len(epoch)] == epoch and len(inner) > len(epoch) and inner[len(epoch)] < num_passes

        for key in [key for key in self.logs if is_over(key)]:
            del self.logs[key]

    def as_plain(self, result: Callable[[Any], Any]) -> list[Any]:
        """Return the answers as data; ``result`` returns the value of a carried handle, or None if there is none."""
        entries = []
        for (path, epoch, number), log in self.logs.items():
            if len(log):
                values = [(place, result(handle)) for place, handle in log.carried.items()]
                known = [[place, list(value)] for place, value in values if value is not None and is_plain(value)]
                answers = [log.cuts, log.rows, log.order, log.facts, known, log.values, log.points]
                entries.append([list(path), epoch, number, *answers])
        return entries

    @classmethod
    def of_plain(cls, entries: Sequence[Any]) -> Answers:
        """Return the answers that `as_plain` returned."""
        answers = cls()
        for path, epoch, number, cuts, rows, order, facts, carried, values, points in entries:
            steps = tuple([step if isinstance(step, int) else PathKey(*step) for step in path])
            known = {place: Known(tuple(value)) for place, value in carried}
            log = AnswerLog(cuts, rows, order, facts, known, values, points, num_lengths=sum(rows[1::2]))
            answers.logs[steps, epoch, number] = log
        return answers


def _size_of(fact: Any) -> float:
    if isinstance(fact, (np.ndarray, np.generic)):
        return fact.nbytes if fact.dtype.kind in FIXED_SIZE_KINDS else float("inf")
    if isinstance(fact, (str, bytes)):
        return len(fact)
    if isinstance(fact, (bool, int, float)):
        return 8
    if type(fact) in (tuple, list):
        return sum(map(_size_of, fact))
    return float("inf")
