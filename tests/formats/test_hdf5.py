"""HDF5: chunks, text, compound types, links to other files, and damage that the library does not expect."""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from pathlib import Path

import dask
import fsspec
import h5py
import numpy as np
import pytest

import daskdist
from daskdist import Options, TensorSpec, errors, read_files, read_hdf5
from daskdist.core.structure import Structure
from daskdist.formats import hdf5 as module
from daskdist.formats.hdf5 import Hdf5
from daskdist.storage.first_file import FirstFile
from daskdist.testing import FormatLaws
from daskdist.testing.formats import spoiled

TEXT = np.dtypes.StringDType()


def write(path, arrays, libver="earliest", **options):
    with h5py.File(path, "w", libver=libver) as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, **_fitting(options, array))
    return str(path)


def _fitting(options, array):
    if not np.shape(array) or not len(array):
        return {}
    chunks = options.get("chunks")
    return {**options, "chunks": (chunks, *array.shape[1:])} if isinstance(chunks, int) else options


class TestHdf5(FormatLaws):
    split_bytes = 100
    libver = "earliest"
    options = ()

    def make_format(self):
        return Hdf5()

    def write(self, directory):
        x, y = np.arange(80, dtype=np.float32).reshape(40, 2), np.arange(40) % 5
        written = {}
        for number, part in enumerate((slice(0, 40), slice(0, 0), slice(3, 10))):
            path = write(directory / f"{number}.h5", {"x": x[part], "y": y[part]}, self.libver, **dict(self.options))
            written[path] = [{"x": a, "y": b} for a, b in zip(x[part], y[part], strict=True)]
        return written


class TestHdf5Compressed(TestHdf5):
    libver = "latest"
    options = (("chunks", 6), ("compression", "gzip"), ("shuffle", True), ("fletcher32", True))


class TestHdf5OfAnyLength(FormatLaws):
    split_bytes = 100

    """Text and lists, of which chunks hold only the addresses."""

    def make_format(self):
        return Hdf5()

    def write(self, directory):
        written = {}
        for number, size in enumerate((30, 0)):
            path = directory / f"{number}.h5"
            texts = np.array([f"text {k} " + "ü" * (k % 5) for k in range(size)], TEXT)
            with h5py.File(path, "w") as file:
                chunks = {"chunks": (7,)} if size else {}
                file.create_dataset("s", (size,), h5py.string_dtype(), **chunks)
                file.create_dataset("v", (size,), h5py.vlen_dtype("i2"), **chunks)
                for k in range(size):
                    file["s"][k] = str(texts[k])
                    file["v"][k] = np.arange(k % 4)
            written[str(path)] = [{"s": texts[k], "v": np.arange(k % 4, dtype="i2")} for k in range(size)]
        return written


@pytest.mark.parametrize("chunks", [None, (4,), (20,)])
@pytest.mark.parametrize(
    ("dtype", "value"), [(h5py.string_dtype(), "text"), (h5py.vlen_dtype("f4"), np.arange(4))], ids=["text", "lists"]
)
def test_no_memory_is_allocated_for_impossible_lengths(tmp_path, chunks, dtype, value):
    # With one changed byte in a length, the library would allocate gigabytes before it sees that the file is smaller.
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", (10,), dtype, chunks=chunks, maxshape=(None,) if chunks else None)
        for k in range(10):
            made[k] = value
        address = made.id.get_offset() or made.id.get_chunk_info(0).byte_offset
    assert len(list(read_hdf5(path, "x"))) == 10
    content = bytearray(path.read_bytes())
    assert content[address : address + 4] == struct.pack("<I", 4)
    content[address + 3] = 0x7F
    path.write_bytes(content)
    with pytest.raises(errors.FileError, match=r"a\.h5 rows 0 to 10: .*'/x' states the length 2130706436, more than"):
        list(read_hdf5(path, "x"))


