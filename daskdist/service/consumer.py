"""One consumer: it learns from the dispatcher which workers to read from, and reads from all of them at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

from distributed.comm import Comm, connect
from distributed.protocol.pickle import dumps
from distributed.utils import LoopRunner

from daskdist.config import seconds
from daskdist.core.block import Rows
from daskdist.core.finalizer import Finalizer
from daskdist.core.primitive import Exhausted, NotReady
from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.messages.failure import Failure
from daskdist.execute.messages.outbox import Outbox, unpacked
from daskdist.service.address import ServiceAddress
from daskdist.service.commands import DatasetEntry, Join
from daskdist.service.intervals import Intervals
from daskdist.service.messages import DISPATCHER_OPERATION, READ_OPERATION, receive, send
from daskdist.service.worker_plugin import NAME

logger: Final = logging.getLogger("daskdist")

# A worker that does not answer is not waited for longer.
_LEAVE_S: Final = 5.0
_numbers: Final = itertools.count()


async def connected(address: ServiceAddress) -> Comm:
    """Connect to the dispatcher, and begin the service on a scheduler that has not got it.

    Raises
    ------
    ClusterError
        There is no scheduler, or it does not take the service from a program.
    """
    # What registers a plugin, a scheduler has to unpickle.
    from daskdist.service.scheduler_plugin import ServiceOnScheduler

    within_s = seconds("timeouts.connect")
    try:
        comm = await connect(address.address, timeout=within_s, **address.connection_args())
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"no scheduler answers at {address.address} within {within_s:g} s ({type(error).__name__}: {error}). Is it "
            "running, and is this its address? `dask scheduler` prints it"
        ) from error
    try:
        plugin = dumps(ServiceOnScheduler())
        await comm.write(
            {"op": "register_scheduler_plugin", "plugin": plugin, "name": NAME, "idempotent": True, "reply": True}
        )
        answer = await comm.read()
        if isinstance(answer, dict) and answer.get("status") == "uncaught-error":
            await _check_preloaded(comm, answer)
        await comm.write({"op": DISPATCHER_OPERATION, "reply": False})
    except BaseException:
        comm.abort()
        raise
    return comm


async def _check_preloaded(comm: Comm, answer: dict[str, Any]) -> None:
    await comm.write({"op": "daskdist_service_present", "reply": True})
    if await comm.read() is not True:
        raise ClusterError(
            f"the scheduler has no data service, and does not take it from a program ({answer.get('exception_text')}); "
            "start it with `dask scheduler --preload daskdist.preload`, in an environment that has daskdist"
        )


class _Shared:
    """What the event loop and the thread that takes elements have in common."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        # Parts that have come: the task, the number of the first element, and the elements.
        self.parts: deque[tuple[str, int, Rows]] = deque()
        # The tasks from which elements are taken in turn, and the next one; in any order where there are none.
        self.turns: list[str] = []
        self.turn = 0
        # What was handed out by the last call, and is done with at the next.
        self.in_hand: tuple[str, int, int] | None = None
        self.is_over = False
        self.failure: BaseException | None = None

    def place(self) -> int | None:
        """Return the place of the part to take elements of; None where that has not come."""
        if not self.turns:
            return 0 if self.parts else None
        task = self.turns[self.turn % len(self.turns)]
        return next((place for place, part in enumerate(self.parts) if part[0] == task), None)

    def taken(self, place: int, most: int) -> Rows:
        """Return elements of the part at a place, at most so many."""
        task, first, rows = self.parts[place]
        if self.turns:
            self.turn += 1
            most = 1
        if len(rows) > most:
            self.parts[place] = task, first + most, rows.slice(most, len(rows))
            rows = rows.slice(0, most)
        else:
            del self.parts[place]
        self.in_hand = task, first, first + len(rows)
        return rows

    def end(self, failure: BaseException | None = None) -> None:
        """Note that nothing more comes."""
        with self.changed:
            self.is_over = True
            self.failure = self.failure or failure
            self.changed.notify_all()


