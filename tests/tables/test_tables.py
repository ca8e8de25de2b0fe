"""Elements of each of Arrow's types: with nulls, of slices, without rows and in chunks."""

from __future__ import annotations

import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from daskdist import Ragged, RaggedTensorSpec, TensorSpec, errors
from daskdist.core.spec import ElementSpec
from daskdist.tables.arrow_text import texts_of
from daskdist.tables.from_arrow import TableReader, leaves_of
from daskdist.tables.replacements import Place

TEXT = np.dtype(np.dtypes.StringDType())
DAY = datetime.date(2024, 2, 29)


def view(kind):
    return pa.array([[1], [], [2, 3]], kind)


# Columns of three values, each with its expected elements.
CASES = [
    (pa.array([1, -2, 3], pa.int8()), np.int8([1, -2, 3])),
    (pa.array([1, 2, 2**64 - 1], pa.uint64()), np.array([1, 2, 2**64 - 1], np.uint64)),
    (pa.array(np.float16([0.5, 1, -2])), np.float16([0.5, 1, -2])),
    (pa.array([0.5, 1, -2], pa.float32()), np.float32([0.5, 1, -2])),
    (pa.array([True, False, True]), np.array([True, False, True])),
    (pa.array([Decimal("1.25"), Decimal(2), Decimal(-3)], pa.decimal128(5, 2)), np.array([1.25, 2, -3])),
    (pa.array([Decimal("1.25"), Decimal(2), Decimal(-3)], pa.decimal256(50, 2)), np.array([1.25, 2, -3])),
    (pa.array([DAY] * 3, pa.date32()), np.array(["2024-02-29"] * 3, "datetime64[D]")),
    (pa.array([DAY] * 3, pa.date64()), np.array(["2024-02-29"] * 3, "datetime64[D]")),
    (pa.array([1, 2, 3], pa.timestamp("us")), np.array([1, 2, 3], "datetime64[us]")),
    (pa.array([1, 2, 3], pa.timestamp("s", "Europe/Berlin")), np.array([1, 2, 3], "datetime64[s]")),
    (pa.array([1, 2, 3], pa.time32("ms")), np.array([1, 2, 3], "timedelta64[ms]")),
    (pa.array([1, 2, 3], pa.time64("ns")), np.array([1, 2, 3], "timedelta64[ns]")),
    (pa.array([1, 2, 3], pa.duration("s")), np.array([1, 2, 3], "timedelta64[s]")),
    (pa.array(["a", "", "ü" * 20]), np.array(["a", "", "ü" * 20], TEXT)),
    (pa.array(["a", "", "ü" * 20], pa.large_string()), np.array(["a", "", "ü" * 20], TEXT)),
    (pa.array(["a", "", "ü" * 20], pa.string_view()), np.array(["a", "", "ü" * 20], TEXT)),
    (pa.array([b"a", b"", b"\xff\0"]), np.array([b"a", b"", b"\xff\0"], object)),
    (pa.array([b"a", b"", b"\xff\0"], pa.large_binary()), np.array([b"a", b"", b"\xff\0"], object)),
    (pa.array([b"a", b"", b"\xff\0"], pa.binary_view()), np.array([b"a", b"", b"\xff\0"], object)),
    (pa.array([b"ab", b"cd", b"e\0"], pa.binary(2)), np.array([b"ab", b"cd", b"e\0"], object)),
    (pa.array(["a", "b", "a"]).dictionary_encode(), np.array(["a", "b", "a"], TEXT)),
    (pa.array([7, 8, 7]).dictionary_encode(), np.array([7, 8, 7])),
    (pa.RunEndEncodedArray.from_arrays([2, 3], [5, 6]), np.array([5, 5, 6])),
    (pa.RunEndEncodedArray.from_arrays([2, 3], ["a", "b"]), np.array(["a", "a", "b"], TEXT)),
    (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 1, 2], pa.int8())), np.array([False, True, True])),
    (pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16(), 2)), np.int16([[1, 2], [3, 4], [5, 6]])),
    (pa.nulls(3), np.full(3, np.nan)),
]
RAGGED = [
    (pa.array([[1], [], [2, 3]], pa.list_(pa.int64())), Ragged(np.array([1, 2, 3]), [0, 1, 1, 3])),
    (pa.array([[1], [], [2, 3]], pa.large_list(pa.int64())), Ragged(np.array([1, 2, 3]), [0, 1, 1, 3])),
    (pa.array([[1], [], [2, 3]], pa.list_view(pa.int64())), Ragged(np.array([1, 2, 3]), [0, 1, 1, 3])),
    (pa.array([[1], [], [2, 3]], pa.large_list_view(pa.int64())), Ragged(np.array([1, 2, 3]), [0, 1, 1, 3])),
    (
        pa.ListViewArray.from_arrays(pa.array([3, 0, 1], pa.int32()), pa.array([1, 2, 2], pa.int32()), [1, 2, 3, 4]),
        Ragged(np.array([4, 1, 2, 2, 3]), [0, 1, 3, 5]),
    ),
    (
        pa.array([["a"], [], ["b", "a"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
        Ragged(np.array(["a", "b", "a"], TEXT), [0, 1, 1, 3]),
    ),
    (
        pa.array([[[1, 2]], [], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.int64(), 2))),
        Ragged(np.array([[1, 2], [3, 4], [5, 6]]), [0, 1, 1, 3]),
    ),
]


def read(table, missing=None, columns="c"):
    tables = TableReader(columns, missing)
    block = tables.block(table, "part", "file")
    spec = tables.spec(table.schema, "file")
    assert block.structure == spec.structure
    for leaf, expected in zip(block.leaves, spec.leaves, strict=True):
        assert leaf.dtype == expected.dtype
        for row in leaf:
            assert len(np.shape(row)) == len(expected.shape) or isinstance(row, Ragged)
    return block.leaves if columns is None or len(block.leaves) > 1 else block.leaves[0]


def same(found, expected):
    assert type(found) is type(expected)
    assert found.dtype == expected.dtype
    if isinstance(expected, Ragged):
        assert found.tolist() == expected.tolist()
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("array", "expected"), CASES + RAGGED, ids=lambda x: str(x.type) if hasattr(x, "type") else "")
def test_types(array, expected):
    same(read(pa.table({"c": array})), expected)
    same(read(pa.record_batch({"c": array})), expected)
    # The values of a slice begin at an offset.
    same(read(pa.record_batch({"c": array}).slice(1)), expected[1:])
    same(read(pa.record_batch({"c": array}).slice(1, 1)), expected[1:2])
    # Some chunks are empty.
    parts = [array.slice(0, 1), array.slice(0, 0), array.slice(1)]
    if not pa.types.is_run_end_encoded(array.type):
        same(read(pa.table({"c": pa.chunked_array(parts)})), expected)
    # These tables have no rows.
    same(read(pa.table({"c": array.slice(0, 0)})), expected[:0])
    same(read(pa.table({"c": pa.chunked_array([], array.type)})), expected[:0])


@pytest.mark.parametrize(
    "kind", [pa.decimal128(9, 2), pa.decimal128(38, 10), pa.decimal256(50, 20), pa.decimal128(9, -2)], ids=str
)
def test_decimals_are_the_nearest_floats(kind):
    numbers = np.random.default_rng(0).integers(-(10**7), 10**7, 1000).tolist()
    values = [None, *(Decimal(number).scaleb(-kind.scale) for number in numbers)]
    (floats,) = leaves_of(pa.array(values, kind)[1:], Place("c"))
    np.testing.assert_array_equal(floats, [float(value) for value in values[1:]])
    (floats,) = leaves_of(pa.array(values, kind), Place("c"))
    assert np.isnan(floats[0])
    assert floats[1] == float(values[1])


@pytest.mark.parametrize(
    ("array", "missing", "expected"),
    [
        (pa.array([1.5, None]), None, np.array([1.5, np.nan])),
        (pa.array([1.5, None], pa.float16()), None, np.float16([1.5, np.nan])),
        (pa.array([Decimal(1), None], pa.decimal128(5, 2)), None, np.array([1, np.nan])),
        (pa.array([DAY, None]), None, np.array(["2024-02-29", "NaT"], "datetime64[D]")),
        (pa.array([1, None], pa.time32("s")), None, np.array([1, "NaT"], "timedelta64[s]")),
        (pa.array([1, None]), -1, np.array([1, -1])),
        (pa.array([1, None]), float("nan"), np.array([1, np.nan])),
        (pa.array([DAY, None]), datetime.datetime(2024, 1, 1), np.array(["2024-02-29", "2024-01-01"], "datetime64[D]")),
        (pa.array([DAY, None]), np.datetime64("2024"), np.array(["2024-02-29", "2024-01-01"], "datetime64[D]")),
        (pa.array([1, None], pa.timestamp("s", "UTC")), np.datetime64(2, "s"), np.array([1, 2], "datetime64[s]")),
        (pa.array([1, None], pa.time32("s")), np.timedelta64(2, "m"), np.array([1, 120], "timedelta64[s]")),
        (pa.nulls(2), 0, np.array([0.0, 0.0])),
        (pa.array(["a", None]), "-", np.array(["a", "-"], TEXT)),
        (pa.array(["a", None], pa.string_view()), "-", np.array(["a", "-"], TEXT)),
        (pa.array(["a", None]).dictionary_encode(), "-", np.array(["a", "-"], TEXT)),
        (pa.array([True, None]), False, np.array([True, False])),
        (pa.array([b"a", None], pa.binary_view()), b"", np.array([b"a", b""], object)),
        (pa.array([0.5, None], pa.float16()), 0.0, np.float16([0.5, 0])),
        (pa.array([b"a", None]), b"", np.array([b"a", b""], object)),
        (pa.array([1.5, None]), 0.0, np.array([1.5, 0])),
        (pa.RunEndEncodedArray.from_arrays([1, 2], pa.array([5, None])), 0, np.array([5, 0])),
        (pa.array([[1], None, [2]], pa.list_(pa.int64())), [], Ragged(np.array([1, 2]), [0, 1, 1, 2])),
        (pa.array([[1], None, [2]], pa.list_view(pa.int64())), [], Ragged(np.array([1, 2]), [0, 1, 1, 2])),
    ],
    ids=lambda x: str(x.type) if hasattr(x, "type") else "",
)
def test_nulls(array, missing, expected):
    table = pa.table({"c": array})
    given = None if missing is None else {"c": missing}
    same(read(table, given), expected)
    same(read(table.slice(1), given), expected[1:])
    # Without a replacement, only floats and times can represent nulls.
    if expected.dtype.kind not in "fmM" or (missing is not None and pa.types.is_integer(array.type)):
        with pytest.raises(errors.FileError, match=r"part: column 'c' of type .* 1 null, the first in row 1"):
            read(table)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        (pa.date32(), datetime.datetime(2024, 2, 29, 12)),
        (pa.date32(), np.datetime64("2024-02-29T12")),
        (pa.timestamp("s"), datetime.datetime(2024, 2, 29, 0, 0, 0, 5)),
        (pa.timestamp("s"), np.datetime64(5, "us")),
        (pa.time32("s"), datetime.time(0, 0, 0, 5)),
        (pa.duration("s"), datetime.timedelta(microseconds=5)),
        (pa.duration("s"), np.datetime64("2024")),
        (pa.int64(), np.float32(1.5)),
        (pa.float32(), 1e300),
        (pa.float16(), 70_000),
        (pa.timestamp("ns"), np.datetime64("9999-01-01")),
        (pa.duration("ns"), np.timedelta64(200_000, "D")),
    ],
    ids=str,
)
def test_replacements_are_not_changed_to_the_type_of_a_column(kind, missing):
    table = pa.table({"c": pa.array([None], kind)})
    with pytest.raises(errors.ArgumentError, match=r"missing: .* cannot stand for a null of file: column 'c'"):
        TableReader("c", {"c": missing}).spec(table.schema, "file")


