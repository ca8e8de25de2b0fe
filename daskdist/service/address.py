"""The address of the service."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from distributed import Client, Security, get_worker
from distributed.client import _get_global_client
from distributed.deploy import Cluster

from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.callers.cluster_requests import address_in_file, check_address, usable_security

# The scheme in addresses of TensorFlow's data service; taken as tcp.
_PROTOCOLS: Final = {"grpc": "tcp", "grpc+local": "tcp"}


@runtime_checkable
class HasTarget(Protocol):
    """A server that knows its address as text, such as a `DispatchServer`."""

    @property
    def target(self) -> str:
        """Return the address, such as ``"tcp://10.0.0.1:8786"``."""


@dataclass(frozen=True)
class ServiceAddress:
    """The address of the scheduler that runs the service, and how to connect to it.

    Parameters
    ----------
    address
        The address of the scheduler, such as ``"tcp://10.0.0.1:8786"``.
    security
        The security of connections to it; if None, that of Dask's configuration.
    """

    address: str
    security: Security | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        return repr(self.address)

    def connection_args(self) -> dict[str, Any]:
        """Return the arguments of `distributed.comm.connect`.

        Raises
        ------
        ClusterError
            The certificates cannot be used, or there are none but the address needs some.
        """
        args: dict[str, Any] = self.usable_security().get_connection_args("client")
        return args

    def usable_security(self) -> Security:
        """Return the security of connections; see `connection_args`."""
        giving = "a client, Client(address, security=distributed.Security(...))"
        return usable_security(self.address, self.security, " of the data service", giving)


def service_address(service: Any) -> ServiceAddress:
    """Return the address of a service.

    Parameters
    ----------
    service
        A Dask client or cluster; an address such as ``"tcp://host:8786"``, ``"tls://..."``, or ``"grpc://..."``, which
        is taken as ``tcp``; ``"host:8786"``; a pair of a protocol and an address; the path of a scheduler file; or None
        for the client of this program, or the scheduler of this worker.

    Raises
    ------
    ArgumentError
        The service is none of these.
    ClusterError
        The service is None and there is neither a client nor a worker, or its client is closed.
    """
    if service is None:
        return _current()
    if isinstance(service, ServiceAddress):
        return service
    if isinstance(service, Client):
        if service.scheduler is None:
            raise ClusterError("the client given as the service is closed; give a connected client")
        return ServiceAddress(service.scheduler.address, service.security)
    if isinstance(service, Cluster):
        return ServiceAddress(service.scheduler_address, service.security)
    if isinstance(service, os.PathLike):
        return ServiceAddress(address_in_file(os.fspath(service)))
    if isinstance(service, tuple) and len(service) == 2 and all(isinstance(part, str) for part in service):
        protocol, rest = service
        return service_address(rest if "://" in rest else f"{protocol}://{rest}")
    if isinstance(service, str):
        return _of_text(service)
    if isinstance(service, HasTarget):
        return _of_text(service.target)
    raise ArgumentError(
        f"service is of type {type(service).__name__}; give a Dask client or cluster, an address such as "
        "'tcp://host:8786', or the path of a scheduler file"
    )


def _current() -> ServiceAddress:
    client = _get_global_client()
    if client is not None and client.scheduler is not None:
        return ServiceAddress(client.scheduler.address, client.security)
    try:
        worker = get_worker()
    except ValueError:
        raise ClusterError(
            "no service was given and there is no Dask client; create one, or give the address of a scheduler, such as "
            "service='tcp://host:8786'"
        ) from None
    return ServiceAddress(worker.scheduler.address, worker.security)


def _of_text(text: str) -> ServiceAddress:
    if text.endswith(".json") and "://" not in text:
        return ServiceAddress(address_in_file(text))
    protocol, separator, rest = text.partition("://")
    if not separator:
        protocol, rest = "tcp", text
    check_address("service", rest)
    if not rest or not protocol or "://" in rest:
        raise ArgumentError(f"service is {text!r}; give an address such as 'tcp://host:8786'")
    if ":" not in rest.rpartition("]")[2] and protocol in ("tcp", "tls", *_PROTOCOLS):
        raise ArgumentError(f"service is {text!r}, which has no port; give one, such as '{text}:8786'")
    return ServiceAddress(f"{_PROTOCOLS.get(protocol, protocol)}://{rest}")
