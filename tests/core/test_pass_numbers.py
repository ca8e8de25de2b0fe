"""Random draws: another order in each iteration, and always the same orders with a given seed."""

from __future__ import annotations

import ast
import itertools
import pickle

import cloudpickle
import dask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import mirrored
from hypothesis import given, settings
from hypothesis import strategies as st

import daskdist
from daskdist import Dataset, Options
from daskdist.core.dataset_base import primitive_of
from daskdist.sharding import AutoShardPolicy
from daskdist.strategy.input.dataset import strategy_of
from daskdist.testing import SimulatedWorkers

# Hypothesis warns if other threads draw random numbers meanwhile, as those of other tests' clusters do.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

NUMBERS = np.arange(24)


def flat(elements):
    return [int(x) for element in elements for x in np.ravel(element)]


def shuffled(seed=3):
    return Dataset.from_tensor_slices(NUMBERS).shuffle(24, seed=seed)


def orders(num_passes=3):
    """Return the orders of the first passes over the plain shuffle."""
    ds = shuffled()
    return [flat(ds) for _ in range(num_passes)]


def steps(distributed):
    strategy = strategy_of(distributed)
    return [np.concatenate(strategy.local_results(step)) for step in distributed]


# A program may derive such a dataset in each epoch.
DERIVED = {
    "itself": lambda ds: ds,
    "batch": lambda ds: ds.batch(5),
    "map": lambda ds: ds.map(lambda x: x + 0),
    "take": lambda ds: ds.take(24),
    "enumerate": lambda ds: ds.enumerate().map(lambda k, x: x),
    "concatenate": lambda ds: Dataset.range(0).concatenate(ds),
    "zip": lambda ds: Dataset.zip(Dataset.range(24), ds).map(lambda k, x: x),
    "options": lambda ds: ds.with_options(Options(num_threads=2)).prefetch(2),
    "distributed": lambda ds: steps(mirrored(2).distribute_dataset(ds.batch(6))),
    "distributed by DATA": lambda ds: steps(SimulatedWorkers([1, 2]).distribute_dataset(ds.batch(6))),
}


@pytest.mark.parametrize("name", DERIVED)
def test_each_iteration_of_a_derived_dataset_has_the_next_order(name):
    ds = shuffled()
    assert [flat(DERIVED[name](ds)) for _ in range(3)] == orders()


def test_iterations_of_different_derived_datasets_count_together():
    ds = shuffled()
    made = [flat(DERIVED[name](ds)) for name in ("batch", "itself", "distributed")]
    assert made == orders()
    assert len(set(map(tuple, made))) == 3


def test_no_pass_in_loops_on_replicas_has_an_order_of_another():
    def loop(iterator, num_passes):
        return repr([flat(iterator) for _ in range(num_passes)])

    def orders_of_program():
        strategy, ds = mirrored(1), shuffled()
        distributed = strategy.distribute_dataset(ds.batch(6))
        in_loops = [ast.literal_eval(strategy.run(loop, args=(distributed, 2))) for _ in range(2)]
        return [*itertools.chain(*in_loops), flat(steps(distributed)), flat(ds)]

    actual = orders_of_program()
    assert actual[:2] == orders(2)
    assert len({tuple(order) for order in actual}) == 6
    assert orders_of_program() == actual


@pytest.mark.cluster
def test_on_a_cluster_and_made_by_a_function(on_cluster):
    ds = shuffled()
    assert [flat(steps(on_cluster.distribute_dataset(ds.batch(6)))) for _ in range(2)] == orders(2)

    def made(context):
        return shuffled().batch(6)

    distributed = on_cluster.distribute_datasets_from_function(made)
    num_pipelines = len(on_cluster.workers)
    for order in orders(2):
        assert sorted(flat(steps(distributed))) == sorted(order * num_pipelines)
    ds = shuffled()
    # Distribute a new dataset in each epoch, derived from one that was created before.
    for order in orders(3):
        second = on_cluster.distribute_datasets_from_function(lambda context: ds.batch(6))
        assert flat([on_cluster.local_results(step)[0] for step in second]) == order
    again = on_cluster.distribute_datasets_from_function(made)
    first, second = ([on_cluster.local_results(step)[0] for step in again] for _ in range(2))
    assert [flat(first), flat(second)] == orders(2)


