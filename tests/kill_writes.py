"""A program that kills writers before each change to a file system, and checks the files that are left.

``python kill_writes.py DIRECTORY METHOD:SCHEME`` writes with a method of `Dataset` to ``SCHEME://...``, first to an
empty place and then over an older dataset, in processes that end before their first, second, ... change, until one
completes. After each, a reader has to find the old dataset or the new one, and another write has to remove all
leftovers; the command ``convert`` is also repeated before that, and has to give the new dataset.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import dask
import fsspec
import pyarrow.dataset
import pyarrow.parquet  # noqa: F401
import zarr  # noqa: F401
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

import daskdist
from daskdist import Dataset, errors
from daskdist.cli import main

OLD, NEW, LATER = list(range(4)), list(range(100, 106)), list(range(200, 202))
# The method ``convert`` is the command, which continues where it was killed.
CONVERT = "convert"
OPTIONS = {"to_zarr": {"chunk_rows": 3}, "save": {}}


class Fuse:
    """A counter that ends the process before the change with a given number, from 0."""

    left: int | None = None
    lock = threading.Lock()

    @classmethod
    def burn(cls) -> None:
        with cls.lock:
            if cls.left == 0:
                os._exit(9)
            if cls.left is not None:
                cls.left -= 1


class Disk(LocalFileSystem):
    """The file system of this machine."""

    protocol = ("file", "local")

    def mv(self, *args: Any, **options: Any) -> None:
        Fuse.burn()
        super().mv(*args, **options)

    def rm(self, *args: Any, **options: Any) -> None:
        Fuse.burn()
        super().rm(*args, **options)

    def rm_file(self, path: str) -> None:
        Fuse.burn()
        super().rm_file(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        Fuse.burn()
        super().makedirs(path, exist_ok=exist_ok)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            Fuse.burn()
        return super().open(path, mode, **options)


class Objects(AbstractFileSystem):
    """An object store: objects appear whole, are copied one by one, and cannot be renamed."""

    protocol = "objects"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.disk = LocalFileSystem(auto_mkdir=True)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self.disk.ls(self._strip_protocol(path), detail=detail)

    def info(self, path: str, **options: Any) -> Any:
        return self.disk.info(self._strip_protocol(path))

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        Fuse.burn()
        self.disk.cp_file(self._strip_protocol(path1), self._strip_protocol(path2))

    def rm_file(self, path: str) -> None:
        Fuse.burn()
        path = self._strip_protocol(path)
        self.disk.rm_file(path)
        # Directories exist only as prefixes of the names of objects.
        while not os.listdir(path := os.path.dirname(path)):
            os.rmdir(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: Any = None) -> None:
        for name in self.find(path):
            self.rm_file(name)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        Fuse.burn()
        self.disk.pipe_file(self._strip_protocol(path), value)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            Fuse.burn()
        return self.disk.open(self._strip_protocol(path), mode)


fsspec.register_implementation("file", Disk, clobber=True)
fsspec.register_implementation("objects", Objects)


def convert(values: list[int], place: str) -> None:
    folder = Path(place.partition("://")[2] or place).parent.parent / f"source-{values[0]}"
    args = ["convert", str(folder), place, "--to", "zarr", "--rows-per-file", "2", "--overwrite"]
    with dask.config.set({"daskdist.num-threads": 1}), contextlib.redirect_stdout(None):
        main.main(args, standalone_mode=False)


def write(method: str, values: list[int], place: str) -> None:
    if method == CONVERT:
        convert(values, place)
        return
    dataset = Dataset.from_list([{"cls": value} for value in values])
    options: dict[str, Any] = {} if method == "save" else {"overwrite": True}
    options |= OPTIONS.get(method, {"rows_per_file": 2})
    with dask.config.set({"daskdist.num-threads": 1, "daskdist.split-bytes": 16, "daskdist.bundle-bytes": 16}):
        getattr(dataset, method)(place, **options)


def read(method: str, place: str) -> list[int] | None:
    """Return the values that a reader finds; None if it reports that no complete dataset exists."""
    readers = {
        "to_parquet": daskdist.read_parquet,
        "to_npy": daskdist.read_npy,
        "to_webdataset": daskdist.read_webdataset,
        "to_tfrecord": lambda path: daskdist.read_tfrecord(path, {"cls": daskdist.FixedLenFeature((), "int64")}),
        "to_zarr": daskdist.read_zarr,
        CONVERT: daskdist.read_zarr,
        "save": Dataset.load,
    }
    try:
        return [int(each["cls"]) for each in readers[method](place)]
    except errors.FileError:
        return None


def in_another_process(function: Any) -> int:
    """Return the exit status of a forked process that calls a function."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def names_in(folder: Path, method: str) -> list[str]:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    # File names of a saved dataset are random.
    return [name if "part-" not in name or method != "save" else name[:11] for name in names]


