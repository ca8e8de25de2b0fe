"""Datasets that a function creates for each input pipeline: where it is called, its datasets, and the elements."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os

import numpy as np
import pytest
from conftest import mirrored
from distributed import get_worker

import daskdist
from daskdist import (
    AutoShardPolicy,
    Dataset,
    InputContext,
    InputOptions,
    InputReplicationMode,
    Options,
    PerReplicaSpec,
    TensorSpec,
    errors,
)
from daskdist.core.cardinality import INFINITE


def steps_of(strategy, distributed) -> list[list[list[int]]]:
    """Return the elements of each replica, for each step."""
    return [[np.asarray(value).tolist() for value in strategy.local_results(step)] for step in distributed]


def in_pairs(context: InputContext) -> Dataset:
    """Return batches of two numbers of this input pipeline's share of the numbers below 10."""
    return Dataset.range(10).shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)


# --- the function's argument ---


def test_context():
    context = InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    assert context.get_per_replica_batch_size(64) == 16
    assert str(context) == "InputContext(input pipeline 1 of 2, 4 replicas in sync)"
    assert InputContext() == InputContext(1, 0, 1)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (10, r"10 rows cannot be divided evenly over 4 replicas; use 8 or 12 rows"),
        (3, r"3 rows cannot be divided evenly over 4 replicas; use 4 rows"),
        (0, r"global_batch_size is 0; give 1 or more"),
        (2.5, r"global_batch_size is 2.5; give a whole number"),
    ],
)
def test_a_batch_that_cannot_be_divided(size, message):
    with pytest.raises(ValueError, match=message):
        InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(size)


def test_called_once_for_all_passes():
    seen = []

    def dataset_fn(context):
        seen.append(context)
        return in_pairs(context)

    strategy = mirrored(3)
    distributed = strategy.distribute_datasets_from_function(dataset_fn)
    assert seen == [InputContext(1, 0, 3)]
    assert steps_of(strategy, distributed) == steps_of(strategy, distributed)
    assert len(seen) == 1


@pytest.mark.cluster
@pytest.mark.parametrize("num_threads", [1, 2])
def test_called_once_on_each_worker(start_cluster, num_threads, tmp_path):
    client = start_cluster(2, num_threads)

    def dataset_fn(context):
        made = tmp_path / f"{context.input_pipeline_id}-{os.getpid()}"
        made.touch(exist_ok=False)
        address = get_worker().address
        return Dataset.from_tensors(f"{context.input_pipeline_id} {address} {os.getpid()}").repeat(num_threads)

    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=num_threads) as strategy:
        distributed = strategy.distribute_datasets_from_function(dataset_fn)
        for _ in range(2):
            (step,) = steps_of(strategy, distributed)
            expected = [
                f"{number} {worker} {client.run(os.getpid)[worker]}"
                for number, worker in enumerate(strategy.workers)
                for _ in range(num_threads)
            ]
            assert step == expected
    assert len(list(tmp_path.iterdir())) == 2


# --- whose turn it is ---


def test_replicas_take_elements_in_turn():
    strategy = mirrored(2)
    distributed = strategy.distribute_datasets_from_function(in_pairs)
    assert steps_of(strategy, distributed) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], []]]
    assert distributed.cardinality() == len(distributed) == 3
    assert distributed.element_spec == PerReplicaSpec(*[TensorSpec((None,), np.int64)] * 2)


def test_one_replica_has_plain_values():
    distributed = mirrored(1).distribute_datasets_from_function(in_pairs)
    assert [value.tolist() for value in distributed] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert distributed.element_spec == TensorSpec((None,), np.int64)


def test_a_dataset_for_each_replica():
    options = InputOptions(replication_mode="PER_REPLICA")
    strategy = mirrored(2)
    distributed = strategy.distribute_datasets_from_function(in_pairs, options)
    assert steps_of(strategy, distributed) == [[[0, 2], [1, 3]], [[4, 6], [5, 7]], [[8], [9]]]


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("PER_WORKER", [[[0, 2], [4, 6], [1, 3], [5, 7]], [[8], [], [9], []]]),
        ("PER_REPLICA", [[[0, 4], [1, 5], [2, 6], [3, 7]], [[8], [9], [], []]]),
    ],
)
def test_turns_on_a_cluster(start_cluster, mode, expected):
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(2, 2), num_replicas_per_worker=2) as strategy:
        distributed = strategy.distribute_datasets_from_function(in_pairs, InputOptions(replication_mode=mode))
        assert steps_of(strategy, distributed) == expected
        assert distributed.cardinality() == len(expected)


