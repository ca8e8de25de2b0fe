"""Names that are imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazily(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__``, for names given as ``"import.path:attribute"`` or ``"import.path"``."""

    def getattr_(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        path, _, attribute = names[name].partition(":")
        found = importlib.import_module(path)
        return getattr(found, attribute) if attribute else found

    return getattr_
