"""Batches of rows of a ragged array are ragged arrays again, as in TensorFlow."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import mirrored

from daskdist import Dataset, Ragged, RaggedRowSpec, RaggedTensorSpec, TensorSpec, errors
from daskdist.execute.callers.choose import using
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.callers.threads import Threads
from daskdist.testing import same_elements

ROWS = [[0, 1], [], [2, 3, 4], [5, 6, 7, 8], [9]]
RAGGED = Ragged(np.arange(10), [0, 2, 2, 5, 9, 10])
BATCHES = [ROWS[:2], ROWS[2:4], ROWS[4:]]


def rows():
    return Dataset.from_tensor_slices(RAGGED)


def pairs():
    return Dataset.from_tensor_slices({"r": RAGGED, "n": np.arange(5)})


def ragged_elements():
    return Dataset.range(5).map(lambda x: Ragged(np.arange(x), [0, int(x)]))


def lists(elements):
    return [element.tolist() for element in elements]


# Operations that keep rows unchanged, and operations that cut ragged arrays into rows.
PIPELINES = {
    "slices": (rows, BATCHES),
    "take and skip": (lambda: rows().skip(1).take(3), [ROWS[1:3], ROWS[3:4]]),
    "filter": (lambda: rows().filter(lambda x: len(x) > 1), [[ROWS[0], ROWS[2]], [ROWS[3]]]),
    "even by chance": (lambda: rows().filter(lambda x: len(x) == 2).repeat(2), [[[0, 1], [0, 1]]]),
    "cache": (lambda: rows().cache(), BATCHES),
    "prefetch": (lambda: rows().prefetch(2), BATCHES),
    "concatenate": (
        lambda: rows().concatenate(Dataset.from_tensor_slices([[7, 7], [8, 8]])),
        [*BATCHES[:2], [[9], [7, 7]], [[8, 8]]],
    ),
    "window": (lambda: rows().window(3).flat_map(lambda w: w), BATCHES),
    "flat_map": (lambda: Dataset.range(1).flat_map(lambda _: rows()), BATCHES),
    "interleave": (lambda: Dataset.range(1).interleave(lambda _: rows()), BATCHES),
    "unbatch": (lambda: rows().batch(3).unbatch(), BATCHES),
    "unbatch of ragged elements": (
        lambda: ragged_elements().unbatch(),
        [[[], [0]], [[0, 1], [0, 1, 2]], [[0, 1, 2, 3]]],
    ),
    "persisted": (lambda: rows().persist(scheduler="sync"), BATCHES),
    "generator": (
        lambda: Dataset.from_generator(lambda: map(np.array, [[1], [2, 3]]), RaggedRowSpec((None,), np.int64)),
        [[[1], [2, 3]]],
    ),
}


@pytest.mark.parametrize("caller", [Synchronous, Threads])
@pytest.mark.parametrize("name", PIPELINES)
def test_batches_of_rows_of_ragged_are_ragged(name, caller):
    build, expected = PIPELINES[name]
    with using(caller):
        ds = build().batch(2)
        assert ds.element_spec == RaggedTensorSpec((None, None), np.int64)
        actual = list(ds)
    assert {type(batch) for batch in actual} == {Ragged}
    assert lists(actual) == expected
    assert all(ds.element_spec.is_compatible_with(batch) for batch in actual)


def test_other_leaves_stack():
    ds = pairs().batch(2)
    assert ds.element_spec == {"r": RaggedTensorSpec((None, None), np.int64), "n": TensorSpec((None,), np.int64)}
    actual = list(ds)
    assert lists(batch["r"] for batch in actual) == BATCHES
    assert lists(batch["n"] for batch in actual) == [[0, 1], [2, 3], [4]]
    ds = Dataset.zip(rows(), Dataset.range(5).map(lambda x: np.zeros(x))).batch(2)
    with pytest.raises(errors.StackError, match="do not stack"):
        list(ds)


def test_drop_remainder_and_batches_of_batches():
    ds = rows().batch(2, drop_remainder=True)
    assert ds.element_spec == RaggedTensorSpec((2, None), np.int64)
    assert lists(ds) == BATCHES[:2]
    assert lists(rows().batch(2).batch(2)) == [BATCHES[:2], BATCHES[2:]]


def test_rows_are_arrays():
    ds = rows()
    assert ds.element_spec == RaggedRowSpec((None,), np.int64)
    assert {type(row) for row in ds} == {np.ndarray}
    assert all(ds.element_spec.is_compatible_with(row) for row in ds)
    assert ds.element_spec.is_compatible_with(TensorSpec((3,), np.int64))
    # Results of a function are arrays and no rows of a ragged array, so they do not stack.
    with pytest.raises(errors.StackError, match="do not stack"):
        list(ds.map(lambda x: x).batch(2))


@pytest.mark.parametrize("sizes", [3, [2, 0, 1], [0, 3, 1], [0, 9]])
@pytest.mark.parametrize("build", [rows, pairs])
@pytest.mark.parametrize("grouped", ["batch", "ragged_batch"])
def test_ragged_batches_of_other_sizes(build, sizes, grouped):
    ds = getattr(build(), grouped)(2).rebatch(sizes)
    expected = [[int(n) for n in batch] for batch in Dataset.range(5).batch(2).rebatch(sizes)]
    actual = [batch["r"] if build is pairs else batch for batch in ds]
    assert {type(batch) for batch in actual} == {Ragged}
    assert lists(actual) == [[ROWS[n] for n in batch] for batch in expected]
    if build is pairs:
        assert lists(batch["n"] for batch in ds) == expected


def test_saved_rows_of_ragged(tmp_path):
    rows().save(tmp_path / "saved")
    assert lists(Dataset.load(tmp_path / "saved").batch(2)) == BATCHES
    for _ in range(2):
        assert lists(rows().cache(tmp_path / "kept").batch(2)) == BATCHES


def test_positions():
    ds = rows().shuffle(3, seed=1, reshuffle_each_iteration=False).batch(2)
    whole = lists(ds)
    it = iter(ds)
    next(it)
    again = iter(ds)
    again.load_state_dict(it.state_dict())
    assert lists(again) == whole[1:]


def test_distributed():
    steps = list(mirrored(2).distribute_dataset(rows().batch(4)))
    assert [lists(step.values) for step in steps] == [[ROWS[:2], ROWS[2:4]], [ROWS[4:], []]]


@pytest.mark.cluster
def test_on_a_cluster(on_cluster):
    actual = [on_cluster.local_results(step) for step in on_cluster.distribute_dataset(pairs().batch(4))]
    assert [lists(part["r"] for part in step) for step in actual] == [[ROWS[:2], ROWS[2:4]], [ROWS[4:], []]]
    same_elements([part["n"] for part in actual[0]], [np.array([0, 1]), np.array([2, 3])], "the other leaf")


def test_functions_are_not_called_for_the_specs_of_other_batches():
    calls = []

    def function(x):
        calls.append(x)
        return x

    Dataset.range(3).map(function, vectorized=False).shuffle(2).batch(2)
    assert calls == []
