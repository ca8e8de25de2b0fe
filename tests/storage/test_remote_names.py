"""Names of remote files with characters that mean something in patterns and URLs."""

from __future__ import annotations

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

import daskdist
from daskdist import errors
from daskdist.storage.filesystem import Storage, first_link, has_wildcards

NAMES = [
    "a[1].csv",
    "[ab].csv",
    "a]b.csv",
    "a*b.csv",
    "what?.csv",
    "a#1.csv",
    "100%.csv",
    "a b.csv",
    "ä.csv",
]


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/names", recursive=True)


def xs(path):
    return [int(row["x"]) for row in daskdist.read_csv(path)]


@pytest.mark.parametrize("name", NAMES)
def test_files_and_directories_are_read_by_their_names(memory, name):
    memory.pipe(f"/names/{name}", b"x\n1\n")
    memory.pipe("/names/a1.csv", b"x\n2\n")
    memory.pipe("/names/b.csv", b"x\n3\n")
    assert xs(f"memory://names/{name}") == [1]
    memory.pipe(f"/names/{name}.folder/k.csv", b"x\n4\n")
    assert xs(f"memory://names/{name}.folder") == [4]
    assert sorted(xs("memory://names/*.csv")) == [1, 2, 3]


def test_patterns_are_patterns_where_no_file_has_their_name(memory):
    for k, name in enumerate(("a1.csv", "a2.csv")):
        memory.pipe(f"/names/{name}", f"x\n{k}\n".encode())
    assert xs("memory://names/a[12].csv") == [0, 1]
    with pytest.raises(errors.FileError, match="no file matches"):
        xs("memory://names/c[12].csv")


def test_an_unfinished_write_to_a_directory_with_brackets_is_noticed(tmp_path):
    folder = tmp_path / "a[1]"
    daskdist.Dataset.range(3).to_parquet(folder)
    assert len(daskdist.read_parquet(folder)) == 3
    next(folder.glob("*.parquet")).unlink()
    with pytest.raises(errors.FileError, match="missing, but the manifest"):
        daskdist.read_parquet(folder)


class Objects(MemoryFileSystem):
    """A store of objects under any keys."""

    protocol = "oss"
    store, pseudo_dirs = {}, [""]

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("oss://").lstrip("/")

    def find(self, path, detail=False, **options):
        keys = sorted(key for key in self.store if key.startswith(self._strip_protocol(path).rstrip("/") + "/"))
        return {key: {"name": key, "type": "file", "size": 4} for key in keys} if detail else keys


@pytest.fixture
def objects():
    fsspec.register_implementation("oss", Objects, clobber=True)
    yield Objects()
    Objects.store.clear()


def test_objects_that_stand_for_folders_are_no_files(objects):
    content = MemoryFile(objects, "/b/f/part", b"1\n")
    objects.store |= dict.fromkeys(("/b/f/", "/b/f/empty/", "/b/f/below", "/b/f/below/part", "/b/f/part"), content)
    assert Storage().expand("oss://b/f", ("",)) == ("oss:///b/f/below/part", "oss:///b/f/part")


def test_keys_with_two_colons(objects):
    for k, name in enumerate(("a::b.csv", "c.csv::d.csv", "a::e.csv")):
        objects.store[f"/b/{name}"] = MemoryFile(objects, f"/b/{name}", f"x\n{k}\n".encode())
    assert xs("oss://b/a::b.csv") == [0]
    assert xs("oss://b/c.csv::d.csv") == [1]
    assert xs("oss://b/a::*.csv") == [0, 2]
    assert xs("oss://b") == [0, 2, 1]


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("s3://bucket/a::b.csv", "s3://bucket/a::b.csv"),
        ("memory://a::b::c", "memory://a::b::c"),
        ("zip://*.csv::s3://bucket/a.zip", "zip://*.csv"),
        ("simplecache::http://host/a.csv", "simplecache"),
        ("tar://a.csv::/tmp/a.tar", "tar://a.csv"),
        ("s3://bucket/a.csv", "s3://bucket/a.csv"),
    ],
)
def test_the_first_link_of_a_chain(path, first):
    assert first_link(path) == first
    assert has_wildcards(path) is ("*" in first)