@pytest.fixture
def decoded(monkeypatch):
    """Return the start and the number of rows of each read of an array."""
    counts = Counter()
    whole = module._values

    def values(dataset, start, stop, *args):
        counts.update(
            (dataset.name, chunk) for chunk in range(start // dataset.chunks[0], -(-stop // dataset.chunks[0]))
        )
        return whole(dataset, start, stop, *args)

    monkeypatch.setattr(module, "_values", values)
    return counts


@pytest.mark.parametrize("chunk_rows", [(7, 7), (4, 6), (7, 64), (100, 9)])
@pytest.mark.parametrize(("split_bytes", "num_threads"), [(60, 4), (150, 1), (150, 4), (10**6, 4)])
def test_a_chunk_is_decoded_once(tmp_path, decoded, chunk_rows, split_bytes, num_threads):
    x, y = np.arange(200).reshape(100, 2), np.arange(100, dtype="i2")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(chunk_rows[0], 2), compression="gzip")
        file.create_dataset("y", data=y, chunks=(chunk_rows[1],), compression="gzip")
    with dask.config.set({"daskdist.split-bytes": split_bytes, "daskdist.num-threads": num_threads}):
        ds = read_hdf5(tmp_path / "a.h5")
        for _ in range(2):
            decoded.clear()
            rows = list(ds)
            np.testing.assert_array_equal([row["x"] for row in rows], x)
            np.testing.assert_array_equal([row["y"] for row in rows], y)
            assert len(decoded) == sum(-(-100 // rows) for rows in chunk_rows)
            assert set(decoded.values()) == {1}


def test_splits_end_where_chunks_do(tmp_path):
    path = write(tmp_path / "a.h5", {"x": np.arange(20)}, chunks=(6,))
    form = Hdf5()
    with dask.config.set({"daskdist.split-bytes": 100}):
        splits = form.list_splits(path, 0, FirstFile(path, form.spec(path)))
    assert [split.label for split in splits] == [f"{path} rows {k} to {min(k + 12, 20)}" for k in (0, 12)]
    assert [split.num_bytes for split in splits] == [96, 64]
    # An array without chunks can be cut anywhere.
    path = write(tmp_path / "b.h5", {"x": np.arange(20)})
    with dask.config.set({"daskdist.split-bytes": 100}):
        splits = form.list_splits(path, 0, FirstFile(path, form.spec(path)))
    assert [split.num_rows for split in splits] == [12, 8]


@pytest.mark.parametrize("userblock_size", [0, 512])
def test_contiguous_arrays_are_mapped(tmp_path, userblock_size):
    array = np.arange(200).reshape(50, 4)
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=userblock_size) as file:
        file["x"] = array
        file.create_dataset("y", data=array, chunks=(10, 4))
        # No dtype has 12 bits.
        kind = h5py.h5t.STD_I16LE.copy()
        kind.set_precision(12)
        space = h5py.h5s.create_simple((50,))
        made = h5py.h5d.create(file.id, b"odd", kind, space)
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(50, dtype="i2") - 25)
    path = str(tmp_path / "a.h5")
    form = Hdf5(("x", "y", "odd"))
    with dask.config.set({"daskdist.split-bytes": 700}):
        splits = form.list_splits(path, 0, FirstFile(path, form.spec(path)))
    assert [split.num_rows for split in splits] == [10] * 5
    x, y, odd = form.read(splits[1]).leaves
    np.testing.assert_array_equal(x, array[10:20])
    np.testing.assert_array_equal(y, array[10:20])
    assert odd.tolist() == list(range(-15, -5))
    bases = []
    for leaf in (x, y, odd):
        while isinstance(leaf, np.ndarray) and not isinstance(leaf, np.memmap):
            leaf = leaf.base
        bases.append(isinstance(leaf, np.memmap))
    assert bases == [not userblock_size, False, False]


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (np.arange(9, dtype="u1"), None),
        (np.arange(9, dtype=">i4"), None),
        (np.arange(9, dtype="f2"), None),
        (np.arange(9) % 2 == 0, None),
        (np.arange(9) * 1j, None),
        (np.array([b"a", b"bc"], "S3"), None),
        (np.arange(60, dtype="i2").reshape(5, 3, 4), None),
        (np.array([1, "NaT"], "M8[s]"), h5py.opaque_dtype(np.dtype("M8[s]"))),
        (np.array([0, 1, 0], "i1"), h5py.enum_dtype({"A": 0, "B": 1}, "i1")),
        (np.zeros((3, 0)), None),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_dtypes(tmp_path, array, dtype):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=array.astype(dtype or array.dtype))
    ds = read_hdf5(tmp_path / "a.h5", "x")
    wanted = array.dtype.newbyteorder("=")
    assert ds.element_spec == TensorSpec(array.shape[1:], wanted)
    actual = next(iter(ds.batch(100)))
    assert actual.dtype == wanted
    assert actual.dtype.metadata is None
    np.testing.assert_array_equal(actual, array)


