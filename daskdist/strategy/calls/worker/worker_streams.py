"""The streams of all strategies to one worker."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Sequence
from typing import Any, Final

from distributed import Worker, get_worker
from distributed.comm import Comm
from distributed.core import Status

from daskdist.config import seconds
from daskdist.dashboard.figures import TIMES_METRIC
from daskdist.execute.task_times import task_times
from daskdist.strategy.calls.calls import LOOP_PREFIX
from daskdist.strategy.calls.stream import OPERATION
from daskdist.strategy.calls.worker.data_keys import data_keys_of
from daskdist.strategy.calls.worker.replica_call import CrossReplica
from daskdist.strategy.calls.worker.worker_steps import StepsOnWorker
from daskdist.strategy.collectives.mailbox import mailbox_of
from daskdist.strategy.collectives.messages import SentResult
from daskdist.strategy.group import ReplicaGroup

_PLUGIN: Final = "daskdist-steps"
# Seconds between the checks of an ending worker for calls that have not ended, and of another worker for connections to
# an ended one.
_LOOK_EVERY_S: Final = 0.01
# Seconds without calls after which an ending worker ends: a program on a busy machine may not have got to using the
# results of its last step yet.
_AT_REST_S: Final = 1.0


class StreamsOfWorker:
    """The streams of all strategies to one worker.

    Parameters
    ----------
    worker
        The worker.
    cross_replica
        Returns the strategy for cross-replica functions.
    """

    def __init__(self, worker: Worker, cross_replica: CrossReplica) -> None:
        self._cross_replica = cross_replica
        self._mailbox = mailbox_of(worker)
        self._keys = data_keys_of(worker)
        self._mailbox.links.handlers[SentResult] = self._receive
        self.by_token: dict[str, StepsOnWorker] = {}
        worker.handlers[OPERATION] = self._serve
        worker.plugins[_PLUGIN] = self
        # Dask's dashboard has a column for each on its page of workers, and `Client.scheduler_info` has them too.
        worker.metrics["daskdist_replicas"] = self._num_replicas
        worker.metrics["daskdist_running"] = self._running
        worker.metrics[TIMES_METRIC] = self._replica_times

    async def _serve(self, comm: Comm, group: bytes, is_relayed: bool) -> Any:
        known: ReplicaGroup = pickle.loads(group)
        steps = self.by_token[known.token] = StepsOnWorker(
            self._mailbox, known, comm, is_relayed, self._keys, self._cross_replica
        )
        try:
            await comm.write("OK")
            await steps.serve()
        finally:
            steps.close()
            if self.by_token.get(known.token) is steps:
                del self.by_token[known.token]
        return Status.dont_reply

    async def teardown(self, worker: Worker) -> None:
        """Wait for the calls that were sent, while their programs are connected; Dask calls it before a worker ends.

        So no call is lost when a worker is retired: it notifies the programs, and sends them the values that only its
        replicas have, and they continue without it.
        """
        for steps in self.by_token.values():
            steps.announce_leaving()
        now = busy_at = time.monotonic()
        until = busy_at + seconds("timeouts.step")
        while self.by_token and now < until:
            are_at_rest = all(steps.is_at_rest for steps in self.by_token.values())
            if not are_at_rest or self._hand_over():
                busy_at = now
            elif now > busy_at + _AT_REST_S:
                break
            await asyncio.sleep(_LOOK_EVERY_S)
            now = time.monotonic()
        # While Dask closes the worker, a call would change values that were handed over: others make it.
        for steps in self.by_token.values():
            steps.end_stream()

    def _hand_over(self) -> bool:
        # Return whether a program had not been given the values yet.
        return True in [steps.hand_over(only_new=True) for steps in self.by_token.values()]

    def _num_replicas(self, worker: Worker) -> int:
        return sum(len(steps.slots) for steps in self.by_token.values())

    def _replica_times(self, worker: Worker) -> dict[str, Any]:
        # For the dashboard's page, as in `DashboardFigures.observe`.
        replicas = [
            (token, slot.number, slot.replica.device, *slot.times.totals())
            for token, steps in list(self.by_token.items())
            for slot in steps.slots
        ]
        return {"at": time.monotonic(), "replicas": replicas, "tasks": task_times(worker.address).by_name()}

    def _running(self, worker: Worker) -> str:
        running = [call for steps in self.by_token.values() for call in steps.running()]
        return ", ".join(f"{name.removeprefix(LOOP_PREFIX)} for {so_far:.0f} s" for _, name, so_far, _ in running)

    def _receive(self, sender: str, result: SentResult) -> None:
        steps = self.by_token.get(result.token)
        if steps is not None:
            steps.arrive(result)


def install(cross_replica: CrossReplica, dask_worker: Worker) -> None:
    """Register the handler of streams of steps on a worker; called in its event loop."""
    if streams_of(dask_worker) is None:
        StreamsOfWorker(dask_worker, cross_replica)
        _end_late_connections(dask_worker)


def _end_late_connections(worker: Worker) -> None:
    # When Dask hears that a worker has left, it ends all connections to it, including those being made. A transfer that
    # was decided on in the same batch of messages connects only afterwards, and would try for 30 s
    # (``distributed.comm.timeouts.connect``) before the data is requested elsewhere.
    handle, loop = worker.stream_handlers["remove-worker"], asyncio.get_running_loop()
    pool, links = worker.rpc, mailbox_of(worker).links

    def remove_worker(worker: str, stimulus_id: str) -> None:
        handle(worker=worker, stimulus_id=stimulus_id)
        links.note_left(worker)
        loop.call_later(_LOOK_EVERY_S, end, worker)

    def end(address: str) -> None:
        try:
            pool.remove(address)
        except RuntimeError:
            # A connection is being ended already, and the pool has not handled the others: try again.
            loop.call_later(_LOOK_EVERY_S, end, address)

    worker.stream_handlers["remove-worker"] = remove_worker


def streams_of(worker: Worker) -> StreamsOfWorker | None:
    """Return the streams to a worker; None if no strategy has used it yet."""
    return worker.plugins.get(_PLUGIN)  # type: ignore[no-any-return]


def steps_of(worker: Worker, token: str) -> StepsOnWorker:
    """Return the steps of a strategy on a worker."""
    streams: StreamsOfWorker = worker.plugins[_PLUGIN]
    return streams.by_token[token]


def result_in_memory(results: Sequence[Any], token: str, number: int, place: int) -> Any:
    """Return a result of a step, in a task on its worker."""
    return steps_of(get_worker(), token).value(number, place)
