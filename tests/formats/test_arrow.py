"""Arrow files and streams: splits, which values are copied, and damaged files."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import dask
import fsspec
import numpy as np
import programs
import pyarrow as pa
import pyarrow.feather
import pytest
from conftest import TESTS

from daskdist import Dataset, Options, TensorSpec, errors, read_arrow, read_files
from daskdist.core.dataset_base import node_of
from daskdist.formats.arrow.arrow_format import Arrow
from daskdist.formats.arrow.arrow_messages import index_of
from daskdist.storage.first_file import FirstFile
from daskdist.testing import FormatLaws
from daskdist.testing.formats import spoiled

TEXT = np.dtypes.StringDType()
FLIGHTS = TESTS / "data" / "flights-2k.arrow"
WRITERS = {".arrow": pa.ipc.new_file, ".arrows": pa.ipc.new_stream}


def write(path, table, num_rows=None, compression=None, **options):
    """Write a file or a stream, as the end of the name says, in batches of a number of rows."""
    options = pa.ipc.IpcWriteOptions(compression=compression, **options)
    with WRITERS[Path(path).suffix](str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=num_rows)
    return str(path)


def splits_of(form, path):
    return form.list_splits(path, 0, FirstFile(path, form.spec(path)))


# --- laws ---


class TestFiles(FormatLaws):
    split_bytes = 200

    end, compression = ".arrow", None

    def make_format(self):
        return Arrow()

    def write(self, directory):
        written = {}
        for number, num_rows in enumerate([20, 0, 3]):
            path = directory / f"{number}{self.end}"
            words = [f"{'ü' * (k % 4)}{k}" for k in range(num_rows)]
            n = np.arange(num_rows) + 10 * number
            lists = pa.array([[k] * (k % 3) for k in range(num_rows)], pa.list_(pa.int32()))
            kinds = pa.array(["a", "bb", "a", "c"] * 5, pa.string()).slice(0, num_rows).dictionary_encode()
            at = pa.StructArray.from_arrays([pa.array(n / 2), pa.array(n % 2 == 0)], ["x", "on"])
            columns = {"n": n, "f": n.astype("float32"), "s": pa.array(words, pa.string())}
            table = pa.table({**columns, "l": lists, "kind": kinds, "at": at})
            write(path, table, 7, self.compression)
            text, kind = np.array(words, TEXT), np.array(["a", "bb", "a", "c"] * 5, TEXT)
            written[str(path)] = [
                {
                    "n": n[k],
                    "f": np.float32(n[k]),
                    "s": text[k],
                    "l": np.array([k] * (k % 3), np.int32),
                    "kind": kind[k],
                    "at": {"x": n[k] / 2, "on": n[k] % 2 == 0},
                }
                for k in range(num_rows)
            ]
        return written


class TestStreams(TestFiles):
    end = ".arrows"


class TestCompressedFiles(TestFiles):
    compression = "lz4"


class TestCompressedStreams(TestStreams):
    compression = "zstd"


class TestNumbers(FormatLaws):
    split_bytes = 200
    end = ".arrow"

    def make_format(self):
        return Arrow({"x": ["f", "n"], "y": "n"})

    def write(self, directory):
        written = {}
        for number, num_rows in enumerate([300, 0]):
            n = np.arange(num_rows)
            path = write(directory / f"{number}{self.end}", pa.table({"n": n, "f": n / 4}), 100)
            written[path] = [{"x": np.array([k / 4, k]), "y": n[k]} for k in range(num_rows)]
        return written


class TestStreamsOfNumbers(TestNumbers):
    end = ".arrows"


# --- reading ---


def test_flights():
    ds = read_arrow(FLIGHTS)
    assert ds.element_spec == {
        "delay": TensorSpec((), "int16"),
        "distance": TensorSpec((), "int16"),
        "time": TensorSpec((), "float32"),
    }
    assert ds.cardinality() == 2000
    with pa.memory_map(str(FLIGHTS)) as file, pa.ipc.open_file(file) as reader:
        own = reader.read_all()
    (batch,) = ds.batch(5000)
    for name, column in batch.items():
        np.testing.assert_array_equal(column, own[name].to_numpy(), strict=True)
    assert (int(batch["delay"].sum(dtype=int)), int(batch["distance"].sum(dtype=int))) == (45441, 1817226)
    with dask.config.set({"daskdist.split-bytes": 1000}):
        small = read_arrow(FLIGHTS, {"x": ["delay", "distance"]})
        assert len(node_of(small).splits()) == 8
        np.testing.assert_array_equal(next(iter(small.batch(5000)))["x"][:, 1], batch["distance"])


def test_numbers_are_not_copied(tmp_path):
    n = np.arange(100_000)
    for end in WRITERS:
        path = write(tmp_path / f"a{end}", pa.table({"n": n, "f": n.astype("float32")}), 50_000)
        form = Arrow()
        with dask.config.set({"daskdist.split-bytes": "1 MB"}):
            blocks = [form.read(split) for split in splits_of(form, path)]
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if path in line]
        mapped = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
        leaves = [leaf for block in blocks for leaf in block.leaves]
        assert len(leaves) == 4
        for leaf in leaves:
            assert not leaf.flags.owndata
            assert not leaf.flags.writeable
            at = leaf.ctypes.data
            assert any(start <= at and at + leaf.nbytes <= stop for start, stop in mapped)
        # The arrays alone keep the mapping of the file alive.
        gc.collect()
        np.testing.assert_array_equal(np.concatenate([block.leaves[0] for block in blocks]), n)
        leaf = leaves[0][:10]
        del blocks, leaves
        gc.collect()
        np.testing.assert_array_equal(leaf, n[:10])
        del leaf
        gc.collect()
        assert path not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("end", WRITERS)
def test_large_batches_are_cut_and_small_ones_joined(tmp_path, end, compression):
    n = np.arange(1000)
    with dask.config.set({"daskdist.split-bytes": 1600}):
        path = write(tmp_path / f"large{end}", pa.table({"n": n}), 500, compression)
        sizes = [split.num_rows for split in splits_of(Arrow(), path)]
        assert sizes == ([500, 500] if compression else [166, 167, 167] * 2)
        assert [int(x["n"]) for x in read_arrow(path)] == n.tolist()
        path = write(tmp_path / f"small{end}", pa.table({"n": n}), 10, compression)
        splits = splits_of(Arrow(), path)
        assert [split.num_rows for split in splits] == [200] * 5
        assert splits[1].label == f"{path} record batches 20 to 39"
        assert [int(x["n"]) for x in read_arrow(path)] == n.tolist()
        path = write(tmp_path / f"alone{end}", pa.table({"n": n}), 100, compression)
        assert [split.num_rows for split in splits_of(Arrow(), path)] == [100] * 10
    # The number of rows does not determine the size of text.
    table = pa.table({"n": n, "s": [str(k) for k in n], "kind": pa.array(["a", "b"] * 500).dictionary_encode()})
    path = write(tmp_path / f"text{end}", table, 10, compression)
    with dask.config.set({"daskdist.split-bytes": "20 kB"}):
        assert 1 < len(splits_of(Arrow(), path)) < 20
        assert [(int(x["n"]), x["s"], x["kind"]) for x in read_arrow(path)] == list(
            zip(*table.to_pydict().values(), strict=True)
        )
        assert [int(x) for x in read_arrow(path, "n")] == n.tolist()


def batches_of_dictionaries(deltas):
    words = [["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]] if deltas else [["a", "b"], ["x"], ["a", "y"]]
    kind = pa.dictionary(pa.int8(), pa.string())
    arrays = [pa.DictionaryArray.from_arrays(pa.array([0, len(item) - 1], pa.int8()), item) for item in words]
    schema = pa.schema({"n": pa.int64(), "kind": kind})
    batches = [pa.record_batch([pa.array([k, k + 1]), value], schema=schema) for k, value in enumerate(arrays)]
    return schema, batches, [word[place] for word in words for place in (0, -1)]


@pytest.mark.parametrize(("end", "deltas"), [(".arrow", True), (".arrows", True), (".arrows", False)])
@pytest.mark.parametrize("split_bytes", [1, 40, 10_000])
def test_dictionaries_that_grow_or_change(tmp_path, end, deltas, split_bytes):
    schema, batches, words = batches_of_dictionaries(deltas)
    path = str(tmp_path / f"a{end}")
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with WRITERS[end](path, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
        assert (writer.stats.num_dictionary_deltas, writer.stats.num_replaced_dictionaries) == (
            (2, 0) if deltas else (0, 2)
        )
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        form = Arrow("kind")
        splits = splits_of(form, path)
        blocks = {split.label: form.read(split) for split in reversed(splits)}
    assert [word for split in splits for word in blocks[split.label].leaves[0]] == words
    assert len(splits) > 1 if split_bytes == 1 else True


def test_streams_of_old_writers(tmp_path):
    # Messages of old writers begin with their length, without the marker of newer ones.
    table = pa.table({"n": np.arange(10), "kind": pa.array(["a", "b"] * 5).dictionary_encode()})
    for end in WRITERS:
        path = write(tmp_path / f"a{end}", table, 4, use_legacy_format=True)
        assert [(int(x["n"]), x["kind"]) for x in read_arrow(path)] == list(
            zip(*table.to_pydict().values(), strict=True)
        )


def test_feather(tmp_path):
    table = pa.table({"n": np.arange(1000), "s": [str(k) for k in range(1000)]})
    pyarrow.feather.write_feather(table, str(tmp_path / "a.feather"), chunksize=100)
    assert [x["s"] for x in read_arrow(tmp_path)] == table["s"].to_pylist()
    (tmp_path / "b.feather").write_bytes(b"FEA1" + bytes(100))
    with pytest.raises(errors.FileError, match=r"b\.feather: Feather version 1.*write_feather"):
        read_arrow(tmp_path / "b.feather")
    with pytest.raises(errors.FileError, match="Feather version 1"):
        read_files(tmp_path / "b.feather")


def test_files_elsewhere(tmp_path):
    fs = fsspec.filesystem("memory")
    table = pa.table({"n": np.arange(30), "f": np.arange(30) / 4})
    try:
        for end in WRITERS:
            path = write(tmp_path / f"a{end}", table, 10)
            fs.pipe(f"/arrow/a{end}", Path(path).read_bytes())
            url = f"memory://arrow/a{end}"
            with dask.config.set({"daskdist.split-bytes": 10}):
                assert len(node_of(read_arrow(url)).splits()) == 3
                assert [int(x) for x in read_arrow(url, "n")] == list(range(30))
        assert [int(x["n"]) for x in read_arrow("memory://arrow")] == list(range(30)) * 2
        assert [int(x["n"]) for x in read_files("memory://arrow/a.arrows")] == list(range(30))
    finally:
        fs.rm("/arrow", recursive=True)


def test_partitions_and_columns(tmp_path):
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        write(tmp_path / f"day={day}" / "a.arrow", pa.table({"n": [day * 10, day * 10 + 1], "s": ["a", None]}))
    assert [int(x) for x in read_arrow(tmp_path, "day")] == [1, 1, 2, 2]
    ds = read_arrow(tmp_path, ("n", "day"), missing={"s": "-"})
    assert [(int(n), int(day)) for n, day in ds] == [(10, 1), (11, 1), (20, 2), (21, 2)]
    assert list(read_arrow(tmp_path, "s", missing={"s": "-"})) == ["a", "-"] * 2
    assert list(read_arrow(tmp_path, partitioned=False, missing={"s": ""}).element_spec) == ["n", "s"]
    with pytest.raises(errors.FileError, match=r"record batch 0: column 's'.*1 null, the first in row 1"):
        list(read_arrow(tmp_path))
    with pytest.raises(errors.ArgumentError, match="no column 'z'"):
        read_arrow(tmp_path, "z")
    write(tmp_path / "day=2" / "b.arrow", pa.table({"m": [1]}))
    with pytest.raises(errors.FileError, match=r"b\.arrow: no column 'n'.*the first file"):
        list(read_arrow(tmp_path, ["n"]))
    write(tmp_path / "day=2" / "b.arrow", pa.table({"n": ["x"]}))
    with pytest.raises(errors.FileError, match=r"b\.arrow: its elements are .*StringDType"):
        list(read_arrow(tmp_path, ["n"]))


# --- damage ---


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty, while"),
        (b"ARROW1\0\0", "not an Arrow file, or a damaged one"),
        (b"\xff\xff\xff\xff\x10\0\0\0", "not an Arrow file, or a damaged one"),
        (b"\xff\xff\xff\xff\0\0\0\0", "a damaged one: .* schema message"),
        (b"a,b\n1,2\n", "a damaged one: Expected to read .* metadata bytes"),
        (b"a,b", "a damaged one: Corrupted message"),
    ],
)
def test_invalid_files_are_errors(tmp_path, content, message):
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(errors.FileError, match=message) as caught:
        read_arrow(tmp_path / "a.arrow")
    assert str(tmp_path / "a.arrow") in str(caught.value)


def test_only_a_broken_batch_is_skipped(tmp_path):
    table = pa.table({"n": np.arange(30), "s": [f"text {k}" for k in range(30)]})
    for end in WRITERS:
        path = write(tmp_path / f"a{end}", table, 10)
        content = Path(path).read_bytes()
        Path(path).write_bytes(content.replace(b"text 15", b"text \xff5"))
        ds = read_arrow(path, "n"), read_arrow(path, ("n", "s"))
        # Damage in columns that are not read does not matter.
        assert len(list(ds[0])) == 30
        with pytest.raises(errors.FileError, match=r"record batches 0 to 2: damaged or cut short.*UTF8"):
            list(ds[1])
        given = list(iterator := iter(ds[1].ignore_errors()))
        assert [int(n) for n, _ in given] == [*range(10), *range(20, 30)]
        assert iterator.stats()["skipped_by_file"] == {path: 1}


@pytest.mark.parametrize("end", WRITERS)
@pytest.mark.parametrize("split_bytes", [100, "16 MiB"])
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, pa.int64()),
        ("a", pa.string()),
        ("a", pa.string_view()),
        (b"a", pa.binary()),
        (True, pa.bool_()),
        ([1], pa.list_(pa.int64())),
        ([1], pa.list_(pa.int64(), 1)),
        ({"a": [1]}, pa.struct({"a": pa.list_(pa.int64())})),
        ("a", pa.dictionary(pa.int8(), pa.string())),
    ],
)
def test_rows_with_a_null_are_left_out_one_by_one(tmp_path, end, split_bytes, value, kind):
    values = pa.array([None if k in (3, 15, 29) else value for k in range(30)], kind)
    path = write(tmp_path / f"a{end}", pa.table({"x": values, "n": np.arange(30)}), 10)
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        ds = read_arrow(path)
        with pytest.raises(errors.DamagedFileError, match=r"'x'.* null"):
            list(ds)
        kept = list(iterator := iter(ds.with_options(Options(on_error="skip"))))
    assert [int(row["n"]) for row in kept] == [k for k in range(30) if k not in (3, 15, 29)]
    assert iterator.stats()["skipped_by_file"] == {path: 3}


def test_a_broken_batch_and_rows_with_a_null_keep_their_places(tmp_path):
    table = pa.table({"x": [None if k in (3, 25) else k for k in range(30)], "s": [f"text {k}" for k in range(30)]})
    path = write(tmp_path / "a.arrow", table, 10)
    Path(path).write_bytes(Path(path).read_bytes().replace(b"text 15", b"text \xff5"))
    pairs = Dataset.zip((read_arrow(path), Dataset.range(30))).with_options(Options(on_error="skip"))
    assert [(int(row["x"]), int(k)) for row, k in pairs] == [
        (k, k) for k in [*range(3), *range(4, 10), *range(20, 25), *range(26, 30)]
    ]


def stream_of_batches(tmp_path, **columns):
    """Write a stream of three batches; return its path, its bytes, where batches begin and where the last ends."""
    path = write(tmp_path / "a.arrows", pa.table({"n": np.arange(30), **columns}), 10)
    storage = Arrow().storage
    index = index_of(storage, storage.version(path))
    return path, Path(path).read_bytes(), [batch.start for batch in index.batches], index.batches[-1].stop


def test_a_stream_that_stops_or_is_garbage_is_an_error(tmp_path):
    path, content, starts, stop = stream_of_batches(tmp_path)
    bad_kind = bytearray(content)
    # Change the byte that has the kind of a message, from a record batch to a dictionary (2) and to a tensor (4).
    place = content.index(b"\x03", starts[1] + 8)
    bad_kinds = []
    for kind in (2, 4):
        bad_kind[place] = kind
        bad_kinds.append(bytes(bad_kind))
    for damaged, message in (
        (content[: starts[1] + 4], "Corrupted metadata length"),
        (content[: starts[1] + 100], r"Expected to read \d+ metadata bytes, but only read"),
        (content[: stop - 1], r"Expected to be able to read \d+ bytes for message body"),
        # A page of zeros, which a full disk or a crash may leave.
        (
            content[: starts[1]] + bytes(len(content) - starts[1]),
            r"bytes after its last message, which ends at byte \d",
        ),
        (content + content, "several streams in one file"),
        (bad_kinds[0], "a damaged one"),
        (bad_kinds[1], "a damaged one"),
    ):
        Path(path).write_bytes(damaged)
        with pytest.raises(errors.FileError, match=message) as caught:
            list(read_arrow(path))
        assert path in str(caught.value)


def test_a_damaged_stream_is_left_out_where_errors_are(tmp_path, caplog):
    path, content, starts, _ = stream_of_batches(tmp_path)
    write(tmp_path / "0.arrows", pa.table({"n": np.arange(5)}))
    Path(path).write_bytes(content[: starts[2] + 50])
    rows = list(iterator := iter(read_arrow(tmp_path, "n").ignore_errors()))
    assert [int(n) for n in rows] == list(range(5))
    assert iterator.stats()["skipped_by_file"] == {path: 1}


def test_a_stream_without_an_end_is_read_with_a_warning(tmp_path, caplog):
    path, content, starts, stop = stream_of_batches(tmp_path)
    assert [int(n) for n in read_arrow(path, "n")] == list(range(30))
    assert not caplog.records
    for end, num_rows in ((stop, 30), (starts[2], 20)):
        caplog.clear()
        Path(path).write_bytes(content[:end])
        assert [int(n) for n in read_arrow(path, "n")] == list(range(num_rows))
        (record,) = caplog.records
        assert f"{path} has no end-of-stream marker: all {num_rows // 10} record batches" in record.message


@pytest.mark.parametrize("end", WRITERS)
@pytest.mark.parametrize("kind", [pa.uint8(), pa.uint32(), pa.uint64()])
def test_dictionaries_of_views_as_polars_writes_them(tmp_path, end, kind):
    values, runs = pa.array(["a", "b"], pa.string_view()), pa.array([b"x", None, b"y"], pa.binary_view())
    words = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0], kind), values)
    lists = pa.LargeListArray.from_arrays([0, 1, 1, 3, 4], words.take(pa.array([0, 1, 1, 0])))
    table = pa.table({"word": words, "words": lists, "run": pa.RunEndEncodedArray.from_arrays([1, 3, 4], runs)})
    path = write(tmp_path / f"a{end}", table, 3)
    actual = list(read_arrow(path, missing={"word": "-", "run": b"?"}))
    assert [x["word"] for x in actual] == ["a", "b", "-", "a"]
    assert [x["run"] for x in actual] == [b"x", b"?", b"?", b"y"]
    assert [x["words"].tolist() for x in actual] == [["a"], [], ["b", "b"], ["a"]]


def test_offsets_and_numbers_of_dictionaries_are_looked_at(tmp_path):
    # Wrong offsets and numbers of words would make readers read memory outside of the arrays.
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 77777], pa.int32()), pa.array(np.arange(77777)))
    kinds = pa.DictionaryArray.from_arrays(pa.array([0, 1, 1], pa.int32()), ["a", "b"])
    for column, good, bad in (
        (lists, np.int32([0, 2, 77777]), np.int32([0, 88888, 77777])),
        (kinds, np.int32([0, 1, 1]), np.int32([0, 1, 9])),
    ):
        for end in WRITERS:
            path = write(tmp_path / f"a{end}", pa.table({"c": column}))
            content = Path(path).read_bytes()
            assert content.count(good.tobytes()) >= 1
            assert len(list(read_arrow(path))) == len(column)
            Path(path).write_bytes(content.replace(good.tobytes(), bad.tobytes()))
            with pytest.raises(errors.FileError, match=r"record batch 0.*(offset|out of bounds)"):
                list(read_arrow(path))


def test_a_file_that_was_changed_since(tmp_path):
    path = write(tmp_path / "a.arrow", pa.table({"n": [1]}))
    ds = read_arrow(path)
    assert len(list(ds)) == 1
    write(path, pa.table({"n": [1, 2]}))
    with pytest.raises(errors.FileError, match="was changed since it was listed"):
        list(ds)


def try_spoiled(path, seeds):
    """Read a file after each of many bad things has happened to it."""
    content = Path(path).read_bytes()
    form = Arrow()
    first = FirstFile(path, form.spec(path))
    num_read = 0
    for seed in seeds:
        Path(path).write_bytes(spoiled(content, random.Random(seed)))
        try:
            for split in form.list_splits(path, 0, first):
                num_read += len([*form.read(split).elements()])
        except errors.FileError as error:
            if path not in str(error):
                raise
    return num_read


@pytest.mark.parametrize("end", WRITERS)
def test_no_damage_ends_the_process(tmp_path, end):
    rows = range(20)
    table = pa.table(
        {
            "s": pa.array([f"text {k}" for k in rows], pa.large_string()),
            "v": pa.array([[f"{k}"] * (k % 3) for k in rows], pa.list_(pa.string())),
            "d": pa.array([f"{k % 3}" for k in rows]).dictionary_encode(),
            "w": pa.array([[f"{k % 3}"] for k in rows], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
            "b": pa.array([b"x" * k for k in rows], pa.binary_view()),
            "f": pa.array([k if k % 2 else None for k in rows], pa.float64()),
            "l": pa.array([[k, k] for k in rows], pa.list_(pa.int16(), 2)),
            "m": pa.array([[k] * (k % 4) for k in rows], pa.list_view(pa.int64())),
        }
    )
    path = write(tmp_path / f"a{end}", table, 8)
    program = (
        "import sys; sys.path[:0] = sys.argv[1:3]; import test_arrow;"
        "print(test_arrow.try_spoiled(sys.argv[3], range(150)))"
    )
    done = programs.run("-c", program, TESTS, TESTS / "formats", path, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 0
