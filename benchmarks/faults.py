"""Passes in which workers are killed, and programs that are killed and resumed: rows lost, rows doubled, recovery.

    python benchmarks/faults.py [--only NAME ...] [--size small] [--seconds N] [--seed N] [--json] [--check]
                                [--peer tf|ray --python PATH]

``workers``: passes over 2 and 3 workers with each sharding policy, in a plain loop, in a captured function and in a
loop on replicas; in each a random worker is killed before a random step. ``programs``: programs that are killed with
SIGKILL at a random moment, and resumed from their checkpoint by another. ``schedulers``: passes in which the scheduler
is killed in a random step, and started again with its workers at the same address, over one dataset and over datasets
of a function in turn. ``states``: sizes of positions at
90 % of a pass, and the time from there to the first batch. ``memory``: a pass over much more data than workers with
little memory can hold; a worker that exceeds its limit is lost. Combinations take turns until the time is up. Runs of a
short time with different seeds have different faults, so that several of them are worth one long run.

With ``--peer``, a worker is killed in the middle of a pass of another library instead, in an environment of its own,
and in one of ours over the same rows, which take some milliseconds each.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import dask
import numpy as np
from distributed import Client, LocalCluster
from measure import MIB, Figure, arguments, measured, report
from peers.serving import COSTLY_PRODUCTS, COSTLY_SIZE

import daskdist
from daskdist import Dataset, Options
from daskdist.testing import Fault, VisitationReport, verify_visitation


@dataclass(frozen=True)
class Size:
    """The amounts of work.

    Parameters
    ----------
    seconds
        The time for passes with killed workers, and again for killed programs and for killed schedulers.
    num_passes, num_programs
        The most passes, and the most programs, or schedulers for each kind of dataset.
    num_rows, num_buffered
        The rows of a dataset whose positions are measured, and of its shuffle buffer.
    times_memory
        The size of a dataset, in units of the workers' memory limit.
    num_peer_rows
        The rows of a pass that is compared with another library's.
    seed
        The seed of the moments at which workers and programs are killed.
    """

    seconds: float = 600.0
    num_passes: int = 1_800
    num_programs: int = 100
    num_rows: int = 4_000_000
    num_buffered: int = 1_000_000
    times_memory: float = 20.0
    num_peer_rows: int = 2_000
    seed: int = 27


SIZES: Final = {"full": Size(), "small": Size(20.0, 1, 1, 40_000, 10_000, 1.4, 400)}

_ROWS: Final = 4_000
_BATCH_ROWS: Final = 50
_NUM_STEPS: Final = _ROWS // _BATCH_ROWS
_NUM_FILES: Final = 6
_SAVE_EVERY: Final = 5
# A pass that takes longer counts as hanging.
_HANGS_AFTER_S: Final = 60.0
# The memory limit of workers with little memory, and the size of a row; a tenth of the limit is shuffled at a time.
_LIMIT_BYTES: Final = 300 * MIB
_ROW_BYTES: Final = 10_000
# After this time since a worker ended, a local cluster gives the worker up if it is not running at that moment, even if
# it was started again meanwhile and killed once more.
_RESTARTS_WORKERS: Final = {"distributed.deploy.lost-worker-timeout": "1h"}
# The clusters that several parts use, which end with the program.
_CLUSTERS: Final = contextlib.ExitStack()
_LOOPS: Final = ("plain", "function", "replicas")
_POLICIES: Final = ("FILE", "DATA", "OFF")


@dataclass
class Outcomes:
    """The outcomes of the passes of one combination."""

    reports: list[VisitationReport] = field(default_factory=list)
    num_hangs: int = 0

    def figures(self, name: str) -> Iterator[Figure]:
        """Return the share of complete passes, and text about lost rows."""
        num_passes = len(self.reports) + self.num_hangs
        gaps = [each.longest_gap_s for each in self.reports if each.error is None]
        told = {each.error for each in self.reports if each.error is not None}
        note = (
            f"{num_passes} passes: {sum(len(each.lost) for each in self.reports)} rows lost, "
            f"{sum(len(each.doubled) for each in self.reports)} doubled, {self.num_hangs} hangs, "
            f"{sum(len(each.failed_steps) for each in self.reports)} failed steps"
        )
        if gaps:
            note += f"; longest gap {median(gaps):.1f} s in the median, {max(gaps):.1f} s at most"
        missed = {each for report in self.reports for each in report.missed_faults}
        if missed:
            note += f"; faults that did not come: {'; '.join(sorted(missed))[:300]}"
        if told:
            note += f"; ended by {'; '.join(sorted(told))[:300]}"
        num_complete = sum(each.error is None for each in self.reports)
        yield Figure(f"{name}: complete", 100 * num_complete / num_passes, "%", target=100, note=note)


@functools.cache
def cluster_of(num_workers: int) -> LocalCluster:
    """Return a cluster whose workers have little memory; it is started only once, as that takes seconds."""
    _CLUSTERS.enter_context(dask.config.set(_RESTARTS_WORKERS))
    return _CLUSTERS.enter_context(
        LocalCluster(
            n_workers=num_workers,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            memory_limit=_LIMIT_BYTES,
            silence_logs=50,
        )
    )


@contextlib.contextmanager
def client_of(num_workers: int) -> Iterator[Client]:
    """Connect to the cluster with this number of workers, once all of them are there."""
    with Client(cluster_of(num_workers), set_as_default=False) as client:
        client.wait_for_workers(num_workers, timeout=30)
        yield client


def numbers_in(directory: Path) -> Dataset:
    """Write the rows as files, so that each policy can divide them."""
    for number in range(_NUM_FILES):
        rows = np.arange(number * _ROWS // _NUM_FILES, (number + 1) * _ROWS // _NUM_FILES)
        np.save(directory / f"{number}.npy", rows)
    return daskdist.read_npy(str(directory / "*.npy"))


def verified(client: Client, num_workers: int, dataset: Dataset, loop: Any, chance: random.Random) -> Any:
    """Return the report of one pass with a killed worker; None if it hangs."""
    fault = Fault("kill", chance.randrange(1, _NUM_STEPS - 1), chance.randrange(num_workers))
    reports: list[VisitationReport] = []

    def verify() -> None:
        with daskdist.MultiWorkerMirroredStrategy(client) as strategy:
            reports.append(verify_visitation(dataset, strategy, [fault], loop=loop))

    thread = threading.Thread(target=verify, name="pass", daemon=True)
    thread.start()
    thread.join(_HANGS_AFTER_S)
    return reports[0] if reports else None


def workers(size: Size) -> Iterator[Figure]:
    """Measure passes in which a worker is killed."""
    chance, end = random.Random(size.seed), time.monotonic() + size.seconds
    combinations = list(itertools.product((2, 3), _POLICIES, _LOOPS))
    if size.num_passes < len(combinations):
        combinations = [(2, "DATA", loop) for loop in _LOOPS]
    outcomes = {combination: Outcomes() for combination in combinations}
    with tempfile.TemporaryDirectory() as directory:
        rows = numbers_in(Path(directory)).map(np.abs).shuffle(500, seed=1).batch(_BATCH_ROWS)
        turns = range(max(size.num_passes // len(combinations), 1))
        for _, combination in itertools.product(turns, combinations):
            num_workers, policy, loop = combination
            dataset = rows.with_options(Options(auto_shard_policy=policy))
            with client_of(num_workers) as client:
                outcome = verified(client, num_workers, dataset, loop, chance)
            if outcome is None:
                outcomes[combination].num_hangs += 1
                cluster_of.cache_clear()
            else:
                outcomes[combination].reports.append(outcome)
            if time.monotonic() > end:
                break
    reports = [each for outcome in outcomes.values() for each in outcome.reports]
    for (num_workers, policy, loop), outcome in outcomes.items():
        if outcome.reports or outcome.num_hangs:
            yield from outcome.figures(f"{num_workers} workers, {policy}, {loop}")
    gaps = [each.longest_gap_s for each in reports]
    num_hangs = sum(outcome.num_hangs for outcome in outcomes.values())
    yield Figure("passes with a killed worker", sum(bool(each.faults) for each in reports), "passes")
    num_missed = sum(len(each.missed_faults) for each in reports)
    yield Figure("faults that did not come", num_missed, "faults", target=0, bound="most")
    yield Figure("rows lost", sum(len(each.lost) for each in reports), "rows", target=0, bound="most")
    yield Figure("rows doubled", sum(len(each.doubled) for each in reports), "rows", target=0, bound="most")
    yield Figure("hangs", num_hangs, "passes", target=0, bound="most")
    yield Figure("longest gap between steps", max(gaps, default=0.0), "s", target=5, bound="most")


def program(directory: Path, address: str) -> None:
    """Iterate and note the rows of each step; save a checkpoint every few steps, and continue from the last one."""
    manager = daskdist.CheckpointManager(str(directory / "checkpoints"))
    with Client(address, set_as_default=False) as client, daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        rows = Dataset.range(_ROWS).shuffle(500, seed=1).batch(_BATCH_ROWS)
        batches = iter(strategy.distribute_dataset(rows))
        checkpoint = daskdist.Checkpoint(batches=batches, step=0)
        manager.restore(checkpoint)
        step = int(checkpoint.step)
        attempt = len(list(directory.glob("rows-*")))
        with (directory / f"rows-{attempt}").open("w") as notes:
            print(json.dumps([step, []]), file=notes, flush=True)
            for batch in batches:
                step += 1
                parts = strategy.local_results(strategy.run(np.asarray, args=(batch,)))
                print(json.dumps([step, np.concatenate(parts).tolist()]), file=notes, flush=True)
                if step % _SAVE_EVERY == 0:
                    checkpoint.step = step
                    manager.save(checkpoint)
        manager.close()
    (directory / "over").touch()


def rows_of_programs(directory: Path) -> Counter[int]:
    """Return the rows up to the step from which the next program continued."""
    attempts = [
        [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(directory.glob("rows-*"))
    ]
    firsts = [notes[0][0] for notes in attempts if notes]
    lasts = [*firsts[1:], _NUM_STEPS]
    kept = [step[1] for notes, last in zip(attempts, lasts, strict=True) for step in notes[1:] if step[0] <= last]
    return Counter(itertools.chain.from_iterable(kept))


def killed_program(address: str, chance: random.Random) -> Counter[int]:
    """Return the rows visited by a program that is killed and by one that resumes from its checkpoint."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        command = [sys.executable, __file__, "--program", name, address]
        first = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        kill_at, notes = chance.randrange(_SAVE_EVERY + 1, _NUM_STEPS - 1), directory / "rows-0"
        end = time.monotonic() + _HANGS_AFTER_S
        while first.poll() is None and time.monotonic() < end:
            if notes.exists() and notes.read_text().count("\n") > kill_at:
                break
            time.sleep(0.001)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        subprocess.run(command, check=True, timeout=_HANGS_AFTER_S, stderr=subprocess.DEVNULL)
        return rows_of_programs(directory)


