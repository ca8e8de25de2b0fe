"""Saved datasets: parts and manifests are read as they were written, or there is an error that says what is wrong."""

from __future__ import annotations

import itertools
import tempfile
import tracemalloc

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_values import LONE, PAIR, SPEC, TEXT, bundle, columns, leaves, nests

from daskdist.core.block import Batches, Block, Bundle
from daskdist.core.ragged import Ragged
from daskdist.core.structure import Structure, as_array
from daskdist.errors import FileError
from daskdist.formats.saved.manifest import Manifest, exists, read_manifest, remove_unfinished, write_manifest
from daskdist.formats.saved.store import SavedPart, read_part, write_part

# Hypothesis warns if other threads draw random numbers meanwhile, as those of other tests' clusters do.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


def same_leaf(a, b):
    """Return whether two leaves are equal bit by bit, except for byte order."""
    if isinstance(a, Ragged) or isinstance(b, Ragged):
        return (
            type(a) is type(b)
            and a.row_splits.dtype == b.row_splits.dtype
            and a.row_splits.tolist() == b.row_splits.tolist()
            and same_leaf(a.values, b.values)
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, (str, bytes)) and not isinstance(a, np.generic):
        return a == b
    dtype = a.dtype if a.dtype.isnative else a.dtype.newbyteorder("=")
    if dtype != b.dtype or not b.dtype.isnative or a.shape != b.shape:
        return False
    if a.dtype.kind in "TO" or isinstance(a, (np.str_, np.bytes_)):
        return a.tolist() == b.tolist()
    return a.astype(b.dtype).tobytes() == b.tobytes()


def same_rows(found, expected):
    """Check that two blocks or bundles have the same elements, and also return the same ones by index."""
    assert len(found) == len(expected)
    # A row of text is a string in a block, and an array in a bundle or on its own.
    for a, b in zip(expected.elements(), found.elements(), strict=True):
        leaves, others = expected.structure.leaves_of(a), found.structure.leaves_of(b)
        assert all(map(same_leaf, leaves, others)), f"{b!r} should be {a!r}"
    for index in range(len(expected)):
        assert all(map(same_leaf, map(as_array, expected.item(index)), map(as_array, found.item(index))))


def round_trip(rows, directory, compression=None):
    part = write_part(rows, str(directory), "part-0", compression)
    assert part.name == "part-0.arrow"
    assert part.num_rows == len(rows)
    return read_part(str(directory), part, rows.structure)


# --- what comes back ---

VALUES = {
    "bool": [True, False, True],
    "int8": [-128, 0, 127],
    "uint8": [0, 1, 255],
    ">i2": [-(2**15), 1, 2**15 - 1],
    "int32": [-(2**31), 0, 2**31 - 1],
    "uint64": [0, 1, 2**64 - 1],
    "int64": [-(2**63), 0, 2**63 - 1],
    "float16": [np.nan, -0.0, 6e-8],
    "float32": [np.nan, -np.inf, 1e-45],
    ">f4": [1.5, np.nan, -0.0],
    "float64": [np.nan, -0.0, 5e-324],
    "longdouble": [0.1, 1, -2],
    "complex64": [1 + 2j, complex(np.nan, -0.0), 0],
    "complex128": [1 + 2j, complex(-0.0, np.inf), 0],
    ">c16": [1 + 2j, 3, 0],
    "datetime64[D]": ["2024-02-29", "NaT", "1677-01-01"],
    "datetime64[ns]": ["2024-02-29T12:00:00.000000001", "NaT", "1970"],
    "datetime64[25s]": [1, 2, "NaT"],
    ">M8[us]": [1, 2, "NaT"],
    "timedelta64[ms]": [1, "NaT", -1],
    "timedelta64": [1, "NaT", -1],
    "S3": [b"abc", b"a\0b", b""],
    "U4": ["abcd", "ä", "\U0001f600"],
    ">U2": ["ab", "", "ä"],
    "T": ["", "ä\0b\0", "longer than fifteen bytes"],
    "O": [b"", b"a\0\0", b"\xff" * 20],
}


def column_of(dtype, shape):
    """Return an array of a dtype that repeats the values above."""
    values = np.array(VALUES[dtype], dtype)
    return np.resize(values, shape) if np.prod(shape) else np.zeros(shape, values.dtype)


@pytest.mark.parametrize("dtype", VALUES)
def test_blocks(tmp_path, dtype):
    shapes, compressions = [(3,), (7, 2), (2, 1, 1), (4, 0, 3), (0,), (0, 2)], [None, "lz4", "zstd", "AUTO"]
    for shape, compression in itertools.product(shapes, compressions):
        block = Block(LONE, [column_of(dtype, shape)])
        actual = round_trip(block, tmp_path, compression)
        assert isinstance(actual, Block), (shape, compression)
        assert same_leaf(block.leaves[0], actual.leaves[0]), (shape, compression)
        same_rows(actual, block)


