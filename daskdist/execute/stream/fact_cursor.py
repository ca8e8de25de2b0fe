"""The cursor over elements with a fact about each."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskdist.core.block import Rows
from daskdist.core.failing.failed_element import FAILED
from daskdist.core.failing.origin import Skipped
from daskdist.core.failing.try_each import TryEach, TryEachMany
from daskdist.core.primitive import Cursor, Epoch, Exhausted, Fact, FailedRun, Noted, NotReady
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import Run, RunQueue
from daskdist.errors import ArgumentError
from daskdist.execute.caller import Handle
from daskdist.execute.resume.recorded_answers import Path
from daskdist.execute.stream.calls import GetItem, OfLength, changed_length, fill_again
from daskdist.execute.stream.gather import run_bytes
from daskdist.execute.stream.runtime import StreamRuntime

# The number of elements in the first call of a function that may make many elements of each.
_FIRST_ELEMENTS = 4


@dataclass(slots=True)
class _FactCall:
    # A call: its input elements, the elements that its fact is about, its handle, and its number if it is recorded.
    inputs: Run
    run: Run
    handle: Handle
    number: int | None = None


class FactCursor:
    """A cursor over elements and facts about them, which are computed ahead on the worker that has the elements.

    Its log has for each call the number of its inputs, the number of elements that it made, and the fact. An element
    that failed, or that the function fails on, is recorded as a call of its own: `pull` raises `FailedRun` for it.
    """

    def __init__(self, runtime: StreamRuntime, fact: Fact, path: Path, epoch: Epoch, source: Cursor) -> None:
        self.runtime = runtime
        self.fact = fact
        self.source = source
        self.log = runtime.answers.open(path, epoch)
        self._pending: deque[_FactCall] = deque()
        self.waiting = RunQueue()
        # The rest of the last call, in order: elements with facts, and elements that failed.
        self._rest: deque[Noted | FailedRun] = deque()
        # The number of calls that were repeated as recorded.
        self._num_repeated = 0
        # An error that ends the stream, raised when the elements before it were handed out.
        self._failure: Exception | None = None
        # The most bytes of the elements that a call made, for each of its inputs.
        self._input_bytes = 0.0
        # The number of input elements whose facts were handed out.
        self.num_given = 0
        self.is_over = False

    def pull(self) -> Noted:
        if not self._rest:
            self._rest.extend(self._next_call())
        part = self._rest.popleft()
        if isinstance(part, FailedRun):
            raise part
        return part

    def _next_call(self) -> Sequence[Noted | FailedRun]:
        # Return the elements of the next call with their facts.
        self._ask_ahead()
        if not self._pending:
            failure, self._failure = self._failure, None
            raise Exhausted if failure is None else failure
        call, caller = self._pending[0], self.runtime.caller
        if call.number is not None:
            known = self._known(call, call.number)
            if known is not None:
                self._pending.popleft()
                self.num_given += len(call.inputs)
                return [known]
        if not self.runtime.waits and not caller.is_done(call.handle):
            raise NotReady
        result = caller.result(call.handle)
        self._pending.popleft()
        self.num_given += len(call.inputs)
        if self.fact.makes_rows:
            run, fact = self._made(call, result)
            return [self._noted(run, fact, call)]
        fact, failed = (result, ()) if self.fact.is_strict else result
        if call.number is not None and failed:
            raise ArgumentError(
                f"load_state_dict: {self.fact.name} needs an element that it had before the position was taken and "
                "that fails now"
            )
        return self._parts(call, fact, failed)

    def _noted(self, run: Run, fact: Any, call: _FactCall) -> Noted:
        if call.number is None:
            self.log.cuts.append(len(call.inputs))
            self.log.rows.append(len(run))
            self.log.note_fact(fact, len(run))
        return Noted(run, fact)

    def _parts(self, call: _FactCall, fact: Any, failed: Sequence[int]) -> list[Noted | FailedRun]:
        # Cut the elements of a call at those that failed, which have no facts.
        if not failed:
            return [self._noted(call.run, fact, call)]
        parts: list[Noted | FailedRun] = []
        start = 0
        for number, stop in enumerate([*failed, len(call.run)]):
            if start < stop:
                part = _FactCall(call.run[start:stop], call.run[start:stop], None)
                parts.append(self._noted(part.run, fact[start - number : stop - number], part))
            if stop < len(call.run):
                self.log.cuts.append(1)
                self.log.rows.append(FAILED)
                self.log.facts.append(None)
                parts.append(self._failed(call.run[stop : stop + 1]))
            start = stop + 1
        return parts

    def _failed(self, run: Run) -> FailedRun:
        # An element that failed; one that the function fails on is replaced. If it no longer fails, it is delivered.
        runtime, name, worker = self.runtime, f"{self.fact.name}-failed", self.runtime.near(run)
        function = TryEach(CheckedBy(self.fact.function))
        handle = runtime.ask(run, worker=worker, name=name, function=function)
        return FailedRun(Selection.whole(runtime.refer(handle, 1, int(run_bytes(run)), worker, runtime.reads)))

    def _made(self, call: _FactCall, result: Any) -> tuple[Run, Any]:
        # Return the elements that a call made, and the fact about them.
        (ref,) = call.run.blocks  # type: ignore[union-attr]
        num_rows, num_bytes, skipped, fact = result
        self.runtime.resize(ref, num_bytes)
        self._input_bytes = max(self._input_bytes, num_bytes / max(len(call.inputs), 1))
        if call.number is not None and num_rows != self.log.rows[call.number]:
            raise changed_length(self.fact.name, "the elements", self.log.rows[call.number], num_rows)
        ref.num_rows = num_rows
        self.runtime.note_skipped(skipped)
        return Selection.whole(ref), fact

    def skip(self, num_elements: int) -> int:
        """Skip the elements of recorded calls without their facts; fewer if a call is not over."""
        num_skipped = num_inputs = 0
        log, number = self.log, 0
        while number < len(log.cuts) and 0 <= log.rows[number] <= num_elements - num_skipped:
            num_skipped += log.rows[number]
            num_inputs += log.cuts[number]
            number += 1
        self.source.skip(num_inputs)  # type: ignore[attr-defined]
        self._num_repeated, self.num_given = number, num_inputs
        if self.runtime.used is not None:
            self.runtime.used.note_calls(log, number, number)
        return num_skipped

    def _is_known(self, number: int) -> bool:
        # A fact that is of use in its own pass only is not computed again.
        return self.log.facts[number] is not None or self.fact.is_of_pass or self.log.rows[number] == FAILED

    def _known(self, call: _FactCall, number: int) -> Noted | FailedRun | None:
        # Return what a recorded call gave; None if it has to be made again.
        log, runtime = self.log, self.runtime
        if not self._is_known(number):
            return None
        if runtime.used is not None:
            runtime.used.note_calls(log, number, number + 1)
        if log.rows[number] == FAILED:
            return self._failed(call.inputs)
        if self.fact.makes_rows:
            (ref,) = call.run.blocks  # type: ignore[union-attr]
            ref.num_rows, name = log.rows[number], self.fact.name
            function = OfLength(name, ref.num_rows)
            ref.handle = runtime.caller.call(function, [ref.handle], worker=ref.worker, is_cheap=True, name=name)
            return Noted(Selection.whole(ref), log.facts[number])
        return Noted(call.run, log.facts[number])

    def _ask_ahead(self) -> None:
        runtime = self.runtime
        while not self.is_over and len(self._pending) <= runtime.caller.num_ahead:
            if self._pending and not runtime.reads.has_room():
                return
            try:
                with runtime.waiting(not self._pending):
                    if self._num_repeated < len(self.log.cuts):
                        self._repeat(self._num_repeated)
                        continue
                    run = self._next_inputs()
                self._ask(run)
                self._num_repeated = sys.maxsize
            except Exhausted:
                self.is_over = True
            except NotReady:
                if not self._pending:
                    raise
                return
            except Exception as error:
                self._failure, self.is_over = error, True

    def _repeat(self, number: int) -> None:
        # Make a recorded call, if its fact or the elements that it makes are needed.
        num_inputs = self.log.cuts[number]
        fill_again(self.waiting, self.source.pull, num_inputs, self.fact.name)
        inputs = self.waiting.pop(num_inputs)
        self._num_repeated += 1
        if self._is_known(number) and not self.fact.makes_rows:
            self._pending.append(_FactCall(inputs, inputs, None, number))
        else:
            self._ask(inputs, number)

    def _next_inputs(self) -> Run:
        if not self.fact.makes_rows:
            return self.waiting.pop(len(self.waiting)) if self.waiting else self.source.pull()
        # One element may make many rows, and the function may be slow: each call takes as many as all before it, unless
        # the rows are too large for one block.
        self.waiting.fill(self.source.pull, 1)
        most_inputs = self.runtime.most_bytes / max(self._input_bytes, 1)
        return self.waiting.pop(max(int(min(max(self.num_given, _FIRST_ELEMENTS), most_inputs)), 1))

    def _ask(self, inputs: Run, number: int | None = None) -> None:
        fact, runtime, worker = self.fact, self.runtime, self.runtime.near(inputs)
        kind: Any = TryEachMany if fact.makes_rows else WithoutFailed
        function: Any = fact.function if fact.is_strict else kind(fact.function)
        handle = runtime.ask(inputs, worker=worker, name=fact.name, function=function)
        if not fact.makes_rows:
            self._pending.append(_FactCall(inputs, inputs, handle, number))
            return
        reported = runtime.caller.call(with_report, [handle], worker=worker, name=f"{fact.name}-fact")
        rows = runtime.caller.call(GetItem(0), [handle], worker=worker, name=f"{fact.name}-rows")
        ref = runtime.refer(rows, -1, int(run_bytes(inputs)), worker, runtime.reads)
        self._pending.append(_FactCall(inputs, Selection((ref,), range(0)), reported, number))


@dataclass(frozen=True)
class CheckedBy:
    """A function that returns its rows if another function does not fail for them."""

    function: Callable[[Rows], Any]

    def __call__(self, rows: Rows) -> Rows:
        self.function(rows)
        return rows


@dataclass(frozen=True)
class WithoutFailed:
    """A function that computes the fact about rows without those that failed or fail now, and returns their places."""

    function: Callable[[Rows], Any]

    def __call__(self, rows: Rows) -> tuple[Any, list[int]]:
        may_have_failed = range(len(rows)) if rows.has_failed else ()
        failed = [index for index in may_have_failed if rows.failed_at(index) is not None]
        good = _without(rows, failed)
        if good is not None:
            with suppress(Exception):
                return self.function(good), failed
        facts, failed = [], []
        for index in range(len(rows)):
            try:
                facts.append(self.function(rows.slice(index, index + 1)))
            except Exception:
                failed.append(index)
        # If none fails by itself, the error was there for a moment, or they fail only together.
        return (_joined(facts), failed) if failed else (self.function(rows), [])


def _without(rows: Rows, failed: Sequence[int]) -> Rows | None:
    # Return the elements that did not fail; None if all did.
    if not failed:
        return rows
    good = sorted(set(range(len(rows))).difference(failed))
    return rows.take(np.array(good, np.intp)) if good else None


def _joined(facts: Sequence[Any]) -> Any:
    if not facts:
        return np.zeros(0, np.intp)
    return [part for fact in facts for part in fact] if isinstance(facts[0], list) else np.concatenate(facts)


def with_report(values: Sequence[Any]) -> tuple[int, int, tuple[Skipped, ...], Any]:
    """Return the number and the bytes of the rows that a fact is about, the elements left out before, and the fact."""
    rows, fact = values[0]
    return len(rows), rows.nbytes, rows.skipped, fact


class FailedInPlace:
    """A cursor of an arrangement of elements with facts: an element that failed, and so has none, is one of its own.

    Parameters
    ----------
    cursor
        The cursor, which passes on the signal `FailedRun`.
    is_grouped
        Whether its elements are batches, of which the failed element is one.
    skips
        Whether it can skip elements by the arithmetic of its cursor, as none has failed.
    """

    def __init__(self, cursor: Any, *, is_grouped: bool, skips: bool) -> None:
        self.cursor = cursor
        if skips:
            # `SkippingByArithmetic` is recognised by this method.
            self.skip = cursor.skip
        self._is_grouped = is_grouped
        # The error of the element that was pulled last, see `FailedRun`.
        self.failed_now: Exception | None = None

    def pull(self) -> Any:
        try:
            return self.cursor.pull()
        except FailedRun as failed:
            run: Any = failed.run
            self.failed_now = failed.error
            return Groups(run, np.array([0, 1])) if self._is_grouped else run
