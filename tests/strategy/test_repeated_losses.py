"""Calls and tasks that end each worker that makes them: an error says so before all workers are lost."""

from __future__ import annotations

import contextlib
import os
import signal

import dask
import numpy as np
import pytest
from conftest import eventually, never_restart_workers, new_cluster, running_workers
from distributed import Event, get_worker
from distributed.scheduler import KilledWorker

from daskdist import Dataset, MultiWorkerMirroredStrategy, Variable, errors, function
from daskdist.execute.callers.submit import Submit
from daskdist.strategy.calls.recovery.call_log import CallLog
from daskdist.strategy.calls.worker.worker_streams import streams_of
from daskdist.strategy.replica.contract import internals_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

MIB = 2**20
ROWS = 240
# A row in the middle of the pass.
BAD = 130
# The number of the step of 24 rows with it.
BAD_STEP = BAD // 24 + 1
ALLOWED = "distributed.scheduler.allowed-failures"


@pytest.fixture(scope="module")
def client():
    """Return the client of three workers that Dask starts again; a task is not made again after it ended two."""
    with contextlib.ExitStack() as opened:
        with dask.config.set({"distributed.worker.memory.monitor-interval": "50ms", ALLOWED: 1}):
            started = opened.enter_context(new_cluster(3, memory_limit=300 * MIB))
        yield started


@pytest.fixture
def strategy(client):
    eventually(lambda: len(running_workers(client)) == 3)
    with MultiWorkerMirroredStrategy(client) as opened:
        yield opened


@pytest.fixture
def strategy_beside_tasks():
    """Return a strategy on three workers; tasks that happen to run beside losses are made again, as by default."""
    with new_cluster(3) as started, MultiWorkerMirroredStrategy(started) as opened:
        yield opened


def fill_memory():
    taken = [np.ones(MIB) for _ in range(45)]
    # Dask ends the worker.
    Event("never").wait(60)
    return len(taken)


def visit(strategy, dataset, step=None):
    """Make a pass; return the rows of its batches, or those that steps return."""
    rows = []
    for batch in strategy.distribute_dataset(dataset.batch(24)):
        values = batch if step is None else strategy.run(step, args=(batch,))
        rows += np.concatenate(strategy.local_results(values)).tolist()
    return rows


def test_a_step_too_large_for_any_worker_is_made_twice(strategy):
    def step(batch):
        if BAD in batch:
            fill_memory()
        return batch

    with pytest.raises(
        errors.RepeatedLossError,
        match=rf"^run-step in step {BAD_STEP} of the strategy ran.*Dask ended .* MiB, .* MiB, .*\(memory_limit\)",
    ):
        visit(strategy, Dataset.range(ROWS), step)
    assert len(strategy.workers) == 1
    # It was raised once, and the other steps can be made.
    assert visit(strategy, Dataset.range(BAD), step) == [*range(BAD)]


def test_the_error_of_a_task_too_large_for_any_worker_says_so(strategy, client):
    submit = Submit(client, strategy.workers)
    handle = submit.call(lambda _: fill_memory(), [], name="large")
    assert isinstance(handle.exception(timeout=60), KilledWorker)
    for look in (submit.result, lambda of: submit.report(of, wait=True)):
        with pytest.raises(
            errors.RepeatedLossError, match=r"^large.* ran each of 2 times .*; Dask ended .*memory_limit"
        ):
            look(handle)


def test_a_step_whose_results_nobody_looks_at_ends_workers(strategy):
    def step(batch):
        if BAD in batch:
            os.kill(os.getpid(), signal.SIGKILL)
        return len(batch)

    def train():
        for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(ROWS).batch(24))):
            # The variable keeps the results until the next step.
            num_rows = strategy.run(step, args=(batch,))
            if number == BAD // 24:
                eventually(lambda: len(internals_of(strategy).replicas_left()) == 1)
            else:
                strategy.local_results(num_rows)

    with (
        dask.config.set({ALLOWED: 1}),
        pytest.raises(errors.RepeatedLossError, match=rf"run-step in step {BAD_STEP} .*; the logs"),
    ):
        train()
    assert len(strategy.workers) == 1


