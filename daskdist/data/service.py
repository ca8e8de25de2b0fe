"""The data service: pipelines that run on a cluster's workers and are read from anywhere, also by several programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daskdist.core.dataset_base import element_spec_of, node_of
from daskdist.dataset import Dataset
from daskdist.service.dispatcher.status import ServiceStatus
from daskdist.service.request import ServiceRequest
from daskdist.service.sharding_policy import CrossTrainerCache as CrossTrainerCache
from daskdist.service.sharding_policy import ShardingPolicy as ShardingPolicy
from daskdist.service.signature import JOB_OPTIONS, TRAINER_OPTIONS, with_parameters

__all__ = ["CrossTrainerCache", "ShardingPolicy", "distribute", "from_dataset_id", "register_dataset", "status"]


@with_parameters(
    Dataset.serve,
    "processing_mode",
    "service",
    *JOB_OPTIONS,
    "compression",
    *TRAINER_OPTIONS,
    "on_consumer_loss",
    "tokens_per_consumer",
    "length_fn",
)
def distribute(processing_mode: Any, service: Any, **options: Any) -> Callable[[Dataset], Dataset]:
    """Return a function for `Dataset.apply` that calls `Dataset.serve`."""
    return lambda dataset: dataset.serve(service, processing_mode, **options)


def register_dataset(
    service: Any, dataset: Dataset, compression: str | None = "AUTO", dataset_id: str | None = None
) -> str:
    """Register a dataset with the service and return its id, by which other programs read it with `from_dataset_id`.

    Parameters
    ----------
    service
        As in `Dataset.serve`.
    dataset
        The dataset.
    compression
        As in `Dataset.serve`, for all readers.
    dataset_id
        The id of the dataset; if None, the fingerprint of its pipeline, so that equal pipelines have the same id.

    Raises
    ------
    ArgumentError
        Another dataset has the id, or the dataset cannot be sent to workers.
    ClusterError
        The service cannot be reached.
    """
    from daskdist.service.address import service_address
    from daskdist.service.registry import register

    return register(node_of(dataset), element_spec_of(dataset), service_address(service), compression, dataset_id)


@with_parameters(
    Dataset.serve,
    "processing_mode",
    "service",
    "dataset_id",
    "element_spec",
    *JOB_OPTIONS,
    *TRAINER_OPTIONS,
    "on_consumer_loss",
)
def from_dataset_id(
    processing_mode: Any, service: Any, dataset_id: str, element_spec: Any = None, **options: Any
) -> Dataset:
    """Return a dataset that is registered with the service.

    Parameters
    ----------
    dataset_id
        The id that `register_dataset` returned.
    element_spec
        The expected spec, in the structure of an element; if None, the registered one.
    processing_mode, service, job_name, consumer_index, num_consumers, max_outstanding_requests
        As in `Dataset.serve`.
    cross_trainer_cache, target_workers, on_consumer_loss
        As in `Dataset.serve`.

    Raises
    ------
    ArgumentError
        No dataset has the id, it has another spec, or an argument is not allowed.
    ClusterError
        The service cannot be reached.
    """
    from daskdist.service.address import service_address
    from daskdist.service.registry import registered

    # The compression is registered with the dataset.
    request = ServiceRequest.of(processing_mode, compression=None, **options)
    return Dataset(registered(dataset_id, element_spec, request, service_address(service)))


def status(service: Any = None) -> ServiceStatus:
    """Return the status of a service, printed as a table: its jobs, their consumers and their progress.

    Parameters
    ----------
    service
        As in `Dataset.serve`; this program's client if None.

    Raises
    ------
    ClusterError
        The service cannot be reached.
    """
    from daskdist.service.current_status import current_status

    return current_status(service)