def test_text_and_bytes_and_lists(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["s"] = ["a", "ünï", ""]
        file.create_dataset("b", data=[b"a", b"\xff", b""], dtype=h5py.string_dtype("ascii"))
        file.create_dataset("two", data=[["a", "b"], ["c", "d"], ["e", "f"]], dtype=h5py.string_dtype())
        file.create_dataset("v", (3,), h5py.vlen_dtype("<i4"))
        file["v"][1] = [1, 2]
    ds = read_hdf5(tmp_path / "a.h5")
    assert ds.element_spec == {
        "b": TensorSpec((), object),
        "s": TensorSpec((), TEXT),
        "two": TensorSpec((2,), TEXT),
        "v": TensorSpec((None,), "int32"),
    }
    rows = list(ds)
    assert [row["s"] for row in rows] == ["a", "ünï", ""]
    assert [bytes(row["b"]) for row in rows] == [b"a", b"\xff", b""]
    assert rows[2]["two"].tolist() == ["e", "f"]
    assert [row["v"].tolist() for row in rows] == [[], [1, 2], []]
    assert rows[1]["v"].dtype == np.int32
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("s", data=[b"\xff"], dtype=h5py.string_dtype())
    with pytest.raises(errors.FileError, match=r"b\.h5 rows 0 to 1: .*array '/s' has text that is not UTF-8"):
        list(read_hdf5(tmp_path / "b.h5"))


def test_compound_types_become_dicts(tmp_path):
    array = np.array([(1.5, [1, 2]), (2.5, [3, 4])], [("a", ">f4"), ("b", "i8", (2,))])
    rows = list(read_hdf5(write(tmp_path / "a.h5", {"x": array}), "x"))
    assert [float(row["a"]) for row in rows] == [1.5, 2.5]
    assert rows[1]["b"].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (h5py.ref_dtype, "array 'x' holds Python objects, which are not supported"),
        (np.dtype([("a", h5py.string_dtype())]), "array 'x', field 'a' holds Python objects"),
        (np.dtype("V3"), r"array 'x' holds raw bytes \(\|V3\)"),
        (h5py.vlen_dtype(np.dtype([("a", "i4")])), "array 'x' holds lists of .* in 1 axes, which is not supported"),
        (h5py.vlen_dtype(">i4"), "array 'x' holds lists of >i4 in 1 axes, which is not supported"),
    ],
)
def test_dtypes_that_no_element_holds(tmp_path, dtype, words):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (2,), dtype)
        file["y"] = [1, 2]
    with pytest.raises(errors.FileError, match=words):
        read_hdf5(tmp_path / "a.h5")
    assert [int(y) for y in read_hdf5(tmp_path / "a.h5", "y")] == [1, 2]


@pytest.mark.parametrize(
    ("arrays", "row"),
    [
        (None, {"a": 1, "b": 0.5}),
        ("a", 1),
        (("b", "deep/er/c"), (0.5, 11)),
        ({"x": ["a", "b"], "y": ("deep/er/c",)}, {"x": np.array([1, 0.5]), "y": (11,)}),
    ],
)
def test_arrays_in_a_structure(tmp_path, arrays, row):
    path = write(tmp_path / "a.h5", {"a": np.arange(3), "b": np.arange(3) / 2, "deep/er/c": np.arange(3) + 10})
    actual = list(read_hdf5(path, arrays))[1]
    leaves, structure = Structure.of(row)
    for given, leaf in zip(structure.leaves_of(actual), leaves, strict=True):
        np.testing.assert_array_equal(given, leaf)