def test_integers_are_not_rounded_to_floats_for_nulls():
    for values, error in ([[2**53 + 1, 2], errors.FileError], [[2**53 + 1, None], errors.ArgumentError]):
        with pytest.raises(error, match="column 'c'"):
            read(pa.table({"c": values}), {"c": float("nan")})
    same(read(pa.table({"c": [2**53, None]}), {"c": float("nan")}), np.array([2.0**53, np.nan]))


def test_integers_are_not_rounded_beside_floats():
    number = 2**53 + 1
    table = pa.table({"id": [number, 1], "x": [0.5, 1.5], "n": pa.array([1, 2], pa.uint64())})
    with pytest.raises(
        errors.FileError, match=r"part: the integers of column 'id' would be rounded in one array of float64"
    ):
        read(table, columns={"rows": ["id", "x"]})
    rows = table.slice(1)
    (actual,) = TableReader((["id", "x", "n"],)).block(rows, "part", "file").leaves
    assert actual.tolist() == [[1.0, 1.5, 2.0]]


def test_times_of_several_units_do_not_change_beside_each_other():
    table = pa.table(
        {
            "day": pa.array([datetime.date(9999, 1, 1), datetime.date(2020, 1, 1)]),
            "instant": pa.array([1, None], pa.timestamp("ns")),
            "long": pa.array([10**17, 1], pa.duration("us")),
            "short": pa.array([1, 2], pa.duration("ns")),
        }
    )
    for names in (["day", "instant"], ["short", "long"]):
        (changed,) = {"day", "long"} & set(names)
        with pytest.raises(errors.FileError, match=f"part: the times of column '{changed}' do not fit in one array"):
            read(table, columns={"times": names})
        (actual,) = TableReader((names,)).block(table.slice(1), "part", "file").leaves
        expected = {"day": np.datetime64("2020-01-01"), "instant": np.datetime64("NaT")}
        expected |= {"long": np.timedelta64(1, "us"), "short": np.timedelta64(2, "ns")}
        np.testing.assert_array_equal(actual, [[expected[name] for name in names]])


