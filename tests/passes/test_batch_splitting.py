"""Batches cut for replicas: all kinds of pipelines, unequal numbers of replicas, and batches that cannot be cut."""

from __future__ import annotations

import ast

import numpy as np
import pytest
from conftest import every_pair, mirrored
from distributed import Client

import daskdist
from daskdist import Dataset, Options, TensorSpec, read_parquet
from daskdist.core.cardinality import INFINITE, UNKNOWN
from daskdist.core.ragged import Ragged
from daskdist.core.structure import Structure
from daskdist.errors import ArgumentError, ShardingError
from daskdist.execute.callers.submit import workers_of
from daskdist.strategy.placement.replicas_per_worker import Worker, as_counts, num_replicas_on
from daskdist.testing import SimulatedWorkers


def numbers(num: int) -> Dataset:
    return Dataset.range(num)


def triangles(num: int) -> Dataset:
    """Return rows of different lengths: [], [0], [0, 1], [0, 1, 2], [], ..."""
    return Dataset.range(num).map(lambda x: np.arange(x % 4))


def batches_of(*lengths: int):
    def generate():
        start = 0
        for length in lengths:
            yield np.arange(start, start + length)
            start += length

    return Dataset.from_generator(generate, output_signature=TensorSpec((None,), np.int64))


def nested(num: int) -> Dataset:
    words = np.array([f"word {k}" for k in range(num)])
    return Dataset.from_tensor_slices({"words": words, "more": (np.arange(num), np.ones((num, 2, 3), np.float32))})


