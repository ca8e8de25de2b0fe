"""``rename``: other names for columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from daskdist.errors import ArgumentError
from daskdist.ops.select import Regroup, RegroupedLeaves, by_column


@dataclass(frozen=True, eq=False)
class Rename(RegroupedLeaves):
    """Elements as dicts, some of whose columns have another name."""

    columns: tuple[tuple[str | int, str], ...]

    name = "rename"

    def __post_init__(self) -> None:
        for _, new in self.columns:
            if not isinstance(new, str):
                raise ArgumentError(f"rename: the new name {new!r:.80} is not text")

    @property
    def regroup(self) -> Regroup:
        return partial(_renamed, self.columns)


def _renamed(columns: tuple[tuple[str | int, str], ...], nest: Any) -> dict[str | int, Any]:
    values, new = by_column(nest) if isinstance(nest, (dict, tuple)) else {}, dict(columns)
    for name in new:
        if name not in values:
            known = ", ".join(map(repr, values)) or "none: elements are lone values"
            raise ArgumentError(f"rename: there is no column {name!r}; there are {known}")
    result = {new.get(name, name): value for name, value in values.items()}
    if len(result) < len(values):
        names = [new.get(name, name) for name in values]
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(f"rename: two columns would be called {twice!r}")
    return {str(name): value for name, value in result.items()}
