"""The reading of one consumer, as a state machine without I/O."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from daskdist.core.block import Rows
from daskdist.execute.messages.failure import Failure
from daskdist.service.consumer.read_ahead_limit import PARTS_ON_THE_WAY
from daskdist.service.intervals import Intervals, Pairs
from daskdist.service.worker.task_messages import Ask, Computing, End, JoinTask, OfTask, Passed, SentRows

logger: Final = logging.getLogger("daskdist")


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

    def place(self) -> int | None:
        """Return the index of the part to take elements from; None if it has not arrived."""
        if not self.turns:
            return 0 if self.parts else None
        task = self.turns[self.turn % len(self.turns)]
        return next((place for place, part in enumerate(self.parts) if part[0] == task), None)

    def take(self, place: int, most: int) -> Rows:
        """Return at most ``most`` elements of the part at an index."""
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

    def end(self, failure: BaseException | None = None) -> None:
        """Record that no more elements will arrive."""
        with self.changed:
            self.is_over = True
            self.failure = self.failure or failure
            self.changed.notify_all()


class Reading:
    """The tasks that a consumer reads, and the elements it has of each.

    It asks for as many elements as its program is going to use soon, and shares them out among the tasks.

    Parameters
    ----------
    joining
        The arguments of `Consumer` in `service.worker.delivery` that producers are sent, but for the number of elements
        and the share of the bytes, which are totals over all tasks.
    arrived
        The queue to which elements are added.
    send
        Sends a message to a worker: ``send(address, message, over)``; ``over`` is called when it has arrived.
    read_all
        Reports to the dispatcher that all tasks up to its message of this number were read: ``read_all(number)``.
    ahead
        The number of elements that may be on their way, or here and unused.
    in_turn
        Whether the consumer takes the elements of the tasks in turn.
    is_limit
        Whether ``ahead`` holds even if there are more tasks; otherwise each task is asked for an element at least.
    """

    def __init__(
        self,
        joining: dict[str, Any],
        arrived: Arrived,
        send: Callable[[str, OfTask, Callable[[Any], None] | None], None],
        read_all: Callable[[int], None],
        ahead: int,
        *,
        in_turn: bool,
        is_limit: bool,
    ) -> None:
        self._joining = joining
        self._arrived = arrived
        self._send = send
        self._read_all = read_all
        self._ahead = ahead
        self._in_turn = in_turn
        self._asks_each = in_turn or not is_limit
        # The number of the last message of the dispatcher.
        self._message_number = 0
        # By task id: the attempt, and the worker; "" while the task has none.
        self._tasks: dict[str, tuple[int, str]] = {}
        self._ended: set[str] = set()
        # By task: the number of elements that were asked for and have not arrived.
        self._asked: dict[str, int] = {}
        # By task: the elements that arrived and are not used, and those that are used and may not have been recorded.
        self._held: defaultdict[str, Intervals] = defaultdict(Intervals)
        self._done: defaultdict[str, Intervals] = defaultdict(Intervals)
        self._ends_late = False

    # --- the dispatcher ---

    def tasks(self, tasks: tuple[tuple[str, int, str], ...], number: int) -> None:
        """Read exactly these tasks from now on: ``(task, attempt, worker)``, with "" while a task waits for a worker.

        ``number`` is that of the dispatcher's message; it is sent back when all tasks were read to their end.
        """
        self._message_number = number
        now = {task: (attempt, worker) for task, attempt, worker in tasks}
        for task in self._tasks.keys() - now:
            # All its elements were used.
            self._ended.discard(task)
            for known in (self._asked, self._held, self._done):
                known.pop(task, None)
        changed = [task for task, place in now.items() if self._tasks.get(task) != place]
        self._tasks = now
        self._ended.difference_update(changed)
        for task in changed:
            self._asked.pop(task, None)
        for task in changed:
            self._join(task)
        self._ask()
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

    # --- workers ---

    def workers(self) -> set[str]:
        """Return the addresses of the workers to read from."""
        return {worker for _, worker in self._tasks.values()} - {""}

    def _join(self, task: str) -> None:
        _, worker = self._tasks[task]
        if worker:
            share = max(self._joining["window_bytes"] // len(self._tasks), 1)
            joining = self._joining | {"num_asked": 0, "window_bytes": share}
            self._send_to_producer(task, JoinTask(joining, list(self._held[task]), list(self._done[task])))
            self._asked[task] = 0

    def got(self, worker: str, about: OfTask) -> None:
        """Handle a message of a worker; ignore messages about earlier attempts."""
        task, attempt, message = about
        if self._tasks.get(task) != (attempt, worker):
            return
        match message:
            case SentRows(first, rows):
                self._ended.discard(task)
                self._held[task].add(first, first + len(rows))
                # After its end, a task sends elements of consumers that are lost without being asked again.
                self._asked[task] = max(self._asked.get(task, 0) - len(rows), 0)
                with self._arrived.changed:
                    self._arrived.parts.append((task, first, rows))
                    self._arrived.changed.notify_all()
            case End():
                self._ended.add(task)
                self._asked.pop(task, None)
                self._ask()
                self._report_if_all_read()
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

    # --- the program ---

    def use(self, parts: Sequence[tuple[str, int, int]], ahead: int) -> None:
        """Record that elements were used, ``(task, first, stop)``, and how many may be on their way from now on."""
        self._ahead = ahead
        used: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for task, first, stop in parts:
            if task in self._tasks:
                self._held[task].remove(first, stop)
                self._done[task].add(first, stop)
                used[task].append((first, stop))
        self._ask(used)
        if self._ends_late and not any(map(len, self._held.values())):
            self._report_if_all_read()

    # --- inside ---

    def _ask(self, used: Mapping[str, Pairs] = MappingProxyType({})) -> None:
        # Report what was used, and ask for more elements of the tasks that may have some, for as many of each.
        asked = self._asked
        room = self._ahead - sum(asked.values()) - sum(map(len, self._held.values()))
        share = max((room + sum(asked.values())) // len(asked), 1) if asked else 0
        if room < self._ahead // PARTS_ON_THE_WAY:
            # Otherwise parts would become smaller and smaller.
            room = 0
        for task in sorted(asked, key=asked.__getitem__):
            # The tasks that were asked for all that may be on its way may be stuck.
            least = int(self._asks_each and not asked[task] and not len(self._held[task]))
            more = max(min(share - asked[task], room), least)
            if more or task in used:
                asked[task] += more
                room = max(room - more, 0)
                self._send_to_producer(task, Ask(used.get(task, ()), more))
        for task in used.keys() - asked:
            self._send_to_producer(task, Ask(used[task], 0))

    def _send_to_producer(self, task: str, message: JoinTask | Ask) -> None:
        attempt, worker = self._tasks[task]
        if worker:
            over = partial(self._told_used, task, message.used) if isinstance(message, Ask) and message.used else None
            self._send(worker, OfTask(task, attempt, message), over)

    def _told_used(self, task: str, used: Pairs, why: str | None) -> None:
        # With a cache, the dispatcher records the elements that one of the trainers used. What a trainer used need not
        # be known if the worker is lost, and its cache with it.
        if self._joining["trainer"]:
            self.recorded([(task, used)])

    def _report_if_all_read(self) -> None:
        if self._tasks and self._ended.issuperset(self._tasks):
            self._read_all(self._message_number)


def _index_of(task: str) -> int:
    return int(task.rpartition("/")[2])