# Pipelines, each with its batches.
TAILS = {
    "batch": (lambda: numbers(10).batch(4), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
    "drop_remainder": (lambda: numbers(10).batch(4, drop_remainder=True), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "map": (lambda: numbers(6).batch(4).map(lambda x: x * 10), [[0, 10, 20, 30], [40, 50]]),
    "map to more": (
        lambda: numbers(4).batch(2).map(lambda x: np.concatenate([x, x])),
        [[0, 1, 0, 1], [2, 3, 2, 3]],
    ),
    "batch of batches": (
        lambda: numbers(14).batch(2).batch(4),
        [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [10, 11], [12, 13]]],
    ),
    "padded_batch": (
        lambda: triangles(6).padded_batch(4),
        [[[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 1, 2]], [[0], [0]]],
    ),
    "ragged_batch": (lambda: triangles(6).ragged_batch(4), [[[], [0], [0, 1], [0, 1, 2]], [[], [0]]]),
    "filter": (
        lambda: numbers(12).batch(4).filter(lambda x: x[0] != 4),
        [[0, 1, 2, 3], [8, 9, 10, 11]],
    ),
    "shuffle": (
        lambda: numbers(8).batch(4).shuffle(1),
        [[0, 1, 2, 3], [4, 5, 6, 7]],
    ),
    "take": (lambda: numbers(20).batch(4).take(2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "skip": (lambda: numbers(10).batch(4).skip(1), [[4, 5, 6, 7], [8, 9]]),
    "repeat": (lambda: numbers(5).batch(3).repeat(2), [[0, 1, 2], [3, 4], [0, 1, 2], [3, 4]]),
    "cache": (lambda: numbers(5).batch(3).cache(), [[0, 1, 2], [3, 4]]),
    "prefetch": (lambda: numbers(5).batch(3).prefetch(2), [[0, 1, 2], [3, 4]]),
    "concatenate": (
        lambda: numbers(5).batch(4).concatenate(numbers(7).batch(6)),
        [[0, 1, 2, 3], [4], [0, 1, 2, 3, 4, 5], [6]],
    ),
    "concatenate with a mapped one": (
        lambda: numbers(5).batch(4).concatenate(numbers(7).batch(6).map(lambda x: x + 1)),
        [[0, 1, 2, 3], [4], [1, 2, 3, 4, 5, 6], [7]],
    ),
    "unbatch and batch": (lambda: numbers(7).batch(2).unbatch().batch(4), [[0, 1, 2, 3], [4, 5, 6]]),
    "rebatch": (
        lambda: numbers(10).batch(4).rebatch([2, 1, 0]),
        [[0, 1], [2], [], [3, 4], [5], [], [6, 7], [8], [], [9]],
    ),
    "group_by_window": (
        lambda: numbers(9).group_by_window(lambda x: x % 2, lambda key, window: window.batch(3), window_size=4),
        [[0, 2, 4], [6], [1, 3, 5], [7], [8]],
    ),
    "bucket_by_sequence_length": (
        lambda: triangles(8).bucket_by_sequence_length(lambda x: len(x), [2], [3, 2]),
        [[[0, 1, 0], [0, 1, 2]], [[0], [0], [0]], [[0, 1, 0], [0, 1, 2]], [[0]]],
    ),
    "batch_by_size": (
        lambda: triangles(6).batch_by_size(6, len),
        [[[0, 0], [0, 0], [0, 1]], [[0, 1, 2], [0, 0, 0]], [[0]]],
    ),
    "flat_map": (
        lambda: numbers(2).flat_map(lambda x: Dataset.range(5).batch(4)),
        [[0, 1, 2, 3], [4], [0, 1, 2, 3], [4]],
    ),
    "generator": (lambda: batches_of(4, 1, 0, 5), [[0, 1, 2, 3], [4], [], [5, 6, 7, 8, 9]]),
    "no batch at all": (lambda: Dataset.from_tensor_slices(np.arange(6).reshape(2, 3)), [[0, 1, 2], [3, 4, 5]]),
}

REPLICAS = [[1], [2], [3], [4], [1, 1], [2, 2], [2, 1], [1, 3], [1, 1, 1]]


def strategy_of(replicas: list[int]) -> daskdist.Strategy:
    return mirrored(replicas[0]) if len(replicas) == 1 else SimulatedWorkers(replicas)


def as_list(leaf) -> list:
    return [np.asarray(row).tolist() for row in leaf] if isinstance(leaf, Ragged) else np.asarray(leaf).tolist()


def steps_of(strategy, ds) -> list[list]:
    return [[as_list(piece) for piece in strategy.local_results(step)] for step in strategy.distribute_dataset(ds)]


def pieces(batch: list, num: int) -> list[list]:
    """Cut a batch: each replica gets ceil(n / N) rows, until no rows are left."""
    size = -(-len(batch) // num) or 1
    return [batch[k * size : (k + 1) * size] for k in range(num)]


def expected_steps(batches: list[list], num_replicas: int) -> list[list[list]]:
    return [pieces(batch, num_replicas) for batch in batches if batch]


@pytest.mark.parametrize("name", TAILS)
def test_every_tail_is_cut_by_the_rule(name):
    make, batches = TAILS[name]
    ds = make().with_options(Options(auto_shard_policy="data"))
    assert [as_list(batch) for batch in ds] == batches
    for replicas in REPLICAS[1:]:
        assert steps_of(strategy_of(replicas), ds) == expected_steps(batches, sum(replicas)), replicas


@pytest.mark.cluster
@pytest.mark.parametrize(("num_workers", "num_threads"), [(1, 2), (2, 1), (3, 1), (2, 2)])
def test_every_tail_is_cut_by_the_rule_on_a_cluster(start_cluster, num_workers, num_threads):
    num_replicas = num_workers * num_threads
    with daskdist.MultiWorkerMirroredStrategy(
        start_cluster(num_workers, num_threads), num_replicas_per_worker=num_threads
    ) as strategy:
        actual, expected = {}, {}
        for name in ("map", "batch of batches", "padded_batch", "ragged_batch", "filter", "concatenate", "rebatch"):
            make, batches = TAILS[name]
            actual[name] = steps_of(strategy, make())
            expected[name] = expected_steps(batches, num_replicas)
        assert actual == expected


# --- tables ---


@pytest.mark.parametrize(
    ("num_rows", "batch", "num_replicas", "sizes"),
    [
        (5, 5, 2, [[3, 2]]),
        (5, 5, 3, [[2, 2, 1]]),
        (5, 5, 4, [[2, 2, 1, 0]]),
        (10, 10, 4, [[3, 3, 3, 1]]),
        (2, 2, 3, [[1, 1, 0]]),
        (3, 3, 4, [[1, 1, 1, 0]]),
        (13, 10, 4, [[3, 3, 3, 1], [1, 1, 1, 0]]),
        (3, 1, 2, [[1, 0]] * 3),
    ],
)
def test_sizes_of_pieces(num_rows, batch, num_replicas, sizes):
    steps = steps_of(mirrored(num_replicas), numbers(num_rows).batch(batch))
    assert [[len(piece) for piece in step] for step in steps] == sizes


def test_drop_remainder_drops_the_last_batch_and_no_piece():
    steps = steps_of(mirrored(3), numbers(23).batch(5, drop_remainder=True))
    assert [[len(piece) for piece in step] for step in steps] == [[2, 2, 1]] * 4


@pytest.mark.parametrize(
    ("replicas", "batch", "num_rows", "expected"),
    [
        ([1, 1], 4, 10, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]),
        ([2, 2], 8, 13, [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [10, 11], [12], []]]),
        (
            [2, 2],
            6,
            13,
            [[[0, 1], [2, 3], [4, 5], []], [[6, 7], [8, 9], [10, 11], []], [[12], [], [], []]],
        ),
        ([2, 2], 7, 14, [[[0, 1], [2, 3], [4, 5], [6]], [[7, 8], [9, 10], [11, 12], [13]]]),
        ([1, 1], 5, 9, [[[0, 1, 2], [3, 4]], [[5, 6], [7, 8]]]),
        ([1, 1], 1, 3, [[[0], []], [[1], []], [[2], []]]),
        ([2, 1], 7, 9, [[[0, 1, 2], [3, 4, 5], [6]], [[7], [8], []]]),
    ],
)
def test_piece_k_goes_to_replica_k(replicas, batch, num_rows, expected):
    ds = numbers(num_rows).batch(batch).with_options(Options(auto_shard_policy="data"))
    assert steps_of(SimulatedWorkers(replicas), ds) == expected


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        (
            [2, 2],
            [
                [[0, 1], [2, 3], [0, 1], [2, 3]],
                [[4, 5], [6], [4, 5], [6]],
                [[7, 8], [9, 10], [7, 8], [9, 10]],
                [[11, 12], [13], [11, 12], [13]],
            ],
        ),
        (
            # Each worker cuts its batches in three; in each step, the first worker uses two pieces and the second one.
            [2, 1],
            [
                [[0, 1, 2], [3, 4, 5], [0, 1, 2]],
                [[6], [7, 8, 9], [3, 4, 5]],
                [[10, 11, 12], [13], [6]],
                [[], [], [7, 8, 9]],
                [[], [], [10, 11, 12]],
                [[], [], [13]],
            ],
        ),
    ],
)
def test_each_worker_cuts_its_own_batches(replicas, expected):
    ds = numbers(14).batch(7).with_options(Options(auto_shard_policy="off"))
    strategy = SimulatedWorkers(replicas)
    assert steps_of(strategy, ds) == expected
    assert strategy.distribute_dataset(ds).cardinality() == len(expected)