def test_structs():
    kind = pa.struct(
        {"x": pa.int64(), "y": pa.float64(), "v": pa.list_(pa.int8()), "in": pa.struct({"s": pa.string()})}
    )
    rows = [{"x": k, "y": k / 2, "v": [k] * k, "in": {"s": f"{k}"}} for k in range(3)]
    table = pa.table({"c": pa.array(rows, kind)})
    spec = TableReader("c").spec(table.schema, "file")
    assert spec.packed == {
        "x": TensorSpec((), "int64"),
        "y": TensorSpec((), "float64"),
        "v": TensorSpec((None,), "int8"),
        "in": {"s": TensorSpec((), TEXT)},
    }
    for start in (0, 1):
        block = TableReader("c").block(table.slice(start), "part", "file")
        assert block.structure == spec.structure
        given = [{**element, "v": element["v"].tolist()} for element in block.elements()]
        assert given == rows[start:]


def test_a_null_struct_is_one_of_nulls():
    kind = pa.struct({"x": pa.int64(), "y": pa.float64(), "in": pa.struct({"s": pa.string()})})
    rows = [{"x": 1, "y": 1.5, "in": {"s": "a"}}, None, {"x": None, "y": None, "in": None}]
    table = pa.table({"c": pa.array(rows, kind)})
    missing = {"c": {"x": float("nan"), "in": {"s": "-"}}}
    text, x, y = read(table, missing)
    assert text.tolist() == ["a", "-", "-"]
    np.testing.assert_array_equal(x, [1, np.nan, np.nan])
    np.testing.assert_array_equal(y, [1.5, np.nan, np.nan])
    with pytest.raises(errors.FileError, match="column 'c', 'in', 's' of type string has 2 nulls, the first in row 1"):
        read(table)
    with pytest.raises(errors.ArgumentError, match=r"give a dict by field, of 'x', 'y', 'in', not -1"):
        read(table, {"c": -1})
    with pytest.raises(errors.ArgumentError, match=r"not {'z': 1}"):
        read(table, {"c": {"z": 1}})


