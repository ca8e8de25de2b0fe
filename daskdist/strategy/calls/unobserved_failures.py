"""Failures of calls whose results were not read and are no longer referenced."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Final

from daskdist.errors import NotMadeAgainError
from daskdist.strategy.calls.calls import APPLY, LOST, Record, records_in
from daskdist.strategy.calls.outcomes import Failed

# The number of raised failures to remember.
_NUM_OBSERVED: Final = 1024


class UnobservedFailures:
    """Failures of calls whose results were not read: the next wait raises the first, and counts the others.

    A failure is identified by the number of the call that raised it. Calls that use its result fail with it, and while
    the program references a result of one of them, the failure can still be raised there.

    The event loop adds failures, while program threads read and forget them.
    """

    def __init__(self) -> None:
        # Held by each method that changes something.
        self._lock = threading.RLock()
        # call that raised -> the number of calls that failed with it and whose results can still be read.
        self._num_failed: Counter[int] = Counter()
        # call that raised -> its failure, whose results can no longer be read.
        self.unobserved: dict[int, Failed] = {}
        # The failures whose results can still be read.
        self._visible: dict[int, Failed] = {}
        self._observed: deque[int] = deque(maxlen=_NUM_OBSERVED)
        # Calls before this one that failed because of lost workers are made again.
        self._first_reported = 0
        # call that raised and is not made again -> its name, until its failure is raised.
        self._final: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self.unobserved)

    def forget_lost(self, before: int = 0) -> None:
        """Forget the failures because of lost workers, also later ones of calls before a given one.

        Those of calls that are not made again stay.
        """
        with self._lock:
            self._first_reported = max(before, self._first_reported)
            for origin, failed in list(self.unobserved.items()):
                if origin not in self._final and _is_lost(failed):
                    del self.unobserved[origin]

    def add(self, record: Record, failed: Failed) -> None:
        """Record that a call failed."""
        origin = failed.origin
        if _is_of_operation(record, failed):
            return
        with self._lock:
            if record.is_final and origin == record.number:
                self._final[origin] = record.name
            if record.reported_with not in (None, origin):
                self.mark_observed(failed)
            self._count(failed, 0 if record.is_dropped else 1)
            if origin in (None, record.number):
                return
            # A call has one error: other failed arguments of it are not raised separately.
            for needed in records_in(record.needs):
                needed.reported_with = origin
                for other in needed.failures():
                    if other.origin != origin:
                        self.mark_observed(other)

    def drop(self, record: Record) -> None:
        """Record that the results of a call can no longer be read."""
        if record.has_failed:
            with self._lock:
                for failed in record.failures():
                    if not _is_of_operation(record, failed):
                        self._count(failed, -1)

    def mark_observed(self, failed: Failed) -> None:
        """Record that a failure was raised, so that it is not raised again."""
        if failed.origin is not None:
            with self._lock:
                self._observed.append(failed.origin)
                self._final.pop(failed.origin, None)
                self.unobserved.pop(failed.origin, None)
                self._visible.pop(failed.origin, None)
                self._num_failed.pop(failed.origin, None)

    def is_observed(self, failed: Failed) -> bool:
        """Return whether a failure was raised."""
        return failed.origin in self._observed

    def _count(self, failed: Failed, change: int) -> None:
        origin = failed.origin
        if origin is None or origin in self._observed or (change < 0 and origin not in self._num_failed):
            return
        if origin < self._first_reported and origin not in self._final and _is_lost(failed):
            return
        self._num_failed[origin] += change
        if self._num_failed[origin] > 0:
            self.unobserved.pop(origin, None)
            self._visible[origin] = failed
        else:
            del self._num_failed[origin]
            self._visible.pop(origin, None)
            self.unobserved.setdefault(origin, failed)

    def take_final(self) -> list[str]:
        """Forget the failures because of lost workers of calls that are not made again; return their names."""
        with self._lock:
            failures = [failed for origin, failed in (self._visible | self.unobserved).items() if origin in self._final]
            lost = list(filter(_is_lost, failures))
            names = [self._final[failed.origin] for failed in lost if failed.origin is not None]
            for failed in lost:
                self.mark_observed(failed)
            return list(dict.fromkeys(names))

    def validate(self) -> None:
        """Check what holds between the attributes."""
        with self._lock:
            visible, unobserved = self._visible.keys(), self.unobserved.keys()
            if self._num_failed.keys() != visible or min(self._num_failed.values(), default=1) < 1:
                raise AssertionError(f"failures are counted as {self._num_failed}, of which can be read {visible}")
            if visible & unobserved or {*self._observed} & (visible | unobserved):
                raise AssertionError(f"failures {visible}, {unobserved} and {self._observed} are the same")

    def first_error(self) -> BaseException | None:
        """Return the error of the first failure in the order of the calls, if there is one."""
        # Another thread may remove some at the same time.
        unobserved = self.unobserved.copy()
        return unobserved[min(unobserved)].failure.error() if unobserved else None

    def visible(self) -> list[Failed]:
        """Return the failures whose results were not read but can be, in the order of the calls."""
        visible = self._visible.copy()
        return [visible[origin] for origin in sorted(visible)]

    def take_error(self) -> BaseException | None:
        """Forget all failures; return the error of the first in the order of the calls, if there is one."""
        with self._lock:
            failures = [self.unobserved[origin] for origin in sorted(self.unobserved)]
            name = self._final.get(min(self.unobserved, default=0), "")
            for failed in failures:
                self.mark_observed(failed)
        if not failures:
            return None
        error = failures[0].failure.error()
        if name and _is_lost(failures[0]):
            why = "as it takes no batch of a distributed dataset"
            error = NotMadeAgainError(f"{name} failed with a lost worker, and is not made again, {why}: {error}")
        if len(failures) > 1:
            error.add_note(f"{len(failures) - 1} more calls failed by then, and their results were not read")
        return error


def _is_of_operation(record: Record, failed: Failed) -> bool:
    # The error of an operation on values is raised only where its result is read.
    return record.name == APPLY and failed.origin == record.number


def _is_lost(failed: Failed) -> bool:
    return isinstance(failed.failure.error(), LOST)
