"""One consumer, which learns from the dispatcher which workers to read from and reads from all of them at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

from distributed.comm import Comm

from daskdist.config import seconds
from daskdist.core.block import Rows
from daskdist.core.finalizer import Finalizer
from daskdist.core.primitive import Exhausted, NotReady
from daskdist.errors import ArgumentError, ClusterError, RepeatedLossError
from daskdist.service.address import ServiceAddress
from daskdist.service.consumer.dispatcher_connection import connected, event_loop
from daskdist.service.consumer.read_ahead_limit import ReadAheadLimit
from daskdist.service.consumer.reading import Arrived, Reading
from daskdist.service.consumer.worker_connection import WorkerConnection
from daskdist.service.dispatcher.commands import (
    AllRead,
    DatasetEntry,
    GivenUp,
    Hello,
    IterationOver,
    Join,
    Leave,
    RecordedAsUsed,
    Refusal,
    Register,
    TasksToRead,
    WaitsFor,
    Welcome,
)
from daskdist.service.messages import receive, send
from daskdist.service.worker.task_messages import OfTask
from daskdist.waiting import wait_intervals

logger: Final = logging.getLogger("daskdist")

# How long to wait for an answer of the scheduler.
_LEAVE_S: Final = 5.0
# The interval between attempts to reach a lost scheduler.
_CONNECT_AGAIN_S: Final = 0.5
_numbers: Final = itertools.count()


class ServiceReader:
    """The elements of one iteration of a served dataset.

    Parameters
    ----------
    address
        The address of the service.
    dataset_id
        The id of the dataset in the service.
    entry
        Returns the entry to register if the service does not know the dataset; None if it must know it.
    join
        Returns the request of the consumer: ``join(name, host)``.
    joining
        The arguments of `daskdist.service.worker.delivery.Consumer` that producers are sent.
    most
        The most elements that may be on their way, or here and unused; None for as many as the program uses soon.
    in_turn
        Whether one element of each task is taken in turn; otherwise elements are taken in order of arrival.
    compression
        As in `daskdist.service.compression.readable`.
    """

    def __init__(
        self,
        address: ServiceAddress,
        dataset_id: str,
        entry: Callable[[], DatasetEntry] | None,
        join: Callable[[str, str], Join],
        joining: dict[str, Any],
        *,
        most: int | None,
        in_turn: bool,
        compression: str | None,
    ) -> None:
        name = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}-{next(_numbers)}"
        self._arrived = arrived = Arrived()
        self._read_ahead_limit = limit = ReadAheadLimit(most)
        self._loop = event_loop()
        self._process = os.getpid()
        self._connection = connection = _Connection(
            name,
            address,
            dataset_id,
            entry,
            join,
            joining | {"name": name},
            arrived,
            limit.on_the_way,
            in_turn=in_turn,
            is_limit=most is not None,
            compression=compression,
        )
        # An interrupt may come at any line: nothing is read that nobody can end.
        self.close = Finalizer(self, _close, self._loop, connection, arrived)
        self._loop.call_soon_threadsafe(connection.start)

    def take(self, num_rows: int, *, wait: bool) -> Rows:
        """Return the next elements, at most ``num_rows``; ``wait`` implies that all earlier ones have been used.

        Raises
        ------
        Exhausted
            There are no more elements.
        NotReady
            No elements have arrived, and ``wait`` is False.
        ClusterError
            This process was forked from the one that began to read, so both would get the same elements.
        """
        if os.getpid() != self._process:
            raise ClusterError(
                "this iterator of a served dataset belongs to the process that this one was forked from; iterate over "
                "the dataset here"
            )
        arrived, limit = self._arrived, self._read_ahead_limit
        if wait:
            limit.waits()
            with arrived.changed:
                in_hand = arrived.done_with()
            if in_hand:
                self._loop.call_soon_threadsafe(self._connection.use, in_hand, limit.on_the_way)
        num_rows = min(num_rows, limit.allowed(wait=wait))
        if num_rows < 1:
            raise NotReady
        with arrived.changed:
            if wait:
                waited_for = "an element from the data service"
                for within_s in wait_intervals(waited_for, "timeouts.data", progress=lambda: arrived.num_signs):
                    if arrived.changed.wait_for(lambda: arrived.place() is not None or arrived.is_over, within_s):
                        break
            place = arrived.place()
            if place is not None:
                rows = arrived.take(place, num_rows)
                limit.took(len(rows), wait=wait)
                return rows
        if not arrived.is_over:
            raise NotReady
        if arrived.failure is not None:
            failure, arrived.failure = arrived.failure, None
            raise failure
        raise Exhausted

    def take_exactly(self, num_rows: int) -> Rows:
        """Refuse to resume from a position: elements that were read are not kept.

        Raises
        ------
        ArgumentError
            The method was called.
        """
        raise ArgumentError(
            "a dataset from the service cannot be resumed from a position; a consumer that starts again with the "
            "same job_name gets the elements that no consumer has read"
        )


def _close(loop: asyncio.AbstractEventLoop, connection: _Connection, arrived: Arrived) -> None:
    # The elements that the local pipeline took count as used; the rest go to other consumers.
    with arrived.changed:
        in_hand = arrived.done_with()
        arrived.is_over = True
        arrived.parts.clear()
        arrived.changed.notify_all()
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(connection.use, in_hand, 0)
        loop.call_soon_threadsafe(connection.stop)
    if not threading.main_thread().is_alive():
        # The program is ending, and has already stopped the event loop.
        connection.has_left.wait(1)


class _Connection:
    """The connections of one consumer, in the event loop."""

    def __init__(
        self,
        name: str,
        address: ServiceAddress,
        dataset_id: str,
        entry: Callable[[], DatasetEntry] | None,
        join: Callable[[str, str], Join],
        joining: dict[str, Any],
        arrived: Arrived,
        ahead: int,
        *,
        in_turn: bool,
        is_limit: bool,
        compression: str | None,
    ) -> None:
        self._name = name
        self._address = address
        self._dataset_id = dataset_id
        self._entry = entry
        self._join = join
        self._arrived = arrived
        self._compression = compression
        self._reading = Reading(
            joining, arrived, self._to_worker, self._read_all, ahead, in_turn=in_turn, is_limit=is_limit
        )
        self._comm: Comm | None = None
        self._task: asyncio.Task[None] | None = None
        # By the address of a worker that has tasks.
        self._connections: dict[str, WorkerConnection] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._is_leaving = False
        self.has_left = threading.Event()
        self._has_joined = False
        # Whether a replacement of a lost scheduler can know this consumer.
        self._is_kept = False

    def start(self) -> None:
        """Start to read."""
        self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """Leave the iteration."""
        if self._task is not None and not self._is_leaving:
            self._task.cancel()

    def use(self, parts: Sequence[tuple[str, int, int]], ahead: int) -> None:
        """Record that elements were used, ``(task, first, stop)``, and how many may be on their way from now on."""
        self._reading.use(parts, ahead)

    async def _run(self) -> None:
        try:
            while not await self._session():
                pass
        except asyncio.CancelledError:
            pass
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, ClusterError):
                error = ClusterError(f"lost the scheduler {self._address.address}, which has the data service: {error}")
            self._arrived.end(error)
        finally:
            await self._leave()

    async def _session(self) -> bool:
        # Return True when the iteration is over for the consumer, and False when the connection was lost.
        comm = self._comm = await self._connected()
        try:
            await self._enter(comm)
            while not self._told(await receive(comm)):
                pass
            return True
        except OSError:
            if not self._is_kept:
                raise
            logger.warning("lost the scheduler %s, which has the data service; waiting for it", self._address.address)
            return False

    async def _connected(self) -> Comm:
        give_up_at = time.monotonic() + (seconds("service.reconnect-timeout") if self._is_kept else 0)
        while True:
            try:
                return await connected(self._address)
            except (ClusterError, OSError):
                if time.monotonic() >= give_up_at:
                    raise
                await asyncio.sleep(_CONNECT_AGAIN_S)

    async def _leave(self) -> None:
        # The dispatcher passes on which elements were used, also to workers that this consumer cannot reach.
        self._is_leaving = True
        try:
            if self._comm is not None:
                await asyncio.wait_for(self._send_leave(self._comm), _LEAVE_S)
        except (OSError, TimeoutError):
            pass
        finally:
            for connection in list(self._connections.values()):
                connection.task.cancel()
            if self._comm is not None:
                self._comm.abort()
            self.has_left.set()

    async def _send_leave(self, comm: Comm) -> None:
        await send(comm, Leave(self._name, self._reading.done()))
        await comm.close()

    async def _enter(self, comm: Comm) -> None:
        await send(comm, Hello(self._dataset_id))
        known: Welcome = await receive(comm)
        if known.facts is None and self._entry is not None:
            await send(comm, Register(await asyncio.to_thread(self._entry)))
            answer = await receive(comm)
            if isinstance(answer, Refusal):
                raise ArgumentError(answer.message)
        host = comm.local_address.rpartition("://")[2].rpartition(":")[0]
        join = await asyncio.to_thread(self._join, self._name, host)
        self._reading.begin_again()
        await send(comm, join._replace(is_again=self._has_joined))
        self._has_joined, self._is_kept = True, known.is_kept

    # --- the dispatcher ---

    def _told(self, message: Any) -> bool:
        # Return whether the iteration is over for the consumer.
        match message:
            case TasksToRead(_, tasks, number):
                self._reading.tasks(tasks, number)
                for worker in self._connections.keys() - self._reading.workers():
                    if not self._connections[worker].is_open:
                        self._connections.pop(worker).task.cancel()
                return False
            case RecordedAsUsed(_, tasks):
                self._reading.recorded(tasks)
                return False
            case WaitsFor(_, what):
                logger.warning("a dataset from the service has waited for 30 s: %s", what)
                return False
            case IterationOver(_, was_over) if not was_over and self._reading.was_given_more():
                # The consumer got elements of others meanwhile; the end is sent again after those.
                return False
            case IterationOver(_, was_over):
                if was_over:
                    logger.warning(
                        "this iteration of the job was over before it was requested, so it has no elements; use "
                        "another job_name to read the dataset again"
                    )
                self._arrived.end()
            case Refusal(why):
                self._arrived.end(ArgumentError(why))
            case GivenUp(_, why):
                self._arrived.end(RepeatedLossError(why))
            case _:
                raise TypeError(f"a consumer of the data service got {message!r:.200}")
        return True

    def _read_all(self, number: int) -> None:
        if self._comm is not None:
            sending = asyncio.ensure_future(send(self._comm, AllRead(self._name, number)))
            self._sending.add(sending)
            sending.add_done_callback(self._sent)

    def _sent(self, sending: asyncio.Task[None]) -> None:
        # A failure means that the dispatcher is gone, which `_session` notices.
        self._sending.discard(sending)
        if not sending.cancelled():
            sending.exception()

    # --- workers ---

    def _to_worker(self, worker: str, message: OfTask, over: Callable[[Any], None] | None) -> None:
        if self._is_leaving:
            return
        if worker not in self._connections:
            self._connections[worker] = WorkerConnection(
                worker, self._name, self._address, self._compression, self._got, self._failed
            )
        self._connections[worker].append(message, over)

    def _got(self, worker: str, message: Any) -> None:
        self._reading.got(worker, message)
        if self._arrived.failure is not None:
            self.stop()

    def _failed(self, error: Exception) -> None:
        self._arrived.end(error)
        self.stop()
