"""`VariableStore`: the states of variables that the replicas of a process keep between calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from daskdist.errors import ArgumentError
from daskdist.strategy.values.variable_contract import variable_number
from daskdist.strategy.variables.record import VariableRecord, is_on_read, layout_of
from daskdist.strategy.variables.undo_log import MISSING, UNKNOWN, UndoLog


class VariableStore:
    """The states of the variables of one strategy, for the replicas of one process."""

    def __init__(self, token: str, lost_with: str = "") -> None:
        self.token = token
        self._lost_with = lost_with
        # Lost workers, until it is known which replicas continue.
        self.lost: tuple[str, ...] = ()
        # number of the variable -> number of the replica -> state.
        self._states: dict[int, dict[int, Any]] = {}
        self._undo_logs: dict[int, UndoLog] = {}
        # The numbers of variables of arrays of which each replica has its own value.
        self._on_read: set[int] = set()

    def undo_log(self, replica: int) -> UndoLog:
        """Return the log of a replica's changes, which notes those of calls that may be undone."""
        return self._undo_logs.setdefault(replica, UndoLog())

    def undo(self, replica: int, call: int) -> bool:
        """Restore a replica's states before a call, by its number; return False if they are not known."""

        def restore(variable: int, state: Any) -> None:
            if state is MISSING:
                self.drop_of(replica, (variable,))
            else:
                self._states.setdefault(variable, {})[replica] = state

        return self.undo_log(replica).undo(call, restore)

    def get(self, variable: VariableRecord, replica: int) -> Any:
        """Return the state of a variable on a replica.

        Raises
        ------
        ArgumentError
            The replica has no state of the variable.
        """
        try:
            return self._states[variable_number(variable)][replica]
        except KeyError:
            why = "the initial value could not be computed, or its worker was restarted since"
            if self._lost_with:
                why = f"{self._lost_with}; assign a value, for example load the last checkpoint"
            raise ArgumentError(f"{variable.name}: replica {replica} has no value: {why}") from None

    def others(self, variable: VariableRecord, replica: int) -> list[Any]:
        """Return the states of a variable on the other replicas of this process."""
        states = dict(self._states.get(variable_number(variable), {}))
        return [state for other, state in states.items() if other != replica]

    def put(self, variable: VariableRecord, replica: int, state: Any) -> None:
        """Store a state."""
        states = self._states.setdefault(variable_number(variable), {})
        if replica in self._undo_logs:
            before = states.get(replica, MISSING)
            is_known = before is MISSING or layout_of(variable).treespec is not None
            self._undo_logs[replica].note(variable_number(variable), before if is_known else UNKNOWN)
        if is_on_read(variable) and layout_of(variable).treespec is not None:
            self._on_read.add(variable_number(variable))
        states[replica] = state

    def own_states(self) -> dict[int, dict[int, Any]]:
        """Return the states that replicas have of their own: number of a variable -> number of a replica -> state."""
        return {number: dict(self._states.get(number, {})) for number in list(self._on_read)}

    def note_mutable(self, variable: VariableRecord, replica: int) -> None:
        """Note that the object of a state may be changed in place."""
        if replica in self._undo_logs:
            self._undo_logs[replica].note(variable_number(variable), UNKNOWN)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Renumber the replicas, given the new number of each old one."""
        for number, states in self._states.items():
            self._states[number] = {numbers[replica]: state for replica, state in states.items()}
        self._undo_logs = {numbers[replica]: undo_log for replica, undo_log in self._undo_logs.items()}

    def drop(self, number: int) -> None:
        """Drop the states of a variable."""
        self._states.pop(number, None)

    def drop_of(self, replica: int, numbers: Iterable[int]) -> None:
        """Drop one replica's states of variables."""
        for number in numbers:
            states = self._states.get(number, {})
            states.pop(replica, None)
            if not states:
                self._states.pop(number, None)
