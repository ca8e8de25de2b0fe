"""Calls that are made again if a worker is lost, unless each attempt ended workers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

import dask.config

from daskdist.errors import ClusterError, DaskdistError, NotMadeAgainError, RepeatedLossError
from daskdist.execute.messages.failure import Failure
from daskdist.execute.paused_workers import MOST_LOSSES, after_repeated_losses, ended_for_memory
from daskdist.strategy.backend import CallRepetition
from daskdist.strategy.calls.calls import Losses, Record
from daskdist.strategy.calls.outcomes import Failed
from daskdist.strategy.calls.recovery.call_log import CallLog, LoggedCall
from daskdist.strategy.calls.stream_set import StreamSet
from daskdist.strategy.group import ReplicaGroup

logger: Final = logging.getLogger("daskdist")

# The number of losses that one counts for if Dask ended the worker because its memory was full: the next worker may
# have no more memory.
_FOR_MEMORY: Final = 2
# Seconds that a call which is made again is the only one under way, if it takes as long: its data may have to be read
# again first. A busy worker reports late that a call is over, and the call would be blamed for a loss meanwhile.
_ALONE_S: Final = 60.0


class RepeatedCalls(CallRepetition):
    """The calls of steps that failed because of a lost worker, and are made again on the remaining ones.

    Parameters
    ----------
    streams
        The streams to the workers.
    log
        The calls of steps that are not complete.
    """

    def __init__(self, streams: StreamSet, log: CallLog) -> None:
        self.streams = streams
        # Changed under the lock.
        self.num_made_again = 0
        self._lock = threading.Lock()
        self._log = log
        # Handles of the calls that are undone, until they have been made again.
        self._held: list[Any] = []
        # Whether calls have been undone on the first replica since all replicas had the same values of variables.
        self._is_unaligned = False
        # Raised by the next call, unless it was raised where a result was looked at.
        self.failed: Failed | None = None

    @property
    def is_needed(self) -> bool:  # type: ignore[override]
        """Return whether calls would have to be made again if workers are lost, or the scheduler is."""
        return bool(self._log) or self.streams.connection.is_lost

    def note_made_again(self) -> None:
        """Note that calls were made again, or given up: what waited for their results looks again."""
        with self._lock:
            self.num_made_again += 1

    def fail_last(self, failed: Failed, num_replicas: int) -> None:
        """Let the last step fail if it is complete, but its results are of use no more; then it is made again."""
        self._log.fail_last(failed, num_replicas)

    def _calls_to_make_again(self) -> list[LoggedCall]:
        # If the first worker joined after a call on replicas was complete, its variables have the call's changes,
        # and cannot undo them.
        return [
            call
            for call in self._log.calls_to_make_again(self.streams.is_there)
            if not call[0].is_of_replicas or call[0].has_failed or not self._is_before_first(call[0])
        ]

    def _is_before_first(self, record: Record) -> bool:
        # Return whether a call was sent before the first worker joined others. Replicas are aligned with its variables.
        live_workers = self.streams.live_workers
        first = live_workers.present[0] if live_workers.present else ""
        return first in live_workers.joined and not self.streams.is_there(first, record.number)

    def first_to_undo(self) -> int | None:
        """Return the number of the first call to undo before calls are made again; None if there is none."""
        calls = self._calls_to_make_again()
        # What is undone is made again, even if nothing else needs it any more.
        self._held = [handle() for _, handle, _ in calls]
        records = [record for record, _, _ in calls if record.is_of_replicas]
        if self._is_unaligned and any(record.is_undone and self._is_before_first(record) for record in records):
            # Perhaps the first replica has not got the values of those that undid the calls.
            self.give_up("all replicas that undid them are lost")
            return None
        return next((record.number for record in records if not record.is_undone), None)

    def note_aligned(self) -> None:
        """Note that all replicas have the same values of variables, those without the calls that are undone."""
        self._is_unaligned = False

    def note_undone(self) -> None:
        """Note that the calls that are to be made again are undone: they fail until they have been made again.

        If another worker is lost meanwhile, the rest of them are made again, also those that had been complete, and the
        changes of those that have been made again stay.
        """
        self._is_unaligned = True
        why = Failed(
            Failure.of(ClusterError("a call was undone after the loss of a worker, and has not been made again")), None
        )
        for record, _, _ in self._calls_to_make_again():
            if record.is_of_replicas:
                record.is_undone = True
                if not record.has_failed:
                    record.fail(why)

    def make_again(self, group: ReplicaGroup) -> None:
        """Make the calls again that failed because of a lost worker; see `CallRepetition`."""
        try:
            self._make_again(group)
        finally:
            # A thread that saw a call undone meanwhile looks again.
            if self._held:
                self.note_made_again()
            self._held = []

    def _make_again(self, group: ReplicaGroup) -> None:
        calls = self._calls_to_make_again()
        records = [record for record, _, _ in calls]
        if calls:
            self.note_made_again()
            # A call that was being made at two losses is not made on the last worker.
            most, rest = dask.config.get(MOST_LOSSES), ""
            if len(self.streams.live_workers.present) == 1:
                most, rest = min(most, 1), "; it is not made on the last worker, with which the strategy continues"
            if error := self._repeated_loss(records, most, rest):
                self._fail(records, error)
                return
            logger.warning("making %d calls again, which failed with the loss", len(calls))
            for failed in chain.from_iterable(record.failures() for record in records):
                self.streams.failures.mark_observed(failed)
        for number, logged in enumerate(calls):
            try:
                if (record := self._log.make_again(logged, group)) is not None:
                    # Make one call at a time: if a worker is lost again, the call that it was making is known.
                    self.streams.wait(partial(_is_over, record), _ALONE_S)
            except Exception as error:
                if lost := self.streams.lost():
                    raise self.streams.lost_error(lost) from error
                record = logged[0]
                if not record.is_of_replicas:
                    # It has changed nothing, so only what needs its result fails.
                    record.fail(Failed(Failure.of(error), record.number))
                    self._log.remove(record)
                    continue
                self._fail(records[number:], self._not_made_again(f"{logged[0].name}: {error}"))
                return

    def lost_once(self) -> set[str]:
        """Return the workers that were lost with calls that are to be made again, and were made once."""
        records = [record for record, _, _ in self._calls_to_make_again()]
        once = [record for record in records if record.losses.num_losses + bool(record.lost) == 1]
        return {worker for record in once for worker in (*record.losses.workers, *record.lost)}

    def fail_repeated_losses(self) -> None:
        """Fail the calls if one of them ended several workers, when no worker is left."""
        records = [record for record, _, _ in self._calls_to_make_again()]
        if error := self._repeated_loss(records, 1, "; no worker is left, create a new strategy"):
            self.note_made_again()
            self._fail(records, error)

    def _repeated_loss(self, records: Sequence[Record], most: int, rest: str = "") -> RepeatedLossError | None:
        # Return an error if a call was being made more than ``most`` times that workers were lost.
        for record in records:
            if record.lost:
                is_for_memory = ended_for_memory(self.streams.client, record.lost) != ""
                workers, num_losses = record.losses
                num_losses += _FOR_MEMORY if is_for_memory else 1
                record.losses, record.lost = Losses((*workers, *record.lost), num_losses), ()
        for record in records:
            workers, num_losses = record.losses
            if num_losses > most:
                why = after_repeated_losses(self.streams.client, workers)
                lost = ", ".join(workers)
                step = f"{record.name} in step {self._log.step_number(record)} of the strategy"
                return RepeatedLossError(
                    f"{step} ran, or waited for its data, each time that {lost} were lost{why}{rest}"
                )
        return None

    def give_up(self, why: str) -> None:
        """Make no calls again, and log the reason."""
        self._fail(self._log.lost_calls(), self._not_made_again(why))

    def _not_made_again(self, why: str) -> NotMadeAgainError:
        lost = ", ".join(self.streams.live_workers.lost)
        return NotMadeAgainError(f"steps that failed with a lost worker are not made again: {why} (lost {lost})")

    def _fail(self, records: Sequence[Record], error: DaskdistError) -> None:
        # Changes of variables by these calls are undone, so calls that had succeeded fail, too.
        logger.warning("%s", error)
        if records:
            failed = self.failed = Failed(Failure.of(error), records[0].number)
            for record in records:
                record.fail(failed)
        self._log.clear()

    def raise_failure(self) -> None:
        """Raise the error of calls that were not made again, unless it was raised where a result was read."""
        failed, self.failed = self.failed, None
        if failed is not None and not self.streams.failures.is_observed(failed):
            self.streams.failures.mark_observed(failed)
            raise failed.failure.error()


def _is_over(record: Record) -> bool:
    return not record.num_left
