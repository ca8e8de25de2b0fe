"""A worker process is killed: its data are read again, and the program does not wait for its replicas."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator

import dask
import numpy as np
import pytest
from conftest import eventually, new_cluster
from distributed import Client, Event, Status, Worker
from distributed.worker_state_machine import AcquireReplicasEvent, FreeKeysEvent, RemoveReplicasEvent

import daskdist
from daskdist import Dataset, errors, waiting
from daskdist.execute.callers import submit
from daskdist.strategy.replica.contract import internals_of


@pytest.fixture
def own_client() -> Iterator[Client]:
    """Return the client of a cluster that no other test uses, since the test will break it."""
    with new_cluster() as client:
        yield client


@pytest.mark.cluster
def test_a_killed_worker_loses_no_row_and_hangs_nothing(own_client):
    strategy = daskdist.MultiWorkerMirroredStrategy(own_client)
    ds = Dataset.range(20_000).map(lambda x: x + 0).shuffle(1_000, seed=1).batch(100)
    lost = strategy.workers[0]
    rows = []
    for number, batch in enumerate(strategy.distribute_dataset(ds)):
        rows += [row for values in strategy.local_results(batch) for row in values.tolist()]
        if number == 20:
            os.kill(own_client.run(os.getpid)[lost], signal.SIGKILL)
    assert sorted(rows) == list(range(20_000))
    # The pass has continued with the other replica.
    assert lost not in strategy.workers
    assert isinstance(int(strategy.run(os.getpid)), int)
    strategy.close()


@pytest.mark.cluster
def test_a_small_result_outlives_the_worker_that_computed_it(own_client):
    starts = daskdist.PerReplica([np.linspace(0, 1, 500), np.linspace(1, 3, 500) ** 3])

    def gradient(weights, start):
        return weights * 0.1 + start

    with daskdist.MultiWorkerMirroredStrategy(own_client) as strategy:
        weights, expected = np.ones(500), np.ones(500)
        for _ in range(4):
            weights = strategy.reduce("MEAN", strategy.run(gradient, args=(weights, starts)), axis=None)
            expected = np.mean([gradient(expected, start) for start in starts.values], axis=0)
        # Wait for the weights without looking at them.
        strategy.local_results(strategy.run(np.sum, args=(weights,)))
        root = strategy.workers[0]
        os.kill(own_client.run(os.getpid)[root], signal.SIGKILL)
        eventually(lambda: not internals_of(strategy).backend.streams.is_open(root))
        np.testing.assert_array_equal(np.asarray(weights), expected)
        with pytest.raises((errors.ClusterError, errors.CollectiveError), match=f"lost {root}"):
            strategy.local_results(strategy.run(np.copy, args=(weights,)))
        (actual,) = strategy.local_results(strategy.run(np.copy, args=(weights,)))
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.cluster
def test_values_of_a_killed_worker_are_not_waited_for(own_client, monkeypatch):
    monkeypatch.setattr(submit, "LOOK_EVERY_S", 0.1)
    with daskdist.MultiWorkerMirroredStrategy(own_client) as strategy:
        values = strategy.run(lambda: np.ones(3))
        kept = strategy.run(lambda: np.zeros(3)).persist()
        strategy.local_results((values.values[0] + 0, kept.values[0] + 0))
        rows = Dataset.from_tensor_slices(np.arange(10)).map(lambda x: x + 0).batch(2)
        lost = strategy.workers[0]
        os.kill(own_client.run(os.getpid)[lost], signal.SIGKILL)
        for look in (
            lambda: strategy.local_results(kept),
            lambda: strategy.local_results(strategy.gather(values, 0)),
            lambda: dask.compute(values),
            lambda: values.persist(),
        ):
            with pytest.raises(errors.ClusterError, match=f"lost {lost}"):
                look()
        # Datasets that are distributed now go to the remaining replicas.
        parts = [part for batch in strategy.distribute_dataset(rows) for part in strategy.local_results(batch)]
        assert np.concatenate(parts).tolist() == list(range(10))


@pytest.mark.cluster
def test_a_transfer_from_a_worker_that_has_just_left_ends_soon(on_cluster, client):
    async def transfer_s(dask_worker: Worker) -> float:
        key, nowhere, named = "rows-of-a-lost-worker", "tcp://127.0.0.1:1", {"stimulus_id": "test"}
        handle, tasks = dask_worker.handle_stimulus, dask_worker.state.tasks
        begun_at = time.monotonic()
        # Act as if one batch of the scheduler's messages asked for a transfer and told that its source has left.
        handle(AcquireReplicasEvent(who_has={key: [nowhere]}, nbytes={key: 1}, **named))
        dask_worker.stream_handlers["remove-worker"](worker=nowhere, **named)
        while tasks[key].state == "flight" and time.monotonic() < begun_at + 8:
            await asyncio.sleep(0.01)
        handle(RemoveReplicasEvent(keys=[key], **named))
        return time.monotonic() - begun_at

    assert client.run(transfer_s, workers=on_cluster.workers[:1])[on_cluster.workers[0]] < 4


@pytest.mark.cluster
def test_a_wait_for_paused_workers_says_so(own_client):
    def pause(dask_worker):
        # Otherwise Dask resumes a worker that has enough memory.
        dask_worker.memory_manager.memory_pause_fraction = False
        dask_worker.status = Status.paused

    def resume(dask_worker):
        dask_worker.status = Status.running

    def messages(dask_worker):
        return str(dask_worker.daskdist_messages)

    def note_messages(dask_worker):
        class Noted(logging.Handler):
            def emit(self, record):
                dask_worker.daskdist_messages.append(record.getMessage())

        dask_worker.daskdist_messages = []
        logging.getLogger("daskdist").addHandler(Noted())
        waiting._LOGGED_AFTER_S = 0.1

    with daskdist.MultiWorkerMirroredStrategy(own_client) as strategy:
        two = strategy.distribute_dataset(Dataset.range(2).map(lambda x: x + 0).batch(2))
        strategy.local_results(strategy.run(np.sum, args=(next(iter(two)),)))
        batches = iter(strategy.distribute_dataset(Dataset.range(20).filter(lambda x: x % 2 == 0).batch(2)))
        own_client.run(note_messages)
        own_client.run(pause)
        with (
            dask.config.set({"daskdist.timeouts.data": 0.5}),
            pytest.raises(
                errors.WaitTimeoutError, match=f"paused, as their memory is nearly full: .*{strategy.workers[0]}"
            ),
        ):
            next(batches)
        result = strategy.run(np.sum, args=(next(iter(two)),))
        eventually(lambda: all("(this worker is paused" in value for value in own_client.run(messages).values()))
        own_client.run(resume)
        assert strategy.local_results(result) == (0, 1)


@pytest.mark.cluster
def test_a_task_that_a_worker_forgot_is_begun_again_after_a_loss():
    with new_cluster(3) as client, daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        lost, worker, _ = strategy.workers
        gate, pids = Event("opens", client=client), client.run(os.getpid)
        # The worker has one thread, so that the second task waits.
        first = client.submit(lambda: gate.wait(60), workers=[worker])
        second = client.submit(lambda x: x + 1, 1, key="forgotten", workers=[worker])
        eventually(lambda: "forgotten" in client.run(lambda dask_worker: list(dask_worker.state.tasks))[worker])

        def forget(dask_worker):
            # As Dask does at an unlucky moment of a loss.
            dask_worker.handle_stimulus(FreeKeysEvent(keys=["forgotten"], stimulus_id="forgets"))

        client.run(forget, workers=[worker])
        os.kill(pids[lost], signal.SIGKILL)
        gate.set()
        assert first.result(timeout=60)
        assert second.result(timeout=60) == 2


@pytest.mark.cluster
def test_arithmetic_that_a_lost_worker_was_to_do_is_done_by_another(own_client):
    with daskdist.MultiWorkerMirroredStrategy(own_client) as strategy:
        loss = strategy.reduce("SUM", strategy.run(float, args=(3,)), axis=None)
        # Wait for the loss without looking at it.
        strategy.local_results(strategy.run(float, args=(loss,)))
        pid = own_client.run(os.getpid)[strategy.workers[0]]
        os.kill(pid, signal.SIGSTOP)
        total = loss
        for _ in range(2_000):
            total = total + 1
        larger = total > loss
        os.kill(pid, signal.SIGKILL)
        assert float(total) == 2_006
        assert bool(larger)
        assert float(loss * 2) == 12


@pytest.mark.cluster
def test_an_operation_on_what_a_lost_worker_had_does_not_keep_later_steps(own_client):
    with daskdist.MultiWorkerMirroredStrategy(own_client) as strategy:
        old = strategy.run(lambda: np.ones(2**15)).values[0]
        strategy.local_results(strategy.run(len, args=(old,)))
        log, totals = internals_of(strategy).backend._log, []
        for number, batch in enumerate(strategy.distribute_dataset(Dataset.range(400).batch(8))):
            totals.append(strategy.reduce("SUM", strategy.run(np.sum, args=(batch,)), axis=None))
            if number == 5:
                pid = own_client.run(os.getpid)[old.worker]
                os.kill(pid, signal.SIGKILL)
            if number == 20:
                with pytest.raises(errors.ClusterError, match="create it again"):
                    float((old * 2)[0])
        assert sum(map(int, totals)) == sum(range(400))

        def has_one_step():
            # Totals may come before what another worker says of its calls.
            log.rest()
            return len(log._steps) <= 1

        eventually(has_one_step)


@pytest.mark.cluster
def test_results_of_data_are_computed_again_wherever_they_are_needed(own_client):
    with daskdist.MultiWorkerMirroredStrategy(own_client) as strategy:
        (step,) = strategy.distribute_dataset(Dataset.from_tensor_slices(np.arange(2**16)).batch(2**16))
        last = step.values[1]
        doubled, expected = last * 2, np.arange(2**15, 2**16) * 2
        # Wait for the result without looking at it.
        strategy.local_results(strategy.run(len, args=(doubled,)))
        pid = own_client.run(os.getpid)[last.worker]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not internals_of(strategy).backend.streams.is_open(last.worker))
        np.testing.assert_array_equal(np.asarray(doubled + 1), expected + 1)
        np.testing.assert_array_equal(np.asarray(doubled), expected)
