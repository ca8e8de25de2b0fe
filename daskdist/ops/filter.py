"""``filter``: the elements for which a predicate holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskdist.core.block import Rows
from daskdist.core.cardinality import UNKNOWN
from daskdist.core.function import UserFunction
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Compute, Primitive
from daskdist.errors import UserFunctionError


@dataclass(frozen=True, eq=False)
class Filter(Transformation):
    """Those elements for which the predicate gives True, in order."""

    predicate: UserFunction

    name = "filter"
    facts = Facts(compute=True, keeps_spec=True, per_worker=True)

    @property
    def cardinality(self) -> int:
        return 0 if self.source.cardinality == 0 else UNKNOWN

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Compute(inputs[0], FilterRows(self.predicate), "filter", factor=None)


@dataclass(frozen=True)
class FilterRows:
    """The predicate over the elements of a block or bundle."""

    predicate: UserFunction

    def __call__(self, rows: Rows) -> Rows:
        kept = []
        for index, element in enumerate(rows.elements()):
            keep = self.predicate(element, lambda index=index: rows.where(index))  # type: ignore[misc]
            if not isinstance(keep, (bool, np.bool_)) and not (
                isinstance(keep, np.ndarray) and keep.shape == () and keep.dtype == bool
            ):
                raise UserFunctionError(
                    f"filter: {self.predicate} returned {type(keep).__name__} {keep!r} on {rows.where(index)}; "
                    "a predicate returns one bool"
                )
            if keep:
                kept.append(index)
        return rows if len(kept) == len(rows) else rows.take(np.asarray(kept, np.intp))
