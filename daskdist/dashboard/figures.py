"""The figures that the dashboard shows, from reports of workers and programs; without I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

# The metric of workers that has the times of their replicas, and the operation by which programs report.
TIMES_METRIC: Final = "daskdist_replica_times"
REPORT_OPERATION: Final = "daskdist_program_report"
# The number of observations that are kept: five minutes.
NUM_KEPT: Final = 300
_MOST_LOST: Final = 20
# The time after which a program that reports nothing is forgotten.
_SILENT_S: Final = 10.0


class ServiceView(Protocol):
    """The data service as it is shown."""

    @property
    def num_used(self) -> Mapping[str, int]:
        """The elements that consumers have used, by the name of the job; "" for all jobs without a name."""
        ...

    def jobs(self) -> Sequence[Any]:
        """Return the status of the iterations of jobs, as in `daskdist.data.service.status`."""
        ...


@dataclass
class ReplicaFigures:
    """The figures of one replica.

    Parameters
    ----------
    strategy
        The token of its strategy.
    number
        The number of the replica.
    worker, device
        The address of its worker, and its device.
    num_steps, num_rows
        The steps it has taken, and the rows of datasets in them.
    step_s, waiting_s
        The seconds in steps, and in waiting for their input.
    """

    strategy: str
    number: int
    worker: str
    device: str
    num_steps: int = 0
    num_rows: int = 0
    step_s: float = 0.0
    waiting_s: float = 0.0
    # Rates since the report before the last.
    steps_per_s: float = 0.0
    rows_per_s: float = 0.0
    step_share: float = 0.0
    waiting_share: float = 0.0
    # By time of observation: steps and rows per second.
    history: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))

    @property
    def idle_share(self) -> float:
        """The share of the time in which the program had sent no step."""
        return max(1.0 - self.step_share - self.waiting_share, 0.0)

    def update(self, totals: Sequence[float], seconds: float | None) -> None:
        """Take new totals, ``seconds`` after those before; None if there were none."""
        num_steps, num_rows, step_s, waiting_s = totals
        if seconds:
            self.steps_per_s = max(num_steps - self.num_steps, 0) / seconds
            self.rows_per_s = max(num_rows - self.num_rows, 0) / seconds
            self.step_share = min(max(step_s - self.step_s, 0.0) / seconds, 1.0)
            self.waiting_share = min(max(waiting_s - self.waiting_s, 0.0) / seconds, 1.0 - self.step_share)
        self.num_steps, self.num_rows, self.step_s, self.waiting_s = int(num_steps), int(num_rows), step_s, waiting_s


@dataclass
class ProgramFigures:
    """The figures that a program reports of a strategy.

    Parameters
    ----------
    reported_at
        The time of the last report.
    num_in_flight, most_in_flight
        The steps that are sent and not finished, and the most there may be.
    ahead_bytes, most_ahead_bytes
        The bytes of batches that are read ahead, and the most there may be.
    waiting_s, step_s
        The seconds that the program waited for next steps, and the seconds between them.
    """

    reported_at: float = 0.0
    num_in_flight: int = 0
    most_in_flight: int = 0
    ahead_bytes: int = 0
    most_ahead_bytes: int = 0
    waiting_s: float = 0.0
    step_s: float = 0.0
    # The share of the time between the last two reports that the program waited; None if it took no steps.
    waiting_share: float | None = None

    def update(self, now: float, report: Mapping[str, Any]) -> None:
        """Take a new report."""
        waited_s, worked_s = report["waiting_s"] - self.waiting_s, report["step_s"] - self.step_s
        self.waiting_share = waited_s / (waited_s + worked_s) if waited_s + worked_s > 0 else None
        self.reported_at = now
        for name, value in report.items():
            setattr(self, name, value)


@dataclass(frozen=True)
class WorkerLoss:
    """A worker that was lost while a strategy used it."""

    at: float
    address: str


class DashboardFigures:
    """The figures of all strategies and jobs of a scheduler.

    Attributes
    ----------
    replicas
        The replicas of open strategies, by token and number.
    programs
        token of a strategy -> the report of its program.
    observed_at
        The time of the last observation.
    lost
        The last workers that were lost, and ``num_lost`` the number of all.
    time_shares
        By time of observation, the shares of all replicas' time in steps, waiting for input, and idle.
    program_shares
        By time of observation, the share of the programs' time in waiting for next steps.
    fill
        By time of observation, the shares in use of the bytes and of the steps that may be under way.
    task_s
        The seconds of all workers' tasks for datasets, by the names of the tasks.
    service
        The data service; None without one.
    """

    def __init__(self) -> None:
        self.replicas: dict[tuple[str, int], ReplicaFigures] = {}
        self.programs: dict[str, ProgramFigures] = {}
        self.lost: deque[WorkerLoss] = deque(maxlen=_MOST_LOST)
        self.num_lost = 0
        self.observed_at = 0.0
        self.time_shares: deque[tuple[float, float, float, float]] = deque(maxlen=NUM_KEPT)
        self.program_shares: deque[tuple[float, float]] = deque(maxlen=NUM_KEPT)
        self.fill: deque[tuple[float, float, float]] = deque(maxlen=NUM_KEPT)
        self.task_s: Counter[str] = Counter()
        self.service: ServiceView | None = None
        # The time of each worker's last report, by its own clock.
        self._reported_at: dict[str, float] = {}

    def observe(self, now: float, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the last reports of all workers, by address; called about once a second.

        A report has the time ``at`` by the worker's clock, ``replicas``: a list of token, number, device, steps, rows,
        and seconds in steps and in waiting for input; and ``tasks``: the seconds of tasks by their names.
        """
        self.observed_at = now
        self.task_s = Counter()
        for report in reports.values():
            self.task_s.update(report["tasks"])
        present: set[tuple[str, int]] = set()
        places = {(known.strategy, known.worker, known.device): known for known in self.replicas.values()}
        for address, report in reports.items():
            before = self._reported_at.get(address)
            seconds = None if before is None else report["at"] - before
            self._reported_at[address] = report["at"]
            for token, number, device, *totals in report["replicas"]:
                key = token, number
                present.add(key)
                replica = self.replicas.get(key)
                if replica is None or replica.worker != address:
                    replica = self.replicas[key] = ReplicaFigures(token, number, address, device)
                    # Replicas are renumbered after a loss; the charts continue.
                    if (token, address, device) in places:
                        replica.history.extend(places[token, address, device].history)
                    replica.update(totals, None)
                elif seconds != 0:
                    replica.update(totals, seconds)
        for key in self.replicas.keys() - present:
            del self.replicas[key]
        for address in self._reported_at.keys() - reports.keys():
            del self._reported_at[address]
        self._add_to_history(now)

    def jobs(self) -> Sequence[Any]:
        """Return the iterations of the data service's jobs."""
        return () if self.service is None else self.service.jobs()

    def _add_to_history(self, now: float) -> None:
        replicas = list(self.replicas.values())
        for replica in replicas:
            replica.history.append((now, replica.steps_per_s, replica.rows_per_s))
        if replicas:
            shares = [(replica.step_share, replica.waiting_share, replica.idle_share) for replica in replicas]
            step, waiting, idle = (sum(column) / len(replicas) for column in zip(*shares, strict=True))
            self.time_shares.append((now, step, waiting, idle))
        for token, program in list(self.programs.items()):
            if now - program.reported_at > _SILENT_S:
                del self.programs[token]
        programs = list(self.programs.values())
        if programs:
            waits = [program.waiting_share for program in programs if program.waiting_share is not None]
            if waits:
                self.program_shares.append((now, sum(waits) / len(waits)))
            ahead = _fill([(program.ahead_bytes, program.most_ahead_bytes) for program in programs])
            in_flight = _fill([(program.num_in_flight, program.most_in_flight) for program in programs])
            self.fill.append((now, ahead, in_flight))

    def program_reported(self, now: float, token: str, report: Mapping[str, Any]) -> None:
        """Take the report of a program: values of `ProgramFigures`, by name."""
        self.programs.setdefault(token, ProgramFigures()).update(now, report)

    def program_ended(self, token: str) -> None:
        """Forget a strategy that was closed."""
        self.programs.pop(token, None)

    def worker_lost(self, now: float, address: str) -> None:
        """Record that a worker was lost while a strategy used it."""
        self.num_lost += 1
        self.lost.append(WorkerLoss(now, address))


def _fill(parts: Sequence[tuple[float, float]]) -> float:
    used, most = map(sum, zip(*parts, strict=True))
    return min(used / most, 1.0) if most else 0.0
