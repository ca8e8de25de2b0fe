"""The status of a strategy: its workers and their running calls."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from daskdist.core.cardinality import counted
from daskdist.display.pages import some_of, state_page
from daskdist.display.plan import size, table

_HEADING: Final = ("worker", "replicas", "devices", "state", "steps sent", "in flight", "outstanding", "heartbeat")


@dataclass(frozen=True)
class RunningCall:
    """A running call of a replica.

    Parameters
    ----------
    replica
        The number of the replica.
    name
        The operation and the function, such as ``"run-train_step"``.
    running_s
        Seconds since it began.
    """

    replica: int
    name: str
    running_s: float


@dataclass(frozen=True)
class WorkerStatus:
    """The status of one worker of a strategy.

    Parameters
    ----------
    address
        The address of the worker; None for this process.
    replicas, devices
        The numbers and devices of its replicas; empty once the strategy continues without the worker.
    state
        ``"running"`` while a replica runs a call; ``"waiting"`` while calls are in flight but none is running, as they
        wait for data, for other workers, or to be sent; ``"idle"``; ``"lost"``; or ``"closed"`` with the strategy.
    running
        The running calls of its replicas.
    num_steps_sent
        The number of calls of `Strategy.run` so far.
    num_steps_in_flight
        The number of those that have not finished on this worker.
    outstanding_bytes
        The bytes of large arguments that have not been sent yet.
    heartbeat_age_s
        Seconds since the last message of the worker; None for this process.
    """

    address: str | None
    replicas: tuple[int, ...]
    devices: tuple[str, ...]
    state: str
    running: tuple[RunningCall, ...] = ()
    num_steps_sent: int = 0
    num_steps_in_flight: int = 0
    outstanding_bytes: int = 0
    heartbeat_age_s: float | None = None


@dataclass(frozen=True, repr=False)
class StrategyStatus:
    """The status of a strategy, as returned by `Strategy.status`.

    Parameters
    ----------
    workers
        The status of each worker, lost ones included.
    """

    workers: tuple[WorkerStatus, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the status as dicts, tuples, strings and numbers."""
        return asdict(self)

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                status.address or "this process",
                some_of(list(map(str, status.replicas))),
                some_of(status.devices),
                _state(status),
                f"{status.num_steps_sent:,}",
                f"{status.num_steps_in_flight:,}",
                size(status.outstanding_bytes),
                "-" if status.heartbeat_age_s is None else f"{status.heartbeat_age_s:.1f} s ago",
            )
            for status in self.workers
        ]

    def __repr__(self) -> str:
        return table([_HEADING, *self._rows()])

    def _repr_html_(self) -> str:
        return self.page("StrategyStatus")

    def page(self, title: str) -> str:
        """Return the status as HTML for notebooks."""
        num_replicas = sum(len(worker.replicas) for worker in self.workers)
        facts = [counted(num_replicas, "replica"), counted(len(self.workers), "worker")]
        return state_page(title, facts, _HEADING, self._rows())


def state_of(running: tuple[RunningCall, ...], num_in_flight: int) -> str:
    """Return the state of a worker that is not lost."""
    if running:
        return "running"
    return "waiting" if num_in_flight else "idle"


def _state(worker: WorkerStatus) -> str:
    # Show only the longest running call.
    longest = max(worker.running, key=lambda call: call.running_s, default=None)
    return worker.state if longest is None else f"running {longest.name} for {longest.running_s:.1f} s"
