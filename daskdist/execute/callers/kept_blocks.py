"""Small blocks of the program's memory that stay on a cluster for all passes over their datasets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from threading import Lock
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from daskdist.core.block import Block
from daskdist.core.ragged import Ragged
from daskdist.execute.caller import Handle

# The largest block to keep. It is sent through the scheduler, which keeps a copy, so that it can be computed again if
# its worker is lost.
MOST_BYTES: Final = 8 * 2**20
# The limit for all blocks together; beyond it the least recently used ones are dropped, and sent again when needed.
_MOST_BYTES_IN_ALL: Final = 64 * 2**20


@dataclass(frozen=True)
class _KeptBlock:
    handle: Handle
    # A copy of the block as it was sent: the program may write into its arrays between two passes.
    block: Block
    num_bytes: int


class KeptBlocks:
    """The blocks kept on a cluster, each for as long as its dataset is referenced.

    Parameters
    ----------
    is_available
        Returns whether the result of a handle is still available.
    """

    def __init__(self, is_available: Callable[[Handle], bool]) -> None:
        self._is_available = is_available
        self._by_owner: WeakKeyDictionary[object, _KeptBlock] = WeakKeyDictionary()
        self._changing = Lock()

    def handle_of(self, owner: object, block: object, send: Callable[[Block], Handle]) -> Handle | None:
        """Return the handle of a block on the cluster; send the block if it has changed or is not there.

        Parameters
        ----------
        owner
            The block is kept for as long as this object is referenced.
        block
            The block.
        send
            Sends a block to the cluster and returns its handle.

        Returns
        -------
        handle
            None if the block is not kept: it is too large, or its arrays hold objects that can change in place.
        """
        sizes = [_size(leaf) for leaf in block.leaves] if isinstance(block, Block) else [None]
        num_bytes = sum(size for size in sizes if size is not None)
        if not isinstance(block, Block) or None in sizes or num_bytes > MOST_BYTES:
            return None
        with self._changing:
            kept = self._by_owner.pop(owner, None)
            if kept is None or not self._is_available(kept.handle) or not _is_same(kept.block, block):
                block_copy = copied(block)
                kept = _KeptBlock(send(block_copy), block_copy, num_bytes)
            # Insert it at the end, as the dict is in order of last use.
            self._by_owner[owner] = kept
            self._make_room()
            return kept.handle

    def _make_room(self) -> None:
        num_bytes = [(owner, kept.num_bytes) for owner, kept in self._by_owner.items()]
        excess = sum(size for _, size in num_bytes) - _MOST_BYTES_IN_ALL
        for owner, size in num_bytes:
            if excess <= 0:
                return
            del self._by_owner[owner]
            excess -= size

    def clear(self) -> None:
        """Drop all blocks."""
        with self._changing:
            self._by_owner.clear()

    def __len__(self) -> int:
        return len(self._by_owner)


def copied(block: Block) -> Block:
    """Return a copy of a block, in separate memory."""
    return Block(block.structure, [_copy(leaf) for leaf in block.leaves], block.label, block.origin)


def _size(leaf: Any) -> int | None:
    # Return the size in bytes, approximate for text; None if the array holds objects that can change in place.
    if type(leaf) is Ragged:
        sizes = _size(leaf.values), _size(leaf.row_splits)
        return None if None in sizes else sum(sizes)  # type: ignore[arg-type]  # none of them is None
    if type(leaf) is not np.ndarray:
        return None
    if leaf.dtype.kind == "T":
        # Only a dtype without a value for missing text can be compared.
        is_plain = leaf.nbytes <= MOST_BYTES and not hasattr(leaf.dtype, "na_object")
        return leaf.nbytes + int(np.strings.str_len(leaf).sum()) if is_plain else None
    if not leaf.dtype.hasobject:
        return leaf.nbytes
    items = leaf.ravel().tolist() if leaf.dtype == object and leaf.nbytes <= MOST_BYTES else [None]
    return leaf.nbytes + sum(map(len, items)) if all(type(item) in (str, bytes) for item in items) else None


def _copy(leaf: Any) -> Any:
    # Copy into separate memory, in C order.
    if type(leaf) is Ragged:
        return Ragged(_copy(leaf.values), leaf.row_splits.copy())
    return leaf.copy("C") if isinstance(leaf, np.ndarray) else copy.copy(leaf)


def _is_same(block: Block, other: Block) -> bool:
    pairs = zip(block.leaves, other.leaves, strict=True)
    return block.structure == other.structure and all(_has_same_bytes(a, b) for a, b in pairs)


def _has_same_bytes(leaf: Any, other: Any) -> bool:
    if type(leaf) is not type(other):
        return False
    if type(leaf) is Ragged:
        return _has_same_bytes(leaf.row_splits, other.row_splits) and _has_same_bytes(leaf.values, other.values)
    if leaf.dtype != other.dtype or leaf.shape != other.shape:
        return False
    if leaf.dtype.kind == "T":
        return bool((leaf == other).all())
    if leaf.dtype.hasobject:
        return all(map(is_, leaf.ravel().tolist(), other.ravel().tolist()))
    # Compare bits: NaN equals itself, and 0.0 differs from -0.0.
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (leaf, other))
    width = 8 if not len(a) % 8 else 1
    return bool((a.view(f"u{width}") == b.view(f"u{width}")).all())
