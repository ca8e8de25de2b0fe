"""NumPy's files: rows, fields, archives, memory mapping, and wrong headers."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import dask
import fsspec
import numpy as np
import pytest

from daskdist import TensorSpec, errors, read_files, read_npy
from daskdist.core.block import Bundle, from_items
from daskdist.core.dataset_base import node_of
from daskdist.core.spec import ElementSpec, RaggedTensorSpec
from daskdist.core.structure import LONE, Structure
from daskdist.formats import npy
from daskdist.formats.npy import Npy, Npz, npy_writer
from daskdist.storage.first_file import FirstFile
from daskdist.testing import FormatLaws

POINT = np.dtype([("at", "<f4", (2,)), ("n", ">i2"), ("deep", [("flag", "?"), ("when", "<M8[s]")])])


def rows_of(array):
    return [array[k] for k in range(len(array))]


class TestNpy(FormatLaws):
    split_bytes = 100

    def make_format(self):
        return Npy()

    def write(self, directory):
        whole = np.arange(120, dtype=np.float32).reshape(40, 3)
        written = {}
        for number, part in enumerate((whole, whole[:0], np.asfortranarray(whole[5:9]))):
            path = directory / f"{number}.npy"
            np.save(path, part)
            written[str(path)] = rows_of(part)
        return written


class TestNpz(FormatLaws):
    split_bytes = 40

    def make_format(self):
        return Npz()

    save = staticmethod(np.savez)

    def write(self, directory):
        x, y = np.arange(80, dtype=np.int16).reshape(20, 4), np.arange(20) / 4
        written = {}
        for number, part in enumerate((slice(0, 20), slice(0, 0), slice(3, 7))):
            path = directory / f"{number}.npz"
            self.save(path, x=x[part], y=y[part])
            written[str(path)] = [{"x": a, "y": b} for a, b in zip(x[part], y[part], strict=True)]
        return written


class TestNpzCompressed(TestNpz):
    save = staticmethod(np.savez_compressed)

    def test_edge_cases_of_the_format_are_covered(self, tmp_path):
        form, files = self.make_format(), self.write(tmp_path)
        for path, rows in files.items():
            # A compressed member is one split of any size, so that it is decompressed once.
            with dask.config.set({"daskdist.split-bytes": 1}):
                splits = form.list_splits(path, 0, FirstFile(path, form.spec(path)))
            assert len(splits) == (1 if rows else 0)
            assert [split.num_bytes for split in splits] == [len(rows) * 16] * len(splits)


class TestNpyOfFields(FormatLaws):
    split_bytes = 64

    def make_format(self):
        return Npy()

    def write(self, directory):
        array = np.zeros(12, POINT)
        array["at"] = np.arange(24).reshape(12, 2)
        array["n"] = np.arange(12)
        array["deep"]["flag"][::2] = True
        array["deep"]["when"][1] = "NaT"
        written = {}
        for number, part in enumerate((array, array[:0])):
            np.save(directory / f"{number}.npy", part)
            written[str(directory / f"{number}.npy")] = [
                {"at": row["at"], "n": np.int16(row["n"]), "deep": {n: row["deep"][n] for n in ("flag", "when")}}
                for row in part
            ]
        return written

    def test_writes_what_it_reads(self, tmp_path):
        # The elements of a structured array are nested dicts, which this format does not write.
        with pytest.raises(errors.ArgumentError, match=r"takes a single array or a dict of arrays.*such a dict"):
            super().test_writes_what_it_reads(tmp_path)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(5),
        np.arange(5, dtype=">u2"),
        np.array([1, np.nan], "f2"),
        np.array([True, False]),
        np.array([1 + 2j]),
        np.array(["2024-02-29", "NaT"], "M8[D]"),
        np.array([1, "NaT"], "m8[ns]"),
        np.array(["a", "ünï"]),
        np.array([b"a", b"bc"]),
        np.zeros((3, 0), "i4"),
        np.zeros((2, 3, 4, 5), np.longdouble),
        np.arange(24.0).reshape(2, 3, 4).T,
    ],
    ids=lambda array: f"{array.dtype.str}{list(array.shape)}",
)
def test_rows_are_as_numpy_has_them(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    ds = read_npy(tmp_path / "a.npy")
    assert ds.element_spec == TensorSpec(array.shape[1:], array.dtype.newbyteorder("="))
    assert ds.cardinality() == len(array)
    actual = next(iter(ds.batch(100)))
    np.testing.assert_array_equal(actual, np.load(tmp_path / "a.npy"))
    assert actual.dtype == array.dtype.newbyteorder("=")


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_versions(tmp_path, version):
    dtype = np.dtype([("größe" if version == (3, 0) else "size", "<f4")])
    array = np.array([(1.5,), (2.5,)], dtype)
    with (tmp_path / "a.npy").open("wb") as file:
        np.lib.format.write_array(file, array, version=version)
    assert [float(row[dtype.names[0]]) for row in read_npy(tmp_path / "a.npy")] == [1.5, 2.5]


def mapping_of(array):
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        array = array.base
    return array


@pytest.mark.parametrize("order", ["C", "F"])
def test_blocks_are_views_of_the_file(tmp_path, order):
    path = str(tmp_path / "a.npy")
    np.save(path, np.asarray(np.arange(1000).reshape(100, 10), order=order))
    form = Npy()
    with dask.config.set({"daskdist.split-bytes": 2000}):
        splits = form.list_splits(path, 0, FirstFile(path, form.spec(path)))
    assert [split.num_rows for split in splits] == [25] * 4
    block = form.read(splits[2])
    assert isinstance(mapping_of(block.leaves[0]), np.memmap)
    assert not block.leaves[0].flags.writeable
    # A change of the file changes the array, so nothing was copied.
    with open(path, "r+b") as file:
        file.seek(-8000 + 8 * (50 if order == "F" else 500), io.SEEK_END)
        file.write(np.int64(-7).tobytes())
    assert block.leaves[0][0, 0] == -7


def test_members_of_archives_are_mapped_where_they_are_not_compressed(tmp_path):
    path = str(tmp_path / "a.npz")
    np.savez(path, b=np.arange(200, dtype=np.uint8), x=np.arange(200) * 2)
    form = Npz(("x", "b"))
    with dask.config.set({"daskdist.split-bytes": 900}):
        splits = form.list_splits(path, 0, FirstFile(path, form.spec(path)))
    assert [split.num_rows for split in splits] == [100, 100]
    x, b = form.read(splits[1]).leaves
    assert isinstance(mapping_of(b), np.memmap)
    assert x.flags.aligned
    assert b.tolist() == list(range(100, 200))
    assert x.tolist() == list(range(200, 400, 2))


def with_a_flipped_bit(path, value):
    """Flip a bit of a value in a file."""
    content = bytearray(Path(path).read_bytes())
    content[content.index(value)] ^= 4
    Path(path).write_bytes(content)


@pytest.mark.parametrize("split_bytes", [9000, 100_000])
def test_checksums_of_mapped_members_are_compared_once(tmp_path, monkeypatch, split_bytes):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.arange(4000), y=np.arange(4000) / 2)
    summed, crc32 = [], zlib.crc32
    # The zipfile library refers to the function by another name.
    monkeypatch.setattr(npy.zlib, "crc32", lambda data, *start: summed.append(len(data)) or crc32(data, *start))
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        assert [int(x) for x in read_npy(path, "x").repeat(2)] == [*range(4000)] * 2
        assert summed == [32000 + 128]
        with_a_flipped_bit(path, np.int64(3077).tobytes())
        with pytest.raises(errors.FileError, match=r"a\.npz rows 0 .*the checksum of array 'x' is 0x.*check_crc=False"):
            list(read_npy(path))
        rows = list(iterator := iter(read_npy(path, "x").ignore_errors()))
        assert not rows
        assert iterator.stats()["skipped_by_file"][str(path)] >= 1
        # Arrays that are not selected are not checked.
        assert [float(y) for y in read_npy(path, "y")] == [k / 2 for k in range(4000)]
        assert [int(x) for x in read_npy(path, "x", check_crc=False)] == [
            k if k != 3077 else 3077 ^ 4 for k in range(4000)
        ]


def test_checksums_of_whole_members_elsewhere_are_compared(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(4000))
    with_a_flipped_bit(tmp_path / "a.npz", np.int64(3077).tobytes())
    fs = fsspec.filesystem("memory")
    fs.pipe("/checksums/a.npz", (tmp_path / "a.npz").read_bytes())
    try:
        with pytest.raises(errors.FileError, match="the checksum of array 'x'"):
            list(read_npy("memory://checksums/a.npz"))
        assert len(list(read_npy("memory://checksums/a.npz", check_crc=False))) == 4000
    finally:
        fs.rm("/checksums", recursive=True)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (None, {"a": np.int64(1), "b": np.float64(0.5), "v": np.array([2, 3])}),
        ("a", np.int64(1)),
        (["a", "b"], {"a": np.int64(1), "b": np.float64(0.5)}),
        (("v", "a"), (np.array([2, 3]), np.int64(1))),
        ({"x": ["a", "b"], "y": "v"}, {"x": np.array([1, 0.5]), "y": np.array([2, 3])}),
    ],
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_columns_of_archives(tmp_path, save, columns, expected):
    save(tmp_path / "a.npz", a=np.arange(3), b=np.arange(3) / 2, v=np.arange(6).reshape(3, 2))
    row = list(read_npy(tmp_path / "a.npz", columns))[1]
    leaves, structure = Structure.flatten(expected)
    for given, leaf in zip(structure.leaves_of(row), leaves, strict=True):
        np.testing.assert_array_equal(given, leaf)


def test_arrays_that_do_not_go_together(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(3), y=np.zeros(4), one=np.float64(1), o=np.array([None], object))
    with pytest.raises(
        errors.FileError, match=r"a\.npz: elements need arrays of equal length.*'x' has 3, 'y' has 4 rows; name some"
    ):
        read_npy(tmp_path / "a.npz", ["x", "y"])
    with pytest.raises(errors.FileError, match=r"array 'one' is a single value, without an axis 0"):
        read_npy(tmp_path / "a.npz")
    with pytest.raises(
        errors.FileError, match=r"array 'o' holds Python objects, which are not supported; store numbers"
    ):
        read_npy(tmp_path / "a.npz", "o")
    with pytest.raises(errors.ArgumentError, match=r"no column 'z'; there are 'x', 'y', 'one', 'o'"):
        read_npy(tmp_path / "a.npz", "z")
    assert len(list(read_npy(tmp_path / "a.npz", "y"))) == 4


def test_objects_are_never_unpickled(tmp_path):
    class Hostile:
        def __reduce__(self):
            return Path.touch, (tmp_path / "was-here",)

    np.save(tmp_path / "a.npy", np.array([Hostile()], object), allow_pickle=True)
    with pytest.raises(errors.FileError, match=r"a\.npy holds Python objects, which are not supported"):
        read_npy(tmp_path / "a.npy")
    np.savez_compressed(tmp_path / "b.npz", x=np.array([(1, Hostile())], [("n", "i4"), ("o", "O")]))
    with pytest.raises(errors.FileError, match=r"array 'x', field 'o' holds Python objects"):
        read_npy(tmp_path / "b.npz")
    assert not (tmp_path / "was-here").exists()


def with_header(path, header, data=b""):
    text = header.encode() + b"\n"
    Path(path).write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 4)}", r"cut short: .*takes 16\d+ bytes, but"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", "12 bytes more than the"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-4,)}", r"says its shape is \(-4,\)"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': ()}", "its array is a single value"),
        ("{'descr': '|V16', 'fortran_order': False, 'shape': (1,)}", r"raw bytes \(\|V16\), which are not supported"),
        ("{'descr': 'nonsense', 'fortran_order': False, 'shape': (4,)}", "descr is not a valid dtype"),
        ("{'shape': (4,)}", "damaged or cut short"),
        ("__import__('os').abort()", "damaged or cut short"),
        ("{" * 5000, "damaged or cut short"),
    ],
)
def test_wrong_headers_are_errors(tmp_path, header, words):
    with_header(tmp_path / "a.npy", header, bytes(16))
    with pytest.raises(errors.FileError, match=words) as caught:
        read_npy(tmp_path / "a.npy")
    assert "a.npy" in str(caught.value)


def test_a_header_of_a_version_to_come(tmp_path):
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x09\x00" + bytes(20))
    with pytest.raises(errors.FileError, match=r"version .* of the format is unknown"):
        read_npy(tmp_path / "a.npy")
    (tmp_path / "b.npy").write_bytes(b"\x93NUMPY\x03\x00\xff\xff\xff\x7f")
    with pytest.raises(errors.FileError, match="its header states a size of 2147483647 bytes"):
        read_npy(tmp_path / "b.npy")
    (tmp_path / "c.npy").write_text("1,2,3")
    with pytest.raises(errors.FileError, match=r"c\.npy: not a NumPy file: it begins with b'1,2,3'"):
        read_npy(tmp_path / "c.npy")


def test_a_file_cut_short_after_it_was_listed(tmp_path):
    # Access to a mapping beyond the end of its file kills the process.
    path = tmp_path / "a.npy"
    np.save(path, np.zeros(1_000_000))
    ds = read_npy(path)
    assert ds.cardinality() == 1_000_000
    path.write_bytes(path.read_bytes()[:500_000])
    with pytest.raises(errors.FileError, match=r"rows 0 to 1000000: the file was changed since it was listed"):
        list(ds)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("save", [None, np.savez, np.savez_compressed])
def test_remote_files(order, save, tmp_path):
    array = np.asarray(np.arange(60).reshape(20, 3), order=order)
    stream = io.BytesIO()
    if save:
        save(stream, x=array)
    else:
        np.save(stream, array)
    fs = fsspec.filesystem("memory")
    fs.pipe("/npy/a.npz" if save else "/npy/a.npy", stream.getvalue())
    try:
        with dask.config.set({"daskdist.split-bytes": 100}):
            ds = read_npy("memory://npy/a.np?", "x" if save else None)
            num_splits = len(node_of(ds).splits())
        assert num_splits == (5 if order == "C" and save is not np.savez_compressed else 1)
        np.testing.assert_array_equal(np.array(list(ds)), array)
    finally:
        fs.rm("/npy", recursive=True)


def test_files_of_other_elements(tmp_path):
    np.save(tmp_path / "0.npy", np.zeros((3, 2)))
    np.save(tmp_path / "1.npy", np.zeros((3, 3)))
    with pytest.raises(errors.FileError, match=r"1\.npy: its elements are .*\(3,\).*those of .*0\.npy"):
        list(read_npy(tmp_path))
    np.savez(tmp_path / "a.npz", x=np.zeros(2))
    np.savez(tmp_path / "b.npz", y=np.zeros(2))
    ds = read_npy([tmp_path / "a.npz", tmp_path / "b.npz"], "x")
    with pytest.raises(errors.FileError, match=r"b\.npz: no column 'x'; there are 'y'; the first file, .*a\.npz, has"):
        list(ds)
    with pytest.raises(errors.ArgumentError, match="it is one array without a name, but columns is 'x'"):
        read_npy(tmp_path / "0.npy", "x")
    np.savez(tmp_path / "none.npz")
    with pytest.raises(errors.FileError, match="has no arrays"):
        read_npy(tmp_path / "none.npz")


def test_a_header_of_more_rows_than_any_file_has(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3 * 2**20, np.uint8))
    with dask.config.set({"daskdist.split-bytes": 1}):
        ds = read_npy(tmp_path / "a.npy")
        with pytest.raises(
            errors.FileError, match=r"more than 1048576 splits of 1: damaged, or to be read with a larger"
        ):
            ds.cardinality()


def test_files_are_recognised_by_their_content(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(2))
    np.savez(tmp_path / "a.npz", x=np.arange(2))
    assert [int(x) for x in read_files(tmp_path / "a.npy")] == [0, 1]
    assert [int(row["x"]) for row in read_files(tmp_path / "a.npz")] == [0, 1]


# --- writing ---


@pytest.mark.parametrize(
    ("element", "words"),
    [
        ((np.zeros(2), np.zeros(2)), r"takes a single array or a dict of arrays"),
        ({"a": {"b": np.zeros(2)}}, r"takes a single array or a dict of arrays"),
        ({"../a": np.zeros(2)}, r"takes a single array or a dict of arrays, with names without '/'"),
        ("text", r"takes no StringDType.*fixed-size text \('U20'\)"),
        (b"bytes", r"takes no object"),
    ],
)
def test_elements_that_are_not_written(element, words):
    with pytest.raises(errors.ArgumentError, match=words):
        npy_writer(ElementSpec.of(element))


def test_rows_of_different_lengths_are_not_written():
    for leaf in (TensorSpec((None,), "f4"), RaggedTensorSpec((2, None), "f4")):
        with pytest.raises(errors.ArgumentError, match=r"takes arrays of one shape.*padded_batch"):
            npy_writer(ElementSpec(LONE, (leaf,)))
    ragged = from_items(LONE, [(np.zeros((2, 2)),), (np.zeros((3, 3)),)])
    with pytest.raises(errors.ArgumentError, match="their shapes or dtypes differ"):
        Npy().write(ragged, io.BytesIO())
    with pytest.raises(errors.ArgumentError, match="there are none, and so no shape"):
        Npy().write(Bundle(LONE, []), io.BytesIO())
    with pytest.raises(errors.ArgumentError, match="takes a single array, but elements are"):
        Npy().check(ElementSpec.of({"x": np.zeros(2)}))
    with pytest.raises(errors.ArgumentError, match="takes a dict of arrays, but elements are single"):
        Npz().check(ElementSpec.of(np.zeros(2)))


def test_what_is_written_numpy_reads(tmp_path):
    rows = from_items(*reversed_items([{"file": np.float32(k), "x": np.array([k, k])} for k in range(3)]))
    form = npy_writer(ElementSpec.of({"file": np.float32(0), "x": np.zeros(2, int)}))
    assert form.suffixes[0] == ".npz"
    with (tmp_path / "a.npz").open("wb") as file:
        form.write(rows, file)
    assert zipfile.ZipFile(tmp_path / "a.npz").testzip() is None
    with np.load(tmp_path / "a.npz") as actual:
        # "file" is the name of a parameter of np.savez.
        assert actual["file"].tolist() == [0, 1, 2]
        assert actual["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert npy_writer(ElementSpec.of(np.zeros(2))).suffixes[0] == ".npy"


def reversed_items(elements):
    flat = [Structure.flatten(element) for element in elements]
    return flat[0][1], [leaves for leaves, _ in flat]
