"""Functions of one element that are called for many at once: with the same bits, or else row by row."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import itertools
import math
import os
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import hypothesis
import numpy as np
import pytest
from conftest import every_pair
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from vectorize_checks import MEAN, block, columns, is_same, rng, scalars, seen

from daskdist import Dataset
from daskdist.core.block import Block, Bundle
from daskdist.core.dataset_base import node_of
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.ragged import Ragged
from daskdist.core.structure import Structure
from daskdist.core.vectorize import apply, proof, rules
from daskdist.errors import UserFunctionError
from daskdist.ops.map import Map
from daskdist.testing import same_elements

Pair = collections.namedtuple("Pair", ["left", "right"])
TABLE = [1.0, 2.0]
MANY = list(range(20_000))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    apply._SAME.clear()
    # Vectorise small blocks too, as most blocks here are small.
    monkeypatch.setattr(apply, "_FEWEST_ROWS", 8)


def vectors(dtype=np.float64, shape=(3,), num_rows=300):
    return block((rng.standard_normal((num_rows, *shape)) * 50).astype(dtype))


def dicts(num_rows=300):
    return block({"n": np.arange(num_rows) - 7, "v": rng.standard_normal((num_rows, 3)).astype(np.float32)})


def tuples(num_rows=300):
    return block((np.arange(num_rows), rng.standard_normal(num_rows)))


def reason_of(given):
    """Return the reason that a function is called row by row, after it was given a block."""
    if list(apply._SAME.values()) == [False]:
        return apply._DIFFERED
    (reason,) = given.vectorised._refused.values()
    return reason


def is_vectorised(function, rows):
    """Check that a second block of other rows is computed at once, with the same results as row by row."""
    given = columns(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given(rows.slice(0, 40))
        assert not given.vectorised._refused
        assert list(apply._SAME.values()) in ([True], [])
    with np.errstate(all="ignore"):
        expected = given.by_row(rows)
        run = given.vectorised.run(rows)
        is_same(Block(run.structure, run.leaves, rows.label), expected)
        is_same(given(rows), expected)


def is_row_by_row(function, rows, reason):
    given = columns(function)
    made = given(rows)
    assert reason in reason_of(given)
    is_same(made, given.by_row(rows))


ON_NUMBERS = [
    lambda x: x,
    lambda x: x * 3 + 1,
    lambda x: 1 - x / 7,
    lambda x: (x, -x, abs(x), +x),
    lambda x: [x, x * 2],
    lambda x: {"a": x, "list": [x, x + 1, 2.5], "lists": [[x, 1], [2, x]]},
    lambda x: Pair(x, {"twice": x * 2}),
    lambda x: (x, 7, 0.5, True, 2**40, [1, 2], "text", b"bytes\0"),
    lambda x: divmod(x, 3),
    lambda x: x // 4 % 5,
    lambda x: np.where(x > 3, x, 9),
    lambda x: np.where(x > 3, 1, 0),
    lambda x: np.where((x > 3) & (x < 30) | ~(x != 5), x, 0.5),
    lambda x: np.clip(x, -2, 5),
    lambda x: x.clip(min=0),
    lambda x: x.astype(np.float32),
    lambda x: (x > 2).astype("int8"),
    lambda x: np.stack([x, x * 2, 1.0]),
    lambda x: np.expand_dims(x, 0) * MEAN,
    lambda x: x * MEAN - TABLE[0],
    lambda x: np.stack([x, x])[:, None] * MEAN,
    lambda x: (x.shape, x.ndim, x.size)[1:],
    lambda x: np.float64(2) * x + np.int8(1),
    lambda x: np.round(x / 3, 2),
    lambda x: np.isin(x, [1, 2, 3]),
    lambda x: np.digitize(x, [0, 1.5, 9]),
    lambda x: np.isclose(x, 3),
    lambda x: (x.sum(), np.mean(x), x.max(), np.argmax(x), np.any(x), np.std(x)),
    lambda x: np.power(x, 2),
    lambda x: (np.zeros_like(x), np.ones_like(x, dtype=np.float32), np.full_like(x, 3)),
    lambda x: x[None] + x[()] + x[...],
    np.negative,
    functools.partial(np.add, 3),
]
ON_FLOATS = [
    lambda x: np.exp(x) + np.sin(x) * np.tanh(x),
    lambda x: np.log1p(abs(x)),
    lambda x: np.sqrt(x),
    lambda x: x / 0,
    lambda x: np.maximum(x, 0),
    lambda x: np.nan_to_num(np.log(x), nan=3.0),
    lambda x: np.arctan2(x, 2.0),
    lambda x: np.modf(x),
    lambda x: np.float32(0.1) * x + 0.1,
]
ON_VECTORS = [
    lambda x: x[0] + x[-1],
    lambda x: x[::2],
    lambda x: x[[2, 0]],
    lambda x: x[np.array([True, False, True])],
    lambda x: (x - MEAN) / 2,
    lambda x: x**2,
    lambda x: x**0.5,
    lambda x: x - x.mean(),
    lambda x: (x - x.min()) / (x.max() - x.min()),
    lambda x: np.sum(x, axis=0, keepdims=True),
    lambda x: np.add.reduce(x),
    lambda x: np.std(x, ddof=1),
    lambda x: sum(x),
    lambda x: [value * 2 for value in x],
    lambda x: x[:, None] * x,
    lambda x: (x[:, None] * x).T.reshape(-1),
    lambda x: (x[:, None] * x)[1, ...],
    lambda x: np.concatenate([x, MEAN]),
    lambda x: np.sort(x),
    lambda x: np.cumsum(x),
    lambda x: len(x) * x.size + x.shape[0] * x,
    lambda x: x.reshape(3, 1).squeeze().ravel().flatten().copy(),
    lambda x: {"z": x} | {"y": x.any()},
    lambda x: np.count_nonzero(x > 0),
]


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "float64", "float32"])
@pytest.mark.parametrize("function", ON_NUMBERS)
def test_numbers(function, dtype):
    is_vectorised(function, scalars(dtype))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("function", ON_FLOATS)
def test_floats(function, dtype):
    is_vectorised(function, scalars(dtype))
    is_vectorised_afresh(function, vectors(dtype))


def is_vectorised_afresh(function, rows):
    apply._SAME.clear()
    is_vectorised(function, rows)


@pytest.mark.parametrize("dtype", ["int64", "int16", "float64", "float32"])
@pytest.mark.parametrize("function", ON_VECTORS)
def test_vectors(function, dtype):
    is_vectorised(function, vectors(dtype))


@pytest.mark.parametrize(
    ("name", "axis", "shape", "dtype"),
    every_pair(
        ["sum", "prod", "mean", "min", "max", "std", "var", "any", "all"],
        [None, 0, 1, -1, (0, 1)],
        [(5, 7), (1, 40), (40, 1), (17, 33)],
        ["float32", "float64"],
    ),
)
def test_reductions_of_matrices(name, axis, shape, dtype):
    is_vectorised_afresh(lambda x: getattr(x, name)(axis=axis), vectors(dtype, shape))
    is_vectorised_afresh(lambda x: getattr(np, name)(x.T * 2, axis), vectors(dtype, shape))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 127, 128, 129, 1000])
def test_long_sums(length):
    for dtype in ("float32", "float64"):
        is_vectorised_afresh(lambda x: (x.sum(), x.mean(), x.std(), np.prod(x), x.cumsum()), vectors(dtype, (length,)))


def test_columns_in_another_memory_order():
    rows = block(np.asfortranarray(rng.standard_normal((300, 20))))
    is_vectorised(lambda x: (x.sum(), x * 2, np.sqrt(abs(x)).mean()), rows)


@pytest.mark.parametrize(
    "function",
    [
        lambda d: d["n"] * d["v"],
        lambda d: {"z": d["n"], "w": d["v"] * 2},
        lambda d: {key: value * 2 for key, value in d.items()},
        lambda d: {**d, "sum": d["v"].sum() + d["n"]},
    ],
)
def test_dicts(function):
    is_vectorised(function, dicts())


def _set_item(d):
    d["z"] = d["v"] - MEAN
    return d


def _built(d):
    made = {}
    for key in d:
        made[key] = d[key] * MEAN[0]
    return made


@pytest.mark.parametrize("function", [_set_item, _built])
def test_a_dict_may_be_changed_that_is_the_elements_or_its_own(function):
    is_vectorised(function, dicts())


class Scaled(NamedTuple):
    value: object
    factor: object

    def product(self):
        seen.append(1)
        return self.value * self.factor

    @property
    def total(self):
        return self.value + self.factor


def test_methods_of_elements_are_looked_into():
    rows = block(Scaled(np.arange(40), rng.standard_normal(40)))
    is_vectorised(lambda row: {"total": row.total, "value": row.value * 2}, rows)
    seen.clear()
    is_row_by_row(lambda row: row.product(), rows, "it changes a list that all rows share")
    assert len(seen) == 80
    is_row_by_row(lambda row: row[0], rows, "it uses a Scaled, which is not plain data")


def test_tuples_are_arguments():
    is_vectorised(lambda n, x: (x * n, n), tuples())
    is_vectorised_afresh(lambda *args: args[::-1], tuples())


def test_functions_of_times_are_vectorised():
    rows = block(np.datetime64("2024-01-01") + np.arange(100))
    is_vectorised(lambda t: (t - np.datetime64("2024-01-05"), t + np.timedelta64(1, "D"), t.astype("M8[M]")), rows)


def _is_whole(x):
    return x * 2 if isinstance(x, np.integer) else x / 2


@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_isinstance_takes_the_branch_of_an_element(dtype):
    is_vectorised(_is_whole, scalars(dtype))
    is_vectorised_afresh(lambda x: x if isinstance(x, np.ndarray) else -x, vectors(dtype))


def test_attributes_that_elements_lack():
    is_vectorised(lambda x: x.cpu() if hasattr(x, "cpu") else getattr(x, "nothing", x) * 2, scalars())


def test_numbers_change_in_place_by_name_only():
    def function(x):
        y = x
        y += 1
        y *= 2
        return x, y

    is_vectorised(function, scalars())


@hypothesis.given(
    st.sampled_from(["int8", "uint16", "int32", "int64", "float32", "float64", "bool"]),
    st.sampled_from(["int8", "int64", "float32", "float64"]),
    hnp.array_shapes(min_dims=0, max_dims=2, max_side=3),
    st.sampled_from([np.add, np.subtract, np.multiply, np.true_divide, np.maximum, np.less, np.equal, np.hypot]),
    st.one_of(st.integers(-9, 9), st.floats(-9, 9), st.booleans()),
    st.randoms(use_true_random=False),
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_arithmetic_of_two_arrays_and_a_number(one, other, shape, ufunc, number, random):
    rng = np.random.default_rng(random.randrange(2**32))
    leaves = [rng.integers(0, 9, (50, *shape)).astype(one), rng.standard_normal((50, 2, *shape)).astype(other)]
    given = columns(lambda a, b: (ufunc(a, b), ufunc(number, b), ufunc(b.sum(axis=0), a)))
    rows = block(tuple(leaves))
    apply._SAME.clear()
    with np.errstate(all="ignore"):
        try:
            expected = given.by_row(rows)
        except UserFunctionError:
            with pytest.raises(UserFunctionError):
                given(rows)
            return
        made = given(rows)
        is_same(made, expected)
        again = given(rows)
    is_same(again, expected)
    if one != "bool" and ufunc is not np.hypot:
        assert not given.vectorised._refused


# --- functions that are called row by row, and the reasons ---


def _swallowed(x):
    try:
        return float(x) * 2
    except Exception:
        return x * 2


def _written(x):
    y = x * 2
    y[0] = 1
    return y


def _in_place(x):
    y = x * 2
    y += 1
    return y


def _out(x):
    y = x * 2
    np.add(y, 1, out=y)
    return y


@pytest.mark.parametrize(
    ("function", "rows", "reason"),
    [
        (lambda x: x if x > 3 else -x, scalars(), "it asks for the truth of a value"),
        (lambda x: max(x, 0.0), scalars(), "it asks for the truth of a value"),
        (lambda x: x and x * 2, scalars(), "it asks for the truth of a value"),
        (lambda x: np.float64(1 if 3.0 in x else 2), vectors(), "it asks for the truth of a value"),
        (lambda x: float(x) * 2, scalars(), "it makes a Python number of a value"),
        (lambda x: int(x), scalars(), "it makes a Python number of a value"),
        (lambda x: round(x), scalars(np.float32), "it makes a Python number of a value"),
        (lambda x: f"{x}", scalars(), "it makes text of a value"),
        (lambda x: str(x), scalars(), "it makes text of a value"),
        (lambda x: len(repr(x)), scalars(), "it makes text of a value"),
        (lambda x: len({x, x}), scalars(), "it asks for the hash of a value"),
        (lambda x: x.item() * 2, scalars(), "it uses .item"),
        (lambda x: x.tolist(), vectors(), "it uses .tolist"),
        (lambda x: MEAN[abs(x) % 3], scalars(np.int64), "it looks up a place that depends on the values"),
        (lambda x: TABLE[x % 2], scalars(np.int64), "it looks up a place that depends on the values"),
        (lambda x: x[np.argmax(x)], vectors(), "it looks up a place that depends on the values"),
        (lambda x: x[: np.argmax(x)].sum(), vectors(), "it looks up a place that depends on the values"),
        (lambda x: (x[:, None] * x)[0, [1, 2]], vectors(), "it looks up places along several axes at once"),
        (lambda x: np.int8(x), scalars(), "it makes a int8 of a value; .astype has a rule"),
        (lambda x: np.array(x), vectors(), "it calls np.array or the like"),
        (lambda x: np.array([x, x]), scalars(), "it calls np.array or the like"),
        (_written, vectors(), "it writes to an array"),
        (_in_place, vectors(), "it changes an array in place"),
        (_out, vectors(), "it changes an array in place"),
        (lambda x: x @ MEAN, vectors(), "it calls matmul, for which there is no rule"),
        (lambda x: np.dot(x, x), vectors(), "it calls dot, for which there is no rule"),
        (lambda x: np.linalg.norm(x), vectors(), "it calls norm, which is not known to be pure"),
        (lambda x: np.add.accumulate(x), vectors(), "it calls add.accumulate, for which there is no rule"),
        (lambda x: np.where(x > 0)[0].sum(), vectors(), "it asks for the places where something holds"),
        (lambda x: x**2, scalars(), "np.power(x, number) is not"),
        (lambda x: np.power(x, x), scalars(np.float32), "np.power(x, number) is not"),
        (lambda x: x.sum(dtype=np.float64), vectors(np.float32), "it calls sum with dtype"),
        (lambda x: np.mean(x), vectors(np.float16), "half-precision"),
        (lambda x: np.sin(x), vectors(np.float16), "half-precision"),
        (lambda x: np.log10(x), scalars(np.int8), "half-precision"),
        (lambda x: x[x > 0].sum(), vectors(), "it looks up a place that depends on the values"),
        (lambda x: (x * 1j).real, scalars(), "it makes complex128 of a value"),
        (lambda x: math.sin(x), scalars(), "it makes a Python number of a value"),
        (_swallowed, scalars(), "it handles exceptions"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_row_by_row(function, rows, reason):
    is_row_by_row(function, rows, reason)


_count = 0


def _counting(x):
    global _count
    _count += 1
    return x * 2


def _noting(x):
    seen.append(1)
    return x * 2


def _drawing(x):
    return x + 0 * np.random.random()


def _helped(x):
    return _noting(x)


class Scaler:
    def __init__(self):
        self.factor = 2.0
        self.calls = []

    def __call__(self, x):
        return x * self.factor

    def noting(self, x):
        self.calls.append(1)
        return self(x)

    def setting(self, x):
        self.last = 1
        return self(x)

    def indirect(self, x):
        return self.noting(x)


class Loud:
    def __init__(self):
        self.calls = []

    def __getitem__(self, place):
        return self.calls.append(place) or 2.0


LOUD = Loud()


def _cell():
    number = 0

    def function(x):
        nonlocal number
        number += 1
        return x * 2

    return function


class Rows(dict):
    def __getitem__(self, key):
        seen.append(key)
        return dict.__getitem__(self, key)


class Items(list):
    def __iadd__(self, items):
        seen.append(items)
        return list.__iadd__(self, items)


ROWS = Rows(a=2.0)
ITEMS = Items([2.0])
COUNTER = itertools.count()
SHARED = np.zeros(3)
LOG = []
OPTIONS = {"b": 2}
SET = {2}
STRUCTURE = importlib
FUNCTIONS = {"double": lambda x: x * 2}


def _aliased(x):
    shared = SHARED
    shared += 1
    return x * 2


def _aliased_list(x):
    log = LOG if x is not None else []
    log += [1]
    return x * 2


def _default(x, log=[]):  # noqa: B006
    log += [1]
    return x * 2


def _maybe_shared(x):
    table = FUNCTIONS or {}
    table["last"] = 1
    return x * 2


def _tried(x):
    try:
        return np.log(x)
    except FloatingPointError:
        return 0.0


def _calls_tried(x):
    return _tried(x)


def _quiet(x):
    with np.errstate(all="ignore"):
        return np.log(x)


def _setting_global(x):
    global _count
    _count = 1
    return x * 2


def _importing(x):
    from numpy.random import rand

    return x + rand() * 0


def _stateful(x):
    seen.append(1)
    return x


STATEFUL_UFUNC = np.frompyfunc(_stateful, 1, 1)
STATEFUL_VECTORIZED = np.vectorize(_stateful, otypes=[float])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_counting, "it sets a global variable"),
        (_setting_global, "it sets a global variable"),
        (_cell(), "it sets the variable number"),
        (_noting, "it changes a list that all rows share"),
        (_helped, "it changes a list that all rows share"),
        (lambda x: seen.append(1) or x, "it changes a list that all rows share"),
        (lambda x: print(end="") or x, "it calls print, which is not known to be pure"),
        (_drawing, "it calls RandomState.random, which is not known to be pure"),
        (_importing, "it imports numpy.random"),
        (lambda x: x + 0 * rng.random(), "Generator.random, which is not known to be pure"),
        (lambda x: x + next(COUNTER), "it calls next, which is not known to be pure"),
        (lambda x: x + sum(zip(COUNTER)), "it uses a count, which is not plain data"),
        (Scaler().noting, "it changes a list that all rows share"),
        (Scaler().indirect, "it changes a list that all rows share"),
        (Scaler().setting, "it sets an attribute"),
        (lambda x: x * LOUD[0], "it uses a Loud, which is not plain data"),
        (lambda x: x * ROWS["a"], "it uses a Rows, which is not plain data"),
        (lambda x: x * len(ITEMS), "it uses a Items, which is not plain data"),
        (lambda x: x * len(MANY), "it uses MANY, which has too many items to look at"),
        (lambda x: warnings.warn("no", stacklevel=1) or x, "it calls warn, which is not known to be pure"),
        (lambda x: np.add(SHARED, 1, SHARED) is None or x, "raises ValueError: output array is read-only"),
        (lambda x: np.add(SHARED, 1, out=SHARED) is None or x, "raises ValueError: output array is read-only"),
        (lambda x: np.add.at(SHARED, 0, 1) or x, "it uses .at, which is not known to be pure"),
        (lambda x: SHARED.sum(0, None, SHARED[0:]) is None or x, "raises ValueError"),
        (lambda x: SHARED.sort() or x, "raises ValueError: sort array is read-only"),
        (_aliased, "raises ValueError: output array is read-only"),
        (_aliased_list, "it changes a list that all rows share"),
        (_default, "it changes a list that all rows share"),
        (_maybe_shared, "it changes a dict that all rows share"),
        (_tried, "it handles exceptions, or has a with statement"),
        (_calls_tried, "it handles exceptions, or has a with statement"),
        (_quiet, "it handles exceptions, or has a with statement"),
        (
            lambda x: STATEFUL_UFUNC(SHARED) is None or x,
            "it calls _stateful (vectorized), which is not known to be pure",
        ),
        (lambda x: STATEFUL_UFUNC(x), "it calls _stateful (vectorized), which is not known to be pure"),
        (lambda x: STATEFUL_VECTORIZED(x), "it uses a set, which is not plain data"),
        (lambda x: sorted([1, 2], key=_stateful) and x, "it changes a list that all rows share"),
        (lambda x: x + time.time() * 0, "it calls time, which is not known to be pure"),
        (lambda x: x + len(os.environ) * 0, "it uses a _Environ, which is not plain data"),
        (lambda x: x + id(x) * 0, "it calls id, which is not known to be pure"),
        (functools.lru_cache(lambda x: x * 2), "which is not known to be pure"),
        (lambda x: (x, f"{_doubled}"), "it makes text of a function"),
        (lambda x: x * (2 in SET), "it uses a set, which is not plain data"),
        (lambda x: _doubled.__globals__ and x, "it uses .__globals__, which is not known to be pure"),
        (lambda x: (x > 0) is (x > 1), "it asks whether a value is another"),
        (lambda x: STRUCTURE and x, "it uses a module, which is not plain data"),
    ],
)
def test_what_is_not_known_to_be_pure(function, reason):
    given = columns(function)
    with contextlib.suppress(Exception):
        given(scalars(num_rows=10))
    assert reason in reason_of(given)


def test_what_is_not_known_to_be_pure_is_called_for_each_row():
    calls = []
    counted = itertools.count()
    _default.__defaults__[0].clear()
    for function in (_default, STATEFUL_VECTORIZED, lambda x: calls.append(next(counted)) or x):
        list(Dataset.range(30).map(function))
    # One more call is for the synthetic element that gives the spec.
    assert len(_default.__defaults__[0]) in (30, 31)
    assert calls == list(range(len(calls)))
    assert len(calls) in (30, 31)


def _dispatched(x):
    return FUNCTIONS["double"](x) + functools.reduce(lambda a, b: a + b, map(FUNCTIONS["double"], [x, 1, 2]))


def _own_list(x):
    made = []
    for place in range(3):
        made.append(x * place)
    made += [x]
    made.reverse()
    return tuple(made), {key: value * 2 for key, value in zip("ab", made, strict=False)}


def _with_attribute(x):
    return x * getattr(_with_attribute, "factor", 1) + _with_attribute.terms[-1]


_with_attribute.factor = 3
_with_attribute.terms = [4]


def _own_cell(x):
    total = x * 0

    def add(y):
        nonlocal total
        total = total + y

    add(x)
    add(2)
    return total


def _keywords(x, /, a, *rest, b=3, **more):
    return x * a + b + sum(rest) + sum(more.values())


@pytest.mark.parametrize(
    "function",
    [
        _dispatched,
        _own_list,
        _own_cell,
        _with_attribute,
        lambda x: x * (x.dtype in ("f4", np.float64)) + (x.dtype == np.float64) + np.dtype(np.float32).itemsize,
        lambda x: (
            x.astype(np.float32) * np.array([1, 2], np.float32) + np.zeros(2, dtype=np.int8) + np.iinfo(np.int8).max
        ),
        lambda x: {np.float64: x, np.float32: -x}[type(x)] * (np.float64 in (int, np.float64)),
        lambda x: functools.reduce(lambda a, b: a + b, filter(None, [x.ndim, 2, 3])) * x,
        lambda x: x * 2 if isinstance(x, np.float64) and not isinstance(x, (np.float32, Pair, dict)) else x,
        lambda x: np.float32(np.float64(2) * x) + np.float64(3.5),
        lambda x: x * np.finfo(np.float64).bits + np.can_cast(np.float32, np.float64),
        lambda x: x * (np.result_type(np.float32, np.int64) == np.float64) + np.full(2, 3, np.uint8),
        lambda x: (x, f"{np.float32}"),
        lambda x: _keywords(x, 2, 3, b=4, c=5) + _keywords(*[x, 1], **OPTIONS),
        lambda x: sum(y * 2 for y in (x, x + 1)) if isinstance(x, np.generic) and x.dtype.kind == "f" else x,
        lambda x: [y for y in [x, -x] if y is not None][1],
        lambda x: Pair(x, x * 2).left + Pair(right=1, left=x).right * x,
        lambda x: np.float32(x) if type(x) is np.float64 else x,
        lambda x: x * np.finfo(x.dtype).eps + np.array([1, 2]).sum() + math.sqrt(2),
        lambda x: {**OPTIONS, "b": f"{2:03d}", "c": -x if not FUNCTIONS else +x}["c"],
    ],
)
def test_python_functions_are_vectorised(function):
    is_vectorised(function, scalars())


def _doubled(x):
    return x * 2


_helper = _doubled


def _tripled(x):
    return x * 3


def _calls_helper(x):
    return _helper(x) * 1


def test_code_that_changes_between_blocks_and_passes(monkeypatch):
    given, rows = columns(_calls_helper), scalars(np.int64)
    ds = Dataset.range(30).map(lambda x: _helper(x))
    for helper, factor in ((_doubled, 2), (_tripled, 3)):
        monkeypatch.setitem(globals(), "_helper", helper)
        is_same(given(rows), given.by_row(rows))
        assert [int(x) for x in ds] == [factor * x for x in range(30)]
    monkeypatch.setitem(globals(), "_helper", _noting)
    for run, number in ((lambda: given(rows), len(rows)), (lambda: list(ds), 30)):
        before = len(seen)
        run()
        assert len(seen) == before + number


def test_modules_that_are_loaded_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    Path(tmp_path, "rows_of_a_module.py").write_text("def scale(x):\n    return x * 2\n")
    module = importlib.import_module("rows_of_a_module")
    ds = Dataset.range(20).map(lambda x: module.scale(x))
    assert [int(x) for x in ds] == [2 * x for x in range(20)]
    calls = []
    Path(tmp_path, "rows_of_a_module.py").write_text("def scale(x):\n    calls.append(1)\n    return x * 30\n")
    importlib.invalidate_caches()
    importlib.reload(module).calls = calls
    assert [int(x) for x in ds] == [30 * x for x in range(20)]
    assert len(calls) >= 20


def test_objects_that_only_hold_numbers():
    is_vectorised(Scaler(), scalars())
    is_vectorised_afresh(functools.partial(lambda a, x: a * x, MEAN), scalars())


def test_what_does_more_than_compute_is_called_once_a_row():
    seen = []
    rows = scalars(num_rows=10)
    columns(lambda x: seen.append(float(x)) or x)(rows)
    assert seen == rows.leaves[0].tolist()


@pytest.mark.parametrize("num_rows", [10, 10_000])
@pytest.mark.parametrize("wrong", [lambda column: column + 1, np.negative])
def test_comparison_finds_what_differs(num_rows, wrong, monkeypatch):
    monkeypatch.setitem(rules._METHODS, "round", lambda trace, args, options: wrong(args[0]._column))
    monkeypatch.setattr(apply, "problem", lambda *args: None)
    rows = block(np.arange(0.0, num_rows) * 0 if wrong is np.negative else np.arange(0.0, num_rows))
    for _ in range(2):
        # The function stays row by row.
        is_row_by_row(_rounded, rows, "results differed on the first block")
    assert Map(node_of(Dataset.from_tensor_slices(rows.leaves[0])), UserFunction(_rounded, "map")).note == (
        "row by row: results differed on the first block"
    )


def _rounded(x):
    return x.round()


def test_proof_finds_what_differs(monkeypatch):
    monkeypatch.setitem(rules._METHODS, "round", lambda trace, args, options: -args[0]._column)
    proof._PROVEN.clear()
    is_row_by_row(lambda x: x.round(), scalars(), "it calls round, which is rounded otherwise for many rows")
    proof._PROVEN.clear()


def test_equal_rows_do_not_confirm_a_function():
    given = columns(lambda x: x * 2)
    for _ in range(2):
        given(block(np.zeros(100)))
        assert not apply._SAME
    given(block(np.arange(100.0)))
    assert list(apply._SAME.values()) == [True]


def test_each_dtype_is_confirmed_separately():
    given = columns(lambda x: x * 2)
    given(scalars(np.int64))
    given(scalars(np.float32))
    assert list(apply._SAME.values()) == [True, True]


def test_what_a_function_refers_to_may_change_between_blocks(monkeypatch):
    given, rows = columns(lambda x: x * OPTIONS["b"]), scalars()
    given(rows)
    monkeypatch.setitem(OPTIONS, "b", 3)
    is_same(given(rows), given.by_row(rows))
    assert list(apply._SAME.values()) == [True]


def test_few_rows_are_computed_one_by_one(monkeypatch):
    monkeypatch.undo()
    given = columns(lambda x: x * 2)
    given(scalars(num_rows=23))
    assert not apply._SAME
    assert isinstance(given(scalars(num_rows=0)), Bundle)
    given(scalars(num_rows=24))
    assert list(apply._SAME.values()) == [True]


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(apply, "_REMEMBERED", 4)
    for number in range(9):
        columns(lambda x: x * 2)(vectors(shape=(number + 1,)))
    assert len(apply._SAME) == 4


@pytest.mark.parametrize(
    "rows",
    [
        block(Ragged.of([np.arange(2.0), np.arange(3.0)] * 4)),
        block(np.array(["a", "b"] * 4, np.dtypes.StringDType())),
        block(np.array([1j, 2j] * 4)),
    ],
)
def test_leaves_without_columns(rows):
    given = columns(lambda x: x + x)
    made, expected = given(rows), given.by_row(rows)
    same_elements(list(made.elements()), list(expected.elements()))
    assert reason_of(given).startswith("its elements")


# --- errors and warnings ---


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("num_rows", [20, 10_000])
def test_an_error_names_the_row(num_rows):
    given = columns(lambda x: 1 / x)
    rows = Block(*reversed(Structure.of(np.arange(num_rows) - 7.0)), label="part")
    with pytest.raises(UserFunctionError, match=r"map: .*raised RuntimeWarning: .*, on row 7 of part"):
        given(rows)
    given = columns(lambda x: 1 / x)
    given(rows.slice(8, num_rows))
    assert list(apply._SAME.values())[-1:] == [True]
    with pytest.raises(UserFunctionError, match="on row 7 of part"):
        given(rows)


def test_warnings_are_those_of_the_rows():
    given = columns(lambda x: np.log(x))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given(block(np.array([1.0, 0.0, 2.0])))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given(block(np.array([1.0, 2.0])))


def test_rows_keep_where_they_came_from():
    rows = scalars(num_rows=100).take(np.arange(99, -1, -1))
    made = columns(lambda x: x * 2)(rows)
    assert made.where(0) == "row 99 of here"
    assert columns(lambda x: x * 2)(rows).where(0) == "row 99 of here"


def test_results_cannot_be_written_to_and_own_their_rows():
    rows = vectors()
    given = columns(lambda x: (x[0], x, 3))
    given(rows)
    first, whole, constant = given(rows).leaves
    assert not any(leaf.flags.writeable for leaf in (first, whole, constant))
    assert first.flags.c_contiguous
    assert constant.flags.c_contiguous
