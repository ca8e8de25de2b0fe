"""The time that a program spends in its steps, and waiting for input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass


@dataclass
class StepTimes:
    """The time of a pass: in steps, and waiting for input.

    Parameters
    ----------
    waiting_s
        Seconds in calls that take the next step. On a cluster, a step is handed out before its data has arrived;
        waiting for the data counts as the program's own time.
    step_s
        Seconds between these calls: the program's own time.
    num_steps
        The number of steps taken in this time.
    """

    waiting_s: float = 0.0
    step_s: float = 0.0
    num_steps: int = 0
    # The end of the latest call; None before the first.
    _left_at: float | None = None

    def note(self, begun_at: float, ended_at: float) -> None:
        """Record the times at which a call for a step began and ended."""
        self.waiting_s += ended_at - begun_at
        # Calls of several threads overlap.
        if self._left_at is not None and begun_at > self._left_at:
            self.step_s += begun_at - self._left_at
        self._left_at = ended_at

    @property
    def total_s(self) -> float:
        """The total time in seconds."""
        return self.waiting_s + self.step_s

    @property
    def waiting_share(self) -> float:
        """The share of the time spent waiting."""
        return self.waiting_s / self.total_s if self.total_s else 0.0

    def rate(self, number: float) -> float:
        """Return a number divided by the total time."""
        return number / self.total_s if self.total_s else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the seconds of waiting and of steps, and the rate of steps."""
        return {"waiting_s": self.waiting_s, "step_s": self.step_s, "steps_per_s": self.rate(self.num_steps)}


@dataclass(frozen=True)
class WorkerTimes:
    """The time that workers of a cluster spend on the input of a pass, and replicas in their steps.

    Parameters
    ----------
    busy_s
        The seconds of the pass's tasks by their names, and in ``"transfer"`` those of copies between workers.
    num_threads
        The number of threads of the workers.
    step_s, waiting_s
        The seconds of all replicas in steps, and in waiting for the input of steps, in all passes.
    """

    busy_s: dict[str, float]
    num_threads: int = 0
    step_s: float = 0.0
    waiting_s: float = 0.0

    @classmethod
    def of(cls, parts: Collection[WorkerTimes]) -> WorkerTimes:
        """Return the sums over several workers; the tasks that took longest come first."""
        busy_s: Counter[str] = Counter()
        for part in parts:
            busy_s.update(part.busy_s)
        return cls(
            dict(busy_s.most_common()),
            sum(part.num_threads for part in parts),
            sum(part.step_s for part in parts),
            sum(part.waiting_s for part in parts),
        )
