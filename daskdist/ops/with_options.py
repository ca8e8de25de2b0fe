"""``with_options``: settings that travel with a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Final

from dask.utils import parse_bytes

from daskdist.core.arguments import whole_number, yes_or_no
from daskdist.core.failing.skip_errors import cardinality_with_skips
from daskdist.core.node import Facts, Node, Transformation, walk
from daskdist.core.primitive import Primitive
from daskdist.errors import ArgumentError
from daskdist.sharding import AutoShardPolicy, policy_of
from daskdist.storage.locations import Locations

# TensorFlow's names of settings that are called otherwise here.
_ALIASES: Final = {"private_threadpool_size": "num_threads", "ram_budget": "memory_budget_bytes"}


class _Options:
    def __setattr__(self, name: str, value: object) -> None:
        name = _ALIASES.get(name, name)
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
            return
        if name not in _CHECKS:
            raise AttributeError(f"Options has no {name!r}; there are {', '.join(_CHECKS)}")
        object.__setattr__(self, name, None if value is None else _CHECKS[name](value))


@dataclass
class Options(_Options):
    """Settings of a pipeline; None leaves one as it was.

    Parameters
    ----------
    auto_shard_policy
        How it is sharded over the workers of a cluster: an `AutoShardPolicy` or its name. AUTO if never set.
    balance
        Under `AutoShardPolicy.FILE`, ``"files"`` for file i to worker i mod n; or ``"bytes"`` for the largest files
        first, each to the worker that has the least so far, and large ones in parts, so that workers have about as
        many bytes. Files if never set.
    drop_uneven
        Whether a distributed dataset ends before the first step in which a replica would have no rows, as where workers
        read files of different size. Where False, replicas that run out early have zero rows until the last is done.
        False if never set.
    deterministic
        Whether elements come in order. Where False, blocks are handed on as they are done: the same elements,
        and a slow one holds up none of the others. True if never set.
    locations
        Which workers of a cluster have files on a disk of their own, and so read them: a mapping of files, or folders
        of them, to the name or address of a worker or a list of such; or a function of a path that returns this, or
        None. The elements and their order are the same wherever they are read. Workers read in turn if never set.
    memory_budget_bytes
        Bytes that may be read ahead on each worker, or in this process: a number, or text such as ``"64 MiB"``.
        All iterators of a process together stay within the setting ``daskdist.window-bytes`` besides.
    num_threads
        Threads that read ahead in this process. The setting ``daskdist.num-threads`` if never set.
    on_error
        ``"raise"`` or ``"skip"``: whether an element whose computation fails raises, or is left out and logged as by
        ``ignore_errors``. Raise if never set.
    python_numbers
        What Python's own numbers become in elements, also those that functions return: ``"numpy"`` for int64 and
        float64; or ``"tensorflow"`` for int32, int64 where that does not hold them, and float32. It is for
        operations added after it. If never set, ``"tensorflow"`` for datasets of ``daskdist.data``, ``"numpy"`` for
        others.
    seed
        Decides every random choice of operations that were given no seed of their own. Drawn anew for each
        operation if never set.
    shuffle_on_device
        Whether the rows of replicas on GPUs are put in order there: the blocks go to each device whole, once, stay
        there for as long as rows of them are to come, and are gathered by the device, which has more memory
        bandwidth; the order and the values are the same. For embedded strategies, and loops on replicas. It takes the
        memory of a shuffle's buffer on each device and of what is read ahead, up to the setting ``window-bytes``, and
        where several replicas share a pipeline, each of their devices is sent all of it. What is computed after the
        last operation that shuffles, batches or the like, and leaves of text, objects, times, or rows of different
        lengths, are put together on the host in any case. False if never set.
    vectorize
        Whether functions of one element may be called once for many rows where that is known to give the same. Where
        False, each is called for each element, also in datasets that functions make; functions given with
        ``vectorized=True`` are called as they say. True if never set.
    writable
        Whether arrays that are handed out can be written into: what would be a read-only view of a block that others
        have too is copied first. It is for iteration over datasets and distributed datasets, for functions that `run`
        calls (on a cluster each call is given a copy of its own), and for ``dask.compute``. Functions given to `map`
        are given read-only arrays all the same. False if never set.

    >>> Options(auto_shard_policy="data").auto_shard_policy
    <AutoShardPolicy.DATA: 2>
    """

    auto_shard_policy: AutoShardPolicy | None = None
    balance: str | None = None
    deterministic: bool | None = None
    drop_uneven: bool | None = None
    locations: Locations | None = None
    memory_budget_bytes: int | None = None
    num_threads: int | None = None
    on_error: str | None = None
    python_numbers: str | None = None
    seed: int | None = None
    shuffle_on_device: bool | None = None
    vectorize: bool | None = None
    writable: bool | None = None

    @property
    def auto_shard(self) -> bool:
        """True if a policy other than OFF is set, or none; assign False for OFF, True for AUTO.

        TensorFlow's older spelling of ``auto_shard_policy``.
        """
        return self.auto_shard_policy is not AutoShardPolicy.OFF

    @auto_shard.setter
    def auto_shard(self, value: bool) -> None:
        yes_or_no("Options", "auto_shard", value)
        self.auto_shard_policy = AutoShardPolicy.AUTO if value else AutoShardPolicy.OFF

    @property
    def experimental_distribute(self) -> Options:
        """These options, which TensorFlow keeps one level down; assigning some sets each field they have."""
        return self

    @experimental_distribute.setter
    def experimental_distribute(self, options: Options) -> None:
        if not isinstance(options, Options):
            raise ArgumentError(f"Options: expected options, such as DistributeOptions(), got {options!r:.80}")
        _update(self, options)

    threading = autotune = experimental_distribute

    def copy(self) -> Options:
        """Return the same settings, to be changed apart from these."""
        return Options(**dict(self.given()))

    def given(self) -> Iterator[tuple[str, Any]]:
        """Return the fields that are set, by name."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                yield each.name, value


