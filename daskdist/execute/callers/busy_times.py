"""Times that calls of a caller in this process take, by their names."""

from __future__ import annotations

import threading
from time import perf_counter


class BusyTimes:
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
