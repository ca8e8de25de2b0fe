"""The state of a dispatcher, kept in a directory so that a new scheduler can continue from it."""

from __future__ import annotations

import logging
import pickle
import struct
import zlib
from collections.abc import Mapping
from typing import Any, Final

from daskdist.errors import FileError
from daskdist.storage.filesystem import Storage

logger: Final = logging.getLogger("daskdist")

_SUFFIX: Final = ".daskdist-journal"
# The length and the checksum of the content.
_HEADER: Final = struct.Struct("<QI")
# After this number of files, the whole state is written as one file.
_MOST_FILES: Final = 64

Changes = Mapping[Any, Any]


class Journal:
    """Changes of a state of keys and values, kept as numbered files in a directory.

    Each file is a header and some changes, where None stands for a removed key. Some files hold the whole state, and
    the files before them are deleted. Files are never appended to, so that object stores can hold them. The last file
    is ignored if it is incomplete because the scheduler was killed while writing it.

    Parameters
    ----------
    work_dir
        The directory, local or of any file system that fsspec knows; it is created if it does not exist.
    """

    def __init__(self, work_dir: str) -> None:
        self.work_dir = work_dir
        self._fs, self._path = Storage().located(work_dir)
        self._fs.makedirs(self._path, exist_ok=True)
        self._state: dict[Any, Any] = {}
        self._number = 0
        self._num_files = 0

    def load(self) -> dict[Any, Any]:
        """Return the state, and rewrite it as one file.

        Raises
        ------
        FileError
            A file other than the last is damaged.
        """
        names = self._names()
        for place, name in enumerate(names):
            content = _unpacked(self._fs.cat_file(name))
            if content is not None:
                is_whole, changes = content
                if is_whole:
                    self._state.clear()
                self._apply(changes)
            elif place < len(names) - 1:
                raise FileError(
                    f"the journal of the data service has a damaged file, {name}; delete {self.work_dir} to start "
                    "without the jobs recorded in it"
                )
            else:
                logger.warning("ignored the last file of the journal, %s, which is incomplete", name)
        if names:
            self._number = int(_stem(names[-1])) + 1
            self._write_whole()
        return dict(self._state)

    def write(self, changes: Changes) -> None:
        """Add changes."""
        self._apply(changes)
        if self._num_files >= _MOST_FILES:
            self._write_whole()
        else:
            self._write(is_whole=False, changes=changes)

    def _apply(self, changes: Changes) -> None:
        for key, value in changes.items():
            if value is None:
                self._state.pop(key, None)
            else:
                self._state[key] = value

    def _write_whole(self) -> None:
        before = self._names()
        self._write(is_whole=True, changes=self._state)
        if before:
            self._fs.rm(before)
        self._num_files = 1

    def _write(self, *, is_whole: bool, changes: Changes) -> None:
        self._fs.pipe_file(f"{self._path}/{self._number:012d}{_SUFFIX}", _packed((is_whole, dict(changes))))
        self._number += 1
        self._num_files += 1

    def _names(self) -> list[str]:
        return sorted(name for name in self._fs.ls(self._path, detail=False, refresh=True) if name.endswith(_SUFFIX))


def _stem(name: str) -> str:
    return name.replace("\\", "/").rpartition("/")[2].removesuffix(_SUFFIX)


def _packed(content: Any) -> bytes:
    pickled = pickle.dumps(content)
    return _HEADER.pack(len(pickled), zlib.crc32(pickled)) + pickled


def _unpacked(data: bytes) -> Any:
    if len(data) < _HEADER.size:
        return None
    num_bytes, checksum = _HEADER.unpack_from(data)
    pickled = data[_HEADER.size :]
    return pickle.loads(pickled) if len(pickled) == num_bytes and zlib.crc32(pickled) == checksum else None
