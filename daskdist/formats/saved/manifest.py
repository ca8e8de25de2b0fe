"""The manifest of a saved dataset: a JSON file with the spec of its elements and the list of its parts.

It is written last, so that a directory with a manifest is complete. Structures, specs and dtypes are restored from JSON
exactly.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from daskdist.core.json_codec import spec_from_json, spec_to_json, typed
from daskdist.core.spec import ElementSpec
from daskdist.errors import ArgumentError, DamagedFileError, FileError
from daskdist.storage.atomic_file import located, name_of_temporary, writing
from daskdist.storage.libraries import pa
from daskdist.url_secrets import shown_cause

MANIFEST: Final = "manifest.json"
VERSION: Final = 1

# The key of a part's metadata in its schema.
KEY: Final = b"daskdist"

# The user's name -> Arrow's name.
CODECS: Final = {None: None, "AUTO": "lz4", "lz4": "lz4", "zstd": "zstd"}

# A plain file name that neither leaves the directory nor is hidden.
_PART_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.arrow")


@dataclass(frozen=True, slots=True)
class SavedPart:
    """One file of elements.

    Parameters
    ----------
    name
        The name of the file, without its directory.
    num_rows
        The number of its elements.
    num_bytes
        Their approximate size in memory; text counts as its bytes.
    """

    name: str
    num_rows: int
    num_bytes: int

    def __post_init__(self) -> None:
        if not _PART_NAME.fullmatch(self.name):
            raise ArgumentError(
                f"{self.name!r} is no part's name; give letters, digits, '-', '_' and single dots, then '.arrow'"
            )
        if self.num_rows < 0 or self.num_bytes < 0:
            raise ArgumentError(f"part {self.name} has {self.num_rows} rows of {self.num_bytes} bytes")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a saved dataset.

    Parameters
    ----------
    fingerprint
        The fingerprint of the pipeline that produced the elements.
    spec
        The spec of an element.
    cardinality
        The number of elements, or one of the constants for an unknown number.
    parts
        The files, in the order of the elements.
    compression
        The codec of the parts; None if they are not compressed.
    version
        The version of the layout of the directory.
    """

    fingerprint: str
    spec: ElementSpec
    cardinality: int
    parts: tuple[SavedPart, ...]
    compression: str | None = None
    version: int = VERSION


def write_manifest(directory: str, manifest: Manifest) -> None:
    """Write the manifest of a directory, replacing an existing one.

    Parameters
    ----------
    directory
        A local path or an fsspec URL.
    manifest
        The manifest; its parts must exist already.

    Raises
    ------
    ArgumentError
        Its spec has a leaf or a structure that cannot be saved.
    FileError
        The manifest cannot be written.
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
        There is no manifest, it is damaged, or its version is unknown.

    Notes
    -----
    A named tuple is imported from the module that defined it: read only directories that you trust. If that fails, or
    its fields have changed, elements are named tuples of the same name and fields.
    """
    fs, root = located(directory)
    path = f"{root}/{MANIFEST}"
    try:
        content = json.loads(fs.cat_file(path))
    except FileNotFoundError:
        raise FileError(f"{path}: not found: nothing was saved in {directory}, or saving has not finished") from None
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path}: damaged: not JSON: {error}") from shown_cause(error)
    # Not only OSError: libraries of remote file systems have errors of their own.
    except Exception as error:
        raise FileError(f"{path}: cannot be read: {error}") from shown_cause(error)
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise FileError(f"{path}: version {version!r} is unknown, only version {VERSION} is supported; save it again")
    try:
        compression = content["compression"]
        return Manifest(
            fingerprint=typed(content["fingerprint"], str),
            spec=spec_from_json(content["spec"]),
            cardinality=typed(content["cardinality"], int),
            parts=tuple(SavedPart(typed(a, str), typed(b, int), typed(c, int)) for a, b, c in content["parts"]),
            compression=None if compression is None else typed(compression, str),
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path}: damaged: {type(error).__name__}: {error}") from shown_cause(error)


def is_manifest(head: bytes) -> bool:
    """Return whether a file begins like a manifest of `write_manifest`."""
    return re.match(rb'\{\s*"version": \d+,\s*"fingerprint": "', head) is not None


def exists(directory: str) -> bool:
    """Return whether a directory holds a complete saved dataset."""
    fs, root = located(directory)
    fs.invalidate_cache(root)
    return bool(fs.isfile(f"{root}/{MANIFEST}"))


def remove_unfinished(directory: str) -> tuple[str, ...]:
    """Delete the leftovers of an unfinished save: temporary files, and parts in no manifest.

    Parameters
    ----------
    directory
        A local path or an fsspec URL.

    Returns
    -------
    tuple of str
        The names of the deleted files.

    Raises
    ------
    FileError
        The manifest is damaged; nothing is deleted then.

    Notes
    -----
    No process may be writing there. Files that do not belong to a saved dataset stay, even Arrow files.
    """
    fs, root = located(directory)
    fs.invalidate_cache(root)
    if not fs.isdir(root):
        return ()
    kept = {part.name for part in read_manifest(directory).parts} if exists(directory) else set()
    names = sorted(entry.rsplit("/", 1)[-1] for entry in fs.ls(root, detail=False))
    removed = tuple(name for name in names if _is_temporary(name) or (name not in kept and _is_ours(fs, root, name)))
    for name in removed:
        # A process that writes there nevertheless may have renamed or removed it.
        with suppress(FileNotFoundError):
            fs.rm_file(f"{root}/{name}")
    return removed


def _is_temporary(name: str) -> bool:
    # Return whether it is a temporary file of `writing`.
    target = name_of_temporary(name)
    return target is not None and (target == MANIFEST or _PART_NAME.fullmatch(target) is not None)


def _is_ours(fs: Any, root: str, name: str) -> bool:
    if not _PART_NAME.fullmatch(name):
        return False
    try:
        with fs.open(f"{root}/{name}", "rb") as file, pa.ipc.open_file(file) as reader:
            return KEY in (reader.schema.metadata or {})
    except (OSError, ValueError):
        return False


def codec(compression: str | None) -> str | None:
    """Return the codec for a user's name.

    Raises
    ------
    ArgumentError
        The name is unknown.
    """
    if compression not in CODECS:
        raise ArgumentError(f"compression is {compression!r}; give one of {', '.join(map(repr, CODECS))}")
    return CODECS[compression]
