"""The contract of what reads and places the datasets of a strategy, and its implementation in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from daskdist.core.dataset_base import node_of
from daskdist.core.node import Node
from daskdist.dataset import Dataset
from daskdist.execute.caller import Caller
from daskdist.execute.callers.choose import local_caller
from daskdist.execute.callers.now import Now
from daskdist.execute.transfer.copy_stats import CopyStats
from daskdist.ops.from_tensor_slices import FromTensorSlices
from daskdist.storage.locations import Locations
from daskdist.strategy.input.on_worker import DatasetSummary, make_dataset, summary_of
from daskdist.strategy.input.options import InputContext


@dataclass(frozen=True)
class PipelineDataset:
    """The dataset of one input pipeline.

    Parameters
    ----------
    node
        The source of its elements.
    summary
        Its spec, cardinality and options.
    """

    node: Node
    summary: DatasetSummary


class InputBackend(Protocol):
    """Reads and places the datasets of a strategy.

    ===================  ==================================================================
    input backend        datasets are read
    ===================  ==================================================================
    `LocalInput`         in this process
    `ClusterInput`       by Dask's tasks on the workers of a cluster
    ===================  ==================================================================
    """

    def check(self, dataset: Dataset) -> None:
        """Refuse a dataset that workers cannot be sent, or whose files are said to be on a worker that is not there."""
        ...

    def reader(self, dataset: Dataset) -> Caller:
        """Return a caller for one pass over a dataset, closed with the pass."""
        ...

    def make_datasets(
        self, dataset_fn: Callable[[InputContext], Any], contexts: Sequence[tuple[str | None, InputContext]]
    ) -> tuple[list[PipelineDataset], Callable[[], Caller]]:
        """Make the dataset of each input pipeline on its worker; return those, and a maker of callers for a pass."""
        ...

    def place(self, node: FromTensorSlices) -> Node:
        """Return a source of the same elements, which lie where they will be read."""
        ...

    def addresses(self, locations: Locations) -> Callable[[str], Sequence[str]]:
        """Return a function from the path of a file to the workers that have it; to none where all have it."""
        ...

    def with_kept_blocks(
        self, plans: Sequence[Any], futures: Mapping[Any, Any], around: Mapping[Any, Any]
    ) -> Sequence[Any]:
        """Return plans of loops with the places of blocks that are on the cluster already, or will be soon."""
        ...

    def copy_stats(self, devices: Sequence[tuple[str | None, str]]) -> CopyStats | None:
        """Return the figures of copies to devices, given as worker and name; None where other processes make none."""
        ...


class LocalInput:
    """Datasets that are read in this process."""

    def check(self, dataset: Dataset) -> None:
        """Accept every dataset."""

    def reader(self, dataset: Dataset) -> Caller:
        """Return a caller of this process."""
        return local_caller(node_of(dataset), dataset.options().num_threads)

    def make_datasets(
        self, dataset_fn: Callable[[InputContext], Any], contexts: Sequence[tuple[str | None, InputContext]]
    ) -> tuple[list[PipelineDataset], Callable[[], Caller]]:
        """Make the dataset of each input pipeline."""
        datasets = [make_dataset(dataset_fn, context) for _, context in contexts]

        def caller() -> Caller:
            # Threads, if one of the datasets gains by those.
            return next((each for each in map(self.reader, datasets) if each.num_ahead), Now())

        return [PipelineDataset(node_of(each), summary_of(each)) for each in datasets], caller

    def place(self, node: FromTensorSlices) -> Node:
        """Return the source itself: the arrays are in this process."""
        return node

    def addresses(self, locations: Locations) -> Callable[[str], Sequence[str]]:
        """Return a function that names no worker: this process has all files."""
        return lambda path: ()

    def with_kept_blocks(
        self, plans: Sequence[Any], futures: Mapping[Any, Any], around: Mapping[Any, Any]
    ) -> Sequence[Any]:
        """Return the plans as they are."""
        return plans

    def copy_stats(self, devices: Sequence[tuple[str | None, str]]) -> CopyStats | None:
        """Return None: iterators of this process know of their own copies."""
        return None