def lengths_by_worker(*lengths):
    return lambda context: Dataset.range(lengths[context.input_pipeline_id]).map(lambda k: np.full(2, k))


@pytest.mark.cluster
@pytest.mark.parametrize(("lengths", "num_steps"), [((3, 1), 3), ((0, 2), 2), ((0, 0), 0)])
def test_a_replica_without_rows_gets_empty_arrays(on_cluster, lengths, num_steps):
    distributed = on_cluster.distribute_datasets_from_function(lengths_by_worker(*lengths))
    steps = steps_of(on_cluster, distributed)
    assert [[piece != [] for piece in step] for step in steps] == [
        [number < length for length in lengths] for number in range(num_steps)
    ]
    assert distributed.cardinality() == num_steps


@pytest.mark.cluster
def test_drop_uneven_ends_all_replicas_with_the_first(on_cluster):
    def dataset_fn(context):
        return lengths_by_worker(3, 2)(context).with_options(Options(drop_uneven=True))

    distributed = on_cluster.distribute_datasets_from_function(dataset_fn)
    assert steps_of(on_cluster, distributed) == [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]
    assert distributed.cardinality() == 2
    # No replica ever has fewer rows, so the spec has the number of rows.
    assert distributed.element_spec == PerReplicaSpec(*[TensorSpec((2,), np.int64)] * 2)


@pytest.mark.cluster
def test_all_end_with_the_first_where_workers_read_files(on_cluster, parquet_files):
    ds = daskdist.read_parquet(parquet_files([8, 2]), "id").batch(2)
    given = on_cluster.distribute_dataset(ds)
    # With drop_uneven, six of ten elements are dropped; without, none is.
    options = Options(drop_uneven=True, auto_shard_policy=AutoShardPolicy.FILE)
    dropped = on_cluster.distribute_dataset(ds.with_options(options))
    assert given.sharding.policy.name == dropped.sharding.policy.name == "FILE"
    assert steps_of(on_cluster, dropped) == steps_of(on_cluster, given)[:2]
    assert len(steps_of(on_cluster, given)) == 8
    assert dropped.cardinality() == 2


def test_drop_uneven_applies_to_distribute_dataset():
    strategy = mirrored(3)
    ds = Dataset.range(7).batch(6).with_options(Options(drop_uneven=True))
    distributed = strategy.distribute_dataset(ds)
    iterator = iter(distributed)
    assert [piece.tolist() for piece in strategy.local_results(next(iterator))] == [[0, 1], [2, 3], [4, 5]]
    assert not iterator.get_next_as_optional().has_value()
    assert not iterator.get_next_as_optional().has_value()
    assert distributed.cardinality() == 1


def test_elements_without_rows_are_values_too():
    strategy = mirrored(2)
    distributed = strategy.distribute_datasets_from_function(lambda context: Dataset.range(3))
    first, last = [strategy.local_results(step) for step in distributed]
    assert first == (0, 1)
    assert last[0] == 2
    assert last[1].shape == (0,)


@pytest.mark.cluster
def test_batches_of_no_rows_keep_their_turn(on_cluster):
    sizes = [2, 0, 1]
    here = mirrored(2)
    expected = steps_of(
        here, here.distribute_datasets_from_function(lambda _: Dataset.range(6).batch(4).rebatch(sizes))
    )
    assert expected == [[[0, 1], []], [[2], [3, 4]], [[], [5]]]
    distributed = on_cluster.distribute_datasets_from_function(lambda _: Dataset.range(6).batch(4).rebatch(sizes))
    # A step in which neither replica has a row is left out.
    assert steps_of(on_cluster, distributed) == [[item, item] for item in ([0, 1], [2], [3, 4], [5])]


