"""State files: zip archives similar to ``.npz``, without any pickled objects.

A file has an uncompressed member ``0.npy``, ``1.npy``, ... for each array, and then ``checkpoint.json``:

=============  =========================================================================================
``format``     ``daskdist checkpoint``
``version``    1
``members``    for each ``.npy`` its length in bytes and its CRC-32
``states``     pairs of a name and its state
=============  =========================================================================================

A state is a JSON null, bool, number or string, or an object with one key:

=================================  =====================================================================
``dict``                           pairs of a key, which is text or a whole number, and its value
``list``, ``tuple``                the items
``array``, ``scalar``              the number of the member; a scalar is a NumPy scalar
``bytes``                          the number of a member of uint8
``text``                           for an array of variable-length text, the numbers of two members: the
                                   concatenated UTF-8, and the length in bytes of each text
``complex``                        a pair of numbers
=================================  =====================================================================
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import IO, Any, Final

import numpy as np

from daskdist.checkpoint.nests import where
from daskdist.core.json_codec import Path, nest_from_json, nest_to_json, typed
from daskdist.core.structure import FIXED_SIZE_KINDS, TEXT
from daskdist.errors import ArgumentError, FileError
from daskdist.formats.npy import header_of
from daskdist.storage.atomic_file import atomic_file, remove_temporaries
from daskdist.storage.failures import damage, failures
from daskdist.storage.filesystem import Storage
from daskdist.storage.http_files import check_writable
from daskdist.url_secrets import shown_cause

FORMAT: Final = "daskdist checkpoint"
VERSION: Final = 1
STRUCTURE: Final = "checkpoint.json"

_MAGIC: Final = b"PK\x03\x04"
# The largest ``checkpoint.json``: parsed JSON takes many times its size in memory.
_MOST_STRUCTURE_BYTES: Final = 2**28
# The longest description of a dtype: NumPy refuses to read longer headers.
_MOST_FIELDS_CHARS: Final = 9_000
_PIECE_BYTES: Final = 2**24


def write_states(
    path: str, states: Mapping[str, Any], storage: Storage, check: Callable[[], None] = lambda: None
) -> None:
    """Write states to a file, which replaces an existing one once it is complete.

    Parameters
    ----------
    path
        A local path or an fsspec URL.
    states
        States by name, each a nest as returned by `as_numpy`.
    storage
        The storage that opens the file.
    check
        Called before the file gets its name; it raises an error if the file is no longer wanted.

    Raises
    ------
    ArgumentError
        An array has a dtype that cannot be saved, or the path is a directory.
    FileError
        The file cannot be written; an existing one is unchanged.
    """
    check_writable(path)
    arrays: list[Any] = []
    nodes = [[name, _encode(name, state, arrays)] for name, state in states.items()]
    fs, inner = storage.located(path)
    with failures(path, "cannot be written", (OSError,)):
        if path.endswith(("/", os.sep)) or fs.isdir(inner):
            raise ArgumentError(f"{path} is a directory; give the path of a file")
    with atomic_file(fs, inner, check) as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            members = [_write_member(archive, number, array) for number, array in enumerate(arrays)]
            content = {"format": FORMAT, "version": VERSION, "members": members, "states": nodes}
            archive.writestr(zipfile.ZipInfo(STRUCTURE), _json(content))
        _sync(file)
    remove_temporaries(fs, inner)


def read_states(path: str, storage: Storage) -> dict[str, Any]:
    """Read the states of a file.

    Raises
    ------
    FileError
        The file is missing, not a checkpoint, damaged or truncated.
    """
    with _opened(path, storage) as file:
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(len(_MAGIC))
        if not head:
            raise FileError(f"{path}: no checkpoint: the file is empty")
        if head != _MAGIC[: len(head)]:
            raise FileError(f"{path}: no checkpoint: it begins with {head!r}, and checkpoints begin with {_MAGIC!r}")
        # A damaged archive may raise any exception, depending on where the damage is.
        with damage(path), zipfile.ZipFile(file) as archive:
            return _StateFileReader(path, archive, num_bytes).states()


@contextmanager
def _opened(path: str, storage: Storage) -> Iterator[IO[bytes]]:
    fs, inner = storage.located(path)
    try:
        file = fs.open(inner, "rb")
    except FileNotFoundError:
        raise FileError(f"{path}: there is no such file, on a disk that this process sees") from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error}") from shown_cause(error)
    with failures(path, "cannot be read", (OSError,)), file:
        yield file


# --- to files ---


def _encode(name: str, state: Any, arrays: list[Any]) -> Any:
    try:
        return nest_to_json(state, lambda leaf, path: _leaf_to_json(leaf, path, arrays))
    except ArgumentError as error:
        raise ArgumentError(f"{name!r}: {error}") from None


def _leaf_to_json(leaf: Any, path: Path, arrays: list[Any]) -> Any:
    # Return the JSON of a leaf, and append its arrays to ``arrays``.
    if isinstance(leaf, (np.ndarray, np.generic)):
        if leaf.dtype.kind == "T":
            return {"text": _text_added(leaf, path, arrays)}
        _check_dtype(leaf.dtype, path)
        return {"array" if isinstance(leaf, np.ndarray) else "scalar": _added(np.asarray(leaf), arrays)}
    if isinstance(leaf, bytes):
        return {"bytes": _added(np.frombuffer(leaf, np.uint8), arrays)}
    if isinstance(leaf, complex):
        return {"complex": [leaf.real, leaf.imag]}
    if isinstance(leaf, int) and type(leaf) not in (int, bool):
        return int(leaf)
    return leaf


def _added(array: Any, arrays: list[Any]) -> int:
    arrays.append(array)
    return len(arrays) - 1


def _text_added(array: Any, path: tuple[Any, ...], arrays: list[Any]) -> list[int]:
    texts = array.ravel().tolist()
    if not all(isinstance(text, str) for text in texts):
        raise ArgumentError(f"{where(path)}: text that may be missing; replace missing text by a string")
    encoded = [text.encode() for text in texts]
    lengths = np.array([len(text) for text in encoded], np.int64).reshape(array.shape)
    return [_added(np.frombuffer(b"".join(encoded), np.uint8), arrays), _added(lengths, arrays)]


def _check_dtype(dtype: np.dtype[Any], path: tuple[Any, ...]) -> None:
    if dtype.kind not in FIXED_SIZE_KINDS + "V" or dtype.hasobject:
        raise ArgumentError(
            f"{where(path)}: dtype {dtype} cannot be saved; numbers, bools, times, text, bytes and fields of them can"
        )
    if dtype.kind == "V" and not _comes_back(dtype):
        raise ArgumentError(f"{where(path)}: dtype {dtype!s:.80} cannot be saved; give an array for each field")


def _comes_back(dtype: np.dtype[Any]) -> bool:
    try:
        fields = np.lib.format.dtype_to_descr(dtype)
    # NumPy cannot describe overlapping fields.
    except ValueError:
        return False
    return np.lib.format.descr_to_dtype(fields) == dtype and len(str(fields)) <= _MOST_FIELDS_CHARS


def _write_member(archive: zipfile.ZipFile, number: int, array: Any) -> list[int]:
    # The member has no time stamp, so that equal states give equal files.
    info = zipfile.ZipInfo(f"{number}.npy")
    with archive.open(info, "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)
    return [info.file_size, info.CRC]


def _json(content: Any) -> bytes:
    try:
        data = json.dumps(content, separators=(",", ":")).encode()
    # Python refuses to convert whole numbers of thousands of digits.
    except ValueError as error:
        raise ArgumentError(f"a number cannot be written: {error}") from None
    if len(data) > _MOST_STRUCTURE_BYTES:
        raise ArgumentError(
            f"everything except the arrays takes {len(data)} bytes, and {_MOST_STRUCTURE_BYTES} is the limit; use "
            "arrays instead of lists of numbers, and bytes instead of long text"
        )
    return data


def _sync(file: Any) -> None:
    # Flush to disk before the file gets its name, as otherwise a power loss could leave an incomplete file there.
    file.flush()
    try:
        number = file.fileno()
    except (AttributeError, io.UnsupportedOperation):
        return
    os.fsync(number)


# --- from files ---


class _StateFileReader:
    # Read the states of an archive in a file of ``num_bytes`` bytes.

    def __init__(self, path: str, archive: zipfile.ZipFile, num_bytes: int) -> None:
        self._path = path
        self._archive = archive
        self._num_bytes = num_bytes
        self._arrays: dict[int, Any] = {}

    def states(self) -> dict[str, Any]:
        infos = self._members()
        content = self._content(infos.pop(STRUCTURE))
        members = content["members"]
        if {f"{number}.npy" for number in range(len(members))} != infos.keys():
            raise ValueError(f"it has {len(infos)} arrays, and not the {len(members)} that it lists")
        for number, (num_bytes, checksum) in enumerate(members):
            info = infos[f"{number}.npy"]
            if (info.file_size, info.CRC) != (num_bytes, checksum):
                raise ValueError(f"array {number} is not the one that was written")
            self._arrays[number] = self._array(info)
        states = {typed(name, str): nest_from_json(node, self._leaf) for name, node in content["states"]}
        if len(states) != len(content["states"]) or self._arrays:
            raise ValueError("a name is duplicated, or an array is not used")
        return states

    def _members(self) -> dict[str, zipfile.ZipInfo]:
        infos = self._archive.infolist()
        named = {info.filename: info for info in infos}
        if STRUCTURE not in named:
            raise FileError(f"{self._path}: no checkpoint: an archive without {STRUCTURE!r}, or a damaged one")
        if len(named) != len(infos):
            raise ValueError("two members have one name")
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise ValueError(f"member {info.filename!r:.80} is compressed, which is never written")
        # This bounds the memory for reading, whatever the headers say.
        if sum(info.file_size for info in infos) > self._num_bytes:
            raise ValueError("its members say they are longer than the file is")
        return named

    def _content(self, info: zipfile.ZipInfo) -> Any:
        if info.file_size > _MOST_STRUCTURE_BYTES:
            raise ValueError(f"{STRUCTURE} has {info.file_size} bytes, and {_MOST_STRUCTURE_BYTES} is the most")
        content = json.loads(self._archive.read(info))
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise FileError(f"{self._path}: no checkpoint: its {STRUCTURE!r} is of something else")
        if content.get("version") != VERSION:
            raise FileError(
                f"{self._path}: of version {content.get('version')!r:.80}, and only version {VERSION} is known here; "
                "save it again, or use the newer daskdist that wrote it"
            )
        return content

    def _array(self, info: zipfile.ZipInfo) -> Any:
        # Read into separate writable memory, up to the end of the member, where zipfile compares the checksum.
        with self._archive.open(info) as stream:
            shape, is_fortran, dtype = header_of(stream)
            num_bytes = info.file_size - stream.tell()
            if dtype.hasobject or prod(shape) * dtype.itemsize != num_bytes or min(shape, default=0) < 0:
                raise ValueError(f"{info.filename}: {num_bytes} bytes are no array of {dtype} and shape {shape!r:.80}")
            data = np.empty(num_bytes, np.uint8)
            view: Any = memoryview(data)  # type: ignore[arg-type]
            done = 0
            while piece := stream.read(_PIECE_BYTES):
                view[done : done + len(piece)] = piece
                done += len(piece)
        if done != num_bytes:
            raise EOFError(f"{info.filename} has {done} bytes of {num_bytes}")
        if not dtype.itemsize:
            return np.zeros(shape, dtype)
        return data.view(dtype).reshape(shape, order="F" if is_fortran else "C")

    def _leaf(self, node: Any, path: Path) -> Any:
        if not isinstance(node, dict):
            if isinstance(node, list):
                raise ValueError(f"a list {where(path)}")
            return node
        ((kind, content),) = node.items()
        if kind == "array":
            return self._taken(content)
        if kind == "scalar":
            return self._taken(content, shape=())[()]
        if kind == "bytes":
            return self._taken(content, np.dtype(np.uint8)).tobytes()
        if kind == "complex":
            return complex(*content)
        if kind == "text":
            data, lengths = content
            return _texts(self._taken(data, np.dtype(np.uint8)), self._taken(lengths, np.dtype(np.int64)))
        raise ValueError(f"{kind!r:.80} {where(path)} is not known")

    def _taken(self, number: Any, dtype: np.dtype[Any] | None = None, shape: tuple[int, ...] | None = None) -> Any:
        # Each array is used once: if two places shared it, a change of one would change the other.
        array = self._arrays.pop(typed(number, int))
        if (dtype is not None and array.dtype.newbyteorder("=") != dtype) or shape not in (None, array.shape):
            raise ValueError(f"array {number} is of {array.dtype} and shape {array.shape}")
        return array


def _texts(data: Any, lengths: Any) -> Any:
    ends = np.cumsum(lengths.ravel()).tolist()
    if lengths.size and (lengths.min() < 0 or lengths.max() > data.size):
        raise ValueError("text has an impossible length")
    if (ends[-1] if ends else 0) != data.size:
        raise ValueError("the lengths of text do not add up to its size")
    encoded = data.tobytes()
    texts = [encoded[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]
    array = np.empty(lengths.shape, TEXT)
    array[...] = np.array(texts, TEXT).reshape(lengths.shape)
    return array
