"""`select`, ``ds["name"]``, `rename` and `columns`; and that readers read no other columns then."""

from __future__ import annotations

from collections import namedtuple

import dask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from daskdist import Dataset, errors, read_arrow, read_csv, read_json, read_parquet
from daskdist.core.dataset_base import node_of
from daskdist.testing import never_run, same_elements

Point = namedtuple("Point", ["x", "y"])


def named():
    return Dataset.range(3).map(lambda k: {"b": k, "a": (k, k + 1), "c": {"d": -k}})


def tuples():
    return Dataset.range(3).map(lambda k: (k, {"d": -k}))


def points():
    return Dataset.range(3).map(lambda k: Point(k, -k))


@pytest.mark.parametrize(
    ("build", "last"),
    [
        (lambda: named().select(["c", "b"]), {"c": {"d": -2}, "b": 2}),
        (lambda: named().select(["a"]), {"a": (2, 3)}),
        (lambda: named()["a"], (2, 3)),
        (lambda: named()[["b", "c"]], {"b": 2, "c": {"d": -2}}),
        (lambda: tuples().select(1), {"d": -2}),
        (lambda: tuples().select([1, 0]), ({"d": -2}, 2)),
        (lambda: points()["y"], -2),
        (lambda: points()[["y"]], {"y": -2}),
        (lambda: named().rename({"b": "c", "c": "b"}), {"c": 2, "a": (2, 3), "b": {"d": -2}}),
        (lambda: points().rename({"x": "u"}), {"u": 2, "y": -2}),
        (lambda: tuples().rename({0: "n", 1: "m"}), {"n": 2, "m": {"d": -2}}),
        (lambda: named().shuffle(1).take(3)["c"]["d"], -2),
    ],
)
def test_elements(build, last):
    elements = list(build())
    same_elements(elements[-1:], [np.int64(last) if isinstance(last, int) else last], "the last")
    if isinstance(last, dict):
        assert list(elements[-1]) == list(last)
        assert build().columns == list(last)
    with never_run():
        assert build().element_spec is not None


def test_columns():
    assert named().columns == ["b", "a", "c"]
    assert tuples().columns == [0, 1]
    assert points().columns == ["x", "y"]
    assert Dataset.range(3).columns == []
    assert [batch.tolist() for batch in named().batch(2)["b"]] == [[0, 1], [2]]


def test_elements_of_different_shapes():
    uneven = Dataset.range(4).map(lambda k: {"n": k, "x": np.full(int(k), k)})
    assert [item.tolist() for item in uneven["x"]] == [[], [1], [2, 2], [3, 3, 3]]
    assert [int(value["m"]) for value in uneven.rename({"n": "m"})] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: named().select(["b", "z"]), ["select", "no column 'z'", "'b', 'a', 'c'"]),
        (lambda: named()["z"], ["no column 'z'"]),
        (lambda: named()[0], ["by 0", "take and skip"]),
        (lambda: named()[1:2], ["slice", "take and skip"]),
        (lambda: Dataset.range(3)["a"], ["no column 'a'", "lone values"]),
        (lambda: named().select([]), ["no columns"]),
        (lambda: named().select(1.5), ["1.5"]),
        (lambda: named().rename({"z": "y"}), ["rename", "no column 'z'"]),
        (lambda: named().rename({"a": "b"}), ["two columns", "'b'"]),
        (lambda: named().rename({"a": 1}), ["new name 1"]),
        (lambda: named().rename(["a"]), ["rename", "dict"]),
        (lambda: Dataset.range(3).rename({"a": "b"}), ["no column 'a'", "lone values"]),
    ],
)
def test_invalid_arguments(build, says):
    with pytest.raises(errors.ArgumentError) as caught:
        build()
    for phrase in says:
        assert phrase in str(caught.value)


@pytest.fixture(params=["parquet", "arrow", "csv", "json"])
def reader(request, tmp_path):
    table = pa.table({"a": [1, 2, 3], "b": [1.5, 2.5, 3.5], "c": ["x", "y", "z"]})
    path = str(tmp_path / f"data.{request.param}")
    if request.param == "parquet":
        pq.write_table(table, path)
        return lambda columns=None: read_parquet(path, columns)
    if request.param == "arrow":
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
        return lambda columns=None: read_arrow(path, columns)
    frame = table.to_pandas()
    if request.param == "csv":
        frame.to_csv(path, index=False)
        return lambda columns=None: read_csv(path, columns=columns)
    frame.to_json(path, orient="records", lines=True)
    return lambda columns=None: read_json(path, columns=columns)


@pytest.mark.parametrize(
    ("build", "columns"),
    [
        (lambda ds: ds.select(["c", "a"]), ["c", "a"]),
        (lambda ds: ds["b"], "b"),
        (lambda ds: ds.take(2).prefetch(1)["b"], "b"),
        (lambda ds: ds[["b", "a"]]["a"], "a"),
        (lambda ds: ds.rename({"a": "x"})[["x", "b"]], {"x": "a", "b": "b"}),
        (lambda ds: ds.rename({"a": "x"})["x"], "a"),
    ],
)
def test_readers_read_no_other_columns(reader, build, columns):
    ds = build(reader())
    assert "select" not in ds.explain("pipeline")
    assert "rename" not in ds.explain("pipeline")
    number = 2 if "take" in ds.explain("pipeline") else 3
    same_elements(list(ds), list(reader(columns).take(number)), "as the reader's own columns")
    node = node_of(ds)
    while node.inputs:
        (node,) = node.inputs
    same = list(columns) if isinstance(node.format.columns, list) else columns
    assert node.format.columns == ({name: name for name in same} if isinstance(same, list) else same)


