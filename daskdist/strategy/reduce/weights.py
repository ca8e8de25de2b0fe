"""Weights of the values of replicas, or of their rows, in reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from daskdist.devices import adopted, dtype_of
from daskdist.errors import ArgumentError
from daskdist.strategy.reduce.device_reduction import cast
from daskdist.strategy.reduce.no_rows import NoRows
from daskdist.strategy.reduce.reductions import NAMED, ReduceOp
from daskdist.strategy.values.absent import ABSENT
from daskdist.strategy.values.device_arrays import Placed, host_array, in_stream_of


def weight_of(value: Any) -> float:
    """Return the weight of a replica as a Python number, so that float32 arrays times it stay float32.

    Raises
    ------
    ArgumentError
        The weight is negative, or not a number.
    """
    if value is ABSENT:
        return 0
    array = np.asarray(host_array(adopted(value)))
    weight = array.item() if not array.ndim and array.dtype.kind in "biuf" else None
    if weight is None or not 0 <= weight < np.inf:
        raise ArgumentError(
            f"reduce: a weight is {value!r:.80}; give each replica a number that is at least 0, such as the number of "
            "its rows"
        )
    return weight  # type: ignore[no-any-return]


def weighted(op: Any, chunk: Callable[[Any], Any], value: Any, weight_value: Any) -> tuple[tuple[int, ...], Any]:
    """Return the shape and the partial result of a value that counts as often as its weight says.

    A value of weight 0 is left out like one without rows: the mean of no rows is NaN.
    """
    weight = weight_of(weight_value)
    shape, partial = chunk(value)
    if type(partial) is NoRows:
        return shape, partial
    device, inner = (partial.device, partial.partial) if type(partial) is Placed else (None, partial)
    if not weight:
        dtype = inner[2] if type(inner) is tuple else dtype_of(inner)
        return shape, NoRows(shape, dtype, device)
    of_replica: Any = NAMED[op].weighted
    if device is None:
        return shape, of_replica(inner, weight)
    with in_stream_of(device):
        if type(weight) is float and type(inner) is not tuple and dtype_of(inner).kind in "iu":
            inner = cast(device.namespace, inner, np.dtype(np.float64))
        return shape, Placed(device, of_replica(inner, weight))


def weighted_rows(
    checked: Callable[[Any], Any], op: Any, chunk: Callable[[Any], Any], value: Any, weights: Any
) -> tuple[tuple[int, ...], Any]:
    """Return the shape and the partial result of rows that each count as often as a weight says, on the host.

    Raises
    ------
    ArgumentError
        There is no weight for each row, or one is negative or not a number.
    """
    if value is ABSENT or weights is ABSENT:
        return chunk(ABSENT)  # type: ignore[no-any-return]
    array, of_rows = checked(host_array(adopted(value))), np.asarray(host_array(adopted(weights)))
    is_number = of_rows.dtype.kind in "biuf" and of_rows.shape == array.shape[:1]
    if not is_number or not ((of_rows >= 0) & (of_rows < np.inf)).all():
        raise ArgumentError(
            f"reduce: the weights of the {len(array)} rows of a replica are {weights!r:.80}; give an array with a "
            "number for each row that is at least 0"
        )
    kept = of_rows != 0
    array, of_rows = array[kept], of_rows[kept]
    if not len(array):
        return chunk(array)  # type: ignore[no-any-return]
    dtype = array.dtype
    if dtype.kind in "biu" and of_rows.dtype.kind in "biu":
        factors = of_rows.astype(np.uint64 if dtype.kind == "u" else np.int64)
    else:
        factors = of_rows.astype(dtype if dtype.kind == "f" and op is ReduceOp.SUM else np.float64)
    shape, inner = chunk(array * factors.reshape(-1, *[1] * (array.ndim - 1)))
    if op is ReduceOp.MEAN and type(inner) is tuple:
        inner = inner[0], float(of_rows.sum(dtype=np.float64)), dtype if dtype.kind in "fc" else inner[2]
    return shape, inner
