"""`PassIterator`: what iterators over one run through pipelines have in common, in the program."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator
from threading import RLock
from time import perf_counter
from typing import Any, Final

from daskdist.core.failing.short_traceback import shortened
from daskdist.core.node import Node, warn_if_empty
from daskdist.display.missing_methods import Advised
from daskdist.display.pages import times_in_words, times_page
from daskdist.display.step_times import StepTimes
from daskdist.errors import ArgumentError, UserFunctionError
from daskdist.execute.caller import Caller, LocalCaller
from daskdist.execute.stream.interpreter import INTERRUPTED, Interpreter, stats_of

logger: Final = logging.getLogger("daskdist")


class PassIterator(Iterator[Any], Advised):
    """An iterator over one run through pipelines, which several threads may share.

    After an interrupt it continues with the element that was being taken.
    """

    # The word for an element, in displays.
    _unit = "element"
    # What computes the elements; the last operation, and the interpreter, of each pipeline.
    _caller: Caller
    _nodes: list[Node]
    _interpreters: list[Interpreter]

    def __init__(self) -> None:
        self._times = StepTimes()
        # The number of elements that were handed out.
        self._number = 0
        self._is_over = self._is_closed = False
        # The type and the arguments of an error that ended the pass.
        self._failure: tuple[type[Exception], tuple[Any, ...]] | None = None
        # The position before an element whose request was interrupted: the arguments of `_state`, or its result.
        self._interrupted_at: tuple[Any, ...] | dict[str, Any] | None = None
        self._lock = RLock()

    @abstractmethod
    def _next(self) -> Any:
        """Return the next element, and count it."""

    @abstractmethod
    def _numbers(self) -> tuple[Any, ...]:
        """Return the numbers of the current position, the arguments of `_state`."""

    @abstractmethod
    def _state(self, *numbers: Any) -> dict[str, Any]:
        """Return the state at a position."""

    @abstractmethod
    def _continue_from(self, state: dict[str, Any], *, with_new_caller: bool = False) -> None:
        """Open the pipelines at the position of a state."""

    def __next__(self) -> Any:
        begun_at = perf_counter()
        with self._lock:
            if self._interrupted_at is not None:
                self._reopen()
            before = self._numbers()
            try:
                try:
                    element = self._next()
                finally:
                    self._times.note(begun_at, perf_counter())
                self._times.num_steps += 1
                return element
            except UserFunctionError as error:
                raise shortened(error) from error.__cause__
            except Exception:
                raise
            except BaseException:
                # Elements that were taken from a queue may be lost.
                self._interrupted_at = before
                raise

    def _reopen(self) -> None:
        # Open the pipelines again at the position before an interrupt; another interrupt may come meanwhile.
        if not (self._is_over or self._failure or self._is_closed):
            if self._loses_elements():
                raise ArgumentError(INTERRUPTED)
            if isinstance(self._interrupted_at, tuple):
                self._interrupted_at = self._state(*self._interrupted_at)
            self._continue_from(self._interrupted_at)  # type: ignore[arg-type]
        self._interrupted_at = None

    def _loses_elements(self) -> bool:
        return any(interpreter.runs_generators for interpreter in self._interpreters)

    def _note_end(self, *, has_elements: bool) -> None:
        # Report what the pass left out when it is at its end for the first time.
        num_skipped = sum(interpreter.num_skipped for interpreter in self._interpreters)
        if num_skipped and not self._is_over:
            logger.warning("left out %d elements in all", num_skipped)
        elif not (has_elements or self._is_over):
            warn_if_empty(self._nodes)
        self._is_over = True

    def _position(self) -> dict[str, Any]:
        if self._is_closed:
            raise ArgumentError("state_dict: this iterator is closed; take the position of one before it is closed")
        if isinstance(self._interrupted_at, dict):
            return self._interrupted_at
        return self._state(*(self._interrupted_at or self._numbers()))

    def _load(self, state: dict[str, Any], *, has_begun: bool) -> None:
        if self._is_closed:
            raise ArgumentError("load_state_dict: this iterator is closed; take a new one")
        self._continue_from(state, with_new_caller=has_begun)
        self._interrupted_at = None

    def _own_stats(self) -> dict[str, Any]:
        # These statistics need no answers of workers.
        caller = self._caller
        busy = {"busy_s": caller.busy.by_name()} if isinstance(caller, LocalCaller) else {}
        return {**stats_of(self._interpreters, self._number), **self._times.as_dict(), **busy}

    def _repr_html_(self) -> str:
        return times_page(type(self).__name__, self._own_stats(), self._unit)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {times_in_words(self._own_stats(), self._unit)}>"
