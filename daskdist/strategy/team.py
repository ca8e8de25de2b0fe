"""What replicas on the workers of a cluster do together: from worker to worker, over Dask's own connections."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future as ThreadFuture
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from distributed import Worker, get_worker, secede
from distributed.protocol import to_serialize
from distributed.threadpoolexecutor import thread_state

from daskdist.config import setting
from daskdist.errors import CollectiveError
from daskdist.execute.callers import Now
from daskdist.execute.fused import Failure, pickled_apart
from daskdist.strategy.collectives import AllReduce, Merge
from daskdist.strategy.context import ReplicaContext
from daskdist.strategy.gang import About, Collective, Gang, late, left
from daskdist.strategy.loops import fed
from daskdist.strategy.mirrored import MirroredStrategy
from daskdist.strategy.picks import Pick, Returned
from daskdist.strategy.strategy import Replica, Strategy, call_on_replica
from daskdist.strategy.values import filled

# Workers that send to all others at once; more do so in a tree.
_MOST_AT_ONCE: Final = 8
# Calls of which it is remembered who has left them.
_MOST_OVER: Final = 1024
_LOOK_EVERY_S: Final = 0.3
_ANSWER_WITHIN_S: Final = 5.0

# What of a call on the replicas of a strategy: the strategy's token and the number of the step.
Step = tuple[str, int]


@dataclass(frozen=True)
class Team:
    """The replicas of a strategy.

    Parameters
    ----------
    token
        The strategy's own.
    replicas
        In order.
    """

    token: str
    replicas: tuple[Replica, ...]

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """Their addresses, in the order of the replicas."""
        return tuple(dict.fromkeys(str(replica.worker) for replica in self.replicas))

    def members(self, worker: str) -> tuple[int, ...]:
        """The numbers of the replicas on a worker."""
        return tuple(number for number, replica in enumerate(self.replicas) if replica.worker == worker)


class StrategyThere(MirroredStrategy):
    """The strategy as a worker knows it: what is between replicas can reduce their values, but calls nothing."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        Strategy.__init__(self, replicas, Now())

    def _on_replicas(self, operation: str, fn: Callable[..., Any], leaves: list[Any], treespec: Any) -> list[Any]:
        raise RuntimeError(f"{operation}: called on a worker; a strategy is for the program that made it")


