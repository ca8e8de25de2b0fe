"""`reduce`: what NumPy gives for all replicas' rows together, in a tree of fixed shape."""

from __future__ import annotations

import collections
import itertools
import math
import operator
from dataclasses import dataclass
from typing import Any

import dask
import numpy as np
import optree
import pandas as pd
import pytest
from conftest import messages_sent, mirrored, of_kind
from distributed import Event
from hypothesis import given, settings
from hypothesis import strategies as st

import daskdist
from daskdist import PerReplica, Ragged, Reduction, errors
from daskdist.strategy.calls.call_messages import MakeCall, PassOn
from daskdist.strategy.calls.local_backend import LocalBackend
from daskdist.strategy.group import Replica, ReplicaGroup
from daskdist.strategy.reduce.pairwise import reduce_rows
from daskdist.strategy.reduce.tree import FoldTree, groups_of
from daskdist.strategy.replica.contract import internals_of

NUMPY = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max, "PROD": np.prod}
DTYPES = ["bool", "int8", "uint8", "int32", "int64", "uint64", "float16", "float32", "float64", "complex64"]


def arrays(*values, dtype=None):
    return PerReplica([np.array(value, dtype) for value in values])


def together(op, values, axis):
    """Reduce by NumPy the rows of all replicas together, or all values if the rows are kept."""
    axes = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    axes = tuple(value % values[0].ndim for value in axes)
    with np.errstate(all="ignore"):
        if 0 in axes:
            return NUMPY[op](np.concatenate(values), axis=axes)
        return NUMPY[op](np.stack(values), axis=(0, *(ax + 1 for ax in axes)))


