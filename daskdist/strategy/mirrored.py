"""`MirroredStrategy`: replicas in this process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from daskdist.dataset import Dataset
from daskdist.devices import check_present, name_of, present
from daskdist.devices import devices as find_devices
from daskdist.execute.by_reference import VariableKey
from daskdist.execute.callers import Caller, Now, embedded
from daskdist.strategy.from_function import Made
from daskdist.strategy.held import made, outlook
from daskdist.strategy.inputs import InputContext
from daskdist.strategy.local_backend import LocalBackend
from daskdist.strategy.shelf import Shelf
from daskdist.strategy.strategy import Replica, Strategy
from daskdist.strategy.team import Team, new_token


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
        self._begin(Team(new_token(), tuple([Replica(None, name_of(device)) for device in found])))

    def _begin(self, team: Team, backend: Callable[..., LocalBackend] = LocalBackend, at: int | None = None) -> None:
        # With all replicas called on the device of one of them, if that is named.
        places = team.replicas if at is None else (team.replicas[at],) * len(team.replicas)
        self._here = backend(weakref.ref(self), places, Shelf(team.token))
        super().__init__(team, self._here)

    def _let_go(self, key: VariableKey) -> None:
        self._here.shelf.drop((key.number,))

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