@pytest.mark.cluster
def test_explain(on_cluster):
    explained = on_cluster.distribute_datasets_from_function(in_pairs).explain()
    assert "sharding: by in_pairs (called once for each input pipeline, of which there are 2)" in explained
    # Numbers of files and rows are unknown here, since the datasets are on workers.
    rows = [line.split() for line in explained.splitlines()]
    for number, worker in enumerate(on_cluster.workers):
        assert [f"{number}", worker, "1", "-", "?", "?", "?"] in rows
    assert "shard(num_shards=2, index=0)" in explained


# --- any dataset ---


def of_generator(context):
    start = 100 * context.input_pipeline_id

    def count():
        yield from (np.full(2, start + number) for number in range(3))

    return Dataset.from_generator(count, output_signature=TensorSpec((2,), np.int64))


def of_shuffled(context):
    return Dataset.range(8).shuffle(8, seed=context.input_pipeline_id).batch(2)


def of_cached(context):
    return in_pairs(context).map(lambda x: x + 1).cache()


def of_windows(context):
    return Dataset.range(6).window(3).flat_map(lambda window: window.batch(2))


@pytest.mark.cluster
@pytest.mark.parametrize("dataset_fn", [of_generator, of_shuffled, of_cached, of_windows], ids=lambda fn: fn.__name__)
def test_elements_of_a_worker_are_those_of_its_dataset(on_cluster, dataset_fn):
    distributed = on_cluster.distribute_datasets_from_function(dataset_fn)
    expected = [[value.tolist() for value in dataset_fn(InputContext(2, number, 2))] for number in range(2)]
    for _ in range(2):
        columns = list(zip(*steps_of(on_cluster, distributed), strict=True))
        assert [[piece for piece in column if piece] for column in columns] == expected
        if dataset_fn is of_shuffled:
            # The second pass has another order, so only the first one is checked.
            break


@pytest.mark.cluster
def test_each_pass_has_another_order(on_cluster):
    distributed = on_cluster.distribute_datasets_from_function(of_shuffled)
    one, other = steps_of(on_cluster, distributed), steps_of(on_cluster, distributed)
    assert one != other
    rows = [sorted(row for step in steps for row in step[0]) for steps in (one, other)]
    assert rows == [list(range(8))] * 2


class Holder:
    def __init__(self, dataset):
        self.dataset = dataset


# A function that refers to a dataset in some way -> its rows, as one list.
WAYS_TO_REFER = {
    "closure": lambda dataset: lambda context: dataset,
    "list": lambda dataset: (lambda held: lambda context: held[0])([dataset]),
    "object": lambda dataset: (lambda held: lambda context: held.dataset)(Holder(dataset)),
    "helper": lambda dataset: (lambda helper: lambda context: helper())(lambda: dataset),
    "partial": lambda dataset: functools.partial(lambda dataset, context: dataset, dataset),
}


@pytest.mark.cluster
@pytest.mark.parametrize("way", WAYS_TO_REFER)
def test_passes_over_a_dataset_that_the_function_refers_to_are_counted(on_cluster, way):
    dataset, other = [Dataset.range(8).shuffle(8, seed=1).batch(8) for _ in range(2)]
    expected = [[batch.tolist() for batch in other] for _ in range(3)]
    assert [batch.tolist() for batch in dataset] == expected[0]
    distributed = on_cluster.distribute_datasets_from_function(WAYS_TO_REFER[way](dataset))
    # The passes over it in this process and on workers have the orders of one count.
    assert [step[0] for step in steps_of(on_cluster, distributed)] == expected[1]
    assert [batch.tolist() for batch in dataset] == expected[2]


@pytest.mark.cluster
def test_files_that_a_worker_has(on_cluster, tmp_path):
    def dataset_fn(context):
        path = tmp_path / f"{os.getpid()}.txt"
        path.write_text("".join(f"{context.input_pipeline_id} {number}\n" for number in range(5)))
        return daskdist.read_text(str(path)).batch(3)

    distributed = on_cluster.distribute_datasets_from_function(dataset_fn)
    assert steps_of(on_cluster, distributed) == [
        [["0 0", "0 1", "0 2"], ["1 0", "1 1", "1 2"]],
        [["0 3", "0 4"], ["1 3", "1 4"]],
    ]


