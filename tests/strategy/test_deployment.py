"""A cluster as people deploy one: scheduler and workers started from the command line, and a program that connects."""

from __future__ import annotations

import json
import os
from pathlib import Path

import programs
import pytest

import daskdist

PROGRAM = """
import json, sys
import daskdist

files, *places = sys.argv[1:]
# Without an argument, the environment names the cluster.
for where in [[place] for place in places] + [[]]:
    with daskdist.MultiWorkerMirroredStrategy(*where) as strategy:
        ds = daskdist.read_parquet(files, "id").shuffle(8, seed=1).batch(6)
        dist = strategy.distribute_dataset(ds)
        steps = [[piece.tolist() for piece in strategy.local_results(step)] for step in dist]
        total = 0
        for step in dist:
            total += strategy.reduce("SUM", strategy.run(lambda ids: ids.sum(), args=(step,)), axis=None)
        print(json.dumps({
            "scheduler": strategy.client.scheduler.address,
            "replicas": strategy.num_replicas_in_sync,
            "policy": dist.sharding.policy.name,
            "steps": steps,
            "cardinality": dist.cardinality(),
            "total": int(total),
        }))
"""


@pytest.mark.cluster
@pytest.mark.slow
def test_a_cluster_started_from_the_command_line(started, parquet_files, tmp_path):
    paths = parquet_files([9, 4, 7, 5])
    file = tmp_path / "scheduler.json"
    here = ["--host", "127.0.0.1", "--no-dashboard"]
    scheduler = started.dask("scheduler", *here, "--port", "0", "--scheduler-file", str(file))
    address = json.loads(started.wait_for(file, "}"))["address"]
    logs = [
        started.dask(
            "worker",
            address,
            *here,
            "--name",
            name,
            "--nthreads",
            "1",
            "--no-nanny",
            "--local-directory",
            str(tmp_path),
        )
        for name in ("alpha", "beta")
    ]
    for log in logs:
        started.wait_for(log, "Registered to")
    assert address.startswith("tcp://127.0.0.1:")
    started.wait_for(scheduler, "Register worker")

    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    files = str(Path(paths[0]).parent / "*.parquet")
    done = programs.run(program, files, address, file, env={"DASK_SCHEDULER_ADDRESS": address})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for actual in map(json.loads, lines):
        assert actual["scheduler"] == address
        assert actual["replicas"] == 2
        assert actual["policy"] == "FILE"
        assert sorted(row for step in actual["steps"] for piece in step for row in piece) == list(range(25))
        # The first replica has files 0 and 2, the second has files 1 and 3.
        first, second = ({row for step in actual["steps"] for row in step[replica]} for replica in (0, 1))
        assert first == {*range(9), *range(13, 20)}
        assert second == {*range(9, 13), *range(20, 25)}
        assert all(len(piece) <= 3 for step in actual["steps"] for piece in step)
        assert actual["cardinality"] == len(actual["steps"])
        assert actual["total"] == sum(range(25))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: .*No such file.*dask scheduler --scheduler-file"),
        ("", "is not a file that 'dask scheduler --scheduler-file' wrote"),
        ("[]", "it names no address"),
        ('{"id": "Scheduler"}', "it names no address"),
    ],
    ids=["missing", "empty", "list", "no address"],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_an_invalid_scheduler_file(tmp_path, content, words, kind):
    path = tmp_path / "scheduler.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(daskdist.errors.ClusterError, match=words):
        daskdist.MultiWorkerMirroredStrategy(kind(path))


WITHOUT_PLUGIN = """
import logging, sys, daskdist
logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
from distributed import Client
with Client(sys.argv[1]) as client:
    for _ in range(2):
        with daskdist.MultiWorkerMirroredStrategy(client) as strategy:
            print(strategy.local_results(strategy.reduce("SUM", strategy.run(float, args=(1,)), axis=None)))
"""


@pytest.mark.cluster
def test_a_scheduler_that_lacks_daskdist_is_warned_of_once(started, tmp_path):
    without = tmp_path / "without"
    without.mkdir()
    (without / "daskdist.py").write_text("raise ModuleNotFoundError(\"No module named 'daskdist'\")\n")
    here = ["--host", "127.0.0.1", "--no-dashboard"]
    file = tmp_path / "scheduler.json"
    path = os.pathsep.join(filter(None, [str(without), os.environ.get("PYTHONPATH")]))
    place = {"cwd": without, "PYTHONPATH": path, "is_new": True}
    started.dask("scheduler", *here, "--port", "0", "--scheduler-file", str(file), **place)
    address = json.loads(started.wait_for(file, "}"))["address"]
    options = ["--nthreads", "1", "--no-nanny", "--local-directory", str(tmp_path)]
    log = started.dask("worker", address, *here, *options)
    started.wait_for(log, "Registered to")
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_PLUGIN)
    done = programs.run(program, address)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (report,) = [line for line in lines if "cannot note which workers a strategy uses" in line]
    assert "No module named 'daskdist'" in report
    assert "adaptive scaling may close them" in report
    assert "Install the same daskdist where the scheduler runs" in report
    assert lines.count("(1.0,)") == 2 or lines.count("(np.float64(1.0),)") == 2, lines
