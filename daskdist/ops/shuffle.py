"""``shuffle``: elements drawn at random from a buffer that slides over the input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from daskdist.core.arguments import whole_number, yes_or_no
from daskdist.core.node import CountingNode, Facts, Node, Transformation
from daskdist.core.primitive import Arrange, Context, Cursor, Epoch, Exhausted, NotReady, Opener, Primitive, Read
from daskdist.core.randomness.pass_numbers import PassNumber
from daskdist.core.randomness.seed import generator, numbers_of, state_of
from daskdist.core.selection.intervals import Index
from daskdist.core.selection.lazy_shuffle import shuffled
from daskdist.core.selection.runs import Run, RunQueue
from daskdist.core.selection.shuffle_buffer import (
    BatchBuffer,
    Draws,
    RowBuffer,
    buffer_of,
    buffer_of_places,
)

# The most draws of one call: few enough for the cache, enough to share the cost of a call.
_DRAWS = 65_536
_DRAWN_BYTES = 2**20
# The number of draws for each slot that are made again at a time; after 16, hardly any slot is left.
_GOING_BACK = 6
# The most elements of the buffer that come last in an order drawn from all orders; more come in one that is computed
# where it is needed, which is faster.
_MOST_DRAWN = 65_536


@dataclass(frozen=True, eq=False)
class Shuffle(CountingNode, Transformation):
    """Elements drawn uniformly from a buffer of ``buffer_size`` that is refilled from the input.

    Parameters
    ----------
    buffer_size
        The number of elements to draw from. With all elements in the buffer, every order is equally likely.
    seed
        Determines the order, together with the buffer size and the number of elements.
    reshuffle_each_iteration
        Whether each pass has a different order.
    share
        The number of the worker's share if the operation is on one and its seed was drawn: workers then draw
        differently.
    """

    buffer_size: int
    seed: int
    reshuffle_each_iteration: bool = True
    share: int = field(default=0, repr=False)

    name = "shuffle"
    facts = Facts(keeps_rows=True, keeps_spec=True, per_worker=True)

    def __post_init__(self) -> None:
        whole_number(self.name, "buffer_size", self.buffer_size, at_least=1)
        whole_number(self.name, "seed", self.seed, at_most=None)
        yes_or_no(self.name, "reshuffle_each_iteration", self.reshuffle_each_iteration)

    def on_share(self, index: int, num_shards: int) -> Node:
        return self if self.is_seeded else replace(self, share=index)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        passes = self.passes if self.reshuffle_each_iteration else None
        stream = 1 + self.passes.stream + (self.share << 16)
        rows = ShuffleRows(self.buffer_size, self.seed, stream, passes)
        if isinstance(inputs[0], Read):
            inputs = (replace(inputs[0], is_shuffled=True),)
        return Arrange(inputs, rows, inputs[0].grouped, name=self.name)


@dataclass(frozen=True)
class ShuffleRows:
    """Row arithmetic of ``shuffle``."""

    buffer_size: int
    seed: int
    stream: int
    passes: PassNumber | None

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        rng = generator(self.seed, self.stream, () if self.passes is None else self.passes.of(epoch))
        return ShuffleCursor(inputs[0](epoch), self.buffer_size, rng, context)


@dataclass
class ShuffleCursor:
    """A cursor with the buffer, and the elements that were pulled but are not in it yet.

    Each draw outputs the element of a random slot and puts the next element of the input there; at the end the rest
    comes in random order. There is one draw for each element, so the order does not depend on how the input was cut.
    """

    source: Cursor
    buffer_size: int
    rng: np.random.Generator
    context: Context
    buffer: RowBuffer | BatchBuffer | None = None
    waiting: RunQueue = field(default_factory=RunQueue)
    num_untidy: int = 0
    # The numbers of input elements and of draws so far, and the number of draws at which the generator's state is
    # recorded next.
    num_elements: int = 0
    num_draws: int = 0
    # An error of the input, to raise after the elements that wait.
    failure: Exception | None = None
    next_point: int = field(default_factory=lambda: 2 * _DRAWS)

    def skip(self, num_elements: int) -> int:
        """Skip draws: those that stay in the buffer are found by number, and of the others nothing is read."""
        size = self.buffer_size
        lengths = self.context.lengths()
        if lengths:
            num_elements = min(num_elements, lengths[0][0] - size)
        if num_elements <= 0:
            return 0
        numbers = self._occupants(num_elements)
        first = self.num_elements = self.source.skip(int(numbers.min()))  # type: ignore[attr-defined]
        num_pulled = size + num_elements - first
        self.waiting.fill(self._pull_source, num_pulled)
        numbers -= first
        self.buffer = buffer_of_places(self.waiting.pop(num_pulled), numbers)
        return num_elements

    def _occupants(self, num_draws: int) -> Index:
        # Return the numbers of the elements in the slots after some draws. Most slots were drawn lately, so make the
        # last draws again, and go back until each slot was drawn, or to the start.
        bits = self.rng.bit_generator
        at_first = bits.state
        occupants, first = self._drawn_before(num_draws, at_first)
        at_stop = bits.state
        while first and occupants.min() < 0:
            earlier, first = self._drawn_before(first, at_first)
            np.copyto(occupants, earlier, where=occupants < 0)
        bits.state, self.num_draws = at_stop, num_draws
        return occupants

    def _drawn_before(self, stop: int, at_first: Any) -> tuple[Index, int]:
        # Make some draws before ``stop`` again. Return the numbers of the elements in the slots, -1 where no draw put
        # one, and the number of the first of the draws.
        size, bits = self.buffer_size, self.rng.bit_generator
        first, state = self.context.point_before(stop - _GOING_BACK * size) or (0, None)
        bits.state = at_first if state is None else state_of(at_first, state)
        dtype = np.int32 if size + stop < 2**31 else np.int64
        occupants = np.arange(size, dtype=dtype) if state is None else np.full(size, -1, dtype)
        for start in range(first, stop, _DRAWS):
            slots = self.rng.integers(size, size=min(_DRAWS, stop - start))
            # If a slot is drawn several times, the last draw counts.
            occupants[slots] = np.arange(size + start, size + start + len(slots), dtype=dtype)
        return occupants, first

    def _pull_source(self) -> Run:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        try:
            run: Run = self.source.pull()
        except Exhausted:
            self.context.note_length(0, self.num_elements)
            raise
        self.num_elements += len(run)
        return run

    def pull(self) -> Run:
        num_draws = 1
        try:
            # First one more than the buffer holds, to learn the size of an element; later as many as are drawn at a
            # time.
            self.waiting.fill(self._pull_source, 1 if self.buffer is not None else self.buffer_size + 1)
            num_draws = self._num_draws(self.waiting.runs[0].element_bytes)
            with self.context.waiting(False):
                self._fill_more(num_draws)
        except NotReady:
            if len(self.waiting) < (1 if self.buffer is not None else self.buffer_size + 1):
                raise
        except Exhausted:
            if self.buffer is None and not self.waiting:
                raise
            num_draws = max(num_draws, min(len(self.waiting), _DRAWS))
        if self.buffer is None:
            self.buffer = buffer_of(self.waiting.pop(self.buffer_size))
        if self.waiting:
            return self._draw(self.buffer, self.waiting.pop(num_draws))
        rest = self.buffer.rest().without_unused()
        if not len(rest):
            raise Exhausted
        self.buffer = buffer_of(rest[:0].without_unused())
        return shuffled(rest, self.rng, _MOST_DRAWN)

    def _fill_more(self, num_elements: int) -> None:
        # Draw the elements before an error first, so that it is raised at the same place however the input is cut.
        try:
            self.waiting.fill(self._pull_source, num_elements)
        except (Exhausted, NotReady):
            raise
        except Exception as error:
            self.failure = error

    def _num_draws(self, element_bytes: float) -> int:
        # A small part of the buffer; if that is little, enough to justify a call, but no more than were pulled before,
        # as each element may take a slow call of a function.
        worth = min(_DRAWN_BYTES / max(element_bytes, 1), _DRAWS / 4, self.num_elements)
        return max(min(self.buffer_size // 8, _DRAWS), int(worth), 1)

    def _draw(self, buffer: RowBuffer | BatchBuffer, incoming: Run) -> Run:
        if self.num_draws >= self.next_point:
            # Save the state of the generator, so that a resumed pass repeats only the draws after it.
            self.context.note_point(self.num_draws, numbers_of(self.rng.bit_generator.state))
            self.next_point = self.num_draws + 2 * max(self.buffer_size, _DRAWS)
        self.num_draws += len(incoming)
        draws = Draws.of(self.rng.integers(len(buffer), size=len(incoming)), len(buffer))
        output: Run = buffer.exchange(draws, incoming)  # type: ignore[arg-type]  # both are of one kind
        self.num_untidy += len(incoming)
        if self.num_untidy >= len(buffer) // 4:
            # The last rows of a block can stay for long: copy them, so that the block can be freed.
            buffer.tidy(lambda run: self.context.compact(run, self.waiting.runs))
            self.num_untidy = 0
        return output
