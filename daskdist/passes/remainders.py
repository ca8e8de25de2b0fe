"""Rows that a pipeline drops at the end of each worker's share of the files, and of the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from daskdist.core.cardinality import INFINITE, UNKNOWN
from daskdist.core.node import Node
from daskdist.errors import FileError
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


def drops_groups(node: Node, *, skips_errors: bool) -> bool:
    """Return whether an operation keeps or drops groups of rows as a whole, such as a filter of batches.

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
    for each in node.inputs:
        if level(each):
            yield from _up_to_groups(each)


def _computes_groups(node: Node) -> bool:
    # A function that is called with groups may fail for one.
    return node.facts.compute and not node.facts.levels and any(map(level, node.inputs))


def remainder(whole: Node, shares: Sequence[Node]) -> Remainder | None:
    """Return the rows dropped by operations with ``drop_remainder``; None where only the data tells.

    Parameters
    ----------
    whole
        The pipeline.
    shares
        The same on the share of each worker.
    """
    try:
        units = {_unit(node) for node in _last_droppers(whole)}
        unit = units.pop() if len(units) == 1 else "elements"
        kept = _kept(whole, unit)
        of_shares = [_kept(share, unit) for share in shares]
    except FileError:
        # Errors of a file are raised when it is read.
        return None
    known = [each for each in of_shares if each is not None]
    if kept is None or len(known) < len(of_shares):
        return None
    return Remainder(kept[0], kept[1], sum(number for _, number in known), unit)


def uneven(shares: Sequence[Node]) -> Remainder | None:
    """Return the parts of batches dropped where all workers end with the first; None where only the data tells."""
    try:
        numbers = [share.cardinality for share in shares]
    except FileError:
        return None
    if UNKNOWN in numbers:
        return None
    if INFINITE in numbers:
        return Remainder(0, 0, 0, "elements") if len(set(numbers)) == 1 else None
    return Remainder(sum(numbers), sum(numbers), len(numbers) * min(numbers), "elements")


def _last_droppers(node: Node) -> Iterator[Node]:
    # On each way to a source the last that drops: how many elements come to it tells what those before it have dropped.
    if node.drops_remainder:
        yield node
        return
    for each in node.inputs:
        yield from _last_droppers(each)


def _kept(pipeline: Node, unit: str) -> tuple[int, int] | None:
    # Return how much reaches the last operations that drop a remainder, and how much they keep, in elements or rows.
    num_rows = num_kept = 0
    for node in _last_droppers(pipeline):
        found = _come_and_kept(node)
        if found is None:
            return None
        if unit == _ROWS and node.group_size is not None:
            found = _num_rows_of(node.inputs[0], found[0]), _num_rows_of(node.inputs[0], found[1])
        num_rows, num_kept = num_rows + found[0], num_kept + found[1]
    return num_rows, num_kept


def _come_and_kept(node: Node) -> tuple[int, int] | None:
    size, number = node.group_size, node.inputs[0].cardinality
    if size is None:
        # Batches of another size are made of the rows of those that come.
        sizes: Sequence[int] = getattr(node, "sizes", ())
        size, number = (sizes[0] if len(sizes) == 1 else None), _num_rows(node.inputs[0])
    if size is None or number == UNKNOWN:
        return None
    # Without end there is no remainder.
    return (0, 0) if number == INFINITE else (number, number - number % size)


def _num_rows(node: Node) -> int:
    # The rows of all batches together.
    while node.facts.keeps_rows:
        node = node.inputs[0]
    size = node.group_size
    if size is None or level(node) > 1:
        return UNKNOWN
    number = node.inputs[0].cardinality
    return number - number % size if number >= 0 and node.drops_remainder else number


def _has_plain_groups(node: Node) -> bool:
    # Return whether the rows that an element is made of can be counted.
    while node.inputs:
        if len(node.inputs) > 1 or node.facts.levels < 0 or (node.facts.levels and node.group_size is None):
            return False
        (node,) = node.inputs
    return True


def _num_rows_of(node: Node, number: int) -> int:
    # The rows of the first elements.
    for source in node.inputs:
        if node.group_size is not None:
            number = min(number * node.group_size, max(source.cardinality, 0))
        return _num_rows_of(source, number)
    return number


def _unit(node: Node) -> str:
    return _ROWS if node.group_size is None or _has_plain_groups(node.inputs[0]) else "elements"
