"""Rows of bytes in one buffer: extracted from it all at once, and concatenated into one."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]

# Where rows have more different lengths than one of so many, they are taken out one by one.
_ROWS_A_LENGTH: Final = 32


def rows_at(data: Any, starts: Array, size: int) -> Array:
    """Copy the bytes from each start on, shape ``(num_starts, size)``, in one pass.

    Parameters
    ----------
    data
        A buffer of bytes.
    starts
        Where each row begins, from 0 to ``size`` before its end.
    size
        The bytes of a row.
    """
    if not size or not len(starts):
        return np.zeros((len(starts), size), np.uint8)
    return _windows(data, size)[starts].view(np.uint8).reshape(len(starts), size)


def objects_at(data: Any, starts: Array, lengths: Array) -> Array:
    """Rows of bytes as Python's own, an array of objects.

    Parameters
    ----------
    data
        A buffer of bytes.
    starts, lengths
        Where each row begins, and how many bytes it has.
    """
    made = np.empty(len(starts), object)
    if not len(starts):
        return made
    if lengths[0] == lengths[-1] and (lengths == lengths[0]).all():
        made[:] = _alike(data, starts, int(lengths[0]))
        return made
    found = np.unique(lengths)
    if len(found) * _ROWS_A_LENGTH > len(starts):
        whole = memoryview(data)
        made[:] = [bytes(whole[start:stop]) for start, stop in zip(starts.tolist(), (starts + lengths).tolist())]  # noqa: B905
        return made
    order, at = np.argsort(lengths, kind="stable"), 0
    for length, stop in zip(found.tolist(), np.searchsorted(lengths[order], found, "right").tolist(), strict=True):
        rows = order[at:stop]
        made[rows] = _alike(data, starts[rows], length)
        at = stop
    return made


def _alike(data: Any, starts: Array, length: int) -> Any:
    # Void scalars, unlike NumPy's bytes, keep the zeros they end with.
    return _windows(data, length)[starts].astype(object) if length else b""


def _windows(data: Any, size: int) -> Array:
    # The bytes from each place on: views that overlap.
    return np.ndarray((max(len(data) - size + 1, 0),), f"V{size}", data, 0, (1,))


def spans(starts: Array, lengths: Array) -> Array:
    """Return the places of all bytes of rows, one row after the other.

    >>> spans(np.array([3, 10]), np.array([2, 3]))
    array([ 3,  4, 10, 11, 12])
    """
    stops = np.cumsum(lengths)
    return np.repeat(starts - stops + lengths, lengths) + np.arange(stops[-1] if len(stops) else 0)


class RowPieces:
    """Rows that are put together, piece by piece.

    Parameters
    ----------
    num_rows
        How many there are.

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
        """Bytes that all rows have."""
        self.each(np.broadcast_to(np.frombuffer(data, np.uint8), (self._num_rows, len(data))))

    def each(self, data: Array) -> None:
        """Bytes of which all rows have as many, shape ``(num_rows, size)``."""
        self._pieces.append((data, data.shape[1]))
        self.lengths = self.lengths + data.shape[1]

    def add(self, data: Array, lengths: Array) -> None:
        """Bytes, one row's after the other, and how many each row has."""
        if self._num_rows and (lengths == lengths[0]).all():
            self.each(data.reshape(self._num_rows, int(lengths[0])))
        else:
            self._pieces.append((data, lengths))
            self.lengths = self.lengths + lengths

    def extend(self, others: RowPieces) -> None:
        """Append the pieces that other `RowPieces` have of the same rows."""
        self._pieces.extend(others._pieces)
        self.lengths = self.lengths + others.lengths

    def joined(self) -> Array:
        """Return all bytes, a row after the other."""
        made = np.empty(int(self.lengths.sum()), np.uint8)
        at = np.cumsum(self.lengths) - self.lengths
        for data, size in self._pieces:
            if isinstance(size, int):
                if size and self._num_rows:
                    _windows(made, size)[at] = np.ascontiguousarray(data).view(f"V{size}").reshape(-1)
            else:
                made[spans(at, size)] = data
            at = at + size
        return made
