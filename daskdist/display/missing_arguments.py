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

# What to use, by the name of the function and of the argument.
OF_FUNCTIONS: Final = {
    "read_csv": {
        "dtype": "dtypes={column: dtype}",
        "field_delim": 'delimiter=";"',
        "names": "header=[column, ...]",
        "na_values": "null_values=[text, ...]",
        "nrows": "ds.take(n)",
        "parse_dates": 'dtypes={column: "datetime64[s]"}, if dates are not recognised',
        "sep": 'delimiter=";"',
        "usecols": "columns=[column, ...]",
    },
    "Dataset.batch": {"drop_last": "drop_remainder=True", "shuffle": "ds.shuffle(10_000).batch(64)"},
    "Dataset.map": {
        "batch_size": f"{_BATCHES}.map(function)",
        "batched": f"{_BATCHES}.map(function)",
        "fn": _FUNCTION,
        "func": _FUNCTION,
        "function": _FUNCTION,
        "num_proc": _PROCESSES,
        "num_workers": _PROCESSES,
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
        "checkpoint_name": 'directory, such as CheckpointManager("run")',
        "max_to_keep": "keep=3",
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
