"""Streams of steps through the scheduler, for programs that cannot connect to workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import dask
import numpy as np
import psutil
import pytest
from conftest import eventually
from distributed import Client, Event, LocalCluster, get_worker
from distributed.comm import registry
from programs import FORKED_WORKERS, Program
from started import Started

import daskdist
from daskdist import Dataset, errors
from daskdist.strategy.calls.stream import connect_to_worker
from daskdist.strategy.replica.contract import internals_of

pytestmark = pytest.mark.cluster
RELAYED = {"daskdist.steps.relay": True}


class OnlyTheScheduler:
    """A TCP backend that connects to the scheduler only, and to no worker."""

    def __init__(self, backend, address):
        self._backend = backend
        self._address = address
        self.refused = []

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def get_connector(self):
        return self

    async def connect(self, address, **options):
        if not self._address.endswith(f"/{address}"):
            self.refused.append(address)
            raise OSError("no route to host")
        return await self._backend.get_connector().connect(address, **options)


@contextlib.contextmanager
def no_way_to_workers(client):
    """Refuse all connections except those to the scheduler, and record the refused addresses."""
    before = registry.backends["tcp"]
    registry.backends["tcp"] = only = OnlyTheScheduler(before, client.scheduler.address)
    try:
        yield only.refused
    finally:
        registry.backends["tcp"] = before


@pytest.fixture(scope="module")
def far_client(tmp_path_factory):
    """Return a client of a scheduler and two workers in separate processes."""
    started = Started(tmp_path_factory.mktemp("far"))
    # The scheduler and workers unpickle functions of this file, so they must be able to import it.
    options = {"PYTHONPATH": os.pathsep.join(sys.path), **FORKED_WORKERS}
    here, file = ["--host", "127.0.0.1", "--no-dashboard"], started.folder / "scheduler.json"
    try:
        started.dask("scheduler", *here, "--port", "0", "--scheduler-file", str(file), **options)
        address = json.loads(started.wait_for(file, "}"))["address"]
        for _ in range(2):
            folder = ["--local-directory", str(started.folder)]
            started.dask("worker", address, *here, "--nthreads", "1", *folder, **options)
        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(2, 60)
            yield client
    finally:
        started.end()


@pytest.fixture
def far(far_client):
    """Return the client, once workers that were killed have been replaced."""
    eventually(lambda: len(far_client.nthreads()) == 2)
    return far_client


def are_relayed(strategy):
    return [stream.is_relayed for stream in internals_of(strategy).backend.streams._streams.values()]


def num_strategies(dask_worker):
    from daskdist.strategy.calls.worker.worker_streams import streams_of

    streams = streams_of(dask_worker)
    return 0 if streams is None else len(streams.by_token)


def test_a_program_that_reaches_no_worker(far):
    def fail(x):
        raise ValueError("this cannot be done")

    rows = np.arange(2.0**18).reshape(16, -1)
    with no_way_to_workers(far) as refused, daskdist.MultiWorkerMirroredStrategy(far) as strategy:
        assert are_relayed(strategy) == [True, True]
        assert {f"tcp://{address}" for address in refused} == set(strategy.workers)
        refused.clear()
        # Send small and large values in both directions.
        assert strategy.local_results(strategy.run(float, args=(2,))) == (2.0, 2.0)
        for each in strategy.local_results(strategy.run(np.add, args=(rows, 1))):
            np.testing.assert_array_equal(each, rows + 1)
        weights = np.ones(3)
        for number in range(50):
            weights = strategy.reduce("SUM", strategy.run(np.add, args=(weights, number % 2)), axis=None) / 2
        np.testing.assert_array_equal(np.asarray(weights), np.full(3, 26.0))
        batches = list(strategy.distribute_dataset(Dataset.from_tensor_slices(rows).batch(4)))
        found = np.concatenate([part for batch in batches for part in strategy.local_results(batch)])
        np.testing.assert_array_equal(found, rows)
        assert float(strategy.reduce("SUM", strategy.run(np.sum, args=(batches[0],)), axis=None)) == rows[:4].sum()
        with pytest.raises(ValueError, match="this cannot be done"):
            strategy.local_results(strategy.run(fail, args=(batches[0],)))
        # Send data for tasks to workers, and back.
        placed = internals_of(strategy).backend._submit.place(rows, strategy.workers[1])
        np.testing.assert_array_equal(internals_of(strategy).backend._submit.result(placed), rows)
        placed.release()
        assert refused == []
        assert set(far.run(num_strategies).values()) == {1}
    eventually(lambda: set(far.run(num_strategies).values()) == {0})


def test_a_relayed_worker_that_is_killed_is_named_at_once(far):
    def wait():
        return float(Event("continue").wait(60))

    pids, gate = far.run(os.getpid), Event("continue", client=far)
    with no_way_to_workers(far), daskdist.MultiWorkerMirroredStrategy(far) as strategy:
        gate.set()
        strategy.local_results(strategy.run(wait))
        gate.clear()
        waiting = strategy.reduce("SUM", strategy.run(wait), axis=None)
        worker = strategy.workers[1]
        since = time.monotonic()
        threading.Timer(0.3, os.kill, (pids[worker], signal.SIGKILL)).start()
        with pytest.raises(errors.ClusterError, match=f"lost {worker}"):
            float(waiting)
        assert time.monotonic() - since < 25
        gate.set()
        assert strategy.local_results(strategy.run(wait)) == (1.0,)


def test_an_unreachable_worker_is_named(on_cluster, client):
    address = "tcp://127.0.0.1:9"
    with no_way_to_workers(client), pytest.raises(OSError, match=f"{address} .*directly.*nor .* does not know it"):
        client.sync(connect_to_worker, address, client)
    with (
        dask.config.set({"distributed.scheduler.blocked-handlers": ["run_function"]} | RELAYED),
        LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0", silence_logs=50) as local,
        Client(local, set_as_default=False) as careful,
        pytest.raises(OSError, match=r"inproc://.*not tried.* calls no functions"),
    ):
        daskdist.MultiWorkerMirroredStrategy(careful)


@pytest.mark.parametrize("relay", [False, True])
def test_a_program_that_is_killed_leaves_nothing_on_its_workers(far, relay):
    program = f"""
