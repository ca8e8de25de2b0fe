"""The producer of a task, which computes elements, sends them, and keeps them until they are used."""

from __future__ import annotations

import logging
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, assert_never

from daskdist.config import in_bytes, sent
from daskdist.core.block import Block, Rows
from daskdist.core.node import Node
from daskdist.core.primitive import Primitive
from daskdist.errors import ArgumentError
from daskdist.execute.caller import Caller
from daskdist.execute.callers.choose import local_caller
from daskdist.execute.callers.compute_key import Fetch
from daskdist.execute.callers.live_workers import LiveWorkers
from daskdist.execute.callers.submit import Submit, workers_of
from daskdist.execute.messages.failure import Failure
from daskdist.execute.resume.position import StreamPosition
from daskdist.execute.stream.interpreter import Interpreter
from daskdist.execute.stream.local_iterator import first_elements, rows_by
from daskdist.ops.with_options import Options, WithOptions, merged_options
from daskdist.passes.autoshard import autoshard
from daskdist.passes.independent_pieces import pieces_of
from daskdist.passes.plan import plan
from daskdist.passes.seed import drawn_seeds, with_drawn
from daskdist.service.dispatcher.commands import Progress, TaskOver, TaskSpec
from daskdist.service.intervals import Intervals, Pairs
from daskdist.service.sharding_policy import ShardingPolicy
from daskdist.service.worker.coordinated_reads import CoordinatedReads
from daskdist.service.worker.cross_trainer_cache import SharedCache
from daskdist.service.worker.delivery import Action, Consumer, Delivery, Done, Forget, Send
from daskdist.service.worker.first_come import FirstCome
from daskdist.service.worker.pickled_dataset import PickledDataset
from daskdist.service.worker.task_messages import Ask, Computing, End, JoinTask, OfTask, SentRows
from daskdist.sharding import AutoShardPolicy

logger: Final = logging.getLogger("daskdist")

_SHARED_OUT: Final = {ShardingPolicy.FILE: AutoShardPolicy.FILE, ShardingPolicy.HINT: AutoShardPolicy.HINT}


def delivery_of(spec: TaskSpec) -> Delivery:
    """Return the delivery for a task, chosen by the options of its job."""
    if spec.options.num_consumers is not None:
        return CoordinatedReads(spec.options.num_consumers, spec.done)
    if spec.options.cache_bytes is not None:
        return SharedCache(spec.options.cache_bytes)
    return FirstCome(spec.done, spec.expected)


@dataclass
class _Part:
    """A part of the kept elements."""

    first: int
    rows: Rows
    num_bytes: int
    num_left: int