@st.composite
def cases(draw):
    """Draw an operation, an axis or several, and the values of one to five replicas.

    Numbers of rows may differ between replicas if the axis allows it.
    """
    op = draw(st.sampled_from(sorted(NUMPY)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    inner = draw(st.sampled_from([(), (2,), (3, 2)]))
    ndim = 1 + len(inner)
    several = st.lists(st.integers(0, ndim - 1), min_size=1, max_size=ndim, unique=True)
    axes = draw(st.one_of(st.none(), st.integers(-ndim, ndim - 1), several.map(tuple)))
    if isinstance(axes, tuple) and draw(st.booleans()):
        axes = tuple(ax - ndim for ax in axes)
    along = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    num_replicas = draw(st.integers(1, 5))
    if 0 in {value % ndim for value in along}:
        rows = draw(st.lists(st.integers(0, 4), min_size=num_replicas, max_size=num_replicas))
    else:
        rows = [draw(st.integers(0, 4))] * num_replicas
    # Numbers that neither round nor overflow.
    numbers = st.integers(0 if dtype.kind in "bu" else -1, 1) if op == "PROD" else st.integers(0, 9)
    values = []
    for num_rows in rows:
        shape = (num_rows, *inner)
        flat = draw(st.lists(numbers, min_size=math.prod(shape), max_size=math.prod(shape)))
        values.append(np.array(flat, np.int64).reshape(shape).astype(dtype))
    return op, axes, values


@settings(max_examples=100, deadline=None)
@given(cases())
@pytest.mark.filterwarnings("ignore:Mean of empty slice:RuntimeWarning")
def test_the_result_equals_numpys_for_all_rows(case):
    op, axis, values = case
    try:
        expected = together(op, values, axis)
    except ValueError:
        with pytest.raises(errors.ArgumentError, match=rf"no replica has a row.*{op} of no rows"):
            mirrored(len(values)).reduce(op, PerReplica(values), axis=axis)
        return
    actual = mirrored(len(values)).reduce(op, PerReplica(values), axis=axis)
    np.testing.assert_array_equal(actual, expected)
    assert actual.dtype == expected.dtype
    assert isinstance(actual, np.ndarray) == isinstance(expected, np.ndarray)
    if isinstance(axis, tuple):
        np.testing.assert_array_equal(mirrored(len(values)).reduce(op, PerReplica(values), axis=list(axis)), expected)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_functions_go_along_rows_too(case):
    _, axis, values = case
    if values[0].dtype.kind == "b" or (axis is not None and not sum(map(np.size, values))):
        return
    strategy, value = mirrored(len(values)), PerReplica(values)
    expected = together("SUM", [part.astype(np.complex128) for part in values], axis)
    wide = PerReplica([item.astype(np.complex128) for item in values])
    np.testing.assert_array_equal(strategy.reduce(operator.add, wide, axis=axis), expected)
    np.testing.assert_array_equal(strategy.reduce(np.maximum, value, axis=axis), strategy.reduce("MAX", value, axis))
    np.testing.assert_array_equal(strategy.reduce(np.add, value, axis=axis), strategy.reduce("SUM", value, axis))


def id_of(op):
    return op if isinstance(op, str) else getattr(op, "__name__", "variance")


NAN = np.nan
TABLE = [
    (arrays([3, 1], [2]), "MIN", 0, 1),
    (arrays([3, 1], [2]), "MAX", 0, 3),
    (arrays([3, 2], [2]), "PROD", 0, 12),
    (arrays([3, 1], [2, 5]), "MAX", None, [3, 5]),
    (arrays([3, 1], [2, 5]), "MIN", None, [2, 1]),
    (arrays([3, 1], [2, 5]), "PROD", None, [6, 5]),
    (arrays([True, False], [True]), "MIN", 0, False),
    (arrays([True, False], [False]), "MAX", 0, True),
    (arrays([True, False], [False, False]), "MAX", None, [True, False]),
    (arrays([1.0, NAN], [2.0]), "MAX", 0, NAN),
    (arrays([1.0, 5.0], [2.0, NAN]), "MIN", None, [1.0, NAN]),
    (arrays([1.0, 5.0], [2.0, NAN]), "SUM", None, [3.0, NAN]),
    (arrays([], [2.0]), "MIN", 0, 2.0),
    (arrays([], [2.0]), "PROD", 0, 2.0),
    (arrays([], []), "PROD", 0, 1.0),
    (arrays([], []), "SUM", 0, 0.0),
    (PerReplica([np.zeros((0, 0)), np.ones((2, 3))]), "MAX", 0, [1.0, 1.0, 1.0]),
    (PerReplica([np.ones((2, 3)), np.zeros((0, 0))]), "SUM", 0, [2.0, 2.0, 2.0]),
    (PerReplica([np.zeros((0, 0)), np.zeros((0, 3))]), "SUM", 0, [0.0, 0.0, 0.0]),
    (PerReplica([np.zeros((0, 0)), np.ones((2, 3))]), "MEAN", 0, [1.0, 1.0, 1.0]),
    (PerReplica([np.zeros((2, 0)), np.zeros((1, 0))]), "MAX", 0, np.zeros(0)),
    (arrays(["2020-01-02", "2020-01-05"], ["2020-01-03"], dtype="M8[D]"), "MAX", 0, np.datetime64("2020-01-05")),
    (arrays([60000.0], [60000.0], dtype=np.float16), "MEAN", 0, 60000.0),
    (arrays(100, 100, dtype=np.int8), "SUM", None, 200),
    (arrays(1.0, 3.0), np.logaddexp, None, np.logaddexp(1.0, 3.0)),
    (arrays([1.0, 2.0], [3.0]), np.logaddexp, 0, np.logaddexp.reduce([1.0, 2.0, 3.0])),
    (arrays([], []), np.logaddexp, 0, -np.inf),
    (arrays([], [], dtype=np.uint8), np.bitwise_and, 0, 255),
    (arrays([], [], dtype=bool), np.logical_and, 0, True),
    (arrays([12, 18], [27]), np.gcd, 0, 3),
    (arrays([12, 18], [27]), math.gcd, 0, 3),
    (arrays([5, 6], [3]), np.bitwise_and, (0,), 0),
    (arrays([3, 1], [2]), max, 0, 3),
    (arrays([3, 1], []), lambda a, b: a + b, 0, 4),
    (arrays([3, 1], [2]), lambda a, b: a, 0, 3),
    (arrays([3, 1], [2]), lambda a, b: b, 0, 2),
    (arrays([[1, 2], [3, 4]], [[5, 6]]), lambda a, b: a + b, (1, 0), 21),
    (PerReplica([np.zeros((3, 0)), np.zeros((2, 0))]), lambda a, b: a + b, 0, np.zeros(0)),
    (PerReplica([np.zeros((0, 3)), np.zeros((0, 3))]), lambda a, b: a + b, 1, np.zeros(0)),
]


@pytest.mark.parametrize(("value", "op", "axis", "expected"), TABLE)
def test_every_operation(strategy, value, op, axis, expected):
    actual = np.asarray(strategy.reduce(op, value, axis=axis))
    np.testing.assert_array_equal(actual, expected)
    assert actual.shape == np.shape(expected)


def test_a_function_need_not_be_commutative(strategy):
    rng = np.random.default_rng(0)
    matrices = rng.integers(-2, 3, (7, 2, 2))
    pieces = PerReplica([matrices[:4], matrices[4:]])
    expected = np.linalg.multi_dot(list(matrices))
    np.testing.assert_array_equal(strategy.reduce(lambda a, b: a @ b, pieces, axis=0), expected)
    both = PerReplica([matrices[0], matrices[1]])
    np.testing.assert_array_equal(strategy.reduce(np.dot, both, axis=None), matrices[0] @ matrices[1])


def test_neighbours_only_are_combined_where_order_may_count():
    workers = ("a", "b", "a", "b")
    values = PerReplica([Made(np.array(letter), 0, worker) for letter, worker in zip("wxyz", workers, strict=True)])
    assert groups_of(workers, in_order=True) == (("a", (0,)), ("b", (1,)), ("a", (2,)), ("b", (3,)))
    assert groups_of(workers, in_order=True, at_once=3) == (("a", (0, 1, 2)), ("b", (3,)))
    assert groups_of(workers, in_order=False, at_once=3) == (("a", (0, 2)), ("b", (1, 3)))
    (made,) = FoldTree(Noting(), np.char.add, None, [values], split_every=2)(group_on(workers))
    assert made.result.leaves[0] == "wxyz"


def test_values_that_are_not_arrays_are_combined_by_a_function(strategy):
    sets = strategy.reduce(operator.or_, PerReplica([{1, 2}, {2, 3}]), axis=None)
    assert strategy.local_results(sets) == ({1, 2, 3},)
    counts = PerReplica([collections.Counter("ab"), collections.Counter("b")])
    assert strategy.local_results(strategy.reduce(operator.add, counts, axis=None))[0]["b"] == 2


def joined(a, b):
    return pd.concat([a, b], ignore_index=True)


@pytest.mark.parametrize(
    ("op", "values", "expected"),
    [
        (operator.add, ["a", "bc"], "abc"),
        # NumPy's dtype for bytes would drop the zero at the end.
        (operator.add, [b"a\0", b"b"], b"a\0b"),
        (joined, [pd.DataFrame({"a": ["x", "y"]}), pd.DataFrame({"a": ["z"]})], pd.DataFrame({"a": ["x", "y", "z"]})),
    ],
    ids=["str", "bytes", "tables of different lengths"],
)
def test_a_function_gets_values_that_are_not_arrays_unchanged(strategy, op, values, expected):
    (actual,) = strategy.local_results(strategy.reduce(op, PerReplica(values), axis=None))
    assert type(actual) is type(expected)
    assert actual.equals(expected) if isinstance(expected, pd.DataFrame) else actual == expected


def test_rows_of_different_lengths(strategy):
    pieces = PerReplica([Ragged(np.array([1, 2, 3]), [0, 2, 3]), Ragged(np.array([4]), [0, 1])])
    (both,) = strategy.local_results(strategy.reduce(lambda a, b: Ragged.concat([a, b]), pieces, axis=None))
    assert [row.tolist() for row in both] == [[1, 2], [3], [4]]
    for op, axis in [("SUM", 0), ("MAX", None), (np.logaddexp, 0), (max, 0)]:
        with pytest.raises(errors.ArgumentError, match=r"rows of different lengths; reduce its flat values.*rows\.val"):
            np.asarray(strategy.reduce(op, pieces, axis=axis))
    assert int(strategy.reduce("SUM", strategy.run(lambda rows: rows.values, args=(pieces,)), axis=0)) == 10


@pytest.mark.parametrize("op", [np.logical_and, np.logaddexp, np.hypot], ids=id_of)
def test_one_replica_gives_the_dtype_of_several(op):
    value = np.array([3, -4, 0])
    actual = mirrored(1).reduce(op, value, axis=None)
    expected = op.reduce(value[None], axis=0)
    np.testing.assert_array_equal(actual, expected)
    assert actual.dtype == expected.dtype == mirrored(2).reduce(op, PerReplica([value] * 2), axis=None).dtype


# --- weights ---


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.integers(-9, 9), min_size=1, max_size=5),
    dtype=st.sampled_from(["int8", "int64", "float16", "float32", "float64", "complex64"]),
    weighing=st.sampled_from([int, float, np.int32]),
    data=st.data(),
)
def test_weights_are_those_of_numpys_average(values, dtype, weighing, data):
    weights = [weighing(data.draw(st.integers(0, 5))) for _ in values]
    replicas = [np.array([value, -value]).astype(dtype) for value in values]
    strategy = mirrored(len(values))
    total = strategy.reduce("SUM", PerReplica(replicas), axis=None, weights=PerReplica(weights))
    wide = np.stack(replicas).astype(np.result_type(dtype, np.float64))
    np.testing.assert_array_equal(total, np.tensordot(np.array(weights, float), wide, 1))
    mean = strategy.reduce("MEAN", PerReplica(replicas), axis=None, weights=PerReplica(weights))
    assert mean.dtype == strategy.reduce("MEAN", PerReplica(replicas), axis=None).dtype
    if not sum(weights):
        assert np.isnan(mean).all()
        return
    average = np.average(wide, axis=0, weights=weights).astype(mean.dtype)
    np.testing.assert_allclose(mean, average, rtol=2 * np.finfo(mean.dtype).eps)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    dtype=st.sampled_from(["bool", "uint64", "int8", "int64", "float16", "float32", "float64", "complex64"]),
    of_weights=st.sampled_from(["bool", "int32", "float32", "float64"]),
    seed=st.integers(0, 99),
)
def test_weights_of_rows_are_those_of_numpys_average(lengths, dtype, of_weights, seed):
    random = np.random.default_rng(seed)
    rows = [random.integers(0, 9, (length, 2)).astype(dtype) for length in lengths]
    weights = [random.integers(0, 4, length).astype(of_weights) for length in lengths]
    strategy, given_weights = mirrored(len(rows)), PerReplica(weights)
    total = strategy.reduce("SUM", PerReplica(rows), axis=0, weights=given_weights)
    mean = strategy.reduce("MEAN", PerReplica(rows), axis=0, weights=given_weights)
    wide = np.concatenate(rows).astype(np.result_type(dtype, np.float64))
    joined = np.concatenate(weights).astype(float)
    np.testing.assert_array_equal(total, joined @ wide)
    assert mean.dtype == strategy.reduce("MEAN", PerReplica(rows), axis=0).dtype
    if not joined.sum():
        assert np.isnan(mean).all()
        return
    average = np.average(wide, axis=0, weights=joined).astype(mean.dtype)
    np.testing.assert_allclose(mean, average, rtol=2 * np.finfo(mean.dtype).eps)


