"""The link of a consumer to one worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from distributed.comm import connect

from daskdist.config import seconds
from daskdist.execute.messages.failure import Failure
from daskdist.execute.messages.link import Link
from daskdist.service.address import ServiceAddress
from daskdist.service.compression import readable
from daskdist.service.messages import READ_OPERATION

logger: Final = logging.getLogger("daskdist")

# The delay before a broken connection is made again; it doubles with each one on which nothing arrived.
_RETRY_S: Final = 0.05
_MOST_RETRY_S: Final = 2.0
_WARN_AFTER: Final = 15


class WorkerConnection:
    """The link over which a consumer reads from a worker, in the event loop; broken connections are made again.

    Parameters
    ----------
    worker
        The address of the worker.
    name
        The name of the consumer.
    address
        The address of the service, and how to connect.
    compression
        As in `daskdist.service.compression.readable`.
    on_message
        Called with each message of the worker: ``on_message(worker, message)``.
    on_failure
        Called once with an error that another connection would not change.
    """

    def __init__(
        self,
        worker: str,
        name: str,
        address: ServiceAddress,
        compression: str | None,
        on_message: Callable[[str, Any], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._worker = worker
        self._name = name
        self._address = address
        self._compression = compression
        self._got = on_message
        self._failed = on_failure
        self._link = Link(self._read)
        # The name of the worker's end, which it makes for this link; "" before the first answer.
        self._other_end = ""
        self.task = asyncio.ensure_future(self._run())

    def append(self, message: Any, over: Callable[[str | None], None] | None = None) -> None:
        """Send a message; ``over`` is called with None when it has arrived."""
        self._link.append(message, over)
        self._link.flush()

    @property
    def is_open(self) -> bool:
        """Return whether there is a connection now."""
        return self._link.batches is not None

    def _read(self, messages: list[Any]) -> None:
        for message in messages:
            if isinstance(message, Failure):
                raise message.error()
            self._got(self._worker, message)

    async def _run(self) -> None:
        num_failed = 0
        while True:
            num_arrived = self._link.state.num_arrived
            try:
                await self._exchange()
            except OSError:
                num_failed = 0 if self._link.state.num_arrived != num_arrived else num_failed + 1
            except Exception as error:
                # For example, elements that cannot be pickled there or unpickled here.
                self._failed(error)
                return
            if num_failed == _WARN_AFTER:
                logger.warning(
                    "a dataset from the service cannot be read from the worker %s: connections to it break",
                    self._worker,
                )
            # Only the dispatcher knows whether the worker is gone and which workers get its tasks.
            await asyncio.sleep(min(_RETRY_S * 2 ** min(num_failed, 10), _MOST_RETRY_S))

    async def _exchange(self) -> None:
        link = self._link
        comm = await connect(self._worker, timeout=seconds("timeouts.connect"), **self._address.connection_args())
        try:
            asked = {"consumer": self._name, "end": self._other_end, "num_arrived": link.state.num_arrived}
            asked["compressions"] = readable(self._compression, comm)
            await comm.write({"op": READ_OPERATION, "reply": False, **asked})
            num_over, end = await comm.read()
            if end != self._other_end:
                self._other_end = end
                link.state.begin_again()
            link.acknowledge(num_over)
            # Dask's messages may be compressed.
            await link.run(comm, is_direct=False)
        finally:
            comm.abort()
