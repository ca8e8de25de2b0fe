"""Elements that nobody wants but for what calls find of them, as when they are written to files.

What the calls give comes here, and the elements stay where they are.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from daskdist.core.block import Rows
from daskdist.core.primitive import Epoch, Exhausted, NotReady, Primitive
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.runs import Run, RunQueue
from daskdist.execute.caller import Caller, Handle
from daskdist.execute.stream.gather import blocks_of, run_bytes
from daskdist.execute.stream.interpreter import Interpreter

logger: Final = logging.getLogger("daskdist")


class HasNumBytes(Protocol):
    """What a call gives."""

    @property
    def num_bytes(self) -> int:
        """The size of the elements it was given."""
        ...


_F = TypeVar("_F", bound=HasNumBytes)


@dataclass(frozen=True, slots=True)
class PortionSize:
    """How many elements a call is given.

    Parameters
    ----------
    num_bytes
        As many as are of about this size: half of it at least, so that blocks of that size need not be cut or moved.
    num_rows
        If given, so many, whatever their size.
    """

    num_bytes: int
    num_rows: int | None = None


def side_outputs_of(
    primitive: Primitive,
    function: Callable[[int, Rows], _F],
    portion_size: PortionSize,
    caller: Caller,
    workers: Sequence[str | None] = (None,),
    budget_bytes: int | None = None,
    *,
    epoch: Epoch = (0,),
    name: str,
) -> Iterator[_F]:
    """What a function gives for the elements of a stream, some at a time, in order.

    Parameters
    ----------
    primitive
        The stream.
    function
        ``function(number, rows)``, called where the rows are; ``number`` counts the calls.
    portion_size
        How many elements a call is given.
    caller
        Who makes the calls; closed at the end.
    workers
        The workers that take part; ``(None,)`` for this process.
    budget_bytes
        Bytes that may be outstanding on each; the setting ``window-bytes`` if None.
    epoch
        Which pass.
    name
        What tasks are called.
    """
    # Nobody waits for the first elements: parts of splits would only have to be put together again.
    caller.divides = False
    interpreter = Interpreter(caller, workers, budget_bytes)
    reader = _PortionReader(interpreter, primitive, portion_size, epoch)
    pending: deque[tuple[Run, Handle]] = deque()
    number = 0
    try:
        while True:
            while reader.is_wanted(len(pending)):
                try:
                    run = reader.pull(waits=not pending)
                except (Exhausted, NotReady):
                    break
                worker = interpreter.near(run)
                pending.append(
                    (run, interpreter.ask(run, worker=worker, name=name, function=Numbered(function, number)))
                )
                number += 1
            if not pending:
                break
            fact = caller.result(pending[0][1])
            reader.learn(pending.popleft()[0], fact.num_bytes)
            yield fact
        if interpreter.num_skipped:
            logger.warning("left out %d elements in all", interpreter.num_skipped)
    finally:
        # Elsewhere calls go on though nobody wants them any more: what they write is to be there before it is removed.
        for _, handle in pending if any(workers) else ():
            with suppress(Exception):
                caller.result(handle)
        pending.clear()
        caller.close()


def run_to_end(
    primitive: Primitive,
    caller: Caller,
    workers: Sequence[str | None] = (None,),
    budget_bytes: int | None = None,
    *,
    epoch: Epoch = (0,),
) -> None:
    """Let a stream run to its end, for what its calls do on the way; the parameters are those of `side_outputs_of`."""
    try:
        cursor = Interpreter(caller, workers, budget_bytes).open(primitive)(epoch)
        with suppress(Exhausted):
            while True:
                cursor.pull()
    finally:
        caller.close()


@dataclass(frozen=True)
class Numbered:
    """A function of a call's number and its rows, in the form of one of rows."""

    function: Callable[[int, Rows], Any]
    number: int

    def __call__(self, rows: Rows) -> Any:
        return self.function(self.number, rows)


class _PortionReader:
    # A stream cut into what calls are given.
    def __init__(self, interpreter: Interpreter, primitive: Primitive, portion_size: PortionSize, epoch: Epoch) -> None:
        self.interpreter = interpreter
        self.portion_size = portion_size
        self.source = interpreter.open(primitive)(epoch)
        self.waiting = RunQueue()
        self.is_over = False
        # Of what waits.
        self._num_rows = 0
        self._expected_bytes = 0.0
        # As the latest call has found it; before any is done, as blocks are that were pulled.
        self._row_bytes: float | None = None
        self._first_row_bytes = 0.0

    def is_wanted(self, num_pending: int) -> bool:
        """Whether one more call is to be under way."""
        if (self.is_over and not self.waiting) or num_pending > self.interpreter.caller.num_ahead:
            return False
        return not num_pending or self.interpreter.reads.has_room()

    def pull(self, *, waits: bool) -> Run:
        """The elements of one call."""
        self.interpreter.waits = waits
        num_rows = self.portion_size.num_rows
        with suppress(Exhausted):
            while len(self.waiting) < num_rows if num_rows else self._num_bytes() < self.portion_size.num_bytes / 2:
                self._pull()
        if not self.waiting:
            raise Exhausted
        run = self.waiting.pop(num_rows or self._num_elements())
        self._num_rows = sum(map(_num_rows, self.waiting.runs))
        self._expected_bytes = sum(map(run_bytes, self.waiting.runs))
        return run

    def learn(self, run: Run, num_bytes: int) -> None:
        """Note what a call has found out of the size of its elements."""
        self._row_bytes = num_bytes / max(_num_rows(run), 1)

    def _pull(self) -> None:
        if self.is_over:
            raise Exhausted
        try:
            run: Run = self.source.pull()
        except Exhausted:
            self.is_over = True
            raise
        self.waiting.push(run)
        self._num_rows += _num_rows(run)
        self._expected_bytes += run_bytes(run)
        caller = self.interpreter.caller
        if self._row_bytes is None and (caller.reports_freely or not self._first_row_bytes):
            # A block is often larger than was expected of it.
            report = caller.report(blocks_of(run)[0].handle, wait=True)
            if report is not None:
                self._first_row_bytes = max(self._first_row_bytes, report.nbytes / max(report.num_rows, 1))

    def _num_bytes(self) -> float:
        if self._row_bytes is not None:
            return self._num_rows * self._row_bytes
        return max(self._expected_bytes, self._num_rows * self._first_row_bytes)

    def _num_elements(self) -> int:
        share = self.portion_size.num_bytes / max(self._num_bytes(), 1)
        return len(self.waiting) if share > 0.5 else max(1, int(len(self.waiting) * share))


def _num_rows(run: Run) -> int:
    return len(run.flat) if isinstance(run, Groups) else len(run)
