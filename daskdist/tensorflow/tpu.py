"""`TPUStrategy` and `TPUClusterResolver`: programs written for TPUs run on the devices of a Dask cluster."""

from __future__ import annotations

from typing import Any

from daskdist.errors import ArgumentError
from daskdist.strategy.multi_worker import MultiWorkerMirroredStrategy
from daskdist.strategy.placement.cluster_resolver import ClusterResolver
from daskdist.strategy.placement.device_assignment import DeviceAssignment


class TPUClusterResolver(ClusterResolver):
    """A Dask cluster, by the name under which TensorFlow finds TPUs.

    Parameters
    ----------
    tpu
        What `ClusterResolver` takes as ``cluster``. ``""`` and ``"local"`` stand for None.
    security, num_workers, timeout
        As `ClusterResolver` has them.

    Raises
    ------
    ArgumentError
        As `ClusterResolver` does.

    >>> TPUClusterResolver("tcp://10.0.0.1:8786").cluster
    'tcp://10.0.0.1:8786'
    """

    def __init__(
        self,
        tpu: Any = None,
        *,
        security: Any = None,
        num_workers: int | None = None,
        timeout: float | None = None,
    ) -> None:
        cluster = None if tpu in ("", "local") else tpu
        super().__init__(cluster, security=security, num_workers=num_workers, timeout=timeout)


class TPUStrategy(MultiWorkerMirroredStrategy):
    """`MultiWorkerMirroredStrategy`, by the name and with the arguments of TensorFlow's strategy for TPUs.

    Parameters
    ----------
    tpu_cluster_resolver
        A `TPUClusterResolver`, or what `MultiWorkerMirroredStrategy` takes as ``cluster``. Replicas are on the
        cluster's devices: its GPUs, or its processors where it has none.
    experimental_device_assignment, device_assignment
        Which worker and device each replica is on: a `DeviceAssignment`. The two are one argument by two names.

    Raises
    ------
    ArgumentError
        The device assignment is given by both names; and as `MultiWorkerMirroredStrategy` does.
    ClusterError
        As `MultiWorkerMirroredStrategy` does.
    """

    def __init__(
        self,
        tpu_cluster_resolver: Any = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        *,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        if experimental_device_assignment is not None and device_assignment is not None:
            raise ArgumentError(
                "TPUStrategy: device_assignment is given twice, as experimental_device_assignment too; give one of them"
            )
        super().__init__(
            tpu_cluster_resolver,
            device_assignment if experimental_device_assignment is None else experimental_device_assignment,
        )
