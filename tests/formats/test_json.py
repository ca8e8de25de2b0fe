"""JSON: elements of objects, splits of files, and messages about values that do not fit."""

from __future__ import annotations

import gzip
import json
import pickle

import dask
import fsspec
import numpy as np
import pyarrow as pa
import pytest
from compressed import compressed_files
from conftest import TESTS

from daskdist import Options, TensorSpec, errors, read_csv, read_files, read_json
from daskdist.core.dataset_base import element_spec_of, node_of
from daskdist.formats.json.json_format import Json
from daskdist.storage.first_file import FirstFile
from daskdist.testing import FormatLaws

TEXT = np.dtypes.StringDType()
PENGUINS = TESTS / "data" / "penguins.json"
DTYPES = {"n": "int64", "f": "float64", "s": "str", "at": {"x": "float32", "on": "bool"}, "tags": ["int64"]}


def objects(numbers):
    return [
        {"n": k, "f": k / 4, "s": "ü\n" * (k % 3), "at": {"x": k / 2, "on": k % 2 == 0}, "tags": [k] * (k % 3)}
        for k in numbers
    ]


def elements(numbers):
    text = np.array([value["s"] for value in objects(range(50))], TEXT)
    return [
        {
            "n": np.int64(k),
            "f": np.float64(k / 4),
            "s": text[k],
            "at": {"x": np.float32(k / 2), "on": np.bool_(k % 2 == 0)},
            "tags": np.array([k] * (k % 3), np.int64),
        }
        for k in numbers
    ]


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def write(tmp_path):
    def write(content, name="a.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


# --- laws ---


class TestLines(FormatLaws):
    split_bytes = 100

    def make_format(self):
        return Json(dtypes=DTYPES)

    def write(self, directory):
        written = {}
        for number, numbers in enumerate([range(8), range(0), range(8, 11)]):
            path = directory / f"{number}.jsonl"
            path.write_text(lines(objects(numbers)))
            written[str(path)] = elements(numbers)
        return written


class TestLinesCompressed(TestLines):
    def write(self, directory):
        return compressed_files(super().write(directory), "gz", gzip.compress)


class TestArrays(TestLines):
    def write(self, directory):
        written = {}
        for number, numbers in enumerate([range(8), range(0), range(8, 11)]):
            path = directory / f"{number}.json"
            path.write_text(json.dumps(objects(numbers), indent=number or None))
            written[str(path)] = elements(numbers)
        return written

    def test_edge_cases_of_the_format_are_covered(self, tmp_path):
        form, files = self.make_format(), self.write(tmp_path)
        path = next(iter(files))
        assert [split.label for split in form.list_splits(path, 0, FirstFile(path, form.spec(path)))] == [
            f"{path} as a whole"
        ]


class TestSomeFields(TestLines):
    def make_format(self):
        return Json({"x": ["n", "f"], "s": "s"}, dtypes=DTYPES)

    def write(self, directory):
        return {
            path: [{"x": np.array([row["n"], row["f"]]), "s": row["s"]} for row in rows]
            for path, rows in super().write(directory).items()
        }


# --- what objects become ---


def test_penguins():
    missing = {"Body Mass (g)": -1, "Flipper Length (mm)": float("nan"), "Sex": ""}
    ds = read_json(PENGUINS, missing=missing)
    assert ds.element_spec["Species"] == TensorSpec((), TEXT)
    assert ds.element_spec["Body Mass (g)"] == TensorSpec((), "int64")
    assert ds.element_spec["Flipper Length (mm)"] == TensorSpec((), "float64")
    (batch,) = ds.batch(1000)
    own = json.loads(PENGUINS.read_text())
    assert len(own) == len(batch["Species"]) == 344
    for name, column in batch.items():
        stands = missing.get(name, float("nan"))
        expected = [stands if value[name] is None else value[name] for value in own]
        np.testing.assert_array_equal(column, np.array(expected, column.dtype), err_msg=name)
    assert np.isnan(batch["Beak Length (mm)"]).sum() == 2
    assert (batch["Sex"] == "").sum() == 10
    with pytest.raises(errors.FileError, match=r"'Body Mass \(g\)' of type int64 has 2 nulls.*missing="):
        list(read_json(PENGUINS))


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (["1", "-2"], "int64"),
        (["1", "18446744073709551615"], "uint64"),
        (["1", "2.5"], "float64"),
        (["-1", "1e3"], "float64"),
        (["null", "null"], "float64"),
        (["true", "false"], "bool"),
        (['"a"', '"2024-02-29T00:00:00"'], TEXT),
        (['"2024-02-29"', '"2024-02-29"'], TEXT),
    ],
)
def test_types_are_inferred_from_the_sample(write, values, dtype):
    path = write("".join(f'{{"a": {value}}}\n' for value in values))
    ds = read_json(path, "a")
    assert ds.element_spec == TensorSpec((), dtype)
    expected = [np.nan if value == "null" else json.loads(value) for value in values]
    np.testing.assert_array_equal(list(ds), np.array(expected, dtype).tolist())


