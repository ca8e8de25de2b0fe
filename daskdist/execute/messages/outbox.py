"""Messages between processes over a comm of Dask, where waiting messages are sent together."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import cloudpickle
from distributed.comm import Comm, CommClosedError
from distributed.protocol import to_serialize
from tornado.iostream import StreamClosedError

# Smaller buffers are copied into the pickle: the header of a separate frame takes longer than the copy.
_SMALL_BYTES: Final = 2**16

_Packed = dict[str, Any]


class Outbox:
    """The sending end of a comm: messages that accumulate while one write runs are sent together by the next.

    Messages are bytes, or nests of plain values and of NumPy arrays that are not modified any more. `append` and
    `flush` may be called from any thread, the rest only from the thread of the event loop.

    Parameters
    ----------
    comm
        The connection.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        # An in-process comm passes buffers without copying, although each side may modify its own.
        self._is_shared = str(comm.peer_address).startswith("inproc://")
        # A deque, because the writer cannot safely swap a list that another thread may be about to append to.
        self._messages: deque[Any] = deque()
        # A function that adds a message without large values, as `append` does.
        self.put: Callable[[Any], None] = self._messages.append
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._event = asyncio.Event()
        # True while the writer waits for `_event`, which nobody has set yet.
        self._is_idle = False
        # Bytes of large values added so far, and bytes written so far. Each counter is changed by one thread at a time.
        self._num_added = self._num_written = 0

    def append(self, message: Any, num_bytes: int = 0) -> None:
        """Add a message to be sent after the next `flush`; ``num_bytes`` is the size of its large values."""
        self._num_added += num_bytes
        self.put(message)

    @property
    def num_bytes(self) -> int:
        """The bytes of large values that are waiting or being written."""
        return self._num_added - self._num_written

    @property
    def is_empty(self) -> bool:
        """True if no message is waiting."""
        return not self._messages

    def flush(self) -> None:
        """Make the writer send the waiting messages."""
        if not self._is_idle:
            # It looks for messages before it waits.
            return
        self._is_idle = False
        if threading.get_ident() == self._loop_thread:
            self._event.set()
        else:
            # The loop may be closed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._event.set)

    async def write_all(self) -> None:
        """Send messages until the comm is closed, then raise `OSError`."""
        try:
            while True:
                while self._messages:
                    await self._write_waiting()
                self._event.clear()
                self._is_idle = True
                if not self._messages:
                    await self._event.wait()
        finally:
            self._is_idle = False

    async def _write_waiting(self) -> None:
        num_added = self._num_added
        messages = [self._messages.popleft() for _ in range(len(self._messages))]
        pickled, buffers = _pickled(messages, is_shared=self._is_shared)
        try:
            await self._comm.write(_packed(pickled, buffers))
        finally:
            # CPython crashes if its garbage collector finds views of pickled buffers in a reference cycle, such as that
            # of an error, its traceback and the frames of that.
            buffers.clear()
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


def pack_messages(batch: Sequence[Any]) -> _Packed:
    """Return messages packed as one message of a comm."""
    return _packed(*_pickled(batch, is_shared=False))


def _packed(pickled: bytes, buffers: Sequence[memoryview]) -> _Packed:
    return {
        "m": to_serialize(pickled) if len(pickled) >= _SMALL_BYTES else pickled,
        "f": list(map(to_serialize, buffers)),
    }


def _pickled(batch: Sequence[Any], *, is_shared: bool) -> tuple[bytes, list[memoryview]]:
    buffers: list[memoryview] = []

    def is_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _SMALL_BYTES:
            return True
        buffers.append(memoryview(bytearray(raw)) if is_shared else raw)
        return False

    try:
        return pickle.dumps(batch, protocol=5, buffer_callback=is_in_band), buffers
    except (pickle.PicklingError, AttributeError, TypeError):
        # For example, named tuples whose class the program defines, and which came here by value.
        buffers.clear()
        return cloudpickle.dumps(batch, protocol=5, buffer_callback=is_in_band), buffers


def unpack_messages(message: _Packed) -> list[Any]:
    """Return the messages that `pack_messages` packed into one."""
    messages: list[Any] = pickle.loads(message["m"], buffers=message["f"])
    return messages
