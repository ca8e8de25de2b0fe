"""``prefetch``: elements that are prepared while earlier ones are in use."""

from __future__ import annotations

from dataclasses import dataclass

from daskdist.core.arguments import whole_number
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Primitive


@dataclass(frozen=True, eq=False)
class Prefetch(Transformation):
    """The same elements, read in the background by threads.

    The setting ``daskdist.window-bytes`` limits the bytes read ahead. ``buffer_size`` is only checked, because a number
    of elements does not say how much memory they take.
    """

    buffer_size: int

    name = "prefetch"
    facts = Facts(keeps_rows=True, keeps_order=True, keeps_spec=True, per_worker=True)
    background = True

    def __post_init__(self) -> None:
        whole_number(self.name, "buffer_size", self.buffer_size, at_least=-1)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return inputs[0]
