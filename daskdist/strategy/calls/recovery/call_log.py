"""The log of calls that may have to be made again if a worker is lost."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeAlias

from daskdist.strategy.calls.calls import LOST, Call, Record
from daskdist.strategy.calls.outcomes import Failed, StaysOnWorker
from daskdist.strategy.group import ReplicaGroup

# A call in the log: its record, a weak reference to its handle, and a function that makes it again for given replicas.
LoggedCall: TypeAlias = tuple[Record, Callable[[], Call | None], Callable[[ReplicaGroup], Any]]


class CallLog:
    """The calls since the last step that is complete on all replicas, in the order of the program.

    A step is a call that takes a batch of a distributed dataset, with the calls that follow it. Calls before the first
    such step are not in the log.
    """

    def __init__(self) -> None:
        # For each step a flat list of the three parts of each of its calls: tuples would be further objects, and the
        # garbage collector examines those of all steps under way.
        self._steps: deque[list[Any]] = deque()
        # The number of steps so far, complete ones included.
        self._num_steps = 0
        # The first call of the last step, if all steps in the log were complete.
        self._last: Callable[[], Call | None] = lambda: None
        self._lock = threading.RLock()

    def __bool__(self) -> bool:
        return bool(self._steps)

    def begin_call(self, *, takes_batch: bool) -> int | None:
        """Return the number of the first call that is not complete, before a call on replicas is sent.

        It is 0 if there is no such call yet, and None if the call need not be added.
        """
        with self._lock:
            if takes_batch:
                self.rest()
            if (takes_batch or not self._steps) and (last := self._last()) is not None:
                # Changes of a call cannot be undone after a later call that is not in the log.
                last.make = None
            if self._steps:
                return int(self._steps[0][0].number)
            return 0 if takes_batch else None

    def add(self, call: Call, make: Callable[[ReplicaGroup], Any], *, begins_step: bool = False) -> None:
        """Add a call, which ``make`` makes again for given replicas, unless all steps before it are complete."""
        record, steps = call.record, self._steps
        with self._lock:
            if begins_step:
                self._num_steps += 1
                steps.append([])
            elif (
                not steps and not record.is_of_replicas and (last := self._last()) is not None and last.make is not None
            ):
                # A call on the results of the last step continues it, while there are references to those.
                steps.append([last.record, self._last, last.make])
            if steps:
                steps[-1] += record, weakref.ref(call), make
                # If the call has ended already, no later outcome removes it from the log.
                if not record.num_left:
                    self.rest()

    def rest(self) -> None:
        """Remove the steps that are complete; the last one is kept by its own results."""
        with self._lock:
            step: list[Any] = []
            while self._steps:
                step = self._steps[0]
                for place, record in enumerate(step[::3]):
                    if record.num_left:
                        return
                    # A single call whose result nothing can read is not made again.
                    is_needed = record.has_failed and (record.is_of_replicas or step[3 * place + 1]() is not None)
                    if is_needed and _is_lost(record):
                        return
                self._steps.popleft()
            if step and (call := step[1]()) is not None:
                # Later calls refer to results of the first, which would form a reference cycle.
                is_alone = not any(record.is_of_replicas for record in step[3::3])
                call.make, self._last = step[2] if is_alone else None, step[1]

    def remove(self, record: Record) -> None:
        """Remove a call, so that it is not made again."""
        with self._lock:
            for number, step in enumerate(self._steps):
                if record in step:
                    place = step.index(record)
                    del step[place : place + 3]
                    if not step:
                        del self._steps[number]
                    return

    def replace(self, record: Record, new: Record) -> None:
        """Replace a call by the same one that was made again, if it is in the log."""
        with self._lock:
            for step in self._steps:
                if record in step:
                    step[step.index(record)] = new

    def step_number(self, record: Record) -> int:
        """Return the number of the step of a call in the log, from 1 on."""
        with self._lock:
            place = next(place for place, step in enumerate(self._steps) if record in step)
            return self._num_steps - len(self._steps) + place + 1

    def fail_last(self, failed: Failed, num_replicas: int) -> None:
        """Let the last step fail if it is complete, but its results are needed, and gone or of other replicas."""
        with self._lock:
            last = self._last()
            if self._steps or last is None or last.make is None:
                return
            if len(last) != num_replicas or _is_gone(last.record, lambda *_: False):
                last.record.fail(failed)
                self._steps.append([last.record, self._last, last.make])

    def lost_calls(self) -> list[Record]:
        """Return the calls on replicas that failed because of a lost worker."""
        with self._lock:
            records = list(chain.from_iterable(step[::3] for step in self._steps))
        return [record for record in records if record.is_of_replicas and _is_lost(record)]

    def clear(self) -> None:
        """Remove all calls."""
        with self._lock:
            self._steps.clear()

    def validate(self) -> None:
        """Check what holds between the attributes."""
        with self._lock:
            records = [id(record) for step in self._steps for record in step[::3]]
            if not all(self._steps) or any(len(step) % 3 for step in self._steps) or len({*records}) < len(records):
                raise AssertionError(f"the log has an empty step, or a call twice: {self._steps}")

    def calls_to_make_again(self, is_there: Callable[[str, int], bool]) -> list[LoggedCall]:
        """Return the calls to make again, all of which are over: from the first on that needs a lost worker."""
        with self._lock:
            steps = list(map(_calls_of, self._steps))
        for number, step in enumerate(steps):
            for place, (record, handle, _) in enumerate(step):
                is_unobserved = not record.is_of_replicas and handle() is not None
                if _is_lost(record) or (is_unobserved and _is_gone(record, is_there)):
                    # Results that each replica had cannot be given to fewer replicas.
                    needs_step = any(
                        earlier.is_of_replicas and _is_gone(earlier, is_there) for earlier, _, _ in step[:place]
                    )
                    needs_step = needs_step or any(later.takes_results for later, _, _ in step[place:])
                    return list(chain(step if needs_step else step[place:], *steps[number + 1 :]))
        return []

    def make_again(self, logged: LoggedCall, group: ReplicaGroup) -> Record | None:
        """Make a call again and return its record; whatever refers to its results refers to the new ones.

        A call is not made again if nothing can read its result.
        """
        record, handle, make = logged
        call = handle()
        if call is None and not record.is_of_replicas:
            # If it stayed in the log, all later steps would stay, too.
            self.remove(record)
            return None
        new: Call = make(group)
        new.record.losses = record.losses
        self.replace(record, new.record)
        record = new.record
        if call is not None:
            call.become(new)
        return record


def _calls_of(step: list[Any]) -> list[LoggedCall]:
    return list(zip(step[::3], step[1::3], step[2::3], strict=True))


def _is_lost(record: Record) -> bool:
    # Return whether the call failed because of a lost worker.
    return record.has_failed and any(isinstance(failed.failure.error(), LOST) for failed in record.failures())


def _is_gone(record: Record, is_there: Callable[[str, int], bool]) -> bool:
    # Return whether a result is on lost workers only.
    return any(
        outcome is not None and type(outcome[1]) is StaysOnWorker and not is_there(worker, record.number)
        for worker, outcome in zip(record.workers, record.outcomes, strict=True)
    )
