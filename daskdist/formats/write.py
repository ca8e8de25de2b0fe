"""Datasets written to the files of a directory, or to a store, so that a reader sees a complete write or none of it.

Files are written to a hidden directory and renamed when all are complete; a manifest lists the files of the dataset.
Replaced files are deleted after that. A store is written to a hidden path beside its own.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count, takewhile
from math import prod
from typing import Any, Final

from daskdist.cached_property import cached_property
from daskdist.config import in_bytes
from daskdist.core.block import Rows
from daskdist.core.spec import ElementSpec
from daskdist.errors import ArgumentError, FileError
from daskdist.formats import WritableFormat
from daskdist.formats.npy import npy_writer
from daskdist.formats.zarr import UnfinishedStore, check_store, unfinished_store
from daskdist.storage.atomic_file import put, remove_temporaries, rename, temporary_beside
from daskdist.storage.compression import compression_of, has_suffix
from daskdist.storage.failures import replaced_errors
from daskdist.storage.filesystem import Storage, is_remote
from daskdist.storage.hidden_files import is_hidden
from daskdist.storage.http_files import check_writable
from daskdist.storage.listing import files_below
from daskdist.storage.replace_directory import current, is_store, pointer_to
from daskdist.storage.write_manifest import WriteManifest, manifest_name
from daskdist.tables.to_arrow import no_rows

# The number of attempts to remove a directory to which abandoned calls may still write, and the seconds between them.
_TRIES: Final = 5
_AGAIN_AFTER_S: Final = 0.1
# A complete part that a write with a key may continue after: its number, rows and bytes.
_DONE: Final = re.compile(r"(\d+)-(\d+)-(\d+)-[0-9a-f]{32}\.done")


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of one call of a write.

    Parameters
    ----------
    name
        The name of its file in the hidden directory.
    num_rows
        The number of its elements.
    num_bytes
        The size of the elements, in memory or in the file, whichever is larger.
    """

    name: str
    num_rows: int
    num_bytes: int


@dataclass(frozen=True)
class WriteFile:
    """A function object that writes the elements of each call to a separate file.

    Parameters
    ----------
    form
        The format of the file.
    directory
        The directory to write to.
    storage
        The options with which files are opened.
    finished
        The first files, if a killed write has left them: ``number`` counts from there on.
    is_kept
        Whether complete files get names by which a later write finds them.
    """

    form: WritableFormat
    directory: str
    storage: Storage
    finished: tuple[Written, ...] = ()
    is_kept: bool = False

    def __call__(self, number: int, rows: Rows) -> Written:
        # A call may be repeated while the first attempt still runs somewhere.
        name = f"{number}-{uuid.uuid4().hex}.tmp"
        path = f"{self.directory}/{name}"
        with unwritable(path):
            num_bytes = max(rows.nbytes, self._write(rows, path))
            if self.is_kept:
                name = done_name(number + len(self.finished), len(rows), num_bytes)
                fs, inner = self.storage.located(path)
                rename(fs, inner, f"{inner.rpartition('/')[0]}/{name}")
        return Written(name, len(rows), num_bytes)

    def _write(self, rows: Rows, path: str) -> int:
        if not is_remote(path):
            with open(path, "wb") as file:
                self.form.write(rows, file)
                return file.tell()
        fs, inner = self.storage.located(path)
        with fs.open(inner, "wb") as file:
            self.form.write(rows, file)
            return int(file.tell())


def unwritable(path: str) -> AbstractContextManager[None]:
    """Raise errors of the block as a `FileError` that names the path to be written."""

    def replace(error: Exception) -> FileError:
        if isinstance(error, FileNotFoundError):
            return FileError(
                f"{path}: cannot be written: there is no such directory; if workers write, give one that all of them "
                "and this process share"
            )
        return FileError(f"{path}: cannot be written: {error or type(error).__name__}")

    return replaced_errors(replace)


def done_name(number: int, num_rows: int, num_bytes: int) -> str:
    """Return a new name of a file that says which part of a write is complete."""
    return f"{number}-{num_rows}-{num_bytes}-{uuid.uuid4().hex}.done"