def test_lists_of_lists_are_ragged():
    table = pa.table({"c": pa.array([[[1], []], [], [[2, 3]]])})
    assert TableReader("c").spec(table.schema, "file").leaves == (RaggedTensorSpec((None, None), "int64"),)
    actual = read(table)
    assert [row.tolist() for row in actual] == [[[1], []], [], [[2, 3]]]
    assert [row.tolist() for row in read(table.slice(1))] == [[], [[2, 3]]]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (pa.array([[{"a": 1}]]), "lists of structs"),
        (pa.array([{}], pa.struct([])), "structs of no fields"),
        (
            pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], fields=[pa.field("a", pa.int64())] * 2),
            "structs of two fields of one name",
        ),
        (pa.array([(1, 2, 3)], pa.month_day_nano_interval()), "is of type month_day_nano_interval"),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), "'c'.*leave it out"),
        (pa.array([[[1]]], pa.list_(pa.list_(pa.int64()), 1)), "fixed-size lists of lists of different lengths"),
    ],
    ids=lambda x: str(x.type)[:40] if hasattr(x, "type") else "",
)
def test_columns_that_cannot_become_arrays(array, message):
    with pytest.raises(errors.FileError, match=message):
        TableReader("c").spec(pa.table({"c": array}).schema, "file")


def test_two_columns_of_one_name():
    table = pa.table([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "a", "b"])
    with pytest.raises(errors.FileError, match="file: two columns are called 'a'"):
        TableReader("a").spec(table.schema, "file")
    assert TableReader("b").spec(table.schema, "file") == ElementSpec.of(np.int64(3))


def test_replacements_for_columns_that_are_not_read():
    table = pa.table({"a": [1], "b": pa.array([None], pa.int64())})
    tables = TableReader("a", {"b": 0})
    assert tables.spec(table.schema, "file") == ElementSpec.of(np.int64(1))
    assert len(tables.block(table.select(["a"]), "part", "file")) == 1
    with pytest.raises(errors.ArgumentError, match="missing: no column 'z'; there are 'a', 'b'"):
        TableReader("a", {"z": 0}).spec(table.schema, "file")


@pytest.mark.parametrize(
    "words",
    [
        ["a", "bb", ""],
        ["same", "long", "each"],
        ["x" * 100, "y" * 100],
        ["x" * 100, "y"],
        ["ü", "日本", "a"],
        ["日本", "ab", "\U0001f600"],
        ["ends\0", "a"],
        ["\0", "\0"],
        ["", ""],
        [],
        [f"{k}" for k in range(10_000)],
        [f"{k}" * (k % 15) for k in range(9_000)],
        [f"{k}" * (k % 50) for k in range(9_000)],
    ],
    ids=range(13),
)
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_texts_are_converted_unchanged(words, kind):
    array = pa.array(words, kind)
    assert texts_of(array).dtype == TEXT
    assert texts_of(array).tolist() == words
    assert texts_of(array.slice(1)).tolist() == words[1:]
