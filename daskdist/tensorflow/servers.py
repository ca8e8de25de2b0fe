"""`DispatchServer` and `WorkerServer`: a Dask scheduler and a Dask worker in the process of a program."""

from __future__ import annotations

from typing import Final, NamedTuple

from daskdist.config import seconds
from daskdist.core.finalizer import Finalizer
from daskdist.errors import ArgumentError, ClusterError
from daskdist.service.address import service_address
from daskdist.service.servers import Serve, ServerThread, ServeScheduler, ServeWorker

_PROTOCOLS: Final = {None: "tcp", "grpc": "tcp", "tcp": "tcp", "tls": "tls"}


class DispatcherConfig(NamedTuple):
    """Options of a `DispatchServer`.

    Parameters
    ----------
    port
        The port to listen on; any free port if 0.
    protocol
        ``"tcp"``, also called ``"grpc"``, or ``"tls"`` with the certificates of Dask's configuration; tcp if None.
    work_dir
        A directory, local or of any file system that fsspec knows, for ``fault_tolerant_mode``.
    fault_tolerant_mode
        Whether jobs are kept in ``work_dir``, so that another server can continue them.
    worker_addresses
        Not used: workers are known once they connect.
    job_gc_check_interval_ms
        Not used: the server looks for unused jobs each second.
    job_gc_timeout_ms
        The time for which a job without consumers is kept, without limit if -1; if None, the setting
        ``daskdist.service.job-gc-timeout``.
    worker_timeout_ms
        The time without a message after which a worker is considered lost; if None, that of Dask's configuration.
    worker_max_concurrent_snapshots
        Not used.
    host
        The address to listen on; all interfaces of this machine if None.
    """

    port: int = 0
    protocol: str | None = None
    work_dir: str | None = None
    fault_tolerant_mode: bool = False
    worker_addresses: list[str] | None = None
    job_gc_check_interval_ms: int | None = None
    job_gc_timeout_ms: int | None = None
    worker_timeout_ms: int | None = None
    worker_max_concurrent_snapshots: int = 0
    host: str | None = None


class WorkerConfig(NamedTuple):
    """Options of a `WorkerServer`.

    Parameters
    ----------
    dispatcher_address
        The address of the `DispatchServer`, with or without its protocol.
    worker_address
        The address to listen on, such as ``"10.0.0.2"`` or ``"localhost:%port%"``; chosen by Dask if None.
    port
        The port to listen on; any free port if 0.
    protocol
        As in `DispatcherConfig`.
    heartbeat_interval_ms
        Not used: Dask chooses it.
    dispatcher_timeout_ms
        The time for which it tries to reach a lost dispatcher; if None, the setting
        ``daskdist.service.reconnect-timeout``.
    data_transfer_protocol, data_transfer_address
        Not used: elements are sent over Dask's connections.
    """

    dispatcher_address: str
    worker_address: str | None = None
    port: int = 0
    protocol: str | None = None
    heartbeat_interval_ms: int | None = None
    dispatcher_timeout_ms: int | None = None
    data_transfer_protocol: str | None = None
    data_transfer_address: str | None = None


class _Server:
    def __init__(self, serve: Serve, *, start: bool) -> None:
        self._thread = ServerThread(serve)
        # The server stops when nothing refers to this object, without a call of `stop`.
        self._finalizer = Finalizer(self, self._thread.stop)
        if start:
            self.start()

    def start(self) -> None:
        """Start the server, and wait until it has started.

        Raises
        ------
        ClusterError
            The server cannot be started.
        """
        self._thread.start()

    def join(self) -> None:
        """Wait until the server has ended, which it does only if another thread stops it."""
        self._thread.join()

    def stop(self) -> None:
        """Stop the server and wait until it has ended; it can be started again."""
        self._thread.stop()

    def _bound_address(self) -> str:
        if self._thread.server is None:
            raise ClusterError(f"the {type(self).__name__} was not started; call start()")
        return str(self._thread.server.address)


class DispatchServer(_Server):
    """The dispatcher of a data service: a Dask scheduler in this process.

    It stops when nothing refers to it any more. ``dask scheduler --preload daskdist.preload`` is the same in a separate
    process, and any scheduler becomes a dispatcher when the first program serves a dataset.

    Parameters
    ----------
    config
        The options of the server; the defaults of `DispatcherConfig` if None.
    start
        Whether to start the server now; otherwise call `start`.

    Raises
    ------
    ArgumentError
        A value of the configuration is not allowed, or ``fault_tolerant_mode`` is set without ``work_dir``.
    ClusterError
        The server cannot be started, for example because its port is in use.
    """

    def __init__(self, config: DispatcherConfig | None = None, start: bool = True) -> None:
        config = config or DispatcherConfig()
        if config.fault_tolerant_mode and not config.work_dir:
            raise ArgumentError("DispatchServer: fault_tolerant_mode needs work_dir, the directory of its journal")
        gc_ms = config.job_gc_timeout_ms
        gc_timeout_s = None if gc_ms is None else float("inf") if gc_ms < 0 else gc_ms / 1000
        ttl_s = None if config.worker_timeout_ms is None else config.worker_timeout_ms / 1000
        serve = ServeScheduler(
            config.host,
            config.port,
            _protocol("DispatchServer", config.protocol),
            config.work_dir if config.fault_tolerant_mode else None,
            gc_timeout_s,
            ttl_s,
        )
        super().__init__(serve, start=start)

    @property
    def target(self) -> str:
        """The address to give as a ``service``, such as ``"tcp://10.0.0.1:8786"``."""
        return self._bound_address()

    @property
    def address(self) -> str:
        """The address without the protocol."""
        return self.target.partition("://")[2]

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return len(self._thread.server.workers) if self._thread.server is not None else 0


class WorkerServer(_Server):
    """A worker of a data service: a Dask worker in this process, with a thread for each core.

    It stops when nothing refers to it any more. If its dispatcher is lost, it waits for it. ``dask worker ADDRESS`` is
    the same in a separate process, but ends with its scheduler.

    Parameters
    ----------
    config
        The options of the server.
    start
        Whether to start the server now; otherwise call `start`.

    Raises
    ------
    ArgumentError
        A value of the configuration is not allowed.
    ClusterError
        The dispatcher does not answer.
    """

    def __init__(self, config: WorkerConfig, start: bool = True) -> None:
        protocol = _protocol("WorkerServer", config.protocol)
        dispatcher = config.dispatcher_address
        if not isinstance(dispatcher, str):
            raise ArgumentError(f"WorkerServer: dispatcher_address is {dispatcher!r}; give text such as 'host:port'")
        address = service_address(dispatcher if "://" in dispatcher else f"{protocol}://{dispatcher}")
        timeout_ms = config.dispatcher_timeout_ms
        timeout_s = seconds("service.reconnect-timeout") if timeout_ms is None else timeout_ms / 1000
        host = None if config.worker_address is None else _host_of(config.worker_address)
        super().__init__(ServeWorker(address, host, config.port, timeout_s), start=start)

    @property
    def address(self) -> str:
        """The address of the worker, without the protocol."""
        return self._bound_address().partition("://")[2]


def _host_of(address: str) -> str:
    rest = address.rpartition("://")[2]
    return rest.rpartition(":")[0] or rest


def _protocol(server: str, protocol: str | None) -> str:
    if protocol not in _PROTOCOLS:
        allowed = ", ".join(repr(protocol_name) for protocol_name in _PROTOCOLS if protocol_name)
        raise ArgumentError(f"{server}: protocol is {protocol!r}; give one of {allowed}, or None")
    return _PROTOCOLS[protocol]
