"""Settings, kept in Dask's own configuration under ``daskdist``.

Set them as any Dask setting: ``dask.config.set({"daskdist.window-bytes": "256 MiB"})``, a YAML file in
``~/.config/dask``, or ``DASK_DASKDIST__WINDOW_BYTES``.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import dask.config
from dask.utils import parse_bytes, parse_timedelta

DEFAULTS: Final[dict[str, Any]] = {
    # Bytes of blocks and bundles that may be outstanding (asked for, not yet released) on one worker, or in
    # this process where there is no cluster, of all iterators of this process together. Half is for what is read, half
    # for what is batched. One iterator alone takes up to three quarters, so that one that comes later finds room.
    "window-bytes": "256 MiB",
    # The size at which a source that can be cut is cut.
    "split-bytes": "16 MiB",
    # The most that a line of text, a row, a record, or a file of JSON that is not in lines may have, decompressed;
    # longer ones are an error, so that a file without newlines does not take all memory.
    "max-record-bytes": "1 GiB",
    # The size of the bundle of chunks that one task builds.
    "bundle-bytes": "16 MiB",
    # The largest file that is read whole, into memory, from an HTTP server that does not serve ranges of files. Those
    # that are kept have no more bytes together.
    "whole-file-bytes": "256 MiB",
    # The arity of the tree by which values of several workers are reduced.
    "split-every": 8,
    # Threads that read ahead in this process; null means one a core.
    "num-threads": None,
    # The seed of every operation that is given none; null means that each draws its own.
    "seed": None,
    # How many calls of `run` may be under way before a further one waits for the oldest.
    "max-steps-in-flight": 256,
    # Bytes of large arguments that may wait to be sent to one worker before a further call waits. Results are not
    # counted: those of `max-steps-in-flight` calls, and those that the program refers to, are in the workers' memory.
    "step-bytes": "256 MiB",
    # Whether steps and their results go by way of the scheduler, and not straight between the program and the workers:
    # true, false or "auto". The last is as the client's `direct_to_workers` says; if it says nothing, they do to each
    # worker that cannot be connected to within three seconds.
    "steps": {"relay": "auto"},
    # Seconds to wait for a scheduler to answer, for its first worker, and for all replicas to make a call they make
    # together. What the program has for the last one when it calls `run` goes along with that, and so counts on workers
    # that were started before it was set; what is set in the function itself comes first. Where the program leaves it
    # at the default, that of the workers counts. And seconds that one call of a replica may take while its result is
    # waited for; loops over distributed datasets may take as long as they like. A worker that does not answer for so
    # long, or for five minutes, is lost.
    "timeouts": {"connect": 8, "workers": 30, "collective": 300, "step": 3600},
    # The data service: for how many seconds a job is kept that nobody reads; where the scheduler keeps the state of
    # jobs, so that another can go on with them (a directory, local or of any file system of fsspec), nowhere if null;
    # for how many seconds readers look for a scheduler that was lost, and it waits for them, where the state is kept;
    # the most bytes of elements that a worker keeps of one task, produced and not acknowledged; the most that are on
    # their way to one consumer from one worker; and the most that a cache which trainers share keeps on one worker.
    "service": {
        "job-gc-timeout": 600,
        "work-dir": None,
        "reconnect-timeout": 60,
        "buffer-bytes": "64 MiB",
        "window-bytes": "32 MiB",
        "cache-bytes": "256 MiB",
    },
}

dask.config.update_defaults({"daskdist": DEFAULTS})


def in_bytes(name: str) -> int:
    """Return a setting that is a size, as a number of bytes."""
    return _num_bytes(setting(name))


@functools.lru_cache(maxsize=64)
def _num_bytes(size: Any) -> int:
    return int(parse_bytes(size))


def setting(name: str) -> Any:
    """Return a setting by its name below ``daskdist``, such as ``"window-bytes"``."""
    value = dask.config.config.get("daskdist")
    parts = name.split(".")
    for part in parts:
        value = value.get(part) if isinstance(value, dict) else None
    # Each step asks, and Dask's own `get` takes ten times as long.
    if value is not None:
        return value
    # Where one was set for a while before this module was imported, all of them go when that is over.
    return dask.config.get(f"daskdist.{name}", functools.reduce(operator.getitem, parts, DEFAULTS))


# In a call of a program on a worker, what the program has for `timeouts.collective`, and what the worker has.
_sent: Final[ContextVar[tuple[Any, Any] | None]] = ContextVar("daskdist settings", default=None)


def collective_s() -> float:
    """Seconds to wait for all replicas to make a call they make together."""
    configured, sent = setting("timeouts.collective"), _sent.get()
    # What has changed since the call began was set by what is called.
    return _in_seconds("timeouts.collective", configured if sent is None or configured != sent[1] else sent[0])


def seconds(name: str) -> float:
    """Return a setting that is a time, in seconds.

    Raises
    ------
    ValueError
        It is none.
    """
    return _in_seconds(name, setting(name))


def _in_seconds(name: str, value: Any) -> float:
    if isinstance(value, (int, float)) and value >= 0:
        return value
    try:
        parsed = parse_timedelta(value) if isinstance(value, str) else -1
    except (KeyError, ValueError):
        parsed = -1
    if parsed < 0:
        raise ValueError(f"daskdist.{name} is {value!r}; give seconds, such as 5 or '5 s'")
    return float(parsed)


def to_send() -> Any:
    """Return the settings to send to a worker along with a call; None where all have their defaults."""
    configured = setting("timeouts.collective")
    return None if configured == DEFAULTS["timeouts"]["collective"] else configured


@contextmanager
def sent(settings: Any) -> Iterator[None]:
    """Apply the settings of a program to the calls inside."""
    token = _sent.set((settings, setting("timeouts.collective")))
    try:
        yield
    finally:
        _sent.reset(token)


def num_threads() -> int:
    """Return the number of threads that read ahead in this process."""
    return int(setting("num-threads") or os.cpu_count() or 1)
