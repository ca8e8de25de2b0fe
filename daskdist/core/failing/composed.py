"""Functions that call others, each with the result of the one before: calls that were fused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from daskdist.core.block import Rows


class Stage(NamedTuple):
    """A function of rows, and the number of its results for each element; None if that varies."""

    function: Callable[..., Rows]
    factor: int | None


@dataclass(frozen=True)
class Composed:
    """The composition of functions, of which each but the first has the result of the one before."""

    stages: tuple[Stage, ...]

    def __call__(self, *args: Any) -> Rows:
        (first, _), *others = self.stages
        rows = first(*args)
        for function, _ in others:
            result = function(rows)
            if result is not rows:
                result.skipped = (*rows.skipped, *result.skipped)
            rows = result
        return rows


def stages_of(function: Callable[..., Rows], factor: int | None) -> tuple[Stage, ...]:
    """Return the functions that a function was composed of, in order; itself with its factor if it was not."""
    return function.stages if isinstance(function, Composed) else (Stage(function, factor),)
