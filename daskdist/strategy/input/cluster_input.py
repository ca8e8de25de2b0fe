"""Datasets that are read by tasks on the workers of a cluster."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from dask.base import tokenize

from daskdist.core.block import Block
from daskdist.core.dataset_base import node_of
from daskdist.core.failing.origin import origin_from
from daskdist.core.node import Node, walk
from daskdist.dashboard.figures import TIMES_METRIC
from daskdist.dataset import Dataset
from daskdist.devices import named
from daskdist.display.step_times import WorkerTimes
from daskdist.execute.caller import Caller
from daskdist.execute.callers.cluster_requests import run_on_workers
from daskdist.execute.callers.fetch import WithRemoteResults, workers_with_data
from daskdist.execute.callers.submit import Submit, workers_of
from daskdist.execute.messages.send_functions import check_functions, sent_function
from daskdist.execute.task_times import task_times
from daskdist.execute.transfer.copy_stats import CopyStats
from daskdist.ops.from_tensor_slices import FromTensorSlices
from daskdist.ops.make_numpy_dataset import MakeNumpyDataset, PlacedArray, Placing
from daskdist.ops.read_files import ReadFiles
from daskdist.storage.locations import Addresses, Locations
from daskdist.strategy.input.device_staging import copy_stats_on_worker
from daskdist.strategy.input.input_backend import InputBackend
from daskdist.strategy.input.on_worker import DatasetSummary, OnWorker, make_on_worker, summary_on_worker
from daskdist.strategy.input.options import InputContext

# The number of the latest copies between workers that are counted.
_MOST_TRANSFERS: Final = 10_000


class ClusterInput(InputBackend):
    """Datasets that are read on the workers of a cluster."""

    def __init__(self, submit: Submit, token: str) -> None:
        self._submit = submit
        self._token = token

    def check(self, dataset: Dataset) -> None:
        """Raise an error for functions that do not pickle, and for files whose named worker is not in the cluster."""
        check_functions(node_of(dataset))
        locations = dataset.options().locations
        if locations is None:
            return
        addresses = self.addresses(locations)
        for path, names in locations.named():
            addresses.of(path, names)
        for node in walk(node_of(dataset)):
            # Call the user's function of locations now rather than in the middle of a pass.
            for path in node.paths if isinstance(node, ReadFiles) else ():
                addresses(path)

    def reader(self, dataset: Dataset) -> Caller:
        """Return a caller that submits tasks, on the workers that have the files if the dataset names them."""
        locations = dataset.options().locations
        return self._reader(None if locations is None else self.addresses(locations))

    def _reader(self, located: Addresses | None = None) -> Submit:
        return Submit(self._submit.client, self._submit.live_workers, self._submit, located)

    def make_datasets(
        self, dataset_fn: Callable[[InputContext], Any], contexts: Sequence[tuple[str | None, InputContext]]
    ) -> tuple[list[Node], list[DatasetSummary], Callable[[], Caller]]:
        """Create the dataset of each input pipeline on its worker; the datasets stay there."""
        call = self._submit.call
        dataset_fn = sent_function(dataset_fn, "distribute_datasets_from_function", len(contexts))
        held = [
            call(make_on_worker, [], dataset_fn, context, worker, worker=worker, is_pinned=True, name="dataset_fn")
            for worker, context in contexts
        ]
        asked = [
            call(summary_on_worker, [handle], worker=worker, is_pinned=True, name="summary")
            for handle, (worker, _) in zip(held, contexts, strict=True)
        ]
        summaries: list[DatasetSummary] = self._submit.results(asked)
        nodes: list[Node] = [
            OnWorker(handle, str(worker), summary)
            for handle, summary, (worker, _) in zip(held, summaries, contexts, strict=True)
        ]
        return nodes, summaries, self._reader

    def place(self, node: FromTensorSlices) -> Node:
        """Send the rows to the workers in blocks, and return a source that reads those blocks."""
        client = self._submit.client
        # In-process workers would get the arrays themselves, not copies.
        is_shared = client.scheduler.address.startswith("inproc://")
        blocks = []
        start = 0
        for split, worker in zip(node.splits(), itertools.cycle(self._submit.live_workers.present)):
            rows = split.payload
            origin = origin_from("make_numpy_dataset", start, len(rows))
            block = Block(rows.structure, rows.leaves, f"make_numpy_dataset rows {start} on", origin)
            start += len(block)
            future = self._submit.place(copy.deepcopy(block) if is_shared else block, worker)
            blocks.append(PlacedArray(future.key, future, len(block), block.nbytes))
        # Hash the contents now, as later they are only on the workers.
        token = tokenize(node.structure, node.leaves)
        return MakeNumpyDataset(start, node.spec, Placing(tuple(blocks), token))

    def addresses(self, locations: Locations) -> Addresses:
        """Return a function from the path of a file to the workers that have it."""
        return Addresses(locations, workers_of(self._submit.client))

    def with_kept_blocks(
        self, plans: Sequence[Any], futures: Mapping[Any, Any], referenced: Mapping[Any, Any]
    ) -> Sequence[Any]:
        """Return the plans with the addresses of the workers that have each block."""
        needed = {**referenced, **futures}
        holders = workers_with_data(self._submit, needed)
        return [WithRemoteResults(plan, needed, {key: holders[key] for key in futures}) for plan in plans]

    def copy_stats(self, devices: Sequence[tuple[str | None, str]]) -> CopyStats | None:
        """Return statistics of the copies from workers to their devices; None if all replicas are on the host."""
        names: dict[str, list[str]] = {}
        for worker, device in devices:
            if worker is not None and not named(device).is_host:
                names.setdefault(worker, []).append(device)
        client = self._submit.client
        stats = run_on_workers(client, copy_stats_on_worker, names, workers=list(names)) if names else {}
        return CopyStats.of(stats.values()) if names else None

    def worker_times(self, caller: Any) -> WorkerTimes | None:
        """Return how the workers spend their time on the tasks of a caller; None if the connection is closed."""
        client = self._submit.client
        if client.status != "running":
            return None
        workers = [worker for worker in self._submit.workers if worker in workers_of(client)]
        times = run_on_workers(client, times_on_worker, caller.token, self._token, workers=workers, on_error="ignore")
        return WorkerTimes.of(times.values())


def times_on_worker(caller: str, strategy: str, dask_worker: Any) -> WorkerTimes:
    """Return the times of the tasks of a caller on a worker, and those of the replicas of a strategy there."""
    transfer_s = sum(
        entry["duration"]
        for entry in itertools.islice(reversed(dask_worker.transfer_incoming_log), _MOST_TRANSFERS)
        if any(f"-{caller}-" in str(key) for key in entry["keys"])
    )
    busy_s = task_times(dask_worker.address, caller).by_name()
    if transfer_s:
        busy_s["transfer"] = transfer_s
    report = dask_worker.metrics[TIMES_METRIC](dask_worker)
    replica_times = [times[-2:] for token, *times in report["replicas"] if token == strategy]
    step_s, waiting_s = map(sum, zip(*replica_times, strict=True)) if replica_times else (0.0, 0.0)
    return WorkerTimes(busy_s, dask_worker.state.nthreads, step_s, waiting_s)
