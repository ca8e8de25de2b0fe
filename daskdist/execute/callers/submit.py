"""The caller that makes calls on a Dask cluster."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import wait as futures_wait
from dataclasses import replace
from functools import partial
from typing import Any, Final

from dask.optimization import cull
from distributed import Client, Future, default_client
from distributed.client import FutureCancelledError, FuturesCancelledError, _wait
from distributed.comm import CommClosedError
from distributed.protocol.pickle import dumps
from distributed.scheduler import KilledWorker

from daskdist.config import in_bytes, seconds, to_send
from daskdist.core.block import Block, Rows
from daskdist.core.primitive import Read, Split, payload_itself, same, value_itself
from daskdist.devices import are_loaded
from daskdist.errors import ClusterError, RepeatedLossError, WaitTimeoutError
from daskdist.execute.caller import CallAgain, Graph, Handle, Report, SplitLocations, report_of
from daskdist.execute.callers.cluster_requests import ask_scheduler, blocking_tasks, closed_error, run_on_scheduler
from daskdist.execute.callers.data_locations import DataLocations
from daskdist.execute.callers.kept_blocks import MOST_BYTES, KeptBlocks, copied
from daskdist.execute.callers.live_workers import (
    LOGGED_AFTER_S,
    STILL_WAITED_FOR,
    LiveWorkers,
    cancel_lost_tasks,
    give_up,
)
from daskdist.execute.callers.sent_blocks import SentBlocks
from daskdist.execute.messages.pickling import dumps_on_host
from daskdist.execute.paused_workers import ended_for_memory, error_of_task
from daskdist.execute.run_task import submit_task
from daskdist.execute.submitted_tasks import SubmittedTask, SubmittedTasks
from daskdist.waiting import wait_intervals

logger: Final = logging.getLogger("daskdist")

# Seconds between two checks of whether the workers are still there, while waiting for a result.
LOOK_EVERY_S = 2
# Data of at most this size is sent inside its task.
_IN_TASK_BYTES: Final = 2**20


class Submit:
    """A caller that submits each call as a task of a cluster; a handle is a Dask future.

    Dropping the future releases the result. The worker of a call is a preference: another worker takes over the tasks
    of one that is lost or busier. A pinned call runs on its worker or not at all; if that worker is lost, waiting for
    the call raises an error.

    Parameters
    ----------
    client
        The connection to the cluster.
    workers
        The addresses of the workers that take part, or the `LiveWorkers` that several callers share.
    shared
        A caller whose ``home`` this one shares: they can use each other's handles, and add to the same futures, blocks
        kept for later passes and data sent for tasks; None for new ones.
    located
        Returns the addresses of the workers that have a file, by its path, on their local disk. One of them reads it;
        no other worker can.
    """

    bundle_chunks = 1024
    compacts = True
    reports_freely = False
    divides = True
    reads_by_row = False

    def __init__(
        self,
        client: Client,
        workers: Sequence[str] | LiveWorkers,
        shared: Submit | None = None,
        located: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        self.client = client
        self.home: Hashable | None = ("cluster", uuid.uuid4().hex) if shared is None else shared.home
        self.live_workers = workers if isinstance(workers, LiveWorkers) else LiveWorkers(workers)
        self.num_ahead = 4 * len(self.workers)
        self.bundle_bytes = in_bytes("bundle-bytes")
        self.futures: SubmittedTasks = SubmittedTasks() if shared is None else shared.futures
        # Unlike a generator, `itertools.count` can be advanced by several threads at once.
        self._numbers = itertools.count()
        # Part of the keys of its tasks.
        self.token = uuid.uuid4().hex[:12]
        self._reports: dict[str, Future] = {}
        self._located = located
        # The workers whose silence was logged.
        self._told_silent: set[str] = set()
        self.kept_blocks: KeptBlocks = KeptBlocks(_is_available) if shared is None else shared.kept_blocks
        self.sent_blocks: SentBlocks = SentBlocks(client) if shared is None else shared.sent_blocks

    @property
    def workers(self) -> tuple[str, ...]:
        """The addresses of the workers that take part."""
        return self.live_workers.present

    @property
    def memory_bytes(self) -> int | None:
        """The memory limit of the worker with the least memory; None without a limit."""
        known = self.live_workers.memory_bytes
        if not known:
            connected = workers_of(self.client)
            limits = [connected[address]["memory_limit"] for address in self.workers if address in connected]
            known.append(min(filter(None, limits), default=None))
        return known[0]

    def call(
        self,
        function: Callable[..., Any],
        handles: Sequence[Handle],
        *args: Any,
        worker: str | None = None,
        is_pinned: bool = False,
        again: CallAgain | None = None,
        name: str,
        **_: Any,
    ) -> Handle:
        return self._submit(name, worker, function, list(handles), *args, is_pinned=is_pinned, again=again)

    def source(
        self, function: Callable[..., Rows], *args: Any, worker: str | None = None, name: str, **_: Any
    ) -> Handle:
        # Large data is sent directly to its worker: inside a task it would pass through the scheduler. Sending waits
        # for the transfer, and so is slower than a task for small data.
        if len(args) == 1 and _has_much_data(args[0]):
            # The program may write into its arrays before the data is sent again.
            block = copied(args[0].payload)
            return self._send(name, worker, function, replace(args[0], payload=block), block.nbytes)
        splits = [arg for arg in args if isinstance(arg, Split)]
        is_local = worker is not None and any(worker in self._locations_of(split) for split in splits)
        return self._submit(name, worker, function, None, *args, is_pinned=is_local, needs_disk=is_local)

    def _placed_on_one(self, data: Any, worker: str | None) -> tuple[Future, str]:
        # On a worker, or on another if it was lost a moment ago.
        failed: Exception | None = None
        wanted = worker or self.workers[next(self._numbers) % len(self.workers)]
        for address in dict.fromkeys((wanted, *self.workers)):
            try:
                return self.place(data, address), address
            except ClusterError:
                raise
            except (OSError, TimeoutError) as error:
                failed = error
        raise ClusterError(f"no worker can be sent data: {failed}") from failed

    def _send(self, name: str, worker: str | None, function: Callable[..., Any], data: Any, num_bytes: int) -> Future:
        arrival, worker = self._placed_on_one(data, worker)
        sent = self.sent_blocks.reference(arrival, is_direct=self.live_workers.is_direct)
        future = self._submit(name, worker, function, None, sent)
        self.sent_blocks.keep(data, num_bytes, arrival, future)
        return future

    def split_locations(self, read: Read) -> SplitLocations | None:
        self._check_open()
        locations = None if read.graph is None else DataLocations(self.client, read.graph(), self.workers)
        if locations:
            return lambda split: locations(split.payload)
        return None if self._located is None else self._locations_of

    def _locations_of(self, split: Split) -> Sequence[str]:
        if self._located is None or not split.path:
            return ()
        return [worker for worker in self._located(split.path) if worker in self.workers]

    def kept_handle(self, read: Read, split: Split, worker: str | None = None) -> Handle | None:
        self._check_open()
        if read.graph is not None:
            # The data is on the cluster already. If it is small, Dask copies it once to each worker that needs it,
            # which is cheaper than moving its rows in every pass.
            is_small = read.function is value_itself and (split.num_bytes or 0) <= MOST_BYTES
            return self.upstream(read.graph, split.payload) if is_small else None

        def send(block: Block) -> Future:
            # A task is computed again if its worker is lost, and Dask copies its result once to each worker.
            return self._submit(read.name, worker, payload_itself, None, replace(split, payload=block))

        return self.kept_blocks.handle_of(read.kept_for, split.payload, send)

    def place(self, data: Any, worker: str) -> Future:
        """Send data to a worker: directly if it can be reached, otherwise through the scheduler."""
        self._check_open()
        try:
            future = self.client.scatter(
                data, workers=[worker], direct=self.live_workers.is_direct, hash=False, timeout=LOOK_EVERY_S
            )
        except (OSError, TimeoutError):
            self._check_workers()
            raise
        self.futures.add(future)
        return future

    def upstream(self, graph: Callable[[], Graph], key: Any, worker: str | None = None) -> Handle:
        value = graph()[key]
        if isinstance(value, Future) and value.client is self.client:
            # The future is not added to ours: `release` must not release it.
            if value.cancelled():
                raise self.live_workers.lost_error(key)
            return value
        client = self.client

        def send(_: list[Future] | None, __: str | None) -> Future:
            return client.get(cull(graph(), [key])[0], key, sync=False)

        future = send(None, None)
        self.futures.add(future, SubmittedTask(send))
        return future

    def stream(self, take: Callable[[], Rows], worker: str | None = None, *, name: str) -> Handle:
        rows = take()
        if rows.nbytes <= _IN_TASK_BYTES:
            return self._submit(name, worker, same, None, rows)
        return self._send(name, worker, same, rows, rows.nbytes)

    def is_done(self, handle: Future) -> bool:
        return bool(handle.done())

    def wait_for_one(self, handles: Sequence[Future]) -> None:
        self.wait(handles, is_one_enough=True)

    def _submit(
        self,
        name: str,
        worker: str | None,
        function: Callable[..., Any],
        handles: list[Future] | None,
        *args: Any,
        is_pinned: bool = False,
        needs_disk: bool = False,
        again: CallAgain | None = None,
    ) -> Future:
        # The results of the handles are the first argument; there is no such argument if they are None.
        self._check_open()
        tasks = None if handles is None else list(map(self.futures.task_of, handles))
        depth = max((needed.depth + 1 for needed in tasks or ()), default=0)
        submit = partial(submit_task, self.client, self.key_of(name), depth, is_pinned)
        pickled = partial(_pickled, self.token, name)
        send = partial(submit, pickled(function, args))
        future = send(handles, worker)
        send_again = send if again is None else partial(_send_again, submit, pickled, again)
        self.futures.add(future, SubmittedTask(send_again, tasks, depth, worker, is_pinned, needs_disk))
        return future

    def key_of(self, name: str) -> str:
        """Return a unique key for a task."""
        return f"{name}-{self.token}-{next(self._numbers)}"

    def report(self, handle: Future, *, wait: bool) -> Report | None:
        # The report is computed on the worker that has the block, so that the block itself is not sent.
        future = self._reports.get(handle.key)
        if future is None:
            future = self._reports[handle.key] = self._submit("report", None, _report_of_one, [handle])
        if not (wait or future.done()):
            return None
        del self._reports[handle.key]
        self.wait([future])
        report: Report = self._result_of(future)
        return report

    def result(self, handle: Future) -> Any:
        return self.results([handle])[0]

    def results(self, handles: Sequence[Future]) -> list[Any]:
        self.wait(handles)
        for handle in handles:
            if handle.status == "error":
                # Raise the error of the first handle in order, not of the call that failed first. The cause may be a
                # lost worker.
                self.live_workers.in_doubt = True
                self._result_of(handle)
        return self._fetched(handles)

    def _fetched(self, handles: Sequence[Future]) -> list[Any]:
        # Results come directly from the workers: through the scheduler it would be five times slower.
        try:
            return self._gathered(handles)
        except FutureCancelledError as error:
            self._check_workers()
            raise self.live_workers.lost_error(error.key) from error
        except CommClosedError as error:
            # The scheduler was lost while it was asked which workers have the results.
            self._check_workers()
            raise self.live_workers.lost_error(handles[0].key) from error
        except KilledWorker as error:
            raise error_of_task(self.client, error) from error

    def _gathered(self, handles: Sequence[Future]) -> list[Any]:
        loop = self.client.loop.asyncio_loop
        gathering = self.client.gather(list(handles), direct=self.live_workers.is_direct, asynchronous=True)
        task = asyncio.run_coroutine_threadsafe(gathering, loop)
        try:
            while not futures_wait([task], timeout=LOOK_EVERY_S).done:
                # If a worker is lost with finished results, the client waits until they are computed again. If the
                # others continued without it, the client may try for a long time to connect to it.
                for handle in handles:
                    if handle.cancelled():
                        raise self.live_workers.lost_error(handle.key)
                if not all(handle.done() for handle in handles):
                    self._check_workers()
            return list(task.result())
        except Exception:
            task.cancel()
            # An interrupt does not cancel it: the client merges requests that begin together, and all later ones would
            # wait for one that was cancelled before it began.
            raise

    def wait(self, handles: Sequence[Future], *, is_one_enough: bool = False) -> None:
        """Wait until all calls are over, or one of them if ``is_one_enough``, whether they succeed or fail.

        Raises
        ------
        ClusterError
            A participating worker is lost, so that calls pinned to it would never end; or data that a call needs is
            no longer there.
        """
        self._check_open()
        enough = any if is_one_enough else all
        if enough(handle.status in ("finished", "error") for handle in handles):
            return
        # `distributed.wait` is not used: to pass it the client, `Client.as_current` sets Dask's scheduler for the whole
        # process, and permanently if two threads wait. Its timeout is not used either: each time it expires, the frames
        # of the error keep the futures alive until the garbage collector runs.
        waiting = _wait(list(handles), return_when="FIRST_COMPLETED" if is_one_enough else "ALL_COMPLETED")
        task = asyncio.run_coroutine_threadsafe(waiting, self.client.loop.asyncio_loop)
        try:
            for within_s in self._wait_intervals(handles):
                if futures_wait([task], timeout=within_s).done:
                    task.result()
                    break
                self.live_workers.paused_workers.check(self.client, self._check_workers())
        except FuturesCancelledError as error:
            self._check_workers()
            raise self.live_workers.lost_error(error.error_groups[0].errors[0].key) from error
        finally:
            task.cancel()

    def _wait_intervals(self, handles: Sequence[Future]) -> Iterator[float]:
        def name() -> str:
            keys = [str(handle.key) for handle in handles if not handle.done()]
            paused = [address for address, its in workers_of(self.client).items() if its["status"] == "paused"]
            why = f"; paused, as their memory is nearly full: {', '.join(paused)}" if paused else ""
            return f"{len(keys)} tasks ({', '.join(keys[:4])}{', ...' if len(keys) > 4 else ''}{why})"

        while True:
            try:
                yield from wait_intervals(
                    name, "timeouts.data", LOOK_EVERY_S, progress=lambda: sum(handle.done() for handle in handles)
                )
            except WaitTimeoutError as error:
                # Workers end calls that hang; these may be long ones that do not, or others before them.
                keys = [handle.key for handle in handles if not handle.done()]
                blocking = run_on_scheduler(self.client, blocking_tasks, keys, self.token)
                if blocking is not None:
                    before = f"workers execute {', '.join(blocking)}" if blocking else "no worker begins them"
                    raise WaitTimeoutError(f"{error}; {before}") from None

    def _result_of(self, handle: Future) -> Any:
        # Dask cancels what `Future.result` waits for when it is interrupted.
        return self._fetched([handle])[0]

    def check(self, handles: Sequence[Future]) -> None:
        """Check that all results will arrive: waiting for one that cannot would never end.

        Raises
        ------
        ClusterError
            The connection is closed, a result is no longer there, or a result is still pending and a worker is lost.
        """
        self._check_open()
        for handle in handles:
            if handle.cancelled():
                raise self.live_workers.lost_error(handle.key)
        if not all(handle.done() for handle in handles):
            self._check_workers()

    def _check_open(self) -> None:
        if self.client.status != "running":
            self.live_workers.in_doubt = True
            raise closed_error(self.client)

    def _check_workers(self) -> dict[str, dict[str, Any]]:
        self._check_open()
        connected = workers_of(self.client)
        if silent := self._silent(connected):
            ask_scheduler(self.client, give_up, self.client, silent)
            connected = workers_of(self.client)
        lost = self.live_workers.missing(connected)
        if lost:
            self.live_workers.in_doubt = True
            rest = "no worker is left, create a new strategy"
            if len(lost) < len(self.workers):
                rest = "calls that need them fail, and the next call continues with the remaining replicas"
            why = ended_for_memory(self.client, lost)
            raise ClusterError(f"lost {', '.join(lost)}, which had replicas{why}; {rest}")
        if self.live_workers.lost:
            run_on_scheduler(self.client, cancel_lost_tasks, self.live_workers.lost, self.client.id)
        return connected

    def missing(self) -> list[str]:
        """Return the participating workers that are gone or were restarted."""
        return self.live_workers.missing(workers_of(self.client))

    def _silent(self, connected: dict[str, dict[str, Any]]) -> list[str]:
        # A stopped worker keeps its connections, so the program would wait for its tasks until Dask gives it up.
        most = seconds("timeouts.silence")
        now = time.monotonic()
        silent_s = self.live_workers.silent_s(connected, now)
        for worker, worker_s in silent_s.items():
            if worker_s <= min(LOGGED_AFTER_S, most / 2):
                self._told_silent.discard(worker)
            elif worker not in self._told_silent:
                self._told_silent.add(worker)
                logger.warning(STILL_WAITED_FOR, worker, worker_s, most)
        return [worker for worker, worker_s in silent_s.items() if worker_s > most]

    def close(self) -> None:
        # Results that a consumer still references stay; Dask has released the others already.
        self._reports.clear()

    def raise_given_up(self) -> None:
        for future in list(self.futures):
            if future.status == "error" and f"-{self.token}-" in str(future.key):
                try:
                    self._result_of(future)
                except RepeatedLossError:
                    raise
                except Exception:
                    # The error is raised where the result is used.
                    continue

    def release(self) -> None:
        """Release every result, including those still referenced, for example by a traceback."""
        self._reports.clear()
        self.kept_blocks.clear()
        self.sent_blocks.clear()
        if self.client.status == "running":
            for future in list(self.futures):
                future.release()


def _pickled(token: str, name: str, function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    # Dask unpickles a task while it reads a worker's messages: an error there, such as a module that the worker lacks,
    # would stop the worker. So functions and their arguments are unpickled inside the task.
    sent = function, args, token, name, to_send()
    return dumps_on_host(sent, by_value=True) if are_loaded() else dumps(sent)


def _send_again(
    submit: Callable[..., Future],
    pickled: Callable[..., bytes],
    again: CallAgain,
    handles: list[Future] | None,
    worker: str | None,
) -> Future | None:
    call = again()
    return None if call is None else submit(pickled(call[0], call[1:]), handles, worker)


def _report_of_one(blocks: Sequence[Rows]) -> Report:
    return report_of(blocks[0])


def workers_of(client: Client) -> dict[str, dict[str, Any]]:
    """Return the scheduler's description of each worker, by address."""
    # `Client.scheduler_info` is not used: it returns a dict that the client periodically overwrites with an answer that
    # lists no workers.
    workers: dict[str, dict[str, Any]] = ask_scheduler(client, client.scheduler.identity, n_workers=-1)["workers"]
    return workers


def _is_available(handle: Future) -> bool:
    return handle.status in ("pending", "finished", "lost")


def _has_much_data(arg: Any) -> bool:
    return isinstance(arg, Split) and isinstance(arg.payload, Block) and arg.payload.nbytes > _IN_TASK_BYTES


def of_default_client() -> Submit | None:
    """Return a caller on all workers of this program's Dask client.

    It is None without a client whose results can be awaited.
    """
    try:
        client = default_client()
    except ValueError:
        return None
    if client.asynchronous or client.status != "running":
        return None
    workers = LiveWorkers(tuple(client.nthreads()))
    # Do not connect to workers directly: it is unknown whether they can be reached from here.
    workers.is_direct = False
    return Submit(client, workers) if workers.present else None
