"""A call on a replica of a cluster, on its worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed import Client, get_worker

from daskdist.devices import named
from daskdist.execute.bringing import Bring
from daskdist.execute.callers import Now
from daskdist.execute.pickling import ForDevices
from daskdist.strategy.context import ReplicaContext
from daskdist.strategy.desk import desk_of
from daskdist.strategy.loops import Around, fed
from daskdist.strategy.mirrored import MirroredStrategy
from daskdist.strategy.on_replica import call_on_replica
from daskdist.strategy.picks import Pick, Returned
from daskdist.strategy.rows_there import arrivals_of
from daskdist.strategy.strategy import Replica, Strategy
from daskdist.strategy.team import told
from daskdist.strategy.values import filled


class StrategyThere(MirroredStrategy):
    """The strategy as a worker knows it: what is between replicas can reduce their values, but calls nothing."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        Strategy.__init__(self, replicas, Now())

    def _on_replicas(self, operation: str, fn: Callable[..., Any], leaves: list[Any], treespec: Any) -> list[Any]:
        raise RuntimeError(f"{operation}: called on a worker; a strategy is for the program that made it")


@dataclass(frozen=True)
class Membership:
    """What a call on a replica is told of its place.

    Parameters
    ----------
    token
        That of the strategy.
    replica
        Its worker and device.
    number
        Which of the replicas it is.
    num_replicas
        How many there are.
    """

    token: str
    replica: Replica
    number: int
    num_replicas: int

    def context(self, step: int) -> ReplicaContext:
        """The context of the replica in a call."""
        token = self.token

        def strategy() -> Strategy:
            return StrategyThere(desk_of(get_worker()).teams[token].replicas)

        return ReplicaContext(
            self.number,
            self.num_replicas,
            strategy,
            lambda: desk_of(get_worker()).gang(token, step),
            lambda: desk_of(get_worker()).shelf(token),
            self.replica.device,
        )

    def leave(self, step: int, error: BaseException | None) -> None:
        """Tell that the call is over."""
        desk_of(get_worker()).leave(self.token, step, self.number, error)

    def around(self, step: int) -> Around:
        """What there is around the replica in a call."""
        worker = get_worker()
        desk = desk_of(worker)
        return Around(Bring(worker), desk.board, partial(desk.ask, (self.token, step)))

    def not_made(self, function: Callable[..., Any], args: tuple[Any, ...], error: BaseException) -> None:
        """Tell that a call is not made, since what it was to be given failed."""
        if function is call_there and self.num_replicas > 1:
            self.leave(args[1], error)


async def tell_not_made(client: Client, of_lane: tuple[Any, ...], steps: Sequence[int], error: BaseException) -> None:
    """Tell the worker of a replica that calls on it are not made: others there, or elsewhere, may wait for it."""
    (own,) = of_lane
    message = {"token": own.token, "steps": list(steps), "number": own.number, "how": told(error)}
    await client.scheduler.broadcast(msg={"op": "daskdist_not_made", **message}, workers=[own.replica.worker])


def call_there(
    results: Sequence[Any],
    treespec: Any,
    step: int,
    picks: Sequence[tuple[int, Pick]],
    leaves: list[Any],
    own: Membership,
) -> Returned:
    """Call a user's function, the first result, with wired leaves of its arguments, on the worker of a replica."""
    context = own.context(step)
    try:
        device = named(own.replica.device)
        if not device.is_host:
            results = list(map(arrivals_of(own.replica.device), results))
        results = [each.on(device) if type(each) is ForDevices else each for each in results]
        given = filled(results, picks, leaves)
        with fed(given, treespec, own.replica, own.number, lambda: own.around(step)) as (args, kwargs):
            returned = Returned.of(call_on_replica(results[0], args, kwargs, own.replica, context))
    except BaseException as error:
        if own.num_replicas > 1:
            own.leave(step, error)
        raise
    if own.num_replicas > 1:
        # Others may wait for it, or will.
        own.leave(step, None)
    return returned