def test_rows_without_weight_are_left_out_whatever_they_are(strategy):
    values, weights = arrays([np.nan, 1.0], [4.0, np.inf]), arrays([0, 1], [0.5, 0])
    assert float(strategy.reduce("MEAN", values, axis=0, weights=weights)) == 2
    assert float(strategy.reduce("SUM", values, axis=0, weights=weights)) == 3


def test_means_weighted_by_rows_are_the_mean_of_all_rows(strategy):
    rows = np.random.default_rng(0).random(997)
    batches = strategy.distribute_dataset(daskdist.Dataset.from_tensor_slices(rows).batch(100))

    def evaluate(batch):
        return {"mean": batch.mean() if len(batch) else np.nan, "num_rows": len(batch)}

    sums = []
    for batch in batches:
        actual = strategy.run(evaluate, args=(batch,))
        num_rows = strategy.reduce("SUM", actual["num_rows"], axis=None)
        sums.append((strategy.reduce("MEAN", actual["mean"], axis=None, weights=actual["num_rows"]), num_rows))
    assert sum(int(num_rows) for _, num_rows in sums) == 997
    total = sum(float(mean) * int(num_rows) for mean, num_rows in sums)
    np.testing.assert_allclose(total / 997, rows.mean(), rtol=1e-14)


