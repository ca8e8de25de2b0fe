"""`DispatchServer` and `WorkerServer`: a Dask scheduler and a Dask worker that a program starts in its own process."""

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
        Where it listens; any port that is free if 0.
    protocol
        ``"tcp"``, also called ``"grpc"``, or ``"tls"`` with the certificates of Dask's configuration; tcp if None.
    work_dir
        A directory, local or of any file system that fsspec knows, for ``fault_tolerant_mode``.
    fault_tolerant_mode
        Whether jobs are kept in ``work_dir``, so that another server goes on with them.
    worker_addresses
        Not used: workers are known once they are there.
    job_gc_check_interval_ms
        Not used: unused jobs are looked for each second.
    job_gc_timeout_ms
        For how long a job is kept that nobody reads, and without end if -1; as the setting
        ``daskdist.service.job-gc-timeout`` says if None.
    worker_timeout_ms
        After how long a worker that is not heard of is lost; as Dask's configuration says if None.
    worker_max_concurrent_snapshots
        Not used.
    host
        The address to listen at; all of this machine if None.
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
        The address to listen at, such as ``"10.0.0.2"`` or ``"localhost:%port%"``; chosen by Dask if None.
    port
        Where it listens; any port that is free if 0.
    protocol
        As of `DispatcherConfig`.
    heartbeat_interval_ms
        Not used: Dask chooses it.
    dispatcher_timeout_ms
        For how long it looks for a dispatcher that was lost; as the setting ``daskdist.service.reconnect-timeout`` says
        if None.
    data_transfer_protocol, data_transfer_address
        Not used: elements go over Dask's connections.
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
        # Nobody has to stop it.
        self._finalizer = Finalizer(self, self._thread.stop)
        if start:
            self.start()

    def start(self) -> None:
        """Start the server, and wait until it has started.

        Raises
        ------
        ClusterError
            It cannot be started.
        """
        self._thread.start()

    def join(self) -> None:
        """Wait until the server has ended: for ever, unless it is stopped from another thread."""
        self._thread.join()

    def stop(self) -> None:
        """End the server, and wait until it has ended; it can be started again."""
        self._thread.stop()

    def _bound_address(self) -> str:
        if self._thread.server is None:
            raise ClusterError(f"the {type(self).__name__} was not started; call start()")
        return str(self._thread.server.address)


class DispatchServer(_Server):
    """The dispatcher of a data service: a Dask scheduler in this process.

    It ends with the last reference to it. ``dask scheduler --preload daskdist.preload`` is the same in a process of its
    own, and any scheduler becomes one when the first program serves a dataset.

    Parameters
    ----------
    config
        How it runs; by the defaults of `DispatcherConfig` if None.
    start
        Whether it is started now; `start` does it later.

    Raises
    ------
    ArgumentError
        A value of the configuration is not allowed, or it is to be fault tolerant without a directory.
    ClusterError
        It cannot be started: its port is taken, say.
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
        """The same without the protocol."""
        return self.target.partition("://")[2]

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return len(self._thread.server.workers) if self._thread.server is not None else 0


class WorkerServer(_Server):
    """A worker of a data service: a Dask worker in this process, with a thread a core.

    It ends with the last reference to it. When its dispatcher is lost, it waits for it. ``dask worker ADDRESS`` is the
    same in a process of its own, but that ends with its scheduler.

    Parameters
    ----------
    config
        How it runs.
    start
        Whether it is started now; `start` does it later.

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
        """Its address, without the protocol."""
        return self._bound_address().partition("://")[2]


def _host_of(address: str) -> str:
    rest = address.rpartition("://")[2]
    return rest.rpartition(":")[0] or rest


def _protocol(what: str, protocol: str | None) -> str:
    if protocol not in _PROTOCOLS:
        allowed = ", ".join(repr(protocol_name) for protocol_name in _PROTOCOLS if protocol_name)
        raise ArgumentError(f"{what}: protocol is {protocol!r}; give one of {allowed}, or None")
    return _PROTOCOLS[protocol]
