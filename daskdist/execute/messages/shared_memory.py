"""`MemoryConnection`: messages between two processes of a machine, whose arrays go through memory that both have."""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from daskdist.core.array_pool import pooled_empty

# Messages of fewer bytes go through the connection, which has room for so much.
_SMALL_BYTES: Final = 2**16
# The size of a message after which the memory is freed; writing to memory that was used before is several times faster.
_MOST_KEPT_BYTES: Final = 2**26


def unnamed_memory() -> io.FileIO:
    """Return a file in memory that is gone once the processes that have it open have ended, however they do."""
    if hasattr(os, "memfd_create"):
        return io.FileIO(os.memfd_create("daskdist"), "r+")
    return tempfile.TemporaryFile(buffering=0)


class MemoryConnection(Connection):
    """An end of a connection whose large messages are written to memory, and copied from it by the receiver.

    Both ends have one memory: a large message must be received before the next is sent, in any direction.

    Parameters
    ----------
    descriptor, memory
        The number of the open socket, and the file that both ends have.
    """

    def __init__(self, descriptor: int, memory: io.FileIO) -> None:
        super().__init__(descriptor)
        self._memory = memory

    def send(self, obj: Any) -> None:
        """Send a message that can be pickled.

        Raises
        ------
        OSError
            The other process has ended.
        """
        buffers: list[pickle.PickleBuffer] = []
        pickled = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
        frames = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
        sizes = [frame.nbytes for frame in frames]
        is_in_memory = sum(sizes) >= _SMALL_BYTES and self._is_written(frames)
        self.send_bytes(pickle.dumps(sizes if is_in_memory else list(map(bytes, frames)), protocol=5))

    def recv(self) -> Any:
        """Wait for a message, and return it.

        Raises
        ------
        EOFError, OSError
            The other process has ended.
        """
        frames = pickle.loads(self.recv_bytes())
        if isinstance(frames[0], int):
            frames = self._read(frames)
        return pickle.loads(frames[0], buffers=frames[1:])

    def free(self) -> None:
        """Free the memory; no message is on its way."""
        self._memory.truncate(0)

    def close(self) -> None:
        """Close this end."""
        super().close()
        self._memory.close()

    def _is_written(self, frames: Sequence[memoryview]) -> bool:
        try:
            self._memory.seek(0)
            for rest in frames:
                # The system writes and reads at most 2 GiB at once.
                while rest:
                    rest = rest[self._memory.write(rest) :]
        except OSError:
            # There is no room left, such as in a container with little memory.
            self.free()
            return False
        return True

    def _read(self, sizes: Sequence[int]) -> list[Any]:
        frames = [pooled_empty((size,), np.uint8) for size in sizes]
        self._memory.seek(0)
        for frame in frames:
            rest = memoryview(frame)
            while rest:
                rest = rest[self._memory.readinto(rest) :]
        if sum(sizes) > _MOST_KEPT_BYTES:
            self.free()
        return frames
