"""``group_by_window``: windows of elements with the same key, each reduced to a dataset by a function."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from daskdist.core.arguments import whole_number
from daskdist.core.block import Batches, Block, Bundle, Rows, merge
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.node import Facts
from daskdist.core.primitive import (
    Arrange,
    Compute,
    Context,
    Cursor,
    Epoch,
    Exhausted,
    Fact,
    Opener,
    Primitive,
    gathered,
)
from daskdist.core.ragged import Ragged
from daskdist.core.randomness.seed import SeedsInCall
from daskdist.core.selection.groups import Groups
from daskdist.core.selection.intervals import Index
from daskdist.core.selection.resume_points import ResumableSource
from daskdist.core.selection.runs import Run, RunQueue, concat, group
from daskdist.core.spec import ElementSpec, MakeDataset, known_spec
from daskdist.core.structure import LONE, as_array
from daskdist.core.to_numpy import to_numpy
from daskdist.core.vectorize.apply import Vectorised
from daskdist.errors import UserFunctionError
from daskdist.ops.element_random import DrawsForFunction, unpaired
from daskdist.ops.nested import NestedFunction, rows_of


@dataclass(frozen=True, eq=False)
class GroupByWindow(DrawsForFunction):
    """The elements of the datasets that ``reduce_function(key, window)`` returns.

    Parameters
    ----------
    key_function
        Returns an element's key, an integer.
    reduce_function
        Returns a dataset for a key and the dataset of a window.
    window_size
        The number of elements of a window, or a function of the key that returns it.
    make
        Creates a dataset from rows and the spec of its elements.
    """

    key_function: UserFunction
    reduce_function: NestedFunction
    window_size: int | UserFunction
    make: MakeDataset = field(repr=False)

    name = "group_by_window"
    # The result of a window depends on its elements, and the windows of each worker's share have other ones.
    facts = Facts(regroups=True)
    may_have_ragged_rows = True

    def __post_init__(self) -> None:
        if not isinstance(self.window_size, UserFunction):
            whole_number(self.name, "window_size", self.window_size, at_least=1)

    @property
    def spec(self) -> ElementSpec:
        return self.reduce_function.nested_spec(self.source, self.make).spec_or_raise()

    @property
    def draws(self) -> bool:
        return self.reduce_function.nested_spec(self.source, self.make).draws

    @property
    def note(self) -> str:
        """Describe whether the key function is called for many rows at once, and if not, why; nothing is read."""
        return Vectorised(self.key_function).note(self.source)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        source, reduce_function = gathered(inputs[0]), self.reduce_function
        of_each = KeysOf(self.key_function, Vectorised(self.key_function))
        keys_of: Callable[[Rows], Index] = of_each
        if self.draws:
            # A window draws random numbers by the words of its first element.
            source, reduce_function = self._paired(source), reduce_function.with_words()
            keys_of = KeysOfPairs(keys_of)
        keys = Fact(source, keys_of, f"{self.name}-keys")
        windows = Arrange((keys,), GroupRows(self.window_size), grouped=1, name=self.name)
        reduce_rows = ReduceWindows(of_each, reduce_function, self.make, known_spec(self.source))
        return Compute(
            windows, reduce_rows, self.name, factor=None, unstacked=True, costly=reduce_function, may_be_large=True
        )


@dataclass(frozen=True)
class KeysOf:
    """A function that returns the key of each element, shape ``(num_rows,)``, int64.

    Parameters
    ----------
    function
        Returns the key of one element.
    vectorised
        The function for many elements at once.
    kind
        The word for a key in messages.
    """

    function: UserFunction
    vectorised: Vectorised
    kind: str = "key"

    def __call__(self, rows: Rows) -> Index:
        if self.function.function is len and isinstance(rows, Block) and rows.structure == LONE:
            (leaf,) = rows.leaves
            if isinstance(leaf, Ragged):
                return leaf.row_lengths.astype(np.int64)
        return self.vectorised.column(rows, self._by_row).astype(np.int64)  # type: ignore[no-any-return]

    def _by_row(self, rows: Rows) -> Index:
        keys = []
        with SeedsInCall() as seeds:
            for index, element in enumerate(rows.elements()):
                seeds.argument, seeds.number = element, 0
                keys.append(self.key(element, lambda index=index: rows.where(index)))  # type: ignore[misc]
        return np.stack(keys) if keys else np.zeros(0, np.int64)

    def key(self, element: Any, where: Callable[[], str]) -> Any:
        """Return the key of one element, in its original dtype."""
        value = self.function(element, where)
        key = to_numpy(value)
        if key.shape or key.dtype.kind not in "biu":
            raise UserFunctionError(
                f"{self.function.operation}: {self.function} returned {value!r:.80} on {where()}; "
                f"a {self.kind} is one integer"
            )
        return as_array(value, narrow=self.function.narrow)


@dataclass(frozen=True)
class KeysOfPairs:
    """A function that returns the key of each element in pairs with words."""

    keys_of: Callable[[Rows], Index]

    def __call__(self, rows: Rows) -> Index:
        return self.keys_of(unpaired(rows))


@dataclass(frozen=True)
class ReduceWindows:
    """A function that reduces windows and returns the elements of the resulting datasets."""

    keys: KeysOf
    reduce_function: NestedFunction
    make: MakeDataset
    spec: ElementSpec | None

    def __call__(self, batches: Batches) -> Rows:
        parts: list[Rows] = []
        for index in range(len(batches)):
            rows = batches.rows.slice(batches.bounds[index], batches.bounds[index + 1])
            first, words = next(iter(rows.elements())), None
            if self.reduce_function.has_words:
                (first, words), rows = first, unpaired(rows)
            with SeedsInCall(first):
                key = np.int64(self.keys.key(first, lambda rows=rows: rows.where(0)))  # type: ignore[misc]
            where = partial(_where, key, rows)
            reduced = self.reduce_function.dataset(key, self._last(rows, words), where=where)
            parts += self.reduce_function.of_one_structure(parts, rows_of(reduced, self.reduce_function), where)
        return merge(parts, batches)

    def _last(self, rows: Block | Bundle, words: Any) -> Any:
        window = self.make(rows, self.spec)
        return window if words is None else (window, words)


def _where(key: Any, rows: Rows) -> str:
    return f"the window of key {key} that begins with {rows.where(0)}"


@dataclass(frozen=True)
class GroupRows:
    """Row arithmetic of ``group_by_window``; its input is a stream with each element's key.

    Parameters
    ----------
    size
        The number of elements of a group: one number, one for each key, or a function of the key.
    drop_remainder
        Whether incomplete groups at the end are left out.
    """

    size: int | tuple[int, ...] | UserFunction
    drop_remainder: bool = False

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        return GroupCursor(ResumableSource(inputs[0](epoch), context), self)

    def size_of(self, key: int) -> int:
        """Return the number of elements of a key's groups."""
        if isinstance(self.size, UserFunction):
            with SeedsInCall(key):
                size = to_numpy(self.size.of((np.int64(key),), lambda: f"the key {key}"))
            if size.shape or size.dtype.kind not in "iu" or size < 1:
                raise UserFunctionError(
                    f"{self.size.operation}: {self.size} returned {size[()]!r:.80} on the key {key}; "
                    "a window size is an integer of 1 or more"
                )
            return int(size)
        return self.size[key] if isinstance(self.size, tuple) else self.size


