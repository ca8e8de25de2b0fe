"""Files of states: zip archives in the manner of ``.npz``, never with Python objects.

A file has a member ``0.npy``, ``1.npy``, ... for each array, not compressed, then ``checkpoint.json``:

=============  =========================================================================================
``format``     ``daskdist checkpoint``
``version``    1
``members``    of each ``.npy`` its length in bytes and its CRC-32
``states``     pairs of a name and what is its state
=============  =========================================================================================

A state is JSON's own null, bool, number or text, or an object of one key:

=================================  =====================================================================
``dict``                           pairs of a key, which is text or a whole number, and what is there
``list``, ``tuple``                what is in it
``array``, ``scalar``              the number of its member; a scalar is of NumPy
``bytes``                          the number of a member of uint8
``text``                           of an array of text of any length two numbers of members: its UTF-8
                                   one after the other, and of each text how many bytes it has
``complex``                        a pair of numbers
=================================  =====================================================================
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import IO, Any, Final

import numpy as np

from daskdist.checkpoint.nests import MOST_DEPTH, check_depth, where
from daskdist.errors import ArgumentError, FileError
from daskdist.formats.npy import header_of
from daskdist.storage.filesystem import Storage, failures
from daskdist.storage.whole_file import remove_temporaries, whole_file

FORMAT: Final = "daskdist checkpoint"
VERSION: Final = 1
STRUCTURE: Final = "checkpoint.json"

_MAGIC: Final = b"PK\x03\x04"
_KINDS: Final = "biufcmMSUV"
# JSON takes many times its size in memory.
_MOST_STRUCTURE_BYTES: Final = 2**28
# NumPy reads no longer header.
_MOST_FIELDS_CHARS: Final = 9_000
_PIECE_BYTES: Final = 2**24


def write_states(path: str, states: Mapping[str, Any], storage: Storage) -> None:
    """Write states to a file, in place of the one there is once it is whole.

    Parameters
    ----------
    path
        A local path or an fsspec URL.
    states
        By name, each a nest as `as_numpy` gives it.
    storage
        How it is opened.

    Raises
    ------
    ArgumentError
        An array is of a dtype that no file holds, or the path is that of a directory.
    FileError
        It cannot be written; what was there before is so still.
    """
    arrays: list[Any] = []
    nodes = [[name, _encode(name, state, arrays)] for name, state in states.items()]
    fs, inner = storage.located(path)
    with failures(path, "cannot be written", (OSError,)):
        if path.endswith(("/", os.sep)) or fs.isdir(inner):
            raise ArgumentError(f"{path} is a directory; give the path of a file")
    with whole_file(fs, inner) as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            members = [_write_member(archive, number, array) for number, array in enumerate(arrays)]
            content = {"format": FORMAT, "version": VERSION, "members": members, "states": nodes}
            archive.writestr(zipfile.ZipInfo(STRUCTURE), _json(content))
        _sync(file)
    remove_temporaries(fs, inner)


def read_states(path: str, storage: Storage) -> dict[str, Any]:
    """Read the states of a file.

    Parameters
    ----------
    path
        A local path or an fsspec URL.
    storage
        How it is opened.

    Raises
    ------
    FileError
        There is none, it is none of states, or it is damaged or cut short.
    """
    with _opened(path, storage) as file:
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(len(_MAGIC))
        if not head:
            raise FileError(f"{path}: no checkpoint: the file is empty")
        if head != _MAGIC[: len(head)]:
            raise FileError(f"{path}: no checkpoint: it begins with {head!r}, and checkpoints begin with {_MAGIC!r}")
        # Errors for a damaged archive depend on the place of the damage.
        with failures(path, kinds=(Exception,)), zipfile.ZipFile(file) as archive:
            return _StateFileReader(path, archive, num_bytes).states()


@contextmanager
def _opened(path: str, storage: Storage) -> Iterator[IO[bytes]]:
    fs, inner = storage.located(path)
    try:
        file = fs.open(inner, "rb")
    except FileNotFoundError:
        raise FileError(f"{path}: there is no such file, on a disk that this process sees") from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error}") from error
    with failures(path, "cannot be read", (OSError,)), file:
        yield file


# --- to files ---


def _encode(name: str, state: Any, arrays: list[Any]) -> Any:
    try:
        return _node(state, (), arrays)
    except ArgumentError as error:
        raise ArgumentError(f"{name!r}: {error}") from None


def _node(nest: Any, path: tuple[Any, ...], arrays: list[Any]) -> Any:
    # The JSON of a nest, whose arrays are added to those given.
    check_depth(path)
    if isinstance(nest, dict):
        return {"dict": [[key, _node(part, (*path, key), arrays)] for key, part in nest.items()]}
    if isinstance(nest, (list, tuple)):
        parts = [_node(part, (*path, number), arrays) for number, part in enumerate(nest)]
        return {"list" if isinstance(nest, list) else "tuple": parts}
    if isinstance(nest, (np.ndarray, np.generic)):
        if nest.dtype.kind == "T":
            return {"text": _text_added(nest, path, arrays)}
        _check_dtype(nest.dtype, path)
        return {"array" if isinstance(nest, np.ndarray) else "scalar": _added(np.asarray(nest), arrays)}
    if isinstance(nest, bytes):
        return {"bytes": _added(np.frombuffer(nest, np.uint8), arrays)}
    if isinstance(nest, complex):
        return {"complex": [nest.real, nest.imag]}
    if isinstance(nest, int) and type(nest) not in (int, bool):
        return int(nest)
    return nest


def _added(array: Any, arrays: list[Any]) -> int:
    arrays.append(array)
    return len(arrays) - 1


def _text_added(array: Any, path: tuple[Any, ...], arrays: list[Any]) -> list[int]:
    texts = array.ravel().tolist()
    if not all(isinstance(text, str) for text in texts):
        raise ArgumentError(f"{where(path)}: text that may be missing; give another text in its place")
    encoded = [text.encode() for text in texts]
    lengths = np.array([len(each) for each in encoded], np.int64).reshape(array.shape)
    return [_added(np.frombuffer(b"".join(encoded), np.uint8), arrays), _added(lengths, arrays)]


def _check_dtype(dtype: np.dtype[Any], path: tuple[Any, ...]) -> None:
    if dtype.kind not in _KINDS or dtype.hasobject:
        raise ArgumentError(
            f"{where(path)}: dtype {dtype} cannot be saved; numbers, bools, times, text, bytes and fields of them can"
        )
    if dtype.kind == "V" and not _comes_back(dtype):
        raise ArgumentError(f"{where(path)}: dtype {dtype!s:.80} cannot be saved; give an array for each field")


def _comes_back(dtype: np.dtype[Any]) -> bool:
    try:
        fields = np.lib.format.dtype_to_descr(dtype)
    # Of fields that overlap.
    except ValueError:
        return False
    return np.lib.format.descr_to_dtype(fields) == dtype and len(str(fields)) <= _MOST_FIELDS_CHARS


def _write_member(archive: zipfile.ZipFile, number: int, array: Any) -> list[int]:
    # Of no time: the same states are the same file.
    info = zipfile.ZipInfo(f"{number}.npy")
    with archive.open(info, "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)
    return [info.file_size, info.CRC]


def _json(content: Any) -> bytes:
    try:
        data = json.dumps(content, separators=(",", ":")).encode()
    # Of a whole number of thousands of digits.
    except ValueError as error:
        raise ArgumentError(f"a number cannot be written: {error}") from None
    if len(data) > _MOST_STRUCTURE_BYTES:
        raise ArgumentError(
            f"all but the arrays takes {len(data)} bytes, and {_MOST_STRUCTURE_BYTES} is the most; give arrays in "
            "place of lists of numbers, and bytes in place of long text"
        )
    return data


def _sync(file: Any) -> None:
    # On a disk of this machine before it has its name, lest that be of half a file where the machine loses power.
    file.flush()
    try:
        number = file.fileno()
    except (AttributeError, io.UnsupportedOperation):
        return
    os.fsync(number)


# --- from files ---


class _StateFileReader:
    # An archive, of a file of so many bytes.

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
            raise ValueError(f"it has {len(infos)} arrays, and not the {len(members)} that it tells of")
        for number, (num_bytes, checksum) in enumerate(members):
            info = infos[f"{number}.npy"]
            if (info.file_size, info.CRC) != (num_bytes, checksum):
                raise ValueError(f"array {number} is not the one that was written")
            self._arrays[number] = self._array(info)
        states = {_checked(name, str): self._nest(node, (name,)) for name, node in content["states"]}
        if len(states) != len(content["states"]) or self._arrays:
            raise ValueError("a name is there twice, or an array has no place")
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
        # So that what is read fits in what there is, whatever a header says.
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
        # In memory of its own, that can be written to; to its end, where the checksum is compared.
        with self._archive.open(info) as stream:
            shape, is_fortran, dtype = header_of(stream)
            num_bytes = info.file_size - stream.tell()
            if dtype.hasobject or prod(shape) * dtype.itemsize != num_bytes or min(shape, default=0) < 0:
                raise ValueError(f"{info.filename}: {num_bytes} bytes are no array of {dtype} and shape {shape!r:.80}")
            data = np.empty(num_bytes, np.uint8)
            room: Any = memoryview(data)  # type: ignore[arg-type]
            done = 0
            while piece := stream.read(_PIECE_BYTES):
                room[done : done + len(piece)] = piece
                done += len(piece)
        if done != num_bytes:
            raise EOFError(f"{info.filename} has {done} bytes of {num_bytes}")
        if not dtype.itemsize:
            return np.zeros(shape, dtype)
        return data.view(dtype).reshape(shape, order="F" if is_fortran else "C")

    def _nest(self, node: Any, path: tuple[Any, ...]) -> Any:
        if len(path) > MOST_DEPTH + 1:
            raise ValueError(f"{where(path[:4])}... is deeper than {MOST_DEPTH}")
        if not isinstance(node, dict):
            if isinstance(node, list):
                raise ValueError(f"a list {where(path)}")
            return node
        ((kind, content),) = node.items()
        if kind == "dict":
            parts = {_key(key): self._nest(part, (*path, key)) for key, part in content}
            if len(parts) != len(content):
                raise ValueError(f"a key is there twice {where(path)}")
            return parts
        if kind in ("list", "tuple"):
            listed = [self._nest(part, (*path, number)) for number, part in enumerate(_checked(content, list))]
            return listed if kind == "list" else tuple(listed)
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
        # Once: what is there of many places would be changed in all of them.
        array = self._arrays.pop(_checked(number, int))
        if (dtype is not None and array.dtype.newbyteorder("=") != dtype) or shape not in (None, array.shape):
            raise ValueError(f"array {number} is of {array.dtype} and shape {array.shape}")
        return array


def _texts(data: Any, lengths: Any) -> Any:
    ends = np.cumsum(lengths.ravel()).tolist()
    if lengths.size and (lengths.min() < 0 or lengths.max() > data.size):
        raise ValueError("text has an impossible length")
    if (ends[-1] if ends else 0) != data.size:
        raise ValueError("text is longer or shorter than it is")
    encoded = data.tobytes()
    texts = [encoded[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]
    made = np.empty(lengths.shape, np.dtypes.StringDType())
    made[...] = np.array(texts, np.dtypes.StringDType()).reshape(lengths.shape)
    return made


def _key(key: Any) -> Any:
    if type(key) not in (str, int):
        raise ValueError(f"{key!r:.80} is no key")
    return key


def _checked(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.80} where {kind.__name__} is expected")
    return value
