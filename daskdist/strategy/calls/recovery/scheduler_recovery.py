"""The recovery of a strategy on a cluster that also loses its scheduler, and with it all workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from daskdist.core.cardinality import counted
from daskdist.errors import ClusterError
from daskdist.execute.callers.submit import workers_of
from daskdist.execute.messages.failure import Failure
from daskdist.strategy.backend import GenerationEndedError
from daskdist.strategy.calls.outcomes import Failed
from daskdist.strategy.calls.program_report import ProgramReport
from daskdist.strategy.calls.recovery.scheduler_connection import SchedulerConnection
from daskdist.strategy.calls.recovery.worker_recovery import WorkerRecovery
from daskdist.strategy.calls.worker.on_scheduler import note_in_use
from daskdist.strategy.group import ReplicaGroup

logger: Final = logging.getLogger("daskdist")

# The most times that other workers are chosen, if some are lost before there are streams to them.
_MOST_ATTEMPTS: Final = 5


class SchedulerRecovery(WorkerRecovery):
    """The recovery also from the loss of the scheduler: a strategy continues with another one at its address.

    The tasks that the program still needs are submitted to it again, so that batches that were handed out, or read
    ahead, can be used as before. Workers of the lost scheduler have ended with it; others take the places of all, and
    may have the same addresses.

    The parameters are those of `WorkerRecovery`.
    """

    # What the program reports to the scheduler, once the strategy is open.
    report: ProgramReport
    # True from the choice of other workers until there are streams to them.
    _is_beginning = False

    @property
    def connection(self) -> SchedulerConnection:
        """The connection to the scheduler."""
        return self.streams.connection

    @property
    def in_doubt(self) -> bool:
        """Return whether something failed since the workers were last checked, or the scheduler is lost."""
        return self.connection.is_lost or super().in_doubt

    def lost_workers(self, within_s: float) -> list[str]:
        """Return the workers that are lost but still have replicas, waiting up to some seconds for one."""
        try:
            lost = super().lost_workers(within_s)
        except (ClusterError, OSError):
            if not self.connection.is_lost:
                raise
        return list(self.live_workers.present) if self.connection.is_lost else lost

    def _recovered(self, group: ReplicaGroup) -> ReplicaGroup:
        try:
            if not self.connection.is_lost:
                return super()._recovered(group)
            self.connection.renew(self._abandon_leaving)
            group = self._continued(group)
        except (ClusterError, OSError) as error:
            if self.connection.is_lost_again:
                raise GenerationEndedError("the scheduler was lost while a strategy continued") from error
            raise
        self.connection.note()
        return group

    def _abandon_leaving(self) -> None:
        # Without their scheduler, workers end as soon as the calls that were sent to them have.
        leaving = [address for address in self.live_workers.leaving if self.streams.is_open(address)]
        if leaving:
            self.streams.abandon(leaving)

    def _continued(self, group: ReplicaGroup) -> ReplicaGroup:
        client, live_workers, before = self.client, self.live_workers, group
        missing = live_workers.missing(workers_of(client))
        if self._is_beginning or len(missing) == len(live_workers.present):
            group = self._begun_again(group)
        else:
            # Only the connection was lost. Passes begin again from their positions with each new tuple of replicas.
            group = replace(group, replicas=tuple(map(replace, group.replicas)))
            self.streams.announce(group)
            self._note_in_use(group)
        self._submit.sent_blocks.follow_scheduler()
        # Workers keep the input pipelines of a function's datasets if as many replicas are on as many workers.
        is_alike = group.num_members == before.num_members
        self._submit.futures.submit_again(dict(zip(before.workers, group.workers, strict=True)) if is_alike else {})
        # Reads of values that the loss interrupted start again.
        self._repeated_calls.note_made_again()
        logger.warning(
            "joined the scheduler at %s again, with %s on %s",
            client.scheduler.address,
            counted(len(group.replicas), "replica"),
            counted(len(group.workers), "worker"),
        )
        return group

    def _begun_again(self, group: ReplicaGroup, num_attempts: int = _MOST_ATTEMPTS) -> ReplicaGroup:
        client = self.client
        why = f"the scheduler at {client.scheduler.address} was lost, and with it all workers"
        placed = replace(
            group, replicas=tuple(self.replacements.take_all(client)), lost_with=why, num_lost=group.num_lost + 1
        )
        connected = workers_of(client)
        try:
            self._continue_on(placed, why, connected)
            return placed
        except (ClusterError, OSError):
            self.replacements.forget(placed.workers)
            if num_attempts == 1 or not self._are_lost(placed.workers, connected):
                raise
        return self._begun_again(group, num_attempts - 1)

    def _continue_on(self, group: ReplicaGroup, why: str, connected: Mapping[str, Mapping[str, Any]]) -> None:
        live_workers, streams, before = self.live_workers, self.streams, self.live_workers.present
        self._is_beginning = True
        live_workers.replace_all(group.workers, why)
        # Remember their identities, as others may later get their addresses.
        lost = live_workers.missing(connected)
        gone = Failure.of(ClusterError(f"a result is gone: {live_workers.advice}"))
        self._repeated_calls.fail_last(Failed(gone, None), len(group.replicas))
        streams.abandon(before)
        self.objects.clear()
        if lost:
            raise ClusterError(f"lost {', '.join(lost)}, which was to have replicas")
        # The scheduler may have to relay the streams.
        self._note_in_use(group)
        self._open(group, group.workers)
        self.streams.announce(group)
        self._is_beginning = False

    def _note_in_use(self, group: ReplicaGroup) -> None:
        if note_in_use(self.client, group.token, group.workers):
            self.report.start()
