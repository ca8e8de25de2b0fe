"""The manifest of a saved dataset: a JSON file that says what its elements are and which parts hold them.

It is written last, so that a directory with a manifest is complete. Structures, specs and dtypes become JSON
and come back equal.
"""

from __future__ import annotations

import collections
import importlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import optree

from daskdist.core.spec import DatasetSpec, ElementSpec, RaggedRowSpec, RaggedTensorSpec, TensorSpec
from daskdist.core.structure import Structure
from daskdist.errors import ArgumentError, FileError

MANIFEST: Final = "manifest.json"
VERSION: Final = 1

# Under what name a part has what else is to be known of it.
KEY: Final = b"daskdist"

# What users write -> what Arrow calls it.
CODECS: Final = {None: None, "AUTO": "lz4", "lz4": "lz4", "zstd": "zstd"}

# One plain file name: nothing that leads out of the directory, and nothing hidden.
_PART_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.arrow")
_TEMPORARY: Final = re.compile(r"\.(.*)\.[0-9a-f]{32}\.tmp")

_SPECS: Final[dict[str, type[TensorSpec]]] = {
    "tensor": TensorSpec,
    "ragged": RaggedTensorSpec,
    "row of ragged": RaggedRowSpec,
}
# What NumPy has no short name for that is the same everywhere.
_DTYPES: Final[dict[str, np.dtype[Any]]] = {"text": np.dtype(np.dtypes.StringDType()), "bytes": np.dtype(object)}
_KINDS: Final = "biufcmMSU"


