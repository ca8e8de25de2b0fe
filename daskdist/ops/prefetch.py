"""``prefetch``: elements made ready while earlier ones are in use."""

from __future__ import annotations

from dataclasses import dataclass

from daskdist.core.arguments import whole_number
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Primitive


@dataclass(frozen=True, eq=False)
class Prefetch(Transformation):
    """The same elements, read in the background by threads.

    How far ahead is governed by bytes (``daskdist.window-bytes``), not by ``buffer_size``, which is only
    checked: a number of elements says nothing of the memory they take.
    """

    buffer_size: int

    name = "prefetch"
    facts = Facts(keeps_rows=True, keeps_order=True, keeps_spec=True, per_worker=True)
    background = True

    def __post_init__(self) -> None:
        whole_number(self.name, "buffer_size", self.buffer_size, at_least=-1)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return inputs[0]
