"""Values that are pickled as an identifier."""

from __future__ import annotations

from typing import Any


class ByReference:
    """A value that lives on the workers: its pickle holds an identifier and no contents."""


class VariableKey(ByReference):
    """The key of a variable on the workers."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return VariableKey, (self.number,)
