"""The service on the scheduler: it reports events to the dispatcher and carries out its commands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import time
from collections import defaultdict
from typing import Any, Final

import dask.config
from distributed import Scheduler
from distributed.comm import Comm, CommClosedError
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps
from tornado.ioloop import PeriodicCallback

from daskdist.config import seconds, setting
from daskdist.dashboard.scheduler_plugin import dashboard_of
from daskdist.execute.paused_workers import MOST_LOSSES
from daskdist.service.dispatcher.commands import (
    Command,
    Hello,
    Jobs,
    JobsAsked,
    Join,
    LoseConsumer,
    Refusal,
    Register,
    Registered,
    StartTask,
    StopTask,
    Welcome,
)
from daskdist.service.dispatcher.dispatcher import Dispatcher, Refused
from daskdist.service.dispatcher.journal import Journal
from daskdist.service.dispatcher.status import JobStatus, job_status
from daskdist.service.messages import (
    COMMAND_OPERATION,
    DISPATCHER_OPERATION,
    EVENT_OPERATION,
    PRESENT_OPERATION,
    REPORT_OPERATION,
    receive,
    send,
)
from daskdist.service.worker.worker_plugin import NAME, ServiceOnWorker

logger: Final = logging.getLogger("daskdist")

_TICK_EVERY_S: Final = 1.0
_REPORT_WITHIN_S: Final = 5.0
# The delay before a failed write of the state is tried again.
_WRITE_AGAIN_S: Final = 1.0


class ServiceOnScheduler(SchedulerPlugin):  # type: ignore[misc]
    """A plugin that makes a scheduler the dispatcher of the data service.

    Parameters
    ----------
    work_dir
        The directory in which the state is kept for another scheduler. If None, the scheduler's setting
        ``daskdist.service.work-dir``; the state is not kept if that is None, too.
    gc_timeout_s
        The time for which a job without consumers is kept; if None, the setting ``daskdist.service.job-gc-timeout``.
    """

    name = NAME

    def __init__(self, work_dir: str | None = None, gc_timeout_s: float | None = None) -> None:
        self._work_dir = work_dir
        self._gc_timeout_s = gc_timeout_s
        # What keeps the state, once the service is there.
        self._keeping: asyncio.Task[None] | None = None

    async def start(self, scheduler: Scheduler) -> None:
        """Accept connections of consumers, and set up all present and future workers to produce elements.

        Do nothing if the scheduler has the service already, for example from another program that started it at the
        same time.
        """
        if DISPATCHER_OPERATION in scheduler.handlers:
            return
        self._scheduler = scheduler
        gc_timeout_s = seconds("service.job-gc-timeout") if self._gc_timeout_s is None else self._gc_timeout_s
        work_dir = setting("service.work-dir") if self._work_dir is None else self._work_dir
        self._journal = Journal(work_dir) if work_dir else None
        self.dispatcher = Dispatcher(
            time.monotonic,
            gc_timeout_s,
            seconds("service.reconnect-timeout"),
            is_kept=self._journal is not None,
            most_losses=dask.config.get(MOST_LOSSES),
        )
        if self._journal is not None:
            self.dispatcher.restore(self._journal.load())
        if NAME not in scheduler.plugins:
            # Dask adds a plugin only after its start, and meanwhile another program may have started one as well.
            scheduler.add_plugin(self, name=NAME)
        scheduler.handlers[DISPATCHER_OPERATION] = self._serve
        self._comms: dict[str, asyncio.Queue[Any]] = {}
        # By worker: the datasets that were sent to it.
        self._sent: defaultdict[str, set[str]] = defaultdict(set)
        self._is_closing = False
        # The commands that wait until the changes before them are written.
        self._commands: list[Command] = []
        self._has_changes = asyncio.Event()
        scheduler.handlers[PRESENT_OPERATION] = lambda: True
        scheduler.stream_handlers[EVENT_OPERATION] = self._event
        self._ticking = PeriodicCallback(lambda: self._carry_out(self.dispatcher.tick()), 1000 * _TICK_EVERY_S)
        self._ticking.start()
        self._keeping = asyncio.ensure_future(self._keep())
        dashboard_of(scheduler).service = self.dispatcher
        await scheduler.register_worker_plugin(None, dumps(ServiceOnWorker()), name=NAME, idempotent=False)

    async def before_close(self) -> None:
        """Write the state before the scheduler closes the connections of consumers and workers."""
        if self._keeping is None:
            # The scheduler could not start, or has the service of another plugin.
            return
        self._is_closing = True
        self._ticking.stop()
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        await self._write_changes()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """Give the tasks of a removed worker to others."""
        self._sent.pop(worker, None)
        if not self._is_closing:
            # Dask's last event of a worker says whether it was asked to leave.
            events = scheduler.get_events(worker)
            is_expected = bool(events) and isinstance(events[-1][1], dict) and bool(events[-1][1].get("expected"))
            self._carry_out(self.dispatcher.worker_left(worker, is_expected=is_expected))

    async def _keep(self) -> None:
        # Commands are sent only after the changes they rest on are written, so that a new scheduler knows them.
        while True:
            await self._has_changes.wait()
            self._has_changes.clear()
            commands, self._commands = self._commands, []
            while not await self._write_changes():
                await asyncio.sleep(_WRITE_AGAIN_S)
            self._carry_out_now(commands)

    async def _write_changes(self) -> bool:
        changes = self.dispatcher.changes()
        if self._journal is None or not changes:
            return True
        writing = asyncio.ensure_future(asyncio.to_thread(self._journal.write, changes))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # The service is closing: this write must not end after the last one, and replace newer values.
            await asyncio.wait([writing])
            if writing.exception() is not None:
                self.dispatcher.note_unwritten(changes)
            raise
        except OSError as error:
            logger.error("the data service waits, as it cannot keep its state in %s: %s", self._journal.work_dir, error)
            self.dispatcher.note_unwritten(changes)
            return False
        return True

    def _event(self, event: bytes, worker: str) -> None:
        # The tasks of a worker that was removed have new attempts, which its last messages are not about.
        if worker in self._scheduler.workers:
            self._carry_out(self.dispatcher.heard(pickle.loads(event), worker, self._scheduler.workers[worker].host))

    async def _serve(self, comm: Comm) -> Any:
        names: set[str] = set()
        queue: asyncio.Queue[Any] = asyncio.Queue()
        writing = asyncio.ensure_future(_write(comm, queue))
        try:
            while True:
                message = await receive(comm)
                try:
                    if isinstance(message, JobsAsked):
                        queue.put_nowait(Jobs(list(self.dispatcher.workers), await self._statuses()))
                    else:
                        self._request(message, queue, names)
                except Refused as error:
                    queue.put_nowait(Refusal(str(error)))
        except (CommClosedError, OSError):
            pass
        finally:
            writing.cancel()
            for name in names:
                # The consumer may have reconnected.
                if self._comms.get(name) is queue:
                    del self._comms[name]
                    if not self._is_closing:
                        self._carry_out(self.dispatcher.left(name))
            comm.abort()
        return Status.dont_reply

    async def _statuses(self) -> list[JobStatus]:
        asking = self._scheduler.broadcast(
            msg={"op": REPORT_OPERATION}, workers=list(self.dispatcher.workers), on_error="ignore"
        )
        reports: dict[str, Any] = {}
        # Leave out workers that do not answer.
        with contextlib.suppress(asyncio.TimeoutError):
            for report in (await asyncio.wait_for(asking, _REPORT_WITHIN_S)).values():
                reports.update(report)
        return [job_status(iteration, reports) for iteration in self.dispatcher.iterations()]

    def _request(self, message: Any, queue: asyncio.Queue[Any], names: set[str]) -> None:
        dispatcher = self.dispatcher
        match message:
            case Hello(dataset):
                known = dispatcher.datasets.get(dataset)
                queue.put_nowait(Welcome(known and known.facts, self._journal is not None))
            case Register(entry):
                dispatcher.register(entry)
                queue.put_nowait(Registered(entry.id))
            case Join(name):
                self._comms[name] = queue
                names.add(name)
                self._carry_out(dispatcher.heard(message))
            case _:
                self._carry_out(dispatcher.heard(message))

    def _carry_out(self, commands: list[Command]) -> None:
        if self._journal is None:
            self._carry_out_now(commands)
        else:
            self._commands += commands
            self._has_changes.set()

    def _carry_out_now(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, StartTask):
                has = self._sent[command.worker]
                if command.spec.dataset not in has:
                    command = command._replace(dataset=self.dispatcher.datasets[command.spec.dataset].pickle)
                has.add(command.spec.dataset)
            if not isinstance(command, StartTask | StopTask | LoseConsumer):
                if (queue := self._comms.get(command.consumer)) is not None:
                    queue.put_nowait(command)
            elif command.worker in self._scheduler.stream_comms:
                message = {"op": COMMAND_OPERATION, "command": pickle.dumps(command)}
                self._scheduler.worker_send(command.worker, message)


async def _write(comm: Comm, queue: asyncio.Queue[Any]) -> None:
    while True:
        await send(comm, await queue.get())
