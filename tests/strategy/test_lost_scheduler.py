"""Programs whose scheduler is killed: the error says so in time, and a scheduler at the same address is used again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from itertools import chain

import numpy as np
import pytest
from conftest import eventually
from distributed import Client, Scheduler, Worker
from programs import FORKED_WORKERS

import daskdist
from daskdist import Dataset
from daskdist.errors import ClusterError, CollectiveError
from daskdist.execute.callers.cluster_requests import ask_from_worker

# Enough that a pass is not over before the loss is noticed.
_ROWS = 1_000
_BATCH_ROWS = 10
_KILLED_AT = 20
# The error comes as soon as the connection breaks.
_TOLD_WITHIN_S = 15

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(120)]


def cluster(started, number, port="0", *worker_options):
    """Start a scheduler and two workers; return the scheduler's process and address."""
    here, folder = ["--host", "127.0.0.1", "--no-dashboard"], started.folder
    file = folder / f"scheduler-{number}.json"
    started.dask("scheduler", *here, "--port", port, "--scheduler-file", str(file))
    scheduler = started.processes[-1]
    address = json.loads(started.wait_for(file, "}"))["address"]
    for log in start_workers(started, address, *(worker_options or ("--no-nanny",))):
        started.wait_for(log, "Registered to")
    return scheduler, address


def start_workers(started, address, *worker_options):
    """Start two workers; return the files of their messages."""
    options = ["--host", "127.0.0.1", "--no-dashboard", "--nthreads", "1", "--local-directory", str(started.folder)]
    environment = FORKED_WORKERS if "--nanny" in worker_options else {}
    return [started.dask("worker", address, *options, *worker_options, **environment) for _ in range(2)]


def rows_of(strategy, step):
    return np.concatenate(strategy.local_results(step)).tolist()


def in_a_pass(strategy, batches, manager, checkpoint, kill):
    """Look at batches; return the rows of those before the checkpoint."""
    rows = []
    for number, batch in enumerate(batches, 1):
        rows += rows_of(strategy, batch)
        if number == _KILLED_AT // 2:
            manager.save(checkpoint)
            kept = list(rows)
        if number == _KILLED_AT:
            kill()
            yield kept


def in_steps(strategy, batches, manager, checkpoint, kill):
    """Make steps; return the rows of those before the checkpoint."""
    rows = []
    for number, batch in enumerate(batches, 1):
        rows += rows_of(strategy, strategy.run(np.asarray, args=(batch,)))
        if number == _KILLED_AT // 2:
            manager.save(checkpoint)
            kept = list(rows)
        if number == _KILLED_AT:
            kill()
            yield kept


def wait_for_ends(started):
    for process in started.processes:
        process.wait(30)
    started.processes.clear()


@pytest.mark.parametrize(
    ("visit", "options", "workers_first"),
    [(in_a_pass, ("--no-nanny",), False), (in_steps, ("--nanny",), False), (in_steps, ("--no-nanny",), True)],
)
def test_another_scheduler_at_the_address_continues_from_the_checkpoint(
    started, tmp_path, visit, options, workers_first
):
    scheduler, address = cluster(started, 0, "0", *options)
    dataset = Dataset.range(_ROWS).shuffle(100, seed=1).batch(_BATCH_ROWS)
    with Client(address, set_as_default=False) as client:
        strategy = daskdist.MultiWorkerMirroredStrategy(client)
        batches = iter(strategy.distribute_dataset(dataset))
        manager = daskdist.CheckpointManager(str(tmp_path / "checkpoints"))
        checkpoint = daskdist.Checkpoint(batches=batches)
        visited = visit(strategy, batches, manager, checkpoint, scheduler.kill)
        kept = next(visited)
        killed_at = time.monotonic()
        with pytest.raises(ClusterError, match=f"lost the scheduler at {address}.*from a checkpoint"):
            list(visited)
        assert time.monotonic() - killed_at < _TOLD_WITHIN_S
        with pytest.raises(ClusterError, match=f"lost the scheduler at {address}"):
            strategy.local_results(strategy.run(int))
        strategy.close()
        wait_for_ends(started)

        port = address.rpartition(":")[2]
        if workers_first:
            # A supervisor starts workers again as soon as they end. The strategy waits for them and their scheduler.
            start_workers(started, address, *options)
            started.dask("scheduler", "--host", "127.0.0.1", "--no-dashboard", "--port", port)
        else:
            assert cluster(started, 1, port, *options)[1] == address
        with daskdist.MultiWorkerMirroredStrategy(client) as strategy:
            batches = iter(strategy.distribute_dataset(dataset))
            manager.restore(daskdist.Checkpoint(batches=batches))
            rest = list(chain.from_iterable(rows_of(strategy, batch) for batch in batches))
        manager.close()
    assert sorted(kept + rest) == list(range(_ROWS))


