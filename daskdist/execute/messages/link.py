"""Links: the messages that one worker sends to another, in order; each arrives once, although connections break.

A message is numbered, and kept until the other end acknowledges it. When a connection breaks, the sender opens another
one and sends again what it keeps; the receiver ignores what it has already. Two things tell of a lost worker: its
silence, which each link measures, and Dask's scheduler. Messages that were not acknowledged then go back to those that
sent them, with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from distributed import Worker
from distributed.comm import Comm, CommClosedError, connect
from distributed.core import Status
from tornado.ioloop import PeriodicCallback

from daskdist.config import seconds
from daskdist.execute.messages.failure import LARGE_BYTES
from daskdist.execute.messages.outbox import BatchStream, Outbox, flush

logger: Final = logging.getLogger("daskdist")

_OPERATION: Final = "daskdist_link"
# Seconds after which received messages are acknowledged; large ones are at once, as senders may wait for that.
_ACKNOWLEDGED_WITHIN_S: Final = 0.05
# Seconds before the next attempt after a connection on which nothing was acknowledged.
_PAUSE_S: Final = 0.1
# Seconds to wait for an answer on a new connection before the next attempt.
_ANSWERS_WITHIN_S: Final = 2.0
# Seconds between measurements of silence, and the silence after which the scheduler is believed that a worker has left.
_BEAT_S: Final = 0.25
_SILENT_S: Final = 2.0
# The number of links from others, and of workers that have left, that are remembered.
_MOST_REMEMBERED: Final = 4096
_HAS_LEFT: Final = "it has left the cluster"


class Sent(NamedTuple):
    """A message that is kept until it is acknowledged.

    Parameters
    ----------
    number
        Its number in the link, from 1.
    message
        The message.
    over
        Called once in the event loop: with None when the message has arrived, with the reason if its worker is lost.
    num_bytes
        The size of what is large in it.
    """

    number: int
    message: Any
    over: Callable[[str | None], None] | None
    num_bytes: int


class LinkState:
    """The state of one end of a link, without input and output.

    The messages `kept` have consecutive numbers, which end with `num_sent`. `send` is called under a lock of the
    caller's, everything else in one thread.
    """

    def __init__(self) -> None:
        self.kept: deque[Sent] = deque()
        self.num_sent = 0
        self.num_arrived = 0
        # The seconds for which messages are kept while nothing moves.
        self.silent_s = 0.0
        self._last_progress: Any = None

    @property
    def num_over(self) -> int:
        """The number of messages that the other end has acknowledged."""
        return self.num_sent - len(self.kept)

    def send(
        self, message: Any, over: Callable[[str | None], None] | None = None, num_bytes: int = 0
    ) -> tuple[int, Any]:
        """Keep a message; return what is to be written."""
        self.num_sent += 1
        self.kept.append(Sent(self.num_sent, message, over, num_bytes))
        return self.num_sent, message

    def acknowledge(self, number: int) -> list[Sent]:
        """Return the messages that are not kept any longer, as the other end has all up to a number."""
        arrived = []
        while self.kept and self.kept[0].number <= number:
            arrived.append(self.kept.popleft())
        return arrived

    def arrive(self, number: int) -> bool:
        """Return whether a message of the other end is new, and count it then."""
        is_new = number > self.num_arrived
        if is_new:
            self.num_arrived = number
        return is_new

    def begin_again(self) -> None:
        """Continue with another process in the place of the other end, which numbers its messages from 1 on."""
        self.num_arrived = 0

    def beat(self, passed_s: float, num_moved: int) -> None:
        """Add to the silence the seconds since the last beat, or end it if something has moved meanwhile."""
        progress = self.kept[0].number if self.kept else None, num_moved
        is_silent = bool(self.kept) and progress == self._last_progress
        self.silent_s = self.silent_s + passed_s if is_silent else 0.0
        self._last_progress = progress

    def validate(self) -> None:
        """Check what holds between the attributes."""
        numbers = [sent.number for sent in self.kept]
        if numbers != list(range(self.num_sent - len(numbers) + 1, self.num_sent + 1)):
            raise AssertionError(f"{numbers} are kept of {self.num_sent} messages")


class RunClock:
    """The time for which this process has run: that in which it was stopped, and has read nothing, does not count.

    Parameters
    ----------
    every_s
        The seconds between two beats.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._beat_at = time.monotonic()
        self.run_s = 0.0

    def beat(self, now: float) -> float:
        """Return the seconds since the last beat that count."""
        passed_s, self._beat_at = min(now - self._beat_at, 2 * self._every_s), now
        self.run_s += passed_s
        return passed_s


