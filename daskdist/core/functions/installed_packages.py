"""The installed packages of modules, and their versions."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
import types
from typing import Any, Final


def package_of(module: Any) -> str | None:
    """Return the name and version of the installed package of a module; None if it is in none."""
    if not isinstance(module, (str, type(None))):
        # Some types of extensions have no module.
        return "extension"
    return _installed((module or "").partition(".")[0])


@functools.cache
def _installed(root: str) -> str | None:
    if root in ("", "__main__", "__mp_main__"):
        return None
    if root in sys.builtin_module_names:
        return _PYTHON
    module = sys.modules.get(root)
    if root == "daskdist":
        return f"daskdist {getattr(module, '__version__', '')}"
    for place in _places(root, module):
        parts = place.split(os.sep)
        is_of_packages = "site-packages" in parts or "dist-packages" in parts
        if is_of_packages:
            return f"{root} {_version(root, module)}"
        if any(place.startswith(directory + os.sep) for directory in _STANDARD):
            return _PYTHON
    return None


_PYTHON: Final = f"python {sys.version_info.major}.{sys.version_info.minor}"
_STANDARD: Final = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)}


def _places(root: str, module: types.ModuleType | None) -> list[str]:
    spec = getattr(module, "__spec__", None)
    if module is None:
        try:
            spec = importlib.util.find_spec(root)
        except (ImportError, ValueError):
            spec = None
    places = [getattr(module, "__file__", None), getattr(spec, "origin", None)]
    places += list(getattr(spec, "submodule_search_locations", None) or ())
    return [os.path.abspath(place) for place in places if place and place not in ("built-in", "frozen", "namespace")]


def _version(root: str, module: types.ModuleType | None) -> str:
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return importlib.metadata.version(root)
    except importlib.metadata.PackageNotFoundError:
        pass
    names = importlib.metadata.packages_distributions().get(root, ())
    return ",".join(importlib.metadata.version(name) for name in names)
