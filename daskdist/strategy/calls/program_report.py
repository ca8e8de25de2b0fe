"""The program's figures about a strategy, sent to the scheduler once a second for the dashboard."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from daskdist.config import setting
from daskdist.dashboard.figures import REPORT_OPERATION
from daskdist.display.step_times import StepTimes
from daskdist.execute.stream.local_iterator import times_of
from daskdist.strategy.calls.stream_set import StreamSet
from daskdist.strategy.input.iterator import DistributedIterator, ahead_bytes_of


class ProgramReport:
    """The figures of one strategy in its program.

    Parameters
    ----------
    streams
        The streams of the strategy.
    token
        The token of the strategy.
    """

    def __init__(self, streams: StreamSet, token: str) -> None:
        self.client = streams.client
        self.token = token
        self._streams = streams
        self._iterators: deque[tuple[StepTimes, weakref.ref[DistributedIterator]]] = deque()
        # The times of iterators that no longer exist.
        self._waiting_s = self._step_s = 0.0

    def add(self, iterator: DistributedIterator) -> None:
        """Include an iterator in the reports, for as long as it lives."""
        self._iterators.append((times_of(iterator), weakref.ref(iterator)))

    def content(self) -> dict[str, Any]:
        """Return the figures now, as in `daskdist.dashboard.figures.ProgramFigures`.

        Raises
        ------
        ClusterError
            The strategy or the client is closed.
        """
        self._streams.check_open(())
        waiting_s = step_s = 0.0
        ahead_bytes = most_ahead_bytes = 0
        # Other threads may append meanwhile.
        for _ in range(len(self._iterators)):
            times, reference = self._iterators.popleft()
            iterator = reference()
            if iterator is None:
                self._waiting_s += times.waiting_s
                self._step_s += times.step_s
                continue
            self._iterators.append((times, reference))
            waiting_s += times.waiting_s
            step_s += times.step_s
            used, most = ahead_bytes_of(iterator)
            ahead_bytes += used
            most_ahead_bytes += most
        return {
            "num_in_flight": self._streams.num_steps,
            "most_in_flight": setting("max-steps-in-flight"),
            "ahead_bytes": ahead_bytes,
            "most_ahead_bytes": most_ahead_bytes,
            "waiting_s": self._waiting_s + waiting_s,
            "step_s": self._step_s + step_s,
        }

    def start(self) -> None:
        """Send a report with each beat of the streams from now on, while they are open and something refers to this."""
        self._streams.on_beat = weakref.WeakMethod(self._send)

    async def _send(self) -> None:
        reference, started = weakref.ref(self._streams), self._streams.on_beat
        try:
            sending = getattr(self.client.scheduler, REPORT_OPERATION)(token=self.token, report=self.content())
            # A scheduler that does not answer keeps nothing of the strategy.
            del self
            await sending
        except Exception:
            # The strategy is closed, or the scheduler is gone. Another one may have been found meanwhile.
            streams = reference()
            if streams is not None and streams.on_beat is started:
                streams.on_beat = lambda: None
