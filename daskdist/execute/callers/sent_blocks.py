"""Large data that the program sends to workers directly, and again if a task needs it after a worker was lost."""

from __future__ import annotations

import asyncio
import time
import uuid
import weakref
from dataclasses import dataclass
from typing import Any, Final

from distributed import Client, Future, Worker, get_worker

from daskdist.config import seconds
from daskdist.errors import ClusterError

_LOOK_EVERY_S: Final = 0.01
# Seconds between drops of data that no task needs any more, and the bytes of such data from which it is dropped
# earlier.
_DROP_EVERY_S: Final = 5.0
_MOST_NEW_BYTES: Final = 64 * 2**20
# Seconds after which the scheduler knows a submitted task, if the program is not blocked.
_SETTLED_S: Final = 2.0


@dataclass(frozen=True)
class SentBlock:
    """A task's reference to data.

    Parameters
    ----------
    topic
        The topic of the Dask events that request the data from the program.
    key
        The key under which the data was sent to the task's worker.
    limit_s
        The seconds to wait for the data if it has to be sent again.
    """

    topic: str
    key: str
    limit_s: float

    def fetch(self) -> Any:
        """Return the data, in a task; another worker than the first one asks the program for it.

        Raises
        ------
        ClusterError
            The program does not send it.
        """
        worker = get_worker()
        fetching = self._fetched(worker, worker.get_current_task())
        return asyncio.run_coroutine_threadsafe(fetching, worker.loop.asyncio_loop).result()

    async def _fetched(self, worker: Worker, task: Any) -> Any:
        key, until = self.key, time.monotonic() + self.limit_s
        if key not in worker.data:
            key = f"{self.key}-{uuid.uuid4().hex}"
            worker.log_event(self.topic, {"key": self.key, "worker": worker.address, "as": key})
            while key not in worker.data:
                if task not in worker.state.tasks or worker.state.tasks[task].state == "cancelled":
                    raise ClusterError(f"{self.key} is not needed any more")
                if time.monotonic() > until:
                    raise ClusterError(
                        f"{self.key} was lost with a worker, and the program has not sent it again within "
                        f"{self.limit_s:g} s, which is daskdist.timeouts.data"
                    )
                await asyncio.sleep(_LOOK_EVERY_S)
        data = worker.data[key]
        worker.log_event(self.topic, {"key": self.key, "worker": None, "as": key})
        return data


@dataclass
class _Kept:
    data: Any
    # Key on a worker -> the future of the data there, until the task has it; None while it is being sent.
    arrivals: dict[str, Future | None]
    task: str
    is_known: bool = False
    # The time at which the scheduler first did not know the task.
    missing_since: float | None = None


class SentBlocks:
    """The data that the program keeps while a task may need it again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._topic = f"daskdist-blocks-{uuid.uuid4().hex}"
        self._kept: dict[str, _Kept] = {}
        self._is_direct = True
        self._is_subscribed = self._is_looking = False
        self._num_new_bytes = 0
        # The connection to the scheduler that knows the tasks; after its loss, they are submitted again.
        self._connection: Any = None

    def __len__(self) -> int:
        return len(self._kept)

    def reference(self, arrival: Future, *, is_direct: bool) -> SentBlock:
        """Return a reference to data that was sent to a worker, for a task there."""
        if not self._is_subscribed:
            self._subscribe()
            # Another thread submits its tasks only after this.
            self._is_subscribed = True
        self._is_direct = is_direct
        return SentBlock(self._topic, arrival.key, seconds("timeouts.data"))

    def _subscribe(self) -> None:
        self._connection, blocks = self._client.scheduler_comm, weakref.ref(self)

        def handle(event: tuple[float, Any]) -> None:
            if (kept := blocks()) is not None:
                kept._heard(**event[1])

        self._client.subscribe_topic(self._topic, handle)

    def keep(self, data: Any, num_bytes: int, arrival: Future, task: Future) -> None:
        """Keep data until the scheduler has forgotten the task that takes it."""
        self._kept[arrival.key] = _Kept(data, {arrival.key: arrival}, task.key)
        self._num_new_bytes += num_bytes
        repeats = not self._is_looking
        if repeats or self._num_new_bytes > _MOST_NEW_BYTES:
            self._is_looking, self._num_new_bytes = True, 0
            self._client.loop.asyncio_loop.call_soon_threadsafe(_look, weakref.ref(self), repeats)

    def follow_scheduler(self) -> None:
        """Serve the tasks that were submitted again to another scheduler."""
        if self._is_subscribed:
            for kept in list(self._kept.values()):
                kept.is_known, kept.missing_since = False, None
            self._subscribe()

    def clear(self) -> None:
        """Drop all data."""
        self._kept.clear()
        if self._is_subscribed and self._client.status == "running":
            self._is_subscribed = False
            self._client.unsubscribe_topic(self._topic)

    def _heard(self, key: str, worker: str | None, **message: Any) -> None:
        kept, key_there = self._kept.get(key), message["as"]
        if kept is None:
            return
        kept.is_known = True
        if worker is None:
            kept.arrivals.pop(key_there, None)
            return
        kept.arrivals[key_there] = None
        task = asyncio.ensure_future(self._send_again(kept, key_there, worker))
        # If that worker is lost, too, the task requests it from another one.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _send_again(self, kept: _Kept, key: str, worker: str) -> None:
        data, direct = {key: kept.data}, self._is_direct
        sent = await self._client.scatter(data, workers=[worker], direct=direct, hash=False, asynchronous=True)
        # The task may have it already.
        if key in kept.arrivals:
            kept.arrivals[key] = sent[key]

    def look(self, *, repeats: bool) -> None:
        """Drop the data that no task needs any more, in the event loop; repeat that while there is any."""
        if self._client.status not in ("running", "connecting"):
            self._kept.clear()
            return
        if self._client.scheduler_comm is self._connection:
            task = asyncio.ensure_future(self._drop_unneeded())
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        if repeats:
            self._is_looking = False
            if self._kept:
                self._is_looking = True
                asyncio.get_running_loop().call_later(_DROP_EVERY_S, _look, weakref.ref(self), True)

    async def _drop_unneeded(self) -> None:
        kept, now = dict(self._kept), time.monotonic()
        states = await self._client.scheduler.get_task_status(keys=[block.task for block in kept.values()])
        if self._client.scheduler_comm is not self._connection:
            return
        for key, block in kept.items():
            if states[block.task] is not None:
                block.missing_since = None
            elif block.is_known or (block.missing_since or now) < now - _SETTLED_S:
                self._kept.pop(key, None)
            else:
                block.missing_since = block.missing_since or now


def _look(blocks: weakref.ref[SentBlocks], repeats: bool) -> None:
    if (kept := blocks()) is not None:
        kept.look(repeats=repeats)
