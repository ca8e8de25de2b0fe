"""Replacements of nulls within structs and lists, and the advice in errors for nulls."""

from __future__ import annotations

import re
from decimal import Decimal

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from daskdist import Dataset, errors, read_arrow, read_json, read_parquet
from daskdist.tables.from_arrow import leaves_of
from daskdist.tables.replacements import Place


def write_parquet(tmp_path, table):
    pq.write_table(table, tmp_path / "a.parquet")
    return lambda **options: list(read_parquet(tmp_path / "a.parquet", **options))


def write_arrow(tmp_path, table):
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    return lambda **options: list(read_arrow(tmp_path / "a.arrow", **options))


def dask_frame(tmp_path, table):
    frame = dd.from_map(lambda _: table.to_pandas(types_mapper=pd.ArrowDtype), [0])
    return lambda **options: list(Dataset.from_dask(frame, **options))


SOURCES = [write_parquet, write_arrow, dask_frame]
KIND = pa.struct({"x": pa.int64(), "in": pa.struct({"s": pa.string(), "l": pa.list_(pa.int64())})})
NULLS = [
    pa.array([1, None]),
    pa.array([1, None], pa.uint64()),
    pa.array([2**60 + 1, None]),
    pa.array([[2**60 + 1, None], None]),
    pa.array([[2**60 + 1, None], None], pa.list_(pa.int64(), 2)),
    pa.array([["a"], None], pa.list_(pa.dictionary(pa.int8(), pa.string()), 1)),
    pa.array([[2**60 + 1], None], pa.list_(pa.dictionary(pa.int8(), pa.int64()), 1)),
    pa.array([True, None]),
    pa.array(["a", None]),
    pa.array([b"a", None]),
    pa.array([b"ab", None], pa.binary(2)),
    pa.array(["a", None]).dictionary_encode(),
    pa.array([7, None, 7]).dictionary_encode(),
    pa.array([[1], None]),
    pa.array([[1, None], [2]]),
    pa.array([[1, None], None]),
    pa.array([["a", None], None, []]),
    pa.array([["a", None], None], pa.list_(pa.string())).cast(pa.large_list(pa.large_string())),
    pa.array([[[1], None], None]),
    pa.array([[[1, None], None], None]),
    pa.array([[True, None], None, [False]]),
    pa.array([[1, 2], None], pa.list_(pa.int16(), 2)),
    pa.array([[1, None], None], pa.list_(pa.int16(), 2)),
    pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)),
    pa.array([["a", "b"], None], pa.list_(pa.string(), 2)),
    pa.array([["a", "b"], None], pa.list_(pa.string_view(), 2)),
    pa.array([[[1, 2]], [None]], pa.list_(pa.list_(pa.int64(), 2), 1)),
    pa.array([[b"ab", None]], pa.list_(pa.binary(2), 2)),
    pa.array([[Decimal(1)], None], pa.list_(pa.decimal128(5, 2), 1)),
    pa.array([[1], None], pa.list_(pa.timestamp("s"), 1)),
    pa.array([[1], None], pa.list_(pa.duration("s"), 1)),
    pa.array([[1], None], pa.list_(pa.time32("s"), 1)),
    pa.array([{"x": 1, "in": {"s": None, "l": []}}, None, {"x": 2, "in": {"s": "a", "l": None}}], KIND),
    pa.array([{"l": [[1, None], None]}, {"l": None}, None]),
    pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int8(), [1, 2]), pa.array([[1, 2], None], pa.list_(pa.int8(), 2))
    ),
    pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16), None], pa.binary(16))),
    pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}", None])),
    pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, None], pa.int8())),
]


def follow(read, missing):
    """Read with each replacement that an error gives as advice, until there is none; return the rows."""
    for _ in range(9):
        try:
            return read(missing=missing)
        except errors.DaskdistError as error:
            (advice,) = re.findall(r"give a replacement with missing=(\{.*?\}+)[,; ]", str(error))
        given = eval(advice, {"numpy": np})
        missing = merged(missing, given)
    raise AssertionError(f"missing={missing} is not enough")


def merged(missing, given):
    if not (isinstance(missing, dict) and isinstance(given, dict)):
        return given
    return {**missing, **{name: merged(missing.get(name), value) for name, value in given.items()}}


# Dask itself cannot take rows of views.
CASES = [
    (source, array) for array in NULLS for source in SOURCES if source != dask_frame or "view" not in str(array.type)
]


