"""``sliding_window``: consecutive elements stacked, each window some elements after the one before."""

from __future__ import annotations

from dataclasses import dataclass

from daskdist.core.node import Facts
from daskdist.core.primitive import Primitive
from daskdist.core.spec import ElementSpec
from daskdist.ops.window import WindowNode


@dataclass(frozen=True, eq=False)
class SlidingWindow(WindowNode):
    """Windows as `WindowNode` counts them, each stacked along a new first axis."""

    name = "sliding_window"
    facts = Facts(regroups=True, levels=1)

    @property
    def spec(self) -> ElementSpec:
        return self.source.spec.grouped(self.size if self.drop_remainder else None)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return self.windows(inputs)