@pytest.mark.cluster
def test_weighted_reductions_give_the_same_bits_everywhere(on_cluster):
    values = PerReplica(list(np.random.default_rng(0).random((2, 50), dtype=np.float32)))
    for op, weights in itertools.product(["SUM", "MEAN"], [(3, 7), (0.1, 0.7), (0, 2)]):
        here, there = (
            np.asarray(replicas.reduce(op, values, axis=None, weights=PerReplica(weights)))
            for replicas in (mirrored(2), on_cluster)
        )
        assert here.tobytes() == there.tobytes()
        assert here.dtype == there.dtype


def test_a_value_without_weight_is_left_out_whatever_it_is(strategy):
    for nothing in (np.nan, np.inf):
        actual = strategy.reduce("MEAN", arrays(nothing, 3.0), axis=None, weights=arrays(0, 2))
        assert float(actual) == 3
        assert float(strategy.reduce("SUM", arrays(nothing, 3.0), axis=None, weights=arrays(0, 2))) == 6
    nest = {"loss": arrays(1.0, 4.0), "hits": arrays(2, 5)}
    actual = strategy.reduce("MEAN", nest, axis=None, weights=arrays(1, 2))
    assert {name: float(value) for name, value in actual.items()} == {"loss": 3, "hits": 4}


def test_one_replica_is_weighted_by_a_plain_number():
    assert mirrored(1).reduce("SUM", 3, axis=None, weights=4) == 12
    assert mirrored(1).reduce("MEAN", 3, axis=None, weights=4) == 3


@pytest.mark.parametrize(
    ("op", "axis", "weights", "message"),
    [
        ("MAX", None, arrays(1, 2), "MAX takes no weights; MEAN and SUM do"),
        (np.logaddexp, None, arrays(1, 2), "logaddexp takes no weights"),
        ("MEAN", 1, arrays([1], [2]), "axis is 1; give axis=None or 0"),
        ("MEAN", 0, arrays(1, 2), r"weights of the 1 rows of a replica are array\([12]\); give an array"),
        ("MEAN", 0, arrays([1], [1, 2]), r"weights of the 1 rows of a replica are .*1, 2.*; give an array"),
        ("SUM", 0, arrays([1], [-2]), "that is at least 0"),
        ("MEAN", None, [1, 2], r"weights is \[1, 2\]; give a PerReplica with a number for each replica"),
        ("MEAN", None, 2, "weights is 2; give a PerReplica"),
        ("MEAN", None, arrays(1, -2), "a weight is .*-2.*; give each replica a number that is at least 0"),
        ("MEAN", None, arrays(1, np.nan), "a weight is .*nan"),
        ("MEAN", None, arrays([1], [2]), r"a weight is array\(\[1\]\)"),
        ("MEAN", None, PerReplica(["a", "b"]), "a weight is 'a'"),
    ],
)
def test_weights_that_are_refused(strategy, op, axis, weights, message):
    with pytest.raises(errors.ArgumentError, match=message):
        np.asarray(strategy.reduce(op, arrays([1.0], [2.0]), axis=axis, weights=weights))


def test_a_mean_over_uneven_replicas_is_reported_once(strategy, caplog):
    def told(num_rows, reduce):
        caplog.clear()
        replicas = strategy if "MultiWorker" in type(strategy).__name__ else mirrored(2)
        internals_of(replicas).has_warned_of_uneven = False
        for batch in replicas.distribute_dataset(daskdist.Dataset.range(num_rows).batch(4)):
            reduce(replicas, replicas.run(lambda batch: batch.sum(), args=(batch,)), batch)
        return [record.getMessage() for record in caplog.records if "counts replicas, not rows" in record.getMessage()]

    def mean(replicas, value, batch):
        return replicas.reduce("MEAN", value, axis=None)

    # Steps of 2 and 2 rows; then one of 2 and 1, and one of 1 and 0.
    assert told(8, mean) == []
    assert len(told(7, mean)) == len(told(9, mean)) == 1
    # The warning also comes for results of a later call that uses the first call's results.
    assert len(told(7, lambda replicas, value, _: mean(replicas, replicas.run(abs, args=(value,)), None))) == 1
    assert told(7, lambda replicas, value, _: replicas.reduce("SUM", value, axis=None)) == []
    assert told(7, lambda replicas, _, batch: replicas.reduce("MEAN", batch, axis=0)) == []

    def weighted(replicas, value, batch):
        return replicas.reduce("MEAN", value, axis=None, weights=replicas.run(len, args=(batch,)))

    assert told(7, weighted) == []