def test_fields_that_objects_lack_are_null(write):
    path = write('{"a": 1}\n{"b": 2.5}\n{"at": {"x": 1}}\n{"at": {"y": 2.0}}\n')
    given = list(read_json(path, missing={"a": -1, "at": {"x": -2}}))
    assert [int(part["a"]) for part in given] == [1, -1, -1, -1]
    assert [int(item["at"]["x"]) for item in given] == [-2, -2, 1, -2]
    np.testing.assert_array_equal([value["at"]["y"] for value in given], [np.nan, np.nan, np.nan, 2])
    with pytest.raises(errors.ArgumentError, match=r"'at', which holds structs, give a dict by field, of 'x', 'y'"):
        read_json(path, missing={"at": -1})
    with pytest.raises(errors.ArgumentError, match="missing: no column 'z'"):
        read_json(path, missing={"z": -1})


def test_dtypes_of_users(write):
    path = write('{"a": 1, "t": "2024-02-29T10:00:00+02:00", "b": "hi", "at": {"x": 1, "y": 2}, "v": [1]}\n')
    dtypes = {"a": np.float32, "t": "datetime64[ms]", "b": bytes, "at": {"x": "int8"}, "v": ["float32"], "z": "float64"}
    (element,) = read_json(path, dtypes=dtypes)
    assert element["a"].dtype == np.float32
    assert element["t"] == np.datetime64("2024-02-29T08:00:00", "ms")
    assert element["b"] == b"hi"
    assert (element["at"]["x"].dtype, element["at"]["y"].dtype) == (np.int8, np.int64)
    assert element["v"].dtype == np.float32
    assert np.isnan(element["z"])
    assert next(iter(read_json(path, "a", dtypes={"a": pa.decimal128(5, 2)}))) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtypes": {"a": "float16"}}, "'a' is 'float16', which JSON cannot become"),
        ({"dtypes": {"a": "datetime64[D]"}}, "which JSON cannot become"),
        ({"dtypes": {"a": "nonsense"}}, "give a dtype, such as 'float32'"),
        ({"dtypes": {"a": [1, 2]}}, r"for a list give \[dtype\]"),
        ({"dtypes": {"a": pa.duration("s")}}, "is not supported"),
        ({"dtypes": "int64"}, "give a dict by field"),
        ({"dtypes": {1: "int64"}}, "1 is not the name of a field"),
        ({"lines": "yes"}, "lines is 'yes'"),
        ({"sample_bytes": 0}, "sample_bytes is 0"),
        ({"compression": "rar"}, "compression is 'rar'"),
        ({"columns": "z"}, "no column 'z'; there are 'a'"),
    ],
)
def test_options_that_are_wrong(write, options, message):
    with pytest.raises(errors.ArgumentError, match=message):
        read_json(write('{"a": 1}\n'), **options)


