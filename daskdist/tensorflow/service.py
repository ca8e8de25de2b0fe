"""The functions of ``tf.data.experimental.service``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daskdist.core.dataset_base import element_spec_of, node_of
from daskdist.dataset import Dataset, TensorFlowDataset
from daskdist.errors import ArgumentError
from daskdist.service.address import service_address
from daskdist.service.modes import CrossTrainerCache
from daskdist.service.registry import register, registered
from daskdist.service.request import ServiceRequest


def distribute(
    processing_mode: Any,
    service: Any,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    compression: str | None = "AUTO",
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: str = "AUTO",
) -> Callable[[Dataset], Dataset]:
    """Return what ``dataset.apply`` takes to have a dataset produced by the service; see `Dataset.serve`.

    Elements go over Dask's connections: ``data_transfer_protocol`` is None, ``"grpc"`` or ``"tcp"``, which are alike.
    """
    _check_protocol(data_transfer_protocol)
    return lambda dataset: dataset.serve(
        service,
        processing_mode,
        job_name,
        consumer_index=consumer_index,
        num_consumers=num_consumers,
        max_outstanding_requests=max_outstanding_requests,
        compression=compression,
        cross_trainer_cache=cross_trainer_cache,
        target_workers=target_workers,
    )


def register_dataset(
    service: Any, dataset: Dataset, compression: str | None = "AUTO", dataset_id: str | None = None
) -> str:
    """Register a dataset with the service; see `daskdist.data.service.register_dataset`."""
    return register(node_of(dataset), element_spec_of(dataset), service_address(service), compression, dataset_id)


def from_dataset_id(
    processing_mode: Any,
    service: Any,
    dataset_id: str,
    element_spec: Any = None,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: str = "AUTO",
) -> TensorFlowDataset:
    """Return the elements of a dataset that is registered; see `daskdist.data.service.from_dataset_id`."""
    _check_protocol(data_transfer_protocol)
    request = ServiceRequest.of(
        processing_mode,
        job_name=job_name,
        consumer_index=consumer_index,
        num_consumers=num_consumers,
        max_outstanding_requests=max_outstanding_requests,
        cross_trainer_cache=cross_trainer_cache,
        target_workers=target_workers,
    )
    return TensorFlowDataset(registered(dataset_id, element_spec, request, service_address(service)))


def _check_protocol(protocol: str | None) -> None:
    if protocol not in (None, "grpc", "tcp"):
        raise ArgumentError(
            f"data_transfer_protocol is {protocol!r}; give None: elements go over connections of the service's protocol"
        )
