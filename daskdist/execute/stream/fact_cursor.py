"""The cursor over elements with a fact about each."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from daskdist.core.failing.failed_elements import NO_ELEMENT_FAILED, FailedBeforeError
from daskdist.core.failing.origin import Skipped
from daskdist.core.failing.skip_errors import WithoutInputs
from daskdist.core.primitive import Cursor, Epoch, Exhausted, Fact, Noted, NotReady
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import Run, RunQueue
from daskdist.execute.caller import Handle
from daskdist.execute.resume.recorded_answers import INPUTS_BEFORE, Path
from daskdist.execute.stream.calls import GetItem, OfLength, RepeatedCall, changed_length, fill_again
from daskdist.execute.stream.gather import run_bytes
from daskdist.execute.stream.runtime import StreamRuntime

# The number of elements in the first call of a function that may make many elements of each.
_FIRST_ELEMENTS = 4


@dataclass(slots=True)
class _FactCall:
    # A call: its input elements, the elements that its fact is about, its handle, its number if it is recorded, and
    # whether it is made again since it failed.
    inputs: Run
    run: Run
    handle: Handle
    number: int | None = None
    is_again: bool = False


class FactCursor:
    """A cursor over elements and facts about them, which are computed ahead on the worker that has the elements.

    Its log has for each call the number of its inputs, the number of elements that it made, and the fact.
    """

    def __init__(self, runtime: StreamRuntime, fact: Fact, path: Path, epoch: Epoch, source: Cursor) -> None:
        self.runtime = runtime
        self.fact = fact
        self.source = source
        self.log = runtime.answers.open(path, epoch)
        self._pending: deque[_FactCall] = deque()
        self.waiting = RunQueue()
        # The number of calls that were repeated as recorded.
        self._num_repeated = 0
        # An error of the input, raised when the elements before it were handed out.
        self._failure: Exception | None = None
        # The error of a call whose failing element was not found yet, and the number of elements that it may be.
        self._suspect: tuple[Exception, int] | None = None
        # The numbers of calls for which failed earlier inputs were dropped.
        self._dropped: set[int] = set()
        # The most bytes of the elements that a call made, for each of its inputs.
        self._input_bytes = 0.0
        # The number of input elements whose facts were handed out.
        self.num_given = 0
        self.is_over = False

    def pull(self) -> Noted:
        self._ask_ahead()
        if not self._pending:
            failure, self._failure = self._failure, None
            raise Exhausted if failure is None else failure
        call = self._pending[0]
        is_raised = isinstance(call.handle, _Raised)
        if call.number is not None and self._is_known(call.number) and not is_raised:
            return self._known(self._pending.popleft(), call.number)
        caller = self.runtime.caller
        if not self.runtime.waits and not is_raised and not caller.is_done(call.handle):
            raise NotReady
        try:
            if is_raised:
                raise call.handle.error
            fact = caller.result(call.handle)
        except Exception as error:
            self._bisect(call, error)
            return self.pull()
        self._pending.popleft()
        self._rule_out(len(call.inputs))
        run, fact = self._made(call, fact) if self.fact.makes_rows else (call.run, fact)
        self.num_given += len(call.inputs)
        if call.number is None:
            self.log.cuts.append(len(call.inputs))
            self.log.rows.append(len(run))
            self.log.note_fact(fact, len(run))
        return Noted(run, fact)

    def _made(self, call: _FactCall, result: Any) -> tuple[Run, Any]:
        # Return the elements that a call made, and the fact about them.
        (ref,) = call.run.blocks  # type: ignore[union-attr]
        num_rows, num_bytes, skipped, fact = result
        self.runtime.resize(ref, num_bytes)
        self._input_bytes = max(self._input_bytes, num_bytes / max(len(call.inputs), 1))
        if call.number is not None and num_rows != self.log.rows[call.number]:
            raise changed_length(self.fact.name, "the elements", self.log.rows[call.number], num_rows)
        ref.num_rows = num_rows
        number = len(self.log.cuts) if call.number is None else call.number
        self.log.note_logged(number, skipped)
        self.runtime.note_skipped(skipped)
        return Selection.whole(ref), fact

    def skip(self, num_elements: int) -> int:
        """Skip the elements of recorded calls without their facts; fewer if a call is not over."""
        num_skipped = num_inputs = 0
        log, number = self.log, 0
        while number < len(log.cuts) and log.rows[number] <= num_elements - num_skipped:
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
        return self.log.facts[number] is not None or self.fact.is_of_pass

    def _known(self, call: _FactCall, number: int) -> Noted:
        self.num_given += len(call.inputs)
        if self.runtime.used is not None:
            self.runtime.used.note_calls(self.log, number, number + 1)
        if self.fact.makes_rows:
            (ref,) = call.run.blocks  # type: ignore[union-attr]
            ref.num_rows, name = self.log.rows[number], self.fact.name
            function, caller = OfLength(name, ref.num_rows), self.runtime.caller
            ref.handle = caller.call(function, [ref.handle], worker=ref.worker, is_cheap=True, name=name)
            return Noted(Selection.whole(ref), self.log.facts[number])
        return Noted(call.run, self.log.facts[number])

    def _ask_ahead(self) -> None:
        runtime = self.runtime
        while not self.is_over and self._failure is None and len(self._pending) <= runtime.caller.num_ahead:
            if self._pending and not runtime.reads.has_room():
                return
            try:
                with runtime.waiting(not self._pending):
                    if self._num_repeated < len(self.log.cuts):
                        self._repeat(self._num_repeated)
                        continue
                    run = self._next_inputs()
            except Exhausted:
                self.is_over = True
            except NotReady:
                if not self._pending:
                    raise
                return
            except Exception as error:
                if not self._pending:
                    raise
                self._failure = error
            else:
                self._ask(run)
                self._num_repeated = sys.maxsize

    def _repeat(self, number: int) -> None:
        # Make a recorded call, if its fact or the elements that it makes are needed.
        num_inputs = self.log.cuts[number]
        self._drop(number)
        fill_again(self.waiting, self.source.pull, num_inputs, self.fact.name)
        inputs = self.waiting.pop(num_inputs)
        self._num_repeated += 1
        if self._is_known(number) and not self.fact.makes_rows:
            self._pending.append(_FactCall(inputs, inputs, None, number))
        else:
            self._ask(inputs, number)

    def _bisect(self, call: _FactCall, error: Exception) -> None:
        # Find the failing element by bisection: those before it are handed out first, those after it later.
        inputs = call.inputs
        if call.number is not None:
            # These elements existed before the position was taken, and later answers are of no use without them.
            raise error
        self._pending.popleft()
        if isinstance(error, NO_ELEMENT_FAILED):
            self._suspect = None
            raise error
        if len(inputs) == 1:
            self._suspect = None
            self._fail(error, 1)
        rest, self._pending = self._pending, deque()
        if self._suspect is None and not call.is_again:
            # The error may be transient.
            self._ask(inputs)
            self._pending[0].is_again = True
        else:
            self._suspect = self._suspect or (error, len(inputs))
            middle = len(inputs) // 2
            self._ask(inputs[:middle])
            self._ask(inputs[middle:])
        self._pending.extend(rest)

    def _rule_out(self, num_inputs: int) -> None:
        # If no element fails on its own, they fail only together: for example, one has another structure. Then the
        # error of the call is raised in place of the last elements.
        if self._suspect is not None:
            error, num_left = self._suspect
            self._suspect = (error, num_left - num_inputs) if num_left > num_inputs else None
            if self._suspect is None:
                self._fail(error, num_inputs)

    def _fail(self, error: Exception, num_inputs: int) -> None:
        self.runtime.note_failure(error, self.log, len(self.log.cuts), (INPUTS_BEFORE, num_inputs))
        raise error

    def _drop(self, number: int) -> None:
        # Drop the inputs before those of a call that failed before the position.
        num_inputs = sum(element.number for element in self.log.elements_left_out(number) if element.is_raised)
        if num_inputs and number not in self._dropped:
            self.waiting.fill(self.source.pull, num_inputs)
            self.waiting.pop(num_inputs)
            self._dropped.add(number)
            raise FailedBeforeError

    def _next_inputs(self) -> Run:
        if self._num_repeated == len(self.log.cuts):
            self._drop(self._num_repeated)
        if not self.fact.makes_rows:
            return self.waiting.pop(len(self.waiting)) if self.waiting else self.source.pull()
        # One element may make many rows, and the function may be slow: each call takes as many as all before it, unless
        # the rows are too large for one block.
        self.waiting.fill(self.source.pull, 1)
        most_inputs = self.runtime.most_bytes / max(self._input_bytes, 1)
        return self.waiting.pop(max(int(min(max(self.num_given, _FIRST_ELEMENTS), most_inputs)), 1))

    def _ask(self, inputs: Run, number: int | None = None) -> None:
        try:
            self._call(inputs, number)
        except NO_ELEMENT_FAILED:
            raise
        except Exception as error:
            # A caller that makes calls at once also raises at once; the results of earlier calls are handed out first.
            self._pending.append(_FactCall(inputs, inputs, _Raised(error), number))

    def _call(self, inputs: Run, number: int | None) -> None:
        fact, runtime, worker = self.fact, self.runtime, self.runtime.near(inputs)
        elements = () if number is None else self.log.elements_left_out(number)
        left_out = frozenset(element.number for element in elements if not element.is_raised)
        function: Any = WithoutInputs(fact.function, left_out) if left_out else fact.function
        if number is not None:
            function = RepeatedCall(function, fact.name)
        handle = runtime.ask(inputs, worker=worker, name=fact.name, function=function)
        if not fact.makes_rows:
            self._pending.append(_FactCall(inputs, inputs, handle, number))
            return
        reported = runtime.caller.call(with_report, [handle], worker=worker, name=f"{fact.name}-fact")
        rows = runtime.caller.call(GetItem(0), [handle], worker=worker, name=f"{fact.name}-rows")
        ref = runtime.refer(rows, -1, int(run_bytes(inputs)), worker, runtime.reads)
        self._pending.append(_FactCall(inputs, Selection((ref,), range(0)), reported, number))


@dataclass(frozen=True)
class _Raised:
    # Replaces the handle of a call that raised at once.
    error: Exception


def with_report(values: Sequence[Any]) -> tuple[int, int, tuple[Skipped, ...], Any]:
    """Return the number and the bytes of the rows that a fact is about, the elements left out before, and the fact."""
    rows, fact = values[0]
    return len(rows), rows.nbytes, rows.skipped, fact
