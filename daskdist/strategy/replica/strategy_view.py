"""The view of a strategy in functions of datasets that run in other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StrategyView:
    """The properties of a strategy at the time when the function was sent."""

    num_replicas_in_sync: int

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"strategy.{name} is not available in a dataset's function that runs on a worker: a strategy stays in its "
            "program, and only num_replicas_in_sync is sent. Read other values before passing the function "
            "to the dataset"
        )


class Viewed:
    """An object that is replaced by a `StrategyView` in functions of datasets that run in other processes."""

    num_replicas_in_sync: Any

    def _view_elsewhere(self) -> StrategyView:
        return StrategyView(self.num_replicas_in_sync)

    def __dask_tokenize__(self) -> object:
        return type(self).__name__, self.num_replicas_in_sync
