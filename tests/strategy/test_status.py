"""`Strategy.status`, and the workers in use as Dask's own tools show them."""

from __future__ import annotations

import gc
import threading

import pytest
from conftest import eventually, mirrored
from distributed import Event

import daskdist
from daskdist.execute.callers.submit import workers_of

pytestmark = [pytest.mark.timeout(60)]


def test_status_of_a_strategy_of_this_process():
    strategy = mirrored(2)
    begun, release = threading.Event(), threading.Event()

    def wait():
        begun.set()
        assert release.wait(30)

    strategy.run(float, args=(1,))
    (idle,) = strategy.status().workers
    assert (idle.address, idle.replicas, idle.devices) == (None, (0, 1), ("CPU:0", "CPU:1"))
    assert (idle.state, idle.running, idle.num_steps_sent, idle.num_steps_in_flight) == ("idle", (), 1, 0)
    program = threading.Thread(target=strategy.run, args=(wait,))
    program.start()
    assert begun.wait(30)
    (busy,) = strategy.status().workers
    assert (busy.state, busy.num_steps_sent, busy.num_steps_in_flight) == ("running", 2, 1)
    assert {call.name for call in busy.running} == {"run-wait"}
    assert 0 in {call.replica for call in busy.running}
    assert all(call.running_s >= 0 for call in busy.running)
    assert "running run-wait for" in repr(strategy.status())
    release.set()
    program.join()
    assert strategy.status().workers[0].state == "idle"
    strategy.close()
    assert strategy.status().workers[0].state == "closed"


@pytest.mark.cluster
def test_status_in_the_middle_of_a_long_call(on_cluster, client):
    begun, release = Event("status-begun", client=client), Event("status-release", client=client)
    begun.clear()
    release.clear()

    def wait_on_the_first(waits):
        replica = daskdist.get_replica_context().replica_id_in_sync_group
        if waits and replica == 0:
            Event("status-begun").set()
            assert Event("status-release").wait(30)
        return replica

    num_before = [value.num_steps_sent for value in on_cluster.status().workers]
    on_cluster.local_results(on_cluster.run(wait_on_the_first, args=(False,)))
    waiting = on_cluster.run(wait_on_the_first, args=(True,))
    after = on_cluster.run(wait_on_the_first, args=(False,))
    assert begun.wait(30)
    eventually(lambda: on_cluster.status().workers[1].state == "idle")
    first, second = on_cluster.status().workers
    assert (first.address, second.address) == on_cluster.workers
    assert (first.replicas, second.replicas) == ((0,), (1,))
    assert (first.state, second.state) == ("running", "idle")
    (call,) = first.running
    assert (call.replica, call.name) == (0, "run-wait_on_the_first")
    assert call.running_s >= 0
    assert on_cluster.status().workers[0].running[0].running_s > call.running_s
    assert (first.num_steps_in_flight, second.num_steps_in_flight) == (2, 0)
    assert [first.num_steps_sent - num_before[0], second.num_steps_sent - num_before[1]] == [3, 3]
    assert all(0 <= item.heartbeat_age_s < 30 for item in (first, second))
    release.set()
    assert on_cluster.local_results(after) == on_cluster.local_results(waiting) == (0, 1)
    assert [worker.state for worker in on_cluster.status().workers] == ["idle", "idle"]
    report = on_cluster.status().to_dict()
    assert report["workers"][0]["address"] == on_cluster.workers[0]
    assert len(repr(on_cluster.status()).splitlines()) == 3


# --- Dask's own tools ---


def metrics_of(client):
    """Return the metrics of workers that the scheduler shows, by address."""
    workers = workers_of(client).items()
    return {
        address: (info["metrics"].get("daskdist_replicas", 0), info["metrics"].get("daskdist_running", ""))
        for address, info in workers
    }


def metrics_on(dask_worker):
    """Return the metrics that a worker should send."""
    return tuple(
        dask_worker.metrics[name](dask_worker) if name in dask_worker.metrics else nothing
        for name, nothing in (("daskdist_replicas", 0), ("daskdist_running", ""))
    )


@pytest.mark.cluster
def test_workers_in_use_are_among_the_metrics_of_workers(client):
    begun, release = Event("metrics-begun", client=client), Event("metrics-release", client=client)

    def wait():
        Event("metrics-begun").set()
        assert Event("metrics-release").wait(30)

    # Earlier strategies may end meanwhile: those that nothing refers to do so with the next garbage collection.
    before = dict.fromkeys(client.nthreads(), (0, ""))
    eventually(lambda: gc.collect() >= 0 and metrics_of(client) == client.run(metrics_on) == before)
    first, second = client.nthreads()
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker={first: 2, second: 0}) as strategy:
        strategy.local_results(strategy.run(float, args=(1,)))
        program = threading.Thread(target=strategy.run, args=(wait,))
        program.start()
        assert begun.wait(30)
        eventually(lambda: metrics_of(client)[first][0] == before[first][0] + 2)
        eventually(lambda: metrics_of(client)[first][1].startswith("run-wait for "))
        assert metrics_of(client)[second] == before[second]
        release.set()
        program.join()
    eventually(lambda: metrics_of(client) == before)
