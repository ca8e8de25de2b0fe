"""``ignore_errors``: the elements whose computation succeeds."""

from __future__ import annotations

from dataclasses import dataclass

from daskdist.core.failing.leaving_out import cardinality_without_failed, without_failed
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Primitive


@dataclass(frozen=True, eq=False)
class IgnoreErrors(Transformation):
    """The elements that no upstream operation failed on; others are logged and left out."""

    name = "ignore_errors"
    facts = Facts(keeps_spec=True, per_worker=True, leaves_out_failed=True)

    @property
    def cardinality(self) -> int:
        return cardinality_without_failed(self.source)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return without_failed(inputs[0])