@pytest.mark.parametrize("replicas", [[1, 1], [2, 1], [1, 2]], ids=str)
def test_files_are_cut_on_their_worker(parquet_files, replicas):
    ds = read_parquet(parquet_files(3, files=5), "id").batch(4).with_options(Options(auto_shard_policy="file"))
    strategy = SimulatedWorkers(replicas)
    actual = steps_of(strategy, ds)
    # The first worker has files 0, 2 and 4, the second has files 1 and 3.
    shares = [[[0, 1, 2, 6], [7, 8, 12, 13], [14]], [[3, 4, 5, 9], [10, 11]]]
    starts = np.cumsum([0, *replicas])
    for number, batches in enumerate(shares):
        own = [piece for step in actual for piece in step[starts[number] : starts[number + 1]] if piece]
        assert own == [piece for batch in batches for piece in pieces(batch, sum(replicas)) if piece]
    assert all(any(step) for step in actual)
    assert strategy.distribute_dataset(ds).cardinality() == len(actual)


# --- what elements are made of ---


@pytest.mark.parametrize("replicas", [[2], [4], [2, 1]], ids=str)
@pytest.mark.parametrize("mapped", [False, True])
def test_nested_elements_are_cut_leaf_by_leaf(replicas, mapped):
    ds = nested(5).batch(5)
    ds = ds.map(lambda d: {**d, "more": (d["more"][0] * 2, d["more"][1])}) if mapped else ds
    strategy = strategy_of(replicas)
    (step,) = strategy.distribute_dataset(ds)
    (batch,) = ds
    num = sum(replicas)
    words = pieces([f"word {k}" for k in range(5)], num)
    for number, piece in enumerate(strategy.local_results(step)):
        assert Structure.flatten(piece)[1] == Structure.flatten(batch)[1]
        assert [str(word) for word in piece["words"]] == words[number]
        assert piece["words"].dtype == batch["words"].dtype
        assert piece["more"][0].tolist() == pieces(batch["more"][0].tolist(), num)[number]
        assert piece["more"][1].shape == (len(words[number]), 2, 3)


