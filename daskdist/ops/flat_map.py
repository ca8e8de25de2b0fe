"""``flat_map``: the elements of the datasets that a function returns for elements."""

from __future__ import annotations

from dataclasses import dataclass, replace

from daskdist.core.primitive import Arrange, Compute, Fact, Primitive, gathered
from daskdist.ops.interleave import InterleaveRows
from daskdist.ops.nested import ExpandRows, Expansion, elements_of
from daskdist.ops.window_rows import batches_of_windows, stacked_windows


@dataclass(frozen=True, eq=False)
class FlatMap(Expansion):
    """The elements of the first element's dataset, then those of the second's, and so on."""

    name = "flat_map"

    @property
    def note(self) -> str:
        """Say whether windows are batched by arithmetic; nothing is read."""
        return "" if batches_of_windows(self.source, self.function) is None else "windows stacked, no datasets made"

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        drop_remainder = batches_of_windows(self.source, self.function)
        if drop_remainder is not None:
            batches = stacked_windows(inputs[0], drop_remainder=drop_remainder)
            if batches is not None:
                return batches
        source, function = self._calls(inputs[0])
        if self.function.nested_spec(self.source).is_cheap:
            # Small datasets are created and read on the worker that has their elements, many in one call.
            expand = ExpandRows(function)
            return Compute(source, expand, self.name, factor=None, costly=self.function, may_be_large=True)
        elements = Fact(gathered(source), elements_of, f"{self.name}-elements")
        rows = InterleaveRows(1, None, function)
        lenient = replace(rows, leaves_out_failed=True)
        return Arrange((elements,), rows, grouped=0, name=self.name, lenient=lenient)
