"""Datasets written to the files of a directory, or to a store, so that a reader sees a complete write or none of it.

Files are written to a hidden directory and renamed when all are complete; a manifest lists the files of the dataset.
Replaced files are deleted after that. A store is written to a hidden path beside its own.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count
from math import prod
from typing import Any, Final

from daskdist.config import in_bytes
from daskdist.core.block import Rows
from daskdist.core.spec import ElementSpec
from daskdist.errors import ArgumentError, DaskdistError, FileError
from daskdist.formats import WritableFormat
from daskdist.formats.npy import npy_writer
from daskdist.formats.zarr import UnfinishedStore, check_store, create_store
from daskdist.storage.atomic_file import put, remove_temporaries, rename
from daskdist.storage.compression import compression_of, without_suffix
from daskdist.storage.filesystem import DAMAGE, Storage, is_remote
from daskdist.storage.hidden_names import is_hidden
from daskdist.storage.replace_directory import current, pointer_to
from daskdist.storage.write_manifest import WriteManifest, manifest_name
from daskdist.tables.to_arrow import no_rows

# Attempts to remove a directory, to which calls that nobody waits for any more may still write, and seconds
# between them.
_TRIES: Final = 5
_AGAIN_AFTER_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of one call of a write.

    Parameters
    ----------
    name
        The name of its file, where that waits.
    num_rows
        Its elements.
    num_bytes
        Their size, in memory or in the file, whichever is more.
    """

    name: str
    num_rows: int
    num_bytes: int


# ``write(number, rows)`` writes the elements of a call, by its number, where they lie.
Write = Callable[[int, Rows], Written]


@dataclass(frozen=True)
class WriteFile:
    """Elements written to a file of their own.

    Parameters
    ----------
    form
        How.
    directory
        Where.
    storage
        How files are opened.
    """

    form: WritableFormat
    directory: str
    storage: Storage

    def __call__(self, number: int, rows: Rows) -> Written:
        # A call may be made again, while the first still goes on somewhere.
        name = f"{number}-{uuid.uuid4().hex}.tmp"
        path = f"{self.directory}/{name}"
        with unwritable(path):
            num_bytes = self._write(rows, path)
        return Written(name, len(rows), max(rows.nbytes, num_bytes))

    def _write(self, rows: Rows, path: str) -> int:
        if not is_remote(path):
            with open(path, "wb") as file:
                self.form.write(rows, file)
                return file.tell()
        fs, inner = self.storage.located(path)
        with fs.open(inner, "wb") as file:
            self.form.write(rows, file)
            return int(file.tell())


@contextmanager
def unwritable(path: str) -> Iterator[None]:
    """Make what goes wrong inside a `FileError` that names what was to be written."""
    try:
        yield
    except DaskdistError:
        raise
    except FileNotFoundError as error:
        raise FileError(
            f"{path}: cannot be written: there is no such directory; where workers write, give one that all of them "
            "and this process share"
        ) from error
    except DAMAGE as error:
        raise FileError(f"{path}: cannot be written: {error or type(error).__name__}") from error


