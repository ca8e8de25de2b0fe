"""States that are saved to files and restored from them: of variables, and of any object that has a state."""

from __future__ import annotations

import collections
import io
import json
import os
import random
import signal
import zipfile
import zlib
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import programs
import pytest
from conftest import TESTS, mirrored
from fsspec.implementations.memory import MemoryFileSystem

import daskdist
from daskdist import Checkpoint, PerReplica, Variable
from daskdist.checkpoint.nests import as_numpy, like
from daskdist.errors import ArgumentError, FileError

pytestmark = pytest.mark.timeout(120)

Pair = collections.namedtuple("Pair", "first second")
Nothing = collections.namedtuple("Nothing", "")


class Thing:
    """An object with a state, which counts how often it was loaded."""

    def __init__(self, state=None):
        self.state = state
        self.num_loads = 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state
        self.num_loads += 1


class Counter:
    """An object for variables."""

    def __init__(self):
        self.count = 0
        self.seen = np.zeros(2)

    def state_dict(self):
        return {"count": self.count, "seen": self.seen}

    def load_state_dict(self, state):
        self.count, self.seen = state["count"], state["seen"]

    def step(self, by):
        self.count += by
        self.seen += by
        return self.count, self.seen.tolist()


@pytest.fixture(params=["embedded", pytest.param("cluster", marks=pytest.mark.cluster)])
def three(request):
    """Return three replicas in this process, or six on two workers of one thread each."""
    if request.param == "embedded":
        yield mirrored(3)
        return
    client = request.getfixturevalue("start_cluster")(2, 1)
    with daskdist.MultiWorkerMirroredStrategy(client, num_replicas_per_worker=3) as made:
        yield made


