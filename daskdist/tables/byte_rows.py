"""Rows of bytes in one buffer: extracted from it all at once, and concatenated into one."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]

# If there are fewer rows than this for each distinct length, they are extracted one by one.
_ROWS_A_LENGTH: Final = 32


def rows_at(data: Any, starts: Array, size: int) -> Array:
    """Copy the bytes from each start on, shape ``(num_starts, size)``, in one pass.

    Parameters
    ----------
    data
        A buffer of bytes.
    starts
        The offset of each row, at most ``len(data) - size``.
    size
        The number of bytes of a row.
    """
    if not size or not len(starts):
        return np.zeros((len(starts), size), np.uint8)
    return _windows(data, size)[starts].view(np.uint8).reshape(len(starts), size)


def objects_at(data: Any, starts: Array, lengths: Array) -> Array:
    """Return rows of bytes as an array of Python ``bytes`` objects, shape ``(num_starts,)``.

    Parameters
    ----------
    data
        A buffer of bytes.
    starts, lengths
        The offset of each row, and its number of bytes.
    """
    objects = np.empty(len(starts), object)
    if not len(starts):
        return objects
    if lengths[0] == lengths[-1] and (lengths == lengths[0]).all():
        objects[:] = _alike(data, starts, int(lengths[0]))
        return objects
    distinct = np.unique(lengths)
    if len(distinct) * _ROWS_A_LENGTH > len(starts):
        whole = memoryview(data)
        objects[:] = [bytes(whole[start:stop]) for start, stop in zip(starts.tolist(), (starts + lengths).tolist())]  # noqa: B905
        return objects
    order, at = np.argsort(lengths, kind="stable"), 0
    ends = np.searchsorted(lengths[order], distinct, "right")
    for length, stop in zip(distinct.tolist(), ends.tolist(), strict=True):
        rows = order[at:stop]
        objects[rows] = _alike(data, starts[rows], length)
        at = stop
    return objects


def _alike(data: Any, starts: Array, length: int) -> Any:
    # Void scalars, unlike NumPy's bytes, keep trailing zeros.
    return _windows(data, length)[starts].astype(object) if length else b""


def _windows(data: Any, size: int) -> Array:
    # Return the `size` bytes from each offset on, as overlapping views.
    return np.ndarray((max(len(data) - size + 1, 0),), f"V{size}", data, 0, (1,))


def spans(starts: Array, lengths: Array) -> Array:
    """Return the offsets of all bytes of rows, in the order of the rows.

    >>> spans(np.array([3, 10]), np.array([2, 3]))
    array([ 3,  4, 10, 11, 12])
    """
    stops = np.cumsum(lengths)
    return np.repeat(starts - stops + lengths, lengths) + np.arange(stops[-1] if len(stops) else 0)


class RowPieces:
    """Rows of bytes under construction, piece by piece.

    Parameters
    ----------
    num_rows
        The number of rows.

    >>> rows = RowPieces(2)
    >>> rows.same(b"-")
    >>> rows.add(np.frombuffer(b"abc", np.uint8), np.array([1, 2]))
    >>> bytes(rows.joined())
    b'-a-bc'
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._pieces: list[tuple[Array, Array | int]] = []
        self.lengths: Array = np.zeros(num_rows, np.int64)

    def same(self, data: bytes) -> None:
        """Append the same bytes to all rows."""
        self.each(np.broadcast_to(np.frombuffer(data, np.uint8), (self._num_rows, len(data))))

    def each(self, data: Array) -> None:
        """Append bytes to each row, shape ``(num_rows, size)``."""
        self._pieces.append((data, data.shape[1]))
        self.lengths = self.lengths + data.shape[1]

    def add(self, data: Array, lengths: Array) -> None:
        """Append bytes, given as one array in the order of the rows, and their number for each row."""
        if self._num_rows and (lengths == lengths[0]).all():
            self.each(data.reshape(self._num_rows, int(lengths[0])))
        else:
            self._pieces.append((data, lengths))
            self.lengths = self.lengths + lengths

    def extend(self, other: RowPieces) -> None:
        """Append the pieces of other `RowPieces` for the same rows."""
        self._pieces.extend(other._pieces)
        self.lengths = self.lengths + other.lengths

    def joined(self) -> Array:
        """Return all bytes in the order of the rows."""
        content = np.empty(int(self.lengths.sum()), np.uint8)
        at = np.cumsum(self.lengths) - self.lengths
        for data, size in self._pieces:
            if isinstance(size, int):
                if size and self._num_rows:
                    _windows(content, size)[at] = np.ascontiguousarray(data).view(f"V{size}").reshape(-1)
            else:
                content[spans(at, size)] = data
            at = at + size
        return content