# --- records ---


def _moments(x, axis):
    return (np.sum(x, axis=axis), np.sum(x * x, axis=axis), x.shape[0])


def _add_moments(a, b):
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _variance(partial):
    total, squares, count = partial
    return squares / max(count, 1) - (total / max(count, 1)) ** 2


VARIANCE = Reduction(_moments, _add_moments, _variance, identity=(0, 0, 0))


def test_a_custom_reduction_of_rows(strategy):
    rows = np.arange(12.0).reshape(6, 2)
    for pieces in ([rows[:4], rows[4:]], [rows[:0], rows], [rows, rows[:0]]):
        actual = strategy.reduce(VARIANCE, PerReplica(pieces), axis=0)
        np.testing.assert_allclose(actual, rows.var(axis=0))


def test_a_custom_reduction_of_no_rows(strategy):
    nothing = PerReplica([np.zeros((0, 2))] * 2)
    np.testing.assert_array_equal(strategy.reduce(VARIANCE, nothing, axis=0), [0.0, 0.0])
    norm = Reduction(lambda x, axis: np.sum(x * x, axis=axis), np.add, np.sqrt, identity=0)
    assert float(strategy.reduce(norm, arrays([], []), axis=0)) == 0
    without = Reduction(lambda x, axis: np.sum(x, axis=axis), np.add)
    with pytest.raises(errors.ArgumentError, match=r"no replica has a row along axis 0.*identity"):
        np.asarray(strategy.reduce(without, arrays([], []), axis=0))


def test_an_identity_of_another_structure():
    broken = Reduction(_moments, _add_moments, _variance, identity=0)
    with pytest.raises(
        errors.ArgumentError, match=r"identity of the reduction is 0, and its chunk returns.*value, value, value"
    ):
        mirrored(2).reduce(broken, arrays([], []), axis=0)


def test_a_custom_reduction_over_replicas_only(strategy):
    norm = Reduction(lambda x, axis: x * x if axis is None else np.sum(x * x, axis=axis), np.add, np.sqrt)
    assert float(strategy.reduce(norm, arrays(3.0, 4.0), axis=None)) == 5


@pytest.mark.parametrize("part", ["chunk", "combine", "finalize"])
def test_a_reduction_with_parts_that_are_not_functions(part):
    parts = {"chunk": np.sum, "combine": np.add, "finalize": np.sqrt, part: 3}
    with pytest.raises(errors.ArgumentError, match=rf"Reduction: {part} is 3; give a function"):
        Reduction(**parts)


# --- bits ---


def test_rounding_errors_do_not_grow_with_the_number_of_rows():
    rng = np.random.default_rng(0)
    rows = rng.random((1_000_000, 4), dtype=np.float32)
    exact = np.array([math.fsum(column) for column in rows.T])
    strategy = mirrored(2)
    eps = np.finfo(np.float32).eps
    for pieces in ([rows[:500_000], rows[500_000:]], [rows[:7], rows[7:]]):
        actual = strategy.reduce("SUM", PerReplica(pieces), axis=0)
        assert np.max(np.abs(actual - exact) / exact) < 8 * eps
        mean = strategy.reduce("MEAN", PerReplica(pieces), axis=0)
        assert np.max(np.abs(mean * 1e6 - exact) / exact) < 8 * eps
    # Check that the test can fail: NumPy's own sum, which adds row by row, has a far larger error.
    assert np.max(np.abs(rows.sum(axis=0) - exact) / exact) > 40 * eps


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((1000, 300, 2), (0, 1)), ((1000, 300, 2), 1), ((3000, 3, 50), (0, 2)), ((5, 20_000, 3), (-2,)), ((90_000, 1), 0)],
)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_the_error_along_several_axes(shape, axis, dtype):
    rows = np.random.default_rng(0).random(shape, dtype=np.float32).astype(dtype)
    exact = rows.astype(np.complex128).sum(axis=axis)
    for laid in (rows, np.asfortranarray(rows), np.repeat(rows, 2, axis=-1)[..., ::2], rows.swapaxes(0, 1).copy("K")):
        each = laid if laid.shape == shape else laid.swapaxes(0, 1)
        actual = reduce_rows(np.add, each, axis)
        assert actual.dtype == dtype
        assert actual.shape == exact.shape
        assert np.max(np.abs(actual - exact) / np.abs(exact)) < 12 * np.finfo(np.float32).eps