def check(place: str, target: Path, is_fresh: bool, method: str) -> None:
    globs = {"save": [], "to_zarr": [f"{place[:-1]}*"], CONVERT: [f"{place[:-1]}*"]}.get(method, [f"{place}/part-*"])
    for path in [place, *globs]:
        found = read(method, path)
        allowed = [None, NEW] if is_fresh else [OLD, NEW]
        if found not in allowed:
            raise SystemExit(f"{path} is read as {found}")
    if method == CONVERT:
        convert(NEW, place)
        if (found := read(method, place)) != NEW:
            raise SystemExit(f"{place} was converted again, and is read as {found}")
    write(method, LATER, place)
    for path in [place, *globs]:
        if (found := read(method, path)) != LATER:
            raise SystemExit(f"{path} was written again, and is read as {found}")


def import_what_is_used(folder: Path, method: str) -> None:
    """Import all modules that a write and a read import, as each of the processes that are killed would do it again."""
    noted, home = folder / "modules", folder / "first"
    home.mkdir()

    def note() -> None:
        before = set(sys.modules)
        write(method, OLD, str(home / "data.x"))
        read(method, str(home / "data.x"))
        noted.write_text(" ".join(name for name in sys.modules if name not in before))

    if in_another_process(note):
        raise SystemExit("the first dataset could not be written")
    for name in noted.read_text().split():
        importlib.import_module(name)


def kill_before_each_change(folder: Path, method: str, scheme: str) -> None:
    if method == CONVERT:
        for values in (OLD, NEW, LATER):
            Dataset.from_list([{"cls": value} for value in values]).to_parquet(folder / f"source-{values[0]}")
    import_what_is_used(folder, method)
    for is_fresh in (True, False):
        number, is_over = 0, False
        while not is_over:
            home = folder / f"{is_fresh}-{number}"
            home.mkdir()
            target = home / "data.x"
            place = f"{scheme}://{target}" if scheme else str(target)
            if not is_fresh:
                if not number and in_another_process(lambda place=place: write(method, OLD, place)):
                    raise SystemExit("the old dataset could not be written")
                if number:
                    shutil.copytree(folder / "old", home, dirs_exist_ok=True)
                else:
                    shutil.copytree(home, folder / "old")

            def killed(place: str = place, number: int = number) -> None:
                Fuse.left = number
                write(method, NEW, place)

            status = in_another_process(killed)
            if status not in (0, 9):
                raise SystemExit(f"status {status} before change {number}")
            is_over = status == 0
            label = f"{method}, {'fresh' if is_fresh else 'overwritten'}, killed before change {number}"
            if in_another_process(lambda p=place, t=target, f=is_fresh: check(p, t, f, method)):
                raise SystemExit(f"{label}: {names_in(home, method)}")
            if number == 0:
                expected = names_in(home, method)
            if len(names_in(home, method)) != len(expected):
                raise SystemExit(f"{label}: left {names_in(home, method)}, not {expected}")
            number += 1
        state = "fresh" if is_fresh else "overwritten"
        print(f"{method} {scheme} {state}: killed before {number - 1} changes", flush=True)


if __name__ == "__main__":
    kill_before_each_change(Path(sys.argv[1]), *sys.argv[2].split(":"))