def programs(size: Size) -> Iterator[Figure]:
    """Measure programs that are killed, and resumed by others."""
    chance, end, expected = random.Random(size.seed), time.monotonic() + size.seconds, Counter(range(_ROWS))
    num_lost = num_doubled = num_killed = 0
    address = cluster_of(2).scheduler_address
    while num_killed < size.num_programs and (time.monotonic() < end or not num_killed):
        rows = killed_program(address, chance)
        num_killed += 1
        num_lost += (expected - rows).total()
        num_doubled += (rows - expected).total()
    yield Figure("killed programs", num_killed, "programs")
    yield Figure("rows lost by killed programs", num_lost, "rows", target=0, bound="most")
    yield Figure("rows doubled by killed programs", num_doubled, "rows", target=0, bound="most")


class Deployment:
    """A scheduler and two workers in processes, which are started again at the same address."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "scheduler.json"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.address = ""
        self._start("0")
        end = time.monotonic() + _HANGS_AFTER_S
        while not self.address and time.monotonic() < end:
            time.sleep(0.05)
            if self._file.exists() and (text := self._file.read_text()).endswith("}"):
                self.address = json.loads(text)["address"]
        self._start_workers()

    def _start(self, port: str) -> None:
        self._dask("scheduler", "--port", port, "--scheduler-file", str(self._file))

    def _start_workers(self) -> None:
        for _ in range(2):
            self._dask("worker", self.address, "--nthreads", "1", "--no-nanny")

    def _dask(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "dask", *arguments, "--host", "127.0.0.1", "--no-dashboard"]
        folder = self._file.parent
        self._processes.append(subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL))

    def restart(self) -> None:
        """Kill the scheduler, and start another one and workers."""
        self._processes[0].kill()
        # Without it, the workers end.
        for process in self._processes:
            process.wait(_HANGS_AFTER_S)
        self._processes.clear()
        self._start(self.address.rpartition(":")[2])
        self._start_workers()

    def close(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            process.kill()
            process.wait()


def schedulers(size: Size) -> Iterator[Figure]:
    """Measure passes in which the scheduler is killed."""
    chance, end, expected = random.Random(size.seed), time.monotonic() + size.seconds, Counter(range(_ROWS))
    num_lost = num_doubled = 0
    gaps: list[float] = []

    def share(context: daskdist.InputContext) -> Dataset:
        rows = Dataset.range(_ROWS).shard(context.num_input_pipelines, context.input_pipeline_id)
        return rows.map(np.abs).shuffle(500).batch(context.get_per_replica_batch_size(_BATCH_ROWS))

    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.closing(Deployment(Path(name))) as deployment,
        Client(deployment.address, set_as_default=False) as client,
        daskdist.MultiWorkerMirroredStrategy(daskdist.ClusterResolver(client, num_workers=2)) as strategy,
    ):
        rows = Dataset.range(_ROWS).map(np.abs).shuffle(500, seed=1).batch(_BATCH_ROWS)
        kinds = [strategy.distribute_dataset(rows), strategy.distribute_datasets_from_function(share)]
        while len(gaps) < len(kinds) * size.num_programs and (time.monotonic() < end or len(gaps) < len(kinds)):
            kill_at, times = chance.randrange(1, _NUM_STEPS - 1), [time.monotonic()]
            killing = threading.Thread(target=deployment.restart, name="kill")
            visited: Counter[int] = Counter()
            for number, batch in enumerate(kinds[len(gaps) % len(kinds)]):
                step = strategy.run(np.asarray, args=(batch,))
                if number == kill_at:
                    killing.start()
                for part in strategy.local_results(step):
                    visited.update(part.tolist())
                times.append(time.monotonic())
            killing.join()
            num_lost += (expected - visited).total()
            num_doubled += (visited - expected).total()
            gaps.append(max(after - before for before, after in itertools.pairwise(times)))
    yield Figure("passes with a killed scheduler", len(gaps), "passes")
    yield Figure("rows lost with killed schedulers", num_lost, "rows", target=0, bound="most")
    yield Figure("rows doubled with killed schedulers", num_doubled, "rows", target=0, bound="most")
    yield Figure("longest gap with a killed scheduler", max(gaps), "s", note=f"{median(gaps):.1f} s in the median")


def states(size: Size) -> Iterator[Figure]:
    """Measure positions at 90 % of a pass."""
    rows = Dataset.range(size.num_rows)
    pipelines = {
        "no shuffle": (rows.map(np.abs).batch(1_000), 10_000),
        f"a shuffle buffer of {size.num_buffered:,}": (rows.shuffle(size.num_buffered, seed=1).batch(1_000), 100_000),
        "a shuffle of all rows": (rows.global_shuffle(seed=1).batch(1_000), 10_000),
    }
    strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    for name, (dataset, most_bytes) in pipelines.items():
        distributed = strategy.distribute_dataset(dataset)
        begun_at = time.perf_counter()
        batches = iter(distributed)
        next(batches)
        first_s = time.perf_counter() - begun_at
        for _ in range(size.num_rows * 9 // 10 // 1_000 - 1):
            next(batches)
        checkpoint = daskdist.Checkpoint(batches=batches)
        with tempfile.TemporaryDirectory() as directory:
            path = str(Path(directory) / "state.ckpt")
            checkpoint.save(path)
            num_bytes = os.path.getsize(path)
            begun_at = time.perf_counter()
            other = iter(distributed)
            daskdist.Checkpoint(batches=other).restore(path)
            next(other)
            resumed_s = time.perf_counter() - begun_at
        yield Figure(f"{name}: checkpoint at 90 %", num_bytes, "bytes", target=most_bytes, bound="most")
        yield Figure(
            f"{name}: first batch after it", 1e3 * resumed_s, "ms", 1e3 * first_s, "of a pass", 2, "ratio", "most"
        )


def large_row(number: int) -> Any:
    return np.full(_ROW_BYTES // 8, float(number))


def numbers_of(rows: Any) -> Any:
    return rows[:, 0].astype(int)


def most_memory(dask_worker: Any) -> int:
    """Return the most memory that the process of a worker has had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def memory(size: Size) -> Iterator[Figure]:
    """Measure a pass over much more data than the workers can hold."""
    num_rows = int(size.times_memory * _LIMIT_BYTES / _ROW_BYTES)
    rows = Dataset.range(num_rows).map(large_row).shuffle(_LIMIT_BYTES // _ROW_BYTES // 10, seed=1).batch(128)
    visited: Counter[int] = Counter()
    with client_of(2) as client, daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        first_workers = set(client.run(os.getpid).values())
        begun_at = time.perf_counter()
        for batch in strategy.distribute_dataset(rows):
            for part in strategy.local_results(strategy.run(numbers_of, args=(batch,))):
                visited.update(part.tolist())
        seconds = time.perf_counter() - begun_at
        num_lost = len(first_workers - set(client.run(os.getpid).values()))
        most_bytes = max(client.run(most_memory).values())
    expected = Counter(range(num_rows))
    note = f"{size.times_memory:g} times the memory limit"
    yield Figure("a pass over large data", num_rows * _ROW_BYTES / MIB / seconds, "MiB/s", note=note)
    yield Figure("the most memory of a worker", most_bytes / MIB, "MiB", target=_LIMIT_BYTES / MIB, bound="most")
    yield Figure("workers lost for memory", num_lost, "workers", target=0, bound="most")
    yield Figure("rows of large data lost", (expected - visited).total(), "rows", target=0, bound="most")
    yield Figure("rows of large data doubled", (visited - expected).total(), "rows", target=0, bound="most")


BENCHMARKS: Final[dict[str, Callable[[Size], Iterator[Figure]]]] = {
    "workers": workers,
    "programs": programs,
    "schedulers": schedulers,
    "states": states,
    "memory": memory,
}


def expensive(rows: Any) -> Any:
    """Return rows after products of matrices that take some milliseconds a row."""
    matrix = np.full((COSTLY_SIZE, COSTLY_SIZE), 1 / COSTLY_SIZE, np.float32)
    for _ in range(len(rows) * COSTLY_PRODUCTS):
        matrix = matrix @ matrix
    return rows + np.int64(matrix[0, 0] * 0.5)


# Library -> the script of its passes, and for each of them the policy of ours.
_PEERS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "ray": (
        "ray_faults.py",
        {
            "Ray Data, iter_batches, a task's process killed": "DATA",
            "Ray Data, streaming_split, a consumer killed": "DATA",
            "Ray Train, a worker killed": "DATA",
        },
    ),
    "tf": (
        "tensorflow_faults.py",
        {
            "TensorFlow's service, DYNAMIC, not restarted": "DATA",
            "TensorFlow's service, DYNAMIC, restarted": "DATA",
            "TensorFlow's service, OFF, restarted": "OFF",
        },
    ),
}
_PEER_BATCH_ROWS: Final = 20