def test_columns_that_are_needed_are_read(reader):
    ds = reader()
    assert [int(x) for x in ds.filter(lambda row: row["b"] > 2)["a"]] == [2, 3]
    side_by_side = reader({"x": ["a", "b"], "y": "c"})
    assert [x.tolist() for x in side_by_side["x"]] == [[1.0, 1.5], [2.0, 2.5], [3.0, 3.5]]
    assert [str(y) for y in side_by_side["y"]] == ["x", "y", "z"]
    with pytest.raises(errors.ArgumentError, match="no column 'z'"):
        ds["z"]


@pytest.mark.parametrize("vectorized", [None, False])
@pytest.mark.parametrize("kept", [(), (7,), (0, 9)])
def test_blocks_of_which_a_filter_leaves_nothing(kept, vectorized):
    with dask.config.set({"daskdist.split-bytes": 16, "daskdist.bundle-bytes": 16}):
        ds = Dataset.from_tensor_slices({"a": range(10), "b": range(10)}).filter(lambda row: row["a"] in kept)
        ds = ds.map(lambda row: {"c": row["a"], "d": row["b"]}, vectorized=vectorized)
        assert list(ds.select("c")) == list(kept)
        assert [list(row) for row in ds.rename({"c": "e"}).select(["d", "e"])] == [["d", "e"]] * len(kept)
        assert [len(part) for part in ds.batch(2).select("d")] == ([len(kept)] if kept else [])


@pytest.mark.parametrize(
    "build",
    [
        lambda a, b: a.concatenate(b),
        lambda a, b: Dataset.choose_from_datasets([a, b], Dataset.from_list([0, 1])),
        lambda a, b: Dataset.sample_from_datasets([a, b], seed=1).shuffle(1),
    ],
)
@pytest.mark.parametrize("is_batched", [False, True])
def test_dicts_of_several_datasets_have_the_order_of_the_first(build, is_batched):
    a = Dataset.from_list([{"y": 1, "x": {"d": 2, "c": 3}}])
    b = Dataset.from_list([{"x": {"c": 30, "d": 20}, "y": 10}])
    ds = build(a.batch(1), b.batch(1)).unbatch() if is_batched else build(a, b)
    expected = [[1, 2, 3], [10, 20, 30]]

    def values(row):
        return np.stack([row["y"], *row["x"].values()]) if list(row) == ["y", "x"] else np.zeros(3, np.int64)

    for same in (
        ds.map(values),
        ds.map(values, vectorized=False),
        ds.batch(1).map(lambda row: row).unbatch().map(values),
    ):
        assert sorted(row.tolist() for row in same) == expected
    rows = sorted((int(row["y"]), [list(row), list(row["x"])]) for row in ds)
    assert rows == [(1, [["y", "x"], ["d", "c"]]), (10, [["y", "x"], ["d", "c"]])]


def classes(spelling):
    flag = np.arange(400) % 4 == 0
    rows = {"n": np.arange(400) % 7 + 1, "label": flag.astype(np.int64), "flag": flag, "v": np.zeros((400, 3))}
    return Dataset.from_tensor_slices(rows if spelling == "dict" else tuple(rows.values()))


@pytest.mark.parametrize("spelling", ["dict", "tuple"])
@pytest.mark.parametrize(
    ("build", "column", "value"),
    [
        (lambda ds, by: ds.rejection_resample(by, [0.5, 0.5], [0.75, 0.25], seed=1), "label", lambda row: row[1]),
        (lambda ds, by: ds.rejection_resample(by, [0.5, 0.5], [0.75, 0.25], seed=1), "flag", lambda row: int(row[2])),
        (lambda ds, by: ds.group_by_window(by, lambda key, window: window.batch(3), 3), "n", lambda row: row[0]),
        (
            lambda ds, by: ds.group_by_window(by, lambda key, window: window.batch(3), 3),
            "flag",
            lambda row: int(row[2]),
        ),
        (lambda ds, by: ds.bucket_by_sequence_length(by, [3, 5], [2, 3, 4]), "n", lambda row: row[0]),
        (lambda ds, by: ds.bucket_by_sequence_length(by, [3, 5], [2, 3, 4]), "v", lambda row: len(row[3])),
        (lambda ds, by: ds.batch_by_size(30, by), "n", lambda row: row[0]),
        (lambda ds, by: ds.batch_by_size(30, by), "v", lambda row: len(row[3])),
    ],
)
def test_the_name_of_a_column_stands_for_a_function_that_returns_it(build, column, value, spelling):
    ds = classes(spelling)
    by = column if spelling == "dict" else ["n", "label", "flag", "v"].index(column)
    expected = build(ds, lambda *row: value(list(row[0].values()) if spelling == "dict" else row))
    same_elements(list(build(ds, by)), list(expected), "by name")
    with pytest.raises(errors.ArgumentError, match=r": there is no column 'other'; there are "):
        build(ds, "other")


def test_unique_of_a_column_is_not_taken_for_the_name_of_the_operation():
    ds = Dataset.from_tensor_slices({"a": [1, 1, 2], "b": [1, 2, 3]})
    with pytest.raises(errors.ArgumentError, match=r"is 'a', which is a column; .* write ds\['a'\]\.unique\(\)"):
        ds.unique("a")
    assert [int(x) for x in ds["a"].unique("a")] == [1, 2]
    assert len(list(ds.unique("other"))) == 3
