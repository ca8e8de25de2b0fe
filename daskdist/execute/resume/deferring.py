"""A caller that can defer calls until their results are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from daskdist.execute.caller import Caller, Handle


class Deferred:
    """A handle of a deferred call: the handles that it needs, and a function that makes the call with real ones."""

    __slots__ = ("__weakref__", "handle", "make", "needs")

    def __init__(self, needs: Sequence[Handle], make: Callable[[list[Handle]], Handle]) -> None:
        self.needs = needs
        # None once the call was made.
        self.make: Callable[[list[Handle]], Handle] | None = make
        self.handle: Handle = None

    def become(self, handle: Handle) -> None:
        """Stand for a call that was made."""
        self.handle, self.needs, self.make = handle, (), None


def real(handle: Handle) -> Handle:
    """Return the caller's own handle of a call, which is made now if it was deferred."""
    if not isinstance(handle, Deferred):
        return handle
    # Use a loop instead of recursion, since each call of a chain needs the one before.
    deferred, stack = handle, [handle]
    while stack:
        last = stack[-1]
        missing = [need for need in last.needs if isinstance(need, Deferred) and need.make is not None]
        if missing:
            stack += missing
            continue
        stack.pop()
        if last.make is not None:
            needs = [need.handle if isinstance(need, Deferred) else need for need in last.needs]
            now = last.make(needs)
            # Making it may have made it stand for another call.
            if last.make is not None:
                last.become(now)
    return deferred.handle


class RefusedError(Exception):
    """A call is needed although none may be made."""


class DeferringCaller:
    """A caller that defers calls while a stream is advanced, and makes them afterwards.

    Parameters
    ----------
    caller
        Makes the calls; all other attributes are its own.
    """

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.is_deferring = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.caller, name)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Defer all calls made in this context."""
        self.is_deferring = True
        try:
            yield
        finally:
            self.is_deferring = False

    def _make(self, needs: Sequence[Handle], make: Callable[[list[Handle]], Handle]) -> Handle:
        return Deferred(tuple(needs), make) if self.is_deferring else make(list(map(real, needs)))

    def call(self, function: Callable[..., Any], handles: Sequence[Handle], *args: Any, **options: Any) -> Handle:
        return self._make(handles, lambda needs: self.caller.call(function, needs, *args, **options))

    def source(self, function: Callable[..., Any], *args: Any, **options: Any) -> Handle:
        return self._make((), lambda needs: self.caller.source(function, *args, **options))

    def upstream(self, graph: Callable[[], Any], key: Any, worker: str | None = None) -> Handle:
        return self._make((), lambda needs: self.caller.upstream(graph, key, worker))

    def is_done(self, handle: Handle) -> bool:
        try:
            now = real(handle)
        except Exception:
            # The result raises the error.
            return True
        return self.caller.is_done(now)

    def wait_for_one(self, handles: Sequence[Handle]) -> None:
        real_handles = []
        for handle in handles:
            try:
                real_handles.append(real(handle))
            except Exception:
                # The call is over, and its result raises the error.
                return
        self.caller.wait_for_one(real_handles)

    def report(self, handle: Handle, *, wait: bool) -> Any:
        return self.caller.report(real(handle), wait=wait)

    def result(self, handle: Handle) -> Any:
        return self.caller.result(real(handle))

    def results(self, handles: Sequence[Handle]) -> list[Any]:
        return self.caller.results(list(map(real, handles)))


class RefusingCaller(DeferringCaller):
    """A caller that defers calls, and raises `RefusedError` where one is needed."""

    def _refuse(self, *args: Any, **options: Any) -> Any:
        raise RefusedError

    stream = is_done = wait_for_one = report = result = results = _refuse
