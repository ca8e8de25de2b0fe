"""Messages waiting to be sent, and their packing into one message."""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from distributed.comm import Comm, CommClosedError
from distributed.protocol import to_serialize
from tornado.iostream import StreamClosedError

# Smaller buffers are copied into the pickle: the header of a separate frame takes longer than the copy.
_SMALL_BYTES: Final = 2**16


class Outbox:
    """The sending end of a comm: messages that accumulate while one write runs are sent together by the next.

    Messages are bytes, or nests of plain values and of NumPy arrays that are not modified any more. `append` may be
    called from any thread, `kick` and `write_all` only from the thread of the event loop.

    Parameters
    ----------
    comm
        The connection.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        # A deque, because the writer cannot safely swap a list that another thread may be about to append to.
        self._messages: deque[Any] = deque()
        self._event = asyncio.Event()
        # Bytes of large values added so far, and bytes written so far. Each counter is changed by one thread at a time.
        self._num_added = self._num_written = 0

    def append(self, message: Any, num_bytes: int = 0) -> None:
        """Add a message to be sent after the next `kick`; ``num_bytes`` is the size of its large values."""
        self._num_added += num_bytes
        self._messages.append(message)

    @property
    def num_bytes(self) -> int:
        """The bytes of large values that are waiting or being written."""
        return self._num_added - self._num_written

    @property
    def is_empty(self) -> bool:
        """True if no message is waiting."""
        return not self._messages

    def kick(self) -> None:
        """Wake the writer, which sends the waiting messages."""
        self._event.set()

    async def write_all(self) -> None:
        """Send messages until the comm is closed, then raise `OSError`."""
        while True:
            await self._event.wait()
            self._event.clear()
            while self._messages:
                batch = [self._messages.popleft() for _ in range(len(self._messages))]
                num_added = self._num_added
                await self._comm.write(pack_messages(batch, self._comm))
                if num_added > self._num_written:
                    # `Comm.write` returns once the data is in a buffer, so that large values may still be waiting.
                    await flush(self._comm)
                self._num_written = num_added


async def flush(comm: Comm) -> None:
    """Wait until the write buffer of a comm is empty, if it has one."""
    stream = getattr(comm, "stream", None)
    if stream is not None:
        try:
            await stream.write(b"")
        except StreamClosedError as error:
            raise CommClosedError(str(error)) from error


def pack_messages(batch: Sequence[Any], comm: Comm | None = None) -> dict[str, Any]:
    """Return messages packed as one message of a comm."""
    # An in-process comm passes buffers without copying, although each side may modify its own.
    is_shared = comm is not None and comm.peer_address.startswith("inproc://")
    buffers: list[memoryview] = []

    def is_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _SMALL_BYTES:
            return True
        buffers.append(memoryview(bytearray(raw)) if is_shared else raw)
        return False

    pickled: Any = pickle.dumps(batch, protocol=5, buffer_callback=is_in_band)
    if len(pickled) >= _SMALL_BYTES:
        pickled = to_serialize(pickled)
    return {"m": pickled, "f": list(map(to_serialize, buffers))}


def unpack_messages(message: dict[str, Any]) -> list[Any]:
    """Return the messages that `pack_messages` packed into one."""
    messages: list[Any] = pickle.loads(message["m"], buffers=message["f"])
    return messages
