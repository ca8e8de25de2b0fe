"""Saved datasets: refused elements, damaged and unfinished files, and manifests."""

from __future__ import annotations

import collections
import json
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import optree
import programs
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_values import LONE, PAIR, SPEC, TEXT, Point, bundle, nests, numbers

from daskdist.core.block import Block, Bundle
from daskdist.core.json_codec import (
    dtype_from_json,
    dtype_to_json,
    spec_from_json,
    spec_to_json,
    structure_from_json,
    structure_to_json,
)
from daskdist.core.ragged import Ragged
from daskdist.core.spec import DatasetSpec, ElementSpec, TensorSpec
from daskdist.core.structure import Nested, Structure
from daskdist.errors import ArgumentError, FileError
from daskdist.formats.saved.manifest import Manifest, exists, read_manifest, remove_unfinished, write_manifest
from daskdist.formats.saved.store import SavedPart, read_part, write_part
from daskdist.storage.atomic_file import writing

# Hypothesis warns if other threads draw random numbers meanwhile, as those of other tests' clusters do.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


# --- refused arguments ---


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        # This needs an id, since pytest's default one has the object's address, which differs between processes.
        pytest.param(Nested(), r"leaf \[0\] is a dataset, such as a window", id="nested"),
        (np.array([b"a", "b"], object), r"holds str, but only bytes can be saved \(leaf \[0\]\)"),
        (np.array([b"a", None], object), "holds NoneType"),
        (np.array([np.bytes_(b"a")], object), "holds bytes_"),
        (np.zeros(2, "i4,f8"), r"dtype.*cannot be saved.*leaf \[0\]"),
        (np.zeros(2, "V3"), "cannot be saved"),
        (np.array(["a"], np.dtypes.StringDType(na_object=None)), "may be missing"),
        (Ragged(np.array([{}]), [0, 1]), "holds dict"),
        ("not an array", "builtins.str; only arrays in host memory"),
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
    with pytest.raises(ArgumentError, match="is no part's name"):
        write_part(bundle(np.zeros(2)), str(tmp_path / "inner"), name)
    with pytest.raises(ArgumentError, match="is no part's name"):
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
    """Write a part with columns of every layout; return it, its path and its structure."""
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
        # Each file has a new name, as a file that is mapped into memory must not change.
        (path.parent / f"c-{number}.arrow").write_bytes(data)
        try:
            actual = read_part(str(path.parent), SavedPart(f"c-{number}.arrow", part.num_rows, 0), structure)
            outcomes[len(list(actual.elements()))] += 1
        except FileError as error:
            assert f"c-{number}.arrow" in str(error)  # noqa: PT017 - some are read as they are
            outcomes["refused"] += 1
    assert set(outcomes) == {"refused", part.num_rows}


def test_a_file_that_is_gone(written):
    part, path, structure = written
    path.unlink()
    with pytest.raises(FileError, match=r"a\.arrow: not found: deleted since it was saved"):
        read_part(str(path.parent), part, structure)


def test_a_file_of_something_else(written):
    part, path, structure = written
    path.write_text("no longer a table")
    with pytest.raises(FileError, match=r"a\.arrow: damaged"):
        read_part(str(path.parent), part, structure)
    table = pa.table({"a": [1, 2, 3, 4]})
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)
    with pytest.raises(FileError, match=r"a\.arrow: an Arrow file, but not of a saved dataset"):
        read_part(str(path.parent), part, structure)
    path.unlink()
    path.mkdir()
    with pytest.raises(FileError, match=r"a\.arrow"):
        read_part(str(path.parent), part, structure)