class Link:
    """One end of a link: its state, and the connection that is open now.

    `state.send` is called and `_outbox` is read under the lock, in any thread; the rest belongs to the event loop.

    Parameters
    ----------
    receive
        Called with the messages that arrive together.
    """

    def __init__(self, receive: Callable[[list[Any]], None]) -> None:
        self.state = LinkState()
        self.batches: BatchStream | None = None
        self._receive = receive
        self._outbox: Outbox | None = None
        self._lock = threading.Lock()
        # Bytes of messages so far, and of those that are over. Each is changed in one place.
        self.num_sent_bytes = self.num_over_bytes = 0
        self._moved_before = 0

    def append(self, message: Any, over: Callable[[str | None], None] | None = None, num_bytes: int = 0) -> None:
        """Add a message that is sent after the next `flush`, in any thread; see `Sent`."""
        with self._lock:
            self.num_sent_bytes += num_bytes
            numbered = self.state.send(message, over, num_bytes)
            if self._outbox is not None:
                self._outbox.messages.append(numbered)

    def flush(self) -> None:
        """Send what waits, in any thread."""
        outbox = self._outbox
        if outbox is not None and not outbox.is_empty:
            outbox.flush()

    @property
    def num_bytes(self) -> int:
        """The bytes of large values that were not acknowledged yet."""
        return self.num_sent_bytes - self.num_over_bytes

    @property
    def is_written(self) -> bool:
        """Return whether no message waits to be written."""
        outbox = self._outbox
        return outbox is None or outbox.is_empty

    def close(self) -> None:
        """Drop what is kept, as the link is not opened again; Python must not find it in a cycle, see `BatchStream`."""
        self.state.kept.clear()
        self.num_over_bytes = self.num_sent_bytes

    def acknowledge(self, number: int) -> None:
        """Drop what the other end has."""
        for sent in self.state.acknowledge(number):
            self.num_over_bytes += sent.num_bytes
            if sent.over is not None:
                sent.over(None)

    def beat(self, passed_s: float) -> float:
        """Return the seconds of silence, after some more seconds."""
        self.state.beat(passed_s, self._num_moved())
        return self.state.silent_s

    def moves(self) -> bool:
        """Return whether something has moved since the last question."""
        before, self._moved_before = self._moved_before, self._num_moved()
        return self._moved_before != before

    def _num_moved(self) -> int:
        batches = self.batches
        return 0 if batches is None else batches.num_read + batches.num_read_there

    def validate(self) -> None:
        """Check what holds between the attributes."""
        with self._lock:
            self.state.validate()

    async def run(
        self, comm: Comm, *, is_direct: bool = True, unsendable: Callable[[BaseException], Any] | None = None
    ) -> None:
        """Exchange messages over a connection until it breaks, then raise `OSError`.

        If messages do not pickle, that is raised, and the other end gets what ``unsendable`` returns for it.
        """
        batches = BatchStream(comm, is_direct=is_direct)
        outbox = Outbox(batches)
        with self._lock:
            outbox.messages.extend([sent[:2] for sent in self.state.kept])
            self._outbox, self.batches = outbox, batches
        ends = list(map(asyncio.ensure_future, (outbox.write_all(), self._read(batches, outbox))))
        done, error = set[asyncio.Task[None]](), None
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            error = next(iter(done)).exception()
            if ends[0] in done and unsendable is not None and error is not None and not isinstance(error, OSError):
                await batches.write([(self.state.num_sent + 1, unsendable(error))])
            next(iter(done)).result()
        finally:
            if self._outbox is outbox:
                self._outbox = self.batches = None
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            # The traceback of an error must not lead to its task, and so back to it; see `BatchStream.write`.
            ends.clear()
            done.clear()
            del error

    async def _read(self, batches: BatchStream, outbox: Outbox) -> None:
        loop, is_due = asyncio.get_running_loop(), False

        def acknowledge() -> None:
            nonlocal is_due
            is_due = False
            outbox.messages.append(self.state.num_arrived)
            outbox.flush()

        while True:
            before = batches.num_read
            if not self._take(await batches.read()):
                continue
            if batches.num_read - before > LARGE_BYTES:
                acknowledge()
            elif not is_due:
                # Acknowledge messages that arrive soon together.
                is_due = True
                loop.call_later(_ACKNOWLEDGED_WITHIN_S, acknowledge)

    def _take(self, batch: Sequence[tuple[int, Any] | int]) -> bool:
        # Return whether there are messages in it.
        messages = []
        for item in batch:
            if isinstance(item, int):
                self.acknowledge(item)
            elif self.state.arrive(item[0]):
                messages.append(item[1])
        self._receive(messages)
        return any(not isinstance(item, int) for item in batch)


