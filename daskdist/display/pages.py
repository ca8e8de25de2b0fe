"""Notebook pages about datasets and replicas.

Creating a page reads no data, computes nothing and never waits. Only indexes of a few local files may be read to count
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from daskdist.core.cardinality import counted
from daskdist.core.node import Node
from daskdist.core.spec import DatasetSpec, ElementSpec, RaggedTensorSpec, TensorSpec
from daskdist.display.drawing import cardinality_in_words, drawing, known_cardinality
from daskdist.display.html import Box, PageTable, Section, TimePart, page, texts
from daskdist.display.plan import Share, share_cells
from daskdist.tables.describe import column_name


def dataset_page(title: str, node: Node, spec: ElementSpec | None, what_runs: Callable[[], str]) -> str:
    """Return the page of a dataset: its plan as a drawing, and its elements.

    Parameters
    ----------
    title
        The name of its class.
    node
        The pipeline.
    spec
        The spec of its elements; None if it depends on data.
    what_runs
        Returns the primitives that run, as text.
    """
    number = known_cardinality(node)
    facts = [cardinality_in_words(number)]
    sections = [Section("plan", drawing(node))]
    if spec is None:
        sections.append(Section("text", "The elements depend on the data: ds.show() shows some."))
    else:
        sections.append(spec_section(spec))
    if number is None:
        sections.append(Section("text", "ds.cardinality() reads the indexes of the files to count the elements."))
    sections.append(Section("lines", what_runs(), "What runs", is_folded=True))
    return page(title, facts, sections)


def spec_section(spec: ElementSpec, title: str = "Each element") -> Section:
    """Return a table of the leaves of an element."""
    rows = [
        [
            Box(column_name(path) if path else "(the element)", is_code=True),
            Box(_shape_of(leaf), is_code=True),
            Box(_dtype_of(leaf)),
        ]
        for path, leaf in spec.structure.in_order(spec.leaves)
    ]
    title = f"{title}: {counted(len(rows), 'array')}" if len(rows) > 8 else title
    return Section("table", PageTable(texts("column", "shape", "dtype"), rows), title, is_folded=len(rows) > 8)


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
) -> str:
    """Return the page of a distributed dataset: the share of each worker, and the reason for it.

    Parameters
    ----------
    title, facts
        The name of its class, and facts such as its number of steps.
    shares
        The share of each worker.
    sharding
        The policy, and the reason for it.
    node
        The pipeline of the first worker.
    spec
        The spec of a replica's element, if it is known.
    notes
        Remarks about devices.
    is_counted
        Whether the indexes of the files have been read.
    """
    sections = [Section("text", f"Sharding: {sharding}"), Section("table", shares_drawn(shares))]
    if not is_counted:
        sections.append(Section("text", "explain() reads the indexes of the files to count rows and bytes."))
    sections += [Section("text", note) for note in notes]
    if spec is not None:
        sections.append(spec_section(spec, "Each replica gets"))
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
        rows.append([Box(str(number), "number"), Box(share.worker), Box(some_of(share.devices)), *bar, *numbers])
    names = [Box(name, "number") for name in ("files", "splits", "rows", "bytes")]
    return PageTable([*texts("", "worker", "replicas"), *texts("")[: measure is not None], *names], rows)


def some_of(names: Sequence[str]) -> str:
    """Return the names with commas between them; of many, the first and the last."""
    if len(names) > 4:
        return f"{len(names)}: {names[0]} to {names[-1]}"
    return ", ".join(names) or "-"


def state_page(title: str, facts: Sequence[str], heading: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a page with one table; the first cell of each row is set as code."""
    cells = [[Box(str(first), is_code=True), *[Box(str(rest), "wide") for rest in others]] for first, *others in rows]
    return page(title, facts, [Section("table", PageTable(texts(*heading), cells))] if rows else [])


def times_in_words(stats: dict[str, Any], unit: str = "step") -> str:
    """Describe the progress of an iterator, and the share of the time that the program waited for it.

    >>> times_in_words({"num_elements": 30, "waiting_s": 1.0, "step_s": 2.0, "steps_per_s": 10.0, "num_skipped": 0})
    '30 steps, 10.0 a second, waiting 33 % of the time'
    """
    total_s = stats["waiting_s"] + stats["step_s"]
    words = [counted(stats["num_elements"], unit)]
    if total_s:
        words.append(f"{stats['steps_per_s']:,.1f} a second")
        words.append(f"waiting {100 * stats['waiting_s'] / total_s:.0f} % of the time")
    if stats["num_skipped"]:
        words.append(f"{counted(stats['num_skipped'], 'element')} left out")
    return ", ".join(words)


def times_page(title: str, stats: dict[str, Any], unit: str = "step") -> str:
    """Return the page of an iterator over steps or elements: its progress, and how time was spent."""
    total_s = stats["waiting_s"] + stats["step_s"]
    sections = []
    if total_s:
        share = 100 * stats["waiting_s"] / total_s
        parts = [
            TimePart(f"waiting for input {stats['waiting_s']:.2f} s", round(share, 1), "waiting"),
            TimePart(f"in the program's steps {stats['step_s']:.2f} s", round(100 - share, 1), "step-time"),
        ]
        sections.append(Section("shares", parts))
    if stats.get("busy_s"):
        sections.append(Section("table", bars("work for input", "all threads", stats["busy_s"])))
    return page(title, [times_in_words(stats, unit)], sections)


def bars(names: str, summed_over: str, seconds_by_name: dict[str, float]) -> PageTable:
    """Return a table of seconds by name, with a bar for each; the first are the most."""
    longest = max(seconds_by_name.values())
    rows = [
        [Box(name, is_code=True), Box(share=round(100 * seconds / longest, 1)), Box(f"{seconds:.3f} s", "number")]
        for name, seconds in seconds_by_name.items()
    ]
    return PageTable([*texts(names, ""), Box(summed_over, "number")], rows)