ZIPPED = [
    # Three replicas get [2, 2, 0] rows of a leaf of 4, and [2, 2, 2] rows of a leaf of 6.
    (3, [[([0, 1], [0, 1]), ([2, 3], [2, 3]), ([], [4, 5])], [([4], [6]), ([], []), ([], [])]]),
    (2, [[([0, 1], [0, 1, 2]), ([2, 3], [3, 4, 5])], [([4], [6]), ([], [])]]),
]


@pytest.mark.parametrize(("num_replicas", "expected"), ZIPPED)
@pytest.mark.parametrize("is_here", [True, False])
def test_leaves_of_different_length_are_cut_for_themselves(num_replicas, expected, is_here):
    strategy = mirrored(num_replicas) if is_here else SimulatedWorkers([1] * num_replicas)
    ds = Dataset.zip((numbers(5).batch(4), numbers(7).batch(6)))
    steps = [strategy.local_results(step) for step in strategy.distribute_dataset(ds)]
    assert [[tuple(leaf.tolist() for leaf in piece) for piece in step] for step in steps] == expected


@pytest.mark.cluster
def test_leaves_of_different_length_on_a_cluster(on_cluster):
    ds = Dataset.zip((numbers(2).batch(1), numbers(8).batch(4)))
    steps = [on_cluster.local_results(step) for step in on_cluster.distribute_dataset(ds)]
    assert [[tuple(leaf.tolist() for leaf in piece) for piece in step] for step in steps] == [
        [([0], [0, 1]), ([], [2, 3])],
        [([1], [4, 5]), ([], [6, 7])],
    ]


def test_a_step_exists_if_any_leaf_has_a_row():
    ds = numbers(4).batch(2).map(lambda x: (x[:0], x))
    strategy = mirrored(2)
    steps = [strategy.local_results(step) for step in strategy.distribute_dataset(ds)]
    assert [[piece[1].tolist() for piece in step] for step in steps] == [[[0], [1]], [[2], [3]]]


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_the_spec_of_ragged_batches_is_ragged(num_replicas):
    strategy = mirrored(num_replicas)
    dist = strategy.distribute_dataset(triangles(5).ragged_batch(4))
    for step in dist:
        for piece, spec in zip(strategy.local_results(step), dist.element_spec.specs, strict=True):
            assert spec.is_compatible_with(piece)
            assert isinstance(piece, Ragged)


