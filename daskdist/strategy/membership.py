"""A call on a replica of a cluster, on its worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed import Client, Worker, get_worker

from daskdist.devices import named
from daskdist.errors import CollectiveError
from daskdist.execute.bringing import Bring
from daskdist.execute.pickling import ForDevices
from daskdist.execute.roster import Roster
from daskdist.strategy.between import StrategyThere
from daskdist.strategy.context import ReplicaContext
from daskdist.strategy.desk import Stretches, desk_of, enrol
from daskdist.strategy.loops import Around, fed
from daskdist.strategy.on_replica import call_on_replica
from daskdist.strategy.picks import Pick, Returned
from daskdist.strategy.rows_there import arrivals_of
from daskdist.strategy.strategy import Replica, Strategy
from daskdist.strategy.team import Team, told
from daskdist.strategy.values import filled


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
            desk = desk_of(get_worker())
            return StrategyThere(desk.team(token), desk.shelf(token), self.number)

        return ReplicaContext(
            self.number,
            self.num_replicas,
            strategy,
            lambda: desk_of(get_worker()).gang(token, step),
            lambda: desk_of(get_worker()).shelf(token),
            self.replica.device,
        )

    def check(self, step: int) -> None:
        """Refuse a call of replicas that there were before some were lost, or one that was made.

        Dask makes again what a lost result was made of; a replica that did so would change its variables twice.
        """
        desk = desk_of(get_worker())
        team, shelf = desk.teams.get(self.token), desk.shelf(self.token)
        if shelf is not None and shelf.lost:
            raise CollectiveError(f"run: lost {', '.join(shelf.lost)} before this call was made; make it anew")
        if team is not None and len(team.replicas) != self.num_replicas:
            raise CollectiveError(
                f"run: a call for {self.num_replicas} replicas, of which {len(team.replicas)} are left; make it anew"
            )
        if step in desk._ended.get((self.token, self.number), ()):
            raise CollectiveError(
                f"run: replica {self.number} made this call before, what came of it went with a worker that is lost, "
                "and it is not made twice; make it anew"
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


def part_from(token: str, lost: Sequence[str], *, dask_worker: Worker) -> None:
    """Have calls that are under way wait for nobody on workers that are lost, and make no others until `go_on_as`."""
    desk = desk_of(dask_worker)
    with desk.changed:
        shelf = desk.shelf(token)
        if shelf is not None:
            shelf.lost = tuple(lost)
        for key in [each for each in desk._gangs if each[0] == token]:
            desk._unsent.setdefault(key, {}).update(dict.fromkeys(lost, "the scheduler knows it no more"))
        desk.changed.notify_all()


def go_on_as(team: Team, *, dask_worker: Worker) -> None:
    """Have the replicas of a worker be those of a team of fewer, with what they keep."""
    desk = desk_of(dask_worker)
    with desk.changed:
        before, shelf = desk.teams.get(team.token), desk.shelves.get(team.token)
        if before is not None and shelf is not None:
            own, token = dask_worker.address, team.token
            numbers = dict(zip(before.members(own), team.members(own), strict=True))
            shelf.renumber(numbers)
            shelf.lost = ()
            ended = {(token, new): desk._ended.pop((token, old), Stretches()) for old, new in numbers.items()}
            desk._ended.update(ended)
            desk.teams[token] = team
            return
    # It was started anew at the same address.
    enrol(team, dask_worker)


async def tell_not_made(
    client: Client, roster: Roster, of_lane: tuple[Any, ...], steps: Sequence[int], error: BaseException
) -> None:
    """Tell the worker of a replica that calls on it are not made: others there, or elsewhere, may wait for it."""
    (own,) = of_lane
    if own.replica.worker in roster.lost:
        return
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
        own.check(step)
        device = named(own.replica.device)
        if not device.is_host:
            results = list(map(arrivals_of(own.replica.device), results))
        results = [each.on(device) if type(each) is ForDevices else each for each in results]
        given = filled(results, picks, leaves)
        with (
            desk_of(get_worker()).side_by_side(own.token, own.number),
            fed(given, treespec, own.replica, own.number, lambda: own.around(step)) as (args, kwargs),
        ):
            returned = Returned.of(call_on_replica(results[0], args, kwargs, own.replica, context))
    except BaseException as error:
        if own.num_replicas > 1:
            own.leave(step, error)
        raise
    if own.num_replicas > 1:
        # Others may wait for it, or will.
        own.leave(step, None)
    return returned
