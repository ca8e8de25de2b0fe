"""``repeat``: several passes in sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from daskdist.core import cardinality
from daskdist.core.arguments import whole_number
from daskdist.core.node import Facts, Node, Transformation, walk
from daskdist.core.primitive import Arrange, Context, Cursor, Epoch, Exhausted, Opener, Primitive
from daskdist.core.selection.runs import Run
from daskdist.core.selection.skipping import skip_unread, whole_parts


@dataclass(frozen=True, eq=False)
class Repeat(Transformation):
    """The elements of ``count`` passes over the input; endless if ``count`` is None or negative."""

    count: int | None = None

    name = "repeat"
    facts = Facts(keeps_spec=True, per_worker=True)

    def __post_init__(self) -> None:
        whole_number(self.name, "count", self._count)

    @property
    def _count(self) -> int:
        return -1 if self.count is None else self.count

    @property
    def cardinality(self) -> int:
        return cardinality.multiply(self.source.cardinality, self._count)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        # Each pass has as many elements only if none can fail or is kept from another pass.
        is_even = all(map(_keeps_all, walk(self.source))) and self.source.cardinality > 0
        rows = RepeatRows(self._count, self.source.cardinality if is_even else None)
        return Arrange(inputs, rows, inputs[0].grouped, name=self.name)


def _keeps_all(node: Node) -> bool:
    is_in_memory = not node.inputs and node.is_cheap and node.reads_files is False
    is_of_groups = node.group_size is not None
    return is_in_memory or node.facts.keeps_rows or node.facts.by_count or is_of_groups or isinstance(node, Repeat)


# The most empty passes to accept: with random operations, a pass may have elements after empty ones.
_MOST_EMPTY: Final = 1000


@dataclass(frozen=True)
class RepeatRows:
    """Row arithmetic of ``repeat``; ``length`` is the number of elements of each pass, if it is known."""

    count: int
    length: int | None = None

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        return RepeatCursor(inputs[0], epoch, self.count, context, self.length)


@dataclass
class RepeatCursor:
    """A cursor over passes: ``passes`` are over, ``current`` is the running one."""

    opener: Opener
    epoch: Epoch
    count: int
    context: Context
    length: int | None = None
    passes: int = 0
    current: Cursor | None = None
    is_empty: bool = True
    # The number of elements of the running pass so far.
    num_elements: int = 0

    @property
    def skips_unread(self) -> bool:
        """Return whether all passes have the same number of elements, which is known."""
        return self.length is not None

    def skip(self, num_elements: int) -> int:
        """Skip complete passes without reading them, and elements of the next one."""
        lengths = self.context.lengths()
        if self.length is not None:
            lengths = [(self.length, self.count if self.count >= 0 else num_elements // self.length + 1)]
        self.passes, num_skipped = whole_parts(lengths, num_elements)
        self.is_empty = not num_skipped
        self.context.note_passes_over(self.passes)
        if num_skipped < num_elements and self.passes != self.count:
            self.current = self.opener((*self.epoch, self.passes))
            self.num_elements = skip_unread(self.current, num_elements - num_skipped)
            self.is_empty = not num_skipped + self.num_elements
        return num_skipped + self.num_elements

    def pull(self) -> Run:
        while self.count < 0 or self.passes < self.count:
            if self.current is None:
                self.current = self.opener((*self.epoch, self.passes))
            try:
                run: Run = self.current.pull()
            except Exhausted:
                if self.is_empty and (self.count < 0 or self.passes == _MOST_EMPTY):
                    # No elements so far: endless empty passes would hang.
                    raise
                if self.length is None:
                    self.context.note_length(self.passes, self.num_elements)
                self.current, self.num_elements = None, 0
                self.passes += 1
                continue
            self.is_empty = False
            self.num_elements += len(run)
            return run
        raise Exhausted
