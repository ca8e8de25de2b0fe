"""Fixtures that tests share: Dask clusters of real processes, and small Parquet files."""

from __future__ import annotations

import compileall
import contextlib
import gc
import importlib
import itertools
import logging
import multiprocessing
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import dask
import numpy as np
import programs
import pytest
from _pytest.assertion import rewrite
from _pytest.doctest import DoctestModule
from distributed import Client, LocalCluster, SpecCluster, Status
from started import Started

import daskdist
from daskdist.core.finalizer import Finalizer
from daskdist.execute.callers.submit import workers_of
from daskdist.execute.transfer import gather_on_device
from daskdist.strategy.replica.contract import internals_of

TESTS = Path(__file__).parent
# It is imported in the workers, too.
importlib.import_module("validated_calls")
# Collecting doctests would put this folder on the path, and its module would then be imported instead of CuPy.
collect_ignore = ["cupy_stand_in"]

StartCluster = Callable[[int, int], Client]
ParquetFiles = Callable[..., list[str]]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    # Machines with GPUs may lack the pytest plugins whose options pyproject.toml sets.
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds that a test may take, where pytest-timeout is installed")


def _is_for_gpus(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "gpu")


def _is_rewritten(path: Path) -> bool:
    return rewrite._read_pyc(path, rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)) is not None


def _rewrite(config: pytest.Config, paths: Sequence[Path]) -> None:
    for path in paths:
        status, code = rewrite._rewrite_test(path, config)
        folder = rewrite.get_cache_dir(path)
        rewrite.try_makedirs(folder)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, status, folder / (path.stem + rewrite.PYC_TAIL))


def send_less(interactor: Any) -> None:
    """Let a test process send what is printed only: two messages for most tests instead of xdist's six."""
    send = interactor.sendevent

    def send_if_printed(name: str, **content: Any) -> None:
        report = content.get("data") if name == "testreport" else None
        is_silent = report and (report["when"], report["outcome"], report["sections"]) in _SILENT
        if name not in ("logstart", "logfinish") and not is_silent:
            send(name, **content)

    interactor.sendevent = send_if_printed


_SILENT = [("setup", "passed", []), ("teardown", "passed", [])]


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        (interactor,) = (plugin for plugin in config.pluginmanager.get_plugins() if hasattr(plugin, "sendevent"))
        send_less(interactor)
        return
    # Tests start a hundred programs. Where Python is told to write no bytecode, each would compile the package again.
    if sys.dont_write_bytecode:
        compileall.compile_dir(TESTS.parent / "daskdist", quiet=2, workers=0)
    # Rewriting the assertions takes half of the time to collect the tests, which each test process would do again.
    if config.getoption("numprocesses", None) and config.getoption("assertmode") == "rewrite":
        paths = [path for path in sorted(TESTS.rglob("test_*.py")) if not _is_rewritten(path)]
        context, size = multiprocessing.get_context("fork"), os.cpu_count() or 1
        processes = [context.Process(target=_rewrite, args=(config, paths[k::size])) for k in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


def pytest_report_header(config: pytest.Config) -> str | None:
    return "-m gpu: files without tests for GPUs are not read" if _is_for_gpus(config) else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Runs of the GPU tests skip all other files, since the libraries that those import may not be installed.
    if collection_path.suffix == ".py" and _is_for_gpus(config) and "mark.gpu" not in collection_path.read_text():
        return True
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    # What is imported stays, and searching it again and again takes a tenth of the time to collect.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Iterator[None]:
    # Looking for examples in the objects of a module without any takes longer than looking at its text.
    collectors = yield
    if any(isinstance(collector, DoctestModule) for collector in collectors) and ">>>" not in file_path.read_text():
        collectors = [collector for collector in collectors if not isinstance(collector, DoctestModule)]
    return collectors


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Run long tests first, so that no test process is left with one at the end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


# The tests and their imports are half a million objects. Searching all of them in each test that checks that objects
# were freed took a tenth of the time.
_FREEZE_EVERY = 100
_num_begun = itertools.count()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # An error in another hook would end the whole run. At the end of a test, its objects would still be referred to,
    # and their threads would never end.
    if next(_num_begun) % _FREEZE_EVERY == 0:
        gc.collect()
        gc.freeze()


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return type(value)(map(_encodable, value)) if isinstance(value, list | tuple) else value


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable(report: pytest.TestReport | pytest.CollectReport) -> Iterator[None]:
    # xdist cannot send a failure whose text has half of a surrogate pair, which would end the whole run.
    data = yield
    return data if report.passed and not report.sections else _encodable(data)


_internal_errors: list[str] = []


def pytest_internalerror(excrepr: object) -> None:
    _internal_errors.append(str(excrepr))


def pytest_unconfigure(config: pytest.Config) -> None:
    # The first error is the cause, and is printed far above the end of the output.
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if _internal_errors and terminal is not None:
        terminal.section("the internal error that ended the run")
        terminal.write_line(_internal_errors[0])


# Idle clusters of this process do not monitor themselves, which would take a third of a core, and their workers are
# forked from a process that has done the imports, since starting a new process takes a second. The tests that run
# programs, such as the demo and the notebooks, start clusters in the default way.
_FRUGAL_CLUSTERS = {
    "distributed.worker.profile.enabled": False,
    "distributed.worker.memory.monitor-interval": "5s",
    "distributed.worker.multiprocessing-method": "forkserver",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.admin.tick.interval": "5s",
    "distributed.admin.tick.limit": "30s",
    "distributed.admin.tick.cycle": "10s",
    # After this time (15 s by default) since a worker ended, Dask gives the worker up if it is not running at that
    # moment, even if it was started again meanwhile and killed once more.
    "distributed.deploy.lost-worker-timeout": "1h",
}
_USED_BY_MOST = (2, 1)
_LOGGERS_OF_DASK = ["distributed", "distributed.client", "distributed.gc", "tornado", "tornado.application"]
# Workers of small clusters report to the scheduler every half second, which is most of what idle ones do.
_HEARTBEAT_S = 2


@pytest.fixture(scope="session", autouse=True)
def _frugal_clusters() -> Iterator[None]:
    # Do not log to pytest's file, which is closed while Dask's threads may still log.
    for handler in itertools.chain.from_iterable(logging.getLogger(name).handlers for name in _LOGGERS_OF_DASK):
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.__stderr__)
    with dask.config.set(_FRUGAL_CLUSTERS), pytest.MonkeyPatch.context() as patched:
        patched.setattr("distributed.scheduler.heartbeat_interval", lambda num_workers: _HEARTBEAT_S)
        patched.setattr(forkserver._forkserver, "ensure_running", programs.start_forkserver)
        yield
    # Close clusters that tests left open: at the end of the process, errors would not be reported.
    left_open = [cluster for cluster in SpecCluster._instances if cluster.status is Status.running]
    for cluster in left_open:
        cluster.close(timeout=10)
    assert not left_open, "a test left these objects open"


