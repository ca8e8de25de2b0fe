"""The interpreter, which opens a cursor for each primitive of a pipeline.

It knows the primitives, and no operation.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from daskdist.cached_property import cached_property
from daskdist.core.failing.failed_elements import FailedBeforeError
from daskdist.core.primitive import (
    Arrange,
    Chain,
    Compute,
    Cursor,
    Epoch,
    Fact,
    KeepingElements,
    Opener,
    Primitive,
    Read,
    Stream,
)
from daskdist.core.selection.skipping import advance
from daskdist.errors import ArgumentError
from daskdist.execute.resume.deferring import DeferringCaller, RefusedError
from daskdist.execute.resume.recorded_answers import AnswerLog, Answers, Path, PathKey, UsedAnswers
from daskdist.execute.resume.skipping import SkippingCursor
from daskdist.execute.stream.cursors import ChainCursor, ComputeCursor
from daskdist.execute.stream.fact_cursor import FactCursor
from daskdist.execute.stream.read_cursor import ReadCursor
from daskdist.execute.stream.runtime import StreamRuntime
from daskdist.execute.stream.stream_cursors import StreamCursor, WorkerStreamCursor

# The error of a pass that an interrupt ended.
INTERRUPTED: Final = (
    "this pass was interrupted while it took an element from a generator, or copied a step to devices, and cannot go "
    "on; begin another pass, or take a new iterator and give its load_state_dict this one's state_dict(), which runs a "
    "generator again from its start"
)
logger: Final = logging.getLogger("daskdist")


class Interpreter(StreamRuntime):
    """The interpreter of one pipeline: it opens a cursor for each primitive.

    The parameters are those of `StreamRuntime`.
    """

    # The stream that is being advanced to a position, if one is.
    _advance: _Advance | None = None
    # The stream in which positions are taken, its pass, and whether errors were raised in parts of it.
    _stream: tuple[Primitive, Epoch, bool] | None = None

    def open(self, primitive: Primitive, path: Path = ()) -> Opener:
        """Return a function that opens a cursor over the primitive's elements for an epoch.

        Parameters
        ----------
        primitive
            The primitive.
        path
            The path from the end of the pipeline to the primitive.
        """
        make = self._maker(primitive, path)

        def opener(epoch: Epoch) -> Any:
            cursor = make(epoch)
            if self._advance is None or isinstance(cursor, SkippingCursor):
                return cursor
            if self._advance.is_half_way and isinstance(cursor, KeepingElements):
                # Call this before the cursor reaches its end, where it would keep elements of which it saw only some.
                cursor.resume(is_trial=self._advance.is_trial)
            advance = self._advance
            return SkippingCursor(cursor, is_exact=advance.is_exact, is_advancing=lambda: self._advance is advance)

        return opener

    def open_at(
        self,
        primitive: Primitive,
        epoch: Epoch,
        answers: Answers,
        num_elements: int,
        num_errors: int = 0,
        *,
        is_exact: bool = False,
        is_trial: bool = False,
    ) -> Cursor:
        """Return a cursor over the rest of a stream; nothing before the position is read.

        Parameters
        ----------
        primitive, epoch
            The stream.
        answers
            The answers that it got until the position was taken.
        num_elements, num_errors
            The number of elements before the position, and of errors that are not among the answers.
        is_exact
            Whether errors were raised in parts of the stream.
        is_trial
            Whether to do only the arithmetic: no call is made, and nothing outside of the stream changes.

        Raises
        ------
        ArgumentError
            The stream is shorter.
        """
        self.answers = answers
        caller = self.caller if isinstance(self.caller, DeferringCaller) else DeferringCaller(self.caller)
        self.caller = caller
        is_half_way = bool(num_elements or num_errors or answers.logs)
        is_exact = is_exact or num_errors > 0 or any(log.has_raised for log in answers.logs.values())
        advance_now = self._advance = _Advance(is_exact, is_half_way, is_trial)
        before, self.waits = self.waits, True
        try:
            with caller.deferring():
                cursor: Any = self.open(primitive)(epoch)
                advance(cursor, num_elements, num_errors)
        finally:
            self._advance, self.waits = None, before
        for passes in advance_now.finished_passes:
            answers.drop(*passes)
        return cursor  # type: ignore[no-any-return]

    def note_stream(self, primitive: Primitive, epoch: Epoch, *, is_exact: bool = False) -> None:
        """Note the stream in which positions are taken; the parameters are those of `open_at`."""
        self._stream = primitive, epoch, is_exact

    def answers_at(self, num_elements: int, num_errors: int) -> tuple[Answers, int]:
        """Return the answers that a position in the stream needs, and the number of errors that they do not have.

        Operations that ask for facts need only the facts after their last resume point.

        Parameters
        ----------
        num_elements, num_errors
            The number of elements, and of all errors, before the position.
        """
        for cursor in list(self.worker_streams):
            cursor.note_position(num_elements)
        self.chain_failures.look(self.caller, wait=True)
        answers, num_others = self.answers.at(num_elements, num_errors)
        if self._stream is None or num_others or not any(log.facts for log in answers.logs.values()):
            return answers, num_others
        primitive, epoch, is_exact = self._stream
        used = UsedAnswers()
        if is_exact or not self._advance_trial(answers, primitive, epoch, num_elements, used):
            return answers, num_others
        return answers.only(used), num_others

    def note_passes_over(self, path: Path, epoch: Epoch, num_passes: int) -> None:
        """Note that the first passes of a repetition are over at the position to which the stream is advanced."""
        if self._advance is not None:
            self._advance.note(path, epoch, num_passes)

    def drop_answers_before(self, primitive: Primitive, epoch: Epoch, num_elements: int) -> None:
        """Drop the answers that no position after some elements needs: those of repetitions that are over."""
        self._advance_trial(self.answers, primitive, epoch, num_elements)

    def _advance_trial(
        self,
        answers: Answers,
        primitive: Primitive,
        epoch: Epoch,
        num_elements: int,
        used: UsedAnswers | None = None,
    ) -> bool:
        # Advance another stream with the same answers by arithmetic alone; return whether that is possible.
        trial = Interpreter(DeferringCaller(self.caller, refuses=True))
        trial.is_trial, trial.used = True, used
        try:
            trial.open_at(primitive, epoch, answers.again(), num_elements, is_trial=True)
        except (RefusedError, ArgumentError):
            # Calls would be needed, or the stream has other splits by now.
            return False
        return True

    def _maker(self, primitive: Primitive, path: Path) -> Callable[[Epoch], Any]:
        match primitive:
            case Read():
                return lambda epoch: ReadCursor(self, primitive, path, epoch)
            case Stream():
                self.runs_generators |= primitive.begin is None
                cursor = StreamCursor if primitive.begin is None else WorkerStreamCursor
                return lambda epoch: cursor(self, primitive, path, epoch)
            case Compute() | Chain() | Fact():
                source = self.open(primitive.source, (*path, 0))
                cursor_type: Any = {Compute: ComputeCursor, Chain: ChainCursor, Fact: FactCursor}[type(primitive)]
                return lambda epoch: cursor_type(self, primitive, path, epoch, source(epoch))
            case Arrange():
                inputs = [self.open(source, (*path, number)) for number, source in enumerate(primitive.inputs)]
                arrangement = primitive.arrangement
                return lambda epoch: arrangement.open(inputs, epoch, ArrangementContext(self, arrangement, path, epoch))


@dataclass
class _Advance:
    # The way in which a stream is advanced, and the repetitions that were passed, as in `Answers.drop`.
    is_exact: bool
    is_half_way: bool
    is_trial: bool
    finished_passes: list[tuple[Path, Epoch, int]] = field(default_factory=list)

    def note(self, path: Path, epoch: Epoch, num_passes: int) -> None:
        """Note that the first passes of a repetition are over."""
        self.finished_passes.append((path, epoch, num_passes))


def stats_of(interpreters: Sequence[Interpreter], num_elements: int) -> dict[str, Any]:
    """Return the statistics of a pass so far; see `ElementIterator.stats`."""
    by_file: Counter[str] = Counter()
    for interpreter in interpreters:
        by_file.update(interpreter.skipped_of)
    return {
        "num_elements": num_elements,
        "num_skipped": sum(interpreter.num_skipped for interpreter in interpreters),
        "skipped_by_file": dict(by_file),
    }


class ArrangementContext:
    """The services that the cursors of one arrangement may use; see `daskdist.core.primitive.Context`."""

    def __init__(self, interpreter: Interpreter, arrangement: Any, path: Path, epoch: Epoch) -> None:
        self._interpreter = interpreter
        self._arrangement = arrangement
        self._path = path
        self._epoch = epoch
        self._num_opened = self._num_recalled = 0
        self.compact = interpreter.compact

    def waiting(self, is_needed: bool, *, is_brief: bool = False) -> AbstractContextManager[None]:
        """Let inputs wait only for elements that are needed now; see `daskdist.core.primitive.Context.waiting`."""
        return self._interpreter.waiting(is_needed, is_brief=is_brief)

    @property
    def home(self) -> Hashable | None:
        return self._interpreter.caller.home

    def open(self, key: Any) -> Opener:
        self._num_opened += 1
        if self._num_opened in self._log.left_out:
            raise FailedBeforeError
        path = (*self._path, PathKey(self._epoch, self._num_opened))
        try:
            primitive = self._arrangement.primitive_of(key)
        except Exception as error:
            self._interpreter.note_failure(error, self._log, self._num_opened, (0, 0))
            raise
        return self._interpreter.open(primitive, path)

    @cached_property
    def _log(self) -> AnswerLog:
        return self._interpreter.answers.open(self._path, self._epoch)

    def recall(self, make: Callable[[], Any]) -> Any:
        """Return a value as it was before; see `daskdist.core.primitive.Context.recall`."""
        self._num_recalled += 1
        return self._log.value(self._num_recalled - 1, make)

    def note_length(self, number: int, length: int) -> None:
        """Record a length; see `daskdist.core.primitive.Context.note_length`."""
        self._log.note_length(number, length)

    def note_passes_over(self, num_passes: int) -> None:
        """Note passes that are over; see `daskdist.core.primitive.Context.note_passes_over`."""
        self._interpreter.note_passes_over(self._path, self._epoch, num_passes)

    def note_point(self, place: int, state: Any) -> None:
        """Record the state at a place; see `daskdist.core.primitive.Context.note_point`."""
        self._log.note_point(place, state)

    def point_before(self, place: int) -> tuple[int, Any] | None:
        """Return the last recorded state up to a place; see `daskdist.core.primitive.Context.point_before`."""
        point, used = self._log.point_before(place), self._interpreter.used
        if used is not None:
            used.note_point(self._log, point)
        return point

    def lengths(self) -> list[tuple[int, int]]:
        """Return the recorded lengths; see `daskdist.core.primitive.Context.lengths`."""
        return list(self._log.lengths())
