"""Columns of blocks that are on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from daskdist.core.block import read_only
from daskdist.core.to_numpy import HOST_CONVERTERS


class DeviceColumn:
    """A column of a block that is on a device, for gathering there. Code for the host can use it as a NumPy array.

    Used on the host, or sent to another process, it is copied to the host as a whole, once.

    Parameters
    ----------
    array
        An array of a device.
    dtype
        Its dtype as NumPy's.
    ready
        The event after which the array is computed.
    """

    __slots__ = ("_host", "array", "dtype", "ready", "shape")

    def __init__(self, array: Any, dtype: np.dtype[Any], ready: Any) -> None:
        self.array = array
        self.dtype = dtype
        self.ready = ready
        self.shape: tuple[int, ...] = tuple(array.shape)
        self._host: Any = None

    @property
    def host(self) -> Any:
        """The column as a NumPy array."""
        if self._host is None:
            self.ready.synchronize()
            self._host = read_only(HOST_CONVERTERS.known(self.array))
        return self._host

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """The steps in bytes of the array on the host."""
        return self.host.strides  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Any:
        return self.host[rows]

    def take(self, rows: Any, **options: Any) -> Any:
        return self.host.take(rows, **options)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.host, dtype, copy=copy)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        # Another process need not have the device.
        return np.asarray, (self.host,)
