"""`MirroredStrategy`: replicas in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from daskdist.dataset import Dataset
from daskdist.devices import devices as find_devices
from daskdist.devices import name_of
from daskdist.execute.callers import Caller, Handle, Now, embedded
from daskdist.strategy.from_function import Made
from daskdist.strategy.held import made, outlook
from daskdist.strategy.inputs import InputContext
from daskdist.strategy.strategy import Replica, Strategy, call_on_replica
from daskdist.strategy.values import PerReplica, regroup


class MirroredStrategy(Strategy):
    """Replicas in this process, one a device; no cluster.

    Parameters
    ----------
    devices
        Their names, such as ``["CPU:0", "CPU:1"]``; one CPU replica if None or empty.

    Raises
    ------
    UnknownDeviceError
        There is no such device, or one is named twice.

    >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    >>> batches = strategy.distribute_dataset(Dataset.range(8).batch(4))
    >>> sums = [strategy.run(lambda x: x.sum(), args=(batch,)) for batch in batches]
    >>> sums[0]
    PerReplica:{
      0: np.int64(1),
      1: np.int64(5)
    }
    """

    def __init__(self, devices: Sequence[str] | None = None) -> None:
        found = find_devices(devices or ["CPU:0"])
        super().__init__([Replica(None, name_of(device)) for device in found], Now())

    def _on_replicas(self, operation: str, fn: Callable[..., Any], leaves: list[Any], treespec: Any) -> list[Any]:
        results = []
        for number, replica in enumerate(self._replicas):
            own = [leaf.values[number] if isinstance(leaf, PerReplica) else leaf for leaf in leaves]
            args, kwargs = treespec.unflatten(own)
            results.append(call_on_replica(fn, args, kwargs, replica, number))
        return results

    def _returned(self, fn: Callable[..., Any], handles: Sequence[Handle]) -> Any:
        return handles[0] if len(handles) == 1 else regroup(handles)

    def _values(self, handles: Sequence[Handle]) -> Any:
        return regroup(handles, always=True)

    def _leaves_of(self, handle: Handle, num_leaves: int) -> list[Any]:
        return list(handle.leaves)

    def _made_where_fed(
        self, dataset_fn: Callable[[InputContext], Any], contexts: Sequence[tuple[str | None, InputContext]]
    ) -> tuple[list[Made], Callable[[], Caller]]:
        datasets = [made(dataset_fn, context) for _, context in contexts]

        def caller() -> Caller:
            found = map(self.reader, datasets)
            # Threads, if any of them gains by those.
            return next((each for each in found if each.num_ahead), Now())

        return [Made(each.node, outlook(each)) for each in datasets], caller

    def reader(self, dataset: Dataset) -> Caller:
        return embedded(dataset.node, dataset.options().num_threads)
