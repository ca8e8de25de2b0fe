"""The manifest of a saved dataset: a JSON file that says what its elements are and which parts hold them.

It is written last, so that a directory with a manifest is complete. Structures, specs and dtypes become JSON
and come back equal.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from daskdist.core.json_codec import spec_from_json, spec_to_json, typed
from daskdist.core.spec import ElementSpec
from daskdist.errors import ArgumentError, FileError
from daskdist.storage.whole_file import TEMPORARY, located, writing

MANIFEST: Final = "manifest.json"
VERSION: Final = 1

# Under what name a part has what else is to be known of it.
KEY: Final = b"daskdist"

# The user's name -> Arrow's name.
CODECS: Final = {None: None, "AUTO": "lz4", "lz4": "lz4", "zstd": "zstd"}

# One plain file name: nothing that leads out of the directory, and nothing hidden.
_PART_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.arrow")


@dataclass(frozen=True, slots=True)
class SavedPart:
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
    """The description of a saved dataset.

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
    parts: tuple[SavedPart, ...]
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
            fingerprint=typed(content["fingerprint"], str),
            spec=spec_from_json(content["spec"]),
            cardinality=typed(content["cardinality"], int),
            parts=tuple(SavedPart(typed(a, str), typed(b, int), typed(c, int)) for a, b, c in content["parts"]),
            compression=None if compression is None else typed(compression, str),
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: damaged: {type(error).__name__}: {error}") from error


def is_manifest(head: bytes) -> bool:
    """Return whether a file begins like a manifest of `write_manifest`."""
    return re.match(rb'\{\s*"version": \d+,\s*"fingerprint": "', head) is not None


def exists(directory: str) -> bool:
    """Return whether a directory holds a complete saved dataset."""
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
    # Return whether it is a temporary file of `writing`.
    match = TEMPORARY.fullmatch(name)
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
    """Return the codec that a user's name for it stands for.

    Raises
    ------
    ArgumentError
        There is no such name.
    """
    if compression not in CODECS:
        raise ArgumentError(f"compression is {compression!r}; give one of {', '.join(map(repr, CODECS))}")
    return CODECS[compression]
