"""Connections from other workers, read by the thread that waits for a result of them.

A waiting thread reads the connections itself, as otherwise the event loop would have to wake up first, and then wake
the thread. While no thread waits, the event loop reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import ssl
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final

from distributed.comm import Comm
from tornado.iostream import StreamClosedError

from daskdist.execute.messages.outbox import BatchReader, framed
from daskdist.strategy.steps.remote.promises import Promise
from daskdist.waiting import wait_intervals

logger: Final = logging.getLogger("daskdist")

# Seconds after which received messages are acknowledged.
ACKNOWLEDGED_WITHIN_S: Final = 0.05
# Seconds without a waiting thread after which the event loop reads again.
_PAUSE_S: Final = 0.004


def can_be_read_by_threads(comm: Comm) -> bool:
    """Return whether threads can read the framed batches of a comm."""
    return hasattr(select, "poll") and isinstance(getattr(comm, "stream", None) and comm.stream.socket, socket.socket)


class _SocketStream:
    """The reading methods of a tornado stream, on a socket without data in any buffer but its own.

    Where tornado's wait, these suspend until they are resumed by `send(None)`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        # TLS may have data in its buffer, of which `poll` knows nothing.
        self._is_plain = not isinstance(sock, ssl.SSLSocket)
        self._is_drained = False

    @types.coroutine
    def read_bytes(self, num_bytes: int, *, partial: bool) -> Generator[None, None, bytes]:
        """Return the bytes there are, at least one and at most ``num_bytes``."""
        if self._is_drained:
            self._is_drained = False
            yield
        while True:
            try:
                data = self._socket.recv(num_bytes)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                yield
                continue
            except OSError as error:
                raise StreamClosedError(error) from error
            if not data:
                raise StreamClosedError
            self._is_drained = self._is_plain and len(data) < num_bytes
            return data

    @types.coroutine
    def read_into(self, view: memoryview) -> Generator[None, None, None]:
        """Fill a piece of memory."""
        while len(view):
            try:
                num_read = self._socket.recv_into(view)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                yield
                continue
            except OSError as error:
                raise StreamClosedError(error) from error
            if not num_read:
                raise StreamClosedError
            view = view[num_read:]


class InboundConnection:
    """A connection from another worker that threads read, instead of tornado."""

    def __init__(self, comm: Comm, link: str, receive: Callable[[str, int, Any], None]) -> None:
        stream: Any = comm.stream
        stream.io_loop.remove_handler(stream.fileno())
        self.socket: socket.socket = stream.socket
        self.fd = self.socket.fileno()
        self.has_ended = asyncio.Event()
        # The numbers of the last message, and of the last one that was acknowledged.
        self.last = self.acknowledged = 0
        self.acknowledged_at = time.monotonic()
        reader = BatchReader(comm, is_framed=True, stream=_SocketStream(self.socket))
        self._reading = self._read_all(reader, link, receive)

    async def _read_all(self, reader: BatchReader, link: str, receive: Callable[[str, int, Any], None]) -> None:
        while True:
            for number, message in await reader.read():
                self.last = number
                receive(link, number, message)

    def read(self) -> None:
        """Read the messages that have arrived; raise an error if the connection has ended."""
        self._reading.send(None)
        if time.monotonic() > self.acknowledged_at + ACKNOWLEDGED_WITHIN_S:
            self.acknowledge()

    def end(self) -> None:
        """Stop reading."""
        # If the worker is closing, a thread may be reading at this moment.
        with contextlib.suppress(ValueError):
            self._reading.close()

    def acknowledge(self) -> None:
        """Acknowledge the received messages to the sender."""
        if self.last == self.acknowledged:
            return
        data = framed([self.last])
        try:
            num_sent = self.socket.send(data)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            # The sender does not read now; a later acknowledgement covers these messages.
            return
        if num_sent < len(data):
            raise StreamClosedError
        self.acknowledged, self.acknowledged_at = self.last, time.monotonic()