# --- what does not fit ---


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ('{"a": 2.5}', r"the field 'a' is 2.5, but int64 is expected; write dtypes={'a': 'float64'}"),
        ('{"a": 18446744073709551615}', r"write dtypes={'a': 'uint64'}"),
        ('{"a": "x"}', r"the field 'a' is 'x', but int64 is expected; leave it out with columns="),
        ('{"a": true}', r"the field 'a' is True, but int64 is expected"),
        ('{"at": {"x": 1.5}}', r"the field 'at.x' is 1.5.*write dtypes={'at': {'x': 'float64'}}"),
        ('{"v": [1, 0.5]}', r"the field 'v.\[\]' is 0.5.*write dtypes={'v': \['float64'\]}"),
        ('{"a": 1', "it is not JSON: .*give lines=False"),
        ("[1]", "it is not an object"),
        ('{"a": 1}{"a": 2}', "it is not JSON: Extra data"),
        ('{"a": 1, "a": 2}', "was specified twice"),
        ('{"a": ' + "[" * 3000 + "]" * 3000 + "}", "it is nested too deeply|but int64 is expected"),
    ],
)
def test_later_values_of_another_type(write, second, message):
    first = '{"a": 1, "at": {"x": 1}, "v": [1], "e": null}'
    path = write(f"{first}\n" * 20 + f"{second}\n" + f"{first}\n" * 20)
    ds = read_json(path, missing={"a": 0, "at": {"x": 0}, "v": []}, sample_bytes=60)
    with pytest.raises(errors.FileError, match=message) as caught:
        list(ds)
    assert f"{path} bytes 0 to" in str(caught.value)
    assert "its line 20" in str(caught.value)
    given = list(iterator := iter(ds.ignore_errors()))
    assert len(given) == 40
    assert iterator.stats()["skipped_by_file"] == {path: 1}


# No sampled record has a value of the field: the file is not damaged.
@pytest.mark.parametrize(
    ("second", "message"),
    [
        ('{"a": 1, "b": "x"}', r"the field 'b' is in none.*write dtypes={'b': 'str'} to read it"),
        ('{"a": 1, "b": {"c": [1.5]}}', r"write dtypes={'b': {'c': \['float64'\]}}"),
        ('{"at": {"z": 1}}', r"the field 'at.z' is in none.*write dtypes={'at': {'z': 'int64'}}"),
        ('{"e": 1}', r"the field 'e' is 1, but null is expected; write dtypes={'e': 'int64'}"),
        ('{"a": 1, "b": null}', r"the field 'b' is in none.*select other columns"),
    ],
)
def test_later_fields_without_sampled_values_are_an_error_also_when_damage_is_left_out(write, second, message):
    first = '{"a": 1, "at": {"x": 1}, "v": [1], "e": null}'
    path = write(f"{first}\n" * 20 + f"{second}\n" + f"{first}\n" * 20)
    ds = read_json(path, missing={"a": 0, "at": {"x": 0}, "v": []}, sample_bytes=60)
    for each in (ds, ds.ignore_errors(), ds.with_options(Options(on_error="skip"))):
        with pytest.raises(errors.FileError, match=message) as caught:
            list(each)
        assert type(caught.value) is errors.FileError
        assert "line 20" in str(caught.value)
        assert str(path) in str(caught.value)


