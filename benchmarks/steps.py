"""The cost of a step: a sum of 128x16 float32 numbers on two replicas, reduced, embedded and on a cluster of two.

    python benchmarks/steps.py [--only NAME ...] [--size small] [--json] [--check] [--peer ray|tf --python PATH]

The floor on a cluster is Dask itself: for awaited steps their three tasks, submitted one by one; for other steps bare
streams, which carry numbers of calls and their results in messages over comms; for a round trip a bare message over a
comm; and for large arguments ``scatter`` to all workers. With ``--peer``, the same steps of another library are timed
after ours, with ``--python`` by another interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import add
from pathlib import Path
from statistics import median
from typing import Any, Final

import dask
import numpy as np
import psutil
from distributed import Client, LocalCluster, Worker
from distributed.comm import Comm, connect
from distributed.core import Status
from distributed.deploy.subprocess import SubprocessCluster
from measure import MIB, Figure, arguments, measured, report

import daskdist
from daskdist.strategy.replica.contract import internals_of


@dataclass(frozen=True)
class Size:
    """The amounts of work.

    Parameters
    ----------
    num_rows
        The rows in memory, of 64 bytes each; repeated endlessly.
    embedded_steps, cluster_steps
        The numbers of steps in a timing, one at a time.
    floor_steps
        The number of tasks submitted one by one.
    many_steps
        The number of steps in a timing, in functions.
    growth_steps
        The number of steps during which memory must not grow.
    repeats
        The number of timings of each case.
    """

    num_rows: int = 2**18
    embedded_steps: int = 5_000
    cluster_steps: int = 4_000
    floor_steps: int = 200
    many_steps: int = 10_000
    growth_steps: int = 100_000
    repeats: int = 5


SIZES: Final = {"full": Size(), "small": Size(2**12, 50, 20, 5, 100, 100, 1)}

_BATCH_ROWS: Final = 128
_STEPS_A_CALL: Final = 100
_NUM_LOOP_STEPS: Final = 400
_HERE: Final[dict[str, Any]] = {"host": "127.0.0.1", "protocol": "tcp", "dashboard_address": "127.0.0.1:0"}
# The calls in a message of bare streams, and the most messages of a stream in flight.
_CALLS_A_MESSAGE, _MESSAGES_AHEAD = 64, 4


def total(x: Any) -> Any:
    """Return the sum, as the function of a step."""
    return x.sum()


def batches(strategy: Any, size: Size) -> Iterator[Any]:
    """Return endless batches from memory."""
    rows = np.random.default_rng(0).random((size.num_rows, 16), np.float32)
    return iter(strategy.distribute_dataset(strategy.experimental_make_numpy_dataset(rows).repeat().batch(_BATCH_ROWS)))


def step(strategy: Any, iterator: Iterator[Any]) -> Any:
    """Make one step."""
    return strategy.reduce("SUM", strategy.run(total, args=(next(iterator),)), axis=None)


def per_second(num_steps: int, call: Callable[[], Any]) -> float:
    """Return the steps a second of a call."""
    start = time.perf_counter()
    call()
    return num_steps / (time.perf_counter() - start)


def embedded(size: Size) -> Iterator[Figure]:
    """Measure two replicas in this process."""
    yield Figure("embedded: steps", embedded_rate(size), "steps/s")


def embedded_rate(size: Size) -> float:
    """Measure the steps a second in this process."""
    strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    iterator = batches(strategy, size)

    def loop() -> None:
        for _ in range(size.embedded_steps):
            step(strategy, iterator)

    loop()
    return median(per_second(size.embedded_steps, loop) for _ in range(size.repeats))


@contextmanager
def two_workers() -> Iterator[tuple[Client, Any]]:
    """Provide a client of two worker processes, and a strategy on them."""
    # Dask's history of tasks grows by 150 bytes a step until it is full. Keep it so short that it is full at once.
    history = {"distributed.admin.low-level-log-length": 50, "distributed.diagnostics.computations.max-history": 5}
    with (
        dask.config.set({"distributed.worker.profile.enabled": False, **history}),
        LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as local,
        Client(local) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        yield client, strategy


def one_by_one(client: Client, strategy: Any, num_steps: int) -> None:
    """Submit the tasks of steps to Dask and await each step: two sums, each on its worker, and the sum of both."""
    # Use new keys: the release of an equal earlier array could reach the scheduler after this one.
    ones = np.ones((_BATCH_ROWS // 2, 16), np.float32)
    shards = [client.scatter(ones, workers=[each], hash=False) for each in strategy.workers]
    for _ in range(num_steps):
        parts = [
            client.submit(total, shard, workers=[worker], pure=False)
            for shard, worker in zip(shards, strategy.workers, strict=True)
        ]
        client.submit(add, *parts, pure=False).result()


_SUMS: Final = "daskdist_benchmark_sums"


def answer_sums(dask_worker: Worker) -> None:
    """Make a worker answer each number of a message with a sum, as its steps do, without any other work."""
    rows = np.ones((_BATCH_ROWS // 2, 16), np.float32)

    async def serve(comm: Comm) -> Any:
        with contextlib.suppress(OSError):
            while True:
                await comm.write([(number, float(total(rows))) for number in await comm.read()])
        return Status.dont_reply

    dask_worker.handlers[_SUMS] = serve


def bare_streams(client: Client, num_steps: int) -> None:
    """Make steps by an ordered stream of messages to each worker."""
    addresses = list(client.run(answer_sums))

    async def sums(address: str) -> dict[int, float]:
        comm = await connect(address, **client.connection_args)
        try:
            await comm.write({"op": _SUMS, "reply": False})
            sums: dict[int, float] = {}
            num_sent = 0
            while len(sums) < num_steps:
                while num_sent < min(len(sums) + _MESSAGES_AHEAD * _CALLS_A_MESSAGE, num_steps):
                    numbers = range(num_sent, min(num_sent + _CALLS_A_MESSAGE, num_steps))
                    await comm.write(list(numbers))
                    num_sent += len(numbers)
                sums.update(await comm.read())
            return sums
        finally:
            comm.abort()

    async def steps() -> list[float]:
        one, other = await asyncio.gather(*map(sums, addresses))
        return [one[number] + other[number] for number in range(num_steps)]

    client.sync(steps)


def cluster(size: Size) -> Iterator[Figure]:
    """Provide a strategy with a replica on each of two worker processes; the scheduler is in the driver's process."""
    found, explained = cluster_rates(size)
    for name in ("a step at a time", "functions of 100"):
        note = explained if name == "functions of 100" else ""
        yield Figure(f"cluster: {name}", found[name], "steps/s", found["bare streams"], "of bare streams", note=note)
    name, floor = "cluster: each awaited", found["floor awaited"]
    yield Figure(name, found["each awaited"], "steps/s", floor, "of Dask", 8, on="ratio")