def test_a_file_of_other_rows(written):
    part, path, structure = written
    with pytest.raises(FileError, match=r"a\.arrow: has 4 rows, but 5 in the manifest"):
        read_part(str(path.parent), SavedPart(part.name, 5, 0), structure)
    with pytest.raises(FileError, match=r"a\.arrow: its leaves are .* but \('\[0\]', '\[1\]'\)"):
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
    actual = read_manifest(directory)
    assert actual.parts == made.parts
    assert (actual.fingerprint, actual.cardinality, actual.compression) == ("token", 6, "lz4")
    assert actual.spec.structure == SPEC.structure
    assert [type(leaf) for leaf in actual.spec.leaves] == [type(leaf) for leaf in SPEC.leaves]
    assert [leaf.name for leaf in actual.spec.leaves] == ["pixels", None, None, None]
    assert [leaf.dtype for leaf in actual.spec.leaves] == ["float32", "int32", TEXT, "datetime64[25s]"]
    assert actual.spec.packed["x"][1]._fields == ("x", "y")
    assert type(actual.spec.packed["x"][1]) is Point
    # Replace the manifest.
    write_manifest(directory, manifest(names=()))
    assert read_manifest(directory).parts == ()
    assert [path.name for path in Path(directory).iterdir()] == ["manifest.json"]


@given(nests)
@settings(max_examples=50, deadline=None)
def test_any_structure(nest):
    structure = Structure.of(nest)[1]
    actual = structure_from_json(json.loads(json.dumps(structure_to_json(structure))))
    assert actual == structure
    packed, other = structure.pack(range(structure.num_leaves)), actual.pack(range(structure.num_leaves))
    assert in_order(other) == in_order(packed)


def in_order(nest):
    """Return a nest with the types of tuples, and with dicts as lists of items, so that their order is compared too."""
    if isinstance(nest, dict):
        return [(name, in_order(item)) for name, item in nest.items()]
    return (type(nest), [in_order(value) for value in nest]) if isinstance(nest, tuple) else nest


@given(st.one_of(numbers, st.sampled_from(["longdouble", "T", "O", "U0", "S0"]).map(np.dtype)))
@settings(max_examples=50, deadline=None)
def test_any_dtype(dtype):
    actual = dtype_from_json(json.loads(json.dumps(dtype_to_json(dtype))))
    assert actual == (dtype if dtype.isnative else dtype.newbyteorder("="))
    assert actual.isnative


def test_named_tuples_of_no_module(tmp_path):
    local = collections.namedtuple("Local", "left right", module="nowhere.at_all")
    changed = collections.namedtuple("Point", "x y z", module=__name__)
    for kind in (local, changed):
        content = structure_to_json(Structure.of(kind(*range(len(kind._fields))))[1])
        actual = structure_from_json(content).pack(range(len(kind._fields)))
        assert type(actual) is not Point
        assert type(actual).__name__ == kind.__name__
        assert actual._fields == kind._fields
        # Reading gives the same class each time, and writing that class gives the same text.
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
        (collections.OrderedDict(a=0), "OrderedDict cannot be saved; convert it to a tuple, named tuple or dict"),
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
    """Return the content of a manifest file."""
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
    with pytest.raises(FileError, match=r"manifest.json: version 2 is unknown, only version 1 is supported"):
        read_manifest(str(tmp_path))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_of_hostile_names(tmp_path, content, name):
    for part in (name, f"{name}.arrow"):
        save_json(tmp_path, content | {"parts": [[part, 3, 100]]})
        with pytest.raises(FileError, match=r"manifest.json: damaged.*is no part's name"):
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
        "import os, sys; from daskdist.storage.atomic_file import writing\n"
        "managers = [writing(sys.argv[1], name) for name in ('a.arrow', 'manifest.json')]\n"
        "for file in [manager.__enter__() for manager in managers]: file.write(b'half'); file.flush()\n"
        "os._exit(1)"
    )
    done = programs.run("-c", program, tmp_path)
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
    # There is one file of that name, and it is complete.
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
    running = [programs.Program("-c", program, tmp_path, number) for number in range(2)]
    assert [process.wait(60) for process in running] == [0, 0]
    for number in range(2):
        for part in range(20):
            actual = read_part(str(tmp_path), SavedPart(f"part-{number}-{part}.arrow", 5, 0), LONE)
            np.testing.assert_array_equal(actual.leaves[0], np.full(5, number))
    assert len(list(tmp_path.iterdir())) == 40
