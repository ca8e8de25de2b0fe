"""Syntax trees of Python files, for tests that look at all files of the package."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@contextlib.contextmanager
def parsed(paths: Sequence[Path]) -> Iterator[None]:
    """Parse files, and forget their trees after the block."""
    # These are half a million objects, which take four times as long if they are searched for garbage meanwhile.
    gc.collect()
    gc.disable()
    try:
        for path in paths:
            nodes_of(path)
        gc.freeze()
    finally:
        gc.enable()
    try:
        yield
    finally:
        tree_of.cache_clear()
        nodes_of.cache_clear()
