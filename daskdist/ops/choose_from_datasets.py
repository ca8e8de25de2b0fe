"""``Dataset.choose_from_datasets``: elements of several datasets, chosen by a dataset of their numbers."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from daskdist.core.arguments import yes_or_no
from daskdist.core.block import Block, Rows
from daskdist.core.cardinality import UNKNOWN
from daskdist.core.node import Node
from daskdist.core.primitive import (
    Arrange,
    Context,
    Cursor,
    Epoch,
    Exhausted,
    Fact,
    Opener,
    Primitive,
    gathered,
)
from daskdist.core.selection.intervals import Index
from daskdist.core.selection.resume_points import ResumableSource
from daskdist.core.selection.runs import Run, RunQueue, concat
from daskdist.core.spec import ElementSpec, SpecUnknown, common_spec
from daskdist.errors import ArgumentError
from daskdist.ops.select import alike

# The number of choices to serve at a time.
_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class ChooseFromDatasets(Node):
    """The next element of the source that each choice names.

    Parameters
    ----------
    sources
        The datasets to choose from.
    choices
        The numbers of sources, as integer scalars.
    stop_on_empty_dataset
        Whether to end when the chosen source is exhausted; otherwise such a choice is skipped.
    """

    sources: tuple[Node, ...] = field(repr=False)
    choices: Node = field(repr=False)
    stop_on_empty_dataset: bool = True

    name = "choose_from_datasets"

    def __post_init__(self) -> None:
        if not self.sources:
            raise ArgumentError("choose_from_datasets: there are no datasets to choose from")
        yes_or_no(self.name, "stop_on_empty_dataset", self.stop_on_empty_dataset)
        with contextlib.suppress(SpecUnknown):
            common_spec(self.name, self.sources)
        try:
            (leaf, *more) = self.choices.spec.leaves
        except SpecUnknown:
            return
        if more or leaf.shape or leaf.dtype.kind not in "iu":
            raise ArgumentError(f"choose_from_datasets: choices are {self.choices.spec.packed}; give integer scalars")

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (*self.sources, self.choices)

    def with_inputs(self, inputs: tuple[Node, ...]) -> Node:
        *sources, choices = inputs
        return ChooseFromDatasets(tuple(sources), choices, self.stop_on_empty_dataset, label=self.label)

    @property
    def spec(self) -> ElementSpec:
        return common_spec(self.name, self.sources, must_be_known=True)

    @property
    def cardinality(self) -> int:
        return UNKNOWN

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        *sources, choices = inputs
        sources = list(alike(self.sources, sources))
        numbers = Fact(gathered(choices), column_of, f"{self.name}-choices")
        rows = ChooseRows(self.stop_on_empty_dataset)
        return Arrange((*sources, numbers), rows, sources[0].grouped, name=self.name)


def column_of(rows: Rows) -> Any:
    """Return elements that are scalars as one array, shape ``(num_rows,)``."""
    if isinstance(rows, Block):
        return rows.leaves[0]
    return np.array([rows.item(index)[0] for index in range(len(rows))])


@dataclass(frozen=True)
class ChooseRows:
    """Row arithmetic of ``choose_from_datasets``; the last input is the stream of choices."""

    stop_on_empty: bool

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        *sources, choices = [opener(epoch) for opener in inputs]
        return ChosenCursor(sources, self.stop_on_empty, ResumableSource(choices, context))


@dataclass
class DirectedCursor(ABC):
    """A cursor with the elements pulled but not yet chosen, and the choices not yet served."""

    sources: list[Cursor]
    stop_on_empty: bool
    queues: list[RunQueue] = field(init=False)
    waiting: Index = field(default_factory=lambda: np.zeros(0, np.intp), init=False)
    are_over: set[int] = field(default_factory=set, init=False)
    is_over: bool = field(default=False, init=False)
    # The number of elements of each source that were handed out.
    num_taken: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.queues = [RunQueue() for _ in self.sources]
        self.num_taken = [0] * len(self.sources)

    @abstractmethod
    def next_choices(self) -> Index:
        """Return the next choices, at least one."""

    def pull(self) -> Run:
        while not self.is_over:
            if not len(self.waiting):
                if len(self.are_over) == len(self.sources) and not any(map(len, self.queues)):
                    break
                self.waiting = self.next_choices()
            run = self._meet(self.waiting[:_AT_ONCE])
            if run is not None:
                return run
        raise Exhausted

    def _meet(self, choices: Index) -> Run | None:
        # Serve as many of the choices as there are elements for.
        bad = np.flatnonzero((choices < 0) | (choices >= len(self.sources)))
        if len(bad):
            if bad[0] == 0:
                raise ArgumentError(
                    f"choose_from_datasets: a choice is {choices[0]}; there are datasets 0 to {len(self.sources) - 1}"
                )
            choices = choices[: bad[0]]
        counts = np.bincount(choices, minlength=len(self.sources)).tolist()
        for number, count in enumerate(counts):
            self._fill(number, count)
        for number, queue in enumerate(self.queues):
            missing = counts[number] - len(queue)
            if missing > 0:
                # Stop at the first choice of an exhausted source.
                choices = choices[: np.flatnonzero(choices == number)[-missing]]
                counts = np.bincount(choices, minlength=len(self.sources)).tolist()
        self._pass_on(len(choices))
        if not len(choices):
            return None
        parts, order, start = [], np.empty(len(choices), np.intp), 0
        for number, count in enumerate(counts):
            if count:
                parts.append(self.queues[number].pop(count))
                self.num_taken[number] += count
                order[choices == number] = np.arange(start, start + count)
                start += count
        return concat(parts) if len(parts) == 1 else concat(parts).take(order)

    def _fill(self, number: int, count: int) -> None:
        if number not in self.are_over:
            try:
                self.queues[number].fill(self.sources[number].pull, count)
            except Exhausted:
                self.are_over.add(number)

    def _pass_on(self, num_met: int) -> None:
        # If there is a further choice among those examined, its source has no elements.
        looked_at = min(len(self.waiting), _AT_ONCE)
        self.waiting = self.waiting[num_met:]
        if num_met == looked_at:
            return
        number = int(self.waiting[0])
        if 0 <= number < len(self.sources) and number in self.are_over:
            if self.stop_on_empty:
                self.is_over = True
            else:
                self.waiting = self.waiting[self.waiting != number]


@dataclass
class ChosenCursor(DirectedCursor):
    """A cursor of elements chosen by a dataset, which continues without the choices before."""

    choices: ResumableSource

    def next_choices(self) -> Index:
        numbers: Index = self.choices.pull().fact
        return numbers

    def skip(self, num_elements: int) -> int:
        """Skip elements: those before the last resume point by their number in each source."""
        point = self.choices.resume(num_elements)
        if point is None:
            return 0
        for noted in self.choices.rest(point):
            self.waiting = np.concatenate([self.waiting, noted.fact])
        _, *self.num_taken = point.state
        for source, number in zip(self.sources, self.num_taken, strict=True):
            source.skip(number)  # type: ignore[attr-defined]
        return point.place

    def pull(self) -> Run:
        run = super().pull()
        if not self.are_over:
            # Choices of sources without elements were left out.
            self.choices.note_rest(sum(self.num_taken), len(self.waiting), tuple(self.num_taken))
        return run
