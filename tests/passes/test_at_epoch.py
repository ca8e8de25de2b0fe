"""`Dataset.at_epoch`: the orders and random numbers of a later pass."""

from __future__ import annotations

import pickle
import tempfile

import cloudpickle
import dask
import numpy as np
import pytest
from conftest import mirrored
from hypothesis import given, settings
from hypothesis import strategies as st

import daskdist
from daskdist import Dataset, Options, errors
from daskdist.core.structure import Structure


def flip(image, rng):
    return image[:, ::-1] if rng.integers(2) else image


def images():
    pixels = np.random.default_rng(0).integers(0, 256, (12, 4, 4, 3), dtype=np.uint8)
    return Dataset.from_tensor_slices(pixels).shuffle(6, seed=1).map(flip, rng=2)


def drop_words(text, rng):
    return " ".join(word for word in str(text).split() if rng.random() < 0.7)


def texts():
    return Dataset.from_tensor_slices([f"some words of row {k}" for k in range(12)]).map(drop_words, rng=3)


PIPELINES = [
    images,
    texts,
    lambda: Dataset.range(12).shuffle(5, seed=1).batch(5),
    lambda: Dataset.range(12).global_shuffle(seed=1).map(lambda x, rng: x + rng.integers(9), rng=5),
    lambda: Dataset.range(5).shuffle(5, seed=1).repeat(2),
    lambda: Dataset.range(9).shuffle(9, seed=1, reshuffle_each_iteration=False).batch(4),
    lambda: Dataset.range(9).shuffle(9, seed=1).cache().shuffle(9, seed=2),
    lambda: Dataset.zip(Dataset.range(9).shuffle(9, seed=1), Dataset.range(9).shuffle(4, seed=2)),
    lambda: Dataset.random(seed=4).take(5),
    lambda: Dataset.range(3).flat_map(lambda x: Dataset.range(4).shuffle(4, seed=7)),
    lambda: Dataset.range(12).shuffle(12, seed=1).split(0.5, seed=0)[0].shuffle(9, seed=3),
    lambda: Dataset.sample_from_datasets([Dataset.range(9), Dataset.range(9)], [0.5, 0.5], seed=3),
    lambda: Dataset.range(8).shuffle(8).map(lambda x: x * 2).shuffle(3).with_options(Options(seed=3)),
]


def plain(elements):
    return [[np.asarray(leaf).tolist() for leaf in Structure.of(element)[0]] for element in elements]


@pytest.mark.parametrize("build", PIPELINES)
def test_at_epoch_gives_the_pass_of_that_number(build):
    ds = build()
    passes = [plain(ds) for _ in range(4)]
    for number in (3, 0, 2):
        assert plain(ds.at_epoch(number)) == passes[number]
    # Another program gets the same pass, and then the passes after it.
    later = build().at_epoch(2)
    assert [plain(later), plain(later)] == passes[2:4]
    assert plain(pickle.loads(cloudpickle.dumps(build().at_epoch(3)))) == passes[3]
    # These passes do not count as passes of the original dataset.
    assert plain(ds.at_epoch(1).at_epoch(3)) == passes[3]
    assert plain(ds) == plain(build().at_epoch(4))


def printed(ds, capsys):
    ds.show(12)
    return [int(line.split()[1]) for line in capsys.readouterr().out.splitlines()[1:13]]


def read_back(write, read, tmp_path):
    directory = tempfile.mkdtemp(dir=tmp_path)
    write(directory)
    return [next(iter(row.values())) if isinstance(row, dict) else row for row in read(directory)]


