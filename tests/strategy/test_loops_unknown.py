"""Whole loops over datasets of a function, whose number of elements only their worker can know."""

from __future__ import annotations

import time

import dask
import numpy as np
import pytest

import daskdist
from daskdist import Dataset, InputOptions, Options, errors

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def lengths_of(numbers, drop_uneven=False):
    """Return a dataset function; its datasets do not know their numbers of elements, which are given here."""

    def dataset_fn(context):
        number = numbers[context.input_pipeline_id]
        own = Dataset.range(3 * number).filter(lambda x: x % 3 == 0).batch(1)
        return own.with_options(Options(drop_uneven=drop_uneven))

    return dataset_fn


def with_rowless(context):
    own = Dataset.range(8 + 4 * context.input_pipeline_id).filter(lambda x: x % 7 != 5).batch(2)
    # Some elements have no rows, other ones on each worker.
    return own.map(lambda x: x[x % 4 != 2 * context.input_pipeline_id])


def as_lists(x):
    return np.asarray(x).tolist()


def passes_of(it, num_passes, is_together):
    actual = []
    for _ in range(num_passes):
        actual.append([])
        for x in it:
            actual[-1].append(as_lists(x))
            if is_together:
                daskdist.get_replica_context().all_reduce("SUM", len(x))
    return repr(actual)


def by_steps(strategy, distributed, num_passes):
    actual = [[] for _ in range(strategy.num_replicas_in_sync)]
    for _ in range(num_passes):
        steps = [strategy.local_results(step) for step in distributed]
        for number, result in enumerate(actual):
            result.append([as_lists(step[number]) for step in steps])
    return list(map(repr, actual))


MADE = {
    "even": lengths_of([5, 5, 5, 5]),
    "uneven": lengths_of([3, 11, 0, 6]),
    "long": lengths_of([60, 20, 1, 90]),
    "nothing": lengths_of([0, 0, 0, 0]),
    "uneven dropped": lengths_of([9, 4, 6, 5], drop_uneven=True),
    "without rows": with_rowless,
}


@pytest.mark.parametrize(
    ("name", "mode", "is_together"),
    [
        *((name, "PER_WORKER", True) for name in MADE),
        *((name, "PER_REPLICA", False) for name in ("uneven", "uneven dropped")),
        ("without rows", "PER_WORKER", False),
        ("without rows", "PER_REPLICA", True),
    ],
)
def test_as_step_by_step(start_cluster, name, mode, is_together):
    per_worker = 1 if name == "long" else 2
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(2, 1), num_replicas_per_worker=per_worker) as strategy:

        def distributed():
            options = InputOptions(replication_mode=mode)
            return strategy.distribute_datasets_from_function(MADE[name], options)

        num_passes = 2 if name in ("uneven", "without rows") else 1
        expected = by_steps(strategy, distributed(), num_passes)
        actual = strategy.run(passes_of, args=(distributed(), num_passes, is_together))
        assert list(map(str, strategy.local_results(actual))) == expected


def test_a_replica_that_leaves_its_loop_is_not_waited_for(on_cluster):
    def loop(it):
        number = daskdist.get_replica_context().replica_id_in_sync_group
        return sum(1 for _, x in zip(range(2 if number else 100), it, strict=False))

    distributed = on_cluster.distribute_datasets_from_function(lengths_of([4, 50]))
    begin = time.monotonic()
    few, left = on_cluster.local_results(on_cluster.run(loop, args=(distributed,)))
    # The other replica still gets the steps that were read before this one left.
    assert 4 <= int(few) < 50
    assert int(left) == 2
    assert time.monotonic() - begin < 25


def test_a_replica_that_fails_is_not_waited_for(on_cluster):
    def loop(it):
        if daskdist.get_replica_context().replica_id_in_sync_group:
            raise KeyError("no such thing")
        return sum(1 for _ in it)

    distributed = on_cluster.distribute_datasets_from_function(lengths_of([4, 50]))
    begin = time.monotonic()
    with pytest.raises(KeyError, match="no such thing"):
        on_cluster.local_results(on_cluster.run(loop, args=(distributed,)))
    assert time.monotonic() - begin < 25


@pytest.mark.parametrize("is_set_by", ["the function", "the program"])
def test_different_passes_are_an_error(on_cluster, tmp_path, is_set_by):
    done = tmp_path / "done"
    short = {"daskdist.timeouts.collective": 0.5}

    def loop(it):
        list(it)
        if daskdist.get_replica_context().replica_id_in_sync_group:
            end = time.monotonic() + 20
            while not done.exists() and time.monotonic() < end:
                time.sleep(0.01)
            return 0
        try:
            with dask.config.set(short if is_set_by == "the function" else {}):
                list(it)
        finally:
            done.touch()
        return 0

    distributed = on_cluster.distribute_datasets_from_function(lengths_of([4, 5]))
    with (
        dask.config.set(short if is_set_by == "the program" else {}),
        pytest.raises(errors.CollectiveError, match=r"replica 1 did not reach step 4 of pass 1 .*within 0.5 s"),
    ):
        on_cluster.local_results(on_cluster.run(loop, args=(distributed,)))
