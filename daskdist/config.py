"""Settings, kept in Dask's own configuration under ``daskdist``.

Set them as any Dask setting: ``dask.config.set({"daskdist.window-bytes": "256 MiB"})``, a YAML file in
``~/.config/dask``, or ``DASK_DASKDIST__WINDOW_BYTES``.
"""

from __future__ import annotations

import functools
import operator
import os
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NoReturn

import dask.config
from dask.utils import parse_bytes, parse_timedelta

from daskdist.context_variables import changed

DEFAULTS: Final[dict[str, Any]] = {
    # The most bytes of blocks and bundles that may be outstanding (requested, not yet released) on one worker, or in
    # this process without a cluster, in total over all iterators of this process. Half is for reading, half for
    # batching. A single iterator uses at most three quarters, so that a later one finds room. On a cluster it is at
    # most an eighth of the memory limit of the worker that has the least.
    "window-bytes": "256 MiB",
    # The size of the splits of a source that can be split.
    "split-bytes": "16 MiB",
    # The largest decompressed size of a line of text, a row, a record, or a JSON file that is not in lines; larger ones
    # are an error, so that a file without newlines does not take all memory.
    "max-record-bytes": "1 GiB",
    # The size of the bundle of chunks that one task builds.
    "bundle-bytes": "16 MiB",
    # The largest file that is read whole into memory from an HTTP server that does not serve ranges of files; also the
    # total size of such files that are kept.
    "whole-file-bytes": "256 MiB",
    # The seconds before a request to a server of files is made again, if it refused for a moment (HTTP status 408, 429,
    # 500, 502, 503, 504) or closed the connection; after the last one it is an error.
    "request-pauses": [0.25, 1, 4],
    # The arity of the tree in which values of several workers are reduced.
    "split-every": 8,
    # The number of threads that read ahead in this process; null means one per core.
    "num-threads": None,
    # The seed of every operation without a seed; null means that each operation draws one.
    "seed": None,
    # The number of calls of `run` that may be in flight before another one waits for the oldest; fewer are if their
    # batches fill a quarter of a worker's memory.
    "max-steps-in-flight": 1024,
    # The bytes of large arguments that may wait to be sent to one worker before another call waits. Results are not
    # counted: those of `max-steps-in-flight` calls, and those that the program refers to, stay in the workers' memory.
    "step-bytes": "256 MiB",
    # The modules whose functions travel to workers with their code instead of being imported there: "local" for those
    # beside or below the script (the notebook's folder), or a list of names. null for those of `__main__` only.
    "send-modules": None,
    # Whether steps and their results are sent through the scheduler rather than directly between the program and the
    # workers: true, false or "auto". "auto" uses the client's `direct_to_workers`; if that is not set, only workers
    # that cannot be connected to within three seconds are reached through the scheduler.
    "steps": {"relay": "auto"},
    # Whether `all_reduce` combines large device arrays of several workers from device to device, by NCCL, instead of
    # through the hosts. The order of additions then depends on NCCL, so that sums of floats may differ in the last bits
    # from those of the tree; replicas have the same bits in any case. Set it on all workers, or on none. NCCL opens
    # connections of its own, which are neither encrypted nor authenticated: on a cluster with TLS, true is an error,
    # and "insecure" allows them.
    "nccl": False,
    # Whether CPUs stand in for the GPUs that a program names and this machine lacks, with a warning, so that programs
    # for GPUs can be tried on any machine; otherwise that is an error.
    "devices": {"cpu-stand-in": False},
    # Seconds to wait. `connect`: for a scheduler to answer a new connection; `workers`: for its first worker;
    # `scheduler`: for a scheduler to answer a request; `collective`: for all replicas to join a collective call.
    # `data`: the time that reading, one call of a dataset's function, or one element of a generator may take while it
    # is waited for; the program's value is sent along with its tasks. `step`: the time that one call of a replica may
    # take while its result is waited for. `loop`: instead, the time that a loop over a distributed dataset may take
    # from one batch or collective operation to the next; after 30 seconds there is a message in the log. `silence`: the
    # time for which a worker may give no sign of life, because it is stopped, swaps, or a function holds Python's lock;
    # after that it is considered lost. `paused`: the time for which nothing happens on workers that Dask has paused, as
    # their memory is full, and that cannot free any, for example because their disk is full, too. The program's values
    # of `collective`, `silence` and `data` at a call of `run` are sent along, so they also apply on workers that were
    # started earlier; a value set in the function itself takes precedence, and if the program has the default, the
    # workers' value applies.
    "timeouts": {
        "connect": 8,
        "workers": 30,
        "scheduler": 60,
        "collective": 300,
        "data": 3600,
        "step": 3600,
        "loop": 86400,
        "silence": 300,
        "paused": 30,
    },
    "service": {
        # Seconds for which a job without consumers is kept.
        "job-gc-timeout": 600,
        # The directory, local or of any file system of fsspec, in which the scheduler keeps the state of jobs, so that
        # another scheduler can continue them; null means that it is not kept.
        "work-dir": None,
        # Seconds for which consumers try to reach a lost scheduler, and for which a new one waits for them.
        "reconnect-timeout": 60,
        # The most bytes of elements of one task that a worker keeps, produced and not acknowledged.
        "buffer-bytes": "64 MiB",
        # The most bytes of elements in flight from one worker to one consumer.
        "window-bytes": "32 MiB",
        # The most bytes that a cache shared by trainers keeps on one worker.
        "cache-bytes": "256 MiB",
    },
}

