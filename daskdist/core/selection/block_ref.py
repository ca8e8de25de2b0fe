"""References to blocks that exist or are being computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class BlockRef:
    """A reference to a requested block, which may not exist yet.

    Parameters
    ----------
    handle
        The handle from the caller that computes the block.
    num_rows
        Its number of rows.
    nbytes
        Its size in memory, as far as it is known.
    worker
        The address of the worker that computes it; None in this process, or if any worker may have it.
    on_release
        Called with ``nbytes`` when nothing refers to the block any longer.
    is_kept
        Whether it exists and stays, even without references.
    """

    __slots__ = ("__weakref__", "handle", "is_kept", "nbytes", "num_rows", "on_release", "worker")

    def __init__(
        self,
        handle: Any,
        num_rows: int,
        nbytes: int = 0,
        worker: str | None = None,
        on_release: Callable[[int], None] | None = None,
        *,
        is_kept: bool = False,
    ) -> None:
        self.handle = handle
        self.is_kept = is_kept
        self.num_rows = num_rows
        self.nbytes = nbytes
        self.worker = worker
        self.on_release = on_release

    def __del__(self) -> None:
        if self.on_release is not None:
            self.on_release(self.nbytes)

    def keep(self) -> None:
        """Stop counting it as outstanding, because it is kept for later."""
        if self.on_release is not None:
            self.on_release(self.nbytes)
            self.on_release = None

    @property
    def row_bytes(self) -> float:
        """The bytes of a row, as far as they are known."""
        return self.nbytes / max(self.num_rows, 1)
