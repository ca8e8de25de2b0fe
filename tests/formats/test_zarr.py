"""Zarr: v2 and v3, chunks and shards, several arrays, damaged chunks, and stores written in parts."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import shutil
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask
import fsspec
import numpy as np
import pytest
import zarr
from fsspec import AbstractFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

import daskdist
from daskdist import Dataset, Options, TensorSpec, errors, read_files, read_zarr
from daskdist.core.block import from_items
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import LONE, Structure
from daskdist.formats.zarr import Zarr, unfinished_store
from daskdist.storage.first_file import FirstFile
from daskdist.testing import FormatLaws
from daskdist.testing.formats import spoiled

# The v3 specification does not define some of these dtypes yet; they are read as in v2.
pytestmark = pytest.mark.filterwarnings("ignore:The data type")

TEXT = np.dtypes.StringDType()


def write_group(path, arrays, chunk_rows=7, *, zarr_format=3, **options):
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    for name, array in arrays.items():
        rows = chunk_rows[name] if isinstance(chunk_rows, dict) else chunk_rows
        made = group.create_array(
            name, shape=array.shape, dtype=array.dtype, chunks=(rows, *array.shape[1:]), **options
        )
        made[:] = array
    return str(path)


class TestZarr(FormatLaws):
    split_bytes = 100
    zarr_format = 3

    def make_format(self):
        return Zarr()

    def write(self, directory):
        x, y = np.arange(80, dtype=np.float32).reshape(40, 2), np.arange(40) % 5
        written = {}
        for number, part in enumerate((slice(0, 40), slice(0, 0), slice(3, 10))):
            path = write_group(directory / f"{number}.zarr", {"x": x[part], "y": y[part]}, zarr_format=self.zarr_format)
            written[path] = [{"x": a, "y": b} for a, b in zip(x[part], y[part], strict=True)]
        return written

    def test_garbage_in_metadata_is_a_file_error(self, tmp_path):
        (path, *_) = self.write(tmp_path)
        form = self.make_format()
        first = FirstFile(path, form.spec(path))
        messages = []
        files = [value for value in Path(path).rglob("*") if value.name in ("zarr.json", ".zarray", ".zgroup")]
        assert len(files) == 3
        for seed in range(200):
            file = files[seed % 3]
            content = file.read_bytes()
            file.write_bytes(spoiled(content, random.Random(seed)))
            try:
                for split in form.list_splits(path, 0, first):
                    assert len(form.read(split)) == split.num_rows
            except errors.FileError as error:
                messages.append(str(error))
            file.write_bytes(content)
        assert len(messages) > 50
        assert all(path in message for message in messages)

    def test_guess_recognises_its_files(self, tmp_path):
        # A directory has no first bytes, so its name decides.
        form = self.make_format()
        assert form.guess("a/b.zarr", b"")
        assert form.guess("a/b.zarr/", b"")
        assert form.guess("b.zarr.zip", b"PK")
        assert not form.guess("b.zip", b"PK")


class TestZarrV2(TestZarr):
    zarr_format = 2


class TestZarrArrays(FormatLaws):
    """Single arrays with shards, in zip archives."""

    def make_format(self):
        return Zarr()

    def write(self, directory):
        whole = np.arange(90, dtype=np.int32).reshape(45, 2)
        written = {}
        for number, part in enumerate((whole, whole[:0])):
            folder = directory / f"{number}"
            made = zarr.create_array(folder, shape=part.shape, dtype=part.dtype, chunks=(3, 1), shards=(6, 2))
            made[:] = part
            shutil.make_archive(str(directory / f"{number}.zarr"), "zip", folder)
            shutil.rmtree(folder)
            written[str(directory / f"{number}.zarr.zip")] = [part[k] for k in range(len(part))]
        return written

    def test_edge_cases_of_the_format_are_covered(self, tmp_path):
        with dask.config.set({"daskdist.split-bytes": 100}):
            super().test_edge_cases_of_the_format_are_covered(tmp_path)
            form, (path, *_) = self.make_format(), self.write(tmp_path)
            # Splits are whole shards.
            assert {split.num_rows for split in form.list_splits(path, 0, FirstFile(path, form.spec(path)))} == {12, 9}


@pytest.fixture
def decoded(monkeypatch):
    """Return how often each chunk was fetched and decoded."""
    counts = Counter()
    whole = zarr.storage.LocalStore.get

    async def get(self, key, *args, **kwargs):
        if not key.endswith(("json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")):
            counts[key] += 1
        return await whole(self, key, *args, **kwargs)

    monkeypatch.setattr(zarr.storage.LocalStore, "get", get)
    return counts


@pytest.mark.parametrize("chunk_rows", [{"x": 7, "y": 7}, {"x": 4, "y": 6}, {"x": 7, "y": 64}, {"x": 100, "y": 9}])
@pytest.mark.parametrize(
    ("split_bytes", "num_threads", "zarr_format"), [(60, 4, 3), (150, 1, 2), (150, 4, 3), (10**6, 4, 2)]
)
def test_a_chunk_is_decoded_once(tmp_path, decoded, zarr_format, chunk_rows, split_bytes, num_threads):
    arrays = {"x": np.arange(200).reshape(100, 2) + 1, "y": np.arange(100, dtype="i2") + 1}
    path = write_group(tmp_path / "a.zarr", arrays, chunk_rows, zarr_format=zarr_format)
    num_chunks = sum(-(-100 // rows) for rows in chunk_rows.values())
    with dask.config.set({"daskdist.split-bytes": split_bytes, "daskdist.num-threads": num_threads}):
        ds = read_zarr(path)
        for _ in range(2):
            decoded.clear()
            rows = list(ds)
            np.testing.assert_array_equal([row["x"] for row in rows], arrays["x"])
            np.testing.assert_array_equal([row["y"] for row in rows], arrays["y"])
            assert len(decoded) == num_chunks
            assert set(decoded.values()) == {1}


def splits_of(path, split_bytes, **options):
    form = Zarr(**options)
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        return [split.payload.stop for split in form.list_splits(path, 0, FirstFile(path, form.spec(path)))]


def test_splits_end_where_chunks_do(tmp_path):
    arrays = {"x": np.arange(100), "y": np.arange(100)}
    path = write_group(tmp_path / "a.zarr", arrays, {"x": 4, "y": 6})
    assert splits_of(path, 1, arrays="x") == [*range(4, 101, 4)]
    assert splits_of(path, 100, arrays="x") == [*range(12, 97, 12), 100]
    # Splits end where chunks of both arrays end; if that would be too large, where the larger chunks end.
    assert splits_of(path, 100) == [*range(12, 97, 12), 100]
    assert splits_of(path, 10**4) == [100]
    assert splits_of(path, 20) == [*range(6, 97, 6), 100]


def test_names_of_splits_in_messages(tmp_path):
    path = write_group(tmp_path / "a.zarr", {"x": np.arange(10)})
    form = Zarr()
    with dask.config.set({"daskdist.split-bytes": 1}):
        labels = [split.label for split in form.list_splits(path, 0, FirstFile(path, form.spec(path)))]
    assert labels == [f"{path} rows 0 to 7", f"{path} rows 7 to 10"]


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(9, dtype="u1"),
        np.arange(9, dtype=">i4"),
        np.arange(9, dtype="f2"),
        np.arange(9) % 2 == 0,
        np.arange(9) * 1j,
        np.array(["2024-02-29", "NaT", "1970-01-01"] * 3, "M8[s]"),
        np.array([1, 2, 3], "m8[ns]"),
        np.array(["a", "ünï", ""], TEXT),
        np.array(["a", "ünï", ""]),
        np.array([b"a", b"bc", b""], "S3"),
        np.arange(60, dtype="i2").reshape(5, 3, 4),
        np.array(["a", "b", "c", "d"], TEXT).reshape(2, 2),
    ],
    ids=lambda value: str(getattr(value, "dtype", value)),
)
def test_dtypes(tmp_path, array, zarr_format):
    path = write_group(tmp_path / "a.zarr", {"x": array}, 2, zarr_format=zarr_format)
    ds = read_zarr(path, "x")
    wanted = array.dtype if array.dtype == TEXT else array.dtype.newbyteorder("=")
    assert ds.element_spec == TensorSpec(array.shape[1:], wanted)
    actual = next(iter(ds.batch(100)))
    assert actual.dtype == wanted
    np.testing.assert_array_equal(actual, array)


def test_bytes_of_any_length(tmp_path):
    made = zarr.create_array(tmp_path / "a.zarr", shape=(3,), chunks=(2,), dtype="variable_length_bytes")
    made[:] = np.array([b"a", b"", b"x\0\0"], object)
    assert [bytes(value) for value in read_zarr(tmp_path / "a.zarr")] == [b"a", b"", b"x\0\0"]
    assert read_zarr(tmp_path / "a.zarr").element_spec == TensorSpec((), object)


def test_fields_become_a_dict(tmp_path):
    array = np.array([(1.5, 2), (2.5, 3)], [("a", "f4"), ("b", "i8")])
    path = write_group(tmp_path / "a.zarr", {"x": array}, 1)
    assert list(read_zarr(path, "x")) == [{"a": 1.5, "b": 2}, {"a": 2.5, "b": 3}]


@pytest.mark.parametrize(
    ("arrays", "row"),
    [
        (None, {"a": 1, "b": 0.5}),
        ("a", 1),
        (("b", "deep/c"), (0.5, 11)),
        ({"x": ["a", "b"], "y": ("deep/c",)}, {"x": np.array([1, 0.5]), "y": (11,)}),
    ],
)
@pytest.mark.parametrize("is_consolidated", [False, True])
@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_arrays_in_a_structure(tmp_path, arrays, row, is_consolidated):
    path = write_group(tmp_path / "a.zarr", {"a": np.arange(3), "b": np.arange(3) / 2})
    write_group(tmp_path / "a.zarr" / "deep", {"c": np.arange(3) + 10})
    if is_consolidated:
        zarr.consolidate_metadata(path)
    actual = list(read_zarr(path, arrays))[1]
    leaves, structure = Structure.of(row)
    for given, leaf in zip(structure.leaves_of(actual), leaves, strict=True):
        np.testing.assert_array_equal(given, leaf)


def test_stores_anywhere(tmp_path):
    path = write_group(tmp_path / "a.zarr", {"x": np.arange(10)})
    write_group(tmp_path / "b.zarr", {"x": np.arange(10, 12)})
    archive = shutil.make_archive(path, "zip", path)
    fs = fsspec.filesystem("memory")
    fs.put(path, "/stores/a.zarr", recursive=True)
    fs.put(str(tmp_path / "b.zarr"), "/stores/b.zarr", recursive=True)
    try:
        for store in (path, Path(path), archive, f"file://{path}", f"zip://::{archive}", "memory://stores/a.zarr"):
            assert [int(x) for x in read_zarr(store, "x")] == list(range(10)), store
        for store in (tmp_path / "*.zarr", "memory://stores/*.zarr", [path, "memory://stores/b.zarr"]):
            assert [int(x) for x in read_zarr(store, "x")] == list(range(12)), store
        # The path of an array inside of the store can be read too.
        assert [int(x) for x in read_zarr(f"{path}/x")] == list(range(10))
    finally:
        fs.rm("/stores", recursive=True)


def test_missing_and_invalid_stores_are_errors(tmp_path):
    with pytest.raises(errors.FileError, match=r"no such store: .*none\.zarr"):
        read_zarr(tmp_path / "none.zarr")
    with pytest.raises(errors.FileError, match=r"no such store: .*\*\.zarr"):
        read_zarr(tmp_path / "*.zarr")
    with pytest.raises(errors.FileError, match="the list of stores is empty"):
        read_zarr([])
    with pytest.raises(errors.FileError, match="not a Zarr store: it has neither a group nor an array"):
        read_zarr("memory://none.zarr")
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.FileError, match="not a Zarr store: it has neither a group nor an array"):
        read_zarr(tmp_path / "empty")
    (tmp_path / "a.zip").write_text("no archive")
    with pytest.raises(errors.FileError, match=r"a\.zip: .*not a zip file"):
        read_zarr(tmp_path / "a.zip")
    zarr.create_group(tmp_path / "group")
    with pytest.raises(errors.FileError, match="group: has no arrays"):
        read_zarr(tmp_path / "group")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data_type", "float128"),
        ("zarr_format", 4),
        ("chunk_grid", {"name": "other", "configuration": {}}),
        ("must", {"name": "other"}),
    ],
)
def test_what_the_library_lacks_is_an_error_even_with_skip(tmp_path, key, value):
    for name in ("a.zarr", "b.zarr"):
        write_group(tmp_path / name, {"x": np.arange(10.0)})
    place = tmp_path / "b.zarr" / "x" / "zarr.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), key: value}))
    with pytest.raises(errors.FileError, match=r"b\.zarr: cannot be read: ") as caught:
        list(read_zarr([tmp_path / "a.zarr", tmp_path / "b.zarr"], "x").with_options(Options(on_error="skip")))
    assert type(caught.value) is errors.FileError


def test_arrays_that_do_not_go_together(tmp_path):
    path = write_group(tmp_path / "a.zarr", {"x": np.arange(3), "y": np.arange(4)})
    zarr.open_group(path).create_array("one", shape=(), dtype="f4")
    with pytest.raises(
        errors.FileError, match=r"a\.zarr: elements need arrays of equal length.*'x' has 3, 'y' has 4 rows; name some"
    ):
        read_zarr(path, ["x", "y"])
    with pytest.raises(errors.FileError, match="array 'one' is a single value"):
        read_zarr(path)
    with pytest.raises(errors.ArgumentError, match=r"a\.zarr: no array 'z'; there are 'one', 'x', 'y'"):
        read_zarr(path, "z")
    with pytest.raises(errors.ArgumentError, match="it is one array without a name, but arrays is 'x'"):
        read_zarr(f"{path}/x", "x")
    other = write_group(tmp_path / "b.zarr", {"y": np.arange(3)})
    with pytest.raises(errors.FileError, match=r"b\.zarr: no array 'x'; there are 'y'; the first file, .* has"):
        list(read_zarr([path, other], "x"))
    other = write_group(tmp_path / "b.zarr", {"x": np.arange(3.0)})
    with pytest.raises(errors.FileError, match=r"b\.zarr: its elements are .*float64"):
        list(read_zarr([path, other], "x"))


def test_pickled_objects_are_refused(tmp_path):
    class Hostile:
        def __reduce__(self):
            return Path.touch, (tmp_path / "was-here",)

    path = write_group(tmp_path / "a.zarr", {"x": np.array(["a"], TEXT)}, 1, zarr_format=2)
    (Path(path) / "x" / "0").write_bytes(pickle.dumps(Hostile()))
    file = Path(path) / "x" / ".zarray"
    texts, hostile = {"id": "vlen-utf8"}, {"id": "pickle", "protocol": 5}
    content = {**json.loads(file.read_text()), "compressor": None}
    file.write_text(json.dumps({**content, "filters": [texts, hostile]}))
    with pytest.raises(errors.FileError, match=r"array 'x' is made of pickled Python objects, which are not supported"):
        read_zarr(path)
    for made in ({"filters": [hostile]}, {"filters": [texts], "compressor": hostile}):
        file.write_text(json.dumps({**content, **made}))
        with pytest.raises(errors.FileError, match="pickle"):
            read_zarr(path)
    assert not (tmp_path / "was-here").exists()


def test_an_impossible_length_is_an_error(tmp_path):
    path = write_group(tmp_path / "a.zarr", {"x": np.arange(3)}, 2)
    file = Path(path) / "x" / "zarr.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "shape": [10**18]}))
    with pytest.raises(errors.FileError, match=r"states 1000000000000000000 rows, more than .* splits"):
        list(read_zarr(path))


def test_a_store_that_was_changed_since(tmp_path):
    path = write_group(tmp_path / "a.zarr", {"x": np.arange(10)})
    ds = read_zarr(path, "x")
    assert len(list(ds)) == 10
    write_group(path, {"x": np.arange(5)})
    with pytest.raises(errors.FileError, match="the store was changed since it was listed; create the dataset again"):
        list(ds)
    assert len(list(read_zarr(path, "x"))) == 5


@pytest.mark.parametrize("chunk_rows", [5, {"x": 5, "y": 10}])
def test_a_broken_chunk_is_left_out(tmp_path, chunk_rows, caplog):
    path = write_group(tmp_path / "a.zarr", {"x": np.arange(40), "y": np.arange(40)}, chunk_rows)
    (Path(path) / "x" / "c" / "3").write_bytes(b"no chunk")
    ds = read_zarr(path)
    with pytest.raises(errors.FileError, match=r"a\.zarr rows 0 to 40: damaged or cut short"):
        list(ds)
    iterator = iter(ds.ignore_errors())
    with caplog.at_level(logging.WARNING, "daskdist"):
        assert [int(row["y"]) for row in iterator] == [*range(15), *range(20, 40)]
    assert iterator.stats()["skipped_by_file"] == {path: 1}
    for file in (Path(path) / "x" / "c").iterdir():
        file.write_bytes(b"no chunk")
    assert list(ds.ignore_errors()) == []


def test_parts_of_shared_chunks_after_an_error(tmp_path):
    # After an error, the chunk is read and decoded again.
    path = write_group(tmp_path / "a.zarr", {"x": np.arange(40), "y": np.arange(40)}, {"x": 40, "y": 3})
    chunk = Path(path) / "x" / "c" / "0"
    content = chunk.read_bytes()
    with dask.config.set({"daskdist.split-bytes": 20}):
        ds = read_zarr(path, ("x", "y"))
        chunk.write_bytes(b"")
        with pytest.raises(errors.FileError):
            list(ds)
        chunk.write_bytes(content)
        assert [int(x) for x, _ in ds] == list(range(40))


# --- writing ---


def blocks_of(array, chunk_rows):
    return [from_items(LONE, [(row,) for row in array[k : k + chunk_rows]]) for k in range(0, len(array), chunk_rows)]


def create_store(path, spec, chunk_rows):
    store = unfinished_store(path, spec, chunk_rows)
    store.create()
    return store


@pytest.mark.parametrize("place", ["local", "memory"])
@pytest.mark.parametrize("num_rows", [1, 4, 11])
def test_stores_written_in_parts(tmp_path, place, num_rows):
    path = str(tmp_path / "a.zarr") if place == "local" else "memory://written/a.zarr"
    elements = [
        {"x": np.float32([k, -0.0]), "t": np.datetime64(k, "s"), "s": np.array(f"text {k}", TEXT)[()], "b": k % 2 == 0}
        for k in range(num_rows)
    ]
    flat = [Structure.flatten(element) for element in elements]
    structure = flat[0][1]
    store = create_store(path, ElementSpec.of(elements[0]), 4)
    try:
        parts = [
            (number, from_items(structure, [leaves for leaves, _ in flat[start : start + 4]]))
            for number, start in enumerate(range(0, num_rows, 4))
        ]
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda part: store.write(*part), reversed(parts)))
        # A part may be written twice, since a call may be made again.
        store.write(*parts[0])
        with pytest.raises(errors.FileError, match=r"no such store|neither a group nor an array"):
            read_zarr(path)
        store.finish(num_rows)
        actual = list(read_zarr(path))
        assert len(actual) == num_rows
        for given, expected in zip(actual, elements, strict=True):
            assert given["s"] == expected["s"]
            assert given["t"] == expected["t"]
            assert bool(given["b"]) == expected["b"]
            np.testing.assert_array_equal(given["x"], expected["x"])
            assert np.signbit(given["x"][1])
        with pytest.raises(errors.FileError, match=r"a\.zarr exists already"):
            create_store(path, ElementSpec.of(elements[0]), 4)
        if place == "local":
            assert os.listdir(tmp_path) == ["a.zarr"]
            # The zarr library can read the store, and its consolidated metadata.
            group = zarr.open_group(path, mode="r", use_consolidated=True)
            assert group["x"].shape == (num_rows, 2)
            np.testing.assert_array_equal(group["x"][:, 0], np.arange(num_rows))
    finally:
        fs = fsspec.filesystem("memory")
        if fs.exists("/written"):
            fs.rm("/written", recursive=True)


def test_lone_arrays_are_stores_of_one(tmp_path):
    array = np.arange(10).reshape(5, 2)
    store = create_store(str(tmp_path / "a.zarr"), ElementSpec.of(array[0]), 2)
    for number, block in enumerate(blocks_of(array, 2)):
        store.write(number, block)
    store.finish(5)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "a.zarr", mode="r")[:], array)
    np.testing.assert_array_equal(list(read_zarr(tmp_path / "a.zarr")), array)


def test_stores_that_are_given_up(tmp_path):
    spec = ElementSpec.of(np.zeros(2))
    store = create_store(str(tmp_path / "a.zarr"), spec, 2)
    with pytest.raises(errors.ArgumentError, match=r"part 1 of .* has 3 rows, but a chunk has 2"):
        store.write(1, blocks_of(np.zeros((3, 2)), 3)[0])
    assert len(os.listdir(tmp_path)) == 1
    store.abandon()
    store.abandon()
    assert os.listdir(tmp_path) == []
    store = create_store(str(tmp_path / "a.zarr"), spec, 2)
    (tmp_path / "a.zarr").mkdir()
    with pytest.raises(errors.FileError, match="exists already; remove it, or write to another"):
        store.finish(0)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (ElementSpec.of((np.zeros(2), np.zeros(2))), "Zarr takes a single array or a dict of arrays"),
        (ElementSpec(LONE, (TensorSpec((None,), "f4"),)), "Zarr takes arrays of one shape.*padded_batch"),
        (ElementSpec(LONE, (TensorSpec((), "V5"),)), r"Zarr takes no \|V5"),
    ],
)
def test_elements_that_are_not_written(tmp_path, spec, words):
    with pytest.raises(errors.ArgumentError, match=words):
        create_store(str(tmp_path / "a.zarr"), spec, 2)
    assert os.listdir(tmp_path) == []


def test_without_the_library(tmp_path, monkeypatch):
    path = write_group(tmp_path / "a.zarr", {"x": np.arange(3)})
    monkeypatch.setitem(__import__("sys").modules, "zarr", None)
    with pytest.raises(errors.MissingPackageError, match=r"pip install 'daskdist\[zarr\]'"):
        daskdist.read_zarr(path)


def test_an_archive_is_closed(tmp_path):
    path = write_group(tmp_path / "a.zarr", {"x": np.arange(30)})
    archive = shutil.make_archive(path, "zip", path)
    assert len(list(read_zarr(archive))) == 30
    # Other threads open and close files meanwhile.
    open_files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert archive not in open_files
    assert zipfile.ZipFile(archive).testzip() is None


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_store_is_one_dataset_whatever_it_is_called(tmp_path, zarr_format):
    write_group(tmp_path / "a.zarr", {"x": np.arange(9)}, zarr_format=zarr_format)
    write_group(tmp_path / "b", {"x": np.arange(9, 12)}, zarr_format=zarr_format)
    zarr.save_array(tmp_path / "c", np.arange(4), zarr_format=zarr_format)
    for path in ("a.zarr", "a.*", "b"):
        assert [int(row["x"]) for row in read_files(tmp_path / path)] == list(range(9, 12) if path == "b" else range(9))
    for given in (None, "zarr", Zarr("x")):
        both = read_files([tmp_path / "a.zarr", tmp_path / "b"], given)
        assert [int(row["x"] if isinstance(row, dict) else row) for row in both] == list(range(12))
    assert [int(x) for x in read_files(str(tmp_path / "c") + "/")] == [0, 1, 2, 3]
    with pytest.raises(errors.FileError, match=r"no such store: '.*none'"):
        read_files(tmp_path / "none", "zarr")


@pytest.mark.parametrize("given", [5, [5]])
def test_invalid_paths_are_refused(given):
    with pytest.raises(errors.ArgumentError, match=r"got int|contains 5; give paths, URLs and globs"):
        read_zarr(given)


def test_a_format_by_name_opens_files_with_the_options_given(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(3))
    options = {"path": str(tmp_path), "target_protocol": "file"}
    for given in (None, "npy"):
        assert [int(x) for x in read_files("dir://a.npy", given, storage_options=options)] == [0, 1, 2]


def test_bytes_are_written(tmp_path):
    given = [{"x": b"ab"}, {"x": b""}, {"x": b"c\0"}]
    Dataset.from_list(given).to_zarr(tmp_path / "a.zarr")
    assert list(read_zarr(tmp_path / "a.zarr")) == given


def test_integers_beyond_int64_are_written(tmp_path):
    Dataset.range(3).map(lambda i: {"x": 2**63 + int(i)}).to_zarr(tmp_path / "a.zarr")
    assert [int(row["x"]) for row in read_zarr(tmp_path / "a.zarr")] == [2**63, 2**63 + 1, 2**63 + 2]


def test_texts_of_numpy_of_several_widths_are_written_whole(tmp_path):
    ds = Dataset.range(8).map(lambda n: {"x": np.array("abcdefgh"[: int(n) + 1])})
    ds.to_zarr(tmp_path / "a.zarr", chunk_rows=4)
    assert [row["x"] for row in read_zarr(tmp_path / "a.zarr")] == ["abcdefgh"[: n + 1] for n in range(8)]


def test_texts_longer_than_the_width_of_the_spec_are_not_truncated(tmp_path):
    texts = [np.str_("a"), np.str_("abcd")]
    ds = Dataset.from_generator(lambda: iter(texts), output_signature=TensorSpec((), "<U2"))
    with pytest.raises(errors.ArgumentError, match=r"its array is <U2\[\] in element_spec, but elements are <U4\[\]"):
        ds.to_zarr(tmp_path / "a.zarr")
    assert not list(tmp_path.iterdir())


def _one_is_none(e):
    return {"x": np.array({1: None}.get(int(e["x"]), b"a"), object)}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        # Zarr itself would truncate, cast and broadcast these values, and write None as empty bytes.
        (lambda e: {"x": np.int32(1) if e["x"] < 4 else np.float64(2.5)}, r"'x' is int32\[\] .* float64\[\]"),
        (
            lambda e: {"x": np.zeros((4, 4) if e["x"] < 4 else (1, 4))},
            r"arrays of one shape, but leaf \['x'\] is TensorSpec\(shape=\(None, 4\)",
        ),
        (_one_is_none, "part 0 of .*: array 'x' holds bytes, but a value is None"),
    ],
)
def test_elements_that_are_not_as_their_spec_says_are_not_written(tmp_path, function, message):
    ds = Dataset.from_tensor_slices({"x": np.arange(8)}).map(function)
    with pytest.raises(errors.ArgumentError, match=message):
        ds.to_zarr(tmp_path / "a.zarr", chunk_rows=4)
    assert not list(tmp_path.iterdir())


class Snapshot(AbstractFileSystem):
    """The folder that `FOLDER` named when it was created."""

    protocol = "snapshot"
    cachable = False
    FOLDER = ""

    def __init__(self, **options):
        super().__init__(**options)
        self.folder = DirFileSystem(Snapshot.FOLDER, LocalFileSystem())

    def ls(self, path, detail=True, **options):
        return self.folder.ls(self._strip_protocol(path), detail=detail)

    def info(self, path, **options):
        return self.folder.info(self._strip_protocol(path))

    def _open(self, path, mode="rb", **options):
        return self.folder.open(self._strip_protocol(path), mode)


def test_a_file_system_with_a_state_is_created_for_each_use(tmp_path, monkeypatch):
    fsspec.register_implementation("snapshot", Snapshot, clobber=True)
    for number in range(2):
        write_group(tmp_path / str(number) / "a.zarr", {"x": np.full(3, number)})
        monkeypatch.setattr(Snapshot, "FOLDER", str(tmp_path / str(number)))
        # fsspec tells the file systems of different threads apart.
        with dask.config.set({"daskdist.num-threads": 1}):
            assert [int(value["x"]) for value in read_zarr("snapshot://a.zarr")] == [number] * 3
