"""Whole loops on replicas that fail or end early on one of them; and steps whose batch cannot be read."""

from __future__ import annotations

import logging
import os
import signal
import time
from functools import partial

import dask
import numpy as np
import pytest
from conftest import mirrored, new_cluster

import daskdist
from daskdist import Dataset, Options, errors

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(
    params=[
        "embedded",
        pytest.param("a replica a worker", marks=pytest.mark.cluster),
        pytest.param("two on each", marks=pytest.mark.cluster),
    ]
)
def strategy(request):
    """Return replicas in this process, on two workers, or two on each of two workers of one thread."""
    if request.param == "embedded":
        yield mirrored(3)
        return
    client = request.getfixturevalue("start_cluster")(2, 1)
    per_worker = 1 if request.param == "a replica a worker" else 2
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=per_worker) as made:
        yield made


def own_number():
    return daskdist.get_replica_context().replica_id_in_sync_group


def batches(strategy, num_steps):
    size = strategy.num_replicas_in_sync
    return strategy.distribute_dataset(Dataset.range(num_steps * 2 * size).batch(2 * size))


# --- captured ---


@pytest.mark.cluster
def test_in_a_captured_function(on_cluster):
    def total(it, start):
        actual = start
        for x in it:
            actual += daskdist.get_replica_context().all_reduce("SUM", int(x.sum()))
        return actual

    @daskdist.function
    def twice(distributed):
        first = on_cluster.run(total, args=(distributed, 0))
        return on_cluster.run(total, args=(distributed, first))

    distributed = batches(on_cluster, 3)
    for _ in range(2):
        assert list(map(int, on_cluster.local_results(twice(distributed)))) == [2 * sum(range(12))] * 2
    assert "2 steps" in twice.explain()


# --- replicas that leave ---


def test_a_replica_that_leaves_early_does_not_block_others(strategy):
    def loop(it):
        actual = []
        for x in it:
            actual.append(int(x.sum()))
            if own_number() == 0 and len(actual) == 2:
                break
        return len(actual)

    actual = strategy.local_results(strategy.run(loop, args=(batches(strategy, 40),)))
    assert list(map(int, actual)) == [2] + [40] * (strategy.num_replicas_in_sync - 1)


def test_collectives_name_the_replica_that_left_early(strategy):
    def loop(it):
        num_steps = 0
        for x in it:
            if own_number() == 0 and num_steps == 2:
                break
            num_steps += 1
            daskdist.get_replica_context().all_reduce("SUM", x.sum())
        return num_steps

    begin = time.monotonic()
    with pytest.raises(errors.CollectiveError, match=r"by some replicas only: replica 0 has ended"):
        strategy.local_results(strategy.run(loop, args=(batches(strategy, 40),)))
    assert time.monotonic() - begin < 25
    # The strategy can be used afterwards.
    actual = strategy.local_results(strategy.run(sum_of_all, args=(batches(strategy, 2),)))
    assert len(set(map(int, actual))) == 1


def sum_of_all(it):
    return sum(daskdist.get_replica_context().all_reduce("SUM", int(x.sum())) for x in it)


# --- a batch that cannot be read ---


def refuse_large(x):
    # The row 31 is on the last replica, whether there are two, three or four of them.
    if x == 31:
        raise ValueError("too much for it")
    return x


def numbers_of_batches(strategy):
    # Each batch has one row for each replica; in the middle of the pass, the last replica's row cannot be read.
    size = strategy.num_replicas_in_sync
    ids = np.where(np.arange(20 * size) == 10 * size - 1, 31, 0)
    return strategy.distribute_dataset(Dataset.from_tensor_slices(ids).map(refuse_large).batch(size))


def test_an_unreadable_batch_releases_waiting_replicas(strategy):
    begin = time.monotonic()
    with pytest.raises((ValueError, errors.DaskdistError), match="too much for it"):
        strategy.local_results(strategy.run(sum_of_all, args=(numbers_of_batches(strategy),)))
    assert time.monotonic() - begin < 25


@pytest.mark.cluster
def test_errors_of_reading_take_precedence_over_missing_replicas(on_cluster):
    def loop(it):
        if own_number() == 0:
            return daskdist.get_replica_context().all_reduce("SUM", 0)
        return sum(int(x.sum()) for x in it)

    with pytest.raises(errors.UserFunctionError, match=r"too much for it.* \(raised by replica 1"):
        on_cluster.run(loop, args=(numbers_of_batches(on_cluster),))


def fail_on_last(x, last):
    if np.max(x) == last:
        raise ValueError("one is too much")
    return x


def reduced(x, folder):
    """Sum the replicas' values; write the error that a waiting replica gets into a file."""
    try:
        return daskdist.get_replica_context().all_reduce("SUM", np.sum(x))
    except errors.CollectiveError as error:
        (folder / f"part {own_number()}").write_text(str(error))
        (folder / f"part {own_number()}").rename(folder / f"told {own_number()}")
        raise


