"""Iterators that several threads take from, and iterators that replicas must not take from."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from conftest import mirrored

import daskdist
from daskdist import Dataset, MirroredStrategy, Options, TensorSpec

NUM_THREADS = 4


@pytest.fixture(autouse=True)
def _threads_switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(take, num_threads=NUM_THREADS):
    """Call ``take()`` in several threads until StopIteration; return a list of results per thread, and other errors."""
    taken, errors = [[] for _ in range(num_threads)], []
    ready = threading.Barrier(num_threads)

    def work(own):
        ready.wait()
        try:
            while True:
                own.append(take())
        except StopIteration:
            pass
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(own,)) for own in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return taken, errors


def rows_taken(take, local=lambda value: [value]):
    taken, errors = in_threads(take)
    assert not errors
    return sorted(int(row) for own in taken for value in own for part in local(value) for row in np.ravel(part))


def counted(num_rows):
    return Dataset.from_generator(lambda: iter(range(num_rows)), TensorSpec((), "int64"))


PIPELINES = {
    "range": lambda n: Dataset.range(n).batch(4),
    "function": lambda n: Dataset.range(n).map(lambda x: x + 0).filter(lambda x: x >= 0).batch(4),
    "shuffle": lambda n: Dataset.range(n).shuffle(50).batch(4),
    "threads": lambda n: Dataset.range(n).batch(4).with_options(Options(num_threads=2)),
    "generator": lambda n: counted(n).batch(4),
    "generator that iterates": lambda n: Dataset.from_generator(
        lambda: iter(Dataset.range(n)), TensorSpec((), "int64")
    ).batch(4),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_each_element_goes_to_one_thread(name):
    iterator = iter(PIPELINES[name](1602))
    assert rows_taken(lambda: next(iterator)) == list(range(1602))


@pytest.mark.parametrize("name", PIPELINES)
def test_each_step_goes_to_one_thread(name):
    strategy = mirrored(2)
    iterator = iter(strategy.distribute_dataset(PIPELINES[name](402)))
    assert rows_taken(lambda: next(iterator), strategy.local_results) == list(range(402))


def test_each_optional_goes_to_one_thread():
    strategy = mirrored(2)
    iterator = iter(strategy.distribute_dataset(Dataset.range(402).batch(4)))

    def take():
        actual = iterator.get_next_as_optional()
        if not actual.has_value():
            raise StopIteration
        return actual.get_value()

    assert rows_taken(take, strategy.local_results) == list(range(402))


def test_each_step_on_devices_goes_to_one_thread(strict):
    strategy = MirroredStrategy(["STRICT:0", "STRICT:1"])
    iterator = iter(strategy.distribute_dataset(Dataset.range(402).batch(4)))
    taken, errors = in_threads(lambda: next(iterator))
    assert not errors
    actual = [strategy.gather(value, axis=0) for own in taken for value in own]
    assert sorted(np.concatenate(actual).tolist()) == list(range(402))


def test_steps_of_a_replica_go_to_one_of_its_threads():
    strategy = mirrored(2)

    def loop(iterator):
        return [rows_taken(lambda: next(iterator))]

    dataset = strategy.distribute_dataset(Dataset.range(402).batch(4))
    (first,), (second,) = strategy.local_results(strategy.run(loop, args=(dataset,)))
    assert sorted(first + second) == list(range(402))


@pytest.mark.cluster
@pytest.mark.parametrize("policy", ["data", "file"])
def test_each_step_of_a_cluster_goes_to_one_thread(on_cluster, parquet_files, policy):
    ds = daskdist.read_parquet(parquet_files([130, 70]), "id").batch(4).with_options(Options(auto_shard_policy=policy))
    iterator = iter(on_cluster.distribute_dataset(ds))
    assert rows_taken(lambda: next(iterator), on_cluster.local_results) == list(range(200))


def test_another_iterator_is_usable_while_a_thread_waits():
    release, begun = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert release.wait(60)
        yield 1

    waiting = iter(Dataset.from_generator(slow, TensorSpec((), "int64")).batch(1))
    thread = threading.Thread(target=next, args=(waiting,))
    thread.start()
    assert begun.wait(60)
    # Meanwhile this thread can use another dataset.
    assert len(list(mirrored(2).distribute_dataset(Dataset.range(8).batch(4)))) == 2
    release.set()
    thread.join(60)
    assert next(waiting, None) is None


# --- replicas ---


def of_next(iterator, dataset):
    return lambda x: next(iterator)


def of_get_next(iterator, dataset):
    return lambda x: iterator.get_next()


def of_optional(iterator, dataset):
    return lambda x: iterator.get_next_as_optional()


def of_a_loop(iterator, dataset):
    return lambda x: list(dataset)


def of_merge_call(iterator, dataset):
    return lambda x: daskdist.get_replica_context().merge_call(lambda strategy, x: next(iterator), args=(x,))


@pytest.mark.parametrize("make", [of_next, of_get_next, of_optional, of_a_loop, of_merge_call])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_function_of_replicas_cannot_take_steps(make, num_replicas):
    strategy = mirrored(num_replicas)
    dataset = strategy.distribute_dataset(Dataset.range(8).batch(4))
    iterator = iter(dataset)
    with pytest.raises(RuntimeError, match=r"distributed dataset is iterated over by .*args=\(next\(iterator\),\)"):
        strategy.run(make(iterator, dataset), args=(1,))
    # The refused function took nothing, and the program can take all steps, in a scope too.
    with strategy.scope():
        steps = list(iterator)
    assert [row for step in steps for part in strategy.local_results(step) for row in part] == list(range(8))


@pytest.mark.cluster
@pytest.mark.parametrize("make", [of_next, of_a_loop])
def test_a_function_of_replicas_cannot_take_steps_on_a_cluster(on_cluster, make):
    dataset = on_cluster.distribute_dataset(Dataset.range(8).batch(4))
    with pytest.raises(daskdist.errors.ArgumentError, match=r"stays in its program.*args=\(next\(iterator\),\)"):
        on_cluster.run(make(iter(dataset), dataset), args=(1,))


def test_a_function_of_replicas_iterates_over_a_dataset_of_its_own():
    strategy = mirrored(2)
    sums = strategy.run(lambda x: x + sum(int(row) for row in Dataset.range(4)), args=(1,))
    assert strategy.local_results(sums) == (7, 7)
