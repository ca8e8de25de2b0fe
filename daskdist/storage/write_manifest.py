"""The manifest of a written directory: which of its files are the dataset, and which are not.

The writers put one into a directory, a small JSON file for each format: before the first file has its name there, and
again when all of them have. Until then it lists the files that were there before, so that whoever reads the directory
has the old dataset or the new one, and never some of a write that was killed. Spark's empty ``_SUCCESS`` would tell
that a write has ended, but not which files are of it once a directory is overwritten. Names that begin with ``_`` are
skipped by pandas, pyarrow and Spark.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from daskdist.errors import FileError

# Matches the manifests of all formats.
PATTERN: Final = "_daskdist_*.json"
_VERSION: Final = 1


def manifest_name(format: str) -> str:
    """Return the name of the manifest of the files of one format.

    >>> manifest_name("parquet")
    '_daskdist_parquet.json'
    """
    return PATTERN.replace("*", format)


def is_manifest_name(name: str) -> bool:
    """Return whether a file is such a manifest, by its name."""
    start, _, end = PATTERN.partition("*")
    return name.startswith(start) and name.endswith(end)


@dataclass(frozen=True)
class WriteManifest:
    """Files of a directory, by their names in it.

    Parameters
    ----------
    files
        Those of the dataset, with their sizes in bytes.
    ignored
        Those that an unfinished write may have left, or that are about to be deleted because others took their place.

    Notes
    -----
    Files that it does not name were put there by others, and are read as if there were no manifest.
    """

    files: Mapping[str, int] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def is_unfinished(self) -> bool:
        """True if a first write has not finished."""
        return bool(self.ignored) and not self.files

    def to_bytes(self) -> bytes:
        """Return it as JSON."""
        content = {"version": _VERSION, "files": dict(self.files), "ignored": list(self.ignored)}
        return json.dumps(content, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> WriteManifest:
        """Return what `to_bytes` gave.

        Raises
        ------
        FileError
            It is damaged, or of a version not known here.
        """
        try:
            content = json.loads(data)
            version = content["version"]
            if version == _VERSION:
                files = {_plain(name): int(size) for name, size in content["files"].items()}
                return cls(files, tuple(map(_plain, content["ignored"])))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise FileError(
                f"{path}: the list of the files written there is damaged: {error or type(error).__name__}; delete it "
                "to read all files of the directory"
            ) from error
        raise FileError(f"{path}: of version {version!r}, and only version {_VERSION} is known here; update daskdist")


def _plain(name: str) -> str:
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"{name!r} is no name of a file")
    return name