def test_payloads_of_nan_are_kept(tmp_path):
    bits = np.array([0x7FF8000000000001, 0xFFF0000000000001, 0x7FF4000000000000], np.uint64)
    actual = round_trip(Block(LONE, [bits.view(np.float64)]), tmp_path)
    np.testing.assert_array_equal(actual.leaves[0].view(np.uint64), bits)


@pytest.mark.parametrize("dtype", VALUES)
def test_rows_of_different_lengths(tmp_path, dtype):
    for case in itertools.product([(), (2,), (0,)], [np.int32, np.int64], [None, "lz4"]):
        inner, splits, compression = case
        rows = Ragged(column_of(dtype, (6, *inner)), np.array([0, 2, 2, 5, 6], splits))
        deep = Ragged(rows, np.array([0, 0, 3, 4], np.int32))
        block = Block(PAIR, [rows[:3], deep])
        actual = round_trip(block, tmp_path, compression)
        assert isinstance(actual, Block), case
        assert same_leaf(rows[:3], actual.leaves[0]), case
        assert same_leaf(deep, actual.leaves[1]), case
        same_rows(actual, block)


def test_rows_of_different_lengths_and_no_rows(tmp_path):
    none = Ragged(np.zeros((0, 2), ">i4"), [0])
    actual = round_trip(Block(PAIR, [none, Ragged(none, [0])]), tmp_path)
    assert same_leaf(none, actual.leaves[0])
    assert len(actual) == 0


@pytest.mark.parametrize("dtype", VALUES)
def test_elements_of_other_shapes(tmp_path, dtype):
    same = [column_of(dtype, (2, 3)), column_of(dtype, (2, 3))]
    longer = [column_of(dtype, (2, 3)), column_of(dtype, (0, 3)), column_of(dtype, (4, 3))]
    other = [column_of(dtype, (2, 3)), column_of(dtype, (0, 5)), column_of(dtype, (4, 0)), column_of(dtype, (1, 1))]
    mixed = [column_of(dtype, (2, 3)), column_of(dtype, (3,)), np.float32(3), column_of("T", (2,))]
    for items, kind in [(same, Block), (longer, Block), (other, Bundle), (mixed, Bundle)]:
        for compression in (None, "zstd"):
            rows = bundle(*items)
            actual = round_trip(rows, tmp_path, compression)
            assert isinstance(actual, kind)
            same_rows(actual, rows)


def test_elements_that_are_rows_of_different_lengths(tmp_path):
    a = Ragged(np.arange(3), [0, 1, 3])
    b = Ragged(np.arange(0), [0, 0])
    deep = Ragged(Ragged(np.array(["a", "b", "ä"], TEXT), np.array([0, 1, 3], np.int32)), [0, 2])
    for items, kind in [
        ((a, b, a), Block),
        ((a, Ragged(np.arange(3.0), [0, 3])), Bundle),
        ((a, deep, np.arange(2)), Bundle),
        ((deep, deep), Block),
        ((a, Ragged(a.values, a.row_splits.astype(np.int32))), Bundle),
        ((Ragged(np.zeros((1, 2)), [0, 1]), Ragged(np.zeros((1, 3)), [0, 1])), Bundle),
        ((Ragged(np.zeros(3, ">f4"), [0, 1, 3]),), Block),
    ]:
        rows = bundle(*items)
        actual = round_trip(rows, tmp_path)
        assert isinstance(actual, kind)
        same_rows(actual, rows)


def test_scalars_of_text_keep_their_zeros_and_widths(tmp_path):
    leaves = [np.str_("a\0"), np.str_(""), np.str_("abc"), np.str_("\ud800")]
    rows = bundle(*leaves)
    actual = round_trip(rows, tmp_path)
    same_rows(actual, rows)
    assert [element.dtype for element in actual.elements()] == [leaf.dtype for leaf in leaves]
    rows = bundle(np.bytes_(b"a\0"), np.bytes_(b""), np.bytes_(b"\xff"))
    same_rows(round_trip(rows, tmp_path), rows)
    rows = bundle(np.bytes_(b"a\0"), np.str_("a\0"), np.array("a"))
    for a, b in zip(round_trip(rows, tmp_path).elements(), rows.elements(), strict=True):
        assert a.dtype == b.dtype
        assert a == b


