"""``ignore_errors``: the elements whose computation succeeds."""

from __future__ import annotations

from dataclasses import dataclass

from daskdist.core.cardinality import UNKNOWN
from daskdist.core.failing.leaving_out import without_failed
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Primitive
from daskdist.errors import DamagedFileError


@dataclass(frozen=True, eq=False)
class IgnoreErrors(Transformation):
    """The elements that no upstream operation failed on; others are logged and left out."""

    name = "ignore_errors"
    facts = Facts(keeps_spec=True, per_worker=True, leaves_out_failed=True)

    @property
    def cardinality(self) -> int:
        try:
            number = self.source.cardinality
        except DamagedFileError:
            return UNKNOWN
        return number if number <= 0 else UNKNOWN

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return without_failed(inputs[0])
