"""Copies of errors that are raised more than once, so that each has its own notes and traceback."""

from __future__ import annotations

from typing import Any, TypeVar

from daskdist.core.failing.packed_error import parts_of
from daskdist.errors import DaskdistError

_E = TypeVar("_E", bound=BaseException)


def copied_error(error: _E) -> _E:
    """Return an equal error with the same notes and cause, without a traceback; the error itself if it is not copied.

    An error that is raised in two threads would have the frames of both in its traceback.
    """
    try:
        make, arguments, state = parts_of(error)
        error_copy: _E = make(*arguments)  # type: ignore[assignment]
        error_copy.__setstate__(state)
    except Exception:
        return error
    if str(error_copy) != str(error):
        # The error cannot be created from its arguments.
        return error
    if hasattr(error, "__notes__"):
        error_copy.__notes__ = list(error.__notes__)
    error_copy.__cause__, error_copy.__suppress_context__ = error.__cause__, True
    return error_copy


def type_and_arguments(error: Exception) -> tuple[type[Exception], tuple[Any, ...]]:
    """Return the type and the arguments of an equal error, without the traceback."""
    try:
        type(error)(*error.args)
    except Exception:
        return DaskdistError, (f"{type(error).__name__}: {error}",)
    return type(error), error.args
