"""The reading of one consumer, as a state machine without I/O."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from daskdist.core.block import Rows
from daskdist.execute.messages.failure import Failure
from daskdist.service.intervals import Intervals, Pairs
from daskdist.service.worker.task_messages import (
    Computing,
    Confirm,
    End,
    GivenBack,
    JoinTask,
    OfTask,
    Passed,
    Recall,
    Room,
    SentRows,
    Used,
    Withdraw,
)

logger: Final = logging.getLogger("daskdist")


# A program that has taken nothing for this long leaves the elements of new tasks to other consumers.
_IDLE_S: Final = 0.25


class Arrived:
    """The elements that have arrived, which the event loop adds and the program's thread takes.

    Callers hold its condition.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        # The parts that have arrived: the task, the number of the first element, and the elements.
        self.parts: deque[tuple[str, int, Rows]] = deque()
        # The tasks whose elements are taken in turn, and the next one; without tasks, elements are taken in any order.
        self.turns: list[str] = []
        self.turn = 0
        # The intervals of elements that were taken and are not used up: (task, first, stop).
        self.in_hand: list[tuple[str, int, int]] = []
        self.is_over = False
        # The number of messages that producers compute elements for this consumer.
        self.num_signs = 0
        self.failure: BaseException | None = None
        self._taken_at = time.monotonic()

    @property
    def is_idle(self) -> bool:
        """Return whether elements have waited for a while without the program taking any."""
        has_some = bool(self.parts or self.in_hand)
        return has_some and time.monotonic() - self._taken_at > _IDLE_S

    def place(self) -> int | None:
        """Return the index of the part to take elements from; None if it has not arrived."""
        if not self.turns:
            return 0 if self.parts else None
        task = self.turns[self.turn % len(self.turns)]
        return next((place for place, part in enumerate(self.parts) if part[0] == task), None)

    def take(self, place: int, most: int) -> Rows:
        """Return at most ``most`` elements of the part at an index."""
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
        """Return the intervals that were taken since the last call."""
        in_hand, self.in_hand = self.in_hand, []
        return in_hand

    def remove(self, task: str, unwanted: Intervals) -> Pairs:
        """Drop elements of a task that were not taken yet, and return their intervals."""
        removed: list[tuple[int, int]] = []
        parts, self.parts = self.parts, deque()
        for part_task, first, rows in parts:
            if part_task != task:
                self.parts.append((part_task, first, rows))
                continue
            stop = first + len(rows)
            removed += unwanted.within(first, stop)
            for begin, end in unwanted.missing(first, stop):
                self.parts.append((task, begin, rows.slice(begin - first, end - first)))
        return removed

    def end(self, failure: BaseException | None = None) -> None:
        """Record that no more elements will arrive."""
        with self.changed:
            self.is_over = True
            self.failure = self.failure or failure
            self.changed.notify_all()


