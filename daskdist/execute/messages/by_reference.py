"""Values whose pickle only says which one they are."""

from __future__ import annotations

from typing import Any


class ByReference:
    """A value that lives on the workers: its pickle says which one it is, and has no contents."""


class VariableKey(ByReference):
    """The key by which workers know a variable.

    Parameters
    ----------
    number
        Which of the variables it is.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return VariableKey, (self.number,)
