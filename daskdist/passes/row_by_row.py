"""Pipelines in which every function of one element is called for each element."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from daskdist.core.functions.user_function import UserFunction
from daskdist.core.node import Node, with_each_input


def row_by_row(node: Node) -> Node:
    """Return the pipeline with functions of one element called for each element, never for many at once."""
    node = with_each_input(node, row_by_row)
    values: dict[str, Any] = {attribute.name: getattr(node, attribute.name) for attribute in fields(node)}
    changed: dict[str, Any] = {
        name: value.row_by_row() for name, value in values.items() if isinstance(value, UserFunction)
    }
    return replace(node, **changed) if changed else node
