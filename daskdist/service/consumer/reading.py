"""The reading of one consumer, as a state machine without I/O."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

from daskdist.core.block import Rows
from daskdist.service.intervals import Intervals

logger: Final = logging.getLogger("daskdist")

Pairs = list[tuple[int, int]]

# A program that has taken nothing for so long leaves the elements of new tasks to others.
_IDLE_S: Final = 0.25


class Arrived:
    """The elements that have come, which the event loop adds and the program's thread takes.

    Its condition is held by those who use it.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        # Parts that have come: the task, the number of the first element, and the elements.
        self.parts: deque[tuple[str, int, Rows]] = deque()
        # The tasks from which elements are taken in turn, and the next one; in any order where there are none.
        self.turns: list[str] = []
        self.turn = 0
        # Elements that were taken and are not done with: the task, the first, and before which they stop.
        self.in_hand: list[tuple[str, int, int]] = []
        self.is_over = False
        self.failure: BaseException | None = None
        self._taken_at = time.monotonic()

    @property
    def is_idle(self) -> bool:
        """Return whether elements wait for a program that has taken none for a while."""
        has_some = bool(self.parts or self.in_hand)
        return has_some and time.monotonic() - self._taken_at > _IDLE_S

    def place(self) -> int | None:
        """Return the place of the part to take elements of; None where that has not come."""
        if not self.turns:
            return 0 if self.parts else None
        task = self.turns[self.turn % len(self.turns)]
        return next((place for place, part in enumerate(self.parts) if part[0] == task), None)

    def take(self, place: int, most: int) -> Rows:
        """Return elements of the part at a place, at most so many."""
        self._taken_at = time.monotonic()
        task, first, rows = self.parts[place]
        if self.turns:
            self.turn += 1
            most = 1
        if len(rows) > most:
            self.parts[place] = task, first + most, rows.slice(most, len(rows))
            rows = rows.slice(0, most)
        else:
            del self.parts[place]
        self.in_hand.append((task, first, first + len(rows)))
        return rows

    def done_with(self) -> list[tuple[str, int, int]]:
        """Return what was taken and has not been returned by this."""
        in_hand, self.in_hand = self.in_hand, []
        return in_hand

    def remove(self, task: str, unwanted: Intervals) -> Pairs:
        """Drop elements of a task that were not taken yet; return those."""
        removed: Pairs = []
        parts, self.parts = self.parts, deque()
        for each, first, rows in parts:
            if each != task:
                self.parts.append((each, first, rows))
                continue
            stop = first + len(rows)
            removed += unwanted.within(first, stop)
            for begin, end in unwanted.missing(first, stop):
                self.parts.append((task, begin, rows.slice(begin - first, end - first)))
        return removed

    def end(self, failure: BaseException | None = None) -> None:
        """Note that nothing more comes."""
        with self.changed:
            self.is_over = True
            self.failure = self.failure or failure
            self.changed.notify_all()


