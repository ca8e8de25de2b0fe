"""Small blocks of the program's memory that stay on a cluster for all passes over the datasets they are of."""

from __future__ import annotations

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

# A block is sent by way of the scheduler, which keeps it too, so that it can be made again where its worker is lost.
MOST_BYTES: Final = 8 * 2**20
# Of all blocks together; of more, those that were not used for longest are sent anew when they are.
_MOST_BYTES_IN_ALL: Final = 64 * 2**20


@dataclass(frozen=True)
class _KeptBlock:
    handle: Handle
    # A copy that is as what was sent: the program may write into its arrays between two passes.
    block: Block
    num_bytes: int


class KeptBlocks:
    """The blocks that are kept, each for as long as somebody has the dataset that it is all of.

    Parameters
    ----------
    is_there
        Tells whether what a handle stands for can still be had.
    """

    def __init__(self, is_there: Callable[[Handle], bool]) -> None:
        self._is_there = is_there
        self._by_owner: WeakKeyDictionary[object, _KeptBlock] = WeakKeyDictionary()
        self._changing = Lock()

    def handle_of(self, owner: object, block: object, send: Callable[[Block], Handle]) -> Handle | None:
        """Return the handle of a block on the cluster, sent there if it has changed or is not there.

        Parameters
        ----------
        owner
            What it is kept for: while somebody has that.
        block
            The block.
        send
            Sends it.

        Returns
        -------
        handle
            None where it is not kept: it is large, or what its arrays hold can change although they do not.
        """
        sizes = [_size(leaf) for leaf in block.leaves] if isinstance(block, Block) else [None]
        num_bytes = sum(size for size in sizes if size is not None)
        if not isinstance(block, Block) or None in sizes or num_bytes > MOST_BYTES:
            return None
        with self._changing:
            kept = self._by_owner.pop(owner, None)
            if kept is None or not self._is_there(kept.handle) or not _is_same(kept.block, block):
                copied = Block(block.structure, [_copy(leaf) for leaf in block.leaves], block.label, block.origin)
                kept = _KeptBlock(send(copied), copied, num_bytes)
            # The one that was used last is the last.
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
        """Let go of all of them."""
        with self._changing:
            self._by_owner.clear()

    def __len__(self) -> int:
        return len(self._by_owner)


def _size(leaf: Any) -> int | None:
    # In bytes; of text, about. None of what can change although the array does not.
    if type(leaf) is Ragged:
        sizes = _size(leaf.values), _size(leaf.row_splits)
        return None if None in sizes else sum(sizes)  # type: ignore[arg-type]  # none of them is None
    if type(leaf) is not np.ndarray:
        return None
    if leaf.dtype.kind == "T":
        # One without a value that stands for missing text.
        is_plain = leaf.nbytes <= MOST_BYTES and not hasattr(leaf.dtype, "na_object")
        return leaf.nbytes + int(np.strings.str_len(leaf).sum()) if is_plain else None
    if not leaf.dtype.hasobject:
        return leaf.nbytes
    items = leaf.ravel().tolist() if leaf.dtype == object and leaf.nbytes <= MOST_BYTES else [None]
    return leaf.nbytes + sum(map(len, items)) if all(type(item) in (str, bytes) for item in items) else None


def _copy(leaf: Any) -> Any:
    # In memory of its own, each row after the one before.
    return Ragged(_copy(leaf.values), leaf.row_splits.copy()) if type(leaf) is Ragged else leaf.copy("C")


def _is_same(one: Block, other: Block) -> bool:
    pairs = zip(one.leaves, other.leaves, strict=True)
    return one.structure == other.structure and all(_has_same_bytes(a, b) for a, b in pairs)


def _has_same_bytes(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if type(one) is Ragged:
        return _has_same_bytes(one.row_splits, other.row_splits) and _has_same_bytes(one.values, other.values)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.kind == "T":
        return bool((one == other).all())
    if one.dtype.hasobject:
        return all(map(is_, one.ravel().tolist(), other.ravel().tolist()))
    # As bits: not a number is itself, and the zeros differ.
    a, b = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (one, other))
    width = 8 if not len(a) % 8 else 1
    return bool((a.view(f"u{width}") == b.view(f"u{width}")).all())
