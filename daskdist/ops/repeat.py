"""``repeat``: several passes in sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from daskdist.core import cardinality
from daskdist.core.arguments import whole_number
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Arrange, Context, Cursor, Epoch, Exhausted, Opener, Primitive
from daskdist.core.selection.runs import Run
from daskdist.core.selection.skipping import whole_parts


@dataclass(frozen=True, eq=False)
class Repeat(Transformation):
    """The elements of ``count`` passes over the input; endless if ``count`` is None or negative."""

    count: int | None = None

    name = "repeat"
    facts = Facts(keeps_spec=True, per_worker=True)

    def __post_init__(self) -> None:
        whole_number(self.name, "count", self._count)

    @property
    def _count(self) -> int:
        return -1 if self.count is None else self.count

    @property
    def cardinality(self) -> int:
        return cardinality.multiply(self.source.cardinality, self._count)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Arrange(inputs, RepeatRows(self._count), inputs[0].grouped, name=self.name)


# The most empty passes to accept: with random operations, a pass may have elements after empty ones.
_MOST_EMPTY: Final = 1000


@dataclass(frozen=True)
class RepeatRows:
    """Row arithmetic of ``repeat``."""

    count: int

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        return RepeatCursor(inputs[0], epoch, self.count, context)


@dataclass
class RepeatCursor:
    """A cursor over passes: ``passes`` are over, ``current`` is the running one."""

    opener: Opener
    epoch: Epoch
    count: int
    context: Context
    passes: int = 0
    current: Cursor | None = None
    is_empty: bool = True
    # The number of elements of the running pass so far.
    num_elements: int = 0

    def skip(self, num_elements: int) -> int:
        """Skip complete passes without reading them, and elements of the next one."""
        self.passes, num_skipped = whole_parts(self.context.lengths(), num_elements)
        self.is_empty = not num_skipped
        self.context.note_passes_over(self.passes)
        if num_skipped < num_elements:
            self.current = self.opener((*self.epoch, self.passes))
            self.num_elements = self.current.skip(num_elements - num_skipped)  # type: ignore[attr-defined]
            self.is_empty = not num_skipped + self.num_elements
        return num_skipped + self.num_elements

    def pull(self) -> Run:
        while self.count < 0 or self.passes < self.count:
            if self.current is None:
                self.current = self.opener((*self.epoch, self.passes))
            try:
                run: Run = self.current.pull()
            except Exhausted:
                if self.is_empty and (self.count < 0 or self.passes == _MOST_EMPTY):
                    # No elements so far: endless empty passes would hang.
                    raise
                self.context.note_length(self.passes, self.num_elements)
                self.current, self.num_elements = None, 0
                self.passes += 1
                continue
            self.is_empty = False
            self.num_elements += len(run)
            return run
        raise Exhausted
