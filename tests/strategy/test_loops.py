"""Whole loops on the replicas: `run` with distributed datasets."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter

import dask
import numpy as np
import pytest
from conftest import eventually, mirrored, threads_of_passes

import daskdist
from daskdist import Dataset, InputOptions, Options
from daskdist.errors import ArgumentError, DaskdistError
from daskdist.sharding import AutoShardPolicy
from daskdist.strategy.input import shared_reader
from daskdist.testing import afresh


def as_lists(element):
    if isinstance(element, dict):
        return {name: as_lists(value) for name, value in element.items()}
    if isinstance(element, tuple):
        return [as_lists(value) for value in element]
    # Dtype and shape tell arrays without rows apart.
    array = np.asarray(element)
    return [str(array.dtype), list(array.shape[1:]), array.tolist()]


def passes_of(iterator, num_passes):
    return repr([[as_lists(element) for element in iterator] for _ in range(num_passes)])


def by_steps(strategy, distributed, num_passes):
    """Return each replica's elements in a loop of the program."""
    actual = [[] for _ in range(strategy.num_replicas_in_sync)]
    for _ in range(num_passes):
        steps = [strategy.local_results(step) for step in distributed]
        for number, result in enumerate(actual):
            result.append([as_lists(step[number]) for step in steps])
    return list(map(repr, actual))


def by_loops(strategy, distributed, num_passes):
    """Return each replica's elements in loops on the replicas."""
    return [str(value) for value in strategy.local_results(strategy.run(passes_of, args=(distributed, num_passes)))]


def with_options(dataset, **options):
    return dataset.with_options(Options(**options))


def named(x):
    return {"x": x, "pair": (x * 2, x / 2)}


def keep_thirds(x):
    return x[x % 3 == 0]


IN_MEMORY = {
    "slices": lambda: Dataset.from_tensor_slices(np.arange(60, dtype=np.float32).reshape(30, 2)).batch(8),
    "shuffle": lambda: Dataset.range(50).shuffle(16, seed=3).batch(12),
    "short_last_batch": lambda: Dataset.range(13).batch(10),
    "dicts": lambda: Dataset.range(20).map(named).batch(6),
    "filter": lambda: Dataset.range(40).filter(lambda x: x % 5 < 2).batch(6),
    "rows_left_out_of_batches": lambda: Dataset.range(29).batch(7).map(keep_thirds),
    "drop_uneven": lambda: with_options(Dataset.range(43).batch(10), drop_uneven=True),
    "unordered": lambda: with_options(Dataset.range(24).map(named).batch(5), num_threads=2),
    "off": lambda: with_options(Dataset.range(11).batch(4), auto_shard_policy=AutoShardPolicy.OFF),
}


# --- the same elements as in the program's own loop ---


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("name", IN_MEMORY)
def test_embedded_as_step_by_step(name, num_replicas):
    strategy = mirrored(num_replicas)
    dataset = IN_MEMORY[name]()
    expected = by_steps(strategy, strategy.distribute_dataset(afresh(dataset)), 3)
    assert by_loops(strategy, strategy.distribute_dataset(afresh(dataset)), 3) == expected


@pytest.mark.cluster
@pytest.mark.parametrize("name", IN_MEMORY)
def test_on_a_cluster_as_step_by_step(on_cluster, name):
    dataset = IN_MEMORY[name]()
    expected = by_steps(on_cluster, on_cluster.distribute_dataset(afresh(dataset)), 2)
    assert by_loops(on_cluster, on_cluster.distribute_dataset(afresh(dataset)), 2) == expected


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["shuffle", "filter", "rows_left_out_of_batches"])
def test_several_replicas_on_a_worker(start_cluster, name):
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(2, 2), num_replicas_per_worker=2) as strategy:
        dataset = IN_MEMORY[name]()
        expected = by_steps(strategy, strategy.distribute_dataset(afresh(dataset)), 2)
        assert by_loops(strategy, strategy.distribute_dataset(afresh(dataset)), 2) == expected


