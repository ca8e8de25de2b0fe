"""Waiting for calls to end, and calls that are ended because a worker is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from daskdist.config import seconds
from daskdist.errors import ClusterError
from daskdist.execute.caller import Handle
from daskdist.execute.callers.cluster_requests import closed_error
from daskdist.execute.callers.live_workers import LiveWorkers
from daskdist.strategy.steps.captures import current_capture
from daskdist.strategy.steps.sending.call_log import CallLog
from daskdist.strategy.steps.stream_set import StreamSet


class EndsCalls:
    """The part of a backend that ends calls on replicas, and waits until the loss of a worker is known."""

    streams: StreamSet
    live_workers: LiveWorkers
    _log: CallLog

    def missing(self) -> list[str]:
        """Return the strategy's workers that are lost or were restarted."""
        raise NotImplementedError

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """Wait while a condition holds and calls are under way, whose ends may change it."""
        streams, capture = self.streams, current_capture()

        def goes_on() -> bool:
            # The log refers to the batches of steps that are complete, too.
            self._log.rest()
            return streams.is_busy and condition()

        if goes_on():
            if capture is not None:
                capture.note_wait("steps under way had to end, whose batches fill their part of the workers' memory")
            streams.wait(lambda: not goes_on())

    def lost_workers(self, within_s: float) -> list[str]:
        """Return the workers that are lost but still have replicas, waiting up to some seconds for one."""
        streams = self.streams
        with contextlib.suppress(ClusterError):
            streams.wait(lambda: bool(streams.lost()), within_s)
        if streams.client.status != "running":
            raise closed_error(streams.client)
        if lost := self.missing():
            self.live_workers.in_doubt = True
        return lost

    def end_call(self, handles: Sequence[Handle], why: str) -> None:
        """End the functions of a call at their next batch, collective operation or checkpoint, and wait for that."""
        streams, most = self.streams, seconds("timeouts.step")
        with streams.lock:
            for result in handles:
                self._log.remove(result.call.record)
                if not result.is_over and streams.is_open(result.worker):
                    streams.stream_with(result.worker, ()).append("end", result.call.record.number, why)
        streams.wait(lambda: all(result.is_over for result in handles), most)
        if late := [result.worker for result in handles if not result.is_over]:
            raise ClusterError(
                f"run: {why}, but goes on on {', '.join(late)} after {most:g} s, which is daskdist.timeouts.step; a "
                "function ends at its next batch, collective operation or checkpoint"
            )
