"""Messages over the connections of the service."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any, Final

from distributed.comm import Comm

# The operations of schedulers and workers that hand a connection to the service.
DISPATCHER_OPERATION: Final = "daskdist_service"
PRESENT_OPERATION: Final = "daskdist_service_present"
READ_OPERATION: Final = "daskdist_service_read"
REPORT_OPERATION: Final = "daskdist_service_report"
# The operations of messages between the scheduler and its workers in Dask's streams.
EVENT_OPERATION: Final = "daskdist-service-event"
COMMAND_OPERATION: Final = "daskdist-service-command"


async def send(comm: Comm, message: Any) -> None:
    """Send a small message, pickled here, since a scheduler does not deserialize what Dask serializes."""
    await comm.write({"m": pickle.dumps(message)})


async def receive(comm: Comm) -> Any:
    """Return the next small message; if this is cancelled, messages can still be sent."""
    # Dask closes a connection of which a read is cancelled. This one ends when the connection is closed.
    reading = asyncio.ensure_future(comm.read())
    reading.add_done_callback(lambda done: done.cancelled() or done.exception())
    return pickle.loads((await asyncio.shield(reading))["m"])
