"""The caller that makes calls on a bounded pool of threads."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from daskdist.call_progress import CallProgress, under_way
from daskdist.call_threads import CALL_THREADS, CallInThread
from daskdist.config import num_threads
from daskdist.core.block import Rows
from daskdist.core.failing.error_copy import copied_error
from daskdist.errors import WaitTimeoutError
from daskdist.execute.caller import Graph, Handle, LocalCaller, Report, report_of
from daskdist.execute.callers.compute_key import Fetch, compute_key
from daskdist.waiting import wait_intervals

_WHAT: Final = "a call that reads or computes data in a thread of this process"


class Threads(LocalCaller):
    """A caller that makes calls on a pool of threads; a handle is a future of the pool.

    A call gets a thread only when all its arguments are available, so that no thread ever waits.

    Parameters
    ----------
    number
        The number of threads; the setting ``daskdist.num-threads`` if None.
    fetch
        Gets results that the cluster of this worker holds; None in the program.
    """

    home: Hashable | None = "threads"

    def __init__(self, number: int | None = None, fetch: Fetch | None = None) -> None:
        super().__init__()
        self._fetch = fetch
        number = self.num_ahead = number or num_threads()
        self._pool = _Pool(number)

    def call(
        self,
        function: Callable[..., Any],
        handles: Sequence[Handle],
        *args: Any,
        is_cheap: bool = False,
        name: str,
        **_: Any,
    ) -> Handle:
        result: Future[Any] = Future()
        missing = itertools.count(len(handles), -1)
        # A finished future keeps its callbacks. The arguments of the call are popped when it is made; otherwise
        # every block would keep all blocks that were ever computed from it.
        pending_call = [(result, partial(self.timed, name, function), handles, args)]

        def count_down(handle: Future[Any]) -> None:
            if handle.cancelled():
                # The pool is closing, and holds the lock that `submit` would acquire.
                for waiting, *_ in pending_call:
                    waiting.cancel()
                return
            # Counting is atomic, so that exactly one of the callbacks gets the last number.
            if next(missing) > 1:
                return
            if is_cheap:
                # Run in the current thread: the one that computed the last argument, or the one that called.
                _run(*pending_call.pop())
                return
            call = pending_call.pop()
            try:
                self._pool.submit(name, _run, *call)
            except RuntimeError:
                # The pool was closed in the meantime; nobody is waiting any more.
                call[0].cancel()

        for handle in handles:
            handle.add_done_callback(count_down)
        if not handles:
            self._pool.submit(name, _run, *pending_call.pop())
        return result

    def source(self, function: Callable[..., Rows], *args: Any, name: str, **_: Any) -> Handle:
        return self._pool.submit(name, self.timed, name, function, *args)

    def upstream(self, graph: Callable[[], Graph], key: Any, worker: str | None = None) -> Handle:
        return self._pool.submit(str(key), compute_key, graph(), key, self._fetch)

    def stream(self, take: Callable[[], Rows], worker: str | None = None, *, name: str) -> Handle:
        result: Future[Rows] = Future()
        result.set_result(take())
        return result

    def is_done(self, handle: Future[Any]) -> bool:
        return handle.done()

    def wait_for_one(self, handles: Sequence[Future[Any]]) -> None:
        self._wait(handles, futures.FIRST_COMPLETED)

    def report(self, handle: Future[Rows], *, wait: bool) -> Report | None:
        return report_of(self.result(handle)) if wait or handle.done() else None

    def result(self, handle: Future[Any]) -> Any:
        if not handle.done():
            self._wait([handle], futures.ALL_COMPLETED)
        if (error := handle.exception()) is not None:
            # The call keeps its error, whose traceback would keep the iterator that raises it, and so these threads.
            raise copied_error(error).with_traceback(error.__traceback__)
        return handle.result()

    def _wait(self, handles: Sequence[Future[Any]], return_when: str) -> None:
        for within_s in self._pool.wait_intervals():
            if futures.wait(handles, within_s, return_when).done:
                return

    def close(self) -> None:
        self._pool.close()


class _Pool:
    # A number of threads, which do not keep a program from ending if a call in them never does.
    def __init__(self, number: int) -> None:
        self._number = number
        # Held for a moment, to change the following. An interrupt at the beginning of `with self._changed` would leave
        # it locked, as that calls Python functions.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[tuple[Future[Any], str, Callable[..., Any], tuple[Any, ...]]] = deque()
        # Threads that were started and have not ended; one whose start was interrupted is not there.
        self._threads: set[object] = set()
        self._under_way: dict[CallProgress, None] = {}
        self._is_closed = self._is_late = False

    def submit(self, name: str, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        new = object()
        try:
            with self._lock:
                if self._is_closed:
                    raise RuntimeError("the pool is closed")
                self._waiting.append((future, name, function, args))
                needs_thread = len(self._threads) < self._number
                if needs_thread:
                    self._threads.add(new)
            if needs_thread:
                CALL_THREADS.start(CallInThread(partial(self._work, new)))
        except BaseException:
            self._threads.discard(new)
            raise
        return future

    def _work(self, this: object) -> None:
        # The thread is used for other calls later, and its name says whether it reads.
        thread = threading.current_thread()
        idle, thread.name = thread.name, "daskdist"
        while True:
            with self._lock:
                if not self._waiting or this not in self._threads:
                    thread.name = idle
                    self._threads.discard(this)
                    self._changed.notify_all()
                    return
                call = self._waiting.popleft()
            self._make(*call)
            # Keep no references while waiting.
            del call

    def _make(self, future: Future[Any], name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        progress = under_way.call = CallProgress(name)
        self._under_way[progress] = None
        try:
            result = function(*args)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            under_way.call = None
            del self._under_way[progress]
            # An error's traceback refers to this frame, which must not refer to the future that has the error: what the
            # call was given would stay in memory until the garbage collector runs.
            del future, args

    def wait_intervals(self) -> Iterator[float]:
        try:
            yield from wait_intervals(
                lambda: ", ".join(sorted({str(call) for call in list(self._under_way)})) or _WHAT,
                "timeouts.data",
                progress=lambda: [(id(call), call.look()) for call in list(self._under_way)],
            )
        except WaitTimeoutError:
            # Closing must not wait for it either.
            self._is_late = True
            raise

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for future, *_ in waiting:
            future.cancel()
        if self._is_late:
            return
        with contextlib.suppress(WaitTimeoutError), self._changed:
            for within_s in self.wait_intervals():
                if self._changed.wait_for(lambda: not self._threads, within_s):
                    return


def _run(result: Future[Any], function: Callable[..., Any], handles: Sequence[Future[Any]], args: Any) -> None:
    try:
        result.set_result(function([handle.result() for handle in handles], *args))
    except BaseException as error:
        result.set_exception(error)
    finally:
        # See `_make`.
        del result