def report_of_pass(size: Size, policy: str, kill_at: int) -> VisitationReport:
    """Return the report of a pass over rows that take some time, on two workers, one of which is killed."""
    rows = Dataset.range(size.num_peer_rows).batch(_PEER_BATCH_ROWS).map(expensive)
    with client_of(2) as client, daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        dataset = rows.with_options(Options(auto_shard_policy=policy))
        return verify_visitation(dataset, strategy, [Fault("kill", kill_at, 0)])


def against(size: Size, key: str, python: str) -> Iterator[Figure]:
    """Compare the rows that passes of another library lose and double when a worker is killed with those of ours."""
    script, policies = _PEERS[key]
    kill_at = size.num_peer_rows // _PEER_BATCH_ROWS // 4
    ours = {policy: report_of_pass(size, policy, kill_at) for policy in dict.fromkeys(policies.values())}
    numbers = map(str, (size.num_peer_rows, _PEER_BATCH_ROWS, kill_at))
    command = [python, str(Path(__file__).with_name("peers") / script), *numbers]
    # The process must not find the packages of this environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    outcomes = json.loads(done.stdout.splitlines()[-1])
    for name, policy in policies.items():
        theirs, mine = outcomes[name], ours[policy]
        expected = Counter(dict.fromkeys(range(size.num_peer_rows), theirs["num_times"]))
        visited = Counter(theirs["visited"])
        note = f"ended by {theirs['error']}" if theirs["error"] else ""
        num_lost, num_doubled = (expected - visited).total(), (visited - expected).total()
        yield Figure(f"{policy}: rows lost", len(mine.lost), "rows", num_lost, name, 0, bound="most", note=note)
        yield Figure(f"{policy}: rows doubled", len(mine.doubled), "rows", num_doubled, name, 0, bound="most")
        yield Figure(f"{policy}: longest gap", mine.longest_gap_s, "s", theirs["longest_gap_s"], name)


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, BENCHMARKS, SIZES)
    parser.add_argument("--seconds", type=float, help="the time for passes with killed workers, and for programs")
    parser.add_argument("--seed", type=int, help="the seed of the moments at which workers and programs are killed")
    parser.add_argument("--program", nargs=2, metavar=("DIRECTORY", "ADDRESS"), help="be the program that is killed")
    parser.add_argument("--peer", choices=list(_PEERS), help="kill workers of this library instead, and ours beside it")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has it; this one by default")
    options = parser.parse_args(argv)
    if options.program is not None:
        program(Path(options.program[0]), options.program[1])
        return 0
    size = SIZES[options.size]
    if options.seconds is not None:
        size = replace(size, seconds=options.seconds)
    if options.seed is not None:
        size = replace(size, seed=options.seed)
    with _CLUSTERS:
        if options.peer:
            return report(list(against(size, options.peer, options.python)), size, options)
        return report(measured(BENCHMARKS, options.only or BENCHMARKS, size), size, options)


if __name__ == "__main__":
    sys.exit(main())
