"""What is captured of a function: calls that go to a cluster together when it is over."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from daskdist.execute.callers import Caller, Handle

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Session:
    """What is captured until it ends, of all callers."""

    def __init__(self) -> None:
        # By the identity of a caller, that and what it notes.
        self.captures: dict[int, tuple[Any, Any]] = {}
        self.sent: list[Sent] = []
        self.is_over = False
        self._awaited: list[tuple[Caller, Handle]] = []

    def wait_for(self, caller: Caller, handle: Handle) -> None:
        """Have a call waited for when the session ends, since nobody has a result of it to look at."""
        self._awaited.append((caller, handle))

    def all_sent(self) -> list[Sent]:
        """The graphs there were; what waits is sent."""
        for caller, capture in self.captures.values():
            if capture.is_over:
                caller.send_over()
        return self.sent

    def end(self) -> None:
        """Send what is left, and wait for what is to be waited for."""
        self.is_over = True
        failure: Exception | None = None
        for caller, capture in self.captures.values():
            try:
                caller.end(capture)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        awaited, self._awaited = self._awaited, []
        for caller, handle in awaited:
            caller.result(handle)


@dataclass(frozen=True)
class Sent:
    """A graph that was sent.

    Parameters
    ----------
    num_steps
        Calls of `run` in it.
    num_tasks
        Its tasks.
    num_stages
        Tasks of it that come one after the other.
    reason
        Why it was sent before its function ended; None if it was not.
    num_others
        Calls of `run` in the same graph that were not captured with it.
    """

    num_steps: int
    num_tasks: int
    num_stages: int
    reason: str | None
    num_others: int = 0


_session: ContextVar[Session | None] = ContextVar("daskdist session", default=None)
_reason: ContextVar[str | None] = ContextVar("daskdist reason", default=None)


def current_session() -> Session | None:
    """The session of this thread, if there is one."""
    found = _session.get()
    # What was started in it, as a coroutine say, may go on when it is over.
    return None if found is None or found.is_over else found


@contextlib.contextmanager
def session() -> Iterator[Session]:
    """Capture what is called in a ``with`` block; in a session, that goes on."""
    outer = current_session()
    if outer is not None:
        yield outer
        return
    made = Session()
    token = _session.set(made)
    try:
        try:
            yield made
        finally:
            # Also what was called before an error: it would have been made without a session.
            made.end()
    finally:
        made.is_over = True
        _session.reset(token)


@contextlib.contextmanager
def sending_because(reason: str | None) -> Iterator[None]:
    """Give the reason for what is sent in a ``with`` block, where a session goes on; and where in the program it is."""
    if reason is None or current_session() is None:
        yield
        return
    token = _reason.set(f"{reason}, {_where()}")
    try:
        yield
    finally:
        _reason.reset(token)


def sent_because() -> str | None:
    """The reason for what is sent."""
    return _reason.get()


def _where() -> str:
    # The innermost line of the program itself.
    frame: Any = sys._getframe(1)
    while frame is not None and _is_of_a_library(frame.f_code.co_filename):
        frame = frame.f_back
    return (
        "in a library" if frame is None else f"in {os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"
    )


def _is_of_a_library(path: str) -> bool:
    return path.startswith(_PACKAGE) or f"{os.sep}site-packages{os.sep}" in path or path == contextlib.__file__
