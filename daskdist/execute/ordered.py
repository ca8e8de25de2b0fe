"""What calls on a cluster change: those that use it are made in their order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any


class Ordered:
    """Something on the workers that calls change.

    Parameters
    ----------
    number
        What it is known by there.
    """

    __slots__ = ("last", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        # What the last call that used it will give: the next one comes after it.
        self.last: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        meet(self)
        return Ordered, (self.number,)


class ByReference:
    """Of which a pickle only says which one it is: it is not in this process, or not only."""


_met: ContextVar[set[Ordered] | None] = ContextVar("daskdist ordered", default=None)


@contextlib.contextmanager
def meeting() -> Iterator[set[Ordered]]:
    """Note what is pickled in a ``with`` block."""
    found: set[Ordered] = set()
    token = _met.set(found)
    try:
        yield found
    finally:
        _met.reset(token)


def meet(ordered: Ordered) -> None:
    """Tell whoever wants to know that something is pickled."""
    found = _met.get()
    if found is not None:
        found.add(ordered)
