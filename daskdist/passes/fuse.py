"""Fusion of adjacent computations into one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from daskdist.core.block import Rows
from daskdist.core.failing.skip_errors import with_skipped
from daskdist.core.primitive import Arrange, Chain, Composition, Compute, Fact, Primitive, Read


@dataclass(frozen=True)
class Composed:
    """The composition of two functions."""

    first: Callable[..., Rows]
    then: Callable[[Rows], Rows]

    @property
    def stages(self) -> tuple[Callable[..., Rows], ...]:
        """The functions, in order; none of them is a composition."""
        return (*_stages_of(self.first), *_stages_of(self.then))

    def __call__(self, *args: Any) -> Rows:
        rows = self.first(*args)
        result = self.then(rows)
        return result if result is rows else with_skipped(result, rows.skipped)


def _stages_of(function: Callable[..., Rows]) -> tuple[Callable[..., Rows], ...]:
    return function.stages if isinstance(function, Composition) else (function,)


def fuse(primitive: Primitive) -> Primitive:
    """Return the same stream with one call for each chain of computations, or of a read and computations."""
    if isinstance(primitive, Arrange):
        return replace(primitive, inputs=tuple(map(fuse, primitive.inputs)))
    if isinstance(primitive, (Chain, Fact)):
        return replace(primitive, source=fuse(primitive.source))
    if not isinstance(primitive, Compute):
        return primitive
    source = fuse(primitive.source)
    if not isinstance(source, (Read, Compute)) or primitive.unstacked or primitive.is_full:
        return replace(primitive, source=source)
    changes: dict[str, Any] = {
        "function": Composed(source.function, primitive.function),
        "factor": None if source.factor is None or primitive.factor is None else source.factor * primitive.factor,
        "name": f"{source.name}-{primitive.name}",
        "costly": primitive.costly or source.costly,
    }
    return replace(source, in_order=source.in_order and primitive.in_order, **changes)
