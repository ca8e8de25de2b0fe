"""Values of context variables for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any


@contextmanager
def changed(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Give a context variable a value inside a ``with`` block.

    An interrupt at any place leaves the earlier value: a token of the variable could be lost by one.
    """
    before = variable.get()
    try:
        variable.set(value)
        yield
    finally:
        variable.set(before)
