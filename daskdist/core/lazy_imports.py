"""Modules whose names are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazily(
    module: str, names: Mapping[str, str], instead: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a module's ``__getattr__`` and ``__dir__``.

    Parameters
    ----------
    module
        The module's name, for messages.
    names
        Each public name with its import path: ``"import.path:attribute"`` or ``"import.path"``.
    instead
        Names that only other libraries have, each with the replacement to suggest.
    """

    def getattr_(name: str) -> Any:
        if name not in names:
            advice = f"; use {instead[name]}" if instead is not None and name in instead else ""
            raise AttributeError(f"module {module!r} has no attribute {name!r}{advice}")
        path, _, attribute = names[name].partition(":")
        imported_module = importlib.import_module(path)
        return getattr(imported_module, attribute) if attribute else imported_module

    return getattr_, lambda: sorted(names)
