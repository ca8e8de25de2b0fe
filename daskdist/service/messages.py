"""Messages of the connections of the service."""

from __future__ import annotations

import pickle
from typing import Any, Final

from distributed.comm import Comm

# The operations by which comms are given to the service on the scheduler and on workers.
DISPATCHER_OPERATION: Final = "daskdist_service"
PRESENT_OPERATION: Final = "daskdist_service_present"
READ_OPERATION: Final = "daskdist_service_read"
REPORT_OPERATION: Final = "daskdist_service_report"
# Between the scheduler and its workers, in Dask's own streams.
EVENT_OPERATION: Final = "daskdist-service-event"
COMMAND_OPERATION: Final = "daskdist-service-command"


async def send(comm: Comm, message: Any) -> None:
    """Send a small message; a scheduler does not look into what Dask would serialize."""
    await comm.write({"m": pickle.dumps(message)})


async def receive(comm: Comm) -> Any:
    """Return the next small message."""
    return pickle.loads((await comm.read())["m"])
