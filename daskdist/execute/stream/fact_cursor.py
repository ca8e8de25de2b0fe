"""Places in streams of elements with a fact of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from daskdist.core.origin import Skipped
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

# Elements given at first to a function that may make many of each.
_FEW_GIVEN = 16


class FactCursor:
    """Elements and a fact of them, asked for ahead where the elements lie."""

    def __init__(self, runtime: StreamRuntime, fact: Fact, path: Path, epoch: Epoch, source: Cursor) -> None:
        self.runtime = runtime
        self.fact = fact
        self.path = path
        self.epoch = epoch
        self.source = source
        # Of each call: the elements it was given, those it is of, and its handle.
        self._pending: deque[tuple[Run, Run, Handle]] = deque()
        self.waiting = RunQueue()
        # What a call raised of which no element was found yet that fails, and how many may be it.
        self._suspect: tuple[Exception, int] | None = None
        # Elements whose facts were handed on.
        self.num_given = 0
        self.is_over = False

    def pull(self) -> Noted:
        self._ask_ahead()
        if not self._pending:
            raise Exhausted
        given, run, handle = self._pending[0]
        caller = self.runtime.caller
        is_raised = isinstance(handle, _Raised)
        if not self.runtime.waits and not is_raised and not caller.is_done(handle):
            raise NotReady
        try:
            if isinstance(handle, _Raised):
                raise handle.error
            fact = caller.result(handle)
        except Exception as error:
            self._without_failed(given, error)
            return self.pull()
        self._pending.popleft()
        self.num_given += len(given)
        self._settled(len(given))
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
                    run = self._next_given()
            except Exhausted:
                self.is_over = True
            except NotReady:
                if not self._pending:
                    raise
                return
            else:
                self._ask(run)

    def _without_failed(self, given: Run, error: Exception) -> None:
        # The element that fails is found by halves; those before it come first, and those behind it later.
        self._pending.popleft()
        if isinstance(error, ClusterError) or len(given) == 1:
            self._suspect = None
            raise error
        if self._suspect is None:
            self._suspect = error, len(given)
        rest, self._pending = self._pending, deque()
        middle = len(given) // 2
        self._ask(given[:middle])
        self._ask(given[middle:])
        self._pending.extend(rest)

    def _settled(self, num_elements: int) -> None:
        # Elements of which none fails by itself fail together: one is of another structure, say.
        if self._suspect is None:
            return
        error, num_left = self._suspect
        self._suspect = (error, num_left - num_elements) if num_left > num_elements else None
        if self._suspect is None:
            raise error

    def _next_given(self) -> Run:
        if not self.fact.makes_rows:
            return self.source.pull()  # type: ignore[no-any-return]
        # What one element makes may be much, and the function slow: as many at a time as there were before.
        self.waiting.fill(self.source.pull, 1)
        return self.waiting.pop(max(self.num_given, _FEW_GIVEN))

    def _ask(self, given: Run) -> None:
        try:
            self._call(given)
        except ClusterError:
            raise
        except Exception as error:
            # A caller that calls at once raises at once; what was asked for before comes first.
            self._pending.append((given, given, _Raised(error)))

    def _call(self, given: Run) -> None:
        fact, worker = self.fact, self.runtime.near(given)
        handle = self.runtime.ask(given, worker=worker, name=fact.name, function=fact.function)
        if not fact.makes_rows:
            self._pending.append((given, given, handle))
            return
        asked = self.runtime.caller.call(with_report, [handle], worker=worker, name=f"{fact.name}-fact")
        run = Selection((self._rows(given, handle, worker),), range(0))
        self._pending.append((given, run, asked))

    def _rows(self, given: Run, handle: Handle, worker: str | None) -> BlockRef:
        runtime = self.runtime
        rows = runtime.caller.call(GetItem(0), [handle], worker=worker, name=f"{self.fact.name}-rows")
        lineage = Lineage(self.path, self.epoch, None, with_lineages(given))
        return runtime.refer(rows, -1, int(run_bytes(given)), worker, runtime.reads, lineage)

    def remade(self, extent: Any, run: Any) -> BlockRef:
        """The block of a lineage, asked for again."""
        fact, worker = self.fact, self.runtime.near(run)
        return self._rows(run, self.runtime.ask(run, worker=worker, name=fact.name, function=fact.function), worker)

    def saved(self) -> dict[str, Any]:
        """What a position takes besides the fields that are data: the elements that facts were asked of."""
        return {"given": [given for given, _, _ in self._pending]}

    def resumed(self, saved: dict[str, Any]) -> None:
        """Go on from there."""
        for given in saved["given"]:
            self._ask(given)


@dataclass(frozen=True)
class _Raised:
    # Stands for the handle of a call that raised when it was asked for.
    error: Exception


def with_report(values: Sequence[Any]) -> tuple[int, tuple[Skipped, ...], Any]:
    """How many rows a fact is of, what was left out on the way to them, and the fact."""
    rows, fact = values[0]
    return len(rows), rows.skipped, fact