import time, daskdist, dask
dask.config.set({{"daskdist.steps.relay": {relay}}})
strategy = daskdist.MultiWorkerMirroredStrategy({far.scheduler.address!r})
print(strategy.local_results(strategy.run(float, args=(1,))), flush=True)
time.sleep(60)
"""
    with Program("-c", program, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "(1.0, 1.0)\n"
        assert set(far.run(num_strategies).values()) == {1}
        process.kill()
    eventually(lambda: set(far.run(num_strategies).values()) == {0})


def scheduler_of(client):
    return psutil.Process(client.run_on_scheduler(os.getpid))


@pytest.mark.parametrize("relay", [False, True])
def test_a_worker_that_receives_nothing_makes_the_program_wait(far, relay):
    pids = far.run(os.getpid)
    large = np.ones(2**20)
    with (
        dask.config.set({"daskdist.steps.relay": relay, "daskdist.step-bytes": "32 MiB"}),
        daskdist.MultiWorkerMirroredStrategy(far) as strategy,
    ):
        assert are_relayed(strategy) == [relay, relay]
        strategy.local_results(strategy.run(np.sum, args=(large,)))
        scheduler, num_sent, calls = scheduler_of(far), 0, []
        before = scheduler.memory_info().rss

        def send():
            nonlocal num_sent
            for number in range(40):
                large[0] = number
                calls.append(strategy.run(np.sum, args=(large,)))
                num_sent += 1

        os.kill(pids[strategy.workers[0]], signal.SIGSTOP)
        try:
            sender = threading.Thread(target=send)
            sender.start()
            eventually(lambda: num_sent >= 4)
            time.sleep(1)
            # The arguments of all 40 calls have 320 MiB. Program and scheduler hold at most 40 MiB each, and the kernel
            # has two buffers for each of the two connections: Linux 6.18 has limits of 32 and 4 MiB.
            assert 4 <= num_sent < 30
            assert scheduler.memory_info().rss - before < 128 * 2**20
        finally:
            os.kill(pids[strategy.workers[0]], signal.SIGCONT)
        sender.join(30)
        for number, call in enumerate(calls):
            assert strategy.local_results(call) == (2**20 - 1.0 + number,) * 2
        assert num_sent == 40


def test_a_relayed_worker_that_is_stopped_is_lost(far):
    pids = far.run(os.getpid)
    with dask.config.set(RELAYED), daskdist.MultiWorkerMirroredStrategy(far) as strategy:
        assert strategy.local_results(strategy.run(float, args=(1,))) == (1.0, 1.0)
        worker = strategy.workers[1]
        os.kill(pids[worker], signal.SIGSTOP)
        try:
            with (
                dask.config.set({"daskdist.timeouts.silence": "1 s"}),
                pytest.raises(errors.ClusterError, match=f"lost {worker}.*no answer for"),
            ):
                float(strategy.reduce("SUM", strategy.run(float, args=(1,)), axis=None))
        finally:
            os.kill(pids[worker], signal.SIGCONT)


def test_settings_of_relays(client):
    with (
        no_way_to_workers(client),
        dask.config.set({"daskdist.steps.relay": False, "distributed.comm.timeouts.connect": 1}),
        pytest.raises(OSError, match="Timed out"),
    ):
        daskdist.MultiWorkerMirroredStrategy(client)
    with (
        dask.config.set({"daskdist.steps.relay": "never"}),
        pytest.raises(errors.ArgumentError, match="'never'; give true, false or 'auto'"),
    ):
        daskdist.MultiWorkerMirroredStrategy(client)
    for is_direct in (True, False):
        with (
            Client(client.scheduler.address, direct_to_workers=is_direct, set_as_default=False) as other,
            daskdist.MultiWorkerMirroredStrategy(other) as strategy,
        ):
            assert are_relayed(strategy) == [not is_direct] * 2
            assert strategy.local_results(strategy.run(float, args=(1,))) == (1.0, 1.0)


def test_relayed_workers_in_this_process_share_no_memory_with_the_program():
    def make():
        get_worker().made = np.zeros(2**17)
        return get_worker().made

    def change():
        get_worker().made += 1
        return float(get_worker().made[0])

    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0") as local,
        Client(local, set_as_default=False) as client,
        dask.config.set(RELAYED),
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        assert are_relayed(strategy) == [True, True]
        for each in strategy.local_results(strategy.run(make)):
            each += 100
        assert strategy.local_results(strategy.run(change)) == (1.0, 1.0)
        given = np.zeros(2**17)
        assert strategy.local_results(strategy.run(np.add, args=(given, 1)))[0][0] == 1
        assert given[0] == 0
