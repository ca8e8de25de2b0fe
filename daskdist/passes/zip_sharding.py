"""A check that zipped inputs stay aligned on each worker's share of their files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from daskdist.core.cardinality import counted
from daskdist.core.file_backed_source import FileBackedSource
from daskdist.core.node import Node
from daskdist.core.primitive import Split
from daskdist.sharding import Pairing


def pairing(node: Node) -> Pairing:
    """Return the facts about a pairing operation on which a policy bases its decision."""

    def mismatch(by_split: bool) -> str | None:
        try:
            _match(node, by_split)
        except _Unlike as unlike:
            return str(unlike)
        return None

    return Pairing(node.name, mismatch)


def tied(node: Node, is_left_out: Callable[[Node], bool]) -> Iterator[tuple[FileBackedSource, ...]]:
    """Yield groups of sources whose shares must correspond, except nodes for which ``is_left_out`` returns True."""
    if isinstance(node, FileBackedSource):
        yield (node,)
    if is_left_out(node):
        return
    parts = [list(tied(source, is_left_out)) for source in node.inputs]
    if node.facts.pairs:
        for alike in zip(*parts, strict=True):
            yield tuple(source for group in alike for source in group)
        return
    for groups in parts:
        yield from groups


class _Unlike(Exception):  # noqa: N818 - a signal with the difference, not an error
    pass


def _match(node: Node, by_split: bool) -> None:
    # Two inputs correspond if their files have the same numbers of rows and pass through the same operations.
    first, *other_inputs = node.inputs
    for other in other_inputs:
        _compare(first, other, by_split)
    for source in node.inputs:
        _match_within(source, by_split)


def _match_within(node: Node, by_split: bool) -> None:
    if node.facts.pairs:
        _match(node, by_split)
        return
    for source in node.inputs:
        _match_within(source, by_split)


def _compare(node: Node, other: Node, by_split: bool) -> None:
    node, other = _origin_of(node), _origin_of(other)
    if isinstance(node, FileBackedSource) and isinstance(other, FileBackedSource):
        _compare_files(node, other, by_split)
        return
    for source in (node, other):
        if not isinstance(source, FileBackedSource) and len(source.inputs) < 2 and source.group_size is None:
            raise _Unlike(f"the origin of an element is unknown after {source.name}")
    if _shape(node) != _shape(other):
        raise _Unlike(f"{node.name} does not correspond to {other.name}")
    for left, right in zip(node.inputs, other.inputs, strict=True):
        _compare(left, right, by_split)


def _origin_of(node: Node) -> Node:
    # Return the earliest node whose n-th element becomes the n-th element of this node.
    while len(node.inputs) == 1 and (node.facts.keeps_order or (node.facts.keeps_count and node.facts.per_worker)):
        (node,) = node.inputs
    # The first input of a pairing stands for the origin: the others are compared with it.
    return _origin_of(node.inputs[0]) if node.facts.pairs else node


def _shape(node: Node) -> Any:
    return len(node.inputs), node.group_size, node.drops_remainder, node.facts.per_worker


def _compare_files(source: FileBackedSource, other: FileBackedSource, by_split: bool) -> None:
    if len(source.paths) != len(other.paths):
        raise _Unlike(f"one reads {counted(len(source.paths), 'file')} and the other {len(other.paths)}")
    if source is other:
        return
    find = _rows_of_splits if by_split else _rows_of_file
    for file, path in enumerate(source.paths):
        rows, other_rows = find(source.splits_of_file, file, path), find(other.splits_of_file, file, other.paths[file])
        if rows != other_rows:
            raise _Unlike(f"{path} has {_said(rows)} rows and {other.paths[file]} {_said(other_rows)}")


def _rows_of_splits(list_file: Callable[[int], Any], file: int, path: str) -> list[int]:
    splits: list[Split] = list(list_file(file))
    rows = [split.num_rows for split in splits if split.num_rows is not None]
    if len(rows) < len(splits):
        raise _Unlike(f"the number of rows of {path} is only known when it is read")
    return rows


def _rows_of_file(list_file: Callable[[int], Any], file: int, path: str) -> list[int]:
    return [sum(_rows_of_splits(list_file, file, path))]


def _said(rows: list[int]) -> str:
    return " + ".join(map(str, rows)) or "no"
