"""Tracebacks that show a user's function and not the frames between it and the call that ran it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Final, ParamSpec, TypeVar

# Top-level packages whose frames lie between a user's call and the user's function.
_BETWEEN: Final = frozenset({"asyncio", "concurrent", "dask", "daskdist", "distributed", "threading", "tornado"})

_E = TypeVar("_E", bound=BaseException)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def shortened(error: _E) -> _E:
    """Return an error to raise again, with the frames of the user's function only.

    Parameters
    ----------
    error
        An error that a user's function raised, or one that has such as its cause.

    Notes
    -----
    Raised where a user called, it shows that place, the line that raises it there, and the user's own frames. The
    chain of causes is shortened in place; an error that no user's frame was part of keeps what its message says.
    """
    cause = error.__cause__
    if cause is not None:
        cause.__traceback__ = _from_user_on(cause.__traceback__)
    _cut_context(error if cause is None else cause)
    return error.with_traceback(_from_user_on(error.__traceback__))


def with_short_traceback(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function raise the errors of users' functions as `shortened` has them."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise shortened(error)  # noqa: B904 - it keeps the causes that it has

    return call


def _from_user_on(traceback: TracebackType | None) -> TracebackType | None:
    # Frames that follow the first of the user's stay: the user's function may call this package in turn.
    while traceback is not None and _is_between(traceback):
        traceback = traceback.tb_next
    return traceback


def _cut_context(error: BaseException) -> None:
    # A traceback begins where its error was caught. What was caught between the user's call and the user's function is
    # none of the user's: an attempt to call the function for many rows at once, for instance.
    link, seen = error, {id(error)}
    while (context := link.__context__) is not None and id(context) not in seen:
        if context.__traceback__ is not None and _is_between(context.__traceback__):
            link.__context__ = None
            return
        seen.add(id(context))
        link = context


def _is_between(traceback: TracebackType) -> bool:
    return str(traceback.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in _BETWEEN
