"""Calls are completed, even if the program does not wait for them: their side effects happen in order."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import programs
import psutil
import pytest
from conftest import eventually, without_closing
from distributed import Event

import daskdist
from daskdist.strategy.replica.contract import internals_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(100)]
NUM_CALLS = 20


def lines_of(folder: Path) -> dict[str, list[str]]:
    """Return the lines of each file of a folder."""
    return {path.name: path.read_text().split() for path in sorted(folder.iterdir())}


def note(folder, what, gate):
    if gate is not None:
        assert Event(gate).wait(60)
    replica = daskdist.get_replica_context().replica_id_in_sync_group
    with open(Path(folder) / f"{replica}", "a") as file:
        file.write(f"{what}\n")
    return 1


def total(folder, batch):
    return note(folder, int(np.asarray(batch).sum()), None)


@pytest.mark.parametrize("how", ["dropped", "closed", "left"])
def test_calls_of_an_abandoned_strategy(client, tmp_path, how):
    gate = Event(f"calls-{how}", client=client)
    strategy = daskdist.MultiWorkerMirroredStrategy(client)
    batches = iter(strategy.distribute_dataset(daskdist.Dataset.range(8).batch(4)))
    strategy.run(note, args=(str(tmp_path), "first", None))
    strategy.run(total, args=(str(tmp_path), next(batches)))
    strategy.run(note, args=(str(tmp_path), "gate", gate.name))
    for number in range(NUM_CALLS):
        strategy.run(note, args=(str(tmp_path), number, None))
    strategy.run(total, args=(str(tmp_path), next(batches)))
    del batches
    token, backend = internals_of(strategy).token, weakref.ref(internals_of(strategy).backend)
    if how == "dropped":
        del strategy
        eventually(lambda: gc.collect() >= 0 and backend() is None)
        eventually(lambda: set(lines_of(tmp_path)) == {"0", "1"})
        assert client.run_on_scheduler(tokens_in_use, client.id).count(token) == 1
        gate.set()
    elif how == "closed":
        gate.set()
        strategy.close()
        assert [len(value) for value in lines_of(tmp_path).values()] == [NUM_CALLS + 4] * 2
    else:
        gate.set()
        with strategy:
            pass
        assert [len(line) for line in lines_of(tmp_path).values()] == [NUM_CALLS + 4] * 2
    expected = [["first", own, "gate", *map(str, range(NUM_CALLS)), other] for own, other in (("1", "9"), ("5", "13"))]
    eventually(lambda: list(lines_of(tmp_path).values()) == expected)
    # The scheduler keeps nothing of the strategy.
    eventually(lambda: token not in client.run_on_scheduler(tokens_in_use, client.id))


def tokens_in_use(client_id, dask_scheduler):
    plugin = dask_scheduler.plugins["daskdist-steps"]
    return [token for owner, token in plugin.used if owner == client_id]


PROGRAM = """
import os, sys, time
from pathlib import Path
import daskdist
from distributed import Client, LocalCluster

def note(path, number, sleeps=0.02):
    time.sleep(sleeps)
    replica = daskdist.get_replica_context().replica_id_in_sync_group
    with open(Path(path) / f"{replica}", "a") as file:
        file.write(f"{number}\\n")
    return 1

if __name__ == "__main__":
    folder, where, end = sys.argv[1:]
    if where == "threads":
        cluster = LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0"
        )
        client = Client(cluster)
        strategy = daskdist.MultiWorkerMirroredStrategy(client)
    elif where == "own":
        strategy = daskdist.MultiWorkerMirroredStrategy(daskdist.ClusterResolver(num_workers=2))
    else:
        strategy = daskdist.MultiWorkerMirroredStrategy(where)
    pids = strategy.client.run(os.getpid)
    Path(folder).with_name("pids").write_text(" ".join(map(str, pids.values())))
    strategy.run(note, args=(folder, "first", 0.0))
    if end == "raise":
        strategy.run(note, args=(folder, "long", 10_000))
        raise ValueError("mine")
    results = [strategy.run(note, args=(folder, number, 0.02)) for number in range(20)]
    if end != "kept":
        del results
    if end == "dropped":
        del strategy
    if end == "exit":
        sys.exit(3)
"""


@pytest.mark.parametrize(
    ("where", "end"),
    [
        ("remote", "exit"),
        ("own", "kept"),
        ("own", "dropped"),
        ("threads", "dropped"),
    ],
)
def test_calls_of_a_program_that_ends(client, tmp_path, where, end):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folder = tmp_path / "notes"
    folder.mkdir()
    address = client.scheduler.address if where == "remote" else where
    # Clusters that share a directory remove each other's.
    env = {**programs.FORKED_WORKERS, "DASK_TEMPORARY_DIRECTORY": str(tmp_path)}
    done = programs.run(program, folder, address, end, timeout=80, cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (3 if end == "exit" else 0, ""), done.stderr
    assert without_closing(done.stderr) == ""
    assert list(lines_of(folder).values()) == [["first", *map(str, range(NUM_CALLS))]] * 2
    if where == "own":
        pids = map(int, (tmp_path / "pids").read_text().split())
        eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_program_that_fails_waits_for_nothing(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    folder = tmp_path / "notes"
    folder.mkdir()
    done = programs.run(program, folder, "threads", "raise", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: mine"
