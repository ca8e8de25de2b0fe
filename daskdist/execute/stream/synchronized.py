"""Methods that hold the lock of their object, so that several threads can use one iterator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def synchronized(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Make a method hold the object's ``_lock`` while it runs, which one thread may acquire several times.

    A thread may need it twice: the garbage collector can close an iterator in the middle of that iterator's own step.
    """

    @functools.wraps(method)
    def with_lock(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return with_lock
