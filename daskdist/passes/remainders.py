"""The rows that a pipeline drops at the end of each worker's share of the files, and at the end of the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from daskdist.core.cardinality import INFINITE, UNKNOWN
from daskdist.core.node import Node, walk
from daskdist.core.spec import ElementSpec
from daskdist.errors import FileError
from daskdist.ops.unbatch import num_in_groups
from daskdist.sharding import Remainder

_ROWS: Final = "rows"


def level(node: Node) -> int:
    """Return the depth of batching of a node's elements: 0 for elements of its sources, 1 for batches of them.

    >>> from daskdist import Dataset
    >>> from daskdist.core.dataset_base import node_of
    >>> level(node_of(Dataset.range(8).batch(2).batch(2).unbatch()))
    1
    """
    return max(max(map(level, node.inputs), default=0) + node.facts.levels, 0)


def looks_like_batches(node: Node, spec: ElementSpec) -> bool:
    """Return whether elements may be batches: they are made of such, and all leaves have a first axis that fits.

    >>> from daskdist import Dataset
    >>> from daskdist.core.dataset_base import node_of
    >>> batches = node_of(Dataset.range(8).batch(2).map(lambda x: x + 1))
    >>> looks_like_batches(batches, batches.spec)
    True
    """
    sizes = {None, *(upstream.group_size for upstream in walk(node))}
    return level(node) > 0 and all(leaf.shape and leaf.shape[0] in sizes for leaf in spec.leaves)


def drops_groups(node: Node, *, skips_errors: bool) -> bool:
    """Return whether an operation drops whole groups of rows, such as a filter of batches.

    Parameters
    ----------
    node
        The operation.
    skips_errors
        Whether elements whose computation fails are left out by the options of the pipeline.
    """
    facts = node.facts
    if not node.inputs or not level(node.inputs[0]):
        return False
    if facts.leaves_out_failed:
        return any(map(_computes_groups, _up_to_groups(node.inputs[0])))
    is_filter = facts.compute and facts.keeps_spec and not facts.keeps_count
    return is_filter or (skips_errors and _computes_groups(node))


def _up_to_groups(node: Node) -> Iterator[Node]:
    yield node
    for source in node.inputs:
        if level(source):
            yield from _up_to_groups(source)


def _computes_groups(node: Node) -> bool:
    # A function of groups may fail for one.
    return node.facts.compute and not node.facts.levels and any(map(level, node.inputs))


def remainder(whole: Node, shares: Sequence[Node]) -> Remainder | None:
    """Return the rows dropped by operations with ``drop_remainder``; None if that depends on the data."""
    try:
        units = {_unit(node) for node in _last_dropping_nodes(whole)}
        unit = units.pop() if len(units) == 1 else "elements"
        kept = _kept(whole, unit)
        of_shares = [_kept(share, unit) for share in shares]
    except FileError:
        # Reading the file will raise the error.
        return None
    known = [counts for counts in of_shares if counts is not None]
    if kept is None or len(known) < len(of_shares):
        return None
    return Remainder(kept[0], kept[1], sum(number for _, number in known), unit)


def uneven(shares: Sequence[Node]) -> Remainder | None:
    """Return the batch parts dropped because all workers end with the first; None if that depends on the data."""
    try:
        numbers = [share.cardinality for share in shares]
    except FileError:
        return None
    if UNKNOWN in numbers:
        return None
    if INFINITE in numbers:
        return Remainder(0, 0, 0, "elements") if len(set(numbers)) == 1 else None
    return Remainder(sum(numbers), sum(numbers), len(numbers) * min(numbers), "elements")


def _last_dropping_nodes(node: Node) -> Iterator[Node]:
    # Yield the last dropping operation on each path to a source: its input reflects what earlier ones drop.
    if node.drops_remainder:
        yield node
        return
    for source in node.inputs:
        yield from _last_dropping_nodes(source)


def _kept(pipeline: Node, unit: str) -> tuple[int, int] | None:
    # Return how many elements or rows reach the last operations that drop a remainder, and how many they keep.
    num_rows = num_kept = 0
    for node in _last_dropping_nodes(pipeline):
        numbers = _come_and_kept(node)
        if numbers is None:
            return None
        if unit == _ROWS and node.group_size is not None:
            numbers = _num_rows_of(node.inputs[0], numbers[0]), _num_rows_of(node.inputs[0], numbers[1])
        num_rows, num_kept = num_rows + numbers[0], num_kept + numbers[1]
    return num_rows, num_kept


def _come_and_kept(node: Node) -> tuple[int, int] | None:
    size, number = node.group_size, node.inputs[0].cardinality
    if size is None:
        # Rebatching counts the rows of all incoming batches.
        size, number = node.rows_per_element, _num_rows(node.inputs[0])
    if size is None or number == UNKNOWN:
        return None
    # An endless stream has no remainder.
    return (0, 0) if number == INFINITE else (number, number - number % size)


def _num_rows(node: Node) -> int:
    # Return the number of rows of all batches together.
    return UNKNOWN if level(node) > 1 else num_in_groups(node)


def _has_plain_groups(node: Node) -> bool:
    # Return whether the rows of an element can be counted.
    while node.inputs:
        if len(node.inputs) > 1 or node.facts.levels < 0 or (node.facts.levels and node.group_size is None):
            return False
        (node,) = node.inputs
    return True


def _num_rows_of(node: Node, number: int) -> int:
    # Return the number of rows of the first elements.
    for source in node.inputs:
        if node.group_size is not None:
            number = min(number * node.group_size, max(source.cardinality, 0))
        return _num_rows_of(source, number)
    return number


def _unit(node: Node) -> str:
    return _ROWS if node.group_size is None or _has_plain_groups(node.inputs[0]) else "elements"
