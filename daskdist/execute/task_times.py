"""Times that calls of a caller in this process take, by their names."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Final

# The most callers for whose tasks a worker keeps times.
_MOST_CALLERS: Final = 64


class TaskTimes:
    """The seconds that calls took, by the name of the call, of all threads together."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, begun_at: float) -> None:
        """Add the time since ``begun_at``, by `time.perf_counter`."""
        seconds = perf_counter() - begun_at
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def by_name(self) -> dict[str, float]:
        """Return the seconds of each name, the longest first."""
        with self._lock:
            return dict(sorted(self._seconds.items(), key=lambda item: -item[1]))


# The times of tasks, by the worker's address and the token of the caller that submitted them; "" for all callers. One
# process may have several workers.
_of_tasks: dict[tuple[str, str], TaskTimes] = {}
_making: Final = threading.Lock()


def task_times(worker: str, caller: str = "") -> TaskTimes:
    """Return the times of the tasks of a caller that ran on a worker of this process; of all callers if not given."""
    key = worker, caller
    times = _of_tasks.get(key)
    if times is None:
        with _making:
            times = _of_tasks.setdefault(key, TaskTimes())
            callers = [kept for kept in _of_tasks if kept[0] == worker and kept[1]]
            for kept in callers[:-_MOST_CALLERS]:
                del _of_tasks[kept]
    return times
