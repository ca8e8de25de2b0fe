"""Saved datasets: parts and manifests come back as they were, or with an error that says what is wrong."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import fsspec
import numpy as np
import optree
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from daskdist.core.block import Batches, Block, Bundle
from daskdist.core.ragged import Ragged
from daskdist.core.spec import DatasetSpec, ElementSpec, RaggedTensorSpec, TensorSpec
from daskdist.core.spec_json import (
    dtype_from_json,
    dtype_to_json,
    spec_from_json,
    spec_to_json,
    structure_from_json,
    structure_to_json,
)
from daskdist.core.structure import Nested, Structure, as_array
from daskdist.errors import ArgumentError, FileError
from daskdist.formats.saved.manifest import Manifest, exists, read_manifest, remove_unfinished, write_manifest
from daskdist.formats.saved.store import PIECE_BYTES, SavedPart, read_part, take_rows, write_part
from daskdist.storage.whole_file import writing

# Threads of a cluster that other tests started draw random numbers of their own, also while hypothesis does.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

TEXT = np.dtypes.StringDType()
LONE = Structure.of(0)[1]
PAIR = Structure.of((0, 0))[1]
Point = collections.namedtuple("Point", "x y")


class Typed(NamedTuple):
    a: int
    b: float


def same_leaf(a, b):
    """Whether two leaves are alike to the bit, but for byte order."""
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
    """Check that two hold the same elements, and give them alike one by one."""
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


def bundle(*leaves):
    """A bundle of elements that are lone leaves."""
    return Bundle(LONE, [(leaf,) for leaf in leaves])


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
    """An array of a dtype, whose values are all those above in turn."""
    values = np.array(VALUES[dtype], dtype)
    return np.resize(values, shape) if np.prod(shape) else np.zeros(shape, values.dtype)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd", "AUTO"])
@pytest.mark.parametrize("shape", [(3,), (7, 2), (2, 1, 1), (4, 0, 3), (0,), (0, 2)], ids=str)
@pytest.mark.parametrize("dtype", VALUES)
def test_blocks(tmp_path, dtype, shape, compression):
    block = Block(LONE, [column_of(dtype, shape)])
    found = round_trip(block, tmp_path, compression)
    assert isinstance(found, Block)
    assert same_leaf(block.leaves[0], found.leaves[0])
    same_rows(found, block)


def test_payloads_of_nan_are_kept(tmp_path):
    bits = np.array([0x7FF8000000000001, 0xFFF0000000000001, 0x7FF4000000000000], np.uint64)
    found = round_trip(Block(LONE, [bits.view(np.float64)]), tmp_path)
    np.testing.assert_array_equal(found.leaves[0].view(np.uint64), bits)


@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("inner", [(), (2,), (0,)], ids=str)
@pytest.mark.parametrize("splits", [np.int32, np.int64])
def test_rows_of_different_lengths(tmp_path, dtype, inner, splits):
    rows = Ragged(column_of(dtype, (6, *inner)), np.array([0, 2, 2, 5, 6], splits))
    deep = Ragged(rows, np.array([0, 0, 3, 4], np.int32))
    for compression in (None, "lz4"):
        block = Block(PAIR, [rows[:3], deep])
        found = round_trip(block, tmp_path, compression)
        assert isinstance(found, Block)
        assert same_leaf(rows[:3], found.leaves[0])
        assert same_leaf(deep, found.leaves[1])
        same_rows(found, block)


def test_rows_of_different_lengths_and_no_rows(tmp_path):
    none = Ragged(np.zeros((0, 2), ">i4"), [0])
    found = round_trip(Block(PAIR, [none, Ragged(none, [0])]), tmp_path)
    assert same_leaf(none, found.leaves[0])
    assert len(found) == 0


@pytest.mark.parametrize("dtype", VALUES)
def test_elements_of_other_shapes(tmp_path, dtype):
    same = [column_of(dtype, (2, 3)), column_of(dtype, (2, 3))]
    longer = [column_of(dtype, (2, 3)), column_of(dtype, (0, 3)), column_of(dtype, (4, 3))]
    other = [column_of(dtype, (2, 3)), column_of(dtype, (0, 5)), column_of(dtype, (4, 0)), column_of(dtype, (1, 1))]
    mixed = [column_of(dtype, (2, 3)), column_of(dtype, (3,)), np.float32(3), column_of("T", (2,))]
    for leaves, kind in [(same, Block), (longer, Block), (other, Bundle), (mixed, Bundle)]:
        for compression in (None, "zstd"):
            rows = bundle(*leaves)
            found = round_trip(rows, tmp_path, compression)
            assert isinstance(found, kind)
            same_rows(found, rows)


def test_elements_that_are_rows_of_different_lengths(tmp_path):
    a = Ragged(np.arange(3), [0, 1, 3])
    b = Ragged(np.arange(0), [0, 0])
    deep = Ragged(Ragged(np.array(["a", "b", "ä"], TEXT), np.array([0, 1, 3], np.int32)), [0, 2])
    for leaves, kind in [
        ((a, b, a), Block),
        ((a, Ragged(np.arange(3.0), [0, 3])), Bundle),
        ((a, deep, np.arange(2)), Bundle),
        ((deep, deep), Block),
        ((a, Ragged(a.values, a.row_splits.astype(np.int32))), Bundle),
        ((Ragged(np.zeros((1, 2)), [0, 1]), Ragged(np.zeros((1, 3)), [0, 1])), Bundle),
        ((Ragged(np.zeros(3, ">f4"), [0, 1, 3]),), Block),
    ]:
        rows = bundle(*leaves)
        found = round_trip(rows, tmp_path)
        assert isinstance(found, kind)
        same_rows(found, rows)


def test_scalars_of_text_keep_their_zeros_and_widths(tmp_path):
    leaves = [np.str_("a\0"), np.str_(""), np.str_("abc"), np.str_("\ud800")]
    rows = bundle(*leaves)
    found = round_trip(rows, tmp_path)
    same_rows(found, rows)
    assert [element.dtype for element in found.elements()] == [leaf.dtype for leaf in leaves]
    rows = bundle(np.bytes_(b"a\0"), np.bytes_(b""), np.bytes_(b"\xff"))
    same_rows(round_trip(rows, tmp_path), rows)
    rows = bundle(np.bytes_(b"a\0"), np.str_("a\0"), np.array("a"))
    for a, b in zip(round_trip(rows, tmp_path).elements(), rows.elements(), strict=True):
        assert a.dtype == b.dtype
        assert a == b


def test_text_of_no_width(tmp_path):
    none = np.ndarray((2,), "U0")
    rows = bundle(none, none)
    found = round_trip(rows, tmp_path)
    assert [element.dtype for element in found.elements()] == [none.dtype] * 2
    assert round_trip(Block(LONE, [none]), tmp_path).leaves[0].dtype == none.dtype


def test_elements_of_text_are_arrays_in_a_bundle(tmp_path):
    rows = Bundle(PAIR, [(np.array("a", TEXT), np.zeros(2)), (np.array("", TEXT), np.zeros((1, 1)))])
    found = round_trip(rows, tmp_path)
    assert isinstance(found, Bundle)
    same_rows(found, rows)
    rows = bundle(np.array(b"a", object), np.array(b"", object))
    same_rows(round_trip(rows, tmp_path), rows)


def test_arrays_without_axes_become_scalars(tmp_path):
    found = round_trip(bundle(np.array(1.5), np.array(2.5)), tmp_path)
    assert [type(element) for element in found.elements()] == [np.float64, np.float64]


def test_elements_without_leaves(tmp_path):
    empty = Structure.of(())[1]
    found = round_trip(Bundle(empty, [(), (), ()]), tmp_path)
    assert list(found.elements()) == [(), (), ()]
    part = SavedPart("part-0.arrow", 3, 0)
    assert list(read_part(str(tmp_path), part, empty, 1).elements()) == [(), ()]
    assert list(take_rows(str(tmp_path), part, empty, [2, 2, 0, 1]).elements()) == [()] * 4
    assert len(round_trip(Block(empty, []), tmp_path)) == 0


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_nothing(tmp_path, compression):
    found = round_trip(Bundle(PAIR, []), tmp_path, compression)
    assert isinstance(found, Bundle)
    assert list(found.elements()) == []
    part = SavedPart("part-0.arrow", 0, 0)
    assert len(take_rows(str(tmp_path), part, PAIR, [])) == 0
    with pytest.raises(ArgumentError, match="rows go from 0 to 0"):
        take_rows(str(tmp_path), part, PAIR, [0])


@pytest.mark.parametrize(
    ("bounds", "kind"),
    [([0, 2, 4, 6], Block), ([1, 3, 5], Block), ([0, 4, 6], Block), ([2], Block), ([3, 3], Block), ([0, 6], Block)],
)
def test_batches(tmp_path, bounds, kind):
    rows = Block(Structure.of({"x": 0, "s": 0})[1], [column_of("T", (6,)), np.arange(12.0).reshape(6, 2)])
    batches = Batches(rows, bounds)
    found = round_trip(batches, tmp_path)
    assert isinstance(found, kind)
    same_rows(found, batches)


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


numbers = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?"),
    npst.complex_number_dtypes(sizes=(64, 128), endianness="?"),
    npst.datetime64_dtypes(endianness="?"),
    npst.timedelta64_dtypes(endianness="?"),
    npst.byte_string_dtypes(min_len=1, max_len=5),
    npst.unicode_string_dtypes(min_len=1, max_len=5, endianness="?"),
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def arrays(draw, shape, dtype=None):
    """Arrays of a shape, of any dtype that is saved."""
    dtype = dtype or draw(st.one_of(numbers, st.just(np.dtype(TEXT)), st.just(np.dtype(object))))
    if dtype.kind not in "TO":
        return draw(npst.arrays(dtype, shape))
    size = int(np.prod(shape))
    values = draw(st.lists(texts if dtype.kind == "T" else st.binary(max_size=20), min_size=size, max_size=size))
    made = np.empty(size, dtype)
    made[:] = values
    return made.reshape(shape)


shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)


@st.composite
def columns(draw, num_rows, depth=2):
    """Columns of so many rows, of one length or of different lengths."""
    if depth and draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows))
        splits = np.cumsum([0, *lengths]).astype(draw(st.sampled_from(["i4", "i8"])))
        return Ragged(draw(columns(int(splits[-1]), depth - 1)), splits)
    return draw(arrays((num_rows, *draw(shapes))))


leaves = st.one_of(
    shapes.flatmap(arrays).map(lambda array: as_array(array[()])),
    st.integers(0, 3).flatmap(columns),
    texts.map(np.str_),
    st.binary(max_size=5).map(np.bytes_),
)
keys = st.one_of(st.text(max_size=3), st.integers(-5, 5))
nests = st.recursive(
    st.just(0),
    lambda inner: st.one_of(
        st.tuples(inner, inner),
        st.tuples(inner),
        st.builds(Point, inner, inner),
        st.builds(Typed, inner, inner),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=4,
)
codecs = st.sampled_from([None, "lz4", "zstd"])


@given(st.data(), nests, st.integers(0, 4), codecs)
@settings(max_examples=60, deadline=None)
def test_any_block(data, nest, num_rows, compression):
    structure = Structure.of(nest)[1]
    block = Block(structure, [data.draw(columns(num_rows)) for _ in range(structure.num_leaves)])
    with tempfile.TemporaryDirectory() as directory:
        found = round_trip(block, directory, compression)
        assert isinstance(found, Block)
        assert all(map(same_leaf, block.leaves, found.leaves))
        same_rows(found, block)
        check_choice(data, block, directory, compression)


@given(st.data(), nests, st.integers(0, 4), codecs)
@settings(max_examples=60, deadline=None)
def test_any_bundle(data, nest, num_rows, compression):
    structure = Structure.of(nest)[1]
    items = [tuple(data.draw(leaves) for _ in range(structure.num_leaves)) for _ in range(num_rows)]
    with tempfile.TemporaryDirectory() as directory:
        same_rows(round_trip(Bundle(structure, items), directory, compression), Bundle(structure, items))
        check_choice(data, Bundle(structure, items), directory, compression)


def check_choice(data, rows, directory, compression):
    """Check that chosen rows are those rows, in that order."""
    part = write_part(rows, directory, "part-0", compression)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5))))
    found = list(read_part(directory, part, rows.structure, start, stop).elements())
    expected = list(rows.elements())
    wanted = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6)) if len(rows) else []
    found += list(take_rows(directory, part, rows.structure, wanted).elements())
    expected = expected[start:stop] + [expected[index] for index in wanted]
    assert len(found) == len(expected)
    for a, b in zip(expected, found, strict=True):
        assert all(map(same_leaf, rows.structure.leaves_of(a), rows.structure.leaves_of(b)))


# --- some rows of many ---


@pytest.fixture(scope="module", params=[None, "lz4", "zstd"])
def long(request, tmp_path_factory):
    """A part of several pieces where it is compressed: its rows, its directory and itself."""
    num_rows = 3 * PIECE_BYTES // 100 + 1
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
    with pa.ipc.open_file(f"{directory}/long.arrow") as file:
        assert (file.num_record_batches > 2) == (request.param is not None)
        # Pieces are alike in length, but for the last.
        assert file.num_record_batches == 1 or file.get_batch(0).num_rows == file.get_batch(1).num_rows
    return block, directory, part


def test_all_of_many_rows(long):
    block, directory, part = long
    found = read_part(directory, part, block.structure)
    assert all(map(same_leaf, block.leaves, found.leaves))
    assert found.where(7) == f"row 7 of {directory}/long.arrow"


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_some_of_many_rows(long, data):
    block, directory, part = long
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(block) + 5)] * 2)))
    found = read_part(directory, part, block.structure, start, stop)
    assert all(map(same_leaf, block.slice(start, stop).leaves, found.leaves))
    rows = np.array(data.draw(st.lists(st.integers(0, len(block) - 1), max_size=9)), data.draw(st.sampled_from("iL")))
    found = take_rows(directory, part, block.structure, rows)
    assert all(map(same_leaf, block.take(rows.astype(int)).leaves, found.leaves))
    if len(rows):
        assert found.where(0) == f"row {rows[0]} of {directory}/long.arrow"


@pytest.mark.parametrize("start", [-5, 0, 10**6, None])
@pytest.mark.parametrize("stop", [None, -1, 0, 3, 10**6])
def test_starts_and_stops_are_those_of_slices(long, start, stop):
    block, directory, part = long
    found = read_part(directory, part, block.structure, start, stop)
    np.testing.assert_array_equal(found.leaves[0], block.leaves[0][start:stop])


@pytest.mark.parametrize(
    ("rows", "message"),
    [([-1], "from -1"), ([10**9], "to 1000000000"), ([0.5], "float64"), ([[0]], r"\[1, 1\]"), (["a"], "U1")],
)
def test_rows_that_are_not_there(long, rows, message):
    block, directory, part = long
    with pytest.raises(ArgumentError, match=message):
        take_rows(directory, part, block.structure, rows)


def test_numbers_are_used_where_they_lie(tmp_path):
    block = Block(PAIR, [np.ones((1000, 4000)), Ragged(np.ones(10**6), np.arange(1001) * 1000)])
    part = write_part(block, str(tmp_path), "a")
    assert abs(part.num_bytes - block.nbytes) <= 8
    read_part(str(tmp_path), part, PAIR)
    allocated = pa.total_allocated_bytes()
    tracemalloc.start()
    found = read_part(str(tmp_path), part, PAIR)
    chosen = take_rows(str(tmp_path), part, PAIR, [999, 0])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert pa.total_allocated_bytes() - allocated < 10_000
    assert not found.leaves[0].flags.owndata
    assert not found.leaves[0].flags.writeable
    assert chosen.leaves[0].shape == (2, 4000)


def test_rows_outlive_their_file(tmp_path):
    block = Block(LONE, [np.arange(10**5)])
    found = round_trip(block, tmp_path)
    (tmp_path / "part-0.arrow").unlink()
    same_rows(found.slice(0, 9), block.slice(0, 9))
    # A file of that name written later is another.
    round_trip(Block(LONE, [np.zeros(10**5, int)]), tmp_path)
    np.testing.assert_array_equal(found.leaves[0], np.arange(10**5))


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


# --- what is refused ---


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        # Named, for its own name has its address, which is another in every process.
        pytest.param(Nested(), r"leaf \[0\] is a dataset, as a window is", id="nested"),
        (np.array([b"a", "b"], object), r"holds str, and only bytes are saved \(leaf \[0\]\)"),
        (np.array([b"a", None], object), "holds NoneType"),
        (np.array([np.bytes_(b"a")], object), "holds bytes_"),
        (np.zeros(2, "i4,f8"), r"dtype.*cannot be saved.*leaf \[0\]"),
        (np.zeros(2, "V3"), "cannot be saved"),
        (np.array(["a"], np.dtypes.StringDType(na_object=None)), "may be missing"),
        (Ragged(np.array([{}]), [0, 1]), "holds dict"),
        ("not an array", "builtins.str; only arrays in the memory of the host"),
    ],
    ids=str,
)
def test_leaves_that_no_file_holds(tmp_path, leaf, message):
    for other in (np.zeros(1), leaf):
        with pytest.raises(ArgumentError, match=message):
            write_part(Bundle(PAIR, [(leaf, np.zeros(2)), (other, np.zeros(2))]), str(tmp_path), "a")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("compression", ["GZIP", "SNAPPY", "gzip", "", "LZ4", 5])
def test_codecs_that_are_not_known(tmp_path, compression):
    with pytest.raises(ArgumentError, match="None, 'AUTO', 'lz4', 'zstd'"):
        write_part(bundle(np.zeros(2)), str(tmp_path), "a", compression)


HOSTILE = ["../a", "a/b", "/etc/passwd", "a..b", "..", ".", "", ".hidden", "a\\b", "a\n", "a b", "é", "a\0", "C:a"]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_lead_elsewhere(tmp_path, name):
    with pytest.raises(ArgumentError, match="is no name of a part"):
        write_part(bundle(np.zeros(2)), str(tmp_path / "inner"), name)
    with pytest.raises(ArgumentError, match="is no name of a part"):
        SavedPart(f"{name}.arrow", 1, 1)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("here")
    with pytest.raises(FileError, match=r"file/a.arrow: cannot be written"):
        write_part(bundle(np.zeros(2)), str(tmp_path / "file"), "a")
    with pytest.raises(FileError, match=r"file/manifest.json"):
        read_manifest(str(tmp_path / "file"))
    with pytest.raises(FileError, match="cannot be opened"):
        write_part(bundle(np.zeros(2)), "nosuch://there", "a")


# --- damage ---


@pytest.fixture
def written(tmp_path):
    """A part, its path and its structure: columns of every layout."""
    structure = Structure.of({"n": 0, "t": 0, "r": 0, "s": 0, "e": 0, "w": 0})[1]
    items = [
        (
            np.zeros((k, 2, 2 * k)) if k % 2 else Ragged(np.arange(3), [0, 1, 3]),
            np.arange(3.0),
            np.arange(k),
            np.ones((k, 2 * k), np.int16),
            np.array(f"text {k}", TEXT),
            np.str_("w" * k),
        )
        for k in range(1, 5)
    ]
    part = write_part(Bundle(structure, items), str(tmp_path), "a")
    return part, tmp_path / "a.arrow", structure


def test_a_file_cut_short(written):
    part, path, structure = written
    whole = path.read_bytes()
    for length in {*range(0, len(whole), 97), len(whole) - 1, 0, 1, 8}:
        path.write_bytes(whole[:length])
        with pytest.raises(FileError, match=r"a\.arrow: damaged or cut short"):
            read_part(str(path.parent), part, structure)


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_a_file_of_flipped_bits(written, compression):
    part, path, structure = written
    rows = read_part(str(path.parent), part, structure)
    write_part(rows, str(path.parent), "b", compression)
    whole = (path.parent / "b.arrow").read_bytes()
    random = np.random.default_rng(0)
    outcomes = collections.Counter()
    for number in range(600):
        data = bytearray(whole)
        for place in random.integers(0, len(data), random.integers(1, 4)):
            data[place] ^= 1 << random.integers(8)
        # A name of its own each: what a file mapped into memory holds is not to change.
        (path.parent / f"c-{number}.arrow").write_bytes(data)
        try:
            found = read_part(str(path.parent), SavedPart(f"c-{number}.arrow", part.num_rows, 0), structure)
            outcomes[len(list(found.elements()))] += 1
        except FileError as error:
            assert f"c-{number}.arrow" in str(error)  # noqa: PT017 - some are read as they are
            outcomes["refused"] += 1
    assert set(outcomes) == {"refused", part.num_rows}


def test_a_file_that_is_gone(written):
    part, path, structure = written
    path.unlink()
    with pytest.raises(FileError, match=r"a\.arrow: not found: gone since it was saved"):
        read_part(str(path.parent), part, structure)
    with pytest.raises(FileError, match=r"a\.arrow: not found"):
        take_rows(str(path.parent), part, structure, [0])


def test_a_file_of_something_else(written):
    part, path, structure = written
    path.write_text("no longer a table")
    with pytest.raises(FileError, match=r"a\.arrow: damaged"):
        read_part(str(path.parent), part, structure)
    table = pa.table({"a": [1, 2, 3, 4]})
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)
    with pytest.raises(FileError, match=r"a\.arrow: an Arrow file, and not of a saved dataset"):
        read_part(str(path.parent), part, structure)
    path.unlink()
    path.mkdir()
    with pytest.raises(FileError, match=r"a\.arrow"):
        read_part(str(path.parent), part, structure)


def test_a_file_of_other_rows(written):
    part, path, structure = written
    with pytest.raises(FileError, match=r"a\.arrow: has 4 rows, and the manifest says 5"):
        read_part(str(path.parent), SavedPart(part.name, 5, 0), structure)
    with pytest.raises(FileError, match=r"a\.arrow: its leaves are .* and those asked for \('\[0\]', '\[1\]'\)"):
        read_part(str(path.parent), part, PAIR)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, 2], pa.int32()),
        pa.array([1, None], pa.int64()),
        pa.array([[1], [2]]),
        pa.array([[1], [2]], pa.list_(pa.int64(), 1)),
        pa.array(["a", "b"]),
        pa.nulls(2),
    ],
    ids=lambda column: str(column.type),
)
def test_a_column_of_another_type(tmp_path, column):
    part = write_part(Block(LONE, [np.arange(2)]), str(tmp_path), "a")
    path = str(tmp_path / part.name)
    with pa.ipc.open_file(path) as file:
        metadata = file.schema.metadata
    schema = pa.schema([pa.field("", column.type)], metadata=metadata)
    with pa.ipc.new_file(path, schema) as file:
        file.write_batch(pa.record_batch([column], schema=schema))
    with pytest.raises(FileError, match=r"a\.arrow: damaged"):
        read_part(str(tmp_path), part, LONE)


@pytest.mark.parametrize(
    "change",
    [
        {"piece_rows": 0},
        {"piece_rows": 1},
        {"piece_rows": None},
        {"layouts": []},
        {"layouts": [["rows", "<i8", [2**40], []]]},
        {"layouts": [["rows", "<i8", [-1], []]]},
        {"layouts": [["rows", "V8", [], []]]},
        {"layouts": [["each", "bytes", [], []]]},
        {"layouts": [["shaped", "<i8", [2], []]]},
        {"layouts": [["other", "<i8", [], []]]},
        {"layouts": 3},
    ],
    ids=str,
)
def test_layouts_that_do_not_fit(tmp_path, change):
    part = write_part(Block(LONE, [np.arange(2)]), str(tmp_path), "a")
    path = str(tmp_path / part.name)
    with pa.ipc.open_file(path) as file:
        table = file.read_all()
    content = json.loads(table.schema.metadata[b"daskdist"]) | change
    schema = table.schema.with_metadata({"daskdist": json.dumps(content)})
    with pa.ipc.new_file(path, schema) as file:
        file.write_table(table.cast(schema))
    with pytest.raises(FileError, match=r"a\.arrow: damaged"):
        read_part(str(tmp_path), part, LONE)


# --- manifests ---

SPEC = ElementSpec(
    Structure.of({"y": 0, "x": (0, Point(0, 0))})[1],
    (
        TensorSpec((None, 3), "float32", "pixels"),
        RaggedTensorSpec((None, None, 2), ">i4"),
        TensorSpec((), TEXT),
        TensorSpec((2,), "datetime64[25s]"),
    ),
)


def manifest(spec=SPEC, names=("a", "b")):
    parts = tuple(SavedPart(f"{name}.arrow", 3, 100) for name in names)
    return Manifest("token", spec, 3 * len(parts), parts, "lz4")


def test_manifests(tmp_path):
    directory = str(tmp_path / "new" / "deep")
    assert not exists(directory)
    with pytest.raises(FileError, match=r"deep/manifest.json: not found: nothing was saved in"):
        read_manifest(directory)
    made = manifest()
    write_manifest(directory, made)
    assert exists(directory)
    found = read_manifest(directory)
    assert found.parts == made.parts
    assert (found.fingerprint, found.cardinality, found.compression) == ("token", 6, "lz4")
    assert found.spec.structure == SPEC.structure
    assert [type(leaf) for leaf in found.spec.leaves] == [type(leaf) for leaf in SPEC.leaves]
    assert [leaf.name for leaf in found.spec.leaves] == ["pixels", None, None, None]
    assert [leaf.dtype for leaf in found.spec.leaves] == ["float32", "int32", TEXT, "datetime64[25s]"]
    assert found.spec.packed["x"][1]._fields == ("x", "y")
    assert type(found.spec.packed["x"][1]) is Point
    # Another in its place.
    write_manifest(directory, manifest(names=()))
    assert read_manifest(directory).parts == ()
    assert [path.name for path in Path(directory).iterdir()] == ["manifest.json"]


@given(nests)
@settings(max_examples=80, deadline=None)
def test_any_structure(nest):
    structure = Structure.of(nest)[1]
    found = structure_from_json(json.loads(json.dumps(structure_to_json(structure))))
    assert found == structure
    packed, other = structure.pack(range(structure.num_leaves)), found.pack(range(structure.num_leaves))
    assert in_order(other) == in_order(packed)


def in_order(nest):
    """A nest with the types of its containers, and its dicts as lists."""
    if isinstance(nest, dict):
        return [(name, in_order(each)) for name, each in nest.items()]
    return (type(nest), [in_order(each) for each in nest]) if isinstance(nest, tuple) else nest


@given(st.one_of(numbers, st.sampled_from(["longdouble", "T", "O", "U0", "S0"]).map(np.dtype)))
@settings(max_examples=80, deadline=None)
def test_any_dtype(dtype):
    found = dtype_from_json(json.loads(json.dumps(dtype_to_json(dtype))))
    assert found == (dtype if dtype.isnative else dtype.newbyteorder("="))
    assert found.isnative


def test_named_tuples_of_no_module(tmp_path):
    local = collections.namedtuple("Local", "left right", module="nowhere.at_all")
    changed = collections.namedtuple("Point", "x y z", module=__name__)
    for kind in (local, changed):
        content = structure_to_json(Structure.of(kind(*range(len(kind._fields))))[1])
        found = structure_from_json(content).pack(range(len(kind._fields)))
        assert type(found) is not Point
        assert type(found).__name__ == kind.__name__
        assert found._fields == kind._fields
        # The same class each time, and the same words for it.
        assert structure_from_json(content) == structure_from_json(content)
        assert structure_to_json(structure_from_json(content)) == content


@optree.register_pytree_node_class(namespace="test_store")
class Own(collections.UserList):
    def __tree_flatten__(self):
        return self.data, None, None

    @classmethod
    def __tree_unflatten__(cls, metadata, children):
        raise AssertionError("nothing of a class of its own is built")


@pytest.mark.parametrize(
    ("nest", "message"),
    [
        (collections.OrderedDict(a=0), "OrderedDict cannot be saved; make elements tuples, named tuples or dicts"),
        ((collections.deque([0]),), "deque"),
        ({"a": collections.defaultdict(int, a=0)}, "defaultdict"),
        ({1.5: 0}, r"1.5 is a name in a dict; give text or whole numbers"),
        ({"a": {(1, 2): 0}}, r"\(1, 2\)"),
    ],
    ids=str,
)
def test_structures_that_no_manifest_holds(nest, message):
    with pytest.raises(ArgumentError, match=message):
        structure_to_json(Structure.of(nest)[1])


def test_containers_of_their_own_class():
    _, treespec = optree.tree_flatten({"a": Own([0, 0])}, none_is_leaf=True, namespace="test_store")
    with pytest.raises(ArgumentError, match="Own cannot be saved"):
        structure_to_json(Structure(treespec))


def test_specs_that_no_manifest_holds():
    for leaf, message in [
        (DatasetSpec(), r"leaf \['x'\] is a dataset"),
        (TensorSpec((), "i4,i4"), "dtype.*cannot be saved"),
        (TensorSpec((), np.dtypes.StringDType(na_object=np.nan)), "may be missing"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            spec_to_json(ElementSpec(Structure.of({"x": 0})[1], (leaf,)))


def test_specs_are_equal(tmp_path):
    spec = ElementSpec(LONE, (TensorSpec((None, 0), "S0", "name"),))
    assert spec_from_json(spec_to_json(spec)) == spec


def save_json(directory, content):
    (directory / "manifest.json").write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def content(tmp_path):
    """What the file of a manifest holds."""
    write_manifest(str(tmp_path), manifest())
    return json.loads((tmp_path / "manifest.json").read_text())


def test_a_manifest_cut_short(tmp_path, content):
    whole = json.dumps(content)
    for length in range(len(whole)):
        save_json(tmp_path, whole[:length])
        with pytest.raises(FileError, match=r"manifest.json: damaged: not JSON"):
            read_manifest(str(tmp_path))


@pytest.mark.parametrize("text", ["", "\xff", "[]", "3", "null", "{}", "[" * 100_000, '{"version": "1"}'], ids=repr)
def test_a_manifest_of_something_else(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(FileError, match=r"manifest.json: "):
        read_manifest(str(tmp_path))


def test_a_manifest_of_another_version(tmp_path, content):
    save_json(tmp_path, content | {"version": 2, "parts": "of another form"})
    with pytest.raises(FileError, match=r"manifest.json: of version 2, and only version 1 is known"):
        read_manifest(str(tmp_path))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_of_hostile_names(tmp_path, content, name):
    for part in (name, f"{name}.arrow"):
        save_json(tmp_path, content | {"parts": [[part, 3, 100]]})
        with pytest.raises(FileError, match=r"manifest.json: damaged.*is no name of a part"):
            read_manifest(str(tmp_path))


LEAF = ["tensor", [], "<f4", None]


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": None},
        {"cardinality": 3.5},
        {"cardinality": True},
        {"compression": 3},
        {"parts": None},
        {"parts": [["a.arrow", 3]]},
        {"parts": [["a.arrow", -3, 100]]},
        {"parts": [["a.arrow", "3", 100]]},
        {"parts": [[3, 3, 100]]},
        {"spec": None},
        {"spec": {"structure": None, "leaves": []}},
        {"spec": {"structure": {"list": []}, "leaves": []}},
        {"spec": {"structure": "leaf", "leaves": [LEAF]}},
        {"spec": {"structure": {"dict": [[[], None]]}, "leaves": [LEAF]}},
        {"spec": {"structure": {"namedtuple": "a:B", "fields": ["x"], "items": []}, "leaves": []}},
        {"spec": {"structure": {"namedtuple": "a:B", "fields": ["class"], "items": [None]}, "leaves": [LEAF]}},
        {"spec": {"structure": {"namedtuple": "os:system", "fields": ["x"], "items": [None]}, "leaves": [["t"]]}},
        {"spec": {"structure": None, "leaves": [["other", [], "<f4", None]]}},
        {"spec": {"structure": None, "leaves": [["tensor", [-1], "<f4", None]]}},
        {"spec": {"structure": None, "leaves": [["tensor", ["a"], "<f4", None]]}},
        {"spec": {"structure": None, "leaves": [["tensor", [], "f4,f4", None]]}},
        {"spec": {"structure": None, "leaves": [["tensor", [], "O", None]]}},
        {"spec": {"structure": None, "leaves": [["tensor", [], "no dtype", None]]}},
        {"spec": {"structure": None, "leaves": [["tensor", [], 3, None]]}},
        {"spec": {"structure": None, "leaves": [["tensor", [], "<f4", 3]]}},
    ],
    ids=str,
)
def test_a_damaged_manifest(tmp_path, content, change):
    save_json(tmp_path, content | change)
    with pytest.raises(FileError, match=r"manifest.json: damaged: "):
        read_manifest(str(tmp_path))
    with pytest.raises(FileError):
        remove_unfinished(str(tmp_path))
    for key in change:
        save_json(tmp_path, {name: value for name, value in content.items() if name != key})
        with pytest.raises(FileError, match=rf"manifest.json: damaged.*{key}"):
            read_manifest(str(tmp_path))


# --- what does not come to its end ---


def test_a_file_has_its_name_once_it_is_whole(tmp_path):
    with writing(str(tmp_path), "manifest.json") as file:
        file.write(b"half")
        assert not exists(str(tmp_path))
    assert exists(str(tmp_path))
    (tmp_path / "manifest.json").unlink()
    with suppress(KeyboardInterrupt), writing(str(tmp_path), "manifest.json") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_process_that_dies_while_it_writes(tmp_path):
    program = (
        "import os, sys; from daskdist.storage.whole_file import writing\n"
        "managers = [writing(sys.argv[1], name) for name in ('a.arrow', 'manifest.json')]\n"
        "for file in [manager.__enter__() for manager in managers]: file.write(b'half'); file.flush()\n"
        "os._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == 1
    left = [path.name for path in tmp_path.iterdir()]
    assert len(left) == 2
    assert all(name.endswith(".tmp") for name in left)
    assert not exists(str(tmp_path))
    assert sorted(remove_unfinished(str(tmp_path))) == sorted(left)
    assert not list(tmp_path.iterdir())


def test_only_what_is_left_over_is_removed(tmp_path):
    directory = str(tmp_path)
    assert remove_unfinished(str(tmp_path / "not there")) == ()
    for name in ("a", "b", "c"):
        write_part(bundle(np.zeros(3)), directory, name)
    table = pa.table({"x": [1]})
    with pa.ipc.new_file(str(tmp_path / "theirs.arrow"), table.schema) as file:
        file.write_table(table)
    (tmp_path / "damaged.arrow").write_text("not ours to judge")
    (tmp_path / "notes.txt").write_text("keep")
    (tmp_path / ".notes.tmp").write_text("keep")
    (tmp_path / "folder.arrow").mkdir()
    others = {"theirs.arrow", "damaged.arrow", "notes.txt", ".notes.tmp", "folder.arrow"}
    write_manifest(directory, manifest(names=("a", "b")))
    assert remove_unfinished(directory) == ("c.arrow",)
    assert {path.name for path in tmp_path.iterdir()} == {"a.arrow", "b.arrow", "manifest.json", *others}
    (tmp_path / "manifest.json").unlink()
    assert remove_unfinished(directory) == ("a.arrow", "b.arrow")
    assert {path.name for path in tmp_path.iterdir()} == others


def test_writers_side_by_side(tmp_path):
    directory = str(tmp_path / "shared")
    parts, failed = {}, []

    def write(number):
        try:
            for name in (f"part-{number}", "same"):
                parts[name, number] = write_part(bundle(np.full(1000, number)), directory, name, "lz4")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for number in range(8):
        (element,) = read_part(directory, parts[f"part-{number}", number], LONE).elements()
        np.testing.assert_array_equal(element, np.full(1000, number))
    # Of one name there is one, and it is whole.
    (element,) = read_part(directory, parts["same", 0], LONE).elements()
    assert set(element) <= set(range(8))
    assert len(set(element)) == 1
    assert len(list(Path(directory).iterdir())) == 9


def test_processes_side_by_side(tmp_path):
    program = (
        "import sys, numpy as np; from daskdist.core.block import Block\n"
        "from daskdist.core.structure import Structure\n"
        "from daskdist.formats.saved.store import write_part\n"
        "number = int(sys.argv[2]); block = Block(Structure.of(0)[1], [np.full(5, number)])\n"
        "for part in range(20): write_part(block, sys.argv[1], f'part-{number}-{part}')"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(number)]) for number in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    for number in range(2):
        for part in range(20):
            found = read_part(str(tmp_path), SavedPart(f"part-{number}-{part}.arrow", 5, 0), LONE)
            np.testing.assert_array_equal(found.leaves[0], np.full(5, number))
    assert len(list(tmp_path.iterdir())) == 40


# --- places ---


@pytest.fixture
def bucket():
    """A directory of fsspec's memory file system."""
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
    found = read_manifest(bucket)
    assert found.parts == (part,)
    same_rows(read_part(bucket, part, PAIR), block)
    same_rows(take_rows(bucket, part, PAIR, [4, 0]), block.take([4, 0]))
    assert remove_unfinished(bucket) == (left.name,)
    with pytest.raises(FileError, match=r"b.arrow: not found"):
        read_part(bucket, left, PAIR)
    # In place of the one there is.
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
