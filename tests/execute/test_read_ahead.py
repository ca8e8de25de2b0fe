"""Limits of reading ahead, in rows, bytes, time and tasks."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import time
import traceback
from collections import Counter

import numpy as np
import pytest
from conftest import eventually, mirrored, threads_of_passes
from distributed import Client, Event, LocalCluster, get_worker

import daskdist
from daskdist import Dataset, Options, TensorSpec
from daskdist.core.dataset_base import node_of
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.primitive import Exhausted, NotReady
from daskdist.errors import UserFunctionError
from daskdist.execute.callers.submit import Submit, workers_of
from daskdist.execute.stream.element_puller import ElementPuller
from daskdist.execute.stream.element_reader import ElementReader
from daskdist.ops.from_generator import Generated
from daskdist.strategy.replica.contract import internals_of

NUMBER = TensorSpec((), np.int64)


class Gated:
    """A generator of numbers that waits before one of them for a gate, and records how many were taken."""

    def __init__(self, stop_before=None, end=None):
        self.stop_before, self.end = stop_before, end
        self.gate = threading.Event()
        self.num_pulled = 0

    def __call__(self):
        for number in itertools.count():
            if number == self.end:
                return
            if number == self.stop_before:
                self.gate.wait(60)
            self.num_pulled = number + 1
            yield np.int64(number)

    def dataset(self):
        return Dataset.from_generator(self, output_signature=NUMBER)


def lists(value):
    """Return the rows of a step, of all replicas together."""
    parts = value.values if isinstance(value, daskdist.PerReplica) else (value,)
    return np.concatenate([np.asarray(part) for part in parts]).tolist()


PLACES = {
    "plain": lambda ds: ds,
    "threads": lambda ds: ds.with_options(Options(num_threads=2)),
    "one replica": lambda ds: mirrored(1).distribute_dataset(ds),
    "two replicas": lambda ds: mirrored(2).distribute_dataset(ds),
}
AFTER = {
    "batch": lambda ds: ds.batch(2),
    "map": lambda ds: ds.map(lambda x: x, vectorized=False).batch(2),
    "map of batches": lambda ds: ds.batch(2).map(lambda x: x),
    "filter": lambda ds: ds.filter(lambda x: x >= 0).batch(2),
    "scan": lambda ds: ds.scan(np.int64(0), lambda state, x: (state, x)).batch(2),
    "zip": lambda ds: Dataset.zip(ds, Dataset.range(100)).map(lambda x, y: x).batch(2),
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("after", AFTER)
def test_batches_wait_for_their_own_rows_only(where, after):
    source = Gated(stop_before=4)
    it = iter(PLACES[where](AFTER[after](source.dataset())))
    try:
        assert [lists(next(it)) for _ in range(2)] == [[0, 1], [2, 3]]
    finally:
        source.gate.set()
    assert lists(next(it)) == [4, 5]
    it.close()


@pytest.mark.parametrize("where", PLACES)
def test_a_generator_is_pulled_little_ahead_at_first(where):
    source = Gated()
    it = iter(PLACES[where](source.dataset().batch(2)))
    for number in range(6):
        next(it)
        assert source.num_pulled <= 16 * 2 * (number + 1)
    it.close()


@pytest.mark.parametrize("where", PLACES)
def test_a_generator_inside_flat_map_is_pulled_little_ahead(where):
    source = Gated(stop_before=4)
    it = iter(PLACES[where](Dataset.range(3).flat_map(lambda _: source.dataset()).batch(2)))
    try:
        assert [lists(next(it)) for _ in range(2)] == [[0, 1], [2, 3]]
    finally:
        source.gate.set()
    it.close()


@pytest.mark.parametrize("where", PLACES)
def test_the_budget_limits_the_elements_pulled_ahead(where):
    taken, most = [0], [0]

    def rows():
        for number in range(400):
            most[0] = max(most[0], number - taken[0])
            yield np.full(1000, number)

    spec = TensorSpec((1000,), np.int64)
    ds = Dataset.from_generator(rows, output_signature=spec).batch(1).with_options(Options(memory_budget_bytes=100_000))
    it = iter(PLACES[where](ds))
    for _ in it:
        taken[0] += 1
    assert taken[0] == 400
    # At 8 kB per row, these are the rows that the budget allows, and a few that are being computed or handed over.
    assert most[0] <= 100_000 // 8000 + 8


def test_a_generator_that_is_slow_in_another_thread_is_left_at_once():
    source = Gated(stop_before=1)
    it = iter(source.dataset())
    next(it)
    assert threads_of_passes()
    del it
    source.gate.set()
    gc.collect()
    for thread in threads_of_passes():
        thread.join(10)
    assert not threads_of_passes()


def test_a_generator_runs_in_one_thread_and_is_closed_there():
    threads, closed = set(), threading.Event()

    def rows():
        try:
            for number in range(1000):
                threads.add(threading.get_ident())
                yield np.int64(number)
        finally:
            threads.add(threading.get_ident())
            closed.set()

    it = iter(Dataset.from_generator(rows, output_signature=NUMBER).batch(10))
    next(it)
    it.close()
    del it
    gc.collect()
    assert closed.wait(10)
    assert len(threads) == 1


def test_a_position_counts_only_elements_handed_out():
    source = Gated(end=50)
    ds = source.dataset().shuffle(7, seed=3, reshuffle_each_iteration=False).batch(3)
    whole = [batch.tolist() for batch in ds]
    for number in (0, 1, 4, len(whole)):
        it = iter(ds)
        assert [next(it).tolist() for _ in range(number)] == whole[:number]
        state = it.state_dict()
        it.close()
        again = iter(ds)
        again.load_state_dict(state)
        assert [batch.tolist() for batch in again] == whole[number:]


# --- the reader itself ---


def reader_of(generator, limit_bytes=2**20, *, is_ahead=False):
    spec = Dataset.from_generator(generator, output_signature=NUMBER).element_spec
    node = node_of(Dataset.from_generator(generator, output_signature=NUMBER))
    assert spec == NUMBER
    return ElementReader(
        lambda: Generated(UserFunction(generator, "from_generator"), (), node.spec), limit_bytes, is_ahead=is_ahead
    )


def values(rows):
    return [int(value) for value in rows.elements()]


def test_a_reader_returns_ready_elements_without_waiting_for_more():
    source = Gated(stop_before=3)
    reader = reader_of(source)
    assert values(reader.take(8, wait=True)) == [0, 1, 2]
    with pytest.raises(NotReady):
        reader.take(1, wait=False)
    source.gate.set()
    assert values(reader.take_exactly(5)) == [3, 4, 5, 6, 7]
    assert source.num_pulled == 8
    reader.close()


def test_a_reader_holds_a_limited_number_of_bytes():
    source = Gated(end=100)
    reader = reader_of(source, 80)
    assert values(reader.take(50, wait=True)) == list(range(10))
    assert values(reader.take_exactly(30)) == list(range(10, 40))
    reader.close()


@pytest.mark.parametrize("limit_bytes", [0, 1, 8])
def test_a_reader_with_a_window_of_one_returns_as_many_as_requested(limit_bytes):
    reader = reader_of(Gated(end=50), limit_bytes)
    assert values(reader.take(9, wait=True)) == [0]
    assert values(reader.take_exactly(20)) == list(range(1, 21))
    assert values(reader.take_exactly(100)) == list(range(21, 50))
    reader.close()


def test_a_reader_reports_its_end_and_errors():
    def fails():
        yield np.int64(7)
        raise KeyError("of the generator's")

    reader = reader_of(fails)
    rows = reader.take(5, wait=True)
    assert rows.item(0) == (7,)
    with pytest.raises(daskdist.errors.UserFunctionError, match="of the generator's"):
        rows.item(1)
    with pytest.raises(Exhausted):
        reader.take(5, wait=True)


# --- generators inside ---


@pytest.mark.parametrize("how", ["flat_map", "interleave"])
def test_generators_inside_run_in_the_thread_that_needs_them(how):
    threads = set()

    def rows():
        for number in range(50):
            threads.add(threading.get_ident())
            yield np.int64(number)

    inside = Dataset.from_generator(rows, output_signature=NUMBER)
    ds = getattr(Dataset.range(20), how)(lambda _: inside)
    assert sorted(map(int, ds)) == sorted(list(range(50)) * 20)
    assert threads == {threading.get_ident()}


def test_many_generators_inside_come_in_order():
    def inner(x):
        return Dataset.from_generator(lambda: iter(range(10 * int(x), 10 * int(x) + 10)), output_signature=NUMBER)

    ds = Dataset.range(200)
    assert list(map(int, ds.flat_map(inner))) == list(range(2000))
    actual = ds.interleave(inner, cycle_length=2, block_length=3)
    expected = ds.interleave(lambda x: Dataset.range(10 * int(x), 10 * int(x) + 10), cycle_length=2, block_length=3)
    assert list(map(int, actual)) == list(map(int, expected))


def test_a_puller_reports_its_end_and_errors():
    def fails():
        yield np.int64(7)
        raise KeyError("of the generator's")

    node = node_of(Dataset.from_generator(fails, output_signature=NUMBER))
    puller = ElementPuller(lambda: Generated(UserFunction(fails, "from_generator"), (), node.spec), 2**20)
    rows = puller.take(5, wait=True)
    assert rows.item(0) == (7,)
    with pytest.raises(daskdist.errors.UserFunctionError, match=r"of the generator's.*at element 1"):
        rows.item(1)
    with pytest.raises(Exhausted):
        puller.take(5, wait=True)


# --- datasets of few elements ---


@pytest.mark.parametrize("function", [Dataset.range, lambda x: Gated(end=int(x) % 3).dataset()])
@pytest.mark.parametrize("how", ["flat_map", "interleave"])
def test_datasets_inside_are_made_little_ahead(function, how):
    made = []

    def inner(x):
        made.append(int(x))
        return function(x)

    it = iter(getattr(Dataset.counter(1), how)(inner).batch(2))
    for number in range(40):
        next(it)
        assert len(made) <= 200 + 4 * number
    it.close()


# --- on a cluster ---


@pytest.mark.cluster
def test_batches_on_a_cluster_wait_for_their_own_rows_only(on_cluster):
    source = Gated(stop_before=4)
    it = iter(on_cluster.distribute_dataset(source.dataset().batch(2)))
    try:
        assert [lists(on_cluster.gather(next(it), axis=0)) for _ in range(2)] == [[0, 1], [2, 3]]
    finally:
        source.gate.set()
    it.close()


@pytest.mark.cluster
def test_a_generator_on_a_cluster_is_pulled_little_ahead(on_cluster):
    source = Gated()
    it = iter(on_cluster.distribute_dataset(source.dataset().batch(2)))
    for number in range(4):
        next(it)
        assert source.num_pulled <= 16 * 2 * (number + 1)
    it.close()


@pytest.mark.cluster
def test_a_small_dataset_repeated_makes_few_tasks(on_cluster):
    it = iter(on_cluster.distribute_dataset(Dataset.from_tensor_slices([1, 2, 3, 4]).repeat().batch(4)))
    for _ in range(8):
        next(it)
    num_tasks = len({future.key for future in it._caller.futures})
    it.close()
    assert num_tasks <= 150


@pytest.mark.cluster
def test_numbers_of_rows_are_asked_for_ahead(on_cluster, tmp_path, monkeypatch):
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text("a\nb\n" * (number + 1))
    asked, report = [], Submit.report

    def noted(submit, handle, *, wait):
        asked.append((handle.key, wait))
        return report(submit, handle, wait=wait)

    monkeypatch.setattr(Submit, "report", noted)
    dataset = daskdist.read_text(f"{tmp_path}/*.txt").batch(2).with_options(Options(auto_shard_policy="DATA"))
    it = iter(on_cluster.distribute_dataset(dataset))
    assert [len(lists(on_cluster.gather(batch, axis=0))) for batch in it] == [2] * 210
    # Otherwise the program would wait for the task of one file after the other.
    first_wait = [wait for _, wait in asked].index(True)
    assert len({key for key, _ in asked[:first_wait]}) >= 4


@pytest.mark.cluster
def test_slow_rows_do_not_hold_up_the_first_batch(on_cluster):
    def slow(number):
        time.sleep(0.001)
        return np.int64(bin(number).count("1"))

    begun_at = time.monotonic()
    it = iter(on_cluster.distribute_dataset(Dataset.range(100_000).map(slow).shuffle(500, seed=0).batch(64)))
    lists(on_cluster.gather(next(it), axis=0))
    it.close()
    # Computing all rows would take 50 s on two workers.
    assert time.monotonic() - begun_at < 25


def slow_count(row):
    time.sleep(0.001)
    return np.int64(bin(int(row)).count("1"))


@pytest.fixture
def files_of(tmp_path):
    """A function that writes numbers to files and returns a dataset of them."""

    def write(kind, num_files, num_rows):
        for number in range(num_files):
            rows = np.arange(number * num_rows, (number + 1) * num_rows)
            if kind == "npy":
                np.save(tmp_path / f"{number}.npy", rows)
            else:
                (tmp_path / f"{number}.txt").write_text("".join(f"{row}\n" for row in rows))
        read = daskdist.read_npy if kind == "npy" else daskdist.read_text
        return read(str(tmp_path / "*.*")).with_options(Options(auto_shard_policy="data"))

    return write


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["npy", "text"])
def test_slow_rows_of_files_do_not_hold_up_the_first_batch(on_cluster, files_of, kind):
    # The rows of a file take 50 s.
    rows = files_of(kind, 2, 50_000).map(slow_count)
    for _ in range(2):
        begun_at = time.monotonic()
        it = iter(on_cluster.distribute_dataset(rows.batch(64)))
        assert lists(on_cluster.gather(next(it), axis=0)) == [bin(number).count("1") for number in range(64)]
        it.close()
        assert time.monotonic() - begun_at < 25


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["npy", "text"])
def test_slow_functions_of_rows_of_files_keep_all_workers_busy(on_cluster, files_of, kind):
    def where(row):
        time.sleep(0.002)
        return get_worker().name

    workers = [
        name
        for batch in on_cluster.distribute_dataset(files_of(kind, 1, 1_000).map(where).batch(100))
        for name in on_cluster.gather(batch, axis=0).tolist()
    ]
    assert len(workers) == 1_000
    assert min(Counter(workers).values()) >= 250


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["npy", "text"])
def test_files_with_fast_functions_are_computed_whole_once_that_is_known(on_cluster, files_of, kind):
    def sizes(rows):
        return np.full(len(rows), len(rows))

    dist = on_cluster.distribute_dataset(files_of(kind, 6, 5_000).map(sizes, vectorized=True).batch(1_000))
    first, second = [
        Counter(size for batch in dist for size in lists(on_cluster.gather(batch, axis=0))) for _ in range(2)
    ]
    assert min(first) == 64
    assert first[5_000] >= 15_000
    assert second == {5_000: 30_000}


@pytest.mark.cluster
@pytest.mark.parametrize(("kind", "keep"), [("npy", None), ("text", lambda row: row % 3 > 0)], ids=["npy", "text"])
def test_a_pass_over_parts_of_files_continues_after_what_was_computed(on_cluster, files_of, kind, keep):
    def number(row):
        time.sleep(0.001)
        return np.int64(row)

    rows = files_of(kind, 3, 700).map(number)
    rows = (rows if keep is None else rows.filter(keep)).batch(50)
    dist = on_cluster.distribute_dataset(rows)
    it = iter(dist)
    before = [lists(on_cluster.gather(next(it), axis=0)) for _ in range(5)]
    state = it.state_dict()
    after = [lists(on_cluster.gather(batch, axis=0)) for batch in it]
    other = iter(dist)
    other.load_state_dict(state)
    assert [lists(on_cluster.gather(batch, axis=0)) for batch in other] == after
    assert list(itertools.chain(*before, *after)) == [number for number in range(2_100) if keep is None or keep(number)]


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["npy", "text"])
def test_rows_of_parts_of_files_fail_by_themselves(on_cluster, files_of, kind):
    def fragile(row):
        time.sleep(0.001)
        if int(row) in (3, 500):
            raise ValueError(f"{int(row)} is not wanted")
        return np.int64(row)

    rows = files_of(kind, 2, 600).map(fragile)
    kept = [number for number in range(1_200) if number not in (3, 500)]
    lenient = on_cluster.distribute_dataset(rows.with_options(Options(on_error="skip")).batch(50))
    it = iter(lenient)
    actual = [lists(on_cluster.gather(batch, axis=0)) for batch in it]
    assert list(itertools.chain(*actual)) == kept
    assert it.stats()["num_skipped"] == 2

    def first_batch():
        return lists(on_cluster.gather(next(iter(on_cluster.distribute_dataset(rows.batch(50)))), axis=0))

    with pytest.raises(UserFunctionError, match="3 is not wanted"):
        first_batch()


@pytest.mark.cluster
def test_an_interrupt_while_steps_wait_for_memory_loses_no_rows(on_cluster, monkeypatch):
    it = iter(on_cluster.distribute_dataset(Dataset.range(40).batch(4)))
    backend = internals_of(on_cluster).backend
    waits, num_interrupts = backend.wait_while, 0

    def interrupted(condition):
        nonlocal num_interrupts
        num_interrupts += 1
        if num_interrupts % 2:
            raise KeyboardInterrupt
        waits(condition)

    monkeypatch.setattr(backend, "wait_while", interrupted)
    actual = []
    while True:
        try:
            actual += lists(on_cluster.gather(next(it), axis=0))
        except KeyboardInterrupt:
            continue
        except StopIteration:
            break
    assert num_interrupts > 2
    assert actual == list(range(40))


@pytest.mark.parametrize("order", ["in order", "shuffled", "batches"])
def test_calls_begin_small_while_the_size_of_results_is_not_known(order):
    num_called = 0

    def load(name):
        nonlocal num_called
        num_called += 1
        return np.full(10**6, float(name[0] if order == "batches" else name))

    names = Dataset.from_tensor_slices([f"{number}" for number in range(2_000)])
    if order == "batches":
        loaded = names.batch(2).map(load)
    else:
        loaded = (names if order == "in order" else names.shuffle(2_000, seed=0)).map(load).batch(2)
    it = iter(loaded)
    assert next(it).shape == ((10**6,) if order == "batches" else (2, 10**6))
    # Elements of 8 MB, of which more than the window are not computed ahead.
    assert num_called <= 40


@pytest.mark.parametrize(
    ("kind", "most_calls"),
    [("filter", 4), ("filter, shuffled", 300), ("scan", 20), ("flat_map", 20), ("interleave", 20), ("groups", 20)],
)
def test_functions_that_load_for_themselves_begin_with_few_calls(kind, most_calls):
    num_called = 0

    def load(name):
        nonlocal num_called
        num_called += 1
        return np.full(10**6, len(name) / 4)

    names = Dataset.from_tensor_slices([f"{number}" for number in range(2_000)])
    if kind == "scan":
        ds = names.scan(0, lambda total, name: (total + 1, load(name)))
    elif kind == "flat_map":
        ds = names.flat_map(lambda name: Dataset.from_tensor_slices(load(name)[:2]))
    elif kind == "interleave":
        ds = names.interleave(lambda name: Dataset.from_tensors(name).map(load), cycle_length=2)
    elif kind == "groups":
        ds = names.group_by_window(len, lambda key, window: window.map(load).batch(2), 2)
    else:
        ds = names.filter(lambda name: bool(load(name).mean() > 0))
        ds = ds.shuffle(100, seed=0) if kind == "filter, shuffled" else ds
    # Not counted: calls with made-up names.
    assert ds.element_spec
    num_called = 0
    it = iter(ds)
    next(it)
    assert num_called <= most_calls
    if kind == "interleave":
        # Elements of 8 MB.
        for _ in range(70):
            next(it)
        assert num_called <= 100


@pytest.fixture(scope="module")
def small_workers():
    """Return a strategy on two workers with little memory, and its client."""
    with (
        LocalCluster(
            2, threads_per_worker=1, memory_limit=8e8, host="127.0.0.1", dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
    ):
        yield strategy, client


def test_a_dataset_that_a_function_returned_before_begins_with_few_calls():
    num_called = 0

    def load(number):
        nonlocal num_called
        num_called += 1
        return np.full(4, number)

    loaded = Dataset.range(200).shuffle(100, seed=0).map(load, vectorized=False)
    # There all elements are wanted before the first is used.
    nested = list(Dataset.range(1).flat_map(lambda number: loaded))
    num_called = 0
    it = iter(loaded)
    first = next(it)
    assert num_called == 4
    assert np.array_equal([first, *it], nested)


@pytest.mark.cluster
def test_few_large_elements_are_made_of_small_rows_before_their_size_is_known(small_workers):
    strategy, client = small_workers
    workers = set(workers_of(client))
    rows = Dataset.range(16_000).map(lambda x: np.full(125_000, float(x)))
    for batch in itertools.islice(strategy.distribute_dataset(rows.batch(4)), 8):
        assert all(len(values) == 2 for values in strategy.local_results(batch))
    # Dask restarts workers that exceed their memory, at other addresses.
    assert set(workers_of(client)) == workers


@pytest.mark.cluster
@pytest.mark.parametrize("way", ["function", "one replica"])
def test_batches_of_steps_under_way_leave_most_of_the_workers_memory_free(small_workers, way):
    strategy, client = small_workers
    name = f"sums of {way}"
    gate = Event(name, client=client)

    def sum_after_gate(rows):
        Event(name).wait(60)
        return rows.sum()

    def steps(strategy, num_steps):
        # A step has 4 rows of 4 MB. Those of an eighth to a quarter of 800 MB may be in use on each worker.
        batches = Dataset.range(1_000).map(lambda x: np.full(500_000, float(x))).batch(4)
        for batch in itertools.islice(strategy.distribute_dataset(batches), num_steps):
            found = strategy.reduce("SUM", strategy.run(sum_after_gate, args=(batch,)), axis=None)
        return found

    def waits_for_steps():
        frames = traceback.extract_stack(sys._current_frames()[program.ident])
        return any(frame.name == "wait_while" for frame in frames)

    with contextlib.ExitStack() as opened:
        if way == "one replica":
            where = {strategy.workers[0]: 1}
            strategy = opened.enter_context(daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=where))
        gate.set()
        steps(strategy, 1)
        gate.clear()
        function, found = daskdist.function(steps) if way == "function" else steps, []
        program = threading.Thread(target=lambda: found.append(float(function(strategy, 26))))
        program.start()
        eventually(waits_for_steps)
        num_steps = internals_of(strategy).backend.streams.num_steps
        gate.set()
        program.join(60)
    assert found == [500_000 * sum(range(100, 104))]
    assert 2 <= num_steps <= 24
    if way == "function":
        assert "whose batches fill their part of the workers' memory" in function.explain()