class _LinkTo(Link):
    # A link to another worker, which sends back nothing but acknowledgements.

    def __init__(self, *, has_left: bool) -> None:
        super().__init__(lambda messages: None)
        self.name = uuid.uuid4().hex
        self.has_left = has_left
        # The longest silence that one of those who sent something allows, and the time of `RunClock` at which something
        # moved in either direction.
        self.most_silence_s = 0.0
        self.moved_s = 0.0
        self.task: asyncio.Task[None] | None = None
        self.why = "it was closed"

    def end(self, why: str) -> None:
        self.why = why
        if self.task is not None:
            self.task.cancel()


class WorkerLinks:
    """The links from one worker to others, and from others to it.

    Parameters
    ----------
    worker
        The worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = weakref.proxy(worker)
        # Type of a message -> what is called in the event loop with the address of the sender and each message.
        self.handlers: dict[type, Callable[[str, Any], None]] = {}
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._links: dict[str, _LinkTo] = {}
        # Name of a link from another worker -> that worker, and the link's end here.
        self._received: OrderedDict[str, tuple[str, Link]] = OrderedDict()
        # The workers that have left, according to the scheduler.
        self._left: OrderedDict[str, None] = OrderedDict()
        self.clock = RunClock(_BEAT_S)
        worker.handlers[_OPERATION] = self._serve
        # The worker ends it when it closes.
        beating = worker.periodic_callbacks["daskdist-links"] = PeriodicCallback(self._beat, 1000 * _BEAT_S)
        beating.start()

    def send(self, address: str, message: Any, over: Callable[[str | None], None] | None = None) -> None:
        """Send a message, in any thread; see `Sent`."""
        most_silence_s = seconds("timeouts.silence")
        with self._lock:
            link = self._links.get(address)
            is_new = link is None
            if link is None:
                link = self._links[address] = _LinkTo(has_left=address in self._left)
            # Under the lock, as the link may end at any moment.
            link.append(message, over)
            link.most_silence_s = max(link.most_silence_s, most_silence_s)
        link.flush()
        if is_new:
            # The worker may be closing.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._start, address, link)

    def moved_s(self, address: str) -> float:
        """Return the time of the clock at which messages last moved to or from a worker."""
        link = self._links.get(address)
        return 0.0 if link is None else link.moved_s

    def note_left(self, address: str) -> None:
        """Note that the scheduler has dropped a worker; called in the event loop."""
        self._left[address] = None
        if len(self._left) > _MOST_REMEMBERED:
            self._left.popitem(last=False)
        link = self._links.get(address)
        if link is not None:
            link.has_left = True
            if link.batches is None or not link.state.kept:
                link.end(_HAS_LEFT)

    def num_kept(self) -> int:
        """Return the number of messages that were not acknowledged yet."""
        return sum(len(link.state.kept) for link in list(self._links.values()))

    def _beat(self) -> None:
        passed_s = self.clock.beat(time.monotonic())
        for sender, received in self._received.values():
            link = self._links.get(sender)
            if received.moves() and link is not None:
                link.moved_s = self.clock.run_s
        for link in list(self._links.values()):
            silent_s = link.beat(passed_s)
            if link.state.kept and not silent_s:
                link.moved_s = self.clock.run_s
            if silent_s > link.most_silence_s:
                link.end(silence_error(link.most_silence_s))
            elif link.has_left and silent_s > _SILENT_S:
                link.end(_HAS_LEFT)

    # --- the sending end ---

    def _start(self, address: str, link: _LinkTo) -> None:
        link.task = asyncio.ensure_future(self._send_all(address, link))

    async def _send_all(self, address: str, link: _LinkTo) -> None:
        try:
            while True:
                num_over = link.state.num_over
                try:
                    await self._send_by_one(address, link)
                except (CommClosedError, TimeoutError) as error:
                    link.why = f"{type(error).__name__}: {error}"
                with self._lock:
                    if not link.state.kept:
                        del self._links[address]
                        return
                if link.has_left:
                    return
                if link.state.num_over == num_over:
                    await asyncio.sleep(_PAUSE_S)
        except Exception as error:
            link.why = f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                if self._links.get(address) is link:
                    del self._links[address]
            for sent in link.state.kept:
                if sent.over is not None:
                    sent.over(link.why)
            link.close()

    async def _send_by_one(self, address: str, link: _LinkTo) -> None:
        # A worker that has left does not answer, but another one may have started at its address.
        within = {"timeout": _ANSWERS_WITHIN_S} if link.has_left else {}
        comm = await connect(address, **within, **self._worker.connection_args)
        try:
            await comm.write({"op": _OPERATION, "reply": False, "link": link.name, "sender": self._worker.address})
            # A worker that was started at the address of a lost one answers once it takes part.
            link.acknowledge(await asyncio.wait_for(comm.read(), _ANSWERS_WITHIN_S))
            await link.run(comm)
        finally:
            comm.abort()

    # --- the receiving end ---

    async def _serve(self, comm: Comm, link: str, sender: str) -> Any:
        _, end = self._received.setdefault(link, (sender, Link(partial(self._receive, sender))))
        # Remember the links that are open, and those that were opened last.
        self._received.move_to_end(link)
        if len(self._received) > _MOST_REMEMBERED:
            closed = next((name for name, (_, old) in self._received.items() if old.batches is None), link)
            if closed != link:
                del self._received[closed]
        # It may be another worker at the address of one that has left.
        self._left.pop(sender, None)
        if sender in self._links:
            self._links[sender].has_left = False
        try:
            # Acknowledge the messages that earlier connections brought.
            await comm.write(end.state.num_arrived)
            await flush(comm)
            await end.run(comm)
        except OSError:
            pass
        finally:
            comm.abort()
        return Status.dont_reply

    def _receive(self, sender: str, messages: list[Any]) -> None:
        for message in messages:
            try:
                self.handlers[type(message)](sender, message)
            except Exception:
                # The others are not concerned.
                logger.exception("a message of %s could not be handled", sender)


def silence_error(most_s: float) -> str:
    """Return the reason for the loss of a worker that was silent for too long."""
    return f"no answer for {most_s:g} s, which is daskdist.timeouts.silence"