@pytest.mark.parametrize("how", ["option", "operation"])
@pytest.mark.parametrize("replicas", [[1], [2], [3], [1, 1]], ids=str)
def test_a_batch_left_out_is_left_out_as_a_whole(how, replicas):
    rows = [np.arange(3) if number == 6 else np.arange(2) + 10 * number for number in range(12)]
    ds = Dataset.from_generator(lambda: iter(rows), output_signature=TensorSpec((None,), np.int64)).batch(4)
    ds = ds.with_options(Options(on_error="skip")) if how == "option" else ds.ignore_errors()
    batches = [[[10 * number, 10 * number + 1] for number in range(start, start + 4)] for start in (0, 8)]
    assert [batch.tolist() for batch in ds] == batches
    strategy = strategy_of(replicas)
    actual = [step if sum(replicas) > 1 else step[:1] for step in steps_of(strategy, ds)]
    assert [[piece for piece in step if piece] for step in actual] == [
        [piece for piece in pieces(batch, sum(replicas)) if piece] for batch in batches
    ]


# --- what cannot be cut ---

SCALARS = {
    "rows": (lambda: numbers(5), [r"leaf \(the element\) is a scalar", r"Add \.batch\(global_batch_size\)"]),
    "unbatch": (lambda: numbers(5).batch(2).unbatch(), ["after batch removes it", r"\.batch\(global_batch_size\)"]),
    "map to a scalar": (lambda: numbers(5).batch(2).map(lambda x: x.sum()), ["after batch removes it"]),
    "one scalar leaf": (
        lambda: numbers(5).batch(2).map(lambda x: {"rows": x, "of": {"all": x.sum()}}),
        [r"leaf \['of'\]\['all'\] is a scalar", "Keep a value for each row"],
    ),
    "generator": (
        lambda: Dataset.from_generator(lambda: iter([1]), output_signature=TensorSpec((), np.int64)),
        [r"Add \.batch\(global_batch_size\)"],
    ),
    "window": (lambda: numbers(5).window(2), ["is a dataset", r"flat_map\(lambda window: window\.batch"]),
    "window in a tuple": (
        lambda: Dataset.zip((numbers(4).batch(2), numbers(4).window(2))),
        [r"leaf \[1\] is a dataset"],
    ),
}


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.parametrize("replicas", [[2], [1, 1]], ids=str)
def test_elements_without_batch_dimension(name, replicas):
    make, words = SCALARS[name]
    for word in [*words, f"over {sum(replicas)} replicas", "no batch dimension", "distribute_datasets_from_function"]:
        with pytest.raises(ShardingError, match=word):
            strategy_of(replicas).distribute_dataset(make())


def test_one_replica_needs_no_batch():
    assert steps_of(mirrored(1), numbers(3)) == [[0], [1], [2]]
    windows = mirrored(1).distribute_dataset(numbers(3).window(2))
    assert [[int(x) for x in window] for window in windows] == [[0, 1], [2]]


@pytest.mark.parametrize("replicas", [[2], [1, 1]], ids=str)
def test_a_batch_that_turns_out_a_scalar(replicas):
    # For made-up batches, which have few rows, the function returns rows.
    ds = numbers(9).batch(9).map(lambda x: x.sum() if len(x) * 2000 > 16000 else x)
    strategy = strategy_of(replicas)
    with pytest.raises(ShardingError, match=r"leaf \(the element\) is a scalar .* a row for each row"):
        # On a cluster, the batch fails on its worker, and the error is raised when its value is used.
        list(map(strategy.local_results, strategy.distribute_dataset(ds)))


@pytest.mark.parametrize("replicas", [[1], [2], [1, 1]], ids=str)
def test_a_function_that_selects_no_sample_row(replicas):
    ds = numbers(12).batch(4).map(lambda x: x[x > 3])
    distributed = strategy_of(replicas).distribute_dataset(ds)
    assert ds.element_spec == TensorSpec((None,), np.int64)
    assert distributed.cardinality() == 3
    assert [row for step in steps_of(strategy_of(replicas), ds) for row in np.concatenate(step)] == list(range(4, 12))


# --- unequal replicas ---