class Producer:
    """The producer of a task's elements: a thread computes them, the worker's event loop does everything else.

    Parameters
    ----------
    spec
        The description of the task.
    dataset
        The dataset.
    make_client
        Connects to the scheduler, which is needed if all workers compute the elements.
    call_soon
        Schedules a function call in the event loop.
    send
        Sends a message to a consumer of a name.
    notify
        Sends the dispatcher a `Progress` or a `TaskOver`.
    fetch
        Gets results that the cluster holds, for a worker that computes the elements itself.
    """

    def __init__(
        self,
        spec: TaskSpec,
        dataset: PickledDataset,
        make_client: Callable[[], Any],
        call_soon: Callable[..., Any],
        send: Callable[..., None],
        notify: Callable[..., None],
        fetch: Fetch | None = None,
    ) -> None:
        self.spec = spec
        self.delivery = delivery_of(spec)
        self.failure: Failure | None = None
        self.is_done = False
        self.num_produced = 0
        self.kept_bytes = 0
        self._send = send
        self._notify = notify
        self._parts: dict[int, _Part] = {}
        self._firsts: list[int] = []
        self._limit_bytes = in_bytes("service.buffer-bytes")
        # A cache has its own bound, which may be larger than the buffer: then parts are produced one by one on demand.
        self._is_cache = spec.options.cache_bytes is not None
        self._coming_bytes = 0
        self._room = threading.Condition()
        self._is_stopped = False
        # False while the thread waits, and at its end.
        self._is_computing = True
        self._is_wanted = self.delivery.is_wanted
        self._unreported = Intervals()
        self._thread = threading.Thread(
            target=_produce_with_settings,
            args=(weakref.ref(self), spec, dataset, make_client, call_soon, fetch),
            name="daskdist-service",
            daemon=True,
        )

    def start(self) -> None:
        """Start to produce."""
        self._thread.start()

    # --- in the thread that produces ---

    def wait_for_room(self) -> bool:
        """Wait until there is room for more elements; return False if the task was stopped."""
        with self._room:
            self._is_computing = False
            self._room.wait_for(lambda: self._is_stopped or (self._is_wanted and self._has_room))
            self._is_computing = True
            return not self._is_stopped

    @property
    def _has_room(self) -> bool:
        return not self._coming_bytes if self._is_cache else self.kept_bytes < self._limit_bytes

    @property
    def is_stopped(self) -> bool:
        """Return whether the task was stopped."""
        return self._is_stopped

    # --- in the event loop ---

    def add(self, first: int, rows: Rows) -> None:
        """Add produced rows, the first of which has the number ``first``."""
        stop, num_bytes = first + len(rows), rows.nbytes
        with self._room:
            self._coming_bytes -= num_bytes
        self.num_produced = stop
        self._parts[first] = _Part(first, rows, num_bytes, len(rows))
        self._firsts.append(first)
        self._carry_out(self.delivery.produced(first, stop, num_bytes))

    def end(self, failure: Failure | None) -> None:
        """Record that no more elements will be produced."""
        self.failure, self._is_computing = failure, False
        self._carry_out(self.delivery.finished())

    def message(self, name: str, message: JoinTask | Ask) -> None:
        """Handle a message of a consumer."""
        match message:
            case JoinTask(arguments, held, done):
                self._unreported.update(done)
                try:
                    actions = self.delivery.joined(Consumer(**arguments, held=Intervals(held)), done)
                except ArgumentError as error:
                    self._send_to(name, Failure.of(error))
                    return
                self._carry_out(actions)
            case Ask(used, num_elements):
                self._unreported.update(used)
                self._carry_out(self.delivery.asked(name, used, num_elements))
            case _:
                assert_never(message)

    def lose(self, name: str, done: Pairs | None = None) -> None:
        """Remove a consumer; ``done`` has the elements it used if it left, and is None if it was lost."""
        is_redelivered = done is not None or self.spec.options.redelivers
        used = done or ()
        if not is_redelivered:
            # Given up, also for a later attempt of the task.
            used = [pair for consumer in self.delivery.consumers if consumer.name == name for pair in consumer.held]
        self._unreported.update(used)
        self._carry_out(self.delivery.lost(name, done or (), redeliver=is_redelivered))

    def tick(self) -> None:
        """Tell consumers that wait that calls are slow, and report progress."""
        if self._is_computing:
            # Calls that hang end here, with an error, and not the waits of consumers.
            for consumer in self.delivery.consumers:
                if not len(consumer.held):
                    self._send_to(consumer.name, Computing())
        self.report()

    def report(self) -> None:
        """Report to the dispatcher which elements were used since the last report."""
        pairs, self._unreported = list(self._unreported), Intervals()
        if pairs and not self.is_done:
            self._notify(Progress(self.spec.id, self.spec.attempt, pairs))

    def stop(self) -> None:
        """Stop the thread and free all elements, without waiting."""
        self._is_stopped = True
        self._parts.clear()
        with self._room:
            self._room.notify_all()

    def _send_to(self, name: str, message: Any) -> None:
        self._send(name, OfTask(self.spec.id, self.spec.attempt, message))

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(name, first, stop):
                    for begin, rows in self._rows(first, stop):
                        self._send_to(name, SentRows(begin, rows))
                case Forget(first, stop):
                    self._forget(first, stop)
                case Done():
                    if self.failure is None:
                        self.report()
                        self.is_done = True
                        self._notify(TaskOver(self.spec.id, self.spec.attempt))
                case End(name) if self.failure is not None:
                    self._send_to(name, self.failure)
                case message:
                    self._send_to(message.consumer, message)
        with self._room:
            self._is_wanted = self.delivery.is_wanted
            self._room.notify_all()

    def _rows(self, first: int, stop: int) -> Iterator[tuple[int, Rows]]:
        for part in self._parts_of(first, stop):
            begin, end = max(first, part.first), min(stop, part.first + len(part.rows))
            is_all = end - begin == len(part.rows)
            yield begin, _plain(part.rows if is_all else part.rows.slice(begin - part.first, end - part.first))

    def _parts_of(self, first: int, stop: int) -> list[_Part]:
        firsts = self._firsts
        parts = [
            self._parts[key] for key in firsts[max(bisect_right(firsts, first) - 1, 0) : bisect_left(firsts, stop)]
        ]
        return [part for part in parts if first < part.first + len(part.rows)]

    def _forget(self, first: int, stop: int) -> None:
        for part in self._parts_of(first, stop):
            part.num_left -= min(stop, part.first + len(part.rows)) - max(first, part.first)
            if part.num_left <= 0:
                del self._parts[part.first], self._firsts[bisect_left(self._firsts, part.first)]
                with self._room:
                    self.kept_bytes -= part.num_bytes

    def count(self, num_bytes: int) -> None:
        """Count bytes that are about to be added."""
        with self._room:
            self.kept_bytes += num_bytes
            self._coming_bytes += num_bytes