def test_where_an_array_lies_makes_no_difference_to_the_bits():
    rows = np.random.default_rng(0).random((5000, 3), dtype=np.float32)
    gaps = np.repeat(np.repeat(rows, 2, axis=0), 2, axis=1)[::2, ::2]
    assert not gaps.flags.c_contiguous
    for axis in (0, 1, (0, 1)):
        assert reduce_rows(np.add, gaps, axis).tobytes() == reduce_rows(np.add, rows, axis).tobytes()
        few = reduce_rows(np.add, gaps[:50], axis)
        assert few.tobytes() == reduce_rows(np.add, rows[:50].copy(), axis).tobytes()


def test_logaddexp_of_many_rows():
    rows = np.random.default_rng(0).random((20_000, 2), dtype=np.float32)
    exact = np.logaddexp.reduce(rows.astype(np.float64), axis=0)
    np.testing.assert_allclose(mirrored(1).reduce(np.logaddexp, rows, axis=0), exact, rtol=1e-6)


@pytest.mark.parametrize("op", ["SUM", "MEAN", "PROD", np.logaddexp, VARIANCE], ids=id_of)
def test_the_same_values_give_the_same_bits(strategy, op):
    rng = np.random.default_rng(1)
    pieces = PerReplica([rng.normal(1, 0.01, (n, 3)).astype(np.float32) for n in (700, 431)])
    actual = {np.asarray(strategy.reduce(op, pieces, axis=0)).tobytes() for _ in range(4)}
    made_there = strategy.run(np.copy, args=(pieces,))
    actual.add(np.asarray(strategy.reduce(op, made_there, axis=0)).tobytes())
    assert actual == {np.asarray(mirrored(2).reduce(op, pieces, axis=0)).tobytes()}


def askew(array):
    """Return an equal array whose memory is not aligned, as arrays from messages may be."""
    return np.frombuffer(b"." + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)


def test_where_an_array_begins_makes_no_difference_to_the_bits(strategy):
    arrays_there = [np.random.default_rng(seed).random((200, 100), dtype=np.float32) for seed in range(12)]
    # Check that the test can fail: NumPy's own sum depends on where the array begins.
    assert any(askew(value).sum().tobytes() != value.sum().tobytes() for value in arrays_there)
    totals = Reduction(lambda x, axis: np.sum(x, axis=axis), np.add)
    for op in ("SUM", "MEAN", totals):
        for item in arrays_there:
            expected = mirrored(2).reduce(op, PerReplica([item, item[:1]]), axis=(0, 1))
            actual = strategy.reduce(op, PerReplica([askew(item), item[:1]]), axis=(0, 1))
            assert np.asarray(actual).tobytes() == expected.tobytes()


# --- the tree ---


@dataclass
class Made:
    """A result, the depth of its tree in calls that need results of other workers, and its worker."""

    result: Any
    depth: int
    worker: str


def group_on(workers):
    return ReplicaGroup("", tuple([Replica(worker, "CPU:0") for worker in workers]))