@pytest.mark.parametrize("policy", [AutoShardPolicy.FILE, AutoShardPolicy.DATA])
def test_workers_agree(policy, tmp_path):
    for number in range(4):
        pq.write_table(pa.table({"n": NUMBERS + 24 * number}), tmp_path / f"{number}.parquet")
    names = Dataset.list_files(str(tmp_path / "*"))
    read = names.interleave(lambda name: daskdist.read_parquet(str(name), "n"), cycle_length=2)
    ds = read.shuffle(96).batch(8).with_options(Options(auto_shard_policy=policy))
    actual = [flat(steps(SimulatedWorkers([1, 1]).distribute_dataset(ds))) for _ in range(3)]
    assert all(sorted(result) == list(range(96)) for result in actual)
    assert len(set(map(tuple, actual))) == 3


def test_without_a_given_seed_shares_of_workers_draw_differently(tmp_path):
    for number in range(2):
        pq.write_table(pa.table({"n": NUMBERS}), tmp_path / f"{number}.parquet")

    def shares(seed):
        ds = daskdist.read_parquet(str(tmp_path), "n").shuffle(24, seed=seed).batch(24)
        distributed = SimulatedWorkers([1, 1]).distribute_dataset(ds.with_options(Options(auto_shard_policy="file")))
        # Each worker has one batch, which its two steps divide between the replicas.
        halves = [strategy_of(distributed).local_results(step) for step in distributed]
        return [flat([half[worker] for half in halves]) for worker in range(2)]

    first, second = shares(None)
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second
    assert shares(3) == orders(1) * 2


# --- other operations that draw ---


DRAWING = {
    "random": lambda seed: Dataset.random(seed, rerandomize_each_iteration=True).take(9),
    "sample": lambda seed: Dataset.sample_from_datasets([Dataset.range(20), Dataset.range(50, 70)], seed=seed),
    "shuffle": lambda seed: Dataset.range(20).shuffle(7, seed=seed),
    "global_shuffle": lambda seed: Dataset.range(20).global_shuffle(seed=seed),
    "global_shuffle of mapped": lambda seed: Dataset.range(20).map(lambda x: x).global_shuffle(seed=seed),
    "rejection_resample": lambda seed: (
        Dataset.range(600).rejection_resample(lambda x: x % 2, [0.9, 0.1], seed=seed).map(lambda k, x: x)
    ),
}


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("name", DRAWING)
def test_each_iteration_draws_anew(name, seed):
    ds = DRAWING[name](seed)
    actual = [flat(ds.batch(3)) for _ in range(3)]
    assert len(set(map(tuple, actual))) == 3
    if seed is not None:
        again = DRAWING[name](seed)
        assert [flat(again) for _ in range(3)] == actual


def test_random_without_a_seed_draws_anew_unless_told():
    ds, fixed = Dataset.random(), Dataset.random(rerandomize_each_iteration=False)
    assert flat(ds.take(3)) != flat(ds.take(3))
    assert flat(fixed.take(3)) == flat(fixed.take(3))
    assert flat(Dataset.random(seed=1).take(3)) == flat(Dataset.random(seed=1).take(3))


def test_in_one_iteration_all_uses_have_one_order():
    ds = shuffled()
    for order in orders(2):
        first, second = zip(*Dataset.zip(ds.map(lambda x: x), ds.batch(1).unbatch()), strict=True)
        assert flat(first) == flat(second) == order
    # Parts of one iteration are disjoint and together complete.
    assert sorted(ds.take(10).concatenate(ds.skip(10))) == list(range(24))
    both = Dataset.sample_from_datasets([ds.take(10).batch(2), ds.skip(10).batch(2)], seed=1)
    assert sorted(flat(steps(mirrored(2).distribute_dataset(both)))) == list(range(24))


def test_iterators_that_are_open_together():
    ds = shuffled().batch(4)
    steps_of_all = zip(iter(ds), iter(ds), iter(ds.map(lambda x: x)), strict=True)
    assert [flat(value) for value in zip(*steps_of_all, strict=True)] == orders()


