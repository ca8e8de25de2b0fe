"""`MirroredStrategy`: replicas in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from daskdist.dataset import Dataset
from daskdist.devices import check_present, name_of, present
from daskdist.devices import devices as find_devices
from daskdist.execute.callers import Caller, Handle, Now, embedded
from daskdist.execute.ordered import Ordered
from daskdist.strategy.from_function import Made
from daskdist.strategy.held import made, outlook
from daskdist.strategy.inputs import InputContext
from daskdist.strategy.regroup import regroup
from daskdist.strategy.shelf import Shelf
from daskdist.strategy.side_by_side import Calls
from daskdist.strategy.strategy import Replica, Strategy
from daskdist.strategy.values import PerReplica


class MirroredStrategy(Strategy):
    """Replicas in this process, one a device; no cluster.

    Parameters
    ----------
    devices
        Their names, such as ``["CPU:0", "CPU:1"]`` or ``["GPU:0"]``. If None or empty, all GPUs that this process sees,
        as `list_devices` lists them; one CPU replica where it sees none.

    Raises
    ------
    UnknownDeviceError
        There is no such device here, or one is named twice.

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
        found = find_devices(devices) if devices else present() or find_devices("CPU:0")
        check_present(found)
        super().__init__([Replica(None, name_of(device)) for device in found], Now())
        self._shelf = Shelf(self._token)

    @property
    def _places(self) -> Sequence[Replica]:
        """Where the functions of replicas are called."""
        return self.replicas

    def _on_replicas(self, operation: str, fn: Callable[..., Any], leaves: list[Any], treespec: Any) -> list[Any]:
        return Calls(self, fn, leaves, treespec).results()

    def _returned(self, fn: Callable[..., Any], handles: Sequence[Handle]) -> Any:
        return handles[0] if len(handles) == 1 else regroup(handles)

    def _values(self, handles: Sequence[Handle]) -> Any:
        return regroup(handles, always=True)

    def _columns(self, handles: Sequence[Handle], num_leaves: int) -> list[PerReplica]:
        return [PerReplica(column) for column in zip(*[each.leaves for each in handles], strict=True)]

    def _leaves_of(self, handle: Handle, num_leaves: int) -> list[Any]:
        return list(handle.leaves)

    def _let_go(self, ordered: Ordered) -> None:
        self._shelf.drop((ordered.number,))

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
