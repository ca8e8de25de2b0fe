"""The status of a service, by its address."""

from __future__ import annotations

from typing import Any

from daskdist.service.address import service_address
from daskdist.service.consumer.dispatcher_connection import ask
from daskdist.service.dispatcher.commands import Jobs, JobsAsked
from daskdist.service.dispatcher.status import ServiceStatus


def current_status(service: Any) -> ServiceStatus:
    """Return the status of a service; see `daskdist.data.service.status`."""
    address = service_address(service)
    answer: Jobs = ask(address, JobsAsked())
    return ServiceStatus(address.address, tuple(answer.workers), tuple(answer.jobs))
