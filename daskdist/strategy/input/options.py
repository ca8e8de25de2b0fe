"""`InputContext` and `ValueContext`, the arguments of a ``dataset_fn`` and a ``value_fn``, and `InputOptions`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from daskdist.core.arguments import whole_number, yes_or_no
from daskdist.core.cardinality import counted
from daskdist.errors import ArgumentError


@dataclass(frozen=True)
class ValueContext:
    """The replica that a ``value_fn`` computes a value for.

    Parameters
    ----------
    replica_id_in_sync_group
        The number of the replica, from 0.
    num_replicas_in_sync
        The number of replicas.

    >>> print(ValueContext(1, 2))
    ValueContext(replica id 1, total replicas in sync: 2)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        return (
            f"ValueContext(replica id {self.replica_id_in_sync_group}, "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )


@dataclass(frozen=True)
class InputContext:
    """The input pipeline for which a ``dataset_fn`` returns a dataset.

    Parameters
    ----------
    num_input_pipelines
        The number of input pipelines.
    input_pipeline_id
        The number of this one, from 0.
    num_replicas_in_sync
        The number of replicas that all of them feed.

    >>> context = InputContext(2, 0, 4)
    >>> context.get_per_replica_batch_size(256)
    64
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the rows per replica of a global batch.

        Parameters
        ----------
        global_batch_size
            The rows of a batch, of all replicas together.

        Raises
        ------
        ArgumentError
            The rows cannot be divided evenly.
        """
        whole_number("get_per_replica_batch_size", "global_batch_size", global_batch_size, at_least=1)
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            below, above = size * self.num_replicas_in_sync, (size + 1) * self.num_replicas_in_sync
            raise ArgumentError(
                f"a global batch of {global_batch_size} rows cannot be divided evenly over "
                f"{self.num_replicas_in_sync} replicas; use {f'{below} or ' if below else ''}{above} rows"
            )
        return size

    def __str__(self) -> str:
        return (
            f"InputContext(input pipeline {self.input_pipeline_id} of {self.num_input_pipelines}, "
            f"{counted(self.num_replicas_in_sync, 'replica')} in sync)"
        )


class InputReplicationMode(enum.Enum):
    """The unit for which a ``dataset_fn`` returns a dataset; values as in TensorFlow."""

    PER_WORKER = "PER_WORKER"
    """One dataset per worker, whose replicas take its elements in turn."""
    PER_REPLICA = "PER_REPLICA"
    """One dataset per replica."""