def same(one, other):
    """Return whether two states are equal in types, dtypes and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and repr(one.tolist()) == repr(other.tolist())
    return repr(one) == repr(other)


def saved(path, state):
    Checkpoint(it=Thing(state)).save(path)
    return Path(path)


def restored(path, state=None):
    """Restore a state from a file, and return it."""
    thing = Thing({"all": None} if state is None else state)
    Checkpoint(it=thing).restore(path)
    return thing.state


def members_of(path):
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def write_members(path, members, how=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, data in members:
            archive.writestr(name, data)


# --- contents of states ---

STATES = {
    "numbers": [0, -1, 2**200, True, 1.5, float("inf"), -0.0, 1e-320, 1 + 2j, complex(-0.0, float("inf"))],
    "text": ["", "plain", "žluťoučký \0 \ud800", b"", b"\0\xff\0", None],
    "nests": {"a": {1: [(), [], {}], "1": ((1, (2,)), [None])}, -5: {"": 0}},
    "dtypes": [np.arange(6).astype(code).reshape(2, 3) for code in "?bBhHiIqQefdgFDG"],
    "orders": [np.arange(6.0).reshape(2, 3).T, np.arange(9)[::-2], np.asfortranarray(np.ones((2, 3, 4)))],
    "byte orders": [np.arange(3, dtype=">i4"), np.arange(3, dtype=">f8")],
    "empty": [np.zeros((0, 3)), np.zeros((2, 0), ">i2"), np.array(5.0), np.array(["a"], "U0"), np.zeros(2, "V0")],
    "times": [np.array(["2020-01-01", "NaT"], "M8[ns]"), np.array([5], "m8[25s]")],
    "fixed text": [np.array(["a", "žlu"]), np.array([b"a", b"bcd"]), np.array([b"ab"], "V2")],
    "fields": np.array([(1, [2.0, 3.0])], [("n", "<i4"), ("x", ">f8", (2,))]),
    "aligned fields": np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "text of any length": np.array([["", "a\0b"], ["žluť" * 50, "x"]], np.dtypes.StringDType()),
    "no text": np.empty((0, 2), np.dtypes.StringDType()),
    "scalars": [np.float32(1.5), np.int8(-3), np.bool_(True), np.datetime64("2020-01-01"), np.float64("nan")],
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_round_trips(tmp_path, name):
    state = {"all": STATES[name]}
    assert same(restored(saved(tmp_path / "a.ckpt", state)), state)


def test_arrays_that_come_back_can_be_changed(tmp_path):
    actual = restored(saved(tmp_path / "a.ckpt", {"all": [np.zeros(3), np.zeros((2, 2), order="F")]}))["all"]
    assert all(array.flags.writeable for array in actual)


def test_the_same_state_is_the_same_file(tmp_path):
    one, other = (saved(tmp_path / name, STATES).read_bytes() for name in "ab")
    assert one == other


def test_numpy_itself_can_read_the_arrays(tmp_path):
    path = saved(tmp_path / "a.ckpt", {"x": np.arange(3), "y": np.ones(2)})
    with np.load(path, allow_pickle=False) as actual:
        assert (actual["0"].tolist(), actual["1"].tolist()) == ([0, 1, 2], [1, 1])


def test_containers_come_back_as_they_are_in_the_object(tmp_path):
    made = {"o": collections.OrderedDict(b=np.zeros(1), a=1), "n": Pair(np.zeros(2), Nothing()), "t": (1, 2)}
    made["o"].extra = "kept"
    path = saved(tmp_path / "a.ckpt", made)
    made["o"]["a"], made["n"] = 7, Pair(np.ones(2), Nothing())
    actual = restored(path, made)
    assert type(actual["o"]) is collections.OrderedDict
    assert actual["o"]["a"] == 1
    assert actual["o"].extra == "kept"
    assert type(actual["n"]) is Pair
    assert actual["n"].first.tolist() == [0, 0]
    assert type(actual["n"].second) is Nothing
    # Objects are matched by name, in any order.
    other = collections.namedtuple("Pair", "second first")
    assert restored(path, {**made, "n": other(Nothing(), np.ones(2))})["n"].first.tolist() == [0, 0]


def test_numpy_text_is_plain_text():
    assert same(as_numpy([np.str_("a"), np.bytes_(b"b")]), ["a", b"b"])


def test_arrays_are_copied_unless_that_is_not_wanted():
    array = np.zeros(2)
    assert not np.shares_memory(as_numpy([array])[0], array)
    assert as_numpy([array], copied=False)[0] is array
    assert not np.shares_memory(like([array], [array])[0], array)
    assert like([array], [array], copied=False)[0] is array


itself = []
itself.append(itself)

REFUSED = {
    "an object": (
        {"a": [object()]},
        r"save: 'it': at \['a'\]\[0\]: object is no part of a state; give arrays, numbers",
    ),
    "a set": ({"a": {1}}, r"at \['a'\]: set is no part of a state"),
    "a class": ({"a": np.ndarray}, r"at \['a'\]: type is no part of a state"),
    "a key": ({"a": {(1, 2): 0}}, r"at \['a'\]: \(1, 2\) is a key; give text or whole numbers"),
    "a bool as key": ({True: 0}, r"the state: True is a key"),
    "objects": ([np.array([None])], r"at \[0\]: an array of Python objects"),
    "fields of objects": ([np.zeros(1, [("a", "O")])], r"at \[0\]: an array of Python objects"),
    "a masked array": ([np.ma.array([1], mask=[True])], r"at \[0\]: a masked array; give x.filled\(value\)"),
    "missing text": (
        [np.array(["a", None], np.dtypes.StringDType(na_object=None))],
        r"at \[0\]: text that may be missing",
    ),
    "overlapping fields": (
        [np.zeros(1, np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2]}))],
        r"'it': at \[0\]: dtype .* cannot be saved; give an array for each field",
    ),
    "very many fields": (
        [np.zeros(1, [(f"f{k}", "i4") for k in range(2000)])],
        r"at \[0\]: dtype .* an array for each",
    ),
    "itself": (itself, r"at \[0\]\[0\]\[0\]\[0\]...: deeper than 100, or inside itself"),
    "a huge number": ([10**5000], "save: a number cannot be written"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_failed_save_leaves_the_old_file(tmp_path, name):
    state, words = REFUSED[name]
    path = saved(tmp_path / "a.ckpt", [1])
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match=words):
        saved(path, state)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.ckpt"]


# --- comparison with the present objects ---

UNLIKE = {
    "missing": ({"a": 1}, {"a": 1, "b": 2}, r"the state: 'b' missing"),
    "superfluous": ({"x": {"a": 1, 5: 2}}, {"x": {"a": 1}}, r"at \['x'\]: 5 superfluous"),
    "both": ({"a": 1}, {"b": 1}, r"the state: 'b' missing; 'a' superfluous"),
    "a length": ([1, 2], [1, 2, 3], r"the state: 2 missing"),
    "a shape": (
        {"x": [np.zeros((2, 3))]},
        {"x": [np.zeros((3, 2))]},
        r"at \['x'\]\[0\]: shape \(2, 3\) was saved, and ",
    ),
    "an array for a number": ({"x": np.zeros(3)}, {"x": 1.0}, r"at \['x'\]: shape \(3,\) was saved, and \(\) is there"),
    "a list for a dict": ({"x": [1]}, {"x": {0: 1}}, r"at \['x'\]: a list was saved, and a dict is there"),
    "an array for a dict": ({"x": np.zeros(1)}, {"x": {0: 1}}, r"at \['x'\]: an array was saved, and a dict is there"),
    "a dict for a number": ({"x": {"y": 1}}, {"x": 5}, r"at \['x'\]: a dict was saved, and a int is there"),
    "no fields": ({"x": {}}, {"x": Pair(1, 2)}, r"at \['x'\]: 'first', 'second' missing"),
    "nothing": ({}, {"x": 1}, r"the state: 'x' missing"),
    "many": ({}, dict.fromkeys(range(30), 0), r"the state: 0, 1, .*, 18, 19 and others missing"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_another_structure_changes_nothing(tmp_path, name):
    given, there, words = UNLIKE[name]
    Checkpoint(a=Thing({"x": 1}), it=Thing(given)).save(tmp_path / "a.ckpt")
    first, thing = Thing({"x": 2}), Thing(there)
    with pytest.raises(ArgumentError, match=rf"restore: 'it': {words}.*; nothing was restored"):
        Checkpoint(a=first, it=thing).restore(tmp_path / "a.ckpt")
    assert (first.num_loads, thing.num_loads, first.state) == (0, 0, {"x": 2})


def test_objects_without_state_accept_any_state(tmp_path):
    begun = {"state": {0: {"step": 1, "mean": np.ones(2)}}, "groups": [{"lr": 0.5}], "last": np.ones(3)}
    fresh = {"state": {}, "groups": [{"lr": 0.1}], "last": None}
    assert same(restored(saved(tmp_path / "begun", begun), fresh), begun)
    assert same(restored(saved(tmp_path / "fresh", fresh), begun), fresh)


@pytest.mark.parametrize("number", [float, np.float32])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_lists_of_numbers_may_differ_in_length(tmp_path, number, length):
    losses = [number(k) for k in range(length)]
    Checkpoint(losses=losses, by_name={"valid": losses}).save(tmp_path / "a.ckpt")
    checkpoint = Checkpoint(losses=[number(9)] * 2, by_name={"valid": [number(8)] * 3})
    checkpoint.restore(tmp_path / "a.ckpt")
    assert checkpoint.losses == checkpoint.by_name["valid"] == losses


def test_lists_of_other_values_have_to_have_the_same_length(tmp_path):
    Checkpoint(layers=[np.zeros(2), np.zeros(3)]).save(tmp_path / "a.ckpt")
    with pytest.raises(ArgumentError, match=r"restore: 'layers': the state: 1 superfluous"):
        Checkpoint(layers=[np.zeros(2)]).restore(tmp_path / "a.ckpt")


def test_http_servers_are_not_written_to():
    checkpoint = Checkpoint(step=1)
    for save in (checkpoint.save, lambda url: daskdist.CheckpointManager(url).save(checkpoint, step=1)):
        with pytest.raises(FileError, match=r"^http://127\.0\.0\.1:1/x.*: files of HTTP servers are only read"):
            save("http://127.0.0.1:1/x")


def test_other_names_list_all(tmp_path):
    Checkpoint(a=Thing(1), b=Thing(2), c=Thing(3)).save(tmp_path / "a.ckpt")
    things = Thing(1), Thing(2)
    words = r"a\.ckpt is of other objects: 'x' missing; 'a', 'c' superfluous; the checkpoint is of b, x"
    with pytest.raises(ArgumentError, match=words):
        Checkpoint(b=things[0], x=things[1]).restore(tmp_path / "a.ckpt")
    assert [thing.num_loads for thing in things] == [0, 0]


def test_an_object_that_refuses_is_named_with_those_restored_before(tmp_path):
    class Refusing(Thing):
        def load_state_dict(self, state):
            raise KeyError("no")

    Checkpoint(a=Thing(1), b=Thing(2), c=Thing(3)).save(tmp_path / "a.ckpt")
    last = Thing(0)
    words = "restore: 'b' does not accept its state: KeyError: 'no'; restored before it: a"
    with pytest.raises(ArgumentError, match=words):
        Checkpoint(a=Thing(0), b=Refusing(0), c=last).restore(tmp_path / "a.ckpt")
    assert last.num_loads == 0


@pytest.mark.parametrize("given", [object(), Thing, {"thing": Thing(1)}], ids=["an object", "a class", "in a dict"])
def test_objects_need_both_methods(given):
    with pytest.raises(
        ArgumentError, match=r"'it' is (object|the class Thing|dict); give an object with state_dict\(\)"
    ):
        Checkpoint(it=given)


def test_a_checkpoint_without_objects_is_refused():
    with pytest.raises(ArgumentError, match="give the objects to be saved, by name"):
        Checkpoint()


def test_objects_can_have_any_name(tmp_path):
    names = {"self": Thing(1), "path": Thing(2), "a/b c": Thing(3)}
    checkpoint = Checkpoint(**names)
    checkpoint.save(tmp_path / "a.ckpt")
    checkpoint.restore(tmp_path / "a.ckpt")
    assert repr(checkpoint) == "Checkpoint(self, path, a/b c)"
    assert [name.state for name in names.values()] == [1, 2, 3]


# --- files ---


def test_files_far_away():
    memory = fsspec.filesystem("memory")
    path = "memory://checkpoints/run [1]/*.ckpt"
    for number in range(2):
        saved_state = {"x": np.full(3, number)}
        Checkpoint(it=Thing(saved_state)).save(path)
        assert restored(path, {"x": np.zeros(3)})["x"].tolist() == [number] * 3
    assert [name.rpartition("/")[2] for name in memory.find("/checkpoints")] == ["*.ckpt"]
    memory.rm("/checkpoints", recursive=True)


def test_directories_are_made_and_a_path_may_be_of_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("here.ckpt", "a/b/c.ckpt", Path("p.ckpt"), f"file://{tmp_path}/u.ckpt"):
        Checkpoint(it=Thing([1])).save(path)
        assert restored(path, [0]) == [1]


@pytest.mark.parametrize("end", ["", "/"])
def test_a_directory_is_no_file(tmp_path, end):
    with pytest.raises(ArgumentError, match=r"save: .* is a directory; give the path of a file"):
        Checkpoint(it=Thing(1)).save(f"{tmp_path}{end}")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", ["{}/none.ckpt", "memory://none/none.ckpt"])
def test_no_file(tmp_path, path):
    with pytest.raises(FileError, match=r"none.ckpt: there is no such file"):
        restored(path.format(tmp_path))


def test_a_file_that_cannot_be_opened(tmp_path):
    with pytest.raises(FileError, match=r"cannot be read: .*[Dd]irectory"):
        restored(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileError, match="cannot be written"):
        saved(tmp_path / "file" / "a.ckpt", [1])
    with pytest.raises(FileError, match="nosuch"):
        restored("nosuch://a.ckpt")


def test_storage_options_are_given_on(tmp_path):
    with pytest.raises(ArgumentError, match="storage_options is int"):
        Checkpoint(it=Thing(1)).save(tmp_path / "a", storage_options=5)
    options = {"auto_mkdir": True}
    Checkpoint(it=Thing(1)).save(tmp_path / "b" / "a", storage_options=options)
    thing = Thing(0)
    Checkpoint(it=thing).restore(tmp_path / "b" / "a", storage_options=options)
    assert thing.state == 1


def test_leftovers_of_a_dead_process_are_removed_by_the_next_save(tmp_path):
    names = [f".a.ckpt.{'0' * 32}.tmp", f".b.ckpt.{'0' * 32}.tmp", ".a.ckpt.tmp"]
    for name in names:
        (tmp_path / name).write_bytes(b"half")
    saved(tmp_path / "a.ckpt", [1])
    assert sorted(os.listdir(tmp_path)) == sorted([*names[1:], "a.ckpt"])


# --- interrupted saves ---

DYING = """
import resource, signal, sys
import numpy as np
from daskdist import Checkpoint