def finished_parts(fs: Any, directory: str) -> tuple[Written, ...]:
    """Return the complete parts of a write up to the first that is missing, and delete the files of others."""
    fs.invalidate_cache(directory)
    try:
        entries = fs.ls(directory, detail=False)
    except FileNotFoundError:
        # In object stores an empty directory is none.
        return ()
    finished: dict[int, Written] = {}
    for entry in entries:
        name = str(entry).rpartition("/")[2]
        if match := _DONE.fullmatch(name):
            finished[int(match[1])] = Written(name, int(match[2]), int(match[3]))
    first = list(map(finished.__getitem__, takewhile(finished.__contains__, count())))
    names = {part.name for part in first}
    for entry in entries:
        if str(entry).rpartition("/")[2] not in names:
            fs.rm_file(entry)
    return tuple(first)


@dataclass(frozen=True)
class DirectoryWriter:
    """The writer of a dataset to the files of a directory.

    Parameters
    ----------
    operation
        The name of the function in error messages.
    form
        The format of the files.
    path
        The directory: an absolute local path or an fsspec URL.
    storage
        The options with which files are opened.
    overwrite
        Whether to replace existing files of the format.
    key
        Identifies what is written, in 32 hexadecimal digits. A write that ends early keeps its complete files, and the
        next one with this key continues after them: see `WriteFile.finished`. None to begin from the start.
    """

    operation: str
    form: WritableFormat
    path: str
    storage: Storage
    overwrite: bool
    key: str | None = None

    def write(self, spec: ElementSpec, calls: Callable[[WriteFile], Iterable[Written]]) -> list[str]:
        """Write the dataset.

        Parameters
        ----------
        spec
            The spec of the elements.
        calls
            Runs ``write`` on all elements, in several calls, and returns the outcomes of the calls in order, with
            ``write.finished`` before them.

        Returns
        -------
        list of str
            The paths of the files, in the order of the elements.

        Raises
        ------
        ArgumentError
            The format cannot hold the elements, or files of the format exist already.
        FileError
            The files cannot be written; none of them is left then.
        """
        with _errors_of(self.operation):
            self.form.check(spec)
        check_writable(self.path)
        old, before = self._there()
        fs, root = self._located
        is_new = not fs.isdir(root)
        waiting = f".{self.operation}-{self.key or uuid.uuid4().hex}.tmp"
        try:
            with unwritable(self.path):
                fs.makedirs(f"{root}/{waiting}", exist_ok=True)
                finished = () if self.key is None else finished_parts(fs, f"{root}/{waiting}")
            write = WriteFile(self.form, f"{self.path}/{waiting}", self.storage, finished, self.key is not None)
            written = list(calls(write)) or [write(0, no_rows(spec))]
            with unwritable(self.path):
                finals = self._named(f"{root}/{waiting}", [part.name for part in written], old, before)
        except BaseException:
            if self.key is None:
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

    def _there(self) -> tuple[dict[str, int], WriteManifest | None]:
        # The files to be replaced with their sizes, and the existing manifest.
        fs, root = self._located
        with unwritable(self.path):
            fs.invalidate_cache(root)
            if fs.isfile(root):
                raise ArgumentError(f"{self.operation}: {self.path} is a file; give a directory")
            content = fs.cat_file(self._manifest) if fs.isfile(self._manifest) else None
            sizes = self._found()
        before = None if content is None else WriteManifest.from_bytes(content, self._manifest)
        ignored = () if before is None else before.ignored
        old = {name: size for name, size in sorted(sizes.items()) if name not in ignored}
        if old and not self.overwrite:
            raise ArgumentError(
                f"{self.operation}: {self.path} has {next(iter(old))!r} already ({len(old)} such files in all); give "
                "another directory, or overwrite=True to replace them once the new ones are complete"
            )
        below = next((name for name in old if "/" in name), None)
        if below is not None:
            # Readers of the directory would take these files for new ones, and ``overwrite`` does not cover them.
            raise ArgumentError(
                f"{self.operation}: {self.path} has {below!r} in a directory below it, which overwrite=True keeps; "
                "remove it first, or give another directory"
            )
        return old, before

    def _found(self) -> dict[str, int]:
        # The files of the format that a reader would find without a manifest, and their sizes.
        fs, root = self._located
        if not is_remote(self.path):
            entries = {path: {"size": os.stat(path).st_size} for path in files_below(root) if os.path.exists(path)}
        else:
            entries = fs.find(root, detail=True) if fs.isdir(root) else {}
        names = {str(path)[len(root) + 1 :]: int(info.get("size") or 0) for path, info in entries.items()}
        return {
            name: size
            for name, size in names.items()
            if has_suffix(name, self.form.suffixes) and not any(map(is_hidden, name.split("/")))
        }

    def _named(
        self, waiting: str, names: Sequence[str], old: Mapping[str, int], before: WriteManifest | None
    ) -> list[str]:
        # The dataset is the old one until the second manifest is written.
        fs, root = self._located
        sizes = self._sizes(waiting, names)
        finals = self._names(len(names), old)
        leftover = () if before is None else before.ignored
        unfinished = WriteManifest(old, tuple({*leftover, *finals})).to_bytes()
        targets, renamed = [f"{root}/{final}" for final in finals], list[str]()
        try:
            put(fs, self._manifest, unfinished)
            for name in leftover:
                if fs.isfile(f"{root}/{name}"):
                    fs.rm_file(f"{root}/{name}")
            for name, target in zip(names, targets, strict=True):
                if fs.exists(target):
                    raise FileError(
                        f"{target}: another program created it during this write; write to another directory"
                    )
                rename(fs, f"{waiting}/{name}", target)
                renamed.append(target)
            put(fs, self._manifest, WriteManifest(dict(zip(finals, sizes, strict=True)), tuple(old)).to_bytes())
        except BaseException:
            # If that fails, the unfinished manifest excludes the remaining files from the dataset.
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
                f"{self.path}: this process does not see the files that the workers wrote; give a directory that "
                "all of them share"
            )
        return [sizes[name] for name in names]

    def _names(self, number: int, old: Mapping[str, int]) -> list[str]:
        # Avoid the names of the files to be replaced, which stay until the new ones are listed.
        num_digits = max(5, len(str(number - 1)))
        numbers = [f"part-{place:0{num_digits}d}" for place in range(number)]
        versions = chain([""], (f"-{version}" for version in count(1)))
        candidates = ([f"{start}{version}{self.form.suffixes[0]}" for start in numbers] for version in versions)
        return next(names for names in candidates if old.keys().isdisjoint(names))

    def _clean(self, waiting: str, old: Sequence[str]) -> None:
        # Best effort, also for files of killed processes: files that remain are hidden, or not in the manifest.
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
    """A function object that writes the elements of each call to a store, as the chunk of the call's number.

    Parameters
    ----------
    store
        The store that is being written.
    finished
        The first chunks, if a killed write has left them: ``number`` counts from there on.
    done
        The directory for an empty file for each complete chunk, by which a later write finds it; None without them.
    """

    store: UnfinishedStore
    finished: tuple[Written, ...] = ()
    done: str | None = None

    def __call__(self, number: int, rows: Rows) -> Written:
        number += len(self.finished)
        self.store.write(number, rows)
        name = done_name(number, len(rows), rows.nbytes)
        if self.done is not None:
            with unwritable(self.store.path):
                fs, directory = self.store.storage.located(self.done)
                fs.pipe_file(f"{directory}/{name}", b"")
        return Written(name, len(rows), rows.nbytes)


