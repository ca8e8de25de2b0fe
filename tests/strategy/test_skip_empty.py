"""The option ``last_batch="skip_empty"``: replicas without rows are not called, and have no value."""

from __future__ import annotations

import numpy as np
import pytest

import daskdist
from daskdist import Dataset, Options, PerReplica, errors
from daskdist.strategy.values.per_replica import is_uneven

SKIP = Options(last_batch="skip_empty")


def last_batch(strategy, options=SKIP, dataset=None):
    """Return the last of the batches of 4 of 9 rows: one row for the first replica, none for the second."""
    dataset = Dataset.range(9) if dataset is None else dataset
    *_, batch = strategy.distribute_dataset(dataset.batch(4).with_options(options))
    return batch


def test_a_replica_without_rows_is_not_called(strategy):
    def mean(batch):
        if not len(batch):
            raise ValueError("called without rows")
        return {"mean": batch.mean(), "num_rows": len(batch)}

    actual = strategy.run(mean, args=(last_batch(strategy),))
    assert strategy.local_results(actual) == ({"mean": 8.0, "num_rows": 1}, {"mean": None, "num_rows": None})
    # A later call that is given these results is skipped on the same replica.
    later = strategy.run(lambda value, x: value + x, args=(actual["mean"], 1))
    assert strategy.local_results(later) == (9.0, None)
    with pytest.raises(ValueError, match=r"called without rows"):
        strategy.local_results(strategy.run(mean, args=(last_batch(strategy, Options()),)))


def test_values_of_skipped_replicas_are_left_out_of_reductions(strategy):
    batch = last_batch(strategy)
    value = strategy.run(lambda batch: np.array([batch.sum(), 1.0]), args=(batch,))
    for op in ("SUM", "MEAN", "MIN", "MAX", "PROD", np.logaddexp, lambda a, b: a + b):
        np.testing.assert_array_equal(strategy.reduce(op, value, axis=None), [8.0, 1.0])
    assert float(strategy.reduce("MEAN", value, axis=0)) == 4.5
    weights = strategy.run(len, args=(batch,))
    np.testing.assert_array_equal(strategy.reduce("MEAN", value, axis=None, weights=weights), [8.0, 1.0])
    np.testing.assert_array_equal(strategy.reduce("MEAN", value, axis=None, weights=PerReplica([3, 4])), [8.0, 1.0])
    np.testing.assert_array_equal(strategy.gather(value, axis=0), [8.0, 1.0])
    np.testing.assert_array_equal(strategy.gather(batch, axis=0), [8])
    assert "1: <skipped: no rows>" in repr(value)


def test_no_value_at_all_is_an_error(strategy):
    absent = strategy.run(lambda batch: batch.sum(), args=(last_batch(strategy),)).values[1]
    skipped = strategy.run(lambda value: (value, 1), args=(PerReplica([absent, absent]),))
    assert strategy.local_results(skipped) == (None, None)
    with pytest.raises(errors.ArgumentError, match="no replica has a value: all were without rows"):
        np.asarray(strategy.reduce("SUM", skipped, axis=None))
    with pytest.raises(errors.ArgumentError, match="no replica has a value"):
        np.asarray(strategy.gather(skipped, axis=0))
    with pytest.raises(errors.ArgumentError, match=r"a replica has no value here.*local_results, where it is None"):
        np.asarray(absent)


def test_a_function_that_returns_none_or_its_argument(strategy):
    batch = last_batch(strategy)
    assert strategy.run(lambda batch: None, args=(batch,)) is None
    assert strategy.local_results(strategy.run(lambda batch: batch, args=(batch,)))[1] is None


def test_the_structure_is_learned_from_the_replicas_that_are_called(strategy):
    # Each replica in turn is skipped in the first call of a function.
    values = strategy.run(lambda batch: batch.sum(), args=(last_batch(strategy),)).values
    for present, absent in (values, values[::-1]):
        actual = strategy.run(lambda value: {"a": value, "b": (value, 2)}, args=(PerReplica([present, absent]),))
        assert sorted(actual) == ["a", "b"]
        assert float(strategy.reduce("SUM", actual["b"][0], axis=None)) == 8


def test_collectives_name_the_skipped_replica(strategy):
    def total(batch):
        return daskdist.get_replica_context().all_reduce("SUM", len(batch))

    with pytest.raises(errors.CollectiveError, match="replica 1 had no rows, so that its function was skipped"):
        strategy.local_results(strategy.run(total, args=(last_batch(strategy),)))


def test_batches_made_by_a_function(strategy):
    value = last_batch(strategy, dataset=Dataset.range(9).batch(3).map(lambda batch: batch + 1).unbatch())
    assert strategy.local_results(strategy.run(lambda batch: int(batch[0]), args=(value,))) == (9, None)
    mapped = strategy.distribute_dataset(Dataset.range(9).batch(4).map(np.negative).with_options(SKIP))
    *_, value = mapped
    actual = strategy.run(lambda batch: int(batch[0]), args=(value,))
    assert int(strategy.reduce("SUM", actual, axis=None)) == -8


def test_loops_on_replicas_get_zero_rows(strategy):
    batches = strategy.distribute_dataset(Dataset.range(9).batch(4).with_options(SKIP))
    actual = strategy.run(lambda iterator: [len(batch) for batch in iterator], args=(batches,))
    assert strategy.local_results(actual) == ([2, 2, 1], [2, 2, 0])


def test_values_that_are_refused():
    with pytest.raises(errors.ArgumentError, match="last_batch is 'drop'; give 'keep_empty' or 'skip_empty'"):
        Options(last_batch="drop")


def test_batches_that_are_put_on_devices(strict):
    strategy = daskdist.MirroredStrategy(["STRICT:0", "STRICT:1"])
    batch = last_batch(strategy)
    value = strategy.run(lambda batch: batch * 2, args=(batch,))
    assert int(strategy.reduce("SUM", value, axis=0)) == 16
    assert is_uneven(batch)
    assert strategy.local_results(value)[1] is None
