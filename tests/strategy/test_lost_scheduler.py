"""Programs whose scheduler is killed continue with another one at the same address, or an error says so in time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time

import dask
import dask.array as da
import numpy as np
import pytest
from conftest import eventually
from distributed import CancelledError, Client, Scheduler, Worker
from programs import FORKED_WORKERS

import daskdist
from daskdist import Dataset
from daskdist.errors import ArgumentError, ClusterError, CollectiveError
from daskdist.execute.callers.cluster_requests import ask_from_worker
from daskdist.execute.callers.submit import workers_of
from daskdist.strategy.calls.stream_set import StreamSet
from daskdist.strategy.placement.replacements import Replacements

_ROWS = 1_000
_BATCH_ROWS = 10
_KILLED_AT = 20
# The loss is noticed as soon as the connection breaks.
_TOLD_WITHIN_S = 15

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(120)]


def cluster(started, number, port="0", *worker_options, worker_ports=("0", "0")):
    """Start a scheduler and workers; return the scheduler's process and address."""
    here, folder = ["--host", "127.0.0.1", "--no-dashboard"], started.folder
    file = folder / f"scheduler-{number}.json"
    started.dask("scheduler", *here, "--port", port, "--scheduler-file", str(file))
    scheduler = started.processes[-1]
    address = json.loads(started.wait_for(file, "}"))["address"]
    for log in start_workers(started, address, *(worker_options or ("--no-nanny",)), ports=worker_ports):
        started.wait_for(log, "Registered to")
    return scheduler, address


def start_workers(started, address, *worker_options, ports=("0", "0")):
    """Start workers at given ports; return the files of their messages."""
    options = ["--host", "127.0.0.1", "--no-dashboard", "--nthreads", "1", "--local-directory", str(started.folder)]
    environment = FORKED_WORKERS if "--nanny" in worker_options else {}
    return [
        started.dask("worker", address, *options, *worker_options, "--worker-port", port, **environment)
        for port in ports
    ]


def port_of(address):
    return address.rpartition(":")[2]


def rows_of(strategy, step):
    return np.concatenate(strategy.local_results(step)).tolist()


class Restart:
    """A scheduler that is killed, and starts again with its workers while the program continues."""

    def __init__(self, started, scheduler, address, *worker_options, workers_first=False, worker_ports=("0", "0")):
        self._started, self._scheduler, self._address = started, scheduler, address
        self._worker_options, self._workers_first = worker_options or ("--no-nanny",), workers_first
        self.worker_ports = tuple(worker_ports)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        return self

    def begin(self):
        """Kill the scheduler, and return while others start."""
        self._scheduler.kill()
        self._scheduler.wait(10)
        self._thread.start()

    def _run(self):
        started, address = self._started, self._address
        for process in started.processes:
            process.wait(30)
        started.processes.clear()
        port = port_of(address)
        if self._workers_first:
            # A supervisor starts workers again as soon as they end.
            start_workers(started, address, *self._worker_options, ports=self.worker_ports)
            started.dask("scheduler", "--host", "127.0.0.1", "--no-dashboard", "--port", port)
        else:
            cluster(started, 1, port, *self._worker_options, worker_ports=self.worker_ports)

    def __exit__(self, *error):
        if self._thread.ident is not None:
            self._thread.join(60)


def by_looking(strategy, batch, begin):
    """Look at a batch; the scheduler is lost before that if ``begin`` is given."""
    begin()
    return rows_of(strategy, batch)


def by_steps(strategy, batch, begin):
    """Run a function with a batch and reduce its result; the scheduler is lost while they run."""

    def double(x):
        time.sleep(0.01)
        return 2 * np.asarray(x)

    # A result that the program does not have yet is computed again with its step.
    doubled = strategy.run(double, args=(batch,))
    begin()
    total = strategy.reduce("SUM", doubled, axis=0)
    rows = rows_of(strategy, strategy.run(np.asarray, args=(batch,)))
    assert float(total) == 2 * sum(rows)
    return rows


