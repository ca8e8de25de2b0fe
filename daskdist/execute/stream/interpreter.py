"""The interpreter, which opens a cursor for each primitive of a pipeline.

It knows the primitives, and no operation.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from daskdist.core.primitive import Arrange, Chain, Compute, Epoch, Fact, Opener, Primitive, Read, Stream
from daskdist.execute.stream.cursors import ChainCursor, ComputeCursor, ReadCursor, StreamCursor, WorkerStreamCursor
from daskdist.execute.stream.fact_cursor import FactCursor
from daskdist.execute.stream.lineage import OpenedCursor, Path, PathKey
from daskdist.execute.stream.runtime import StreamRuntime

logger: Final = logging.getLogger("daskdist")


class Interpreter(StreamRuntime):
    """The interpreter of one pipeline: it opens a cursor for each primitive.

    The parameters are those of `StreamRuntime`.
    """

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
            # A position records this to open the same cursor again. If an arrangement returned a cursor that it opened
            # elsewhere, that place is kept.
            if not isinstance(cursor, OpenedCursor):
                cursor.opened_at = path, epoch
            return cursor

        return opener

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
                context = ArrangementContext(self, primitive.arrangement, path)
                return lambda epoch: primitive.arrangement.open(inputs, epoch, context)


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

    def __init__(self, interpreter: Interpreter, arrangement: Any, path: Path) -> None:
        self._interpreter = interpreter
        self._arrangement = arrangement
        self._path = path
        self.compact = interpreter.compact

    def waiting(self, is_needed: bool, *, is_brief: bool = False) -> AbstractContextManager[None]:
        """Let inputs wait only for elements that are needed now; see `daskdist.core.primitive.Context.waiting`."""
        return self._interpreter.waiting(is_needed, is_brief=is_brief)

    @property
    def home(self) -> Hashable | None:
        return self._interpreter.caller.home

    def open(self, key: Any) -> Opener:
        return self._interpreter.open(self._arrangement.primitive_of(key), (*self._path, PathKey(key)))
