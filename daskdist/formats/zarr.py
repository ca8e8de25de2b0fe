"""Zarr stores, v2 and v3, read by zarr-python; splits end at the ends of chunks, or of shards."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from daskdist.core.block import Block, Rows
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import FIXED_SIZE_KINDS, LONE, TEXT
from daskdist.errors import ArgumentError, FileError
from daskdist.formats import cf_attributes
from daskdist.formats.stored_arrays import (
    LONE_NAME,
    RangeReader,
    StoredArray,
    StoredArrays,
    by_chunks,
    check_alike,
    check_rows,
    check_writable,
    chosen,
    columns_of,
    names_in,
)
from daskdist.storage.atomic_file import put, temporary_beside
from daskdist.storage.failures import damage, failures
from daskdist.storage.filesystem import Paths, Storage, is_remote, local
from daskdist.storage.first_file import FirstFile
from daskdist.storage.hidden_files import is_hidden_from
from daskdist.storage.libraries import LazyModule
from daskdist.storage.replace_directory import current, pointed_from, pointer_to, replace_directory
from daskdist.storage.retries import retried

zarr: Final = LazyModule("zarr", "Zarr stores are read by zarr-python 3: pip install 'daskdist[zarr]'")
_ADVICE: Final = "convert it to numbers, times, text or bytes with map(...)"
# The ends of the names under which Zarr, and `atomic_file`, write a file in a local directory.
_UNFINISHED: Final = re.compile(r"\.[0-9a-f]{32}\.(partial|tmp)$")
# The length of an array while it is written, which no complete array has.
_OPEN_END: Final = 2**48
# The names of the metadata files of arrays in v3 and in v2.
_METADATA: Final = ("zarr.json", ".zarray")
# A filter that would let the store run arbitrary code.
_HOSTILE: Final = "pickle"


@dataclass(frozen=True, slots=True)
class ZarrSplit:
    """The rows of a store that a split reads.

    Parameters
    ----------
    path
        The path of the store.
    start, stop
        The range of rows.
    arrays
        The columns of the elements.
    stamps
        The version of each array when it was listed, to detect changes.
    """

    path: str
    start: int
    stop: int
    arrays: StoredArrays
    stamps: Mapping[str, str]


@dataclass(frozen=True)
class Zarr(RangeReader):
    """The reader, with its options.

    Parameters
    ----------
    arrays
        The arrays of a group and their structure: see `Columns.of`.
    storage
        The options of the file system.
    """

    arrays: Any = None
    storage: Storage = field(default_factory=Storage)

    name = "zarr"
    suffixes = (".zarr", ".zarr.zip")
    marks = (*_METADATA, ".zgroup")
    is_splittable = True

    def guess(self, path: str, head: bytes) -> bool:
        is_mark = path.rpartition("/")[2] in self.marks and head.lstrip().startswith(b"{")
        return is_mark or path.rstrip("/").lower().endswith(self.suffixes)

    def spec(self, path: str) -> ElementSpec:
        return self._found(path, None)[0].spec

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        arrays, stamps = self._found(path, first)
        check_alike(arrays, path, first)
        return arrays.splits(path, file, lambda start, stop: ZarrSplit(path, start, stop, arrays, stamps))

    def rows(self, part: ZarrSplit, label: str) -> Block:
        with self._opened(part.path) as store, damage(label):
            names = [stored.name for stored in part.arrays.stored]
            arrays = {name: self._array(store, name, part.path) for name in names}

            def rows(stored: StoredArray) -> Any:
                array, stamp = arrays[stored.name]
                if stamp != part.stamps[stored.name]:
                    raise FileError(f"{label}: the store was changed since it was listed; create the dataset again")
                key = part.path, stored.name, stamp

                def fetch(start: int, stop: int) -> Any:
                    return retried(_values, array, start, stop)

                return by_chunks(stored, part.start, part.stop, key, fetch)

            return part.arrays.block(rows, label)

    def _found(self, path: str, first: FirstFile | None) -> tuple[StoredArrays, dict[str, str]]:
        stamps: dict[str, str] = {}
        with self._opened(path) as store, damage(path, "not a Zarr store, or damaged"):
            try:
                node = retried(zarr.open, store, mode="r")
            except FileNotFoundError:
                raise FileError(f"{path}: not a Zarr store: it has neither a group nor an array") from None
            if isinstance(node, zarr.Array):
                columns = chosen(self.arrays, [LONE_NAME], path, first)
            else:
                columns = chosen(self.arrays, _names(node, self.arrays), path, first)

            attributes = {}

            def describe(name: str) -> StoredArray:
                array, stamps[name] = self._array(store, name, path)
                attributes[name] = cf_attributes.not_applied(_cf_attributes(array), array.dtype)
                return _stored(array, name, path)

            arrays = StoredArrays.of(columns, describe, path)
            if first is None:
                cf_attributes.warn(attributes, path, "open_zarr")
            return arrays, stamps

    def _array(self, store: Any, name: str, path: str) -> tuple[Any, str]:
        # Use the array's own metadata, as the group's consolidated metadata may be older.
        array = retried(zarr.open_array, store, path=name, mode="r")
        metadata = array.metadata.to_dict()
        metadata.pop("attributes", None)
        text = json.dumps(metadata, default=str, sort_keys=True)
        if _HOSTILE in text:
            raise FileError(f"{path}: array {name!r} is made of pickled Python objects, which are not supported")
        places = [] if is_remote(path) else [os.path.join(path, name, file) for file in _METADATA]
        times = [os.stat(place).st_mtime_ns for place in places if os.path.exists(place)]
        return array, hashlib.blake2b(f"{text} {times}".encode(), digest_size=16).hexdigest()

    @contextmanager
    def _opened(self, path: str) -> Iterator[Any]:
        with damage(path, "cannot be opened as a Zarr store"):
            if is_remote(path):
                store = _remote_store(path, self.storage, read_only=True)
            elif os.path.isdir(path):
                store = zarr.storage.LocalStore(path, read_only=True)
            else:
                os.stat(path)
                store = zarr.storage.ZipStore(path, mode="r")
        try:
            yield store
        finally:
            # A file that is no archive was never opened, which its store does not expect when it is closed.
            with suppress(AttributeError):
                store.close()


def stores(paths: Paths, storage: Storage) -> tuple[str, ...]:
    """List the stores, directories or archives, that paths and globs match, sorted for each pattern.

    Raises
    ------
    FileError
        A pattern matches no store.
    ArgumentError
        An item is not a path.
    """
    several: Any = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    if not isinstance(several, Sequence):
        raise ArgumentError(f"expected a path or URL, a glob, or a list of them, got {type(paths).__name__}")
    if not several:
        raise FileError("the list of stores is empty; give a path or URL, a glob, or a list of them")
    for path in several:
        if not isinstance(path, (str, os.PathLike)):
            raise ArgumentError(f"the list of stores contains {path!r:.80}; give paths, URLs and globs")
    store_paths: list[str] = []
    for path in map(os.fspath, several):
        matches = _stores_of(path, storage)
        if not matches:
            raise FileError(f"no such store: {path!r}")
        store_paths.extend(matches)
    return tuple(store_paths)


def _stores_of(path: str, storage: Storage) -> list[str]:
    # Return the paths of the stores that a path or glob matches; a store that is being replaced may be beside its path.
    remote = is_remote(path)
    whole = path if remote else local(path)
    fs, inner = storage.located(whole)
    inner = str(fs._strip_protocol(inner)).rstrip("/") if remote else inner
    chained = "".join(path.partition("::")[1:]) if remote else ""
    with failures(path, "cannot be looked up"):
        if (remote or not os.path.exists(whole)) and glob.has_magic(inner):
            matches = [name.rstrip("/") for name in fs.glob(inner)]
            matches += [pointed_from(name) for name in fs.glob(pointer_to(inner))]
            matches = sorted({name for name in matches if not is_hidden_from(name, inner)})
            return [_url(fs, current(fs, name), remote) + chained for name in matches]
        place = current(fs, inner)
        if place != inner:
            return [_url(fs, place, remote) + chained]
    return [whole] if remote or os.path.exists(whole) else []


def _url(fs: Any, path: str, remote: bool) -> str:
    return str(fs.unstrip_protocol(path)) if remote else path


def _names(group: Any, asked: Any) -> list[str]:
    # The arrays of the group, and the requested arrays of its subgroups.
    names = sorted(group.array_keys())
    if asked is None:
        return names
    below = [name for name in names_in(asked) if name.strip("/") == name and "/" in name]
    return [*names, *(name for name in below if isinstance(group.get(name), zarr.Array))]


def _stored(array: Any, name: str, path: str) -> StoredArray:
    check_rows(name, array.shape, path)
    chunk_rows = (array.shards or array.chunks)[0]
    if array.dtype == TEXT or (array.dtype == object and _is_bytes(array)):
        row = ElementSpec(LONE, (TensorSpec(array.shape[1:], array.dtype),))
        row_bytes = int(np.prod(array.shape[1:])) * array.dtype.itemsize
        return StoredArray(name, array.shape[0], row, row_bytes, max(chunk_rows, 1))
    return StoredArray.of(name, array.shape, array.dtype, path, chunk_rows)


def _cf_attributes(array: Any) -> dict[str, Any]:
    # xarray writes the fill value of version 2 as that of the chunks.
    attributes = dict(array.attrs)
    is_of_xarray = "_ARRAY_DIMENSIONS" in attributes and array.fill_value is not None
    return {"_FillValue": array.fill_value, **attributes} if is_of_xarray else attributes


def _is_bytes(array: Any) -> bool:
    metadata = array.metadata
    kind = metadata.data_type if metadata.zarr_format == 3 else metadata.dtype
    return isinstance(kind, zarr.dtype.VariableLengthBytes)


def _values(array: Any, start: int, stop: int) -> Any:
    values = np.asarray(array[start:stop])
    if len(values) != stop - start:
        raise EOFError(f"expected rows {start} to {stop}, but got {len(values)} rows")
    return values


# --- writing ---


@dataclass(frozen=True)
class UnfinishedStore:
    """A store that is being written, under a name that no reader looks for.

    Parameters
    ----------
    path
        Its final path.
    temporary
        Its current path.
    spec
        The spec of an element.
    names
        The names of its arrays, one for each leaf; ``""`` for a store of one array.
    chunk_rows
        The number of rows in a chunk, and so in a part.
    storage
        The options of the file system.
    """

    path: str
    temporary: str
    spec: ElementSpec
    names: tuple[str, ...]
    chunk_rows: int
    storage: Storage

    def create(self, *, overwrite: bool = False) -> None:
        """Create the arrays.

        Parameters
        ----------
        overwrite
            Whether the final path may exist; that store remains until this one is finished.

        Raises
        ------
        FileError
            The final path exists, or the store cannot be written.
        """
        with failures(self.path, "cannot be written"):
            if not overwrite:
                self._check_free()
            with self._opened() as store:
                if self.names != (LONE_NAME,):
                    zarr.create_group(store, zarr_format=3)
                for name, leaf in zip(self.names, self.spec.leaves, strict=True):
                    shape = tuple(size or 0 for size in leaf.shape)
                    zarr.create_array(
                        store,
                        name=name or None,
                        shape=(_OPEN_END, *shape),
                        chunks=(self.chunk_rows, *(max(size, 1) for size in shape)),
                        dtype="variable_length_bytes" if leaf.dtype == object else leaf.dtype,
                        zarr_format=3,
                    )

    def write(self, number: int, rows: Rows) -> None:
        """Write the elements from ``number * chunk_rows`` on; several parts may be written at the same time.

        Raises
        ------
        ArgumentError
            There are more elements, or they differ in shape or dtype.
        FileError
            The store cannot be written to.
        """
        if len(rows) > self.chunk_rows:
            raise ArgumentError(f"part {number} of {self.path} has {len(rows)} rows, but a chunk has {self.chunk_rows}")
        start = number * self.chunk_rows
        leaves = columns_of(rows)
        with failures(self.path, "cannot be written"), self._opened() as store:
            for name, leaf in zip(self.names, leaves, strict=True):
                array = zarr.open_array(store, path=name, mode="r+")
                # A missing chunk was lost; it is not one of zeros.
                array = array.with_config({"write_empty_chunks": True})
                array[start : start + len(leaf)] = _fitting(leaf, array, f"part {number} of {self.path}", name)

    def finish(self, num_rows: int, *, overwrite: bool = False) -> None:
        """Set the number of rows, and move the store to its final path.

        Raises
        ------
        FileError
            The final path exists, or the store cannot be written to.
        """
        fs, inner = self.storage.located(self.temporary)
        final = self.storage.located(self.path)[1].rstrip("/")
        with failures(self.path, "cannot be written"):
            if not is_remote(self.temporary):
                # Processes that were killed while they wrote a file have left it under its temporary name.
                for file in fs.find(inner):
                    if _UNFINISHED.search(file):
                        fs.rm_file(file)
            for name in self.names:
                place = f"{inner}/{name}/zarr.json" if name else f"{inner}/zarr.json"
                metadata = json.loads(fs.cat_file(place))
                metadata["shape"][0] = num_rows
                put(fs, place, json.dumps(metadata, indent=2).encode())
            if self.names != (LONE_NAME,):
                with self._opened() as store, warnings.catch_warnings():
                    # Zarr warns that some readers ignore consolidated metadata; these read the metadata of each array.
                    warnings.simplefilter("ignore")
                    zarr.consolidate_metadata(store)
            if not overwrite:
                self._check_free()
            replace_directory(fs, inner, final, put)

    def _check_free(self) -> None:
        fs, final = self.storage.located(self.path)
        if fs.exists(final) or fs.exists(pointer_to(final)):
            raise FileError(f"{self.path} exists already; remove it, or write to another path")

    def abandon(self) -> None:
        """Remove the unfinished store, unless it already replaced the old one."""
        fs, inner = self.storage.located(self.temporary)
        final = self.storage.located(self.path)[1].rstrip("/")
        with failures(self.path, "cannot be removed"):
            if fs.exists(inner) and current(fs, final) != inner:
                fs.rm(inner, recursive=True)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        if is_remote(self.temporary):
            store = _remote_store(self.temporary, self.storage, read_only=False)
        else:
            store = zarr.storage.LocalStore(self.temporary)
        try:
            yield store
        finally:
            store.close()


def _fitting(leaf: Any, array: Any, label: str, name: str) -> Any:
    # Check rows before they are written: Zarr would silently cast or truncate other dtypes, and broadcast other shapes.
    label = f"{label}: array {name!r}" if name else f"{label}: its array"
    held = array.dtype
    if held == TEXT and leaf.dtype.kind == "U":
        leaf = leaf.astype(held)
    leaf_dtype = leaf.dtype
    fits = leaf_dtype == held or (leaf_dtype.kind in "biufcSUT" and np.can_cast(leaf_dtype, held, "safe"))
    if leaf_dtype.kind == held.kind and leaf_dtype.kind in "SU":
        # Text may fit although its dtype allows for longer text.
        fits = bool((leaf.astype(held) == leaf).all())
    if not fits or leaf.shape[1:] != array.shape[1:]:
        raise ArgumentError(
            f"{label} is {held}{list(array.shape[1:])} in element_spec, but elements are "
            f"{leaf_dtype}{list(leaf.shape[1:])}; convert all of them to one with map(...)"
        )
    if leaf_dtype.kind != "O":
        return leaf
    invalid = [value for value in leaf.ravel() if not isinstance(value, bytes)]
    if invalid:
        raise ArgumentError(f"{label} holds bytes, but a value is {invalid[0]!r:.80}; give bytes or text")
    # Zarr's codec needs a writable array.
    return leaf.copy()


def check_store(spec: ElementSpec) -> tuple[str, ...]:
    """Return the names of the arrays for elements, ``""`` for a single one.

    Raises
    ------
    ArgumentError
        The elements cannot be written; the message names the leaf and a remedy.
    """
    return tuple(check_writable(spec, "Zarr", FIXED_SIZE_KINDS + "TO", _ADVICE))


def unfinished_store(
    path: str, spec: ElementSpec, chunk_rows: int, storage: Storage | None = None, key: str | None = None
) -> UnfinishedStore:
    """Return a v3 store to be created: one array for a single leaf, otherwise a group of one array for each leaf.

    Parameters
    ----------
    path
        The final local path or fsspec URL.
    spec
        The spec of an element.
    chunk_rows
        The number of rows in a chunk, which spans all other axes.
    storage
        The options of the file system.
    key
        Identifies what is written, in 32 hexadecimal digits: an earlier write with this key may have created the store.
        None for a new one.

    Raises
    ------
    ArgumentError
        Elements of this spec cannot be written.
    """
    path = path.rstrip("/") if is_remote(path) else local(path)
    return UnfinishedStore(path, temporary_beside(path, key), spec, check_store(spec), chunk_rows, storage or Storage())


def _remote_store(url: str, storage: Storage, *, read_only: bool) -> Any:
    return zarr.storage.FsspecStore.from_url(url, dict(storage.options or {}), read_only)
