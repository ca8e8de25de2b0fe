"""Callers: who makes the calls an interpreter asks for.

An interpreter says what is to be called, on which blocks and near which worker. A caller makes the call and
gives a **handle**, which stands for the result and can be an argument of further calls.

====================  ==========================================  =================================
caller                makes a call                                a handle is
====================  ==========================================  =================================
`Now`                 at once, in this thread                     the result
`Threads`             on a bounded pool of this process           a future of the pool
`graph.Record`        never: writes a Dask task                   a reference to the task
`submit.Submit`       on a Dask cluster, at once                  a Dask future
`NeverRun`            never: raises                               —
====================  ==========================================  =================================
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from daskdist.config import num_threads
from daskdist.core.block import Rows
from daskdist.core.failures import FailedElement, failed_of, raw_item
from daskdist.core.loop_limit import LoopPool
from daskdist.core.node import Node, walk
from daskdist.core.origin import Skipped
from daskdist.core.primitive import Read, Split
from daskdist.errors import ClusterError, DaskdistError

Handle = Any
Graph = dict[Any, Any]
# Tells the workers that have the data of a split already.
Places = Callable[[Split], Sequence[str]]
MIB = 2**20


@dataclass(frozen=True)
class Report:
    """What a finished call says of its block.

    Parameters
    ----------
    num_rows
        Its elements.
    nbytes
        Its size in memory.
    skipped
        What was left out on the way to it.
    failed
        The elements that failed, each with its place.
    """

    num_rows: int
    nbytes: int
    skipped: tuple[Skipped, ...] = ()
    failed: tuple[tuple[int, FailedElement], ...] = ()


def report_of(rows: Rows) -> Report:
    """The report on a block."""
    return Report(len(rows), rows.nbytes, rows.skipped, failed_of(rows))


def lengths_of(blocks: Sequence[Rows]) -> tuple[int, ...]:
    """Of each element of a block, the length of its longest leaf along axis 0; 1 where it has none."""
    (rows,) = blocks
    items = (raw_item(rows, index) for index in range(len(rows)))
    # One that failed is told where it would be handed out.
    shapes = ([()] if isinstance(item, FailedElement) else [leaf.shape for leaf in item] for item in items)
    return tuple(max((shape[0] if shape else 1 for shape in each), default=1) for each in shapes)


class Caller(Protocol):
    """See the top of this file."""

    # Calls worth having under way beyond the one that is waited for.
    num_ahead: int
    # The most a bundle should hold.
    bundle_bytes: int
    bundle_chunks: int
    # Whether to spend calls on giving up memory early.
    compacts: bool
    # Whether a report costs no call.
    reports_freely: bool
    # Whether splits that can be divided are, so that the first elements come soon.
    divides: bool
    # Where results lie, the same for callers whose handles are of use to each other; None where of no use later.
    home: Hashable | None

    @property
    def backend(self) -> Any:
        """Return the source that brings results to the program that looks at them; the caller itself by default."""
        ...

    def call(
        self,
        function: Callable[..., Any],
        handles: Sequence[Handle],
        *args: Any,
        on: str | None = None,
        is_pinned: bool = False,
        is_light: bool = False,
        name: str,
    ) -> Handle:
        """Call ``function(results of the handles, *args)``, on worker ``on`` if that can be, or there only.

        A light call, which only makes views or copies a few rows, is not worth handing from one thread to another.
        """
        ...

    def source(self, function: Callable[..., Rows], *args: Any, on: str | None = None, name: str) -> Handle:
        """Call ``function(*args)``."""
        ...

    def upstream(self, graph: Callable[[], Graph], key: Any, on: str | None = None) -> Handle:
        """The value of a key of a Dask graph."""
        ...

    def places(self, read: Read) -> Places | None:
        """What tells for each split of a source where its data lies already; None where nothing is known of that."""
        ...

    def kept(self, read: Read, split: Split, on: str | None = None) -> Handle | None:
        """The payload of the only split of a source, where it is kept for all passes; asked for on worker ``on``.

        None where it is given anew to each call that needs it.
        """
        ...

    def stream(self, take: Callable[[], Rows], on: str | None = None, *, name: str) -> Handle:
        """Call ``take()`` in this thread, at once; what it raises passes through."""
        ...

    def is_done(self, handle: Handle) -> bool:
        """Whether a result is there."""
        ...

    def wait_for_one(self, handles: Sequence[Handle]) -> None:
        """Wait until one of several results is there."""
        ...

    def report(self, handle: Handle, *, wait: bool) -> Report | None:
        """What is known of a result; None where it is not there yet and ``wait`` is False."""
        ...

    def result(self, handle: Handle) -> Any:
        """The result itself, waited for and brought here."""
        ...

    def results(self, handles: Sequence[Handle]) -> list[Any]:
        """Several results, brought here together."""
        ...

    def close(self) -> None:
        """Drop what is under way; no call is made after it."""
        ...


class Now:
    """Each call at once, in this thread.

    Parameters
    ----------
    bring
        Brings what a cluster has, on a worker of that.
    """

    num_ahead = 0
    bundle_bytes = 4 * MIB
    bundle_chunks = 64
    compacts = True
    reports_freely = True
    divides = True
    home: Hashable | None = "now"

    def __init__(self, bring: Bring | None = None) -> None:
        self._bring = bring

    @property
    def backend(self) -> Any:
        """Itself: results are here."""
        return self

    def call(
        self,
        function: Callable[..., Any],
        handles: Sequence[Handle],
        *args: Any,
        on: str | None = None,
        is_pinned: bool = False,
        is_light: bool = False,
        name: str,
    ) -> Handle:
        return function(handles, *args)

    def source(self, function: Callable[..., Rows], *args: Any, on: str | None = None, name: str) -> Handle:
        return function(*args)

    def upstream(self, graph: Callable[[], Graph], key: Any, on: str | None = None) -> Handle:
        return compute_key(graph(), key, self._bring)

    def places(self, read: Read) -> Places | None:
        return None

    def kept(self, read: Read, split: Split, on: str | None = None) -> Handle | None:
        return None

    def stream(self, take: Callable[[], Rows], on: str | None = None, *, name: str) -> Handle:
        return take()

    def is_done(self, handle: Handle) -> bool:
        return True

    def wait_for_one(self, handles: Sequence[Handle]) -> None:
        pass

    def report(self, handle: Handle, *, wait: bool) -> Report | None:
        return report_of(handle)

    def result(self, handle: Handle) -> Any:
        return handle

    def results(self, handles: Sequence[Handle]) -> list[Any]:
        return list(handles)

    def close(self) -> None:
        pass


class Threads:
    """Calls on a pool of threads; one takes a thread when all it needs is there, so that none waits in one.

    Parameters
    ----------
    number
        How many there are; the setting ``daskdist.num-threads`` if None.
    bring
        Brings what a cluster has, on a worker of that.
    """

    bundle_bytes = 4 * MIB
    bundle_chunks = 64
    compacts = True
    reports_freely = True
    divides = True
    home: Hashable | None = "threads"
    backend: Any = None

    def __init__(self, number: int | None = None, bring: Bring | None = None) -> None:
        self._bring = bring
        number = self.num_ahead = number or num_threads()
        self._pool = ThreadPoolExecutor(number, "daskdist")
        self._loops = LoopPool(number)

    def call(
        self,
        function: Callable[..., Any],
        handles: Sequence[Handle],
        *args: Any,
        on: str | None = None,
        is_pinned: bool = False,
        is_light: bool = False,
        name: str,
    ) -> Handle:
        result: Future[Any] = Future()
        missing = itertools.count(len(handles), -1)
        # A future that is done keeps its callbacks. What they need to make the call is taken out when it is made,
        # or every block would keep all that was ever made of it.
        call = [(result, function, handles, args)]

        def one_is_there(handle: Future[Any]) -> None:
            if handle.cancelled():
                # The pool is closing, and holds the lock that asking it for a thread would take.
                for waiting, *_ in call:
                    waiting.cancel()
                return
            # Counting is atomic: just one of the callbacks sees the last.
            if next(missing) > 1:
                return
            made = call.pop()
            if is_light:
                # In the thread that is here: the one that has made the last of them, or the one that asks.
                _run(*made)
                return
            try:
                self._pool.submit(self._loops.run, _run, *made)
            except RuntimeError:
                # The pool was closed in the meantime; nobody is waiting any more.
                made[0].cancel()

        for handle in handles:
            handle.add_done_callback(one_is_there)
        if not handles:
            self._pool.submit(self._loops.run, _run, *call.pop())
        return result

    def source(self, function: Callable[..., Rows], *args: Any, on: str | None = None, name: str) -> Handle:
        return self._pool.submit(self._loops.run, function, *args)

    def upstream(self, graph: Callable[[], Graph], key: Any, on: str | None = None) -> Handle:
        return self._pool.submit(self._loops.run, compute_key, graph(), key, self._bring)

    def places(self, read: Read) -> Places | None:
        return None

    def kept(self, read: Read, split: Split, on: str | None = None) -> Handle | None:
        return None

    def stream(self, take: Callable[[], Rows], on: str | None = None, *, name: str) -> Handle:
        result: Future[Rows] = Future()
        result.set_result(take())
        return result

    def is_done(self, handle: Future[Any]) -> bool:
        return handle.done()

    def wait_for_one(self, handles: Sequence[Future[Any]]) -> None:
        futures.wait(handles, return_when=futures.FIRST_COMPLETED)

    def report(self, handle: Future[Rows], *, wait: bool) -> Report | None:
        return report_of(handle.result()) if wait or handle.done() else None

    def result(self, handle: Future[Any]) -> Any:
        return handle.result()

    def results(self, handles: Sequence[Future[Any]]) -> list[Any]:
        return [handle.result() for handle in handles]

    def close(self) -> None:
        self._loops.close()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _run(result: Future[Any], function: Callable[..., Any], handles: Sequence[Future[Any]], args: Any) -> None:
    try:
        result.set_result(function([handle.result() for handle in handles], *args))
    except BaseException as error:
        result.set_exception(error)


class NeverRun:
    """Refuses every call: proof that building a pipeline runs none of it."""

    num_ahead = 0
    bundle_bytes = 4 * MIB
    bundle_chunks = 64
    compacts = False
    reports_freely = False
    divides = False
    home: Hashable | None = None
    backend: Any = None

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise DaskdistError("a call was made where none may be")

    call = source = upstream = stream = is_done = wait_for_one = report = result = results = _refuse

    def places(self, read: Read) -> Places | None:
        return None

    def kept(self, read: Read, split: Split, on: str | None = None) -> Handle | None:
        return None

    def close(self) -> None:
        pass


_chosen: ContextVar[Callable[[], Caller] | None] = ContextVar("daskdist caller", default=None)


@contextlib.contextmanager
def using(make: Callable[[], Caller]) -> Iterator[None]:
    """Make every pipeline that starts inside run by the callers that ``make`` gives."""
    token = _chosen.set(make)
    try:
        yield
    finally:
        _chosen.reset(token)


def embedded(node: Node, num_threads: int | None = None, bring: Bring | None = None) -> Caller:
    """The caller for a pipeline that runs in this process: threads where asked for, or where they gain something."""
    make = _chosen.get()
    if make is not None:
        return make()
    gains = num_threads or any(each.background for each in walk(node))
    return Threads(num_threads, bring) if gains else Now(bring)


def compute_key(graph: Graph, key: Any, bring: Bring | None = None) -> Any:
    """One key of a Dask graph, computed in this thread; ``bring`` brings what is `Kept` of it."""
    from dask.local import get_sync
    from dask.optimization import cull

    wanted = cull(graph, [key])[0]
    # What is on a cluster is brought here, straight from the workers.
    brought: Graph = {}
    for name, task in wanted.items():
        if is_future(task) and task.client is None and bring is not None:
            # It came to a worker with a function that has it from around it.
            brought[name] = (partial(bring, Kept(task.key, ())),)
        elif is_future(task):
            if task.client is None or task.cancelled():
                raise gone(name)
            brought[name] = (Brought(task),)
        elif type(task) is Kept:
            if bring is None:
                raise gone(name)
            brought[name] = (partial(bring, task),)
    return get_sync({**wanted, **brought}, key)


@dataclass(frozen=True)
class Kept:
    """Stands in a Dask graph for what the cluster has on whose worker the graph is.

    Parameters
    ----------
    key
        What the cluster calls it.
    workers
        The workers that had it when that was asked.
    """

    key: Any
    workers: tuple[str, ...]


Bring = Callable[[Kept], Any]


@dataclass(frozen=True)
class Brought:
    """The result of a future of a cluster, waited for."""

    future: Any

    def __call__(self) -> Any:
        client = self.future.client
        return client.gather(self.future, direct=client.direct_to_workers is not False)


def is_future(task: Any) -> bool:
    """Whether a task of a graph stands for a result that a cluster has or is to have."""
    # By its name: this is no place to load distributed.
    return type(task).__name__ == "Future" and type(task).__module__ == "distributed.client"


def gone(key: Any) -> ClusterError:
    """What is raised where data was on a cluster only, and is no longer."""
    return ClusterError(
        f"{key} is no longer on the cluster: the strategy that put it there is closed, or the worker that had it is "
        "lost; make the data again"
    )
