"""The replicas of a strategy, in the form that all workers of a cluster share."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from daskdist.cached_property import cached_property
from daskdist.errors import CollectiveError

# A call on the replicas of a strategy: the strategy's token and the number of the step.
Step = tuple[str, int]


def new_token() -> str:
    """Return the token of a new strategy."""
    return uuid.uuid4().hex[:12]


@dataclass(frozen=True)
class Replica:
    """The worker and device of one replica.

    Parameters
    ----------
    worker
        The address of the worker; None for this process.
    device
        The name of the device.
    """

    worker: str | None
    device: str


@dataclass(frozen=True)
class ReplicaGroup:
    """The replicas of a strategy, until one of them is lost.

    Parameters
    ----------
    token
        The token of the strategy.
    replicas
        The replicas, in order.
    lost_with
        The reason why the values of all earlier replicas are lost; "" if they are not.
    num_lost
        The number of times that all replicas were lost.
    """

    token: str
    replicas: tuple[Replica, ...]
    lost_with: str = ""
    num_lost: int = 0

    @cached_property
    def worker_of(self) -> tuple[str | None, ...]:
        """The address of each replica's worker; None for this process."""
        return tuple([replica.worker for replica in self.replicas])

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """The addresses of the workers, in the order of the replicas."""
        return tuple(dict.fromkeys(str(replica.worker) for replica in self.replicas))

    def members(self, worker: str) -> tuple[int, ...]:
        """Return the numbers of the replicas on a worker."""
        return self.members_of.get(worker, ())

    @property
    def num_members(self) -> tuple[int, ...]:
        """The number of replicas on each worker, in the order of `workers`."""
        return tuple(map(len, self.members_of.values()))

    @cached_property
    def members_of(self) -> dict[str, tuple[int, ...]]:
        """The numbers of the replicas on each worker."""
        return {
            worker: tuple([number for number, address in enumerate(self.worker_of) if address == worker])
            for worker in self.workers
        }


def describe_error(error: BaseException) -> str:
    """Return the description of an error that is sent to others."""
    return f"raised {type(error).__name__}: {error}"


def named_replicas(numbers: Sequence[int]) -> str:
    """Return the name of some replicas in messages, such as ``replicas 1, 2``."""
    return f"replica{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def lost_worker_error(name: str, group: ReplicaGroup, address: str, why: str) -> CollectiveError:
    """Return the error for a worker that cannot be reached."""
    return CollectiveError(f"{name}: lost {address}, and with it {named_replicas(group.members(address))} ({why})")
