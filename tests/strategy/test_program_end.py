"""Programs that end with work under way: they end soon, with their own exit code and without further output."""

from __future__ import annotations

import os
import signal
import tempfile

import programs
import psutil
import pytest
from conftest import eventually, without_closing

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

HEAD = """
import os, signal, sys, threading, time
import numpy as np
import daskdist
from distributed import Client, LocalCluster

# Programs started in the background ignore this signal by default.
signal.signal(signal.SIGINT, signal.default_int_handler)

def slow(x):
    time.sleep(0.0002)
    return x

def step(x):
    return x.sum()

def slow_step(x):
    time.sleep(0.2)
    return x.sum()

def sleep(seconds):
    time.sleep(seconds)
    return seconds

def loop(steps):
    for x in steps:
        return x.sum()

def endless():
    number = 0
    while True:
        yield np.int64(number)
        number += 1

def start(processes):
    global cluster, client
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, processes=processes, dashboard_address=":0")
    client = Client(cluster)
    return daskdist.MultiWorkerMirroredStrategy(client)

# Nothing warns of a policy that the program gives.
by_data = daskdist.Options(auto_shard_policy="DATA")
batches = daskdist.Dataset.range(20_000).shuffle(100).batch(8).repeat().with_options(by_data)
generated = daskdist.Dataset.from_generator(endless, daskdist.TensorSpec((), "int64")).batch(4).with_options(by_data)

if __name__ == "__main__":
"""
EMBEDDED = 'strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])'
THREADS = "strategy = start(processes=False)"
PROCESSES = "strategy = start(processes=True)"
OWN = """
strategy = daskdist.MultiWorkerMirroredStrategy(daskdist.ClusterResolver(num_workers=2))
print(*strategy.client.run(os.getpid).values(), file=open("pids", "w"))
"""
ITERATORS = """
iterators = [iter(strategy.distribute_dataset(each)) for each in (batches, generated, batches.map(slow))]
for iterator in iterators:
    for _ in range(2):
        next(iterator)
"""
STEPS = "results = [strategy.run(step, args=(next(iterators[0]),)) for _ in range(20)]"


# Python drops an interrupt that arrives while the main thread finalizes an object, such as a future of Dask, or runs a
# callback of the garbage collector, and the program would continue. So the main thread waits nearly all of the time.
def interrupted(kill):
    """Return a program that a call interrupts while steps are under way."""
    waiting = "for x in iterators[0]:\n    strategy.local_results(strategy.run(slow_step, args=(x,)))"
    return f"{STEPS}\nthreading.Timer(0.3, lambda: {kill}).start()\n{waiting}"


# name -> (the program, its exit code, the last line that it prints as an error).
PROGRAMS = {
    "embedded, an exception": (
        f"{EMBEDDED}\n{ITERATORS}\nstrategy.run(step, args=(next(iterators[0]),))\nraise ValueError('mine')",
        1,
        "ValueError: mine",
    ),
    "embedded, exit in a loop": (
        f"{EMBEDDED}\n{ITERATORS}\nplain = iter(batches.map(slow))\nnext(plain)\nsys.exit(3)",
        3,
        None,
    ),
    "threads, iterators and steps": (f"{THREADS}\n{ITERATORS}\n{STEPS}", 0, None),
    "threads, an exception in a with block": (
        f"with {THREADS.partition(' = ')[2]} as strategy:\n"
        + "".join(f"    {line}\n" for line in ITERATORS.splitlines())
        + "    raise ValueError('mine')",
        1,
        "ValueError: mine",
    ),
    "threads, an interrupt": (
        f"{THREADS}\n{ITERATORS}\n{interrupted('os.kill(os.getpid(), signal.SIGINT)')}",
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
    "processes, in the middle of a step": (
        f"{PROCESSES}\n{ITERATORS}\nloops = strategy.run(loop, args=(strategy.distribute_dataset(batches),))\n"
        f"{STEPS}\nlast = [strategy.run(slow_step, args=(next(iterators[0]),)) for _ in range(2)]\nsys.exit(3)",
        3,
        None,
    ),
    "processes, the client closed first": (f"{PROCESSES}\n{ITERATORS}\n{STEPS}\nclient.close()", 0, None),
    "processes, an interrupt of all": (
        f"{PROCESSES}\n{ITERATORS}\n{interrupted('os.killpg(0, signal.SIGINT)')}",
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
    "its own cluster, an exception in the middle of a step": (
        f"{OWN}\n{ITERATORS}\nfor seconds in (0.0, 10_000.0):\n    strategy.run(sleep, args=(seconds,))\n"
        "raise ValueError('mine')",
        1,
        "ValueError: mine",
    ),
}


# Dask also warns of it if the machine is busy and the directory is in memory.
SLOW_DISK = "ignore:Creating scratch directories is taking:UserWarning"


def ended(name, folder):
    """Run a program, and return its exit code and what it printed."""
    path = folder / "program.py"
    path.write_text(HEAD + "".join(f"    {line}\n" for line in PROGRAMS[name][0].splitlines()))
    printed = path.with_suffix(".err")
    # Clusters that share a directory remove each other's.
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with open(printed, "w") as file, tempfile.TemporaryDirectory(dir=memory) as scratch:
        environment = {**programs.FORKED_WORKERS, "DASK_TEMPORARY_DIRECTORY": scratch, "PYTHONWARNINGS": SLOW_DISK}
        # A separate process group, as these programs interrupt their whole group.
        options = {"start_new_session": True, "cwd": folder, "env": environment, "timeout": 100}
        done = programs.run(path, stdout=file, stderr=file, **options)
    return done.returncode, printed.read_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_only_its_own_output_at_its_end(name, tmp_path):
    _, code, last = PROGRAMS[name]
    actual, printed = ended(name, tmp_path)
    if (pids := tmp_path / "pids").exists():
        eventually(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids.read_text().split()))
    printed = without_closing(printed)
    lines = printed.splitlines()
    if last is None:
        assert lines == []
    else:
        # There is one traceback, that of the program's own error.
        assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", last), printed
        assert printed.count("Traceback") == 1, printed
        assert "distributed." not in printed.replace("site-packages/distributed", ""), printed
    assert actual == code
