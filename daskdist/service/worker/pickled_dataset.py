"""Pickled datasets on a worker."""

from __future__ import annotations

import threading

import cloudpickle

from daskdist.core.node import Node


class PickledDataset:
    """A dataset that is unpickled once for all tasks of a worker, when the first task needs it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._node: Node | None = None
        self._lock = threading.Lock()

    def node(self) -> Node:
        """Return the dataset's node, which is the same for all threads."""
        with self._lock:
            if self._node is None:
                self._node = cloudpickle.loads(self._data)
            return self._node

    def forget_node(self) -> None:
        """Free the unpickled node, which no task needs for now."""
        self._node = None
