"""Cursors over the steps of input pipelines, as places in blocks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from daskdist.core.failing.failed_element import FAILED
from daskdist.core.primitive import Exhausted
from daskdist.errors import OutOfRangeError
from daskdist.execute.stream.bundle_builder import BundleBuilder, Lane

# For each pipeline, the number of elements that were handed out.
HandedOut = list[int]
_NO_ROWS: Final = (Lane(None, ()), -1)
AT_ITS_END: Final = "the iterator is at its end; iterate over the dataset again for another pass"


class PipelineCursor:
    """The elements of one pipeline, a step at a time.

    Parameters
    ----------
    builder
        The builder of their bundles.
    """

    def __init__(self, builder: BundleBuilder) -> None:
        self.builder = builder
        self.lanes: list[Lane] = []
        # For each step of the bundle the numbers of rows that its elements have, as far as they are known.
        self.num_rows: Sequence[Collection[int]] = ()
        self.position = self.length = 0
        # The number of elements in the bundles before the current one.
        self._num_before, self._num_elements = builder.start.num_elements, 0

    def num_handed_out(self) -> int:
        """Return the number of elements that were handed out."""
        return self._num_before + min(self.position * len(self.lanes), self._num_elements)

    def next(self) -> list[tuple[Lane, int]] | None:
        """Return each replica's lane and its place in the lane; None at the end."""
        if self.position == self.length:
            self._num_before, self._num_elements = self.num_handed_out(), 0
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
        lengths = np.append(self.builder.interpreter.caller.result(lane.lengths), 0)
        failed = frozenset(np.flatnonzero(lengths == FAILED).tolist())
        # An element that failed counts as one row.
        num_rows = np.abs(lengths)[np.asarray(lane.places)]
        places = np.where(num_rows > 0, lane.places, -1).tolist()
        return replace(lane, places=places, num_rows=num_rows, failed=failed)


class JointCursor:
    """The steps of all pipelines together, as places in blocks.

    Parameters
    ----------
    feeds
        The cursor of each pipeline.
    drops_uneven
        Whether the pass ends before the first step in which some replica has no rows.
    fails_by_replica
        Whether each replica has elements of its own. A step with one that failed then comes as several: the elements
        before it, itself, and those behind it.
    """

    def __init__(self, feeds: list[PipelineCursor], *, drops_uneven: bool, fails_by_replica: bool) -> None:
        self.feeds = feeds
        self._fails_by_replica = fails_by_replica
        self._handed_out_at_end: HandedOut = []
        self._drops_uneven = drops_uneven
        # The numbers of rows that replicas have in the last step, as far as they are known; -1 for unknown ones beside
        # replicas without rows.
        self.num_rows: frozenset[int] = frozenset()
        # The replicas whose elements of the next step were handed out already.
        self.done: frozenset[int] = frozenset()

    def next(self) -> tuple[list[tuple[Lane, int]], int]:
        """Return each replica's lane and place, and the number without rows; raise `OutOfRangeError` at the end."""
        while True:
            is_over = True
            places: list[tuple[Lane, int]] = []
            num_rows: set[int] = set()
            for number, feed in enumerate(self.feeds):
                try:
                    step = feed.next()
                except Exception:
                    # The elements of the earlier feeds were not handed out.
                    for earlier in self.feeds[:number]:
                        earlier.step_back()
                    raise
                if step is None:
                    places += [_NO_ROWS] * len(feed.builder.workers)
                else:
                    is_over = False
                    places += step
                    num_rows.update(feed.num_rows[feed.position - 1])
            if is_over:
                raise OutOfRangeError(AT_ITS_END)
            num_empty = 0
            for _, place in places:
                num_empty += place < 0
            # A step in which a replica has rows is handed out.
            if num_empty < len(places):
                break
        if num_empty and self._drops_uneven:
            raise OutOfRangeError(AT_ITS_END)
        if self.done:
            places = [_NO_ROWS if replica in self.done else place for replica, place in enumerate(places)]
            self.done = frozenset()
            num_empty = len([place for _, place in places if place < 0])
        if self._fails_by_replica:
            places = self._up_to_failed(places)
            num_empty = len([place for _, place in places if place < 0])
        self.num_rows = frozenset({0} | (num_rows or {-1}) if num_empty else num_rows)
        return places, num_empty

    def _up_to_failed(self, places: list[tuple[Lane, int]]) -> list[tuple[Lane, int]]:
        # Return a step's elements before the first that failed, or that one if it comes first; others come next.
        failed = next((replica for replica, (lane, place) in enumerate(places) if place in lane.failed), None)
        if failed is None:
            return places
        has_rows = any(place >= 0 for _, place in places[:failed])
        num_done = failed if has_rows else failed + 1
        if any(place >= 0 for _, place in places[num_done:]):
            for feed in self.feeds:
                feed.step_back()
            self.done = frozenset(range(num_done))
        return [*places[:num_done], *[_NO_ROWS] * (len(places) - num_done)]

    def handed_out(self) -> HandedOut:
        """Return for each pipeline the number of elements that were handed out."""
        return [feed.num_handed_out() for feed in self.feeds] if self.feeds else self._handed_out_at_end

    def close(self) -> None:
        """Drop the blocks that were read; no step follows."""
        self._handed_out_at_end, self.feeds = self.handed_out(), []
