"""The answers that a stream's arithmetic got from calls, which a position needs besides the number of elements.

The order of a stream's elements is arithmetic on numbers of rows, and on facts that operations such as
``group_by_window`` ask for. Where these come from calls, they are recorded, in one `AnswerLog` for each opened cursor.
A stream that is opened again with the same answers has the same elements without making those calls.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np

from daskdist.core.failing.failed_elements import Carried, LeftOut
from daskdist.core.failing.origin import Skipped
from daskdist.core.primitive import Epoch
from daskdist.core.structure import FIXED_SIZE_KINDS
from daskdist.execute.resume.packing import is_plain, narrowed

# The path from the end of a pipeline to a primitive: the numbers of inputs, and the keys of streams that arrangements
# opened.
Path = tuple[Any, ...]
# The key of a log: the primitive's path, the pass, and the number of earlier logs with both.
LogKey = tuple[Path, Epoch, int]

# In place of a number of rows: the block has failed elements, and is made again.
HAS_FAILED: Final = -2
# In place of a computation: the number of inputs before those of the call that failed.
INPUTS_BEFORE: Final = -1
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


class _FailedInput(NamedTuple):
    # An element that failed, and the numbers of errors that were raised and of elements that were handed out
    # before any position that needs to know it: 0 if it failed before this stream was opened, or was only logged. For
    # an element of a chain they are those of the element that was made of it, which another log may have, too.
    element: LeftOut
    num_errors: int = 0
    num_elements: int = 0
    is_of_chain: bool = False


class AnswerLog:
    """The answers for one cursor, in the order in which it got them.

    Attributes
    ----------
    cuts
        For each call how much of the input it took, in a unit that the cursor defines.
    rows
        For each block that was handed out its number of rows, or `HAS_FAILED`.
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
    left_out
        For some calls, by number, the elements that failed before the position; instead of a computation,
        `INPUTS_BEFORE` with a number of inputs. Elements whose errors were not raised yet are not among them: they are
        tried again.
    num_done, failed
        The number of first calls of a chain that were over when the position was taken, and of these the elements that
        failed and are not in `left_out`, by call. All others were counted in the value that the chain carries.
    outputs
        For some calls of a chain a handle of the value after it, with the number of calls so far.
    """

    __slots__ = (
        "__weakref__",
        "carried",
        "cuts",
        "facts",
        "failed",
        "left_out",
        "num_done",
        "num_lengths",
        "order",
        "outputs",
        "points",
        "rows",
        "values",
    )

    def __init__(self) -> None:
        self.cuts: list[int] = []
        self.rows: list[int] = []
        self.order: list[int] = []
        self.facts: list[Any] = []
        self.carried: dict[int, Any] = {}
        self.values: list[Any] = []
        self.points: list[tuple[int, Any]] = []
        self.left_out: dict[int, list[_FailedInput]] = {}
        self.num_done = 0
        self.failed: dict[int, frozenset[int]] = {}
        self.outputs: list[tuple[int, Any]] = []
        # The number of recorded lengths.
        self.num_lengths = 0

    def __len__(self) -> int:
        parts = (self.cuts, self.rows, self.order, self.facts, self.carried, self.values, self.points, self.left_out)
        return sum(map(len, parts))

    def cut(self, number: int) -> int | None:
        """Return the recorded cut of a call, or None."""
        return self.cuts[number] if number < len(self.cuts) else None

    def note_cut(self, number: int, cut: int) -> None:
        """Record the cut of a call, unless it is recorded."""
        if number == len(self.cuts):
            self.cuts.append(cut)

    def note_fact(self, fact: Any, num_elements: int) -> None:
        """Record the fact of a call if it is small."""
        is_small = _size_of(fact) <= _MOST_FACT_BYTES * num_elements + _SMALL_FACT_BYTES
        if is_small and isinstance(fact, np.ndarray):
            # A copy: a fact may be a view of a whole block.
            # Keys and lengths are mostly small numbers of 8 bytes. Operations take them as integers of any width.
            fact = narrowed(fact) if fact.dtype.kind in "iu" and fact.size else fact.copy()
        self.facts.append(fact if is_small else None)

    def note_raised(self, number: int, place: tuple[int, int], num_errors: int) -> None:
        """Record that an element of a call failed, and that its error was the ``num_errors``-th to be raised."""
        self.left_out.setdefault(number, []).append(_FailedInput(LeftOut(*place, is_raised=True), num_errors))

    def note_uncounted(self, call: int, number: int, *, num_errors: int, num_elements: int) -> None:
        """Record that an element of a call of a chain failed; it counts once so many errors and elements came."""
        element = LeftOut(0, number, is_raised=True)
        self.left_out.setdefault(call, []).append(_FailedInput(element, num_errors, num_elements, is_of_chain=True))

    def note_logged(self, number: int, notes: Sequence[Skipped]) -> None:
        """Record the elements that a call left out because they failed."""
        for note in notes:
            if note.place is not None:
                self.left_out.setdefault(number, []).append(_FailedInput(LeftOut(*note.place, is_raised=False)))

    def elements_left_out(self, number: int) -> tuple[LeftOut, ...]:
        """Return the elements of a call that failed before the position."""
        return tuple([failed.element for failed in self.left_out.get(number, ())])

    @property
    def has_raised(self) -> bool:
        """Return whether errors were raised."""
        return any(failed.element.is_raised for elements in self.left_out.values() for failed in elements)

    def at(self, num_elements: int, num_errors: int) -> AnswerLog:
        """Return the log with only those elements left out that failed within so many elements and errors."""
        log = copy.copy(self)
        log.left_out = {}
        for number, elements in self.left_out.items():
            before = [
                _FailedInput(failed.element)
                for failed in elements
                if failed.num_errors <= num_errors and failed.num_elements <= num_elements
            ]
            if before:
                log.left_out[number] = before
        return log

    def num_left_out(self, number: int) -> int:
        """Return the number of elements that are left out in the calls of a chain before one."""
        calls = [elements for call, elements in self.left_out.items() if call < number]
        # An element that several others were made of was recorded with each of them.
        return sum(len({failed.element for failed in elements}) for elements in calls)

    def carried_again(self, number: int, state: Any) -> Carried:
        """Return a value that a call of a chain got, which counts no elements that failed before it."""
        return Carried(state, self.num_left_out(number), (), number)

    def note_carried(self, number: int, handle: Any) -> None:
        """Record a handle of a carried value; if there are many, some of the earlier ones are dropped."""
        self.carried[number] = handle
        if len(self.carried) > _MOST_CARRIED:
            numbers = sorted(self.carried)
            for place in numbers[1 : _MOST_CARRIED // 2 : 2]:
                del self.carried[place]

    def note_output(self, num_calls: int, handle: Any, is_done: Callable[[Any], bool]) -> None:
        """Record a handle of the value after some calls of a chain, and drop those before the last that is done."""
        self.outputs.append((num_calls, handle))
        last_done = next((k for k in reversed(range(len(self.outputs))) if is_done(self.outputs[k][1])), None)
        if last_done is not None:
            self.num_done = max(self.num_done, self.outputs[last_done][0])
            del self.outputs[:last_done]

    def counted(self, result: Callable[[Any], Carried | None]) -> tuple[int, list[list[int]]]:
        """Return ``num_done``, and ``failed`` as pairs; ``result`` returns the value of a handle, or None."""
        failed = [(call, number) for call, numbers in self.failed.items() for number in numbers]
        for num_calls, handle in reversed(self.outputs):
            value = result(handle)
            if value is not None:
                # These calls were made again, and those before and after them were not.
                others = [element for element in failed if not value.first_call <= element[0] < num_calls]
                failed, num_done = [*others, *value.failed], max(self.num_done, num_calls)
                break
        else:
            num_done = self.num_done
        left_out = {(call, failed.element.number) for call, elements in self.left_out.items() for failed in elements}
        return num_done, [list(element) for element in sorted(failed) if element not in left_out]

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
        """Return the log with the facts of some calls only, and nothing of calls after them and after failures."""
        log = copy.copy(self)
        calls = range(calls.start, max(calls.stop, *[number + 1 for number in self.left_out], 0))
        log.cuts, log.rows = self.cuts[: calls.stop], self.rows[: calls.stop]
        log.facts = [*([None] * calls.start), *self.facts[calls.start : calls.stop]]
        return log

    def with_points(self, points: Sequence[tuple[int, Any]]) -> AnswerLog:
        """Return the log with these points only."""
        log = copy.copy(self)
        log.points = sorted(points, key=itemgetter(0))
        return log

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

    value: Carried


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

    def at(self, num_elements: int, num_errors: int) -> tuple[Answers, int]:
        """Return the answers after so many elements and errors, and the number of errors that they do not have."""
        logs = [log for log in self.logs.values() if log.left_out]
        if not logs:
            return self, num_errors
        other = self.again()
        other.logs = {key: log.at(num_elements, num_errors) if log.left_out else log for key, log in self.logs.items()}
        elements = [failed for log in logs for of_call in log.left_out.values() for failed in of_call]
        noted = [failed for failed in elements if not failed.is_of_chain and 0 < failed.num_errors <= num_errors]
        return other, num_errors - len(noted)

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
                carried = [(place, result(handle)) for place, handle in log.carried.items()]
                # Leave out values that count other elements than the resumed pass, which tries some failed ones again.
                known = [
                    [place, list(value.state)]
                    for place, value in carried
                    if value is not None and value.num_uncounted == log.num_left_out(place) and is_plain(value.state)
                ]
                left_out = [[place, list(map(tuple, log.elements_left_out(place)))] for place in log.left_out]
                answers = [log.cuts, log.rows, log.order, log.facts, known, log.values, log.points, left_out]
                entries.append([list(path), epoch, number, *answers, *log.counted(result)])
        return entries

    @classmethod
    def of_plain(cls, entries: Sequence[Any]) -> Answers:
        """Return the answers that `as_plain` returned."""
        answers = cls()
        for path, epoch, number, cuts, rows, order, facts, carried, values, points, left_out, done, failed in entries:
            steps = tuple([step if isinstance(step, int) else PathKey(*step) for step in path])
            log = answers.logs[steps, epoch, number] = AnswerLog()
            log.cuts, log.rows, log.order, log.facts, log.values, log.points = cuts, rows, order, facts, values, points
            log.num_done = done
            log.failed = {
                call: frozenset(map(itemgetter(1), elements)) for call, elements in groupby(failed, itemgetter(0))
            }
            log.num_lengths = sum(log.rows[1::2])
            log.left_out = {
                place: [_FailedInput(LeftOut(*element)) for element in elements] for place, elements in left_out
            }
            log.carried = {place: Known(log.carried_again(place, tuple(value))) for place, value in carried}
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
