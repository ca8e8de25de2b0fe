"""Files of HTTP servers that do not serve ranges: read whole, once, and kept in memory up to a limit."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import IO, Any, Final

from daskdist.config import in_bytes, setting
from daskdist.errors import FileError

_AT_ONCE: Final = 2**20
# The message of fsspec when it asked for a range and got the whole file.
_REFUSED: Final = "range requests"


def is_http(path: str) -> bool:
    """Return whether a URL is one of a file on an HTTP server."""
    return path.startswith(("http://", "https://"))


def open_http(fs: Any, url: str, info: Mapping[str, Any]) -> IO[bytes]:
    """Open a file, of which ranges are read where the server serves them, and else the whole.

    Parameters
    ----------
    fs
        The file system.
    url
        The file.
    info
        What the server says of it.

    Raises
    ------
    FileError
        The file has to be read whole, and is larger than the setting ``whole-file-bytes``.
    """
    size = info.get("size")
    if size is None or info.get("partial") is False or _whole.has(url, info):
        return io.BytesIO(_whole.content(fs, url, info))
    file: IO[bytes] = fs.open(url, "rb", size=size)
    cache = getattr(file, "cache", None)
    ranges = getattr(cache, "fetcher", None)
    if cache is None or ranges is None:
        # An empty file.
        return file

    def fetch(start: int, stop: int) -> Any:
        try:
            return ranges(start, stop)
        except ValueError as error:
            if _REFUSED not in str(error):
                raise
            return _whole.content(fs, url, info)[start:stop]

    cache.fetcher = fetch
    return file


def num_bytes(fs: Any, url: str, info: Mapping[str, Any]) -> int:
    """Return the size of a file, which is read if the server does not tell.

    Raises
    ------
    FileError
        It has to be read, and is larger than the setting ``whole-file-bytes``.
    """
    return len(_whole.content(fs, url, info)) if info.get("size") is None else int(info["size"])


class _WholeFiles:
    # Files that were read whole, those used last; together no more than the limit.
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[Any, threading.Lock] = {}
        self._files: OrderedDict[Any, bytes] = OrderedDict()

    def has(self, url: str, info: Mapping[str, Any]) -> bool:
        with self._lock:
            return _key(url, info) in self._files

    def content(self, fs: Any, url: str, info: Mapping[str, Any]) -> bytes:
        key = _key(url, info)
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        # Once for all threads that want it.
        with lock:
            with self._lock:
                if key in self._files:
                    self._files.move_to_end(key)
                    return self._files[key]
            limit = in_bytes("whole-file-bytes")
            found = _fetched(fs, url, info.get("size"), limit)
            with self._lock:
                self._files[key] = found
                while len(self._files) > 1 and sum(map(len, self._files.values())) > limit:
                    old, _ = self._files.popitem(last=False)
                    self._locks.pop(old, None)
        return found


_whole: Final = _WholeFiles()


def _key(url: str, info: Mapping[str, Any]) -> Any:
    return url, info.get("size"), info.get("ETag"), info.get("Last-Modified")


def _fetched(fs: Any, url: str, size: int | None, limit: int) -> bytes:
    found = bytearray()
    if size is None or size <= limit:
        with fs.open(url, "rb", block_size=0) as stream:
            while len(found) <= limit and (chunk := stream.read(_AT_ONCE)):
                found += chunk
        if len(found) <= limit:
            if size is not None and len(found) != size:
                raise FileError(f"{url}: the server says it has {size} bytes, and sent {len(found)}")
            return bytes(found)
    raise FileError(
        f"{url}: its server does not serve ranges of files, so that it has to be read whole, and its "
        f"{size if size is not None else f'more than {limit}'} bytes are more than the setting "
        f"daskdist.whole-file-bytes, {setting('whole-file-bytes')}; set that higher, where memory is large enough, or "
        "download the file first"
    )