WORKERS = [Worker("tcp://10.0.0.1:1", "0"), Worker("tcp://10.0.0.2:1", "one"), Worker("tcp://10.0.0.3:1", "2")]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (1, [1, 1, 1]),
        (np.int64(1), [1, 1, 1]),
        ([2, 3, 1], [2, 3, 1]),
        ((2, 0, 1), [2, 0, 1]),
        (np.array([0, 4, 0]), [0, 4, 0]),
        ({"one": 2}, [0, 2, 0]),
        ({2: 1, 0: 2}, [2, 0, 1]),
        ({"tcp://10.0.0.2:1": 3, "0": 0}, [0, 3, 0]),
    ],
    ids=str,
)
def test_replicas_of_each_worker(wanted, expected):
    assert num_replicas_on(WORKERS, as_counts(wanted)) == expected


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (0, "num_replicas_per_worker is 0; give 1 or more"),
        (True, "num_replicas_per_worker is True; give a whole number"),
        ("2", "num_replicas_per_worker is '2'; give a whole number"),
        (1.5, "num_replicas_per_worker is 1.5; give a whole number"),
        ([1, -1, 1], r"num_replicas_per_worker\[1\] is -1; give 0 or more"),
        ([1, None, 1], r"num_replicas_per_worker\[1\] is None; give a whole number"),
        ([0, 0, 0], r"is \[0, 0, 0\]; give at least one worker a replica"),
        ([], r"is \[\]; give at least one worker a replica"),
        ({}, r"is {}; give at least one worker a replica"),
        ({"one": -2}, r"num_replicas_per_worker\['one'\] is -2; give 0 or more"),
        ([1, 1], r"has 2 numbers, but there are 3 workers, in order 0 \(tcp.*\), one .*Give one for each, 0 for none"),
        ({"three": 1}, r"names worker 'three', but there is none.*there are 0 \(tcp://10.0.0.1:1\), one"),
        ({0: 1, "tcp://10.0.0.1:1": 1}, r"names one worker twice, as '0' and 'tcp://10.0.0.1:1'"),
        ({0: 1, "0": 1}, "names one worker twice"),
    ],
    ids=str,
)
def test_invalid_numbers_of_replicas_are_refused(wanted, words):
    with pytest.raises(ArgumentError, match=words):
        num_replicas_on(WORKERS, as_counts(wanted))


def by_name(client: Client) -> dict:
    return {str(info["name"]): address for address, info in workers_of(client).items()}


@pytest.mark.cluster
def test_unequal_replicas_on_a_cluster(start_cluster, parquet_files):
    client = start_cluster(2, 2)
    paths = parquet_files([5, 4, 3, 2])
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=[2, 1]) as strategy:
        assert [replica.device for replica in strategy.replicas] == ["CPU:0", "CPU:1", "CPU:0"]
        assert len(strategy.workers) == 2
        assert repr(strategy) == "<MultiWorkerMirroredStrategy: 3 replicas on 2 workers>"
        for policy, expected in {
            "data": [[[0, 1, 2], [3, 4, 5], [6]], [[7, 8, 9], [10, 11, 12], [13]]],
            # Files 0 and 2 have 8 rows, which make batches of 7 and 1; files 1 and 3 have 6 rows.
            "file": [
                [[0, 1, 2], [3, 4, 9], [5, 6]],
                [[10], [11], [7, 8]],
                [[], [], [12, 13]],
            ],
        }.items():
            ds = read_parquet(paths, "id").batch(7).with_options(Options(auto_shard_policy=policy))
            dist = strategy.distribute_dataset(ds)
            assert steps_of(strategy, ds) == expected
            assert dist.cardinality() == len(expected)
            total = sum(
                float(strategy.reduce("SUM", strategy.run(lambda x: x.sum(), args=(step,)), axis=None)) for step in dist
            )
            assert total == sum(range(14))


@pytest.mark.cluster
def test_a_worker_without_replicas_takes_no_part(start_cluster):
    client = start_cluster(3, 1)
    addresses = by_name(client)
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker={2: 1, addresses["0"]: 1}) as strategy:
        assert strategy.workers == (addresses["0"], addresses["2"])
        dist = strategy.distribute_dataset(numbers(6).batch(4))
        assert addresses["1"] not in dist.explain()
        steps = list(dist)
        assert [[piece.tolist() for piece in strategy.local_results(step)] for step in steps] == [
            [[0, 1], [2, 3]],
            [[4], [5]],
        ]
        assert not client.has_what([addresses["1"]])[addresses["1"]]
    with (
        pytest.raises(ArgumentError, match=r"names worker 'x'.*there are 0 \("),
        daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker={"x": 1}),
    ):
        pass


