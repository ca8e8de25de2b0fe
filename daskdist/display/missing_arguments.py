"""Arguments that functions of other libraries have, and what to use instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

_BATCHES: Final = "ds.batch(64)"
_PROCESSES: Final = "ds.with_options(daskdist.Options(num_processes=2))"
_PARTITIONS: Final = 'ds.to_dask_dataframe().to_parquet(path, partition_on=["x"])'
_FUNCTION: Final = "map_func=function"
_SIGNATURE: Final = 'output_signature=daskdist.TensorSpec((), "int64")'
_COMMUNICATION: Final = "the strategy without it: how replicas communicate is chosen for you"
_AS_WRITTEN: Final = "daskdist.function without it: functions are called as they are written"
_DIRECTORY: Final = "CheckpointManager(directory), and its save(checkpoint, step)"

# What to use, by the name of the function and of the argument.
OF_FUNCTIONS: Final = {
    "read_csv": {
        "dtype": "dtypes={column: dtype}",
        "field_delim": 'delimiter=";"',
        "names": "header=[column, ...], or new_names=[column, ...] where files begin with names",
        "na_values": "null_values=[text, ...]",
        "nrows": "ds.take(n)",
        "parse_dates": 'dtypes={column: "datetime64[s]"}, if dates are not recognised',
        "sep": 'delimiter=";"',
        "usecols": "columns=[column, ...]",
    },
    "Dataset.batch": {"drop_last": "drop_remainder=True", "shuffle": "ds.shuffle(10_000).batch(64)"},
    "Dataset.from_generator": {"output_shapes": _SIGNATURE, "output_types": _SIGNATURE},
    "Dataset.load": {
        "compression": "Dataset.load(path): the files say how they are compressed",
        "reader_func": "Dataset.load(path), and the methods of the dataset",
    },
    "Dataset.map": {
        "batch_size": f"{_BATCHES}.map(function)",
        "batched": f"{_BATCHES}.map(function)",
        "fn": _FUNCTION,
        "func": _FUNCTION,
        "function": _FUNCTION,
        "num_proc": _PROCESSES,
        "num_workers": _PROCESSES,
        "synchronous": "num_parallel_calls=1",
        "use_unbounded_threadpool": "ds.with_options(daskdist.Options(num_threads=64))",
    },
    "Dataset.with_options": {
        name: f"ds.with_options(daskdist.Options({name}=...))"
        for name in ("deterministic", "num_processes", "num_threads")
    },
    "Dataset.to_parquet": {
        "partition_by": _PARTITIONS,
        "partition_cols": _PARTITIONS,
        "partition_on": _PARTITIONS,
    },
    "torch_loader": {
        "batch_size": f"daskdist.torch_loader({_BATCHES})",
        "drop_last": "ds.batch(64, drop_remainder=True)",
        "num_workers": _PROCESSES,
        "shuffle": f"ds.shuffle(10_000), before {_BATCHES}",
    },
    "CheckpointManager": {
        "checkpoint": _DIRECTORY,
        "checkpoint_name": 'directory, such as CheckpointManager("run")',
        "max_to_keep": "keep=3",
    },
    "MirroredStrategy": {"cross_device_ops": _COMMUNICATION},
    "MultiWorkerMirroredStrategy": {
        "cluster_resolver": "cluster=resolver, with a daskdist.ClusterResolver, a Dask cluster, a client or an address",
        "communication": _COMMUNICATION,
        "communication_options": _COMMUNICATION,
    },
    "TPUStrategy": {"experimental_spmd_xla_partitioning": "the strategy without it: each replica has one device"},
    "TPUClusterResolver": dict.fromkeys(
        ("coordinator_address", "coordinator_name", "credentials", "discovery_url", "job_name", "project", "zone"),
        'the address of a Dask scheduler, tpu="tcp://host:8786", or a Dask cluster of any kind',
    ),
    "function": {
        "func": "fn=function",
        **dict.fromkeys(
            (
                "autograph",
                "experimental_compile",
                "experimental_relax_shapes",
                "jit_compile",
                "reduce_retracing",
            ),
            _AS_WRITTEN,
        ),
    },
}


def advises(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make the errors of a function for arguments of other libraries say what to use instead.

    Parameters
    ----------
    name
        The name of the function in `OF_FUNCTIONS`.
    """
    advice = OF_FUNCTIONS[name]

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for argument in kwargs:
                if argument in advice:
                    raise TypeError(f"{name}() got an unexpected keyword argument {argument!r}; use {advice[argument]}")
            return function(*args, **kwargs)

        return call

    return decorate
