"""The functions of ``tf.data.experimental.service``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daskdist.dataset import Dataset
from daskdist.errors import ArgumentError
from daskdist.service.address import service_address
from daskdist.service.registry import registered
from daskdist.service.request import ServiceRequest
from daskdist.service.signature import JOB_OPTIONS, TRAINER_OPTIONS, with_parameters
from daskdist.tensorflow_dataset import TensorFlowDataset


@with_parameters(
    Dataset.serve,
    "processing_mode",
    "service",
    *JOB_OPTIONS,
    "data_transfer_protocol",
    "compression",
    *TRAINER_OPTIONS,
)
def distribute(
    processing_mode: Any, service: Any, data_transfer_protocol: str | None = None, **options: Any
) -> Callable[[Dataset], Dataset]:
    """Return a function for `Dataset.apply` that calls `Dataset.serve`.

    Elements are sent over Dask's connections, so ``data_transfer_protocol`` must be None, ``"grpc"`` or ``"tcp"``,
    which have no effect.
    """
    _check_protocol(data_transfer_protocol)
    return lambda dataset: dataset.serve(service, processing_mode, **options)


@with_parameters(
    Dataset.serve,
    "processing_mode",
    "service",
    "dataset_id",
    "element_spec",
    *JOB_OPTIONS,
    "data_transfer_protocol",
    *TRAINER_OPTIONS,
)
def from_dataset_id(
    processing_mode: Any,
    service: Any,
    dataset_id: str,
    element_spec: Any = None,
    data_transfer_protocol: str | None = None,
    **options: Any,
) -> TensorFlowDataset:
    """Return a dataset that is registered with the service; see `daskdist.data.service.from_dataset_id`."""
    _check_protocol(data_transfer_protocol)
    request = ServiceRequest.of(processing_mode, compression=None, on_consumer_loss="redeliver", **options)
    return TensorFlowDataset(registered(dataset_id, element_spec, request, service_address(service)))


def _check_protocol(protocol: str | None) -> None:
    if protocol not in (None, "grpc", "tcp"):
        raise ArgumentError(
            f"data_transfer_protocol is {protocol!r}; give None: elements are sent by the service's own protocol"
        )
