"""Results that go from one worker to another, in order, over Dask's own connections."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable
from typing import Any, Final

from distributed import Worker
from distributed.comm import Comm, connect
from distributed.core import Status

from daskdist.strategy.steps.outbox import packed, unpacked

_OPERATION: Final = "daskdist_results"


class _Link:
    """Messages that wait to be sent to one worker, each with a function that is told why it could not be."""

    def __init__(self) -> None:
        self.unsent: list[tuple[Any, Callable[[str], None]]] = []
        self.event = asyncio.Event()

    async def write_all(self, comm: Comm) -> None:
        """Send messages for as long as the comm is open."""
        while True:
            await self.event.wait()
            self.event.clear()
            while self.unsent:
                batch = [message for message, _ in self.unsent]
                await comm.write(packed(batch, comm))
                del self.unsent[: len(batch)]


class Peers:
    """The connections by which one worker sends results to others.

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
        self._links: dict[str, _Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        worker.handlers[_OPERATION] = self._serve

    def send(self, address: str, message: Any, failed: Callable[[str], None]) -> None:
        """Send a message, in the event loop; ``failed`` is called with the reason where that cannot be done."""
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = _Link()
            task = asyncio.ensure_future(self._write(address, link))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        link.unsent.append((message, failed))
        link.event.set()

    async def _write(self, address: str, link: _Link) -> None:
        comm: Comm | None = None
        why = "it was closed"
        try:
            comm = await connect(address, **self._worker.connection_args)
            await comm.write({"op": _OPERATION, "reply": False})
            # Nothing comes: reading ends when the connection does.
            ends = [asyncio.ensure_future(each) for each in (link.write_all(comm), comm.read())]
            try:
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                next(iter(done)).result()
            finally:
                for each in ends:
                    each.cancel()
                await asyncio.gather(*ends, return_exceptions=True)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        finally:
            del self._links[address]
            if comm is not None:
                comm.abort()
            for _, failed in link.unsent:
                failed(why)

    async def _serve(self, comm: Comm) -> Any:
        with contextlib.suppress(OSError):
            while True:
                for message in unpacked(await comm.read()):
                    self._receive(message)
        return Status.dont_reply
