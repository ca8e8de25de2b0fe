"""The producers of a worker, and the consumers that read from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daskdist.service.dispatcher.commands import TaskSpec
from daskdist.service.intervals import Intervals
from daskdist.service.worker.delivery import Consumer
from daskdist.service.worker.pickled_dataset import PickledDataset
from daskdist.service.worker.producer import Producer

Pairs = list[tuple[int, int]]


class Producers:
    """Brings together what the dispatcher has a worker produce and what consumers ask of it; without I/O.

    Parameters
    ----------
    make
        Returns the producer of a task, which was not started: ``make(spec, dataset)``.
    """

    def __init__(self, make: Callable[[TaskSpec, PickledDataset], Producer]) -> None:
        self._make = make
        self._datasets: dict[str, PickledDataset] = {}
        self.producers: dict[str, Producer] = {}
        # The consumers that are connected, and of those what they asked of tasks that have not begun here yet, by task
        # and attempt.
        self._connected: set[str] = set()
        self._early: dict[tuple[str, int], dict[str, tuple[Consumer, Pairs]]] = {}

    # --- the dispatcher ---

    def start(self, spec: TaskSpec, pickled: bytes | None) -> Producer:
        """Begin a task, or a further attempt of it."""
        if pickled is not None:
            self._datasets[spec.dataset] = PickledDataset(pickled)
        self.stop(spec.id, spec.attempt)
        producer = self.producers[spec.id] = self._make(spec, self._datasets[spec.dataset])
        for consumer, done in self._early.pop((spec.id, spec.attempt), {}).values():
            producer.join(consumer, done)
        return producer

    def stop(self, task: str, attempt: int | None = None) -> None:
        """End a task, and let go of what was asked of its attempts before one; of all if None."""
        for key in [key for key in self._early if key[0] == task and (attempt is None or key[1] < attempt)]:
            del self._early[key]
        producer = self.producers.pop(task, None)
        if producer is not None:
            producer.stop()
            dataset = producer.spec.dataset
            if all(other.spec.dataset != dataset for other in self.producers.values()):
                self._datasets[dataset].forget_node()

    def lose(self, task: str, consumer: str, done: Pairs | None = None) -> None:
        """Note that a consumer of a task is gone for good, and if it left what it was done with."""
        if task in self.producers:
            self.producers[task].lose(consumer, done)

    def lose_all(self, consumer: str) -> None:
        """Note that a consumer is gone for good which the dispatcher does not know."""
        if consumer not in self._connected:
            for task in list(self.producers):
                self.lose(task, consumer, [])

    # --- consumers ---

    def connected(self, consumer: str) -> None:
        """Note that a consumer has connected, maybe again: it is sent nothing before it has joined anew."""
        self.disconnected(consumer)
        self._connected.add(consumer)

    def disconnected(self, consumer: str) -> None:
        """Note that the connection of a consumer was cut."""
        self._connected.discard(consumer)
        for key, asked in list(self._early.items()):
            asked.pop(consumer, None)
            if not asked:
                del self._early[key]
        for producer in list(self.producers.values()):
            producer.miss(consumer)

    def message(self, consumer: str, kind: str, task: str, attempt: int, *args: Any) -> None:
        """Take a message of a consumer; one about an attempt that is over says nothing."""
        producer = self.producers.get(task)
        is_there = producer is not None and producer.spec.attempt == attempt
        if kind == "join":
            joining, held, done = args
            asked = Consumer(**joining, held=Intervals(held))
            if producer is not None and is_there:
                producer.join(asked, done)
            else:
                self._early.setdefault((task, attempt), {})[consumer] = asked, list(done)
        elif producer is not None and is_there:
            act: dict[str, Any] = {"ack": producer.acknowledge, "return": producer.take_back, "window": producer.resize}
            act[kind](consumer, *args)
        elif consumer in self._early.get((task, attempt), {}):
            early, done = self._early[task, attempt][consumer]
            if kind == "window":
                early.window_elements = args[0]
            elif kind == "ack":
                early.held.difference_update(args[0])
                done += args[0]

    def reports(self) -> dict[str, tuple[int, dict[str, tuple[int, int]]]]:
        """Return what `daskdist.service.dispatcher.status.Reports` has of the tasks."""
        return {
            task: (
                producer.kept_bytes,
                {each.name: (len(each.held), int(each.held_bytes)) for each in producer.delivery.consumers},
            )
            for task, producer in self.producers.items()
        }

    # --- time ---

    def tick(self) -> None:
        """Note that some time has passed."""
        for producer in list(self.producers.values()):
            producer.tick()
