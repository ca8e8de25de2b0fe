"""Vectorized functions in pipelines: maps and filters, their notes, and functions that are given whole blocks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import cloudpickle
import numpy as np
import pytest
from dask.tokenize import tokenize
from vectorize_checks import MEAN, block, columns, is_same, scalars, seen

from daskdist import Dataset, Options
from daskdist.core.block import Batches, Bundle
from daskdist.core.dataset_base import node_of
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.ragged import Ragged
from daskdist.core.spec import SpecUnknown
from daskdist.core.structure import Nested, Structure
from daskdist.core.vectorize import apply
from daskdist.core.vectorize.apply import Vectorised
from daskdist.errors import ArgumentError, UserFunctionError
from daskdist.ops.filter import Filter, FilterBlocks, FilterRows
from daskdist.ops.map import Map, MapBlocks, MapColumns, MapRows
from daskdist.testing import same_elements


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    apply._SAME.clear()
    # Vectorise small blocks too, as most blocks here are small.
    monkeypatch.setattr(apply, "_FEWEST_ROWS", 8)


# --- pipelines ---


def mapped(ds, function, vectorized=None):
    return Dataset(Map(node_of(ds), UserFunction(function, "map"), vectorized))


def filtered(ds, predicate, vectorized=None):
    return Dataset(Filter(node_of(ds), UserFunction(predicate, "filter"), vectorized))


def num_calls(function, run):
    """Return the number of calls of a function, counted where the function cannot see it."""
    calls = []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code is function.__code__:
            calls.append(1)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return len(calls)


def test_few_calls_for_many_rows():
    def function(x):
        return x * 3 + 1

    def predicate(x):
        return x % 2 == 0

    rows = scalars(np.int64, 10_000)
    filtering = UserFunction(predicate, "filter")
    for run, called in ((columns(function), function), (FilterRows(filtering, Vectorised(filtering)), predicate)):
        # Each time, one more call is that of the columns.
        assert num_calls(called, functools.partial(run, rows.slice(0, 64))) == 65
        assert num_calls(called, functools.partial(run, rows)) == 1


def test_whole_pipelines():
    arrays = {"a": np.arange(1000), "b": np.arange(2000.0).reshape(1000, 2)}
    ds = Dataset.from_tensor_slices(arrays)

    def chain(vectorized):
        chained = mapped(ds, lambda d: {"s": d["b"].sum(), "a": d["a"]}, vectorized)
        chained = filtered(chained, lambda d: d["a"] % 3 != 0, vectorized)
        return mapped(chained, lambda d: (d["s"] / 2, d["a"]), vectorized).shuffle(100, seed=1).batch(32)

    same_elements(list(chain(None)), list(chain(False)))
    assert list(apply._SAME.values()) == [True] * 3


@pytest.mark.parametrize(
    "predicate",
    [
        lambda x: x > 3,
        lambda x: True,
        lambda x: np.bool_(False),
        lambda x: x > 3 and x < 9,
        lambda x: (x > 3) & (x < 9),
    ],
)
def test_filters(predicate):
    ds = Dataset.range(100)
    same_elements(list(filtered(ds, predicate)), list(filtered(ds, predicate, False)))


@pytest.mark.parametrize("predicate", [lambda x: x, lambda x: (x > 3, True), lambda x: 1, lambda x: (x > 3)[None]])
def test_a_predicate_returns_one_bool(predicate):
    with pytest.raises(UserFunctionError, match=r"on row 0 of .*; a predicate returns one bool"):
        list(filtered(Dataset.range(9), predicate))


def test_functions_travel():
    user = UserFunction(lambda x: x * MEAN, "map")
    given = MapColumns(MapRows(user), Vectorised(user))
    copy = cloudpickle.loads(cloudpickle.dumps(given))
    assert tokenize(copy.vectorised) == tokenize(given.vectorised)
    rows = scalars()
    is_same(copy(rows), given(rows))
    # The copy uses the original's result of the comparison, since both have the same key.
    assert list(apply._SAME.values()) == [True]
    assert tokenize(copy.vectorised) == tokenize(Vectorised(UserFunction(user.function, "map")))
    assert tokenize(copy.vectorised) != tokenize(Vectorised(UserFunction(lambda x: x * 2, "map")))


# --- notes ---


@pytest.mark.parametrize(
    ("function", "note"),
    [
        (lambda x: x * 3 + 1, "vectorised: multiply, add"),
        (lambda x: x, "vectorised"),
        (lambda x: x if x > 3 else 0, "row by row: it asks for the truth of a value"),
        (lambda x: seen.append(1), "row by row: it changes a list that all rows share"),
        (lambda x: x.nothing, "raises AttributeError: 'int64' object has no attribute 'nothing'"),
    ],
)
def test_the_note_gives_the_reason(function, note):
    actual = Map(node_of(Dataset.range(5)), UserFunction(function, "map")).note
    assert actual.endswith(note) if note.startswith("raises") else actual == note
    assert Filter(node_of(Dataset.range(5)), UserFunction(function, "filter")).note == actual


def test_the_note_on_other_elements():
    user = UserFunction(lambda x: x + 1, "map")

    def note(ds, vectorized=None):
        return Map(node_of(ds), user, vectorized).note

    ds = Dataset.range(5)
    assert note(ds.batch(2)) == "row by row: its elements are batches"
    assert note(ds.batch(2).map(lambda x: x * 2).take(2)) == "row by row: its elements are batches"
    assert note(ds.map(lambda x: np.zeros(int(x)))).startswith("decided at the first block")
    assert note(ds.map(lambda x: np.zeros(9 // (x - 1)))) == "decided at the first block"
    assert note(ds, True) == "vectorised: given whole blocks"
    assert note(ds, False) == "row by row: vectorized=False"
    strings = Dataset.from_tensor_slices(np.array(["a", "b"]))
    assert note(strings).startswith("row by row: its elements have a leaf of ")


TEXT_FUNCTIONS: dict[str, tuple[str, Callable[..., object]]] = {
    "not used": ("vectorised: greater", lambda row: row["x"] > 3),
    "passed on": ("vectorised: multiply", lambda row: {**row, "x": row["x"] * 2}),
    "in a list": ("row by row", lambda row: {"s": [row["s"], "a"]}),
    "given twice": ("vectorised: add", lambda row: (row["s"], row["x"] + 1, row["s"])),
    "compared": ("row by row", lambda row: row["s"] == "oslo"),
    "compared from the right": ("row by row", lambda row: np.str_("oslo") == row["s"]),
    "compared with a number": ("row by row", lambda row: row["x"] == row["s"]),
    "looked up": ("row by row", lambda row: {"oslo": 1}.get(row["s"], 0)),
    "found": ("row by row", lambda row: "o" in row["s"]),
    "among others": ("row by row", lambda row: row["s"] in ["oslo", "rome"]),
    "tested": ("row by row", lambda row: "a" if row["s"] else "b"),
    "classified": ("row by row", lambda row: isinstance(row["s"], str)),
    "measured": ("row by row", lambda row: len(row["s"])),
    "formatted": ("row by row", lambda row: f"{row['s']}!"),
    "joined": ("row by row", lambda row: "!" + row["s"]),
    "inserted": ("row by row", lambda row: "%s" % row["s"]),  # noqa: UP031
    "cut": ("row by row", lambda row: row["s"][:2]),
    "a method": ("row by row", lambda row: row["s"].upper()),
    "chosen": ("row by row", lambda row: np.where(row["x"] > 3, row["s"], "none")),
    "an array": ("row by row", lambda row: np.array([row["s"]])),
    "NumPy's": ("row by row", lambda row: np.equal(row["s"], "oslo")),
    "sorted": ("row by row", lambda row: max(row["s"], "m")),
}


@pytest.mark.parametrize("name", TEXT_FUNCTIONS)
def test_functions_that_only_pass_text_on_are_vectorised(name):
    note, function = TEXT_FUNCTIONS[name]
    text = ["oslo", "rome", "", "Ötzi", "a\0b", "nan"] * 8
    rows = Dataset.from_tensor_slices({"s": text, "x": np.arange(48.0)}).map(function)
    assert f"# {note}" in str(rows.explain("pipeline"))
    same_elements(list(rows), list(rows.with_options(Options(vectorize=False))))


def test_options_turn_it_off():
    calls = []
    ds = Dataset.range(40).map(lambda x: x * 2).filter(lambda x: x % 3 != 0).take_while(lambda x: x < 60)
    ds = ds.group_by_window(lambda x: x % 2, lambda key, rows: rows.map(lambda x: x + 1).batch(8), 8)
    off = ds.with_options(Options(vectorize=False))
    same_elements(list(off), list(ds))
    assert off.explain("pipeline").count("# row by row: Options(vectorize=False)") == 4
    assert ds.explain("pipeline").count("# vectorised") == 4
    assert "vectorize=False" in str(off.options())
    apply._SAME.clear()
    list(off)
    assert not apply._SAME
    list(Dataset.range(30).map(lambda x: calls.append(1) or x).with_options(Options(vectorize=False)))
    with pytest.raises(ArgumentError, match="vectorize is 'no'; give True or False"):
        Options(vectorize="no")


def test_explain_tells_of_blocks_that_were_computed_row_by_row(caplog):
    ds = Dataset.from_tensor_slices(np.arange(-5.0, 30)).map(lambda x: np.sqrt(x))
    caplog.set_level("INFO", "daskdist")
    with np.errstate(all="ignore"):
        list(ds)
    assert ds.explain("pipeline").endswith("# vectorised: sqrt")
    with pytest.warns(RuntimeWarning, match="invalid value"):
        list(ds)
    assert ds.explain("pipeline").endswith(
        "# vectorised: sqrt; some blocks row by row: invalid value encountered in sqrt"
    )
    assert "is called row by row for some blocks: invalid value encountered in sqrt" in caplog.text


def test_arguments_of_a_node_are_shown_where_given():
    user = UserFunction(np.negative, "map")
    assert "vectorized" not in str(Map(node_of(Dataset.range(5)), user))
    assert "vectorized=True" in str(Map(node_of(Dataset.range(5)), user, True))


# --- functions that are given whole blocks ---


def at_once(ds, function):
    return mapped(ds, function, True)


def test_blocks_are_given_whole():
    shapes = []
    ds = Dataset.from_tensor_slices({"a": np.arange(100), "b": np.arange(200.0).reshape(100, 2)})
    made = at_once(ds, lambda d: shapes.append(d["b"].shape) or {"s": d["b"].sum(axis=1), "a": d["a"][::-1]})
    assert len(list(made)) == 100
    assert all(shape[0] > 1 and shape[1:] == (2,) for shape in shapes)
    assert {key: (spec.shape, spec.dtype) for key, spec in made.element_spec.items()} == {
        "s": ((), np.dtype("float64")),
        "a": ((), np.dtype("int64")),
    }


def test_tuples_are_given_as_arguments_and_lists_are_tuples():
    ds = Dataset.from_tensor_slices((np.arange(10), np.arange(10.0)))
    same_elements(list(at_once(ds, lambda a, b: [a * 2, b])), [(np.int64(2 * k), np.float64(k)) for k in range(10)])


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: x.sum(), r"int64\[\] for its leaf \(the element\)"),
        (lambda x: x[:1], r"int64\[1\] for its leaf \(the element\)"),
        (lambda x: {"a": x, "b": 3}, r"int64\[\] for its leaf \['b'\]"),
        (lambda x: (x, np.zeros((2, 9))), r"float64\[2, 9\] for its leaf \[1\]"),
    ],
)
def test_as_many_rows_are_returned_as_given(function, says):
    with pytest.raises(UserFunctionError, match=f"map: .* returned {says}, on 9 rows of .*gets 9 rows along axis 0"):
        list(at_once(Dataset.range(9), function))


def test_an_error_of_a_block_says_which():
    with pytest.raises(UserFunctionError, match=r"map: .* raised ZeroDivisionError: .* on 9 rows of "):
        list(at_once(Dataset.range(9), lambda x: 1 // 0))
    with pytest.raises(SpecUnknown, match="on two made-up rows"):
        _ = node_of(at_once(Dataset.range(9), lambda x: 1 // 0)).spec


def test_rows_of_different_lengths_are_given_as_such():
    rows = block(Ragged.of([np.arange(2.0), np.arange(3.0)]))
    made = MapBlocks(UserFunction(lambda x: (Ragged(x.values * 2, x.row_splits), x.row_lengths), "map"))(rows)
    same_elements(
        list(made.elements()),
        [(np.array([0.0, 2.0]), np.int64(2)), (np.array([0.0, 2.0, 4.0]), np.int64(3))],
    )


def test_batches_are_rows_too():
    shapes = []

    def function(x):
        shapes.append(x.shape)
        return x.sum(axis=1)

    rows = block(np.arange(10))
    made = MapBlocks(UserFunction(function, "map"))(Batches(rows, np.array([0, 4, 8])))
    same_elements(list(made.elements()), [np.int64(6), np.int64(22)])
    made = MapBlocks(UserFunction(function, "map"))(Batches(rows, np.array([0, 4, 8, 10])))
    same_elements(list(made.elements()), [np.int64(6), np.int64(22), np.int64(17)])
    assert shapes == [(2, 4), (1, 4), (1, 4), (1, 2)]
    ds = at_once(Dataset.range(10).batch(4), lambda x: x * 2)
    same_elements(list(ds), [np.arange(4) * 2, np.arange(4, 8) * 2, np.arange(8, 10) * 2])
    assert ds.element_spec.shape == (None,)


def test_datasets_are_no_rows():
    class Window(Nested):
        pass

    nested = Bundle(Structure.of(0)[1], [(Window(),), (Window(),)])
    with pytest.raises(ArgumentError, match="elements have datasets"):
        MapBlocks(UserFunction(lambda x: x, "map"))(nested)


def test_the_structure_of_blocks_is_one():
    rows = Batches(block(np.arange(6)), np.array([0, 4, 6]))
    with pytest.raises(UserFunctionError, match="every element needs the same"):
        MapBlocks(UserFunction(lambda x: x if x.shape[1] == 4 else (x,), "map"))(rows)


def test_blocks_without_rows_are_not_given():
    rows = scalars(num_rows=0)
    assert len(MapBlocks(UserFunction(lambda x: 1 // 0, "map"))(rows)) == 0
    assert len(FilterBlocks(UserFunction(lambda x: 1 // 0, "filter"))(rows)) == 0


def test_predicates_of_blocks():
    ds = Dataset.range(20)
    same_elements(list(filtered(ds, lambda x: x % 2 == 0, True)), list(map(np.int64, range(0, 20, 2))))
    batches = filtered(ds.batch(3), lambda x: x.sum(axis=1) > 30, True)
    same_elements(list(batches), list(filtered(ds.batch(3), lambda x: x.sum() > 30, False)))


@pytest.mark.parametrize(
    ("predicate", "says"),
    [
        (lambda x: x, r"returned int64\[9\] on 9 rows of .* returns bool\[9\]"),
        (lambda x: (x > 3, x > 2), r"returned \('bool\[9\]', 'bool\[9\]'\)"),
        (lambda x: x[:, None] > 3, r"returned bool\[9, 1\]"),
        (lambda x: True, r"returned bool\[\] for its leaf \(the element\)"),
        (lambda x: x[:2] > 3, r"returned bool\[2\] for its leaf \(the element\)"),
    ],
)
def test_a_predicate_of_blocks_returns_bools(predicate, says):
    with pytest.raises(UserFunctionError, match=f"filter: .*{says}"):
        list(filtered(Dataset.range(9), predicate, True))


# --- values at which NumPy rounds, and identities ---

BIG = 2**53


def outcome(dataset):
    """Return the elements of a dataset, with their dtypes, or the type of its error."""
    try:
        return [(leaf.dtype, leaf.tolist()) for element in dataset for leaf in Structure.flatten(element)[0]]
    except UserFunctionError as error:
        return type(error)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: {"pair": [x, 0.5]},
        lambda x: {"rows": [[x, 1.0], [1.0, x]]},
        lambda x: {"pairs": [(x, np.float64(2)), (x, 3.0)]},
        lambda x: {"mixed": [x, x.astype(np.uint64)]},
        lambda x: {"counts": [np.stack([x, x]), np.zeros(2)]},
    ],
)
def test_lists_with_rounded_integers_are_refused_in_every_block(function):
    small, big = np.arange(40), np.arange(40) + BIG
    for dtype in (np.int64, np.uint64):
        first = outcome(Dataset.from_tensor_slices(small.astype(dtype)).map(function))
        assert isinstance(first, list)
        exact = Dataset.from_tensor_slices(big.astype(dtype) // 2 * 2).map(function)
        dataset = Dataset.from_tensor_slices(big.astype(dtype)).map(function)
        for rows in (exact, dataset):
            assert outcome(rows) == outcome(rows.with_options(Options(vectorize=False)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: np.isin(x, [BIG + 1, BIG + 4, -1]),
        lambda x: np.isin(x, [float(BIG), 2.0, 3.5]),
        lambda x: np.isin(x, np.arange(BIG, BIG + 30)),
        lambda x: np.isin(x, np.arange(BIG, BIG + 30, dtype=np.uint64)),
        lambda x: np.isin(x.astype(np.float64), [BIG + 1, 7]),
        lambda x: np.isin(x.astype(np.float32), [2**24 + 1, 2**24, 7]),
        lambda x: x == BIG + 1,
        lambda x: x == np.uint64(BIG + 1),
        lambda x: x < np.int64(BIG + 3),
        lambda x: np.maximum(x, np.uint64(BIG + 3)),
        lambda x: np.where(x > 5, x, 0.5),
        lambda x: np.clip(x, 3, BIG + 1),
        lambda x: np.digitize(x, np.array([1, BIG, BIG + 1], np.uint64)),
        lambda x: x + np.int64(1),
        lambda x: np.stack([x, x.astype(np.float64)]),
    ],
)
@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_large_integers_of_two_dtypes_have_the_results_of_a_loop(function, dtype):
    for numbers in (np.arange(40), np.concatenate([BIG + np.arange(30), 2**24 + np.arange(10)])):
        dataset = Dataset.from_tensor_slices(numbers.astype(dtype)).map(function)
        with np.errstate(all="ignore"):
            expected = [function(number).tolist() for number in numbers.astype(dtype)]
            assert [element.tolist() for element in dataset] == expected


class Flags:
    HIGH = np.bool_(True)
    names = "text"


ENABLED = np.bool_(True)


@pytest.mark.parametrize(
    ("function", "is_at_once"),
    [
        (lambda x: (x > 35) is Flags.HIGH, False),
        (lambda x: (x > 35) is ENABLED, False),
        (lambda x: (x > 35) is not np.True_, False),
        (lambda x: Flags.HIGH is (x > 35), False),
        (lambda x: (lambda y: y is Flags.HIGH)(x > 35), False),
        (lambda x, flag=ENABLED: (x > 35) is flag, False),
        (lambda x: (x > 35) is None, True),
        (lambda x: x + (type(x) is np.int64), True),
        (lambda x: x + (Flags.names is None), True),
    ],
)
def test_identities_with_results_of_rows_are_looked_at_row_by_row(function, is_at_once):
    list(Dataset.range(20).map(function))
    dataset = Dataset.range(20, 60).map(function)
    assert [element.item() for element in dataset] == [int(function(np.int64(x))) for x in range(20, 60)]
    assert ("it asks whether a value is another" not in dataset.explain()) == is_at_once


# A NaN of each sign, one with a payload, and numbers of which some operations make NaN.
UNLIKE_NANS = np.array([np.nan, -np.nan, np.uint64(0x7FF8000000000123).view(np.float64), 1.5, np.inf, -np.inf])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[0] + x[1],
        lambda x: x[0] - x[2],
        lambda x: x[1] / x[0],
        lambda x: x[0].astype(np.float32) * x[1].astype(np.float32),
        lambda x: x + x[::-1],
        lambda x: np.maximum(x[0], x[1]),
        lambda x: np.hypot(x[0], x[1]),
        lambda x: x.mean(),
        lambda x: np.prod(x),
        lambda x: np.cumsum(x),
        lambda x: x.max() + x[0],
        lambda x: np.float64(-np.nan) * x[0],
        lambda x: np.log(x[0]) - 1,
    ],
)
@pytest.mark.parametrize("invalid", ["warn", "ignore"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_has_the_sign_and_payload_that_it_has_row_by_row(function, invalid):
    places = np.indices((6, 6, 6)).reshape(3, -1).T
    dataset = Dataset.from_tensor_slices(UNLIKE_NANS[places]).map(function)
    with np.errstate(invalid=invalid):
        list(Dataset.from_tensor_slices(np.random.default_rng(0).random((40, 3))).map(function))
        at_once, by_row = list(dataset), list(dataset.with_options(Options(vectorize=False)))
    assert [element.tobytes() for element in at_once] == [element.tobytes() for element in by_row]


def test_columns_with_nan_of_one_sign_are_computed_at_once():
    rows = np.where(np.arange(120).reshape(40, 3) % 4 == 0, np.nan, 1.5)
    for function in (lambda x: x[0] * 2 + x[1], lambda x: x.sum()):
        dataset = Dataset.from_tensor_slices(rows).map(function)
        list(dataset)
        assert "row by row" not in dataset.explain()
