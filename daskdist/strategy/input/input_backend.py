"""`InputBackend`, which reads and places a strategy's datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from daskdist.core.dataset_base import node_of
from daskdist.core.node import Node
from daskdist.dataset import Dataset
from daskdist.display.step_times import WorkerTimes
from daskdist.execute.caller import Caller
from daskdist.execute.callers.choose import local_caller
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.transfer.copy_stats import CopyStats
from daskdist.ops.from_tensor_slices import FromTensorSlices
from daskdist.storage.locations import Locations
from daskdist.strategy.input.on_worker import DatasetSummary, make_dataset, summary_of
from daskdist.strategy.input.options import InputContext


class InputBackend:
    """Reads and places the datasets of a strategy, in this process; `ClusterInput` does so on workers."""

    def check(self, dataset: Dataset) -> None:
        """Raise an error if a dataset cannot be sent to workers, or has files on a worker outside the cluster.

        This process can read every dataset.
        """

    def reader(self, dataset: Dataset) -> Caller:
        """Return a caller for one pass over a dataset; it is closed when the pass ends."""
        options = dataset.options()
        return local_caller(node_of(dataset), options.num_threads, num_processes=options.num_processes)

    def make_datasets(
        self, dataset_fn: Callable[[InputContext], Any], contexts: Sequence[tuple[str | None, InputContext]]
    ) -> tuple[list[Node], list[DatasetSummary], Callable[[], Caller]]:
        """Create each input pipeline's dataset on its worker.

        Returns
        -------
        nodes, summaries, reader
            The sources of their elements, their summaries, and a function that makes the caller for a pass.
        """
        datasets = [make_dataset(dataset_fn, context) for _, context in contexts]

        def caller() -> Caller:
            # Use threads if at least one of the datasets benefits from them.
            return next((caller for caller in map(self.reader, datasets) if caller.num_ahead), Synchronous())

        return list(map(node_of, datasets)), list(map(summary_of, datasets)), caller

    def place(self, node: FromTensorSlices) -> Node:
        """Return a source of the same elements, stored where they will be read: here that is the same one."""
        return node

    def addresses(self, locations: Locations) -> Callable[[str], Sequence[str]]:
        """Return a function that maps a file's path to the workers that have it; to no workers if all have it."""
        return lambda path: ()

    def with_kept_blocks(
        self, plans: Sequence[Any], futures: Mapping[Any, Any], referenced: Mapping[Any, Any]
    ) -> Sequence[Any]:
        """Return the plans with the addresses of blocks that the cluster has, or is computing."""
        return plans

    def copy_stats(self, devices: Sequence[tuple[str | None, str]]) -> CopyStats | None:
        """Return statistics of copies to (worker, device) pairs; None if no other process makes copies."""
        return None

    def worker_times(self, caller: Caller) -> WorkerTimes | None:
        """Return how workers spend their time on the tasks of a caller from `reader`; None without workers."""
        return None
