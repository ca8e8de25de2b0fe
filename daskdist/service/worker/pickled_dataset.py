"""Datasets as they come to a worker."""

from __future__ import annotations

import threading

import cloudpickle

from daskdist.core.node import Node


class PickledDataset:
    """A dataset that is unpickled once for all tasks of a worker, when the first of them needs it.

    Parameters
    ----------
    data
        The dataset's node, pickled.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._node: Node | None = None
        self._lock = threading.Lock()

    def node(self) -> Node:
        """Return the dataset's node; threads that ask at the same time get the same."""
        with self._lock:
            if self._node is None:
                self._node = cloudpickle.loads(self._data)
            return self._node

    def forget_node(self) -> None:
        """Free what was unpickled: no task needs it for now."""
        self._node = None
