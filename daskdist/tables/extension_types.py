"""Arrow's extension types: those that are bools and tensors, those that are read as they are stored, and others.

An extension type says what stored values stand for. If Python has no class for one, it comes as its storage type, and
only the metadata of its field names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from daskdist.errors import FileError
from daskdist.storage.libraries import pa, pc
from daskdist.tables.arrow_text import is_bytes, is_text
from daskdist.tables.replacements import Place

_TENSOR: Final = "arrow.fixed_shape_tensor"
# Types that are converted, or whose stored values say all.
_KNOWN: Final = frozenset(
    (
        "arrow.bool8",
        _TENSOR,
        "arrow.opaque",
        "pandas.interval",
        "geoarrow.point",
        *(f"datasets.features.features.Array{number}DExtensionType" for number in range(2, 6)),
    )
)
_ADVICE: Final = {
    "pandas.period": "convert periods to times with dt.to_timestamp()",
    "arrow.variable_shape_tensor": "write the tensors flat, as lists, with their shapes in another column",
}
_NAME: Final = b"ARROW:extension:name"


def is_tensor(kind: Any) -> bool:
    """Return whether an Arrow type is that of tensors of one shape."""
    return bool(getattr(kind, "extension_name", "") == _TENSOR)


def tensor_shape(kind: Any, where: Place) -> tuple[int, ...]:
    """Return the shape of the tensors of a type, as it is after the permutation of their axes.

    Raises
    ------
    FileError
        The permutation is ambiguous.
    """
    axes = _axes(kind)
    if any(axes[axis] != place for place, axis in enumerate(axes)):
        # pyarrow writes the inverse of what Arrow's specification says.
        raise FileError(
            f"{where} holds tensors whose axes are permuted as {axes}, which libraries read in different ways: write "
            "C-contiguous arrays, or leave it out"
        )
    return tuple(kind.shape[axis] for axis in axes)


def tensors_of(values: np.ndarray[Any, Any], kind: Any) -> np.ndarray[Any, Any]:
    """Return tensors, shape ``(num_rows, *tensor_shape)``, from their stored values, shape ``(num_rows, size)``."""
    stored = values.reshape(len(values), *kind.shape)
    return np.ascontiguousarray(stored.transpose(0, *(axis + 1 for axis in _axes(kind))))


def _axes(kind: Any) -> list[int]:
    return list(range(len(kind.shape))) if kind.permutation is None else list(kind.permutation)


def stored_as(kind: Any) -> Any:
    """Return the type of the values of an extension type other than that of tensors."""
    return pa.bool_() if kind.extension_name == "arrow.bool8" else kind.storage_type


def stored_values(array: Any, where: Place) -> Any:
    """Return the values of an array of an extension type other than that of tensors.

    Raises
    ------
    FileError
        The stored values are not the values.
    """
    if array.type.extension_name == "arrow.bool8":
        return pc.not_equal(array.storage, 0)
    refuse_unknown(None, array.type, where)
    return array.storage


def refuse_unknown(metadata: Mapping[bytes, bytes] | None, kind: Any, where: Place) -> None:
    """Check that the stored values of a field, if it has an extension type, are the values.

    Parameters
    ----------
    metadata
        The metadata of the field, which names an extension type without a class in Python; None if it has none.
    kind
        The type of the field.
    where
        The field, for messages.

    Raises
    ------
    FileError
        They are not.
    """
    name = getattr(kind, "extension_name", "") or (metadata or {}).get(_NAME, b"").decode("utf-8", "replace")
    storage_type = getattr(kind, "storage_type", kind)
    if not name or name in _KNOWN or is_text(storage_type) or is_bytes(storage_type):
        return
    advice = _ADVICE.get(name, "write it as that type if the stored values are what you want")
    raise FileError(
        f"{where} is of the extension type {name!r}, which is not known, stored as {storage_type}: {advice}, or leave "
        "it out"
    )