def _plain(rows: Rows) -> Rows:
    """Return rows without the notes on their origins, which need not be sent."""
    return Block(rows.structure, rows.leaves, rows.label) if isinstance(rows, Block) else rows


def _produce_with_settings(ref: weakref.ref[Producer], spec: TaskSpec, *args: Any) -> None:
    with sent(spec.settings):
        _produce(ref, spec, *args)


def _produce(
    ref: weakref.ref[Producer],
    spec: TaskSpec,
    dataset: PickledDataset,
    make_client: Callable[[], Any],
    call_soon: Callable[..., Any],
    fetch: Fetch | None,
) -> None:
    # A weak reference, so that the thread does not keep the producer alive.
    failure: Failure | None = None
    client: Any = None
    try:
        node = dataset.node()
        if spec.lease is None and spec.options.mode in (ShardingPolicy.DYNAMIC, ShardingPolicy.DATA):
            client = make_client()
        number = 0
        done = Intervals(spec.done)
        for rows in _rows_of(node, spec, client, fetch):
            for begin, stop in done.missing(number, number + len(rows)):
                part = rows if stop - begin == len(rows) else rows.slice(begin - number, stop - number)
                producer = ref()
                if producer is None or not producer.wait_for_room():
                    return
                producer.count(part.nbytes)
                call_soon(_add, ref, begin, part)
                del producer
            number += len(rows)
            producer = ref()
            if producer is None or producer.is_stopped:
                return
            del producer
    except BaseException as error:
        error.add_note(f"raised while the data service produced elements, in its task {spec.id}")
        failure = Failure.of(error)
    finally:
        if client is not None:
            client.close(timeout=1)
    call_soon(_end, ref, failure)


def _add(ref: weakref.ref[Producer], first: int, rows: Rows) -> None:
    producer = ref()
    if producer is not None and not producer.is_stopped:
        producer.add(first, rows)


def _end(ref: weakref.ref[Producer], failure: Failure | None) -> None:
    producer = ref()
    if producer is not None and not producer.is_stopped:
        producer.end(failure)


def _rows_of(node: Node, spec: TaskSpec, client: Any, fetch: Fetch | None) -> Iterator[Rows]:
    primitive, caller = _planned(node, spec, client, fetch)
    interpreter = Interpreter(caller, budget_bytes=merged_options(node).memory_budget_bytes)
    return rows_by(interpreter, primitive, StreamPosition(spec.draws.epoch, []))


def _planned(node: Node, spec: TaskSpec, client: Any, fetch: Fetch | None) -> tuple[Primitive, Caller]:
    # The order does not depend on the worker, so that another can reproduce the same elements.
    options = Options(deterministic=True)
    if spec.draws.seeds is not None:
        node = with_drawn(node, spec.draws.seeds)
    if spec.options.mode is ShardingPolicy.OFF:
        # Each copy has a different order.
        node = with_drawn(node, [seed + spec.index for seed in drawn_seeds(node)])
        seed = merged_options(node).seed
        options.seed = None if seed is None else seed + spec.index
    node = WithOptions(node, options)
    if spec.lease is not None:
        pieces = pieces_of(node)
        if pieces is None:
            raise ArgumentError("the dataset cannot be split on this worker, but it could be where it was registered")
        node = pieces.cut(*spec.lease)
    policy = _SHARED_OUT.get(spec.options.mode)
    if policy is not None:
        _, shares = autoshard(node, policy, spec.count, lambda names, number: first_elements(plan(names), number))
        node = shares[spec.index % len(shares)]
    if client is not None:
        return plan(node), _OnAllWorkers(client)
    return plan(node), local_caller(node, merged_options(node).num_threads, fetch)


class _OnAllWorkers(Submit):
    """A caller that submits calls as tasks to the present workers."""

    def __init__(self, client: Any) -> None:
        super().__init__(client, _AnyWorkers(tuple(workers_of(client))))


class _AnyWorkers(LiveWorkers):
    """Workers any of which may be lost, as others make its calls again."""

    def missing(self, connected: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return no worker, and continue without those that are gone, and with new ones if none is left."""
        if lost := super().missing(connected):
            self.drop(lost)
            if not self.present:
                self.add(list(connected))
        return []
