"""The caller that makes calls on a bounded pool of threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from daskdist.config import num_threads
from daskdist.core.block import Rows
from daskdist.core.loop_limit import LoopPool
from daskdist.core.primitive import Read, Split
from daskdist.execute.caller import MIB, Graph, Handle, Report, SplitLocations, report_of
from daskdist.execute.callers.compute_key import Fetch, compute_key


class Threads:
    """Calls on a pool of threads; one takes a thread when all it needs is there, so that none waits in one.

    Parameters
    ----------
    number
        How many there are; the setting ``daskdist.num-threads`` if None.
    fetch
        Brings what a cluster has, on a worker of that.
    """

    bundle_bytes = 4 * MIB
    bundle_chunks = 64
    compacts = True
    reports_freely = True
    divides = True
    home: Hashable | None = "threads"
    backend: Any = None

    def __init__(self, number: int | None = None, fetch: Fetch | None = None) -> None:
        self._fetch = fetch
        number = self.num_ahead = number or num_threads()
        self._pool = ThreadPoolExecutor(number, "daskdist")
        self._loops = LoopPool(number)

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
            if is_cheap:
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

    def source(self, function: Callable[..., Rows], *args: Any, worker: str | None = None, name: str) -> Handle:
        return self._pool.submit(self._loops.run, function, *args)

    def upstream(self, graph: Callable[[], Graph], key: Any, worker: str | None = None) -> Handle:
        return self._pool.submit(self._loops.run, compute_key, graph(), key, self._fetch)

    def places(self, read: Read) -> SplitLocations | None:
        return None

    def kept(self, read: Read, split: Split, worker: str | None = None) -> Handle | None:
        return None

    def stream(self, take: Callable[[], Rows], worker: str | None = None, *, name: str) -> Handle:
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