class Reading:
    """The tasks that a consumer reads, and the elements it has of each.

    Parameters
    ----------
    name
        The name of the consumer.
    joining
        The arguments of `Consumer` in `service.worker.delivery` that producers are sent. The windows are totals over
        all tasks.
    arrived
        The queue to which elements are added.
    send
        Sends a message to a worker: ``send(address, message)``.
    read_all
        Reports to the dispatcher that all tasks up to its message of this number were read: ``read_all(number)``.
    """

    def __init__(
        self,
        name: str,
        joining: dict[str, Any],
        arrived: Arrived,
        send: Callable[[str, OfTask], None],
        read_all: Callable[[int], None],
        *,
        in_turn: bool,
    ) -> None:
        self._joining = joining | {"name": name}
        self._arrived = arrived
        self._send = send
        self._read_all = read_all
        self._in_turn = in_turn
        # Consumers of a shared cache get all elements each.
        self._may_leave_tasks = not in_turn and not joining["trainer"]
        # The number of the last message of the dispatcher.
        self._message_number = 0
        # By task id: the attempt, and the worker; "" while the task has none.
        self._tasks: dict[str, tuple[int, str]] = {}
        self._ended: set[str] = set()
        # The tasks that came while the program took no elements, which are left to consumers that do.
        self._unjoined: set[str] = set()
        # By task: the elements that arrived and are not acknowledged, and those that are acknowledged and may not have
        # been recorded by the dispatcher.
        self._held: defaultdict[str, Intervals] = defaultdict(Intervals)
        self._done: defaultdict[str, Intervals] = defaultdict(Intervals)
        self._windows = _Windows(joining["window_elements"], self._held, is_each_read=in_turn)
        self._ends_late = False

    # --- the dispatcher ---

    def tasks(self, tasks: tuple[tuple[str, int, str], ...], number: int) -> None:
        """Read exactly these tasks from now on: ``(task, attempt, worker)``, with "" while a task waits for a worker.

        ``number`` is that of the dispatcher's message; it is sent back when all tasks were read to their end.
        """
        self._message_number = number
        now = {task: (attempt, worker) for task, attempt, worker in tasks}
        for task in self._tasks.keys() - now:
            # All its elements were acknowledged.
            self._forget(task)
        changed = [task for task, place in now.items() if self._tasks.get(task) != place]
        self._tasks = now
        self._ended.difference_update(changed)
        for task in changed:
            self._windows.close(task)
            # A restarted task sends no elements until all its consumers have joined again.
            if not now[task][0] and self._may_leave_tasks and self._arrived.is_idle:
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
        self._report_if_all_read()

    def begin_again(self) -> None:
        """Forget the messages of the dispatcher, since another one may answer from now on."""
        self._message_number = 0

    def recorded(self, tasks: Iterable[tuple[str, Iterable[tuple[int, int]]]]) -> None:
        """Forget elements that were used and are recorded: ``(task, pairs)``."""
        for task, pairs in tasks:
            if task in self._done:
                self._done[task].difference_update(pairs)

    def done(self) -> dict[str, Pairs]:
        """Return the elements that were used and may not have been recorded, by task."""
        return {task: list(numbers) for task, numbers in self._done.items() if len(numbers)}

    def was_given_more(self) -> bool:
        """Return whether elements arrived after the end of all tasks, which must then be reported again."""
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
        """Send a worker everything again, since messages to and from it may have been lost."""
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
            asked = JoinTask(joining, list(self._held[task]), list(self._done[task]))
            self._send(worker, OfTask(task, attempt, asked))

    def got(self, worker: str, about: OfTask) -> None:
        """Handle a message of a worker; ignore messages about earlier attempts."""
        task, attempt, message = about
        if self._tasks.get(task) != (attempt, worker):
            return
        match message:
            case SentRows(first, rows):
                self._ended.discard(task)
                self._held[task].add(first, first + len(rows))
                with self._arrived.changed:
                    self._arrived.parts.append((task, first, rows))
                    self._arrived.changed.notify_all()
            case Room(window_elements):
                self._windows.confirm(task, window_elements)
                self._resize()
            case End():
                self._ended.add(task)
                self._windows.close(task)
                self._resize()
                self._report_if_all_read()
            case Recall():
                self._send_to_producer(task, GivenBack(self._remove(task, Intervals(self._held[task]))))
            case Withdraw(_, pairs):
                self._remove(task, Intervals(pairs))
                # The consumer was considered lost, so elements that it is using were given to others as well.
                self._held[task].difference_update(pairs)
            case Confirm(_, pairs):
                self.recorded([(task, pairs)])
            case Computing():
                self._arrived.num_signs += 1
            case Passed(_, num_elements):
                logger.warning(
                    "a trainer was slower than the window of the shared cache and missed %d elements; have the "
                    "trainers keep the same pace, or set daskdist.service.cache-bytes higher",
                    num_elements,
                )
            case Failure():
                self._arrived.end(message.error())
            case _:
                raise TypeError(f"a consumer of the data service got {message!r:.200}")

    def _remove(self, task: str, unwanted: Intervals) -> Pairs:
        with self._arrived.changed:
            removed = self._arrived.remove(task, unwanted)
        self._held[task].difference_update(removed)
        return removed

    # --- the program ---

    def acknowledge(self, task: str, first: int, stop: int) -> None:
        """Record that elements were used."""
        if task in self._tasks:
            self._held[task].remove(first, stop)
            self._done[task].add(first, stop)
            self._send_to_producer(task, Used([(first, stop)]))
            unjoined, self._unjoined = self._unjoined, set()
            self._resize()
            for other_task in unjoined:
                self._join(other_task)
            if self._ends_late and not any(map(len, self._held.values())):
                self._report_if_all_read()

    # --- inside ---

    def _send_to_producer(self, task: str, message: Room | Used | GivenBack) -> None:
        attempt, worker = self._tasks[task]
        if worker:
            self._send(worker, OfTask(task, attempt, message))

    def _resize(self) -> None:
        out = self._ended | self._unjoined
        open_tasks = [task for task, (_, worker) in self._tasks.items() if worker and task not in out]
        for task, window in self._windows.changes(open_tasks):
            self._send_to_producer(task, Room(window))

    def _report_if_all_read(self) -> None:
        if self._tasks and self._ended.issuperset(self._tasks):
            self._read_all(self._message_number)


class _Windows:
    """The division of a consumer's window, the elements that may be in flight to it, among the tasks it reads.

    Parameters
    ----------
    num_elements
        The window, a total over all tasks; None for no limit.
    held
        By task, the elements that arrived and are not acknowledged.
    is_each_read
        Whether the consumer needs an element of each task, so that each gets a window.
    """

    def __init__(self, num_elements: int | None, held: dict[str, Intervals], *, is_each_read: bool) -> None:
        self._num_elements = num_elements
        self._held = held
        self._least = int(is_each_read)
        # By open task: the largest window that its producer may still use, and the one it was sent last.
        self._granted: dict[str, int] = {}
        self._sent: dict[str, int] = {}

    def of(self, task: str) -> int:
        """Return the window of a task."""
        return _NO_LIMIT if self._num_elements is None else self._sent.get(task, 0)

    def close(self, task: str) -> None:
        """Record that a task sends nothing."""
        self._granted.pop(task, None)
        self._sent.pop(task, None)

    def confirm(self, task: str, window: int) -> None:
        """Record that the producer of a task uses a window from now on."""
        if self._sent.get(task) == window:
            self._granted[task] = window

    def changes(self, open_tasks: list[str]) -> list[tuple[str, int]]:
        """Return the tasks whose windows are to change, and the new windows, among the tasks that may send elements."""
        if self._num_elements is None or not open_tasks:
            return []
        share, rest = divmod(self._num_elements, len(open_tasks))
        changed = []
        for place, task in enumerate(open_tasks):
            target = max(share + (place < rest), self._least)
            sent = self._sent.get(task, 0)
            if sent < target:
                target = min(target, max(sent + self._num_elements - self._num_out(), self._least))
            if target != sent:
                self._sent[task] = target
                self._granted[task] = max(self._granted.get(task, 0), target)
                changed.append((task, target))
        return changed

    def _num_out(self) -> int:
        # The elements of all tasks that arrived or may arrive.
        tasks = self._granted.keys() | self._held.keys()
        return sum(max(self._granted.get(task, 0), len(self._held.get(task, ()))) for task in tasks)


_NO_LIMIT: Final = 2**62


def _index_of(task: str) -> int:
    return int(task.rpartition("/")[2])