def test_inspecting_a_dataset_does_not_count():
    ds = shuffled().map(lambda x: [x, None][0]).batch(4)
    ds.element_spec, ds.cardinality(), ds.fingerprint(), repr(ds), ds.explain(), len(ds)
    distributed = mirrored(2).distribute_dataset(ds)
    distributed.element_spec, distributed.cardinality(), distributed.explain(), repr(distributed)
    # As a Dask collection, a dataset is a value: computing it twice gives the first order twice.
    for _ in range(2):
        assert flat(dask.compute(ds)[0]) == orders(1)[0]
    assert [flat(ds), flat(ds)] == orders(2)


def test_a_copy_counts_separately():
    ds = shuffled()
    list(ds)
    assert [flat(cloudpickle.loads(cloudpickle.dumps(ds))) for _ in range(2)] == orders(1) * 2
    assert flat(ds) == orders(2)[1]


def test_writing_counts_as_an_iteration(tmp_path):
    ds = shuffled()
    actual = []
    for number in range(2):
        ds.save(str(tmp_path / str(number)))
        actual.append(flat(Dataset.load(str(tmp_path / str(number)))))
    ds.map(lambda x: {"n": x}).to_parquet(str(tmp_path / "parquet"))
    actual.append(flat(daskdist.read_parquet(str(tmp_path / "parquet"), "n")))
    assert actual == orders()


def test_a_resumed_pass_counts():
    ds = shuffled()
    list(ds), list(ds)
    iterator = iter(ds.batch(5))
    next(iterator)
    state = pickle.dumps(iterator.state_dict())
    rest, after = flat(iterator), flat(ds.batch(5))
    # Resume in another program.
    ds = shuffled()
    iterator = iter(ds.batch(5))
    iterator.load_state_dict(pickle.loads(state))
    assert [flat(iterator), flat(ds.batch(5))] == [rest, after]
    # Resuming from an old position does not change which order comes next.
    iterator = iter(ds.batch(5))
    iterator.load_state_dict(pickle.loads(state))
    assert flat(iterator) == rest
    assert flat(ds) == orders(6)[5]


def test_datasets_derived_from_a_cache_have_one_order():
    ds = shuffled().cache()
    first = flat(ds.batch(5))
    assert [flat(ds), flat(ds.map(lambda x: x)), flat(ds.shuffle(1))] == [first] * 3
    ds = Dataset.random(rerandomize_each_iteration=True).take(4).cache()
    assert flat(ds.batch(2)) == flat(ds) == flat(ds.map(lambda x: x))


# --- a given seed fixes the order by itself ---


SAME = {
    "map": lambda ds: ds.map(lambda x: x),
    "interpreted map": lambda ds: ds.map(lambda x: [x, None][0], vectorized=False),
    "filter": lambda ds: ds.filter(lambda x: x >= 0),
    "batch and unbatch": lambda ds: ds.batch(1).unbatch(),
    "batches and unbatch": lambda ds: ds.batch(4).map(lambda x: x).unbatch(),
    "take": lambda ds: ds.take(1000),
    "skip": lambda ds: Dataset.range(3).map(lambda x: x - 3).concatenate(ds).skip(3),
    "enumerate": lambda ds: ds.enumerate().map(lambda k, x: x),
    "flat_map": lambda ds: ds.flat_map(Dataset.from_tensors),
    "prefetch": lambda ds: ds.prefetch(2),
    "window": lambda ds: ds.window(3).flat_map(lambda w: w),
    "cache": lambda ds: ds.cache(),
}
SHUFFLES = {
    "shuffle of all": lambda ds, **seed: ds.shuffle(30, **seed),
    "shuffle of a part": lambda ds, **seed: ds.shuffle(5, **seed),
    "global_shuffle": lambda ds, **seed: ds.global_shuffle(**seed),
    "rejection_resample": lambda ds, **seed: ds.rejection_resample(lambda x: x % 2, [0.9, 0.1], seed=seed["seed"]).map(
        lambda k, x: x
    ),
    "sample": lambda ds, **seed: Dataset.sample_from_datasets([ds, Dataset.range(-9, 0)], seed=seed["seed"]),
}