@dataclass(frozen=True)
class DirectoryWriter:
    """The files of a directory that a dataset is written to.

    Parameters
    ----------
    operation
        What a message begins with.
    form
        The format of the files.
    path
        The directory: an absolute local path or an fsspec URL.
    storage
        How files are opened.
    overwrite
        Whether files of the format that are there already give way.
    """

    operation: str
    form: WritableFormat
    path: str
    storage: Storage
    overwrite: bool

    def write(self, spec: ElementSpec, calls: Callable[[Write], Iterable[Written]]) -> list[str]:
        """Write them.

        Parameters
        ----------
        spec
            The spec of the elements.
        calls
            Has ``write`` called for all elements, some at a time, and gives what came of each call, in order.

        Returns
        -------
        list of str
            Their paths, in the order of the elements.

        Raises
        ------
        ArgumentError
            The format does not hold such elements, or there are files of it already.
        FileError
            They cannot be written. Nothing is left of them then.
        """
        with _errors_of(self.operation):
            self.form.check(spec)
        old, before = self._there()
        fs, root = self._located
        is_new = not fs.isdir(root)
        waiting = f".{self.operation}-{uuid.uuid4().hex}.tmp"
        try:
            with unwritable(self.path):
                fs.makedirs(f"{root}/{waiting}", exist_ok=True)
            write = WriteFile(self.form, f"{self.path}/{waiting}", self.storage)
            written = list(calls(write)) or [write(0, no_rows(spec))]
            with unwritable(self.path):
                finals = self._named(f"{root}/{waiting}", [part.name for part in written], old, before)
        except BaseException:
            _remove(fs, f"{root}/{waiting}")
            if is_new:
                with suppress(Exception):
                    fs.rmdir(root)
            raise
        self._clean(waiting, list(old))
        return [fs.unstrip_protocol(final) for final in finals] if is_remote(self.path) else finals

    @cached_property
    def _located(self) -> tuple[Any, str]:
        fs, root = self.storage.located(self.path)
        return fs, root.rstrip("/")

    @property
    def _manifest(self) -> str:
        return f"{self._located[1]}/{manifest_name(self.form.name)}"

    def _there(self) -> tuple[dict[str, int], bytes | None]:
        # The files that are to be replaced, with their sizes, and the manifest there is.
        fs, root = self._located
        with unwritable(self.path):
            fs.invalidate_cache(root)
            if fs.isfile(root):
                raise ArgumentError(f"{self.operation}: {self.path} is a file; give a directory")
            before = fs.cat_file(self._manifest) if fs.isfile(self._manifest) else None
            sizes = self._found()
        ignored = () if before is None else WriteManifest.from_bytes(before, self._manifest).ignored
        old = {name: size for name, size in sorted(sizes.items()) if name not in ignored}
        if old and not self.overwrite:
            raise ArgumentError(
                f"{self.operation}: {self.path} has {next(iter(old))!r} already ({len(old)} such files in all); give "
                "another directory, or overwrite=True to replace them once the new ones are whole"
            )
        below = next((name for name in old if "/" in name), None)
        if below is not None:
            # Readers of the directory would take them for some of the new ones, and nobody asked for their removal.
            raise ArgumentError(
                f"{self.operation}: {self.path} has {below!r} in a directory below it, which overwrite=True leaves; "
                "remove it first, or give another directory"
            )
        return old, before

    def _found(self) -> dict[str, int]:
        # The files of the format that a reader would find if there were no manifest, and their sizes.
        fs, root = self._located
        entries = fs.find(root, detail=True) if fs.isdir(root) else {}
        names = {str(path)[len(root) + 1 :]: int(info.get("size") or 0) for path, info in entries.items()}
        return {
            name: size
            for name, size in names.items()
            if without_suffix(name).endswith(self._endings) and not any(map(is_hidden, name.split("/")))
        }

    @property
    def _endings(self) -> tuple[str, ...]:
        return tuple(map(without_suffix, self.form.suffixes))

    def _named(self, waiting: str, names: Sequence[str], old: Mapping[str, int], before: bytes | None) -> list[str]:
        # Until the second manifest is there the dataset is the old one.
        fs, root = self._located
        sizes = self._sizes(waiting, names)
        finals = self._names(len(names), old)
        leftover = () if before is None else WriteManifest.from_bytes(before, self._manifest).ignored
        unfinished = WriteManifest(old, tuple({*leftover, *finals})).to_bytes()
        targets, renamed = [f"{root}/{final}" for final in finals], list[str]()
        try:
            put(fs, self._manifest, unfinished)
            for name in leftover:
                if fs.isfile(f"{root}/{name}"):
                    fs.rm_file(f"{root}/{name}")
            for name, target in zip(names, targets, strict=True):
                if fs.exists(target):
                    raise FileError(f"{target}: came while this was written; write to a place of your own")
                rename(fs, f"{waiting}/{name}", target)
                renamed.append(target)
            put(fs, self._manifest, WriteManifest(dict(zip(finals, sizes, strict=True)), tuple(old)).to_bytes())
        except BaseException:
            # Should it fail, the unfinished manifest says that what stays is no part of the dataset.
            with suppress(Exception):
                put(fs, self._manifest, unfinished)
                for target in renamed:
                    fs.rm_file(target)
                if before is None:
                    fs.rm_file(self._manifest)
                else:
                    put(fs, self._manifest, WriteManifest(old, leftover).to_bytes())
            raise
        return targets

    def _sizes(self, waiting: str, names: Sequence[str]) -> list[int]:
        fs, _ = self._located
        fs.invalidate_cache(waiting)
        sizes = {str(entry["name"]).rpartition("/")[2]: int(entry["size"]) for entry in fs.ls(waiting, detail=True)}
        if not sizes.keys() >= set(names):
            raise FileError(
                f"{self.path}: what the workers have written is not there for this process; give a directory that "
                "all of them share"
            )
        return [sizes[name] for name in names]

    def _names(self, number: int, old: Mapping[str, int]) -> list[str]:
        # Other names than those of the files to be replaced, which stay until the new ones are listed.
        num_digits = max(5, len(str(number - 1)))
        numbers = [f"part-{place:0{num_digits}d}" for place in range(number)]
        versions = chain([""], (f"-{version}" for version in count(1)))
        candidates = ([f"{start}{version}{self.form.suffixes[0]}" for start in numbers] for version in versions)
        return next(names for names in candidates if old.keys().isdisjoint(names))

    def _clean(self, waiting: str, old: Sequence[str]) -> None:
        # Best effort, of what killed processes left too: whatever stays is hidden, or ignored by the manifest.
        fs, root = self._located
        with suppress(OSError):
            for name in old:
                fs.rm_file(f"{root}/{name}")
            if old:
                manifest = WriteManifest.from_bytes(fs.cat_file(self._manifest), self._manifest)
                put(fs, self._manifest, WriteManifest(manifest.files).to_bytes())
        with suppress(OSError):
            is_waiting = re.compile(rf"\.{self.operation}-[0-9a-f]{{32}}\.tmp").fullmatch
            for entry in [waiting, *fs.ls(root, detail=False)]:
                if is_waiting(str(entry).rstrip("/").rpartition("/")[2]):
                    _remove(fs, entry)
        remove_temporaries(fs, self._manifest)


