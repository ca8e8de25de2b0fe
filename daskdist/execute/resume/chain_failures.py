"""Elements that failed in chains: a stream that continues after them must not count them again."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakValueDictionary

from daskdist.core.failing.failed_elements import Uncounted
from daskdist.execute.caller import Caller, Handle
from daskdist.execute.resume.recorded_answers import AnswerLog


class _HandedOut(NamedTuple):
    # A block whose elements were handed out: its handle, the place of each element in it, or -1, and the
    # number of elements of the chain's input that had been used after the first of them, and by each later one.
    handle: Handle
    places: Sequence[int]
    first: int
    step: int


class ChainFailures:
    """The elements of a stream's chains that failed and whose errors were raised or handed out.

    The value that a chain carries does not count an element that fails. All elements made of it fail with it, anywhere
    downstream, and name its chains.
    """

    def __init__(self) -> None:
        self._logs: WeakValueDictionary[str, AnswerLog] = WeakValueDictionary()
        # Blocks that were handed out, and may have failed elements.
        self._unknown: list[_HandedOut] = []

    def __bool__(self) -> bool:
        return bool(self._logs)

    def key_of(self, log: AnswerLog) -> str:
        """Return a key for a chain with a log, which no chain of another process has."""
        key = uuid.uuid4().hex
        self._logs[key] = log
        return key

    def note(self, elements: Iterable[Uncounted], *, num_errors: int = 0, num_elements: int = 0) -> None:
        """Record failed elements, which are before any position after so many errors and elements."""
        for chain, call, number in elements:
            log = self._logs.get(chain)
            if log is not None:
                log.note_uncounted(call, number, num_errors=num_errors, num_elements=num_elements)

    def note_handed_out(self, handle: Handle, places: Sequence[int], first: int, step: int) -> None:
        """Record that elements of a block are handed out.

        Parameters
        ----------
        handle
            The handle of the block.
        places
            The place of each element in it; -1 for one without rows.
        first, step
            The number of elements of the chain's input that had been used after the first of them, and by each later
            one.
        """
        self._unknown.append(_HandedOut(handle, places, first, step))

    def look(self, caller: Caller, *, wait: bool) -> None:
        """Record which elements that were handed out failed: in all blocks if ``wait``, or in the available ones.

        A block that cannot be computed has no elements that were handed out.
        """
        unknown, self._unknown = self._unknown, []
        for block in unknown:
            report = None
            with suppress(Exception):
                report = caller.report(block.handle, wait=wait)
                if report is None:
                    self._unknown.append(block)
            failed = {} if report is None else dict(report.failed)
            for number, place in enumerate(block.places) if failed else ():
                if place in failed:
                    self.note(failed[place].uncounted, num_elements=block.first + number * block.step)
