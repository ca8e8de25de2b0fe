"""`VariableContract`: the part of a variable that rooms below ``variables`` use."""

from __future__ import annotations

from typing import Any

from daskdist.execute.messages.by_reference import VariableKey


class VariableContract:
    """The part of a variable that values, collectives and replicas use.

    Attributes
    ----------
    key
        The key by which workers look up their copies.
    token
        The token of the strategy.
    """

    key: VariableKey
    token: str

    def read_value(self) -> Any:
        """Return the current value."""
        raise NotImplementedError
