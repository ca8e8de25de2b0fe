"""Calls of users' functions on a replica of a cluster, on its worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from daskdist.core.block import read_only
from daskdist.core.functions.kept_values import keep_as_they_are
from daskdist.devices import Device, named
from daskdist.errors import CollectiveError
from daskdist.execute.callers.fetch import WorkerFetch
from daskdist.execute.messages.pickling import ForDevices
from daskdist.strategy.calls.call_on_replica import call_on_replica
from daskdist.strategy.collectives.mailbox import Mailbox
from daskdist.strategy.group import Replica, ReplicaGroup
from daskdist.strategy.input.device_staging import staging_of
from daskdist.strategy.input.replica_iterator import WorkerServices, replica_iterators
from daskdist.strategy.input.replica_plans import ReplicaPlan
from daskdist.strategy.replica.call_end import CallEnd
from daskdist.strategy.replica.context import ReplicaContext
from daskdist.strategy.replica.contract import StrategyContract
from daskdist.strategy.replica.replica_times import ReplicaTimes
from daskdist.strategy.values.absent import ABSENT, SKIPPED
from daskdist.strategy.values.encoding import Encoded
from daskdist.strategy.values.refs import FlatResult, RowLeaf
from daskdist.strategy.variables.store import VariableStore

# The prefix of the names of other calls of `Strategy.run`.
STEP: Final = "run-"
# Types of results that functions get in another form.
_CONVERTED: Final = frozenset({ForDevices, FlatResult, np.ndarray})

# Returns the strategy for cross-replica functions, given the group, this worker's variables and a replica's number.
CrossReplica = Callable[[ReplicaGroup, VariableStore | None, int], StrategyContract]


@dataclass(frozen=True)
class ReplicaSlot:
    """A replica of this worker, and what calls on it need.

    Parameters
    ----------
    token
        The token of the strategy.
    replica
        Its worker and device.
    number
        The number of the replica.
    num_replicas
        The number of replicas.
    cross_replica
        Returns the strategy for cross-replica functions.
    times
        The times of its steps, for the dashboard.
    """

    token: str
    replica: Replica
    number: int
    num_replicas: int
    cross_replica: CrossReplica
    times: ReplicaTimes = field(default_factory=ReplicaTimes, compare=False)

    def context(self, mailbox: Mailbox, step: int, end: CallEnd) -> ReplicaContext:
        """Return the context of the replica in a call."""
        token = self.token

        def strategy() -> StrategyContract:
            return self.cross_replica(mailbox.group(token), mailbox.store(token), self.number)

        return ReplicaContext(
            self.number,
            self.num_replicas,
            strategy,
            lambda: mailbox.rendezvous(token, step),
            lambda: mailbox.store(token),
            self.replica.device,
            end,
        )

    def check(self, mailbox: Mailbox) -> None:
        """Raise for a call that was made before some of its replicas were lost.

        Raises
        ------
        CollectiveError
            Some of the call's replicas are lost.
        """
        group, store = mailbox.groups.get(self.token), mailbox.store(self.token)
        if store is not None and store.lost:
            raise CollectiveError(f"run: lost {', '.join(store.lost)} before this call was made; make it again")
        if group is not None and len(group.replicas) != self.num_replicas:
            raise CollectiveError(
                f"run: a call for {self.num_replicas} replicas, of which {len(group.replicas)} are left; make it again"
            )

    def leave(self, mailbox: Mailbox, step: int, error: BaseException | str | None) -> None:
        """Report to other replicas that the call is over, since they may wait for this one."""
        self.times.rest()
        mailbox.leave(self.token, step, self.number, error)


def call_once(arguments: Encoded, function: Callable[..., Any], *results: Any) -> Any:
    """Call a function that no replica calls, with some arguments, given the results that they need."""
    args, kwargs = arguments.nest(results)
    return function(*args, **kwargs)


def call_replica(
    mailbox: Mailbox,
    slot: ReplicaSlot,
    step: int,
    results: Sequence[Any],
    sent: Encoded,
    end: CallEnd,
    *,
    is_step: bool,
) -> FlatResult:
    """Call a user's function, which is the first result, with arguments that need the other results.

    The dashboard counts the call if ``is_step``.
    """
    try:
        slot.check(mailbox)
        end.check()
        device = named(slot.replica.device)
        if not device.is_host:
            results = list(map(staging_of(slot.replica.device), results))
        results = [_given(device, result) if type(result) in _CONVERTED else result for result in results]
        arguments = sent.leaves_with(results[1:])
        if True in [argument is ABSENT for argument in arguments]:
            slot.leave(mailbox, step, SKIPPED)
            return FlatResult([ABSENT], None)
        if is_step:
            # The part of a distributed dataset's step, if there is one.
            slot.times.count(next((arguments[leaf] for leaf, pick in sent.inputs if type(pick) is RowLeaf), None))
        slot.times.work()

        def services() -> WorkerServices:
            ask = partial(mailbox.ask_steps, (slot.token, step))
            return WorkerServices(WorkerFetch(mailbox.worker), mailbox.step_counts, ask, slot.times)

        context = slot.context(mailbox, step, end)
        if ReplicaPlan in map(type, arguments):
            with replica_iterators(arguments, sent.treespec, slot.replica, slot.number, end, services) as parts:
                args, kwargs = parts
                result = call_on_replica(results[0], args, kwargs, slot.replica, context)
        else:
            args, kwargs = sent.treespec.unflatten(arguments)
            result = call_on_replica(results[0], args, kwargs, slot.replica, context)
        del args, kwargs, arguments
        returned = FlatResult.of(result)
        del result
        keep_as_they_are(returned.leaves)
    except BaseException as error:
        slot.leave(mailbox, step, error)
        raise
    slot.leave(mailbox, step, None)
    return returned


def _given(device: Device, result: ForDevices | FlatResult | np.ndarray[Any, Any]) -> Any:
    # Return a result in the form that functions get.
    if isinstance(result, ForDevices):
        return result.on(device)
    if isinstance(result, np.ndarray):
        return read_only(result)
    # An array may be reduced, sent or read at the same time.
    if True not in [isinstance(leaf, np.ndarray) for leaf in result.leaves]:
        return result
    return FlatResult(list(map(read_only, result.leaves)), result.treespec)
