"""TFRecord files: framing, checksums, the index, compression and writing."""

from __future__ import annotations

import builtins
import gzip
import io
import struct
import threading
import zlib
from pathlib import Path

import dask
import fsspec
import google_crc32c
import numpy as np
import pytest
from compressed import compressed_files
from conftest import TESTS

import daskdist
from daskdist import Dataset, FixedLenFeature, TensorSpec, VarLenFeature, data, errors, read_files, read_tfrecord
from daskdist.core.block import Block
from daskdist.core.dataset_base import node_of
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import Structure
from daskdist.formats.tfrecord import checksums
from daskdist.formats.tfrecord.tfrecord_format import TFRecord
from daskdist.storage.first_file import FirstFile
from daskdist.testing import FormatLaws

DATA = TESTS / "data"


def masked(content):
    actual = google_crc32c.value(content)
    return struct.pack("<I", (((actual >> 15) | (actual << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(*records):
    lengths = [struct.pack("<Q", len(record)) for record in records]
    return b"".join(
        length + masked(length) + record + masked(record) for length, record in zip(lengths, records, strict=True)
    )


def records_of(dataset):
    return [bytes(element) if isinstance(element, bytes) else element.item() for element in dataset]


def written(path, *records):
    path.write_bytes(framed(*records))
    return str(path)


@pytest.fixture(params=["256 MiB", "100 B", "1 B"])
def any_split(request):
    with dask.config.set({"daskdist.split-bytes": request.param}):
        yield


# --- laws ---


class TestTFRecord(FormatLaws):
    split_bytes = 100
    sizes = (*([9] * 40), 0, 0, 1, 300, *range(30), 9, 9, 9)

    def make_format(self):
        return TFRecord()

    def write(self, directory):
        draws, files = np.random.default_rng(0), {}
        for number, sizes in enumerate([self.sizes, (), (5,)]):
            path, records = directory / f"{number}.tfrecord", [draws.bytes(size) for size in sizes]
            path.write_bytes(framed(*records))
            files[str(path)] = [np.array(record, object)[()] for record in records]
        return files


class TestTFRecordWithIndex(TestTFRecord):
    def make_format(self):
        return TFRecord(index=True)


class TestTFRecordUnchecked(TestTFRecord):
    def make_format(self):
        return TFRecord(check_crc=False)


class TestTFRecordCompressed(TestTFRecord):
    # The laws also read parts backwards, each of which decompresses the file from its beginning, so keep it small.
    sizes = (4,) * 8

    def make_format(self):
        return TFRecord(compression="zlib")

    def write(self, directory):
        return compressed_files(super().write(directory), "zz", zlib.compress)


# --- what others wrote ---


def test_files_that_tensorflow_wrote():
    features = {
        "image": FixedLenFeature((), bytes),
        "pixels": FixedLenFeature((8, 8), "float32"),
        "label": FixedLenFeature((), "int64"),
        "name": FixedLenFeature((), str),
        "ink": VarLenFeature("int64"),
    }
    facts = {
        "digits-0.tfrecord": (450, 2000, 141421, 8838.8125, 8459, 265967, "digit-0", "digit-449"),
        "digits-3.tfrecord.gz": (449, 2017, 139695, 8730.9375, 8395, 263952, "digit-1348", "digit-1796"),
    }
    for name, expected in facts.items():
        rows = list(read_tfrecord(DATA / name, features))
        actual = (
            len(rows),
            sum(int(row["label"]) for row in rows),
            sum(np.frombuffer(row["image"], np.uint8).sum(dtype=int) for row in rows),
            sum(float(row["pixels"].sum()) for row in rows),
            sum(len(row["ink"]) for row in rows),
            sum(int(row["ink"].sum()) for row in rows),
            str(rows[0]["name"]),
            str(rows[-1]["name"]),
        )
        assert actual == expected
        assert len(list(read_files(DATA / name))) == expected[0]
    first = list(read_tfrecord(DATA / "digits-0.tfrecord", {"label": features["label"]}).take(10))
    assert [int(row["label"]) for row in first] == list(range(10))


def test_batches_of_examples():
    ds = read_tfrecord(DATA / "digits-0.tfrecord", {"ink": VarLenFeature("int64"), "label": FixedLenFeature((), int)})
    assert ds.element_spec == {"ink": TensorSpec((None,), "int64"), "label": TensorSpec((), "int64")}
    padded = next(iter(ds.padded_batch(100)))
    ragged = next(iter(ds.ragged_batch(100)))
    lengths = ragged["ink"].row_lengths
    assert padded["ink"].shape == (100, lengths.max())
    assert (padded["ink"] == ragged["ink"].padded(lengths.max())).all()


def test_the_bytes_tensorflow_writes(tmp_path):
    content = (
        b"\x01\x00\x00\x00\x00\x00\x00\x00\x01u\xdeAaxn\xe4(\x00\x00\x00\x00\x00\x00\x00\x00)\x03\x98\x07\xd8\xea\x82"
        b"\xa2\x03\x00\x00\x00\x00\x00\x00\x00\xb0\x99I\x0eccc\xe5\xbf\x1d\x8e"
    )
    (tmp_path / "a.tfrecord").write_bytes(content)
    assert records_of(read_tfrecord(tmp_path / "a.tfrecord")) == [b"a", b"", b"ccc"]
    column = np.array([b"a", b"", b"ccc"], object)
    file = io.BytesIO()
    TFRecord().write(Block(Structure.of(0)[1], [column]), file)
    assert file.getvalue() == content


def test_tensorflows_name(tmp_path):
    paths = [written(tmp_path / "0.tfrecord", b"a"), str(tmp_path / "1.gz")]
    Path(paths[1]).write_bytes(gzip.compress(framed(b"b", b"c")))
    assert records_of(data.TFRecordDataset(paths[:1])) == [b"a"]
    assert records_of(data.TFRecordDataset(paths[1], "GZIP")) == [b"b", b"c"]
    assert data.TFRecordDataset(paths[0]).cardinality() == data.UNKNOWN_CARDINALITY
    assert data.TFRecordDataset(paths[0]).element_spec == TensorSpec((), object)
    names = data.Dataset.list_files(str(tmp_path / "*.tfrecord"))
    assert records_of(data.TFRecordDataset(names)) == [b"a"]
    with pytest.raises(errors.FileError, match=r"1\.gz.*at byte 0.*compressed by gzip: give compression='gzip'"):
        list(data.TFRecordDataset(paths[1]))


# --- how records follow one another ---


@pytest.mark.parametrize("seed", range(4))
def test_any_lengths(tmp_path, seed):
    draws = np.random.default_rng(seed)
    runs = [[int(size)] * int(number) for size, number in zip(draws.integers(0, 40, 60), draws.integers(1, 90, 60))]  # noqa: B905
    records = [draws.bytes(size) for run in runs for size in run]
    path = written(tmp_path / "a.tfrecord", *records)
    assert records_of(read_tfrecord(path)) == records
    with dask.config.set({"daskdist.split-bytes": 1000}):
        assert records_of(read_tfrecord(path)) == records


def test_checksums_of_lengths():
    lengths = np.array([0, 1, 127, 2**16, 2**33 + 5, 2**63], np.uint64)
    assert checksums.length_checksums(lengths).tolist() == [
        struct.unpack("<I", masked(struct.pack("<Q", length)))[0] for length in lengths.tolist()
    ]


def test_a_length_that_looks_like_gzip(tmp_path):
    record = bytes(0x088B1F)
    path = written(tmp_path / "a.tfrecord", record, b"b")
    assert Path(path).read_bytes().startswith(b"\x1f\x8b\x08")
    assert [len(value) for value in records_of(read_tfrecord(path))] == [len(record), 1]


def test_a_gzip_name_of_an_uncompressed_file(tmp_path):
    assert records_of(read_tfrecord(written(tmp_path / "a.tfrecord.gz", b"plain"))) == [b"plain"]


# --- damage ---


def test_a_record_whose_bytes_are_damaged(tmp_path, any_split):
    content = bytearray(framed(b"one", b"two", b"three"))
    content[19 + 12] ^= 1
    path = tmp_path / "a.tfrecord"
    path.write_bytes(content)
    message = r"record \d of .*a\.tfrecord bytes .*, 3 bytes at 31: its checksum is not that of its bytes"
    with pytest.raises(errors.FileError, match=message):
        list(read_tfrecord(path))
    kept = iter(read_tfrecord(path).ignore_errors())
    assert records_of(kept) == [b"one", b"three"]
    assert kept.stats()["skipped_by_file"] == {str(path): 1}
    assert records_of(read_tfrecord(path, check_crc=False)) == [b"one", b"uwo", b"three"]


@pytest.mark.parametrize("index", [False, True])
def test_a_record_whose_length_is_damaged(tmp_path, any_split, index):
    content = bytearray(framed(b"one", b"two", b"three"))
    content[19 + 1] ^= 1
    path = tmp_path / "a.tfrecord"
    path.write_bytes(content)
    ds = read_tfrecord(path, index=index)
    with pytest.raises(errors.FileError, match=r"at byte 19: a record states a length of 259 bytes, whose checksum"):
        list(ds)
    kept = iter(ds.ignore_errors())
    assert records_of(kept) == [b"one"]
    assert kept.stats()["skipped_by_file"] == {str(path): 1}
    with pytest.raises(
        errors.FileError, match=r"at byte 19: a record has 259 bytes, but the file ends 235 bytes before"
    ):
        list(read_tfrecord(path, check_crc=False, index=index))


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize(
    ("cut", "reason"),
    [
        (-1, "at byte 38: a record has 5 bytes, but the file ends 1 bytes before"),
        (-12, "at byte 38: 9 bytes at its end, but a record takes at least 16"),
    ],
)
def test_a_file_cut_short(tmp_path, any_split, cut, reason, index):
    path = tmp_path / "a.tfrecord"
    path.write_bytes(framed(b"one", b"two", b"three")[:cut])
    ds = read_tfrecord(path, index=index)
    with pytest.raises(errors.FileError, match=reason):
        list(ds)
    kept = iter(ds.ignore_errors())
    assert records_of(kept) == [b"one", b"two"]
    assert kept.stats()["num_skipped"] == 1


def test_a_compressed_file_cut_short(tmp_path):
    records = [np.random.default_rng(k).bytes(1000) for k in range(1000)]
    whole = gzip.compress(framed(*records), 1)
    path = tmp_path / "a.tfrecord.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(errors.FileError, match=r"damaged or cut short: after \d+ bytes when decompressed"):
        list(read_tfrecord(path))
    kept = records_of(read_tfrecord(path).ignore_errors())
    assert 0 < len(kept) < 1000
    assert kept == records[: len(kept)]


def test_files_that_are_not_tfrecord(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(b"not a tfrecord file at all, really")
    with pytest.raises(errors.FileError, match="is it a TFRecord file, with the compression of its name"):
        list(read_tfrecord(tmp_path / "a.tfrecord"))


def test_without_the_library(tmp_path, monkeypatch):
    path = written(tmp_path / "a.tfrecord", b"one")
    imported = builtins.__import__

    def without(name, *args):
        if name == "google_crc32c":
            raise ImportError(name)
        return imported(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(errors.MissingPackageError, match=r"'daskdist\[tfrecord\]', or give check_crc=False"):
        read_tfrecord(path)
    assert records_of(read_tfrecord(path, check_crc=False)) == [b"one"]


# --- the index ---


def test_an_index_counts_records_and_writes_nothing(tmp_path):
    records = [np.random.default_rng(k).bytes(30_000) for k in range(20)]
    path = written(tmp_path / "a.tfrecord", *records)
    with dask.config.set({"daskdist.split-bytes": "100 kB"}):
        ds = read_tfrecord(path, index=True)
        assert ds.cardinality() == 20
        splits = node_of(ds).splits()
    assert sum(split.num_rows for split in splits) == 20
    assert len(splits) > 4
    assert records_of(ds) == records
    assert [value.name for value in tmp_path.iterdir()] == ["a.tfrecord"]
    # A file that was changed has another index.
    written(tmp_path / "a.tfrecord", *records[:7])
    assert read_tfrecord(path, index=True).cardinality() == 7


def test_files_elsewhere_have_an_index():
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/tfrecords/a.tfrecord", framed(b"one", b"two"))
    try:
        ds = read_tfrecord("memory://tfrecords/*.tfrecord", index=True)
        assert (ds.cardinality(), records_of(ds)) == (2, [b"one", b"two"])
    finally:
        fs.rm("/tfrecords", recursive=True)


def test_compressed_files_have_no_index(tmp_path):
    path = tmp_path / "a.tfrecord.gz"
    path.write_bytes(gzip.compress(framed(b"one")))
    ds = read_tfrecord(path, index=True)
    assert (ds.cardinality(), records_of(ds)) == (data.UNKNOWN_CARDINALITY, [b"one"])


def test_a_file_that_was_changed_since(tmp_path):
    path = written(tmp_path / "a.tfrecord", b"one")
    for index in (False, True):
        ds = read_tfrecord(path, index=index)
        list(ds)
        written(tmp_path / "a.tfrecord", *[b"other"] * (2 + index))
        with pytest.raises(errors.FileError, match="was changed since it was listed"):
            list(ds)


def test_parts_read_by_threads_at_once(tmp_path):
    records = [bytes([k % 251]) * (k % 90) for k in range(20_000)]
    path = written(tmp_path / "a.tfrecord", *records)
    with dask.config.set({"daskdist.split-bytes": "50 kB"}):
        form = TFRecord()
        splits = form.list_splits(path, 0, FirstFile(path, form.spec(path)))
    actual = {}
    threads = [
        threading.Thread(target=lambda k=k: actual.update({k: form.read(splits[k])})) for k in range(len(splits))
    ]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [record for k in range(len(splits)) for record in actual[k].leaves[0]] == records


# --- writing ---


def test_compressed_files_have_a_suffix(tmp_path):
    column = np.array([b"one", b"two"], object)
    for compression, end in (("gzip", ".gz"), ("zlib", ".zz"), ("zstd", ".zst"), ("bz2", ".bz2"), ("xz", ".xz")):
        form = TFRecord(compression=compression)
        path = tmp_path / f"a{form.suffixes[0]}"
        assert path.name == f"a.tfrecord{end}"
        with path.open("wb") as file:
            form.write(Block(Structure.of(0)[1], [column]), file)
        assert records_of(read_tfrecord(path)) == [b"one", b"two"]
    assert len(records_of(read_tfrecord(tmp_path))) == 10


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TensorSpec((), "float32"), "bytes, one for each record, or dicts"),
        (TensorSpec((3,), object), "bytes, one for each record, or dicts"),
        ((TensorSpec((), object), TensorSpec((), object)), "bytes, one for each record, or dicts"),
        ({"x": {"y": TensorSpec((), "float32")}}, "'x' holds a nest; an example is flat"),
        ({"x": TensorSpec((), "complex64")}, r"leaf \['x'\] is complex64; an example holds numbers, bytes and text"),
        ({"x": daskdist.RaggedTensorSpec((2, None), "int64")}, "unbatch"),
    ],
)
def test_elements_that_cannot_be_written(spec, message):
    leaves, structure = Structure.of(spec)
    with pytest.raises(errors.ArgumentError, match=message):
        TFRecord().check(ElementSpec(structure, leaves))


def test_values_that_cannot_be_written():
    def write(column):
        leaves, structure = Structure.of(column)
        TFRecord().write(Block(structure, leaves), io.BytesIO())

    with pytest.raises(errors.ArgumentError, match=r"records must be bytes, but one is .*3"):
        write(np.array([b"a", 3], object))
    with pytest.raises(errors.ArgumentError, match="leaf 'x' has None; give bytes, or text"):
        write({"x": np.array([b"a", None], object)})
    with pytest.raises(errors.ArgumentError, match="None is not an element"):
        write(np.array([b"a", None], object))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            np.array([1, 2**64 - 1], np.uint64),
            "leaf 'x' of row 1 of .* has 18446744073709551615; an example holds int64",
        ),
        (np.array([np.inf, 1.0, 1e300]), r"leaf 'x' of row 2 of .* has 1e\+300; an example holds float32"),
        (np.array([[1.0, 2.0], [3.0, -3.5e38]]), r"leaf 'x' of row 1 of .* has -3\.5e\+38; an example holds float32"),
    ],
)
def test_numbers_that_are_too_large_are_not_written(tmp_path, column, message):
    with pytest.raises(errors.ArgumentError, match=message):
        Dataset.from_tensor_slices({"x": column}).to_tfrecord(tmp_path / "a")
    # The same holds for lists of different lengths.
    lists = Dataset.from_tensor_slices({"x": column}).map(lambda e: {"x": np.repeat(e["x"].reshape(-1)[-1], 3)})
    with pytest.raises(errors.ArgumentError, match=message):
        lists.to_tfrecord(tmp_path / "b")
    assert not list(tmp_path.iterdir())