@dataclass(frozen=True)
class ZarrWriter:
    """The writer of a dataset to a Zarr store.

    Parameters
    ----------
    operation
        The name of the function in error messages.
    path
        An absolute local path or an fsspec URL.
    chunk_rows
        The number of elements in each call but the last.
    storage
        The options with which the store is opened.
    overwrite
        Whether to replace an existing store.
    key
        As for `DirectoryWriter`.
    """

    operation: str
    path: str
    chunk_rows: int
    storage: Storage
    overwrite: bool
    key: str | None = None

    def write(self, spec: ElementSpec, calls: Callable[[WriteChunk], Iterable[Written]]) -> list[str]:
        """Write the dataset; parameters, results and errors are those of `DirectoryWriter.write`."""
        with _errors_of(self.operation):
            check_store(spec)
        check_writable(self.path)
        fs, root = self.storage.located(self.path)
        root = root.rstrip("/")
        with unwritable(self.path):
            fs.invalidate_cache(root)
            is_replaced = fs.exists(pointer_to(root))
            is_there = fs.exists(root)
        store = unfinished_store(self.path, spec, self.chunk_rows, self.storage, self.key)
        place = current(fs, root)
        # An earlier write with this key was killed when its store was complete, but not yet at the final path.
        is_complete = place == self.storage.located(store.temporary)[1]
        if (is_there or is_replaced) and not is_complete:
            self._check_store(fs, root if is_there and not is_replaced else place)
        write = WriteChunk(store) if self.key is None else self._continued(store, self.key, is_complete)
        try:
            if not write.finished and not is_complete:
                if is_replaced and place == root:
                    # Remove a pointer that a killed process left to the path that this store may get.
                    fs.rm_file(pointer_to(root))
                store.create(overwrite=is_there or is_replaced)
            parts = list(calls(write))
            if write.done is not None:
                self._check_parts(write.done, parts)
            store.finish(sum(part.num_rows for part in parts), overwrite=is_there or is_replaced)
        except BaseException:
            if self.key is None:
                with suppress(FileError):
                    store.abandon()
            raise
        return [self.path]

    def _continued(self, store: UnfinishedStore, key: str, is_complete: bool) -> WriteChunk:
        # Go on after the complete chunks of an earlier write, or remove what it left.
        done = temporary_beside(store.path, uuid.uuid5(uuid.UUID(key), "done").hex)
        fs, directory = self.storage.located(done)
        _, temporary = self.storage.located(store.temporary)
        with unwritable(self.path):
            finished = finished_parts(fs, directory)
            if is_complete or (finished and is_store(fs, temporary)):
                return WriteChunk(store, finished, done)
            # Remove in this order, as files for chunks may exist only while their store does.
            for leftover in (directory, temporary):
                if fs.exists(leftover):
                    fs.rm(leftover, recursive=True)
            fs.makedirs(directory, exist_ok=True)
        return WriteChunk(store, (), done)

    def _check_parts(self, done: str, parts: Sequence[Written]) -> None:
        # Another write with this key that begins meanwhile may remove the first chunks: Zarr reads those as zeros.
        fs, directory = self.storage.located(done)
        fs.invalidate_cache(directory)
        with unwritable(self.path):
            names = {str(entry).rpartition("/")[2] for entry in fs.ls(directory, detail=False)} if parts else set()
        if not names.issuperset(part.name for part in parts):
            raise FileError(
                f"{self.path}: another process writes the same rows to it, and has removed some of those that this one "
                "wrote; let only one write, and begin again when it is over"
            )

    def _check_store(self, fs: Any, root: str) -> None:
        if not self.overwrite:
            raise ArgumentError(
                f"{self.operation}: {self.path} exists already; give another path, or overwrite=True to replace it "
                "once the new one is complete"
            )
        # Only a store may be removed, not any other directory.
        if not is_store(fs, root):
            raise ArgumentError(
                f"{self.operation}: {self.path} is not a Zarr store, and overwrite=True replaces only those; give "
                "another path"
            )


