"""Failures of calls whose results were not read and are no longer referenced."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

from daskdist.errors import NotMadeAgainError
from daskdist.strategy.calls.calls import APPLY, LOST, Record, records_in
from daskdist.strategy.calls.outcomes import Failed

# The number of raised failures to remember.
_NUM_OBSERVED: Final = 1024


@dataclass(slots=True)
class _Unraised:
    # A failure that was not raised; the number of calls that failed with it and whose results can still be read; and
    # the name of the call that raised it, if that is not made again.
    failed: Failed
    num_readable: int = 0
    final_name: str = ""


class UnobservedFailures:
    """Failures of calls whose results were not read: the next wait raises the first, and counts the others.

    A failure is identified by the number of the call that raised it. Calls that use its result fail with it, and while
    the program references a result of one of them, the failure can still be raised there.

    The event loop adds failures, while program threads read and forget them.
    """

    def __init__(self) -> None:
        # Held by each method that changes something.
        self._lock = threading.RLock()
        # call that raised -> its failure, until that is raised; others only look whether there are any.
        self.unraised: dict[int, _Unraised] = {}
        self._observed: deque[int] = deque(maxlen=_NUM_OBSERVED)
        # Calls before this one that failed because of lost workers are made again.
        self._first_reported = 0

    @property
    def unobserved(self) -> dict[int, Failed]:
        """The failures whose results can no longer be read, by the number of the call that raised."""
        # Another thread may remove some at the same time.
        return {origin: one.failed for origin, one in self.unraised.copy().items() if not one.num_readable}

    def __bool__(self) -> bool:
        return bool(self.unobserved)

    def forget_lost(self, before: int = 0) -> None:
        """Forget the failures because of lost workers, also later ones of calls before a given one.

        Those of calls that are not made again stay.
        """
        with self._lock:
            self._first_reported = max(before, self._first_reported)
            for origin, failed in self.unobserved.items():
                if not self.unraised[origin].final_name and _is_lost(failed):
                    del self.unraised[origin]

    def add(self, record: Record, failed: Failed) -> None:
        """Record that a call failed."""
        origin = failed.origin
        if _is_of_operation(record, failed):
            return
        with self._lock:
            if record.reported_with not in (None, origin):
                self.mark_observed(failed)
            final_name = record.name if record.is_final and origin == record.number else ""
            self._count(failed, 0 if record.is_dropped else 1, final_name)
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
                self.unraised.pop(failed.origin, None)

    def is_observed(self, failed: Failed) -> bool:
        """Return whether a failure was raised."""
        return failed.origin in self._observed

    def _count(self, failed: Failed, change: int, final_name: str = "") -> None:
        origin = failed.origin
        if origin is None or origin in self._observed:
            return
        one = self.unraised.get(origin) or _Unraised(failed)
        one.final_name = final_name or one.final_name
        if origin < self._first_reported and not one.final_name and _is_lost(failed):
            return
        if change >= 0 or one.num_readable:
            one.num_readable += change
            self.unraised[origin] = one

    def take_final(self) -> list[str]:
        """Forget the failures because of lost workers of calls that are not made again; return their names."""
        with self._lock:
            lost = [one for one in self.unraised.values() if one.final_name and _is_lost(one.failed)]
            for one in lost:
                self.mark_observed(one.failed)
            return list(dict.fromkeys(one.final_name for one in lost))

    def validate(self) -> None:
        """Check what holds between the attributes."""
        with self._lock:
            if both := {*self._observed} & self.unraised.keys():
                raise AssertionError(f"failures {both} were raised, and are still to be raised")

    def first_error(self) -> BaseException | None:
        """Return the error of the first failure in the order of the calls, if there is one."""
        unobserved = self.unobserved
        return unobserved[min(unobserved)].failure.error() if unobserved else None

    def visible(self) -> list[Failed]:
        """Return the failures whose results were not read but can be, in the order of the calls."""
        unraised = self.unraised.copy()
        return [unraised[origin].failed for origin in sorted(unraised) if unraised[origin].num_readable]

    def take_error(self) -> BaseException | None:
        """Forget all failures; return the error of the first in the order of the calls, if there is one."""
        with self._lock:
            failures = [self.unraised[origin] for origin in sorted(self.unobserved)]
            for one in failures:
                self.mark_observed(one.failed)
        if not failures:
            return None
        name, error = failures[0].final_name, failures[0].failed.failure.error()
        if name and isinstance(error, LOST):
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
