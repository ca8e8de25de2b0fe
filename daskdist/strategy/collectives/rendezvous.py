"""In-process rendezvous for collective operations; the last replica to arrive exchanges data with other workers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from daskdist.config import seconds
from daskdist.core.failing.error_copy import copied_error
from daskdist.errors import CollectiveError
from daskdist.strategy.group import describe_error, named_replicas

# The number of a replica's calls that a message shows.
_NUM_SHOWN: Final = 8
# Seconds between a waiter's checks of replicas in other processes.
LOOK_EVERY_S: Final = 0.3
# Seconds between checks for their answers once the timeout has passed.
_ANSWER_S: Final = 0.02
# Exit reasons sent to others: the replica has finished, or a collective operation failed.
HAS_ENDED: Final = "has ended"
_RAISED: Final = f"raised {CollectiveError.__name__}: "


class Collective(Protocol):
    """An operation that all replicas take part in."""

    @property
    def name(self) -> str:
        """Return the name in messages, the same on all replicas."""

    def shapes(self, contribution: Any) -> Any:
        """Return the properties of a replica's contribution that must be the same on all replicas."""

    def partial(self, contributions: Mapping[int, Any]) -> Any:
        """Return a partial result of the contributions of some replicas, given by their numbers."""

    def combined(self, partials: Sequence[Any]) -> Any:
        """Return the combination of several partial results."""

    def final(self, partial: Any) -> Any:
        """Return the result from the last partial result."""


@dataclass(frozen=True)
class CallSignature:
    """The name, shapes and history of a replica's collective call, which are compared between replicas.

    Parameters
    ----------
    number
        The number of the replica.
    name
        The name of the call.
    shapes
        The properties that must be the same on all replicas.
    order
        The last calls of the replica, this one included.
    """

    number: int
    name: str
    shapes: Any
    order: tuple[str, ...]

    def check(self, other: CallSignature) -> None:
        """Raise an error if another replica's call is different.

        Raises
        ------
        CollectiveError
            The other call has another name or other shapes.
        """
        first, second = (self, other) if self.number < other.number else (other, self)
        if first.name != second.name:
            raise CollectiveError(
                f"replicas make different calls: replica {first.number} calls {', '.join(first.order)}; replica "
                f"{second.number} calls {', '.join(second.order)}; all must make the same calls in the same order"
            )
        if first.shapes != second.shapes:
            raise CollectiveError(
                f"{first.name}: values of replicas differ in structure or shape: replica {first.number} gives "
                f"{first.shapes}, replica {second.number} gives {second.shapes}"
            )


@dataclass(eq=False)
class _Round:
    contributions: dict[int, tuple[Collective, Any]] = field(default_factory=dict)
    # One pre-acquired lock per waiter; releasing it wakes that waiter. Faster than a condition, whose lock all waiters
    # would have to take in turn.
    gates: list[Any] = field(default_factory=list)
    is_over: bool = False
    result: Any = None
    error: BaseException | None = None


