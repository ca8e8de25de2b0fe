"""`Strategy.predict`: predictions in the order of the rows, computed on replicas."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conftest import mirrored
from hypothesis import given, settings
from hypothesis import strategies as st

import daskdist
from daskdist import Dataset, Options, errors
from daskdist.core.cardinality import INFINITE, UNKNOWN


@pytest.fixture(params=["embedded", "one replica", pytest.param("cluster", marks=pytest.mark.cluster)])
def strategy(request):
    """Return two replicas, in this process or in two processes of a cluster, or a single one."""
    if request.param == "cluster":
        return request.getfixturevalue("on_cluster")
    return mirrored(1 if request.param == "one replica" else 2)


def rows(num_rows):
    return Dataset.from_tensor_slices({"key": np.arange(num_rows), "x": np.arange(num_rows) / 2})


def scaled(batch, factor):
    return {"key": batch["key"], "y": batch["x"] * factor}


def test_predictions_are_in_the_order_of_the_rows(strategy, parquet_files):
    predictions = strategy.predict(scaled, rows(23).batch(5), args=(4,))
    for _ in range(2):
        assert [(int(row["key"]), float(row["y"])) for row in predictions] == [(k, k * 2.0) for k in range(23)]
    files = daskdist.read_parquet(parquet_files(5, 10)).batch(7)
    column = files.columns[0]
    expected = [row for batch in files for row in np.asarray(batch[column]).tolist()]
    actual = strategy.predict(lambda batch: batch[column], files)
    assert [row.tolist() for row in actual] == expected


@settings(max_examples=30, deadline=None)
@given(num_rows=st.integers(0, 30), batch_size=st.integers(1, 9), num_replicas=st.integers(1, 4), num=st.integers(0, 9))
def test_any_number_of_replicas_gives_the_same(num_rows, batch_size, num_replicas, num):
    predictions = mirrored(num_replicas).predict(scaled, rows(num_rows).batch(batch_size), args=(1,))
    assert [int(row["key"]) for row in predictions.take(num)] == list(range(min(num, num_rows)))
    assert [int(row["key"]) for row in predictions] == list(range(num_rows))


def test_the_number_of_predictions_is_known_where_that_of_the_rows_is(strategy):
    numbers = [
        len(strategy.predict(scaled, ds, args=(1,)))
        for ds in (rows(11).batch(4), rows(11).batch(4, drop_remainder=True), rows(11).shuffle(3).batch(4).prefetch(1))
    ]
    assert numbers == [11, 8, 11]
    for ds in (rows(11).filter(lambda row: row["x"] > 1).batch(4), rows(11).batch(4).map(lambda row: row)):
        assert strategy.predict(scaled, ds, args=(1,)).cardinality() == UNKNOWN
    assert strategy.predict(scaled, rows(3).batch(2).repeat(), args=(1,)).cardinality() == INFINITE


def test_predictions_are_written(strategy, tmp_path):
    predictions = strategy.predict(scaled, rows(11).batch(4), args=(2,))
    paths = predictions.to_parquet(tmp_path, rows_per_file=5)
    assert len(paths) == 3
    assert [int(row["key"]) for row in daskdist.read_parquet(paths)] == list(range(11))
    assert predictions.to_pandas()["y"].tolist() == list(range(11))
    assert [len(batch["y"]) for batch in predictions.batch(8)] == [8, 3]


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_predictions_of_no_rows_have_their_columns(strategy, tmp_path, drop_remainder):
    none = rows(20).filter(lambda row: row["x"] > 100).batch(5, drop_remainder=drop_remainder)
    table = strategy.predict(scaled, none, args=(4,)).to_pandas()
    assert dict(table.dtypes) == {"key": np.int64, "y": np.float64}
    assert len(table) == 0
    strategy.predict(scaled, none, args=(4,)).to_parquet(tmp_path / "none")
    written = daskdist.read_parquet(tmp_path / "none")
    assert (written.columns, written.count()) == (["key", "y"], 0)
    needs_rows = strategy.predict(lambda batch: batch["x"] - batch["x"].max(), none)
    assert list(needs_rows) == []
    with pytest.raises(errors.UnknownLengthError, match=r"no elements, .* function accepts a batch without rows"):
        needs_rows.to_pandas()


def test_replicas_without_rows_are_not_called(strategy):
    def first(batch):
        return np.repeat(batch[:1] + 0 * batch[0], len(batch))

    assert len(list(strategy.predict(first, Dataset.range(9).batch(4)))) == 9


def test_weights_that_are_variables(strategy):
    with strategy.scope():
        factor = daskdist.Variable(np.float64(3))
    predictions = strategy.predict(lambda batch: batch * factor.numpy(), Dataset.range(5).batch(2))
    given_weights = strategy.predict(lambda batch, factor: batch * factor, Dataset.range(5).batch(2), args=(factor,))
    for actual in (predictions, given_weights):
        assert [float(x) for x in actual] == [0, 3, 6, 9, 12]
    # Each pass uses the weights at the time of that pass.
    factor.assign(np.float64(2))
    assert [float(x) for x in given_weights] == [0, 2, 4, 6, 8]


def shuffled(seed=1):
    return Dataset.range(8).shuffle(8, seed=seed).batch(4)


@pytest.mark.parametrize("seed", [1, None])
def test_rows_and_their_predictions_are_of_one_pass(strategy, seed):
    data = shuffled(seed)
    predictions, read = strategy.predict(lambda batch: batch, data), data.unbatch()
    pairs = {
        "rows": Dataset.zip(predictions, read),
        "themselves": Dataset.zip(predictions, predictions),
        "repetitions": Dataset.zip(predictions.repeat(2), read.repeat(2)),
        "repeated pairs": Dataset.zip(predictions, read).repeat(2),
        "a pass by its number": Dataset.zip(predictions.at_epoch(3), read.at_epoch(3)),
        "predictions of predictions": Dataset.zip(strategy.predict(abs, predictions.batch(3)), read),
        "nested": Dataset.range(2).flat_map(lambda _: Dataset.zip(predictions, read)),
        "another seed": Dataset.zip(predictions, read).with_options(Options(seed=5)),
    }
    for name, ds in pairs.items():
        for _ in range(2):
            both = [(int(prediction), int(x)) for prediction, x in ds]
            assert len(both) >= 8, name
            assert [prediction for prediction, _ in both] == [x for _, x in both], name


def test_passes_are_counted_as_those_of_the_dataset(strategy):
    passes = [[int(x) for x in shuffled().unbatch().at_epoch(number)] for number in range(5)]
    data = shuffled()
    predictions = strategy.predict(lambda batch: batch, data)
    # Looks do not count.
    assert [int(x) for x in predictions.head(8)] == passes[0]
    assert predictions.element_spec.shape == ()
    assert [[int(x) for x in predictions] for _ in range(2)] == passes[:2]
    assert [int(x) for x in predictions.at_epoch(4)] == passes[4]
    assert [int(x) for x in data.unbatch()] == passes[2]
    iterator, again = iter(predictions), iter(predictions)
    next(iterator)
    again.load_state_dict(iterator.state_dict())
    assert [int(x) for x in again] == passes[3][1:]


def fails_at_9(x):
    if (np.asarray(x) == 9).any():
        raise ValueError("nine")
    return x


FAILING = {
    "map": lambda: (Dataset.range(16).map(fails_at_9), abs),
    "filter": lambda: (Dataset.range(16).filter(lambda x: fails_at_9(x) >= 0), abs),
    "flat_map": lambda: (Dataset.range(16).flat_map(lambda x: Dataset.from_tensors(fails_at_9(x))), abs),
    "generator": lambda: (
        Dataset.from_generator(lambda: map(fails_at_9, range(16)), daskdist.TensorSpec((), "int64")),
        abs,
    ),
    "the function": lambda: (Dataset.range(16), fails_at_9),
}


@pytest.mark.parametrize("case", FAILING)
def test_rows_before_one_that_fails_come_first(strategy, case):
    ds, function = FAILING[case]()
    predictions = iter(strategy.predict(function, ds.batch(2)))
    assert [int(x) for x in itertools.islice(predictions, 8)] == list(range(8))
    with pytest.raises((errors.UserFunctionError, ValueError), match="nine"):
        next(predictions)


def test_text_and_options_of_the_dataset(strategy):
    ds = Dataset.range(6).batch(3).with_options(Options(auto_shard_policy="off", writable=True))
    assert list(strategy.predict(lambda batch: np.array([f"row {k}" for k in batch]), ds)) == [
        f"row {k}" for k in range(6)
    ]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda batch: batch.sum(), r"returned int64 of shape \(\) for \d rows; return an array, or a nest of arrays"),
        (lambda batch: batch[:0], r"returned ndarray of shape \(0,\) for"),
        (lambda batch: (batch, None), "returned None for"),
        (lambda batch: batch.tolist(), r"returned \d for"),
    ],
)
def test_results_without_a_row_for_each_row(strategy, function, message):
    with pytest.raises(errors.ArgumentError, match=f"predict: the function {message}"):
        list(strategy.predict(function, Dataset.range(6).batch(4)))


def test_arguments_that_are_refused(strategy):
    batches = Dataset.range(3).batch(2)
    with pytest.raises(
        errors.ArgumentError, match=r"predict: expected a function and a Dataset.*got builtin.* and list"
    ):
        strategy.predict(abs, [1, 2])
    with pytest.raises(errors.ArgumentError, match=r"predict\(fn, dataset\), got Dataset and builtin"):
        strategy.predict(batches, abs)
    with pytest.raises(errors.ArgumentError, match=r"got .* and DistributedDataset; predict itself distributes"):
        strategy.predict(abs, strategy.distribute_dataset(batches))
    with pytest.raises(errors.ArgumentError, match="predict: args is 3; give a tuple of arguments"):
        strategy.predict(abs, batches, args=3)
    with pytest.raises(errors.ArgumentError, match=r"predict: elements are not batches.*; give dataset.batch\(n\)"):
        strategy.predict(abs, Dataset.range(3))


def test_predictions_of_devices(strict):
    strategy = daskdist.MirroredStrategy(["STRICT:0", "STRICT:1"])
    assert [int(x) for x in strategy.predict(lambda batch: batch * 2, Dataset.range(7).batch(3))] == [
        0,
        2,
        4,
        6,
        8,
        10,
        12,
    ]
