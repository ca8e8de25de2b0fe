"""The interpreter, which opens a cursor for each primitive of a pipeline.

It knows the primitives, and no operation.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from daskdist.core.primitive import (
    Arrange,
    Chain,
    Compute,
    Cursor,
    Epoch,
    Fact,
    Opener,
    Primitive,
    Read,
    Stream,
)
from daskdist.core.selection.skipping import advance
from daskdist.execute.resume.answers import AnswerLog, Answers, Path, PathKey
from daskdist.execute.resume.deferring import DeferringCaller
from daskdist.execute.resume.skipping import SkippingCursor
from daskdist.execute.stream.cursors import ChainCursor, ComputeCursor, ReadCursor
from daskdist.execute.stream.fact_cursor import FactCursor
from daskdist.execute.stream.runtime import StreamRuntime
from daskdist.execute.stream.stream_cursors import StreamCursor, WorkerStreamCursor

logger: Final = logging.getLogger("daskdist")


class Interpreter(StreamRuntime):
    """The interpreter of one pipeline: it opens a cursor for each primitive.

    The parameters are those of `StreamRuntime`.
    """

    # The stream that is being advanced to a position, if one is.
    _advance: _Advance | None = None

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
            if hasattr(cursor, "resume"):
                self._advance.resumed.append(cursor)
            return SkippingCursor(cursor, is_exact=self._advance.is_exact)

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
    ) -> Cursor:
        """Return a cursor over the rest of a stream, of which nothing behind is read.

        Parameters
        ----------
        primitive, epoch
            The stream.
        answers
            The answers that it got until the position was taken.
        num_elements, num_errors
            The number of elements, and of errors, that are behind.
        is_exact
            Whether errors were raised in what the stream is made of.

        Raises
        ------
        ArgumentError
            The stream is shorter.
        """
        self.answers = answers
        caller = self.caller if isinstance(self.caller, DeferringCaller) else DeferringCaller(self.caller)
        self.caller = caller
        opened = self._advance = _Advance(is_exact=is_exact or num_errors > 0)
        before, self.waits = self.waits, True
        try:
            with caller.deferring():
                cursor: Any = self.open(primitive)(epoch)
                advance(cursor, num_elements, num_errors)
        finally:
            self._advance, self.waits = None, before
        if num_elements or num_errors or answers.logs:
            for resumed in opened.resumed:
                resumed.resume()
        return cursor  # type: ignore[no-any-return]

    def _maker(self, primitive: Primitive, path: Path) -> Callable[[Epoch], Any]:
        match primitive:
            case Read():
                return lambda epoch: ReadCursor(self, primitive, path, epoch)
            case Stream():
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
    # A stream that is being advanced; and the cursors that were opened and need to be told that they begin half way.
    is_exact: bool
    resumed: list[Any] = field(default_factory=list)


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
        path = (*self._path, PathKey(self._epoch, self._num_opened))
        return self._interpreter.open(self._arrangement.primitive_of(key), path)

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

    def lengths(self) -> list[tuple[int, int]]:
        """Return the recorded lengths; see `daskdist.core.primitive.Context.lengths`."""
        return list(self._log.lengths())
