"""Checkpoints in functions that run on replicas: of all replicas at one step, written by the first replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from daskdist.checkpoint.checkpoint import Stateful, refuse_objects_inside
from daskdist.checkpoint.checkpoint_manager import CheckpointManager
from daskdist.checkpoint.nests import PLAIN, as_numpy, differences, like
from daskdist.errors import ArgumentError
from daskdist.execute.messages.failure import Failure
from daskdist.strategy.collectives.operations import Collect, First
from daskdist.strategy.collectives.rendezvous import Collective
from daskdist.strategy.replica.call_end import CallEnd

_PLAIN: Final = (*PLAIN, np.generic, type(None))
# An attribute of objects whose state may consist of the values of all replicas, which then all call ``state_dict``:
# whether it does, rather than be the state of any replica.
_OF_ALL: Final = "_is_of_all_replicas"


class ReplicaCheckpoints:
    """The checkpoints of one call, for one of its replicas.

    Parameters
    ----------
    meet
        Takes part in a collective operation.
    number
        The number of the replica.
    end
        Returns whether the call is to end.
    """

    def __init__(self, meet: Callable[[Collective, Any], Any], number: int, end: CallEnd) -> None:
        self._meet = meet
        self._number = number
        self._end = end
        self._managers: list[CheckpointManager] = []

    def save(self, manager: CheckpointManager, objects: Mapping[str, Any]) -> None:
        """Save the states of all replicas as one checkpoint; see `ReplicaContext.checkpoint`."""
        self._check("checkpoint", manager, objects)
        for name, value in objects.items():
            if not isinstance(value, Stateful):
                try:
                    refuse_objects_inside(value)
                except ArgumentError as error:
                    raise ArgumentError(f"checkpoint: {name!r} has {error}") from None
        # A failure of the previous save is raised on all replicas.
        failure = self._outcome(lambda: self._used(manager).wait())
        plain = {name: repr(value) for name, value in objects.items() if isinstance(value, _PLAIN)}
        collected = self._meet(Collect("checkpoint"), (list(objects), plain, failure))
        _check_alike([(names, values) for names, values, _ in collected])
        if isinstance(collected[0][2], Failure):
            raise collected[0][2].error()
        states = {}
        for name, value in objects.items():
            is_stateful = isinstance(value, Stateful)
            if self._number and not getattr(value, _OF_ALL, False):
                continue
            try:
                states[name] = as_numpy(value.state_dict() if is_stateful else value)
            except ArgumentError as error:
                raise ArgumentError(f"checkpoint: {name!r}: {error}") from error
        if not self._number:
            manager._save_states(states, check=self._end.check_saves)

    def restore(self, manager: CheckpointManager, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Restore all replicas from the newest checkpoint; see `ReplicaContext.restore`."""
        self._check("restore", manager, objects)
        newest = self._meet(First("restore"), self._outcome(lambda: self._used(manager)._newest_states()))
        if isinstance(newest, Failure):
            raise newest.error()
        number, saved = newest
        if number is None:
            return {name: value for name, value in objects.items() if not isinstance(value, Stateful)}
        missing = [name for name in objects if name not in saved]
        superfluous = [name for name in saved if name not in objects]
        if missing or superfluous:
            raise ArgumentError(
                f"restore: {manager.path(number)} is of other objects: {differences(missing, superfluous)}"
            )
        states = {}
        for name, value in objects.items():
            try:
                states[name] = _state_for(value, saved[name])
            except ArgumentError as error:
                raise ArgumentError(f"restore: {name!r}: {error}") from error
        for name, value in objects.items():
            if isinstance(value, Stateful):
                value.load_state_dict(states.pop(name))
        return states

    def close(self, *, is_failed: bool) -> None:
        """Wait until all checkpoints are written; raise an error of writing unless the call has failed already."""
        managers, self._managers = self._managers, []
        for manager in managers:
            try:
                manager.close()
            except Exception:
                # The error was logged.
                if not is_failed:
                    raise

    def _check(self, operation: str, manager: Any, objects: Mapping[str, Any]) -> None:
        if not isinstance(manager, CheckpointManager):
            raise ArgumentError(
                f"{operation}: the first argument is {type(manager).__name__}; give a CheckpointManager, and objects "
                f"by name: context.{operation}(manager, iterator=iterator, weights=weights)"
            )
        if not objects:
            raise ArgumentError(f"{operation}: give the objects by name: context.{operation}(manager, weights=weights)")

    def _used(self, manager: CheckpointManager) -> CheckpointManager:
        if manager not in self._managers:
            # From now on, earlier calls of programs that are gone cannot write.
            manager._claim_directory()
            self._managers.append(manager)
        return manager

    def _outcome(self, function: Callable[[], Any]) -> Any:
        # Return the result or the failure of the first replica, for which the others wait.
        if self._number:
            return None
        try:
            return function()
        except Exception as error:
            return Failure.of(error)


def _state_for(value: Any, saved: Any) -> Any:
    if not isinstance(value, Stateful):
        # Give each replica a copy, which it may change.
        return as_numpy(saved)
    if hasattr(value, _OF_ALL):
        return saved
    return like(value.state_dict(), saved, owner=value)


def _check_alike(collected: list[tuple[list[str], dict[str, str]]]) -> None:
    (names, values), *others = collected
    for number, (other_names, other_values) in enumerate(others, 1):
        if other_names != names:
            raise ArgumentError(
                f"checkpoint: replica 0 saves {', '.join(names)}, and replica {number} {', '.join(other_names)}; save "
                "the same on all replicas, in the same order"
            )
        for name, value in values.items():
            if other_values.get(name) != value:
                other_value = other_values.get(name, "no number or text")
                raise ArgumentError(
                    f"checkpoint: {name!r} is {value:.80} on replica 0 and {other_value:.80} on replica {number}; give "
                    "a value that is the same on all, such as one of all_reduce"
                )
