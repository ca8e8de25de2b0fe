"""The cursor over elements with a fact about each."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from daskdist.core.failing.origin import Skipped
from daskdist.core.primitive import Cursor, Epoch, Exhausted, Fact, Noted, NotReady
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.selection.rows import Selection
from daskdist.core.selection.runs import Run, RunQueue
from daskdist.errors import ClusterError
from daskdist.execute.caller import Handle
from daskdist.execute.stream.calls import GetItem
from daskdist.execute.stream.gather import run_bytes
from daskdist.execute.stream.lineage import Lineage, Path, with_lineages
from daskdist.execute.stream.runtime import StreamRuntime

# The number of elements in the first call of a function that may make many elements of each.
_FIRST_ELEMENTS = 16


class FactCursor:
    """A cursor over elements and facts about them, which are computed ahead on the worker that has the elements."""

    def __init__(self, runtime: StreamRuntime, fact: Fact, path: Path, epoch: Epoch, source: Cursor) -> None:
        self.runtime = runtime
        self.fact = fact
        self.path = path
        self.epoch = epoch
        self.source = source
        # For each call: its input elements, the elements that its fact is about, and its handle.
        self._pending: deque[tuple[Run, Run, Handle]] = deque()
        self.waiting = RunQueue()
        # The error of a call whose failing element was not found yet, and the number of elements that may be it.
        self._suspect: tuple[Exception, int] | None = None
        # The number of input elements whose facts were handed out.
        self.num_given = 0
        self.is_over = False

    def pull(self) -> Noted:
        self._ask_ahead()
        if not self._pending:
            raise Exhausted
        inputs, run, handle = self._pending[0]
        caller = self.runtime.caller
        is_raised = isinstance(handle, _Raised)
        if not self.runtime.waits and not is_raised and not caller.is_done(handle):
            raise NotReady
        try:
            if isinstance(handle, _Raised):
                raise handle.error
            fact = caller.result(handle)
        except Exception as error:
            self._bisect(inputs, error)
            return self.pull()
        self._pending.popleft()
        self.num_given += len(inputs)
        self._rule_out(len(inputs))
        if self.fact.makes_rows:
            (ref,) = run.blocks  # type: ignore[union-attr]
            ref.num_rows, skipped, fact = fact
            self.runtime.note_skipped(skipped)
            run = Selection.whole(ref)
        return Noted(run, fact)

    def _ask_ahead(self) -> None:
        runtime = self.runtime
        while not self.is_over and len(self._pending) <= runtime.caller.num_ahead:
            if self._pending and not runtime.reads.has_room():
                return
            try:
                with runtime.waiting(not self._pending):
                    run = self._next_inputs()
            except Exhausted:
                self.is_over = True
            except NotReady:
                if not self._pending:
                    raise
                return
            else:
                self._ask(run)

    def _bisect(self, inputs: Run, error: Exception) -> None:
        # Find the failing element by bisection: those before it are handed out first, those behind it later.
        self._pending.popleft()
        if isinstance(error, ClusterError) or len(inputs) == 1:
            self._suspect = None
            raise error
        if self._suspect is None:
            self._suspect = error, len(inputs)
        rest, self._pending = self._pending, deque()
        middle = len(inputs) // 2
        self._ask(inputs[:middle])
        self._ask(inputs[middle:])
        self._pending.extend(rest)

    def _rule_out(self, num_elements: int) -> None:
        # If no element fails by itself they fail only together: for example, one has another structure. Then the error
        # of the call is raised.
        if self._suspect is None:
            return
        error, num_left = self._suspect
        self._suspect = (error, num_left - num_elements) if num_left > num_elements else None
        if self._suspect is None:
            raise error

    def _next_inputs(self) -> Run:
        if not self.fact.makes_rows:
            return self.source.pull()  # type: ignore[no-any-return]
        # One element may make many rows, and the function may be slow: each call takes as many as all before it.
        self.waiting.fill(self.source.pull, 1)
        return self.waiting.pop(max(self.num_given, _FIRST_ELEMENTS))

    def _ask(self, inputs: Run) -> None:
        try:
            self._call(inputs)
        except ClusterError:
            raise
        except Exception as error:
            # A caller that calls at once raises at once; the results of earlier calls are handed out first.
            self._pending.append((inputs, inputs, _Raised(error)))

    def _call(self, inputs: Run) -> None:
        fact, worker = self.fact, self.runtime.near(inputs)
        handle = self.runtime.ask(inputs, worker=worker, name=fact.name, function=fact.function)
        if not fact.makes_rows:
            self._pending.append((inputs, inputs, handle))
            return
        reported = self.runtime.caller.call(with_report, [handle], worker=worker, name=f"{fact.name}-fact")
        run = Selection((self._rows(inputs, handle, worker),), range(0))
        self._pending.append((inputs, run, reported))

    def _rows(self, inputs: Run, handle: Handle, worker: str | None) -> BlockRef:
        runtime = self.runtime
        rows = runtime.caller.call(GetItem(0), [handle], worker=worker, name=f"{self.fact.name}-rows")
        lineage = Lineage(self.path, self.epoch, None, with_lineages(inputs))
        return runtime.refer(rows, -1, int(run_bytes(inputs)), worker, runtime.reads, lineage)

    def remake(self, extent: Any, run: Any) -> BlockRef:
        """Request the block of a lineage again."""
        fact, worker = self.fact, self.runtime.near(run)
        return self._rows(run, self.runtime.ask(run, worker=worker, name=fact.name, function=fact.function), worker)

    def saved(self) -> dict[str, Any]:
        """Return the state besides the fields that are data: the inputs of the pending calls."""
        return {"given": [inputs for inputs, _, _ in self._pending]}

    def resumed(self, saved: dict[str, Any]) -> None:
        """Make the pending calls again."""
        for inputs in saved["given"]:
            self._ask(inputs)


@dataclass(frozen=True)
class _Raised:
    # Replaces the handle of a call that raised at once.
    error: Exception


def with_report(values: Sequence[Any]) -> tuple[int, tuple[Skipped, ...], Any]:
    """Return the number of rows that a fact is about, the elements left out on the way to them, and the fact."""
    rows, fact = values[0]
    return len(rows), rows.skipped, fact
