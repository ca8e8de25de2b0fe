"""``take``: the first elements."""

from __future__ import annotations

from dataclasses import dataclass

from daskdist.core import cardinality
from daskdist.core.arguments import whole_number
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Arrange, ByCursor, Cursor, Exhausted, Primitive
from daskdist.core.selection.runs import Run
from daskdist.core.selection.skipping import may_skip_unread


@dataclass(frozen=True, eq=False)
class Take(Transformation):
    """The first ``count`` elements; all if ``count`` is negative."""

    count: int

    name = "take"
    facts = Facts(keeps_spec=True, by_count=True)

    def __post_init__(self) -> None:
        whole_number(self.name, "count", self.count)

    @property
    def first_taken(self) -> int:
        return 0

    @property
    def cardinality(self) -> int:
        return cardinality.at_most(self.source.cardinality, self.count)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        if self.count < 0:
            return inputs[0]
        rows = ByCursor(TakeCursor, (self.count,))
        return Arrange(inputs, rows, inputs[0].grouped, name=self.name, is_counted=True)


@dataclass
class CountingCursor:
    """A cursor that counts the elements of its input, and so can skip as the input does."""

    source: Cursor

    @property
    def skips_unread(self) -> bool:
        """Return whether its input can skip elements without reading them."""
        return may_skip_unread(self.source)


@dataclass
class TakeCursor(CountingCursor):
    """A cursor that returns ``left`` more elements."""

    left: int

    def skip(self, num_elements: int) -> int:
        """Skip elements that would be returned."""
        num_skipped: int = self.source.skip(min(num_elements, self.left))  # type: ignore[attr-defined]
        self.left -= num_skipped
        return num_skipped

    def pull(self) -> Run:
        if self.left == 0:
            raise Exhausted
        run: Run = self.source.pull()[: self.left]
        self.left -= len(run)
        return run
