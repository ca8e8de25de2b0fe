"""References to blocks: where a block is, or is going to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class BlockRef:
    """A block that lies somewhere: asked for, perhaps not there yet.

    Parameters
    ----------
    handle
        What the caller that makes the block gave for it.
    num_rows
        Its length.
    nbytes
        Its size in memory, as far as known.
    worker
        The address of the worker that was asked to make it; None in this process, or where any worker may have it.
    on_release
        Called with ``nbytes`` when nothing refers to the block any more.
    lineage
        How it can be made again.
    is_kept
        Whether it is there and stays, whoever refers to it.
    """

    __slots__ = ("__weakref__", "handle", "is_kept", "lineage", "nbytes", "num_rows", "on_release", "worker")

    def __init__(
        self,
        handle: Any,
        num_rows: int,
        nbytes: int = 0,
        worker: str | None = None,
        on_release: Callable[[int], None] | None = None,
        lineage: Any = None,
        *,
        is_kept: bool = False,
    ) -> None:
        self.handle = handle
        self.is_kept = is_kept
        self.num_rows = num_rows
        self.nbytes = nbytes
        self.worker = worker
        self.on_release = on_release
        self.lineage = lineage

    def __del__(self) -> None:
        if self.on_release is not None:
            self.on_release(self.nbytes)

    def keep(self) -> None:
        """Let it no longer count as outstanding: somebody keeps it for later."""
        if self.on_release is not None:
            self.on_release(self.nbytes)
            self.on_release = None

    @property
    def row_bytes(self) -> float:
        """The size of a row, as far as known."""
        return self.nbytes / max(self.num_rows, 1)
