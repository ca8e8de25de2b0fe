"""Functions of the program's own modules, which travel to other processes with their code.

By default only functions of ``__main__`` and notebooks do; those of modules are imported by name where they arrive.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any, Final

import cloudpickle

from daskdist.config import setting
from daskdist.errors import ArgumentError

# Held while modules are registered, as cloudpickle's registry is that of the process.
_registering: Final = RLock()
_INSTALLED: Final = tuple({Path(path).resolve() for path in sysconfig.get_paths().values()})


@contextmanager
def modules_by_value() -> Iterator[None]:
    """Pickle what modules define with its code, as the setting ``daskdist.send-modules`` says, inside a block.

    Raises
    ------
    ArgumentError
        The setting is neither null nor ``"local"`` nor a list of names of imported modules.
    """
    names = setting("send-modules")
    if names is None:
        yield
        return
    with _registering:
        registered = cloudpickle.list_registry_pickle_by_value()
        added = [module for module in _modules(names) if module.__name__ not in registered]
        for module in added:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in added:
                cloudpickle.unregister_pickle_by_value(module)


def _modules(names: Any) -> list[ModuleType]:
    loaded = {name: module for name, module in list(sys.modules.items()) if isinstance(module, ModuleType)}
    if names == "local":
        folder = _folder()
        return [module for name, module in loaded.items() if name == module.__name__ and _is_local(module, folder)]
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(
            f"the setting daskdist.send-modules is {names!r:.80}; give 'local', a list of names of modules, or null"
        )
    for name in names:
        if name not in loaded:
            raise ArgumentError(f"the setting daskdist.send-modules names {name!r}, which is not imported")
    return [
        module
        for loaded_name, module in loaded.items()
        if any(loaded_name == name or loaded_name.startswith(f"{name}.") for name in names)
    ]


def _folder() -> Path:
    # Return the folder of the script, or the current one in a notebook or at a prompt.
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).resolve().parent if file else Path.cwd().resolve()


def _is_local(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    if not file or module.__name__ == "__main__" or module.__name__.partition(".")[0] == "daskdist":
        return False
    return _is_local_file(file, folder)


@functools.cache
def _is_local_file(file: str, folder: Path) -> bool:
    # Many modules are asked about for each function that is sent, and finding out takes system calls.
    path = Path(file).resolve()
    return folder in path.parents and not any(
        installed in path.parents for installed in _INSTALLED if installed != folder and installed not in folder.parents
    )


def by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in the form in which it travels: the function itself, or one that pickles with its code."""
    return function if setting("send-modules") is None else PickledWithCode(function)


class PickledWithCode:
    """A function whose pickle has the code of local modules; unpickled, it is the plain function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        with modules_by_value():
            return cloudpickle.loads, (cloudpickle.dumps(self._function),)
