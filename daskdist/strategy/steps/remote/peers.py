"""Results that go from one worker to another, in order, over Dask's own connections."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final

from distributed import Worker
from distributed.comm import Comm, CommClosedError, connect
from distributed.core import Status

from daskdist.config import seconds
from daskdist.execute.messages.outbox import BatchStream, Outbox, flush

_OPERATION: Final = "daskdist_results"
# Seconds after which received messages are acknowledged.
_ACKNOWLEDGED_WITHIN_S: Final = 0.05
# Seconds before the next attempt after a connection on which nothing was acknowledged.
_PAUSE_S: Final = 0.1
# Seconds to wait for an answer on a new connection before the next attempt.
_ANSWERS_WITHIN_S: Final = 2.0
# The number of senders whose last message number is remembered.
_MOST_SENDERS: Final = 4096


class _Link:
    """Messages to one worker, each kept until it is acknowledged."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        # Numbered messages, each with a function that is called with the reason if it could not be sent.
        self.kept: deque[tuple[tuple[int, Any], Callable[[str], None]]] = deque()
        self.num_acknowledged = 0
        self._num_messages = 0
        self._outbox: Outbox | None = None
        self._is_over = False
        self._lock = threading.Lock()

    def send(self, message: Any, failed: Callable[[str], None]) -> bool:
        """Keep a message, and send it if there is a connection, in any thread; return False if the link is over."""
        with self._lock:
            if self._is_over:
                return False
            self._num_messages += 1
            numbered = self._num_messages, message
            self.kept.append((numbered, failed))
            outbox = self._outbox
            if outbox is not None:
                outbox.append(numbered)
        if outbox is not None:
            outbox.flush()
        return True

    def end_if_unused(self) -> bool:
        """End the link unless messages are kept; return whether it is over."""
        with self._lock:
            self._is_over = not self.kept
            return self._is_over

    def end(self, why: str) -> None:
        """End the link, and report why messages could not be sent."""
        with self._lock:
            self._is_over = True
        for _, failed in self.kept:
            failed(why)

    async def write_all(self, batches: BatchStream) -> None:
        """Send all kept and all later messages while the comm is open."""
        outbox = Outbox(batches)
        with self._lock:
            for numbered, _ in self.kept:
                outbox.append(numbered)
            self._outbox = outbox
        try:
            await outbox.write_all()
        finally:
            self._outbox = None

    async def read_all(self, batches: BatchStream) -> None:
        """Drop messages as they are acknowledged, while the comm is open."""
        while True:
            self.acknowledge(max(await batches.read()))

    def acknowledge(self, number: int) -> None:
        """Drop the messages up to an acknowledged number."""
        while self.kept and self.kept[0][0][0] <= number:
            self.kept.popleft()
        self.num_acknowledged = max(self.num_acknowledged, number)


class Peers:
    """The connections by which one worker sends results to others.

    Each message arrives once and in order, even if a connection breaks: it is numbered, kept until it is acknowledged,
    and sent again by the next connection. That is given up when nothing was acknowledged for ``daskdist.timeouts.step``
    seconds, or no connection can be made. Results of recent calls are kept, too.

    Parameters
    ----------
    worker
        The worker.
    receive
        Called in the event loop with each message that comes from another worker.
    """

    def __init__(self, worker: Worker, receive: Callable[[Any], None]) -> None:
        self._worker = weakref.proxy(worker)
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._links: dict[str, _Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Name of a sender's link -> the number of the last message that arrived.
        self._last: OrderedDict[str, int] = OrderedDict()
        worker.handlers[_OPERATION] = self._serve

    def send(self, address: str, message: Any, failed: Callable[[str], None]) -> None:
        """Send a message, in any thread; if that fails, ``failed`` is called with the reason."""
        link = self._links.get(address)
        if link is not None and link.send(message, failed):
            return
        if threading.get_ident() != self._loop_thread:
            # The worker may be closing.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.send, address, message, failed)
            return
        link = self._links[address] = _Link()
        link.send(message, failed)
        task = asyncio.ensure_future(self._send_all(address, link))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_all(self, address: str, link: _Link) -> None:
        why, clock = "it was closed", asyncio.get_running_loop().time
        give_up_at = clock() + seconds("timeouts.step")
        try:
            while clock() < give_up_at:
                before = link.num_acknowledged
                try:
                    await self._send_by_one(address, link)
                except (CommClosedError, TimeoutError) as error:
                    why = f"{type(error).__name__}: {error}"
                if link.end_if_unused():
                    break
                if link.num_acknowledged > before:
                    give_up_at = clock() + seconds("timeouts.step")
                else:
                    await asyncio.sleep(_PAUSE_S)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        finally:
            if self._links.get(address) is link:
                del self._links[address]
            link.end(why)

    async def _send_by_one(self, address: str, link: _Link) -> None:
        comm = await connect(address, **self._worker.connection_args)
        ends: list[asyncio.Task[None]] = []
        try:
            await comm.write({"op": _OPERATION, "reply": False, "link": link.name})
            # A worker that was started at the address of a lost one answers once it takes part.
            link.acknowledge(await asyncio.wait_for(comm.read(), _ANSWERS_WITHIN_S))
            batches = BatchStream(comm)
            ends += map(asyncio.ensure_future, (link.write_all(batches), link.read_all(batches)))
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            next(iter(done)).result()
        finally:
            for end in ends:
                end.cancel()
            comm.abort()
            await asyncio.gather(*ends, return_exceptions=True)

    async def _serve(self, comm: Comm, link: str) -> Any:
        with contextlib.suppress(OSError):
            # Acknowledge the messages that earlier connections brought.
            await comm.write(self._last.get(link, 0))
            await flush(comm)
            await self._read_all(BatchStream(comm), link)
        comm.abort()
        return Status.dont_reply

    async def _read_all(self, batches: BatchStream, link: str) -> None:
        has_arrived = asyncio.Event()
        acknowledging = asyncio.ensure_future(self._acknowledge(batches, link, has_arrived))
        # Reading raises the same error.
        acknowledging.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            while True:
                for number, message in await batches.read():
                    self._take(link, number, message)
                has_arrived.set()
        finally:
            acknowledging.cancel()

    async def _acknowledge(self, batches: BatchStream, link: str, has_arrived: asyncio.Event) -> None:
        while True:
            await has_arrived.wait()
            # Acknowledge messages that arrive soon together.
            await asyncio.sleep(_ACKNOWLEDGED_WITHIN_S)
            has_arrived.clear()
            await batches.write([self._last[link]])

    def _take(self, link: str, number: int, message: Any) -> None:
        # An earlier connection may have brought the message already.
        last = self._last.get(link, 0)
        if number <= last:
            return
        self._last[link] = number
        # Keep the senders that were active last.
        self._last.move_to_end(link)
        if not last and len(self._last) > _MOST_SENDERS:
            self._last.popitem(last=False)
        self._receive(message)
