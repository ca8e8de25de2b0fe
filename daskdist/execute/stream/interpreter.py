"""The interpreter, which opens a cursor for each primitive of a pipeline.

It knows the primitives, and no operation.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from daskdist.cached_property import cached_property
from daskdist.core.failing.failed_element import FAILED
from daskdist.core.failing.try_each import not_made
from daskdist.core.primitive import (
    Arrange,
    Chain,
    Compute,
    Cursor,
    Epoch,
    Fact,
    FailedRun,
    KeepingElements,
    Opener,
    Primitive,
    Read,
    SkippingByArithmetic,
    Stream,
)
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.skipping import advance
from daskdist.errors import ArgumentError, UserFunctionError
from daskdist.execute.resume.deferring import DeferringCaller, RefusedError, RefusingCaller
from daskdist.execute.resume.position import StreamPosition
from daskdist.execute.resume.recorded_answers import AnswerLog, Path, PathKey, UsedAnswers
from daskdist.execute.resume.skipping import SkippingCursor
from daskdist.execute.stream.calls import Constant
from daskdist.execute.stream.cursors import ChainCursor, ComputeCursor
from daskdist.execute.stream.fact_cursor import FactCursor, FailedInPlace
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
    # The stream in which positions are taken, and the one at which it was opened.
    stream_of_positions: tuple[Primitive, StreamPosition] | None = None

    def open(self, primitive: Primitive, path: Path = (), *, is_paired: bool = False) -> Opener:
        """Return a function that opens a cursor over the primitive's elements for an epoch.

        Parameters
        ----------
        primitive
            The primitive.
        path
            The path from the end of the pipeline to the primitive.
        is_paired
            Whether an operation on the path joins elements of several inputs by their numbers.
        """
        make = self._maker(primitive, path, is_paired)

        def opener(epoch: Epoch) -> Any:
            cursor = make(epoch)
            if self._advance is None or isinstance(cursor, SkippingCursor):
                return cursor
            if self._advance.is_half_way and isinstance(cursor, KeepingElements):
                # Call this before the cursor reaches its end, where it would keep elements of which it saw only some.
                cursor.resume(is_trial=self.is_trial)
            return SkippingCursor(cursor)

        return opener

    def open_at(self, primitive: Primitive, start: StreamPosition) -> Cursor:
        """Return a cursor over the rest of a stream after a position; nothing before it is read.

        Raises
        ------
        ArgumentError
            The stream is shorter.
        """
        answers, num_elements = start.answers, start.num_elements
        if answers is None:
            return self.open(primitive)(start.epoch)
        self.answers = answers
        caller = self.caller if isinstance(self.caller, DeferringCaller) else DeferringCaller(self.caller)
        self.caller = caller
        is_half_way = bool(num_elements or answers.logs)
        advance_now = self._advance = _Advance(is_half_way)
        before, self.waits = self.waits, True
        try:
            with caller.deferring():
                cursor: Any = self.open(primitive)(start.epoch)
                advance(cursor, num_elements)
        finally:
            self._advance, self.waits = None, before
        for passes in advance_now.finished_passes:
            answers.drop(*passes)
        return cursor  # type: ignore[no-any-return]

    def position_at(self, num_elements: int) -> list[Any]:
        """Return the position in the stream after a number of elements, as data.

        Operations that ask for facts need only the facts after their last resume point.
        """
        for cursor in list(self.worker_streams):
            cursor.note_position(num_elements)
        answers, used = self.answers, UsedAnswers()
        if any(log.facts for log in answers.logs.values()) and self._advance_trial(num_elements, used):
            answers = answers.only(used)
        _, start = self.stream_of_positions  # type: ignore[misc]
        return replace(start, num_elements=num_elements, answers=answers).as_plain(self.caller)

    def failed_run(self, error: Exception, where: str, *, is_new: bool) -> FailedRun:
        """Return the signal for an element whose stream cannot be made, which did not fail before if ``is_new``."""
        handle = self.caller.source(Constant(not_made(error, where)), name="failed")
        return FailedRun(Selection.whole(self.refer(handle, 1, 0, None, self.reads)), error if is_new else None)

    def note_passes_over(self, path: Path, epoch: Epoch, num_passes: int) -> None:
        """Note that the first passes of a repetition are over at the position to which the stream is advanced."""
        if self._advance is not None:
            self._advance.finished_passes.append((path, epoch, num_passes))

    def drop_answers_before(self, num_elements: int) -> None:
        """Drop the answers that no position after some elements needs: those of repetitions that are over."""
        self._advance_trial(num_elements)

    def _advance_trial(self, num_elements: int, used: UsedAnswers | None = None) -> bool:
        # Advance another stream with the same answers by arithmetic alone; return whether that is possible.
        if self.stream_of_positions is None:
            return False
        trial = Interpreter(RefusingCaller(self.caller))
        trial.is_trial, trial.used = True, used
        primitive, start = self.stream_of_positions
        try:
            trial.open_at(primitive, replace(start, num_elements=num_elements, answers=self.answers.again()))
        except (RefusedError, ArgumentError):
            # Calls would be needed, or the stream has other splits by now.
            return False
        return True

    def _maker(self, primitive: Primitive, path: Path, is_paired: bool) -> Callable[[Epoch], Any]:
        match primitive:
            case Read():
                return lambda epoch: ReadCursor(self, primitive, path, epoch, is_paired=is_paired)
            case Stream():
                self.runs_generators |= primitive.begin is None
                cursor = StreamCursor if primitive.begin is None else WorkerStreamCursor
                return lambda epoch: cursor(self, primitive, path, epoch)
            case Compute() | Chain() | Fact():
                source = self.open(primitive.source, (*path, 0), is_paired=is_paired)
                cursor_type: Any = {Compute: ComputeCursor, Chain: ChainCursor, Fact: FactCursor}[type(primitive)]
                return lambda epoch: cursor_type(self, primitive, path, epoch, source(epoch))
            case Arrange():
                pairs = is_paired or primitive.is_of_pairs
                inputs = [self.open(source, (*path, k), is_paired=pairs) for k, source in enumerate(primitive.inputs)]
                arrangement = primitive.arrangement

                def opened(epoch: Epoch) -> Any:
                    context = ArrangementContext(self, arrangement, path, epoch, is_paired=pairs)
                    cursor = arrangement.open(inputs, epoch, context)
                    if not any(isinstance(source, Fact) and not source.is_strict for source in primitive.inputs):
                        return cursor
                    skips = isinstance(cursor, SkippingByArithmetic) and not self._have_failed(path)
                    return FailedInPlace(cursor, is_grouped=primitive.grouped > 0, skips=skips)

                return opened

    def _have_failed(self, path: Path) -> bool:
        # Return whether elements have no facts that cursors below a path asked for: arithmetic does not count them.
        logs = self.answers.logs.items()
        return any(FAILED in log.rows for (its_path, _, _), log in logs if its_path[: len(path)] == path)


@dataclass
class _Advance:
    # The way in which a stream is advanced, and the repetitions that were passed, as in `Answers.drop`.
    is_half_way: bool
    finished_passes: list[tuple[Path, Epoch, int]] = field(default_factory=list)


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

    def __init__(
        self, interpreter: Interpreter, arrangement: Any, path: Path, epoch: Epoch, *, is_paired: bool
    ) -> None:
        self._interpreter = interpreter
        self._arrangement = arrangement
        self._path = path
        self._epoch = epoch
        self._is_paired = is_paired
        self._num_opened = self._num_recalled = 0
        self.compact = interpreter.compact

    def waiting(self, is_needed: bool, *, is_brief: bool = False) -> AbstractContextManager[None]:
        """Let inputs wait only for elements that are needed now; see `daskdist.core.primitive.Context.waiting`."""
        return self._interpreter.waiting(is_needed, is_brief=is_brief)

    @property
    def home(self) -> Hashable | None:
        return self._interpreter.caller.home

    def open(self, key: Any, element: str | None = None) -> Opener:
        self._num_opened += 1
        path = (*self._path, PathKey(self._epoch, self._num_opened))
        # The log has the numbers of streams that could not be made as cuts.
        has_failed = element is not None and self._num_opened in self._log.cuts
        try:
            primitive = self._arrangement.primitive_of(key)
        except Exception as error:
            if element is None:
                raise
            if not has_failed:
                self._log.cuts.append(self._num_opened)
            raise self._interpreter.failed_run(error, element, is_new=not has_failed) from None
        if has_failed:
            before = UserFunctionError(f"what is made of {element} failed before the position was taken")
            raise self._interpreter.failed_run(before, str(element), is_new=False)
        return self._interpreter.open(primitive, path, is_paired=self._is_paired)

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
