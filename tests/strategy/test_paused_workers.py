"""Workers whose memory is full: others do the work of paused ones, and errors say why those wait or were ended."""

from __future__ import annotations

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor

import dask
import numpy as np
import pytest
from conftest import eventually, frequent_heartbeats, new_cluster
from distributed import Event, Status, get_worker

from daskdist import Dataset, MultiWorkerMirroredStrategy, errors, read_npy
from daskdist.execute.callers.submit import workers_of
from daskdist.execute.paused_workers import PausedWorkers, ended_for_memory

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

MIB = 2**20
ROWS = 400
# Workers that only a test pauses, and of which others take no tasks by themselves.
BY_HAND = {"distributed.worker.memory.pause": False, "distributed.scheduler.work-stealing": False}
BY_DASK = {"distributed.worker.memory.terminate": False, "distributed.worker.memory.monitor-interval": "100ms"}
PAUSED_S = "daskdist.timeouts.paused"


@pytest.fixture
def by_hand():
    """Return a client of two workers that pause when a test says so, and their addresses."""
    with dask.config.set(BY_HAND), frequent_heartbeats(), new_cluster(memory_limit=2_000 * MIB) as client:
        yield client, *client.nthreads()


def set_status(client, status, *workers):
    def set_it(dask_worker):
        dask_worker.status = status

    client.run(set_it, workers=list(workers))
    eventually(lambda: all(workers_of(client)[worker]["status"] == status.name for worker in workers))


def large_row(number):
    return np.random.default_rng(int(number)).random(MIB)


@contextlib.contextmanager
def in_thread(function):
    """Call a function in another thread, whose result is awaited with a limit."""
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(function)


def rows_of(strategy, dataset):
    rows = []
    for batch in strategy.distribute_dataset(dataset):
        rows += np.concatenate(strategy.local_results(strategy.run(np.asarray, args=(batch,)))).tolist()
    return sorted(rows)


@pytest.mark.skipif(sys.platform == "win32", reason="sizes of files are limited on POSIX only")
def test_full_disks_and_full_memory_are_an_error():
    def limit_files():
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))

    with (
        dask.config.set({**BY_DASK, PAUSED_S: 1}),
        frequent_heartbeats(),
        new_cluster(memory_limit=300 * MIB) as client,
        MultiWorkerMirroredStrategy(client) as strategy,
    ):
        client.run(limit_files)
        kept = [strategy.distribute_dataset(Dataset.range(100).map(large_row).cache().batch(2))]

        def pass_over_kept():
            for batch in kept[0]:
                strategy.run(np.max, args=(batch,))

        with pytest.raises(errors.WaitTimeoutError, match=r"cannot free any.*timeouts\.paused.*File too large.*cache"):
            pass_over_kept()
        # What fills the memory is dropped with it.
        kept.clear()
        eventually(lambda: {its["status"] for its in workers_of(client).values()} == {"running"})
        assert rows_of(strategy, Dataset.range(ROWS).batch(50)) == [*range(ROWS)]


def test_the_loss_of_workers_that_exceed_their_memory_limit_is_said():
    def step():
        taken = [np.ones(MIB) for _ in range(45)]
        # Dask ends the worker.
        Event("never").wait(60)
        return len(taken)

    with (
        dask.config.set({"distributed.worker.memory.monitor-interval": "50ms"}),
        new_cluster(memory_limit=300 * MIB) as client,
        MultiWorkerMirroredStrategy(client) as strategy,
        pytest.raises(errors.ClusterError, match=r"lost .*; Dask ended .* MiB, which exceeded the memory limit"),
    ):
        strategy.local_results(strategy.run(step))


