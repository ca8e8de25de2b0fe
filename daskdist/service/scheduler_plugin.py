"""The service on the scheduler: what happens is told to the dispatcher, and its commands are carried out."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections import defaultdict
from typing import Any, Final

from distributed import Scheduler
from distributed.comm import Comm, CommClosedError
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps

from daskdist.config import seconds
from daskdist.service.commands import (
    Command,
    DatasetEntry,
    Join,
    LoseConsumer,
    StartTask,
    StopTask,
    TellEnd,
    TellFailure,
    TellTasks,
    TellWaiting,
)
from daskdist.service.dispatcher import Dispatcher, Refused
from daskdist.service.messages import COMMAND_OPERATION, DISPATCHER_OPERATION, EVENT_OPERATION, receive, send
from daskdist.service.worker_plugin import NAME, ServiceOnWorker

logger: Final = logging.getLogger("daskdist")

_TICK_EVERY_S: Final = 1.0


class ServiceOnScheduler(SchedulerPlugin):  # type: ignore[misc]
    """Makes a scheduler the dispatcher of the data service."""

    name = NAME

    async def start(self, scheduler: Scheduler) -> None:
        """Take connections of consumers, and have all workers, present and future, produce elements."""
        self._scheduler = scheduler
        self.dispatcher = Dispatcher(time.monotonic, seconds("service.job-gc-timeout"))
        self._comms: dict[str, asyncio.Queue[Any]] = {}
        # The datasets that each worker has.
        self._sent: defaultdict[str, set[str]] = defaultdict(set)
        scheduler.handlers[DISPATCHER_OPERATION] = self._serve
        scheduler.stream_handlers[EVENT_OPERATION] = self._event
        self._ticking = asyncio.ensure_future(self._tick())
        await scheduler.register_worker_plugin(None, dumps(ServiceOnWorker()), name=NAME, idempotent=False)

    async def close(self) -> None:
        """Stop the clock."""
        self._ticking.cancel()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Have other workers take the tasks of one that is gone."""
        self._sent.pop(worker, None)
        self._carry_out(self.dispatcher.worker_left(worker))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_EVERY_S)
            self._carry_out(self.dispatcher.tick())

    def _event(self, event: bytes, worker: str) -> None:
        kind, *args = pickle.loads(event)
        if kind == "ready":
            self._carry_out(self.dispatcher.worker_joined(worker, self._scheduler.workers[worker].host))
        elif kind == "progress":
            self._carry_out(self.dispatcher.progressed(*args))
        elif kind == "done":
            self._carry_out(self.dispatcher.task_done(*args))
        elif kind == "away" and not self.dispatcher.knows(*args):
            # It was gone before the worker had heard of it.
            self._to_worker(worker, "lose_all", *args)

    async def _serve(self, comm: Comm) -> Any:
        names: set[str] = set()
        queue: asyncio.Queue[Any] = asyncio.Queue()
        writing = asyncio.ensure_future(_write(comm, queue))
        try:
            while True:
                kind, *args = await receive(comm)
                try:
                    self._request(kind, args, queue, names)
                except Refused as error:
                    queue.put_nowait(("refused", str(error)))
        except (CommClosedError, OSError):
            pass
        finally:
            writing.cancel()
            for name in names:
                self._comms.pop(name, None)
                self._carry_out(self.dispatcher.left(name))
            comm.abort()
        return Status.dont_reply

    def _request(self, kind: str, args: list[Any], queue: asyncio.Queue[Any], names: set[str]) -> None:
        dispatcher = self.dispatcher
        if kind == "hello":
            (dataset,) = args
            known = dispatcher.datasets.get(dataset)
            queue.put_nowait(("welcome", len(dispatcher.workers), known and known.facts))
        elif kind == "register":
            entry: DatasetEntry = args[0]
            dispatcher.register(entry)
            queue.put_nowait(("registered", entry.id))
        elif kind == "join":
            join: Join = args[0]
            self._comms[join.name] = queue
            names.add(join.name)
            self._carry_out(dispatcher.joined(join))
        elif kind == "read_all":
            self._carry_out(dispatcher.read_all(*args))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case StartTask(worker, spec):
                    has = self._sent[worker]
                    pickled = None if spec.dataset in has else self.dispatcher.datasets[spec.dataset].pickle
                    has.add(spec.dataset)
                    self._to_worker(worker, "start", spec, pickled)
                case StopTask(worker, task):
                    self._to_worker(worker, "stop", task)
                case LoseConsumer(worker, task, consumer):
                    self._to_worker(worker, "lose", task, consumer)
                case TellTasks(consumer, tasks):
                    self._to_consumer(consumer, "tasks", tasks)
                case TellEnd(consumer, was_over):
                    self._to_consumer(consumer, "end", was_over)
                case TellFailure(consumer, message, error):
                    self._to_consumer(consumer, "failed", message, error)
                case TellWaiting(consumer, message):
                    self._to_consumer(consumer, "waiting", message)

    def _to_worker(self, worker: str, *command: Any) -> None:
        if worker in self._scheduler.stream_comms:
            self._scheduler.worker_send(worker, {"op": COMMAND_OPERATION, "command": pickle.dumps(command)})

    def _to_consumer(self, consumer: str, *message: Any) -> None:
        queue = self._comms.get(consumer)
        if queue is not None:
            queue.put_nowait(message)


async def _write(comm: Comm, queue: asyncio.Queue[Any]) -> None:
    while True:
        await send(comm, await queue.get())
