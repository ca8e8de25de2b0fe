"""The generations of a strategy: which replicas take part, and the one place that continues with others.

Any change of who takes part ends a generation: workers that are lost, leave or join, and a lost scheduler. What was
begun in it and needs those that are gone fails with an error, is caught here, and is begun again in the next one, in
which the program's data is submitted again and the calls of incomplete steps are made again. References outlive it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from daskdist.errors import ArgumentError, ClusterError, CollectiveError, NotMadeAgainError
from daskdist.strategy.backend import Backend, GenerationEndedError
from daskdist.strategy.group import ReplicaGroup

logger: Final = logging.getLogger("daskdist")

_T = TypeVar("_T")


class Generations:
    """The current replicas, and the numbers of replicas before any were lost.

    Any thread reads the attributes; they change under the lock, in the thread that recovers or adds replicas.

    Parameters
    ----------
    group
        The first replicas.
    backend
        Calls the replicas, and finds others.
    align
        Returns the function that is called after a loss, to give the remaining replicas the same values of variables
        and make calls again, with whether there are any of the earlier replicas; None once the strategy is garbage.
    """

    def __init__(
        self, group: ReplicaGroup, backend: Backend, align: Callable[[], Callable[[bool], None] | None]
    ) -> None:
        # Replaced as a whole if replicas are lost or added.
        self.now = group
        # The backend itself would be in a cycle with this.
        self._live_workers = backend.live_workers
        self._recovery = backend.recovery
        self._repetition = backend.repetition
        self._align = align
        self._sizes_before: tuple[int, ...] = ()
        # True once replicas were lost or added.
        self.has_changed = False
        self._lost: tuple[str | None, ...] = ()
        # Held while a thread recovers, for which others wait. The flag prevents re-entry, as recovery calls replicas.
        self._lock = threading.RLock()
        self._is_inside = False
        # True while a recovery is under way, and after one that failed: the next call goes on with it.
        self.is_recovering = False
        # Whether some replicas remained of those before the losses after which replicas have yet to be aligned; None if
        # all are aligned.
        self._some_remain: bool | None = None

    # --- the next generation ---

    def recover(self) -> None:
        """Continue with the remaining replicas if some are lost."""
        with self._lock:
            if self._is_inside or not (self._recovery.in_doubt or self.is_recovering):
                return
            if (align := self._align()) is None:
                return
            self._is_inside = self.is_recovering = True
            try:
                while self._has_ended(align):
                    # More may have been lost meanwhile.
                    pass
            finally:
                self._is_inside, self.is_recovering = False, self._some_remain is not None

    def _has_ended(self, align: Callable[[bool], None]) -> bool:
        # Begin the next generation if the current one has ended; return whether it had.
        try:
            group = self._recovery.recover(self.now)
        except GenerationEndedError:
            return True
        has_changed = group is not self.now
        if not has_changed and self._some_remain is None:
            return False
        if has_changed:
            self._some_remain = self._replace(group) and self._some_remain is not False
        try:
            align(self._some_remain is not False)
            self._some_remain = None
        except (ClusterError, CollectiveError, OSError):
            # Another worker may be lost in the meantime, also while the replicas meet.
            if not has_changed:
                raise
        return True

    def recover_soon(self) -> None:
        """Continue with the remaining replicas if some are known to be lost."""
        if self._live_workers.has_lost:
            self._live_workers.in_doubt = True
        # Another thread may be recovering.
        if self._live_workers.in_doubt or self.is_recovering:
            self.recover()

    def recover_steps(self) -> None:
        """Continue with the remaining replicas if some are lost, and steps are under way that have to be made again."""
        if self._repetition.is_needed:
            self.recover()

    def call(self, work: Callable[[], _T], recover: Callable[[], Any] | None = None, *, settles: bool = False) -> _T:
        """Return the result of a function that uses the current replicas; call it again if they change meanwhile.

        Parameters
        ----------
        work
            The function.
        recover
            Called after an error, to continue with the remaining replicas if some are lost; `recover_soon` by default.
        settles
            Whether the function is also called again if replicas are found to be lost after it.
        """
        while True:
            group, num_made_again = self.now, self._repetition.num_made_again
            try:
                result = work()
            except NotMadeAgainError:
                raise
            except (ClusterError, CollectiveError) as error:
                # After a change of the replicas by another thread, wait for its end.
                (self.recover if isinstance(error, GenerationEndedError) else recover or self.recover_soon)()
                # What settles may be the report of a failure, which is made once: a second call would not report it.
                has_changed = self.now is not group or (
                    self._repetition.num_made_again != num_made_again and not settles
                )
                if not has_changed:
                    raise
                continue
            if settles:
                self.recover_soon()
            if not settles or self.now is group:
                return result

    def grow(self) -> bool:
        """Continue with further replicas on workers that take the places of lost ones; return whether there are any."""
        with self._lock:
            before, self.now = self.now, self._recovery.with_replacements(self.now)
            if self.now is not before:
                self._sizes_before += (len(before.replicas),)
                self.has_changed = True
            return self.now is not before

    def _replace(self, group: ReplicaGroup) -> bool:
        # Return whether some replicas remain.
        before = self.now
        some_remain = group.num_lost == before.num_lost
        lost = [worker for worker in before.workers if not some_remain or worker not in group.workers]
        self._sizes_before += (len(before.replicas),)
        self.has_changed = True
        self._lost += tuple(lost)
        self.now = group
        if lost and some_remain:
            reasons = [
                f"lost {address}, and with it replica {', '.join(map(str, before.members(address)))}"
                for address in lost
            ]
            sizes = len(group.replicas), len(before.replicas)
            logger.warning("%s; %d of %d replicas are left", "; ".join(reasons), *sizes)
        return some_remain

    # --- values of earlier generations ---

    def had(self, size: int | None) -> bool:
        """Return whether there were this many replicas before some were lost or added."""
        return size in self._sizes_before

    def wrong_size(self, operation: str, size: int) -> Exception:
        """Return the error for a `PerReplica` with a wrong number of values."""
        now = len(self.now.replicas)
        if self.had(size):
            lost = f"lost {', '.join(map(str, self._lost))}, and " if self._lost else ""
            return ClusterError(
                f"{operation}: {lost}a PerReplica of {size} values is for the "
                f"{size} replicas there were, and now there {'is' if now == 1 else 'are'} {now}; create it again: a "
                "distributed dataset that is iterated over again gives each of them its part"
            )
        return ArgumentError(
            f"{operation}: a PerReplica of {size} values was given to a strategy of {now} replicas; "
            "it belongs to another strategy"
        )
