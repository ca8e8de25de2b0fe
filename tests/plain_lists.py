"""The expected elements of a pipeline, computed with plain lists: the reference for every way to run it.

A pipeline is evaluated one operation after another, each a few lines on a list of elements. An element that cannot be
computed, such as a batch of elements that do not stack, is an `Unmade`. Operations that look at values pass it on, and
it is an error if it is among the final elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import reject

import daskdist
from daskdist.core.randomness.seed import generator
from daskdist.core.structure import Nested, Structure, call_with
from daskdist.errors import StackError
from daskdist.testing import same_elements


class Unmade:
    """An element that could not be computed."""


@dataclass(frozen=True)
class Listed(Nested):
    """A dataset that is a leaf of an element, such as a window, as the list of its elements."""

    elements: tuple[Any, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.elements)

    def __len__(self) -> int:
        return len(self.elements)


@dataclass(frozen=True)
class Outcome:
    """The elements of a pipeline, and whether some elements failed on the way."""

    elements: list[Any]
    met_unmade: bool

    @property
    def must_fail(self) -> bool:
        return any(isinstance(element, Unmade) for element in self.elements)

    def check(self, run: Any, what: str) -> None:
        """Check that ``run()`` gives these elements, or the same error."""
        try:
            given = list(run())
        except StackError:
            # A failed element may raise even if it is not among the final elements.
            assert self.met_unmade, f"{what}: raised, but all elements stack"
            return
        assert not self.must_fail, f"{what}: returned {given}, but some elements do not stack"
        same_elements(given, self.elements, what)


def outcome(pipeline: Any, iteration: int = 0) -> Outcome:
    """Return the elements of a pipeline in an iteration."""
    reference = Reference()
    elements = [value if isinstance(value, Unmade) else _plain(value) for value in reference.of(pipeline, (iteration,))]
    return Outcome(elements, reference.met_unmade)


class RaggedRow(np.ndarray):
    """A row of a `Ragged`. Batches of such rows are ragged; the tests of `Ragged` check these."""


def _plain(element):
    leaves, structure = Structure.flatten(element)
    return structure.pack([np.asarray(leaf) if isinstance(leaf, RaggedRow) else leaf for leaf in leaves])


# Operations that only arrange elements, and so pass on failed ones; three operations on single elements do so too.
_ARRANGING = {"take", "skip", "repeat", "shuffle", "prefetch", "shard", "concatenate", "choose", "sample"}
_PASSING_ON = _ARRANGING | {"map", "filter", "batch", "ignore_errors", "assert_cardinality"}


class Reference:
    """A method for each operation, with its name: takes elements and arguments, returns elements.

    `of` passes more to some operations: those with several inputs, and those that draw at random.
    """

    def __init__(self) -> None:
        self.met_unmade = False

    def of(self, pipeline: Any, epoch: tuple[int, ...], number: int | None = None) -> list[Any]:
        """Return the elements of a pipeline in an epoch, or those after its first ``number`` operations."""
        number = len(pipeline.operations) if number is None else number
        if number == 0:
            elements = pipeline.source.elements(epoch)
            if pipeline.source.kind == "uneven" and pipeline.source.name == "slices":
                elements = [value.view(RaggedRow) for value in elements]
            return elements
        name, args = pipeline.operations[number - 1]
        if name == "repeat":
            return [item for k in range(args[0]) for item in self.of(pipeline, (*epoch, k), number - 1)]
        elements = self.of(pipeline, epoch, number - 1)
        if name not in _PASSING_ON and any(isinstance(element, Unmade) for element in elements):
            # The elements of the window are unknown here, and the operation may or may not fail.
            reject()
        if name in ("zip", "concatenate", "choose", "sample"):
            others, *args = args
            lists = [elements, *(self.of(other, epoch) for other in others)]
            if name == "sample":
                return self._sample(lists, *args, epoch=epoch)
            return getattr(self, f"_{name}")(lists, *args)
        if name in ("shuffle", "rejection_resample"):
            return getattr(self, f"_{name}")(elements, *args, epoch=epoch)
        return getattr(self, f"_{name}")(elements, *args)

    # --- one by one ---

    def _map(self, elements, function):
        return [element if isinstance(element, Unmade) else self._mapped(function, element) for element in elements]

    def _mapped(self, function, element):
        try:
            result = call_with(function, _plain(element))
        except ZeroDivisionError:
            return Unmade()
        leaves, structure = Structure.flatten(tuple(result) if type(result) is list else result)
        return structure.pack(leaves)

    def _filter(self, elements, predicate):
        return [element for element in elements if isinstance(element, Unmade) or call_with(predicate, element)]

    def _ignore_errors(self, elements):
        return [element for element in elements if not isinstance(element, Unmade)]

    def _enumerate(self, elements, start):
        return [(np.int64(number), element) for number, element in enumerate(elements, start)]

    def _take_while(self, elements, predicate):
        return list(itertools.takewhile(lambda value: call_with(predicate, value), elements))

    def _unique(self, elements):
        first = {}
        for element in elements:
            first.setdefault(_key(element), element)
        return list(first.values())

    def _scan(self, elements, initial, function):
        outputs, state = [], initial
        for element in elements:
            state, output = function(state, element)
            outputs.append(output)
        return outputs

    # --- selection and order ---

    def _take(self, elements, count):
        return elements if count < 0 else elements[:count]

    def _skip(self, elements, count):
        return [] if count < 0 else elements[count:]

    def _shard(self, elements, num_shards, index):
        return elements[index::num_shards]

    def _prefetch(self, elements, buffer_size):
        return elements

    def _assert_cardinality(self, elements, expected):
        assert len(elements) == expected
        return elements

    def _shuffle(self, elements, buffer_size, seed, reshuffle=True, *, epoch):
        return shuffled(elements, buffer_size, seed, reshuffle, epoch=epoch)

    def _rejection_resample(self, elements, class_of, target, initial, seed, *, epoch):
        # One draw per element; a class is kept with the ratio of its target share to its share, up to a common factor.
        rng = generator(seed, 1, epoch)
        seen = [0] * len(target)
        output = []
        for value in elements:
            number = call_with(class_of, value)
            seen[number] += 1
            there = seen if initial is None else initial
            ratios = [want / have if have else 0 for want, have in zip(target, there, strict=True)]
            draw = rng.random()
            if max(ratios) and draw < ratios[number] / max(ratios):
                output.append((np.int32(number), value))
        return output

    # --- several inputs ---

    def _zip(self, lists, form):
        if form == "dict":
            return [{"b": a, "a": b} for a, b in zip(*lists, strict=False)]
        return list(zip(*lists, strict=False))

    def _concatenate(self, lists):
        return [element for elements in lists for element in elements]

    def _choose(self, lists, choices, stop):
        return _directed(lists, iter(choices), stop)

    def _sample(self, lists, weights, seed, stop, rerandomize, *, epoch):
        kept = [number for number, weight in enumerate(weights) if weight]
        shares = np.cumsum([weights[number] / sum(weights) for number in kept])[:-1]
        rng = generator(seed, 1, epoch if rerandomize else ())
        draws = (int(np.searchsorted(shares, rng.random(), side="right")) for _ in itertools.count())
        return _directed([lists[number] for number in kept], draws, stop)

    # --- batches ---

    def _batch(self, elements, size, drop_remainder=False):
        groups = [elements[start : start + size] for start in range(0, len(elements), size)]
        return [self._stacked(group) for group in groups if len(group) == size or not drop_remainder]

    def _stacked(self, group):
        if not any(isinstance(item, Unmade) for item in group):
            columns = list(zip(*[Structure.flatten(value)[0] for value in group], strict=True))
            if any(isinstance(leaf, RaggedRow | daskdist.Ragged) for column in columns for leaf in column):
                # Batches of ragged rows are ragged; the tests of `Ragged` check them.
                reject()
            if all(map(_stacks, columns)):
                return Structure.flatten(group[0])[1].pack([np.stack(column) for column in columns])
        self.met_unmade = True
        return Unmade()

    def _padded_batch(self, elements, size, shapes=None, values=None, drop_remainder=False):
        groups = [elements[start : start + size] for start in range(0, len(elements), size)]
        return [_padded(group, values) for group in groups if len(group) == size or not drop_remainder]

    def _ragged_batch(self, elements, size, drop_remainder=False):
        # Only generated for single arrays of unknown length.
        groups = [elements[start : start + size] for start in range(0, len(elements), size)]
        return [daskdist.Ragged.of(group) for group in groups if len(group) == size or not drop_remainder]

    def _unbatch(self, elements):
        return [row for element in elements for row in _rows(element)]

    def _rebatch(self, elements, sizes, drop_remainder=False):
        rows = self._unbatch(elements)
        batches, like = [], rows[:1]
        for size in itertools.cycle([sizes] if isinstance(sizes, int) else sizes):
            if size and len(rows) < size:
                # Batches of size 0 follow the batch before them directly; none follows a shorter last batch.
                batches += [self._stacked(rows)] if rows and not drop_remainder else []
                break
            if like:
                batches.append(self._stacked(rows[:size]) if size else _without_rows(like[0]))
            rows = rows[size:]
        return batches

    def _bucket_by_sequence_length(self, elements, length_of, boundaries, sizes, *padding):
        _, values, to_boundary, no_padding, drop_remainder = padding
        number_of = lambda value: int(np.searchsorted(boundaries, call_with(length_of, value), side="right"))  # noqa: E731
        groups = _grouped(elements, number_of, lambda number: sizes[number], drop_remainder)
        if no_padding:
            return [self._stacked(group) for _, group in groups]
        fill = {number: boundary - 1 for number, boundary in enumerate(boundaries)} if to_boundary else {}
        return [_padded(group, values, fill.get(number)) for number, group in groups]

    def _batch_by_size(self, elements, budget, length_of, buffer_size=None, value=None, ragged=False, round_size=1):
        buffer_size = None if buffer_size is None else -(-buffer_size // round_size) * round_size
        length = lambda part: max(int(call_with(length_of, part)), 1)  # noqa: E731
        if any(length(element) > budget for element in elements):
            reject()
        fits = lambda group: (  # noqa: E731
            sum(map(length, group)) <= budget if ragged else len(group) * max(map(length, group)) <= budget
        )
        groups = []
        step = buffer_size or max(len(elements), 1)
        for start in range(0, len(elements), step):
            buffer = elements[start : start + step]
            actual = []
            for item in buffer if buffer_size is None else sorted(buffer, key=length):
                if actual and fits([*actual[-1], item]):
                    actual[-1].append(item)
                else:
                    actual.append([item])
            while len(actual) % round_size and len(actual) < len(buffer):
                largest = max(actual, key=len)
                half = len(largest) - len(largest) // 2
                actual[actual.index(largest) : actual.index(largest) + 1] = [largest[:half], largest[half:]]
            groups += actual
        return [daskdist.Ragged.of(group) if ragged else _padded(group, value) for group in groups]

    # --- nested ---

    def _flat_map(self, elements, inner):
        return [value for element in elements for value in inner.elements(self, element)]

    def _interleave(self, elements, inner, cycle_length=None, block_length=1):
        # Follow the documented rule, one element at a time.
        slots: list[Any] = [None] * (cycle_length or 2)
        waiting, output, position = list(elements), [], 0
        while waiting or any(slot is not None for slot in slots):
            if slots[position] is None and waiting:
                slots[position] = list(inner.elements(self, waiting.pop(0)))
            for _ in range(block_length):
                if not slots[position]:
                    slots[position] = None
                    break
                output.append(slots[position].pop(0))
            position = (position + 1) % len(slots)
        return output

    def _window(self, elements, size, shift=None, stride=1, drop_remainder=False):
        windows = []
        for start in range(0, len(elements), shift or size):
            members = elements[start : start + (size - 1) * stride + 1 : stride]
            if len(members) == size or not drop_remainder:
                columns = zip(*[Structure.flatten(member)[0] for member in members], strict=True)
                windows.append(Structure.flatten(members[0])[1].pack([Listed(column) for column in columns]))
        return windows

    def _sliding_window(self, elements, size, shift=1, stride=1, drop_remainder=True):
        last = (size - 1) * stride + 1
        groups = [elements[start : start + last : stride] for start in range(0, len(elements), shift)]
        return [self._stacked(group) for group in groups if len(group) == size or not drop_remainder]

    def _group_by_window(self, elements, key_of, reduce, size, size_of=None):
        sized = (lambda key: size) if size_of is None else lambda key: size_of(np.int64(key))
        groups = _grouped(elements, lambda value: call_with(key_of, value), sized, False)
        return [element for key, group in groups for element in reduce.elements(self, key, group)]


def shuffled(elements, buffer_size, seed, reshuffle=True, *, epoch):
    """Shuffle by drawing from one slot of the buffer at a time."""
    rng = generator(seed, 1, epoch if reshuffle else ())
    buffer, rest = list(elements[:buffer_size]), elements[buffer_size:]
    output = []
    for element in rest:
        slot = rng.integers(len(buffer))
        output.append(buffer[slot])
        buffer[slot] = element
    return output + [buffer[place] for place in rng.permutation(len(buffer))]


def _directed(lists, choices, stop):
    lists, output = [list(elements) for elements in lists], []
    are_over: set[int] = set()
    for choice in choices:
        if lists[choice]:
            output.append(lists[choice].pop(0))
            continue
        are_over.add(choice)
        if stop or len(are_over) == len(lists):
            break
    return output


def _grouped(elements, key_of, size_of, drop_remainder):
    # A group follows its last element; incomplete groups come at the end in the order of keys.
    groups, waiting = [], {}
    for value in elements:
        key = key_of(value)
        waiting.setdefault(key, []).append(value)
        if len(waiting[key]) == size_of(key):
            groups.append((key, waiting.pop(key)))
    return groups if drop_remainder else groups + sorted(waiting.items(), key=lambda item: item[0])


def _stacks(column):
    if any(isinstance(leaf, Nested) for leaf in column):
        return False
    return len({(leaf.shape, leaf.dtype) for leaf in column}) == 1


def _padded(group, value, fill_to=None):
    structure = Structure.flatten(group[0])[1]
    batch = []
    for column in zip(*[Structure.flatten(item)[0] for item in group], strict=True):
        longest = np.max([leaf.shape for leaf in column], axis=0).astype(int).tolist()
        shape = longest if fill_to is None else [fill_to] * len(longest)
        dtype = column[0].dtype
        filler = value if value is not None else b"" if dtype.kind == "O" else np.zeros((), dtype)[()]
        batch.append(np.full((len(column), *shape), filler, dtype))
        for row, leaf in zip(batch[-1], column, strict=True) if shape else ():
            row[tuple(map(slice, leaf.shape))] = leaf
        if not shape:
            batch[-1] = np.stack(column)
    return structure.pack(batch)


def _rows(element):
    leaves, structure = Structure.flatten(element)
    columns = [[row.view(RaggedRow) for row in leaf] if _is_ragged(leaf) else leaf for leaf in leaves]
    return [structure.pack(row) for row in zip(*columns, strict=True)]


def _without_rows(row):
    leaves, structure = Structure.flatten(row)
    return structure.pack([np.zeros((0, *leaf.shape), leaf.dtype) for leaf in leaves])


def _key(element):
    # 0.0 and -0.0 are equal, and so are all NaN.
    leaves, structure = Structure.flatten(element)
    arrays = [part for leaf in leaves for part in ((leaf.values, leaf.row_splits) if _is_ragged(leaf) else (leaf,))]
    return structure, *(
        (str(array.dtype), array.shape, repr((array + 0).tolist() if array.dtype.kind in "fc" else array.tolist()))
        for array in arrays
    )


def _is_ragged(leaf):
    return isinstance(leaf, daskdist.Ragged)
