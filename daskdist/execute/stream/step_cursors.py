"""Cursors over the steps of input pipelines, as places in blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import numpy as np

from daskdist.core.failing.failed_elements import is_of_element
from daskdist.core.primitive import Exhausted, Primitive
from daskdist.errors import OutOfRangeError
from daskdist.execute.caller import Caller
from daskdist.execute.resume.position import StreamPosition
from daskdist.execute.stream.bundle_builder import BundleBuilder, Lane

_T = TypeVar("_T")
# For each pipeline, the numbers of elements and of errors that were handed out.
HandedOut = list[tuple[int, int]]
_NO_ROWS: Final = (Lane(None, ()), -1)
AT_ITS_END: Final = "the iterator is at its end; iterate over the dataset again for another pass"


class PipelineCursor:
    """The elements of one pipeline, a step at a time."""

    def __init__(self, builder: BundleBuilder, caller: Caller) -> None:
        self.builder = builder
        self.caller = caller
        self.lanes: list[Lane] = []
        # For each step of the bundle the numbers of rows that its elements have, as far as they are known.
        self.num_rows: Sequence[Collection[int]] = ()
        self.position = self.length = 0
        # The number of elements in the bundles before the current one.
        self._num_before = self._num_elements = 0

    @property
    def num_handed_out(self) -> tuple[int, int]:
        """The numbers of elements and of errors that were handed out."""
        return self._num_before + min(self.position * len(self.lanes), self._num_elements), self.builder.num_errors

    def move_to(self, primitive: Primitive, position: StreamPosition, *, is_exact: bool) -> None:
        """Continue from a position."""
        self._num_before = position.num_elements
        self.builder.move_to(
            primitive,
            position.epoch,
            position.answers,
            position.num_elements,
            position.num_errors,
            is_exact=is_exact,
        )

    def next(self) -> list[tuple[Lane, int]] | None:
        """Return each replica's lane and its place in the lane; None at the end."""
        if self.position == self.length:
            self._num_before, self._num_elements = self.num_handed_out[0], 0
            self.position = self.length = 0
            try:
                bundle = self.builder.pull()
            except Exhausted:
                return None
            self._num_elements = bundle.num_elements
            self.lanes = list(map(self._without_empty, bundle.lanes))
            self.position, self.length = 0, len(bundle)
            known = [lane.num_rows for lane in self.lanes if lane.num_rows is not None]
            self.num_rows = list(map(set, np.stack(known, 1).tolist())) if known else ((),) * self.length
        step = [(lane, lane.places[self.position]) for lane in self.lanes]
        self.position += 1
        return step

    def step_back(self) -> None:
        """Take the last step back, which was not handed out; there is none at the end."""
        self.position -= self.length > 0

    def _without_empty(self, lane: Lane) -> Lane:
        if lane.lengths is None:
            return lane
        lengths = np.append(self.caller.result(lane.lengths), 0)
        num_rows = lengths[np.asarray(lane.places)]
        return replace(lane, places=np.where(num_rows > 0, lane.places, -1).tolist(), num_rows=num_rows)


class JointCursor:
    """The steps of all pipelines together, as places in blocks.

    Parameters
    ----------
    feeds
        The cursor of each pipeline.
    num_lanes
        The number of replicas that each pipeline feeds.
    drops_uneven
        Whether the pass ends before the first step in which some replica has no rows.
    """

    def __init__(self, feeds: list[PipelineCursor], num_lanes: list[int], *, drops_uneven: bool) -> None:
        self.feeds = feeds
        self._handed_out_at_end: HandedOut = []
        self._num_lanes = num_lanes
        self._drops_uneven = drops_uneven
        # The numbers of rows that replicas have in the last step, as far as they are known; -1 for unknown ones beside
        # replicas without rows.
        self.num_rows: frozenset[int] = frozenset()
        # The replicas whose elements of the next step were handed out or have failed already, see `before_failed`.
        self.done: frozenset[int] = frozenset()

    def next(self) -> tuple[list[tuple[Lane, int]], int]:
        """Return each replica's lane and place, and the number without rows; raise `OutOfRangeError` at the end."""
        while True:
            is_over = True
            places: list[tuple[Lane, int]] = []
            num_rows: set[int] = set()
            for number, (feed, num_lanes) in enumerate(zip(self.feeds, self._num_lanes, strict=False)):
                try:
                    step = feed.next()
                except Exception:
                    # The elements of the earlier feeds were not handed out.
                    for earlier in self.feeds[:number]:
                        earlier.step_back()
                    raise
                if step is None:
                    places += [_NO_ROWS] * num_lanes
                else:
                    is_over = False
                    places += step
                    num_rows.update(feed.num_rows[feed.position - 1])
            if is_over:
                raise OutOfRangeError(AT_ITS_END)
            num_empty = len([place for _, place in places if place < 0])
            # A step in which a replica has rows is handed out.
            if num_empty < len(places):
                break
        if num_empty and self._drops_uneven:
            raise OutOfRangeError(AT_ITS_END)
        if self.done:
            places = [_NO_ROWS if replica in self.done else place for replica, place in enumerate(places)]
            num_empty, self.done = len([place for _, place in places if place < 0]), frozenset()
        self.num_rows = frozenset({0} | (num_rows or {-1}) if num_empty else num_rows)
        return places, num_empty

    def before_failed(self, read: Callable[[tuple[Lane, int]], _T], places: Sequence[tuple[Lane, int]]) -> list[_T]:
        """Read the last step's elements up to the first that fails, if each replica has elements of its own.

        The next step then has the others: first the failed one, whose error is raised, then those behind it.
        """
        elements: list[_T] = []
        for replica, place in enumerate(places):
            try:
                elements.append(read(place))
            except Exception as error:
                if not is_of_element(error):
                    raise
                has_rows = any(number >= 0 for _, number in places[:replica])
                num_done = replica if has_rows else replica + 1
                if any(number >= 0 for _, number in places[num_done:]):
                    for feed in self.feeds:
                        feed.step_back()
                    self.done = frozenset(range(num_done))
                if not has_rows:
                    raise
                self.num_rows = frozenset({0}) | (self.num_rows or {-1})
                break
        return elements

    def handed_out(self) -> HandedOut:
        """Return for each pipeline the numbers of elements and of errors that were handed out."""
        return [feed.num_handed_out for feed in self.feeds] if self.feeds else self._handed_out_at_end

    def close(self) -> None:
        """Drop the blocks that were read; no step follows."""
        self._handed_out_at_end, self.feeds = self.handed_out(), []
