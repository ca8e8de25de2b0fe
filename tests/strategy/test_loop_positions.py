"""Positions of replicas' iterators: from every step exactly the rest is given, for any replicas and workers."""

from __future__ import annotations

import json
import pickle
import threading

import numpy as np
import pytest
from conftest import mirrored
from test_resume import UNEVEN, continued, datasets, files, parts_of, rows_of  # noqa: F401

import daskdist
from daskdist import Dataset, Options, errors, read_parquet
from daskdist.testing import SimulatedWorkers

# Steps in which no replica has rows are left out; with drop_uneven, the pass ends when one replica lacks rows.
EMPTIED = {
    "whole batches without rows": lambda: Dataset.range(48).batch(4).map(lambda x: x[x % 12 < 4]),
    "drop_uneven": lambda: Dataset.range(30).batch(6).map(lambda x: x[x < 20]).with_options(Options(drop_uneven=True)),
}

# Pipelines whose workers have other numbers of steps, elements or rows, or other orders, where files are shared out.
SHARED_OUT_BY_FILE = ["drop_remainder", "unseeded shuffle", "filter", "flat_map", "repeat", "cache"]


def taken(iterator, num_steps, state):
    """Return a replica's elements of the next steps from a state on, or of all remaining steps, and the state after."""
    if state is not None:
        iterator.load_state_dict(json.loads(json.dumps(state)))
    elements = []
    if num_steps is None:
        elements += [element.tolist() for element in iterator]
    else:
        elements += [next(iterator).tolist() for _ in range(num_steps)]
    return json.dumps(elements), pickle.dumps(iterator.state_dict())


def by_loop(strategy, dataset, num_steps=None, state=None):
    """Return the steps that replicas take in one call, each as in `parts_of`, and the state after them."""
    rows, states = strategy.run(taken, args=(strategy.distribute_dataset(dataset), num_steps, state))
    columns = [json.loads(str(text)) for text in strategy.local_results(rows)]
    return list(map(list, zip(*columns, strict=True))), pickle.loads(strategy.local_results(states)[0])


def all_of(strategy, dataset):
    """Return all steps, and the states before each of them and at the end, from a sequence of loops of one step."""
    steps, state = by_loop(strategy, dataset, 0)
    states = [state]
    whole, _ = by_loop(strategy, dataset, None, state)
    for _ in whole:
        actual, state = by_loop(strategy, dataset, 1, state)
        steps += actual
        states.append(state)
    assert steps == whole
    return steps, states


