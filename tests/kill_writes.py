"""A program that checks what is left of writes that are killed before each of their changes to a file system.

``python kill_writes.py DIRECTORY METHOD:SCHEME`` writes with a method of `Dataset` to ``SCHEME://...``, first to an
empty place and then over an older dataset. The files are copied before each change of the write, since these are what
a process leaves that is killed there; one process is killed, and has to leave the same files. In each state, a reader
has to find the old dataset or the new one, and another write has to remove all leftovers; the command ``convert`` is
repeated for that, and has to give the new dataset.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import fsspec
import pyarrow.dataset
import pyarrow.parquet  # noqa: F401
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

import daskdist
from daskdist import Dataset, errors
from daskdist.cli import main

# The new dataset has more files than the others.
OLD, NEW, LATER = list(range(2)), list(range(100, 103)), list(range(200, 202))
# The method ``convert`` is the command, which continues where it was killed.
CONVERT = "convert"
OPTIONS = {"to_zarr": {"chunk_rows": 2}, "save": {}}


class Changes:
    """The changes to file systems: each calls a function with its number, from 0, before it is made."""

    num = 0
    before: Callable[[int], None] | None = None
    lock = threading.Lock()

    @classmethod
    def count(cls) -> None:
        with cls.lock:
            if cls.before is not None:
                cls.before(cls.num)
                cls.num += 1


class Disk(LocalFileSystem):
    """The file system of this machine."""

    protocol = ("file", "local")

    def mv(self, *args: Any, **options: Any) -> None:
        Changes.count()
        super().mv(*args, **options)

    def rm(self, *args: Any, **options: Any) -> None:
        Changes.count()
        super().rm(*args, **options)

    def rm_file(self, path: str) -> None:
        Changes.count()
        super().rm_file(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        Changes.count()
        super().makedirs(path, exist_ok=exist_ok)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            Changes.count()
        return super().open(path, mode, **options)


class Objects(AbstractFileSystem):
    """An object store: objects appear whole, are copied one by one, and cannot be renamed."""

    protocol = "objects"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.disk = LocalFileSystem(auto_mkdir=True)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self.disk.ls(self._strip_protocol(path), detail=detail)

    def info(self, path: str, **options: Any) -> Any:
        return self.disk.info(self._strip_protocol(path))

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        Changes.count()
        self.disk.cp_file(self._strip_protocol(path1), self._strip_protocol(path2))

    def rm_file(self, path: str) -> None:
        Changes.count()
        path = self._strip_protocol(path)
        self.disk.rm_file(path)
        # Directories exist only as prefixes of the names of objects.
        while not os.listdir(path := os.path.dirname(path)):
            os.rmdir(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: Any = None) -> None:
        for name in self.find(path):
            self.rm_file(name)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        Changes.count()
        self.disk.pipe_file(self._strip_protocol(path), value)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            Changes.count()
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
        return [int(value["cls"]) for value in readers[method](place)]
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


def check(place: str, is_fresh: bool, method: str) -> None:
    globs = {"save": [], "to_zarr": [f"{place[:-1]}*"], CONVERT: [f"{place[:-1]}*"]}.get(method, [f"{place}/part-*"])
    for path in [place, *globs]:
        actual = read(method, path)
        allowed = [None, NEW] if is_fresh else [OLD, NEW]
        if actual not in allowed:
            raise SystemExit(f"{path} is read as {actual}")
    if method == CONVERT:
        convert(NEW, place)
        if (actual := read(method, place)) != NEW:
            raise SystemExit(f"{place} was converted again, and is read as {actual}")
        # Another conversion would begin with the same files after each state.
        return
    write(method, LATER, place)
    for path in [place, *globs]:
        if (actual := read(method, path)) != LATER:
            raise SystemExit(f"{path} was written again, and is read as {actual}")


def import_what_is_used(folder: Path, method: str) -> None:
    """Import all modules that a write and a read import, as each of the processes that are killed would do it again."""
    if method in ("to_zarr", CONVERT):
        # This takes so long that it is done here, not by the other process too.
        importlib.import_module("zarr")
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


def copy(source: Path, target: Path) -> None:
    """Copy a directory, whose files may be written and renamed meanwhile."""
    try:
        shutil.copytree(source, target, dirs_exist_ok=True)
    except shutil.Error as error:
        if not all("No such file" in reason for _, _, reason in error.args[0]):
            raise


def check_before_each_change(folder: Path, method: str, scheme: str) -> None:
    if method == CONVERT:
        for values in (OLD, NEW, LATER):
            Dataset.from_list([{"cls": value} for value in values]).to_parquet(folder / f"source-{values[0]}")
    import_what_is_used(folder, method)
    for is_fresh in (True, False):
        state = "fresh" if is_fresh else "overwritten"
        home, states, initial = folder / state, folder / f"{state}-states", folder / f"{state}-initial"
        home.mkdir()
        states.mkdir()
        target = home / "data.x"
        place = f"{scheme}://{target}" if scheme else str(target)
        if not is_fresh and in_another_process(lambda place=place: write(method, OLD, place)):
            raise SystemExit("the old dataset could not be written")
        copy(home, initial)

        def copied(place: str = place, home: Path = home, states: Path = states) -> None:
            Changes.before = lambda number: copy(home, states / str(number))
            write(method, NEW, place)
            Changes.before(Changes.num)

        if in_another_process(copied):
            raise SystemExit(f"{method}, {state}: the new dataset could not be written")
        num_changes = len(list(states.iterdir())) - 1

        def restore(source: Path, home: Path = home) -> None:
            shutil.rmtree(home)
            copy(source, home)

        def killed(number: int = num_changes // 2, place: str = place) -> None:
            Changes.before = lambda at: os._exit(9) if at == number else None
            write(method, NEW, place)

        restore(initial)
        if in_another_process(killed) != 9 or len(names_in(home, method)) != len(
            names_in(states / str(num_changes // 2), method)
        ):
            raise SystemExit(f"{method}, {state}: a process that was killed left {names_in(home, method)}")

        def checked(is_fresh: bool = is_fresh, place: str = place, home: Path = home, states: Path = states) -> None:
            expected: list[str] = []
            for number in range(len(list(states.iterdir()))):
                restore(states / str(number), home)
                try:
                    check(place, is_fresh, method)
                except SystemExit as error:
                    raise SystemExit(f"killed before change {number}: {error}") from None
                expected = expected or names_in(home, method)
                if len(names_in(home, method)) != len(expected):
                    raise SystemExit(f"left {names_in(home, method)}, not {expected}")

        if in_another_process(checked):
            raise SystemExit(f"{method}, {state}: {names_in(home, method)}")
        print(f"{method} {scheme} {state}: killed before {num_changes} changes", flush=True)


if __name__ == "__main__":
    check_before_each_change(Path(sys.argv[1]), *sys.argv[2].split(":"))
