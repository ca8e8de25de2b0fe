"""The arguments of calls on replicas as they are sent: references to results, and pickles of the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Final, Protocol

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
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.extract import ExtractAll, ExtractFromResult, ExtractFromRows, PerReplicaRef, Remote
from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.values.placeholders import Placeholder, Placeholders, numbered_placeholders


class CallSender(Protocol):
    """The interface of an object that sends calls again.

    A bound method instead would be one more object of each step under way.
    """

    def send_again(self, replica_call: ReplicaCall, group: ReplicaGroup) -> Call:
        """Send a call again to given replicas."""
        ...


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

    sender: CallSender
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

    def __call__(self, group: ReplicaGroup) -> Call:
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


class PreparedCalls:
    """The parts that calls of one function have in common, sent to workers once two calls in a row have them.

    Parameters
    ----------
    dropped
        A list to which the numbers of objects are added when their handles are gone.
    """

    def __init__(self, dropped: deque[int]) -> None:
        self._dropped = dropped
        # The number of a function -> the part of its last call that others may have, and that part as it is sent.
        self._last: dict[int, tuple[Any, SentObject | None]] = {}

    def __call__(self, call: ReplicaCall, picks: tuple[Any, ...] | None, num_columns: int) -> SentObject | None:
        """Return the part that a call has in common with the last one of its function.

        It is None if the call is sent as a whole.
        """
        if picks is None:
            return None
        function = call.function.number
        common = function, call.structure, call.settings, call.name, num_columns, picks
        last, prepared = self._last.get(function, (None, None))
        if last == common and prepared is not None:
            return prepared
        if last == common:
            pickled = pickled_value(picks, lambda: "run: an argument")
            prepared = SentObject(cloudpickle.dumps((*common[:-1], pickled)), self._dropped)
        else:
            prepared = None
        if len(self._last) >= _MOST_PREPARED:
            self._last.pop(next(iter(self._last)), None)
        self._last[function] = common, prepared
        return prepared


def alike_arguments(packed: Sequence[Any]) -> tuple[tuple[Any, ...] | None, list[Any], int | tuple[int, ...]]:
    """Return the arguments of a call in a form that differs between most steps in the handles and the place only.

    Returns
    -------
    tuple
        For each leaf the number of its column and its extraction, that of a leaf of a batch without the place; the
        columns of handles; and the place of the batches, or that of each replica. None first where leaves are no parts
        of results.
    """
    columns: list[Any] = []
    picks: list[tuple[Any, ...]] = []
    place: int | tuple[int, ...] = -1
    handle: Any
    pick: Any
    for leaf in packed:
        if type(leaf) is PerReplicaRef:
            handle, pick = leaf.handles, leaf.picks
        elif type(leaf) is AsyncValue and type(source := leaf.source) is Remote:
            handle, pick = source.handle, source.pick
        elif type(leaf) is SentObject:
            handle, pick = leaf, _ALL
        else:
            return None, [], place
        if handle not in columns:
            columns.append(handle)
        number = columns.index(handle)
        first = pick[0] if type(pick) is tuple else pick
        if type(first) is ExtractFromRows:
            leaf_place = tuple([part.place for part in pick]) if type(pick) is tuple else pick.place
            if place not in (-1, leaf_place):
                return None, [], place
            place = leaf_place
            picks.append((number, first.leaf, first.is_writable))
        elif type(pick) is ExtractFromResult or type(pick) is ExtractAll:
            picks.append((number, pick))
        else:
            return None, [], place
    return tuple(picks), columns, place


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
    # References are sent unchanged; other values are pickled now, since they may change later.
    if set(map(type, leaves)) == _PLACEHOLDERS and _SIMPLE.issuperset([type(pick) for _, pick in picks]):
        return picks, numbered_placeholders(len(picks))
    return pickled_value((picks, leaves), lambda: "run: an argument")


# The number of functions whose last calls are kept.
_MOST_PREPARED: Final = 64
# Types of arguments with a handle for each replica.
COLUMNS: Final = frozenset({tuple, Call})
_PLACEHOLDERS: Final = frozenset({Placeholder})
# Types that extract parts of results and can always be pickled.
_SIMPLE: Final = frozenset({ExtractFromRows, ExtractAll})
_ALL: Final = ExtractAll()


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
