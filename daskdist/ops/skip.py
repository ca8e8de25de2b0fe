"""``skip``: all but the first elements."""

from __future__ import annotations

from dataclasses import dataclass

from daskdist.core import cardinality
from daskdist.core.arguments import whole_number
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Arrange, ByCursor, Primitive
from daskdist.core.selection.runs import Run
from daskdist.core.selection.skipping import skip_unread
from daskdist.ops.take import CountingCursor, TakeCursor


@dataclass(frozen=True, eq=False)
class Skip(Transformation):
    """The elements after the first ``count``; none if ``count`` is negative."""

    count: int

    name = "skip"
    facts = Facts(keeps_spec=True, by_count=True)

    def __post_init__(self) -> None:
        whole_number(self.name, "count", self.count)

    @property
    def first_taken(self) -> int | None:
        return self.count if self.count >= 0 else None

    @property
    def cardinality(self) -> int:
        return cardinality.beyond(self.source.cardinality, self.count)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        rows = ByCursor(TakeCursor, (0,)) if self.count < 0 else ByCursor(SkipCursor, (self.count,))
        return Arrange(inputs, rows, inputs[0].grouped, name=self.name, is_counted=True)


@dataclass
class SkipCursor(CountingCursor):
    """A cursor that skips ``left`` more elements."""

    left: int

    def skip(self, num_elements: int) -> int:
        """Skip more elements."""
        num_skipped: int = self.source.skip(self.left + num_elements) - self.left  # type: ignore[attr-defined]
        self.left = 0
        return num_skipped

    def pull(self) -> Run:
        self.left -= skip_unread(self.source, self.left)
        while True:
            run: Run = self.source.pull()
            passed = min(self.left, len(run))
            self.left -= passed
            if passed < len(run):
                return run[passed:]