class Reading:
    """The tasks that a consumer reads, and what it has of each.

    Parameters
    ----------
    name
        The name of the consumer.
    joining
        What producers are told of it: arguments of `Consumer` in `service.worker.delivery`. Its windows are of all
        tasks together.
    arrived
        Where elements go.
    send
        Sends a message to a worker: ``send(address, message)``.
    read_all
        Tells the dispatcher that the tasks of its messages so far are at their end: ``read_all(number of the last)``.
    """

    def __init__(
        self,
        name: str,
        joining: dict[str, Any],
        arrived: Arrived,
        send: Callable[[str, Any], None],
        read_all: Callable[[int], None],
        *,
        in_turn: bool,
    ) -> None:
        self._joining = joining | {"name": name}
        self._arrived = arrived
        self._send = send
        self._read_all = read_all
        self._in_turn = in_turn
        # The number of the dispatcher's last message.
        self._told = 0
        # By the id of a task: the attempt, and the worker; "" while none has it.
        self._tasks: dict[str, tuple[int, str]] = {}
        self._ended: set[str] = set()
        # Tasks that came while the program took no elements: those of others go to whoever does.
        self._unjoined: set[str] = set()
        # Of each task, the elements that came and are not acknowledged, and those that are.
        self._held: defaultdict[str, Intervals] = defaultdict(Intervals)
        self._done: defaultdict[str, Intervals] = defaultdict(Intervals)
        self._windows = _Windows(joining["window_elements"], self._held, is_each_read=in_turn)
        self._ends_late = False

    # --- the dispatcher ---

    def tasks(self, tasks: tuple[tuple[str, int, str], ...], number: int) -> None:
        """Read from these tasks from now on: each with its attempt and its worker, "" where it waits for one.

        The dispatcher is told the ``number`` of its last message along with the end of all of them.
        """
        self._told = number
        now = {task: (attempt, worker) for task, attempt, worker in tasks}
        for task in self._tasks.keys() - now:
            # All its elements were acknowledged.
            self._forget(task)
        changed = [task for task, place in now.items() if self._tasks.get(task) != place]
        self._tasks = now
        self._ended.difference_update(changed)
        for task in changed:
            self._windows.close(task)
            # Elements of a task that has begun anew go to nobody before all have come.
            if not now[task][0] and not self._in_turn and self._arrived.is_idle:
                self._unjoined.add(task)
            else:
                self._unjoined.discard(task)
        self._resize()
        for task in changed:
            if task not in self._unjoined:
                self._join(task)
        if self._in_turn:
            with self._arrived.changed:
                self._arrived.turns = sorted(now, key=_index_of)
                self._arrived.changed.notify_all()
        self._tell_if_all_read()

    def begin_again(self) -> None:
        """Note that another dispatcher may answer, which has told nothing yet."""
        self._told = 0

    def done(self) -> dict[str, Pairs]:
        """Return what is done with, by task."""
        return {task: list(numbers) for task, numbers in self._done.items() if len(numbers)}

    def was_given_more(self) -> bool:
        """Return whether elements have come since the end of all tasks; that is told once more when they are used."""
        self._ends_late = any(map(len, self._held.values()))
        return self._ends_late

    def _forget(self, task: str) -> None:
        self._ended.discard(task)
        self._unjoined.discard(task)
        self._windows.close(task)
        self._held.pop(task, None)
        self._done.pop(task, None)

    # --- workers ---

    def workers(self) -> set[str]:
        """Return the addresses of the workers to read from."""
        return {worker for _, worker in self._tasks.values()} - {""}

    def connected_again(self, worker: str) -> None:
        """Note that messages to and from a worker may have been lost: tell it all."""
        for task, (_, its) in list(self._tasks.items()):
            if its == worker:
                self._ended.discard(task)
                self._windows.close(task)
        self._resize()
        for task, (_, its) in list(self._tasks.items()):
            if its == worker and task not in self._unjoined:
                self._join(task)

    def _join(self, task: str) -> None:
        attempt, worker = self._tasks[task]
        if worker:
            share = max(self._joining["window_bytes"] // len(self._tasks), 1)
            joining = self._joining | {"window_elements": self._windows.of(task), "window_bytes": share}
            self._send(worker, ("join", task, attempt, joining, list(self._held[task]), list(self._done[task])))

    def got(self, worker: str, message: Any) -> None:
        """Take a message of a worker; one about an attempt that is over says nothing."""
        kind, task, attempt, *args = message
        if self._tasks.get(task) == (attempt, worker):
            getattr(self, f"_on_{kind}")(task, *args)

    def _on_rows(self, task: str, first: int, rows: Rows) -> None:
        self._ended.discard(task)
        self._held[task].add(first, first + len(rows))
        with self._arrived.changed:
            self._arrived.parts.append((task, first, rows))
            self._arrived.changed.notify_all()

    def _on_end(self, task: str) -> None:
        self._ended.add(task)
        self._windows.close(task)
        self._resize()
        self._tell_if_all_read()

    def _on_recall(self, task: str) -> None:
        self._tell(task, "return", self._remove(task, Intervals(self._held[task])))

    def _on_withdraw(self, task: str, pairs: Pairs) -> None:
        self._remove(task, Intervals(pairs))
        # What is being used comes twice: this consumer was taken for lost.
        self._held[task].difference_update(pairs)

    def _on_passed(self, task: str, num_elements: int) -> None:
        logger.warning(
            "a trainer was slower than the window of the shared cache and passed over %d elements; have the trainers "
            "keep the same pace, or set daskdist.service.cache-bytes higher",
            num_elements,
        )

    def _on_window(self, task: str, window_elements: int) -> None:
        self._windows.confirm(task, window_elements)
        self._resize()

    def _on_failed(self, task: str, failure: Any) -> None:
        self._arrived.end(failure.error())

    def _remove(self, task: str, unwanted: Intervals) -> Pairs:
        with self._arrived.changed:
            removed = self._arrived.remove(task, unwanted)
        self._held[task].difference_update(removed)
        return removed

    # --- the program ---

    def acknowledge(self, task: str, first: int, stop: int) -> None:
        """Note that elements are done with."""
        if task in self._tasks:
            self._held[task].remove(first, stop)
            self._done[task].add(first, stop)
            self._tell(task, "ack", [(first, stop)])
            unjoined, self._unjoined = self._unjoined, set()
            self._resize()
            for each in unjoined:
                self._join(each)
            if self._ends_late and not any(map(len, self._held.values())):
                self._tell_if_all_read()

    # --- inside ---

    def _tell(self, task: str, kind: str, *args: Any) -> None:
        attempt, worker = self._tasks[task]
        if worker:
            self._send(worker, (kind, task, attempt, *args))

    def _resize(self) -> None:
        out = self._ended | self._unjoined
        open_tasks = [task for task, (_, worker) in self._tasks.items() if worker and task not in out]
        for task, window in self._windows.changes(open_tasks):
            self._tell(task, "window", window)

    def _tell_if_all_read(self) -> None:
        if self._tasks and self._ended.issuperset(self._tasks):
            self._read_all(self._told)


class _Windows:
    """Divides the elements that may be on their way to a consumer among the tasks that it reads.

    Parameters
    ----------
    num_elements
        The most, of all tasks together; None for no limit.
    held
        Of each task the elements that came and are not acknowledged.
    is_each_read
        Whether the consumer needs an element of each task, so that none is left without.
    """

    def __init__(self, num_elements: int | None, held: dict[str, Intervals], *, is_each_read: bool) -> None:
        self._num_elements = num_elements
        self._held = held
        self._least = int(is_each_read)
        # Of each task that is open what its producer may go by, and what it was told last.
        self._granted: dict[str, int] = {}
        self._told: dict[str, int] = {}

    def of(self, task: str) -> int:
        """Return the window of a task."""
        return _NO_LIMIT if self._num_elements is None else self._told.get(task, 0)

    def close(self, task: str) -> None:
        """Note that nothing is sent from a task."""
        self._granted.pop(task, None)
        self._told.pop(task, None)

    def confirm(self, task: str, window: int) -> None:
        """Note that the producer of a task goes by a window from now on."""
        if self._told.get(task) == window:
            self._granted[task] = window

    def changes(self, open_tasks: list[str]) -> list[tuple[str, int]]:
        """Return the windows that are to change, of tasks from which elements may come."""
        if self._num_elements is None or not open_tasks:
            return []
        share, rest = divmod(self._num_elements, len(open_tasks))
        changed = []
        for place, task in enumerate(open_tasks):
            target = max(share + (place < rest), self._least)
            told = self._told.get(task, 0)
            if told < target:
                target = min(target, max(told + self._num_elements - self._num_out(), self._least))
            if target != told:
                self._told[task] = target
                self._granted[task] = max(self._granted.get(task, 0), target)
                changed.append((task, target))
        return changed

    def _num_out(self) -> int:
        # Of all tasks what came or may come.
        tasks = self._granted.keys() | self._held.keys()
        return sum(max(self._granted.get(task, 0), len(self._held.get(task, ()))) for task in tasks)


_NO_LIMIT: Final = 2**62


def _index_of(task: str) -> int:
    return int(task.rpartition("/")[2])
