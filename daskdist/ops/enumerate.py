"""``enumerate``: each element with its number."""

from __future__ import annotations

from dataclasses import dataclass

from daskdist.core.arguments import whole_number
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Primitive
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import Structure
from daskdist.ops.counter import Counter
from daskdist.ops.zip import zipped

_PAIR = Structure.of((0, 0))[1]


@dataclass(frozen=True, eq=False)
class Enumerate(Transformation):
    """Pairs ``(number, element)``; numbers are int64 scalars counted from ``start``."""

    start: int = 0

    name = "enumerate"
    facts = Facts(keeps_count=True)

    def __post_init__(self) -> None:
        whole_number(self.name, "start", self.start)

    @property
    def spec(self) -> ElementSpec:
        return ElementSpec.nest(_PAIR, [Counter().spec, self.source.spec])

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return zipped((Counter(self.start).lower(()), *inputs), _PAIR, self.name)