@dataclass(frozen=True, init=False)
class InputOptions:
    """Options for the input of replicas. The first four are TensorFlow's, and may be given by TensorFlow's names too.

    These names are ``experimental_fetch_to_device`` and so on. Arguments by position are in TensorFlow's order.

    Parameters
    ----------
    fetch_to_device
        Whether values are copied to a replica's device ahead of use. With False, iterating over the distributed
        dataset gives NumPy arrays, in the program and in loops on replicas. `Strategy.run` copies its array arguments
        to the replicas' devices in any case.
    replication_mode
        `InputReplicationMode`, or its name: whether ``distribute_datasets_from_function`` creates a dataset per
        worker or per replica.
    place_dataset_on_device
        Whether the dataset itself is on the device; needs PER_REPLICA and ``fetch_to_device=False``.
    per_replica_buffer_size
        The least number of values computed ahead for each replica, the next one included. With 0, each is computed
        when it is asked for. More are computed ahead if the setting ``daskdist.window-bytes`` allows.
    device_buffer_size
        The greatest number of copies to a replica's device ahead of use. A copy is one step's value, or several small
        ones of up to 4 MiB together. Beside them, two that the program released stay, of 256 MiB at most, while the
        device may still compute with them. The process keeps up to 64 MiB of page-locked memory for each device.
    device_buffer_bytes
        The most bytes of a device that copies ahead of use may take; unlimited if None. One copy is always made.
    pin_arrays
        Whether arrays in memory of 32 MiB and more become page-locked at their first use, until they are dropped, if
        batches are views of them, as of `Dataset.from_tensor_slices` without a shuffle. Devices then copy from them
        directly, two to four times as fast. It takes about twice as long as such a copy, so it is worth it for several
        passes; the system cannot swap the memory meanwhile. It applies without a cluster and to loops on replicas.

    Raises
    ------
    ArgumentError
        An option is not allowed, or contradicts another.
    """

    fetch_to_device: bool
    replication_mode: InputReplicationMode
    place_dataset_on_device: bool
    per_replica_buffer_size: int
    device_buffer_size: int
    device_buffer_bytes: int | None
    pin_arrays: bool

    def __init__(
        self,
        fetch_to_device: bool | None = None,
        replication_mode: InputReplicationMode | str | None = None,
        place_dataset_on_device: bool | None = None,
        per_replica_buffer_size: int | None = None,
        *,
        device_buffer_size: int = 2,
        device_buffer_bytes: int | None = None,
        pin_arrays: bool = False,
        experimental_fetch_to_device: bool | None = None,
        experimental_replication_mode: InputReplicationMode | str | None = None,
        experimental_place_dataset_on_device: bool | None = None,
        experimental_per_replica_buffer_size: int | None = None,
    ) -> None:
        mode = _either("replication_mode", replication_mode, experimental_replication_mode, "PER_WORKER")
        on_device = _either(
            "place_dataset_on_device", place_dataset_on_device, experimental_place_dataset_on_device, False
        )
        fetches = _either("fetch_to_device", fetch_to_device, experimental_fetch_to_device, True)
        size = _either("per_replica_buffer_size", per_replica_buffer_size, experimental_per_replica_buffer_size, 1)
        yes_or_no("InputOptions", "place_dataset_on_device", on_device)
        yes_or_no("InputOptions", "fetch_to_device", fetches)
        whole_number("InputOptions", "per_replica_buffer_size", size, at_least=0)
        whole_number("InputOptions", "device_buffer_size", device_buffer_size, at_least=1)
        if device_buffer_bytes is not None:
            whole_number("InputOptions", "device_buffer_bytes", device_buffer_bytes, at_least=1)
        object.__setattr__(self, "replication_mode", _mode(mode))
        object.__setattr__(self, "place_dataset_on_device", on_device)
        object.__setattr__(self, "fetch_to_device", fetches)
        object.__setattr__(self, "per_replica_buffer_size", size)
        object.__setattr__(self, "device_buffer_size", device_buffer_size)
        yes_or_no("InputOptions", "pin_arrays", pin_arrays)
        object.__setattr__(self, "device_buffer_bytes", device_buffer_bytes)
        object.__setattr__(self, "pin_arrays", pin_arrays)
        if on_device and self.replication_mode is InputReplicationMode.PER_WORKER:
            raise ArgumentError("InputOptions: place_dataset_on_device=True needs replication_mode='PER_REPLICA'")
        if on_device and fetches:
            raise ArgumentError(
                "InputOptions: place_dataset_on_device=True needs fetch_to_device=False: what is on the device already "
                "is not fetched to it"
            )

    @property
    def experimental_fetch_to_device(self) -> bool:
        """Return ``fetch_to_device``."""
        return self.fetch_to_device

    @property
    def experimental_replication_mode(self) -> InputReplicationMode:
        """Return ``replication_mode``."""
        return self.replication_mode

    @property
    def experimental_place_dataset_on_device(self) -> bool:
        """Return ``place_dataset_on_device``."""
        return self.place_dataset_on_device

    @property
    def experimental_per_replica_buffer_size(self) -> int:
        """Return ``per_replica_buffer_size``."""
        return self.per_replica_buffer_size


def _either(name: str, value: object, by_its_older_name: object, default: object) -> object:
    if value is not None and by_its_older_name is not None:
        raise ArgumentError(f"InputOptions: {name} is given twice, as experimental_{name} too")
    chosen = by_its_older_name if value is None else value
    return default if chosen is None else chosen


def _mode(value: object) -> InputReplicationMode:
    if isinstance(value, InputReplicationMode):
        return value
    if isinstance(value, str) and value.upper() in InputReplicationMode.__members__:
        return InputReplicationMode[value.upper()]
    names = " and ".join(InputReplicationMode.__members__)
    raise ArgumentError(f"InputOptions: replication_mode is {value!r}; there are {names}")


def checked_options(options: object) -> InputOptions:
    """Return the given options, or the default ones for None.

    Raises
    ------
    ArgumentError
        They are not `InputOptions`.
    """
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise ArgumentError(f"options is {type(options).__name__}; give InputOptions")
    return options