# All ways in which elements leave a dataset.
WAYS_OUT = {
    "as_numpy_iterator": lambda ds, *_: ds.as_numpy_iterator(),
    "compute": lambda ds, *_: dask.compute(ds)[0],
    "persist": lambda ds, *_: ds.persist(),
    "head": lambda ds, *_: ds.head(12),
    "show": lambda ds, capsys, tmp_path: printed(ds, capsys),
    "to_delayed": lambda ds, *_: dask.compute(*ds.to_delayed()),
    "to_dask_array": lambda ds, *_: ds.batch(5).to_dask_array().compute(),
    "to_dask_dataframe": lambda ds, *_: ds.to_dask_dataframe()["value"].compute(),
    "to_pandas": lambda ds, *_: ds.to_pandas()["value"],
    "to_pandas of batches": lambda ds, *_: ds.batch(5).to_pandas(unbatch=True)["value"],
    "reduce": lambda ds, *_: ds.map(lambda x: np.array([x])).reduce(np.arange(0), lambda a, b: np.append(a, b)),
    "get_single_element": lambda ds, *_: ds.batch(12).get_single_element(),
    "save": lambda ds, capsys, path: read_back(ds.save, Dataset.load, path),
    "to_parquet": lambda ds, capsys, path: read_back(ds.to_parquet, daskdist.read_parquet, path),
    "to_npy": lambda ds, capsys, path: read_back(ds.to_npy, daskdist.read_npy, path),
    "flat_map": lambda ds, *_: Dataset.range(1).flat_map(lambda _: ds),
    "interleave": lambda ds, *_: Dataset.range(1).interleave(lambda _: ds, cycle_length=2),
    "from_function": lambda ds, *_: mirrored(1).distribute_datasets_from_function(lambda context: ds),
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_all_ways_out_of_a_dataset_begin_with_that_pass(way, capsys, tmp_path):
    def ds():
        return Dataset.range(12).shuffle(12, seed=1)

    passes = [[int(x) for x in ds().at_epoch(number)] for number in range(4)]
    for number in (2, 0):
        assert [int(x) for x in WAYS_OUT[way](ds().at_epoch(number), capsys, tmp_path)] == passes[number]


def test_graphs_of_several_passes_are_computed_together():
    ds = Dataset.range(12).shuffle(12, seed=1).map(lambda x, rng: (x, rng.integers(99)), rng=2).batch(5)
    first, third = dask.compute(ds.at_epoch(0), ds.at_epoch(2))
    assert plain(first) == plain(ds.at_epoch(0)) != plain(third) == plain(ds.at_epoch(2))


def test_looks_and_graphs_are_of_the_first_pass_and_the_others_count():
    ds = Dataset.range(12).shuffle(12, seed=1)
    passes = [[int(x) for x in ds.at_epoch(number)] for number in range(3)]
    assert [ds.to_pandas()["value"].tolist(), [int(x) for x in ds]] == passes[:2]
    assert [int(x) for x in ds.head(12)] == [int(x) for x in ds.compute()] == passes[0]
    assert [int(x) for x in ds] == passes[2]


def test_parts_stay_apart_in_all_passes():
    ds = Dataset.range(40).shuffle(40, seed=1).at_epoch(3)
    one, other = ds.split(0.5, seed=0)
    for number in range(3):
        assert sorted([int(x) for part in (one.at_epoch(number), other) for x in part]) == list(range(40))


@pytest.mark.cluster
def test_datasets_of_a_function_on_workers(on_cluster):
    ds = Dataset.range(12).shuffle(12, seed=1).batch(4)
    passes = [[int(x) for batch in ds.at_epoch(number) for x in batch] for number in range(6)]

    def rows(distributed):
        return [int(x) for step in distributed for x in on_cluster.local_results(step)[0]]

    for epoch in range(2):
        distributed = on_cluster.distribute_datasets_from_function(lambda _, epoch=epoch: ds.at_epoch(epoch))
        assert rows(distributed) == passes[epoch]
    distributed = on_cluster.distribute_datasets_from_function(lambda _: ds.at_epoch(3))
    assert [rows(distributed), rows(distributed)] == passes[3:5]
    loops = on_cluster.run(lambda batches: [int(x) for batch in batches for x in batch], args=(distributed,))
    assert on_cluster.local_results(loops)[0] == passes[5]
    # A position is one of its pass, whatever pass the datasets begin with.
    iterator = iter(on_cluster.distribute_datasets_from_function(lambda _: ds.at_epoch(2)))
    next(iterator)
    again = iter(on_cluster.distribute_datasets_from_function(lambda _: ds.at_epoch(4)))
    again.load_state_dict(iterator.state_dict())
    assert rows(again) == passes[2][4:]


@settings(max_examples=25, deadline=None)
@given(number=st.integers(0, 5), num_replicas=st.integers(1, 3), batch_size=st.integers(1, 7))
def test_distributed_passes_have_the_same_number(number, num_replicas, batch_size):
    strategy = mirrored(num_replicas)
    distributed = strategy.distribute_dataset(images().batch(batch_size).at_epoch(number))
    rows = [row for batch in distributed for part in strategy.local_results(batch) for row in part.tolist()]
    assert rows == [row for (row,) in plain(images().at_epoch(number))]


@pytest.mark.cluster
def test_passes_on_a_cluster(on_cluster):
    undistributed = images()
    passes = [plain(undistributed) for _ in range(3)]
    distributed = on_cluster.distribute_dataset(images().batch(5).at_epoch(1))
    for number in (1, 2):
        actual = [on_cluster.gather(batch, axis=0) for batch in distributed]
        assert np.concatenate([np.asarray(batch) for batch in actual]).tolist() == [row for (row,) in passes[number]]

    def orders(iterator):
        return [[int(x) for batch in iterator for x in batch] for _ in range(2)]

    shuffled = Dataset.range(12).shuffle(12, seed=1).batch(4)
    expected = [[int(x) for batch in shuffled.at_epoch(number) for x in batch] for number in (3, 4)]
    loops = on_cluster.run(orders, args=(on_cluster.distribute_dataset(shuffled.at_epoch(3)),))
    by_replica = on_cluster.local_results(loops)
    for number, order in enumerate(expected):
        assert sorted(by_replica[0][number] + by_replica[1][number]) == sorted(order)
        pieces = [order[start : start + 4] for start in range(0, 12, 4)]
        assert by_replica[0][number] == [x for piece in pieces for x in piece[:2]]


def test_positions_continue_with_and_without_at_epoch():
    ds = images().batch(5)
    list(ds)
    iterator = iter(ds)
    next(iterator)
    state, rest = iterator.state_dict(), plain(iterator)
    again = iter(images().batch(5).at_epoch(1))
    again.load_state_dict(state)
    assert plain(again) == rest


@pytest.mark.parametrize("epoch", [-1, 1.5, "7", None])
def test_invalid_epochs_are_refused(epoch):
    with pytest.raises(errors.ArgumentError, match="at_epoch: epoch is"):
        Dataset.range(3).at_epoch(epoch)