# Pipelines over files, and their options. Of two workers, the second has far fewer rows than the first.
OF_FILES = {
    "even": (lambda ds: ds.batch(4), {"auto_shard_policy": AutoShardPolicy.FILE}),
    "data": (lambda ds: ds.batch(4), {"auto_shard_policy": AutoShardPolicy.DATA}),
    "shuffled": (lambda ds: ds.shuffle(9, seed=1).batch(6), {"auto_shard_policy": AutoShardPolicy.FILE}),
    "more_pieces_than_rows": (lambda ds: ds.batch(3), {"auto_shard_policy": AutoShardPolicy.FILE}),
    "lengths_unknown": (
        lambda ds: ds.filter(lambda row: row["id"] % 4 != 1).batch(5),
        {"auto_shard_policy": AutoShardPolicy.FILE},
    ),
    "uneven_dropped": (lambda ds: ds.batch(4), {"auto_shard_policy": AutoShardPolicy.FILE, "drop_uneven": True}),
    "unknown_uneven_dropped": (
        lambda ds: ds.filter(lambda row: row["id"] % 4 != 1).batch(4),
        {"auto_shard_policy": AutoShardPolicy.FILE, "drop_uneven": True},
    ),
}


@pytest.mark.cluster
@pytest.mark.parametrize("name", OF_FILES)
def test_files_on_a_cluster(on_cluster, parquet_files, name):
    made, options = OF_FILES[name]
    dataset = with_options(made(daskdist.read_parquet(parquet_files([31, 6, 9, 2]))), **options)
    expected = by_steps(on_cluster, on_cluster.distribute_dataset(afresh(dataset)), 2)
    assert by_loops(on_cluster, on_cluster.distribute_dataset(afresh(dataset)), 2) == expected


def own_numbers(context):
    size = context.get_per_replica_batch_size(12)
    own = Dataset.range(21).shard(context.num_input_pipelines, context.input_pipeline_id)
    return own.shuffle(30, seed=2).batch(size + context.input_pipeline_id)


@pytest.mark.cluster
@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
def test_datasets_of_a_function(start_cluster, mode):
    with daskdist.MultiWorkerMirroredStrategy(start_cluster(2, 2), num_replicas_per_worker=2) as strategy:

        def distributed():
            options = InputOptions(replication_mode=mode)
            return strategy.distribute_datasets_from_function(own_numbers, options)

        assert by_loops(strategy, distributed(), 2) == by_steps(strategy, distributed(), 2)


@pytest.mark.parametrize("mode", ["PER_WORKER", "PER_REPLICA"])
def test_datasets_of_a_function_embedded(mode):
    strategy = mirrored(3)
    options = InputOptions(replication_mode=mode)
    expected = by_steps(strategy, strategy.distribute_datasets_from_function(own_numbers, options), 2)
    assert by_loops(strategy, strategy.distribute_datasets_from_function(own_numbers, options), 2) == expected


def test_a_distributed_dataset_may_be_in_nests_of_arguments():
    strategy = mirrored(2)
    distributed = strategy.distribute_dataset(Dataset.range(8).batch(4))

    def loop(nest, *, other):
        pairs = zip(nest["data"][0], other, strict=True)
        return sum(int(x.sum()) * nest["times"] + int(y.sum()) for x, y in pairs)

    actual = strategy.run(loop, args=({"data": [distributed], "times": 100},), kwargs={"other": distributed})
    assert actual.values == (10 * 101, 18 * 101)


# --- the iterator ---


def test_iterators_in_loops_have_the_usual_methods():
    strategy = mirrored(1)
    distributed = strategy.distribute_dataset(Dataset.range(6).batch(2))

    def loop(it):
        assert iter(it) is it
        actual = [it.get_next().tolist(), next(it).tolist()]
        actual.append(it.get_next_as_optional().get_value().tolist())
        actual += [it.get_next_as_optional().has_value(), next(it, "over")]
        actual.append([x.tolist() for x in it])
        return repr((actual, it.element_spec == distributed.element_spec, repr(it)))

    expected = [[0, 1], [2, 3], [4, 5], False, "over", [[0, 1], [2, 3], [4, 5]]]
    actual = strategy.run(loop, args=(distributed,))
    assert actual.startswith(repr((expected, True))[:-1])
    assert "<ReplicaIterator of replica 0, pass 1: TensorSpec(" in actual


