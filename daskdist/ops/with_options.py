"""``with_options``: settings attached to a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Self

from dask.utils import parse_bytes

from daskdist.core.arguments import whole_number, yes_or_no
from daskdist.core.node import Facts, Node, Transformation, walk
from daskdist.core.primitive import Primitive
from daskdist.display.missing_methods import Advised, advice_for
from daskdist.errors import ArgumentError
from daskdist.ops.ignore_errors import IgnoreErrors
from daskdist.sharding import AutoShardPolicy, policy_of
from daskdist.storage.locations import Locations

# TensorFlow's names for settings with another name here.
_ALIASES: Final = {"private_threadpool_size": "num_threads", "ram_budget": "memory_budget_bytes"}


class _Options(Advised):
    def __new__(cls, *args: object, **settings: object) -> Self:
        for name in settings:
            # Derived classes have arguments of their own.
            if cls is Options and name not in _CHECKS:
                raise TypeError(_lacks(cls, name))
        return super().__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        name = _ALIASES.get(name, name)
        check = _CHECKS.get(name)
        if check is not None:
            object.__setattr__(self, name, None if value is None else check(value))
        elif isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            raise AttributeError(_lacks(type(self), name))


def _lacks(cls: type, name: str) -> str:
    advice = advice_for(cls, name)
    rest = f"use {advice}" if advice else f"there are {', '.join(_CHECKS)}"
    return f"Options has no {name!r}; {rest}"


@dataclass(repr=False)
class Options(_Options):
    """Settings of a pipeline; None leaves a setting unchanged.

    Parameters
    ----------
    auto_shard_policy
        The sharding over the workers of a cluster: an `AutoShardPolicy` or its name. Default: AUTO.
    balance
        The distribution of files under `AutoShardPolicy.FILE`: ``"files"`` gives file i to worker i mod n; ``"bytes"``
        gives the largest files first, each to the worker with the fewest bytes so far, and splits large ones, so that
        workers have about the same number of bytes. Default: ``"files"``.
    drop_uneven
        Whether a distributed dataset ends before the first step in which a replica would have no rows, for example when
        workers read files of different sizes. If False, replicas that run out early get batches of zero rows until the
        last one is done. Default: False.
    deterministic
        Whether elements come in order. If False, blocks come as they finish: the same elements, without waiting for a
        slow block. Default: True.
    last_batch
        The call of a function with a batch that has rows for some replicas only: ``"keep_empty"`` calls it on the
        others with zero rows; ``"skip_empty"`` does not call it there, so that they have no value. `reduce` and
        `gather` leave them out, `local_results` shows None, and a later call that is given such a value is skipped as
        well. Loops on replicas get zero rows in any case. Default: ``"keep_empty"``.
    locations
        The workers of a cluster that have files on a local disk and so read them: a mapping from files or folders to
        the name or address of a worker or a list of them, or a function from a path to these or None. The elements and
        their order do not depend on it. Default: workers read in turn.
    memory_budget_bytes
        The bytes to read ahead on each worker, or in this process: a number, or text such as ``"64 MiB"``. All
        iterators of a process together also stay within the setting ``daskdist.window-bytes``.
    num_processes
        The number of local processes in which files are read and functions called, or ``"auto"`` for one per core: for
        functions that mostly run Python, of which a process runs one at a time. Elements and their order are the same.
        The processes are started by the first pass and kept; arrays come back by memory that both have. Batches are
        made in this process. It has no effect on a cluster, whose workers are processes already. Default: none.
    num_threads
        The number of threads that read ahead in this process. Default: the setting ``daskdist.num-threads``, one per
        core. A function that lets other threads run many times in each row, such as a decoder of small images, is
        faster in one thread, or in processes.
    on_error
        ``"raise"``, or ``"skip"`` to log and leave out elements whose computation fails and damaged parts of files, as
        ``ignore_errors`` does. Default: ``"raise"``.
    python_numbers
        The dtypes of Python numbers in elements, also of those that functions return: ``"numpy"`` for int64 and
        float64, or ``"tensorflow"`` for int32 (int64 for larger numbers) and float32. It applies to operations added
        after it. Default: ``"tensorflow"`` for datasets of ``daskdist.data``, ``"numpy"`` for others.
    seed
        Determines the random choices of all operations without a seed. Default: a seed drawn for each operation.
    shuffle_on_device
        Whether rows for replicas on GPUs are shuffled there, for embedded strategies and loops on replicas: each device
        gets whole blocks, once, keeps them while rows of them are needed, and gathers the rows with its higher memory
        bandwidth. The order and the values are the same. This takes device memory for the buffer of a shuffle and for
        data read ahead, up to the setting ``window-bytes``; if several replicas share a pipeline, each of their devices
        gets all of it. Results of operations after the last one that shuffles, batches or the like, and leaves of text,
        objects, times or rows of different lengths, are assembled on the host in any case. Default: False.
    vectorize
        Whether functions of one element may be called once for many rows if that is known to give the same. If False,
        each is called for each element, also in datasets that functions return; functions with ``vectorized=True`` are
        not affected. Default: True.
    writable
        Whether arrays that reach the user are writable: read-only views of shared blocks are copied first. It applies
        to iteration over datasets and distributed datasets, to functions that `run` calls (on a cluster each call gets
        its own copy), and to ``dask.compute``. Functions passed to `map` get read-only arrays in any case. Default:
        False.

    >>> Options(auto_shard_policy="data").auto_shard_policy
    <AutoShardPolicy.DATA: 2>
    """

    auto_shard_policy: AutoShardPolicy | None = None
    balance: str | None = None
    deterministic: bool | None = None
    drop_uneven: bool | None = None
    last_batch: str | None = None
    locations: Locations | None = None
    memory_budget_bytes: int | None = None
    num_processes: int | str | None = None
    num_threads: int | None = None
    on_error: str | None = None
    python_numbers: str | None = None
    seed: int | None = None
    shuffle_on_device: bool | None = None
    vectorize: bool | None = None
    writable: bool | None = None

    def __repr__(self) -> str:
        settings = [f"{name}={getattr(value, 'name', value)!r}" for name, value in options_set(self)]
        return f"Options({', '.join(settings)})"

    @property
    def auto_shard(self) -> bool:
        """False if the policy is OFF, else True; assign False for OFF, True for AUTO.

        TensorFlow's older spelling of ``auto_shard_policy``.
        """
        return self.auto_shard_policy is not AutoShardPolicy.OFF

    @auto_shard.setter
    def auto_shard(self, value: bool) -> None:
        yes_or_no("Options", "auto_shard", value)
        self.auto_shard_policy = AutoShardPolicy.AUTO if value else AutoShardPolicy.OFF

    @property
    def experimental_distribute(self) -> Options:
        """These options, which TensorFlow nests one level deeper; assigning options sets each of their fields."""
        return self

    @experimental_distribute.setter
    def experimental_distribute(self, options: Options) -> None:
        if not isinstance(options, Options):
            raise ArgumentError(f"Options: expected options, such as DistributeOptions(), got {options!r:.80}")
        for name, value in options_set(options):
            setattr(self, name, value)

    threading = autotune = experimental_distribute

    def copy(self) -> Options:
        """Return an independent copy."""
        return Options(**dict(options_set(self)))


def options_set(options: Options) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the options that are set."""
    for name in _CHECKS:
        value = getattr(options, name)
        if value is not None:
            yield name, value


