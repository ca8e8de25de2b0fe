"""The service on a worker: its producers, and the connections of consumers."""

from __future__ import annotations

import contextlib
import pickle
import uuid
from functools import partial
from typing import Any, Final

from distributed import Client, Worker
from distributed.comm import Comm
from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin
from tornado.ioloop import PeriodicCallback

from daskdist.errors import ArgumentError
from daskdist.execute.callers.fetch import WorkerFetch
from daskdist.execute.messages.failure import Failure
from daskdist.execute.messages.link import Link
from daskdist.service.compression import compress
from daskdist.service.dispatcher.commands import (
    ConsumerAway,
    LoseConsumer,
    Progress,
    TaskOver,
    TaskSpec,
    WorkerReady,
)
from daskdist.service.messages import COMMAND_OPERATION, EVENT_OPERATION, READ_OPERATION, REPORT_OPERATION
from daskdist.service.worker.pickled_dataset import PickledDataset
from daskdist.service.worker.producer import Producer
from daskdist.service.worker.producers import Producers

NAME: Final = "daskdist-service"
# The interval of reports to the dispatcher, which limits the loss if a worker and a consumer are lost together.
_TICK_EVERY_S: Final = 0.25


class ServiceOnWorker(WorkerPlugin):  # type: ignore[misc]
    """A plugin that makes a worker produce the elements of tasks."""

    name = NAME

    def setup(self, worker: Worker) -> None:
        """Accept commands of the dispatcher and connections of consumers."""
        self._worker = worker
        self._loop = worker.loop.asyncio_loop
        self.tasks = Producers(self._producer)
        # By consumer: the name of this end of the link to it, and the link, whose connections may break, until the
        # consumer opens another one or the dispatcher says that it is gone.
        self._links: dict[str, tuple[str, Link]] = {}
        worker.handlers[READ_OPERATION] = self._serve
        worker.handlers[REPORT_OPERATION] = self.tasks.reports
        worker.stream_handlers[COMMAND_OPERATION] = self._command
        self._ticking = PeriodicCallback(self._tick, 1000 * _TICK_EVERY_S)
        self._ticking.start()
        self._send_event(WorkerReady())

    def teardown(self, worker: Worker) -> None:
        """End all producers."""
        self._ticking.stop()
        for task in list(self.tasks.producers):
            self.tasks.stop(task)

    def _send_event(self, event: Any) -> None:
        with contextlib.suppress(Exception):
            # `batched_send` would drop messages that are sent before the worker is registered.
            self._worker.batched_stream.send({"op": EVENT_OPERATION, "event": pickle.dumps(event)})

    def _tick(self) -> None:
        self.tasks.tick()
        for consumer, (_, link) in self._links.items():
            if link.batches is None:
                self._send_event(ConsumerAway(consumer))

    # --- commands of the dispatcher ---

    def _command(self, command: bytes) -> None:
        message = pickle.loads(command)
        if isinstance(message, LoseConsumer) and message.task is None:
            if message.consumer in self._links and self._links[message.consumer][1].batches is not None:
                # It has connected again.
                return
            self._links.pop(message.consumer, None)
        producer = self.tasks.command(message)
        if producer is not None:
            producer.start()

    def _producer(self, spec: TaskSpec, dataset: PickledDataset) -> Producer:
        fetch = WorkerFetch(self._worker)
        return Producer(spec, dataset, self._client, self._call_soon, self._send, self._note, fetch)

    def _note(self, event: Progress | TaskOver) -> None:
        self._send_event(event)
        if isinstance(event, TaskOver):
            self.tasks.stop(event.task)

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

    def _send(self, consumer: str, message: Any) -> None:
        if consumer in self._links:
            _, link = self._links[consumer]
            link.append(message)
            link.flush()

    async def _serve(self, comm: Comm, consumer: str, end: str, num_arrived: int, compressions: tuple[str, ...]) -> Any:
        compress(comm, compressions)
        if consumer in self._links and self._links[consumer][0] == end:
            self._links[consumer][1].acknowledge(num_arrived)
        else:
            # Another link of the consumer, or one to a process that is gone, or whose first answer was lost.
            self._links[consumer] = uuid.uuid4().hex, Link(partial(self._receive, consumer))
        end, link = self._links[consumer]
        try:
            await comm.write((link.state.num_arrived, end))
            # Dask's messages may be compressed.
            await link.run(comm, is_direct=False, unsendable=_unsendable)
        except Exception:
            # The connection is broken, or the consumer was told what does not pickle.
            pass
        finally:
            comm.abort()
        return Status.dont_reply

    def _receive(self, consumer: str, messages: list[Any]) -> None:
        for message in messages:
            self.tasks.message(consumer, message)


def _unsendable(error: BaseException) -> Failure:
    # Another connection would not change that elements do not pickle.
    return Failure.of(ArgumentError(f"serve: elements cannot be sent to a consumer: {type(error).__name__}: {error}"))
