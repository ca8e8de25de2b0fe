"""A check that inputs which are zipped stay aligned on each worker's share of their files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from daskdist.core.file_backed_source import FileBackedSource
from daskdist.core.node import Node
from daskdist.core.primitive import Split
from daskdist.sharding import Pairing, counted


def pairing(node: Node) -> Pairing:
    """Return the facts about an operation with the fact `pairs` that a policy decides by."""

    def mismatch(by_split: bool) -> str | None:
        try:
            _match(node, by_split)
        except _Unlike as unlike:
            return str(unlike)
        return None

    return Pairing(node.name, mismatch)


def tied(node: Node, is_left_out: Callable[[Node], bool]) -> Iterator[tuple[FileBackedSource, ...]]:
    """Yield groups of sources whose shares must be cut alike, without what is left out."""
    if isinstance(node, FileBackedSource):
        yield (node,)
    if is_left_out(node):
        return
    parts = [list(tied(each, is_left_out)) for each in node.inputs]
    if node.facts.pairs:
        for alike in zip(*parts, strict=True):
            yield tuple(source for group in alike for source in group)
        return
    for groups in parts:
        yield from groups


class _Unlike(Exception):  # noqa: N818 - says what is unlike, and is no error
    pass


def _match(node: Node, by_split: bool) -> None:
    # Two inputs are cut alike where the same files, as far as their rows go, go the same way.
    first, *others = node.inputs
    for other in others:
        _compare(first, other, by_split)
    for each in node.inputs:
        _match_within(each, by_split)


def _match_within(node: Node, by_split: bool) -> None:
    if node.facts.pairs:
        _match(node, by_split)
        return
    for each in node.inputs:
        _match_within(each, by_split)


def _compare(one: Node, other: Node, by_split: bool) -> None:
    one, other = _passed(one), _passed(other)
    if isinstance(one, FileBackedSource) and isinstance(other, FileBackedSource):
        _compare_files(one, other, by_split)
        return
    for each in (one, other):
        if not isinstance(each, FileBackedSource) and len(each.inputs) < 2 and each.group_size is None:
            raise _Unlike(f"where an element is from is not known after {each.name}")
    if _shape(one) != _shape(other):
        raise _Unlike(f"{one.name} is not matched by {other.name}")
    for left, right in zip(one.inputs, other.inputs, strict=True):
        _compare(left, right, by_split)


def _passed(node: Node) -> Node:
    # What comes of the n-th element of the node returned is the n-th here.
    while len(node.inputs) == 1 and (node.facts.keeps_order or (node.facts.keeps_count and node.facts.per_worker)):
        (node,) = node.inputs
    # Of those, the first alone tells where elements are from: the others are compared with it.
    return _passed(node.inputs[0]) if node.facts.pairs else node


def _shape(node: Node) -> Any:
    return len(node.inputs), node.group_size, node.drops_remainder, node.facts.per_worker


def _compare_files(one: FileBackedSource, other: FileBackedSource, by_split: bool) -> None:
    if len(one.paths) != len(other.paths):
        raise _Unlike(f"one is of {counted(len(one.paths), 'file')} and the other of {len(other.paths)}")
    if one is other:
        return
    find = _rows_of_splits if by_split else _rows_of_file
    for file, path in enumerate(one.paths):
        rows, others = find(one.splits_of_file, file, path), find(other.splits_of_file, file, other.paths[file])
        if rows != others:
            raise _Unlike(f"{path} has {_said(rows)} rows and {other.paths[file]} {_said(others)}")


def _rows_of_splits(list_file: Callable[[int], Any], file: int, path: str) -> list[int]:
    splits: list[Split] = list(list_file(file))
    rows = [split.num_rows for split in splits if split.num_rows is not None]
    if len(rows) < len(splits):
        raise _Unlike(f"how many rows {path} has is only known when it is read")
    return rows


def _rows_of_file(list_file: Callable[[int], Any], file: int, path: str) -> list[int]:
    return [sum(_rows_of_splits(list_file, file, path))]


def _said(rows: list[int]) -> str:
    return " + ".join(map(str, rows)) or "no"
