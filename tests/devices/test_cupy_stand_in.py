"""Tests and benchmarks of GPUs with a stand-in for CuPy: they show how CuPy is called, and nothing about speed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import programs
import pytest
from conftest import TESTS

from daskdist.devices.cupy import CupyDevice

ROOT = TESTS.parent
pytestmark = pytest.mark.skipif(CupyDevice(0).missing() is None, reason="there is a GPU")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    paths = [str(TESTS / "cupy_stand_in"), str(TESTS), str(ROOT)]
    return programs.run(*command, cwd=ROOT, env={"PYTHONPATH": os.pathsep.join(paths)}, timeout=300)


def test_tests_of_gpus_pass() -> None:
    # Leave out the laws of replicas, which other devices test.
    chosen = ("-m", "gpu and not cluster", "-k", "not TestReplica")
    done = run("-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-q", "tests/test_gpu.py", *chosen)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "passed" in done.stdout


def test_one_command_runs_all_measurements(tmp_path: Path) -> None:
    names = ("reducing", "races", "memcheck")
    done = run("benchmarks/gpu_measure.py", "--quick", "--out", str(tmp_path), *(f"--only={name}" for name in names))
    *ends, sanitizer = done.stdout.splitlines()
    assert [f"{name}: passed in" for name in names[:-1]] == [end[: end.index(" in ") + 3] for end in ends], done.stdout
    assert sanitizer.startswith("memcheck: not run: compute-sanitizer is not installed")
    assert done.returncode == 1
    assert "reduce(SUM) of 4 MB" in (tmp_path / "reducing.txt").read_text()
    assert "batches have the sums of their rows" in (tmp_path / "races.txt").read_text()


def test_races_are_looked_for_on_other_devices_too() -> None:
    done = run("benchmarks/gpu_races.py", "--seconds", "1", "--device", "STRICT:0", "--register", "strict_device")
    assert done.returncode == 0, done.stderr


def test_a_wrong_sum_ends_the_search_for_races() -> None:
    broken = (
        "import sys; sys.path.insert(0, 'benchmarks'); import gpu_races, numpy; "
        "gpu_races.on_host = lambda total: numpy.asarray(total._array) + 1; "
        "sys.exit(gpu_races.main(['--seconds', '5', '--device', 'STRICT:0', '--register', 'strict_device']))"
    )
    done = run("-c", broken)
    assert done.returncode == 1
    assert "a batch adds up to" in done.stderr


COUNTS = """
import collections, cupy, numpy as np, daskdist

counts, streams = collections.Counter(), {}

def count(kind, name):
    method = getattr(kind, name)
    def counted(self, *args, **options):
        counts[name] += 1
        result = method(self, *args, **options)
        if name == "record":
            streams[id(result)] = self.ptr
        if name == "wait_event":
            counts["waits for itself"] += streams.get(id(args[0])) == self.ptr
        return result
    setattr(kind, name, counted)

for kind, name in [(cupy.Event, "__init__"), (cupy.Stream, "record"), (cupy.Stream, "wait_event"),
                   (cupy.Stream, "__init__"), (cupy.Stream, "synchronize")]:
    count(kind, name)
strategy = daskdist.MirroredStrategy(["GPU:0"])
rows = daskdist.Dataset.from_tensor_slices(np.zeros((4000, 16), np.float32)).batch(10)
for number, batch in enumerate(strategy.distribute_dataset(rows)):
    strategy.run(lambda x: x * 2, args=(batch,))
    if number == 99:
        counts.clear()
assert counts["waits for itself"] == 0, counts
# Events are used again; one more is created whenever more copies are under way at once than ever before.
assert counts["__init__"] <= 10, counts
# There are two events for each of 300 steps, before and after it, and a few for copies, each of many steps.
assert 600 <= counts["record"] <= 750 and 600 <= counts["wait_event"] <= 750, counts
assert counts["synchronize"] == 0, counts
print("counted")
"""


def test_a_step_takes_two_events_that_were_used_before() -> None:
    done = run("-c", COUNTS)
    assert done.stdout == "counted\n", done.stderr