def test_arrays_that_do_not_go_together(tmp_path):
    path = write(tmp_path / "a.h5", {"x": np.arange(3), "y": np.arange(4), "one": 1.0, "none": h5py.Empty("f4")})
    with pytest.raises(
        errors.FileError, match=r"a\.h5: elements need arrays of equal length.*'x' has 3, 'y' has 4 rows; name some"
    ):
        read_hdf5(path, ["x", "y"])
    with pytest.raises(errors.FileError, match="array 'one' is a single value"):
        read_hdf5(path, "one")
    with pytest.raises(errors.FileError, match="array 'none' has no shape and so no rows"):
        read_hdf5(path, "none")
    with pytest.raises(errors.ArgumentError, match=r"a\.h5: no array 'z'; there are 'none', 'one', 'x', 'y'"):
        read_hdf5(path, "z")
    other = write(tmp_path / "b.h5", {"g/y": np.arange(3)})
    with pytest.raises(errors.FileError, match=r"b\.h5: no array 'x'; there are 'g/y'; the first file, .* has"):
        list(read_hdf5([path, other], "x"))
    with pytest.raises(errors.FileError, match=r"b\.h5: its arrays are all in groups; name some: 'g/y'"):
        read_hdf5(other)
    with pytest.raises(errors.FileError, match="has no arrays"):
        read_hdf5(write(tmp_path / "c.h5", {}))
    with pytest.raises(errors.FileError, match=r"c\.h5: its elements are .*float64"):
        list(read_hdf5([path, write(tmp_path / "c.h5", {"x": np.arange(3.0)})], "x"))