def loop_that_kills(pid):
    """Return a loop that kills a process unless it continues from a checkpoint; its result is the rows of all."""

    # A local function, which is sent whole: the workers do not find the modules of tests.
    def loop(batches, manager):
        context = daskdist.get_replica_context()
        saved = context.restore(manager, batches=batches, step=0, rows=np.zeros(0, int))
        step, rows = saved["step"], saved["rows"]
        for batch in batches:
            step, rows = step + 1, np.append(rows, context.all_gather(batch, 0))
            if step == _KILLED_AT and not saved["step"]:
                if context.replica_id_in_sync_group == 0:
                    os.kill(pid, signal.SIGKILL)
                # The loop must not be over before the loss is noticed.
                while True:
                    context.all_gather(batch, 0)
            if step % 5 == 0:
                context.checkpoint(manager, batches=batches, step=step, rows=rows)
        return rows

    return loop


@pytest.mark.parametrize("restart", [0, 2])
def test_a_loop_on_replicas_continues_on_another_scheduler(started, tmp_path, restart):
    scheduler, address = cluster(started, 0)
    dataset = Dataset.range(_ROWS).shuffle(100, seed=1).batch(_BATCH_ROWS)
    manager = daskdist.CheckpointManager(str(tmp_path / "checkpoints"))
    loop = loop_that_kills(scheduler.pid)
    with Client(address, set_as_default=False) as client:
        strategy = daskdist.MultiWorkerMirroredStrategy(client)
        with pytest.raises(ClusterError, match=f"lost the scheduler at {address}.*from a checkpoint"):
            strategy.local_results(
                strategy.run(loop, args=(strategy.distribute_dataset(dataset), manager), restart=restart)
            )
        assert scheduler.wait(10) == -signal.SIGKILL
        strategy.close()
        wait_for_ends(started)

        cluster(started, 1, address.rpartition(":")[2])
        with daskdist.MultiWorkerMirroredStrategy(client) as strategy:
            rows = strategy.run(loop, args=(strategy.distribute_dataset(dataset), manager))
            found = strategy.local_results(rows)[0]
    assert sorted(found.tolist()) == list(range(_ROWS))


def test_failures_that_may_follow_from_the_loss_are_not_raised_by_close(started):
    def fail(x):
        if x:
            raise CollectiveError("replica 1 has left")
        return x

    scheduler, address = cluster(started, 0)
    with Client(address, set_as_default=False) as client:
        strategy = daskdist.MultiWorkerMirroredStrategy(client)
        strategy.local_results(strategy.run(fail, args=(0.0,)))
        strategy.run(fail, args=(1.0,))
        eventually(lambda: not any(worker.num_steps_in_flight for worker in strategy.status().workers))
        # The connections to the workers do not break before the loss of the scheduler is noticed.
        for worker in started.processes[1:]:
            worker.send_signal(signal.SIGSTOP)
        scheduler.kill()
        eventually(lambda: client.status != "running")
        strategy.close()
        for worker in started.processes[1:]:
            worker.kill()


def test_a_worker_that_closes_does_not_say_that_the_scheduler_is_lost():
    def fail(key):
        raise RuntimeError(f"no {key} here")

    async def ask():
        here = {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"}
        async with Scheduler(**here) as scheduler, Worker(scheduler.address, **here) as worker:
            scheduler.handlers["fail"] = fail
            with pytest.raises(RuntimeError, match="no x here"):
                await ask_from_worker(worker, "fail", key="x")
            await worker.close()
            with pytest.raises(ClusterError, match=f"the worker at {worker.address} is closing"):
                await ask_from_worker(worker, "who_has", keys=["x"])

    asyncio.run(asyncio.wait_for(ask(), 60))
