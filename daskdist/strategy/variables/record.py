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
    _layout
        The structure, shapes and dtypes of the value.
    """

    name: str
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    _layout: CopyLayout

    @property
    def _is_of_all_replicas(self) -> bool:
        return is_on_read(self)


def layout_of(variable: VariableRecord) -> CopyLayout:
    """Return the structure, shapes and dtypes of the value of a variable."""
    return variable._layout


def set_layout(variable: VariableRecord, layout: CopyLayout) -> None:
    """Set the structure, shapes and dtypes of the value of a variable to those of its first value."""
    variable._layout = layout


def is_on_read(variable: VariableRecord) -> bool:
    """Return whether each replica has its own value (``ON_READ``)."""
    return variable.synchronization is VariableSynchronization.ON_READ


def is_mirrored(variable: VariableRecord) -> bool:
    """Return whether the value of a variable consists of arrays that are the same on all replicas."""
    return variable._layout.treespec is not None and not is_on_read(variable)


def is_saved_per_replica(variable: VariableRecord) -> bool:
    """Return whether checkpoints save each replica's value, as these differ and are not summed or averaged."""
    if not is_on_read(variable):
        return False
    return variable._layout.treespec is None or variable.aggregation is VariableAggregation.NONE


def check_is_of(variable: VariableRecord, token: str, operation: str) -> None:
    """Raise an error if a variable is used in an operation of another strategy.

    Raises
    ------
    ArgumentError
        The token belongs to another strategy.
    """
    if variable._token != token:
        raise ArgumentError(
            f"{operation}: {variable.name} belongs to another strategy; use a variable with the strategy in whose "
            "scope it was created"
        )