class Thing:
    def state_dict(self):
        return {"all": [np.full(1000, 2.0) for _ in range(100)]}
    load_state_dict = None.__eq__

signal.signal(signal.SIGXFSZ, signal.SIG_DFL if sys.argv[2] == "killed" else signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    Checkpoint(it=Thing()).save(sys.argv[1])
except Exception as error:
    print(type(error).__name__, error)
"""


def run_python(program, *args):
    return programs.run("-c", program, *args)


@pytest.mark.parametrize(("how", "most_bytes"), [("killed", 0), ("killed", 700_000), ("full", 5_000)])
def test_the_file_from_before_stays_until_the_new_one_is_whole(tmp_path, how, most_bytes):
    # The kernel kills the process at a write beyond the limit, or reports a full disk.
    state = {"all": [np.full(1000, 1.0) for _ in range(100)]}
    path = saved(tmp_path / "a.ckpt", state)
    before = path.read_bytes()
    done = run_python(DYING, path, how, most_bytes)
    if how == "killed":
        assert done.returncode == -signal.SIGXFSZ, done.stderr
        (left,) = set(os.listdir(tmp_path)) - {"a.ckpt"}
        assert left.startswith(".a.ckpt.")
        assert (tmp_path / left).stat().st_size <= most_bytes
    else:
        assert done.stdout.startswith(f"FileError {path}: cannot be written: "), done.stderr
        assert os.listdir(tmp_path) == ["a.ckpt"]
    assert path.read_bytes() == before
    assert same(restored(path), state)
    saved(path, state)
    assert os.listdir(tmp_path) == ["a.ckpt"]


class FailsAtClose(MemoryFileSystem):
    """A file that accepts all writes, and fails when it is closed."""

    protocol = "failsatclose"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    is_full = False

    def _open(self, path, mode="rb", **options):
        file = super()._open(path, mode, **options)
        if self.is_full and "w" in mode:
            return Failing(self, path)
        return file


class Failing(io.BytesIO):
    def __init__(self, fs, path):
        super().__init__()
        self.fs, self.path = fs, path

    def close(self):
        if not self.closed:
            super().close()
            raise OSError("no room left")


def test_a_file_system_that_fails_at_the_end(monkeypatch):
    fsspec.register_implementation("failsatclose", FailsAtClose, clobber=True)
    thing, path = Thing({"x": np.zeros(3)}), "failsatclose://d/a.ckpt"
    Checkpoint(it=thing).save(path)
    monkeypatch.setattr(FailsAtClose, "is_full", True)
    thing.state = {"x": np.ones(3)}
    with pytest.raises(FileError, match=r"a.ckpt: cannot be written: no room left"):
        Checkpoint(it=thing).save(path)
    assert [name.rpartition("/")[2] for name in FailsAtClose.store] == ["a.ckpt"]
    assert restored(path, {"x": np.ones(3)})["x"].tolist() == [0, 0, 0]


# --- damage ---


def damaged_at(data, seed):
    random_of = random.Random(seed)
    if seed % 2:
        return data[: random_of.randrange(len(data))]
    place = random_of.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << random_of.randrange(8))]) + data[place + 1 :]


def test_damage_is_noticed_or_harmless(tmp_path):
    state = {"all": {"x": np.arange(20.0), "t": STATES["text of any length"], "b": b"bytes", "n": [1, None, "a"]}}
    data = saved(tmp_path / "a.ckpt", state).read_bytes()
    path, num_noticed = tmp_path / "b.ckpt", 0
    for seed in range(400):
        path.write_bytes(damaged_at(data, seed))
        thing = Thing({"all": None})
        is_noticed = False
        try:
            Checkpoint(it=thing).restore(path)
        except FileError:
            is_noticed = True
        num_noticed += is_noticed
        assert thing.num_loads == (not is_noticed)
        # A changed bit goes unnoticed only in fields that are not read, such as the time of a member.
        assert is_noticed or (seed % 2 == 0 and same(thing.state, state))
    assert num_noticed > 300


def test_every_bit_of_an_array_is_looked_after(tmp_path):
    path = saved(tmp_path / "a.ckpt", {"x": np.arange(1000.0)})
    data = path.read_bytes()
    start = data.index(np.arange(1000.0).tobytes())
    for place in random.Random(5).sample(range(start, start + 8000), 30):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(FileError, match=r"damaged or cut short: .*CRC"):
            restored(path, {"x": np.zeros(1000)})


def npy(array, **options):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, **options)
    return file.getvalue()


def header(text, data=b""):
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + data


def archive_of(path, arrays, state, change=None):
    """Write an archive of given arrays, with a structure that refers to them."""
    content = {"format": "daskdist checkpoint", "version": 1, "states": [["it", state]]}
    content["members"] = [[len(data), zlib.crc32(data)] for data in arrays]
    if change:
        change(content)
    members = [(f"{number}.npy", data) for number, data in enumerate(arrays)]
    write_members(path, [*members, ("checkpoint.json", json.dumps(content))])


def deep(num):
    node = 0
    for _ in range(num):
        node = {"list": [node]}
    return node


X = {"array": 0}
HOSTILE_ARRAYS = {
    "pickled": ([npy(np.array([None]), allow_pickle=True)], X),
    "a huge shape": ([header("{'descr': '<f8', 'fortran_order': False, 'shape': (1152921504606846976,), }\n")], X),
    "a huge shape of no size": ([header("{'descr': '<U0', 'fortran_order': False, 'shape': (-5,), }\n")], X),
    "a negative shape": ([header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -1), }\n", b"12345678")], X),
    "a header of a program": ([header("__import__('os').abort()")], X),
    "a deep header": ([header("(" * 9000)], X),
    "a header cut short": ([b"\x93NUMPY\x01\x00\xff\xff{"], X),
    "no array": ([b"nothing at all"], X),
    "more bytes than an array": ([npy(np.zeros(2)) + b"more"], X),
    "an array of two places": ([npy(np.zeros(2))], {"list": [X, X]}),
    "an array of no place": ([npy(np.zeros(2))], 5),
    "an array that is not there": ([], X),
    "an array that is a name": ([npy(np.zeros(2))], {"array": "0"}),
    "a scalar of three": ([npy(np.zeros(3))], {"scalar": 0}),
    "bytes of floats": ([npy(np.zeros(3))], {"bytes": 0}),
    "negative text": ([npy(np.zeros(3, np.uint8)), npy(np.array([-3, 6]))], {"text": [0, 1]}),
    "long text": ([npy(np.zeros(3, np.uint8)), npy(np.array([2, 2**62]))], {"text": [0, 1]}),
    "text that is none": ([npy(np.full(3, 255, np.uint8)), npy(np.array([3]))], {"text": [0, 1]}),
    "a kind that is not known": ([], {"pickle": "gASVAA=="}),
    "two kinds": ([], {"list": [], "dict": []}),
    "a class to import": ([], {"namedtuple": "this:nothing", "fields": [], "items": []}),
    "a list of itself": ([], [1]),
    "a key twice": ([], {"dict": [["a", 1], ["a", 2]]}),
    "a key that is none": ([], {"dict": [[None, 1]]}),
    "a very deep one": ([], deep(150)),
    "one that is too deep": ([], deep(400)),
    "a complex of text": ([], {"complex": ["1", "2"]}),
}


@pytest.mark.parametrize("name", HOSTILE_ARRAYS)
def test_hostile_arrays_and_structures(tmp_path, name):
    archive_of(tmp_path / "a.ckpt", *HOSTILE_ARRAYS[name])
    with pytest.raises(FileError, match=r"a\.ckpt: damaged or cut short: "):
        restored(tmp_path / "a.ckpt")


HOSTILE_STRUCTURES = {
    "another version": (lambda it: it.update(version=2), "of version 2, and only version 1 is known here"),
    "another format": (lambda it: it.update(format="x"), "no checkpoint: its 'checkpoint.json' is of something else"),
    "a sum that is not its": (lambda it: it["members"][0].__setitem__(1, 5), "array 0 is not the one that was written"),
    "a length that is not its": (lambda it: it["members"][0].__setitem__(0, 5), "array 0 is not the one"),
    "an array less": (lambda it: it["members"].clear(), "it has 1 arrays, and not the 0 that it lists"),
    "no members": (lambda it: it.pop("members"), "damaged or cut short: 'members'"),
    "a name twice": (lambda it: it["states"].append(["it", 5]), "a name is duplicated"),
    "a name that is none": (lambda it: it["states"].append([5, 5]), "5 where str is expected"),
}


@pytest.mark.parametrize("name", HOSTILE_STRUCTURES)
def test_hostile_tables(tmp_path, name):
    change, words = HOSTILE_STRUCTURES[name]
    archive_of(tmp_path / "a.ckpt", [npy(np.zeros(2))], X, change)
    with pytest.raises(FileError, match=words):
        restored(tmp_path / "a.ckpt")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_hostile_archives(tmp_path):
    path = saved(tmp_path / "a.ckpt", {"all": [np.zeros(2), np.ones(2)]})
    members = members_of(path)
    cases = {
        "two members have one name": ([*members.items(), ("0.npy", b"")], zipfile.ZIP_STORED),
        "is compressed, which is never written": ([*members.items()], zipfile.ZIP_DEFLATED),
        "it has 3 arrays, and not the 2": ([*members.items(), ("../../etc/x.npy", b"")], zipfile.ZIP_STORED),
        "an archive without 'checkpoint.json'": ([*members.items()][:-1], zipfile.ZIP_STORED),
        "not JSON|Expecting value": ([("checkpoint.json", b"!")], zipfile.ZIP_STORED),
        "recursion": ([("checkpoint.json", b"[" * 100_000)], zipfile.ZIP_STORED),
    }
    for words, (listed, how) in cases.items():
        write_members(path, listed, how)
        with pytest.raises(FileError, match=rf"a\.ckpt: .*({words})"):
            restored(path)


def test_a_member_that_says_it_is_longer_than_the_file(tmp_path):
    path = saved(tmp_path / "a.ckpt", {"all": [np.zeros(2)]})
    data = bytearray(path.read_bytes())
    place = data.index(b"PK\x01\x02")
    for offset in (20, 24):
        data[place + offset : place + offset + 4] = (2**31).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(FileError, match="its members say they are longer than the file is"):
        restored(path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the file is empty"),
        (b"P", "damaged"),
        (b"\x89HDF\r\n", "begins with b'.x89HDF'"),
        (b"PK\x03\x04", "damaged"),
    ],
    ids=["empty", "one byte", "HDF5", "four bytes"],
)
def test_foreign_files(tmp_path, data, words):
    (tmp_path / "a.ckpt").write_bytes(data)
    with pytest.raises(FileError, match=rf"a\.ckpt: .*{words}"):
        restored(tmp_path / "a.ckpt")


def test_archives_of_numpy_are_refused_as_checkpoints(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(2))
    with pytest.raises(FileError, match=r"no checkpoint: an archive without 'checkpoint.json'"):
        restored(tmp_path / "a.npz")


# --- variables ---


def variables_of(strategy):
    with strategy.scope():
        return {
            "array": Variable(np.arange(6.0).reshape(2, 3), name="array"),
            "nest": Variable({"w": np.zeros(2), "b": (np.float32(1), 5)}, name="nest"),
            "total": Variable(0.0, synchronization="ON_READ", aggregation="SUM", name="total"),
            "counter": Variable(Counter, name="counter"),
        }


def numbers(strategy):
    return PerReplica([np.float64(number + 1) for number in range(strategy.num_replicas_in_sync)])


def train(strategy, made):
    """Change all variables, and return the replicas' counts."""

    def step(number):
        made["array"].assign(made["array"] + 1)
        made["total"].assign_add(number)
        return made["counter"].read_value().step(2)

    actual = strategy.local_results(strategy.run(step, args=(numbers(strategy),)))
    made["nest"].assign({"w": made["nest"].numpy()["w"] + 3, "b": (np.float32(2), 6)})
    return list(map(_listed, actual))


def _listed(found):
    return [int(found[0]), np.asarray(found[1]).tolist()]


def values_of(made):
    nest = made["nest"].numpy()
    return [made["array"].numpy().tolist(), nest["w"].tolist(), list(map(float, nest["b"])), float(made["total"])]


def test_variables_are_restored(two, tmp_path):
    made = variables_of(two)
    train(two, made)
    before = values_of(made)
    checkpoint = Checkpoint(**made)
    checkpoint.save(tmp_path / "a.ckpt")
    assert train(two, made) == [[4, [4, 4]]] * 2
    assert values_of(made) != before
    checkpoint.restore(tmp_path / "a.ckpt")
    assert values_of(made) == before
    # Replicas do not share the restored objects.
    assert train(two, made) == [[4, [4, 4]]] * 2


def test_another_number_of_replicas_continues(two, three, tmp_path):
    made = variables_of(two)
    train(two, made)
    Checkpoint(**made).save(tmp_path / "a.ckpt")
    other = variables_of(three)
    Checkpoint(**other).restore(tmp_path / "a.ckpt")
    assert values_of(other) == values_of(made)
    assert train(three, other) == [[4, [4, 4]]] * three.num_replicas_in_sync
    expected = sum(range(three.num_replicas_in_sync + 1)) + 3
    assert float(other["total"]) == pytest.approx(expected)


def test_a_variable_of_another_shape_is_left_alone(two, tmp_path):
    with two.scope():
        small, large, first = Variable(np.arange(2.0)), Variable(np.arange(3.0)), Variable(5.0)
    Checkpoint(a=first, v=small).save(tmp_path / "a.ckpt")
    first.assign(6.0)
    with pytest.raises(ArgumentError, match=r"restore: 'v': at .*shape \(2,\) was saved, and \(3,\) is there"):
        Checkpoint(a=first, v=large).restore(tmp_path / "a.ckpt")
    assert float(first) == 6
    assert large.numpy().tolist() == [0, 1, 2]


def test_values_per_replica_need_as_many_replicas(two, tmp_path):
    def own(strategy):
        with strategy.scope():
            return Variable(0.0, synchronization="ON_READ", name="own")

    made = own(two)
    two.run(lambda number: made.assign(number), args=(numbers(two),))
    Checkpoint(own=made).save(tmp_path / "a.ckpt")
    made.assign(9.0)
    Checkpoint(own=made).restore(tmp_path / "a.ckpt")
    assert [float(value) for value in two.local_results(made.values)] == [1, 2]
    with pytest.raises(ArgumentError, match=r"restore: 'own': at \['replicas'\]: 2 missing"):
        Checkpoint(own=own(mirrored(3))).restore(tmp_path / "a.ckpt")


RESTARTED = """
import sys
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/checkpoint"]
from conftest import mirrored
from test_checkpoint import Checkpoint, train, values_of, variables_of

strategy = mirrored(int(sys.argv[3]))
made = variables_of(strategy)
Checkpoint(**made).restore(sys.argv[1])
print(values_of(made))
print(train(strategy, made)[0])
Checkpoint(**made).save(sys.argv[1])
"""


def test_another_process_continues(two, tmp_path):
    made = variables_of(two)
    train(two, made)
    checkpoint = Checkpoint(**made)
    checkpoint.save(tmp_path / "a.ckpt")
    before = values_of(made)
    done = run_python(RESTARTED, tmp_path / "a.ckpt", TESTS, 4)
    assert done.stdout.splitlines() == [str(before), "[4, [4.0, 4.0]]"], done.stderr
    checkpoint.restore(tmp_path / "a.ckpt")
    assert float(made["total"]) == 3 + 10
    assert train(two, made) == [[6, [6, 6]]] * 2


# --- arrays of frameworks ---


def test_tensors_come_back_as_tensors(tmp_path):
    torch = pytest.importorskip("torch")

    def parts():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.arange(12.0).reshape(4, 3)).square().sum().backward()
        optimizer.step()

    def numbers_of(model):
        return torch.cat([value.detach().double().flatten() for value in model.state_dict().values()]).tolist()

    model, optimizer = parts()
    step(model, optimizer)
    Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "a.ckpt")
    step(model, optimizer)
    # Restore into an optimizer before its first step, and again after a step.
    for is_fresh in (True, False):
        if is_fresh:
            other, its = parts()
        checkpoint = Checkpoint(model=other, optimizer=its)
        checkpoint.restore(tmp_path / "a.ckpt")
        assert isinstance(its.state_dict()["state"][0]["exp_avg"], torch.Tensor)
        step(other, its)
        assert numbers_of(other) == numbers_of(model)