def test_text_of_no_width(tmp_path):
    none = np.ndarray((2,), "U0")
    rows = bundle(none, none)
    actual = round_trip(rows, tmp_path)
    assert [element.dtype for element in actual.elements()] == [none.dtype] * 2
    assert round_trip(Block(LONE, [none]), tmp_path).leaves[0].dtype == none.dtype


def test_elements_of_text_are_arrays_in_a_bundle(tmp_path):
    rows = Bundle(PAIR, [(np.array("a", TEXT), np.zeros(2)), (np.array("", TEXT), np.zeros((1, 1)))])
    actual = round_trip(rows, tmp_path)
    assert isinstance(actual, Bundle)
    same_rows(actual, rows)
    rows = bundle(np.array(b"a", object), np.array(b"", object))
    same_rows(round_trip(rows, tmp_path), rows)


def test_arrays_without_axes_become_scalars(tmp_path):
    actual = round_trip(bundle(np.array(1.5), np.array(2.5)), tmp_path)
    assert [type(element) for element in actual.elements()] == [np.float64, np.float64]


def test_elements_without_leaves(tmp_path):
    empty = Structure.of(())[1]
    actual = round_trip(Bundle(empty, [(), (), ()]), tmp_path)
    assert list(actual.elements()) == [(), (), ()]
    assert len(round_trip(Block(empty, []), tmp_path)) == 0


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_an_empty_bundle_is_stored(tmp_path, compression):
    actual = round_trip(Bundle(PAIR, []), tmp_path, compression)
    assert isinstance(actual, Bundle)
    assert list(actual.elements()) == []


@pytest.mark.parametrize(
    ("bounds", "kind"),
    [([0, 2, 4, 6], Block), ([1, 3, 5], Block), ([0, 4, 6], Block), ([2], Block), ([3, 3], Block), ([0, 6], Block)],
)
def test_batches(tmp_path, bounds, kind):
    rows = Block(Structure.of({"x": 0, "s": 0})[1], [column_of("T", (6,)), np.arange(12.0).reshape(6, 2)])
    batches = Batches(rows, bounds)
    actual = round_trip(batches, tmp_path)
    assert isinstance(actual, kind)
    same_rows(actual, batches)


def test_batches_of_batches_and_of_ragged_rows(tmp_path):
    rows = Block(LONE, [np.arange(24).reshape(12, 2)])
    batches = Batches(rows, [0, 6, 12], ((2,), (3,)))
    same_rows(round_trip(batches, tmp_path), batches)
    rows = Block(LONE, [Ragged(np.arange(8), [0, 2, 4, 6, 8])])
    batches = Batches(rows, [0, 1, 4])
    same_rows(round_trip(batches, tmp_path), batches)


def test_order_and_layout_of_memory_do_not_matter(tmp_path):
    array = np.arange(24, dtype=">i4").reshape(4, 6)
    for column in (np.asfortranarray(array), array[::-1], array[:, ::2], array.T, np.broadcast_to(array[0], (3, 6))):
        block = Block(LONE, [column])
        same_rows(round_trip(block, tmp_path), block)


codecs = st.sampled_from([None, "lz4", "zstd"])


@given(st.data(), nests, st.integers(0, 4), codecs)
@settings(max_examples=40, deadline=None)
def test_any_block(data, nest, num_rows, compression):
    structure = Structure.of(nest)[1]
    block = Block(structure, [data.draw(columns(num_rows)) for _ in range(structure.num_leaves)])
    with tempfile.TemporaryDirectory() as directory:
        actual = round_trip(block, directory, compression)
        assert isinstance(actual, Block)
        assert all(map(same_leaf, block.leaves, actual.leaves))
        same_rows(actual, block)


@given(st.data(), nests, st.integers(0, 4), codecs)
@settings(max_examples=40, deadline=None)
def test_any_bundle(data, nest, num_rows, compression):
    structure = Structure.of(nest)[1]
    items = [tuple(data.draw(leaves) for _ in range(structure.num_leaves)) for _ in range(num_rows)]
    with tempfile.TemporaryDirectory() as directory:
        same_rows(round_trip(Bundle(structure, items), directory, compression), Bundle(structure, items))


# --- many rows ---


@pytest.fixture(scope="module", params=[None, "lz4", "zstd"])
def long(request, tmp_path_factory):
    """Write a part of some megabytes; return its rows, its directory and the part."""
    num_rows = 30_000
    numbers = np.arange(num_rows)
    text = np.array([f"row {number}" for number in range(num_rows)], TEXT)
    block = Block(
        Structure.of(("",) * 3)[1],
        [
            numbers.repeat(10).reshape(-1, 10),
            text,
            Ragged(numbers.repeat(numbers % 3), np.cumsum([0, *(numbers % 3)])),
        ],
    )
    directory = str(tmp_path_factory.mktemp("long"))
    part = write_part(block, directory, "long", request.param)
    return block, directory, part