@contextlib.contextmanager
def frequent_heartbeats() -> Iterator[None]:
    """Let workers report as often as by default, for tests in which those that do not are given up."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("distributed.scheduler.heartbeat_interval", lambda num_workers: 0.5)
        yield


class _Cluster(LocalCluster):
    # `wait_for_workers` replaces the list of workers. If the report that one was removed comes later, it is a KeyError
    # of Dask, which ends the connection to the scheduler, and is raised by `close`.
    def _update_worker_status(self, op: str, msg: Any) -> None:
        if op != "remove" or msg in self.scheduler_info["workers"]:
            super()._update_worker_status(op, msg)


@contextlib.contextmanager
def new_cluster(num_workers: int = 2, num_threads: int = 1, **options: Any) -> Iterator[Client]:
    """Start a cluster of worker processes that no other test uses, so that they may be killed; return its client."""
    with (
        _Cluster(
            n_workers=num_workers,
            threads_per_worker=num_threads,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,
            **options,
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def running_workers(client: Client) -> set[str]:
    """Return the addresses of the workers that can take part and may be killed.

    Those that have just connected are not ready. Dask gives a worker up for good that dies before its nanny has read
    its address, a moment later.
    """
    known = {nanny.worker_address for nanny in client.cluster.workers.values()}
    return {address for address, its in workers_of(client).items() if its["status"] == "running" and address in known}


def never_restart_workers(client: Client) -> None:
    """Keep a local cluster from starting workers again that are killed."""
    for nanny in client.cluster.workers.values():
        nanny.close_gracefully()


@pytest.fixture(scope="session")
def start_cluster() -> Iterator[StartCluster]:
    """Return a function that gives a client of a cluster of some worker processes with some threads each.

    The clusters that were used last stay open.
    """
    started: dict[tuple[int, int], tuple[Client, contextlib.ExitStack]] = {}
    with contextlib.ExitStack() as all_opened:

        def start(num_workers: int, num_threads: int = 1) -> Client:
            shape = (num_workers, num_threads)
            if shape not in started:
                # Keep few clusters: an idle worker takes 0.5 % of a core.
                others = [other for other in started if other != _USED_BY_MOST]
                for other in others[:-1] if shape != _USED_BY_MOST else []:
                    started.pop(other)[1].close()
                opened = all_opened.enter_context(contextlib.ExitStack())
                cluster = LocalCluster(
                    n_workers=num_workers,
                    threads_per_worker=num_threads,
                    host="127.0.0.1",
                    dashboard_address="127.0.0.1:0",
                )
                opened.callback(cluster.close)
                started[shape] = (opened.enter_context(Client(cluster, set_as_default=False)), opened)
            elif shape != _USED_BY_MOST:
                started[shape] = started.pop(shape)
            return started[shape][0]

        yield start


_shared_clients: list[Client] = []


@pytest.fixture(scope="session")
def client(start_cluster: StartCluster) -> Client:
    """Return a client of two worker processes of one thread each."""
    client = start_cluster(*_USED_BY_MOST)
    _shared_clients.append(client)
    return client


@pytest.fixture(scope="module", autouse=True)
def _no_devices_left() -> Iterator[None]:
    # Tests of other modules have arrays of that library on the host of the same workers.
    def forget() -> None:
        from daskdist.devices import KINDS

        KINDS.pop("STRICT", None)

    yield
    for client in _shared_clients if "strict_device" in sys.modules else ():
        client.run(forget)


@pytest.fixture(scope="session")
def cluster(client: Client) -> LocalCluster:
    """Return the addresses of the two worker processes of `client`."""
    return client.cluster


@pytest.fixture
def on_cluster(client: Client) -> Iterator[daskdist.MultiWorkerMirroredStrategy]:
    """Return a strategy of two replicas in separate processes."""
    strategy = daskdist.MultiWorkerMirroredStrategy(client)
    yield strategy
    strategy.close()


@pytest.fixture(params=["embedded", pytest.param("cluster", marks=pytest.mark.cluster)])
def two(request: pytest.FixtureRequest) -> Any:
    """Return two replicas, in this process or each on a worker."""
    return mirrored(2) if request.param == "embedded" else request.getfixturevalue("on_cluster")


@pytest.fixture
def strategy(two: Any) -> Any:
    """Return two replicas; modules with other replicas define this fixture themselves."""
    return two


@pytest.fixture(
    params=[
        "one",
        "embedded",
        pytest.param("a replica a worker", marks=pytest.mark.cluster),
        pytest.param("more replicas than threads", marks=pytest.mark.cluster),
    ]
)
def any_strategy(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return one or three replicas in this process, or one or four on each of two workers of one thread."""
    if request.param in ("one", "embedded"):
        yield mirrored(1 if request.param == "one" else 3)
        return
    client = request.getfixturevalue("start_cluster")(2, 1)
    per_worker = 1 if request.param == "a replica a worker" else 4
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=per_worker) as opened:
        yield opened