dask.config.update_defaults({"daskdist": DEFAULTS})


def in_bytes(name: str) -> int:
    """Return a setting that is a size, in bytes."""
    return _num_bytes(setting(name))


@functools.lru_cache(maxsize=64)
def _num_bytes(size: Any) -> int:
    return int(parse_bytes(size))


def all_settings() -> dict[str, Any]:
    """Return all settings, to apply them in another process."""
    return {**DEFAULTS, **(dask.config.config.get("daskdist") or {})}


def setting(name: str) -> Any:
    """Return a setting by its name below ``daskdist``, such as ``"window-bytes"``."""
    parts = name.split(".")
    # Looked up in every step; Dask's `get` takes ten times as long.
    try:
        value = dask.config.config["daskdist"]
        for part in parts:
            value = value[part]
    except (KeyError, TypeError):
        value = None
    if value is not None:
        return value
    # If a setting was set temporarily before this module was imported, all defaults vanish when that ends.
    return dask.config.get(f"daskdist.{name}", functools.reduce(operator.getitem, parts, DEFAULTS))


# Settings of a program that also apply to its calls on workers.
_SENT_ALONG: Final = ("timeouts.collective", "timeouts.silence", "timeouts.data")
# In a program's call on a worker: for each of these settings the program's value, and that of the worker.
_sent: Final[ContextVar[dict[str, tuple[Any, Any]] | None]] = ContextVar("daskdist settings", default=None)


def seconds(name: str) -> float:
    """Return a setting that is a time, in seconds; in a program's call on a worker that may be the program's value.

    Raises
    ------
    ValueError
        The setting is not a time.
    """
    value, sent = setting(name), _sent.get()
    # A value that has changed since the call began was set by the called function.
    if sent is not None and name in sent and value == sent[name][1]:
        value = sent[name][0]
    if isinstance(value, (int, float)) and value >= 0:
        return value
    try:
        parsed = parse_timedelta(value) if isinstance(value, str) else -1
    except (KeyError, ValueError):
        parsed = -1
    if parsed < 0:
        raise ValueError(f"daskdist.{name} is {value!r}; give seconds, such as 5 or '5 s'")
    return float(parsed)


def to_send() -> tuple[Any, ...] | None:
    """Return the settings to send to a worker along with a call; None where all have their defaults."""
    if _sent.get() is not None:
        return tuple(map(seconds, _SENT_ALONG))
    try:
        # Looked up in every call.
        timeouts = dask.config.config["daskdist"]["timeouts"]
        values = timeouts["collective"], timeouts["silence"], timeouts["data"]
    except (KeyError, TypeError):
        values = None, None, None
    if None in values:
        values = tuple(map(setting, _SENT_ALONG))
    return None if values == _DEFAULTS_SENT else values


_DEFAULTS_SENT: Final = tuple(DEFAULTS["timeouts"][name.removeprefix("timeouts.")] for name in _SENT_ALONG)


def sent(settings: tuple[Any, ...] | None) -> AbstractContextManager[None]:
    """Apply the settings of a program, see `to_send`, to the calls in a ``with`` block."""
    if settings is None:
        return nullcontext()
    return changed(_sent, {name: (value, setting(name)) for name, value in zip(_SENT_ALONG, settings, strict=True)})


def num_threads() -> int:
    """Return the number of threads that read ahead in this process."""
    return int(setting("num-threads") or os.cpu_count() or 1)


# Names of TensorFlow's module `config`, and what to use instead.
_OF_TENSORFLOW: Final = {
    **dict.fromkeys(
        ("get_visible_devices", "list_logical_devices", "list_physical_devices"), "daskdist.list_devices()"
    ),
    **dict.fromkeys(
        ("set_logical_device_configuration", "set_visible_devices"),
        'the names of the devices, such as daskdist.MirroredStrategy(["CPU:0", "CPU:1"])',
    ),
    "experimental_connect_to_cluster": "the strategy alone: it connects to its cluster",
    "run_functions_eagerly": "plain Python: functions are always called as they are written",
    "threading": "daskdist.Options(num_threads=...)",
}
# Hidden from type checkers, for which `__getattr__` would make all names valid.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        advice = f"; use {_OF_TENSORFLOW[name]}" if name in _OF_TENSORFLOW else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
