"""The status of a strategy: its workers, and the calls that they are making."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from daskdist.display.pages import state_page
from daskdist.display.plan import count, size, table

_HEADING: Final = ("worker", "replicas", "devices", "state", "steps sent", "in flight", "outstanding", "heartbeat")


@dataclass(frozen=True)
class RunningCall:
    """A call that a replica is making.

    Parameters
    ----------
    replica
        Its number.
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
        Its address; None for this process.
    replicas, devices
        The numbers of its replicas and their devices; none once the strategy goes on without the worker.
    state
        ``"running"`` while a replica makes a call; ``"waiting"`` while calls are under way and none is being made:
        they wait for data, for other workers, or to be sent; ``"idle"``; ``"lost"``; or ``"closed"`` with the strategy.
    running
        The calls that its replicas are making.
    num_steps_sent
        Calls of `Strategy.run` so far.
    num_steps_in_flight
        Those that are not over on this worker.
    outstanding_bytes
        The bytes of large arguments that are still to be sent to it.
    heartbeat_age_s
        Seconds since the worker was last heard of; None for this process.
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
    """The status of a strategy, as `Strategy.status` found it.

    Parameters
    ----------
    workers
        The status of each worker, lost ones included.
    """

    workers: tuple[WorkerStatus, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain dicts, tuples, text and numbers."""
        return asdict(self)

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                each.address or "this process",
                ", ".join(map(str, each.replicas)) or "-",
                ", ".join(each.devices) or "-",
                _state(each),
                f"{each.num_steps_sent:,}",
                f"{each.num_steps_in_flight:,}",
                size(each.outstanding_bytes),
                "-" if each.heartbeat_age_s is None else f"{each.heartbeat_age_s:.1f} s ago",
            )
            for each in self.workers
        ]

    def __repr__(self) -> str:
        return table([_HEADING, *self._rows()])

    def _repr_html_(self) -> str | None:
        return self.page("StrategyStatus")

    def page(self, title: str) -> str | None:
        """Return the status as HTML for notebooks."""
        num_replicas = sum(len(worker.replicas) for worker in self.workers)
        facts = [count(num_replicas, "replica"), count(len(self.workers), "worker")]
        return state_page(title, facts, _HEADING, self._rows())


def state_of(running: tuple[RunningCall, ...], num_in_flight: int) -> str:
    """Return the state of a worker that is there."""
    if running:
        return "running"
    return "waiting" if num_in_flight else "idle"


def _state(worker: WorkerStatus) -> str:
    # The call that takes longest stands for all.
    longest = max(worker.running, key=lambda each: each.running_s, default=None)
    return worker.state if longest is None else f"running {longest.name} for {longest.running_s:.1f} s"