# --- how many steps there are ---


@pytest.mark.parametrize(
    ("replicas", "policy", "drops_uneven"),
    every_pair([[1], [2], [4], [1, 1], [2, 1], [1, 3], [3, 1, 2]], ["off", "data"], [False, True]),
)
def test_cardinality_is_the_number_of_steps(replicas, policy, drops_uneven):
    strategy = strategy_of(replicas)
    options = Options(auto_shard_policy=policy, drop_uneven=drops_uneven)
    known = 0
    for num_rows in (0, 1, 3, 8, 10, 13, 24):
        for size in (1, 2, 5, 8):
            batched = numbers(num_rows).batch(size)
            for ds in (
                batched,
                numbers(num_rows).batch(size, drop_remainder=True),
                batched.concatenate(batched),
                numbers(num_rows).batch(size, drop_remainder=True).map(lambda x: x + 1),
            ):
                dist = strategy.distribute_dataset(ds.with_options(options))
                number = dist.cardinality()
                known += number != UNKNOWN
                assert number in (UNKNOWN, sum(1 for _ in dist)), (num_rows, size, ds)
    assert known > (25 if drops_uneven else 50)


@pytest.mark.parametrize("policy", ["off", "data"])
def test_cardinality_without_end(policy):
    strategy = SimulatedWorkers([2, 1])
    options = Options(auto_shard_policy=policy)
    assert strategy.distribute_dataset(numbers(5).batch(2).repeat().with_options(options)).cardinality() == INFINITE
    uneven = Options(auto_shard_policy=policy, drop_uneven=True)
    assert strategy.distribute_dataset(numbers(5).repeat().batch(6).with_options(uneven)).cardinality() == INFINITE
    # Every batch has two rows for three replicas, so none is complete.
    short = strategy.distribute_dataset(numbers(5).repeat().batch(2).with_options(uneven))
    assert short.cardinality() == (0 if policy == "data" else UNKNOWN)


def test_cardinality_of_very_many_batches():
    ds = numbers(10**12).batch(8).with_options(Options(auto_shard_policy="off"))
    dist = SimulatedWorkers([1, 1]).distribute_dataset(ds)
    assert dist.cardinality() == 2 * 10**12 // 8
    assert SimulatedWorkers([2, 1]).distribute_dataset(ds).cardinality() == 3 * 10**12 // 8


# --- copies ---


def begin_and_end(piece: np.ndarray) -> list[int]:
    begin = piece.__array_interface__["data"][0]
    return [begin, begin + piece.nbytes]


@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_pieces_are_views_of_the_rows(num_replicas):
    rows = np.arange(4000, dtype=np.float32).reshape(1000, 4)
    strategy = mirrored(num_replicas)
    distributed = strategy.distribute_dataset(Dataset.from_tensor_slices(rows).batch(64))
    actual = [piece for step in distributed for piece in strategy.local_results(step)]
    assert np.concatenate(actual).tolist() == rows.tolist()
    ends = [begin_and_end(piece) for piece in actual if len(piece)]
    # Each piece begins where the one before ends.
    assert [begin for begin, _ in ends[1:]] == [end for _, end in ends[:-1]]
    assert not any(piece.flags.writeable for piece in actual)


def test_pieces_in_loops_are_views_of_the_rows():
    rows = np.arange(4000, dtype=np.float32).reshape(1000, 4)
    strategy = mirrored(2)
    distributed = strategy.distribute_dataset(Dataset.from_tensor_slices(rows).batch(64))
    actual = strategy.run(lambda batches: str([begin_and_end(piece) for piece in batches]), args=(distributed,))
    ends = sorted(value for text in strategy.local_results(actual) for value in ast.literal_eval(text))
    assert [begin for begin, _ in ends[1:]] == [end for _, end in ends[:-1]]
    assert ends[-1][1] - ends[0][0] == rows.nbytes


