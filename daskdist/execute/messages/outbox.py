"""Messages between processes over a comm of Dask, where waiting messages are sent together."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import cloudpickle
import numpy as np
from distributed.comm import Comm, CommClosedError
from distributed.protocol import to_serialize
from tornado.iostream import StreamClosedError

# Smaller buffers are copied into the pickle: the header of a separate frame takes longer than the copy.
_SMALL_BYTES: Final = 2**16
# Each batch on a framed comm begins with the length of its pickle and the number of its buffers. Their lengths follow.
_HEADER: Final = struct.Struct("<QQ")
_READ_BYTES: Final = 2**16
# The most bytes of one write; TLS libraries have a limit of 2 GiB.
_MOST_WRITTEN_BYTES: Final = 2**30

_Packed = dict[str, Any]


class Outbox:
    """The sending end of a comm: messages that accumulate while one write runs are sent together by the next.

    Messages are bytes, or nests of plain values and of NumPy arrays that are not modified any more. `append` and
    `flush` may be called from any thread, the rest only from the thread of the event loop.

    Parameters
    ----------
    comm
        The connection.
    is_framed
        Whether small batches are written straight to the stream of the comm; the other end has to know, see
        `can_be_framed`.
    """

    def __init__(self, comm: Comm, *, is_framed: bool = False) -> None:
        self._comm = comm
        self._is_framed = is_framed
        # An in-process comm passes buffers without copying, although each side may modify its own.
        self._is_shared = _is_shared(comm)
        # A deque, because the writer cannot safely swap a list that another thread may be about to append to.
        self._messages: deque[Any] = deque()
        # A function that adds a message without large values, as `append` does.
        self.put: Callable[[Any], None] = self._messages.append
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._event = asyncio.Event()
        # Held while a batch is written at once.
        self._lock = threading.Lock()
        # True while `write_all` waits and nothing is left in the stream's buffer, so that others may write.
        self._is_idle = False
        # A second descriptor, so that a thread that sends never has one that the event loop has closed meanwhile.
        self._socket: socket.socket | None = None
        # Set by `flush` for the writer: the rest of a batch, or an error to be raised.
        self._rest: list[Any] = []
        self._error: Exception | None = None
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
        """Send the waiting messages: at once if they are small and nothing is being written, else by the writer."""
        # If another thread holds the lock, that thread checks for messages again afterwards.
        while self._is_idle and self._messages and self._lock.acquire(blocking=False):
            try:
                if self._is_idle and not self._is_sent_at_once():
                    self._is_idle = False
                    self._wake_writer()
            finally:
                self._lock.release()

    def _is_sent_at_once(self) -> bool:
        # A message that this thread sends need not wait until the event loop's thread wakes up.
        is_here = threading.get_ident() == self._loop_thread
        if self._num_added != self._num_written or not self._is_framed or not (is_here or self._socket):
            return False
        try:
            parts = self._next_parts()
            if len(parts) == 1 and self._socket is not None:
                (part,) = parts
                num_sent = _sent_now(self._socket, part)
                parts = [part[num_sent:]] if num_sent < len(part) else []
            elif is_here:
                # The stream sends the first part now; the writer waits for its end and writes the rest.
                _stream_of(self._comm).write(parts.pop(0))
            self._rest = parts
        except StreamClosedError as error:
            self._error = CommClosedError(str(error))
        except Exception as error:
            self._error = error.with_traceback(None)
        return not self._rest and self._error is None and self._num_added == self._num_written

    def _next_parts(self) -> list[Any]:
        # Return the next data to write: pieces of memory, or one Dask message.
        messages = [self._messages.popleft() for _ in range(len(self._messages))]
        pickled, buffers = _pickled(messages, is_shared=self._is_shared)
        if not self._is_framed:
            return [_packed(pickled, buffers)]
        if not buffers:
            return [_framed(pickled)]
        header = _HEADER.pack(len(pickled), len(buffers))
        return [header + struct.pack(f"<{len(buffers)}Q", *[buffer.nbytes for buffer in buffers]) + pickled, *buffers]

    def _wake_writer(self) -> None:
        if threading.get_ident() == self._loop_thread:
            self._event.set()
        else:
            # The loop may be closed.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._event.set)

    async def write_all(self) -> None:
        """Send messages until the comm is closed, then raise `OSError`."""
        if self._is_framed:
            self._socket = _second_socket(self._comm)
        try:
            while True:
                await self._write_waiting()
                self._event.clear()
                self._is_idle = True
                self.flush()
                await self._event.wait()
        finally:
            self.close()

    def close(self) -> None:
        """Send nothing any more; the connection ends once the comm is closed, too."""
        with self._lock:
            self._is_idle = False
            self._rest = []
            if self._socket is not None:
                self._socket.close()

    async def _write_waiting(self) -> None:
        while self._rest or self._error is not None or self._messages:
            if self._error is not None:
                raise self._error
            parts, self._rest = self._rest or self._next_parts(), []
            num_added = self._num_added
            try:
                while parts:
                    part = parts.pop(0)
                    await (_write(self._comm, part) if self._is_framed else self._comm.write(part))
            finally:
                # CPython crashes if its garbage collector finds views of pickled buffers in a reference cycle, such as
                # that of an error, its traceback and the frames of that.
                parts.clear()
                part = None
            if not self._is_framed and num_added > self._num_written:
                # `Comm.write` returns once the data is in a buffer, so that large values may still be waiting.
                await flush(self._comm)
            self._num_written = num_added


class BatchReader:
    """The receiving end of a comm on which an `Outbox` sends.

    Parameters
    ----------
    comm
        The connection.
    is_framed
        Whether the other end writes straight to the stream of the comm.
    stream
        The stream from which framed batches are read instead of that of the comm.
    """

    def __init__(self, comm: Comm, *, is_framed: bool, stream: Any = None) -> None:
        self._comm = comm
        self._stream = stream
        self._is_framed = is_framed
        self._buffer = bytearray()

    async def read(self) -> list[Any]:
        """Return the messages that were sent together; raise `OSError` if the comm is closed."""
        if not self._is_framed:
            return unpack_messages(await self._comm.read())
        try:
            num_bytes, num_buffers = _HEADER.unpack(await self._take(_HEADER.size))
            sizes = struct.unpack(f"<{num_buffers}Q", await self._take(8 * num_buffers)) if num_buffers else ()
            pickled = await self._take(num_bytes)
            messages: list[Any] = pickle.loads(pickled, buffers=[await self._take(size) for size in sizes])
        except StreamClosedError as error:
            raise CommClosedError(str(error)) from error
        return messages

    async def _take(self, num_bytes: int) -> bytearray | memoryview:
        stream, buffer = self._stream or _stream_of(self._comm), self._buffer
        if num_bytes > len(buffer) + _READ_BYTES:
            taken = np.empty(num_bytes, np.uint8).data
            num_there = len(buffer)
            taken[:num_there] = buffer
            buffer.clear()
            await stream.read_into(taken[num_there:])
            return taken
        while len(buffer) < num_bytes:
            # Read all available bytes: if some were left, tornado would register the stream with the event loop again.
            buffer += await stream.read_bytes(_READ_BYTES, partial=True)
        first = buffer[:num_bytes]
        del buffer[:num_bytes]
        return first


def framed(batch: Sequence[Any]) -> bytes:
    """Return small messages as they are sent on a framed comm."""
    return _framed(pickle.dumps(batch, protocol=5))


def _framed(pickled: bytes) -> bytes:
    return _HEADER.pack(len(pickled), 0) + pickled


def can_be_framed(comm: Comm) -> bool:
    """Return whether batches can be written straight to the stream of a comm, as they can with TCP and TLS.

    This takes half the time of a Dask message. It requires that the other end supports it and that nothing in between,
    such as a relay, reads the messages.
    """
    return getattr(comm, "stream", None) is not None


def _stream_of(comm: Comm) -> Any:
    stream = getattr(comm, "stream", None)
    if stream is None:
        raise CommClosedError("the connection is closed")
    return stream


def _second_socket(comm: Comm) -> socket.socket | None:
    # Return None for TLS, as only one thread may use a TLS connection.
    first = _stream_of(comm).socket
    if first is None:
        # Tornado has closed it.
        raise CommClosedError("the connection is closed")
    return None if isinstance(first, ssl.SSLSocket) else first.dup()


def _sent_now(sock: socket.socket, data: bytes) -> int:
    # Return the number of bytes that the operating system accepted.
    try:
        return sock.send(data)
    except BlockingIOError:
        return 0
    except OSError as error:
        raise CommClosedError(str(error)) from error


async def _write(comm: Comm, data: bytes | memoryview) -> None:
    # Return once the operating system has the data.
    try:
        for start in range(0, max(len(data), 1), _MOST_WRITTEN_BYTES):
            await _stream_of(comm).write(data[start : start + _MOST_WRITTEN_BYTES])
    except StreamClosedError as error:
        raise CommClosedError(str(error)) from error
    finally:
        # Tracebacks must not refer to the data, for the reason given in `Outbox`.
        del data


async def flush(comm: Comm) -> None:
    """Wait until the write buffer of a comm is empty, if it has one."""
    if can_be_framed(comm):
        await _write(comm, b"")


def pack_messages(batch: Sequence[Any]) -> _Packed:
    """Return messages packed as one message of a comm."""
    return _packed(*_pickled(batch, is_shared=False))


def _is_shared(comm: Comm) -> bool:
    return str(comm.peer_address).startswith("inproc://")


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