# A schema that differs and a type of the user's that does not fit are no damage.
@pytest.mark.parametrize(
    ("first", "second", "dtypes", "message"),
    [
        ("1", "2.5", None, "'a' is float64 in all 30 .* as 2.5, but int64 is expected; write dtypes={'a': 'float64'}"),
        ("1", '"x"', None, "'a' is str in all 30 .* as 'x', but int64 is expected; write dtypes={'a': 'str'}"),
        ('{"b": 1}', '{"b": 1.5}', None, "'a.b' is float64 in all 30 .*write dtypes={'a': {'b': 'float64'}}"),
        ("[1, 2]", "[1, 2.5]", None, r"'a' is \['float64'\] in all 30 .*write dtypes={'a': \['float64'\]}"),
        ("1", "2", {"a": "str"}, "'a' is int64 in all 30 .*but string is expected; write dtypes={'a': 'int64'}"),
        ("1", "300", {"a": "int8"}, "'a' is int64 in all 30 .*but int8 is expected; write dtypes={'a': 'int64'}"),
        (
            "1",
            "1" + "0" * 20,
            None,
            "'a' is 10+, which does not fit into 64 bits, and int64 is expected in the 30 records",
        ),
        ('"2024-01-01"', '"1600-01-01"', {"a": "datetime64[ns]"}, "'a' is str in all 30 .*write dtypes={'a': 'str'}"),
        ('"2024-01-01"', "2", {"a": "datetime64[s]"}, "'a' is int64 in all 30 .*but timestamp.*dtypes={'a': 'int64'}"),
    ],
)
@pytest.mark.parametrize("columns", [None, ["a"]])
def test_values_of_another_type_are_an_error_also_when_damage_is_left_out(
    write, first, second, dtypes, message, columns
):
    # Objects without a value, and lines that are no objects, do not matter.
    paths = [
        write(f'{{"a": {first}}}\n' * 30, "a.jsonl"),
        write(f'{{"a": {second}}}\n' * 30 + '{"a": null}\nx\n[]\n', "b.jsonl"),
    ]
    skipping = read_json(paths, columns, dtypes=dtypes).with_options(Options(on_error="skip"))
    with pytest.raises(errors.FileError, match=message) as caught:
        list(skipping)
    assert type(caught.value) is errors.FileError
    assert paths[1] in str(caught.value) or dtypes


def test_a_field_that_all_objects_of_a_file_lack_is_an_error_even_with_skip(write):
    paths = [write('{"x": 1, "y": 2}\n' * 20, "a.jsonl"), write('{"x": 1}\n' * 20, "b.jsonl")]
    with pytest.raises(errors.FileError, match=r"column 'y' of type int64 .*missing=.*; all objects lack it") as caught:
        list(read_json(paths).with_options(Options(on_error="skip")))
    assert type(caught.value) is errors.FileError
    assert paths[1] in str(caught.value)
    assert len(list(read_json(paths, ["x"]))) == len(list(read_json(paths, missing={"y": 0}))) == 40
    # A single object may be damaged.
    write('{"x": 1}\n{"x": 1, "y": 2}\n' * 10, "b.jsonl")
    assert len(list(read_json(paths).with_options(Options(on_error="skip")))) == 30


def test_numbers_beyond_floats_are_infinite_in_csv_and_damage_in_json(write):
    json_path, csv_path = (
        write('{"x": 1.5}\n' * 20 + '{"x": 1e400}\n'),
        write("x\n" + "1.5\n" * 20 + "1e400\n", "a.csv"),
    )
    assert len(list(read_json(json_path).with_options(Options(on_error="skip")))) == 20
    assert [float(row["x"]) for row in read_csv(csv_path)] == [1.5] * 20 + [float("inf")]


def test_single_values_of_another_type_are_damage(write):
    paths = [
        write('{"a": 1, "b": 1}\n' * 30, "a.jsonl"),
        write('{"a": 1.5, "b": 1}\n{"a": 2, "b": "x"}\n', "c.jsonl"),
        write('{"a": 1.5, "b": 1}\n{"a": null, "b": 1}\nx\n', "d.jsonl"),
    ]
    kept = iter(read_json(paths).with_options(Options(on_error="skip")))
    assert [(int(item["a"]), int(item["b"])) for item in kept] == [(1, 1)] * 30
    assert kept.stats()["num_skipped"] == 2 + 3


def test_the_advice_of_the_message_works(write):
    path = write('{"a": 1}\n{"a": 2.5, "b": "x"}\n')
    given = list(read_json(path, dtypes={"a": "float64", "b": "str"}, missing={"b": ""}, sample_bytes=9))
    assert [(float(item["a"]), item["b"]) for item in given] == [(1.0, ""), (2.5, "x")]
    # Columns that are not selected may hold anything.
    assert [float(value) for value in read_json(path, "a", dtypes={"a": "float32"}, sample_bytes=9)] == [1, 2.5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n{"a": "x"}\n', "the field 'a' is a number in some records, but text in others"),
        ('{"a": [1]}\n{"a": [{}]}\n', "is a number in some records, but an object in others"),
        ('{"a": -1}\n{"a": 18446744073709551615}\n', "is negative in some records, but too large for int64"),
        ('{"a": 99999999999999999999}\n', "is 99999999999999999999, which does not fit into 64 bits"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}\n", "is nested more than 32 levels deep"),
        ('{"a": [{"b": 1}]}\n', "lists of structs, which cannot form an array"),
        ("", "no object from which types can be inferred"),
        ("{}\n", "no object from which types can be inferred"),
        ("not json\n", "no object from which types can be inferred"),
    ],
)
def test_columns_without_a_type(write, content, message):
    path = write(content)
    with pytest.raises(errors.FileError, match=message) as caught:
        read_json(path)
    assert path in str(caught.value)


