"""The bytecode interpreter gives the same results as the running Python, and knows the bytecode of typical maps."""

from __future__ import annotations

import functools
import logging
import types

import numpy as np
import pytest

from daskdist import Dataset
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.structure import Structure
from daskdist.core.vectorize import bytecode, instructions
from daskdist.core.vectorize.apply import traced
from daskdist.core.vectorize.interpreter import FunctionInterpreter
from daskdist.core.vectorize.rules import RULES
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
    return sum(x * each for each in range(3))


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
    "a comprehension": lambda x: np.stack([x * each for each in range(3)]),
    "nested comprehensions": lambda x: np.stack([x * a + b for a in range(2) for b in range(3) if a != b]),
    "a dict comprehension": lambda x: {f"x{each}": x * each for each in range(2)},
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
    for found, row in zip(dataset.map(function), expected, strict=True):
        row = row if isinstance(row, dict) else {"": row}
        found = found if isinstance(found, dict) else {"": found}
        for name, value in row.items():
            np.testing.assert_array_equal(found[name], value)


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


# --- the interpreter on plain values ---


def _shadowed_cell(n):
    x = 10
    both = [x + 1 for x in range(n)]
    return both, x, (lambda: x)()


def _cell_in_a_comprehension(n):
    made = [(lambda: each) for each in range(n)]  # noqa: B023 - each sees the last
    return [function() for function in made], n


def _shadowed_free():
    x = 5

    def inner(n):
        before = x
        return [x * 2 for x in range(n)], before, x

    return inner


def _unset_before(n):
    found = [later + 1 for later in range(n)]
    later = 7
    return found, later


def _set_in_one_branch(n):
    if n > 100:
        late = 1
    return late if n > 100 else n


def _never_set(n):
    if n > 100:
        late = 1
    return late


def _loops(n):
    found = []
    for a in range(n):
        if a == 1:
            continue
        for b in range(a):
            if b == 2:
                break
            found.append((a, b))
        else:
            found.append(a)
    else:
        found.append("end")
    while n:
        n -= 1
        if n == 1:
            break
    return found, n


def _leaves_loop_early(n):
    for a in range(9):
        for b in (1, 2, 3):
            if a * b == n:
                return a, b
    return None


def _slices(n):
    items = list(range(10))
    items[n:6] = [0, 0]
    items[1] = items[2:][0]
    items[::4] = items[::4]
    return items[n:], items[:n], items[n:-1], items[::n], items[-n:][::-1], "abcdef"[n:5]


def _texts(n):
    return f"{n}", f"{n!r:>5}", f"{n:{n}d}|{'a'!s}|{(1, 2)}|{[n]!a}", f"{'é'!a}"


def _truths(n):
    kinds = (len, None, [], [0], "", n, 0.0, _helper)
    return (
        [not each for each in kinds],
        [bool(each and n) for each in kinds if each is not _helper],
        [1 if each else 2 for each in kinds],
        [each is None for each in kinds],
        [1 if each is not None else 2 for each in kinds],
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
        [many(each)[0] for each in (n, 2)],
        sorted([3, n, 1], reverse=True),
        ["a", "b"],
        (lambda x, y=n, *, z=1: x + y + z)(1, z=n),
    )


def _unpacking(n):
    a, (b, *c), d = n, (1, 2, 3), "x"
    a, d = d, a
    a, b, c = b, c, a
    one, two, _three, four = range(4)
    return (
        a,
        b,
        c,
        d,
        +n,
        -n,
        ~n,
        [*range(n), *(1, 2)],
        (*range(n), 1),
        {*(1, n)},
        {"a": n, "b": 1},
        four - two + one,
    )


def _captured_argument(n):
    def add(x):
        nonlocal n
        n = n + x
        return n

    return add(1), add(2), n


def _nested_comprehensions(n):
    rows = [[a * b + n for b in range(a) if b != 1] for a in range(n)]
    return rows, {a: {b + 1 for b in each} for a, each in enumerate(rows)}, sum(each for row in rows for each in row)


def _imports(n):
    import math
    from operator import add

    return add(math.floor(2.5), n)


def _yields():
    def pairs(n):
        for each in range(n):
            yield each
            yield each * 2

    return lambda n: [list(pairs(n)), sum(pairs(n))]


def _wide(number):
    # There are so many variables, constants and instructions that arguments and jumps take more than a byte.
    lines = [f"    v{each} = n + {each + 1000}" for each in range(number)]
    lines += [f"    if v{each} > {each + 1002}: v{each} = v{number - 1 - each}" for each in range(number)]
    sums = " + ".join(f"v{each}" for each in range(number))
    found: dict[str, types.FunctionType] = {}
    exec(
        "def wide(n):\n" + "\n".join(lines) + f"\n    for each in range(n):\n        v0 = v0 + each\n    return {sums}",
        found,
    )
    return found["wide"]


PLAIN = [
    _shadowed_cell,
    _cell_in_a_comprehension,
    _shadowed_free(),
    _unset_before,
    _set_in_one_branch,
    _loops,
    _leaves_loop_early,
    _slices,
    _texts,
    _truths,
    _calls,
    _unpacking,
    _captured_argument,
    _nested_comprehensions,
    _imports,
    _yields(),
    _wide(20),
    _wide(300),
]


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("function", PLAIN, ids=lambda function: function.__name__)
def test_the_interpreter_gives_what_python_gives(function, number):
    found = FunctionInterpreter(Trace(8, RULES, None)).call_with(function, number)
    assert repr(found) == repr(function(number))


def test_a_variable_that_is_not_set_raises():
    with pytest.raises(UnboundLocalError):
        FunctionInterpreter(Trace(8, RULES, None)).call_with(_never_set, 1)


# --- unknown calls ---


@pytest.mark.parametrize("name", ["BINARY_OP", "LOAD_CONST", "RETURN_VALUE"])
def test_an_unknown_instruction_is_refused(name, monkeypatch):
    monkeypatch.delitem(instructions._INSTRUCTIONS, name)
    instructions.program.cache_clear()
    try:
        with pytest.raises(NotVectorisable, match=f"it does {name}, for which there is no rule"):
            FunctionInterpreter(Trace(8, RULES, None)).call_with(lambda x: x + 2, 1)
    finally:
        instructions.program.cache_clear()


def test_the_python_that_runs_is_known():
    assert bytecode.unknown_version() is None


def test_unknown_bytecode_goes_row_by_row_and_says_so_once(monkeypatch, caplog):
    bytecode._warn.cache_clear()
    monkeypatch.setattr(bytecode, "MAGIC_NUMBER", 1)
    dataset = Dataset.from_tensor_slices(np.arange(40.0))
    with caplog.at_level(logging.WARNING, "daskdist"):
        for number in (1, 2):
            assert list(dataset.map(lambda x, number=number: x * number)) == [x * number for x in range(40)]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "called row by row" in record.message
    assert "3.11, 3.12 and 3.13" in record.message
    assert "row by row: functions are looked into under CPython 3.11" in dataset.map(lambda x: x * 2).explain()