def _bool(name: str) -> Callable[[object], bool]:
    def checked(value: object) -> bool:
        yes_or_no("Options", name, value)
        return bool(value)

    return checked


def _one_of(name: str, *choices: str) -> Callable[[object], str]:
    def checked(value: object) -> str:
        if value not in choices:
            raise ArgumentError(f"Options: {name} is {value!r}; give {' or '.join(map(repr, choices))}")
        return str(value)

    return checked


def _bytes(value: object) -> int:
    try:
        number = parse_bytes(value)
    except (ValueError, TypeError, AttributeError):
        raise ArgumentError(f"Options: memory_budget_bytes is {value!r}; give a size, such as '64 MiB'") from None
    return whole_number("Options", "memory_budget_bytes", int(number), at_least=1)


def _num_processes(value: object) -> int | str:
    if value == "auto":
        return "auto"
    return whole_number("Options", "num_processes", value, at_least=1)


_CHECKS: Final[dict[str, Any]] = {
    "auto_shard_policy": policy_of,
    "balance": _one_of("balance", "files", "bytes"),
    "deterministic": _bool("deterministic"),
    "drop_uneven": _bool("drop_uneven"),
    "last_batch": _one_of("last_batch", "keep_empty", "skip_empty"),
    "locations": Locations.of,
    "memory_budget_bytes": _bytes,
    "num_processes": _num_processes,
    "num_threads": lambda value: whole_number("Options", "num_threads", value, at_least=1),
    "on_error": _one_of("on_error", "raise", "skip"),
    "python_numbers": _one_of("python_numbers", "numpy", "tensorflow"),
    "seed": lambda value: whole_number("Options", "seed", value, at_most=None),
    "shuffle_on_device": _bool("shuffle_on_device"),
    "vectorize": _bool("vectorize"),
    "writable": _bool("writable"),
}


@dataclass(frozen=True, eq=False)
class WithOptions(Transformation):
    """The same elements."""

    options: Options = field(default_factory=Options)

    name = "with_options"
    facts = Facts(keeps_rows=True, keeps_order=True, keeps_spec=True, per_worker=True)

    def __post_init__(self) -> None:
        if not isinstance(self.options, Options):
            raise ArgumentError(f"with_options: expected Options, got {type(self.options).__name__}")

    @property
    def cardinality(self) -> int:
        source = IgnoreErrors(self.source) if self.options.on_error == "skip" else self.source
        return source.cardinality

    def __str__(self) -> str:
        settings = [f"{name}={getattr(value, 'name', value)}" for name, value in options_set(self.options)]
        return f"with_options({', '.join(settings)})"

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return inputs[0]


def merged_options(node: Node) -> Options:
    """Return the options of a node: a field set further downstream, or by a later input, wins."""
    return Options(**_settings_of(node))


def _settings_of(node: Node) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for source in node.inputs:
        settings.update(_settings_of(source))
    if isinstance(node, WithOptions):
        settings.update(options_set(node.options))
    return settings


def comes_in_any_order(node: Node) -> bool:
    """Return whether the elements of a pipeline come in the order in which they are done."""
    chosen = merged_options(node).deterministic
    return not all(part.in_order for part in walk(node)) if chosen is None else not chosen


def conflicts(node: Node) -> Iterator[str]:
    """Yield a description of each option that the inputs of a node set differently."""
    merged: dict[str, Any] = {}
    for source in node.inputs:
        for name, value in _settings_of(source).items():
            before = merged.get(name, value)
            if before != value:
                yield f"{node.name}: {name} is {before!r} in one dataset and {value!r} in a later one, which wins"
            merged[name] = value
