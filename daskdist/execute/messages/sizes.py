"""What values take, as Dask wants to know it of results."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from dask.sizeof import sizeof

_NUMBERS: Final = (float, int, np.number)
_NUMBER_BYTES: Final = 32


def size_of(value: Any) -> int:
    """The bytes of a value, as Dask counts them; of numbers, which come by the thousand, about."""
    return _NUMBER_BYTES if isinstance(value, _NUMBERS) else int(sizeof(value))