def test_floats_that_fit_and_those_that_are_infinite_are_written(tmp_path):
    values = [np.inf, -np.inf, np.nan, 3.4e38, 0.1]
    Dataset.from_tensor_slices({"x": np.array(values)}).to_tfrecord(tmp_path)
    actual = [float(e["x"]) for e in read_tfrecord(tmp_path, {"x": FixedLenFeature((), "float32")})]
    np.testing.assert_array_equal(actual, np.float32(values))


def test_leaves_of_several_dtypes_are_not_converted_to_a_common_one(tmp_path):
    def odd(e):
        return {"x": np.uint64(5) if e["x"] == 3 else np.int64(2**62 + 1)}

    with pytest.raises(errors.ArgumentError, match=r"element 3 is .*uint64.* earlier elements are .*int64"):
        Dataset.from_tensor_slices({"x": np.arange(6)}).map(odd).to_tfrecord(tmp_path)


def test_on_a_cluster(tmp_path, on_cluster):
    for number in range(2):
        written(tmp_path / f"{number}.tfrecord", *[bytes([k]) * k for k in range(50)])
    with dask.config.set({"daskdist.split-bytes": 400}):
        ds = read_tfrecord(tmp_path).map(len).batch(10)
        steps = [on_cluster.local_results(batch) for batch in on_cluster.distribute_dataset(ds)]
    assert sorted(int(x) for step in steps for part in step for x in np.asarray(part)) == sorted([*range(50)] * 2)
