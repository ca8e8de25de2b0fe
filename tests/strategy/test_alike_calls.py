"""Calls of one kind, of which workers are sent the handles of the arguments and the places of batches only."""

from __future__ import annotations

import pickle

import dask
import numpy as np
import pytest
from conftest import messages_sent, of_kind

from daskdist import Dataset, MultiWorkerMirroredStrategy
from daskdist.strategy.steps.remote.call_inputs import lanes_of, picks_at
from daskdist.strategy.steps.sending.call_arguments import alike_arguments
from daskdist.strategy.values.extract import PerReplicaRef, pick_from_rows

pytestmark = pytest.mark.cluster

ROWS = {"x": np.arange(400.0), "y": np.arange(400.0)[::-1] ** 2}


def difference(x, y, scale=1.0):
    return (x * scale - y).sum()


def num_of_kinds(messages):
    """Return how many calls of replicas were sent whole, and how many as their handles."""
    return len(of_kind(messages, "run")), len(of_kind(messages, "run-alike"))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_calls_with_the_last_result_are_sent_as_handles(client, num_replicas):
    def gradient(batch, weights):
        return weights / 2 + (batch["x"] - batch["y"]).mean()

    with MultiWorkerMirroredStrategy(client, num_replicas_per_worker=num_replicas) as strategy:
        parts = strategy.num_replicas_in_sync
        steps = iter(strategy.distribute_dataset(Dataset.from_tensor_slices(ROWS).batch(20 * parts).repeat(2)))
        weights, expected = np.ones(3), np.ones(3)
        with messages_sent(strategy) as messages:
            for start in range(0, 800, 20 * parts):
                weights = strategy.reduce("MEAN", strategy.run(gradient, args=(next(steps), weights)), axis=None)
                difference = (ROWS["x"] - ROWS["y"])[start % 400 : start % 400 + 20 * parts]
                expected = np.mean([expected / 2 + part.mean() for part in np.split(difference, parts)], axis=0)
            np.testing.assert_allclose(weights, expected)
        # The first call has other arguments, and the second is the first of its kind.
        num_calls = 2 * 800 // (20 * parts)
        assert num_of_kinds(messages) == (4, num_calls - 4)


def test_each_replica_has_its_own_place():
    places = pick_from_rows(3, 1), pick_from_rows(5, 1)
    batch = PerReplicaRef(None, ("left", "right"), places)
    picks, columns, place = alike_arguments([batch, batch._replace(picks=(pick_from_rows(3, 0), pick_from_rows(5, 0)))])
    assert (picks, columns, place) == (((0, 1, False), (0, 0, False)), [("left", "right")], (3, 5))
    # A worker with the second replica only.
    ((replica, references, (place_there, pickled)),) = lanes_of([1, ("k", "right")], 1, place, pickle.dumps(picks))
    assert (replica, references) == (1, [("k", "right")])
    assert picks_at(place_there, pickled)[0] == [(0, pick_from_rows(5, 1)), (0, pick_from_rows(5, 0))]
    # Leaves of batches in several places are sent in another form.
    assert alike_arguments([batch, batch._replace(picks=pick_from_rows(3, 0))])[0] is None


def test_calls_that_differ_in_more_than_handles(on_cluster):
    steps = iter(on_cluster.distribute_dataset(Dataset.from_tensor_slices(ROWS).batch(20)))
    scale, large = np.float64(3), np.full(20_000, 5.0)

    def scaled(x, y):
        return difference(x, y, scale)

    def first(x, large):
        return x.sum() + large[0]

    actual, expected = [], []
    with messages_sent(on_cluster) as messages:
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
    assert 0 not in num_of_kinds(messages)


def test_a_failure_leaves_later_calls_of_its_kind_as_they_are(on_cluster):
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