def test_results_that_exceed_the_memory_limit_are_said():
    with (
        dask.config.set({"distributed.worker.memory.monitor-interval": "50ms"}),
        new_cluster(memory_limit=300 * MIB) as client,
        MultiWorkerMirroredStrategy(client) as strategy,
    ):
        results = [strategy.run(np.ones, args=(4 * MIB,)) for _ in range(12)]

        def lost():
            return [worker.address for worker in strategy.status().workers if worker.state == "lost"]

        # The other worker need not be lost, too. A connection may break before Dask's event comes.
        eventually(lost, within_s=60)
        eventually(lambda: all(ended_for_memory(client, [worker]) for worker in lost()))
        with pytest.raises(errors.ClusterError, match=r"lost .*; Dask ended .* MiB, which exceeded the memory limit"):
            strategy.local_results(results[0])


def test_tasks_for_a_paused_worker_run_on_the_one_that_continues_first(by_hand):
    client, first, second = by_hand
    with MultiWorkerMirroredStrategy(client) as strategy:
        set_status(client, Status.paused, first, second)

        def none_runs(dask_scheduler):
            meant = [task.worker_restrictions for task in dask_scheduler.unrunnable]
            return {first} in meant and {second} in meant

        with in_thread(lambda: rows_of(strategy, Dataset.range(ROWS).map(abs).batch(50))) as rows:
            eventually(lambda: client.run_on_scheduler(none_runs))
            set_status(client, Status.running, first)
            assert rows.result(30) == [*range(ROWS)]


def test_tasks_that_a_paused_worker_has_got_are_given_to_another(by_hand, tmp_path):
    client, first, _ = by_hand
    began, gate = Event("began", client=client), Event("continues", client=client)

    def held_up(number):
        # The first parts are read one by one.
        if number >= ROWS // 2 and get_worker().address == first:
            Event("began").set()
            Event("continues").wait(60)
        return number

    for part, numbers in enumerate(np.split(np.arange(ROWS), 8)):
        np.save(tmp_path / f"{part}.npy", numbers)
    with dask.config.set({PAUSED_S: 4}), MultiWorkerMirroredStrategy(client) as strategy:
        rows = read_npy(str(tmp_path / "*.npy")).map(held_up).batch(50)
        with in_thread(lambda: rows_of(strategy, rows)) as result:
            assert began.wait(60)
            set_status(client, Status.paused, first)
            gate.set()
            assert result.result(30) == [*range(ROWS)]


def test_the_scheduler_is_asked_only_after_a_pause(by_hand, monkeypatch):
    client, worker, _ = by_hand
    handlers, asked = client.cluster.scheduler.handlers, []
    run_function = handlers["run_function"]

    def note(comm, **request):
        asked.append(request)
        return run_function(comm, **request)

    paused_workers, all_running = PausedWorkers(), workers_of(client)
    set_status(client, Status.paused, worker)
    one_paused, num_asked = workers_of(client), []
    monkeypatch.setitem(handlers, "run_function", note)
    for connected in (all_running, one_paused, one_paused, all_running, all_running):
        paused_workers.check(client, connected)
        num_asked.append(len(asked))
    assert num_asked == [0, 1, 2, 3, 3]


def test_steps_of_paused_workers_are_waited_for(by_hand):
    client, *workers = by_hand
    paused_workers = PausedWorkers()

    def look():
        paused_workers.check(client, workers_of(client))

    with dask.config.set({PAUSED_S: 0}), MultiWorkerMirroredStrategy(client) as strategy:
        gate = Event("gate", client=client)

        def step():
            return Event("gate").wait(60)

        # The first call of a function is awaited, since what it returns is not known yet.
        gate.set()
        strategy.run(step)
        gate.clear()
        strategy.run(step)
        set_status(client, Status.paused, *workers)
        eventually(lambda: all(its["metrics"].get("daskdist_running") for its in workers_of(client).values()))
        for _ in range(3):
            look()
        gate.set()
        eventually(lambda: not any(its["metrics"]["daskdist_running"] for its in workers_of(client).values()))
        with pytest.raises(errors.WaitTimeoutError, match="no results in memory that could be moved"):
            eventually(look)
        set_status(client, Status.running, *workers)
        for _ in range(3):
            look()