@dataclass(frozen=True)
class WriteChunk:
    """Elements written to a store, as the chunk of the number of the call.

    Parameters
    ----------
    store
        What is being written.
    """

    store: UnfinishedStore

    def __call__(self, number: int, rows: Rows) -> Written:
        self.store.write(number, rows)
        return Written("", len(rows), rows.nbytes)


@dataclass(frozen=True)
class ZarrWriter:
    """A Zarr store that a dataset is written to.

    Parameters
    ----------
    operation
        What a message begins with.
    path
        An absolute local path or an fsspec URL.
    chunk_rows
        The elements of each call but the last.
    storage
        How it is opened.
    overwrite
        Whether a store that is there already gives way.
    """

    operation: str
    path: str
    chunk_rows: int
    storage: Storage
    overwrite: bool

    def write(self, spec: ElementSpec, calls: Callable[[Write], Iterable[Written]]) -> list[str]:
        """Write it; parameters, results and errors are those of `DirectoryWriter.write`."""
        with _errors_of(self.operation):
            check_store(spec)
        fs, root = self.storage.located(self.path)
        root = root.rstrip("/")
        with unwritable(self.path):
            fs.invalidate_cache(root)
            is_replaced = fs.exists(pointer_to(root))
            is_there = fs.exists(root)
        if is_there or is_replaced:
            self._check_store(fs, root if is_there and not is_replaced else current(fs, root))
        store = create_store(self.path, spec, self.chunk_rows, self.storage, overwrite=is_there or is_replaced)
        try:
            num_rows = sum(part.num_rows for part in calls(WriteChunk(store)))
            store.finish(num_rows, overwrite=is_there or is_replaced)
        except BaseException:
            with suppress(FileError):
                store.abandon()
            raise
        return [self.path]

    def _check_store(self, fs: Any, root: str) -> None:
        if not self.overwrite:
            raise ArgumentError(
                f"{self.operation}: {self.path} is there already; give another path, or overwrite=True to replace it "
                "once the new one is whole"
            )
        # Only a store may be removed, no directory of anything else.
        if not any(fs.exists(f"{root}/{name}") for name in ("zarr.json", ".zgroup", ".zarray")):
            raise ArgumentError(
                f"{self.operation}: {self.path} is no Zarr store, and overwrite=True replaces only such; give another "
                "path"
            )


def compression_to_write(operation: str, name: str | None) -> str | None:
    """Return the compression that a user's name stands for, for files that are written.

    Raises
    ------
    ArgumentError
        There is no such name.
    """
    with _errors_of(operation):
        compression = compression_of(name)
        if compression == "infer":
            raise ArgumentError("compression is 'infer', and there is no file yet to tell it by; give a name, or None")
    return compression


def npy_to_write(operation: str, spec: ElementSpec) -> WritableFormat:
    """Return NumPy's format that elements of a spec are written in.

    Raises
    ------
    ArgumentError
        They are not; the message says which leaf, and what to do.
    """
    with _errors_of(operation):
        return npy_writer(spec)


def rows_of_chunk(spec: ElementSpec, num_rows: int) -> int:
    """Return the default number of rows in a chunk: those of a call, at most all there are where that is known."""
    row_bytes = sum(prod(size or 1 for size in leaf.shape) * leaf.dtype.itemsize for leaf in spec.leaves)
    most = in_bytes("bundle-bytes") // max(row_bytes, 1)
    return max(1, min(most, num_rows) if num_rows >= 0 else most)


@contextmanager
def _errors_of(operation: str) -> Iterator[None]:
    # Put the operation's name before the messages of errors in its arguments.
    try:
        yield
    except ArgumentError as error:
        raise ArgumentError(f"{operation}: {error}") from None


def _remove(fs: Any, directory: str) -> None:
    # Best effort: what stays is hidden.
    for _ in range(_TRIES):
        try:
            fs.rm(directory, recursive=True)
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(_AGAIN_AFTER_S)
        else:
            return
