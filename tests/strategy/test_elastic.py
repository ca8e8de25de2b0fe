"""Strategies whose number of replicas grows when workers are added."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from conftest import eventually, never_restart_workers, new_cluster, running_workers

import daskdist
from daskdist import Dataset
from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.callers.submit import workers_of
from daskdist.strategy.calls.stream_set import StreamSet

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def rows_of(strategy, distributed, at_step=lambda number: None):
    """Run a function with each batch; return the rows, and the number of replicas in each step."""
    rows, sizes = [], []
    for number, batch in enumerate(distributed):
        at_step(number)
        parts = strategy.local_results(strategy.run(np.asarray, args=(batch,)))
        sizes.append(len(parts))
        rows += np.concatenate(parts).tolist()
    return sorted(rows), sizes


@pytest.mark.parametrize("elastic", [True, False])
def test_new_workers_have_replicas_from_the_next_pass_on(elastic):
    def count_up():
        count.assign_add(np.float64(1.0))
        return weights.read_value().sum()

    with new_cluster(1) as client, daskdist.MultiWorkerMirroredStrategy(client, elastic=elastic) as strategy:
        with strategy.scope():
            weights = daskdist.Variable(np.arange(3.0))
            count = daskdist.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        strategy.run(count_up)
        distributed = strategy.distribute_dataset(Dataset.range(60).shuffle(10, seed=1).batch(6))

        def grow(number):
            if number == 3:
                client.cluster.scale(3)
                client.wait_for_workers(3, timeout=30)

        assert rows_of(strategy, distributed, grow) == (list(range(60)), [1] * 10)
        assert strategy.num_replicas_in_sync == 1
        num_replicas = 3 if elastic else 1
        assert rows_of(strategy, distributed) == (list(range(60)), [num_replicas] * 10)
        assert strategy.num_replicas_in_sync == num_replicas
        assert strategy.local_results(strategy.run(count_up)) == (3.0,) * num_replicas
        assert float(count) == 1.0 + num_replicas


def test_new_workers_take_part_later_if_one_of_them_is_lost(monkeypatch):
    open_streams, killed = StreamSet.open, []

    def hooked_open(streams, group, workers):
        if not killed:
            killed.append(workers[0])
            os.kill(streams.client.run(os.getpid, workers=killed)[killed[0]], signal.SIGKILL)
            eventually(lambda: killed[0] not in workers_of(streams.client))
        open_streams(streams, group, workers)

    with new_cluster(1) as client, daskdist.MultiWorkerMirroredStrategy(client, elastic=True) as strategy:
        distributed = strategy.distribute_dataset(Dataset.range(60).batch(6))
        client.cluster.scale(3)
        eventually(lambda: len(running_workers(client)) == 3)
        monkeypatch.setattr(StreamSet, "open", hooked_open)
        assert rows_of(strategy, distributed) == (list(range(60)), [1] * 10)
        assert killed
        eventually(lambda: len(running_workers(client)) == 3)
        assert rows_of(strategy, distributed) == (list(range(60)), [3] * 10)


def test_a_loop_that_begins_again_takes_new_workers(tmp_path):
    def loop(batches, manager):
        context = daskdist.get_replica_context()
        saved = context.restore(manager, batches=batches, step=0, rows=np.zeros(0, int))
        step, rows, begun = saved["step"], saved["rows"], saved["step"]
        for batch in batches:
            step, rows = step + 1, np.append(rows, context.all_gather(batch, 0))
            if step == 4:
                context.checkpoint(manager, batches=batches, step=step, rows=rows)
                return rows, begun
        return rows, begun

    with new_cluster(1) as client, daskdist.MultiWorkerMirroredStrategy(client, elastic=True) as strategy:
        distributed = strategy.distribute_dataset(Dataset.range(60).shuffle(10, seed=1).batch(6))
        manager = daskdist.CheckpointManager(str(tmp_path / "checkpoints"))
        strategy.local_results(strategy.run(loop, args=(distributed, manager)))
        client.cluster.scale(2)
        client.wait_for_workers(2, timeout=30)
        rows, begun = zip(*strategy.local_results(strategy.run(loop, args=(distributed, manager))), strict=True)
    assert begun == (4, 4)
    assert [sorted(each.tolist()) for each in rows] == [list(range(60))] * 2


def test_a_loop_that_is_made_again_after_a_loss_takes_new_workers(tmp_path):
    def wait_for(path):
        until = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < until
            time.sleep(0.01)

    def loop(batches, manager, folder):
        context = daskdist.get_replica_context()
        saved = context.restore(manager, batches=batches, step=0, rows=np.zeros(0, int))
        step, rows, begun = saved["step"], saved["rows"], saved["step"]
        for batch in batches:
            step, rows = step + 1, np.append(rows, context.all_gather(batch, 0))
            if step == 4:
                context.checkpoint(manager, batches=batches, step=step, rows=rows)
            if step == 6 and not begun and context.replica_id_in_sync_group == 1:
                manager.wait()
                (folder / "step 6").touch()
                wait_for(folder / "grown")
                os.kill(os.getpid(), signal.SIGKILL)
        return rows, begun

    with new_cluster(2) as client, daskdist.MultiWorkerMirroredStrategy(client, elastic=True) as strategy:
        # The killed worker is not started again, and so does not take part.
        never_restart_workers(client)
        first, second = strategy.workers

        def grow():
            wait_for(tmp_path / "step 6")
            client.cluster.scale(4)
            client.wait_for_workers(4, timeout=30)
            (tmp_path / "grown").touch()

        growing = threading.Thread(target=grow)
        growing.start()
        distributed = strategy.distribute_dataset(Dataset.range(60).shuffle(10, seed=1).batch(6))
        manager = daskdist.CheckpointManager(str(tmp_path / "checkpoints"))
        results = strategy.run(loop, args=(distributed, manager, tmp_path), restart=1)
        rows, begun = zip(*strategy.local_results(results), strict=True)
        growing.join(30)
        assert begun == (4, 4, 4)
        assert [sorted(each.tolist()) for each in rows] == [list(range(60))] * 3
        assert first in strategy.workers
        assert second not in strategy.workers
        assert strategy.num_replicas_in_sync == 3


def test_a_strategy_on_given_workers_cannot_grow():
    for options in ({"num_replicas_per_worker": {"0": 1}}, {"num_replicas_per_worker": [1]}):
        with pytest.raises(ArgumentError, match="elastic is for any number of workers"):
            daskdist.MultiWorkerMirroredStrategy("tcp://127.0.0.1:1", elastic=True, **options)
    with pytest.raises(ArgumentError, match="elastic is 1; give True or False"):
        daskdist.MultiWorkerMirroredStrategy("tcp://127.0.0.1:1", elastic=1)


def test_a_step_before_new_workers_is_not_counted_twice_if_only_they_are_left():
    def step(batch):
        total.assign_add(np.float64(batch.sum()))
        return np.full(100_000, batch.sum())

    with new_cluster(2) as client, daskdist.MultiWorkerMirroredStrategy(client, elastic=True) as strategy:
        with strategy.scope():
            total = daskdist.Variable(0.0, aggregation="SUM")
        distributed = strategy.distribute_dataset(Dataset.range(12).batch(6))
        value = strategy.run(step, args=(next(iter(distributed)),)).values[0]
        client.cluster.scale(3)
        eventually(lambda: len(running_workers(client)) == 3)
        iter(distributed)
        assert strategy.num_replicas_in_sync == 3
        never_restart_workers(client)
        pids = client.run(os.getpid)
        before = [pids[replica.worker] for replica in strategy.replicas[:2]]
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        # It is sent, but not made, as the workers end.
        doubled = value * 2
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match="lost"):
            np.asarray(doubled)
        eventually(lambda: strategy.num_replicas_in_sync == 1)
        assert float(total) == 15.0