def ends_its_process(batch):
    if BAD in batch:
        os._exit(1)
    return batch


@pytest.mark.parametrize("way", ["each looked at", "all at the end", "in a function"])
def test_a_step_that_ends_each_worker_is_not_made_on_the_last(strategy, way):
    def visit_at_the_end():
        steps = strategy.distribute_dataset(Dataset.range(ROWS).batch(24))
        values = [strategy.run(ends_its_process, args=(batch,)) for batch in steps]
        return [strategy.local_results(value) for value in values]

    def visit_each():
        return visit(strategy, Dataset.range(ROWS), ends_its_process)

    ways = {
        "each looked at": visit_each,
        "all at the end": visit_at_the_end,
        "in a function": function(visit_at_the_end),
    }
    # Workers that are started again in time take part, and the number of losses is limited.
    ends = "(it is not made on the last|allowed-failures says how often)"
    with pytest.raises(errors.RepeatedLossError, match=rf"^run-ends_its_process in step {BAD_STEP} .*{ends}") as caught:
        ways[way]()
    message = str(caught.value)
    if "not made on the last" in message:
        assert len(strategy.workers) == 1
    else:
        assert message.count("tcp://") == 4
        assert strategy.workers
    # The strategy continues, and at the next pass with the workers that were restarted.
    assert visit(strategy, Dataset.range(BAD), ends_its_process) == [*range(BAD)]
    eventually(lambda: visit(strategy, Dataset.range(3)) == [0, 1, 2] and len(strategy.workers) == 3)


@pytest.mark.parametrize("num_workers", [2, 4])
def test_any_number_of_workers_outlives_a_step_that_ends_each(num_workers, tmp_path):
    def step(batch, total):
        (tmp_path / f"{os.getpid()}").touch()
        if BAD in batch:
            os._exit(1)
        total.assign_add(np.float64(len(batch)))
        return batch

    with new_cluster(num_workers) as own_client, MultiWorkerMirroredStrategy(own_client) as strategy:
        with strategy.scope():
            total = Variable(0.0, aggregation="SUM")
        rows = []

        def train(num_rows):
            for batch in strategy.distribute_dataset(Dataset.range(num_rows).batch(24)):
                rows.extend(np.concatenate(strategy.local_results(strategy.run(step, args=(batch, total)))).tolist())

        with pytest.raises(errors.RepeatedLossError, match=rf"run-step in step {BAD_STEP} .* not made on the last"):
            train(ROWS)
        # All earlier steps were made once, and one worker has never ended.
        assert rows == [*range(24 * (BAD_STEP - 1))]
        assert int(total) == len(rows)
        ended = {path.name for path in tmp_path.iterdir()} - {str(pid) for pid in own_client.run(os.getpid).values()}
        assert len(strategy.workers) == 1
        assert len(ended) >= num_workers - 1
        eventually(lambda: len(running_workers(own_client)) == num_workers)
        train(BAD)
        assert len(strategy.workers) == num_workers
        assert int(total) == len(rows)


@pytest.mark.parametrize("restarts_workers", [True, False])
def test_a_loop_that_ends_each_worker_is_not_made_on_the_last(tmp_path, restarts_workers):
    def loop(batches):
        with (tmp_path / "begun").open("a") as file:
            file.write("b")
        for batch in batches:
            if BAD in batch:
                os._exit(1)

    with new_cluster(3) as own_client, MultiWorkerMirroredStrategy(own_client) as strategy:
        steps = strategy.distribute_dataset(Dataset.range(ROWS).batch(24))
        if not restarts_workers:
            never_restart_workers(own_client)
        # With restarted workers, as often as asked for.
        expected = errors.ClusterError if restarts_workers else errors.RepeatedLossError
        with pytest.raises(expected, match="lost"):
            strategy.run(loop, args=(steps,), restart=3)
        assert strategy.local_results(strategy.run(lambda: 1)) == (1,) * len(strategy.workers)
        assert strategy.workers


def is_all_reported(worker):
    """Return whether a worker has told its programs of all calls that are over."""
    return not any(steps._link.state.kept for steps in streams_of(worker).by_token.values())


