"""`MirroredStrategy`: replicas in this process."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from daskdist.devices import devices as find_devices
from daskdist.devices import name_of, present, usable
from daskdist.display.missing_arguments import advises
from daskdist.strategy.calls.local_backend import LocalBackend
from daskdist.strategy.group import Replica, ReplicaGroup, new_token
from daskdist.strategy.input.input_backend import InputBackend
from daskdist.strategy.strategy import Strategy
from daskdist.strategy.variables.store import VariableStore


class MirroredStrategy(Strategy):
    """Replicas in this process, one per device, without a cluster.

    Parameters
    ----------
    devices
        The names of the devices, such as ``["CPU:0", "CPU:1"]`` or ``["GPU:0"]``. If None or empty, all GPUs that this
        process sees, as listed by `list_devices`, or one CPU if it sees none. With the setting
        ``daskdist.devices.cpu-stand-in``, CPUs stand in for GPUs that are named and missing, with a warning.

    Raises
    ------
    UnknownDeviceError
        A device does not exist in this process, or is named twice.

    >>> from daskdist import Dataset
    >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    >>> batches = strategy.distribute_dataset(Dataset.range(8).batch(4))
    >>> sums = [strategy.run(lambda x: x.sum(), args=(batch,)) for batch in batches]
    >>> sums[0]
    PerReplica:{
      0: np.int64(1),
      1: np.int64(5)
    }
    """

    @advises("MirroredStrategy")
    def __init__(self, devices: Sequence[str] | None = None) -> None:
        placed_on = usable(find_devices(devices) if devices else present() or find_devices("CPU:0"))
        group = ReplicaGroup(new_token(), tuple([Replica(None, name_of(device)) for device in placed_on]))
        super().__init__(
            group, LocalBackend(weakref.ref(self), group.replicas, VariableStore(group.token)), InputBackend()
        )