@pytest.mark.cluster
def test_endless_datasets_of_a_function(on_cluster):
    distributed = on_cluster.distribute_datasets_from_function(lambda context: in_pairs(context).repeat())
    assert distributed.cardinality() == INFINITE
    iterator = iter(distributed)
    actual = [on_cluster.local_results(next(iterator)) for _ in range(7)]
    assert [values[1].tolist() for values in actual] == [[1, 3], [5, 7], [9]] * 2 + [[1, 3]]


@pytest.mark.parametrize(("num_elements", "length"), [(4, 2), (5, None), (None, 2)], ids=["even", "uneven", "endless"])
def test_a_length_is_known_where_no_replica_runs_out(num_elements, length):
    def dataset_fn(context):
        ones = Dataset.from_tensors(np.ones(2))
        return ones.repeat(num_elements)

    spec = mirrored(2).distribute_datasets_from_function(dataset_fn).element_spec
    assert spec == PerReplicaSpec(*[TensorSpec((length,), np.float64)] * 2)


@pytest.mark.cluster
def test_run_and_reduce(on_cluster):
    distributed = on_cluster.distribute_datasets_from_function(in_pairs)
    total = 0
    for batch in distributed:
        total += on_cluster.reduce("SUM", on_cluster.run(lambda x: x, args=(batch,)), axis=0)
    assert int(total) == sum(range(10))


@pytest.mark.cluster
def test_elements_that_fail_on_a_worker_are_skipped_and_counted(on_cluster):
    def dataset_fn(context):
        bad = context.input_pipeline_id

        def inverse(x):
            if int(x) == bad:
                raise ZeroDivisionError
            return x

        return Dataset.range(4).map(inverse).ignore_errors().batch(1)

    iterator = iter(on_cluster.distribute_datasets_from_function(dataset_fn))
    assert [[value.tolist() for value in on_cluster.local_results(step)] for step in iterator] == [
        [[1], [0]],
        [[2], [2]],
        [[3], [3]],
    ]
    assert iterator.stats()["num_skipped"] == 2


@pytest.mark.cluster
def test_nothing_is_left_on_the_workers(on_cluster, client):
    distributed = on_cluster.distribute_datasets_from_function(of_generator)
    iterator = iter(distributed)
    next(iterator)
    del iterator, distributed
    gc.collect()

    def there(dask_worker):
        return [key for key in dask_worker.data if str(key).startswith(("dataset_fn", "summary"))]

    # Workers drop a value when they are told that it was released, which may be after a later call.
    for _ in range(100):
        client.gather([client.submit(os.getpid, workers=[worker], pure=False) for worker in on_cluster.workers])
        left = client.run(there)
        if not any(left.values()):
            break
    assert not any(left.values())


# --- what goes wrong ---


@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
def test_a_function_that_returns_no_dataset(mode):
    options = InputOptions(replication_mode=mode)
    with pytest.raises(ValueError, match=r"<lambda> returned list for input pipeline 0; it is to return a daskdist Da"):
        mirrored(2).distribute_datasets_from_function(lambda context: [1, 2], options)


def test_a_dataset_in_place_of_a_function_is_refused():
    with pytest.raises(ValueError, match="Dataset is not a function; give one that takes an InputContext"):
        mirrored(2).distribute_datasets_from_function(Dataset.range(3))


@pytest.mark.cluster
def test_a_function_that_returns_no_dataset_on_a_worker(on_cluster):
    worker = on_cluster.workers[1]

    def dataset_fn(context):
        return None if context.input_pipeline_id else Dataset.range(3)

    with pytest.raises(
        ValueError, match=f"dataset_fn returned NoneType for input pipeline 1 on worker {worker}; it is"
    ):
        on_cluster.distribute_datasets_from_function(dataset_fn)


@pytest.mark.cluster
def test_a_function_that_fails_on_a_worker(on_cluster):
    def dataset_fn(context):
        raise KeyError("no such table")

    with pytest.raises(KeyError, match="no such table") as raised:
        on_cluster.distribute_datasets_from_function(dataset_fn)
    assert any(
        "raised by the dataset_fn of input pipeline 0 on worker tcp://" in note for note in raised.value.__notes__
    )


@pytest.mark.cluster
def test_a_dataset_that_fails_on_a_worker(on_cluster):
    def refused(x):
        if int(x) == 2:
            raise ZeroDivisionError("not this one")
        return x

    def dataset_fn(context):
        return Dataset.range(3).map(refused)

    with pytest.raises(RuntimeError, match=r"map: .* raised ZeroDivisionError"):
        steps_of(on_cluster, on_cluster.distribute_datasets_from_function(dataset_fn))