@dataclass(frozen=True, slots=True)
class Part:
    """One file of elements.

    Parameters
    ----------
    name
        The name of the file, without its directory.
    num_rows
        Its elements.
    num_bytes
        Their size in memory, about: text as many bytes as it has.
    """

    name: str
    num_rows: int
    num_bytes: int

    def __post_init__(self) -> None:
        if not _PART_NAME.fullmatch(self.name):
            raise ArgumentError(
                f"{self.name!r} is no name of a part; give letters, digits, '-', '_' and single dots, then '.arrow'"
            )
        if self.num_rows < 0 or self.num_bytes < 0:
            raise ArgumentError(f"part {self.name} has {self.num_rows} rows of {self.num_bytes} bytes")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a directory holds.

    Parameters
    ----------
    fingerprint
        The token of the pipeline that gave the elements.
    spec
        The spec of an element.
    cardinality
        The number of elements, or one of the constants for a number that is not known.
    parts
        The files, in the order of the elements.
    compression
        The codec of the parts; None where they are not compressed.
    version
        Of the layout of the directory.
    """

    fingerprint: str
    spec: ElementSpec
    cardinality: int
    parts: tuple[Part, ...]
    compression: str | None = None
    version: int = VERSION


def write_manifest(directory: str, manifest: Manifest) -> None:
    """Write the manifest of a directory, in place of the one there is.

    Parameters
    ----------
    directory
        A local path or an fsspec URL.
    manifest
        What to write; its parts are to be there already.

    Raises
    ------
    ArgumentError
        Its spec has a leaf or a structure that no file holds.
    FileError
        It cannot be written.
    """
    content = {
        "version": manifest.version,
        "fingerprint": manifest.fingerprint,
        "spec": spec_to_json(manifest.spec),
        "cardinality": int(manifest.cardinality),
        "compression": manifest.compression,
        "parts": [[part.name, int(part.num_rows), int(part.num_bytes)] for part in manifest.parts],
    }
    with writing(directory, MANIFEST) as file:
        file.write(json.dumps(content, indent=1).encode())


def read_manifest(directory: str) -> Manifest:
    """Read the manifest of a directory.

    Raises
    ------
    FileError
        There is none, it is damaged, or it is of a version not known here.

    Notes
    -----
    A named tuple is imported from the module that defined it: read only directories you trust. Where that
    fails, or its fields are others by now, elements are named tuples of the same name and fields.
    """
    fs, root = located(directory)
    path = f"{root}/{MANIFEST}"
    try:
        content = json.loads(fs.cat_file(path))
    except FileNotFoundError:
        raise FileError(
            f"{path}: not found: nothing was saved in {directory}, or the saving did not come to its end"
        ) from None
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: damaged: not JSON: {error}") from error
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise FileError(f"{path}: of version {version!r}, and only version {VERSION} is known here; save it again")
    try:
        compression = content["compression"]
        return Manifest(
            fingerprint=_typed(content["fingerprint"], str),
            spec=spec_from_json(content["spec"]),
            cardinality=_typed(content["cardinality"], int),
            parts=tuple(Part(_typed(a, str), _typed(b, int), _typed(c, int)) for a, b, c in content["parts"]),
            compression=None if compression is None else _typed(compression, str),
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: damaged: {type(error).__name__}: {error}") from error


def is_manifest(head: bytes) -> bool:
    """Whether a file begins as a manifest does that `write_manifest` wrote."""
    return re.match(rb'\{\s*"version": \d+,\s*"fingerprint": "', head) is not None


def exists(directory: str) -> bool:
    """Whether a directory holds a saved dataset that is complete."""
    fs, root = located(directory)
    fs.invalidate_cache(root)
    return bool(fs.isfile(f"{root}/{MANIFEST}"))


def remove_unfinished(directory: str) -> tuple[str, ...]:
    """Delete what a saving that did not come to its end has left: temporary files, and parts of no manifest.

    Parameters
    ----------
    directory
        A local path or an fsspec URL.

    Returns
    -------
    tuple of str
        The names of the files deleted.

    Raises
    ------
    FileError
        There is a manifest, and it is damaged: nothing is deleted then.

    Notes
    -----
    Only while nobody writes there. Files that are not of a saved dataset stay, Arrow files too.
    """
    fs, root = located(directory)
    fs.invalidate_cache(root)
    if not fs.isdir(root):
        return ()
    kept = {part.name for part in read_manifest(directory).parts} if exists(directory) else set()
    names = sorted(entry.rsplit("/", 1)[-1] for entry in fs.ls(root, detail=False))
    removed = tuple(name for name in names if _is_temporary(name) or (name not in kept and _is_ours(fs, root, name)))
    for name in removed:
        # Whoever writes there nevertheless may have renamed or removed it by now.
        with suppress(FileNotFoundError):
            fs.rm_file(f"{root}/{name}")
    return removed


def _is_temporary(name: str) -> bool:
    # Whether `writing` has not finished it.
    match = _TEMPORARY.fullmatch(name)
    return match is not None and (match[1] == MANIFEST or _PART_NAME.fullmatch(match[1]) is not None)


def _is_ours(fs: Any, root: str, name: str) -> bool:
    import pyarrow as pa

    if not _PART_NAME.fullmatch(name):
        return False
    try:
        with fs.open(f"{root}/{name}", "rb") as file, pa.ipc.open_file(file) as reader:
            return KEY in (reader.schema.metadata or {})
    except (OSError, ValueError):
        return False


def codec(compression: str | None) -> str | None:
    """The codec that a user's name for it stands for.

    Raises
    ------
    ArgumentError
        There is no such name.
    """
    if compression not in CODECS:
        raise ArgumentError(f"compression is {compression!r}; give one of {', '.join(map(repr, CODECS))}")
    return CODECS[compression]


def located(directory: str) -> tuple[Any, str]:
    """The file system of a directory, and its path there."""
    import fsspec

    try:
        fs, root = fsspec.core.url_to_fs(directory)
    # ImportError: of a file system whose library is not installed.
    except (ValueError, ImportError) as error:
        raise FileError(f"{directory!r} cannot be opened: {error}") from None
    return fs, root.rstrip("/")


@contextmanager
def writing(directory: str, name: str) -> Iterator[Any]:
    """A file to write to, which takes its name once it is whole.

    Raises
    ------
    FileError
        It cannot be written; what was written of it is removed.

    Notes
    -----
    A process that dies leaves a temporary file, never half a file of that name. A machine that loses power
    may: nothing waits for the disk.
    """
    fs, root = located(directory)
    with whole_file(fs, f"{root}/{name}") as file:
        yield file


@contextmanager
def whole_file(fs: Any, path: str) -> Iterator[Any]:
    """As `writing`, a file of a file system by its path there."""
    root, _, name = path.rpartition("/")
    temporary = f"{root}/.{name}.{uuid.uuid4().hex}.tmp"
    try:
        if root:
            fs.makedirs(root, exist_ok=True)
        with fs.open(temporary, "wb") as file:
            yield file
        rename(fs, temporary, path)
    except BaseException as error:
        with suppress(Exception):
            fs.rm_file(temporary)
        if isinstance(error, OSError):
            raise FileError(f"{path}: cannot be written: {error}") from error
        raise


def remove_temporaries(fs: Any, path: str) -> None:
    """Delete what processes that died have left of a file, where nobody else writes it now; as far as it can be."""
    root, _, name = path.rpartition("/")
    with suppress(Exception):
        for entry in fs.ls(root, detail=False):
            match = _TEMPORARY.fullmatch(str(entry).rpartition("/")[2])
            if match is not None and match[1] == name:
                fs.rm_file(entry)


def rename(fs: Any, source: str, target: str) -> None:
    """Rename a file; where files cannot be renamed, copy and delete it."""
    from fsspec import AbstractFileSystem

    if type(fs).mv is not AbstractFileSystem.mv:
        fs.mv(source, target)
        return
    # That of all file systems takes names with brackets for patterns.
    fs.cp_file(source, target)
    fs.rm_file(source)


def put(fs: Any, path: str, data: bytes) -> None:
    """Write a small file in place of the one there is: at any time one of them is there, and whole.

    Raises
    ------
    FileError
        It cannot be written.
    """
    from fsspec import AbstractFileSystem

    if type(fs).mv is AbstractFileSystem.mv:
        # Of an object store, where an object appears once all of it is there.
        fs.pipe_file(path, data)
        return
    with whole_file(fs, path) as file:
        file.write(data)
        file.flush()
        # Not all file systems have a disk behind them.
        with suppress(OSError, AttributeError):
            os.fsync(file.fileno())


def spec_to_json(spec: ElementSpec) -> Any:
    """The spec of an element as JSON.

    Raises
    ------
    ArgumentError
        It has a leaf that is a dataset, a dtype that no file holds, or a container of a class of its own.
    """
    kinds = {kind: name for name, kind in _SPECS.items()}
    leaves = []
    for path, leaf in zip(spec.structure.paths, spec.leaves, strict=True):
        if isinstance(leaf, DatasetSpec):
            raise ArgumentError(no_dataset(path))
        leaves.append([kinds[type(leaf)], list(leaf.shape), dtype_to_json(leaf.dtype), leaf.name])
    return {"structure": structure_to_json(spec.structure), "leaves": leaves}


def no_dataset(path: str) -> str:
    """What is said of a leaf that cannot be saved because it is a dataset."""
    return (
        f"save: leaf {path or '(the element)'} is a dataset, as a window is, and files hold arrays; "
        "make arrays of it first, with flat_map(lambda window: window.batch(...))"
    )


def spec_from_json(content: Any) -> ElementSpec:
    """The spec that `spec_to_json` was given."""
    structure = structure_from_json(content["structure"])
    leaves = tuple(
        _SPECS[kind](tuple(shape), dtype_from_json(dtype), None if name is None else _typed(name, str))
        for kind, shape, dtype, name in content["leaves"]
    )
    if len(leaves) != structure.num_leaves:
        raise ValueError(f"{len(leaves)} leaves for a structure of {structure.num_leaves}")
    return ElementSpec(structure, leaves)


def dtype_to_json(dtype: np.dtype[Any]) -> str:
    """A dtype as JSON, in native byte order.

    Raises
    ------
    ArgumentError
        No file holds its values.

    >>> dtype_to_json(np.dtype(">f4")), dtype_to_json(np.dtype("datetime64[25s]")), dtype_to_json(np.dtype("O"))
    ('<f4', '<M8[25s]', 'bytes')
    """
    for name, known in _DTYPES.items():
        if dtype == known:
            return name
    if dtype.kind not in _KINDS:
        raise ArgumentError(
            f"save: dtype {dtype!r} cannot be saved; numbers, bools, times, text and bytes can, and text that "
            "may be missing cannot"
        )
    return dtype.newbyteorder("=").str


def dtype_from_json(content: Any) -> np.dtype[Any]:
    """The dtype that `dtype_to_json` was given."""
    dtype = _DTYPES.get(_typed(content, str))
    if dtype is None:
        dtype = np.dtype(content).newbyteorder("=")
        if dtype.kind not in _KINDS:
            raise ValueError(f"dtype {content!r}")
    return dtype


def structure_to_json(structure: Structure) -> Any:
    """A structure as JSON: a leaf is null, a container an object of its kind.

    Raises
    ------
    ArgumentError
        A container is of a class of its own, or a name in a dict is neither text nor a whole number.

    >>> structure_to_json(Structure.of({"b": 0, "a": (0, 0)})[1])
    {'dict': [['b', None], ['a', {'tuple': [None, None]}]]}
    """
    return _node_to_json(structure.treespec)


def _node_to_json(treespec: Any) -> Any:
    if treespec.is_leaf():
        return None
    kind = treespec.type
    # Before anything of this node is built: a class of its own may do anything then.
    children = [_node_to_json(child) for child in treespec.children()]
    if kind is tuple:
        return {"tuple": children}
    if kind is dict:
        named = dict(zip(treespec.entries(), children, strict=True))
        odd = next((name for name in named if type(name) not in (str, int)), None)
        if odd is not None:
            raise ArgumentError(f"save: {odd!r} is a name in a dict; give text or whole numbers")
        # Children come sorted; only a dict tells in which order they were given.
        return {"dict": [[name, named[name]] for name in treespec.unflatten(range(treespec.num_leaves))]}
    if treespec.kind == optree.PyTreeKind.NAMEDTUPLE:
        return {
            "namedtuple": f"{kind.__module__}:{kind.__qualname__}",
            "fields": list(kind._fields),
            "items": children,
        }
    raise ArgumentError(f"save: {kind.__name__} cannot be saved; make elements tuples, named tuples or dicts with map")


def structure_from_json(content: Any) -> Structure:
    """The structure that `structure_to_json` was given."""
    return Structure.of(_nest(content))[1]


def _nest(content: Any) -> Any:
    if content is None:
        return 0
    if "tuple" in content:
        return tuple(map(_nest, content["tuple"]))
    if "dict" in content:
        return {name: _nest(child) for name, child in content["dict"]}
    kind = _named_tuple(content["namedtuple"], tuple(content["fields"]))
    return kind(*map(_nest, content["items"]))


def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = None
    # What a module raises as it is imported is its own affair.
    with suppress(Exception):
        found = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    if isinstance(found, type) and optree.is_namedtuple_class(found) and getattr(found, "_fields", ()) == fields:
        return found
    return _stand_in(module, qualname, fields)


@cache
def _stand_in(module: str, qualname: str, fields: tuple[str, ...]) -> Any:
    # Made once: structures of two classes are never equal.
    made: Any = collections.namedtuple(qualname.rpartition(".")[2], fields, module=module)  # type: ignore[misc]
    made.__qualname__ = qualname
    return made


def _typed(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r} where {kind.__name__} is expected")
    return value
