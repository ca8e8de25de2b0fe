"""A pass waits for a worker that is very slow, and continues without one that is stopped for ever."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading

import dask
import numpy as np
import pytest
from distributed import Client

from daskdist import Dataset, MultiWorkerMirroredStrategy

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(120)]

ROWS = 600
BATCH_ROWS = 20
STOPPED_AT = 10
STOPPED_S, RUNS_S = 0.09, 0.01


@contextlib.contextmanager
def mostly_stopped(pid):
    """Let a process run for a tenth of the time only."""
    is_over = threading.Event()

    def stop_and_continue():
        while not is_over.is_set():
            os.kill(pid, signal.SIGSTOP)
            is_over.wait(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            is_over.wait(RUNS_S)

    thread = threading.Thread(target=stop_and_continue)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def visit(strategy, at=lambda number: None):
    """Make a pass; return its rows and the sum of the rows, added up by the replicas."""
    rows, total = [], 0
    for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(ROWS).map(abs).batch(BATCH_ROWS))):
        at(number)
        values = strategy.run(np.asarray, args=(batch,))
        total += strategy.reduce("SUM", strategy.run(np.sum, args=(values,)), axis=None)
        rows.append(strategy.local_results(values))
    return np.concatenate([part for parts in rows for part in parts]).tolist(), int(total)


def test_a_worker_that_is_ten_times_slower_is_waited_for(on_cluster, client):
    slow, workers = on_cluster.workers[1], on_cluster.workers
    with mostly_stopped(client.run(os.getpid)[slow]):
        assert visit(on_cluster) == ([*range(ROWS)], sum(range(ROWS)))
    assert on_cluster.workers == workers


def test_a_worker_without_a_nanny_that_is_stopped_for_ever_is_given_up(started):
    here = ["--host", "127.0.0.1", "--no-dashboard"]
    file = started.folder / "scheduler.json"
    started.dask("scheduler", *here, "--port", "0", "--scheduler-file", str(file))
    address = json.loads(started.wait_for(file, "}"))["address"]
    options = ["--no-nanny", "--nthreads", "1", "--local-directory", str(started.folder)]
    for log in [started.dask("worker", address, *here, *options) for _ in range(3)]:
        started.wait_for(log, "Registered to")
    with (
        dask.config.set({"daskdist.timeouts.silence": 2}),
        Client(address, set_as_default=False) as client,
        MultiWorkerMirroredStrategy(client) as strategy,
    ):
        stopped, pids = strategy.workers[0], client.run(os.getpid)

        def stop(number):
            if number == STOPPED_AT:
                os.kill(pids[stopped], signal.SIGSTOP)

        try:
            assert visit(strategy, stop) == ([*range(ROWS)], sum(range(ROWS)))
            assert stopped not in strategy.workers
            assert len(strategy.workers) == 2
        finally:
            os.kill(pids[stopped], signal.SIGKILL)