OTHERS = {
    "another structure": lambda x: {"x": x},
    "another dtype": lambda x: x / 2,
    "another shape": lambda x: np.zeros((2, 3), np.int64),
}


@pytest.mark.cluster
@pytest.mark.parametrize("name", OTHERS)
def test_datasets_that_differ(on_cluster, name):
    def dataset_fn(context):
        ds = Dataset.from_tensors(np.zeros((2, 2), np.int64))
        return ds.map(OTHERS[name]) if context.input_pipeline_id else ds

    one, other = on_cluster.workers
    with pytest.raises(
        ValueError, match=rf"of input pipeline 0 \({one}\) TensorSpec.* of input pipeline 1 \({other}\)"
    ):
        on_cluster.distribute_datasets_from_function(dataset_fn)


@pytest.mark.cluster
def test_datasets_may_differ_in_their_first_length(on_cluster):
    def dataset_fn(context):
        return Dataset.from_tensors(np.arange(2 + context.input_pipeline_id))

    distributed = on_cluster.distribute_datasets_from_function(dataset_fn)
    assert steps_of(on_cluster, distributed) == [[[0, 1], [0, 1, 2]]]
    assert distributed.element_spec == PerReplicaSpec(*[TensorSpec((None,), np.int64)] * 2)


# --- elements that fail ---

FAILING = (3, 4, 8)


def good(x):
    """Return a number, or raise for those that fail."""
    if int(x) in FAILING:
        raise ValueError(f"{x} is not good")
    return x


OF_NUMBERS = {
    "batches": lambda context: Dataset.range(11).map(good).batch(1),
    "functions of batches": lambda context: Dataset.range(11).batch(1).map(lambda b: np.array([good(x) for x in b])),
    "single numbers": lambda context: Dataset.range(11).map(good),
    "padded": lambda context: Dataset.range(11).map(lambda x: np.full(2, good(x))).padded_batch(1),
    "shuffled": lambda context: Dataset.range(11).shuffle(4, seed=1, reshuffle_each_iteration=False).map(good).batch(1),
}


def outcomes(strategy, iterator):
    """Return for each step its distinct rows in order, or "failed", and the positions before each and at the end."""
    taken, states = [], [iterator.state_dict()]
    while True:
        try:
            step = next(iterator)
            taken.append([row for part in strategy.local_results(step) for row in np.unique(part).tolist()])
        except StopIteration:
            return taken, states
        except errors.UserFunctionError:
            taken.append("failed")
        states.append(iterator.state_dict())


def numbers_in(taken):
    return [number for rows in taken if rows != "failed" for number in rows]


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_elements_before_a_failing_one_come_first_and_those_behind_it_later(num_replicas):
    strategy = mirrored(num_replicas)
    for name, dataset_fn in OF_NUMBERS.items():
        taken, _ = outcomes(strategy, iter(strategy.distribute_datasets_from_function(dataset_fn)))
        in_order = [number for rows in taken for number in (["failed"] if rows == "failed" else rows)]
        every = ["failed" if x in FAILING else x for x in range(11)]
        assert taken.count("failed") == len(FAILING), name
        if name == "shuffled":
            assert sorted(numbers_in(taken)) == sorted({*range(11)} - {*FAILING})
        else:
            assert in_order == every, name


def test_a_dataset_of_each_replica_fails_by_itself():
    strategy, options = mirrored(3), InputOptions(replication_mode="PER_REPLICA")

    def dataset_fn(context):
        return Dataset.range(10 * context.input_pipeline_id, 10 * context.input_pipeline_id + 5).map(good).batch(1)

    taken, _ = outcomes(strategy, iter(strategy.distribute_datasets_from_function(dataset_fn, options)))
    # Only the first replica's dataset has numbers that fail, and the others go on in the same steps.
    assert taken[:4] == [[0, 10, 20], [1, 11, 21], [2, 12, 22], "failed"]
    assert taken[4:] == [[13, 23], "failed", [14, 24]]


