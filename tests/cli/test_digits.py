"""The demo's two training loops, on the replicas and on the driver, give the same results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import mirrored

import daskdist
from daskdist.cli import digits

NUM_EPOCHS = 2
# The last batch of a pass has 237 rows, which 2 and 4 replicas cannot divide equally.
BATCH_ROWS = 400


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return digits.write_files(digits.load()[0], tmp_path_factory.mktemp("digits"))


def trained(loop, strategy, paths, batch_rows=BATCH_ROWS, policy="auto", num_epochs=NUM_EPOCHS):
    batches = strategy.distribute_dataset(digits.read_batches(paths, batch_rows, 3, policy))
    return digits.LOOPS[loop](strategy, batches, num_epochs, 3)


def check_that_loops_agree(strategy, *args):
    expected, weights = trained("driver", strategy, *args)
    actual, weights_there = trained("replicas", strategy, *args)
    assert [(step.epoch, step.num_rows) for step in actual] == [(step.epoch, step.num_rows) for step in expected]
    assert sum(step.num_rows for step in actual) % (1437 * NUM_EPOCHS) == 0
    assert [step.loss for step in actual] == pytest.approx([step.loss for step in expected], abs=1e-6)
    means = digits.means_of_epochs(actual)
    assert means == pytest.approx(digits.means_of_epochs(expected), abs=1e-6)
    assert means[-1] < 0.9 * means[0]
    assert weights_there.keys() == weights.keys()
    for name, weight in weights.items():
        assert weights_there[name] == pytest.approx(weight, abs=1e-6), name
    return actual


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_embedded(paths, num_replicas):
    check_that_loops_agree(mirrored(num_replicas), paths)


def test_a_replica_without_rows(paths):
    # The fifth batch of a pass has one row.
    steps = check_that_loops_agree(mirrored(3), paths, 359)
    assert [step.num_rows for step in steps] == [359, 359, 359, 359, 1] * NUM_EPOCHS


@pytest.mark.cluster
@pytest.mark.parametrize("policy", ["file", "data", "off"])
def test_on_a_cluster(on_cluster, paths, policy):
    check_that_loops_agree(on_cluster, paths, BATCH_ROWS, policy)


@pytest.mark.cluster
@pytest.mark.parametrize(("num_workers", "num_threads", "per_worker"), [(3, 1, 1), (2, 2, 2)])
def test_on_more_replicas_of_a_cluster(start_cluster, paths, num_workers, num_threads, per_worker):
    client = start_cluster(num_workers, num_threads)
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=per_worker) as strategy:
        assert strategy.num_replicas_in_sync == num_workers * per_worker
        check_that_loops_agree(strategy, paths)


def check_that_replicas_agree(strategy, paths):
    batches = strategy.distribute_dataset(digits.read_batches(paths, BATCH_ROWS, 3, "auto"))
    first, *others = strategy.local_results(strategy.run(digits.replica_loop, args=(batches, NUM_EPOCHS, 3)))
    assert len(others) == strategy.num_replicas_in_sync - 1
    for other in others:
        for actual, expected in zip(other[0], first[0], strict=True):
            assert np.array_equal(actual, expected)
        for name, weight in first[1].items():
            assert np.array_equal(other[1][name], weight), name


def test_all_replicas_end_with_the_same_network(paths):
    check_that_replicas_agree(mirrored(3), paths)


@pytest.mark.cluster
def test_all_replicas_of_a_cluster_end_with_the_same_network(on_cluster, paths):
    check_that_replicas_agree(on_cluster, paths)


def test_replicas_agree_with_one_on_all_rows(paths):
    # The order of the rows is equal, but the summed parts differ.
    alone, _ = trained("replicas", mirrored(1), paths, BATCH_ROWS, "data")
    together, _ = trained("replicas", mirrored(3), paths, BATCH_ROWS, "data")
    assert [step.loss for step in together] == pytest.approx([step.loss for step in alone], abs=1e-6)


def test_descent_has_momentum():
    slopes = {name: np.ones_like(weight) for name, weight in digits.fresh_weights(3).items()}
    steps, weights = digits.train([None], 2, 3, lambda weights, batch: (6.0, 4, slopes))
    assert steps == [digits.TrainingStep(0, 1.5, 4), digits.TrainingStep(1, 1.5, 4)]
    first = -0.2 * 1.0 / 4
    for name, weight in digits.fresh_weights(3).items():
        assert weights[name] == pytest.approx(weight + first + (0.9 * first + first)), name


def test_means_of_epochs_count_rows():
    steps = [digits.TrainingStep(0, 1.0, 3), digits.TrainingStep(0, 5.0, 1), digits.TrainingStep(1, 0.5, 2)]
    assert digits.means_of_epochs(steps) == [2.0, 0.5]