class Noting(LocalBackend):
    """A caller that makes each call at once, and records transfers."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_transfers = 0

    def call(self, function, args, *, worker=None, name):
        self.num_calls += 1
        needed = [leaf for leaf in optree.tree_leaves(args) if isinstance(leaf, Made)]
        elsewhere = [part for part in needed if part.worker != worker]
        self.num_transfers += len(elsewhere)
        depth = max((part.depth for part in needed), default=0) + bool(elsewhere)
        there = optree.tree_map(lambda leaf: leaf.result if isinstance(leaf, Made) else leaf, args)
        return [Made(function(*there), depth, worker)]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(2, 9),
    st.integers(1, 3),
    st.sampled_from([None, 0]),
    st.sampled_from(["SUM", "MEAN", "MAX"]),
)
def test_depth_and_transfers(num_workers, split_every, per_worker, axis, op):
    caller = Noting()
    workers = tuple(f"w{k // per_worker}" for k in range(num_workers * per_worker))
    values = PerReplica([Made(np.full(3, k), 0, worker) for k, worker in enumerate(workers)])
    op = daskdist.ReduceOp[op]
    (made,) = FoldTree(caller, op, axis, [values], split_every=split_every)(group_on(workers))
    expected = NUMPY[op.name](np.arange(len(workers))) * (3 if axis == 0 and op.name == "SUM" else 1)
    np.testing.assert_array_equal(made.result.leaves[0], expected)
    depth = 0
    while split_every**depth < num_workers:
        depth += 1
    assert made.depth == depth
    assert caller.num_transfers == num_workers - 1
    assert made.worker == "w0"
    # There is a call on each worker that has several values or rows to combine, and one for each inner node of a tree.
    inner = math.ceil((num_workers - 1) / (split_every - 1)) if num_workers > 1 else 0
    own = num_workers if axis == 0 or per_worker > 1 else (1 if num_workers == 1 else 0)
    assert caller.num_calls <= own + inner + depth


@pytest.mark.cluster
@pytest.mark.parametrize(("axis", "split_every"), [(None, 2), (0, 2), (None, 8), (0, 8)])
def test_depth_and_bytes_on_a_cluster(start_cluster, axis, split_every):
    client = start_cluster(3, 1)
    with (
        daskdist.MultiWorkerMirroredStrategy(client) as strategy,
        dask.config.set({"daskdist.split-every": split_every}),
    ):

        def gradient(x):
            return np.full((1, 50_000) if axis == 0 else 50_000, float(x))

        values = strategy.run(gradient, args=(PerReplica([1, 2, 3]),))
        strategy.local_results(strategy.run(np.shape, args=(values,)))
        with messages_sent(strategy) as messages:
            result = strategy.reduce("SUM", values, axis=axis)
        made_by = [where for where, *_ in of_kind(messages, MakeCall)]
        first, second, third = strategy.workers
        # Each of the other two workers sends one partial result, to one worker.
        assert [(where, message.target) for where, message in of_kind(messages, PassOn)] == [
            (second, first),
            (third, first),
        ]
        if axis == 0:
            # Each worker has a call for its own rows; one or two further calls combine the partial results.
            assert made_by[:3] == [first, second, third]
            assert made_by[3:] == [first] * {2: 2, 8: 1}[split_every]
        else:
            assert made_by == {2: [first, third, first], 8: [first]}[split_every]
        assert np.asarray(result)[0] == 6


@pytest.mark.cluster
def test_a_nest_is_one_tree(on_cluster):
    nest = {"a": arrays([1, 2], [3]), "b": [arrays([1.0], [2.0]), arrays([5], [6])]}
    with messages_sent(on_cluster) as messages:
        actual = on_cluster.reduce("SUM", nest, axis=0)
    # There is one call for each worker's own values, and one that combines both.
    assert len(of_kind(messages, MakeCall)) == 3
    assert (int(actual["a"]), float(actual["b"][0]), int(actual["b"][1])) == (6, 3, 11)


@pytest.mark.cluster
def test_reduce_does_not_wait(on_cluster, client):
    name = "until everything is asked for"

    def once_it_is_time(x, waits):
        if waits:
            Event(name).wait(timeout=30)
        return x

    on_cluster.run(once_it_is_time, args=(arrays(1, 2), False))
    values = on_cluster.run(once_it_is_time, args=(arrays(1, 2), True))
    total = on_cluster.reduce("SUM", on_cluster.extended.reduce_to("MAX", values, None), axis=None) + 1
    assert total.ref is not None
    Event(name, client=client).set()
    assert int(total) == 5


# --- plain values ---


@pytest.mark.parametrize("op", ["MEAN", "MIN", "MAX", np.maximum])
@pytest.mark.parametrize("axis", [None, 0])
def test_means_and_maxima_of_a_plain_value_are_the_value(strategy, op, axis):
    plain = np.array([1, 2])
    assert strategy.reduce(op, plain, axis=axis) is plain
    mixed = strategy.reduce(op, {"a": 7, "b": arrays([1], [1])}, axis=0)
    assert (mixed["a"], float(mixed["b"])) == (7, 1)


@pytest.mark.parametrize(
    ("op", "name"), [("SUM", "SUM"), ("PROD", "PROD"), (np.logaddexp, "logaddexp"), (VARIANCE, "the reduction")]
)
def test_sums_of_a_plain_value_are_refused(op, name):
    with pytest.raises(errors.ArgumentError, match=rf"{name} over 2 replicas of a value that is not per replica"):
        mirrored(2).reduce(op, np.ones(2), axis=0)


@pytest.mark.parametrize(
    ("op", "expected"), [("SUM", 6), ("PROD", 6), ("MIN", 1), ("MAX", 3), ("MEAN", 2.0), (max, 3), (np.gcd, 1)]
)
def test_one_replica_reduces_a_plain_value(op, expected):
    assert mirrored(1).reduce(op, np.array([1, 2, 3]), axis=0) == expected
    np.testing.assert_array_equal(mirrored(1).reduce(op, np.array([1, 2, 3]), axis=None), [1, 2, 3])


# --- bad input ---


@pytest.mark.parametrize(
    ("op", "says"),
    [
        ("MEDIAN", r"'MEDIAN' is not a reduction; give SUM, MEAN, MIN, MAX, PROD.*function.*Reduction"),
        (None, "None is not a reduction"),
        (3, "3 is not a reduction"),
        (int, "is not a reduction"),
        (np.sin, r"np\.sin returns 1 of 1 values; give a function that returns one of two"),
        (np.divmod, r"np\.divmod returns 2 of 2 values"),
    ],
)
def test_invalid_reductions_are_refused(op, says):
    with pytest.raises(errors.ArgumentError, match=says):
        mirrored(2).reduce(op, arrays(1, 2), axis=None)


@pytest.mark.parametrize(
    ("axis", "says"),
    [
        ("rows", "axis is 'rows'; give a whole number"),
        (True, "axis is True; give a whole number"),
        (0.0, r"axis is 0\.0; give a whole number"),
        ([0, "x"], r"axis\[1\] is 'x'"),
        ((0, 0), r"axis \(0, 0\) names an axis twice"),
        ((0, -2), r"axis \(0, -2\) of a value of shape \(2, 1\) names an axis twice"),
        (2, r"axis 2 of a value of shape \(2, 1\)"),
    ],
)
def test_invalid_axes_are_refused(axis, says):
    with pytest.raises(errors.ArgumentError, match=says):
        mirrored(2).reduce("SUM", PerReplica([np.ones((2, 1))] * 2), axis=axis)


@pytest.mark.parametrize("axis", [(), [], None])
def test_empty_axes_mean_no_axis(axis):
    np.testing.assert_array_equal(mirrored(2).reduce("SUM", arrays([1, 2], [3, 4]), axis=axis), [4, 6])


@pytest.mark.parametrize("op", ["SUM", "MAX", max, VARIANCE], ids=id_of)
def test_a_scalar_has_no_axis(strategy, op):
    with pytest.raises(errors.ArgumentError, match=r"axis 0 of a value of shape \(\); use axis=None"):
        np.asarray(strategy.reduce(op, PerReplica([np.float64(1), np.float64(2)]), axis=0))


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "PROD", np.logaddexp, operator.add], ids=id_of)
def test_shapes_that_differ(strategy, op):
    with pytest.raises(errors.ArgumentError, match=r"differ over the replicas: \(3,\), \(1,\)\. Give axis=0"):
        np.asarray(strategy.reduce(op, arrays([1, 2, 3], [1]), axis=None))


def test_a_last_batch_whose_inner_shape_only_some_know(strategy):
    unknown = daskdist.TensorSpec((None,), np.float64)
    rows = [np.arange(3.0) + k for k in range(5)]
    ds = daskdist.Dataset.from_generator(lambda: iter(rows), output_signature=unknown).batch(4)
    *_, last = strategy.distribute_dataset(ds)
    assert [piece.shape for piece in strategy.local_results(last)] == [(1, 3), (0, 0)]
    np.testing.assert_array_equal(strategy.reduce("SUM", last, axis=0), rows[4])
    np.testing.assert_array_equal(strategy.gather(last, axis=0), rows[4:])
    np.testing.assert_array_equal(strategy.gather(PerReplica(last.values[::-1]), axis=0), rows[4:])
    nothing = strategy.gather(PerReplica([np.zeros((0, 0)), np.zeros((0, 3))]), axis=0)
    assert np.shape(np.asarray(nothing)) == (0, 3)
    with pytest.raises(errors.ArgumentError, match=r"\(2, 3\), replica 1 gives \(0, 2\); they may differ along axis 0"):
        np.asarray(strategy.gather(PerReplica([np.ones((2, 3)), np.zeros((0, 2))]), axis=0))


def test_zero_rows_of_another_shape():
    with pytest.raises(errors.ArgumentError, match=r"after the reduction along axis 0.*\(3,\), \(2,\)"):
        mirrored(2).reduce("SUM", PerReplica([np.ones((4, 3)), np.ones((0, 2))]), axis=0)


@pytest.mark.parametrize("op", ["MIN", "MAX", max, np.minimum, np.gcd], ids=id_of)
def test_the_maximum_of_no_rows_is_an_error(strategy, op):
    if op is np.gcd:
        assert int(strategy.reduce(op, arrays([], [], dtype=int), axis=0)) == 0
        return
    with pytest.raises(
        errors.ArgumentError, match=r"no replica has a row along axis 0, and \w+ of no rows has no value"
    ):
        np.asarray(strategy.reduce(op, arrays([], []), axis=0))


@pytest.mark.parametrize(("op", "says"), [("SUM", "only numbers add up"), ("MAX", "only numbers have an order")])
def test_text(op, says):
    with pytest.raises(errors.ArgumentError, match=says):
        mirrored(2).reduce(op, arrays(["a"], ["b"]), axis=0)


def test_values_that_make_no_array_are_refused():
    with pytest.raises(
        errors.ArgumentError, match=r"reduce: a value is a list, which does not convert to an array: .*inhomogeneous"
    ):
        mirrored(2).reduce("SUM", PerReplica([[1, [2]], [3, 4]]), axis=0)
    with pytest.raises(
        errors.ArgumentError, match=r"gather: a value is a list, which does not convert to an array: .*inhomogeneous"
    ):
        mirrored(2).gather(PerReplica([[1, [2]], [3, 4]]), axis=0)


def test_a_dict_of_each_replica():
    values = PerReplica([{"a": 1, "b": 2}] * 2)
    for call in (lambda: mirrored(2).reduce("SUM", values, axis=None), lambda: mirrored(2).gather(values, axis=0)):
        with pytest.raises(
            errors.ArgumentError, match=r"a dict of PerReplica values, \{'a': PerReplica\(\.\.\.\), 'b'"
        ):
            call()


def test_masked_values():
    masked = PerReplica([np.ma.masked_array([1, 2], [False, True])] * 2)
    with pytest.raises(errors.ArgumentError, match=r"masked array.*filled\(0\)"):
        mirrored(2).reduce("SUM", masked, axis=0)
    filled = mirrored(2).run(lambda x: x.filled(0), args=(masked,))
    assert mirrored(2).reduce("SUM", filled, axis=0) == 2


def test_a_function_that_raises(strategy):
    def broken(a, b):
        raise KeyError("not today")

    with pytest.raises(KeyError, match="not today") as raised:
        np.asarray(strategy.reduce(broken, arrays(1, 2), axis=None))
    assert any("raised by broken" in note for note in raised.value.__notes__)
