"""`TPUStrategy` and `TPUClusterResolver`: programs written for TPUs run on the devices of a Dask cluster."""

from __future__ import annotations

from typing import Any

from daskdist.display.missing_arguments import advises
from daskdist.errors import ArgumentError
from daskdist.strategy.multi_worker import MultiWorkerMirroredStrategy
from daskdist.strategy.placement.cluster_resolver import ClusterResolver
from daskdist.strategy.placement.device_assignment import DeviceAssignment


class TPUClusterResolver(ClusterResolver):
    """A resolver of a Dask cluster, under the name of TensorFlow's resolver of TPUs.

    Parameters
    ----------
    tpu
        The ``cluster`` of `ClusterResolver`; ``""`` and ``"local"`` stand for None.
    security, num_workers, timeout
        As in `ClusterResolver`.

    Raises
    ------
    ArgumentError
        For the same reasons as `ClusterResolver`.

    >>> TPUClusterResolver("tcp://10.0.0.1:8786").cluster
    'tcp://10.0.0.1:8786'
    """

    @advises("TPUClusterResolver")
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
    """`MultiWorkerMirroredStrategy` with the name and the arguments of TensorFlow's strategy for TPUs.

    Parameters
    ----------
    tpu_cluster_resolver
        A `TPUClusterResolver`, or a ``cluster`` of `MultiWorkerMirroredStrategy`. Replicas are on the cluster's
        devices: its GPUs, or its CPUs if it has none.
    experimental_device_assignment, device_assignment
        A `DeviceAssignment`, which names the worker and the device of each replica. Both names are the same argument.

    Raises
    ------
    ArgumentError
        Both names of the device assignment are given; or for the reasons of `MultiWorkerMirroredStrategy`.
    ClusterError
        For the same reasons as `MultiWorkerMirroredStrategy`.
    """

    @advises("TPUStrategy")
    def __init__(
        self,
        tpu_cluster_resolver: Any = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        *,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        if experimental_device_assignment is not None and device_assignment is not None:
            raise ArgumentError(
                "TPUStrategy: device_assignment and experimental_device_assignment are both given; give one of them"
            )
        super().__init__(
            tpu_cluster_resolver,
            device_assignment if experimental_device_assignment is None else experimental_device_assignment,
        )
