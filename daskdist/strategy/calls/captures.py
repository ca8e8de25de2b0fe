"""The calls that a `daskdist.function` sends, and the places where it waits."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

from daskdist.context_variables import changed
from daskdist.strategy.backend import Backend

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Capture:
    """The calls that one call of a function sends, until it returns."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_other_calls = 0
        # The places where it waited for a result, each with the reason.
        self.waits: list[str] = []
        self.is_over = False
        # id -> a backend with calls of the function.
        self._backends: dict[int, Backend] = {}
        self._awaited: list[Callable[[], Any]] = []

    def add(self, backend: Backend, *, is_step: bool) -> None:
        """Record a call of a backend, before the end."""
        if self.is_over:
            return
        self._backends[id(backend)] = backend
        if is_step:
            self.num_steps += 1
        else:
            self.num_other_calls += 1

    def wait_for(self, wait: Callable[[], Any]) -> None:
        """Register a wait for the end of the function, for calls without results that can be read."""
        self._awaited.append(wait)

    def note_wait(self, reason: str) -> None:
        """Record that the function waits, before the end."""
        if not self.is_over:
            self.waits.append(f"{reason}, {_where()}")

    def end(self) -> None:
        """Run the registered waits."""
        self.is_over = True
        awaited, self._awaited = self._awaited, []
        failure: Exception | None = None
        for wait in awaited:
            try:
                wait()
            except Exception as error:
                # Raise the first error; the others are dropped.
                failure = failure or error
        if failure is not None:
            raise failure

    def raise_unobserved(self) -> None:
        """Raise the error of a call whose results were not read and no longer can be."""
        for backend in self._backends.values():
            backend.raise_unobserved()


# The capture of the running function, if any. It is over in a coroutine that the function started and that continues.
current_capture: Final[ContextVar[Capture | None]] = ContextVar("daskdist capture", default=None)


@contextlib.contextmanager
def capturing() -> Iterator[Capture]:
    """Capture the calls of a ``with`` block; a nested block adds to the outer capture."""
    outer = current_capture.get()
    if outer is not None and not outer.is_over:
        yield outer
        return
    capture = Capture()
    with changed(current_capture, capture):
        try:
            yield capture
        finally:
            # Run the waits after an error of the function, too.
            capture.end()
        capture.raise_unobserved()


def _where() -> str:
    # Return the innermost line of the user's program.
    frame: Any = inspect.currentframe()
    while frame is not None and _is_of_a_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "in a library"
    return f"in {os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"


def _is_of_a_library(path: str) -> bool:
    return path.startswith(_PACKAGE) or f"{os.sep}site-packages{os.sep}" in path or path == contextlib.__file__
