"""Plans as text."""

from __future__ import annotations

from collections.abc import Iterator

from daskdist.core.cardinality import INFINITE, UNKNOWN
from daskdist.core.node import Node
from daskdist.core.primitive import Arrange, Compute, Primitive


def tree(node: Node) -> str:
    """A pipeline, a line an operation, the source first."""
    return "\n".join(_lines(node, 0))


def _lines(node: Node, indent: int) -> Iterator[str]:
    if len(node.inputs) == 1:
        yield from _lines(node.inputs[0], indent)
    else:
        for source in node.inputs:
            yield from _lines(source, indent + 1)
    yield "  " * (indent + 1) + str(node)


def primitives(primitive: Primitive) -> str:
    """What a pipeline comes down to: what is computed in tasks, and what is arithmetic."""
    return "\n".join(_primitive_lines(primitive, 0))


def _primitive_lines(primitive: Primitive, indent: int) -> Iterator[str]:
    pad = "  " * (indent + 1)
    if isinstance(primitive, Arrange):
        for source in primitive.inputs:
            yield from _primitive_lines(source, indent + (len(primitive.inputs) > 1))
        yield f"{pad}arrange  {primitive.arrangement}"
    elif isinstance(primitive, Compute):
        yield from _primitive_lines(primitive.source, indent)
        where = "in the gather task" if primitive.source.grouped else "a task a block"
        yield f"{pad}compute  {primitive.name}, {where}"
    else:
        yield f"{pad}compute  {primitive.name}, a task a split"


def cardinality(number: int) -> str:
    """A number of elements, in words where it is none."""
    return {INFINITE: "endless", UNKNOWN: "unknown"}.get(number, f"{number:,}")


def size(num_bytes: float) -> str:
    """A number of bytes for people.

    >>> size(0), size(1536), size(3 * 2**30)
    ('0 B', '1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows in columns, the first row a heading; all columns but the first to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