class Desk:
    """One worker's part in what replicas do together.

    Parameters
    ----------
    worker
        The worker.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.teams: dict[str, Team] = {}
        self._gangs: dict[Step, Gang] = {}
        # Of calls that are over on a replica, how, in words.
        self._over: OrderedDict[Step, dict[int, str]] = OrderedDict()
        # What came, by its step, the turn of the collective, what part of that it is, and who sent it.
        self._mail: dict[Step, dict[tuple[int, str, str], Any]] = {}
        # By step, the workers to which something could not be sent, and why.
        self._unsent: dict[Step, dict[str, str]] = {}
        self.changed = threading.Condition()
        worker.handlers["daskdist_receive"] = self.receive
        worker.handlers["daskdist_whereabouts"] = self.whereabouts

    async def receive(self, token: str, step: int, turn: int, part: str, sender: str, data: Any) -> None:
        """Keep what another worker sends."""
        key = (token, step)
        with self.changed:
            team, over = self.teams.get(token), self._over.get(key, {})
            if team is None or (key not in self._gangs and over.keys() >= set(team.members(self.worker.address))):
                # Nobody is left here who would take it.
                return
            self._mail.setdefault(key, {})[turn, part, sender] = data
            self.changed.notify_all()

    async def whereabouts(self, token: str, step: int) -> list[tuple[int, str]]:
        """Which replicas have left a call, and how."""
        with self.changed:
            return list(self._over.get((token, step), {}).items())

    def gang(self, token: str, step: int) -> Gang:
        """The gang of a call."""
        with self.changed:
            found = self._gangs.get((token, step))
            if found is None:
                team = self.teams.get(token)
                if team is None:
                    raise CollectiveError(
                        f"{self.worker.address} does not know the strategy whose replica this is; make a new strategy"
                    )
                exchange = Exchange(self, team, step) if len(team.workers) > 1 else None
                members = team.members(self.worker.address)
                found = self._gangs[token, step] = Gang(members, exchange, waits=step_aside)
                for number, how in self._over.get((token, step), {}).items():
                    # It had left before anybody waited.
                    found.leave(number, how)
            return found

    def leave(self, token: str, step: int, number: int, error: BaseException | None) -> None:
        """Tell that a replica's call is over."""
        key = (token, step)
        with self.changed:
            self._over.setdefault(key, {})[number] = (
                "has ended" if error is None else f"raised {type(error).__name__}: {error}"
            )
            while len(self._over) > _MOST_OVER:
                gone, _ = self._over.popitem(last=False)
                self._forget(gone)
            gang = self._gangs.get(key)
            if gang is not None and gang.leave(number, error):
                del self._gangs[key]
                self._forget(key)

    def _forget(self, key: Step) -> None:
        self._mail.pop(key, None)
        self._unsent.pop(key, None)

    def send(self, address: str, **message: Any) -> None:
        """Send something to another worker; nobody waits for it to arrive."""
        asyncio.run_coroutine_threadsafe(self._send(address, message), self.worker.loop.asyncio_loop)

    async def _send(self, address: str, message: dict[str, Any]) -> None:
        try:
            await self.worker.rpc(address).daskdist_receive(sender=self.worker.address, **message)
        except Exception as error:
            key = message["token"], message["step"]
            with self.changed:
                self._unsent.setdefault(key, {})[address] = f"{type(error).__name__}: {error}"
                self.changed.notify_all()

    def take(self, key: Step, turn: int, part: str, senders: Sequence[str], name: str, team: Team) -> list[Any]:
        """What other workers send, in their order; waited for.

        Raises
        ------
        CollectiveError
            A worker is lost, a replica on it has left, or it sends nothing in time.
        """
        most = float(setting("timeouts.collective"))
        now = time.monotonic()
        end, look = now + most, now + _LOOK_EVERY_S
        suspects: dict[str, dict[int, BaseException | str | None]] = {}
        while True:
            with self.changed:
                mail = self._mail.setdefault(key, {})
                missing = [sender for sender in senders if (turn, part, sender) not in mail]
                if not missing:
                    return [mail.pop((turn, part, sender)) for sender in senders]
                if unsent := self._unsent.get(key):
                    raise _lost(name, team, *next(iter(unsent.items())))
                self.changed.wait(min(look, end) - time.monotonic())
                missing = [sender for sender in senders if (turn, part, sender) not in mail]
            now = time.monotonic()
            if now >= look:
                for sender in missing:
                    gone = self._asked(key, sender, name, team)
                    # What it sent before may be on its way.
                    if gone and suspects.get(sender) == gone:
                        raise left(name, gone)
                    suspects[sender] = gone
                look = time.monotonic() + _LOOK_EVERY_S
            if now >= end:
                raise late(name, [number for sender in missing for number in team.members(sender)], most)

    def _asked(self, key: Step, address: str, name: str, team: Team) -> dict[int, BaseException | str | None]:
        async def ask() -> Any:
            asked = self.worker.rpc(address).daskdist_whereabouts(token=key[0], step=key[1])
            return await asyncio.wait_for(asked, _ANSWER_WITHIN_S)

        asked: ThreadFuture[Any] = asyncio.run_coroutine_threadsafe(ask(), self.worker.loop.asyncio_loop)
        try:
            return dict(asked.result(2 * _ANSWER_WITHIN_S))
        except Exception as error:
            raise _lost(name, team, address, f"{type(error).__name__}: {error}") from error


def _lost(name: str, team: Team, address: str, why: str) -> CollectiveError:
    who = ", ".join(map(str, team.members(address)))
    return CollectiveError(f"{name}: lost {address}, and with it replica {who} ({why})")


