"""Resume points: places in a stream from which row arithmetic can continue without the facts about earlier elements."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from daskdist.core.primitive import Context, Cursor, Noted

# The least number of elements between two points; later it is this share of the elements so far.
_FEW_ELEMENTS: Final = 512
_SHARE: Final = 64
# Larger states are not recorded, since the facts take less memory.
_MOST_NUMBERS: Final = 512


class ResumePoint(NamedTuple):
    """A place in the stream to continue from.

    Parameters
    ----------
    place
        The number of elements that were handed out there.
    stop
        The number of elements of the input that were pulled there.
    state
        The numbers that were recorded.
    """

    place: int
    stop: int
    state: tuple[Any, ...]


@dataclass
class ResumableSource:
    """A stream of elements with facts, and the points that an arrangement records in it.

    Parameters
    ----------
    source
        The elements and facts.
    context
        Records the points.
    num_pulled
        The number of elements so far.
    """

    source: Cursor
    context: Context
    num_pulled: int = 0
    # The numbers of the first elements of the last pulls: only there can the input continue.
    _firsts: list[int] = field(default_factory=list)
    _next_point: int = field(default_factory=lambda: _FEW_ELEMENTS)

    def pull(self) -> Noted:
        """Return the next elements and their facts."""
        noted: Noted = self.source.pull()
        self._firsts.append(self.num_pulled)
        self.num_pulled += len(noted.run)
        return noted

    @property
    def is_due(self) -> bool:
        """Return whether the next point is to be recorded."""
        return self.num_pulled >= self._next_point

    def note(self, place: int, first: int, state: tuple[Any, ...]) -> None:
        """Record a point.

        Parameters
        ----------
        place
            The number of elements handed out so far.
        first
            The number of the first element of the input that is still needed.
        state
            Numbers, and tuples of numbers.
        """
        self._next_point = self.num_pulled + max(_FEW_ELEMENTS, self.num_pulled // _SHARE)
        if len(state) > _MOST_NUMBERS:
            return
        if first < self.num_pulled:
            number = bisect_right(self._firsts, first) - 1
            if number < 0:
                return
            first = self._firsts[number]
            del self._firsts[:number]
        else:
            self._firsts.clear()
        self.context.note_point(place, (first, self.num_pulled, *state))

    def resume(self, num_elements: int) -> ResumePoint | None:
        """Advance the input to the last point at or before ``num_elements`` handed out; None without one."""
        point = self.context.point_before(num_elements)
        if point is None:
            return None
        place, (first, stop, *state) = point
        self.num_pulled = self.source.skip(first)  # type: ignore[attr-defined]
        self._next_point = stop + max(_FEW_ELEMENTS, stop // _SHARE)
        return ResumePoint(place, stop, tuple(state))

    def note_rest(self, place: int, num_waiting: int, state: tuple[Any, ...] = ()) -> None:
        """Record a point if it is due, where only the last elements that were pulled are still needed; see `rest`."""
        if self.is_due:
            first = self.num_pulled - num_waiting
            self.note(place, first, (first, *state))

    def rest(self, point: ResumePoint) -> Iterator[Noted]:
        """Yield the elements that were still needed at a point that `note_rest` recorded."""
        first = point.state[0]
        while self.num_pulled < point.stop:
            noted = self.pull()
            yield noted[max(first - (self.num_pulled - len(noted)), 0) :]
