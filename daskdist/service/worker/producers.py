"""The producers of a worker, and the consumers connected to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from daskdist.service.dispatcher.commands import LoseConsumer, StartTask, StopTask, TaskSpec, ToWorker
from daskdist.service.intervals import Intervals, Pairs
from daskdist.service.worker.delivery import Consumer
from daskdist.service.worker.pickled_dataset import PickledDataset
from daskdist.service.worker.producer import Producer
from daskdist.service.worker.task_messages import JoinTask, OfTask, Room, Used


class Producers:
    """A state machine, without I/O, that connects the tasks of a worker with the consumers that read them.

    Parameters
    ----------
    make
        Returns a new producer of a task, not yet started: ``make(spec, dataset)``.
    """

    def __init__(self, make: Callable[[TaskSpec, PickledDataset], Producer]) -> None:
        self._make = make
        self._datasets: dict[str, PickledDataset] = {}
        self.producers: dict[str, Producer] = {}
        # By connected consumer: its requests for tasks that have not started here yet, by task and attempt.
        self._connected: set[str] = set()
        self._early: dict[tuple[str, int], dict[str, tuple[Consumer, list[tuple[int, int]]]]] = {}

    # --- the dispatcher ---

    def command(self, message: ToWorker) -> Producer | None:
        """Handle a message of the dispatcher; return the producer of a task that is to be started."""
        match message:
            case StartTask(_, spec, dataset):
                return self.start(spec, dataset)
            case StopTask(_, task):
                self.stop(task)
            case LoseConsumer(_, task, consumer, done):
                self.lose(task, consumer, done)
            case _:
                assert_never(message)
        return None

    def start(self, spec: TaskSpec, pickled: bytes | None) -> Producer:
        """Start a task, or another attempt of it."""
        if pickled is not None:
            self._datasets[spec.dataset] = PickledDataset(pickled)
        self.stop(spec.id, spec.attempt)
        producer = self.producers[spec.id] = self._make(spec, self._datasets[spec.dataset])
        for consumer, done in self._early.pop((spec.id, spec.attempt), {}).values():
            producer.join(consumer, done)
        return producer

    def stop(self, task: str, attempt: int | None = None) -> None:
        """End a task, and drop the requests for its attempts before ``attempt``; for all if None."""
        for key in [key for key in self._early if key[0] == task and (attempt is None or key[1] < attempt)]:
            del self._early[key]
        producer = self.producers.pop(task, None)
        if producer is not None:
            producer.stop()
            dataset = producer.spec.dataset
            if all(other.spec.dataset != dataset for other in self.producers.values()):
                self._datasets[dataset].forget_node()

    def lose(self, task: str | None, consumer: str, done: Pairs | None = None) -> None:
        """Remove a consumer of a task; ``done`` has the elements it used if it left, and is None if it was lost.

        If the task is None, remove it from all, as the dispatcher does not know it, unless it has connected again.
        """
        if task is None and consumer in self._connected:
            return
        for producer in list(self.producers.values()):
            if task in (None, producer.spec.id):
                producer.lose(consumer, done)

    # --- consumers ---

    def connected(self, consumer: str) -> None:
        """Record that a consumer has connected or reconnected: it is sent nothing until it joins."""
        self.disconnected(consumer)
        self._connected.add(consumer)

    def disconnected(self, consumer: str) -> None:
        """Record that the connection of a consumer broke."""
        self._connected.discard(consumer)
        for key, asked in list(self._early.items()):
            asked.pop(consumer, None)
            if not asked:
                del self._early[key]
        for producer in list(self.producers.values()):
            producer.miss(consumer)

    def message(self, consumer: str, about: OfTask) -> None:
        """Handle a message of a consumer; ignore messages about earlier attempts."""
        task, attempt, message = about
        producer = self.producers.get(task)
        is_there = producer is not None and producer.spec.attempt == attempt
        if isinstance(message, JoinTask):
            asked = Consumer(**message.consumer, held=Intervals(message.held))
            if producer is not None and is_there:
                producer.join(asked, message.done)
            else:
                self._early.setdefault((task, attempt), {})[consumer] = asked, list(message.done)
        elif producer is not None and is_there:
            producer.message(consumer, message)
        elif consumer in self._early.get((task, attempt), {}):
            early, done = self._early[task, attempt][consumer]
            if isinstance(message, Room):
                early.window_elements = message.num_elements
            elif isinstance(message, Used):
                early.held.difference_update(message.pairs)
                done += message.pairs

    def reports(self) -> dict[str, tuple[int, dict[str, tuple[int, int]]]]:
        """Return the reports on the tasks, as in `daskdist.service.dispatcher.status.Reports`."""
        return {
            task: (
                producer.kept_bytes,
                {
                    consumer.name: (len(consumer.held), int(consumer.held_bytes))
                    for consumer in producer.delivery.consumers
                },
            )
            for task, producer in self.producers.items()
        }

    # --- time ---

    def tick(self) -> None:
        """Do what is due after some time has passed."""
        for producer in list(self.producers.values()):
            producer.tick()