def cluster_rates(size: Size) -> tuple[dict[str, float], str]:
    """Measure steps per second for each way to make them, and the statistics of a function."""
    with two_workers() as (client, strategy):
        iterator = batches(strategy, size)
        results: list[Any] = []

        def pipelined() -> None:
            for _ in range(size.cluster_steps):
                results.append(step(strategy, iterator))
            results[:] = [float(results[-1])]

        def awaited() -> None:
            for _ in range(size.floor_steps):
                float(step(strategy, iterator))

        @daskdist.function
        def many(num_steps: int) -> Any:
            found = 0.0
            for _ in range(num_steps):
                found += step(strategy, iterator)
            return found

        def in_functions() -> None:
            found = [many(_STEPS_A_CALL) for _ in range(size.many_steps // _STEPS_A_CALL)]
            results[:] = strategy.local_results(found)[0]

        ways: dict[str, tuple[int, Callable[[], Any]]] = {
            "bare streams": (size.many_steps, lambda: bare_streams(client, size.many_steps)),
            "floor awaited": (size.floor_steps // 4, lambda: one_by_one(client, strategy, size.floor_steps // 4)),
            "a step at a time": (size.cluster_steps, pipelined),
            "functions of 100": (size.many_steps, in_functions),
            "each awaited": (size.floor_steps, awaited),
        }
        for _, call in ways.values():
            call()
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(size.repeats):
            for name, (num_steps, call) in ways.items():
                rates[name].append(per_second(num_steps, call))
        explained = "; ".join(map(str.strip, many.explain().splitlines()))
    return {name: median(each) for name, each in rates.items()}, explained


def gradient(x: Any, weights: Any) -> Any:
    """Return an array of the size of the weights, like the gradient of a training step."""
    return weights * 1e-3 + x.mean()


def training(size: Size) -> Iterator[Figure]:
    """Measure weights of 16 kB from one `reduce` to the next `run`, reading batches, and a large changing argument."""
    found = training_rates(size)
    yield Figure("training: each step looked at", found["looked at"], "steps/s")
    yield Figure(
        "training: never looked at", found["not looked at"], "steps/s", found["bare streams"], "of bare streams"
    )
    yield Figure("a look at a batch on the workers", 1e3 / found["looks"], "ms", target=3, bound="most")
    name = "an argument of 8 MB that changes"
    yield Figure(name, found["argument"] * 8, "MB/s", found["scatter"] * 8, "of scatter", 0.5, on="ratio")


def training_rates(size: Size) -> dict[str, float]:
    """Measure training steps, looks, arguments and their floors per second."""
    with two_workers() as (client, strategy):
        iterator = batches(strategy, size)
        start = np.ones(2_000)
        strategy.run(gradient, args=(next(iterator), start))

        def train(num_steps: int, *, is_looked_at: bool) -> None:
            weights: Any = start
            for _ in range(num_steps):
                weights = strategy.reduce("MEAN", strategy.run(gradient, args=(next(iterator), weights)), axis=None)
                if is_looked_at:
                    np.asarray(weights)
            np.asarray(weights)

        def look(num_looks: int) -> None:
            for _ in range(num_looks):
                strategy.local_results(next(iterator))

        large = np.ones(2**20)

        def argue(num_steps: int) -> None:
            for _ in range(num_steps):
                large[0] += 1
                strategy.local_results(strategy.run(len, args=(large,)))

        def scatter(num_steps: int) -> None:
            for _ in range(num_steps):
                large[0] += 1
                client.scatter(large, broadcast=True, hash=False)

        few = max(size.floor_steps // 10, 2)
        ways: dict[str, tuple[int, Callable[[], Any]]] = {
            "looked at": (size.floor_steps, lambda: train(size.floor_steps, is_looked_at=True)),
            "not looked at": (size.cluster_steps, lambda: train(size.cluster_steps, is_looked_at=False)),
            "looks": (size.floor_steps, lambda: look(size.floor_steps)),
            "argument": (few, lambda: argue(few)),
            "scatter": (few, lambda: scatter(few)),
            "bare streams": (size.many_steps, lambda: bare_streams(client, size.many_steps)),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(size.repeats + 1):
            for name, (num_steps, call) in ways.items():
                rate = per_second(num_steps, call)
                if number:
                    rates[name].append(rate)
    return {name: median(each) for name, each in rates.items()}


def echo(x: Any) -> Any:
    """Return the argument."""
    return x


_ECHO: Final = "daskdist_benchmark_echo"


def answer_echoes(dask_worker: Worker) -> None:
    """Make a worker return each message, as its steps do, without any other work."""

    async def serve(comm: Comm) -> Any:
        with contextlib.suppress(OSError):
            while True:
                await comm.write(await comm.read())
        return Status.dont_reply

    dask_worker.handlers[_ECHO] = serve


def bare_round_trip_ms(client: Client, num_times: int) -> float:
    """Return the milliseconds that a message of 1 kB takes to a worker and back, over an open comm."""
    (address,) = client.run(answer_echoes)

    async def echo() -> float:
        comm = await connect(address, **client.connection_args)
        try:
            await comm.write({"op": _ECHO, "reply": False})
            start = time.perf_counter()
            for _ in range(num_times):
                await comm.write({"m": bytes(1024)})
                await comm.read()
            return 1e3 * (time.perf_counter() - start) / num_times
        finally:
            comm.abort()

    return float(client.sync(echo))


def round_trips(size: Size) -> Iterator[Figure]:
    """Measure a call with 1 kB on one worker, directly and through a scheduler in a separate process."""
    with (
        dask.config.set({"distributed.worker.profile.enabled": False}),
        SubprocessCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
        contextlib.ExitStack() as opened,
    ):
        client.wait_for_workers(1)
        strategies = {}
        for relay in (False, True):
            with dask.config.set({"daskdist.steps.relay": relay}):
                strategies[relay] = opened.enter_context(daskdist.MultiWorkerMirroredStrategy(client))
        argument = np.ones(2**7)
        times: dict[bool, list[float]] = {False: [], True: []}
        bare: list[float] = []
        for number in range(size.repeats + 1):
            for relay, strategy in strategies.items():

                def ask(strategy: Any = strategy) -> None:
                    for _ in range(size.floor_steps):
                        strategy.local_results(strategy.run(echo, args=(argument,)))

                rate = per_second(size.floor_steps, ask)
                if number:
                    times[relay].append(1e3 / rate)
            bare.append(bare_round_trip_ms(client, size.floor_steps))
    direct, relayed = median(times[False]), median(times[True])
    yield Figure("a round trip of 1 kB", direct, "ms", median(bare), "of a bare message")
    yield Figure(
        "a round trip of 1 kB, relayed", relayed, "ms", direct, "of a direct one", 2.5, on="ratio", bound="most"
    )


def memory_mib() -> float:
    """Return the memory of this process."""
    gc.collect()
    return float(psutil.Process(os.getpid()).memory_info().rss / MIB)


def growth(size: Size) -> Iterator[Figure]:
    """Measure a hundred thousand steps, one at a time and in functions: their cost at the end, and leftover memory."""
    with two_workers() as (client, strategy):
        iterator = batches(strategy, size)
        tenth = size.growth_steps // 10

        @daskdist.function
        def many(found: Any) -> Any:
            for _ in range(min(_STEPS_A_CALL, tenth)):
                found = found + step(strategy, iterator)
            return found

        def alone(found: Any) -> Any:
            for _ in range(min(_STEPS_A_CALL, tenth)):
                found = found + step(strategy, iterator)
            return found

        for name, steps in (("a step at a time", alone), ("functions of 100", many)):
            found: Any = 0.0
            seconds: list[float] = []
            sizes: list[list[float]] = []
            for _ in range(10):
                start = time.perf_counter()
                for _ in range(max(tenth // _STEPS_A_CALL, 1)):
                    found = steps(found)
                float(found)
                seconds.append(time.perf_counter() - start)
                sizes.append([memory_mib(), *client.run(memory_mib).values()])
            num_tasks = client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))
            yield Figure(
                f"cluster, {name}: time of the second half of {size.growth_steps:_}",
                sum(seconds[5:]),
                "s",
                sum(seconds[:5]),
                "of the first",
                1.25,
                on="ratio",
                bound="most",
            )
            for who, *own in zip(("driver and scheduler", "worker 0", "worker 1"), *sizes, strict=True):
                yield Figure(
                    f"cluster, {name}: growth of {who} in the second half",
                    100 * (own[-1] / own[4] - 1),
                    "%",
                    target=5,
                    bound="most",
                    note=f"MiB after each tenth: {', '.join(f'{each:.0f}' for each in own)}",
                )
            yield Figure(f"cluster, {name}: tasks left", num_tasks, "tasks", target=2_500, bound="most")


def workers(size: Size) -> Iterator[Figure]:
    """Measure the cost of a step for each of 2, 8 and 32 workers of this process, and what a loop on replicas sends."""
    for num_workers in (2, 8, 32):
        rows = np.ones((_NUM_LOOP_STEPS * num_workers, 16), np.float32)
        with (
            LocalCluster(n_workers=num_workers, processes=False, threads_per_worker=1, **_HERE) as local,
            Client(local) as client,
            daskdist.MultiWorkerMirroredStrategy(client) as strategy,
        ):
            dataset = daskdist.Dataset.from_tensor_slices(rows).batch(num_workers)
            iterator = iter(strategy.distribute_dataset(dataset.repeat()))
            num_steps = max(size.cluster_steps // num_workers, 2)

            def make(num_steps: int = num_steps, strategy: Any = strategy, iterator: Iterator[Any] = iterator) -> None:
                for _ in range(num_steps):
                    sums = strategy.run(total, args=(next(iterator),))
                strategy.local_results(sums)

            make()
            rate = median(per_second(num_steps, make) for _ in range(size.repeats))
            streams = internals_of(strategy).backend.streams._streams.values()
            before = sum(stream.link.state.num_sent for stream in streams)
            loop = strategy.run(_num_batches, args=(strategy.distribute_dataset(dataset),))
            strategy.local_results(loop)
            sent = (sum(stream.link.state.num_sent for stream in streams) - before) / num_workers
        note = f"{rate:,.0f} steps/s; a loop of {_NUM_LOOP_STEPS} steps took {sent:.0f} messages a worker"
        what = f"{num_workers} workers, a step at a time: for each worker"
        yield Figure(what, 1e6 / rate / num_workers, "us", target=250, bound="most", note=note)


def _num_batches(batches: Any) -> int:
    return sum(1 for _ in batches)


BENCHMARKS: Final[dict[str, Callable[[Size], Iterator[Figure]]]] = {
    "embedded": embedded,
    "cluster": cluster,
    "training": training,
    "workers": workers,
    "round_trips": round_trips,
    "growth": growth,
}


# The script of a peer, and cases of daskdist, each with the case of the peer and the least ratio to it, if any.
_PEERS: Final[dict[str, tuple[str, list[tuple[str, str, float | None]]]]] = {
    "ray": (
        "ray_steps.py",
        [
            ("each awaited", "Ray actors, awaited", 1.0),
            ("a step at a time", "Ray actors, ahead", 1.5),
            ("training, not looked at", "Ray actors, ahead", 0.7),
            ("each awaited", "Ray compiled graphs, awaited", None),
        ],
    ),
    "tf": (
        "tensorflow_steps.py",
        [
            ("each awaited", "TensorFlow MultiWorkerMirroredStrategy, awaited", 1.0),
            ("functions of 100", "TensorFlow MultiWorkerMirroredStrategy, in tf.range", 3.0),
            ("embedded", "TensorFlow MirroredStrategy, awaited", 1.0),
            ("embedded", "TensorFlow MirroredStrategy, in tf.range", 4.0),
        ],
    ),
}


def against(size: Size, key: str, python: str) -> Iterator[Figure]:
    """Compare the steps of another library, in two processes, with those of daskdist."""
    script, cases = _PEERS[key]
    ours = {**cluster_rates(size)[0], "embedded": embedded_rate(size)}
    ours["training, not looked at"] = training_rates(size)["not looked at"]
    command = [python, str(Path(__file__).with_name("peers") / script), str(size.floor_steps)]
    # The process must not find the packages of this environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    rates = json.loads(done.stdout.splitlines()[-1])
    for name, case, target in cases:
        yield Figure(f"{name}, against {case}", ours[name], "steps/s", rates[case], "theirs", target, on="ratio")


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__, BENCHMARKS, SIZES)
    parser.add_argument("--peer", choices=list(_PEERS), help="time steps of this library instead, and ours beside it")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has it; this one by default")
    options = parser.parse_args(argv)
    size = SIZES[options.size]
    if options.peer:
        return report(list(against(size, options.peer, options.python)), size, options)
    return report(measured(BENCHMARKS, options.only or BENCHMARKS, size), size, options)


if __name__ == "__main__":
    sys.exit(main())
