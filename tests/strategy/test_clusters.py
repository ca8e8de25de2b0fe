"""Clusters of strategies: their origin, waiting for workers, protocols, and the workers of replicas."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask
import numpy as np
import programs
import psutil
import pytest
from conftest import eventually
from distributed import Client, LocalCluster, Security, get_worker
from distributed.diagnostics.plugin import SchedulerPlugin

import daskdist
from daskdist import ClusterResolver, Dataset, DeviceAssignment, MultiWorkerMirroredStrategy, errors
from daskdist.execute.callers.submit import workers_of
from daskdist.strategy.collectives.mailbox import mailbox_of
from daskdist.strategy.replica.contract import internals_of

pytestmark = pytest.mark.cluster


@pytest.fixture
def soon() -> Iterator[None]:
    """Shorten the time to wait for processes that do not answer."""
    with dask.config.set({"daskdist.timeouts.connect": 2}):
        yield


@pytest.fixture
def at_once() -> Iterator[None]:
    """Wait half a second for an answer that never comes."""
    with dask.config.set({"daskdist.timeouts.connect": 0.5}):
        yield


def wait_until_gone(pids: list[int]) -> None:
    """Wait until processes have ended; fail if one has not within 10 s."""
    there = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(there, timeout=10)
    assert not alive


def pids_of(strategy: MultiWorkerMirroredStrategy) -> list[int]:
    return list(strategy.client.run(os.getpid).values())


# --- where a cluster comes from ---


def scheduler_file(client: Client, folder: Path) -> Path:
    path = folder / "scheduler"
    # The same content as the file that `dask scheduler --scheduler-file` writes.
    path.write_text(json.dumps({"type": "Scheduler", "address": client.scheduler.address, "workers": {}}))
    return path


KINDS: dict[str, Callable[[Client, Path], Any]] = {
    "client": lambda client, folder: client,
    "cluster": lambda client, folder: client.cluster,
    "address": lambda client, folder: client.scheduler.address,
    "address without a scheme": lambda client, folder: client.scheduler.address.removeprefix("tcp://"),
    "path": scheduler_file,
    "name of a file": lambda client, folder: str(scheduler_file(client, folder)),
}


@pytest.mark.parametrize("is_resolver", [False, True], ids=["as it is", "resolver"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cluster(start_cluster, tmp_path, kind, is_resolver):
    client = start_cluster(2, 2)
    given = KINDS[kind](client, tmp_path)
    with MultiWorkerMirroredStrategy(ClusterResolver(given, num_workers=2) if is_resolver else given) as strategy:
        assert strategy.client.scheduler.address == client.scheduler.address
        assert strategy.num_replicas_in_sync == 2
        assert (strategy.client is client) == (kind == "client")
    # The user's client stays open; a client that the strategy opened is closed.
    assert client.status == "running"
    assert strategy.client is client or strategy.client.status == "closed"
    assert client.submit(int, "7", pure=False).result() == 7


@pytest.mark.parametrize("is_file", [False, True], ids=["address", "file"])
def test_the_setting_of_dask(start_cluster, tmp_path, is_file):
    client = start_cluster(2, 2)
    where = str(scheduler_file(client, tmp_path)) if is_file else client.scheduler.address
    for given in (None, ClusterResolver(), ClusterResolver(num_workers=2)):
        with dask.config.set({"scheduler-address": where}), MultiWorkerMirroredStrategy(given) as strategy:
            assert strategy.client.scheduler.address == client.scheduler.address
            # The strategy did not start the cluster.
            assert strategy.client.cluster is None


def test_the_setting_of_dask_names_no_scheduler(at_once):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with (
        dask.config.set({"scheduler-address": address}),
        pytest.raises(errors.ClusterError, match=f"{address}.*scheduler-address, or DASK_SCHEDULER_ADDRESS"),
    ):
        MultiWorkerMirroredStrategy()


@pytest.mark.parametrize("value", [8786, 3.5, True, ["tcp://127.0.0.1:8786"]], ids=str)
def test_the_setting_of_dask_is_no_text(value):
    # Dask converts DASK_SCHEDULER_ADDRESS=8786 to a number.
    with (
        dask.config.set({"scheduler-address": value}),
        pytest.raises(errors.ClusterError, match=r"DASK_SCHEDULER_ADDRESS\) is not the address of .*'tcp://127.0.0.1:"),
    ):
        MultiWorkerMirroredStrategy()


def test_an_empty_address():
    # An empty address must not start a local cluster, as the user meant an existing one.
    with pytest.raises(errors.ClusterError, match=r"'' is not the address of a scheduler.*write it like 'tcp://"):
        MultiWorkerMirroredStrategy("")


def test_a_cluster_of_its_own_closes_with_it():
    # An empty setting counts as no setting.
    with dask.config.set({"scheduler-address": ""}):
        strategy = MultiWorkerMirroredStrategy(num_replicas_per_worker=[2, 1])
    cluster, pids = strategy.client.cluster, pids_of(strategy)
    assert [replica.device for replica in strategy.replicas] == ["CPU:0", "CPU:1", "CPU:0"]
    assert len(pids) == 2
    assert all(psutil.pid_exists(pid) for pid in pids)
    # Other machines cannot connect to the scheduler, a worker or the dashboard.
    listening = [
        connection.laddr.ip
        for pid in [os.getpid(), *pids, *(psutil.Process(pid).ppid() for pid in pids)]
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}
    strategy.close()
    wait_until_gone(pids)
    assert cluster.status.name == "closed"
    strategy.close()


def test_a_created_cluster_is_closed_when_construction_fails():
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(errors.ArgumentError, match="replica 0 is on worker 'nobody'"):
        MultiWorkerMirroredStrategy(device_assignment=DeviceAssignment([("nobody", "CPU:0")]))
    left = set(psutil.Process().children(recursive=True)) - before
    # Python's own fork server stays.
    workers = [value.pid for value in left if "spawn_main" in " ".join(value.cmdline())]
    wait_until_gone(workers)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ClusterResolver(7), "int is not a Dask client, a cluster, an address or the path"),
        (lambda: ClusterResolver(ClusterResolver()), "ClusterResolver is not a Dask client"),
        (lambda: MultiWorkerMirroredStrategy(["tcp://a:1"]), "list is not a Dask client"),
        (lambda: ClusterResolver(security=True), r"security is True; give a distributed\.Security"),
        (lambda: ClusterResolver(num_workers=0), "num_workers is 0; give 1 or more"),
        (lambda: ClusterResolver(num_workers=1.5), "num_workers is 1.5; give a whole number"),
        (lambda: ClusterResolver(timeout=0), "timeout is 0; give a number of seconds above 0"),
        (lambda: ClusterResolver(timeout=float("nan")), "timeout is nan; give a number of seconds above 0"),
        (lambda: ClusterResolver(timeout="1 s"), "timeout is '1 s'; give a number of seconds"),
        (
            lambda: MultiWorkerMirroredStrategy("", DeviceAssignment([("0", "CPU:0")]), num_replicas_per_worker=1),
            "device_assignment and num_replicas_per_worker both place the replicas; give one",
        ),
        (
            lambda: MultiWorkerMirroredStrategy("", device_assignment=[("0", "CPU:0")]),
            r"device_assignment is \[\('0', 'CPU:0'\)\]; write it like DeviceAssignment\(",
        ),
    ],
)
def test_arguments_refused_before_connecting(make, words):
    with pytest.raises(errors.ArgumentError, match=words):
        make()


def test_a_client_has_security_of_its_own(start_cluster):
    with pytest.raises(errors.ArgumentError, match="a client has its own security"):
        ClusterResolver(start_cluster(2, 2), security=Security())


def test_closing_with_a_cluster_of_threads():
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as apart:
        assert apart.scheduler_address.startswith("inproc://")
        with MultiWorkerMirroredStrategy(ClusterResolver(apart.scheduler_address, num_workers=2)) as strategy:
            assert strategy.run(lambda x: x + 1, args=(1,)).values == (2, 2)
        with Client(apart, set_as_default=False) as closed:
            pass
        with pytest.raises(errors.ClusterError, match="the client is closed; create a new one"):
            MultiWorkerMirroredStrategy(closed)
    with pytest.raises(errors.ClusterError, match="already closed or closing"):
        MultiWorkerMirroredStrategy(apart)


def test_in_an_event_loop(start_cluster):
    # Code in a notebook also runs in an event loop.
    address = start_cluster(2, 2).scheduler.address

    async def cell() -> int:
        async with Client(address, asynchronous=True, set_as_default=False) as asynchronous:
            with pytest.raises(errors.ArgumentError, match="the Client is asynchronous; create it with asyn"):
                MultiWorkerMirroredStrategy(asynchronous)
        with MultiWorkerMirroredStrategy(address) as strategy:
            return strategy.num_replicas_in_sync

    assert asyncio.run(cell()) == 2


# --- waiting for workers ---


class Connected(SchedulerPlugin):
    """A plugin that knows when a client has connected."""

    name = "connected"

    def __init__(self) -> None:
        self.has_come = threading.Event()

    def add_client(self, scheduler: Any, client: str) -> None:
        self.has_come.set()


def test_a_worker_that_comes_later_is_waited_for():
    plugin = Connected()
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
        ThreadPoolExecutor(1) as thread,
    ):
        cluster.scheduler.add_plugin(plugin)
        resolver = ClusterResolver(cluster.scheduler_address, num_workers=2)
        making = thread.submit(MultiWorkerMirroredStrategy, resolver)
        assert plugin.has_come.wait(20)
        assert not making.done()
        cluster.scale(2)
        with making.result(30) as strategy:
            assert strategy.num_replicas_in_sync == 2
            assert len(set(strategy.workers)) == 2


def test_workers_that_do_not_come(start_cluster):
    start = time.monotonic()
    with pytest.raises(errors.ClusterError, match=r"has 2 workers of 3 after 0\.2 s; start more, wait longer"):
        MultiWorkerMirroredStrategy(ClusterResolver(start_cluster(2, 2), num_workers=3, timeout=0.2))
    with (
        dask.config.set({"daskdist.timeouts.workers": 0.3}),
        pytest.raises(errors.ClusterError, match=r"has 2 workers of 5 after 0\.3 s"),
    ):
        MultiWorkerMirroredStrategy(ClusterResolver(start_cluster(2, 2).scheduler.address, num_workers=5))
    assert time.monotonic() - start < 25


# --- who listens there ---


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
@pytest.mark.parametrize(
    "greeting",
    [b"", b"SSH-2.0-OpenSSH_9.6\r\n", b"\x10\0\0\0\0\0\0\0abc", b"\x03\0\0\0\0\0\0\0abc"],
    ids=["nothing", "ssh", "too short", "nonsense"],
)
def test_a_server_that_is_not_a_scheduler(at_once, security, scheme, greeting):
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            try:
                while True:
                    connections.append(server.accept()[0])
                    connections[-1].sendall(greeting)
            except OSError:
                return

        greeter = threading.Thread(target=greet)
        greeter.start()
        address = f"{scheme}://127.0.0.1:{server.getsockname()[1]}"
        resolver = ClusterResolver(address, security=security if scheme == "tls" else None)
        start = time.monotonic()
        with pytest.raises(errors.ClusterError, match=f"no Dask scheduler answers at {re.escape(repr(address))}"):
            MultiWorkerMirroredStrategy(resolver)
        assert time.monotonic() - start < 8
        server.shutdown(socket.SHUT_RDWR)
        greeter.join()
    for connection in connections:
        connection.close()


# --- TLS ---


@pytest.fixture(scope="module")
def security() -> Security:
    return Security.temporary()


@pytest.fixture(scope="module")
def on_tls(security: Security) -> Iterator[MultiWorkerMirroredStrategy]:
    """Return two replicas in two processes, between which all messages are encrypted."""
    with MultiWorkerMirroredStrategy(ClusterResolver(security=security, num_workers=2)) as strategy:
        yield strategy


def open_comms(dask_worker: Any) -> list[str]:
    """Return the addresses to which a worker has connections."""
    pool = dask_worker.rpc
    return [*pool.available, *pool.occupied, dask_worker.batched_stream.comm.peer_address]


def scheduler_comms(dask_scheduler: Any) -> list[str]:
    streams = [*dask_scheduler.stream_comms.values(), *dask_scheduler.client_comms.values()]
    return [stream.comm.peer_address for stream in streams]


def test_everything_works_on_tls(on_tls, security, parquet_files):
    paths = parquet_files([9, 4, 7, 5])
    address = on_tls.client.scheduler.address
    with MultiWorkerMirroredStrategy(ClusterResolver(address, security=security, num_workers=2)) as strategy:
        dataset = daskdist.read_parquet(paths, "id").shuffle(8, seed=1, reshuffle_each_iteration=False).batch(6)
        # Rows of every file go to both replicas, and so from worker to worker.
        dataset = dataset.with_options(daskdist.Options(auto_shard_policy="DATA"))
        expected = [batch.tolist() for batch in dataset]
        steps = list(strategy.distribute_dataset(dataset))
        assert [np.concatenate(strategy.local_results(step)).tolist() for step in steps] == expected
        assert [strategy.gather(step, axis=0).tolist() for step in steps] == expected
        sums = [strategy.run(lambda ids: ids.sum(), args=(step,)) for step in steps]
        assert sum(int(strategy.reduce("SUM", part, axis=None)) for part in sums) == sum(range(25))
        assert float(strategy.reduce("MEAN", steps[0], axis=0)) == np.mean(expected[0])

        def dataset_fn(context: daskdist.InputContext) -> Dataset:
            return Dataset.range(8).shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)

        made = strategy.distribute_datasets_from_function(dataset_fn)
        pieces = [[piece.tolist() for piece in strategy.local_results(step)] for step in made]
        assert pieces == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]

        # A number is sent from worker to worker as a whole, such a large array in parts.
        for value in (np.float64(1), np.ones(2**17)):
            reduced = strategy.run(lambda value: daskdist.get_replica_context().all_reduce("SUM", value), args=(value,))
            assert all((np.asarray(item) == 2).all() for item in strategy.local_results(reduced))

        assert all(worker.startswith("tls://") for worker in strategy.workers)
        spoken = [comm for comms in strategy.client.run(open_comms).values() for comm in comms]
        spoken += strategy.client.run_on_scheduler(scheduler_comms)
        assert any(worker in spoken for worker in strategy.workers)
        assert {entry.partition("://")[0] for entry in spoken} == {"tls"}


def listening_ports() -> set[tuple[str, int]]:
    """Return the addresses and ports at which sockets of this process listen."""
    connections = psutil.Process().net_connections("inet")
    return {
        connection.laddr[:2]
        for connection in connections
        if connection.status == psutil.CONN_LISTEN or not connection.raddr
    }


def ports_of(client: Client) -> dict[str, set[tuple[str, int]]]:
    """Return the listening ports of the program, the scheduler and each worker."""
    ports = {"program": listening_ports(), "scheduler": client.run_on_scheduler(listening_ports)}
    return ports | client.run(listening_ports)


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["tcp", "tls"])
def test_nothing_listens_but_dask(is_encrypted, security, parquet_files):
    paths = parquet_files([9, 4, 7, 5])
    options: dict[str, Any] = {"protocol": "tls", "security": security} if is_encrypted else {"protocol": "tcp"}
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address="127.0.0.1:0", **options) as cluster,
        Client(cluster, security=options.get("security")) as client,
    ):
        before = ports_of(client)
        assert len(before) == 4
        assert all(before.values())
        assert {host for ports in before.values() for host, _ in ports} == {"127.0.0.1"}
        with MultiWorkerMirroredStrategy(client) as strategy:
            dataset = daskdist.read_parquet(paths, "id").shuffle(8, seed=1).batch(2)
            distributed = strategy.distribute_dataset(dataset)
            steps = [strategy.run(lambda ids: ids.sum(), args=(step,)) for step in distributed]
            assert sum(int(strategy.reduce("SUM", value, axis=None)) for value in steps) == sum(range(25))

            def loop(batches: Any) -> tuple[float, float, set[tuple[str, int]]]:
                context = daskdist.get_replica_context()
                large = context.all_reduce("SUM", np.ones(2**17))
                total = context.all_reduce("SUM", float(sum(ids.sum() for ids in batches)))
                return total, float(large[0]), listening_ports()

            looped = strategy.local_results(strategy.run(loop, args=(distributed,)))
            assert [result[:2] for result in looped] == [(300, 2), (300, 2)]
            serve = daskdist.data.experimental.service.distribute("distributed_epoch", client)
            served = serve(daskdist.read_parquet(paths, "id"))
            iterator = iter(served)
            ids = [int(next(iterator))]
            during = ports_of(client)
            ids += map(int, iterator)
            assert sorted(ids) == list(range(25))
            assert [result[2] for result in looped] == [before[worker] for worker in strategy.workers]
            assert during == before
            assert ports_of(client) == before


def test_the_address_of_another_protocol(soon, on_tls, start_cluster, security):
    of_tls, of_tcp = on_tls.client.scheduler.address, start_cluster(2, 2).scheduler.address
    other = Security.temporary()
    for resolver, words in [
        (ClusterResolver(of_tls.replace("tls", "tcp")), "no Dask scheduler answers .* uses TLS with 'tls://...'"),
        (ClusterResolver(of_tls), r"tls:// needs certificates, but there are none; give .*security=distributed"),
        (ClusterResolver(of_tls, security=other), "no Dask scheduler answers .*other certificates.*see security"),
        (ClusterResolver(of_tcp.replace("tcp", "tls"), security=security), "no Dask .* may not use TLS"),
        (ClusterResolver(of_tcp, security=security), "requires encryption, which tcp.*write 'tls://"),
        (ClusterResolver(of_tls, security=Security(tls_ca_file="none.pem", tls_client_cert="no")), "cannot be used"),
    ]:
        start = time.monotonic()
        with pytest.raises(errors.ClusterError, match=words):
            MultiWorkerMirroredStrategy(resolver)
        assert time.monotonic() - start < 8


def test_a_cluster_of_its_own_that_cannot_start():
    security = Security(tls_ca_file="none.pem", tls_scheduler_cert="none.pem", tls_client_cert="none.pem")
    with pytest.raises(errors.ClusterError, match=r"a LocalCluster cannot be started: .*if __name__ == '__main__'"):
        MultiWorkerMirroredStrategy(ClusterResolver(security=security, num_workers=1))


WITHOUT_A_GUARD = """
{before}
import daskdist
strategy = daskdist.MultiWorkerMirroredStrategy(daskdist.ClusterResolver(num_workers=2))
class Scale:
    factor = 3
