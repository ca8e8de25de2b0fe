"""Functions that call others, each with the result of the one before: calls that were fused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from daskdist.core.block import Rows
from daskdist.core.failing.skip_errors import with_skipped


@dataclass(frozen=True)
class Composed:
    """The composition of two functions."""

    first: Callable[..., Rows]
    then: Callable[[Rows], Rows]

    def __call__(self, *args: Any) -> Rows:
        rows = self.first(*args)
        result = self.then(rows)
        return result if result is rows else with_skipped(result, rows.skipped)


def stages_of(function: Callable[..., Rows]) -> tuple[Callable[..., Rows], ...]:
    """Return the functions that a function was composed of, in order; itself if it was not."""
    if not isinstance(function, Composed):
        return (function,)
    return (*stages_of(function.first), *stages_of(function.then))
