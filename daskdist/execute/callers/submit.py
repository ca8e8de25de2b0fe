"""The caller that makes calls on a Dask cluster."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import re
import uuid
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import wait as futures_wait
from dataclasses import replace
from typing import Any, Final

from dask.optimization import cull
from distributed import Client, Future
from distributed.client import FutureCancelledError, FuturesCancelledError, _wait
from distributed.protocol.pickle import dumps

from daskdist.config import in_bytes
from daskdist.core.block import Block, Rows
from daskdist.core.primitive import Read, Split, payload_itself, value_itself
from daskdist.devices import are_loaded
from daskdist.errors import ClusterError
from daskdist.execute.caller import Graph, Handle, Report, SplitLocations, report_of
from daskdist.execute.callers.compute_key import lost_data_error
from daskdist.execute.callers.data_locations import DataLocations
from daskdist.execute.callers.kept_blocks import MOST_BYTES, KeptBlocks
from daskdist.execute.callers.live_workers import LiveWorkers, cancel_lost_tasks
from daskdist.execute.messages.pickling import dumps_on_host, load_sent

# Which result each part is of, and what takes it out.
Picks = Sequence[tuple[int, Callable[[Any], Any]]]
# Seconds between two looks at whether the workers are still there, while something is waited for.
LOOK_EVERY_S = 2
# Data of at most this size is part of the task that it is for.
_SENT_ALONG_BYTES: Final = 2**20
# What `Submit.key_of` makes.
_KEY: Final = re.compile(r"-[0-9a-f]{12}-[0-9]+$")


def call_sent(pickled: bytes, *results: Any) -> Any:
    """Call a pickled function.

    Parameters
    ----------
    pickled
        The function and its arguments.
    results
        The arguments that are results of other tasks, each in its place; None for those that are pickled.
    """
    _raise_in_program_only()
    function, args = load_sent(pickled)
    return function(*[arg if result is None else result for arg, result in zip(args, results, strict=True)])


class _NotOfOurTasks(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        is_failure = str(record.msg).startswith("Compute Failed")
        return not (is_failure and any(f"{call_sent.__name__}(" in str(arg) for arg in record.args or ()))


@functools.cache
def _raise_in_program_only() -> None:
    # An error in a task is raised where the program needs what failed; the worker's log does not have it a second time.
    logging.getLogger("distributed.worker").addFilter(_NotOfOurTasks())


def _has_futures(value: Any) -> bool:
    return isinstance(value, Future) or (isinstance(value, list) and any(map(_has_futures, value)))


class Submit:
    """Calls as tasks of a cluster; a handle is a Dask future, and letting go of it lets go of the result.

    Where data is made is a preference: another worker takes the tasks of one that is lost, or that has more to
    do. A pinned call is made on its worker or not at all; should that be lost, whoever waits is told.

    Parameters
    ----------
    client
        The connection to the cluster.
    workers
        The addresses of the workers that take part; or what tells them, which callers have in common.
    futures
        Where its futures are kept note of, for as long as somebody has them.
    located
        Gives the addresses of the workers that have a file, by its path, on a disk of their own: one of them reads it,
        and no other worker can.
    home
        What callers have in common whose handles are of use to each other; its own if None.
    backend
        Who brings results here, where a strategy has a quicker way than tasks; itself if None.
    kept
        The blocks that stay for later passes, which such callers have in common too; its own if None.
    """

    # An expression over its results is evaluated here.
    defers = False
    bundle_chunks = 1024
    compacts = True
    reports_freely = False
    divides = True

    def __init__(
        self,
        client: Client,
        workers: Sequence[str] | LiveWorkers,
        futures: weakref.WeakSet[Future] | None = None,
        located: Callable[[str], Sequence[str]] | None = None,
        home: Hashable | None = None,
        backend: Any = None,
        kept: KeptBlocks | None = None,
    ) -> None:
        self.client = client
        self.backend = self if backend is None else backend
        self.home: Hashable | None = home or ("cluster", uuid.uuid4().hex)
        self.live_workers = workers if isinstance(workers, LiveWorkers) else LiveWorkers(workers)
        self.num_ahead = 4 * len(self.workers)
        self.bundle_bytes = in_bytes("bundle-bytes")
        self.futures: weakref.WeakSet[Future] = weakref.WeakSet() if futures is None else futures
        # No generator, of which threads could not take the next at the same time.
        self._numbers = itertools.count()
        self._token = uuid.uuid4().hex[:12]
        self._reports: dict[str, Future] = {}
        self._located = located
        self.kept_blocks = KeptBlocks(_can_be_had) if kept is None else kept

    @property
    def workers(self) -> tuple[str, ...]:
        """The addresses of the workers that take part."""
        return self.live_workers.present

    def call(
        self,
        function: Callable[..., Any],
        handles: Sequence[Handle],
        *args: Any,
        worker: str | None = None,
        is_pinned: bool = False,
        is_cheap: bool = False,
        name: str,
    ) -> Handle:
        return self._submit(name, worker, function, list(handles), *args, is_pinned=is_pinned)

    def source(self, function: Callable[..., Rows], *args: Any, worker: str | None = None, name: str) -> Handle:
        # Much data is sent to its worker, where a task of its size would have to go by way of the scheduler. That is
        # waited for, and so takes longer than a task with little data.
        placed = [self.place(arg, worker) if _has_much_data(arg) else arg for arg in args]
        is_there = worker is not None and any(isinstance(arg, Split) and worker in self._places_of(arg) for arg in args)
        return self._submit(name, worker, function, *placed, is_pinned=is_there)

    def places(self, read: Read) -> SplitLocations | None:
        self._check_open()
        held = None if read.graph is None else DataLocations(self.client, read.graph(), self.workers)
        if held:
            return lambda split: held(split.payload)
        return None if self._located is None else self._places_of

    def _places_of(self, split: Split) -> Sequence[str]:
        if self._located is None or not split.path:
            return ()
        return [worker for worker in self._located(split.path) if worker in self.workers]

    def kept(self, read: Read, split: Split, worker: str | None = None) -> Handle | None:
        self._check_open()
        if read.kept_for is None:
            return None
        if read.graph is not None:
            # It is there already. What is small had better lie on each worker that needs it, which Dask sees to, than
            # have its rows moved in each pass.
            is_small = read.function is value_itself and (split.num_bytes or 0) <= MOST_BYTES
            return self.upstream(read.graph, split.payload) if is_small else None

        def send(block: Block) -> Future:
            # As a task, which is made again where its worker is lost, and goes to every worker that needs it once.
            return self._submit(read.name, worker, payload_itself, replace(split, payload=block))

        return self.kept_blocks.handle_of(read.kept_for, split.payload, send)

    def place(self, data: Any, worker: str | None = None) -> Future:
        """Send data to a worker, or to all, straight where it can be reached and not by way of the scheduler."""
        self._check_open()
        workers = [worker] if worker else None
        try:
            future = self.client.scatter(
                data,
                workers=workers,
                broadcast=worker is None,
                direct=self.live_workers.is_direct,
                hash=False,
                timeout=LOOK_EVERY_S,
            )
        except (OSError, TimeoutError):
            self._check_workers()
            raise
        self.futures.add(future)
        return future

    def upstream(self, graph: Callable[[], Graph], key: Any, worker: str | None = None) -> Handle:
        there = graph()[key]
        if isinstance(there, Future) and there.client is self.client:
            # It is not ours to let go of.
            if there.cancelled():
                raise self._gone(key)
            return there
        future: Future = self.client.get(cull(graph(), [key])[0], key, sync=False)
        self.futures.add(future)
        return future

    def stream(self, take: Callable[[], Rows], worker: str | None = None, *, name: str) -> Handle:
        return self.place(take(), worker)

    def is_done(self, handle: Future) -> bool:
        return bool(handle.done())

    def wait_for_one(self, handles: Sequence[Future]) -> None:
        self.wait(handles, is_one_enough=True)

    def _submit(
        self, name: str, worker: str | None, function: Callable[..., Any], *args: Any, is_pinned: bool = False
    ) -> Future:
        self._check_open()
        # Dask unpickles what tasks are made of while it reads a worker's messages: an error there, as of a module that
        # the worker lacks, would end the worker. So functions and what they are called with are unpickled in the task.
        has_futures = [_has_futures(arg) for arg in args]
        rest = [None if has else arg for arg, has in zip(args, has_futures, strict=True)]
        future = self.client.submit(
            call_sent,
            dumps_on_host((function, rest), by_value=True) if are_loaded() else dumps((function, rest)),
            *[arg if has else None for arg, has in zip(args, has_futures, strict=True)],
            key=self.key_of(name),
            workers=[worker] if worker else None,
            allow_other_workers=bool(worker) and not is_pinned,
            pure=False,
        )
        self.futures.add(future)
        return future

    def key_of(self, name: str) -> str:
        """A key for a task, that no other has."""
        return f"{name}-{self._token}-{next(self._numbers)}"

    def report(self, handle: Future, *, wait: bool) -> Report | None:
        # Made on the worker that has the block: the block itself does not travel.
        asked = self._reports.get(handle.key)
        if asked is None:
            asked = self._reports[handle.key] = self._submit("report", None, report_of, handle)
        if not (wait or asked.done()):
            return None
        del self._reports[handle.key]
        self.wait([asked])
        report: Report = asked.result()
        return report

    def result(self, handle: Future) -> Any:
        return self.results([handle])[0]

    def results(self, handles: Sequence[Future]) -> list[Any]:
        self.wait(handles)
        for handle in handles:
            if handle.status == "error":
                # Of several errors the first in order, whichever came first. A lost worker may be what it comes of.
                self.live_workers.in_doubt = True
                handle.result()
        # Straight from the workers that have them: by way of the scheduler it would be five times slower.
        try:
            return self._gathered(handles)
        except FutureCancelledError as error:
            self._check_workers()
            raise self._gone(error.key) from error

    def _gathered(self, handles: Sequence[Future]) -> list[Any]:
        loop = self.client.loop.asyncio_loop
        gathering = self.client.gather(list(handles), direct=self.live_workers.is_direct, asynchronous=True)
        task = asyncio.run_coroutine_threadsafe(gathering, loop)
        try:
            while not futures_wait([task], timeout=LOOK_EVERY_S).done:
                # A worker may be lost with what was done: then the client waits until that is made anew. Where others
                # went on without it, it may try to connect to it for long.
                for handle in handles:
                    if handle.cancelled():
                        raise self._gone(handle.key)
                if not all(handle.done() for handle in handles):
                    self._check_workers()
            return list(task.result())
        finally:
            task.cancel()

    def wait(self, handles: Sequence[Future], *, is_one_enough: bool = False) -> None:
        """Wait until calls are over, or one of them where that is enough, however they end.

        Raises
        ------
        ClusterError
            A worker that takes part is lost: what is pinned to it would be waited for without end. Or what a call
            needs is no longer there.
        """
        self._check_open()
        enough = any if is_one_enough else all
        if enough(handle.status in ("finished", "error") for handle in handles):
            return
        with self.waiting(handles, "FIRST_COMPLETED" if is_one_enough else "ALL_COMPLETED") as are_over:
            try:
                while not are_over(LOOK_EVERY_S):
                    self._check_workers()
            except FuturesCancelledError as error:
                self._check_workers()
                raise self._gone(error.error_groups[0].errors[0].key) from error

    def see(self, step: Sequence[Future]) -> None:
        """Wait for calls; raise what the first of them that failed raised."""
        self.wait(step)
        for handle in step:
            if handle.status == "error":
                handle.result()

    @contextlib.contextmanager
    def waiting(
        self, handles: Sequence[Future], return_when: str = "ALL_COMPLETED"
    ) -> Iterator[Callable[[float], bool]]:
        """What waits for calls for some seconds, and tells whether all or one of them are over, however they ended.

        It raises Dask's error if what one needs is no longer there.
        """
        # Not `distributed.wait`: to tell it the client, `Client.as_current` sets Dask's scheduler for the whole
        # process, and for good where two threads wait. Nor its timeout: each time that is over there is an error in
        # whose frames the futures stay until the garbage collector comes.
        task = asyncio.run_coroutine_threadsafe(
            _wait(list(handles), return_when=return_when), self.client.loop.asyncio_loop
        )

        def are_over(within_s: float) -> bool:
            if not futures_wait([task], timeout=within_s).done:
                return False
            task.result()
            return True

        try:
            yield are_over
        finally:
            task.cancel()

    def as_futures(self, handles: Sequence[Handle], picks: Picks) -> tuple[Sequence[Future], Picks]:
        """Handles as what Dask knows, with what takes parts out of them; checked, for Dask waits without end."""
        self.check(handles)
        return handles, picks

    def check(self, handles: Sequence[Future]) -> None:
        """Refuse what would be waited for without end, or is gone.

        Raises
        ------
        ClusterError
            The connection is closed, a result is no longer there, or it is still to come and a worker is lost.
        """
        self._check_open()
        for handle in handles:
            if handle.cancelled():
                raise self._gone(handle.key)
        if not all(handle.done() for handle in handles):
            self._check_workers()

    def _check_open(self) -> None:
        if self.client.status != "running":
            raise ClusterError(
                "the connection to the cluster is closed, and what was computed there is gone with it; fetch results "
                "here, with local_results say, before the strategy or its client is closed"
            )

    def _check_workers(self) -> None:
        self._check_open()
        lost = self.missing()
        if lost:
            self.live_workers.in_doubt = True
            rest = "no worker is left, make a new strategy"
            if len(lost) < len(self.workers):
                rest = "what needs those fails, and the next call goes on with the replicas that are left"
            raise ClusterError(f"lost {', '.join(lost)}, on which replicas were; {rest}")
        if self.live_workers.lost:
            self.client.run_on_scheduler(cancel_lost_tasks, self.live_workers.lost, self.client.id)

    def missing(self) -> list[str]:
        """The workers that take part, and are not there or were started anew."""
        return self.live_workers.missing(workers_of(self.client))

    def _gone(self, key: Any) -> ClusterError:
        self.live_workers.in_doubt = True
        return self.without_lost(key) if self.live_workers.lost else lost_data_error(key)

    def without_lost(self, what: Any) -> ClusterError:
        """What is raised where something needs a worker without which the others went on."""
        return ClusterError(f"lost {', '.join(self.live_workers.lost)}, which {what} needs; make it anew")

    def close(self) -> None:
        # What a consumer still has of its results stays; what it has let go of, Dask has let go of too.
        self._reports.clear()

    def release(self) -> None:
        """Let go of every result, also those that somebody still holds on to, in a traceback say."""
        self._reports.clear()
        self.kept_blocks.clear()
        if self.client.status == "running":
            for future in list(self.futures):
                future.release()


def is_key_of_ours(key: Any) -> bool:
    """Whether a key is one that `Submit.key_of` made, in whichever strategy."""
    return isinstance(key, str) and _KEY.search(key) is not None


def workers_of(client: Client) -> dict[str, dict[str, Any]]:
    """What the scheduler knows of each worker, by address."""
    # Not `Client.scheduler_info`: what it gives is kept by the client, which now and then writes over it an answer
    # that lists no workers, between its question and ours.
    found: dict[str, dict[str, Any]] = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    return found


def _can_be_had(handle: Future) -> bool:
    return handle.status in ("pending", "finished", "lost")


def _has_much_data(arg: Any) -> bool:
    return isinstance(arg, Split) and isinstance(arg.payload, Block) and arg.payload.nbytes > _SENT_ALONG_BYTES
