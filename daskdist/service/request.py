"""Checked requests of a program to the service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from daskdist.core.arguments import whole_number
from daskdist.errors import ArgumentError
from daskdist.service.sharding_policy import CrossTrainerCache, ShardingPolicy, checked_mode

_COMPRESSIONS: Final = (None, "AUTO", "SNAPPY", "LZ4", "ZSTD")
_LOSSES: Final = ("redeliver", "drop")
_TARGETS: Final = ("AUTO", "ANY", "LOCAL")


@dataclass(frozen=True)
class ServiceRequest:
    """A request to read a dataset from the service; see `Dataset.serve` for its options.

    Raises
    ------
    ArgumentError
        An argument is not allowed, or cannot be combined with another.
    """

    mode: ShardingPolicy
    job_name: str | None
    consumer_index: int | None
    num_consumers: int | None
    max_outstanding_requests: int | None
    compression: str | None
    cross_trainer_cache: CrossTrainerCache | None
    target_workers: str
    on_consumer_loss: str

    @classmethod
    def of(cls, processing_mode: Any, **options: Any) -> ServiceRequest:
        """Return the request for a user's arguments."""
        target = options.pop("target_workers")
        return cls(
            checked_mode(processing_mode),
            compression=checked_compression(options.pop("compression")),
            target_workers=target.upper() if isinstance(target, str) else target,
            **options,
        )

    def __post_init__(self) -> None:
        if self.job_name is not None and (not isinstance(self.job_name, str) or not self.job_name):
            raise ArgumentError(f"job_name is {self.job_name!r}; give a non-empty string, or None")
        for name, value, allowed in (
            ("target_workers", self.target_workers, _TARGETS),
            ("on_consumer_loss", self.on_consumer_loss, _LOSSES),
        ):
            _check_one_of(name, value, allowed)
        if self.max_outstanding_requests is not None:
            whole_number("serve", "max_outstanding_requests", self.max_outstanding_requests, at_least=1)
        self._check_consumers()
        cache = self.cross_trainer_cache
        if cache is not None:
            if not isinstance(cache, CrossTrainerCache):
                raise ArgumentError(f"cross_trainer_cache is {cache!r}; give CrossTrainerCache(trainer_id)")
            if self.job_name is None:
                raise ArgumentError("cross_trainer_cache needs a job_name that all trainers share")
            if self.num_consumers is not None:
                raise ArgumentError("cross_trainer_cache and num_consumers cannot be combined; give only one of them")

    def _check_consumers(self) -> None:
        if (self.consumer_index is None) != (self.num_consumers is None):
            raise ArgumentError("give both consumer_index and num_consumers, or neither of them")
        if self.num_consumers is None or self.consumer_index is None:
            return
        whole_number("serve", "num_consumers", self.num_consumers, at_least=1)
        whole_number("serve", "consumer_index", self.consumer_index, at_least=0)
        if self.consumer_index >= self.num_consumers:
            raise ArgumentError(
                f"consumer_index is {self.consumer_index} of {self.num_consumers} consumers; give one from 0 to "
                f"{self.num_consumers - 1}"
            )
        if self.job_name is None:
            raise ArgumentError("consumers that read in rounds must share a job_name; give one")


def checked_compression(compression: Any) -> str | None:
    """Return the compression that a user requested, checked.

    Raises
    ------
    ArgumentError
        The value is not allowed.
    """
    name = compression.upper() if isinstance(compression, str) else compression
    _check_one_of("compression", name, _COMPRESSIONS)
    return name


def _check_one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ArgumentError(f"{name} is {value!r}; give one of {', '.join(map(repr, allowed))}")