@pytest.fixture
def strict() -> Iterator[None]:
    """Register devices that stand in for GPUs, in this process."""
    strict_device = pytest.importorskip("strict_device", reason="array-api-strict is missing", exc_type=ImportError)
    strict_device.register(4)
    yield
    strict_device.unregister()


@pytest.fixture
def strict_and_late(strict: None) -> Iterator[None]:
    """Register devices whose streams are slow, and that have no columns of other tests."""
    from strict_device import StrictStream

    gather_on_device._device_gathers.clear()
    StrictStream.delay_s = 0.0003
    yield
    gather_on_device._device_gathers.clear()


@pytest.fixture
def strict_and_fed(strict: None) -> Iterator[None]:
    """Register devices until the threads that copy to them have ended."""
    from feeding_checks import feed_threads, join
    from strict_device import LIMITS, StrictStream

    yield
    StrictStream.delay_s = 0.0
    LIMITS.clear()
    join(feed_threads())


@pytest.fixture
def parquet_files(tmp_path: Path) -> ParquetFiles:
    """Return a function that writes files ``part-0.parquet``, ... and returns their paths.

    Rows have a number ``id``, counted through all files, and a feature ``x`` that is half of it; ``rows`` is the
    number of rows of all files, or a list with that of each, and ``row_group`` the most rows of a group.
    """

    import pyarrow as pa
    import pyarrow.parquet as pq

    def write(
        rows: int | Sequence[int] = 6,
        files: int | None = None,
        row_group: int | None = None,
        folder: str = "data",
        **options: Any,
    ) -> list[str]:
        counts = [rows] * (files or 1) if isinstance(rows, int) else list(rows)
        bounds = np.cumsum([0, *counts])
        where = tmp_path / folder
        where.mkdir(exist_ok=True)
        paths = []
        for number, (start, stop) in enumerate(pairwise(bounds)):
            ids = np.arange(start, stop)
            paths.append(str(where / f"part-{number}.parquet"))
            table = pa.table({"id": ids, "x": (ids / 2).astype(np.float32)})
            pq.write_table(table, paths[-1], row_group_size=row_group, **options)
        return paths

    return write