def test_tensors_of_dtypes_that_numpy_has_not(tmp_path):
    torch = pytest.importorskip("torch")
    state = {"x": torch.arange(3, dtype=torch.bfloat16, requires_grad=True), "y": torch.tensor(True)}
    path = saved(tmp_path / "a.ckpt", state)
    actual = restored(path, {"x": torch.zeros(3, dtype=torch.bfloat16), "y": torch.tensor(False)})
    assert actual["x"].dtype is torch.bfloat16
    assert actual["x"].tolist() == [0, 1, 2]
    assert actual["y"].item() is True
    assert restored(path, {"x": np.zeros(3), "y": False})["x"].dtype == np.float32
    with pytest.raises(ArgumentError, match=r"at \['x'\]: a str was saved, and an array is there"):
        like({"x": torch.zeros(())}, {"x": "text"})


def test_arrays_of_jax_come_back_as_such(tmp_path):
    jax = pytest.importorskip("jax")
    state = {"p": Pair(jax.numpy.ones(2, "bfloat16"), Nothing()), "k": [jax.numpy.arange(3)], "later": None}
    path = saved(tmp_path / "a.ckpt", state | {"later": [np.arange(2, dtype=np.int32)]})
    actual = restored(path, state)
    assert all(isinstance(item, jax.Array) for item in (actual["p"].first, actual["k"][0], actual["later"][0]))
    assert actual["p"].first.dtype == "bfloat16"
    assert actual["p"].first.tolist() == [1, 1]
    with pytest.raises(ArgumentError, match=r"at \['key'\]: PRNGKeyArray cannot be made a NumPy array: .*key_data"):
        as_numpy({"key": jax.random.key(0)})


