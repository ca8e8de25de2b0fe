"""The caller that makes calls of users' functions in local processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Lock
from typing import Any, Final

import cloudpickle
import numpy as np

from daskdist.core.array_pool import pooled_empty
from daskdist.core.block import Rows
from daskdist.core.functions.by_value import modules_by_value
from daskdist.core.primitive import Split, same
from daskdist.execute.caller import Handle, Report, report_of
from daskdist.execute.callers.compute_key import Fetch
from daskdist.execute.callers.process_pool import process_pool
from daskdist.execute.callers.threads import Threads
from daskdist.execute.callers.unread_rows import UnreadRows, gather_read, with_needed
from daskdist.execute.stream.gather import Picks, gather
from daskdist.storage.grouped_splits import joined_split

# Threads and calls ahead for each process.
_THREADS_OF_PROCESS: Final = 8
_AHEAD_OF_PROCESS: Final = 6


class Processes(Threads):
    """A caller whose threads let local processes read and call functions, and gather batches themselves."""

    reads_by_row = True

    def __init__(self, num_processes: int, fetch: Fetch | None = None) -> None:
        # There are enough threads that each process can work on a split, while others gather batches.
        super().__init__(_THREADS_OF_PROCESS * num_processes, fetch)
        self.num_ahead = _AHEAD_OF_PROCESS * num_processes
        self.num_processes = num_processes
        self._is_closed = False
        self._processes = process_pool(num_processes)
        self._files: dict[Any, str] = {}
        # The functions that these files have.
        self._functions: list[Callable[..., Any]] = []
        self._adding = Lock()

    def source(
        self,
        function: Callable[..., Rows],
        *args: Any,
        by_row: bool = False,
        name: str,
        **_: Any,
    ) -> Handle:
        if by_row:
            unread = UnreadFuture()
            unread.set_result(UnreadRows(self._file_of(function), args[0].payload))
            return unread
        if any(map(_has_arrays, args)):
            return super().source(function, *args, name=name)
        return self._pool.submit(name, self.timed, name, self._called_there, function, *args)

    def report(self, handle: Any, *, wait: bool) -> Report | None:
        if not wait and not handle.done():
            return None
        result = super().result(handle)
        if isinstance(result, UnreadRows):
            return Report(len(result.parts), joined_split(result.parts).num_bytes or 0)
        return report_of(result)

    def result(self, handle: Any) -> Any:
        return self._rows_of(super().result(handle))

    def call(
        self,
        function: Callable[..., Any],
        handles: Sequence[Handle],
        *args: Any,
        is_costly: bool = True,
        name: str,
        **options: Any,
    ) -> Handle:
        is_gather = function is gather
        if is_gather and is_costly and len(args) > 1 and args[1] not in (None, same):
            picks, user_function, *rest = args
            return super().call(partial(self._gathered, user_function), handles, picks, *rest, name=name, **options)
        if any(isinstance(handle, UnreadFuture) for handle in handles):
            function = self._gathered_read if is_gather else partial(self._called_with_rows, function)
            options.pop("is_cheap", None)
        return super().call(function, handles, *args, name=name, **options)

    def _gathered_read(
        self, blocks: Sequence[Any], picks: Any, function: Callable[..., Any] | None = None, unstacked: bool = False
    ) -> Any:
        # Have the rows that are not read yet read where they are gathered.
        file = "" if function is None else self._file_of(function)
        return self._call(gather_read, (*with_needed(blocks, picks), file, unstacked))

    def _called_with_rows(self, function: Callable[..., Any], blocks: Sequence[Any], *args: Any) -> Any:
        return function(list(map(self._rows_of, blocks)), *args)

    def _rows_of(self, result: Any) -> Any:
        if not isinstance(result, UnreadRows):
            return result
        return self._call(gather_read, ([result], Picks(range(len(result.parts)), None, None, None), "", False))

    def _gathered(self, function: Callable[..., Any], blocks: Sequence[Any], picks: Any, unstacked: bool) -> Any:
        if any(isinstance(block, UnreadRows) for block in blocks):
            return self._gathered_read(blocks, picks, function, unstacked)
        return self._called_there(function, gather(blocks, picks, same, unstacked, empty=pooled_empty))

    def _called_there(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._call(self._file_of(function), args)

    def _call(self, function: str | Callable[..., Any], args: Sequence[Any]) -> Any:
        return self._processes.call(function, args, is_over=lambda: self._is_closed)

    def _file_of(self, function: Callable[..., Any]) -> str:
        # Equal functions of one pass are pickled once; those that cannot be hashed, such as readers with a dict of
        # options, once for each object, which is kept so that its id stays its own.
        with self._adding:
            key: Any = function
            try:
                hash(function)
            except TypeError:
                key = id(function)
            known = self._files.get(key)
            if known is None:
                with modules_by_value():
                    known = self._files[key] = self._processes.add(cloudpickle.dumps(function))
                self._functions.append(function)
            return known

    def close(self) -> None:
        self._is_closed = True
        self._processes.wake()
        super().close()
        while self._files:
            with contextlib.suppress(OSError):
                os.unlink(self._files.popitem()[1])


class UnreadFuture(Future[Any]):
    """A handle of rows that are not read yet."""


def _has_arrays(argument: Any) -> bool:
    # Only data in memory is used, which is in this process already.
    payload = argument.payload if isinstance(argument, Split) else argument
    parts = payload if isinstance(payload, (tuple, list)) else (payload,)
    return any(isinstance(part, np.ndarray) for part in parts)