def scaled(batch):
    return batch.sum() * Scale.factor
with strategy.scope():
    seen = daskdist.Variable(0, aggregation="SUM")
for batch in strategy.distribute_dataset(daskdist.Dataset.range(8).batch(4)):
    strategy.run(lambda part: seen.assign_add(scaled(part)), args=(batch,))
print("total", int(seen))
"""


@pytest.mark.parametrize("before", ["", "print(__name__)"], ids=["works", "is told"])
def test_a_script_without_a_guard(tmp_path, before):
    script = tmp_path / "script.py"
    # A script that mentions its name may have a guard, so its processes run it.
    script.write_text(WITHOUT_A_GUARD.format(before=before))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=False)
    if before:
        assert done.returncode == 1
        assert "a process of a LocalCluster runs the script, which starts another one; put the" in done.stderr
        return
    assert (done.returncode, done.stdout) == (0, "total 84\n"), done.stderr
    # Dask's workers log the error of a heartbeat that is under way when they are closed.
    num_of_dask = done.stderr.count("Failed to communicate with scheduler during heartbeat")
    assert done.stderr.count("Traceback (most recent call last)") <= 2 * num_of_dask, done.stderr


# --- which worker each replica sits on ---


def address_here() -> tuple[str, int]:
    return get_worker().address, os.getpid()


@pytest.mark.parametrize(
    "names",
    [["1", "1", "0"], ["0", "1", "1"], ["1", "0"], ["1", "1"]],
    ids=["last worker first", "more on the last", "turned round", "one of two"],
)
def test_replicas_are_placed_as_assigned(start_cluster, parquet_files, names):
    client = start_cluster(2, 2)
    addresses = {str(info["name"]): address for address, info in workers_of(client).items()}
    expected_workers = [addresses[name] for name in names]
    devices = [f"CPU:{names[:k].count(name)}" for k, name in enumerate(names)]
    dataset = (
        daskdist.read_parquet(parquet_files([9, 4, 7, 5]), "id")
        .shuffle(8, seed=1, reshuffle_each_iteration=False)
        .batch(6)
    )
    with MultiWorkerMirroredStrategy(client, DeviceAssignment(zip(names, devices, strict=True))) as strategy:
        assert [replica.worker for replica in strategy.replicas] == expected_workers
        assert [replica.device for replica in strategy.replicas] == devices
        assert list(strategy.workers) == list(dict.fromkeys(expected_workers))
        ran = strategy.local_results(strategy.run(lambda _: address_here(), args=(0,)))
        assert [worker for worker, _ in map(tuple, ran)] == expected_workers
        numbered = strategy.experimental_distribute_values_from_function(
            lambda context: np.array([context.replica_id_in_sync_group])
        )
        assert [int(value[0]) for value in strategy.local_results(numbered)] == list(range(len(names)))
        assert strategy.gather(numbered, axis=0).tolist() == list(range(len(names)))

        # With DATA, the replicas get the same rows as replicas in this process.
        by_rows = dataset.with_options(daskdist.Options(auto_shard_policy="DATA"))
        here = daskdist.MirroredStrategy([f"CPU:{k}" for k in range(len(names))])
        expected = [[piece.tolist() for piece in here.local_results(step)] for step in here.distribute_dataset(by_rows)]
        steps = list(strategy.distribute_dataset(by_rows))
        assert [[piece.tolist() for piece in strategy.local_results(step)] for step in steps] == expected
        rows_of = [[row for piece in step for row in piece] for step in expected]
        assert [strategy.gather(step, axis=0).tolist() for step in steps] == rows_of
        assert [int(strategy.reduce("SUM", step, axis=0)) for step in steps] == list(map(sum, rows_of))

        # With FILE, the worker of the first replica gets the files of the first input pipeline.
        by_file = dataset.with_options(daskdist.Options(auto_shard_policy="FILE"))
        rows: list[set[int]] = [set() for _ in names]
        for step in strategy.distribute_dataset(by_file):
            for mine, piece in zip(rows, strategy.local_results(step), strict=True):
                mine.update(piece.tolist())
        of_first = set.union(*(mine for mine, name in zip(rows, names, strict=True) if name == names[0]))
        assert set.union(*rows) == set(range(25))
        assert sum(map(len, rows)) == 25
        if len(set(names)) == 2:
            assert of_first == {*range(9), *range(13, 20)}


def test_workers_by_address_and_by_number(start_cluster):
    client = start_cluster(2, 2)
    addresses = {str(info["name"]): address for address, info in workers_of(client).items()}
    placed = DeviceAssignment([(addresses["1"], "CPU:0"), (0, "/device:CPU:3")])
    with MultiWorkerMirroredStrategy(client, device_assignment=placed) as strategy:
        assert [(replica.worker, replica.device) for replica in strategy.replicas] == [
            (addresses["1"], "CPU:0"),
            (addresses["0"], "CPU:3"),
        ]


def test_a_created_cluster_has_workers_for_the_assignment():
    placed = DeviceAssignment([("1", "CPU:0"), ("0", "CPU:0"), ("0", "CPU:1")])
    with MultiWorkerMirroredStrategy(device_assignment=placed) as strategy:
        threads = [info["nthreads"] for info in workers_of(strategy.client).values()]
        assert threads == [2, 2]
        assert strategy.num_replicas_in_sync == 3


@pytest.mark.parametrize(
    ("replicas", "error", "words"),
    [
        ([], errors.ArgumentError, "there are no replicas; give one or more"),
        ("0", errors.ArgumentError, "'0' is not a list of workers and devices; write it like DeviceAssignment"),
        (3, errors.ArgumentError, "3 is not a list of workers and devices"),
        (["CPU:0"], errors.ArgumentError, "replica 0 is 'CPU:0'; give the name of a worker and of a device"),
        ([("0", "CPU:0", 1)], errors.ArgumentError, r"replica 0 is \('0', 'CPU:0', 1\); give the name"),
        ([("0", 0)], errors.ArgumentError, r"replica 0 is \('0', 0\); give the name"),
        ([("0", "CPU:0"), (0, "cpu:0")], errors.ArgumentError, "replicas 0 and 1 are both on CPU:0 of worker '0'"),
        (
            [("0", "CPU:0"), ("1", "CPU:0"), ("0", "CPU:1")],
            errors.ArgumentError,
            r"worker '0' has replicas \[0, 2\], with others between them; put .* next to each other",
        ),
        ([("0", "TPU:0")], errors.UnknownDeviceError, "'TPU:0': the kind TPU is unknown"),
        ([("0", "zero")], errors.UnknownDeviceError, "'zero' is not the name of a device"),
    ],
)
def test_invalid_assignments_are_refused(replicas, error, words):
    with pytest.raises(error, match=words):
        DeviceAssignment(replicas)


def test_assignments_that_do_not_fit_the_cluster(start_cluster):
    client = start_cluster(2, 2)
    addresses = {str(info["name"]): address for address, info in workers_of(client).items()}
    for replicas, words in [
        ([("0", "CPU:0"), ("2", "CPU:0")], r"replica 1 is on worker '2', but there is none of that name.* 1 \(tcp://"),
        ([("0", "CPU:0"), (addresses["0"], "CPU:0")], f"both on CPU:0 of worker '{addresses['0']}'"),
        ([("0", "CPU:0"), ("1", "CPU:0"), (addresses["0"], "CPU:1")], r"has replicas \[0, 2\], with others between"),
    ]:
        with pytest.raises(errors.ArgumentError, match=words):
            MultiWorkerMirroredStrategy(client, DeviceAssignment(replicas))
    # The name and the address of a worker denote the same worker.
    with MultiWorkerMirroredStrategy(client, DeviceAssignment([("0", "CPU:0"), (addresses["0"], "CPU:1")])) as strategy:
        assert strategy.workers == (addresses["0"],)


# --- leftovers ---


def known_to(dask_worker):
    return list(mailbox_of(dask_worker).stores)


def until_known(client, token, *, is_known):
    eventually(lambda: all((token in known) == is_known for known in client.run(known_to).values()))


def test_workers_forget_an_unreferenced_strategy(start_cluster, tmp_path):
    client = start_cluster(2, 1)

    def begun():
        strategy = daskdist.MultiWorkerMirroredStrategy(client)
        with strategy.scope():
            total = daskdist.Variable(np.zeros(2), aggregation="SUM")

        def step(waits):
            while waits and not (tmp_path / "go").exists():
                time.sleep(0.02)
            return total.assign_add(np.ones(2))

        # `run` waits for the first call of a function.
        strategy.run(step, args=(False,))
        return internals_of(strategy).token, strategy.run(step, args=(True,))

    token, values = begun()
    gc.collect()
    # The strategy exists as long as one of its results is referenced.
    until_known(client, token, is_known=True)
    (tmp_path / "go").touch()
    assert [value.result().tolist() for value in values.values] == [[4, 4]] * 2
    until_known(client, token, is_known=True)
    del values
    gc.collect()
    until_known(client, token, is_known=False)


# A client's sender waits for the end of an interval in a future of its own. If the client's loop is stopped just then,
# nobody looks at this future, and asyncio says so. A busy machine makes it likely.
NOISE_OF_DASK = """\
Future exception was never retrieved
future: <Future finished exception=TimeoutError('Timeout')>
TimeoutError: Timeout
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_workers_forget_the_strategies_of_programs_that_are_gone(start_cluster, is_killed):
    client = start_cluster(2, 1)
    program = f"""
import os, daskdist
from daskdist.strategy.replica.contract import internals_of
strategy = daskdist.MultiWorkerMirroredStrategy({client.scheduler.address!r})
with strategy.scope():
    kept = daskdist.Variable(0.0)
kept.numpy()
print(strategy.client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.workers_to_close(n=2)))
print(internals_of(strategy).token, flush=True)
os._exit(0) if {is_killed} else None
"""
    done = programs.run("-c", program, check=True)
    closable, token = done.stdout.splitlines()
    assert done.stderr.replace(NOISE_OF_DASK, "") == ""
    until_known(client, token, is_known=False)
    # Adaptive scaling may now close the workers that the strategy used.
    assert closable == "[]"
    workers = sorted(client.nthreads())
    eventually(lambda: sorted(client.run_on_scheduler(workers_to_close)) == workers)


def workers_to_close(dask_scheduler):
    return dask_scheduler.workers_to_close(n=2)


def test_names_of_tensorflow():
    assert daskdist.distribute.cluster_resolver.ClusterResolver is ClusterResolver
    assert daskdist.distribute.experimental.DeviceAssignment is DeviceAssignment
