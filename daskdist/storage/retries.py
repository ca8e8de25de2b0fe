"""Requests that a server refuses for a moment, made again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

from daskdist.config import setting
from daskdist.errors import DaskdistError

logger: Final = logging.getLogger("daskdist")
# Timeouts, too many requests, and errors of a server or of a proxy in front of it.
_MOMENTARY: Final = {408, 429, 500, 502, 503, 504}
# A server's refusal that it will not take back by itself.
_GONE: Final = {404, 410}
# Errors of aiohttp for connections that are closed before the answer is complete; one of them is also the base of
# ClientConnectorError, for connections that cannot be opened.
_CLOSED: Final = {"ClientOSError", "ClientPayloadError", "ServerDisconnectedError"}
# Libraries of file systems, most of whose errors derive from Exception only.
REMOTE_LIBRARIES: Final = {
    "adlfs",
    "aiobotocore",
    "aiohttp",
    "asyncio",
    "azure",
    "boto3",
    "botocore",
    "fsspec",
    "gcsfs",
    "google",
    "http",
    "paramiko",
    "requests",
    "s3fs",
    "urllib3",
}
# Libraries whose errors are about the content of archives, and of compressed files.
_OF_CONTENT: Final = {"_lzma", "bz2", "gzip", "lzma", "tarfile", "zipfile", "zlib"}
_P = ParamSpec("_P")
_R = TypeVar("_R")


def retried(call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call a function of a remote file system, and again after pauses while its server refuses for a moment.

    Notes
    -----
    The setting ``daskdist.request-pauses`` has the seconds before each further attempt. File systems such as s3fs and
    gcsfs repeat most requests by themselves; they report a refusal after that.
    """
    for pause in setting("request-pauses"):
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if not is_momentary(error):
                raise
            logger.info("a request is made again in %s s: %s", pause, error)
        time.sleep(pause)
    return call(*args, **kwargs)


def fetched(call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call a function that opens a remote file or fetches bytes of it, as `retried` does.

    Raises
    ------
    ConnectionError
        The file system raised an error of an unknown type, which proves nothing about the content.
    """
    try:
        return retried(call, *args, **kwargs)
    except Exception as error:
        kinds = (OSError, DaskdistError, EOFError, ImportError, MemoryError, NotImplementedError)
        library = type(error).__module__.partition(".")[0]
        if isinstance(error, kinds) or library in REMOTE_LIBRARIES | _OF_CONTENT:
            raise
        raise ConnectionError(f"{type(error).__name__}: {error}") from error


def is_momentary(error: BaseException) -> bool:
    """Return whether an error says that a server refuses a request for a moment, or that a connection was closed."""
    error = refusal(error)
    status = _status(error)
    if status is not None:
        return status in _MOMENTARY
    kinds = {kind.__name__ for kind in type(error).__mro__}
    is_closed = not kinds.isdisjoint(_CLOSED) and "ClientConnectorError" not in kinds
    return is_closed or isinstance(error, (ConnectionResetError, ConnectionAbortedError, BrokenPipeError))


def refusal(error: BaseException) -> BaseException:
    """Return the refusal of a server behind an error: fsspec raises `FileNotFoundError` for most of them."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and cause is not None and not isinstance(cause, FileNotFoundError):
        return error if _status(cause) in _GONE else cause
    return error


def _status(error: BaseException) -> int | None:
    # Return the HTTP status that a library reports: aiohttp, gcsfs, botocore.
    for name in ("status", "code"):
        if isinstance(value := getattr(error, name, None), int):
            return value
    response: Any = getattr(error, "response", None)
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