def test_a_field_of_no_type_can_be_left_out_or_given_one(write):
    path = write('{"a": 99999999999999999999, "b": 1}\n{"a": "x", "b": 2}\n')
    assert [int(item) for item in read_json(path, "b")] == [1, 2]
    path = write('{"a": 99999999999999999999}\n')
    assert [float(value) for value in read_json(path, "a", dtypes={"a": "float64"})] == [1e20]


def test_text_that_is_no_utf8(write):
    path = write(b'{"s": "fine"}\n{"s": "\xff"}\n{"s": "too"}\n')
    ds = read_json(path, "s")
    with pytest.raises(errors.FileError, match=r"its line 1.*is not JSON: 'utf-8'"):
        list(ds)
    assert list(ds.ignore_errors()) == ["fine", "too"]


def test_invalid_times_are_an_error(write):
    path = write('{"t": "2024-02-29"}\n{"t": "soon"}\n')
    with pytest.raises(errors.FileError, match=r"the field 't' is 'soon', which does not become timestamp\[s\]"):
        list(read_json(path, dtypes={"t": "datetime64[s]"}))


def test_only_lines_with_nulls_are_left_out(write):
    path = write('{"a": 1}\n{"a": null}\n{"a": 3}\n')
    given = list(iterator := iter(read_json(path, "a").ignore_errors()))
    assert [int(value) for value in given] == [1, 3]
    assert iterator.stats()["skipped_by_file"] == {path: 1}


# --- files ---


@pytest.mark.parametrize(
    "content",
    [
        '{"a": 1}\n{"a": 2}',
        '\ufeff{"a": 1}\r\n\r\n  \n{"a": 2}\r\n',
        '[{"a": 1}, {"a": 2}]',
        '\ufeff [\n {\n "a": 1\n },\n {"a":\n2}\n]\n',
        '{\n  "a": 1\n}\n{\n  "a": 2\n}\n',
        '{"a":\n1}  {"a": 2}',
    ],
)
@pytest.mark.parametrize("split_bytes", [1, 9, 1000])
def test_where_objects_are(write, content, split_bytes):
    path = write(content)
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        assert [int(value) for value in read_json(path, "a")] == [1, 2]


@pytest.mark.parametrize("split_bytes", [1, 1000])
@pytest.mark.parametrize("content", ['null\n{"a": 1}\n', '{"a": 1}\nnull\n', '\n null\n{"a": 1}', '{"a": 1}\n\tnull'])
def test_null_in_place_of_an_object_is_an_error(write, content, split_bytes):
    path = write(content)
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        ds = read_json(path, "a", lines=True)
        with pytest.raises(errors.FileError, match=r"null.*it is not an object"):
            list(ds)
        kept = iter(ds.ignore_errors())
        assert [int(value) for value in kept] == [1]
        assert kept.stats()["num_skipped"] == 1


@pytest.mark.parametrize("split_bytes", [5, 1000])
def test_objects_over_several_lines_are_errors_with_lines(write, split_bytes):
    path = write('{"a": 1}\n{"a":\n2}\n')
    with (
        dask.config.set({"daskdist.split-bytes": split_bytes}),
        pytest.raises(errors.FileError, match=r"it is not JSON: .*give lines=False"),
    ):
        list(read_json(path, dtypes={"a": "int64"}, lines=True))
    assert [int(value["a"]) for value in read_json(path, lines=False)] == [1, 2]


