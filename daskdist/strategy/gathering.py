"""Gathering: the values of all replicas put together as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskdist.core.ragged import Ragged, concat
from daskdist.errors import ArgumentError
from daskdist.strategy.picks import Pick, Returned
from daskdist.strategy.values import filled


@dataclass(frozen=True)
class Gather:
    """What puts values together along an axis, where they are brought.

    Parameters
    ----------
    axis
        The axis, 0 being the rows.
    """

    axis: int

    def __call__(self, results: Sequence[Any], picks: Sequence[tuple[int, Pick]], leaves: list[list[Any]]) -> Returned:
        """From wired values: for each leaf those of the replicas, in order."""
        return Returned.of([concatenated(values, self.axis) for values in filled(results, picks, leaves)])


def concatenated(values: Sequence[Any], axis: int) -> Any:
    """Arrays of replicas, one after the other along an axis.

    Raises
    ------
    ArgumentError
        One has no such axis, or their shapes differ along another.

    >>> concatenated([np.array([1, 2, 3]), np.array([5])], 0)
    array([1, 2, 3, 5])
    """
    arrays = [value if isinstance(value, (Ragged, np.ma.MaskedArray)) else np.asarray(value) for value in values]
    for array in arrays:
        if not array.ndim:
            raise ArgumentError(
                f"gather: {array[()]!r:.80} is a scalar, and has no axis {axis}; use local_results, or return x[None] "
                "from the function"
            )
        if axis >= array.ndim:
            raise ArgumentError(f"gather: axis {axis} of a value of shape {array.shape}; give 0 to {array.ndim - 1}")
    if len({_without(array.shape, axis) for array in arrays}) > 1:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ArgumentError(
            f"gather: the shapes of the replicas' values are {shapes}; they may differ along axis {axis} only"
        )
    if any(isinstance(array, Ragged) for array in arrays):
        if axis or not all(isinstance(array, Ragged) for array in arrays):
            raise ArgumentError("gather: rows of different lengths are put together along axis 0, and with their like")
        return concat(arrays)
    put_together: Any = np.concatenate
    if any(isinstance(array, np.ma.MaskedArray) for array in arrays):
        put_together = np.ma.concatenate
    try:
        return put_together(arrays, axis)
    except TypeError as error:
        kinds = ", ".join(str(array.dtype) for array in arrays)
        raise ArgumentError(f"gather: values of {kinds} do not go together: {error}") from None


def _without(shape: tuple[Any, ...], axis: int) -> tuple[Any, ...]:
    return len(shape), shape[:axis], shape[axis + 1 :]
