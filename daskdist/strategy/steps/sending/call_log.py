"""The log of calls that may have to be made again if a worker is lost."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any, Final

from daskdist.errors import ClusterError, CollectiveError
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.steps.calls import Call, Record, Result
from daskdist.strategy.steps.outcomes import Held

# Errors of calls that need a lost worker.
LOST: Final = (ClusterError, CollectiveError)


class LoggedCall:
    """A call in the log.

    Parameters
    ----------
    call
        The call, which the log does not keep alive.
    make
        Makes the call again for some replicas.
    is_on_replicas
        Whether it is a call of a user's function on each replica, which may have side effects.
    takes_results
        Whether each replica is given its own result of an earlier call in it.
    """

    __slots__ = ("call", "is_on_replicas", "make", "record", "takes_results")

    def __init__(
        self, call: Call, make: Callable[[ReplicaGroup], Any], *, is_on_replicas: bool, takes_results: bool
    ) -> None:
        self.call = weakref.ref(call)
        self.record: Record = call.record
        self.make = make
        self.is_on_replicas = is_on_replicas
        self.takes_results = takes_results

    @property
    def is_complete(self) -> bool:
        """Return whether the call is over, and did not fail because of a lost worker."""
        record = self.record
        return not record.num_left and not (record.has_failed and self.is_lost)

    @property
    def is_lost(self) -> bool:
        """Return whether the call failed because of a lost worker."""
        record = self.record
        return record.has_failed and any(isinstance(failed.failure.error(), LOST) for failed in record.failures())

    def is_gone(self, is_open: Callable[[str], bool]) -> bool:
        """Return whether a result is on lost workers only."""
        record = self.record
        if record.is_replicated and any(map(is_open, record.workers)):
            return False
        return any(
            outcome is not None and type(outcome[1]) is Held and not is_open(worker)
            for worker, outcome in zip(record.workers, record.outcomes, strict=True)
        )

    def make_again(self, group: ReplicaGroup) -> None:
        """Make the call again; whatever refers to its results refers to the new ones."""
        call = self.call()
        if call is None and not self.is_on_replicas:
            # Nothing can read the result.
            return
        result = self.make(group)
        new: Call = result.call if type(result) is Result else result
        self.record = new.record
        if call is not None:
            call.become(new)


class CallLog:
    """The calls since the last step that is complete on all replicas, in the order of the program.

    A step is a call that takes a batch of a distributed dataset, with the calls that follow it. Calls that no such step
    precedes are not in the log.
    """

    def __init__(self) -> None:
        self._steps: deque[list[LoggedCall]] = deque()
        # The first call of the last step, if all that was in the log is complete.
        self._last: weakref.ref[Call] | None = None
        self._lock = threading.RLock()

    def __bool__(self) -> bool:
        return bool(self._steps)

    def begin_call(self, *, takes_batch: bool) -> int | None:
        """Return the number of the first call that is not complete, before a call on replicas is sent.

        It is 0 if there is no such call yet, and None if the call need not be added.
        """
        with self._lock:
            if takes_batch:
                self._pop_complete()
            if takes_batch or not self._steps:
                # Changes of a call cannot be undone after a later call that is not in the log.
                if (last := self._last_call()) is not None:
                    last.step = ()
                self._last = None
            if self._steps:
                return self._steps[0][0].record.number
            return 0 if takes_batch else None

    def add_step(self, call: Call, make: Callable[[ReplicaGroup], Any], *, takes_results: bool) -> None:
        """Add the first call of a step."""
        with self._lock:
            self._steps.append([LoggedCall(call, make, is_on_replicas=True, takes_results=takes_results)])
            self._rest_after(call)

    def add_call(self, call: Call, make: Callable[[ReplicaGroup], Any], *, takes_results: bool) -> None:
        """Add a further call on replicas, unless all steps before it are complete."""
        with self._lock:
            if self._steps:
                self._steps[-1].append(LoggedCall(call, make, is_on_replicas=True, takes_results=takes_results))
                self._rest_after(call)

    def add_result(self, call: Call, make: Callable[[ReplicaGroup], Any]) -> None:
        """Add a call on results of the last step, unless nobody has those."""
        with self._lock:
            if not self._steps and (last := self._last_call()) is not None and last.step:
                self._steps.append(last.step)
            if self._steps:
                self._steps[-1].append(LoggedCall(call, make, is_on_replicas=False, takes_results=False))
                self._rest_after(call)

    def _rest_after(self, call: Call) -> None:
        # If the call has ended already, no outcome will come to clean up the log.
        if not call.record.num_left:
            self.rest()

    def _last_call(self) -> Call | None:
        return None if self._last is None else self._last()

    def rest(self) -> None:
        """Remove the steps that are complete; the last one is kept by its own results."""
        with self._lock:
            step = self._pop_complete()
            if step and not self._steps:
                call = step[0].call()
                if call is not None:
                    # Later calls refer to results of the first, which would form a reference cycle.
                    is_alone = not any(logged.is_on_replicas for logged in step[1:])
                    call.step, self._last = step[:1] if is_alone else (), weakref.ref(call)

    def _pop_complete(self) -> list[LoggedCall]:
        # Return the last step that was removed.
        step: list[LoggedCall] = []
        while self._steps:
            for logged in self._steps[0]:
                if not logged.is_complete:
                    return step
            step = self._steps.popleft()
        return step

    def has_lost_without_trace(self) -> bool:
        """Return whether a call on replicas failed because of a lost worker, and nobody has its result."""
        with self._lock:
            calls = list(chain.from_iterable(self._steps))
        return any(logged.is_on_replicas and logged.is_lost and logged.call() is None for logged in calls)

    def clear(self) -> None:
        """Remove all calls."""
        with self._lock:
            self._steps.clear()

    def calls_to_make_again(self, is_open: Callable[[str], bool]) -> list[LoggedCall]:
        """Return the calls to make again, all of which are over: from the first on that needs a lost worker."""
        with self._lock:
            steps = [list(step) for step in self._steps]
        for number, step in enumerate(steps):
            for place, logged in enumerate(step):
                is_unseen = not logged.is_on_replicas and logged.call() is not None
                if logged.is_lost or (is_unseen and logged.is_gone(is_open)):
                    # Results that each replica had cannot be given to fewer replicas.
                    needs_step = any(earlier.is_on_replicas and earlier.is_gone(is_open) for earlier in step[:place])
                    needs_step = needs_step or any(later.takes_results for later in step[place:])
                    return list(chain(step if needs_step else step[place:], *steps[number + 1 :]))
        return []
