"""Running a pipeline for the results of a function of its elements, for example to write them to files.

Only the results come to this process; the elements stay on the workers and are dropped.
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
from daskdist.long_work import LongWork

logger: Final = logging.getLogger("daskdist")


class HasNumBytes(Protocol):
    """A result of a call, which states the size of its input."""

    @property
    def num_bytes(self) -> int:
        """The size of the elements that the call processed."""
        ...


_F = TypeVar("_F", bound=HasNumBytes)


@dataclass(frozen=True, slots=True)
class PortionSize:
    """The number of elements per call.

    Parameters
    ----------
    num_bytes
        The approximate size of the elements of a call: at least half of this, so that blocks of this size need not be
        split or moved.
    num_rows
        If given, the exact number of elements, whatever their size.
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
    """Call a function on a stream's elements, some at a time, and yield its results in order.

    Parameters
    ----------
    primitive
        The stream.
    function
        ``function(number, rows)``, called on the worker that has the rows; ``number`` counts the calls.
    portion_size
        The number of elements per call.
    caller
        Makes the calls; closed at the end.
    workers
        The workers that take part; ``(None,)`` for this process.
    budget_bytes
        The limit of outstanding bytes on each worker; the setting ``window-bytes`` if None.
    epoch
        The pass.
    name
        The name of the tasks.
    """
    # The first elements are not urgent, and parts of divided splits would only have to be joined again.
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
            output = caller.result(pending[0][1])
            reader.learn(pending.popleft()[0], output.num_bytes)
            yield output
        if interpreter.num_skipped:
            logger.warning("left out %d elements in all", interpreter.num_skipped)
    finally:
        # Calls on workers keep running after an error: wait for them, so that files they write can be removed.
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
    work: LongWork,
) -> None:
    """Run a stream to its end for its side effects; the parameters are those of `side_outputs_of`."""
    try:
        cursor = Interpreter(caller, workers, budget_bytes).open(primitive)(epoch)
        with suppress(Exhausted), work:
            while True:
                work.add(_num_rows(cursor.pull()))
    finally:
        caller.close()


@dataclass(frozen=True)
class Numbered:
    """A function of rows that also gets the number of its call."""

    function: Callable[[int, Rows], Any]
    number: int

    def __call__(self, rows: Rows) -> Any:
        return self.function(self.number, rows)


class _PortionReader:
    # Splits a stream into the inputs of calls.
    def __init__(self, interpreter: Interpreter, primitive: Primitive, portion_size: PortionSize, epoch: Epoch) -> None:
        self.interpreter = interpreter
        self.portion_size = portion_size
        self.source = interpreter.open(primitive)(epoch)
        self.waiting = RunQueue()
        self.is_over = False
        # The number of rows in ``waiting``, and their expected size.
        self._num_rows = 0
        self._expected_bytes = 0.0
        # The size of a row according to the latest call; before any call is done, according to blocks.
        self._row_bytes: float | None = None
        self._first_row_bytes = 0.0

    def is_wanted(self, num_pending: int) -> bool:
        """Return whether to start another call."""
        if (self.is_over and not self.waiting) or num_pending > self.interpreter.caller.num_ahead:
            return False
        return not num_pending or self.interpreter.reads.has_room()

    def pull(self, *, waits: bool) -> Run:
        """Return the elements of the next call."""
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
        """Record the size of a call's elements."""
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
            # A block is often larger than expected.
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
