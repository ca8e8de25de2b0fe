"""The recovery of a strategy on a cluster that loses workers: it continues with others."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from distributed import Client

from daskdist.errors import ClusterError
from daskdist.execute.callers.cluster_requests import closed_error, run_on_scheduler, run_on_workers
from daskdist.execute.callers.live_workers import LiveWorkers, cancel_lost_tasks
from daskdist.execute.callers.submit import Submit, workers_of
from daskdist.strategy.backend import GenerationEndedError, Recovery
from daskdist.strategy.calls.call_messages import AskValues
from daskdist.strategy.calls.recovery.repeated_calls import RepeatedCalls
from daskdist.strategy.calls.sent_objects import SentObjects
from daskdist.strategy.calls.stream_set import StreamSet
from daskdist.strategy.calls.worker.on_scheduler import answers, note_in_use
from daskdist.strategy.calls.worker.replica_call import CrossReplica
from daskdist.strategy.calls.worker.worker_streams import install
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.placement.replacements import Replacements
from daskdist.waiting import wait_intervals

logger: Final = logging.getLogger("daskdist")

# Seconds after which the scheduler knows of a loss that the program has noticed.
_KNOWN_WITHIN_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.05
# Seconds within which a worker that leaves hands over its values.
_HANDS_OVER_WITHIN_S: Final = 10.0


class WorkerRecovery(Recovery):
    """The recovery from the loss of workers: a strategy continues with others, once earlier calls have ended.

    Parameters
    ----------
    streams
        The streams to the workers.
    submit
        Makes Dask's tasks, and knows which of its workers are lost.
    objects
        The objects that workers have.
    cross_replica
        Makes the strategy for functions between replicas, on a worker.
    replacements
        Finds workers that take the places of lost ones.
    repeated_calls
        The calls that are made again.
    """

    def __init__(
        self,
        streams: StreamSet,
        submit: Submit,
        objects: SentObjects,
        cross_replica: CrossReplica,
        replacements: Replacements,
        repeated_calls: RepeatedCalls,
    ) -> None:
        self.client: Client = streams.client
        self.live_workers: LiveWorkers = streams.live_workers
        self.streams = streams
        self.objects = objects
        self.cross_replica = cross_replica
        self.replacements = replacements
        self._submit = submit
        self._repeated_calls = repeated_calls

    @property
    def in_doubt(self) -> bool:
        """Return whether something failed since the workers were last checked."""
        return self.live_workers.in_doubt and self.client.status == "running"

    def missing(self) -> list[str]:
        """Return the strategy's workers that are lost or were restarted."""
        return list(dict.fromkeys((*self.streams.lost(), *self.live_workers.leaving, *self._submit.missing())))

    def lost_workers(self, within_s: float) -> list[str]:
        """Return the workers that are lost but still have replicas, waiting up to some seconds for one."""
        streams = self.streams
        with contextlib.suppress(ClusterError):
            streams.wait(lambda: bool(streams.lost()), within_s)
        if self.client.status != "running":
            raise closed_error(self.client)
        if lost := self.missing():
            self.live_workers.in_doubt = True
        return lost

    def recover(self, group: ReplicaGroup) -> ReplicaGroup:
        """Continue with the remaining workers, once earlier calls have ended; return the remaining replicas."""
        # Before the workers are checked: one that is lost meanwhile sets them again.
        self.live_workers.in_doubt = self.live_workers.has_lost = False
        try:
            return self._recovered(group)
        except BaseException:
            self.live_workers.in_doubt = True
            raise

    def _recovered(self, group: ReplicaGroup) -> ReplicaGroup:
        live_workers, lost = self.live_workers, self.missing()
        if len(lost) == len(live_workers.present):
            # Further calls will raise.
            self._repeated_calls.fail_repeated_losses()
            return group
        if live_workers.leaving:
            # Leaving workers complete the calls that were sent to them.
            self.streams.finish()
            self._wait_for_values(live_workers.leaving)
        live_workers.drop(lost)
        left = replace(
            group, replicas=tuple([replica for replica in group.replicas if replica.worker in live_workers.present])
        )
        if left == group:
            return group
        # The scheduler may lack this package.
        with contextlib.suppress(Exception):
            run_on_scheduler(self.client, cancel_lost_tasks, lost, self.client.id, _KNOWN_WITHIN_S)
        try:
            self.streams.end_waiting_for(live_workers.lost)
            # Wait for calls in flight, which change variables.
            self.streams.become(left)
            self.objects.clear()
            note_in_use(self.client, group.token, left.workers)
        except (ClusterError, OSError) as error:
            # Those that were missing before are dropped.
            if self.missing():
                raise GenerationEndedError("another worker was lost while a strategy continued without some") from error
            raise
        return left

    def _wait_for_values(self, leaving: Sequence[str]) -> None:
        # Values that a worker handed over on its own may be older than the last call. If it ends before it answers, it
        # made no further call.
        streams, live_workers = self.streams, self.live_workers
        asked = {worker: live_workers.num_handed_over(worker) for worker in leaving if streams.is_open(worker)}
        with streams.lock:
            for worker in asked:
                streams.stream_with(worker, ()).link.append(AskValues())

        def is_silent(worker: str) -> bool:
            return streams.is_open(worker) and live_workers.num_handed_over(worker) == asked[worker]

        streams.wait(lambda: True not in map(is_silent, asked), _HANDS_OVER_WITHIN_S)
        for worker in filter(is_silent, asked):
            within_s = _HANDS_OVER_WITHIN_S
            logger.warning("%s, which leaves, did not hand over its ON_READ variables within %g s", worker, within_s)

    def take_handed_over(self) -> list[Any]:
        """Return the values that only workers that left had; see `Recovery`."""
        return self.live_workers.take_handed_over()

    def with_replacements(self, group: ReplicaGroup) -> ReplicaGroup:
        """Continue with further workers in the places of lost ones, if there are any; return the replicas."""
        live_workers, streams, client = self.live_workers, self.streams, self.client
        if live_workers.present != group.workers or not self.replacements.are_needed(group.workers):
            return group
        connected = workers_of(client)
        added = self.replacements.take(group.workers, connected)
        if not added:
            return group
        more = replace(group, replicas=(*group.replicas, *added))
        workers = list(dict.fromkeys(str(replica.worker) for replica in added))
        try:
            streams.finish()
            self._open(more, workers)
            streams.announce(more, group.workers)
        except (ClusterError, OSError) as error:
            logger.warning("%s cannot take part: %s", ", ".join(workers), error)
            if self._are_lost(more.workers, connected):
                # The others can take part later.
                self.replacements.forget(workers)
            return group
        live_workers.add(workers)
        # Store their identities, as other workers may later get the same addresses.
        live_workers.missing(connected)
        note_in_use(client, group.token, more.workers)
        logger.warning("%s takes part; there are %d replicas now", ", ".join(workers), len(more.replicas))
        return more

    def waits_for_replacement(self, lost: Collection[str]) -> Iterator[float]:
        """Yield seconds to wait between attempts to replace lost workers, while Dask may start them again."""
        waited_for = f"a worker in the place of {', '.join(lost)}"
        with contextlib.suppress(Exception):
            for within_s in wait_intervals(waited_for, "timeouts.workers", _LOOK_EVERY_S):
                if self.streams.lost() or not run_on_scheduler(self.client, answers, self.replacements.nannies(lost)):
                    return
                yield within_s

    def _open(self, group: ReplicaGroup, workers: Sequence[str]) -> None:
        # Open streams to workers that were chosen.
        run_on_workers(self.client, install, self.cross_replica, workers=workers)
        self.streams.open(group, workers)

    def _are_lost(self, workers: Sequence[str], before: Mapping[str, Mapping[str, Any]]) -> bool:
        # Return whether some workers are not those that were connected before, once the scheduler knows.
        directories = [before[worker]["local_directory"] if worker in before else None for worker in workers]
        until = time.monotonic() + _KNOWN_WITHIN_S

        def are_lost() -> bool:
            connected = workers_of(self.client)
            return directories != [
                connected[worker]["local_directory"] if worker in connected else "" for worker in workers
            ]

        while not (is_known := are_lost()) and time.monotonic() <= until:
            time.sleep(_LOOK_EVERY_S)
        return is_known
