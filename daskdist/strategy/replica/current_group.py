"""The current replicas of a strategy, some of which may be lost while the program runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from daskdist.errors import ArgumentError, ClusterError, CollectiveError
from daskdist.strategy.backend import Recovery
from daskdist.strategy.group import ReplicaGroup

logger: Final = logging.getLogger("daskdist")


class CurrentGroup:
    """The current replicas, and the numbers of replicas before any were lost."""

    def __init__(self, group: ReplicaGroup, recovery: Recovery) -> None:
        # Replaced as a whole if replicas are lost.
        self.now = group
        self._recovery = recovery
        self._sizes_before: tuple[int, ...] = ()
        # True once replicas were lost or added.
        self.has_changed = False
        self._lost: tuple[str | None, ...] = ()
        # Other threads wait for the lock. The flag prevents re-entry, as recovery itself calls replicas.
        self._lock = threading.RLock()
        self._is_inside = False
        # True while a recovery is under way, and after one that failed: the next call goes on with it.
        self.is_recovering = False
        # Whether some replicas remained of those before the losses after which replicas have yet to be aligned; None if
        # all are aligned.
        self._some_remain: bool | None = None

    def recover(self, align: Callable[[bool], None]) -> None:
        """Continue with the remaining replicas if some are lost.

        Parameters
        ----------
        align
            Called if replicas are lost, to give the remaining ones the same values of variables, with whether there are
            any of the earlier ones.
        """
        with self._lock:
            if self._is_inside or not (self._recovery.in_doubt or self.is_recovering):
                return
            self._is_inside = self.is_recovering = True
            try:
                while (group := self._recovery.recover(self.now)) is not self.now or self._some_remain is not None:
                    has_changed = group is not self.now
                    if has_changed:
                        self._some_remain = self._replace(group) and self._some_remain is not False
                    try:
                        align(self._some_remain is not False)
                        self._some_remain = None
                    except (ClusterError, CollectiveError, OSError):
                        # Another worker may be lost in the meantime, also while the replicas meet.
                        if not has_changed:
                            raise
            finally:
                self._is_inside, self.is_recovering = False, self._some_remain is not None

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