def of_files(folder):
    for number in range(5):
        rows = np.arange(number * _ROWS // 5, (number + 1) * _ROWS // 5)
        np.save(folder / f"{number}.npy", rows)
    return daskdist.read_npy(str(folder / "*.npy")).map(np.abs)


def of_memory(folder):
    # Blocks of this size are not sent in tasks, but before them.
    values = np.repeat(np.arange(_ROWS), 2_048).reshape(_ROWS, -1)
    return Dataset.from_tensor_slices(values).map(lambda row: row[0])


def of_dask(folder):
    return Dataset.from_dask(da.arange(_ROWS, chunks=70).map_blocks(np.abs)).map(np.abs)


def of_function(folder):
    def slowly(row):
        # The time varies, and with it how many rows a worker has ready at a time.
        time.sleep(time.perf_counter_ns() % 997 / 997_000)
        return row

    # A local function, which is sent whole: the workers do not find the modules of tests.
    def dataset_fn(context):
        share = Dataset.range(_ROWS).shard(context.num_input_pipelines, context.input_pipeline_id)
        # The seed of the shuffle is drawn on the worker.
        return share.map(slowly).shuffle(100).batch(_BATCH_ROWS)

    return dataset_fn


def distributed_by(strategy, rows, folder):
    if rows is of_function:
        return strategy.distribute_datasets_from_function(of_function(folder))
    return strategy.distribute_dataset(rows(folder).shuffle(100, seed=1).batch(_BATCH_ROWS))


@pytest.mark.parametrize(
    ("visit", "rows", "options", "workers_first"),
    [
        (by_looking, of_files, ("--no-nanny",), False),
        (by_steps, of_files, ("--nanny",), False),
        (by_steps, of_memory, ("--no-nanny",), True),
        (by_steps, of_dask, ("--no-nanny",), False),
        (by_looking, of_function, ("--no-nanny",), True),
        (by_steps, of_function, ("--nanny",), False),
    ],
)
def test_a_pass_continues_with_another_scheduler(started, tmp_path, caplog, visit, rows, options, workers_first):
    scheduler, address = cluster(started, 0, "0", *options)
    with (
        Client(address, set_as_default=False) as client,
        Restart(started, scheduler, address, *options, workers_first=workers_first) as restart,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        seen, distributed = [], distributed_by(strategy, rows, tmp_path)
        for number, batch in enumerate(distributed):
            seen += visit(strategy, batch, restart.begin if number == _KILLED_AT else lambda: None)
        assert sorted(seen) == list(range(_ROWS))
        assert strategy.num_replicas_in_sync == 2
        assert f"lost the scheduler at {address}; it is waited for" in caplog.text
        assert f"joined the scheduler at {address} again" in caplog.text
        # The next pass is an ordinary one.
        seen = [row for batch in distributed for row in rows_of(strategy, batch)]
        assert sorted(seen) == list(range(_ROWS))


def test_a_pass_continues_if_the_scheduler_is_lost_while_it_is_asked(started, tmp_path):
    scheduler, address = cluster(started, 0)
    with (
        Client(address, set_as_default=False) as client,
        Restart(started, scheduler, address) as restart,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        batches = iter(distributed_by(strategy, of_function, tmp_path))
        seen = rows_of(strategy, next(batches))
        eventually(lambda: all(state.status == "finished" for state in list(client.futures.values())))
        # It does not answer any more, and its end is noticed by the request.
        scheduler.send_signal(signal.SIGSTOP)
        threading.Timer(0.5, restart.begin).start()
        seen += [row for batch in batches for row in rows_of(strategy, batch)]
        assert sorted(seen) == list(range(_ROWS))


def test_a_scheduler_that_does_not_answer_for_a_while_is_not_lost(started, tmp_path):
    scheduler, address = cluster(started, 0)
    with Client(address, set_as_default=False) as client, daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        steps = strategy.distribute_dataset(Dataset.range(_ROWS).shuffle(30, seed=1).batch(4))
        seen = []
        for number, step in enumerate(steps):
            if number in (3, 40):
                # Workers are told at once of steps that need tasks of which the scheduler learns when it goes on.
                scheduler.send_signal(signal.SIGSTOP)
                threading.Timer(9.5, scheduler.send_signal, (signal.SIGCONT,)).start()
            seen += rows_of(strategy, strategy.run(np.asarray, args=(step,)))
        assert sorted(seen) == list(range(_ROWS))


@pytest.mark.parametrize("rows", [of_files, of_function])
def test_a_pass_in_a_captured_function_continues(started, tmp_path, rows):
    scheduler, address = cluster(started, 0)
    with (
        Client(address, set_as_default=False) as client,
        Restart(started, scheduler, address) as restart,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):

        @daskdist.function
        def visit(batches):
            parts = []
            for number, batch in enumerate(batches):
                parts.append(strategy.gather(strategy.run(np.asarray, args=(batch,)), 0))
                if number == _KILLED_AT:
                    restart.begin()
            return parts

        seen = np.concatenate(list(map(np.asarray, visit(distributed_by(strategy, rows, tmp_path)))))
        assert sorted(seen.tolist()) == list(range(_ROWS))


def test_a_pass_continues_with_fewer_workers(started, tmp_path):
    scheduler, address = cluster(started, 0)
    dataset = of_files(tmp_path).shuffle(100, seed=1).batch(_BATCH_ROWS)
    with (
        Client(address, set_as_default=False) as client,
        Restart(started, scheduler, address, worker_ports=["0"]) as restart,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
        dask.config.set({"daskdist.timeouts.workers": 3}),
    ):
        # The rows of a function's datasets are not divided again.
        distributed = strategy.distribute_datasets_from_function(of_function(tmp_path))
        batches = iter(distributed)
        rows_of(strategy, next(batches))
        seen = []
        for number, batch in enumerate(strategy.distribute_dataset(dataset)):
            seen += by_steps(strategy, batch, restart.begin if number == _KILLED_AT else lambda: None)
        assert sorted(seen) == list(range(_ROWS))
        assert strategy.num_replicas_in_sync == 1
        with pytest.raises(ClusterError, match=f"the scheduler at {address}"):
            [rows_of(strategy, batch) for batch in batches]
        seen = [row for batch in distributed for row in rows_of(strategy, batch)]
        assert sorted(seen) == list(range(_ROWS))


@pytest.mark.parametrize(("before", "relay"), [("install", True), ("open", "auto")])
def test_a_worker_is_lost_while_the_strategy_joins_another_scheduler(started, tmp_path, monkeypatch, before, relay):
    scheduler, address = cluster(started, 0)
    dataset = of_files(tmp_path).shuffle(100, seed=1).batch(_BATCH_ROWS)
    killed = []

    def kill_once(workers):
        if not killed:
            killed.append(workers[0])
            os.kill(client.run(os.getpid, workers=killed)[killed[0]], signal.SIGKILL)
            # Otherwise Dask tries for 30 seconds to reach it.
            eventually(lambda: killed[0] not in workers_of(client))

    def hooked_take_all(replacements, client):
        replicas = take_all(replacements, client)
        kill_once([replica.worker for replica in replicas])
        return replicas

    def hooked_open(streams, group, workers):
        kill_once(workers)
        open_streams(streams, group, workers)

    with (
        dask.config.set({"daskdist.timeouts.workers": 3, "daskdist.steps.relay": relay}),
        Client(address, set_as_default=False) as client,
        Restart(started, scheduler, address) as restart,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        take_all, open_streams = Replacements.take_all, StreamSet.open
        if before == "install":
            monkeypatch.setattr(Replacements, "take_all", hooked_take_all)
        else:
            monkeypatch.setattr(StreamSet, "open", hooked_open)
        distributed, seen = strategy.distribute_dataset(dataset), []
        for number, batch in enumerate(distributed):
            seen += by_steps(strategy, batch, restart.begin if number == _KILLED_AT else lambda: None)
        assert sorted(seen) == list(range(_ROWS))
        assert killed[0] not in strategy.workers
        assert strategy.num_replicas_in_sync == 1
        # Another worker takes the free place.
        start_workers(started, address, "--no-nanny", ports=("0",))
        eventually(lambda: [info["status"] for info in workers_of(client).values()] == ["running"] * 2)
        seen = [row for batch in distributed for row in rows_of(strategy, batch)]
        assert sorted(seen) == list(range(_ROWS))
        assert strategy.num_replicas_in_sync == 2


def test_passes_over_datasets_that_may_differ_end_with_an_error(started):
    scheduler, address = cluster(started, 0)
    spec = daskdist.TensorSpec((), np.int64)
    reasons = {
        lambda _: Dataset.from_generator(lambda: iter(range(40)), output_signature=spec).batch(4): (
            "from_generator may not give the same elements again"
        ),
        lambda _: Dataset.from_tensor_slices(np.random.default_rng().permutation(40)).batch(4): (
            "has created other ones"
        ),
        lambda _: Dataset.range(40).batch(4).with_options(daskdist.Options(deterministic=False)): "any order",
        lambda _: Dataset.range(40).batch(4).ignore_errors(): "elements that fail are left out",
        lambda _: Dataset.range(40).shuffle(9).cache().batch(4): "cache replays the random order of an earlier pass",
    }
    with (
        Client(address, set_as_default=False) as client,
        Restart(started, scheduler, address) as restart,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        datasets = [strategy.distribute_datasets_from_function(dataset_fn) for dataset_fn in reasons]
        begun = list(map(iter, datasets))
        steps = [strategy.run(np.asarray, args=(next(batches),)) for batches in begun]
        # A call that is not over cannot be made again, and its error would be raised in a later pass.
        list(map(strategy.local_results, steps))
        restart.begin()
        for batches, reason in zip(begun, reasons.values(), strict=True):
            with pytest.raises(ClusterError, match=f"lost with their workers, .*{reason}"):
                [rows_of(strategy, batch) for batch in batches]
        for distributed in datasets:
            seen = [row for batch in distributed for row in rows_of(strategy, batch)]
            assert sorted(seen) == sorted([*range(40), *range(40)])


@pytest.mark.parametrize("rows", [of_files, of_function])
def test_a_pass_goes_on_with_workers_at_the_same_addresses(started, tmp_path, rows):
    _, address = cluster(started, 0)
    with Client(address, set_as_default=False) as client, daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        distributed, workers = distributed_by(strategy, rows, tmp_path), strategy.workers
        pids = {client.run(os.getpid)[worker] for worker in workers}
        for num_losses in (1, 2):
            with Restart(started, started.processes[0], address, worker_ports=map(port_of, workers)) as restart:
                seen = []
                for number, batch in enumerate(distributed):
                    seen += by_steps(strategy, batch, restart.begin if number == _KILLED_AT else lambda: None)
            assert sorted(seen) == list(range(_ROWS))
            assert strategy.workers == workers
            pids |= {client.run(os.getpid)[worker] for worker in workers}
            assert len(pids) == 2 + 2 * num_losses
        # Those that are lost later are the ones that are there now.
        os.kill(client.run(os.getpid)[workers[0]], signal.SIGKILL)
        if rows is of_function:
            with pytest.raises(ClusterError, match=f"lost {workers[0]}"):
                [by_steps(strategy, batch, lambda: None) for batch in distributed]
        seen = [row for batch in distributed for row in by_steps(strategy, batch, lambda: None)]
        assert sorted(seen) == list(range(_ROWS))
        assert strategy.workers == workers[1:]


@pytest.mark.parametrize("at_the_same_addresses", [False, True])
def test_what_only_workers_had_is_lost_with_the_scheduler(started, tmp_path, at_the_same_addresses):
    scheduler, address = cluster(started, 0)
    with (
        Client(address, set_as_default=False) as client,
        Restart(started, scheduler, address) as restart,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        with strategy.scope():
            total = daskdist.Variable(1.0, name="total")
        manager = daskdist.CheckpointManager(str(tmp_path / "checkpoints"))
        manager.save(daskdist.Checkpoint(total=total))
        large, small = strategy.run(np.ones, args=(100_000,)), strategy.run(float, args=(3.0,))
        assert strategy.local_results(small) == (3.0, 3.0)
        strategy.local_results(strategy.run(np.sum, args=(large,)))
        described = dask.delayed(repr)(large)
        if at_the_same_addresses:
            restart.worker_ports = tuple(map(port_of, strategy.workers))
        restart.begin()
        eventually(lambda: client.status != "running")
        assert strategy.local_results(strategy.run(float, args=(4.0,))) == (4.0, 4.0)
        assert strategy.local_results(small) == (3.0, 3.0)
        lost = f"the scheduler at {address} was lost, and with it all workers"
        with pytest.raises(ClusterError, match=f"{lost}; load the last checkpoint"):
            strategy.local_results(large)
        with pytest.raises(CancelledError):
            client.compute(described).result()
        with pytest.raises(ArgumentError, match=f"total: .*{lost}; .*load the last checkpoint"):
            float(total)
        manager.restore(daskdist.Checkpoint(total=total))
        manager.close()
        assert float(total) == 1.0


@pytest.mark.parametrize("rows", [of_files, of_function])
def test_a_lost_connection_to_a_scheduler_that_is_still_there_loses_nothing(started, tmp_path, rows):
    _, address = cluster(started, 0)
    with Client(address, set_as_default=False) as client, daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        with strategy.scope():
            total = daskdist.Variable(1.0)
        connection = client.scheduler_comm

        def lose_connection():
            client.loop.add_callback(connection.comm.abort)
            eventually(lambda: client.status == "running" and client.scheduler_comm is not connection)

        seen = []
        for number, batch in enumerate(distributed_by(strategy, rows, tmp_path)):
            seen += by_steps(strategy, batch, lose_connection if number == _KILLED_AT else lambda: None)
        assert sorted(seen) == list(range(_ROWS))
        assert float(total) == 1.0


def test_a_scheduler_that_does_not_come_back_is_an_error_in_time(started):
    scheduler, address = cluster(started, 0)
    with Client(address, set_as_default=False) as client, dask.config.set({"daskdist.timeouts.scheduler": 2}):
        strategy = daskdist.MultiWorkerMirroredStrategy(client)
        batches = iter(strategy.distribute_dataset(Dataset.range(_ROWS).batch(_BATCH_ROWS)))
        next(batches)
        scheduler.kill()
        killed_at = time.monotonic()
        with pytest.raises(ClusterError, match=f"lost the scheduler at {address}.*from a checkpoint"):
            [by_steps(strategy, batch, lambda: None) for batch in batches]
        assert 2 <= time.monotonic() - killed_at < _TOLD_WITHIN_S
        # It is not waited for again.
        with pytest.raises(ClusterError, match=f"lost the scheduler at {address}"):
            strategy.local_results(strategy.run(int))
        assert time.monotonic() - killed_at < _TOLD_WITHIN_S
        strategy.close()
        for process in started.processes:
            process.wait(30)


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


@pytest.mark.parametrize(("restart", "rows"), [(0, of_files), (2, of_files), (2, of_function)])
def test_a_loop_on_replicas_continues_on_another_scheduler(started, tmp_path, restart, rows):
    scheduler, address = cluster(started, 0)
    manager = daskdist.CheckpointManager(str(tmp_path / "checkpoints"))
    loop = loop_that_kills(scheduler.pid)
    with (
        Client(address, set_as_default=False) as client,
        Restart(started, scheduler, address) as begun,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        # The loop kills the scheduler itself.
        threading.Thread(target=lambda: (scheduler.wait(60), begun.begin())).start()
        args = distributed_by(strategy, rows, tmp_path), manager
        if not restart:
            with pytest.raises(ClusterError, match=f"the scheduler at {address}"):
                strategy.local_results(strategy.run(loop, args=args))
        rows = strategy.run(loop, args=args, restart=restart)
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
        closed_at = time.monotonic()
        strategy.close()
        # Nothing is left that needs another scheduler.
        assert time.monotonic() - closed_at < _TOLD_WITHIN_S
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
