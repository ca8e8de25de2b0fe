"""``filter``: the elements for which a predicate holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from daskdist.cached_property import cached_property
from daskdist.core.block import Block, Rows
from daskdist.core.cardinality import counted
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Compute, Primitive
from daskdist.core.randomness.seed import SeedsInCall
from daskdist.core.structure import LONE
from daskdist.core.vectorize.apply import Vectorised, blocks_of, call_at_once
from daskdist.devices import on_host
from daskdist.errors import UserFunctionError
from daskdist.ops.map import result_bytes_at_once


@dataclass(frozen=True, eq=False)
class Filter(Transformation):
    """The elements for which the predicate returns True, in order.

    Parameters
    ----------
    predicate
        Returns a bool for an element.
    vectorized
        True if it takes many elements, with rows along axis 0, and returns an array of bools; False if it is called
        for each; None if it is written for one, and may be called for many if the result is the same.
    """

    predicate: UserFunction
    vectorized: bool | None = None

    name = "filter"
    facts = Facts(compute=True, keeps_spec=True, per_worker=True)

    @cached_property
    def has_large_results(self) -> bool:
        """True if the predicate is called row by row, as it may load the file that a row names."""
        return not self.vectorized and result_bytes_at_once(self.predicate, self.source) is None

    @property
    def note(self) -> str:
        """Describe whether the predicate is called for many rows at once, and if not, why; nothing is read."""
        if self.vectorized is None:
            return Vectorised(self.predicate).note(self.source)
        return "vectorised: given whole blocks" if self.vectorized else "row by row: vectorized=False"

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        vectorised = Vectorised(self.predicate) if self.vectorized is None else None
        function = FilterBlocks(self.predicate) if self.vectorized else FilterRows(self.predicate, vectorised)
        return Compute(
            inputs[0], function, "filter", factor=None, costly=self.predicate, may_be_large=self.may_be_large
        )


@dataclass(frozen=True)
class FilterRows:
    """A function that filters a block or bundle, with one call for a block if that gives the same."""

    predicate: UserFunction
    vectorised: Vectorised | None = None

    def __call__(self, rows: Rows) -> Rows:
        return _kept(rows, self.mask(rows))

    def mask(self, rows: Rows) -> Any:
        """Return the predicate's values for the elements; bool, shape ``(num_elements,)``."""
        return self._by_row(rows) if self.vectorised is None else self.vectorised.column(rows, self._by_row)

    def _by_row(self, rows: Rows) -> Any:
        mask = np.zeros(len(rows), bool)
        with SeedsInCall() as seeds:
            for index, element in enumerate(rows.elements()):
                seeds.argument, seeds.number = element, 0
                keep = on_host(self.predicate(element, lambda index=index: rows.where(index)))  # type: ignore[misc]
                if not isinstance(keep, (bool, np.bool_)) and not (
                    isinstance(keep, np.ndarray) and keep.shape == () and keep.dtype == bool
                ):
                    raise UserFunctionError(
                        f"{self.predicate.operation}: {self.predicate} returned {type(keep).__name__} {keep!r} "
                        f"on {rows.where(index)}; "
                        "a predicate returns one bool"
                    )
                mask[index] = keep
        return mask


@dataclass(frozen=True)
class FilterBlocks:
    """A function that filters the rows of a block by a predicate of many rows."""

    predicate: UserFunction

    def __call__(self, rows: Rows) -> Rows:
        if not len(rows):
            return rows
        blocks = [rows] if isinstance(rows, Block) else blocks_of(rows, "filter")
        return _kept(rows, np.concatenate(list(map(self._mask, blocks))))

    def _mask(self, block: Block) -> Any:
        where = f"{counted(len(block), 'row')} of {block.label or 'a block'}"
        leaves, structure = call_at_once(self.predicate, block.structure, block.leaves, len(block), where)
        if structure != LONE or leaves[0].dtype != bool or leaves[0].ndim != 1:
            kinds = structure.pack([f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves])
            raise UserFunctionError(
                f"{self.predicate.operation}: {self.predicate} returned {kinds} on {where}; "
                f"with vectorized=True a predicate returns bool[{len(block)}]"
            )
        return leaves[0]


def _kept(rows: Rows, mask: Any) -> Rows:
    kept = np.flatnonzero(mask)
    return rows if len(kept) == len(rows) else rows.take(kept)
