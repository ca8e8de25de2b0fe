"""The view of a strategy that a function of a dataset has where it runs in another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StrategyView:
    """The plain facts of a strategy, as they were when the function was sent.

    Parameters
    ----------
    num_replicas_in_sync
        The number of its replicas.
    """

    num_replicas_in_sync: int

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"strategy.{name} is not there in a function of a dataset that runs on a worker: a strategy stays in its "
            "program, and only num_replicas_in_sync is taken along. Take what else the function needs before it is "
            "given to the dataset"
        )


class Viewed:
    """An object of which functions of datasets see a `StrategyView` where they run in another process."""

    num_replicas_in_sync: Any

    def view_elsewhere(self) -> StrategyView:
        """Return the view, as it is now."""
        return StrategyView(self.num_replicas_in_sync)

    def __dask_tokenize__(self) -> object:
        return type(self).__name__, self.num_replicas_in_sync