def test_element_spec_is_of_one_replica():
    strategy = mirrored(2)
    distributed = strategy.distribute_dataset(Dataset.range(8).batch(4))
    specs = strategy.run(lambda it: repr(it.element_spec), args=(distributed,))
    assert specs.values == (repr(distributed.element_spec.specs[0]),) * 2


def test_a_loop_continues_where_it_was_left():
    strategy = mirrored(2)
    distributed = strategy.distribute_dataset(Dataset.range(12).repeat().batch(4))

    def loop(it):
        actual = []
        for _ in range(2):
            for x in it:
                actual += x.tolist()
                if len(actual) % 6 == 0:
                    break
        return repr(actual)

    one, other = strategy.run(loop, args=(distributed,)).values
    assert one == repr([0, 1, 4, 5, 8, 9, 0, 1, 4, 5, 8, 9])
    assert other == repr([2, 3, 6, 7, 10, 11, 2, 3, 6, 7, 10, 11])


def test_calls_and_iterators_draw_from_one_sequence():
    strategy = mirrored(2)
    dataset = Dataset.range(16).shuffle(16, seed=1).batch(8)

    def passes():
        distributed = strategy.distribute_dataset(afresh(dataset))
        return [way(strategy, distributed, 1) for way in (by_loops, by_steps, by_loops)]

    first = by_steps(strategy, strategy.distribute_dataset(afresh(dataset)), 1)
    orders = passes()
    assert orders[0] == first
    assert len(set(map(str, orders))) == 3
    assert passes() == orders


# --- one reading for the replicas of a process ---


class Counting:
    """A counter of the elements that are made."""

    def __init__(self):
        self.number = 0

    def __call__(self):
        for k in range(64):
            self.number += 1
            yield np.full(2**8, k)


def test_input_is_read_once():
    counting = Counting()
    strategy = mirrored(3)
    dataset = Dataset.from_generator(counting, output_signature=daskdist.TensorSpec((2**8,), np.int64)).batch(6)
    counting.number = 0
    sums = strategy.run(lambda it: sum(int(x[:, 0].sum()) for x in it), args=(strategy.distribute_dataset(dataset),))
    assert sum(sums.values) == sum(range(64))
    assert counting.number == 64


def test_a_late_replica_reads_for_itself():
    counting = Counting()
    strategy = mirrored(2)
    dataset = Dataset.from_generator(counting, output_signature=daskdist.TensorSpec((2**8,), np.int64)).batch(4)
    small = with_options(dataset, memory_budget_bytes=2**14)
    expected = by_steps(strategy, strategy.distribute_dataset(small), 1)
    counting.number = 0
    is_first_over = threading.Event()

    def loop(it):
        if daskdist.get_replica_context().replica_id_in_sync_group:
            assert is_first_over.wait(10)
        elements = passes_of(it, 1)
        is_first_over.set()
        return elements

    elements = strategy.run(loop, args=(strategy.distribute_dataset(small),))
    assert [str(value) for value in strategy.local_results(elements)] == expected
    assert counting.number == 128


def in_threads(strategy, distributed, loops):
    """Call a separate function on each replica, at the same time, and return the results."""
    go = threading.Barrier(len(loops))
    actual = {}

    def loop(it, number):
        # All replicas begin the pass before any of them continues.
        next(it)
        daskdist.get_replica_context().all_reduce("SUM", 1)
        go.wait(10)
        actual[number] = loops[number](it)
        return number

    numbers = daskdist.PerReplica(range(len(loops)))
    strategy.run(loop, args=(distributed, numbers))
    return [actual[number] for number in range(len(loops))]


