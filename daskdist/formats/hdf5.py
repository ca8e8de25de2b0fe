"""HDF5 files, read by h5py; splits end at the ends of chunks.

The library reads in one thread at a time. It trusts files too much: links out of a file, and impossible sizes by which
it would allocate memory, are refused here first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import prod
from typing import Any, Final

import numpy as np

from daskdist.core.block import Block
from daskdist.core.cardinality import counted
from daskdist.core.primitive import Split
from daskdist.core.ragged import Ragged
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import LONE, TEXT
from daskdist.errors import DamagedFileError, FileError
from daskdist.formats import cf_attributes
from daskdist.formats.stored_arrays import (
    RangeReader,
    StoredArray,
    StoredArrays,
    by_chunks,
    check_alike,
    check_rows,
    chosen,
    names_in,
    native,
)
from daskdist.storage.failures import damage
from daskdist.storage.filesystem import Storage, Version, is_remote, local
from daskdist.storage.first_file import FirstFile
from daskdist.storage.libraries import LazyModule
from daskdist.storage.mapped_arrays import mapped_array

h5py: Final = LazyModule("h5py", "HDF5 files need h5py: pip install 'daskdist[hdf5]'")
_MAGIC: Final = b"\x89HDF\r\n\x1a\n"
_BYTES: Final = np.dtype(object)
# The depth to which groups, and links to links, are followed, as a group in a damaged file may contain itself.
_MOST_LEVELS: Final = 32
# The usual size of a value of variable length in a chunk.
_REFERENCE_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class MappedRange:
    """The bytes of an uncompressed, contiguous array in its file."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hdf5Split:
    """The rows of a file that a split reads.

    Parameters
    ----------
    version
        The file, as it was listed.
    start, stop
        The range of its rows.
    arrays
        The arrays as elements.
    places
        The position of each array, by name; None for arrays that the library reads.
    """

    version: Version
    start: int
    stop: int
    arrays: StoredArrays
    places: Mapping[str, MappedRange | None]


@dataclass(frozen=True)
class Hdf5(RangeReader):
    """The reader, with its options.

    Parameters
    ----------
    arrays
        The arrays, by their paths in the file, and their structure; see `Columns.of`.
    storage
        Opens the files.
    """

    arrays: Any = None
    storage: Storage = field(default_factory=Storage)

    name = "hdf5"
    suffixes = (".h5", ".hdf5", ".hdf")
    is_splittable = True

    def guess(self, path: str, head: bytes) -> bool:
        return head.startswith(_MAGIC)

    def spec(self, path: str) -> ElementSpec:
        return self._found(path, None)[1].spec

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        version, arrays, places = self._found(path, first)
        check_alike(arrays, path, first)
        return arrays.splits(path, file, lambda start, stop: Hdf5Split(version, start, stop, arrays, places))

    def rows(self, part: Hdf5Split, label: str) -> Block:
        self.storage.check_unchanged(part.version, label)
        with ExitStack() as opened, damage(label):

            @cache
            def file() -> Any:
                return opened.enter_context(self._opened(part.version.path))

            def raw(start: int, stop: int) -> bytes:
                return self.storage.read(part.version.path, start, stop)

            def rows(stored: StoredArray) -> Any:
                key = part.version, stored.name
                mapped = _mapped(part.version.path, part.places[stored.name])
                if mapped is not None:
                    return mapped[part.start : part.stop]
                dataset = file()[stored.name]

                def fetch(start: int, stop: int) -> Any:
                    return _values(dataset, start, stop, part.version.num_bytes, raw)

                return by_chunks(stored, part.start, part.stop, key, fetch)

            return part.arrays.block(rows, label)

    def _found(self, path: str, first: FirstFile | None) -> tuple[Version, StoredArrays, dict[str, MappedRange | None]]:
        version = self.storage.version(path)
        with self._opened(path) as file, damage(path):
            # The paths of the arrays, and the problems of links that lead out of the file or nowhere.
            names, refused = list[str](), dict[str, str]()
            _add_names(file, file, "", (), names, refused)
            asked = self.arrays
            for name in [name for name in refused if "/" not in name] if asked is None else names_in(asked):
                reason = next((refused[link] for link in refused if f"{name}/".startswith(f"{link}/")), None)
                if reason is not None:
                    advice = "name the arrays to read without it" if asked is None else "leave it out"
                    raise FileError(f"{path}: {name!r} {reason}; {advice}")
            if asked is None:
                asked = [name for name in names if "/" not in name]
                if names and not asked:
                    raise FileError(
                        f"{path}: its arrays are all in groups; name some: {', '.join(map(repr, names[:20]))}"
                    )
            columns = chosen(asked if names else None, names, path, first)
            arrays = StoredArrays.of(columns, lambda name: _stored(file[name], name, path, version.num_bytes), path)
            if first is None:
                names = [stored.name for stored in arrays.stored]
                attributes = {name: cf_attributes.not_applied(file[name].attrs, file[name].dtype) for name in names}
                cf_attributes.warn(attributes, path, "open_dataset")
            places = {name: None if is_remote(path) else _place(file[name], file, version) for name in columns.names}
            return version, arrays, places

    @contextmanager
    def _opened(self, path: str) -> Iterator[Any]:
        version = self.storage.version(path)
        with damage(path, f"not an HDF5 file, or a damaged one, of {counted(version.num_bytes, 'byte')}"):
            if is_remote(path):
                with self.storage.open(path) as stream, h5py.File(stream, "r") as file:
                    yield file
            else:
                # Without a lock, as nothing is written and not all file systems support locks.
                with h5py.File(path, "r", locking=False) as file:
                    yield file


