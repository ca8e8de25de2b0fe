"""Messages between processes over a comm of Dask, where waiting messages are sent together."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import cloudpickle
import numpy as np
from distributed.comm import Comm, CommClosedError
from distributed.protocol import to_serialize
from tornado.iostream import StreamClosedError

from daskdist.execute.messages.failure import LARGE_BYTES

# A framed batch begins with the length of its pickle and the number of its buffers. Their lengths follow.
_HEADER: Final = struct.Struct("<QQ")
_READ_BYTES: Final = 2**16
# The most bytes of one write, and of one read into a large buffer. So many exceed the buffers of sockets: after it, the
# other end is known to read.
_MOST_WRITTEN_BYTES: Final = 2**24


class BatchStream:
    """Batches of messages over a comm.

    They are written to its stream, which TCP and TLS have; this takes a quarter of the time of Dask's messages. Other
    comms send those.

    Parameters
    ----------
    comm
        The connection.
    is_direct
        Whether nothing in between, such as a relay, reads Dask's messages. Both ends must say the same.
    """

    def __init__(self, comm: Comm, *, is_direct: bool = True) -> None:
        self.comm = comm
        self._is_framed = is_direct and hasattr(comm, "stream")
        # An in-process comm passes buffers without copying, although each side may modify its own.
        self._is_shared = str(comm.peer_address).startswith("inproc://")
        self._buffer = bytearray()
        # The bytes read, and those that the other end is known to have read.
        self.num_read = self.num_read_there = 0

    async def write(self, batch: Sequence[Any]) -> None:
        """Write messages; return once the operating system has them."""
        pickled, buffers = _pickled(batch, is_shared=self._is_shared)
        try:
            if self._is_framed:
                sizes = struct.pack(f"<{len(buffers)}Q", *[buffer.nbytes for buffer in buffers])
                await self._write(_HEADER.pack(len(pickled), len(buffers)) + sizes + pickled)
                while buffers:
                    await self._write(buffers.pop(0))
            else:
                # Dask copies large bytes less often if they are marked.
                large = to_serialize(pickled) if len(pickled) >= LARGE_BYTES else pickled
                await self.comm.write({"m": large, "f": list(map(to_serialize, buffers))})
                # `Comm.write` returns once the data is in a buffer.
                await flush(self.comm)
        finally:
            # CPython crashes if its garbage collector finds views of pickled buffers in a reference cycle, such as that
            # of an error, its traceback and the frames of that.
            buffers.clear()

    async def read(self) -> list[Any]:
        """Return the messages that were written together; raise `OSError` if the comm is closed."""
        if not self._is_framed:
            message = await self.comm.read()
            self.num_read += sum(memoryview(frame).nbytes for frame in (message["m"], *message["f"]))
            return pickle.loads(message["m"], buffers=message["f"])  # type: ignore[no-any-return]
        num_bytes, num_buffers = _HEADER.unpack(await self._take(_HEADER.size))
        sizes = struct.unpack(f"<{num_buffers}Q", await self._take(8 * num_buffers))
        pickled = await self._take(num_bytes)
        messages: list[Any] = pickle.loads(pickled, buffers=[await self._take(size) for size in sizes])
        return messages

    async def _write(self, data: bytes | memoryview) -> None:
        try:
            for start in range(0, max(len(data), 1), _MOST_WRITTEN_BYTES):
                await _write(self.comm, data[start : start + _MOST_WRITTEN_BYTES])
                if start:
                    self.num_read_there += _MOST_WRITTEN_BYTES
        finally:
            # Tracebacks must not refer to the data, for the reason given in `write`.
            del data

    async def _take(self, num_bytes: int) -> bytearray | memoryview:
        buffer = self._buffer
        try:
            if num_bytes > len(buffer) + _READ_BYTES:
                taken, num_there = np.empty(num_bytes, np.uint8).data, len(buffer)
                taken[:num_there] = buffer
                buffer.clear()
                for start in range(num_there, num_bytes, _MOST_WRITTEN_BYTES):
                    stop = start + _MOST_WRITTEN_BYTES
                    self.num_read += await _stream_of(self.comm).read_into(taken[start:stop])
                return taken
            while len(buffer) < num_bytes:
                buffer += await _stream_of(self.comm).read_bytes(_READ_BYTES, partial=True)
            self.num_read += num_bytes
        except StreamClosedError as error:
            raise CommClosedError(str(error)) from error
        first = buffer[:num_bytes]
        del buffer[:num_bytes]
        return first


class Outbox:
    """The sending end of a connection: messages that accumulate while one write runs are sent together by the next.

    Any thread may append to `messages` and call `flush`, which sends them; the rest is only for the thread of the event
    loop. Messages are bytes, or nests of plain values and of NumPy arrays that are not modified any more.

    Parameters
    ----------
    stream
        Where batches are written to.
    """

    def __init__(self, stream: BatchStream) -> None:
        self._stream = stream
        # A deque, because the writer cannot safely swap a list that another thread may be about to append to.
        self.messages: deque[Any] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._event = asyncio.Event()
        # True while the writer waits for `_event`, which nobody has set yet.
        self._is_idle = False

    @property
    def is_empty(self) -> bool:
        """True if no message is waiting."""
        return not self.messages

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
                while self.messages:
                    await self._write_waiting()
                self._event.clear()
                self._is_idle = True
                if not self.messages:
                    await self._event.wait()
        finally:
            self._is_idle = False

    async def _write_waiting(self) -> None:
        messages = [self.messages.popleft() for _ in range(len(self.messages))]
        await self._stream.write(messages)


def _stream_of(comm: Comm) -> Any:
    stream = getattr(comm, "stream", None)
    if stream is None:
        raise CommClosedError("the connection is closed")
    return stream


async def _write(comm: Comm, data: bytes | memoryview) -> None:
    # Return once the operating system has the data.
    try:
        await _stream_of(comm).write(data)
    except StreamClosedError as error:
        raise CommClosedError(str(error)) from error
    finally:
        # Tracebacks must not refer to the data, for the reason given in `BatchStream`.
        del data


async def flush(comm: Comm) -> None:
    """Wait until the write buffer of a comm is empty, if it has one."""
    if hasattr(comm, "stream"):
        await _write(comm, b"")


def _pickled(batch: Sequence[Any], *, is_shared: bool) -> tuple[bytes, list[memoryview]]:
    buffers: list[memoryview] = []

    def is_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE_BYTES:
            return True
        buffers.append(memoryview(bytearray(raw)) if is_shared else raw)
        return False

    try:
        return pickle.dumps(batch, protocol=5, buffer_callback=is_in_band), buffers
    except (pickle.PicklingError, AttributeError, TypeError):
        # For example, named tuples whose class the program defines, and which came here by value.
        buffers.clear()
        return cloudpickle.dumps(batch, protocol=5, buffer_callback=is_in_band), buffers
