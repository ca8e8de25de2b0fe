"""Arrow's text as NumPy's, much faster than by way of Python's."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from daskdist.core.structure import TEXT
from daskdist.storage.libraries import pa, pc


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type is text."""
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_bytes(kind: Any) -> bool:
    """Return whether an Arrow type is bytes."""
    is_binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    return bool(is_binary or pa.types.is_binary_view(kind))


# The number of texts to convert at a time, and the most bytes of a text for which NumPy's bytes are faster than `str`.
_NUM_TEXTS: Final = 65_536
_SHORT_BYTES: Final = 64


def texts_of(array: Any) -> np.ndarray[Any, Any]:
    """Convert an Arrow array of text without nulls, shape ``(num_rows,)``, dtype ``StringDType``."""
    texts = np.empty(len(array), TEXT)
    if not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
        array = array.cast(pa.large_string())
    for start in range(0, len(array), _NUM_TEXTS):
        part = array.slice(start, _NUM_TEXTS)
        short = _of_short(part)
        if short is None:
            texts[start : start + len(part)] = part.to_pylist()
        else:
            _fill_from_bytes(texts[start : start + len(part)], short)
    return texts


def repeated_texts(array: Any) -> np.ndarray[Any, Any] | None:
    """Convert a dictionary array without nulls by its words as NumPy bytes; None if that is not possible."""
    words = array.dictionary
    is_plain = pa.types.is_string(words.type) or pa.types.is_large_string(words.type)
    short = _of_short(words) if is_plain and len(words) and not array.null_count and not words.null_count else None
    if short is None:
        return None
    texts, indices = np.empty(len(array), TEXT), array.indices.to_numpy()
    for start in range(0, len(array), _NUM_TEXTS):
        part = slice(start, start + _NUM_TEXTS)
        _fill_from_bytes(texts[part], short[indices[part]])
    return texts


def _fill_from_bytes(texts: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
    # A plain assignment treats bytes of most lengths as unaligned, and then creates each text twice. An iterator with
    # a buffer does not.
    done = 0
    with np.nditer(
        texts, ["buffered", "external_loop", "refs_ok"], ["writeonly"], values.dtype, casting="unsafe", buffersize=2048
    ) as buffers:
        for buffer in buffers:
            buffer[...] = values[done : done + len(buffer)]  # type: ignore[index]
            done += len(buffer)


def _of_short(array: Any) -> Any:
    # Return texts as NumPy's bytes of one length, which convert much faster than Python's; None if padding would waste
    # too much memory or trailing zeros would be lost.
    _, offsets, data = array.buffers()
    if data is None or not data.size:
        return None
    width = np.int32 if pa.types.is_string(array.type) else np.int64
    bounds = np.frombuffer(offsets, width)[array.offset : array.offset + len(array) + 1]
    longest = int(np.subtract(bounds[1:], bounds[:-1]).max())
    content = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]]
    if not longest or not content.min():
        return None
    if longest * len(array) == len(content):
        return content.view(f"S{longest}")
    if longest > _SHORT_BYTES:
        return None
    padded = pc.ascii_rpad(array, longest, "\0")
    return np.frombuffer(padded.buffers()[2], f"S{longest}", len(array))
