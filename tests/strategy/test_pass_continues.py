"""A worker is killed in a pass: the pass continues with the others, and every row is in one completed step."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import eventually, running_workers
from distributed import Client, LocalCluster, WorkerPlugin

import daskdist
from daskdist import Dataset, Options, errors
from daskdist.execute.messages.link import Link
from daskdist.strategy.calls.recovery import worker_recovery
from daskdist.strategy.calls.stream_set import StreamSet
from daskdist.strategy.replica.contract import internals_of

pytestmark = pytest.mark.cluster
NUM_ROWS = 2_400
ROWS = [row for row in range(NUM_ROWS) if row % 7 != 3]


class KillableWorkers:
    """Three workers that may be killed; Dask starts them again, or else there are three other ones."""

    def __init__(self) -> None:
        self._opened = contextlib.ExitStack()
        self.client: Client | None = None

    def wait(self) -> Client:
        """Return a client of three workers."""
        until = time.monotonic() + 5
        while self.client is not None and len(running_workers(self.client)) < 3:
            if time.monotonic() > until:
                self.close()
            time.sleep(0.1)
        if self.client is None:
            cluster = LocalCluster(
                n_workers=3, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0", silence_logs=50
            )
            self.client = self._opened.enter_context(Client(self._opened.enter_context(cluster), set_as_default=False))
        return self.client

    def close(self) -> None:
        self.client = None
        self._opened.close()


@pytest.fixture(scope="module")
def killable_workers() -> Iterator[KillableWorkers]:
    workers = KillableWorkers()
    yield workers
    workers.close()


@pytest.fixture
def strategy(
    killable_workers: KillableWorkers, request: pytest.FixtureRequest
) -> Iterator[daskdist.MultiWorkerMirroredStrategy]:
    """Return a strategy on three workers, or on as many as the test says."""
    client = killable_workers.wait()
    num_workers = getattr(request, "param", 3)
    workers = [1] * num_workers + [0] * (3 - num_workers)
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=workers) as opened:
        pids = client.run(os.getpid)
        opened.pids = [pids[worker] for worker in opened.workers]
        yield opened


def kill(strategy, number):
    """Kill a worker of those that there were at first."""
    os.kill(strategy.pids[number], signal.SIGKILL)


def numbers_in_files(folder):
    for part in range(6):
        np.save(folder / f"{part}.npy", np.arange(part * NUM_ROWS // 6, (part + 1) * NUM_ROWS // 6))
    return daskdist.read_npy(str(folder / "*.npy"))


def rows_and_sum(x):
    return {"rows": x, "sum": int(x.sum())}


@pytest.mark.parametrize(
    ("strategy", "policy", "looks"),
    [(2, "FILE", True), (3, "FILE", False), (3, "DATA", True), (2, "DATA", False), (3, "OFF", False)],
    indirect=["strategy"],
)
def test_every_row_is_in_one_completed_step(strategy, policy, looks, tmp_path):
    numbers = numbers_in_files(tmp_path) if policy == "FILE" else Dataset.range(NUM_ROWS)
    dataset = numbers.map(lambda x: x + 0).filter(lambda x: x % 7 != 3).shuffle(500, seed=1).batch(60)
    steps = strategy.distribute_dataset(dataset.with_options(Options(auto_shard_policy=policy)))
    num_passes = strategy.num_replicas_in_sync if policy == "OFF" else 1
    parts, total = [], 0
    for number, batch in enumerate(steps):
        result = strategy.run(rows_and_sum, args=(batch,))
        total += strategy.reduce("SUM", result["sum"], axis=None)
        parts.append(strategy.local_results(result["rows"]) if looks else result["rows"])
        if number == 10:
            kill(strategy, 0)
    parts = parts if looks else [strategy.local_results(rows) for rows in parts]
    assert sorted(np.concatenate([part for step in parts for part in step]).tolist()) == sorted(ROWS * num_passes)
    assert int(total) == sum(ROWS) * num_passes
    # The next pass is divided among the replicas that exist by then.
    num_rows = [strategy.reduce("SUM", strategy.run(len, args=(batch,)), axis=None) for batch in steps]
    assert sum(map(int, num_rows)) == len(ROWS) * (strategy.num_replicas_in_sync if policy == "OFF" else 1)


def wide_rows(numbers):
    return np.repeat(numbers[:, None], 2_000, axis=1)


def yielded():
    for number in range(1_800):
        yield number, np.full(2_000, number)


IN_PROGRAM = {
    "an array": lambda: Dataset.from_tensor_slices((np.arange(1_800), wide_rows(np.arange(1_800)))),
    "a generator": lambda: Dataset.from_generator(
        yielded, output_signature=(daskdist.TensorSpec((), np.int64), daskdist.TensorSpec((2_000,), np.int64))
    ),
}


@pytest.mark.parametrize(("source", "looks"), [("an array", True), ("a generator", False)])
def test_rows_that_only_a_lost_worker_had_are_sent_again(strategy, source, looks):
    def visited():
        rows = []
        for number, (numbers, wide) in enumerate(strategy.distribute_dataset(dataset)):
            is_right = strategy.run(lambda x, y: bool((y == x[:, None]).all()), args=(numbers, wide))
            rows.append(strategy.gather(strategy.run(lambda x: x, args=(numbers,)), 0))
            if looks:
                assert all(strategy.local_results(is_right))
            if number in (10, 40):
                kill(strategy, number // 40)
        return np.concatenate(list(map(np.asarray, rows))).tolist()

    dataset = IN_PROGRAM[source]().shuffle(200, seed=3).batch(30)
    assert sorted(visited()) == list(range(1_800))
    # The program drops the rows that it kept to send them again.
    gc.collect()
    eventually(lambda: not len(internals_of(strategy).backend._submit.sent_blocks))


def test_two_workers_are_lost_one_after_the_other(strategy):
    dataset = Dataset.range(NUM_ROWS).batch(60, drop_remainder=True).repeat(2)
    rows = []
    for number, batch in enumerate(strategy.distribute_dataset(dataset)):
        rows.append(strategy.gather(strategy.run(rows_and_sum, args=(batch,))["rows"], 0))
        if number in (10, 50):
            kill(strategy, number // 50)
    assert np.concatenate(list(map(np.asarray, rows))).tolist() == [*range(NUM_ROWS)] * 2


def test_results_of_a_step_that_is_made_again_when_they_are_looked_at(strategy, tmp_path):
    def step(batch, gate):
        eventually(gate.exists, 60)
        return int(batch.sum())

    gate = tmp_path / "continues"
    gate.touch()
    first, second, *_ = strategy.distribute_dataset(Dataset.range(90).batch(30))
    assert sum(strategy.local_results(strategy.run(step, args=(first, gate)))) == sum(range(30))
    gate.unlink()
    result = strategy.run(step, args=(second, gate))
    kill(strategy, 0)
    eventually(lambda: internals_of(strategy).backend.live_workers.has_lost, 60)
    gate.touch()
    # The loss is handled within this call.
    actual = strategy.local_results(result)
    assert len(actual) == 2
    assert sum(actual) == sum(range(30, 60))


def test_a_worker_is_lost_while_a_reduction_is_sent(strategy, monkeypatch):
    streams, second, num_asked = internals_of(strategy).backend.streams, strategy.workers[1], itertools.count()

    def is_open(worker):
        # It is lost after the first answer. Nothing waits here for the event loop, which may wait for the call's lock.
        is_asked_again = worker == second and (number := next(num_asked)) > 20
        if worker == second and number == 20:
            kill(strategy, 1)
        return not is_asked_again and StreamSet.is_open(streams, worker)

    totals = []
    for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(240).batch(24))):
        doubled = strategy.run(lambda x: 2 * x, args=(batch,))
        if number == 3:
            num_asked = itertools.count(20)
            monkeypatch.setattr(streams, "is_open", is_open)
        totals.append(strategy.reduce("SUM", doubled, axis=0))
    assert next(num_asked) > 20
    assert sum(map(int, totals)) == 2 * sum(range(240))


def test_steps_of_a_function_are_made_again(strategy):
    dataset = Dataset.from_tensor_slices({"x": np.arange(4_000), "y": np.arange(4_000) * 2}).batch(40)

    def difference(batch, factor):
        return batch["y"] - batch["x"] * factor

    @daskdist.function
    def train(steps):
        total = 0
        for number, batch in enumerate(steps):
            total = total + strategy.reduce("SUM", strategy.run(difference, args=(batch, 1)), axis=0)
            if number == 30:
                kill(strategy, 1)
        return total

    assert int(train(strategy.distribute_dataset(dataset))) == sum(range(4_000))


@pytest.mark.parametrize("size", [4, 20_000])
def test_weights_contain_each_complete_step_once(strategy, size):
    def gradient(x, weights):
        return weights * 0.5 + x.sum()

    weights = expected = np.zeros(size)
    for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(1_800).batch(30))):
        num_replicas = 3 if number < 20 else 2
        weights = strategy.reduce("MEAN", strategy.run(gradient, args=(batch, weights)), axis=None)
        expected = expected * 0.5 + np.arange(number * 30, number * 30 + 30).sum() / num_replicas
        if number == 19:
            np.asarray(weights)
            kill(strategy, 2)
            eventually(lambda: internals_of(strategy).backend.streams.lost())
    np.testing.assert_allclose(np.asarray(weights), expected)


def test_an_array_that_is_changed_after_a_step_is_given_again_as_it_was(strategy):
    weights, sums = np.zeros(3), []
    for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(360).batch(6))):
        sums.append(strategy.reduce("SUM", strategy.run(lambda x, w: w[0] * len(x), args=(batch, weights)), axis=None))
        weights += 1
        if number == 10:
            kill(strategy, 0)
    assert list(map(int, sums)) == [6 * number for number in range(60)]


def test_a_variable_is_read_after_a_pass_whose_last_step_failed_with_a_loss(strategy, tmp_path):
    streams, first, gate = internals_of(strategy).backend.streams, strategy.workers[0], tmp_path / "gate"
    with strategy.scope():
        count = daskdist.Variable(0, aggregation="SUM")

    def step(x):
        while 11 in x and not gate.exists():
            time.sleep(0.01)
        count.assign_add(np.int64(len(x)))
        return len(x)

    for batch in strategy.distribute_dataset(Dataset.range(18).batch(9)):
        strategy.run(step, args=(batch,))
    kill(strategy, 0)
    eventually(lambda: not streams.is_open(first))
    gate.touch()
    assert int(count) == 18


@pytest.mark.parametrize("looks", [False, True])
def test_variables_are_those_of_complete_steps(strategy, looks):
    with strategy.scope():
        count = daskdist.Variable(0, aggregation="SUM")
        history = daskdist.Variable(np.zeros(2))

    def step(x):
        # A replica may make the first assignment before it knows that another one is lost; the second needs all values.
        history.assign(history.read_value() * 0.5 + [1, count.read_value()])
        count.assign_add(np.int64(len(x)))
        return count.read_value()

    counts = []
    for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(360).batch(6))):
        result = strategy.run(step, args=(batch,))
        if looks:
            counts.append(int(strategy.local_results(result)[0]))
        if number == 20:
            kill(strategy, 0)
    assert int(count) == 360
    assert counts == ([*range(6, 366, 6)] if looks else [])
    expected = np.zeros(2)
    for number in range(60):
        expected = expected * 0.5 + [1, 6 * number]
    for value in strategy.local_results(history.values):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("waits", [False, True])
def test_steps_that_changed_values_of_a_lost_replica_fail(killable_workers, strategy, waits):
    with strategy.scope():
        seen = daskdist.Variable(0, synchronization="ON_READ", aggregation="SUM")

    def step(x):
        seen.assign_add(len(x))
        return len(x)

    num_failed, num_steps, lengths = 0, 0, []
    batches = iter(strategy.distribute_dataset(Dataset.range(600).batch(6)))
    while True:
        try:
            batch = next(batches)
            num_steps += 1
            lengths.append(strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None))
        except StopIteration:
            break
        except errors.ClusterError:
            # A call after the loss is known raises the error of earlier ones that were not looked at; if all steps were
            # made before that, the end of the pass does.
            num_failed += 1
        if num_steps == 51 and not num_failed:
            kill(strategy, 0)
            if waits:
                # The next step that is made finds the loss.
                eventually(lambda: len(running_workers(killable_workers.client)) == 2)
    assert num_steps == 100
    assert num_failed <= 1
    assert 100 - num_failed <= len(lengths) <= 100
    for length in lengths:
        try:
            assert int(length) == 6
        except (errors.ClusterError, errors.CollectiveError):
            num_failed += 1
    assert num_failed
    assert strategy.num_replicas_in_sync == 2


def test_an_error_of_a_function_is_raised_once_and_not_made_again(strategy):
    def fail_at(x):
        if 300 in x:
            raise ValueError("the function's own")
        return len(x)

    num_rows, failures = 0, []
    for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(600).batch(6))):
        try:
            num_rows += int(strategy.reduce("SUM", strategy.run(fail_at, args=(batch,)), axis=None))
        except ValueError as error:
            failures.append(error)
        if number == 10:
            kill(strategy, 0)
    assert len(failures) == 1
    assert num_rows == 594


def test_restarted_workers_take_part_in_the_next_pass(strategy, killable_workers):
    with strategy.scope():
        count = daskdist.Variable(0, aggregation="SUM")
    steps = strategy.distribute_dataset(Dataset.range(600).batch(12))
    for number, batch in enumerate(steps):
        strategy.run(lambda x: count.assign_add(np.int64(len(x))), args=(batch,))
        if number == 10:
            kill(strategy, 0)
    # Reading the value waits for all steps, so the program knows that the worker is lost.
    assert int(count) == 600
    assert strategy.num_replicas_in_sync == 2
    with strategy.scope():
        seen = daskdist.Variable(0, synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: seen.assign_add(3))
    eventually(lambda: len(running_workers(killable_workers.client)) == 3)
    rows = [strategy.local_results(batch) for batch in steps]
    assert strategy.num_replicas_in_sync == 3
    assert {len(parts) for parts in rows} == {3}
    assert sorted(np.concatenate([part for parts in rows for part in parts]).tolist()) == list(range(600))
    assert [int(value) for value in strategy.local_results(count.values)] == [600] * 3
    assert [int(value) for value in strategy.local_results(seen.values)] == [3, 3, 0]
    strategy.run(lambda: (count.assign_add(np.int64(1)), seen.assign_add(1)))
    assert (int(count), int(seen)) == (603, 9)


@pytest.mark.parametrize("is_generator", [False, True])
def test_a_pass_over_datasets_of_a_function_after_another_began_with_a_restarted_worker(
    strategy, killable_workers, is_generator
):
    def share(context):
        numbers = range(context.input_pipeline_id, 600, context.num_input_pipelines)
        if is_generator:
            rows = Dataset.from_generator(lambda: iter(numbers), output_signature=daskdist.TensorSpec((), np.int64))
        else:
            rows = Dataset.from_tensor_slices(np.array(numbers)).shuffle(50)
        return rows.batch(5)

    def rows_of(batches):
        return np.concatenate([part for batch in batches for part in strategy.local_results(batch)]).tolist()

    steps = strategy.distribute_datasets_from_function(share)
    batches = iter(steps)
    first, before = rows_of([next(batches)]), set(strategy.workers)
    kill(strategy, 0)
    eventually(lambda: len(running_workers(killable_workers.client) - before) == 1)
    assert sorted(rows_of(steps)) == list(range(600))
    if is_generator:
        with pytest.raises(errors.ClusterError, match=r"lost with their workers, .*from_generator may not give"):
            rows_of(batches)
    else:
        assert sorted(first + rows_of(batches)) == list(range(600))


def test_rows_that_are_read_slowly_when_a_worker_is_lost(strategy):
    def slow(x):
        time.sleep(0.005)
        return x + 0

    rows = []
    for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(1_200).map(slow).batch(30))):
        rows.append(strategy.gather(batch, 0))
        if number == 2:
            kill(strategy, 0)
    assert np.concatenate(list(map(np.asarray, rows))).tolist() == list(range(1_200))


def test_steps_that_cannot_be_made_again_and_whose_results_nobody_has_are_told_of(strategy):
    with strategy.scope():
        seen = daskdist.Variable(lambda: SimpleNamespace(number=0))

    def step(x):
        seen.read_value().number += len(x)
        return len(x)

    def train():
        for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(600).batch(6))):
            strategy.run(step, args=(batch,))
            if number == 50:
                kill(strategy, 0)
        eventually(lambda: len(internals_of(strategy).replicas_left()) == 2)
        strategy.run(len, args=([],))

    with pytest.raises(errors.ClusterError, match="steps that failed with a lost worker are not made again"):
        train()


def test_a_worker_is_retired_in_a_pass(strategy, killable_workers):
    client, leaving = killable_workers.client, strategy.workers[0]
    workers = internals_of(strategy).backend.live_workers
    rows, total = [], 0
    for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(1_800).shuffle(100, seed=1).batch(30))):
        result = strategy.run(rows_and_sum, args=(batch,))
        if number == 10:
            assert list(client.retire_workers([leaving])) == [leaving]
            assert eventually(lambda: workers.leaving) == [leaving]
        # Its results of this step can still be used.
        total += strategy.reduce("SUM", result["sum"], axis=None)
        rows.append(strategy.gather(result["rows"], 0))
    assert sorted(np.concatenate(list(map(np.asarray, rows))).tolist()) == list(range(1_800))
    assert int(total) == sum(range(1_800))
    assert leaving not in strategy.workers
    # No step was interrupted.
    assert internals_of(strategy).backend.repetition.num_made_again == 0


@pytest.mark.parametrize("is_at_rest", [False, True])
def test_replicas_of_a_retired_worker_hand_over_values_of_their_own(strategy, killable_workers, is_at_rest):
    leaving = strategy.workers[0]
    with strategy.scope():
        total = daskdist.Variable(0, synchronization="ON_READ", aggregation="SUM")
        steps = daskdist.Variable(0, synchronization="ON_READ", aggregation="ONLY_FIRST_REPLICA")

    def add(rows):
        total.assign_add(int(rows.sum()))
        steps.assign_add(daskdist.get_replica_context().replica_id_in_sync_group + 1)

    for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(600).batch(30))):
        strategy.run(add, args=(batch,))
        if number == 10:
            assert list(killable_workers.client.retire_workers([leaving])) == [leaving]
            if is_at_rest:
                # It does not wait for the program.
                eventually(lambda: not internals_of(strategy).backend.streams.is_open(leaving))
                assert (int(total.read_value()), int(steps.read_value())) == (sum(range(330)), 11)
    assert leaving not in strategy.workers
    assert (int(total.read_value()), int(steps.read_value())) == (sum(range(600)), 20)


class SlowTeardown(WorkerPlugin):
    """Holds up the end of a worker until a file exists."""

    def __init__(self, path):
        self.path = path

    async def teardown(self, worker):
        until = time.monotonic() + 30
        while not self.path.exists() and time.monotonic() < until:
            await asyncio.sleep(0.01)


def test_a_retired_worker_takes_no_step_after_it_handed_over_its_values(strategy, killable_workers, tmp_path):
    client, leaving = killable_workers.client, strategy.workers[0]
    with strategy.scope():
        total = daskdist.Variable(0, synchronization="ON_READ", aggregation="SUM")
    streams = internals_of(strategy).backend.streams
    strategy.local_results(strategy.run(total.assign_add, args=(1,)))
    client.register_plugin(SlowTeardown(tmp_path / "continues"), name="slow teardown")
    with ThreadPoolExecutor(1) as threads:
        retired = threads.submit(client.retire_workers, [leaving])
        try:
            # Its process is still there.
            eventually(lambda: not streams.is_open(leaving), within_s=8)
            strategy.run(total.assign_add, args=(1,))
            assert int(total.read_value()) == 5
        finally:
            (tmp_path / "continues").touch()
            client.unregister_worker_plugin("slow teardown")
        assert list(retired.result(60)) == [leaving]


@pytest.fixture
def summed(strategy, killable_workers):
    """Return a variable that is summed, of which each replica has its number plus one, and the first worker stopped."""
    with strategy.scope():
        total = daskdist.Variable(0, synchronization="ON_READ", aggregation="SUM")

    def add():
        total.assign_add(daskdist.get_replica_context().replica_id_in_sync_group + 1)

    strategy.run(add)
    assert int(total.read_value()) == 6
    leaving = strategy.workers[0]
    yield total
    with contextlib.suppress(ProcessLookupError):
        kill(strategy, 0)
    client = killable_workers.client
    eventually(lambda: leaving not in client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.workers)))


def test_a_leaving_worker_that_is_silent_is_logged(strategy, summed, monkeypatch, caplog):
    monkeypatch.setattr(worker_recovery, "_HANDS_OVER_WITHIN_S", 0.5)
    caplog.set_level(logging.WARNING)
    leaving = strategy.workers[0]
    os.kill(strategy.pids[0], signal.SIGSTOP)
    internals_of(strategy).backend.live_workers.note_leaving(leaving)
    assert [int(x) for x in strategy.local_results(strategy.run(int, args=(1,)))] == [1, 1]
    assert f"{leaving}, which leaves, did not hand over its ON_READ variables within 0.5 s" in caplog.text
    assert leaving not in strategy.workers
    # The value of its replica is lost.
    assert int(summed.read_value()) == 5


def test_values_handed_over_stay_if_the_worker_ends_before_it_answers_again(strategy, summed, killable_workers, caplog):
    backend, leaving = internals_of(strategy).backend, strategy.workers[0]
    caplog.set_level(logging.WARNING)

    def hand_over(dask_worker):
        (steps,) = dask_worker.plugins["daskdist-steps"].by_token.values()
        steps.announce_leaving()
        steps.hand_over()

    killable_workers.client.run(hand_over, workers=[leaving])
    eventually(lambda: backend.live_workers.num_handed_over(leaving) == 1)
    os.kill(strategy.pids[0], signal.SIGSTOP)
    # It is killed while the program waits for values that may be newer.
    threading.Timer(0.5, kill, (strategy, 0)).start()
    assert [int(x) for x in strategy.local_results(strategy.run(int, args=(1,)))] == [1, 1]
    assert leaving not in strategy.workers
    assert "did not hand over" not in caplog.text
    assert int(summed.read_value()) == 6


@pytest.mark.parametrize("killed_at", [None, 10])
def test_a_pass_over_datasets_of_a_function_ends_with_an_error_that_names_the_lost_worker(strategy, killed_at):
    def share(context):
        rows = Dataset.range(1_800).shard(context.num_input_pipelines, context.input_pipeline_id)
        return rows.map(lambda x: x + 0).batch(10)

    steps, lost = strategy.distribute_datasets_from_function(share), strategy.workers[0]

    def visit():
        if killed_at is None:
            # The loss is noticed while the first data is waited for.
            kill(strategy, 0)
        for number, batch in enumerate(steps):
            np.asarray(strategy.gather(strategy.run(lambda x: x, args=(batch,)), 0))
            if number == killed_at:
                kill(strategy, 0)

    with pytest.raises(errors.ClusterError, match=f"lost {lost}"):
        visit()
    # The next pass uses datasets of the remaining workers.
    rows = [part for batch in steps for part in strategy.local_results(batch)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(1_800))


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_step_that_was_taken_is_not_left_out_if_its_function_cannot_be_called(strategy, monkeypatch, is_lost):
    steps = iter(strategy.distribute_dataset(Dataset.range(240).batch(24).map(lambda x: x + 1, device=True)))
    run, rows = strategy.run, []

    def fail_after_a_step(fn, args):
        if not rows:
            return run(fn, args)
        if is_lost:
            monkeypatch.setattr(strategy, "run", run)
            kill(strategy, 0)
            eventually(lambda: internals_of(strategy).backend.live_workers.has_lost)
        raise errors.ClusterError("it cannot be called")

    monkeypatch.setattr(strategy, "run", fail_after_a_step)
    rows += strategy.local_results(next(steps))
    if is_lost:
        rows += [part for step in steps for part in strategy.local_results(step)]
        assert strategy.num_replicas_in_sync == 2
    else:
        for _ in range(2):
            with pytest.raises(errors.ClusterError, match="it cannot be called"):
                next(steps)
    assert np.concatenate(rows).tolist() == [*range(1, 241 if is_lost else 25)]


def test_another_worker_tells_of_a_loss_first(killable_workers, monkeypatch):
    failures = []

    def is_noticed_late(method):
        async def run(*args, **kwargs):
            try:
                await method(*args, **kwargs)
            except OSError:
                until = time.monotonic() + 10
                while not failures[0] and time.monotonic() < until:
                    await asyncio.sleep(0.01)
                # Leave the program time to raise the failure.
                await asyncio.sleep(0.3)
                raise

        return run

    monkeypatch.setattr(Link, "run", is_noticed_late(Link.run))
    client = killable_workers.wait()
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=1) as strategy:
        failures.append(internals_of(strategy).backend.streams.failures)
        with strategy.scope():
            count = daskdist.Variable(0, aggregation="SUM")
        first = client.run(os.getpid, workers=strategy.workers[:1])
        for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(600).batch(12))):
            strategy.run(lambda x: count.assign_add(np.int64(len(x))), args=(batch,))
            if number == 10:
                os.kill(*first.values(), signal.SIGKILL)
                eventually(lambda: failures[0])
        assert int(count) == 600
        assert strategy.num_replicas_in_sync == 2


def test_an_error_that_nobody_saw_is_raised_after_a_worker_is_lost(strategy):
    def fail_at(x):
        if 300 in x:
            raise ValueError("the function's own")
        return len(x)

    def train():
        streams = internals_of(strategy).backend.streams
        for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(600).batch(6))):
            strategy.run(fail_at, args=(batch,))
            if number == 60:
                streams.wait(lambda: not streams.is_busy)
                kill(strategy, 0)
                eventually(streams.lost)

    with pytest.raises(ValueError, match="the function's own"):
        train()
    assert strategy.num_replicas_in_sync == 2
