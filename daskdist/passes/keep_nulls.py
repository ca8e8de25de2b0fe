"""Pipelines in which nulls of files are kept as NaN, for statistics that count them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from daskdist.core.node import Node
from daskdist.ops.read_files import ReadFiles
from daskdist.ops.select import Select
from daskdist.ops.with_options import merged_options
from daskdist.tables.replacements import NullsKept


def keeping_nulls(node: Node) -> Node:
    """Return a pipeline that keeps nulls without a replacement, unless it looks at values or leaves them out."""
    return node if merged_options(node).on_error == "skip" else _keeping_nulls(node)


def _keeping_nulls(node: Node) -> Node:
    if isinstance(node, ReadFiles):
        form: Any = node.format
        if not hasattr(form, "missing"):
            return node
        return replace(node, format=replace(form, missing=NullsKept(form.missing or {})), whole=None)
    facts = node.facts
    if len(node.inputs) == 1 and (facts.keeps_rows or facts.by_count or isinstance(node, Select)):
        return node.with_inputs((_keeping_nulls(node.inputs[0]),))
    return node
