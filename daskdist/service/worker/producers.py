"""The producers of a worker, and the messages of consumers to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_never

from daskdist.service.dispatcher.commands import LoseConsumer, StartTask, StopTask, TaskSpec, ToWorker
from daskdist.service.intervals import Pairs
from daskdist.service.worker.pickled_dataset import PickledDataset
from daskdist.service.worker.producer import Producer
from daskdist.service.worker.task_messages import JoinTask, OfTask


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
        # By task and attempt: the messages of consumers for those that have not started here yet.
        self._early: dict[tuple[str, int], list[tuple[str, Any]]] = {}

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
        for consumer, message in self._early.pop((spec.id, spec.attempt), ()):
            producer.message(consumer, message)
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
        """Remove a consumer of a task, or of all if None; ``done`` has what it used if it left, None if it was lost."""
        for key in [key for key in self._early if task in (None, key[0])]:
            self._early[key] = [early for early in self._early[key] if early[0] != consumer]
            if not self._early[key]:
                del self._early[key]
        for producer in list(self.producers.values()):
            if task in (None, producer.spec.id):
                producer.lose(consumer, done)

    # --- consumers ---

    def message(self, consumer: str, about: OfTask) -> None:
        """Handle a message of a consumer; ignore messages about earlier attempts."""
        task, attempt, message = about
        producer = self.producers.get(task)
        if producer is not None and producer.spec.attempt == attempt:
            producer.message(consumer, message)
        elif isinstance(message, JoinTask) or (task, attempt) in self._early:
            self._early.setdefault((task, attempt), []).append((consumer, message))

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