def test_nothing_is_followed_out_of_the_file(tmp_path):
    (tmp_path / "secret").write_bytes(bytes(range(12)))
    write(tmp_path / "other.h5", {"x": np.arange(3)})
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("outside", (3,), "i4", external=[(str(tmp_path / "secret"), 0, 12)])
        layout = h5py.VirtualLayout((3,), "i8")
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (3,))
        file.create_virtual_dataset("virtual", layout)
        file["link"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "x")
        file["soft"] = h5py.SoftLink("/link")
        file["group"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/")
        file["deep/soft"] = h5py.SoftLink("/group/x")
        file["here"] = np.arange(3)
    for name in ("outside", "virtual"):
        with pytest.raises(errors.FileError, match=f"the values of array '{name}' are in other files; read"):
            read_hdf5(path, name)
    for name in ("link", "soft", "group", "group/x", "deep/soft"):
        with pytest.raises(errors.FileError, match=rf"a\.h5: '{name}' is, or leads to, a link to another file, '.*oth"):
            read_hdf5(path, {"x": [name]})
    # If no names are given, links to other files are an error too, and not left out.
    with pytest.raises(errors.FileError, match=r"'group' is, or leads to, .* name the arrays to read without it"):
        read_hdf5(path)
    assert [int(x) for x in read_hdf5(path, "here")] == [0, 1, 2]


def test_soft_links_in_the_file_are_followed(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["g/x"] = np.arange(3)
        file["g/up"] = h5py.SoftLink("/g")
        file["g/beside"] = h5py.SoftLink("x")
        file["soft"] = h5py.SoftLink("/g/x")
        file["twice"] = h5py.SoftLink("soft")
        file["h"] = h5py.SoftLink("/g")
        file["through"] = h5py.SoftLink("h/./beside")
    assert list(read_hdf5(path)) == [dict.fromkeys(("soft", "twice", "through"), k) for k in range(3)]
    assert [int(x) for x in read_hdf5(path, "h/x")] == [0, 1, 2]
    assert [int(x) for x in read_hdf5(path, "g/beside")] == [0, 1, 2]
    with h5py.File(path, "a") as file:
        file["gone"] = h5py.SoftLink("/g/y")
        file["round"] = h5py.SoftLink("/about")
        file["about"] = h5py.SoftLink("/round")
    with pytest.raises(errors.FileError, match=r"a\.h5: 'gone' is a link that leads nowhere in the file; leave it out"):
        read_hdf5(path, "gone")
    with pytest.raises(errors.FileError, match=r"a\.h5: 'round' is a chain of more than 32 links"):
        read_hdf5(path, "round")
    with pytest.raises(errors.FileError, match=r"a\.h5: 'about' is .*name the arrays to read without it"):
        read_hdf5(path)
    assert [int(x) for x in read_hdf5(path, "soft")] == [0, 1, 2]


def test_groups_that_hold_themselves(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("g")
        group["again"] = group
        group["twice"] = group
        group["root"] = file["/"]
        file["x"] = np.arange(2)
    assert [int(x) for x in read_hdf5(tmp_path / "a.h5", "x")] == [0, 1]
    with pytest.raises(errors.ArgumentError, match="no array 'z'"):
        read_hdf5(tmp_path / "a.h5", "z")


def test_remote_files(tmp_path):
    path = write(tmp_path / "a.h5", {"x": np.arange(50), "s": [f"text {k}" for k in range(50)]}, chunks=(7,))
    fs = fsspec.filesystem("memory")
    fs.put(path, "/hdf5/a.h5")
    try:
        with dask.config.set({"daskdist.split-bytes": 200}):
            rows = list(read_hdf5("memory://hdf5/*.h5"))
        assert [int(row["x"]) for row in rows] == list(range(50))
        assert [row["s"] for row in rows] == [f"text {k}" for k in range(50)]
    finally:
        fs.rm("/hdf5", recursive=True)


def test_files_are_recognised_by_their_content(tmp_path):
    path = write(tmp_path / "a.h5", {"x": np.arange(2)})
    assert [int(row["x"]) for row in read_files(path)] == [0, 1]
    (tmp_path / "b.h5").write_text("x,y")
    with pytest.raises(errors.FileError, match=r"b\.h5: not an HDF5 file, or a damaged one, of 3 bytes"):
        read_hdf5(tmp_path / "b.h5")


def test_a_file_that_another_takes_the_place_of_unnoticed(tmp_path):
    path, other = tmp_path / "a.h5", tmp_path / "b.h5"
    for item, names in ((path, "xy"), (other, "yx")):
        with h5py.File(item, "w") as file:
            for value, name in enumerate(names):
                file[name] = np.full(100, value)
    assert path.stat().st_size == other.stat().st_size
    assert {int(row["x"]) for row in read_hdf5(path)} == {0}
    known = path.stat().st_mtime_ns
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(known, known))
    # A new dataset reads the new file.
    assert {int(row["x"]) for row in read_hdf5(path)} == {1}


def test_a_file_that_was_changed_since(tmp_path):
    path = write(tmp_path / "a.h5", {"x": np.arange(10)})
    ds = read_hdf5(path, "x")
    assert len(list(ds)) == 10
    write(path, {"x": np.arange(500)})
    with pytest.raises(errors.FileError, match="the file was changed since it was listed; create the dataset again"):
        list(ds)


def test_a_broken_chunk_is_left_out(tmp_path):
    path = write(tmp_path / "a.h5", {"x": np.arange(40)}, chunks=(5,), fletcher32=True)
    with h5py.File(path) as file:
        offset = file["x"].id.get_chunk_info(3).byte_offset
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"\xff\xff")
    ds = read_hdf5(path, "x")
    with pytest.raises(errors.FileError, match=r"a\.h5 rows 0 to 40: damaged or cut short"):
        list(ds)
    iterator = iter(ds.ignore_errors())
    assert [int(x) for x in iterator] == [*range(15), *range(20, 40)]
    assert iterator.stats()["skipped_by_file"] == {path: 1}


def test_a_compression_that_is_not_installed_is_an_error_even_with_skip(tmp_path):
    plain = write(tmp_path / "a.h5", {"x": np.arange(10)})
    with h5py.File(tmp_path / "b.h5", "w") as file:
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_chunk((10,))
        # A number that the registry of filters keeps for tests.
        layout.set_filter(300, h5py.h5z.FLAG_OPTIONAL, ())
        space = h5py.h5s.create_simple((10,))
        array = h5py.h5d.create(file.id, b"x", h5py.h5t.py_create(np.dtype("i8")), space, layout)
        array.write_direct_chunk((0,), b"compressed", 0)
    ds = read_hdf5([plain, str(tmp_path / "b.h5")], "x").with_options(Options(on_error="skip"))
    with pytest.raises(
        errors.FileError, match=r"b\.h5 .* the compression or filter 300, .*import hdf5plugin"
    ) as caught:
        list(ds)
    assert type(caught.value) is errors.FileError


@pytest.mark.parametrize("dtype", ["i4", h5py.string_dtype()], ids=["numbers", "text"])
def test_chunks_of_impossible_sizes_are_not_read(tmp_path, dtype):
    # The library would write such a chunk beyond the end of its buffer, and the process would crash.
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", (10,), dtype, chunks=(5,))
        made[:] = "1" if dtype != "i4" else 1
        known = made.id.get_chunk_info(1)
    assert len(list(read_hdf5(path, "x"))) == 10
    content = bytearray(path.read_bytes())
    # A chunk's entry in the index has its size, the mask of skipped filters, and its places in the array and the file.
    entry = struct.pack("<IIQQQ", known.size, 0, 5, 0, known.byte_offset)
    assert content.count(entry) == 1
    at = content.find(entry)
    content[at : at + 4] = struct.pack("<I", known.size + 512)
    path.write_bytes(content)
    words = f"chunk of array '/x' has {known.size + 512} bytes by its index, not {known.size}"
    with pytest.raises(errors.FileError, match=words):
        list(read_hdf5(path, "x"))


def test_damage_is_no_more_than_an_error(tmp_path):
    # The file has every kind of array, in the older layout, whose metadata has no checksums.
    path = str(tmp_path / "a.h5")
    with h5py.File(path, "w", libver="earliest") as file:
        file.create_dataset("c", data=np.zeros(30, [("a", "f4"), ("b", "i8", (2,))]), chunks=(7,))
        file.create_dataset("s", data=[f"text {k}" for k in range(30)], dtype=h5py.string_dtype())
        file.create_dataset("z", data=np.arange(30), chunks=(8,), compression="gzip", maxshape=(None,))
    content = Path(path).read_bytes()
    form = Hdf5()
    first = FirstFile(path, form.spec(path))
    messages = []
    for seed in range(200):
        Path(path).write_bytes(spoiled(content, random.Random(seed)))
        try:
            for split in form.list_splits(path, 0, first):
                form.read(split)
        except errors.FileError as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert all(path in message for message in messages)


def test_without_the_library(tmp_path, monkeypatch):
    path = write(tmp_path / "a.h5", {"x": np.arange(3)})
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(errors.MissingPackageError, match=r"pip install 'daskdist\[hdf5\]'"):
        daskdist.read_hdf5(path)


@pytest.mark.parametrize("address_bytes", [2, 4, 8])
def test_files_whose_addresses_have_another_size(tmp_path, address_bytes):
    settings = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    settings.set_sizes(address_bytes, 4)
    path = str(tmp_path / "a.h5")
    with h5py.File(h5py.h5f.create(path.encode(), h5py.h5f.ACC_TRUNC, fcpl=settings)) as file:
        for name, chunks in (("whole", None), ("chunks", (2,))):
            file.create_dataset(f"text {name}", data=["a", "bb", ""], dtype=h5py.string_dtype(), chunks=chunks)
            lists = file.create_dataset(f"lists {name}", (3,), h5py.vlen_dtype("i4"), chunks=chunks)
            lists[0], lists[2] = [1, 2], [3]
    rows = list(read_hdf5(path))
    for name in ("whole", "chunks"):
        assert [row[f"text {name}"] for row in rows] == ["a", "bb", ""]
        assert [row[f"lists {name}"].tolist() for row in rows] == [[1, 2], [], [3]]
