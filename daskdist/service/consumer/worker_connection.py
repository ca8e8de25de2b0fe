"""The connection of a consumer to one worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from distributed.comm import Comm, connect

from daskdist.config import seconds
from daskdist.execute.messages.failure import Failure
from daskdist.execute.messages.link import Link
from daskdist.service.address import ServiceAddress
from daskdist.service.compression import readable
from daskdist.service.messages import READ_OPERATION


class WorkerConnection:
    """A connection over which a consumer reads from a worker, in the event loop.

    Parameters
    ----------
    worker
        The address of the worker.
    name, number
        The name of the consumer, and a number larger than those of its earlier connections.
    address
        The address of the service, and how to connect.
    compression
        As in `daskdist.service.compression.readable`.
    on_message
        Called with each message of the worker: ``on_message(connection, message)``.
    on_lost
        Called when the connection ends: ``on_lost(connection, error)``, where ``error`` is None if it was closed or
        broken.
    """

    def __init__(
        self,
        worker: str,
        name: str,
        number: int,
        address: ServiceAddress,
        compression: str | None,
        on_message: Callable[[WorkerConnection, Any], None],
        on_lost: Callable[[WorkerConnection, Exception | None], None],
    ) -> None:
        self.worker = worker
        self._got = on_message
        self._lost = on_lost
        self._link = Link(self._read)
        self.task = asyncio.ensure_future(self._run(name, number, address, compression))

    def append(self, message: Any) -> None:
        """Send a message."""
        self._link.append(message)
        self._link.flush()

    def _read(self, messages: list[Any]) -> None:
        for message in messages:
            if isinstance(message, Failure):
                raise message.error()
            self._got(self, message)

    async def _run(self, name: str, number: int, address: ServiceAddress, compression: str | None) -> None:
        comm: Comm | None = None
        failure: Exception | None = None
        try:
            comm = await connect(self.worker, timeout=seconds("timeouts.connect"), **address.connection_args())
            asked = {"consumer": name, "number": number, "compressions": readable(compression, comm)}
            await comm.write({"op": READ_OPERATION, "reply": False, **asked})
            # Dask's messages may be compressed.
            await self._link.run(comm, is_direct=False)
        except (OSError, asyncio.CancelledError):
            pass
        except Exception as error:
            # For example, elements that cannot be pickled there or unpickled here.
            failure = error
        finally:
            if comm is not None:
                comm.abort()
            self._lost(self, failure)