def test_a_replica_ahead_waits_for_the_slowest():
    strategy = mirrored(2)
    # A batch has 64 KiB for each replica; about 16 batches fit into the window's share for bundles.
    dataset = Dataset.from_tensor_slices(np.zeros((400, 2**14), np.float32)).batch(2)
    distributed = strategy.distribute_dataset(with_options(dataset, memory_budget_bytes=2**21))
    is_slow, taken = threading.Event(), []

    def fast(it):
        for number, _ in enumerate(it):
            taken.append(number)
        return len(taken)

    def slow(it):
        # Wait until the fast replica makes no more progress.
        while True:
            before = len(taken)
            if is_slow.wait(0.3) or (taken and len(taken) == before):
                break
        ahead = len(taken)
        return ahead, sum(1 for _ in it)

    num_fast, (ahead, num_slow) = in_threads(strategy, distributed, [fast, slow])
    assert num_fast == num_slow == 199
    assert 0 < ahead < 150


@pytest.mark.parametrize("how", ["leaves", "closes"])
def test_a_replica_that_leaves_does_not_block_others(how, monkeypatch):
    monkeypatch.setattr(shared_reader, "_MAX_WAIT_S", 60)
    strategy = mirrored(2)
    dataset = Dataset.from_tensor_slices(np.zeros((400, 2**14), np.float32)).batch(2)
    distributed = strategy.distribute_dataset(with_options(dataset, memory_budget_bytes=2**21))
    over = threading.Event()

    def early(it):
        if how == "closes":
            it.close()
            # The call of this replica lasts as long as the other replica's loop.
            assert over.wait(20)
        return True

    def late(it):
        number = sum(1 for _ in it)
        over.set()
        return number

    assert in_threads(strategy, distributed, [early, late]) == [True, 199]


def test_a_replica_that_waits_elsewhere_does_not_block_others_forever(monkeypatch):
    monkeypatch.setattr(shared_reader, "_MAX_WAIT_S", 0.01)
    strategy = mirrored(2)
    dataset = Dataset.from_tensor_slices(np.zeros((100, 2**14), np.float32)).batch(2)
    distributed = strategy.distribute_dataset(with_options(dataset, memory_budget_bytes=2**19))
    over = threading.Event()

    def waiting(it):
        assert over.wait(20)
        return sum(1 for _ in it)

    def ahead(it):
        number = sum(1 for _ in it)
        over.set()
        return number

    assert in_threads(strategy, distributed, [waiting, ahead]) == [49, 49]


# --- cost for the cluster ---


@pytest.mark.cluster
def test_no_message_a_batch(on_cluster, client):
    def num_transitions(dask_scheduler):
        return dask_scheduler.transition_counter

    def loop(it, num_steps):
        actual = 0.0
        for _, x in zip(range(num_steps), it, strict=False):
            actual += float(x.sum())
        return actual

    rows = np.ones((512, 4), np.float32)
    distributed = on_cluster.distribute_dataset(Dataset.from_tensor_slices(rows).repeat().batch(16))

    def run(num_steps):
        before = client.run_on_scheduler(num_transitions)
        actual = on_cluster.local_results(on_cluster.run(loop, args=(distributed, num_steps)))
        assert list(map(float, actual)) == [32.0 * num_steps] * 2
        return client.run_on_scheduler(num_transitions) - before

    run(1)
    # Values of the previous call may be released during a call, so take the smallest of three counts.
    counts = {num_steps: min(run(num_steps) for _ in range(3)) for num_steps in (10, 1000)}
    assert counts[1000] <= counts[10] + 4
    assert counts[1000] < 100


