"""Positions of distributed iterators: from every position exactly the rest is given, for any replicas and workers."""

from __future__ import annotations

import itertools
import json

import dask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import strict_device
from conftest import mirrored
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import pipelines

import daskdist
from daskdist import Dataset, Options, errors, read_parquet
from daskdist.testing import SimulatedWorkers

# Hypothesis warns if other threads draw random numbers meanwhile, as those of other tests' clusters do.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write tables of 7, 4, 0 and 9 rows in row groups of 3; rows are numbered through all tables."""
    directory = tmp_path_factory.mktemp("files")
    first = 0
    for number, num_rows in enumerate([7, 4, 0, 9]):
        table = pa.table({"n": np.arange(first, first + num_rows)})
        pq.write_table(table, directory / f"{number}.parquet", row_group_size=3)
        first += num_rows
    return sorted(map(str, directory.glob("*.parquet")))


def parts_of(strategy, step):
    """Return each replica's part of a step."""
    return [np.asarray(part).tolist() for part in strategy.local_results(step)]


def rows_of(steps):
    """Return all rows, in the order of steps and replicas."""
    return [row for parts in steps for part in parts for row in part]


def steps_and_states(strategy, dataset):
    """Return the steps of a pass, and the states before each of them and at its end."""
    iterator = iter(strategy.distribute_dataset(dataset))
    steps, states = [], [iterator.state_dict()]
    for step in iterator:
        steps.append(parts_of(strategy, step))
        states.append(iterator.state_dict())
    # Take a second state at the end, when the iterator knows that it is at the end.
    return steps, states, iterator.state_dict()


def continued(strategy, dataset, state):
    """Return the steps from a position on."""
    iterator = iter(strategy.distribute_dataset(dataset))
    iterator.load_state_dict(json.loads(json.dumps(state)))
    return [parts_of(strategy, step) for step in iterator]


def lengths(n):
    return Dataset.range(n).map(lambda x: np.full(x % 5, x))


# Pipelines of a dataset of numbers below 20. The rows of these two groups can be cut into other batches.
PIPELINES = {
    "batch": lambda ds: ds.batch(6),
    "drop_remainder": lambda ds: ds.batch(6, drop_remainder=True),
    "shuffle": lambda ds: ds.shuffle(7, seed=1).batch(4),
    "unseeded shuffle": lambda ds: ds.shuffle(7).batch(4),
    "shuffle of batches": lambda ds: ds.batch(3).shuffle(3, seed=1),
    "map after batch": lambda ds: ds.batch(4).map(lambda x: x + 1),
    "filter": lambda ds: ds.filter(lambda x: x % 3 > 0).batch(4),
    "flat_map": lambda ds: ds.flat_map(Dataset.range).batch(16),
    "interleave": lambda ds: ds.interleave(Dataset.range, 3, 2).batch(16),
    "repeat": lambda ds: ds.shuffle(20, seed=2).repeat(2).batch(6),
    "repeat of batches": lambda ds: ds.batch(6).repeat(2),
    "unbatch": lambda ds: ds.batch(3).unbatch().batch(4).prefetch(2),
    "cache": lambda ds: ds.shuffle(5, seed=1).cache().repeat(2).batch(6),
}
# These cannot be sharded by file, since they give other elements for each worker's share.
OF_ALL = {
    "group_by_window": lambda ds: ds.group_by_window(lambda x: x % 2, lambda key, window: window.batch(3), 3),
    "rebatch": lambda ds: ds.batch(5).rebatch(3),
    "zip": lambda ds: Dataset.zip(ds, ds).map(lambda x, y: x + y).batch(4),
    "global_shuffle": lambda ds: ds.global_shuffle(seed=1).batch(4),
    "take": lambda ds: ds.skip(3).take(14).batch(4),
    "unique": lambda ds: ds.map(lambda x: x % 13).unique().batch(4),
    "scan": lambda ds: ds.scan(np.int64(0), lambda s, x: (s + x, s + x)).batch(4),
}
UNEVEN = {
    "padded_batch": lambda: lengths(17).padded_batch(4),
    "bucket_by_sequence_length": lambda: lengths(23).bucket_by_sequence_length(len, [2, 4], [4, 4, 4]),
}


def datasets(files, policy):
    """Return the pipelines that a policy can shard, by name."""
    source = (lambda: read_parquet(files, "n")) if policy == "file" else lambda: Dataset.range(20)
    named = PIPELINES if policy == "file" else {**PIPELINES, **OF_ALL}
    for name, make in named.items():
        yield name, make(source()).with_options(Options(auto_shard_policy=policy))


