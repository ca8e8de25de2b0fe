"""The calls that a `daskdist.function` sends, and the places where it waits."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final, Protocol

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Sender(Protocol):
    """A backend whose calls wait until the function is over."""

    def flush(self) -> None:
        """Send what waits."""
        ...

    def raise_unseen(self) -> None:
        """Raise an error that is known by now and that nobody has looked at, nor can."""
        ...


class Capture:
    """The calls that one call of a function sends, until it is over."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_other_calls = 0
        # The places where it waited for a result, each with the reason.
        self.waits: list[str] = []
        self.is_over = False
        self._senders: dict[int, Sender] = {}
        self._awaited: list[Callable[[], None]] = []

    def add(self, sender: Sender, *, is_step: bool) -> None:
        """Note a call; ``sender`` sends what waits when the function is over."""
        self._senders[id(sender)] = sender
        if is_step:
            self.num_steps += 1
        else:
            self.num_other_calls += 1

    def wait_for(self, wait: Callable[[], None]) -> None:
        """Wait for something when the function is over, since nobody has a result of it to look at."""
        self._awaited.append(wait)

    def note_wait(self, reason: str) -> None:
        """Note that the function waits."""
        self.waits.append(f"{reason}, {_where()}")

    def end(self) -> None:
        """Send what waits, and wait for what is to be waited for."""
        self.is_over = True
        for sender in self._senders.values():
            sender.flush()
        awaited, self._awaited = self._awaited, []
        failure: Exception | None = None
        for wait in awaited:
            try:
                wait()
            except Exception as error:
                # The first is raised, and the others are not raised later.
                failure = failure or error
        if failure is not None:
            raise failure

    def raise_unseen(self) -> None:
        """Raise an error that is known by now and that nobody has looked at, nor can."""
        for sender in self._senders.values():
            sender.raise_unseen()


_current: ContextVar[Capture | None] = ContextVar("daskdist capture", default=None)


def current_capture() -> Capture | None:
    """Return the capture of the function this is in, if it is in one."""
    found = _current.get()
    # A coroutine that was started in it may go on when it is over.
    return None if found is None or found.is_over else found


@contextlib.contextmanager
def capturing() -> Iterator[Capture]:
    """Capture the calls of a ``with`` block; inside of another one those are its own."""
    outer = current_capture()
    if outer is not None:
        yield outer
        return
    capture = Capture()
    token = _current.set(capture)
    try:
        try:
            yield capture
        finally:
            # Also what was called before an error: it would have been made without a function around it.
            capture.end()
        capture.raise_unseen()
    finally:
        capture.is_over = True
        _current.reset(token)


def _where() -> str:
    # The innermost line of the program itself.
    frame: Any = sys._getframe(1)
    while frame is not None and _is_of_a_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "in a library"
    return f"in {os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"


def _is_of_a_library(path: str) -> bool:
    return path.startswith(_PACKAGE) or f"{os.sep}site-packages{os.sep}" in path or path == contextlib.__file__