@pytest.mark.cluster
def test_a_loop_leaves_no_threads_or_iterators(client, parquet_files):
    def threads_there():
        gc.collect()
        return sorted(thread.name for thread in threads_of_passes())

    def num_iterators():
        gc.collect()
        return sum(
            type(value).__name__ in ("ReplicaIterator", "SharedPass", "PipelineReader") for value in gc.get_objects()
        )

    def loop(it):
        next(it)
        return sum(int(x["id"].sum()) for _, x in zip(range(3), it, strict=False))

    before = client.run(threads_there)
    with daskdist.MultiWorkerMirroredStrategy(client) as strategy:
        distributed = strategy.distribute_dataset(daskdist.read_parquet(parquet_files(40, 4)).repeat().batch(4))
        strategy.local_results(strategy.run(loop, args=(distributed,)))
        # The thread of a replica reports the result before it drops the arguments.
        eventually(lambda: set(client.run(num_iterators).values()) == {0})

    def threads_more():
        # Threads of earlier tests may end meanwhile.
        return [Counter(now) - Counter(before[worker]) for worker, now in client.run(threads_there).items()]

    eventually(lambda: not any(threads_more()))
    del distributed
    gc.collect()
    eventually(
        lambda: (
            not client.run_on_scheduler(
                lambda dask_scheduler: [key for key in dask_scheduler.tasks if "run" in str(key)]
            )
        )
    )


def test_nothing_is_left_embedded(parquet_files):
    before = threads_of_passes()
    strategy = mirrored(2)
    distributed = strategy.distribute_dataset(daskdist.read_parquet(parquet_files(40, 4)).repeat().batch(4))
    kept = []

    def loop(it):
        kept.append(it)
        next(it)

    assert strategy.run(loop, args=(distributed,)) is None
    deadline = time.monotonic() + 20
    while threads_of_passes() - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not threads_of_passes() - before
    for value in kept:
        with pytest.raises(ArgumentError, match="this iterator is closed: it can be used until its function returns"):
            next(value)


# --- errors ---


def until_it_fails(it):
    actual = []
    try:
        for x in it:
            actual.append(len(x))
    except Exception as error:
        return f"{len(actual)} {type(error).__name__} {error} {' '.join(getattr(error, '__notes__', []))}"
    return "no error"


def steps_before_it_fails(distributed):
    num_steps = 0
    try:
        for _ in distributed:
            num_steps += 1
    except DaskdistError as error:
        return f"{num_steps} {type(error).__name__} {error}"
    return "no error"


def test_an_error_is_raised_at_its_step(parquet_files):
    paths = parquet_files(800, 3)
    strategy = mirrored(2)
    # Splits are so small that each file is read in calls of its own.
    with dask.config.set({"daskdist.split-bytes": 1000}):
        distributed = strategy.distribute_dataset(daskdist.read_parquet(paths).batch(40))
        with open(paths[2], "r+b") as file:
            file.seek(4)
            file.write(b"\xff" * 2000)
        expected = steps_before_it_fails(distributed)
        actual = strategy.run(until_it_fails, args=(distributed,)).values
    num_steps, kind, _ = expected.split(maxsplit=2)
    assert 0 < int(num_steps) <= 40
    assert kind == "DamagedFileError"
    assert paths[2] in expected
    for result in actual:
        assert result.startswith(expected)


def test_an_error_in_a_function():
    def numbers():
        yield from range(50)
        raise ValueError("no more of them")

    strategy = mirrored(3)
    dataset = Dataset.from_generator(numbers, output_signature=daskdist.TensorSpec((), np.int64)).batch(8)
    distributed = strategy.distribute_dataset(dataset)
    expected = steps_before_it_fails(distributed)
    assert int(expected.split()[0]) > 2
    assert "no more of them" in expected
    # The last batch has fewer rows than the others, and one of them failed: the loops of the others come to the end.
    *others, last = strategy.run(until_it_fails, args=(distributed,)).values
    assert last.startswith(expected)
    assert set(others) == {"no error"}


