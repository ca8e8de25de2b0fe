"""The arguments of calls on replicas as they are sent: references to results, and pickles of the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Final

import cloudpickle
import numpy as np

from daskdist.errors import ArgumentError
from daskdist.execute.callers.fetch import WithRemoteResults
from daskdist.execute.messages.failure import Failure
from daskdist.execute.messages.pickling import describe_unpicklable, dumps_on_host, type_name
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.input.replica_plans import ReplicaPlan
from daskdist.strategy.steps.calls import LOOP_PREFIX, Call, Record
from daskdist.strategy.steps.outcomes import Failed, StaysOnWorker, received_outcome
from daskdist.strategy.steps.sending.sent_objects import SentObject
from daskdist.strategy.values.extract import ExtractAll, PerReplicaRef
from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.values.placeholders import Placeholders


@dataclass(slots=True)
class ReplicaCall:
    """A call on replicas as it is sent; calling it sends it again.

    Parameters
    ----------
    sender
        Sends it again to given replicas.
    function
        The function.
    leaves
        The leaves of the arguments, packed.
    structure
        The structure of the arguments, pickled.
    settings
        The settings of the program.
    kept
        Futures of what has to stay on the cluster until the call is over.
    name
        The name of the call.
    is_step
        Whether it is a call of `run`.
    is_loop
        Whether replicas iterate over a distributed dataset in it.
    takes_results
        Whether each replica is given its own result of an earlier call in it.
    undo_from
        The number of the first call whose changes of variables can still be undone; None if those of this call need not
        be undone.
    """

    # The backend; a bound method would be one more object of each step under way.
    sender: Any
    function: SentObject
    leaves: Sequence[Any]
    structure: bytes
    settings: Any
    kept: Sequence[Any]
    name: str
    is_step: bool
    is_loop: bool
    takes_results: bool
    undo_from: int | None

    def __call__(self, group: ReplicaGroup) -> Any:
        return self.sender.send_again(self, group)


def objects_in(columns: Sequence[Any], lanes: Sequence[int]) -> list[SentObject]:
    """Return the objects among the columns of handles that calls of some replicas need."""
    objects = [column for column in columns if type(column) is SentObject]
    for column in columns:
        if type(column) is tuple and SentObject in map(type, column):
            objects += [column[lane] for lane in lanes if type(column[lane]) is SentObject]
    return objects


def needed(columns: Sequence[Any], kept: Sequence[Any]) -> Any:
    """Return the handles that a call needs: mostly one column, which all steps of a bundle share."""
    return columns[0] if len(columns) == 1 and not kept and type(columns[0]) in COLUMNS else (*columns, *kept)


def wired_arguments(packed: Sequence[Any], num_replicas: int) -> tuple[list[Any], list[Any]]:
    """Return the columns of handles that a call needs, and the arguments of each replica (one object if equal)."""
    if PerReplica in map(type, packed):
        placeholders_of = [Placeholders() for _ in range(num_replicas)]
        args = [
            _sendable(placeholders.picks, [_template_of_part(placeholders, leaf, lane) for leaf in packed])
            for lane, placeholders in enumerate(placeholders_of)
        ]
        columns = zip_longest(*[placeholders.handles for placeholders in placeholders_of])
        return list(columns), args
    placeholders = Placeholders()
    leaves = [
        placeholders.add(leaf.handles, leaf.picks) if type(leaf) is PerReplicaRef else _template_of(placeholders, leaf)
        for leaf in packed
    ]
    picks: list[tuple[int, Any]] = placeholders.picks
    if tuple not in [type(pick) for _, pick in picks]:
        return placeholders.handles, [_sendable(picks, leaves)] * num_replicas
    return placeholders.handles, [
        _sendable([(number, pick[lane] if type(pick) is tuple else pick) for number, pick in picks], leaves)
        for lane in range(num_replicas)
    ]


def last_reference(record: Record, place: int, error: Exception) -> tuple[Any, ...]:
    """Return the reference to a result whose worker is lost: what was fetched before, or an error."""
    structure, payload = record.outcomes[place] or (None, StaysOnWorker(0))
    if type(payload) is Failed:
        return "f", payload
    if type(payload) is StaysOnWorker:
        return "f", Failed(Failure.of(error), None)
    try:
        return "p", cloudpickle.dumps(received_outcome(structure, payload))
    except Exception as unpickled:
        # The value was sent, but cannot be unpickled here.
        return "f", Failed(Failure.of(unpickled), None)


def as_now(leaf: Any) -> Any:
    """Return a copy of a packed argument, which later changes of arrays do not reach."""
    if type(leaf) is PerReplica:
        return PerReplica(list(map(as_now, leaf.values)))
    return leaf.copy("K") if isinstance(leaf, np.ndarray) else leaf


def _sendable(picks: list[tuple[int, Any]], leaves: list[Any]) -> Any:
    # Values are pickled now, since they may change later.
    return pickled_value((picks, leaves), lambda: "run: an argument")


# Types of arguments with a handle for each replica.
COLUMNS: Final = frozenset({tuple, Call})


def _template_of(placeholders: Placeholders, leaf: Any) -> Any:
    return placeholders.add(leaf, ExtractAll()) if type(leaf) is SentObject else placeholders.leaf(leaf)


def _template_of_part(placeholders: Placeholders, leaf: Any, lane: int) -> Any:
    if type(leaf) is PerReplica:
        return _template_of(placeholders, leaf.values[lane])
    if type(leaf) is PerReplicaRef:
        return placeholders.add(leaf.handles[lane], leaf.pick(lane))
    return _template_of(placeholders, leaf)


def pickled_value(value: Any, name: Callable[[], str]) -> bytes:
    """Return the pickle of a value, whose name is for the error if it does not pickle."""
    try:
        pickled = dumps_on_host(value)
        if b"__main__" not in pickled:
            return pickled
    except Exception:
        # Try again below, with functions by value.
        pass
    try:
        return dumps_on_host(value, by_value=True)
    except Exception as error:
        raise ArgumentError(
            f"{name()} ({type_name(value)}) does not pickle, and so cannot be sent to a worker"
            f"{describe_unpicklable(value)}: {error}"
        ) from error


@lru_cache(maxsize=256)
def name_of_call(operation: str, function: str, is_loop: bool) -> str:
    """Return the name of a call, the same object for all calls of a function, so that a message contains it once."""
    return f"{LOOP_PREFIX if is_loop else ''}{operation}-{function}"


def is_plan(value: Any) -> bool:
    """Return whether a replica's argument is its part of a distributed dataset."""
    return type(value.value if type(value) is WithRemoteResults else value) is ReplicaPlan


def place_of_argument(operation: str, treespec: Any, number: int) -> str:
    """Return the place of a leaf among the arguments of a call, for messages."""
    (which, *path) = treespec.paths()[number]
    return f"{operation}: " + ("args" if which == 0 else "kwargs") + "".join(f"[{key!r}]" for key in path)