class Inbound:
    """The connections from other workers to one worker.

    Parameters
    ----------
    receive
        Called in the thread that reads with the name of the link, the number and each message.
    """

    def __init__(self, receive: Callable[[str, int, Any], None]) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        # Held while a thread reads, or waits to read.
        self._lock = threading.Lock()
        self.reading_thread = 0
        self._num_waits = 0
        # Threads that wait while another one reads.
        self._waiting: deque[SimpleQueue[None]] = deque()
        self._connections: dict[int, InboundConnection] = {}
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        weakref.finalize(self, _close, self._waker, self._woken).atexit = False
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        # Whether the event loop reads, and whether a thread that has waited for long has to report when it stops.
        self._is_armed = True
        self._is_parked = False
        self._acknowledges_soon = False

    async def read_all(self, comm: Comm, link: str) -> None:
        """Read a connection until it ends."""
        connection = InboundConnection(comm, link, self._receive)
        # A thread that finds a connection may remove it at once.
        self._poll.register(connection.fd, select.POLLIN)
        self._connections[connection.fd] = connection
        if self._is_armed:
            self._loop.add_reader(connection.fd, self._read_in_loop, connection.fd)
        # A thread that is reading has to poll the new connection too.
        self._wake()
        try:
            await connection.has_ended.wait()
        finally:
            self._remove(connection)
            self._loop.remove_reader(connection.fd)
            connection.end()

    def wait_for(self, promise: Promise) -> None:
        """Wait for a result in a thread that is not the event loop's."""
        if not self._connections:
            # The event loop reads new connections.
            return
        gate: SimpleQueue[None] = SimpleQueue()
        promise.when_set(partial(self._when_set, threading.get_ident(), gate))
        for within_s in wait_intervals(f"a result of {promise.origin or 'an earlier call'}", None):
            if promise.is_set:
                return
            self._waiting.append(gate)
            if self._lock.acquire(blocking=False):
                try:
                    self._stop_waiting(gate)
                    self._read_until_set(promise, within_s)
                finally:
                    self._release()
            else:
                try:
                    gate.get(timeout=within_s)
                except Empty:
                    self._stop_waiting(gate)

    def _stop_waiting(self, gate: SimpleQueue[None]) -> None:
        # Another thread may have removed the gate to wake this one.
        with contextlib.suppress(ValueError):
            self._waiting.remove(gate)

    def _when_set(self, thread: int, gate: SimpleQueue[None]) -> None:
        if thread != threading.get_ident():
            gate.put(None)
            if thread == self.reading_thread:
                self._wake()

    def _wake(self) -> None:
        # The socket is full of unread wake-ups, or the worker is closed.
        with contextlib.suppress(OSError):
            self._waker.send(b"w")

    def _read_until_set(self, promise: Promise, within_s: float) -> None:
        self.reading_thread = threading.get_ident()
        self._num_waits += 1
        until = time.monotonic() + within_s
        while not promise.is_set and (left_s := until - time.monotonic()) > 0:
            connections = list(self._connections.values())
            is_acknowledging = any(connection.last != connection.acknowledged for connection in connections)
            ready = self._poll.poll(1e3 * min(left_s, ACKNOWLEDGED_WITHIN_S if is_acknowledging else left_s))
            for fd, _ in ready:
                self._read(fd)
            if not ready:
                self._acknowledge_all()

    def _release(self) -> None:
        self.reading_thread = 0
        self._lock.release()
        # Any of these threads may read next.
        while self._waiting:
            try:
                self._waiting.popleft().put(None)
            except IndexError:
                break
        if self._is_parked:
            self._is_parked = False
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._arm)

    def _read(self, fd: int) -> None:
        connection = self._connections.get(fd)
        if connection is not None:
            self._try(connection, connection.read)
        elif fd == self._woken.fileno():
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)

    def _try(self, connection: InboundConnection, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if not isinstance(error, OSError):
                logger.exception("a message of another worker could not be read")
            self._remove(connection)
            # The worker may be closing.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(connection.has_ended.set)

    def _remove(self, connection: InboundConnection) -> None:
        # If this connection was closed elsewhere, another one may have its descriptor. Another thread may be first.
        if self._connections.get(connection.fd) is connection:
            with contextlib.suppress(KeyError):
                del self._connections[connection.fd]
                self._poll.unregister(connection.fd)

    def _acknowledge_all(self) -> None:
        for connection in list(self._connections.values()):
            self._try(connection, connection.acknowledge)

    # --- in the event loop ---

    def _read_in_loop(self, fd: int) -> None:
        if not self._lock.acquire(blocking=False):
            self._disarm()
            return
        try:
            self.reading_thread = self._loop_thread
            self._read(fd)
        finally:
            self._release()
        self._acknowledge_soon()

    def _disarm(self) -> None:
        # While threads read, messages must not wake the event loop too.
        self._is_armed = False
        for fd in list(self._connections):
            self._loop.remove_reader(fd)
        self._loop.call_later(_PAUSE_S, self._arm_if_unused, self._num_waits)

    def _arm_if_unused(self, num_waits: int) -> None:
        if num_waits != self._num_waits:
            self._loop.call_later(_PAUSE_S, self._arm_if_unused, self._num_waits)
            return
        self._is_parked = True
        if not self._lock.locked():
            self._is_parked = False
            self._arm()

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            # A thread that reads may remove some meanwhile.
            for fd in list(self._connections):
                self._loop.add_reader(fd, self._read_in_loop, fd)
            self._acknowledge_soon()

    def _acknowledge_soon(self) -> None:
        if not self._acknowledges_soon:
            self._acknowledges_soon = True
            self._loop.call_later(ACKNOWLEDGED_WITHIN_S, self._acknowledge_in_loop)

    def _acknowledge_in_loop(self) -> None:
        self._acknowledges_soon = False
        # Otherwise the thread that reads acknowledges them.
        if self._lock.acquire(blocking=False):
            try:
                self._acknowledge_all()
            finally:
                self._release()


def _close(*sockets: socket.socket) -> None:
    for end in sockets:
        end.close()
