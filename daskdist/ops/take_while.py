"""``take_while``: the elements before the first for which a predicate is False."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskdist.core.functions.user_function import UserFunction
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Arrange, ByCursor, Cursor, Exhausted, Fact, Primitive, gathered
from daskdist.core.selection.runs import Run
from daskdist.core.vectorize.apply import Vectorised
from daskdist.ops.filter import FilterRows


@dataclass(frozen=True, eq=False)
class TakeWhile(Transformation):
    """The elements before the first for which the predicate returns False."""

    predicate: UserFunction

    name = "take_while"
    facts = Facts(keeps_spec=True)

    @property
    def note(self) -> str:
        """Describe whether the predicate is called for many rows at once, and if not, why; nothing is read."""
        return Vectorised(self.predicate).note(self.source)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        mask = FilterRows(self.predicate, Vectorised(self.predicate)).mask
        holds = Fact(gathered(inputs[0]), mask, self.name)
        return Arrange((holds,), ByCursor(TakeWhileCursor), grouped=0, name=self.name)


@dataclass
class TakeWhileCursor:
    """A cursor that ends after the predicate, a fact about each element, was False; ``is_over`` is True then."""

    source: Cursor
    is_over: bool = False

    def pull(self) -> Run:
        if self.is_over:
            raise Exhausted
        noted = self.source.pull()
        while not len(noted):
            # All elements of a call were left out.
            noted = self.source.pull()
        run: Run = noted.run
        if noted.fact.all():
            return run
        self.is_over = True
        number = int(np.argmin(noted.fact))
        if number == 0:
            raise Exhausted
        return run[:number]
