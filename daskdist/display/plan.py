"""Plans of pipelines, and the shares of workers, as text."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from daskdist.core.cardinality import INFINITE, UNKNOWN
from daskdist.core.node import Node
from daskdist.core.primitive import Arrange, Chain, Compute, Fact, Primitive, Split, Stream
from daskdist.url_secrets import without_secrets


def tree(node: Node, *, with_notes: bool = False) -> str:
    """Draw a pipeline with one line per operation, the source first; optionally with notes on how they run."""
    lines = list(_lines(node, 0))
    if not with_notes:
        return "\n".join(line for line, _ in lines)
    width = max(len(line) for line, _ in lines)
    return "\n".join(f"{line:{width}}  # {operation.note}" if operation.note else line for line, operation in lines)


def _lines(node: Node, indent: int) -> Iterator[tuple[str, Node]]:
    if len(node.inputs) == 1:
        yield from _lines(node.inputs[0], indent)
    else:
        for source in node.inputs:
            yield from _lines(source, indent + 1)
    yield "  " * (indent + 1) + operation_text(node), node


def operation_text(node: Node) -> str:
    """Return the text of an operation: without passwords, and paths in the current directory as relative ones."""
    text, directory = without_secrets(str(node)), os.getcwd()
    # A path does not begin in the middle of another one, or of a URL.
    return text if directory == os.sep else re.sub(rf"(?<![\w/:.-]){re.escape(directory)}/(?=\S)", "", text)


def primitives(primitive: Primitive) -> str:
    """Draw the primitives of a pipeline: the tasks, and the row arithmetic between them."""
    lines = list(_primitive_lines(primitive, 0))
    if isinstance(primitive, Arrange):
        lines.append("  compute  gather, a task a bundle of elements")
    return "\n".join(lines)


def _primitive_lines(primitive: Primitive, indent: int) -> Iterator[str]:
    pad = "  " * (indent + 1)
    if isinstance(primitive, Arrange):
        names = [primitive.name]
        while len(primitive.inputs) == 1 and isinstance(primitive.inputs[0], Arrange):
            primitive = primitive.inputs[0]
            names.append(primitive.name)
        for source in primitive.inputs:
            yield from _primitive_lines(source, indent + (len(primitive.inputs) > 1))
        yield f"{pad}arrange  {', '.join(reversed(names))}"
    elif isinstance(primitive, (Compute, Chain)):
        yield from _primitive_lines(primitive.source, indent)
        gathers = isinstance(primitive.source, Arrange) and primitive.name != "gather"
        in_turn = ", one after the other" if isinstance(primitive, Chain) else ""
        unit = "bundle" if isinstance(primitive.source, Arrange) else "block"
        yield f"{pad}compute  {'gather-' * gathers}{primitive.name}, a task a {unit}{in_turn}"
    elif isinstance(primitive, Fact):
        yield from _primitive_lines(primitive.source, indent)
        yield f"{pad}fact     {primitive.name}, a task a block, its result brought to the driver"
    elif isinstance(primitive, Stream):
        yield f"{pad}stream   {primitive.name}, in this process"
    else:
        yield f"{pad}compute  {primitive.name}, a task a split"


def cardinality(number: int) -> str:
    """Format a number of elements; in words if it is unknown or endless."""
    return {INFINITE: "endless", UNKNOWN: "unknown"}.get(number, f"{number:,}")


def size(num_bytes: float) -> str:
    """Format a number of bytes for people.

    >>> size(0), size(1536), size(3 * 2**30)
    ('0 B', '1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"


@dataclass(frozen=True)
class Share:
    """The part of the data that one worker reads; numbers that are unknown before reading are None.

    Parameters
    ----------
    worker
        The name of the worker.
    devices
        The device of each of its replicas.
    num_files, num_splits, num_rows, num_bytes
        The amounts that it reads. The number of files is None for data that is not in files.
    """

    worker: str
    devices: Sequence[str]
    num_files: int | None = None
    num_splits: int | None = None
    num_rows: int | None = None
    num_bytes: int | None = None

    @classmethod
    def of(cls, worker: str, devices: Sequence[str], splits: Sequence[Split], *, is_all: bool = True) -> Share:
        """Return the share of some splits; numbers are unknown if these are not all, such as for a generator."""
        num_files = len({split.file for split in splits if split.file is not None}) or None
        if not is_all:
            return cls(worker, devices, num_files)
        num_rows = _sum_known([split.num_rows for split in splits])
        return cls(worker, devices, num_files, len(splits), num_rows, _sum_known([split.num_bytes for split in splits]))


def _sum_known(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def shares_table(shares: Sequence[Share]) -> str:
    """Format the shares of the workers, one line each; ``?`` for numbers that are unknown before reading."""
    rows: list[tuple[str, ...]] = [("worker", "replicas", "files", "splits", "rows", "bytes")]
    for number, share in enumerate(shares):
        cells = share_cells(share)
        rows.append((f"{number} {share.worker}", f"{len(share.devices)}", *cells))
    return table(rows)


def share_cells(share: Share) -> tuple[str, str, str, str]:
    """Format the files, splits, rows and bytes of a share."""
    return (
        "-" if share.num_files is None else f"{share.num_files:,}",
        "?" if share.num_splits is None else f"{share.num_splits:,}",
        "?" if share.num_rows is None else f"{share.num_rows:,}",
        "?" if share.num_bytes is None else size(share.num_bytes),
    )


def table(rows: list[tuple[str, ...]]) -> str:
    """Format rows in columns, the first row as a heading; all columns but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
