"""The data service without I/O: its state machines, and the messages between them, delivered one at a time."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from typing import Any

import numpy as np

from daskdist.core.block import Block
from daskdist.core.structure import LONE
from daskdist.execute.messages.link import LinkState
from daskdist.service.consumer.reading import Arrived, Reading
from daskdist.service.dispatcher.commands import (
    AllRead,
    ConsumerAway,
    DatasetEntry,
    IterationOver,
    JobOptions,
    Join,
    Leave,
    LoseConsumer,
    RecordedAsUsed,
    StartTask,
    StopTask,
    TaskOver,
    TasksToRead,
    WorkerReady,
)
from daskdist.service.dispatcher.dispatcher import Dispatcher
from daskdist.service.intervals import Intervals
from daskdist.service.sharding_policy import ShardingPolicy
from daskdist.service.worker.producer import Producer
from daskdist.service.worker.producers import Producers
from daskdist.service.worker.task_messages import SentRows

CLOSED = ("closed",)
NO_LIMIT = 2**40


class SimulatedLink:
    """A link of a consumer to a worker, with the messages in transit over its connection to the worker and from it."""

    def __init__(self, consumer: SimulatedConsumer, worker: str) -> None:
        self.consumer = consumer
        self.worker = worker
        self.consumer_end = LinkState()
        self.worker_end: LinkState | None = None
        self.up: deque[Any] = deque()
        self.down: deque[Any] = deque()
        # What either end writes after the connection is cut goes over the next one.
        self.is_cut = self.is_closed = False
        self.connect()

    def cut(self, num_kept: int = 0) -> None:
        """Lose all but the first messages in transit."""
        if not self.is_cut:
            self.is_cut = True
            for queue in (self.up, self.down):
                while len(queue) > num_kept:
                    queue.pop()
                queue.append(CLOSED)

    def connect(self) -> None:
        """Open a connection, as `WorkerConnection` does."""
        worker = self.consumer.service.workers[self.worker]
        self.up.clear()
        self.down.clear()
        self.is_cut = False
        if not worker.is_alive:
            self.cut()
            return
        if worker.links.get(self.consumer.name) is not self or self.worker_end is None:
            worker.links[self.consumer.name], self.worker_end = self, LinkState()
            self.consumer_end.begin_again()
        # Each end drops what the other one has.
        self.worker_end.acknowledge(self.consumer_end.num_arrived)
        self._over(self.worker_end.num_arrived)
        self.up.extend([sent[:2] for sent in self.consumer_end.kept])
        self.down.extend([sent[:2] for sent in self.worker_end.kept])

    def send_up(self, message: Any, over: Any) -> None:
        """Send a message to the worker."""
        numbered = self.consumer_end.send(message, over)
        if not self.is_cut:
            self.up.append(numbered)

    def send_down(self, message: Any) -> None:
        """Send a message to the consumer."""
        numbered = self.worker_end.send(message)
        if not self.is_cut:
            self.down.append(numbered)

    def _acknowledge(self, queue: deque[Any], end: LinkState) -> None:
        # An acknowledgement that was not sent yet is replaced, as links send one for messages that come soon together.
        if queue and isinstance(queue[-1], int):
            queue.pop()
        if not self.is_cut:
            queue.append(end.num_arrived)

    def _over(self, number: int) -> None:
        for sent in self.consumer_end.acknowledge(number):
            if sent.over is not None:
                sent.over(None)

    def reach_worker(self) -> None:
        """Deliver the next message to the worker, and the acknowledgements before it."""
        message = self.up.popleft()
        while isinstance(message, int) and self.up:
            self.worker_end.acknowledge(message)
            message = self.up.popleft()
        worker = self.consumer.service.workers[self.worker]
        if message == CLOSED:
            worker.events.append(ConsumerAway(self.consumer.name))
        elif isinstance(message, int):
            self.worker_end.acknowledge(message)
        elif self.worker_end.arrive(message[0]):
            self._acknowledge(self.down, self.worker_end)
            worker.producers.message(self.consumer.name, message[1])

    def reach_consumer(self) -> None:
        """Deliver the next message to the consumer, and the acknowledgements before it."""
        message = self.down.popleft()
        while isinstance(message, int) and self.down:
            self._over(message)
            message = self.down.popleft()
        if message == CLOSED:
            if not self.is_closed and self.consumer.is_alive:
                self.consumer.calls.append(("connect", self))
        elif isinstance(message, int):
            self._over(message)
        elif self.consumer_end.arrive(message[0]):
            self._acknowledge(self.up, self.consumer_end)
            if not self.is_closed:
                self.consumer.reading.got(self.worker, message[1])

    def close(self) -> None:
        """End the link; what the consumer has sent may arrive."""
        self.is_closed = True
        self.cut(1)


class SimulatedWorker:
    """A worker: its producers without their threads."""

    def __init__(self, service: Simulation, address: str) -> None:
        self.service = service
        self.address = address
        self.producers = Producers(self._producer)
        self.links: dict[str, SimulatedLink] = {}
        # (task, attempt) -> the number of elements that were produced.
        self.positions: dict[tuple[str, int], int] = {}
        self.commands: deque[Any] = deque()
        self.events: deque[Any] = deque([WorkerReady()])
        self.is_alive = True

    def _producer(self, spec: Any, dataset: Any) -> Producer:
        self.positions[spec.id, spec.attempt] = 0
        return Producer(spec, dataset, lambda: None, lambda *args: None, self._send, self._note)

    def _send(self, consumer: str, message: Any, num_bytes: int = 0) -> None:
        if consumer in self.links:
            self.links[consumer].send_down(message)

    def command(self, command: Any) -> None:
        """Take a message of the dispatcher."""
        if isinstance(command, LoseConsumer) and command.task is None:
            link = self.links.get(command.consumer)
            if link is not None and not link.is_cut:
                return
            self.links.pop(command.consumer, None)
        self.producers.command(command)

    def _note(self, event: Any) -> None:
        self.events.append(event)
        if isinstance(event, TaskOver):
            self.producers.stop(event.task)

    def produce(self) -> bool:
        """Produce the next part of each task; return whether there was any."""
        has_produced = False
        for producer in list(self.producers.producers.values()):
            spec = producer.spec
            position = self.positions[spec.id, spec.attempt]
            numbers = self.service.numbers_of(spec)
            if position > len(numbers) or not producer.delivery.is_wanted:
                continue
            has_produced = True
            num_elements = self.service.part
            self.positions[spec.id, spec.attempt] = position + num_elements
            stop = min(position + num_elements, len(numbers))
            for first, end in Intervals(spec.done).missing(position, stop):
                rows = Block(LONE, [np.asarray(numbers[first:end])])
                producer.count(rows.nbytes)
                producer.add(first, rows)
            if position + num_elements > len(numbers):
                producer.end(None)
        return has_produced


class SimulatedConsumer:
    """A consumer, and the program that takes its elements."""

    def __init__(self, service: Simulation, name: str, index: int) -> None:
        self.name = name
        self.service = service
        self.arrived = Arrived()
        in_turn = service.options.num_consumers is not None
        joining = {
            "name": name,
            "window_bytes": 40 * service.part,
            "index": index if in_turn else 0,
            "trainer": "trainer" if service.options.cache_bytes is not None else "",
        }
        self.join = Join(name, "dataset", "job", 0, service.options, consumer_index=index if in_turn else None)
        self.reading = Reading(
            joining,
            self.arrived,
            self._send,
            self._read_all,
            service.window or NO_LIMIT,
            in_turn=in_turn,
            is_limit=service.window is not None,
        )
        self.links: dict[str, SimulatedLink] = {}
        self.asked: deque[Any] = deque()
        self.told: deque[Any] = deque()
        # The actions that the program and timers have requested of the event loop.
        self.calls: deque[Any] = deque()
        self.taken: list[int] = []
        self.is_alive, self.is_leaving = True, False

    def _send(self, worker: str, message: Any, over: Any) -> None:
        if self.is_leaving:
            return
        if worker not in self.links:
            self.links[worker] = SimulatedLink(self, worker)
            self.service.links.append(self.links[worker])
        self.links[worker].send_up(message, over)

    def _read_all(self, num_told: int) -> None:
        self.asked.append(AllRead(self.name, num_told))

    def take(self, most: int, *, is_ahead: bool = False) -> bool:
        """Let the program take elements, if there are any; return whether it did anything.

        With ``is_ahead``, it has not used up those that it took before.
        """
        in_hand = [] if is_ahead else self._done_with()
        place = self.arrived.place()
        if place is not None:
            self.taken += self.arrived.take(place, most).leaves[0].tolist()
        return bool(in_hand) or place is not None

    def _done_with(self) -> list[tuple[str, int, int]]:
        in_hand = self.arrived.done_with()
        if in_hand:
            self.calls.append(("use", in_hand))
        return in_hand

    def close(self) -> None:
        """Let the program close its iterator."""
        self._done_with()
        self.arrived.parts.clear()
        self.arrived.is_over = True
        self.calls.append(("leave",))

    def call(self, kind: str, *args: Any) -> None:
        """Run the requested actions in the event loop."""
        if kind == "use":
            self.reading.use(*args, self.service.window or NO_LIMIT)
        elif kind == "leave":
            self._leave()
        else:
            (link,) = args
            if not link.is_closed:
                link.connect()

    def _leave(self) -> None:
        if not self.is_leaving:
            self.is_leaving = True
            self.asked += [Leave(self.name, self.reading.done()), CLOSED]
            for link in self.links.values():
                link.close()

    def hear_dispatcher(self, message: Any) -> None:
        """Take a message of the dispatcher."""
        if self.is_leaving:
            return
        if isinstance(message, TasksToRead):
            self.reading.tasks(message.tasks, message.number)
            for worker in self.links.keys() - self.reading.workers():
                self.links.pop(worker).close()
        elif isinstance(message, RecordedAsUsed):
            self.reading.recorded(message.tasks)
        elif isinstance(message, IterationOver):
            if message.was_over or not self.reading.was_given_more():
                self.arrived.is_over = True
                self._leave()
        else:
            raise AssertionError(message)

    @property
    def is_reading(self) -> bool:
        """Return whether the program of the consumer continues."""
        return self.is_alive and not self.arrived.is_over

    @property
    def num_out(self) -> int:
        """Return the elements of the consumer's tasks that are in transit to it, or that arrived and were not taken.

        Elements that other consumers leave to it after the end of a task exceed the window.
        """
        places = {task: place for task, place in self.reading._tasks.items() if task not in self.reading._ended}
        here = sum(len(rows) for task, _, rows in self.arrived.parts if task in places)
        links = [link for link in self.service.links if link.consumer is self]
        sent = [
            (link, kept.message)
            for link in links
            for kept in (link.worker_end.kept if link.worker_end else ())
            if kept.number > link.consumer_end.num_arrived
        ]
        coming = [
            about.message.rows
            for link, about in sent
            if isinstance(about.message, SentRows) and places.get(about.task) == (about.attempt, link.worker)
        ]
        return here + sum(map(len, coming))


class Simulation:
    """A dispatcher, workers and consumers, and the messages in transit between them.

    Parameters
    ----------
    mode
        The mode of the job.
    num_elements
        The number of elements of the dataset.
    is_leased
        Whether runs of elements are leased to workers.
    window
        The number of elements that may be in flight to a consumer; None for no limit.
    part
        The number of elements that are produced together.
    options
        Other options of the job.
    """

    def __init__(
        self,
        mode: ShardingPolicy,
        num_elements: int,
        *,
        is_leased: bool = False,
        window: int | None = None,
        part: int = 3,
        **options: Any,
    ) -> None:
        self.num_elements = num_elements
        self.options = JobOptions(mode, **options)
        self.window = window
        self.part = part
        self.dispatcher = self._new_dispatcher()
        # The state that is kept for another dispatcher.
        self.state: dict[Any, Any] = {}
        pieces = (num_elements, 1) if is_leased else None
        self.dispatcher.register(DatasetEntry("dataset", "fingerprint", b"", b"", pieces))
        self._carry_out([])
        self.workers: dict[str, SimulatedWorker] = {}
        self.consumers: dict[str, SimulatedConsumer] = {}
        self.links: list[SimulatedLink] = []
        self._names = itertools.count()
        self._sent: defaultdict[str, set[str]] = defaultdict(set)

    def _new_dispatcher(self) -> Dispatcher:
        return Dispatcher(lambda: 0.0, gc_timeout_s=1e9, is_kept=True)

    def numbers_of(self, spec: Any) -> range:
        """Return the elements of a task, which are numbers."""
        if spec.lease is not None:
            return range(*spec.lease)
        if self.options.mode is ShardingPolicy.FILE:
            return range(spec.index, self.num_elements, spec.count)
        return range(self.num_elements)

    # --- events ---

    def add_worker(self) -> None:
        """Start a worker."""
        address = f"worker-{next(self._names)}"
        self.workers[address] = SimulatedWorker(self, address)

    def add_consumer(self) -> None:
        """Start a consumer."""
        name = f"consumer-{next(self._names)}"
        consumer = self.consumers[name] = SimulatedConsumer(self, name, len(self.consumers))
        consumer.asked.append(consumer.join)

    def kill_worker(self, worker: SimulatedWorker, num_kept: int) -> None:
        """End a worker's process."""
        worker.is_alive = False
        worker.commands.clear()
        worker.events.append(CLOSED)
        for link in self.links:
            if link.worker == worker.address:
                link.cut(num_kept)
                link.up.clear()

    def kill_consumer(self, consumer: SimulatedConsumer, num_kept: int) -> None:
        """End a consumer's process."""
        consumer.is_alive = False
        consumer.told.clear()
        consumer.calls.clear()
        consumer.asked.append(CLOSED)
        for link in self.links:
            if link.consumer is consumer:
                link.cut(num_kept)
                link.down.clear()

    def restart_dispatcher(self) -> None:
        """Replace the dispatcher by one that continues from its state; workers end, consumers come again."""
        for consumer in self.consumers.values():
            while consumer.asked and (consumer.is_leaving or not consumer.is_alive):
                self._request(consumer, consumer.asked.popleft())
        for worker in self.workers.values():
            if worker.is_alive:
                self.kill_worker(worker, 0)
            worker.events.clear()
        before, self.dispatcher = self.dispatcher, self._new_dispatcher()
        self.dispatcher.restore(self.state)
        self._sent.clear()
        for consumer in self.consumers.values():
            consumer.told.clear()
            if consumer.is_alive and not consumer.is_leaving:
                consumer.asked.clear()
                consumer.reading.begin_again()
                consumer.asked.append(consumer.join._replace(is_again=before.knows(consumer.name)))

    def tick(self) -> None:
        """Let some time pass for the dispatcher and the workers."""
        for worker in self.workers.values():
            if worker.is_alive:
                worker.producers.tick()
        self._carry_out(self.dispatcher.tick())

    # --- messages ---

    def steps(self) -> list[Any]:
        """Return functions that each deliver the next message of a connection."""
        steps: list[Any] = []
        self.links = [link for link in self.links if link.up or link.down or not link.is_closed]
        for link in self.links:
            if link.up and self.workers[link.worker].is_alive:
                steps.append(link.reach_worker)
            if link.down:
                steps.append(link.reach_consumer)
        for worker in self.workers.values():
            if worker.events:
                steps.append(lambda worker=worker: self._event(worker, worker.events.popleft()))
            if worker.commands:
                steps.append(lambda worker=worker: worker.command(worker.commands.popleft()))
        for consumer in self.consumers.values():
            if consumer.asked:
                steps.append(lambda consumer=consumer: self._request(consumer, consumer.asked.popleft()))
            if consumer.told:
                steps.append(lambda consumer=consumer: consumer.hear_dispatcher(consumer.told.popleft()))
            if consumer.calls:
                steps.append(lambda consumer=consumer: consumer.call(*consumer.calls.popleft()))
        return steps

    def _event(self, worker: SimulatedWorker, message: Any) -> None:
        if message == CLOSED:
            self._carry_out(self.dispatcher.worker_left(worker.address))
        else:
            self._carry_out(self.dispatcher.heard(message, worker.address, "host"))

    def _request(self, consumer: SimulatedConsumer, message: Any) -> None:
        if message == CLOSED:
            self._carry_out(self.dispatcher.left(consumer.name))
        else:
            self._carry_out(self.dispatcher.heard(message))

    def _carry_out(self, commands: list[Any]) -> None:
        for key, value in self.dispatcher.changes().items():
            if value is None:
                self.state.pop(key, None)
            else:
                self.state[key] = value
        for command in commands:
            match command:
                case StartTask(worker) | StopTask(worker) | LoseConsumer(worker):
                    if self.workers[worker].is_alive:
                        has_dataset = isinstance(command, StartTask)
                        self.workers[worker].commands.append(command._replace(dataset=b"") if has_dataset else command)
                case TasksToRead(name) | IterationOver(name) | RecordedAsUsed(name):
                    if self.consumers[name].is_alive:
                        self.consumers[name].told.append(command)

    # --- the end ---

    def finish(self) -> None:
        """Continue until all consumers are at the end, then read the elements that others have left."""
        if not any(worker.is_alive for worker in self.workers.values()):
            self.add_worker()
        self._settle()
        left_out = [consumer.name for consumer in self.consumers.values() if consumer.is_reading]
        if left_out:
            raise AssertionError(f"{left_out} wait without end")
        # Consumers that died may have kept some elements too long.
        self.add_consumer()
        self._settle()

    def _settle(self) -> None:
        for _ in range(10_000):
            steps = self.steps()
            for step in steps:
                step()
            alive = [worker for worker in self.workers.values() if worker.is_alive]
            has_produced = [worker.produce() for worker in alive]
            has_taken = [consumer.take(4) for consumer in self.consumers.values() if consumer.is_reading]
            if steps or any(has_produced) or any(has_taken):
                continue
            self.tick()
            if not self.steps():
                return
        raise AssertionError("the iteration does not end")

    def counts(self, *, of_living: bool) -> Counter[int]:
        """Return how often each element was taken."""
        consumers = [value for value in self.consumers.values() if value.is_alive or not of_living]
        return Counter(number for consumer in consumers for number in consumer.taken)