@pytest.mark.parametrize(("policy", "workers"), [("data", [2, 1]), ("file", [2, 1])], ids=str)
def test_loops_continue_from_every_step(files, policy, workers):  # noqa: F811
    named = dict(datasets(files, policy))
    if policy == "data":
        named |= {name: make() for name, make in {**UNEVEN, **EMPTIED}.items()}
    else:
        # What the other operations do to positions does not depend on the policy.
        named = {name: named[name] for name in SHARED_OUT_BY_FILE}
    for name, dataset in named.items():
        strategy = SimulatedWorkers(workers)
        steps, states = all_of(strategy, dataset)
        for number in {0, len(steps) // 2, len(steps)}:
            # An iterator of the program can load the same states.
            assert continued(strategy, dataset, states[number]) == steps[number:], f"{name}: continued from {number}"
        iterator = iter(strategy.distribute_dataset(dataset))
        next(iterator)
        state = iterator.state_dict()
        rest, _ = by_loop(strategy, dataset, None, state)
        assert rest == continued(strategy, dataset, state), f"{name}: a state of the program's iterator in a loop"


@pytest.mark.parametrize(
    ("policy", "before", "after"),
    [("data", [2, 1], [3]), ("file", [1, 1, 1], [1, 1])],
    ids=str,
)
def test_other_replicas_continue_with_every_row_once(files, policy, before, after):  # noqa: F811
    named = dict(datasets(files, policy))
    for name in SHARED_OUT_BY_FILE if policy == "file" else named:
        if name == "drop_remainder":
            continue
        dataset = named[name]
        strategy, other = SimulatedWorkers(before), SimulatedWorkers(after)
        _, start = by_loop(strategy, dataset, 0)
        steps, _ = by_loop(strategy, dataset, None, start)
        for number in {len(steps) // 2, len(steps)}:
            _, state = by_loop(strategy, dataset, number, start)
            first, state = by_loop(other, dataset, min(1, len(steps) - number), state)
            again, _ = by_loop(strategy, dataset, None, state)
            assert sorted(rows_of(first + again)) == sorted(rows_of(steps[number:])), f"{name}: continued from {number}"


def test_on_a_cluster(on_cluster, files):  # noqa: F811
    for name, dataset in [
        ("file", read_parquet(files, "n").filter(lambda x: x != 3).shuffle(4, seed=1).batch(4)),
        ("data", Dataset.range(40).filter(lambda x: x % 3 > 0).shuffle(9).batch(4)),
        ("any order", Dataset.range(40).batch(4).with_options(Options(deterministic=False))),
    ]:
        whole, _ = by_loop(on_cluster, dataset)
        first, state = by_loop(on_cluster, dataset, 2)
        rest, _ = by_loop(on_cluster, dataset, None, state)
        assert sorted(rows_of(first + rest)) == sorted(rows_of(whole)), name
        other, _ = by_loop(mirrored(3), dataset, None, state)
        assert sorted(rows_of(other)) == sorted(rows_of(rest)), name
        if name != "any order":
            assert continued(on_cluster, dataset, state) == rest, name
        assert len(pickle.dumps(state)) < 10_000


def datasets_of_a_function(context):
    number, count = context.input_pipeline_id, context.num_input_pipelines
    return Dataset.range(20).shard(count, number).filter(lambda x: x % 7 > 0).shuffle(9, seed=3).batch(2)


def test_datasets_of_a_function(on_cluster):
    def loop(strategy, num_steps, state):
        distributed = strategy.distribute_datasets_from_function(datasets_of_a_function)
        rows, states = strategy.run(taken, args=(distributed, num_steps, state))
        columns = [json.loads(str(text)) for text in strategy.local_results(rows)]
        return list(map(list, zip(*columns, strict=True))), pickle.loads(strategy.local_results(states)[0])

    for strategy in (on_cluster, mirrored(2)):
        first, state = loop(strategy, 2, None)
        rest, _ = loop(strategy, None, state)
        assert sorted(rows_of(first + rest)) == [x for x in range(20) if x % 7], strategy
    with pytest.raises(errors.ArgumentError, match="datasets a function made"):
        loop(mirrored(3), None, state)


def passes(iterator, num_passes, states, at):
    """Take some passes; replica 0 adds the state at one step of each pass to a list."""
    actual = []
    for _ in range(num_passes):
        actual.append([])
        for number, batch in enumerate(iterator):
            if number == at:
                state = iterator.state_dict()
                if daskdist.get_replica_context().replica_id_in_sync_group == 0:
                    states.append(state)
            actual[-1].append(batch.tolist())
        state = iterator.state_dict()
        if daskdist.get_replica_context().replica_id_in_sync_group == 0:
            states.append(state)
    return json.dumps(actual)


def test_later_passes_keep_their_orders():
    strategy = mirrored(2)
    dataset = Dataset.range(12).shuffle(12).batch(4)
    distributed = strategy.distribute_dataset(dataset)

    def in_passes(num_passes, state):
        states = []

        def loop(iterator):
            if state is not None:
                iterator.load_state_dict(state)
            return passes(iterator, num_passes, states, 1)

        return [json.loads(text) for text in strategy.local_results(strategy.run(loop, args=(distributed,)))], states

    whole, states = in_passes(3, None)
    # Continue after two steps of the second of three passes, and at the end of the second pass.
    again, _ = in_passes(2, states[2])
    assert [replica[0] for replica in again] == [replica[1][2:] for replica in whole]
    assert [replica[1] for replica in again] == [replica[2] for replica in whole]
    again, _ = in_passes(1, states[3])
    assert [replica[0] for replica in again] == [replica[2] for replica in whole]


def test_states_that_do_not_fit():
    strategy = mirrored(2)
    distributed = strategy.distribute_dataset(Dataset.range(12).batch(4))

    def apart(iterator):
        if daskdist.get_replica_context().replica_id_in_sync_group:
            next(iterator)
        iterator.state_dict()

    with pytest.raises(errors.ArgumentError, match="replica 0 has taken 0 steps of pass 0, and replica 1 1 steps"):
        strategy.run(apart, args=(distributed,))

    def late(iterator):
        state = iterator.state_dict()
        next(iterator)
        iterator.load_state_dict(state)

    with pytest.raises(errors.ArgumentError, match="has begun already"):
        strategy.run(late, args=(distributed,))

    def alone(iterator):
        if daskdist.get_replica_context().replica_id_in_sync_group == 0:
            iterator.state_dict()

    with pytest.raises(errors.CollectiveError, match=r"state_dict of a distributed dataset .*replica 1 has ended"):
        strategy.run(alone, args=(distributed,))
    other = iter(strategy.distribute_dataset(Dataset.range(13).batch(4))).state_dict()
    with pytest.raises(errors.ArgumentError, match="of another pipeline"):
        strategy.run(lambda iterator: iterator.load_state_dict(other), args=(distributed,))


@pytest.mark.parametrize("kind", ["local", "distributed"])
def test_threads_save_states_while_others_take_steps(kind):
    strategy, dataset = mirrored(2), Dataset.range(600).shuffle(50, seed=1).batch(2)
    iterable = dataset if kind == "local" else strategy.distribute_dataset(dataset)
    iterator, states, steps, failures = iter(iterable), [], [], []

    def rows(step):
        return [row for part in strategy.local_results(step) for row in np.ravel(part).tolist()]

    def take():
        try:
            steps.extend(map(rows, iterator))
        except Exception as error:
            failures.append(error)

    def save():
        try:
            while not states or states[-1]["number"] < 300:
                states.append(iterator.state_dict())
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=target) for target in (take, save, take, save, take)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert sorted(row for step in steps for row in step) == list(range(600))
    by_number = {state["number"]: state for state in states}
    longest: list = []
    # Try states from the last to the first: the steps after each of them end with the steps after the one tried before.
    for number in sorted(by_number, reverse=True)[:: max(len(by_number) // 8, 1)]:
        again = iter(iterable)
        again.load_state_dict(by_number[number])
        rest = list(map(rows, again))
        assert len(rest) == 300 - number
        assert rest[len(rest) - len(longest) :] == longest
        assert all(step in steps for step in rest)
        longest = rest
