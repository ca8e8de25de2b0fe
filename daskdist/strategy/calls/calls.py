"""Handles of calls that were sent to workers, and the program's records of them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from distributed import Future

from daskdist.errors import ClusterError, CollectiveError
from daskdist.strategy.calls.outcomes import Failed, StaysOnWorker
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.values.refs import Ref, TaskResults

# Errors of calls that need a lost worker.
LOST: Final = (ClusterError, CollectiveError)
# The prefix of the names of calls without a time limit: loops over distributed datasets.
LOOP_PREFIX: Final = "loop-"
# The name of calls that return values to the program, however large these are.
LOOK: Final = "look"
# The name of operations on values; an error of one that nobody reads is not raised elsewhere.
APPLY: Final = "apply"

# A call that a replica is making: the replica, the name, the seconds so far, and what it did last with the seconds
# since, if that is known.
RunningOnReplica: TypeAlias = tuple[int, str, float, tuple[str, float] | None]


class Losses(NamedTuple):
    """The losses of workers that were making a call, in all attempts to make it.

    Parameters
    ----------
    workers
        The addresses of the workers.
    num_losses
        The number of attempts that ended so; some count for several.
    """

    workers: tuple[str, ...] = ()
    num_losses: int = 0


_NO_LOSSES: Final = Losses()


class Record:
    """The program's record of a call that was sent.

    Parameters
    ----------
    number
        The number of the call, in the order of the program.
    workers
        The address of the worker of each result.
    needs
        The sources of the arguments, which must be kept until the call has finished: one, or a tuple of them.
    name
        The name of the call.
    is_step
        Whether it is a call of `run`.
    is_of_replicas
        Whether each replica makes the call.
    takes_results
        Whether each replica is given its own result of an earlier call in it.
    again
        The `PreparedCall` of an operation on values, or of a call on the results of tasks, that makes it again if its
        worker is lost before it is over; None for others.
    is_of_tasks
        Whether all its inputs are results of tasks, so that it can be made again for as long as its result stays on its
        worker.
    is_final
        Whether replicas make it, and it is not made again if it fails with a lost worker.
    """

    __slots__ = (
        "again",
        "has_failed",
        "is_dropped",
        "is_final",
        "is_of_replicas",
        "is_of_tasks",
        "is_step",
        "is_undone",
        "losses",
        "lost",
        "name",
        "needs",
        "num_left",
        "number",
        "outcomes",
        "passed_on",
        "reported_with",
        "takes_results",
        "workers",
    )

    def __init__(
        self,
        number: int,
        workers: Sequence[str],
        needs: Any,
        name: str,
        *,
        is_step: bool = False,
        is_of_replicas: bool = False,
        takes_results: bool = False,
        again: Any = None,
        is_of_tasks: bool = False,
        is_final: bool = False,
    ) -> None:
        self.number = number
        self.workers = workers
        self.needs = needs
        self.name = name
        self.is_step = is_step
        self.is_of_replicas = is_of_replicas
        self.takes_results = takes_results
        self.again = again
        self.is_of_tasks = is_of_tasks
        self.is_final = is_final
        # The structure number and outcome of each result; None until the call has finished. The list becomes a tuple in
        # the end, as the garbage collector does not examine tuples of plain values.
        self.outcomes: Any = [None] * len(workers)
        self.num_left = len(workers)
        self.has_failed = False
        # The places of results, each followed by the stream to the worker that it was passed on to. They are not pairs,
        # as the garbage collector examines each object that the program's values keep.
        self.passed_on: tuple[Any, ...] = ()
        self.is_dropped = False
        # The number of the call whose error this call is reported with: its own, or that of an argument. Its other
        # errors are not raised.
        self.reported_with: int | None = None
        # The workers that were lost while they were making it, and those of earlier attempts.
        self.lost: tuple[str, ...] = ()
        self.losses = _NO_LOSSES
        # Whether its changes of variables are undone, as it is going to be made again.
        self.is_undone = False

    def validate(self) -> None:
        """Check what holds between the attributes, under the lock of `StreamSet` and while the call is under way."""
        outcomes = [outcome for outcome in self.outcomes if outcome is not None]
        has_failed = any(type(outcome[1]) is Failed for outcome in outcomes)
        if self.num_left != len(self.workers) - len(outcomes) or not self.num_left or self.has_failed != has_failed:
            raise AssertionError(f"{self.name} is under way, {self.num_left} left, with the outcomes {self.outcomes}")

    @property
    def holders(self) -> set[str]:
        """The workers that have or will have a result of it."""
        return {*self.workers, *(stream.address for stream in self.passed_on[1::2])}

    def fail(self, failed: Failed) -> None:
        """Replace the results of a finished call by a failure."""
        self.has_failed, self.outcomes = True, ((None, failed),) * len(self.outcomes)

    def failures(self) -> list[Failed]:
        """Return the failures of its results, one for each call that raised."""
        if not self.has_failed:
            return []
        failures = {
            outcome[1].origin: outcome[1]
            for outcome in self.outcomes
            if outcome is not None and type(outcome[1]) is Failed
        }
        return list(failures.values())


class Call(Sequence[Ref]):
    """The handle of a call: while it is referenced, workers keep the results."""

    __slots__ = ("__weakref__", "_dropped", "make", "record", "workers")

    def __init__(self, record: Record, dropped: deque[Record]) -> None:
        self.record = record
        # The address of the worker of each result.
        self.workers = record.workers
        self._dropped = dropped
        # A function that makes the call again, if the call begins the last step and that is complete; see `CallLog`.
        self.make: Callable[[ReplicaGroup], Any] | None = None

    def become(self, other: Call) -> None:
        """Exchange the records of two handles."""
        self.record, other.record = other.record, self.record
        self.workers, other.workers = other.workers, self.workers

    def outcome(self, place: int) -> Any:
        """Return the structure and the outcome of a result; None until it is known.

        Raises
        ------
        ClusterError
            The call was made again without this replica.
        """
        record = self.record
        if place >= len(record.outcomes):
            raise ClusterError(
                f"{record.name} was made again for {len(record.workers)} replicas, and has no value of replica "
                f"{place}; look at the PerReplica instead"
            )
        return record.outcomes[place]

    def __len__(self) -> int:
        return len(self.record.outcomes)

    def __getitem__(self, place: Any) -> Any:
        if not 0 <= place < len(self.record.outcomes):
            raise IndexError(place)
        return Ref(self, place)

    def __del__(self) -> None:
        try:
            self._dropped.append(self.record)
        except AttributeError:
            # An interrupt ended `__init__`.
            return


def lost_calls(calls: Iterable[Any], is_there: Callable[[str, int], bool]) -> list[Call]:
    """Return the calls that have to be made again on other workers, with those that they need, in their order.

    There are none if the workers of all of them are there, as they would fail again.

    Parameters
    ----------
    calls
        Calls; those that were made once, and are not over or have no result here, can be made again.
    is_there
        Returns whether the worker to which a call was sent, by its number, is still there.
    """

    def is_gone(call: Call) -> bool:
        return not is_there(call.record.workers[0], call.record.number)

    def is_lost(call: Any) -> bool:
        if type(call) is not Call or call.record.again is None:
            return False
        _, payload = call.record.outcomes[0] or (None, None)
        if type(payload) is Failed:
            return is_gone(call) or isinstance(payload.failure.error(), LOST)
        return type(payload) is StaysOnWorker and is_gone(call)

    def needed_by(call: Call) -> list[Any]:
        # Another thread may have made it again meanwhile.
        again = call.record.again
        return [] if again is None else [leaf.source for _, leaf in again.inputs if type(leaf) is Ref]

    lost: dict[Call, None] = {}
    waiting = list(calls)
    while waiting:
        call = waiting.pop()
        if call not in lost and is_lost(call):
            lost[call] = None
            waiting += needed_by(call)

    def can_succeed(call: Call) -> bool:
        # Something that it needs may have been made again already.
        return is_gone(call) or any(
            type(source) is Call and source.record.number > call.record.number for source in needed_by(call)
        )

    # What a call needs has a lower number.
    return sorted(lost, key=lambda call: call.record.number) if any(map(can_succeed, lost)) else []


def note_lost(records: Iterable[Record], worker: str) -> None:
    """Record the loss of a worker in the calls that it may have been making: the first two of each replica.

    A worker reports the end of a call some milliseconds later if further calls follow. So the first unfinished call may
    be the one before the call that had just begun.

    Parameters
    ----------
    records
        The calls under way, in their order.
    worker
        The worker's address.
    """
    # The number of calls so far in which each replica was recorded.
    places: Counter[int] = Counter()
    is_first = True
    for record in records:
        not_over = {
            place
            for place, address in enumerate(record.workers)
            if address == worker and record.outcomes[place] is None
        }
        is_of_replicas = record.is_of_replicas
        # Reductions are made at the same time as calls on replicas, and mostly wait for those.
        if not_over and (is_first or (is_of_replicas and any(places[place] < 2 for place in not_over))):
            record.lost += (worker,)
            is_first = False
        if is_of_replicas:
            places.update(not_over)


def future_of(key: Any, records: Iterable[Record]) -> Future | None:
    """Return the future of a task that one of some calls needs; None if none does."""
    sources = [source for record in records for source in _sources(record.needs) if type(source) is TaskResults]
    futures = (future for source in sources for future in source.futures)
    return next((future for future in futures if isinstance(future, Future) and future.key == key), None)


def records_in(needs: Any) -> list[Record]:
    """Return the records of the calls whose results a call needs."""
    return [source.record for source in _sources(needs) if type(source) is Call]


def _sources(needs: Any) -> Sequence[Any]:
    return needs if type(needs) is tuple else (needs,)
