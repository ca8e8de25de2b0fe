"""The manifest of a written directory: which of its files are the dataset, and which are not.

Writers put one small JSON file for each format into a directory: before the first file gets its name, and again after
the last. Until then it lists the files of the previous dataset, so that a reader sees the old dataset or the new one,
never part of a write that was killed. Spark's empty ``_SUCCESS`` would say that a write has finished, but not which
files belong to it after an overwrite. The name begins with ``_``, so pandas, pyarrow and Spark skip it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from daskdist.errors import FileError
from daskdist.url_secrets import shown_cause

# The manifests of all formats.
PATTERN: Final = "_daskdist_*.json"
_VERSION: Final = 1


def manifest_name(format: str) -> str:
    """Return the name of the manifest of the files of one format.

    >>> manifest_name("parquet")
    '_daskdist_parquet.json'
    """
    return PATTERN.replace("*", format)


def is_manifest_name(name: str) -> bool:
    """Return whether a name is that of a manifest."""
    start, _, end = PATTERN.partition("*")
    return name.startswith(start) and name.endswith(end)


@dataclass(frozen=True)
class WriteManifest:
    """Files of a directory, by their names in it.

    Parameters
    ----------
    files
        The files of the dataset, with their sizes in bytes.
    ignored
        Files that an unfinished write may have left, or that are about to be deleted after their replacement.

    Notes
    -----
    Files that it does not name were put there by others and are read too.
    """

    files: Mapping[str, int] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def is_unfinished(self) -> bool:
        """True if a first write has not finished."""
        return bool(self.ignored) and not self.files

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON."""
        content = {"version": _VERSION, "files": dict(self.files), "ignored": list(self.ignored)}
        return json.dumps(content, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> WriteManifest:
        """Return the manifest that `to_bytes` encoded.

        Raises
        ------
        FileError
            The manifest is damaged, or of an unknown version.
        """
        try:
            content = json.loads(data)
            version = content["version"]
            if version == _VERSION:
                files = {_plain(name): int(size) for name, size in content["files"].items()}
                return cls(files, tuple(map(_plain, content["ignored"])))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise FileError(
                f"{path}: the manifest is damaged: {error or type(error).__name__}; delete it "
                "to read all files of the directory"
            ) from shown_cause(error)
        raise FileError(
            f"{path}: version {version!r} is unknown, only version {_VERSION} is supported; update daskdist"
        )


def _plain(name: str) -> str:
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"{name!r} is not a file name")
    return name