class Exchange:
    """What goes between the workers of a gang.

    Parameters
    ----------
    desk
        This worker's.
    team
        All replicas.
    step
        The number of the call.
    """

    def __init__(self, desk: Desk, team: Team, step: int) -> None:
        self._desk = desk
        self._team = team
        self._key = (team.token, step)
        self._own = team.workers.index(desk.worker.address)

    def __call__(self, turn: int, collective: Collective, about: About, partial: Any) -> Any:
        """The result, of what all workers have."""
        step_aside()
        if isinstance(collective, Merge) or len(self._team.workers) > _MOST_AT_ONCE:
            return self._in_a_tree(turn, collective, about, partial)
        return collective.final(self._at_once(turn, collective, about, partial))

    def _at_once(self, turn: int, collective: Collective, about: About, partial: Any) -> Any:
        # Each makes it for itself, in the same order; of something large, each makes a part of it for all.
        num_workers = len(self._team.workers)
        parts = None
        if isinstance(collective, AllReduce) and collective.is_large(partial):
            parts = collective.cut(partial, num_workers)
        others = [number for number in range(num_workers) if number != self._own]
        for number in others:
            # Nobody sends the second part before the first has come: until then there is no result.
            self._post(turn, "values", number, (about, (parts or {number: partial})[number]), is_kept=bool(parts))
        here = partial if parts is None else parts[self._own]
        found = self._combined(turn, "values", collective, about, here, range(num_workers))
        if parts is None or not isinstance(collective, AllReduce):
            return found
        for number in others:
            self._post(turn, "part", number, found, is_kept=True)
        came = dict(zip(others, self._take(turn, "part", others, about), strict=True))
        return collective.joined([found if k == self._own else came[k] for k in range(num_workers)], partial)

    def _combined(
        self, turn: int, part: str, collective: Collective, about: About, own: Any, numbers: Sequence[int]
    ) -> Any:
        others = [number for number in numbers if number != self._own]
        came = dict(zip(others, self._take(turn, part, others, about), strict=True))
        for number in others:
            other, value = came[number]
            if isinstance(value, Failure):
                raise value.error()
            first, second = sorted((about, other), key=lambda each: each.number)
            first.check(second)
        values = [own if number == self._own else came[number][1] for number in numbers]
        if len(values) == 2 and isinstance(collective, AllReduce) and collective.is_large(own):
            # What came is nobody else's.
            return collective.combined_in_place(values, numbers.index(others[0]))
        return collective.combined(values)

    def _in_a_tree(self, turn: int, collective: Collective, about: About, partial: Any) -> Any:
        found = partial
        numbers: Sequence[int] = range(len(self._team.workers))
        led: list[Sequence[int]] = []
        above = 0
        while len(numbers) > 1:
            groups = [numbers[k : k + _MOST_AT_ONCE] for k in range(0, len(numbers), _MOST_AT_ONCE)]
            group = next(each for each in groups if self._own in each)
            above = group[0]
            if above != self._own:
                self._post(turn, f"up {len(led)}", above, (about, found))
                break
            found = _outcome(self._combined, turn, f"up {len(led)}", collective, about, found, group, before=found)
            led.append(group)
            numbers = [each[0] for each in groups]
        if above == self._own:
            found = _outcome(collective.final, found, before=found)
        else:
            (found,) = self._take(turn, f"down {len(led)}", [above], about)
        for level, group in reversed(list(enumerate(led))):
            for number in group[1:]:
                self._post(turn, f"down {level}", number, found)
        if isinstance(found, Failure):
            raise found.error()
        return found

    def _post(self, turn: int, part: str, number: int, data: Any, *, is_kept: bool = False) -> None:
        token, step = self._key
        address = self._team.workers[number]
        # As it is now: it is sent by and by, and the replica may change what it has given as soon as it has a result.
        pickled, buffers = pickled_apart(data)
        frames = [buffer.raw() if is_kept else bytes(buffer.raw()) for buffer in buffers]
        sent = [to_serialize(frame) for frame in frames]
        self._desk.send(address, token=token, step=step, turn=turn, part=part, data=(pickled, sent))

    def _take(self, turn: int, part: str, numbers: Sequence[int], about: About) -> list[Any]:
        senders = [self._team.workers[number] for number in numbers]
        came = self._desk.take(self._key, turn, part, senders, about.name, self._team)
        return [pickle.loads(pickled, buffers=frames) for pickled, frames in came]


def _outcome(function: Callable[..., Any], *args: Any, before: Any) -> Any:
    # Of what failed, that: others wait for it.
    if isinstance(before, Failure):
        return before
    try:
        return function(*args)
    except BaseException as error:
        return Failure.of(error)


def step_aside() -> None:
    """Let the worker go on with other tasks, which may be those of replicas this one waits for."""
    if getattr(thread_state, "proceed", False):
        secede()


_desks: weakref.WeakKeyDictionary[Worker, Desk] = weakref.WeakKeyDictionary()
_lock: Final = threading.Lock()


def desk_of(worker: Worker) -> Desk:
    """The desk of a worker."""
    with _lock:
        found = _desks.get(worker)
        if found is None:
            found = _desks[worker] = Desk(worker)
        return found


def enrol(team: Team, dask_worker: Worker) -> None:
    """Make the replicas of a strategy known to a worker."""
    desk_of(dask_worker).teams[team.token] = team


def dismiss(token: str, dask_worker: Worker) -> None:
    """Have a worker forget the replicas of a strategy."""
    desk_of(dask_worker).teams.pop(token, None)


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

        return ReplicaContext(self.number, self.num_replicas, strategy, lambda: desk_of(get_worker()).gang(token, step))

    def leave(self, step: int, error: BaseException | None) -> None:
        """Tell that the call is over."""
        desk_of(get_worker()).leave(self.token, step, self.number, error)


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
        with fed(filled(results, picks, leaves), treespec, own.replica, own.number) as (args, kwargs):
            returned = Returned.of(call_on_replica(results[0], args, kwargs, own.replica, context))
    except BaseException as error:
        if own.num_replicas > 1:
            own.leave(step, error)
        raise
    if context.has_met:
        own.leave(step, None)
    return returned
