"""Kinds of calls whose result each worker computes itself, which is faster than computing it once and sending it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from daskdist.errors import ClusterError
from daskdist.strategy.steps.calls import Record, Result
from daskdist.strategy.steps.outcomes import Failed, StaysOnWorker

# With more workers, the result is computed once and sent on.
_MOST_WORKERS: Final = 8
# With more than two workers, larger results are computed once: otherwise each worker would be sent all their parts.
_MOST_LARGE_BYTES: Final = 2**20


class ReplicatedKinds:
    """The kinds of calls, such as a certain reduction in a step, whose results other workers need.

    The results of these kinds are likely to be needed by other workers again, like the weights of a training. So each
    worker is sent the inputs of the call, all at the same time, while the result could only be sent after it.
    """

    def __init__(self) -> None:
        self._kinds: set[Any] = set()
        self._large: set[Any] = set()

    def has(self, kind: Any, num_workers: int) -> bool:
        """Return whether each of ``num_workers`` workers should compute a result of a kind for itself."""
        return kind in self._kinds and num_workers <= _MOST_WORKERS

    def note_shared(self, record: Record) -> None:
        """Record that a worker other than the first needs a result."""
        record.is_shared = True
        if record.kind is not None and record.kind not in self._large:
            self._kinds.add(record.kind)

    def note_dropped(self, record: Record) -> None:
        """Record that a result is dropped, and whether more than one worker needed it."""
        if not record.is_replicated:
            return
        _, payload = record.outcomes[0] or (None, None)
        if len(record.workers) > 2 and type(payload) is StaysOnWorker and payload.num_bytes > _MOST_LARGE_BYTES:
            self._large.add(record.kind)
        if not record.is_shared or record.kind in self._large:
            self._kinds.discard(record.kind)


def checked(result: Result) -> Result:
    """Return a result, unless its call was made again for fewer replicas, without this one.

    Raises
    ------
    ClusterError
        The call was made again without the replica.
    """
    record = result.call.record
    if result.place >= len(record.workers):
        raise ClusterError(
            f"{record.name} was made again for {len(record.workers)} replicas, and has no value of replica "
            f"{result.place}; look at the PerReplica instead"
        )
    return result


def reachable(result: Result, is_there: Callable[[str, int], bool]) -> Result:
    """Return a result, or its copy on another worker if its own worker is lost."""
    record = result.call.record
    _, payload = record.outcomes[result.place] or (None, None)
    if record.is_replicated and type(payload) in (Failed, StaysOnWorker) and not is_there(result.worker, record.number):
        places = (place for place, worker in enumerate(record.workers) if is_there(worker, record.number))
        return Result(result.call, next(places, result.place))
    return result
