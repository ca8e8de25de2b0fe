"""`VariableRecord`: the identity of a variable, and how its copies are kept the same."""

from __future__ import annotations

from typing import Any

from daskdist.errors import ArgumentError
from daskdist.execute.messages.by_reference import VariableKey
from daskdist.strategy.variables.aggregation import VariableAggregation, VariableSynchronization
from daskdist.strategy.variables.layout import CopyLayout


class VariableRecord:
    """The identity of a variable, and how its copies are kept the same.

    Attributes
    ----------
    key
        Its number, by which workers find their copies.
    token
        The token of its strategy.
    name
        Its name in messages.
    synchronization, aggregation
        When and how its copies are made one.
    layout
        The structure, shapes and dtypes of its value.
    """

    key: VariableKey
    token: str
    name: str
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    layout: CopyLayout

    def read_value(self) -> Any:
        """Return the current value."""
        raise NotImplementedError

    @property
    def is_mirrored(self) -> bool:
        """Return whether the value is arrays that are the same on all replicas."""
        return self.layout.treespec is not None and not self.is_on_read

    @property
    def is_on_read(self) -> bool:
        """Return whether each replica has its own value (``ON_READ``)."""
        return self.synchronization is VariableSynchronization.ON_READ

    @property
    def is_saved_per_replica(self) -> bool:
        """Return whether a checkpoint has the value of each replica: they differ, and are no sum or mean."""
        if not self.is_on_read:
            return False
        return self.layout.treespec is None or self.aggregation is VariableAggregation.NONE

    def check_is_of(self, token: str, operation: str) -> None:
        """Refuse to use the variable in an operation of another strategy.

        Raises
        ------
        ArgumentError
            The token is not that of its strategy.
        """
        if self.token != token:
            raise ArgumentError(
                f"{operation}: {self.name} is a variable of another strategy; a variable is for the strategy in whose "
                "scope it was made"
            )