def _bool(name: str) -> Callable[[object], bool]:
    def checked(value: object) -> bool:
        yes_or_no("Options", name, value)
        return bool(value)

    return checked


def _bytes(value: object) -> int:
    try:
        number = parse_bytes(value)
    except (ValueError, TypeError, AttributeError):
        raise ArgumentError(f"Options: memory_budget_bytes is {value!r}; give a size, such as '64 MiB'") from None
    return whole_number("Options", "memory_budget_bytes", int(number), at_least=1)


def _on_error(value: object) -> str:
    if value not in ("raise", "skip"):
        raise ArgumentError(f"Options: on_error is {value!r}; give 'raise' or 'skip'")
    return str(value)


def _python_numbers(value: object) -> str:
    if value not in ("numpy", "tensorflow"):
        raise ArgumentError(f"Options: python_numbers is {value!r}; give 'numpy' or 'tensorflow'")
    return str(value)


def _balance(value: object) -> str:
    if value not in ("files", "bytes"):
        raise ArgumentError(f"Options: balance is {value!r}; give 'files' or 'bytes'")
    return str(value)


_CHECKS: Final[dict[str, Any]] = {
    "auto_shard_policy": policy_of,
    "balance": _balance,
    "deterministic": _bool("deterministic"),
    "drop_uneven": _bool("drop_uneven"),
    "locations": Locations.of,
    "memory_budget_bytes": _bytes,
    "num_threads": lambda value: whole_number("Options", "num_threads", value, at_least=1),
    "on_error": _on_error,
    "python_numbers": _python_numbers,
    "seed": lambda value: whole_number("Options", "seed", value),
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
        return cardinality_with_skips(self.source) if self.options.on_error == "skip" else self.source.cardinality

    def __str__(self) -> str:
        given = [f"{name}={getattr(value, 'name', value)}" for name, value in self.options.given()]
        return f"with_options({', '.join(given)})"

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return inputs[0]


def merged_options(node: Node) -> Options:
    """Return the options in force at a node: a field set further down the pipeline, or by a later input, wins."""
    merged = Options()
    if not any(isinstance(each, WithOptions) for each in walk(node)):
        return merged
    for source in node.inputs:
        _update(merged, merged_options(source))
    if isinstance(node, WithOptions):
        _update(merged, node.options)
    return merged


def conflicts(node: Node) -> Iterator[str]:
    """Yield a description of each option that the inputs of a node set differently."""
    merged = Options()
    for source in node.inputs:
        options = merged_options(source)
        for name, value in options.given():
            before = getattr(merged, name)
            if before is not None and before != value:
                yield f"{node.name}: {name} is {before!r} in one dataset and {value!r} in a later one, which wins"
        _update(merged, options)


def _update(merged: Options, options: Options) -> None:
    for name, value in options.given():
        setattr(merged, name, value)
