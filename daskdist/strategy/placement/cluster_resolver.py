"""`ClusterResolver`: the source of a cluster, the connection to it, and the workers to wait for."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import socket
import ssl
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Final

import dask.config
from distributed import Client, LocalCluster, Security
from distributed.comm import connect as open_comm
from distributed.comm import parse_address, parse_host_port
from distributed.comm.registry import get_backend
from distributed.exceptions import WorkerStartTimeoutError

from daskdist.config import setting
from daskdist.core.arguments import whole_number
from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.callers.cluster_requests import (
    address_in_file,
    check_address,
    security_hint,
    usable_security,
    wait_for_scheduler,
)
from daskdist.execute.callers.submit import workers_of
from daskdist.strategy.placement.device_assignment import DeviceAssignment, PerWorker
from daskdist.strategy.placement.replicas_per_worker import Worker

_OPERATION: Final = "ClusterResolver"
_EXAMPLE: Final = "write it like 'tcp://127.0.0.1:8786'"
_GUARD: Final = "put the program's steps under if __name__ == '__main__':"


@dataclass(frozen=True)
class ClusterResolver:
    """The source of a cluster, and the workers to wait for before a strategy is created on it.

    Parameters
    ----------
    cluster
        A ``distributed.Client``, a cluster object such as ``LocalCluster`` or ``SLURMCluster``, the address of a
        scheduler, or the path of a file written by ``dask scheduler --scheduler-file``. If None, the address in Dask's
        setting ``scheduler-address`` (``DASK_SCHEDULER_ADDRESS``); if that is not set, a new ``LocalCluster`` that
        belongs to the strategy and is closed with it.
    security
        The keys and certificates for TLS. If None, those of the cluster object, or else of Dask's configuration.
    num_workers
        The number of workers to wait for, 1 if None. A new ``LocalCluster`` has this many workers; if None, one process
        per GPU that this process sees, or per core if it sees none.
    timeout
        Seconds to wait for the workers; the setting ``daskdist.timeouts.workers`` if None.

    Raises
    ------
    ArgumentError
        The cluster has an unsupported type, or an option is invalid or cannot be combined with the cluster.

    Notes
    -----
    A strategy uses all workers that exist when it is created, even if they are more than it waited for.

    >>> ClusterResolver("tcp://10.0.0.1:8786", num_workers=4).num_workers
    4
    """

    cluster: Any = None
    _: KW_ONLY
    security: Security | None = None
    num_workers: int | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        cluster = self.cluster
        is_known = cluster is None or isinstance(cluster, (Client, str, os.PathLike))
        if not is_known and not hasattr(cluster, "scheduler_address"):
            raise ArgumentError(
                f"{_OPERATION}: {type(cluster).__name__} is not a Dask client, a cluster, an address or the path of a "
                "scheduler file"
            )
        if isinstance(cluster, str) and not _is_file(cluster):
            check_address(_OPERATION, cluster)
        if getattr(cluster, "asynchronous", False):
            raise ArgumentError(
                f"{_OPERATION}: the {type(cluster).__name__} is asynchronous; create it with asynchronous=False and "
                "use it outside of its event loop"
            )
        if self.security is not None and not isinstance(self.security, Security):
            raise ArgumentError(
                f"{_OPERATION}: security is {self.security!r:.80}; give a distributed.Security, such as "
                "Security(tls_ca_file=..., tls_client_cert=..., tls_client_key=..., require_encryption=True)"
            )
        if self.security is not None and isinstance(cluster, Client):
            raise ArgumentError(f"{_OPERATION}: a client has its own security; pass it to the client only")
        if self.num_workers is not None:
            object.__setattr__(self, "num_workers", whole_number(_OPERATION, "num_workers", self.num_workers, 1))
        if self.timeout is not None and not _is_time(self.timeout):
            raise ArgumentError(f"{_OPERATION}: timeout is {self.timeout!r:.80}; give a number of seconds above 0")


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def connect(
    resolver: ClusterResolver, opened: ExitStack, where: DeviceAssignment | PerWorker
) -> tuple[Client, list[Worker]]:
    """Return a client of the cluster, and its workers sorted by name.

    Parameters
    ----------
    resolver
        The source of the cluster.
    opened
        Receives the new objects, to be closed at the end.
    where
        The placement of the replicas, for which a new cluster is made.

    Raises
    ------
    ClusterError
        Nothing answers at the address, it uses another protocol, or too few workers connected.
    """
    cluster, security = resolver.cluster, resolver.security
    if isinstance(cluster, Client):
        client = cluster
        # The client may have lost its scheduler, and look for another one at the address.
        wait_for_scheduler(client)
        if client.status != "running":
            raise ClusterError(f"the client is {client.status}; create a new one")
    else:
        said_by = ""
        if cluster is None and (cluster := dask.config.get("scheduler-address", None) or None) is not None:
            said_by = " (Dask's setting scheduler-address, or DASK_SCHEDULER_ADDRESS)"
            if not isinstance(cluster, str):
                # Dask converts values that look like numbers, for example a port alone.
                raise ClusterError(f"{cluster!r}{said_by} is not the address of a scheduler; {_EXAMPLE}")
        if cluster is None:
            cluster = _made(resolver, opened, where)
        client = _client_of(cluster, security, said_by)
        opened.callback(client.close)
    return client, _workers(client, resolver)


def _is_run_again() -> bool:
    # New processes run the script under this name before they do anything else.
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != "__mp_main__":
        frame = frame.f_back
    return frame is not None


@contextmanager
def _script_run_once() -> Iterator[None]:
    """Keep new processes from running the script, if it does not distinguish that and would start a cluster in each."""
    script = sys.modules["__main__"]
    path = getattr(script, "__file__", None)
    try:
        distinguishes = path is None or script.__spec__ is not None or b"__name__" in Path(path).read_bytes()
    except OSError:
        distinguishes = True
    if distinguishes:
        yield
        return
    del script.__file__
    try:
        yield
    finally:
        script.__file__ = path


def _made(resolver: ClusterResolver, opened: ExitStack, where: DeviceAssignment | PerWorker) -> LocalCluster:
    if _is_run_again():
        raise ClusterError(f"a process of a LocalCluster runs the script, which starts another one; {_GUARD}")
    # Listen on loopback only, also for the dashboard: the cluster is private to this program.
    try:
        with _script_run_once():
            cluster = LocalCluster(
                n_workers=resolver.num_workers or where.num_workers,
                threads_per_worker=where.most_replicas,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",
                security=resolver.security,
            )
    except (OSError, RuntimeError) as error:
        raise ClusterError(
            f"a LocalCluster cannot be started: {error.__cause__ or error}; its processes run the script, so {_GUARD}"
        ) from error
    opened.callback(cluster.close)
    return cluster


def _client_of(cluster: Any, security: Security | None, said_by: str) -> Client:
    timeout = setting("timeouts.connect")
    if isinstance(cluster, os.PathLike) or (isinstance(cluster, str) and _is_file(cluster)):
        cluster = address_in_file(os.fspath(cluster))
    address = cluster if isinstance(cluster, str) else cluster.scheduler_address
    if isinstance(cluster, str):
        check_address(f"{_OPERATION}{said_by}", address)
        try:
            # Check the address first: creating a client with an unreadable one would leave it partly open.
            scheme, location = parse_address(address)
            get_backend(scheme)
            host_and_port = None if scheme == "inproc" else parse_host_port(location)
        except ValueError as error:
            raise ClusterError(
                f"{address!r}{said_by} is not the address of a scheduler: {error}; {_EXAMPLE}"
            ) from error
        giving = "ClusterResolver(address, security=distributed.Security(...))"
        security = usable_security(address, security, said_by, giving)
    try:
        if isinstance(cluster, str) and host_and_port:
            _check_it_speaks(address, scheme, host_and_port, security, timeout)
        return Client(cluster, security=security, timeout=timeout, set_as_default=False)
    except Exception as error:
        # Another kind of server may send anything, which can raise any error.
        why = str(error) or "no greeting"
        raise ClusterError(
            f"no Dask scheduler answers at {address!r}{said_by} within {timeout} s: {why}{security_hint(address)}"
        ) from error


def _is_file(text: str) -> bool:
    return "://" not in text and (text.endswith(".json") or os.path.isfile(text))


def _check_it_speaks(
    address: str, scheme: str, host_and_port: tuple[str, int], security: Security, timeout: float
) -> None:
    # A scheduler sends a greeting to each connection, and a client waits for it forever.
    arguments = security.get_connection_args("client")
    until = time.monotonic() + timeout
    if scheme == "tls":
        _check_it_encrypts(host_and_port, arguments["ssl_context"], timeout)

    async def greet() -> None:
        left = max(until - time.monotonic(), 0)
        comm = await asyncio.wait_for(open_comm(address, timeout=left, **arguments), left)
        comm.abort()

    # In a new thread, as this one may run an event loop, for example a notebook's.
    with ThreadPoolExecutor(1, "daskdist-greet") as thread:
        thread.submit(asyncio.run, greet()).result()


def _check_it_encrypts(host_and_port: tuple[str, int], context: ssl.SSLContext, timeout: float) -> None:
    # Try the handshake first: if the peer does not use TLS, Dask retries until the timeout and leaves a socket open.
    try:
        connection = socket.create_connection(host_and_port, timeout)
    except ConnectionError:
        # The scheduler may be starting.
        return
    with connection, context.wrap_socket(connection) as encrypted:
        # The peer has checked this side's certificate when it sends something.
        encrypted.recv(1)


def _workers(client: Client, resolver: ClusterResolver) -> list[Worker]:
    timeout = resolver.timeout or setting("timeouts.workers")
    wanted = resolver.num_workers or 1
    where = f"the cluster at {client.scheduler.address}"
    try:
        client.wait_for_workers(wanted, timeout=timeout)
    except WorkerStartTimeoutError as error:
        if wanted == 1:
            raise ClusterError(f"{where} has no workers after {timeout} s") from error
        raise ClusterError(
            f"{where} has {error.available_workers} workers of {wanted} after {timeout} s; start more, wait longer "
            "with ClusterResolver(timeout=...), or wait for fewer"
        ) from error
    except (OSError, TimeoutError) as error:
        raise ClusterError(f"the list of workers of {where} cannot be read: {error}") from error
    return in_order(workers_of(client))


def in_order(connected: Mapping[str, Mapping[str, Any]]) -> list[Worker]:
    """Return workers sorted by name, of the scheduler's description of each by address.

    Numeric names, such as those of a LocalCluster, come first, in numeric order.
    """
    workers = [Worker(address, str(info["name"])) for address, info in connected.items()]

    def place(worker: Worker) -> tuple[bool, int, str, str]:
        is_number = worker.name.isdecimal()
        return not is_number, int(worker.name) if is_number else 0, worker.name, worker.address

    return sorted(workers, key=place)
