"""Sizes of results in bytes, in the form that Dask needs."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from dask.sizeof import sizeof

_NUMBERS: Final = (float, int, np.number)
_NUMBER_BYTES: Final = 32


def size_of(value: Any) -> int:
    """Return the size of a value as Dask counts it; an estimate for numbers, of which there may be thousands."""
    return _NUMBER_BYTES if isinstance(value, _NUMBERS) else int(sizeof(value))
