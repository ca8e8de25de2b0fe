"""Records of one length between a header and a footer, as bytes and as arrays."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import dask
import numpy as np
import pytest
from compressed import compressed_files

from daskdist import TensorSpec, data, errors, read_fixed_length
from daskdist.core.dataset_base import node_of
from daskdist.formats.fixed_length import FixedLength
from daskdist.storage.first_file import FirstFile
from daskdist.testing import FormatLaws


def records_of(dataset):
    return [bytes(element) for element in dataset]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"HHabcdefghFF")
    return str(path)


# --- laws ---


class TestFixedLength(FormatLaws):
    split_bytes = 100
    around = (3, 2)
    counts = (60, 0, 3)

    def make_format(self):
        return FixedLength(7, None, *self.around)

    def write(self, directory):
        draws, files = np.random.default_rng(0), {}
        header, footer = self.around
        for number, count in enumerate(self.counts):
            path, content = directory / f"{number}.bin", draws.bytes(7 * count)
            path.write_bytes(bytes(header) + content + bytes(footer))
            files[str(path)] = self.elements([content[7 * k : 7 * k + 7] for k in range(count)])
        return files

    def elements(self, records):
        return [np.array(record, object)[()] for record in records]


class TestFixedLengthArrays(TestFixedLength):
    def make_format(self):
        return FixedLength(7, "uint8", *self.around)

    def elements(self, records):
        return [np.frombuffer(record, np.uint8) for record in records]


class TestFixedLengthFields(TestFixedLength):
    dtype = np.dtype([("label", "u1"), ("x", ">i2", (3,))])

    def make_format(self):
        return FixedLength(7, self.dtype, *self.around)

    def elements(self, records):
        return [
            {"label": np.uint8(record[0]), "x": np.frombuffer(record, ">i2", 3, 1).astype(np.int16)}
            for record in records
        ]


class TestFixedLengthCompressed(TestFixedLength):
    around = (0, 0)
    counts = (25, 0, 3)

    def write(self, directory):
        return compressed_files(super().write(directory), "gz", gzip.compress)


class TestFixedLengthCompressedWithHeader(TestFixedLengthCompressed):
    around = (3, 2)

    def test_edge_cases_of_the_format_are_covered(self, tmp_path):
        form, files = self.make_format(), self.write(tmp_path)
        with dask.config.set({"daskdist.split-bytes": 1}):
            splits = [form.list_splits(path, 0, FirstFile(path, form.spec(path))) for path in files]
        assert [[split.num_rows for split in value] for value in splits] == [[None]] * len(files)


# --- as in TensorFlow 2.21 ---


def test_header_and_footer(path):
    dataset = data.FixedLengthRecordDataset(path, 4, 2, 2)
    assert dataset.element_spec == TensorSpec((), object)
    assert records_of(dataset) == [b"abcd", b"efgh"]
    assert records_of(data.FixedLengthRecordDataset([path, path], 6)) == [b"HHabcd", b"efghFF"] * 2
    names = data.Dataset.list_files(path)
    assert records_of(data.FixedLengthRecordDataset(names, 3, header_bytes=None)) == [b"HHa", b"bcd", b"efg", b"hFF"]


@pytest.mark.parametrize(("kind", "compress"), [("GZIP", gzip.compress), ("ZLIB", zlib.compress)])
def test_compressed(path, kind, compress):
    content = Path(path).read_bytes()
    Path(path).write_bytes(compress(content))
    assert records_of(data.FixedLengthRecordDataset(path, 4, 2, 2, compression_type=kind)) == [b"abcd", b"efgh"]
    assert records_of(data.FixedLengthRecordDataset(path, 6, compression_type=kind)) == [b"HHabcd", b"efghFF"]
    with pytest.raises(errors.FileError, match=r"4 bytes at its end, but a record has 8"):
        list(data.FixedLengthRecordDataset(path, 8, compression_type=kind))
    assert records_of(data.FixedLengthRecordDataset(path, 8, compression_type=kind).ignore_errors()) == [b"HHabcdef"]
    with pytest.raises(
        errors.FileError, match=r"header of 2 and its footer of 2 bytes it has 8, which is not a multiple"
    ):
        list(data.FixedLengthRecordDataset(path, 5, 2, 2, compression_type=kind))
    Path(path).write_bytes(compress(content)[:-9])
    with pytest.raises(errors.FileError, match=r"a\.bin decompressed: damaged or cut short"):
        list(data.FixedLengthRecordDataset(path, 4, 2, 2, compression_type=kind))


@pytest.mark.parametrize(
    ("content", "options", "number"),
    [(b"", (4,), 0), (b"HH", (4, 2), 0), (b"HF", (4, 1, 1), 0), (b"HH", (4, 4), None), (b"", (4, 2), None),
     (b"HHabcdefghFF", (4, 2, 1), None), (b"HHabcdefghFF", (5,), None)],
)  # fmt: skip
def test_files_that_are_no_whole_number_of_records(path, content, options, number):
    Path(path).write_bytes(content)
    ds = data.FixedLengthRecordDataset(path, *options)
    if number is not None:
        assert records_of(ds) == []
        return
    with pytest.raises(errors.FileError, match=r"a\.bin: without its header .* not a multiple of the record size \d"):
        list(ds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((0,), "record_bytes is 0; give a whole number of bytes, 1 or more"),
        ((-1,), "record_bytes is -1"),
        ((2.5,), "record_bytes is 2.5"),
        ((4, -1), "header_bytes is -1; give a whole number of bytes, 0 or more"),
        ((4, 0, -1), "footer_bytes is -1"),
    ],
)
def test_options_out_of_range(path, options, message):
    with pytest.raises(errors.ArgumentError, match=message):
        data.FixedLengthRecordDataset(path, *options)


# --- of our own ---


def test_records_are_counted_before_they_are_read(path):
    with dask.config.set({"daskdist.split-bytes": 4}):
        ds = read_fixed_length(path, 2, header_bytes=2)
        assert ds.cardinality() == 5
        assert [split.num_rows for split in node_of(ds).splits()] == [2, 2, 1]
    assert records_of(ds.skip(4)) == [b"FF"]


def test_records_as_numbers(tmp_path):
    images = np.arange(2 * 12, dtype=">f4").reshape(2, 3, 4)
    (tmp_path / "a.bin").write_bytes(images.tobytes())
    flat = read_fixed_length(tmp_path, 48, ">f4")
    assert flat.element_spec == TensorSpec((12,), "float32")
    assert (next(iter(flat.batch(2))) == images.reshape(2, 12)).all()
    assert (next(iter(flat.batch(2))).dtype) == np.dtype("=f4")
    shaped = read_fixed_length(tmp_path, 48, np.dtype((">f4", (3, 4))))
    assert (next(iter(shaped.batch(2))) == images).all()
    assert read_fixed_length(tmp_path, 4, ">f4").element_spec == TensorSpec((), "float32")
    assert read_fixed_length(tmp_path, 4, ">f4").cardinality() == 24


def test_records_are_views_of_the_bytes_that_were_read(tmp_path):
    dtype = [("label", "u1"), ("image", "u1", (2, 3))]
    (tmp_path / "a.bin").write_bytes(bytes(range(21)))
    ds = read_fixed_length(tmp_path / "a.bin", 7, dtype)
    assert ds.element_spec == {"label": TensorSpec((), "uint8"), "image": TensorSpec((2, 3), "uint8")}
    block = node_of(ds).format.read(node_of(ds).splits()[0])
    leaves = block.structure.pack(block.leaves)
    assert leaves["label"].tolist() == [0, 7, 14]
    assert leaves["image"].strides[0] == 7
    assert np.shares_memory(leaves["image"], leaves["image"].base)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("float64", "of 8 bytes, but a record has 6"),
        ([("a", "u1"), ("b", "u2")], "of 3 bytes, but a record has 6"),
        ("object", "not every object is any bytes; give numbers, or None for bytes"),
        ("S6", "not every"),
        ("bool", "not every bool is any bytes"),
        ([("a", "u2"), ("b", "O")], "not every object"),
        ("nonsense", "which NumPy does not know"),
    ],
)
def test_dtypes_that_do_not_fit(path, dtype, message):
    with pytest.raises(errors.ArgumentError, match=message):
        read_fixed_length(path, 6, dtype)


def test_a_file_that_was_changed_since(path):
    ds = read_fixed_length(path, 4)
    assert len(list(ds)) == 3
    Path(path).write_bytes(b"abcd")
    with pytest.raises(errors.FileError, match="was changed since it was listed"):
        list(ds)
