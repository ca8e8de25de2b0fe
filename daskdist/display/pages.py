"""Pages about datasets and replicas for notebooks.

None of them reads data, computes anything or waits. To count rows, the indexes of a few local files may be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from daskdist.core.node import Node
from daskdist.core.spec import DatasetSpec, ElementSpec, RaggedTensorSpec, SpecUnknown, TensorSpec
from daskdist.display.drawing import cardinality_in_words, drawing, known_cardinality
from daskdist.display.html import Box, PageTable, Section, page, texts
from daskdist.display.plan import Share, count, share_cells


def dataset_page(title: str, node: Node, what_runs: Callable[[], str]) -> str | None:
    """Return the page of a dataset: its plan as a drawing, and its elements.

    Parameters
    ----------
    title
        The name of its class.
    node
        The pipeline.
    what_runs
        Returns what the pipeline comes down to.
    """
    number = known_cardinality(node)
    facts = [cardinality_in_words(number)]
    sections = [Section("plan", drawing(node))]
    try:
        sections.append(spec_section(node.spec))
    except SpecUnknown:
        sections.append(Section("text", "What an element is depends on the data: look with ds.show()."))
    if number is None:
        sections.append(Section("text", "ds.cardinality() counts the elements by the indexes of the files."))
    sections.append(Section("lines", what_runs(), "What runs", is_folded=True))
    return page(title, facts, sections)


def spec_section(spec: ElementSpec, title: str = "Each element") -> Section:
    """Return a table of the leaves of an element."""
    rows = [
        [
            Box(path or "(the element)", is_code=True),
            Box(_shape_of(leaf), is_code=True),
            Box(_dtype_of(leaf)),
        ]
        for path, leaf in zip(spec.structure.paths, spec.leaves, strict=True)
    ]
    title = f"{title}: {count(len(rows), 'array')}" if len(rows) > 8 else title
    return Section("table", PageTable(texts("leaf", "shape", "dtype"), rows), title, is_folded=len(rows) > 8)


def _shape_of(leaf: TensorSpec) -> str:
    if isinstance(leaf, DatasetSpec) or leaf.shape is None:
        return "?"
    lengths = ["?" if length is None else str(length) for length in leaf.shape]
    return f"({', '.join(lengths)}{',' * (len(lengths) == 1)})"


def _dtype_of(leaf: TensorSpec) -> str:
    if isinstance(leaf, DatasetSpec):
        return "a dataset"
    return f"{leaf.dtype}, rows of different lengths" if isinstance(leaf, RaggedTensorSpec) else str(leaf.dtype)


def distributed_page(
    title: str,
    facts: Sequence[str],
    shares: Sequence[Share],
    sharding: str,
    node: Node,
    spec: ElementSpec | None,
    notes: Iterable[str],
    *,
    is_counted: bool,
) -> str | None:
    """Return the page of a distributed dataset: what each worker reads, and why it is that.

    Parameters
    ----------
    title, facts
        The name of its class, and its number of steps, say.
    shares
        What each worker reads.
    sharding
        The policy, and the reason for it.
    node
        The pipeline of the first worker.
    spec
        The spec of what a replica is given, if it is known.
    notes
        What there is to say of devices.
    is_counted
        Whether the indexes of the files have been read.
    """
    sections = [Section("text", f"Sharding: {sharding}"), Section("table", shares_drawn(shares))]
    if not is_counted:
        sections.append(Section("text", "explain() counts rows and bytes by the indexes of the files."))
    sections += [Section("text", note) for note in notes]
    if spec is not None:
        sections.append(spec_section(spec, "Each replica is given"))
    worker = "The plan" if len(shares) == 1 else "The plan of the first worker"
    sections.append(Section("plan", drawing(node), worker, is_folded=True))
    return page(title, facts, sections)


def shares_drawn(shares: Sequence[Share]) -> PageTable:
    """Return a table with a bar for each worker, as long as its share of the bytes, rows, splits or files."""
    amounts = [(share.num_bytes, share.num_rows, share.num_splits, share.num_files) for share in shares]
    measure = next((column for column in zip(*amounts, strict=True) if None not in column and any(column)), None)
    rows = []
    for number, share in enumerate(shares):
        bar = [] if measure is None else [Box(share=round(100 * measure[number] / max(measure), 1))]
        numbers = [Box(text, "number") for text in share_cells(share)]
        rows.append([Box(str(number), "number"), Box(share.worker), Box(_some(share.devices)), *bar, *numbers])
    names = [Box(name, "number") for name in ("files", "splits", "rows", "bytes")]
    return PageTable([*texts("", "worker", "replicas"), *texts("")[: measure is not None], *names], rows)


def _some(names: Sequence[str]) -> str:
    if len(names) > 4:
        return f"{len(names)}: {names[0]} to {names[-1]}"
    return ", ".join(names) or "-"


def state_page(title: str, facts: Sequence[str], heading: Sequence[str], rows: Sequence[Sequence[Any]]) -> str | None:
    """Return a page of one table of texts, the first of each row set as code."""
    cells = [[Box(str(first), is_code=True), *[Box(str(rest), "wide") for rest in others]] for first, *others in rows]
    return page(title, facts, [Section("table", PageTable(texts(*heading), cells))] if rows else [])
