"""Errors of reading and writing, turned into errors that name the file and say whether its content is damaged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final, NamedTuple

from daskdist.errors import DamagedFileError, DaskdistError, FileError
from daskdist.storage.retries import REMOTE_LIBRARIES, refusal
from daskdist.url_secrets import shown_cause

CREDENTIALS: Final = (
    "give credentials by storage_options, such as {'key': ..., 'secret': ...} for s3://, or by the environment, or "
    "{'anon': True} for public data"
)
# Libraries that have no type of error for codecs that they lack: Pillow, HDF5, Zarr, xz. And an error of Python's own
# (its issue 106905) if several threads parse headers of arrays.
_NO_DAMAGE: Final = re.compile(
    r"not (registered|available|supported|implemented)|unsupported|unknown (codec|chunk)|codec not available|"
    r"no zarr data type|invalid .*zarr_format|disallowed extra fields|AST constructor",
    re.IGNORECASE,
)


class DamagedPart(NamedTuple):
    """A part of a split that is damaged.

    Parameters
    ----------
    place
        The place of its first element among those of the split.
    where, reason
        Its name in messages, and the reason.
    num_rows
        Its number of elements; None if that is unknown.
    """

    place: int
    where: str
    reason: str
    num_rows: int | None = 1


def proves_damage(error: Exception) -> bool:
    """Return whether an error shows that the content of a file is damaged, as opposed to any other reason to fail.

    Notes
    -----
    The errors of libraries for damaged content depend on the place of the damage, so they are of nearly any type.
    """
    if isinstance(error, DaskdistError):
        return isinstance(error, DamagedFileError)
    if isinstance(error, (ImportError, MemoryError, NotImplementedError)) or _is_remote(error):
        return False
    if isinstance(error, OSError) and (error.errno is not None or any(map(_is_of_system, type(error).__mro__))):
        return False
    return _NO_DAMAGE.search(str(error)) is None


def _is_of_system(kind: type) -> bool:
    # Return whether a type of errors is one of Python's for a failure of the system, such as TimeoutError.
    return kind is not OSError and kind.__module__ == "builtins" and issubclass(kind, OSError)


@contextmanager
def replaced_errors(replace: Callable[[Exception], FileError | None]) -> Iterator[None]:
    """Raise the error that a function returns in place of each that is not one of daskdist; None lets it pass."""
    try:
        yield
    except DaskdistError:
        raise
    except Exception as error:
        replacement = replace(error)
        if replacement is None:
            raise
        raise replacement from shown_cause(error)


def damage(label: str, problem: str = "damaged or cut short") -> AbstractContextManager[None]:
    """Raise errors of decoding as a `DamagedFileError`, and others as a `FileError`; both name the file.

    Parameters
    ----------
    label
        The name of the file or of its split.
    problem
        The meaning of errors that prove damage, for the message.
    """
    return replaced_errors(lambda error: failure(label, error, problem))


def failure(label: str, error: Exception, problem: str = "damaged or cut short") -> FileError:
    """Return the error to raise in place of a library's, as `damage` does."""
    if proves_damage(error):
        return DamagedFileError(f"{label}: {problem}: {error or type(error).__name__}")
    return _as_file_error(label, error, "cannot be read")


def reading(label: str) -> AbstractContextManager[None]:
    """Raise errors of the system and of remote file systems as a `FileError`; those of decoding pass through."""

    def replace(error: Exception) -> FileError | None:
        is_of_system = isinstance(error, OSError) or _is_remote(error)
        return None if proves_damage(error) or not is_of_system else _as_file_error(label, error, "cannot be read")

    return replaced_errors(replace)


def failures(
    label: str, problem: str, kinds: tuple[type[Exception], ...] = (Exception,)
) -> AbstractContextManager[None]:
    """Raise errors of this context as a `FileError` that names the file, and that is not about its content.

    Parameters
    ----------
    label
        The name of the file.
    problem
        The meaning of errors, for the message.
    kinds
        The errors to convert besides those of libraries of remote file systems.
    """

    def replace(error: Exception) -> FileError | None:
        return _as_file_error(label, error, problem) if isinstance(error, kinds) or _is_remote(error) else None

    return replaced_errors(replace)


def _as_file_error(label: str, error: BaseException, problem: str) -> FileError:
    error = refusal(error)
    if isinstance(error, FileNotFoundError):
        return FileError(
            f"{label}: not found: deleted since it was listed, or on a disk that this machine cannot access"
        )
    if isinstance(error, PermissionError):
        return FileError(f"{label}: access denied: {error}{f'; {CREDENTIALS}' if '://' in label else ''}")
    return FileError(f"{label}: {problem}: {error or type(error).__name__}{advice_for(error) or ''}")


def _is_remote(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in REMOTE_LIBRARIES


def advice_for(error: BaseException) -> str | None:
    """Return what to do about an error of a library of remote file systems; None for any other error."""
    if not _is_remote(error):
        return None
    name = type(error).__name__
    if (status := getattr(error, "status", None)) is not None:
        return f"; {CREDENTIALS}" if status in (401, 403) else ""
    if any(word in name for word in ("Credential", "Token", "Auth", "Profile")):
        return f"; {CREDENTIALS}"
    if any(word in name for word in ("Endpoint", "Connect", "Timeout", "Region", "Bucket")):
        return (
            "; check that the name and the endpoint are right and reachable: storage_options={'endpoint_url': ...} "
            "for s3://"
        )
    return "; check which storage_options the file system takes"