def test_workers_that_are_lost_at_different_steps_end_no_pass(strategy_beside_tasks, tmp_path):
    strategy = strategy_beside_tasks

    def step(batch, number, lost):
        killed = tmp_path / str(number)
        if number in lost and get_worker().address == lost[number] and not killed.exists():
            # Steps that were not reported as over would be blamed for the loss, too.
            eventually(lambda: is_all_reported(get_worker()))
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    rows, lost = [], dict(zip((3, 6), strategy.workers[1:], strict=True))
    with dask.config.set({ALLOWED: 1}):
        for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(ROWS).batch(24))):
            rows.append(strategy.run(step, args=(batch, number, lost)))
        rows = [part for values in rows for part in strategy.local_results(values)]
    assert np.concatenate(rows).tolist() == [*range(ROWS)]
    assert not {*lost.values()} & {*strategy.workers}


def test_workers_that_are_lost_together_are_one_loss(strategy_beside_tasks, tmp_path):
    strategy = strategy_beside_tasks

    def step(batch, number, lost):
        worker = get_worker().address
        there = tmp_path / f"{worker.rpartition(':')[2]}"
        if number == 5 and worker in lost and not there.exists():
            there.touch()
            eventually(lambda: len(list(tmp_path.iterdir())) == 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    rows, lost = [], strategy.workers[1:]
    with dask.config.set({ALLOWED: 1}):
        for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(ROWS).batch(24))):
            rows.append(strategy.run(step, args=(batch, number, lost)))
        rows = [part for values in rows for part in strategy.local_results(values)]
    assert np.concatenate(rows).tolist() == [*range(ROWS)]
    # The step might have ended the last worker too, so it was made again only when another one was back.
    assert len(strategy.workers) > 1


def test_a_pass_ends_where_each_attempt_of_a_task_ended_a_worker(strategy):
    def read(row):
        with contextlib.suppress(ValueError):
            get_worker()
            if row == 30:
                os.kill(os.getpid(), signal.SIGKILL)
        return row

    streams = internals_of(strategy).backend.streams
    steps = iter(strategy.distribute_dataset(Dataset.range(ROWS).map(read).batch(24)))
    next(steps)
    # It is read ahead.
    eventually(lambda: len(streams.lost()) == 2)
    for _ in range(2):
        with pytest.raises(errors.RepeatedLossError, match=r"map.* ran each of 2 times that a worker was lost"):
            next(steps)
    assert len(strategy.workers) == 1


def test_steps_that_were_made_again_before_another_loss_count_once(monkeypatch):
    def step(batch):
        total.assign_add(np.float64(batch.sum()))
        return batch.sum()

    make_again, numbers = CallLog.make_again, []

    def make_again_with_a_loss(log, logged, group):
        numbers.append(logged[0].number)
        if len(numbers) == 2:
            # The first step has been made again, and the others have not.
            os.kill(pids[group.workers[-1]], signal.SIGKILL)
            eventually(internals_of(strategy).backend.streams.lost)
        return make_again(log, logged, group)

    with new_cluster(4) as client, MultiWorkerMirroredStrategy(client) as strategy:
        never_restart_workers(client)
        with strategy.scope():
            total = Variable(0.0, aggregation="SUM")
        pids = client.run(os.getpid)
        distributed = strategy.distribute_dataset(Dataset.range(24).batch(8))
        # The first step shows what the function returns.
        assert sum(strategy.local_results(strategy.run(step, args=(next(iter(distributed)),)))) == 28
        batches = list(distributed)
        first = pids[strategy.workers[0]]
        os.kill(first, signal.SIGSTOP)
        sums = [strategy.run(step, args=(batch,)) for batch in batches]
        monkeypatch.setattr(CallLog, "make_again", make_again_with_a_loss)
        os.kill(first, signal.SIGKILL)
        assert [sum(strategy.local_results(part)) for part in sums] == [28, 92, 156]
        assert float(total) == 28 + sum(range(24))
        assert len(strategy.workers) == 2
        # Three, and then the two that had not been made again.
        assert len(numbers) == 5 - 1
