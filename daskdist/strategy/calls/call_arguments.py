"""Calls as they are sent: a pickle of the arguments that are in the program, and references to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cloudpickle

from daskdist.execute.callers.fetch import WithRemoteResults
from daskdist.execute.messages.failure import Failure
from daskdist.strategy.calls.calls import LOOP_PREFIX, Record
from daskdist.strategy.calls.outcomes import Failed, StaysOnWorker, received_outcome
from daskdist.strategy.calls.sent_objects import SentObject
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.input.replica_plans import ReplicaPlan
from daskdist.strategy.values.per_replica import PerReplica, num_values
from daskdist.strategy.values.refs import Refs


@dataclass(slots=True)
class PreparedCall:
    """A call as it is sent; calling it sends it again, to given replicas.

    Parameters
    ----------
    sender
        The backend; a bound method would be one more object of each step under way.
    function
        The function, or its pickle.
    structure, leaves
        The structure of the arguments, and the pickle of their leaves, as in `Encoded`.
    inputs
        For each argument that is not in the pickle the number of its leaf and one of these: a `Ref` or a `SentObject`;
        the `Refs` of all replicas; a `PerReplica` of a global batch; a tuple with the `Ref`, the `SentObject` or the
        pickle for each replica.
    settings
        The settings of the program.
    name
        The name of the call.
    worker
        The worker of a call that is made once.
    kept
        Futures of what has to stay on the cluster until the call is over.
    is_of_replicas
        Whether each replica makes the call.
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

    sender: Any
    function: SentObject | bytes
    structure: bytes
    leaves: bytes
    inputs: Sequence[tuple[int, Any]]
    settings: Any
    name: str
    worker: str | None = None
    kept: Sequence[Any] = ()
    is_of_replicas: bool = False
    is_step: bool = False
    is_loop: bool = False
    takes_results: bool = False
    undo_from: int | None = None

    def __call__(self, group: ReplicaGroup) -> Any:
        return self.sender.send_again(self, group)


def objects_of(
    objects: Sequence[SentObject], columns: Sequence[tuple[int, Any]], lanes: Sequence[Any]
) -> list[SentObject]:
    """Return the objects that a worker needs for a call of some of its replicas, besides those of all workers."""
    parts = [column[lane] for _, column in columns if type(column) is tuple for lane in lanes]
    return [*objects, *[part for part in parts if type(part) is SentObject]]


def size_of_column(leaf: Any) -> int | None:
    """Return the number of replicas that an input has a value for; None if it has one for all."""
    kind = type(leaf)
    if kind is PerReplica:
        return num_values(leaf)
    return len(leaf.source.workers) if kind is Refs else len(leaf) if kind is tuple else None


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