@pytest.mark.parametrize(
    ("policy", "workers"),
    [("data", [2, 1]), ("off", [1, 1]), ("file", [2, 1])],
    ids=str,
)
def test_distributed_passes_continue_from_every_step(files, policy, workers):
    for name, dataset in datasets(files, policy):
        strategy = SimulatedWorkers(workers)
        steps, states, at_end = steps_and_states(strategy, dataset)
        # With "off", each worker goes through all steps as under "data".
        for number in range(0, len(states), 3 if policy == "off" else 1):
            assert continued(strategy, dataset, states[number]) == steps[number:], f"{name}: continued from {number}"
        assert continued(strategy, dataset, at_end) == [], name


def test_passes_over_uneven_rows_continue_from_every_step():
    for name, make in UNEVEN.items():
        for workers in ([2], [1, 1]):
            strategy, dataset = SimulatedWorkers(workers), make()
            steps, states, _ = steps_and_states(strategy, dataset)
            for number, state in enumerate(states):
                assert continued(strategy, dataset, state) == steps[number:], f"{name}: continued from {number}"


@pytest.mark.parametrize(
    ("policy", "before", "after"),
    [
        ("data", [2], [3]),
        ("data", [2, 1], [1, 1]),
        ("data", [1], [2, 2]),
        ("data", [4, 4], [1]),
        ("off", [1, 1], [3]),
        ("file", [1, 1, 1], [2, 1]),
    ],
    ids=str,
)
def test_other_replicas_continue_with_every_row_once(files, policy, before, after):
    for name, dataset in datasets(files, policy):
        strategy, other = SimulatedWorkers(before), SimulatedWorkers(after)
        steps, states, _ = steps_and_states(strategy, dataset)
        # States at every step are tried with the same replicas.
        for number in sorted({0, 1, len(steps) // 2, len(steps) - 1, len(steps)}):
            actual, expected = rows_of(continued(other, dataset, states[number])), rows_of(steps[number:])
            if name == "drop_remainder":
                # The remaining rows need not form complete batches if they are cut in another way.
                assert set(actual) <= set(expected)
                assert len(expected) - len(actual) < 6
            elif policy == "data" or len(before) == 1:
                assert actual == expected, f"{name}: continued from {number}"
            else:
                assert sorted(actual) == sorted(expected), f"{name}: continued from {number}"


def test_other_replicas_continue_with_rows_that_do_not_stack():
    for name, make in UNEVEN.items():
        strategy, other, dataset = SimulatedWorkers([2]), SimulatedWorkers([1, 2]), make()
        steps, states, _ = steps_and_states(strategy, dataset)
        for number, state in enumerate(states):
            actual = rows_of(continued(other, dataset, state))
            assert actual == rows_of(steps[number:]), f"{name}: continued from {number}"


def wide(n):
    return Dataset.range(n).map(lambda x: np.arange(x % 4) + x)


WHOLE_BATCHES = {
    **UNEVEN,
    "incomplete batches within": lambda: Dataset.range(10).batch(4).repeat(3),
    "incomplete batches anywhere": lambda: (
        Dataset.range(23).batch(4).shuffle(3, seed=1, reshuffle_each_iteration=False)
    ),
    "padded, then map": lambda: wide(18).padded_batch(4).map(lambda x: x * 2),
    "padded, incomplete one dropped": lambda: wide(18).padded_batch(4, drop_remainder=True),
    "ragged": lambda: wide(18).ragged_batch(4),
    "text": lambda: Dataset.range(9).map(lambda x: {"t": "a" * int(x), "n": np.arange(x % 3)}).padded_batch(2),
    "rebatch": lambda: Dataset.range(18).batch(3).rebatch([4, 1, 3]),
    "rebatch of ragged": lambda: wide(18).ragged_batch(3).rebatch(4),
    "windows": lambda: Dataset.range(18).window(4).flat_map(lambda window: window.batch(4)),
    "sliding windows": lambda: Dataset.range(18).window(5, shift=2).flat_map(lambda window: window.batch(5)),
    "group_by_window": lambda: Dataset.range(22).group_by_window(lambda x: x % 3, lambda _, rows: rows.batch(4), 4),
    "batch_by_size": lambda: wide(20).batch_by_size(8, len),
}


def leaves_of(strategy, step):
    """Return the parts of all replicas, leaf by leaf, as lists."""
    leaves = step.values() if isinstance(step, dict) else [step]
    return [[part.tolist() for part in strategy.local_results(leaf)] for leaf in leaves]


def continued_leaves(strategy, dataset, state=None):
    iterator = iter(strategy.distribute_dataset(dataset))
    if state is not None:
        iterator.load_state_dict(state)
    return [leaves_of(strategy, step) for step in iterator]


@pytest.mark.parametrize("name", WHOLE_BATCHES)
def test_batches_that_are_not_made_again_are_divided_as_in_a_new_pass(name):
    for before, after in ([1], [2]), ([2], [1]), ([2], [3]), ([3], [2]), ([2], [1, 1]), ([1, 2], [2, 2]):
        strategy, other = SimulatedWorkers(before), SimulatedWorkers(after)
        dataset = WHOLE_BATCHES[name]().with_options(Options(auto_shard_policy="data"))
        expected = continued_leaves(other, dataset)
        for number, state in enumerate(steps_and_positions(strategy, dataset)):
            assert continued_leaves(other, dataset, state) == expected[number:], f"{before} to {after} at {number}"


def steps_and_positions(strategy, dataset):
    """Return the states before each step of a pass and at its end."""
    iterator = iter(strategy.distribute_dataset(dataset))
    states = [iterator.state_dict()]
    for _ in iterator:
        states.append(iterator.state_dict())
    return states


def test_batches_that_each_worker_cuts_are_divided_again_as_wholes():
    strategy, other = SimulatedWorkers([1, 1]), SimulatedWorkers([2])
    dataset = wide(16).padded_batch(4).with_options(Options(auto_shard_policy="off"))
    states = steps_and_positions(strategy, dataset)
    sizes = [[len(part) for part in step[0]] for step in continued_leaves(other, dataset, states[2])]
    # Each of two workers has three batches of 4 rows left.
    assert sizes == 6 * [[2, 2]]
    sizes = [[len(part) for part in step[0]] for step in continued_leaves(other, dataset, states[3])]
    # Half of a batch of each was handed out.
    assert sizes == [*2 * [[1, 1]], *4 * [[2, 2]]]


def test_a_pass_whose_batches_cannot_get_another_size_says_so(caplog):
    strategy = mirrored(2)
    iterator = iter(strategy.distribute_dataset(wide(20).padded_batch(4)))
    next(iterator)
    state = iterator.state_dict()
    distributed = strategy.distribute_dataset(wide(20).padded_batch(6))
    again = iter(distributed)
    again.load_state_dict(state)
    assert "keeps its batches of 4 rows" in caplog.text
    assert [[len(part) for part in strategy.local_results(step)] for step in again] == 4 * [[2, 2]]
    assert [[len(part) for part in strategy.local_results(step)] for step in distributed] == [*3 * [[3, 3]], [1, 1]]


def test_another_batch_size_continues_and_the_next_pass_is_divided_as_usual():
    strategy, other = SimulatedWorkers([2, 2]), SimulatedWorkers([3])
    dataset = Dataset.range(50).shuffle(50, seed=1)
    steps, states, _ = steps_and_states(strategy, dataset.batch(8))
    distributed = other.distribute_dataset(dataset.batch(9))
    iterator = iter(distributed)
    iterator.load_state_dict(states[3])
    rest = [parts_of(other, step) for step in iterator]
    assert rows_of(rest) == rows_of(steps[3:])
    assert [len(part) for part in rest[0]] == [3, 3, 3]
    # The next pass has another order than the resumed one.
    following = rows_of(parts_of(other, step) for step in distributed)
    assert sorted(following) == list(range(50))
    assert following != rows_of(steps)


@given(
    st.integers(1, 60),
    st.sampled_from(sorted({*PIPELINES, *OF_ALL} - {"drop_remainder"})),
    st.lists(st.sampled_from([[1], [2], [3], [1, 1], [2, 1], [4], [2, 2], [4, 4]]), min_size=3, max_size=5),
    st.sampled_from(["off", "data"]),
    st.data(),
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_replicas_come_and_go(num_rows, name, all_workers, policy, data):
    """A pass is resumed several times, each time with other replicas."""
    dataset = {**PIPELINES, **OF_ALL}[name](Dataset.range(num_rows)).with_options(Options(auto_shard_policy=policy))
    rows, state = [], None
    for place, workers in enumerate(all_workers):
        strategy = SimulatedWorkers(workers)
        if place == 0:
            state = iter(strategy.distribute_dataset(dataset)).state_dict()
            expected = rows_of(continued(strategy, dataset, state))
        iterator = iter(strategy.distribute_dataset(dataset))
        iterator.load_state_dict(state)
        number = data.draw(st.integers(0, 6)) if place < len(all_workers) - 1 else None
        rows += rows_of(parts_of(strategy, step) for step in itertools.islice(iterator, number))
        state = iterator.state_dict()
    if policy == "data" or len(all_workers[0]) == 1:
        assert rows == expected
    else:
        assert sorted(rows) == sorted(expected)


@given(pipelines(), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]), st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_pipeline_continues_with_any_number_of_replicas(pipeline, before, after, data):
    outcome = pipeline.reference()
    if outcome.met_unmade or not outcome.elements:
        return
    with pipeline.settings():
        dataset = pipeline.dataset().enumerate().map(lambda number, element: number).batch(before * after)
        one, other = mirrored(before), mirrored(after)
        iterator = iter(one.distribute_dataset(dataset))
        number = data.draw(st.integers(0, len(outcome.elements) // (before * after)))
        rows = rows_of(parts_of(one, step) for step in itertools.islice(iterator, number))
        again = iter(other.distribute_dataset(dataset))
        again.load_state_dict(iterator.state_dict())
        rows += rows_of(parts_of(other, step) for step in again)
    assert rows == list(range(len(outcome.elements)))


def test_on_a_cluster(on_cluster, files):
    strategy = on_cluster
    for name, dataset in [
        ("file", read_parquet(files, "n").shuffle(4, seed=1).batch(4)),
        ("filter", Dataset.range(40).filter(lambda x: x % 3 > 0).shuffle(9, seed=1).batch(4)),
        ("scan", Dataset.range(20).scan(np.int64(0), lambda s, x: (s + x, s + x)).batch(4)),
    ]:
        steps, states, _ = steps_and_states(strategy, dataset)
        for number in (0, 2, len(steps)):
            assert continued(strategy, dataset, states[number]) == steps[number:], name
        actual = rows_of(continued(mirrored(3), dataset, states[1]))
        assert sorted(actual) == sorted(rows_of(steps[1:])), name


def test_workers_that_share_a_file_need_the_splits_of_the_position(tmp_path):
    np.save(tmp_path / "rows.npy", np.arange(300))

    def taken(strategy, split_bytes, state=None):
        with dask.config.set({"daskdist.split-bytes": split_bytes}):
            batches = daskdist.read_npy(tmp_path / "rows.npy").batch(20).with_options(Options(auto_shard_policy="file"))
            iterator = iter(strategy.distribute_dataset(batches))
            if state is not None:
                iterator.load_state_dict(state)
            first = rows_of([parts_of(strategy, next(iterator)) for _ in range(3)])
            return first, iterator.state_dict(), rows_of([parts_of(strategy, step) for step in iterator])

    two, three = SimulatedWorkers([1, 1]), SimulatedWorkers([1, 1, 1])
    first, state, rest = taken(two, 400)
    assert sorted(first + rest) == list(range(300))
    for strategy in (two, three):
        for other in (240, 800):
            with pytest.raises(errors.ArgumentError, match=r"daskdist\.split-bytes.*; set it to 400, as it was"):
                taken(strategy, other, state)
        again, _, others = taken(strategy, 400, state)
        assert sorted(again + others) == sorted(rest)
    *_, state, _ = taken(mirrored(2), 400)
    assert sum(map(len, taken(mirrored(2), 800, state)[::2])) == 240


@pytest.mark.parametrize("seed", [3, None])
def test_datasets_of_a_function_continue_with_the_same_number(on_cluster, seed):
    def make(context):
        number, count = context.input_pipeline_id, context.num_input_pipelines
        return Dataset.range(60).shard(count, number).shuffle(19, seed=seed).batch(2)

    def begun(strategy):
        return iter(strategy.distribute_datasets_from_function(make))

    for strategy in (on_cluster, mirrored(2)):
        iterator = begun(strategy)
        steps = [parts_of(strategy, step) for step in itertools.islice(iterator, 2)]
        again = begun(strategy)
        again.load_state_dict(iterator.state_dict())
        rest = [parts_of(strategy, step) for step in itertools.islice(again, 3)]
        again_at = again.state_dict()
        rest += [parts_of(strategy, step) for step in again]
        assert rest == [parts_of(strategy, step) for step in iterator]
        assert sorted(rows_of(steps + rest)) == list(range(60))
        # A position that is taken after the continuation has the same order.
        third = begun(strategy)
        third.load_state_dict(again_at)
        assert [parts_of(strategy, step) for step in third] == rest[3:]
    with pytest.raises(errors.ArgumentError, match="datasets a function made"):
        begun(mirrored(3)).load_state_dict(iterator.state_dict())


def test_positions_of_other_pipelines_are_refused():
    strategy = mirrored(2)
    state = iter(strategy.distribute_dataset(Dataset.range(9).shuffle(3, seed=1).batch(2))).state_dict()
    other = iter(strategy.distribute_dataset(Dataset.range(9).shuffle(4, seed=1).batch(2)))
    message = r"first operation that differs is shuffle\(buffer_size=3, seed=1\) there and shuffle\(buffer_size=4"
    with pytest.raises(errors.ArgumentError, match=message):
        other.load_state_dict(state)
    with pytest.raises(errors.ArgumentError, match="another pipeline"):
        iter(Dataset.range(9)).load_state_dict(state)


def test_an_iterator_that_began_or_ended_continues_from_a_position(two):
    distributed = two.distribute_dataset(Dataset.range(23).shuffle(23, seed=1).map(lambda x: x + 1).batch(4))
    iterator = iter(distributed)
    steps, states = [], [iterator.state_dict()]
    for step in iterator:
        steps.append(parts_of(two, step))
        states.append(iterator.state_dict())
    # The iterator is at its end now, and later in the middle.
    for number in (2, 0, 5, 6, 3):
        iterator.load_state_dict(states[number])
        assert [parts_of(two, step) for step in itertools.islice(iterator, 2)] == steps[number : number + 2]
    assert [parts_of(two, step) for step in iterator] == steps[5:]
    # The next pass has another order.
    assert sorted(rows_of(parts_of(two, step) for step in distributed)) == sorted(rows_of(steps))


def test_a_position_of_another_dataset_leaves_an_iterator_as_it_is():
    strategy = mirrored(2)
    other = iter(strategy.distribute_dataset(Dataset.range(9).skip(1).batch(2))).state_dict()
    iterator = iter(strategy.distribute_dataset(Dataset.range(6).batch(2)))
    next(iterator)
    with pytest.raises(errors.ArgumentError, match="another pipeline"):
        iterator.load_state_dict(other)
    assert [parts_of(strategy, step) for step in iterator] == [[[2], [3]], [[4], [5]]]


def test_closed_iterators_have_no_position():
    distributed = mirrored(2).distribute_dataset(Dataset.range(9).batch(2))
    state = iter(distributed).state_dict()
    iterator = iter(distributed)
    next(iterator)
    iterator.close()
    with pytest.raises(errors.ArgumentError, match="is closed"):
        iterator.state_dict()
    with pytest.raises(errors.ArgumentError, match="is closed"):
        iterator.load_state_dict(state)


def test_a_checkpoint_takes_it(tmp_path):
    dataset = Dataset.range(40).shuffle(9, seed=1).batch(4)
    iterator = iter(mirrored(2).distribute_dataset(dataset))
    steps = [next(iterator) for _ in range(3)]
    daskdist.Checkpoint(iterator=iterator).save(tmp_path / "state")
    again = iter(mirrored(4).distribute_dataset(dataset))
    daskdist.Checkpoint(iterator=again).restore(tmp_path / "state")
    rest = [parts_of(mirrored(4), step) for step in again]
    rows = rows_of([parts_of(mirrored(2), step) for step in steps] + rest)
    assert sorted(rows) == list(range(40))


def test_steps_that_are_on_devices_ahead_are_still_to_come(strict):
    strategy = daskdist.MirroredStrategy([f"{strict_device.KIND}:0", f"{strict_device.KIND}:1"])
    dataset = Dataset.range(90).filter(lambda x: x % 3 > 0).shuffle(9, seed=1).batch(4)

    def parts(step):
        return [strict_device.StrictDevice(k).get(part).tolist() for k, part in enumerate(strategy.local_results(step))]

    distributed = strategy.distribute_dataset(dataset)
    iterator = iter(distributed)
    steps, states = [], [iterator.state_dict()]
    for step in iterator:
        steps.append(parts(step))
        states.append(iterator.state_dict())
    assert sorted(rows_of(steps)) == [x for x in range(90) if x % 3]
    for number in (0, 1, 5, len(steps)):
        again = iter(distributed)
        again.load_state_dict(states[number])
        assert [parts(step) for step in again] == steps[number:]
        assert continued(mirrored(2), dataset, states[number]) == steps[number:]
