"""Files of HTTP servers without range requests: downloaded whole, once, and kept in memory up to a limit."""

from __future__ import annotations

import io
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import IO, Any, Final

from daskdist.config import in_bytes, setting
from daskdist.errors import FileError
from daskdist.storage.retries import retried

_AT_ONCE: Final = 2**20
# The largest file that is read by one request, the bytes of such files that are kept, and for how long if nothing tells
# whether the content is still the same.
_SMALL: Final = 2**20
_KEPT: Final = 2**24
_UNTAGGED_S: Final = 10
# Part of fsspec's message when a request for a range returned the whole file.
_REFUSED: Final = "range requests"


def is_http(path: str) -> bool:
    """Return whether a URL is on an HTTP server."""
    return path.startswith(("http://", "https://"))


def check_writable(path: str) -> None:
    """Check that a path can be written, before anything is read or listed.

    Raises
    ------
    FileError
        It is on an HTTP server.
    """
    if is_http(path.rpartition("::")[2]):
        raise FileError(
            f"{path}: cannot be written: files of HTTP servers are only read; give a local path, or a URL of a file "
            "system such as s3://"
        )


def without_query(url: str) -> str:
    """Return a path or URL without the query of an HTTP server, so that it ends with the name of the file."""
    return url.partition("?")[0] if is_http(url.rpartition("::")[2]) else url


class HttpFiles:
    """The files of HTTP servers that a dataset reads, so that few requests are made for small ones.

    Notes
    -----
    The answer to the first request for a file is kept, so that a file that is changed before it is listed is noticed.
    The contents of small files that were read to infer types are kept for reading their rows: up to a total size, and
    without a tag or time of the content only for a few seconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._infos: dict[str, Mapping[str, Any]] = {}
        self._contents: OrderedDict[Any, tuple[float, bytes]] = OrderedDict()

    def info(self, fs: Any, url: str, *, is_current: bool = False) -> Mapping[str, Any]:
        """Return the size and tag of a file as they were first looked up, or if ``is_current``, as they are now."""
        info = None if is_current else self._infos.get(url)
        if info is None:
            info = retried(fs.info, url)
            self._infos.setdefault(url, info)
        return info

    def open(self, fs: Any, url: str) -> IO[bytes]:
        """Open a file as `open_http` does; a small one is downloaded whole."""
        info = self.info(fs, url)
        size = info.get("size")
        if size is None or size > _SMALL:
            return open_http(fs, url, info)
        key = _key(url, info)
        with self._lock:
            fetched_at, content = self._contents.get(key, (0.0, None))
        if content is None or (not _has_tag(info) and time.monotonic() - fetched_at > _UNTAGGED_S):
            content = retried(_fetched, fs, url, size, _SMALL)
            with self._lock:
                self._contents[key] = time.monotonic(), content
                while len(self._contents) * _SMALL > _KEPT and _num_bytes(self._contents) > _KEPT:
                    self._contents.popitem(last=False)
        return io.BytesIO(content)


def _has_tag(info: Mapping[str, Any]) -> bool:
    return bool(info.get("ETag") or info.get("Last-Modified"))


def _num_bytes(contents: Mapping[Any, tuple[float, bytes]]) -> int:
    return sum(len(content) for _, content in contents.values())


def open_http(fs: Any, url: str, info: Mapping[str, Any]) -> IO[bytes]:
    """Open a file, read by ranges if the server supports them and otherwise as a whole.

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
            return retried(ranges, start, stop)
        except ValueError as error:
            if _REFUSED not in str(error):
                raise
            return _whole.content(fs, url, info)[start:stop]

    cache.fetcher = fetch
    return file


def num_bytes(fs: Any, url: str, info: Mapping[str, Any]) -> int:
    """Return the size of a file, which is downloaded if the server does not state it.

    Raises
    ------
    FileError
        The file has to be downloaded, and is larger than the setting ``whole-file-bytes``.
    """
    return len(_whole.content(fs, url, info)) if info.get("size") is None else int(info["size"])


class _WholeFiles:
    # Downloaded files up to a total size; the least recently used are dropped.
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
        # Threads that need the same file download it once.
        with lock:
            with self._lock:
                if key in self._files:
                    self._files.move_to_end(key)
                    return self._files[key]
            limit = in_bytes("whole-file-bytes")
            content = retried(_fetched, fs, url, info.get("size"), limit)
            with self._lock:
                self._files[key] = content
                while len(self._files) > 1 and sum(map(len, self._files.values())) > limit:
                    old, _ = self._files.popitem(last=False)
                    self._locks.pop(old, None)
        return content


_whole: Final = _WholeFiles()


def _key(url: str, info: Mapping[str, Any]) -> Any:
    return url, info.get("size"), info.get("ETag"), info.get("Last-Modified")


def _fetched(fs: Any, url: str, size: int | None, limit: int) -> bytes:
    content = bytearray()
    if size is None or size <= limit:
        with fs.open(url, "rb", block_size=0, size=size) as stream:
            while len(content) <= limit and (chunk := stream.read(_AT_ONCE)):
                content += chunk
        if len(content) <= limit:
            if size is not None and len(content) != size:
                raise FileError(f"{url}: the server states {size} bytes, but sent {len(content)}")
            return bytes(content)
    raise FileError(
        f"{url}: the server does not support range requests, so the file has to be downloaded whole, but its "
        f"{size if size is not None else f'more than {limit}'} bytes exceed the setting "
        f"daskdist.whole-file-bytes, {setting('whole-file-bytes')}; set that higher if there is enough memory, or "
        "download the file first"
    )