@given(
    st.sampled_from(sorted(SHUFFLES)),
    st.lists(st.sampled_from(sorted(SAME)), max_size=3),
    st.integers(0, 30),
    st.sampled_from([1, 8, 24, 100, 2**24]),
    st.integers(0, 2),
)
@settings(max_examples=25, deadline=None)
def test_other_operations_before_a_shuffle_do_not_change_its_order(shuffle, before, num_rows, split_bytes, num_passes):
    plain = SHUFFLES[shuffle](Dataset.from_tensor_slices(np.arange(num_rows)), seed=7)
    ds = Dataset.from_tensor_slices(np.arange(num_rows))
    for name in before:
        ds = SAME[name](ds)
    ds = SHUFFLES[shuffle](ds, seed=7)
    expected = [flat(plain) for _ in range(num_passes + 1)]
    with dask.config.set({"daskdist.split-bytes": split_bytes, "daskdist.window-bytes": 100}):
        assert [flat(ds.batch(4)) for _ in range(num_passes + 1)] == expected


@pytest.mark.parametrize("num_rows", [1000, 70_000])
def test_a_global_shuffle_of_what_is_read_in_place_is_that_of_what_is_held(num_rows):
    rows = np.arange(num_rows)
    in_place = Dataset.from_tensor_slices(rows).global_shuffle(seed=1).batch(num_rows)
    held = Dataset.from_tensor_slices(rows).map(lambda x: x + 0).global_shuffle(seed=1).batch(num_rows)
    assert np.array_equal(next(iter(in_place)), next(iter(held)))


