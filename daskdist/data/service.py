"""The data service: pipelines that run on a cluster's workers and are read from anywhere, also by several programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from daskdist.service.modes import CrossTrainerCache as CrossTrainerCache
from daskdist.service.modes import ShardingPolicy as ShardingPolicy

if TYPE_CHECKING:
    from daskdist.dataset import Dataset

__all__ = ["CrossTrainerCache", "ShardingPolicy", "distribute"]


def distribute(
    processing_mode: Any,
    service: Any,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    compression: str | None = "AUTO",
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: str = "AUTO",
) -> Callable[[Dataset], Dataset]:
    """Return what ``dataset.apply`` takes to have a dataset produced by the service; see `Dataset.serve`."""

    def serve(dataset: Dataset) -> Dataset:
        return dataset.serve(
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

    return serve
