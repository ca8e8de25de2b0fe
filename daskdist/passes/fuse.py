"""Fusion of adjacent computations into one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from daskdist.core.failing.composed import Composed, stages_of
from daskdist.core.primitive import Arrange, Chain, Compute, Fact, Primitive, Read


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
    stages = *stages_of(source.function, source.factor), *stages_of(primitive.function, primitive.factor)
    changes: dict[str, Any] = {
        "function": Composed(stages),
        "factor": None if source.factor is None or primitive.factor is None else source.factor * primitive.factor,
        "name": f"{source.name}-{primitive.name}",
        "costly": primitive.costly or source.costly,
        "may_be_large": primitive.may_be_large or source.may_be_large,
    }
    return replace(source, in_order=source.in_order and primitive.in_order, **changes)
