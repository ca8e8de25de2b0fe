"""All error types that daskdist raises.

::

    DaskdistError
    ├── ArgumentError          (ValueError)    an argument out of range, or a structure that does not fit
    ├── StackError             (ValueError)    elements of different shapes cannot form one array
    ├── ShardingError          (ValueError)    a dataset cannot be sharded in the requested way
    ├── FileError              (OSError)       a file is missing, unreadable or unlike its siblings
    │   └── DamagedFileError                   the content of a file is damaged
    ├── UserFunctionError      (RuntimeError)  a function given to ``map``, ``filter`` or ``run`` raised
    ├── UnknownLengthError     (TypeError)     a number of rows is needed, but unknown
    ├── CardinalityError       (RuntimeError)  the number of elements is not the stated one
    ├── UnknownDeviceError     (ValueError)    a device does not exist here
    ├── DeviceMemoryError      (MemoryError)   a device has not enough memory
    ├── MissingPackageError    (ImportError)   an optional package is not installed
    ├── CollectiveError        (RuntimeError)  replicas do not all take part in a joint operation
    ├── ClusterError           (ConnectionError) a scheduler or its workers cannot be used
    ├── RepeatedLossError      (RuntimeError)  workers were lost each time that they made a call or task
    ├── WaitTimeoutError       (TimeoutError)  something did not come within the time of a setting
    └── OutOfRangeError        (EOFError)      an iterator is at its end

Each is also a subclass of a builtin error, so that code that does not know daskdist can catch it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, NoReturn

from daskdist.url_secrets import without_secrets


class DaskdistError(Exception):
    """The base class of all errors of daskdist, whose messages omit the secrets in URLs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(without_secrets(value) if isinstance(value, str) else value for value in args))


class _SecretsFilter(logging.Filter):
    # Removes the secrets in URLs from log records.

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        shown = without_secrets(message)
        if shown != message:
            record.msg, record.args = shown, None
        return True


logging.getLogger("daskdist").addFilter(_SecretsFilter())


class ArgumentError(DaskdistError, ValueError):
    """An argument is out of range, or a structure does not fit."""


class StackError(DaskdistError, ValueError):
    """Elements of different shapes cannot form one array."""


class ShardingError(DaskdistError, ValueError):
    """A dataset cannot be sharded in the requested way."""


class FileError(DaskdistError, OSError):
    """A file is missing, unreadable, or unlike its siblings."""


class DamagedFileError(FileError):
    """The content of a file is damaged: a checksum or its framing is wrong, or a value cannot be parsed.

    No other error of a file is left out with ``Options(on_error="skip")`` or ``ignore_errors()``.
    """


class UserFunctionError(DaskdistError, RuntimeError):
    """A user's function raised an error; the message names the function, its place and the row."""


class UnknownLengthError(DaskdistError, TypeError):
    """A number of rows is needed, but is unknown before the data is read."""


class CardinalityError(DaskdistError, RuntimeError):
    """The number of elements is not the one stated with ``assert_cardinality``."""


class UnknownDeviceError(DaskdistError, ValueError):
    """A device does not exist here."""


class DeviceMemoryError(DaskdistError, MemoryError):
    """A device has not enough memory."""


class MissingPackageError(DaskdistError, ImportError):
    """An optional package is not installed; the message says how to install it."""


class ClusterError(DaskdistError, ConnectionError):
    """A scheduler or its workers cannot be reached or used."""


class CollectiveError(DaskdistError, RuntimeError):
    """Replicas do not all take part in a joint operation: one is missing, lost, or does something else."""


class NotMadeAgainError(ClusterError):
    """Calls that failed with a lost worker, or whose results were lost, are not made again."""


class RepeatedLossError(DaskdistError, RuntimeError):
    """Workers were lost each time that they made a call or task, for example as it takes more memory than they have.

    A call or task is made again as often as Dask's ``distributed.scheduler.allowed-failures`` says, 3 by default; a
    call, only once if Dask ends its workers since they exceed their memory limit.
    """


class WaitTimeoutError(DaskdistError, TimeoutError):
    """Something did not come within the time that a setting allows."""


class OutOfRangeError(DaskdistError, EOFError):
    """An iterator is at its end."""


# Errors of TensorFlow, and those of this package in the same situations.
_OF_TENSORFLOW: Final = {
    **dict.fromkeys(("AbortedError", "UnavailableError"), "ClusterError"),
    **dict.fromkeys(("AlreadyExistsError", "NotFoundError", "PermissionDeniedError"), "FileError"),
    "DataLossError": "DamagedFileError",
    **dict.fromkeys(
        ("CancelledError", "InternalError", "OpError", "UnimplementedError", "UnknownError"), "DaskdistError"
    ),
    "DeadlineExceededError": "WaitTimeoutError",
    "FailedPreconditionError": "CardinalityError",
    "InvalidArgumentError": "ArgumentError",
    "ResourceExhaustedError": "DeviceMemoryError",
}
# Hidden from type checkers, for which `__getattr__` would make all names valid.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        advice = f"; use daskdist.errors.{_OF_TENSORFLOW[name]}" if name in _OF_TENSORFLOW else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")