@pytest.mark.cluster
def test_an_error_on_a_cluster(on_cluster):
    def loop(it):
        return sum(int(x.sum()) for x in it)

    def divide(x):
        if (x > 30).any():
            raise ValueError("too much for it")
        return x

    distributed = on_cluster.distribute_dataset(Dataset.range(40).map(divide).batch(4))
    with pytest.raises(Exception, match="too much for it"):
        on_cluster.local_results(on_cluster.run(loop, args=(distributed,)))
    good = on_cluster.distribute_dataset(Dataset.range(8).batch(4))
    assert list(map(int, on_cluster.local_results(on_cluster.run(loop, args=(good,))))) == [10, 18]


def test_a_dataset_of_another_strategy_is_refused():
    distributed = mirrored(2).distribute_dataset(Dataset.range(8).batch(4))
    with pytest.raises(
        ArgumentError, match="a distributed dataset is of another strategy; distribute it with the strategy"
    ):
        mirrored(2).run(list, args=(distributed,))


def test_an_iterator_is_refused():
    strategy = mirrored(2)
    iterator = iter(strategy.distribute_dataset(Dataset.range(8).batch(4)))
    with pytest.raises(ArgumentError, match="stays in its program; give the distributed dataset itself"):
        strategy.run(list, args=(iterator,))


def filtered(row):
    return row["id"] % 4 != 1


@pytest.mark.cluster
@pytest.mark.parametrize("where", ["own", "both", "not said"])
def test_files_on_disks_of_their_readers(on_cluster, parquet_files, where):
    paths = parquet_files(8, 4)
    one, other = on_cluster.workers
    places = {"own": [one, other] * 2, "both": [(one, other)] * 4, "not said": [None] * 4}[where]
    options = {"locations": dict(zip(paths, places, strict=True)), "auto_shard_policy": AutoShardPolicy.FILE}
    if where != "own":
        # The number of steps depends on the contents of the files, so that all workers read all of them.
        options["drop_uneven"] = True
    dataset = daskdist.read_parquet(paths)
    dataset = dataset if where == "own" else dataset.filter(filtered)
    dataset = with_options(dataset.batch(4), **options)
    expected = by_steps(on_cluster, on_cluster.distribute_dataset(afresh(dataset)), 2)
    assert by_loops(on_cluster, on_cluster.distribute_dataset(afresh(dataset)), 2) == expected


@pytest.mark.cluster
@pytest.mark.parametrize("how", ["all read all", "assigned elsewhere", "only the data tells"])
def test_files_on_disks_of_others_are_refused(on_cluster, parquet_files, how):
    paths = parquet_files(8, 2)
    one, other = on_cluster.workers
    locations = dict(zip(paths, [other, one] if how == "assigned elsewhere" else [one, other], strict=True))
    policy = AutoShardPolicy.DATA if how == "all read all" else AutoShardPolicy.FILE
    dataset = daskdist.read_parquet(paths)
    dataset = dataset.filter(filtered) if how == "only the data tells" else dataset
    dataset = with_options(dataset.batch(4), locations=locations, auto_shard_policy=policy)
    distributed = on_cluster.distribute_dataset(dataset)
    with pytest.raises(ArgumentError, match=r"part-0.parquet is on disks of some workers only .*would read it"):
        on_cluster.run(list, args=(distributed,))


@pytest.mark.cluster
def test_files_that_a_function_reads_on_disks_of_some_are_refused(on_cluster, parquet_files):
    paths = parquet_files(8, 2)
    dataset = Dataset.from_tensor_slices(np.array(paths)).interleave(lambda path: daskdist.read_parquet(str(path)))
    dataset = with_options(dataset.batch(4), locations=dict(zip(paths, on_cluster.workers, strict=True)))
    distributed = on_cluster.distribute_dataset(dataset)
    with pytest.raises(ArgumentError, match="which files the function of interleave reads is known when they are read"):
        on_cluster.run(list, args=(distributed,))


@pytest.mark.cluster
def test_functions_that_do_not_pickle(on_cluster):
    lock = threading.Lock()
    dataset = Dataset.range(8).batch(4).map(lambda x: x + lock.locked())
    with pytest.raises(ArgumentError, match=r"does not pickle, and so cannot be sent to a worker.*lock"):
        on_cluster.distribute_dataset(dataset)
