"""Two programs that use the same workers at the same time: each has its own steps, loops, collectives and variables."""

from __future__ import annotations

import subprocess

import pytest
from programs import Program

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

# Both programs have the same names and numbers of everything. Neither continues before the other has come as far.
PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path

from distributed import Client

import daskdist
from daskdist import Dataset, get_replica_context


def meet(folder, name, other, place):
    Path(folder, f"{name}-{place}").touch()
    until = time.monotonic() + 30
    while not (Path(folder, f"{other}-{place}").exists() or Path(folder, "killed").exists()):
        if time.monotonic() > until:
            raise TimeoutError(f"{other} does not come to {place}")
        time.sleep(0.002)


def step(batch, factor, variable):
    variable.assign_add(factor)
    return factor * batch.sum()


def loop(batches, factor, folder, name, other):
    context = get_replica_context()
    total = 0
    for number, batch in enumerate(batches):
        meet(folder, name, other, f"loop-{number}-{context.replica_id_in_sync_group}")
        total += context.all_reduce("SUM", factor * batch.sum())
    return int(total)


def main(address, folder, name, other, factor, kills):
    with Client(address) as client, daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        with strategy.scope():
            variable = daskdist.Variable(0)
        batches = strategy.distribute_dataset(Dataset.range(200).shuffle(50, seed=1).batch(20))
        total = 0
        for number, batch in enumerate(batches):
            meet(folder, name, other, f"step-{number}")
            total += int(strategy.reduce("SUM", strategy.run(step, args=(batch, factor, variable)), axis=None))
        print(total, int(variable.numpy()))
        totals = strategy.run(loop, args=(batches, factor, folder, name, other))
        if kills:
            while not Path(folder, f"{name}-loop-5-1").exists():
                time.sleep(0.002)
            os.kill(os.getpid(), signal.SIGKILL)
        print(*strategy.local_results(totals))


if __name__ == "__main__":
    address, folder, name, other, factor, kills = sys.argv[1:]
    main(address, folder, name, other, int(factor), kills == "True")
"""


@pytest.mark.parametrize("kills", [False, True])
def test_two_programs_on_the_same_workers_do_not_disturb_each_other(client, tmp_path, kills):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    common = path, client.scheduler.address, tmp_path
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with (
        Program(*common, "first", "second", 3, False, **pipes) as first,
        Program(*common, "second", "first", 5, kills, **pipes) as second,
    ):
        out, err = second.communicate(80)
        if kills:
            # The first one waits for the second no more.
            (tmp_path / "killed").touch()
        assert out.splitlines() == ["99500 50", *([] if kills else ["99500 99500"])], err
        out, err = first.communicate(80)
        assert out.splitlines() == ["59700 30", "59700 59700"], err
        assert first.wait() == 0
        assert (second.wait() == 0) is not kills