def _add_names(
    file: Any, group: Any, prefix: str, above: tuple[int, ...], names: list[str], refused: dict[str, str]
) -> None:
    above = (*above, h5py.h5o.get_info(group.id).addr)
    for name in group:
        is_link = not isinstance(group.get(name, getlink=True), h5py.HardLink)
        if is_link and (reason := _why_not_followed(file, f"{group.name.rstrip('/')}/{name}")):
            refused[prefix + name] = reason
            continue
        kind = group.get(name, getclass=True)
        if kind is h5py.Dataset:
            names.append(prefix + name)
        elif kind is h5py.Group and len(above) < _MOST_LEVELS:
            below = group[name]
            # A group may contain itself, or a link to a group around it.
            if h5py.h5o.get_info(below.id).addr not in above:
                _add_names(file, below, f"{prefix}{name}/", above, names, refused)


def _why_not_followed(file: Any, path: str) -> str:
    # Return the reason why a path must not be followed, checked link by link before the library follows it; else empty.
    todo, place, num_links = path.split("/"), file["/"], 0
    while todo:
        name = todo.pop(0)
        if name in ("", "."):
            continue
        link = place.get(name, getlink=True) if isinstance(place, h5py.Group) else None
        if link is None:
            return "is a link that leads nowhere in the file"
        if isinstance(link, h5py.ExternalLink):
            return f"is, or leads to, a link to another file, {link.filename!r}, which is refused"
        if isinstance(link, h5py.SoftLink):
            num_links += 1
            if num_links > _MOST_LEVELS:
                return f"is a chain of more than {_MOST_LEVELS} links"
            todo = link.path.split("/") + todo
            place = file["/"] if link.path.startswith("/") else place
        else:
            place = place[name]
    return ""


def _stored(dataset: Any, name: str, path: str, num_bytes: int) -> StoredArray:
    if dataset.shape is None:
        raise FileError(f"{path}: array {name!r} has no shape and so no rows")
    if dataset.external or dataset.is_virtual:
        raise FileError(f"{path}: the values of array {name!r} are in other files; read those")
    shape, where = dataset.shape, f"{path}: array {name!r}"
    check_rows(name, shape, path)
    chunk_rows = dataset.chunks[0] if dataset.chunks else 1
    text = h5py.check_string_dtype(dataset.dtype)
    base = None if text else h5py.check_vlen_dtype(dataset.dtype)
    if text is not None and text.length is None:
        row = TensorSpec(shape[1:], TEXT if text.encoding == "utf-8" else _BYTES)
        return StoredArray(name, shape[0], ElementSpec(LONE, (row,)), prod(shape[1:]) * row.dtype.itemsize, chunk_rows)
    if base is not None:
        # For another byte order the library returns unswapped bytes.
        if len(shape) > 1 or base.kind not in "biufc" or not base.isnative:
            raise FileError(f"{where} holds lists of {base} in {len(shape)} axes, which is not supported; leave it out")
        row = TensorSpec((None,), native(base))
        return StoredArray(name, shape[0], ElementSpec(LONE, (row,)), 2 * _REFERENCE_BYTES, chunk_rows)
    taken = dataset.id.get_storage_size()
    if dataset.chunks is None and taken and (taken < dataset.nbytes or taken > num_bytes):
        raise DamagedFileError(f"{where} of shape {shape} takes {dataset.nbytes} bytes, but has {taken} of {num_bytes}")
    return StoredArray.of(name, shape, dataset.dtype, path, chunk_rows)


def _mapped(path: str, place: MappedRange | None) -> Any:
    # Return None if it must be read.
    if place is None:
        return None
    mapped = mapped_array(local(path), place.dtype, place.offset, place.shape)
    return mapped if mapped.flags.aligned else None


