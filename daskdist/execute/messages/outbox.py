"""Messages that wait to be sent, and how several travel as one."""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from distributed.comm import Comm, CommClosedError
from distributed.protocol import to_serialize
from tornado.iostream import StreamClosedError

# A buffer that is smaller goes inside the pickle: a frame of its own has a header, which takes longer than the copy.
_SMALL_BYTES: Final = 2**16


class Outbox:
    """The sending end of a comm: a writer sends together the messages that gathered since it last wrote.

    Messages are nests of plain values and NumPy arrays that nobody changes, or bytes. `append` may be called from any
    thread, `kick` and `write_all` from the thread of the event loop.

    Parameters
    ----------
    comm
        The connection.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        # Not a list that the writer swaps: a thread may be about to append to it.
        self._messages: deque[Any] = deque()
        self._event = asyncio.Event()
        # Bytes of large values so far: those that were added, and of them those that were written. Each is counted by
        # one thread at a time.
        self._num_added = self._num_written = 0

    def append(self, message: Any, num_bytes: int = 0) -> None:
        """Add a message, and the size of what is large in it; it is sent after the next `kick`."""
        self._num_added += num_bytes
        self._messages.append(message)

    @property
    def num_bytes(self) -> int:
        """The bytes of large values that wait or are being written."""
        return self._num_added - self._num_written

    @property
    def is_empty(self) -> bool:
        """Return whether no message waits."""
        return not self._messages

    def kick(self) -> None:
        """Wake the writer, which sends what waits."""
        self._event.set()

    async def write_all(self) -> None:
        """Send messages for as long as the comm is open; raises `OSError` once it is not."""
        while True:
            await self._event.wait()
            self._event.clear()
            while self._messages:
                batch = [self._messages.popleft() for _ in range(len(self._messages))]
                num_added = self._num_added
                await self._comm.write(pack_messages(batch, self._comm))
                if num_added > self._num_written:
                    # Writing only puts it into a buffer.
                    await flush(self._comm)
                self._num_written = num_added


async def flush(comm: Comm) -> None:
    """Wait until what was written is on its way, where a comm writes into a buffer."""
    stream = getattr(comm, "stream", None)
    if stream is not None:
        try:
            await stream.write(b"")
        except StreamClosedError as error:
            raise CommClosedError(str(error)) from error


def pack_messages(batch: Sequence[Any], comm: Comm | None = None) -> dict[str, Any]:
    """Return messages as one message of a comm."""
    # That passes buffers on as they are, and each side may change its own.
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
    """Return the messages of a message of a comm."""
    found: list[Any] = pickle.loads(message["m"], buffers=message["f"])
    return found
