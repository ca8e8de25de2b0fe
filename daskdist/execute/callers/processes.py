"""The caller that makes calls of users' functions in local processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from operator import itemgetter
from threading import Lock
from typing import Any, Final

import numpy as np

from daskdist.core.array_pool import pooled_empty
from daskdist.core.block import Rows
from daskdist.core.primitive import Split, same
from daskdist.execute.caller import Handle, Report
from daskdist.execute.callers.compute_key import Fetch
from daskdist.execute.callers.process_pool import LocalFunction, process_pool
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
        self._functions: dict[Any, tuple[Callable[..., Any], LocalFunction]] = {}
        self._adding = Lock()

    def source(self, function: Callable[..., Rows], *args: Any, by_row: bool = False, name: str, **_: Any) -> Handle:
        if by_row:
            unread = UnreadFuture()
            unread.set_result(UnreadRows(self._sent(function), args[0].payload))
            return unread
        if any(map(_has_arrays, args)):
            return super().source(function, *args, name=name)
        return self._pool.submit(name, self.timed, name, self._call, self._sent(function), args)

    def report(self, handle: Any, *, wait: bool) -> Report | None:
        if not isinstance(handle, UnreadFuture):
            return super().report(handle, wait=wait)
        parts = super().result(handle).parts
        return Report(len(parts), joined_split(parts).num_bytes or 0)

    def result(self, handle: Any) -> Any:
        # Interrupts come in this thread, which therefore has no process.
        return super().result(
            self.call(itemgetter(0), [handle], name="read") if isinstance(handle, UnreadFuture) else handle
        )

    def call(
        self, function: Callable[..., Any], handles: Sequence[Handle], *args: Any, is_costly: bool = True, **others: Any
    ) -> Handle:
        is_unread = any(isinstance(handle, UnreadFuture) for handle in handles)
        if is_unread:
            others.pop("is_cheap", None)
        if function is gather and (is_unread or (is_costly and len(args) > 1 and args[1] not in (None, same))):
            function = self._gathered
        elif is_unread:
            function = partial(self._with_rows, function)
        return super().call(function, handles, *args, **others)

    def _gathered(
        self, blocks: Sequence[Any], picks: Any, function: Callable[..., Any] | None = None, unstacked: bool = False
    ) -> Any:
        sent = None if function is None else self._sent(function)
        if any(isinstance(block, UnreadRows) for block in blocks):
            # Rows that are not read yet are read where they are gathered.
            return self._read(*with_needed(blocks, picks), sent, unstacked)
        return self._call(sent, [gather(blocks, picks, same, unstacked, empty=pooled_empty)])

    def _with_rows(self, function: Callable[..., Any], blocks: Sequence[Any], *args: Any) -> Any:
        return function([self._rows_of(block) if isinstance(block, UnreadRows) else block for block in blocks], *args)

    def _rows_of(self, unread: UnreadRows) -> Any:
        return self._read([unread], Picks(range(len(unread.parts)), None, None, None), None, False)

    def _read(self, blocks: Sequence[Any], picks: Any, function: LocalFunction | None, unstacked: bool) -> Any:
        readers = [block.function for block in blocks if isinstance(block, UnreadRows)]
        uses = readers if function is None else [function, *readers]
        return self._call(gather_read, (blocks, picks, function, unstacked), uses)

    def _call(self, function: Any, args: Sequence[Any], uses: Sequence[LocalFunction] = ()) -> Any:
        return self._processes.call(function, args, uses, is_over=lambda: self._is_closed)

    def _sent(self, function: Callable[..., Any]) -> LocalFunction:
        # Equal functions of one pass are pickled once; those that cannot be hashed, such as readers with a dict of
        # options, once for each object, which is kept so that its id stays its own.
        with self._adding:
            key: Any = function
            try:
                hash(function)
            except TypeError:
                key = id(function)
            if key not in self._functions:
                self._functions[key] = function, LocalFunction(function)
            return self._functions[key][1]

    def close(self) -> None:
        self._is_closed = True
        self._processes.release()
        super().close()
        # Those that were making a call have memory, too.
        self._processes.release()


class UnreadFuture(Future[Any]):
    """A handle of rows that are not read yet."""


def _has_arrays(argument: Any) -> bool:
    # Only data in memory is used, which is in this process already.
    payload = argument.payload if isinstance(argument, Split) else argument
    parts = payload if isinstance(payload, (tuple, list)) else (payload,)
    return any(isinstance(part, np.ndarray) for part in parts)