def test_large_pieces_put_together_take_memory_of_the_pool():
    def blocks():
        for start in range(0, 480, 48):
            yield np.repeat(np.arange(start, start + 48, dtype=np.float32)[:, None], 2**15, axis=1)

    ds = Dataset.from_generator(blocks, output_signature=TensorSpec((None, 2**15), np.float32)).unbatch().batch(160)
    strategy = mirrored(2)
    pieces = [piece for step in strategy.distribute_dataset(ds) for piece in strategy.local_results(step)]
    assert [piece[:, -1].tolist() for piece in pieces] == [list(range(k, k + 80)) for k in range(0, 480, 80)]
    # Memory of the pool is aligned to 64 bytes, unlike that of NumPy's arrays of this size.
    assert not any(begin_and_end(piece)[0] % 64 for piece in pieces)


WIDE = np.arange(80000, dtype=np.float32).reshape(10000, 8)


@pytest.mark.parametrize(
    "rows", [np.asfortranarray(WIDE), WIDE[:, 1], WIDE[::-1], np.broadcast_to(WIDE[:, :1], WIDE.shape)]
)
def test_scattered_rows_are_gathered(rows):
    strategy = mirrored(2)
    distributed = strategy.distribute_dataset(Dataset.from_tensor_slices(rows).batch(64, drop_remainder=True))
    actual = [strategy.local_results(step) for step in distributed]
    assert np.concatenate([piece for step in actual for piece in step]).tolist() == rows[: len(actual) * 64].tolist()
    # The first replica's part in the first step may be a slice of the source; all other parts are copies.
    assert all(piece.flags.c_contiguous for step in actual[1:] for piece in step)


@pytest.mark.parametrize("num_shards", [6, 8])
def test_pieces_of_a_shard_do_not_keep_the_others(num_shards):
    rows = np.arange(40000, dtype=np.float32).reshape(10000, 4)
    strategy = mirrored(2)
    ds = Dataset.from_tensor_slices(rows).batch(64).shard(num_shards, 0)
    actual = [strategy.local_results(step) for step in strategy.distribute_dataset(ds)]
    starts = range(0, len(rows), 64 * num_shards)
    assert [np.concatenate(step).tolist() for step in actual] == [rows[k : k + 64].tolist() for k in starts]
    # The first replica's part in the first step may be a slice of the source; all other parts are copies.
    assert not any(np.shares_memory(piece, rows) for step in actual[1:] for piece in step)


def test_pieces_of_a_shard_in_loops_do_not_keep_the_others():
    rows = np.arange(40000, dtype=np.float32).reshape(10000, 4)
    strategy = mirrored(2)
    distributed = strategy.distribute_dataset(Dataset.from_tensor_slices(rows).batch(64).shard(8, 0))
    actual = strategy.run(lambda pieces: sum(np.shares_memory(piece, rows) for piece in pieces), args=(distributed,))
    assert max(strategy.local_results(actual)) <= 1


@pytest.mark.parametrize("block_rows", [1, 7, 64, 100])
@pytest.mark.parametrize("size", [4, 6, 50, 128])
def test_rows_of_several_blocks_are_gathered(size, block_rows):
    def rows():
        for start in range(0, 500, block_rows):
            numbers = np.arange(start, min(start + block_rows, 500))
            yield {"x": numbers, "y": np.stack([numbers] * 2, axis=1).astype(np.float32)}

    signature = {"x": TensorSpec((None,), np.int64), "y": TensorSpec((None, 2), np.float32)}
    ds = Dataset.from_generator(rows, output_signature=signature).unbatch().batch(size)
    strategy = mirrored(2)
    actual = [strategy.local_results(step) for step in strategy.distribute_dataset(ds)]
    batches = [np.arange(start, min(start + size, 500)) for start in range(0, 500, size)]
    assert [[piece["x"].tolist() for piece in step] for step in actual] == [pieces(list(value), 2) for value in batches]
    for step in actual:
        for piece in step:
            assert piece["y"].dtype == np.float32
            assert piece["y"].tolist() == [[k, k] for k in piece["x"]]