@pytest.mark.parametrize(
    ("content", "kept", "message"),
    [
        ('[{"a": 1}, {"a": 2}, {"a":', 2, "object 2 of it is not JSON"),
        ('[{"a": 1}, {"a": 2}', 2, "before the end of the array"),
        ('[{"a": 1} {"a": 2}]', 1, "',' or ']' is expected"),
        ('[{"a": 1}]x', 1, "data after the end of the array"),
        ('[{"a": 1}, 5, {"a": 3}]', 2, "its object 1, b'5': it is not an object"),
    ],
)
def test_arrays_that_are_broken(write, content, kept, message):
    ds = read_json(write(content), "a", dtypes={"a": "int64"})
    with pytest.raises(errors.FileError, match=message):
        list(ds)
    given = list(iterator := iter(ds.ignore_errors()))
    assert len(given) == kept
    assert sum(iterator.stats()["skipped_by_file"].values()) == 1


def test_the_first_file_tells_the_types_and_workers_do_not_ask_again(write, monkeypatch):
    paths = [write("", "a.jsonl"), write('{"a": 1}\n', "b.jsonl"), write('[{"a": 2.5}]', "c.json")]
    ds = read_json(paths[:2], "a")
    assert [int(element) for element in ds] == [1]
    form = node_of(ds).format
    assert form.schema is not None
    moved = pickle.loads(pickle.dumps(form))
    monkeypatch.setattr(Json, "_kind", None)
    assert moved.spec(paths[2]) == element_spec_of(ds)
    (split,) = moved.list_splits(paths[2], 0, FirstFile(paths[1], element_spec_of(ds)))
    with pytest.raises(errors.FileError, match=r"c\.json as a whole: its object 0.*dtypes={'a': 'float64'}"):
        moved.read(split)


def test_directories_urls_and_partitions(tmp_path):
    for day in (1, 2):
        folder = tmp_path / f"day={day}"
        folder.mkdir()
        (folder / "a.json.gz").write_bytes(gzip.compress(lines([{"a": day}]).encode()))
    assert [(int(x["a"]), int(x["day"])) for x in read_json(tmp_path)] == [(1, 1), (2, 2)]
    assert [int(x) for x in read_json(tmp_path, "day")] == [1, 2]
    assert list(read_json(tmp_path, partitioned=False).element_spec) == ["a"]
    fs = fsspec.filesystem("memory")
    try:
        fs.pipe("/json/a.jsonl", b'{"a": 7}\n')
        assert [int(x["a"]) for x in read_json("memory://json/*.jsonl")] == [7]
        assert [int(x["a"]) for x in read_files("memory://json")] == [7]
    finally:
        fs.rm("/json", recursive=True)


def test_lists_of_one_length_batch(write):
    path = write(lines([{"v": [k, k + 1]} for k in range(5)]))
    np.testing.assert_array_equal(next(iter(read_json(path, "v").batch(5))), [[k, k + 1] for k in range(5)])
    path = write(lines([{"v": [0] * k} for k in range(3)]))
    with pytest.raises(errors.StackError, match=r"int64\[0\], int64\[1\], int64\[2\]"):
        list(read_json(path, "v").batch(3))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "it is empty"),
        ("\n \n", "it is empty"),
        ("<html>\n<body>403", "begins with b'<html>', like HTML or XML"),
        ("a,b\n1,2\n", "begins with b'a,b', like delimited text, which read_csv reads"),
        ("{'a': 1}\n{'a': 2}\n", "like a Python dict, .* double quotes"),
        ("[1, 2]", "which is JSON, but not an object"),
        ("null\nnull\n", "which is JSON, but not an object"),
        ("{}\n", "which is JSON, but without fields"),
        ("hello\n", "begins with b'hello', which is not JSON"),
        ('{"a": 1,}\n', "which is not JSON"),
    ],
)
def test_a_file_that_is_not_json_is_described_by_its_likely_format(tmp_path, content, told):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(
        errors.FileError, match=rf"a\.json: there is no object from which types can be inferred.*: .*{told}.*dtypes="
    ):
        read_json(tmp_path / "a.json")
