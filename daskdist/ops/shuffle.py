"""``shuffle``: an order drawn from a buffer that slides over the elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from daskdist.core.arguments import whole_number
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Arrange, Context, Cursor, Epoch, Exhausted, Opener, Primitive
from daskdist.core.seed import generator
from daskdist.core.selection import Index, Run, RunQueue, concat

# Draws made at a time, at most: few enough for the cache, enough to share the cost of a call.
_DRAWS = 65_536
_DRAWN_BYTES = 2**20


@dataclass(frozen=True, eq=False)
class Shuffle(Transformation):
    """Elements drawn uniformly from a buffer of ``buffer_size`` that is refilled from the input.

    Parameters
    ----------
    buffer_size
        Elements to draw from. As many as there are elements makes the order uniform over all orders.
    seed
        Decides the order, together with the operation's place in the pipeline.
    reshuffle_each_iteration
        Whether each pass has an order of its own.
    node_id
        The operation's place in the pipeline.
    """

    buffer_size: int
    seed: int
    reshuffle_each_iteration: bool = True
    node_id: int = field(default=0, repr=False)

    name = "shuffle"
    facts = Facts(keeps_rows=True, keeps_spec=True, per_worker=True)

    def __post_init__(self) -> None:
        whole_number(self.name, "buffer_size", self.buffer_size, at_least=1)
        whole_number(self.name, "seed", self.seed)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        rows = ShuffleRows(self.buffer_size, self.seed, self.reshuffle_each_iteration, self.node_id)
        return Arrange(inputs, rows, inputs[0].grouped, name=self.name)


@dataclass(frozen=True)
class ShuffleRows:
    """The arithmetic of it."""

    buffer_size: int
    seed: int
    reshuffle_each_iteration: bool
    node_id: int

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        rng = generator(self.seed, self.node_id, epoch if self.reshuffle_each_iteration else ())
        return ShuffleCursor(inputs[0](epoch), self.buffer_size, rng, context)


@dataclass
class ShuffleCursor:
    """The buffer, and what has been pulled and has not come into it yet.

    The order is that of drawing one slot at a time: output the slot's occupant, put the next element in. So
    the output of draw t is the element put into its slot by the latest earlier draw of that slot, or the
    slot's first occupant; sorting the draws by (slot, t) finds it for all of them at once. Draws are
    consumed one an element, so the order does not depend on how the input was cut.
    """

    source: Cursor
    buffer_size: int
    rng: np.random.Generator
    context: Context
    buffer: Run | None = None
    waiting: RunQueue = field(default_factory=RunQueue)

    def pull(self) -> Run:
        try:
            # One more than the buffer holds, to see what an element takes; then as many as are drawn at a time.
            self.waiting.fill(self.source.pull, 1 if self.buffer is not None else self.buffer_size + 1)
            self.waiting.fill(self.source.pull, self._num_draws(self.waiting.runs[0]))
        except Exhausted:
            if self.buffer is None and not self.waiting:
                raise
        if self.buffer is None:
            self.buffer = self.waiting.pop(self.buffer_size)
        if self.waiting:
            return self._draw(self.buffer, self.waiting.pop(self._num_draws(self.buffer)))
        rest, self.buffer = self.buffer, self.buffer[:0].without_unused()
        if not len(rest):
            raise Exhausted
        return rest.take(self.rng.permutation(len(rest)))

    def _num_draws(self, like: Run) -> int:
        # A small part of the buffer, or if that is small, what makes a call worth its cost and still is not much.
        worth = min(_DRAWN_BYTES / max(like.element_bytes, 1), _DRAWS / 4)
        return max(min(self.buffer_size // 8, _DRAWS), int(worth), 1)

    def _draw(self, buffer: Run, incoming: Run) -> Run:
        size = len(buffer)
        output, occupants = exchange(self.rng.integers(size, size=len(incoming)), size)
        pool = concat([buffer, incoming])
        # A block's last rows can stay long after the others left: keep just them.
        self.buffer = self.context.compact(pool.take(occupants).without_unused(), self.waiting.runs)
        return pool.take(output).without_unused()


def exchange(slots: Index, size: int) -> tuple[Index, Index]:
    """What comes out and what stays when ``slots`` of a buffer are drawn in turn.

    Parameters
    ----------
    slots
        The slot of each draw, shape ``(num_draws,)``.
    size
        The number of slots.

    Returns
    -------
    output
        What each draw gives: a slot for its first occupant, or ``size + t`` for what draw t put in.
    occupants
        What each slot holds in the end, in the same terms.

    >>> exchange(np.array([1, 0, 1, 1]), 2)
    (array([1, 0, 2, 4]), array([3, 5]))
    """
    num_draws = len(slots)
    # The draw's number in the low bits makes each key one of a kind, and so any sort a stable one.
    bits = num_draws.bit_length()
    keys: Index = slots.astype(np.uint32 if size << bits < 2**32 else np.int64)
    keys = np.sort((keys << bits) | np.arange(num_draws, dtype=keys.dtype))
    slot, draw = (keys >> bits).astype(np.intp), (keys & ((1 << bits) - 1)).astype(np.intp)
    is_first = np.empty(num_draws, bool)
    is_first[:1] = True
    np.not_equal(slot[1:], slot[:-1], out=is_first[1:])
    previous = np.empty(num_draws, np.intp)
    previous[1:] = draw[:-1] + size
    np.copyto(previous, slot, where=is_first)
    output = np.empty(num_draws, np.intp)
    output[draw] = previous
    is_last = np.append(is_first[1:], True)
    occupants = np.arange(size)
    occupants[slot[is_last]] = draw[is_last] + size
    return output, occupants
