"""The service on a worker: its producers, and the connections of consumers."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from functools import partial
from typing import Any, Final

from distributed import Client, Worker
from distributed.comm import Comm
from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin

from daskdist.execute.messages.outbox import Outbox, unpacked
from daskdist.service.commands import TaskSpec
from daskdist.service.delivery import Consumer
from daskdist.service.intervals import Intervals
from daskdist.service.messages import COMMAND_OPERATION, EVENT_OPERATION, READ_OPERATION
from daskdist.service.producer import Producer

Pairs = list[tuple[int, int]]

NAME: Final = "daskdist-service"
# What was acknowledged is told to the dispatcher so often, in case a worker and a consumer are lost together.
_REPORT_EVERY_S: Final = 0.25


class ServiceOnWorker(WorkerPlugin):  # type: ignore[misc]
    """Makes a worker produce the elements of tasks."""

    name = NAME

    def setup(self, worker: Worker) -> None:
        """Take commands of the dispatcher and consumers' connections."""
        self._worker = worker
        self._loop = worker.loop.asyncio_loop
        self._datasets: dict[str, bytes] = {}
        self._producers: dict[str, Producer] = {}
        self._outboxes: dict[str, Outbox] = {}
        # Consumers that came before the task they read.
        self._early: dict[tuple[str, int], list[tuple[Consumer, Pairs]]] = {}
        worker.handlers[READ_OPERATION] = self._serve
        worker.stream_handlers[COMMAND_OPERATION] = self._command
        self._reporting = asyncio.ensure_future(self._report())
        self._tell(("ready",))

    def teardown(self, worker: Worker) -> None:
        """End all producers."""
        self._reporting.cancel()
        for producer in self._producers.values():
            producer.stop()
        self._producers.clear()

    def _tell(self, event: Any) -> None:
        with contextlib.suppress(Exception):
            # Not `batched_send`, which drops what is sent before the worker is registered.
            self._worker.batched_stream.send({"op": EVENT_OPERATION, "event": pickle.dumps(event)})

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            for producer in list(self._producers.values()):
                producer.tick()

    # --- commands of the dispatcher ---

    def _command(self, command: bytes) -> None:
        name, *args = pickle.loads(command)
        functions: dict[str, Any] = {"start": self._start, "stop": self._stop, "lose": self._lose}
        functions[name](*args)

    def _start(self, spec: TaskSpec, pickled: bytes | None) -> None:
        if pickled is not None:
            self._datasets[spec.dataset] = pickled
        earlier = self._producers.pop(spec.id, None)
        if earlier is not None:
            earlier.stop()
        producer = self._producers[spec.id] = Producer(
            spec,
            self._datasets[spec.dataset],
            self._client,
            self._call_soon,
            self._send,
            self._note,
        )
        for consumer, done in self._early.pop((spec.id, spec.attempt), []):
            producer.join(consumer, done)
        producer.start()

    def _note(self, what: str, spec: TaskSpec, *args: Any) -> None:
        self._tell((what, spec.id, spec.attempt, *args))
        if what == "done":
            self._producers.pop(spec.id).stop()

    def _stop(self, task: str) -> None:
        for key in [key for key in self._early if key[0] == task]:
            del self._early[key]
        producer = self._producers.pop(task, None)
        if producer is not None:
            producer.stop()

    def _lose(self, task: str, consumer: str) -> None:
        producer = self._producers.get(task)
        if producer is not None:
            producer.lose(consumer)

    def _client(self) -> Client:
        worker = self._worker
        return Client(
            worker.scheduler.address,
            loop=worker.loop,
            security=worker.security,
            set_as_default=False,
            direct_to_workers=True,
            name="daskdist-service",
        )

    def _call_soon(self, function: Any, *args: Any) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    # --- consumers ---

    def _send(self, consumer: str, message: Any, num_bytes: int = 0) -> None:
        outbox = self._outboxes.get(consumer)
        if outbox is not None:
            outbox.append(message, num_bytes)
            outbox.kick()

    async def _serve(self, comm: Comm, consumer: str) -> Any:
        outbox = self._outboxes[consumer] = Outbox(comm)
        ends = [asyncio.ensure_future(each) for each in (outbox.write_all(), self._receive(comm, consumer))]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in ends:
                each.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            if self._outboxes.get(consumer) is outbox:
                del self._outboxes[consumer]
                for producer in list(self._producers.values()):
                    producer.lose(consumer)
            comm.abort()
        return Status.dont_reply

    async def _receive(self, comm: Comm, consumer: str) -> None:
        act = {"ack": Producer.acknowledge, "return": Producer.take_back}
        while True:
            for kind, task, *args in unpacked(await comm.read()):
                if kind == "leave":
                    return
                if kind == "join":
                    self._join(task, *args)
                elif task in self._producers:
                    partial(act[kind], self._producers[task])(consumer, *args)

    def _join(self, task: str, attempt: int, joining: dict[str, Any], held: Pairs, done: Pairs) -> None:
        consumer = Consumer(**joining, held=Intervals(held))
        producer = self._producers.get(task)
        if producer is not None and producer.spec.attempt == attempt:
            producer.join(consumer, done)
        else:
            self._early.setdefault((task, attempt), []).append((consumer, done))
