"""Reductions whose results all workers need: each computes them for itself, with the same bits."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from conftest import eventually, messages_sent, new_cluster, of_kind

import daskdist
from daskdist import PerReplica
from daskdist.strategy.replica.contract import internals_of

pytestmark = pytest.mark.cluster
STARTS = PerReplica([np.linspace(0, 1, 500), np.linspace(1, 3, 500) ** 3])


def gradient(weights, start):
    return weights * 0.1 + start


def trained(strategy, num_steps, op="MEAN", *, looks=False):
    weights = np.ones(500)
    for _ in range(num_steps):
        weights = strategy.reduce(op, strategy.run(gradient, args=(weights, STARTS)), axis=None)
        if looks:
            np.asarray(weights)
    return weights


def trained_here(num_steps):
    weights = np.ones(500)
    for _ in range(num_steps):
        first, second = (gradient(weights, start) for start in STARTS.values)
        weights = (first + second) / 2
    return weights


def places_of_calls(sent):
    return [message[3] for message in of_kind(sent, "call")]


def test_a_result_that_goes_into_the_next_step_is_computed_by_each_worker(on_cluster):
    # Each worker computes the result from the second reduction on, when it is known that both workers needed the result
    # of the first one.
    before = trained(on_cluster, 2)
    with messages_sent(on_cluster) as sent:
        weights = trained(on_cluster, 5)
        actual = np.asarray(weights)
    del before
    assert places_of_calls(sent) == [0, 1] * 5
    # Each worker sends its part to the other, and none sends the result.
    assert len(of_kind(sent, "push")) == 2 * 5
    assert {message[3] for message in of_kind(sent, "push")} == {0, 1}
    np.testing.assert_array_equal(actual, trained_here(5))
    # On both workers it has the same bits.
    for value in on_cluster.local_results(on_cluster.run(np.copy, args=(weights,))):
        np.testing.assert_array_equal(value, actual)


def test_a_fetched_result_is_sent_from_here_to_the_workers(on_cluster):
    trained(on_cluster, 3)
    with messages_sent(on_cluster) as sent:
        actual = np.asarray(trained(on_cluster, 5, looks=True))
    assert places_of_calls(sent)[-3:] == [0] * 3
    np.testing.assert_array_equal(actual, trained_here(5))


def test_results_that_no_other_worker_needs_are_computed_once_again(on_cluster):
    trained(on_cluster, 3)
    value = on_cluster.run(gradient, args=(1.0, STARTS))
    for _ in range(2):
        float(on_cluster.reduce("MEAN", value, axis=None)[0])
    with messages_sent(on_cluster) as sent:
        float(on_cluster.reduce("MEAN", value, axis=None)[0])
    assert 1 not in places_of_calls(sent)


def test_a_user_function_is_called_on_one_worker(on_cluster):
    trained(on_cluster, 3, op=np.logaddexp)
    with messages_sent(on_cluster) as sent:
        np.asarray(trained(on_cluster, 3, op=np.logaddexp))
    assert places_of_calls(sent) == [0] * 3


def test_a_reduction_that_fails_on_each_worker_is_raised_once(on_cluster):
    def first(weights, size):
        return np.ones(size)

    def step(sizes):
        return on_cluster.reduce("SUM", on_cluster.run(first, args=(1, sizes)), axis=None)

    for _ in range(3):
        weights = step(2)
        on_cluster.run(first, args=(weights, 2))
    failed = step(PerReplica([2, 3]))
    depends = on_cluster.run(first, args=(failed, 2))
    for value in (depends, failed):
        with pytest.raises(daskdist.errors.ArgumentError, match="shapes differ"):
            on_cluster.local_results(value)
    for _ in range(5):
        assert on_cluster.local_results(on_cluster.run(float, args=(1,))) == (1.0, 1.0)


def test_a_result_outlives_the_worker_that_would_send_it():
    with (
        new_cluster() as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        weights = trained(strategy, 4)
        # Wait for the weights without fetching them to the program.
        strategy.local_results(strategy.run(np.sum, args=(weights,)))
        root = strategy.workers[0]
        os.kill(client.run(os.getpid)[root], signal.SIGKILL)
        eventually(lambda: not internals_of(strategy).backend.streams.is_open(root))
        np.testing.assert_array_equal(np.asarray(weights), trained_here(4))
        with pytest.raises((daskdist.errors.ClusterError, daskdist.errors.CollectiveError), match=f"lost {root}"):
            strategy.local_results(strategy.run(np.copy, args=(weights,)))
        (actual,) = strategy.local_results(strategy.run(np.copy, args=(weights,)))
        np.testing.assert_array_equal(actual, trained_here(4))