class ServiceReader:
    """The elements of one iteration of a served dataset.

    Parameters
    ----------
    address
        Where the service is.
    dataset_id
        The name of the dataset in the service.
    entry
        Returns what is registered where the service does not have the dataset; None where nothing is.
    join
        Returns what is asked for: ``join(name, num_workers, host)``.
    joining
        What producers are told of this consumer: arguments of `daskdist.service.delivery.Consumer`.
    in_turn
        Whether one element of each task is taken in turn; else whatever has come first.
    """

    def __init__(
        self,
        address: ServiceAddress,
        dataset_id: str,
        entry: Callable[[], DatasetEntry] | None,
        join: Callable[[str, int, str], Join],
        joining: dict[str, Any],
        *,
        in_turn: bool = False,
    ) -> None:
        name = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}-{next(_numbers)}"
        self._shared = shared = _Shared()
        self._loop = _event_loop()
        self._connection = connection = _Connection(
            name, address, dataset_id, entry, join, joining, shared, in_turn=in_turn
        )
        self._loop.call_soon_threadsafe(connection.start)
        self.close = Finalizer(self, _close, self._loop, connection, shared)

    def take(self, num_rows: int, *, wait: bool) -> Rows:
        """Return the next elements, at most ``num_rows``; those of the last call are done with.

        Raises
        ------
        Exhausted
            There are no more.
        NotReady
            Not to wait, and none are there yet.
        """
        self._acknowledge()
        shared = self._shared
        with shared.changed:
            if wait:
                shared.changed.wait_for(lambda: shared.place() is not None or shared.is_over)
            place = shared.place()
            if place is not None:
                return shared.taken(place, num_rows)
        if not shared.is_over:
            raise NotReady
        if shared.failure is not None:
            failure, shared.failure = shared.failure, None
            raise failure
        raise Exhausted

    def take_exactly(self, num_rows: int) -> Rows:
        """Refuse to go on from a position: what was read has gone.

        Raises
        ------
        ArgumentError
            Always.
        """
        raise ArgumentError(
            "a dataset from the service cannot be read again from a position; a consumer that begins anew under the "
            "same job_name gets what nobody has read"
        )

    def _acknowledge(self) -> None:
        in_hand, self._shared.in_hand = self._shared.in_hand, None
        if in_hand is not None:
            self._loop.call_soon_threadsafe(self._connection.acknowledge, *in_hand)


def _close(loop: asyncio.AbstractEventLoop, connection: _Connection, shared: _Shared) -> None:
    # What the local pipeline has taken is done with; the rest goes to others.
    with shared.changed:
        in_hand, shared.in_hand = shared.in_hand, None
        shared.is_over = True
        shared.parts.clear()
        shared.changed.notify_all()
    with contextlib.suppress(RuntimeError):
        if in_hand is not None:
            loop.call_soon_threadsafe(connection.acknowledge, *in_hand)
        loop.call_soon_threadsafe(connection.stop)


