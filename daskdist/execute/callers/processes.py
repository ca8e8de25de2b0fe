"""The caller that makes calls of users' functions in local processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any

import cloudpickle
import numpy as np

from daskdist.core.block import Rows
from daskdist.core.functions.by_value import modules_by_value
from daskdist.core.primitive import Split, same
from daskdist.execute.caller import Handle
from daskdist.execute.callers.compute_key import Fetch
from daskdist.execute.callers.process_pool import process_pool
from daskdist.execute.callers.threads import Threads
from daskdist.execute.stream.gather import gather


class Processes(Threads):
    """A caller whose threads have reads and functions called in local processes, and gather batches themselves.

    Parameters
    ----------
    num_processes
        The number of processes.
    fetch
        As for `Threads`.
    """

    def __init__(self, num_processes: int, fetch: Fetch | None = None) -> None:
        # While one call of a process is running, its next one is on the way.
        super().__init__(2 * num_processes, fetch)
        self.num_processes = num_processes
        self._processes = process_pool(num_processes)
        self._files: dict[Any, str] = {}
        self._adding = Lock()

    def source(self, function: Callable[..., Rows], *args: Any, name: str, **_: Any) -> Handle:
        if any(map(_has_arrays, args)):
            return super().source(function, *args, name=name)
        return self._pool.submit(self.timed, name, self._called_there, function, *args)

    def call(
        self, function: Callable[..., Any], handles: Sequence[Handle], *args: Any, name: str, **options: Any
    ) -> Handle:
        if function is gather and len(args) > 1 and args[1] not in (None, same):
            picks, user_function, *rest = args
            return super().call(partial(self._gathered, user_function), handles, picks, *rest, name=name, **options)
        return super().call(function, handles, *args, name=name, **options)

    def _gathered(self, function: Callable[..., Any], blocks: Sequence[Rows], picks: Any, *rest: Any) -> Any:
        return self._called_there(function, gather(blocks, picks, same, *rest))

    def _called_there(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._processes.call(self._file_of(function), args)

    def _file_of(self, function: Callable[..., Any]) -> str:
        # Equal functions of one pass are pickled once.
        with self._adding:
            known = self._files.get(function)
            if known is None:
                with modules_by_value():
                    known = self._files[function] = self._processes.add(cloudpickle.dumps(function))
            return known

    def close(self) -> None:
        super().close()
        while self._files:
            with contextlib.suppress(OSError):
                os.unlink(self._files.popitem()[1])


def _has_arrays(argument: Any) -> bool:
    # Only data in memory is looked at, which is in this process already.
    payload = argument.payload if isinstance(argument, Split) else argument
    parts = payload if isinstance(payload, (tuple, list)) else (payload,)
    return any(isinstance(part, np.ndarray) for part in parts)
