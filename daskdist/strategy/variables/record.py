"""`VariableRecord`: the identity of a variable and the options of its synchronization."""

from __future__ import annotations

from daskdist.errors import ArgumentError
from daskdist.strategy.values.variable_contract import VariableContract
from daskdist.strategy.variables.aggregation import VariableAggregation, VariableSynchronization
from daskdist.strategy.variables.layout import CopyLayout


class VariableRecord(VariableContract):
    """The identity of a variable and the options of its synchronization.

    Attributes
    ----------
    name
        The name in messages.
    synchronization, aggregation
        When and how the copies are combined.
    layout
        The structure, shapes and dtypes of the value.
    """

    name: str
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    layout: CopyLayout

    @property
    def is_mirrored(self) -> bool:
        """Return whether the value consists of arrays that are the same on all replicas."""
        return self.layout.treespec is not None and not self.is_on_read

    @property
    def is_on_read(self) -> bool:
        """Return whether each replica has its own value (``ON_READ``)."""
        return self.synchronization is VariableSynchronization.ON_READ

    @property
    def is_of_all_replicas(self) -> bool:
        """Return whether the state is of the values of all replicas, rather than that of any."""
        return self.is_on_read

    @property
    def is_saved_per_replica(self) -> bool:
        """Return whether checkpoints save each replica's value, as these differ and are not summed or averaged."""
        if not self.is_on_read:
            return False
        return self.layout.treespec is None or self.aggregation is VariableAggregation.NONE

    def check_is_of(self, token: str, operation: str) -> None:
        """Raise an error if the variable is used in an operation of another strategy.

        Raises
        ------
        ArgumentError
            The token belongs to another strategy.
        """
        if self.token != token:
            raise ArgumentError(
                f"{operation}: {self.name} belongs to another strategy; use a variable with the strategy in whose "
                "scope it was created"
            )
