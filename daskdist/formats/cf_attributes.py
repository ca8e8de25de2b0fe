"""Attributes of the CF conventions, by which the values of an array stand for others.

Climate data is often packed: integers of which xarray makes floats with ``scale_factor`` and ``add_offset``, times
that count days since a date, and numbers that stand for missing ones. Readers of arrays do not apply them, but say so.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import numpy as np

logger: Final = logging.getLogger("daskdist")
_FILL_VALUES: Final = ("_FillValue", "missing_value")
# Attribute -> the value that changes nothing.
_NEUTRAL: Final = {"scale_factor": 1, "add_offset": 0}


def not_applied(attributes: Mapping[str, Any], dtype: np.dtype[Any]) -> list[str]:
    """Return the attributes by which other values are meant than those of an array of a dtype.

    >>> not_applied({"scale_factor": 0.1, "units": "m"}, np.dtype("i2"))
    ['scale_factor=0.1']
    """
    names = [*_FILL_VALUES, *_NEUTRAL, "units", "dtype", *(["_Unsigned"] if dtype.kind in "iu" else [])]
    values = {name: _plain(attributes[name]) for name in names if name in attributes}
    return [f"{name}={value!r:.60}" for name, value in values.items() if _changes_values(name, value)]


def warn(attributes_by_array: Mapping[str, list[str]], path: str, opener: str) -> None:
    """Log that attributes of arrays are not applied; ``opener`` is the function of xarray that applies them."""
    by_array = {name: attributes for name, attributes in attributes_by_array.items() if attributes}
    named = [" ".join([repr(name)] * bool(name) + [", ".join(attributes)]) for name, attributes in by_array.items()]
    if named:
        logger.warning(
            "%s: attributes of the CF conventions are not applied, so elements have the stored values: %s; "
            "Dataset.from_dask(xarray.%s(path, chunks={})) applies them",
            path,
            "; ".join(named),
            opener,
        )


def _plain(value: Any) -> Any:
    # Return the value of an attribute, which NetCDF and HDF5 keep as an array of one.
    values = np.asarray(value).reshape(-1)[:1].tolist()
    if not values:
        return None
    return values[0].decode("utf-8", "replace") if isinstance(values[0], bytes) else values[0]


def _changes_values(name: str, value: Any) -> bool:
    if name == "units":
        return isinstance(value, str) and " since " in value
    if name == "dtype":
        return isinstance(value, str) and value.startswith(("bool", "timedelta64"))
    if name in _FILL_VALUES and isinstance(value, str):
        # xarray writes floats to Zarr 3 in base64.
        with suppress(ValueError):
            value = float(np.frombuffer(base64.b64decode(value, validate=True), "<f8")[0])
    # A fill value of NaN is missing already.
    return value is not None and bool(value == value) and value != _NEUTRAL.get(name, value is None)