@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_a_pass_with_failing_elements_continues_from_each_of_its_steps(name, mode):
    strategy = mirrored(3)
    distributed = strategy.distribute_datasets_from_function(OF_NUMBERS[name], InputOptions(replication_mode=mode))
    taken, states = outcomes(strategy, iter(distributed))

    def loop(iterator, state):
        iterator.load_state_dict(state)
        rows = []
        while True:
            try:
                rows += np.unique(next(iterator)).tolist()
            except StopIteration:
                return str(rows)
            except errors.UserFunctionError:
                continue

    for number, state in enumerate(states):
        iterator = iter(distributed)
        iterator.load_state_dict(state)
        # A position that is taken right after one was loaded is the same position.
        iterator.load_state_dict(iterator.state_dict())
        assert outcomes(strategy, iterator)[0] == taken[number:]
        rows = [json.loads(part) for part in strategy.local_results(strategy.run(loop, (distributed, state)))]
        assert sorted(itertools.chain(*rows)) == sorted(numbers_in(taken[number:]))


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["batches", "functions of batches", "single numbers"])
def test_datasets_on_workers_lose_no_element_before_or_behind_a_failing_one(start_cluster, name):
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(2, 2), num_replicas_per_worker=2) as strategy:
        # Each worker has all numbers.
        distributed = strategy.distribute_datasets_from_function(OF_NUMBERS[name])
        taken, _ = outcomes(strategy, iter(distributed))
        every = sorted(2 * [*({*range(11)} - {*FAILING})])
        assert sorted(numbers_in(taken)) == every
        assert taken.count("failed") == 2 * len(FAILING)


def test_with_drop_uneven_a_step_fails_as_a_whole():
    strategy = mirrored(2)
    distributed = strategy.distribute_datasets_from_function(
        lambda context: Dataset.range(8).map(good).batch(1).with_options(Options(drop_uneven=True))
    )
    assert outcomes(strategy, iter(distributed))[0] == [[0, 1], "failed", "failed", [6, 7]]


# --- how replicas are fed ---


def test_options_by_either_name():
    options = InputOptions(experimental_fetch_to_device=False, experimental_per_replica_buffer_size=3)
    assert options == InputOptions(fetch_to_device=False, per_replica_buffer_size=3)
    assert options.replication_mode is InputReplicationMode.PER_WORKER
    strategy = mirrored(2)
    assert steps_of(strategy, strategy.distribute_dataset(Dataset.range(4).batch(4), options)) == [[[0, 1], [2, 3]]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replication_mode": "PER_DEVICE"}, "replication_mode is 'PER_DEVICE'; there are PER_WORKER and PER_REPLICA"),
        ({"per_replica_buffer_size": -1}, "per_replica_buffer_size is -1; give 0 or more"),
        ({"fetch_to_device": "yes"}, "fetch_to_device is 'yes'; give True or False"),
        ({"place_dataset_on_device": True}, "place_dataset_on_device=True needs replication_mode='PER_REPLICA'"),
        (
            {"place_dataset_on_device": True, "replication_mode": "PER_REPLICA"},
            "place_dataset_on_device=True needs fetch_to_device=False",
        ),
        ({"fetch_to_device": True, "experimental_fetch_to_device": True}, "fetch_to_device is given twice"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_that_are_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        InputOptions(**options)


def test_a_dataset_that_is_given_is_for_all_replicas():
    with pytest.raises(ValueError, match="PER_REPLICA is for distribute_datasets_from_function"):
        mirrored(2).distribute_dataset(Dataset.range(4).batch(2), InputOptions(replication_mode="PER_REPLICA"))
    with pytest.raises(ValueError, match="options is dict; give InputOptions"):
        mirrored(2).distribute_dataset(Dataset.range(4).batch(2), {"fetch_to_device": True})


def test_values_are_made_ahead_of_use():
    def num_made(size):
        made = []

        def note(x):
            made.append(int(x[0]))
            return x

        ds = Dataset.range(1000).batch(2).map(note)
        iterator = iter(mirrored(2).distribute_dataset(ds, InputOptions(per_replica_buffer_size=size)))
        before = len(made)
        next(iterator)
        iterator.close()
        return len(made) - before

    # All elements of one call are computed, also if fewer are asked for.
    assert 1 <= num_made(0) <= num_made(1) < 100
    assert 100 <= num_made(100) < 400
