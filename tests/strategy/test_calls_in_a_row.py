"""Calls of one function in a row, whose arguments differ."""

from __future__ import annotations

import dask
import numpy as np
import pytest

from daskdist import Dataset, MultiWorkerMirroredStrategy, PerReplica, errors

pytestmark = pytest.mark.cluster

ROWS = {"x": np.arange(400.0), "y": np.arange(400.0)[::-1] ** 2}


def difference(x, y, scale=1.0):
    return (x * scale - y).sum()


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_calls_with_the_last_result(client, num_replicas):
    def gradient(batch, weights):
        return weights / 2 + (batch["x"] - batch["y"]).mean()

    with MultiWorkerMirroredStrategy(client, num_replicas_per_worker=num_replicas) as strategy:
        parts = strategy.num_replicas_in_sync
        steps = iter(strategy.distribute_dataset(Dataset.from_tensor_slices(ROWS).batch(20 * parts).repeat(2)))
        weights, expected = np.ones(3), np.ones(3)
        for start in range(0, 800, 20 * parts):
            weights = strategy.reduce("MEAN", strategy.run(gradient, args=(next(steps), weights)), axis=None)
            difference = (ROWS["x"] - ROWS["y"])[start % 400 : start % 400 + 20 * parts]
            expected = np.mean([expected / 2 + part.mean() for part in np.split(difference, parts)], axis=0)
        np.testing.assert_allclose(weights, expected)


def test_calls_with_other_arguments(on_cluster):
    steps = iter(on_cluster.distribute_dataset(Dataset.from_tensor_slices(ROWS).batch(20)))
    scale, large = np.float64(3), np.full(20_000, 5.0)

    def scaled(x, y):
        return difference(x, y, scale)

    def first(x, large):
        return x.sum() + large[0]

    actual, expected = [], []
    for number, start in enumerate(range(0, 400, 20)):
        batch = next(steps)
        x, y = (ROWS[name][start : start + 20] for name in "xy")
        match number // 2 % 5:
            case 0:
                actual.append(on_cluster.run(difference, args=(batch["x"], batch["y"])))
                expected.append((x - y).sum())
            case 1:
                actual.append(on_cluster.run(difference, args=(batch["y"], batch["x"])))
                expected.append((y - x).sum())
            case 2:
                # The same function with another name for an argument, under another setting.
                with dask.config.set({"daskdist.timeouts.collective": 100 + number % 2}):
                    actual.append(on_cluster.run(difference, args=(batch["x"],), kwargs={"y": batch["y"]}))
                expected.append((x - y).sum())
            case 3:
                scale += 1
                actual.append(on_cluster.run(scaled, args=(batch["x"], batch["y"])))
                expected.append((x * scale - y).sum())
            case 4:
                large[0] += 1
                actual.append(on_cluster.run(first, args=(batch["x"], large)))
                expected.append(x.sum() + 2 * large[0])
    sums = [float(on_cluster.reduce("SUM", result, axis=None)) for result in actual]
    np.testing.assert_allclose(sums, expected)


def test_a_failure_leaves_later_calls_as_they_are(on_cluster):
    def fails_at(x):
        if 45 in x:
            raise ValueError("at 45")
        return x.sum()

    steps = on_cluster.distribute_dataset(Dataset.from_tensor_slices(ROWS["x"]).batch(20))
    results = [on_cluster.reduce("SUM", on_cluster.run(fails_at, args=(step,)), axis=None) for step in steps]
    with pytest.raises(ValueError, match="at 45"):
        float(results.pop(2))
    sums = ROWS["x"].reshape(-1, 20).sum(1)
    np.testing.assert_allclose(list(map(float, results)), np.delete(sums, 2))


def test_a_reduction_that_fails_is_raised_where_it_is_needed(on_cluster):
    def first(weights, size):
        return np.ones(size)

    def step(sizes):
        return on_cluster.reduce("SUM", on_cluster.run(first, args=(1, sizes)), axis=None)

    for _ in range(3):
        on_cluster.run(first, args=(step(2), 2))
    failed = step(PerReplica([2, 3]))
    depends = on_cluster.run(first, args=(failed, 2))
    for value in (depends, failed):
        with pytest.raises(errors.ArgumentError, match="shapes differ"):
            on_cluster.local_results(value)
    for _ in range(5):
        assert on_cluster.local_results(on_cluster.run(float, args=(1,))) == (1.0, 1.0)
