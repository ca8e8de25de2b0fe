"""``interleave``: the datasets that a function returns for elements, several of them read in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from daskdist.core.arguments import whole_number
from daskdist.core.dataset_base import node_of, primitive_of
from daskdist.core.primitive import (
    Arrange,
    Context,
    Cursor,
    Epoch,
    Exhausted,
    Fact,
    NotReady,
    Opener,
    Primitive,
    gathered,
)
from daskdist.core.selection.runs import Run, RunQueue, concat
from daskdist.ops.ignore_errors import IgnoreErrors
from daskdist.ops.nested import ExpandRows, Expansion, NestedFunction, elements_of

# The number of elements to return together, first and later, their bytes, and the datasets to open for them.
_FEW = 16
_ENOUGH = 1024
_ENOUGH_BYTES = 4 * 2**20
_MANY_OPENED = 16


@dataclass(frozen=True, eq=False)
class Interleave(Expansion):
    """Blocks of ``block_length`` elements of each of ``cycle_length`` datasets in turn.

    An exhausted dataset is replaced by that of the next element when its turn comes.
    """

    cycle_length: int
    block_length: int = 1

    name = "interleave"

    def __post_init__(self) -> None:
        whole_number(self.name, "cycle_length", self.cycle_length, at_least=1)
        whole_number(self.name, "block_length", self.block_length, at_least=1)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        calls, function = self._calls(gathered(inputs[0]))
        if self.function.nested_spec(self.source).is_cheap:
            # Small datasets are created and read on the worker that has their elements; only their lengths come here.
            source = Fact(calls, ExpandRows(function).with_lengths, self.name, makes_rows=True)
            rows = InterleaveRows(self.cycle_length, self.block_length, None)
        else:
            source = Fact(calls, elements_of, f"{self.name}-elements")
            rows = InterleaveRows(self.cycle_length, self.block_length, function)
        lenient = replace(rows, leaves_out_failed=True)
        return Arrange((source,), rows, grouped=0, name=self.name, lenient=lenient)


@dataclass(frozen=True)
class InterleaveRows:
    """Row arithmetic of ``interleave``.

    Parameters
    ----------
    cycle_length
        The number of datasets that are read in turn.
    block_length
        The number of elements per turn; None for all.
    function
        Returns the dataset of an element in the input's facts; None if the input has the elements of the datasets, and
        its facts are their numbers of elements.
    leaves_out_failed
        Whether elements that fail in the datasets are left out.
    """

    cycle_length: int
    block_length: int | None
    function: NestedFunction | None
    leaves_out_failed: bool = False

    def primitive_of(self, key: tuple[Any, str]) -> Primitive:
        """Return the primitive of an element's dataset, by the element and its place."""
        element, where = key
        if self.function is None:
            raise TypeError("the input already has the elements of the datasets")
        dataset: Any = self.function.dataset(element, where=lambda: where)
        if self.leaves_out_failed:
            dataset = dataset.__replace__(node=IgnoreErrors(node_of(dataset)))
        return gathered(primitive_of(dataset))

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        return InterleaveCursor(inputs[0](epoch), self, context, [None] * self.cycle_length)


@dataclass
class InputSlot:
    """An open dataset: its elements that were not returned yet, and the cursor for more."""

    queue: RunQueue
    source: Cursor | None = None

    def fill(self, num_elements: int) -> bool:
        """Pull until the slot has ``num_elements`` elements or is exhausted; return whether it has them."""
        try:
            if self.source is not None:
                self.queue.fill(self.source.pull, num_elements)
        except Exhausted:
            self.source = None
        return len(self.queue) >= num_elements


@dataclass
class InterleaveCursor:
    """A cursor over slots: ``position`` is the slot whose turn it is, ``taken`` the elements of this turn."""

    source: Cursor
    rows: InterleaveRows
    context: Context
    slots: list[InputSlot | None]
    position: int = 0
    taken: int = 0
    is_input_over: bool = False
    # The next datasets: their elements, or the keys of their primitives.
    ready: deque[Any] = field(default_factory=deque)
    num_opened: int = 0
    # The number of elements that were returned.
    num_elements: int = 0
    # An error to raise after elements that are returned first.
    failure: Exception | None = None

    def pull(self) -> Run:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        runs: list[Run] = []
        num_elements, num_bytes = 0, 0.0
        # No more than before, as each may be large and take a slow call.
        enough = min(max(self.num_elements, _FEW), _ENOUGH)
        most_opened = self.num_opened + _MANY_OPENED
        while num_elements < enough and num_bytes < _ENOUGH_BYTES and (not runs or self.num_opened < most_opened):
            try:
                with self.context.waiting(not runs, is_brief=True):
                    run = self._rounds() or self._turn()
            except (Exhausted, NotReady):
                if not runs:
                    raise
                break
            except Exception as error:
                if not runs:
                    raise
                self.failure = error
                break
            if run is not None:
                runs.append(run)
                num_elements += len(run)
                num_bytes += len(run) * run.element_bytes
        self.num_elements += num_elements
        return concat(runs)

    def _turn(self) -> Run | None:
        # Return the elements of one turn; None if only the position changed.
        slot = self.slots[self.position]
        if slot is None:
            if not self.is_input_over:
                self._open()
            elif any(self.slots):
                self._advance()
            else:
                raise Exhausted
            return None
        if not slot.fill(1):
            self.slots[self.position] = None
            self._advance()
            return None
        length = self.rows.block_length
        num_elements = len(slot.queue.runs[0]) if length is None else min(len(slot.queue), length - self.taken)
        self.taken += num_elements
        if self.taken == length:
            self._advance()
        return slot.queue.pop(num_elements)

    def _advance(self) -> None:
        self.position = (self.position + 1) % len(self.slots)
        self.taken = 0

    def _open(self) -> None:
        try:
            while not self.ready:
                self._pull_ready()
        except Exhausted:
            self.is_input_over = True
            return
        contents = self.ready.popleft()
        if self.rows.function is None:
            queue = RunQueue()
            if len(contents):
                queue.push(contents)
            self.slots[self.position] = InputSlot(queue)
        else:
            # The words of its element already determine the dataset's pass, so the pass number is 0.
            self.num_opened += 1
            slot = self.slots[self.position] = InputSlot(RunQueue())
            slot.source = self.context.open(contents, contents[1])((0,))

    def _pull_ready(self) -> None:
        noted = self.source.pull()
        if self.rows.function is not None:
            self.ready.extend(noted.fact)
            return
        stops = np.cumsum(noted.fact).tolist()
        self.ready.extend(noted.run[start:stop] for start, stop in zip([0, *stops], stops, strict=False))

    def _rounds(self) -> Run | None:
        # Return as many complete rounds as all slots have elements for, in one step.
        length, slots = self.rows.block_length, [slot for slot in self.slots if slot is not None]
        if length is None or self.position or self.taken or not slots:
            return None
        if len(slots) < len(self.slots) and not self.is_input_over:
            return None
        try:
            # A turn waits only for its dataset.
            with self.context.waiting(False, is_brief=True):
                if not all(slot.fill(length) for slot in slots):
                    return None
        except NotReady:
            return None
        num_rounds = min(len(slot.queue) // length for slot in slots)
        if num_rounds == 1:
            return concat([slot.queue.pop(length) for slot in slots])
        joined = concat([slot.queue.pop(num_rounds * length) for slot in slots])
        order = np.arange(len(joined)).reshape(len(slots), num_rounds, length)
        return joined.take(order.transpose(1, 0, 2).ravel())
