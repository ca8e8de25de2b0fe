"""Methods that hold the lock of their object, so that several threads can use one iterator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class HasLock(Protocol):
    """An object with a lock that one thread may acquire several times.

    A thread may need it twice: the garbage collector can close an iterator in the middle of that iterator's own step.
    """

    _lock: Any


_S = TypeVar("_S", bound=HasLock)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def synchronized(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """Make a method hold the object's ``_lock`` while it runs."""

    @functools.wraps(method)
    def with_lock(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._lock:
            return method(self, *args, **kwargs)

    return with_lock
