"""Modules whose names are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazily(module: str, names: Mapping[str, str], instead: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return a module's ``__getattr__``.

    Parameters
    ----------
    module
        The module's name, for messages.
    names
        Each name, with where it is: ``"import.path:attribute"`` or ``"import.path"``.
    instead
        Names that TensorFlow has there and this package does not, each with what to use.
    """

    def getattr_(name: str) -> Any:
        if name not in names:
            advice = f"; use {instead[name]}" if instead is not None and name in instead else ""
            raise AttributeError(f"module {module!r} has no attribute {name!r}{advice}")
        path, _, attribute = names[name].partition(":")
        found = importlib.import_module(path)
        return getattr(found, attribute) if attribute else found

    return getattr_