def test_all_of_many_rows(long):
    block, directory, part = long
    actual = read_part(directory, part, block.structure)
    assert all(map(same_leaf, block.leaves, actual.leaves))
    assert actual.where(7) == f"row 7 of {directory}/long.arrow"


def test_parts_of_several_batches_are_read(long):
    # Earlier versions cut compressed parts.
    block, directory, part = long
    with pa.ipc.open_file(f"{directory}/long.arrow") as file:
        batch = file.get_batch(0)
    with pa.ipc.new_file(f"{directory}/cut.arrow", batch.schema) as file:
        for start in range(0, len(batch), 9_999):
            file.write_batch(batch.slice(start, 9_999))
    actual = read_part(directory, SavedPart("cut.arrow", part.num_rows, part.num_bytes), block.structure)
    assert all(map(same_leaf, block.leaves, actual.leaves))


def test_numbers_are_used_where_they_lie(tmp_path):
    block = Block(PAIR, [np.ones((1000, 4000)), Ragged(np.ones(10**6), np.arange(1001) * 1000)])
    part = write_part(block, str(tmp_path), "a")
    assert abs(part.num_bytes - block.nbytes) <= 8
    read_part(str(tmp_path), part, PAIR)
    allocated = pa.total_allocated_bytes()
    tracemalloc.start()
    actual = read_part(str(tmp_path), part, PAIR)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert pa.total_allocated_bytes() - allocated < 10_000
    assert not actual.leaves[0].flags.owndata
    assert not actual.leaves[0].flags.writeable


def test_rows_outlive_their_file(tmp_path):
    block = Block(LONE, [np.arange(10**5)])
    actual = round_trip(block, tmp_path)
    (tmp_path / "part-0.arrow").unlink()
    same_rows(actual.slice(0, 9), block.slice(0, 9))
    # Writing a new file of the same name does not change the rows of the old one.
    round_trip(Block(LONE, [np.zeros(10**5, int)]), tmp_path)
    np.testing.assert_array_equal(actual.leaves[0], np.arange(10**5))


def test_any_reader_of_arrow_reads_parts(tmp_path):
    structure = Structure.of({"x": 0, "s": 0, "r": 0})[1]
    block = Block(structure, [Ragged(np.arange(3), [0, 2, 3]), np.array(["ä", ""], TEXT), np.arange(4.0).reshape(2, 2)])
    part = write_part(block, str(tmp_path), "a", "zstd")
    with pa.ipc.open_file(str(tmp_path / part.name)) as file:
        assert file.read_all().to_pydict() == {
            "['r']": [[0, 1], [2]],
            "['s']": ["ä", ""],
            "['x']": [[0.0, 1.0], [2.0, 3.0]],
        }


# --- places ---


@pytest.fixture
def bucket():
    """Return a directory in fsspec's memory file system."""
    yield "memory://bucket/saved"
    fs = fsspec.filesystem("memory")
    if fs.exists("/bucket"):
        fs.rm("/bucket", recursive=True)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_urls(bucket, compression):
    assert not exists(bucket)
    block = Block(PAIR, [np.arange(10).reshape(5, 2), column_of("T", (5,))])
    part = write_part(block, bucket, "a", compression)
    left = write_part(block, bucket, "b", compression)
    made = Manifest("token", SPEC, 5, (part,), compression)
    write_manifest(bucket, made)
    assert exists(bucket)
    actual = read_manifest(bucket)
    assert actual.parts == (part,)
    same_rows(read_part(bucket, part, PAIR), block)
    assert remove_unfinished(bucket) == (left.name,)
    with pytest.raises(FileError, match=r"b.arrow: not found"):
        read_part(bucket, left, PAIR)
    # Replace the part by a smaller one.
    write_part(block.slice(0, 2), bucket, "a", compression)
    assert len(read_part(bucket, SavedPart("a.arrow", 2, 0), PAIR)) == 2
    fsspec.filesystem("memory").pipe("/bucket/saved/a.arrow", b"ARROW1")
    with pytest.raises(FileError, match=r"a.arrow: damaged"):
        read_part(bucket, part, PAIR)


def test_ways_to_write_a_place(tmp_path, monkeypatch):
    block = Block(LONE, [np.arange(3)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    part = write_part(block, "saved/", "a")
    for directory in ("saved", "saved/", f"file://{tmp_path}/saved", "~/saved", str(tmp_path / "saved")):
        same_rows(read_part(directory, part, LONE), block)