def test_batches_of_any_size_are_put_in_the_same_order():
    sizes = [3, 1, 4, 1, 5, 9, 2]
    uneven = Dataset.range(7).map(lambda x: np.full(sizes[int(x)], x), vectorized=False)
    expected = flat(Dataset.range(7).shuffle(4, seed=2))
    assert [int(x[0]) for x in uneven.shuffle(4, seed=2)] == expected
    assert [int(x[0]) for x in Dataset.range(14).batch(2).map(lambda x: x // 2).shuffle(4, seed=2)] == expected


@pytest.mark.parametrize("seed", [0, None], ids=["given", "drawn"])
@pytest.mark.parametrize("shuffle", ["shuffle", "global_shuffle"])
def test_a_split_of_a_fixed_order_is_disjoint_and_complete(shuffle, seed):
    size = {"buffer_size": 24} if shuffle == "shuffle" else {}
    fixed = getattr(Dataset.from_tensor_slices(NUMBERS), shuffle)(**size, seed=seed, reshuffle_each_iteration=False)
    train, test = fixed.take(16), fixed.skip(16)
    if seed is not None:
        # The two parts are of datasets that were built separately, one of them with a map before the shuffle.
        mapped = Dataset.from_tensor_slices(NUMBERS - 1).map(lambda x: x + 1).filter(lambda x: x >= 0)
        test = getattr(mapped, shuffle)(**size, seed=seed, reshuffle_each_iteration=False).skip(16)
    ways = [
        flat,
        lambda ds: flat(ds.map(lambda x: x + 0).batch(4)),
        lambda ds: flat(ds.shuffle(24)),
        lambda ds: flat(Dataset.zip(shuffled(), ds).map(lambda k, x: x)),
        lambda ds: flat(steps(mirrored(2).distribute_dataset(ds.batch(4)))),
        lambda ds: flat(steps(SimulatedWorkers([1, 1]).distribute_dataset(ds.map(lambda x: x + 0).batch(4)))),
    ]
    for one, other in itertools.product(ways, ways[:3]):
        assert sorted(one(train) + other(test)) == list(range(24))


def test_operations_without_a_seed_share_that_of_the_options():
    def found(before):
        ds = before(Dataset.range(20)).shuffle(20).map(lambda x: x).shuffle(20)
        return flat(ds.with_options(Options(seed=3)))

    assert found(lambda ds: ds) == found(lambda ds: ds.map(lambda x: x).prefetch(1))
    once = Dataset.range(20).shuffle(20).with_options(Options(seed=3))
    assert flat(once) == flat(Dataset.range(20).shuffle(20, seed=3))


# --- datasets that functions make ---

CAPTURED = Dataset.range(6).shuffle(6)
# Each pipeline has 30 elements, in five datasets of six.
MADE = {
    "flat_map": lambda: Dataset.range(5).flat_map(lambda x: Dataset.range(6).shuffle(6)),
    "flat_map of equal elements": lambda: (
        Dataset.range(5).map(lambda x: 0 * x).flat_map(lambda x: Dataset.range(6).global_shuffle())
    ),
    "captured": lambda: Dataset.range(5).flat_map(lambda x: CAPTURED),
    "captured, in an interleave": lambda: Dataset.range(5).interleave(lambda x: CAPTURED.map(lambda y: y), 2),
    "interleave of streams": lambda: Dataset.range(5).interleave(lambda x: Dataset.random().take(6).shuffle(6), 2),
    "map": lambda: Dataset.range(5).map(lambda x: Dataset.range(6).shuffle(6)).flat_map(lambda made: made),
    "window": lambda: Dataset.range(30).window(6).flat_map(lambda window: window.shuffle(6)),
    "group_by_window": lambda: Dataset.range(30).group_by_window(lambda x: x % 5, lambda key, w: w.shuffle(6), 6),
    "group_by_window of tuples": lambda: (
        Dataset.range(30)
        .map(lambda x: (x, {"y": x}))
        .group_by_window(lambda x, y: x % 5, lambda key, w: w.shuffle(6), 6)
        .map(lambda x, y: x)
    ),
    "twice": lambda: Dataset.range(5).flat_map(
        lambda x: Dataset.range(2).flat_map(lambda y: Dataset.range(3).shuffle(3))
    ),
    "sample": lambda: Dataset.range(5).flat_map(
        lambda x: Dataset.sample_from_datasets([Dataset.range(3), Dataset.range(3, 6)])
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_what_functions_make_is_drawn_alike_when_made_again(name):
    ds = MADE[name]()
    iterator = iter(ds)
    for _ in range(9):
        next(iterator)
    state = pickle.dumps(iterator.state_dict())
    rest = flat(iterator)
    resumed = iter(MADE[name]())
    resumed.load_state_dict(pickle.loads(state))
    assert flat(resumed) == rest
    # Two workers get copies of the dataset, and read the same elements.
    copy = cloudpickle.dumps(ds)
    first, second = (flat(cloudpickle.loads(copy)) for _ in range(2))
    assert first == second
    # Each pass, and each of the five datasets, has another order.
    passes = [flat(ds) for _ in range(2)]
    assert passes[0] != passes[1]
    assert len({tuple(passes[0][k : k + 6]) for k in range(0, 30, 6)}) > 1


@pytest.mark.parametrize("policy", [AutoShardPolicy.DATA, AutoShardPolicy.OFF])
def test_workers_agree_on_what_functions_make(policy):
    def loop(iterator):
        return [int(x) for batch in iterator for x in batch]

    def made(strategy):
        ds = Dataset.range(5).flat_map(lambda x: Dataset.range(6).shuffle(6)).batch(6)
        return strategy.distribute_dataset(ds.with_options(Options(auto_shard_policy=policy)))

    strategy = SimulatedWorkers([1, 1])
    by_replica = strategy.local_results(strategy.run(loop, args=(made(strategy),)))
    assert sorted(x for value in by_replica for x in value) == sorted(
        [*range(6)] * 5 * (2 if policy is AutoShardPolicy.OFF else 1)
    )


def test_a_given_seed_or_order_of_an_inner_dataset_stays():
    seeded = Dataset.range(6).shuffle(6, seed=1)
    fixed = Dataset.range(6).shuffle(6, reshuffle_each_iteration=False)
    kept = Dataset.range(6).shuffle(6).cache()
    for inner in (seeded, fixed, kept):
        ds = Dataset.range(3).flat_map(lambda x, inner=inner: inner)
        assert flat(ds) == flat(ds) == flat(ds)[:6] * 3
    made = Dataset.range(3).flat_map(lambda x: Dataset.range(6).shuffle(6, seed=1))
    assert flat(made) == flat(Dataset.range(6).shuffle(6, seed=1)) * 3


def test_an_inner_split_of_a_captured_shuffle_is_complete():
    ds = Dataset.range(4).flat_map(lambda x: CAPTURED.take(2).concatenate(CAPTURED.skip(2)))
    actual = flat(ds)
    assert all(sorted(actual[k : k + 6]) == list(range(6)) for k in range(0, 24, 6))


def test_inner_datasets_go_by_the_seed_of_the_options():
    def made(seed):
        return flat(MADE["flat_map"]().with_options(Options(seed=seed)))

    assert made(3) == made(3) != made(4)


def test_functions_that_make_no_random_dataset_are_given_nothing():
    plain = Dataset.range(5).flat_map(Dataset.range)
    assert "rng" not in str(primitive_of(plain))
    assert "rng" in str(primitive_of(MADE["flat_map"]()))
    assert plain.fingerprint() == Dataset.range(5).flat_map(Dataset.range).fingerprint()


# --- datasets inside functions ---

SHUFFLED = Dataset.range(6).shuffle(6)


def drawn(captured=False):
    """Return a number drawn by a random dataset, which is created in this call, or was created before it."""
    first, second, *_ = SHUFFLED if captured else Dataset.range(6).shuffle(6)
    return int(first) * 6 + int(second)


def stepped(captured):
    ds = Dataset.range(40)
    return {
        "map": ds.map(lambda x: drawn(captured)),
        "filter": ds.filter(lambda x: drawn(captured) % 2 == 0),
        "take_while": ds.take_while(lambda x: drawn(captured) != 7),
        "scan": ds.scan(0, lambda state, x: (state + drawn(captured), state)),
        "group_by_window": ds.group_by_window(lambda x: drawn(captured) % 3, lambda key, w: w.batch(3), 3).unbatch(),
        "window sizes": ds.group_by_window(
            lambda x: x % 3, lambda key, w: w.batch(99), window_size_func=lambda key: 1 + drawn(captured) % 5
        ).unbatch(),
        "rejection_resample": ds.rejection_resample(lambda x: np.int64(drawn(captured) % 2), [0.5, 0.5], seed=3).map(
            lambda number, x: x
        ),
    }


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", stepped(False))
def test_what_functions_draw_inside_is_drawn_alike_when_called_again(name, captured):
    ds = stepped(captured)[name]
    whole = flat(ds)
    assert flat(stepped(captured)[name]) == whole == flat(cloudpickle.loads(cloudpickle.dumps(ds)))
    iterator = iter(ds)
    for _ in range(len(whole) // 2):
        next(iterator)
    state = pickle.dumps(iterator.state_dict())
    resumed = iter(stepped(captured)[name])
    resumed.load_state_dict(pickle.loads(state))
    assert flat(resumed) == flat(iterator)


@pytest.mark.parametrize("captured", [False, True])
def test_elements_get_different_numbers(captured):
    assert len(set(flat(stepped(captured)["map"]))) > 5


@pytest.mark.parametrize("captured", [False, True])
def test_what_a_function_of_reduce_draws_is_drawn_alike(captured):
    def reduced():
        return Dataset.range(9).reduce((0, ""), lambda s, x: (s[0] + int(x), f"{s[1]} {drawn(captured)}"))

    total, words = reduced()
    assert (total, words) == reduced() == (36, words)
    assert len(set(words.split())) > 3


def test_passes_within_a_call_do_not_count():
    ds = Dataset.range(6).shuffle(6, seed=1)
    before, after = Dataset.range(6).shuffle(6, seed=1), [flat(ds)]
    list(Dataset.range(5).map(lambda x: len(flat(ds)), vectorized=False))
    after.append(flat(ds))
    assert after == [flat(before), flat(before)]


def test_passes_with_a_given_seed_count_within_a_call():
    def both(x):
        made = Dataset.range(6).shuffle(6, seed=1)
        return flat(made) + flat(made)

    made = Dataset.range(6).shuffle(6, seed=1)
    expected = flat(made) + flat(made)
    assert [row.tolist() for row in Dataset.range(3).map(lambda x: np.array(both(x)))] == [expected] * 3
