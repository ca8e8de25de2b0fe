"""Functions in a sandbox: typical ones are vectorised, and on plain values they give what Python gives."""

from __future__ import annotations

import functools
import logging

import numpy as np
import pytest

from daskdist import Dataset
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.structure import Structure
from daskdist.core.vectorize import sandbox
from daskdist.core.vectorize.apply import traced
from daskdist.core.vectorize.rules import RULES
from daskdist.core.vectorize.sandbox import Sandbox
from daskdist.core.vectorize.tracer import NotVectorisable, Trace

SCALE = 3
TABLE = (1.0, 2.0, 4.0)


def _helper(x, by=2, *, offset=0.0):
    return x * by + offset


def _closed_over():
    mean, spread = 0.5, 2.0

    def normalise(x):
        return (x - mean) / spread

    return normalise


def _with_loop(x):
    total = x
    for weight in TABLE:
        if weight == 2.0:
            continue
        total = total + x * weight
    return total


def _with_branches(x, scale=None):
    if scale is None:
        scale = SCALE
    if not scale or scale > 10:
        return x
    return x * scale if 0 < scale <= 3 else -x


def _with_local_function(x):
    def inner(y, *, by=2.0):
        return y * by + x

    return inner(x) + inner(x, by=1.0)


def _with_generator(x):
    return sum(x * number for number in range(3))


def _with_containers(x):
    made = {"one": x, "two": x + 1}
    made["three"] = [made["one"], *[made["two"]]]
    first, *rest = made["three"]
    return {"first": first, "rest": tuple(rest)}


TYPICAL = {
    "arithmetic": lambda x: x * 2 + 1,
    "a dict is returned": lambda x: {"x": x, "twice": x * 2},
    "several are returned": lambda x: (x, -x),
    "a helper": lambda x: _helper(x),
    "keywords": lambda x: _helper(x, by=3, offset=1.0),
    "a method with keywords": lambda x: x.clip(min=-1.0, max=1.0) + np.sum([1, 2], axis=0),
    "starred arguments": lambda x: _helper(*(x, 3), offset=1.0),
    "a closure": _closed_over(),
    "a partial": functools.partial(_helper, by=4),
    "a comprehension": lambda x: np.stack([x * number for number in range(3)]),
    "nested comprehensions": lambda x: np.stack([x * a + b for a in range(2) for b in range(3) if a != b]),
    "a dict comprehension": lambda x: {f"x{number}": x * number for number in range(2)},
    "a generator": _with_generator,
    "a loop": _with_loop,
    "branches": _with_branches,
    "a local function": _with_local_function,
    "containers": _with_containers,
    "a comparison": lambda x: x > 0.5,
    "NumPy": lambda x: np.where(np.abs(x) > 1.0, np.sqrt(np.abs(x)), x),
    "a slice of a table": lambda x: x * TABLE[1:][0] + len(TABLE[:2]),
}
ON_VECTORS = {
    "a slice": lambda x: x[1:],
    "slices": lambda x: x[::2] * x[0],
    "a reduction": lambda x: x / x.sum(),
    "rows": lambda x: (x - x.mean(axis=0)) / 2,
}
ON_DICTS = {
    "items": lambda d: d["n"] * 2 + d["v"][0],
    "a dict in and out": lambda d: {**d, "s": d["v"].sum(), "n": d["n"] + 1},
    "a comprehension": lambda d: {name: value * 2 for name, value in d.items()},
}


def _same_at_once(dataset, function):
    note = dataset.map(function).explain()
    assert "vectorised" in note, note
    assert "row by row" not in note, note
    expected = [function(element) for element in dataset]
    for actual, row in zip(dataset.map(function), expected, strict=True):
        row = row if isinstance(row, dict) else {"": row}
        actual = actual if isinstance(actual, dict) else {"": actual}
        for name, value in row.items():
            np.testing.assert_array_equal(actual[name], value)


@pytest.mark.parametrize("name", TYPICAL)
def test_typical_functions_of_numbers_are_vectorised(name):
    _same_at_once(Dataset.from_tensor_slices(np.linspace(-2, 2, 40)), TYPICAL[name])


@pytest.mark.parametrize("name", ON_VECTORS)
def test_typical_functions_of_vectors_are_vectorised(name):
    _same_at_once(
        Dataset.from_tensor_slices(np.linspace(-2, 2, 160, dtype=np.float32).reshape(40, 4)), ON_VECTORS[name]
    )