def _place(dataset: Any, file: Any, version: Version) -> MappedRange | None:
    # Return the position of an array that can be mapped into memory; None if it must be read.
    offset = dataset.id.get_offset() if dataset.chunks is None else None
    if offset is None or file.userblock_size or dataset.dtype.kind not in "iufc" or not dataset.nbytes:
        return None
    is_plain = dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype))
    if not is_plain or offset + dataset.nbytes > version.num_bytes:
        return None
    return MappedRange(offset, dataset.dtype, dataset.shape)


def _values(dataset: Any, start: int, stop: int, num_bytes: int, read: Callable[[int, int], bytes]) -> Any:
    text = h5py.check_string_dtype(dataset.dtype)
    base = None if text else h5py.check_vlen_dtype(dataset.dtype)
    _check_chunks(dataset, start, stop)
    if base is None and (text is None or text.length is not None):
        return _decoded(dataset, start, stop)
    _check_lengths(dataset, start, stop, num_bytes // (1 if base is None else max(base.itemsize, 1)), read)
    values = _decoded(dataset, start, stop)
    if base is not None:
        return Ragged.of([np.asarray(value, base) for value in values])
    if text.encoding != "utf-8":
        return values
    try:
        return np.array([value.decode() for value in values.ravel()], TEXT).reshape(values.shape)
    except UnicodeDecodeError as error:
        raise ValueError(f"array {dataset.name!r} has text that is not UTF-8: {error}") from None


def _decoded(dataset: Any, start: int, stop: int) -> Any:
    try:
        return dataset[start:stop]
    except OSError as error:
        known = dataset.id.get_create_plist()
        numbers = [known.get_filter(place)[0] for place in range(known.get_nfilters())]
        lacking = [number for number in numbers if not h5py.h5z.filter_avail(number)]
        if not lacking:
            raise
        # The library only says where it looked for a plugin.
        raise NotImplementedError(
            f"array {dataset.name!r} has the compression or filter {lacking[0]}, which is not installed: "
            "import hdf5plugin, in all processes that read"
        ) from error


def _check_chunks(dataset: Any, start: int, stop: int) -> None:
    # The library reads a chunk of the size in its index into a buffer of the expected size.
    kind = dataset.id.get_type()
    value_bytes = _reference(dataset).itemsize if dataset.dtype == object else kind.get_size()
    for place in _unfiltered_chunks(dataset, start, stop):
        expected, actual = prod(dataset.chunks) * value_bytes, _chunk_size(dataset, place)
        if actual not in (None, expected):
            raise ValueError(f"a chunk of array {dataset.name!r} has {actual} bytes by its index, not {expected}")


def _unfiltered_chunks(dataset: Any, start: int, stop: int) -> Iterator[tuple[int, ...]]:
    if dataset.chunks is None or dataset.id.get_create_plist().get_nfilters():
        return
    axes = [range(0, length, chunk) for length, chunk in zip(dataset.shape, dataset.chunks, strict=True)]
    axes[0] = range(start - start % dataset.chunks[0], stop, dataset.chunks[0])
    yield from product(*axes)


def _chunk_size(dataset: Any, place: tuple[int, ...]) -> int | None:
    # Return None if the chunk was never written.
    info = dataset.id.get_chunk_info_by_coord(place)
    return None if info.byte_offset is None else int(info.size)


def _check_lengths(dataset: Any, start: int, stop: int, most: int, read: Callable[[int, int], bytes]) -> None:
    # The library allocates memory by the stated length of a value before it reads it: a flipped bit may take gigabytes.
    kind = _reference(dataset)
    for data in _references(dataset, start, stop, read):
        lengths = np.frombuffer(data, kind, len(data) // kind.itemsize)["length"]
        if lengths.max(initial=0) > most:
            raise ValueError(
                f"a value of array {dataset.name!r} states the length {lengths.max()}, more than the file has"
            )


def _reference(dataset: Any) -> np.dtype[Any]:
    # A value of variable length in a chunk is its length and its position in the file, an address of the file's size.
    address_bytes, _ = dataset.file.id.get_create_plist().get_sizes()
    return np.dtype([("length", "<u4"), ("address", f"V{address_bytes}"), ("index", "<u4")])


def _references(dataset: Any, start: int, stop: int, read: Callable[[int, int], bytes]) -> Iterator[bytes]:
    # Compressed chunks, which few versions of the library allow here, detect most damage themselves.
    row = prod(dataset.shape[1:]) * _reference(dataset).itemsize
    if dataset.chunks is None:
        # The offset is None if the values are not written yet, or are stored in the header.
        offset = dataset.id.get_offset()
        if offset is not None:
            yield read(offset + start * row, offset + stop * row)
        return
    for place in _unfiltered_chunks(dataset, start, stop):
        if _chunk_size(dataset, place) is not None:
            yield dataset.id.read_direct_chunk(place)[1]
