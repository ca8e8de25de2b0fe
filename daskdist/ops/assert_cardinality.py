"""``assert_cardinality``: a stated number of elements, checked as they come."""

from __future__ import annotations

from dataclasses import dataclass

from daskdist.core.arguments import whole_number
from daskdist.core.cardinality import INFINITE
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Arrange, ByCursor, Cursor, Exhausted, Primitive
from daskdist.core.selection.runs import Run
from daskdist.errors import CardinalityError


@dataclass(frozen=True, eq=False)
class AssertCardinality(Transformation):
    """The same elements, whose number is ``expected``; -1 means endless."""

    expected: int

    name = "assert_cardinality"
    facts = Facts(keeps_spec=True)

    def __post_init__(self) -> None:
        whole_number(self.name, "expected_cardinality", self.expected, at_least=INFINITE)

    @property
    def cardinality(self) -> int:
        return self.expected

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        rows = ByCursor(CountCursor, (self.expected,))
        return Arrange(inputs, rows, inputs[0].grouped, name=self.name)


@dataclass
class CountCursor:
    """A cursor that counts elements; ``number`` have come."""

    source: Cursor
    expected: int
    number: int = 0

    def pull(self) -> Run:
        try:
            run: Run = self.source.pull()
        except Exhausted:
            if self.number != self.expected:
                raise CardinalityError(self._message(f"there are {self.number}")) from None
            raise
        self.number += len(run)
        if self.number > self.expected != INFINITE:
            raise CardinalityError(self._message("there are more"))
        return run

    def _message(self, actual: str) -> str:
        expected = "infinite" if self.expected == INFINITE else f"{self.expected}"
        return f"assert_cardinality: the stated number of elements is {expected}, but {actual}"