def test_arrays_and_nests_of_them_are_values(tmp_path):
    weights = {"layers": [np.arange(6.0).reshape(2, 3), np.zeros(2, "f4")], "best": None}
    checkpoint = Checkpoint(weights=weights, order=np.array([3, 1, 2]), history=[0.5, 0.25], epoch=3)
    checkpoint.save(tmp_path / "a.ckpt")
    # None stands for a value that does not exist yet.
    fresh = Checkpoint(weights=None, order=np.zeros(3, int), history=[0.0, 0.0], epoch=0)
    fresh.restore(tmp_path / "a.ckpt")
    assert fresh.epoch == 3
    assert fresh.history == [0.5, 0.25]
    assert fresh.order.tolist() == [3, 1, 2]
    assert fresh.weights["best"] is None
    assert [part.dtype for part in fresh.weights["layers"]] == ["f8", "f4"]
    assert np.array_equal(fresh.weights["layers"][0], weights["layers"][0])
    with pytest.raises(ArgumentError, match=r"restore: 'order'.*nothing was restored"):
        Checkpoint(weights=None, order=np.zeros(4, int), history=[0.0, 0.0], epoch=0).restore(tmp_path / "a.ckpt")


def test_an_object_inside_of_a_nest_is_refused():
    with daskdist.MirroredStrategy(["CPU:0"]).scope():
        variable = daskdist.Variable([1.0, 2.0])
    with pytest.raises(ArgumentError, match=r"Checkpoint: 'x' is dict.*Variable inside; give objects .* by names"):
        Checkpoint(x={"weights": [variable]})


def test_lists_and_dicts_of_values_may_begin_empty(tmp_path):
    path = str(tmp_path / "a.ckpt")
    Checkpoint(losses=[0.5, 0.25], best={"epoch": 1}, names=()).save(path)
    for losses, best, names in (([], {}, ()), ([1.0, 2.0], {"epoch": 0}, ("a",))):
        checkpoint = Checkpoint(losses=losses, best=best, names=names)
        checkpoint.restore(path)
        assert (checkpoint.losses, checkpoint.best, checkpoint.names) == ([0.5, 0.25], {"epoch": 1}, ())
    for losses in ({}, [np.zeros(2)]):
        with pytest.raises(ArgumentError, match=r"^restore: 'losses': the state"):
            Checkpoint(losses=losses, best={}, names=()).restore(path)


@pytest.mark.parametrize("value", ["run", {"epoch": 1}, None])
@pytest.mark.parametrize("operation", ["save", "restore"])
def test_managers_say_what_to_save(tmp_path, operation, value):
    with daskdist.CheckpointManager(tmp_path / "run") as manager:
        text = rf"^{operation}: expected a Checkpoint of the objects, .*, got {type(value).__name__}$"
        with pytest.raises(ArgumentError, match=text):
            getattr(manager, operation)(value)
