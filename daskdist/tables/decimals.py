"""Conversion of decimals to the nearest floats, as in Python.

Arrow's own conversion is off by one in the last place for about every eighth value.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from daskdist.storage.libraries import pa

# Integers of so many digits, and ten to the power of up to so many, are exact as floats.
_EXACT_DIGITS: Final = 15
_EXACT_POWER: Final = 22


def nearest_floats(array: Any) -> Any:
    """Return an Arrow array of decimals as one of float64."""
    kind = array.type
    is_exact = kind.precision <= _EXACT_DIGITS and 0 <= kind.scale <= _EXACT_POWER
    if kind.bit_width == 128 and is_exact and len(array):
        # Both numbers are exact, so their quotient is the nearest float. The upper half of a value has only its sign.
        halves = np.frombuffer(array.buffers()[1], np.int64, 2 * len(array), 16 * array.offset)
        return pa.array(halves[::2] / 10.0**kind.scale, mask=array.is_null().to_numpy(zero_copy_only=False))
    return array.cast(pa.string()).cast(pa.float64())
