"""Every error daskdist raises of its own accord.

::

    DaskdistError
    ├── ArgumentError          (ValueError)    an argument out of range, or a structure that does not fit
    ├── StackError             (ValueError)    elements of different shapes meet where one array is made
    ├── ShardingError          (ValueError)    a dataset cannot be sharded in the way asked for
    ├── FileError              (OSError)       a file is missing, unreadable or unlike its siblings
    ├── UserFunctionError      (RuntimeError)  a function given to ``map``, ``filter`` or ``run`` raised
    ├── UnknownLengthError     (TypeError)     a number of rows is needed and not known
    ├── CardinalityError       (RuntimeError)  there are not as many elements as was stated
    ├── UnknownDeviceError     (ValueError)    no such device here
    ├── DeviceMemoryError      (MemoryError)   a device has no room for what is to be on it
    ├── CollectiveError        (RuntimeError)  replicas that are to do something together do not
    ├── ClusterError           (ConnectionError) a scheduler or its workers cannot be used
    └── OutOfRangeError        (EOFError)      an iterator is at its end

Each is also a subclass of the builtin that fits, so that code that knows nothing of daskdist can catch it.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Final

_PASSWORD_IN_URL: Final = re.compile(r"(?<=://)([^\s/:@'\"]*):[^\s/@'\"]+@")


def without_passwords(text: str) -> str:
    """Return a text with the passwords in URLs replaced.

    >>> without_passwords("no file at ftp://me:secret@host/x")
    'no file at ftp://me:***@host/x'
    """
    return _PASSWORD_IN_URL.sub(r"\1:***@", text) if "://" in text else text


class DaskdistError(Exception):
    """The root of the tree. Messages have no passwords of URLs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(without_passwords(value) if isinstance(value, str) else value for value in args))


class _PasswordFilter(logging.Filter):
    # Removes passwords of URLs from what is logged.

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        shown = without_passwords(message)
        if shown != message:
            record.msg, record.args = shown, None
        return True


logging.getLogger("daskdist").addFilter(_PasswordFilter())


class ArgumentError(DaskdistError, ValueError):
    """An argument is out of range, or a structure does not fit."""


class StackError(DaskdistError, ValueError):
    """Elements of different shapes meet where one array is made of them."""


class ShardingError(DaskdistError, ValueError):
    """A dataset cannot be sharded in the way asked for."""


class FileError(DaskdistError, OSError):
    """A file is missing, unreadable, or unlike its siblings."""


class UserFunctionError(DaskdistError, RuntimeError):
    """A function the user gave raised; the message says which, where and on what row."""


class UnknownLengthError(DaskdistError, TypeError):
    """A number of rows is needed and not known before the data is read."""


class CardinalityError(DaskdistError, RuntimeError):
    """There are not as many elements as ``assert_cardinality`` states."""


class UnknownDeviceError(DaskdistError, ValueError):
    """No such device here."""


class DeviceMemoryError(DaskdistError, MemoryError):
    """A device has no room for what is to be on it."""


class ClusterError(DaskdistError, ConnectionError):
    """A scheduler or its workers cannot be reached or used."""


class CollectiveError(DaskdistError, RuntimeError):
    """Replicas that are to do something together do not: one is missing, lost, or does something else."""


class OutOfRangeError(DaskdistError, EOFError):
    """An iterator is at its end."""