def compression_to_write(operation: str, name: str | None) -> str | None:
    """Return the compression of a user's name for it, for files to be written.

    Raises
    ------
    ArgumentError
        The name is unknown.
    """
    with _errors_of(operation):
        compression = compression_of(name)
        if compression == "infer":
            raise ArgumentError(
                "compression is 'infer', but there is no file yet to infer it from; give a name, or None"
            )
    return compression


def npy_to_write(operation: str, spec: ElementSpec) -> WritableFormat:
    """Return the format of NumPy files for elements of a spec.

    Raises
    ------
    ArgumentError
        The elements cannot be written so; the message names the leaf and what to do.
    """
    with _errors_of(operation):
        return npy_writer(spec)


def rows_of_chunk(spec: ElementSpec, num_rows: int) -> int:
    """Return the default number of rows in a chunk: the rows of a call, or all rows if these are known to be fewer."""
    row_bytes = sum(prod(size or 1 for size in leaf.shape) * leaf.dtype.itemsize for leaf in spec.leaves)
    most = in_bytes("bundle-bytes") // max(row_bytes, 1)
    return max(1, min(most, num_rows) if num_rows >= 0 else most)


@contextmanager
def _errors_of(operation: str) -> Iterator[None]:
    # Put the operation's name before the messages of argument errors.
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
