"""Tracebacks without the frames between the user's call and the user's function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Final, ParamSpec, TypeVar

# Top-level packages whose frames are between a user's call and the user's function.
_BETWEEN: Final = frozenset({"asyncio", "concurrent", "dask", "daskdist", "distributed", "threading", "tornado"})

_E = TypeVar("_E", bound=BaseException)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def shortened(error: _E) -> _E:
    """Return an error to raise again, with the frames of the user's function only.

    Parameters
    ----------
    error
        An error that a user's function raised, or one with such a cause.

    Notes
    -----
    Raised again where the user called, its traceback shows that place, the line that raises it, and the user's frames.
    The chain of causes is shortened in place. An error without user frames keeps only its message.
    """
    cause = error.__cause__
    if cause is not None:
        cause.__traceback__ = _from_user_on(cause.__traceback__)
    _cut_context(error if cause is None else cause)
    return error.with_traceback(_from_user_on(error.__traceback__))


def with_short_traceback(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function raise the errors of users' functions with tracebacks as from `shortened`."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise shortened(error)  # noqa: B904 - it keeps its causes

    return call


def _from_user_on(traceback: TracebackType | None) -> TracebackType | None:
    # Frames after the first user frame stay, as the user's function may call this package.
    while traceback is not None and _is_between(traceback):
        traceback = traceback.tb_next
    return traceback


def _cut_context(error: BaseException) -> None:
    # A traceback begins where its error was caught. Errors that were caught between the user's call and the user's
    # function are internal, such as those of an attempt to call the function for many rows at once.
    link, seen = error, {id(error)}
    while (context := link.__context__) is not None and id(context) not in seen:
        if context.__traceback__ is not None and _is_between(context.__traceback__):
            link.__context__ = None
            return
        seen.add(id(context))
        link = context


def _is_between(traceback: TracebackType) -> bool:
    return str(traceback.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in _BETWEEN