@pytest.mark.parametrize(("source", "array"), CASES, ids=lambda item: getattr(item, "__name__", None) or str(item.type))
def test_the_advice_for_nulls_helps(tmp_path, source, array):
    read = source(tmp_path, pa.table({"c": array}))
    with pytest.raises(errors.DaskdistError, match=r"column 'c'.*null"):
        read()
    rows = follow(read, {})
    assert len(rows) == len(array)


@pytest.mark.parametrize("source", SOURCES)
def test_values_of_null_lists(tmp_path, source):
    def values(kind, missing):
        read = source(tmp_path, pa.table({"c": pa.array([[1, None], None, [3, 4]], kind)}))
        return [row["c"].tolist() for row in read(missing={"c": missing})]

    for kind in (pa.list_(pa.int64()), pa.large_list(pa.int32())):
        assert values(kind, 0) == [[1, 0], [], [3, 4]]
    assert values(pa.list_(pa.int64(), 2), -1) == [[1, -1], [-1, -1], [3, 4]]
    np.testing.assert_equal(values(pa.list_(pa.float64(), 2), np.nan), [[1, np.nan], [np.nan, np.nan], [3, 4]])
    np.testing.assert_equal(values(pa.list_(pa.float64()), []), [[1, np.nan], [], [3, 4]])
    lists = pa.array([[[1], None], None, [[None, 2]]])
    rows = source(tmp_path, pa.table({"c": lists}))(missing={"c": 0})
    assert [row["c"].tolist() for row in rows] == [[[1], []], [], [[0, 2]]]


def test_slices_of_lists_of_a_fixed_size():
    array = pa.array([[1, 2], None, [3, None], [5, 6]], pa.list_(pa.int64(), 2))
    filled = [[1, 2], [0, 0], [3, 0], [5, 6]]
    for start in range(4):
        (leaf,) = leaves_of(array[start:], Place("it"), 0)
        assert leaf.tolist() == filled[start:]


def test_fields_without_nulls_need_no_replacement(tmp_path):
    rows = [{"x": 1, "y": "a", "in": {"n": 1, "f": True}}, {"x": 2, "y": None, "in": {"n": None, "f": False}}]
    for source in SOURCES:
        read = source(tmp_path, pa.table({"c": pa.array(rows)}))
        actual = [row["c"] for row in read(missing={"c": {"y": "", "in": {"n": -1}}})]
        assert [(row["x"], row["y"], row["in"]["n"], row["in"]["f"]) for row in actual] == [
            (1, "a", 1, True),
            (2, "", -1, False),
        ]
    path = tmp_path / "a.jsonl"
    path.write_text('{"c": {"x": 1, "in": {"y": [1, null]}}}\n{"c": {"x": 2, "in": {"y": null}}}\n')
    actual = [row["c"] for row in read_json(path, missing={"c": {"in": {"y": 7}}})]
    assert [(int(row["x"]), row["in"]["y"].tolist()) for row in actual] == [(1, [1, 7]), (2, [])]


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"z": 0}, "give a dict by field, of 'x', 'in', not"),
        ({"x": "a"}, "'a' cannot stand for a null of .*column 'c', 'x': Could not convert"),
        ({"in": 0}, "column 'c', 'in', which holds structs, give a dict by field, of 's', 'l', not 0"),
        (
            {"in": {"l": [0]}},
            r"\[0\] cannot stand for a null of .*column 'c', 'in', 'l'.*: \[\] can stand for a null list",
        ),
        ({"in": {"s": []}}, r"\[\] cannot stand for a null of .*column 'c', 'in', 's'"),
        ({"x": 1.5, "in": {"l": "a"}}, "'a' cannot stand for a null of .*column 'c', 'in', 'l'"),
    ],
)
def test_replacements_that_do_not_fit_a_field(tmp_path, missing, message):
    read = write_parquet(tmp_path, pa.table({"c": pa.array([None], KIND)}))
    with pytest.raises(errors.ArgumentError, match=message):
        read(missing={"c": missing})


@pytest.mark.parametrize("missing", [[], [0, 0], (0,)])
def test_lists_do_not_replace_lists_of_a_fixed_size(tmp_path, missing):
    read = write_arrow(tmp_path, pa.table({"c": pa.array([[1, 2], None], pa.list_(pa.int64(), 2))}))
    with pytest.raises(errors.ArgumentError, match=r"cannot stand for a null of .*column 'c'.*: one value can stand"):
        read(missing={"c": missing})