def words_told(folder, number):
    end = time.monotonic() + 15
    while not (report := folder / f"told {number}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    return report.read_text()


@pytest.mark.cluster
@pytest.mark.parametrize("per_worker", [1, 2])
def test_a_step_with_an_unreadable_batch_releases_other_replicas(start_cluster, tmp_path, per_worker):
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(2, 1), num_replicas_per_worker=per_worker) as strategy:
        size = strategy.num_replicas_in_sync
        # Splits are as small as a worker's rows of one batch.
        with dask.config.set({"daskdist.split-bytes": 8 * per_worker}):
            good = strategy.experimental_make_numpy_dataset(np.arange(2 * size))
        batch, _ = strategy.distribute_dataset(good.batch(size))
        strategy.local_results(strategy.run(reduced, args=(batch, tmp_path)))
        bad = good.map(partial(fail_on_last, last=2 * size - 1)).batch(size)
        begin = time.monotonic()
        _, step = strategy.distribute_dataset(bad)
        with pytest.raises(errors.DaskdistError, match="one is too much"):
            strategy.local_results(strategy.run(reduced, args=(step, tmp_path)))
        assert f"replica {size - 1} raised UserFunctionError" in (words := words_told(tmp_path, 0))
        assert "one is too much" in words
        assert time.monotonic() - begin < 25


@pytest.mark.cluster
@pytest.mark.parametrize("is_captured", [True, False], ids=["captured", "apart"])
def test_a_step_with_a_failed_argument_releases_other_replicas(on_cluster, tmp_path, is_captured):
    def both(last):
        made = on_cluster.run(fail_on_last, args=(daskdist.PerReplica([0, 1]), last))
        return on_cluster.run(reduced, args=(made, tmp_path))

    called = daskdist.function(both) if is_captured else both
    # The first call learns the structure of the results.
    on_cluster.local_results(called(2))
    begin = time.monotonic()
    with pytest.raises((ValueError, errors.CollectiveError), match="one is too much"):
        on_cluster.local_results(called(1))
    assert "replica 1 raised ValueError: one is too much" in words_told(tmp_path, 0)
    assert time.monotonic() - begin < 25


# --- elements that are left out ---


@pytest.mark.parametrize("name", ["ones", "batches"])
def test_skipped_elements_are_counted_as_in_steps(strategy, name):
    size = strategy.num_replicas_in_sync
    node = Dataset.range(12 * size)
    node = node.map(refuse_thirds).batch(size) if name == "ones" else node.batch(size).map(refuse_tens)

    def distributed():
        return strategy.distribute_dataset(node.with_options(Options(on_error="skip")))

    steps = [strategy.local_results(step) for step in distributed()]
    expected = [sum(int(np.sum(step[number])) for step in steps) for number in range(size)]

    def loop(it):
        actual = [x.sum() for x in it]
        return np.array([len(actual), sum(actual)])

    actual = strategy.local_results(strategy.run(loop, args=(distributed(),)))
    assert [np.asarray(result).tolist() for result in actual] == [[len(steps), value] for value in expected]
    assert 0 < len(steps) < 12


def refuse_thirds(x):
    if x % 3 == 1:
        raise ValueError("no thirds")
    return x


def refuse_tens(x):
    if (x % 10 == 0).any():
        raise ValueError("no tens")
    return x


def test_skipped_elements_are_logged(caplog):
    strategy = mirrored(2)
    dataset = Dataset.range(24).map(refuse_thirds).batch(4).with_options(Options(on_error="skip"))
    distributed = strategy.distribute_dataset(dataset)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "daskdist"):
        strategy.run(sum_of_all, args=(distributed,))
    assert [line for line in caplog.messages if "in all" in line] == ["left out 8 elements in all"]
    assert "no thirds" in caplog.messages[0]


# --- a worker that is lost ---


@pytest.mark.cluster
def test_a_worker_lost_in_a_loop():
    with new_cluster(3) as client:

        def apart(it):
            for number, _ in enumerate(it):
                if own_number() == 1 and number == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
            return 0

        def together(it):
            actual = 0
            for number, x in enumerate(it):
                actual += daskdist.get_replica_context().all_reduce("SUM", float(x.sum()))
                if own_number() == 1 and number == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
            return actual

        for loop in (apart, together):
            strategy = daskdist.MultiWorkerMirroredStrategy(client)
            num_replicas, lost = strategy.num_replicas_in_sync, strategy.workers[1]
            begin = time.monotonic()
            with pytest.raises((errors.ClusterError, errors.CollectiveError), match=f"lost {lost}"):
                strategy.local_results(strategy.run(loop, args=(batches(strategy, 50),)))
            assert time.monotonic() - begin < 25
            # The replicas that are left continue.
            assert strategy.num_replicas_in_sync == num_replicas - 1
            sums = strategy.local_results(strategy.run(sum_of_all, args=(batches(strategy, 3),)))
            assert len(set(map(float, sums))) == 1
            strategy.close()
