"""Loops on replicas that begin again when a worker is lost, from their last checkpoint."""

from __future__ import annotations

import collections
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import mirrored, never_restart_workers, new_cluster
from distributed import Client, Event
from programs import Program

import daskdist
from daskdist import CheckpointManager, Dataset, errors, get_replica_context

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def own_client() -> Iterator[Client]:
    """Return the client of a cluster that no other test uses, since the test will break it."""
    with new_cluster() as client:
        yield client


def loop(iterator, manager, directory, kill_at):
    """Make two passes, with a checkpoint every third step; return the rows of all replicas.

    Replica 1 kills its process at some steps, at each of them only once.
    """
    context = get_replica_context()
    saved = context.restore(manager, iterator=iterator, epoch=0, step=0, rows=np.zeros(0, int))
    step, rows = saved["step"], saved["rows"]
    with (directory / f"begun-{context.replica_id_in_sync_group}").open("a") as file:
        print(step, context.num_replicas_in_sync, file=file)
    for epoch in range(saved["epoch"], 2):
        for batch in iterator:
            step += 1
            rows = np.append(rows, context.all_gather(batch, 0))
            killed = directory / f"killed-{step}"
            if context.replica_id_in_sync_group == 1 and step in kill_at and not killed.exists():
                killed.write_text(str(saved["step"]))
                os.kill(os.getpid(), signal.SIGKILL)
            if step % 3 == 0:
                context.checkpoint(manager, iterator=iterator, epoch=epoch, step=step, rows=rows)
    return rows


def failing(iterator, path):
    """Record the call, and raise an error at the second batch."""
    with Path(path).open("a") as file:
        file.write("called\n")
    next(iterator)
    raise KeyError("mine")


@pytest.mark.cluster
def test_a_loop_begins_again_from_its_last_checkpoint(own_client, tmp_path):
    strategy = daskdist.MultiWorkerMirroredStrategy(own_client)
    distributed = strategy.distribute_dataset(Dataset.range(100).shuffle(100).batch(4))
    with pytest.raises(KeyError, match="mine"):
        strategy.run(failing, args=(distributed, tmp_path / "calls"), restart=3)
    # Each replica has called the function once: its own errors cause no restart.
    assert (tmp_path / "calls").read_text().split() == ["called"] * 2
    # The killed worker is not started again, and so does not take part.
    never_restart_workers(own_client)
    manager = CheckpointManager(tmp_path / "run")
    rows = strategy.run(loop, args=(distributed, manager, tmp_path, [13]), restart=1)
    assert (tmp_path / "killed-13").exists()
    # It began with both replicas, and again from the last checkpoint or the one before with the one that is left.
    attempts = [line.split() for line in (tmp_path / "begun-0").read_text().splitlines()]
    assert attempts in ([["0", "2"], ["12", "1"]], [["0", "2"], ["9", "1"]])
    assert (tmp_path / "begun-1").read_text().split() == ["0", "2"]
    assert collections.Counter(strategy.local_results(rows)[0].tolist()) == dict.fromkeys(range(100), 2)
    strategy.close()


@pytest.mark.cluster
def test_a_loop_during_steps_under_way_begins_again(own_client, tmp_path):
    def step(batch):
        Event("gate").wait(60)
        return len(batch)

    def kill_once(batches):
        num_rows = 0
        for batch in batches:
            num_rows += len(batch)
            if get_replica_context().replica_id_in_sync_group == 1 and not (tmp_path / "killed").exists():
                (tmp_path / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return num_rows

    # The killed worker is not started again, and so does not take part.
    never_restart_workers(own_client)
    gate = Event("gate", client=own_client)
    with daskdist.MultiWorkerMirroredStrategy(own_client) as strategy:
        batches = iter(strategy.distribute_dataset(Dataset.range(8).batch(4)))
        gate.set()
        strategy.local_results(strategy.run(step, args=(next(batches),)))
        gate.clear()
        lengths = strategy.run(step, args=(next(batches),))
        opening = threading.Timer(0.2, gate.set)
        opening.start()
        rows = strategy.run(kill_once, args=(strategy.distribute_dataset(Dataset.range(20).batch(2)),), restart=1)
        assert strategy.local_results(rows) == (20,)
        assert sum(strategy.local_results(lengths)) == 4
        opening.join()


def test_restarts_are_counted():
    strategy = mirrored(2)
    with pytest.raises(errors.ArgumentError, match="restart"):
        strategy.run(lambda: 1, restart=-1)
    assert strategy.local_results(strategy.run(lambda: 1, restart=2)) == (1, 1)


# A program with an endless loop, in which each replica records its steps and every second step saves a checkpoint.
PROGRAM = """
import sys, time
from pathlib import Path
from distributed import Client, Event
import daskdist

def loop(iterator, manager, directory):
    context = daskdist.get_replica_context()
    path = Path(directory) / f"steps-{context.replica_id_in_sync_group}"
    for step, batch in enumerate(iterator):
        with path.open("a") as file:
            file.write(".")
        if step % 2:
            context.checkpoint(manager, iterator=iterator, step=step)
        time.sleep(0.01)

with Client(sys.argv[1]) as client, daskdist.MultiWorkerMirroredStrategy(client) as strategy:
    batches = strategy.distribute_dataset(daskdist.Dataset.range(10**9).batch(4))
    manager = daskdist.CheckpointManager(sys.argv[2] + "/run", keep=2)
    strategy.run(loop, args=(batches, manager, sys.argv[2]))
"""


def replica_threads():
    """Return the threads of replicas in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("daskdist replica")]


def restored_step(iterator, manager):
    """Restore the newest checkpoint, and return its step."""
    step = get_replica_context().restore(manager, iterator=iterator, step=0)["step"]
    assert next(iterator)[0] // 4 == step + 1
    return step


def test_loops_of_a_killed_program_end(client, tmp_path):
    threads_before = sum(map(len, client.run(replica_threads).values()))
    manager = CheckpointManager(tmp_path / "run")
    with Program("-c", PROGRAM, client.scheduler.address, tmp_path) as program:
        deadline = time.monotonic() + 60
        while len(manager.steps) < 2:
            assert time.monotonic() < deadline
            assert program.poll() is None
            time.sleep(0.02)
        program.kill()
        killed_at = time.monotonic()
    while sum(map(len, client.run(replica_threads).values())) > threads_before:
        # It takes 0.03 s on an idle machine.
        assert time.monotonic() < killed_at + 4, "loops continue after their program"
        time.sleep(0.02)
    steps, noted = manager.steps, [path.read_text() for path in sorted(tmp_path.glob("steps-*"))]
    # The next program can start at once, and the killed program's loop saves no more checkpoints.
    with daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        batches = strategy.distribute_dataset(Dataset.range(10**9).batch(4))
        saved = strategy.run(restored_step, args=(batches, manager))
        assert set(map(int, strategy.local_results(saved))) == {2 * steps[-1] + 1}
    assert time.monotonic() < killed_at + 8, "the next program had to wait"
    assert manager.steps == steps
    assert [path.read_text() for path in sorted(tmp_path.glob("steps-*"))] == noted
