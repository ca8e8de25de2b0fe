"""Libraries that are imported when they are first used, so that importing daskdist and building pipelines are light."""

from __future__ import annotations

import importlib
from typing import Any, Final

from daskdist.errors import MissingPackageError


class LazyModule:
    """A module of another library, which is imported when the first of its names is looked up.

    Parameters
    ----------
    name
        The name of the module.
    missing
        The message of the `MissingPackageError` if it cannot be imported, with ``{}`` in place of the reason; None for
        a module that daskdist always needs.

    Notes
    -----
    The names of a module that is always there are looked up once, and those of others each time.
    """

    def __init__(self, name: str, missing: str | None = None) -> None:
        self._name = name
        self._missing = missing

    def __reduce__(self) -> tuple[Any, ...]:
        return LazyModule, (self._name, self._missing)

    def __getattr__(self, attribute: str) -> Any:
        try:
            module = importlib.import_module(self._name)
        except ImportError as error:
            if self._missing is None:
                raise
            raise MissingPackageError(self._missing.format(error)) from error
        value = getattr(module, attribute)
        if self._missing is None:
            setattr(self, attribute, value)
        return value


fsspec: Final = LazyModule("fsspec")
pa: Final = LazyModule("pyarrow")
pc: Final = LazyModule("pyarrow.compute")
pq: Final = LazyModule("pyarrow.parquet")
pj: Final = LazyModule("pyarrow.json")
arrow_csv: Final = LazyModule("pyarrow.csv")
