"""The program's end of a stream of steps to one worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

from distributed import Client
from distributed.comm import Comm, connect
from tornado.ioloop import PeriodicCallback

from daskdist.config import seconds, setting
from daskdist.errors import ArgumentError
from daskdist.execute.callers.live_workers import LOGGED_AFTER_S, STILL_WAITED_FOR
from daskdist.execute.messages.link import Link, silence_error
from daskdist.strategy.calls.calls import RunningOnReplica
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.replica.loop_progress import LoopProgress

logger: Final = logging.getLogger("daskdist")

OPERATION = "daskdist_steps"
RELAY = "daskdist_relay"
# The most seconds to connect to a worker directly.
_MOST_S: Final = 3.0


class StepStream:
    """An ordered stream of messages to a worker, and its messages to the program.

    Parameters
    ----------
    address
        The worker's.
    comm
        The connection.
    receive
        Called in the event loop with the messages of one batch.
    broken
        Called in the event loop when the connection breaks, with the reason.
    is_relayed
        Whether the connection is to the scheduler.
    """

    def __init__(
        self,
        address: str,
        comm: Comm,
        receive: Callable[[StepStream, list[Any]], None],
        broken: Callable[[StepStream, str], None],
        *,
        is_relayed: bool,
    ) -> None:
        self.address = address
        self.is_relayed = is_relayed
        self.link = Link(self._read)
        self._comm = comm
        self._receive = receive
        self._broken = broken
        # The numbers of the objects that the worker has.
        self.objects: set[int] = set()
        # The keys of tasks whose data the worker waits for, while the program looks whether it can come.
        self.needed: set[Any] = set()
        self.is_open = True
        # The seconds of a silence that was logged; 0 if there is none.
        self._logged_s = 0.0
        # The running calls of its replicas, and the time of the question.
        self.running: list[RunningOnReplica] = []
        self.running_at = time.monotonic()
        self.loop_progress = LoopProgress("it continues there, and delays later calls")
        # The number of calls of `run` that were sent so far.
        self.num_steps = 0
        # Calls up to this number were sent before this stream was opened, if at all to a lost worker at this address.
        self.opened_after = 0
        self._why = "it was closed"
        self._task = asyncio.ensure_future(self._run())

    @classmethod
    async def open(
        cls,
        address: str,
        group: ReplicaGroup,
        client: Client,
        receive: Callable[[StepStream, list[Any]], None],
        broken: Callable[[StepStream, str], None],
    ) -> StepStream:
        """Connect to a worker, and send it the replicas."""
        comm, is_relayed = await connect_to_worker(address, client)
        try:
            opening = {"group": pickle.dumps(group), "is_relayed": is_relayed}
            await comm.write({"op": OPERATION, "reply": False, **opening})
            # After this message, the worker accepts results of other workers.
            await comm.read()
        except BaseException:
            comm.abort()
            raise
        return cls(address, comm, receive, broken, is_relayed=is_relayed)

    async def _run(self) -> None:
        try:
            await self.link.run(self._comm, is_direct=not self.is_relayed)
        except Exception as error:
            self._why = f"{type(error).__name__}: {error}"
        finally:
            self.is_open = False
            self._comm.abort()
            self.link.close()
            self._broken(self, self._why)

    def beat(self, passed_s: float) -> bool:
        """Close the stream if its worker has been silent for too long, after some more seconds; return whether it has.

        A worker that is stopped neither acknowledges messages nor closes its connection.
        """
        silent_s, most = self.link.beat(passed_s), seconds("timeouts.silence")
        if silent_s > most:
            self.close(silence_error(most))
            return True
        if silent_s > min(LOGGED_AFTER_S, most / 2):
            if not self._logged_s:
                logger.warning(STILL_WAITED_FOR, self.address, silent_s, most)
            self._logged_s = silent_s
        return False

    def _read(self, messages: list[Any]) -> None:
        if self._logged_s:
            logger.warning("%s answers again, after %.0f s", self.address, self._logged_s)
            self._logged_s = 0.0
        self._receive(self, messages)

    def close(self, why: str = "it was closed") -> None:
        """Close the connection, in the event loop; the worker frees everything of the strategy."""
        self._why = why
        with contextlib.suppress(RuntimeError):
            self._task.cancel()


def close_all(streams: Iterable[StepStream]) -> None:
    """Close streams, in the event loop."""
    for stream in streams:
        stream.close()


def close_all_soon(streams: Iterable[StepStream], beat: PeriodicCallback, loop: asyncio.AbstractEventLoop) -> None:
    """Close streams, and end what checks them; called by the garbage collector, in any thread."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(close_all, streams)
        loop.call_soon_threadsafe(beat.stop)


def in_background(work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    """Begin some work in the event loop, of which nothing needs the outcome."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def connect_to_worker(address: str, client: Client) -> tuple[Comm, bool]:
    """Connect to a worker, by way of the scheduler where it is not reached directly; return which."""
    relay: Any = setting("steps.relay")
    if relay not in (True, False, "auto"):
        raise ArgumentError(f"daskdist.steps.relay is {relay!r}; give true, false or 'auto'")
    if relay == "auto" and client.direct_to_workers is not None:
        relay = not client.direct_to_workers
    why = "not tried"
    if relay is not True:
        try:
            connecting = connect(address, **client.connection_args)
            return await (asyncio.wait_for(connecting, _MOST_S) if relay else connecting), False
        except OSError as error:
            if not relay:
                raise
            why = str(error) or f"not within {_MOST_S:g} s"
    comm = await connect(client.scheduler.address, **client.connection_args)
    try:
        await comm.write({"op": RELAY, "worker": address})
        answer = await comm.read()
        if answer != "OK":
            raise OSError(
                f"{address} cannot be reached, neither directly ({why}) nor by way of the scheduler "
                f"({answer or 'which calls no functions of programs, and so relays nothing'})"
            )
    except BaseException:
        comm.abort()
        raise
    return comm, True
