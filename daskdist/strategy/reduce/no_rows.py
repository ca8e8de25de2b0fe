"""`NoRows`: the partial result of a replica without rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import optree

from daskdist.core.structure import describe_nesting
from daskdist.devices import Device
from daskdist.errors import ArgumentError
from daskdist.strategy.reduce.reductions import Axis, Reduction
from daskdist.strategy.values.device_arrays import host_nest


@dataclass(frozen=True)
class NoRows:
    """The partial result of a replica without rows.

    Parameters
    ----------
    one_row
        The shape of its value if that had one row; None for a replica without a value.
    dtype
        The dtype of its value.
    device
        The device of its value; None for the host.
    """

    one_row: tuple[int, ...] | None
    dtype: Any
    device: Device | None = None

    def partial(self, reduction: Reduction, axis: Axis) -> Any:
        """Return the partial result of no rows."""
        row: Any = np.ones(self.one_row or (), self.dtype)
        like = host_nest(reduction.chunk(row if self.device is None else self.device.put(row), axis))
        parts, treespec = optree.tree_flatten(like, none_is_leaf=True)
        try:
            values = treespec.flatten_up_to(reduction.identity)
        except ValueError:
            raise ArgumentError(
                f"reduce: the identity of the reduction is {reduction.identity!r:.80}, and its chunk returns "
                f"{describe_nesting(treespec)}; they must have the same structure"
            ) from None
        return optree.tree_unflatten(treespec, list(map(_full, parts, values)))


def _full(like: Any, value: Any) -> Any:
    if value is None:
        return like
    # The identity of `bitwise_and` is -1, also for unsigned dtypes.
    full = np.full_like(like, np.asarray(value).astype(np.asarray(like).dtype))
    # A number if chunk returns a number.
    return full if isinstance(like, np.ndarray) else full[()]