@dataclass
class GroupCursor:
    """A cursor of groups, with the elements of each key that are in no group yet, and the numbers of these elements."""

    source: ResumableSource
    rows: GroupRows
    queues: dict[int, RunQueue] = field(default_factory=dict)
    numbers: dict[int, Index] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    num_groups: int = 0
    is_over: bool = False

    def skip(self, num_groups: int) -> int:
        """Skip groups: elements before the last resume point that were in no group there are pulled again."""
        point = self.source.resume(num_groups)
        if point is None:
            return 0
        held = dict(zip(point.state[::2], point.state[1::2], strict=True))
        while self.source.num_pulled < point.stop:
            noted = self.source.pull()
            deque(self._push(noted.run, np.asarray(noted.fact), held), maxlen=0)
        for key, number in held.items():
            if len(self.queues[key]) > number:
                self.queues[key].pop(len(self.queues[key]) - number)
            self.numbers[key] = self.numbers[key][len(self.numbers[key]) - number :]
        self.num_groups = point.place
        return point.place

    def pull(self) -> Run:
        while not self.is_over:
            try:
                noted = self.source.pull()
            except Exhausted:
                self.is_over = True
                break
            groups = self._full(noted.run, np.asarray(noted.fact))
            if groups:
                self.num_groups += len(groups)
                if self.source.is_due:
                    self._mark()
                return grouped(groups)
        rest = [] if self.rows.drop_remainder else [self.queues[key] for key in sorted(self.queues)]
        self.queues = {}
        groups = [queue.pop(len(queue)) for queue in rest if len(queue)]
        if not groups:
            raise Exhausted
        return grouped(groups)

    def _mark(self) -> None:
        held = {key: len(queue) for key, queue in self.queues.items() if len(queue)}
        first = min((int(self.numbers[key][0]) for key in held), default=self.source.num_pulled)
        self.source.note(self.num_groups, first, tuple([number for pair in held.items() for number in pair]))

    def _push(self, run: Run, keys: Index, chosen: Container[int] | None = None) -> Iterator[tuple[int, Index, int]]:
        # Add elements to the queues of their keys, of all or of some; yield each key, the places of its elements and
        # the number of elements that it had before.
        first = self.source.num_pulled - len(run)
        for key in np.unique(keys).tolist():
            if chosen is not None and key not in chosen:
                continue
            if key not in self.queues:
                self.queues[key], self.numbers[key] = RunQueue(), np.zeros(0, np.intp)
                self.sizes[key] = self.rows.size_of(key)
            places, number = np.flatnonzero(keys == key), len(self.queues[key])
            self.queues[key].push(run.take(places))
            self.numbers[key] = np.concatenate([self.numbers[key], first + places])
            yield key, places, number

    def _full(self, run: Run, keys: Index) -> list[Run]:
        # Return the groups in the order of their last elements.
        full: list[tuple[int, Run]] = []
        for key, places, number in self._push(run, keys):
            queue, size = self.queues[key], self.sizes[key]
            full += [(last, queue.pop(size)) for last in places[size - number - 1 :: size].tolist()]
            self.numbers[key] = self.numbers[key][len(self.numbers[key]) - len(queue) :]
        return [group for _, group in sorted(full, key=lambda numbered: numbered[0])]


def grouped(groups: Sequence[Run]) -> Groups:
    """Return groups, one for each run."""
    bounds = np.cumsum([0, *map(len, groups)])
    return group(concat(groups), bounds)
