"""The steps of the pipelines of a pass, as places in blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np

from daskdist.core.failing.failed_element import FAILED
from daskdist.core.primitive import Exhausted
from daskdist.errors import OutOfRangeError
from daskdist.execute.stream.bundle_builder import BundleBuilder, Lane

# For each pipeline, the number of elements that were handed out; and the replicas whose elements of the next step were
# handed out already.
HandedOut = tuple[list[int], frozenset[int]]
_NONE: Final[frozenset[int]] = frozenset()
_NO_LANE: Final = Lane(None, ())
# The most steps of a run: they are laid out together, before the first is handed out.
_MOST_STEPS: Final = 256
AT_ITS_END: Final = "the iterator is at its end; iterate over the dataset again for another pass"


class Step(NamedTuple):
    """One step of all replicas.

    Parameters
    ----------
    places
        Each replica's place in its lane; -1 for one without rows.
    num_empty
        The number of replicas without rows.
    num_rows
        The numbers of rows that replicas have, as far as they are known; -1 for unknown ones beside replicas without
        rows.
    num_steps
        The number of steps of the run's bundles that were handed out with this one.
    done
        The replicas whose elements of the next step of the bundles were handed out with this one.
    """

    places: Sequence[int]
    num_empty: int
    num_rows: frozenset[int]
    num_steps: int
    done: frozenset[int] = _NONE


class _Numbers(NamedTuple):
    # The elements of a pipeline that were handed out before a run, those of each of its steps, and the most in all.
    before: int
    per_step: int = 0
    most: int = 0


class StepRun(NamedTuple):
    """Some steps, during which no bundle changes.

    Parameters
    ----------
    lanes
        Each replica's lane of its bundle.
    steps
        The steps.
    numbers
        For each pipeline the numbers of elements.
    done_before
        The replicas whose elements of the first step were handed out before.
    """

    lanes: Sequence[Lane]
    steps: Sequence[Step]
    numbers: Sequence[_Numbers]
    done_before: frozenset[int] = _NONE


# A position: a run, and the number of its steps that were handed out.
Mark = tuple[StepRun, int]


def handed_out_at(mark: Mark) -> HandedOut:
    """Return what was handed out at a position."""
    run, number = mark
    num_steps, done = run.steps[number - 1][-2:] if number else (0, run.done_before)
    return [one.before + min(num_steps * one.per_step, one.most) for one in run.numbers], done


def without_blocks(mark: Mark) -> Mark:
    """Return the same position, which keeps no blocks."""
    numbers, done = handed_out_at(mark)
    return StepRun((), (), list(map(_Numbers, numbers)), done), 0


class _Bundles:
    # The current bundle of one pipeline.
    def __init__(self, builder: BundleBuilder) -> None:
        self.builder = builder
        self.lanes: list[Lane] = [_NO_LANE] * len(builder.workers)
        # For each step of the bundle the numbers of rows that its elements have, as far as they are known.
        self.num_rows: Sequence[Collection[int]] = ()
        self.is_over = False
        # The steps of the bundle that were passed, and those that are left.
        self.position = self.num_left = 0
        # The number of elements before the position, and that from there to the bundle's end.
        self.num_before, self.num_elements = builder.start.num_elements, 0

    def pass_by(self, num_steps: int) -> None:
        """Go on by some steps, or to the end of the bundle."""
        num_elements = min(num_steps * len(self.lanes), self.num_elements)
        self.num_before += num_elements
        self.num_elements -= num_elements
        self.position += num_steps
        self.num_left -= num_steps

    def pull(self) -> None:
        """Get the next bundle, unless steps of this one are left."""
        if self.is_over or self.num_left:
            return
        try:
            bundle = self.builder.pull()
        except Exhausted:
            self.is_over, self.lanes = True, [_NO_LANE] * len(self.lanes)
            return
        lanes = list(map(self._without_empty, bundle.lanes))
        known = [lane.num_rows for lane in lanes if lane.num_rows is not None]
        self.num_rows = list(map(set, np.stack(known, 1).tolist())) if known else ((),) * len(bundle)
        self.lanes, self.position, self.num_left, self.num_elements = lanes, 0, len(bundle), bundle.num_elements

    def _without_empty(self, lane: Lane) -> Lane:
        if lane.lengths is None:
            return lane
        lengths = np.append(self.builder.interpreter.caller.result(lane.lengths), 0)
        failed = frozenset(np.flatnonzero(lengths == FAILED).tolist())
        # An element that failed counts as one row.
        num_rows = np.abs(lengths)[np.asarray(lane.places)]
        places = np.where(num_rows > 0, lane.places, -1).tolist()
        return replace(lane, places=places, num_rows=num_rows, failed=failed)


class StepCursor:
    """The steps of all pipelines of a pass together.

    Parameters
    ----------
    builders
        Builds the bundles of each pipeline.
    drops_uneven
        Whether the pass ends before the first step in which some replica has no rows.
    fails_by_replica
        Whether each replica has elements of its own. A step with one that failed then comes as several: the elements
        before it, itself, and those behind it.
    done
        The replicas whose elements of the first step were handed out already.

    Attributes
    ----------
    mark
        The current position.
    """

    def __init__(
        self,
        builders: Sequence[BundleBuilder],
        *,
        drops_uneven: bool,
        fails_by_replica: bool,
        done: frozenset[int] = _NONE,
    ) -> None:
        self._bundles = list(map(_Bundles, builders))
        self._fails_by_replica = fails_by_replica
        self._drops_uneven = drops_uneven
        # The number of steps of the bundles that the current run has.
        self._length = 0
        self._is_over = False
        self.mark: Mark = (StepRun((), (), [_Numbers(one.num_before) for one in self._bundles], done), 0)

    def next(self) -> tuple[StepRun, Step]:
        """Return the next step, and the run that it is of; raise `OutOfRangeError` at the end."""
        run, number = self.mark
        while number == len(run.steps):
            run, number = self._next_run(handed_out_at((run, number))[1]), 0
        self.mark = run, number + 1
        return run, run.steps[number]

    def close(self) -> None:
        """Drop the blocks that were read; no step follows."""
        self.mark, self._bundles, self._is_over = without_blocks(self.mark), [], True

    def _next_run(self, done: frozenset[int]) -> StepRun:
        if self._is_over:
            raise OutOfRangeError(AT_ITS_END)
        bundles = self._bundles
        for one in bundles:
            one.pass_by(min(self._length, one.num_left))
        # If one of them cannot be had, those before it are kept.
        self._length = 0
        for one in bundles:
            one.pull()
        if all(one.is_over for one in bundles):
            raise OutOfRangeError(AT_ITS_END)
        self._length = min(_MOST_STEPS, *(one.num_left for one in bundles if not one.is_over))
        lanes = [lane for one in bundles for lane in one.lanes]
        numbers = [_Numbers(one.num_before, len(one.lanes), one.num_elements) for one in bundles]
        return StepRun(lanes, self._steps(lanes, done), numbers, done)

    def _steps(self, lanes: Sequence[Lane], done: frozenset[int]) -> list[Step]:
        steps: list[Step] = []
        ahead = [one for one in self._bundles if not one.is_over]
        known = [one.num_rows[one.position : one.position + self._length] for one in ahead]
        columns = [
            repeat(-1) if one.is_over else lane.places[one.position : one.position + self._length]
            for one in self._bundles
            for lane in one.lanes
        ]
        for number, (places, *num_rows) in enumerate(zip(zip(*columns, strict=False), *known, strict=True)):
            num_empty = places.count(-1)
            # A step in which a replica has rows is handed out.
            if num_empty == len(places):
                continue
            if num_empty and self._drops_uneven:
                self._is_over = True
                break
            rows = _NONE.union(*num_rows)
            rows_beside_empty = frozenset({0}).union(rows or (-1,))
            if not (done or self._fails_by_replica):
                steps.append(Step(places, num_empty, rows_beside_empty if num_empty else rows, number + 1))
                continue
            for part, done_with in self._parts(lanes, places, done):
                num_empty = part.count(-1)
                known_rows = rows_beside_empty if num_empty else rows
                steps.append(Step(part, num_empty, known_rows, number + (not done_with), done_with))
            done = _NONE
        return steps

    def _parts(
        self, lanes: Sequence[Lane], places: Sequence[int], done: frozenset[int]
    ) -> Iterator[tuple[list[int], frozenset[int]]]:
        # Yield the elements of a step but for those before the first that failed, that one, and those that come next;
        # and the replicas that are done with the step, if others follow.
        while True:
            left = [-1 if replica in done else place for replica, place in enumerate(places)]
            failed = [replica for replica, place in enumerate(left) if place in lanes[replica].failed]
            num_done = len(left)
            if failed and self._fails_by_replica:
                has_rows = any(place >= 0 for place in left[: failed[0]])
                num_done = failed[0] if has_rows else failed[0] + 1
            has_more = any(place >= 0 for place in left[num_done:])
            done = frozenset(range(num_done)) if has_more else _NONE
            yield [*left[:num_done], *repeat(-1, len(left) - num_done)], done
            if not has_more:
                return
