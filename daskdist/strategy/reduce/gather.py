"""Gathering: concatenation of the values of all replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from daskdist.core.block import Bundle
from daskdist.core.ragged import Ragged, concat
from daskdist.core.structure import Structure
from daskdist.devices import Device, adopted, device_of, dtype_of
from daskdist.errors import ArgumentError
from daskdist.strategy.reduce.device_reduction import cast
from daskdist.strategy.reduce.reductions import numpy_array, without
from daskdist.strategy.values.absent import ABSENT
from daskdist.strategy.values.device_arrays import home_of, host_array, in_stream_of, moved
from daskdist.strategy.values.encoding import Encoded
from daskdist.strategy.values.flat import check_is_no_dict
from daskdist.strategy.values.refs import FlatResult


def gathered(axis: int, leaves: Sequence[Sequence[Any]]) -> FlatResult:
    """Concatenate the values of the replicas, in order, for each leaf, on the worker that collects them."""
    return FlatResult.listed([concatenated(values, axis) for values in leaves])


def cut_piece(
    results: Sequence[Any],
    pieces: Encoded,
    structure: Structure,
    is_balanced: bool,
    number: int,
    num_replicas: int,
) -> Bundle:
    """Return the piece of one replica of leaves, whose pieces are put together and cut again.

    Pieces have ``ceil(num_rows / num_replicas)`` rows until none are left, or, if balanced, numbers of rows that differ
    by one at most.
    """
    piece = []
    leaves, _ = pieces.nest(results)
    for values in leaves:
        rows = concatenated(values, 0, "run")
        size = -(-len(rows) // num_replicas)
        start, stop = number * size, (number + 1) * size
        if is_balanced:
            start, stop = (len(rows) * place // num_replicas for place in (number, number + 1))
        piece.append(rows[start:stop])
    return Bundle(structure, [tuple(piece)])


def concatenated(values: Sequence[Any], axis: int, operation: str = "gather") -> Any:
    """Concatenate arrays of replicas along an axis.

    Raises
    ------
    ArgumentError
        An array lacks the axis, or the shapes differ along another axis.

    >>> concatenated([np.array([1, 2, 3]), np.array([5])], 0)
    array([1, 2, 3, 5])
    """
    values = [adopted(value) for value in values if value is not ABSENT]
    if not values:
        raise ArgumentError(f"{operation}: no replica has a value: all were without rows, and were skipped")
    devices = list(map(device_of, values))
    home = home_of(devices)
    if home is None:
        arrays = [
            _as_array(value if device is None else host_array(value), operation)
            for value, device in zip(values, devices, strict=True)
        ]
    else:
        arrays = list(values)
    _check_axis(arrays, axis, operation)
    if not axis:
        arrays = _of_known_shape(arrays)
    shape = arrays[0].shape
    for number, array in enumerate(arrays):
        if without(array.shape, axis) != without(shape, axis):
            raise ArgumentError(
                f"{operation}: values of replicas differ in shape: replica 0 gives {shape}, replica {number} gives "
                f"{array.shape}; they may differ along axis {axis} only"
            )
    if home is not None:
        return _together_on(home, arrays, axis)
    if any(isinstance(array, Ragged) for array in arrays):
        if axis or not all(isinstance(array, Ragged) for array in arrays):
            raise ArgumentError(
                f"{operation}: rows of different lengths can only be concatenated along axis 0 and with other such rows"
            )
        return concat(arrays)
    put_together: Any = np.concatenate
    if any(isinstance(array, np.ma.MaskedArray) for array in arrays):
        put_together = np.ma.concatenate
    try:
        return put_together(arrays, axis)
    except TypeError as error:
        kinds = ", ".join(str(array.dtype) for array in arrays)
        raise ArgumentError(f"{operation}: values of {kinds} cannot be concatenated: {error}") from None


def _check_axis(arrays: Sequence[Any], axis: int, operation: str) -> None:
    for number, array in enumerate(arrays):
        if not array.ndim:
            raise ArgumentError(
                f"{operation}: replica {number} gives {array[()]!r:.80}, a scalar, which has no axis {axis}; give "
                "x[None], or get the values of all replicas with local_results"
            )
        if axis >= array.ndim:
            most = f"0 to {array.ndim - 1}" if array.ndim > 1 else "0"
            raise ArgumentError(
                f"{operation}: axis {axis} of a value of shape {array.shape}, which replica {number} gives; give {most}"
            )


def _together_on(device: Device, arrays: Sequence[Any], axis: int) -> Any:
    # Concatenate device arrays on the device of the first.
    xp = device.namespace
    dtype = np.result_type(*map(dtype_of, arrays))
    with in_stream_of(device):
        return xp.concat([cast(xp, moved(array, device), dtype) for array in arrays], axis=axis)


def _as_array(value: Any, operation: str) -> Any:
    if isinstance(value, (Ragged, np.ma.MaskedArray)):
        return value
    check_is_no_dict(value, operation)
    return numpy_array(value, operation)


def _of_known_shape(arrays: Sequence[Any]) -> list[Any]:
    # An unknown dimension is 0 in arrays without rows.
    shape = next((array.shape[1:] for array in arrays if array.shape[0] or 0 not in array.shape[1:]), ())
    return [
        np.empty((0, *shape), dtype_of(array))
        if not array.shape[0] and 0 in array.shape[1:] and array.ndim == 1 + len(shape)
        else array
        for array in arrays
    ]