def every_pair(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations of values of factors in which each value meets each value of every other factor."""
    left = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(factors)), 2)
        for i, j in itertools.product(range(len(factors[a])), range(len(factors[b])))
    }
    chosen = []
    candidates = [
        (indices, {(a, indices[a], b, indices[b]) for a, b in itertools.combinations(range(len(factors)), 2)})
        for indices in itertools.product(*map(range, map(len, factors)))
    ]
    while left:
        indices, pairs = max(candidates, key=lambda candidate: len(candidate[1] & left))
        left -= pairs
        chosen.append(indices)
    return [tuple(factor[k] for factor, k in zip(factors, indices, strict=True)) for indices in sorted(chosen)]


def threads_of_passes() -> set[threading.Thread]:
    """Return the threads of passes in this process, without those that serve the whole process."""
    closed, owner = threading.Event(), type("Owner", (), {})()
    Finalizer(owner, closed.set)
    del owner
    # Let iterators that were dropped before close now.
    assert closed.wait(30)
    # These threads end some time after their users, possibly in a later test.
    others = ("daskdist-closing", "daskdist-memory", "daskdist watch", "daskdist idle")
    return {
        thread for thread in threading.enumerate() if thread.name.startswith("daskdist") and thread.name not in others
    }


# These ports are outside of the range that the system uses for connections, one of which might take a port while its
# server is down.
_kept_ports = itertools.count(30_000 + os.getpid() % 200 * 10)


def kept_port() -> int:
    """Return a port for a server that is started again."""
    return next(_kept_ports)


def eventually(is_so, within_s=20.0):
    """Wait until a function returns something true, and return that.

    The longer it waits, the less often it looks, as many of these functions ask workers or collect garbage.
    """
    begun = time.monotonic()
    while not (actual := is_so()):
        waited_s = time.monotonic() - begun
        assert waited_s < within_s
        time.sleep(min(max(waited_s / 10, 0.01), 0.2))
    return actual


@pytest.fixture
def caplog(caplog):
    """Return pytest's `caplog`, without what Dask's servers in this process report of themselves meanwhile."""

    def is_kept(record):
        return record.levelno >= logging.WARNING or not record.name.startswith("distributed")

    caplog.handler.addFilter(is_kept)
    yield caplog
    caplog.handler.removeFilter(is_kept)


# What Dask may log while it closes a cluster on a slow machine, also an idle one: a worker closes during its heartbeat,
# or the scheduler tells the cluster object, which is closed already, of a worker that left. A traceback may follow.
_CLOSING = re.compile(
    r"^\S+ \S+ - distributed\.(worker - ERROR - .* during heartbeat|batched - INFO - Batched Comm Closed <InProc)"
)


def without_closing(printed: str) -> str:
    """Return what a program printed, without what Dask logs if it closes a cluster at an unlucky moment."""
    kept, lines = [], deque(printed.splitlines(keepends=True))
    while lines:
        line = lines.popleft()
        if not _CLOSING.match(line):
            kept.append(line)
            continue
        is_connected = True
        while is_connected and lines and lines[0].startswith("Traceback"):
            lines.popleft()
            while lines and lines[0].startswith((" ", "\n")):
                lines.popleft()
            # The error, and what connects it to the next one.
            lines.popleft()
            is_connected = len(lines) > 2 and lines[0] == "\n" and lines[1].startswith(("The above ", "During "))
            for _ in range(3 * is_connected):
                lines.popleft()
    return "".join(kept)


def mirrored(num_replicas: int) -> daskdist.MirroredStrategy:
    """Return a strategy of replicas in this process."""
    return daskdist.MirroredStrategy([f"CPU:{k}" for k in range(num_replicas)])


@contextlib.contextmanager
def messages_sent(strategy: daskdist.MultiWorkerMirroredStrategy) -> Iterator[list[tuple[str, Any]]]:
    """Record the messages that a strategy sends to its workers in the block, each with the address of its worker."""
    actual: list[tuple[str, Any]] = []
    streams = list(internals_of(strategy).backend.streams._streams.values())

    def noted(address: str, append: Callable[..., None]) -> Callable[..., None]:
        def note(message: Any, **about: Any) -> None:
            actual.append((address, message))
            append(message, **about)

        return note

    for stream in streams:
        stream.link.append = noted(stream.address, stream.link.append)
    try:
        yield actual
    finally:
        for stream in streams:
            del stream.link.append


def of_kind(messages: Sequence[tuple[str, Any]], kind: type) -> list[tuple[str, Any]]:
    """Return the messages of a kind, each with the address of its worker."""
    return [message for message in messages if type(message[1]) is kind]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    processes = Started(tmp_path)
    yield processes
    processes.end()