_runner: LoopRunner | None = None
_starting: Final = threading.Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all consumers of this process."""
    global _runner
    with _starting:
        if _runner is None:
            _runner = LoopRunner(asynchronous=False)
            _runner.start()
        loop: asyncio.AbstractEventLoop = _runner.loop.asyncio_loop
    return loop


def _forget_loop() -> None:
    # A process that was forked has no thread of its parent.
    global _runner
    _runner = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_loop)


class _Connection:
    """The connections of one consumer, in the event loop."""

    def __init__(
        self,
        name: str,
        address: ServiceAddress,
        dataset_id: str,
        entry: Callable[[], DatasetEntry] | None,
        join: Callable[[str, int, str], Join],
        joining: dict[str, Any],
        shared: _Shared,
        *,
        in_turn: bool,
    ) -> None:
        self._in_turn = in_turn
        self._name = name
        self._address = address
        self._dataset_id = dataset_id
        self._entry = entry
        self._join = join
        self._joining = joining
        self._shared = shared
        self._comm: Comm | None = None
        self._task: asyncio.Task[None] | None = None
        # By the address of a worker.
        self._links: dict[str, _Link] = {}
        # By the id of a task: the attempt, the worker.
        self._tasks: dict[str, tuple[int, str]] = {}
        self._ended: set[str] = set()
        # Of each task, the elements that came and are not acknowledged, and those that are.
        self._held: defaultdict[str, Intervals] = defaultdict(Intervals)
        self._done: defaultdict[str, Intervals] = defaultdict(Intervals)
        self._num_told = 0

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """Leave the iteration."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            comm = self._comm = await connected(self._address)
            await self._enter(comm)
            while True:
                kind, *args = await receive(comm)
                if getattr(self, f"_on_{kind}")(*args):
                    break
        except asyncio.CancelledError:
            pass
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, ClusterError):
                error = ClusterError(f"lost the scheduler {self._address.address}, which has the data service: {error}")
            self._shared.end(error)
        finally:
            for link in list(self._links.values()):
                link.leave()
            if self._comm is not None:
                self._comm.abort()

    async def _enter(self, comm: Comm) -> None:
        await send(comm, ("hello", self._dataset_id))
        _, num_workers, facts = await receive(comm)
        if facts is None and self._entry is not None:
            await send(comm, ("register", await asyncio.to_thread(self._entry)))
            kind, *args = await receive(comm)
            if kind == "refused":
                raise ArgumentError(args[0])
        host = comm.local_address.rpartition("://")[2].rpartition(":")[0]
        join = await asyncio.to_thread(self._join, self._name, num_workers, host)
        await send(comm, ("join", join))

    def _on_refused(self, message: str) -> bool:
        self._shared.end(ArgumentError(message))
        return True

    def _on_failed(self, message: str, error: Failure | None) -> bool:
        self._shared.end(error.error() if error is not None else ClusterError(message))
        return True

    def _on_waiting(self, message: str) -> None:
        logger.warning("a dataset from the service has waited for 30 s: %s", message)

    def _on_end(self, was_over: bool) -> bool:
        if was_over:
            logger.warning(
                "this iteration of the job was over before it was asked for, and gives no elements; use another "
                "job_name to read the dataset again"
            )
        self._shared.end()
        return True

    def _on_tasks(self, tasks: tuple[tuple[str, int, str], ...]) -> None:
        self._num_told += 1
        now = {task: (attempt, worker) for task, attempt, worker in tasks}
        for task, (attempt, worker) in now.items():
            if self._tasks.get(task) != (attempt, worker):
                self._ended.discard(task)
                joining = self._joining | {"name": self._name}
                held, done = list(self._held[task]), list(self._done[task])
                self._link(worker).append(("join", task, attempt, joining, held, done))
        self._tasks = now
        if self._in_turn:
            with self._shared.changed:
                self._shared.turns = sorted(now, key=_index_of)
                self._shared.changed.notify_all()
        self._tell_if_all_read()

    def _link(self, worker: str) -> _Link:
        link = self._links.get(worker)
        if link is None:
            link = self._links[worker] = _Link(worker, self._name, self._address, self._got, self._lost)
        return link

    def _lost(self, link: _Link) -> None:
        # The dispatcher knows better than the connection whether the worker is gone, and where its tasks go.
        if self._links.get(link.worker) is link:
            del self._links[link.worker]

    def _got(self, message: Any) -> None:
        kind, task, *args = message
        if kind == "rows":
            first, rows = args
            self._held[task].add(first, first + len(rows))
            with self._shared.changed:
                self._shared.parts.append((task, first, rows))
                self._shared.changed.notify_all()
        elif kind == "end":
            self._ended.add(task)
            self._tell_if_all_read()
        elif kind == "recall":
            self._give_back(task)
        elif kind == "failed":
            self._shared.end(args[0].error())
            self.stop()

    def _give_back(self, task: str) -> None:
        with self._shared.changed:
            pairs = [(first, first + len(rows)) for each, first, rows in self._shared.parts if each == task]
            rest = [part for part in self._shared.parts if part[0] != task]
            self._shared.parts.clear()
            self._shared.parts.extend(rest)
        self._held[task].difference_update(pairs)
        self._to_producer(task, "return", pairs)

    def acknowledge(self, task: str, first: int, stop: int) -> None:
        """Note that elements are done with."""
        self._held[task].remove(first, stop)
        self._done[task].add(first, stop)
        self._to_producer(task, "ack", [(first, stop)])

    def _to_producer(self, task: str, kind: str, pairs: list[tuple[int, int]]) -> None:
        if task in self._tasks:
            link = self._links.get(self._tasks[task][1])
            if link is not None:
                link.append((kind, task, pairs))

    def _tell_if_all_read(self) -> None:
        if self._tasks and self._ended.issuperset(self._tasks) and self._comm is not None:
            message = ("read_all", self._name, self._num_told)
            sending = asyncio.ensure_future(send(self._comm, message))
            sending.add_done_callback(lambda done: done.cancelled() or done.exception())


def _index_of(task: str) -> int:
    return int(task.rpartition("/")[2])


class _Link:
    """The connection of a consumer to one worker."""

    def __init__(
        self,
        worker: str,
        name: str,
        address: ServiceAddress,
        got: Callable[[Any], None],
        lost: Callable[[_Link], None],
    ) -> None:
        self.worker = worker
        self._got = got
        self._lost = lost
        self._outbox: Outbox | None = None
        self._early: list[Any] = []
        self._task = asyncio.ensure_future(self._run(name, address))

    def append(self, message: Any) -> None:
        """Send a message."""
        if self._outbox is None:
            self._early.append(message)
        else:
            self._outbox.append(message)
            self._outbox.kick()

    def leave(self) -> None:
        """Close the connection once the worker has what was sent to it; it does so itself."""
        self.append(("leave", None))
        asyncio.get_running_loop().call_later(_LEAVE_S, self._task.cancel)

    async def _run(self, name: str, address: ServiceAddress) -> None:
        comm: Comm | None = None
        writing: asyncio.Future[None] | None = None
        try:
            comm = await connect(self.worker, timeout=seconds("timeouts.connect"), **address.connection_args())
            await comm.write({"op": READ_OPERATION, "reply": False, "consumer": name})
            outbox = self._outbox = Outbox(comm)
            for message in self._early:
                outbox.append(message)
            outbox.kick()
            writing = asyncio.ensure_future(outbox.write_all())
            while True:
                for message in unpacked(await comm.read()):
                    self._got(message)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            if writing is not None:
                writing.cancel()
            if comm is not None:
                comm.abort()
            self._lost(self)