@pytest.mark.parametrize("name", ON_DICTS)
def test_typical_functions_of_dicts_are_vectorised(name):
    rows = {"n": np.arange(40), "v": np.linspace(-2, 2, 120).reshape(40, 3)}
    _same_at_once(Dataset.from_tensor_slices(rows), ON_DICTS[name])


class _Base:
    def scaled(self, x):
        return x * 2


class _Derived(_Base):
    def __call__(self, x):
        return super().scaled(x) + 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: {"text": f"{x}"}, "makes text"),
        (lambda x: {"text": f"{x!r:>9}"}, "makes text"),
        (lambda x: {"text": f"{x:.2f}"}, "makes text"),
        (lambda x: x if x else -x, "truth"),
        (lambda x: x if x > 0 else -x, "truth"),
        (lambda x: not x, "truth"),
        (lambda x: 0 < x < 1, "truth"),
        (_Derived(), "makes a super"),
    ],
)
def test_what_depends_on_a_value_is_refused(function, reason):
    leaves, structure = Structure.of(np.linspace(-2, 2, 40))
    with pytest.raises(NotVectorisable, match=reason):
        traced(UserFunction(function, "map"), structure, leaves, 40)


# --- plain values ---


def _shadowed_cell(n):
    x = 10
    both = [x + 1 for x in range(n)]
    return both, x, (lambda: x)()


def _shadowed_free():
    x = 5

    def inner(n):
        before = x
        return [x * 2 for x in range(n)], before, x

    return inner


def _texts(n):
    return f"{n}", f"{n!r:>5}", f"{n:{n}d}|{'a'!s}|{(1, 2)}|{[n]!a}", f"{'é'!a}"


def _truths(n):
    kinds = (len, None, [], [0], "", n, 0.0, _helper)
    return (
        [not entry for entry in kinds],
        [bool(part and n) for part in kinds if part is not _helper],
        [1 if item else 2 for item in kinds],
        [value is None for value in kinds],
        [1 if kind is not None else 2 for kind in kinds],
        n in (1, 3) and 1 not in (n,),
        1 < n < 5 <= n + 3,
        n < 2 or n == 3 or n != 9,
    )


def _calls(n):
    def many(a, /, b=2, *rest, c=3, **more):
        return a, b, rest, c, sorted(more.items())

    return (
        many(n),
        many(n, 1),
        many(n, b=1, c=n),
        many(*(n, 1, 2, 3), d=4),
        many(1, *[2, 3], c=4, d=n),
        many(*range(2), 5, c=1),
        [many(item)[0] for item in (n, 2)],
        sorted([3, n, 1], reverse=True),
        ["a", "b"],
        (lambda x, y=n, *, z=1: x + y + z)(1, z=n),
    )


def _captured_argument(n):
    def add(x):
        nonlocal n
        n = n + x
        return n

    return add(1), add(2), n


def _nested_comprehensions(n):
    rows = [[a * b + n for b in range(a) if b != 1] for a in range(n)]
    return rows, {a: {b + 1 for b in item} for a, item in enumerate(rows)}, sum(value for row in rows for value in row)


def _imports(n):
    import math
    from operator import add

    return add(math.floor(2.5), n)


def _yields():
    def pairs(n):
        for number in range(n):
            yield number
            yield number * 2

    return lambda n: [list(pairs(n)), sum(pairs(n))]


PLAIN = [
    _shadowed_cell,
    _shadowed_free(),
    _texts,
    _truths,
    _calls,
    _captured_argument,
    _nested_comprehensions,
    _imports,
    _yields(),
]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("function", PLAIN, ids=lambda function: function.__name__)
def test_a_sandbox_gives_what_python_gives(function, number):
    actual = Sandbox(Trace(8, RULES, None)).call_with(function, number)
    assert repr(actual) == repr(function(number))


# --- unknown calls ---


def test_the_python_that_runs_is_known():
    assert sandbox.unknown_version() is None


def test_unknown_bytecode_goes_row_by_row_and_says_so_once(monkeypatch, caplog):
    sandbox._warn.cache_clear()
    monkeypatch.setattr(sandbox, "VERSIONS", ((3, 2), (3, 3)))
    dataset = Dataset.from_tensor_slices(np.arange(40.0))
    with caplog.at_level(logging.WARNING, "daskdist"):
        for number in (1, 2):
            assert list(dataset.map(lambda x, number=number: x * number)) == [x * number for x in range(40)]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "called row by row" in record.message
    assert "3.2 and 3.3" in record.message
    assert "row by row: functions are looked into under CPython 3.2" in dataset.map(lambda x: x * 2).explain()
