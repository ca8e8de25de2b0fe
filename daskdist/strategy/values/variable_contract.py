"""`VariableContract`: the part of a variable that rooms below ``variables`` use."""

from __future__ import annotations

from typing import Any

from daskdist.execute.messages.by_reference import VariableKey


class VariableContract:
    """The part of a variable that values, collectives and replicas use.

    Attributes
    ----------
    _key
        The key by which workers look up their copies.
    _token
        The token of the strategy.
    """

    _key: VariableKey
    _token: str

    def read_value(self) -> Any:
        """Return the current value."""
        raise NotImplementedError


def key_of(variable: VariableContract) -> VariableKey:
    """Return the key by which workers look up their copies of a variable."""
    return variable._key


def variable_number(variable: VariableContract) -> int:
    """Return the number of a variable, which no other one of the program has."""
    return variable._key.number


def token_of(variable: VariableContract) -> str:
    """Return the token of a variable's strategy."""
    return variable._token