class Rendezvous:
    """The meeting point of the replicas of one call that are in this process.

    Parameters
    ----------
    members
        The numbers of the replicas.
    exchange
        The `Transport` to other processes; None if there are none.
    waits
        Called before a replica waits, to make sure that the others are running.
    """

    def __init__(self, members: Sequence[int], exchange: Any = None, waits: Callable[[], None] | None = None) -> None:
        self.members = tuple(members)
        self._exchange = exchange
        self._waits = waits
        # Raise the error of an invalid setting before anything waits.
        seconds("timeouts.collective")
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(members, 0)
        self._orders: dict[int, deque[Collective]] = {number: deque(maxlen=_NUM_SHOWN) for number in members}
        self._rounds: dict[int, _Round] = {}
        # replica that has left -> exit reason.
        self._left: dict[int, BaseException | str | None] = {}
        # turn -> reason of its failure; the second for failures that only this process knows of.
        self._failed: dict[int, str] = {}
        self._failed_here: dict[int, str] = {}
        self._is_closed = False

    def meet(self, number: int, collective: Collective, contribution: Any) -> tuple[Any, bool]:
        """Take part in a call of all replicas; return its result, and whether no other replica has the same object.

        Raises
        ------
        CollectiveError
            A replica has left, does not make the call in time, or makes another call.
        """
        with self._lock:
            turn = self._counts[number]
            self._counts[number] = turn + 1
            self._orders[number].append(collective)
            turn_round = self._rounds.get(turn) or self._rounds.setdefault(turn, _Round())
            turn_round.contributions[number] = (collective, contribution)
            is_last = len(turn_round.contributions) == len(self.members)
            if is_last:
                del self._rounds[turn]
            else:
                gate = threading.Lock()
                gate.acquire()
                turn_round.gates.append(gate)
        if is_last:
            self._complete(turn_round, turn)
        else:
            if self._waits is not None:
                self._waits()
            try:
                self._await(number, turn_round, turn, collective, gate)
            except CollectiveError as error:
                self._failed[turn] = str(error)
                raise
        if turn_round.error is not None:
            raise turn_round.error if is_last else copied_error(turn_round.error)
        # The result of a single replica may be the object that it contributed.
        return turn_round.result, len(self.members) == 1 and self._exchange is not None

    def leave(self, number: int, error: BaseException | str | None = None) -> bool:
        """Stop waiting for a replica whose call has finished; return whether it was the last."""
        with self._lock:
            self._left[number] = error
            for turn_round in self._rounds.values():
                _open(turn_round)
            return len(self._left) == len(self.members)

    def close(self) -> None:
        """Stop all waiting, as the strategy is closed and replicas that leave are no longer reported."""
        with self._lock:
            self._is_closed = True
            for turn_round in self._rounds.values():
                _open(turn_round)

    def state(self, turn: int) -> tuple[list[int], str | None]:
        """Return the replicas that a turn is waiting for, and the reason if it failed."""
        with self._lock:
            failed = self._failed.get(turn) or self._failed_here.get(turn)
            return [number for number in self.members if self._counts[number] <= turn], failed

    def failure_of(self, number: int) -> str | None:
        """Return the failure of a replica's last collective call in the form sent to others, or None."""
        failed = self._failed.get(self._counts[number] - 1)
        return None if failed is None else f"{_RAISED}{failed}"

    def _complete(self, turn_round: _Round, turn: int) -> None:
        # Compute the result once all replicas of this process have arrived.
        try:
            contributions = {number: turn_round.contributions[number] for number in self.members}
            first, values = contributions[self.members[0]]
            shapes = first.shapes(values)
            for number in self.members[1:]:
                collective, contribution = contributions[number]
                if collective.name != first.name or collective.shapes(contribution) != shapes:
                    signature = self._signature(self.members[0], first, values)
                    signature.check(self._signature(number, collective, contribution))
            partial = first.partial({number: value for number, (_, value) in contributions.items()})
            if self._exchange is None:
                turn_round.result = first.final(partial)
            else:
                signature = self._signature(self.members[0], first, values)
                turn_round.result = self._exchange(turn, first, signature, partial)
        except BaseException as error:
            turn_round.error = error
            if isinstance(error, CollectiveError):
                self._failed[turn] = str(error)
            else:
                name = turn_round.contributions[self.members[0]][0].name
                self._failed_here[turn] = f"{name}: {named_replicas(self.members)} {describe_error(error)}"
        with self._lock:
            turn_round.is_over = True
            _open(turn_round)

    def _signature(self, number: int, collective: Collective, contribution: Any) -> CallSignature:
        order = tuple([collective.name for collective in self._orders[number]])
        return CallSignature(number, collective.name, collective.shapes(contribution), order)

    def _await(self, number: int, turn_round: _Round, turn: int, collective: Collective, gate: Any) -> None:
        since = time.monotonic()
        if not self._left and not self._is_closed:
            # From now on, a replica that leaves releases the gate.
            gate.acquire(timeout=LOOK_EVERY_S)
        if turn_round.is_over:
            return
        # The function may change the setting between calls.
        most = seconds("timeouts.collective")
        end = since + most
        inquiry: Any = None
        elsewhere: Sequence[int] | None = ()
        while not turn_round.is_over:
            with self._lock:
                missing = [other for other in self.members if other not in turn_round.contributions]
                gone = {other: self._left[other] for other in missing if other in self._left}
            if gone:
                raise left_error(collective.name, gone)
            if missing and self._is_closed:
                raise closed_error(collective.name)
            if missing and self._exchange is not None:
                inquiry = inquiry or self._exchange.inquiry(turn, collective.name, end)
                elsewhere = inquiry.absent()
            # Once all replicas have arrived, the exchange checks the timeout.
            if missing and elsewhere is not None and time.monotonic() >= end:
                raise late_error(collective.name, sorted([*missing, *elsewhere]), most)
            gate.acquire(timeout=look_after_s(end) if missing else -1)


def _open(turn_round: _Round) -> None:
    for gate in turn_round.gates:
        if gate.locked():
            gate.release()


def left_error(name: str, errors: Mapping[int, BaseException | str | None]) -> CollectiveError:
    """Return the error for replicas that have finished without making the call."""
    reasons = {
        number: describe_error(error) if isinstance(error, BaseException) else error or HAS_ENDED
        for number, error in errors.items()
    }
    failed = [reason for reason in reasons.values() if reason.startswith(_RAISED)]
    direct = {number: reason for number, reason in reasons.items() if reason not in failed}
    if failed and set(direct.values()) <= {HAS_ENDED}:
        # All replicas raise the same failure.
        return CollectiveError(failed[0].removeprefix(_RAISED))
    # Leave out replicas that only failed as a consequence.
    states = "; ".join(f"replica {number} {reason}" for number, reason in direct.items())
    return CollectiveError(f"{name} is called by some replicas only: {states}")


def look_after_s(end: float) -> float:
    """Return the seconds until a waiter looks at replicas in other processes again, given the time of its timeout."""
    rest_s = end - time.monotonic()
    return min(rest_s, LOOK_EVERY_S) if rest_s > 0 else _ANSWER_S


def closed_error(name: str) -> CollectiveError:
    """Return the error for replicas that have not made the call when the strategy is closed."""
    return CollectiveError(f"{name}: the strategy was closed before all replicas had made this call")


def late_error(name: str, missing: Sequence[int], most_s: float) -> CollectiveError:
    """Return the error for replicas that did not make the call in time."""
    return CollectiveError(
        f"{name}: {named_replicas(missing)} did not call it within {most_s:g} s, which is "
        "daskdist.timeouts.collective; all replicas must make the same calls in the same order"
    )
