"""An element whose computation failed, and its error."""

from __future__ import annotations

from typing import Any, Final

from daskdist.core.failing.error_copy import copied_error
from daskdist.core.failing.packed_error import pack_error, unpacked_error
from daskdist.errors import ClusterError, WaitTimeoutError

_OF_ELEMENT: Final = "_daskdist_of_element"
# In place of a number of elements or rows: an element failed.
FAILED: Final = -1
# Errors of calls without a failed element: another cluster, the remaining workers, or a longer wait may have them.
NO_ELEMENT_FAILED: Final = ClusterError, WaitTimeoutError


class FailedElement:
    """A placeholder in rows for an element that could not be computed.

    It holds the place of the element in every operation on elements, and in those that join or count them; what is made
    of it fails with its error.

    Parameters
    ----------
    error
        The error of the computation.
    where
        The name of the element for the log; empty if the error names it.
    file
        The path of its file, if that is damaged; else empty.
    split
        A name that all elements share which failed together, since nothing of their split could be read; an iterator
        raises their error once. Empty if only this element failed.
    stands_for_many
        Whether it stands for an unknown number of elements.
    """

    __slots__ = ("error", "file", "split", "stands_for_many", "where")

    def __init__(
        self, error: Exception, where: str = "", file: str = "", split: str = "", *, stands_for_many: bool = False
    ) -> None:
        self.error = error
        self.where = where
        self.file = file
        self.split = split
        self.stands_for_many = stands_for_many

    def again(self) -> Exception:
        """Return an equal error to raise, with the traceback of the original."""
        return of_element(copied_error(self.error).with_traceback(self.error.__traceback__), self.split)

    def __reduce__(self) -> tuple[Any, ...]:
        return _failed, (pack_error(self.error), self.where, self.file, self.split, self.stands_for_many)


def _failed(packed: bytes, where: str, file: str, split: str, stands_for_many: bool) -> FailedElement:
    error: Any = unpacked_error(packed)
    return FailedElement(error, where, file, split, stands_for_many=stands_for_many)


def of_element(error: Exception, split: str = "") -> Exception:
    """Mark an error after which an iterator continues; ``split`` is as in `FailedElement`."""
    setattr(error, _OF_ELEMENT, split)
    return error


def is_of_element(error: BaseException) -> bool:
    """Return whether an iterator continues after an error."""
    return hasattr(error, _OF_ELEMENT)


def must_raise(error: Exception, reported: set[str]) -> bool:
    """Return whether an iterator must raise an error; ``reported`` has the splits whose error it has raised."""
    split = getattr(error, _OF_ELEMENT, "")
    is_known = split in reported
    if split:
        reported.add(split)
    return not is_known
