"""The status of workers, from their streams."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable

from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.status import RunningCall, WorkerStatus, state_of
from daskdist.strategy.steps.calls import LOOP_PREFIX, Record
from daskdist.strategy.steps.stream import StepStream


def worker_statuses(
    streams: Iterable[StepStream],
    under_way: Collection[Record],
    group: ReplicaGroup,
    *,
    is_closed: bool,
    tells_running: bool = True,
) -> tuple[WorkerStatus, ...]:
    """Return the status of each worker.

    Parameters
    ----------
    streams
        The streams to the workers.
    under_way
        The unfinished calls.
    group
        The current replicas.
    is_closed
        Whether the strategy is closed.
    tells_running
        Whether the workers' last report of running calls is up to date.
    """
    num_calls, num_steps = _num_left(under_way, steps_only=False), _num_left(under_way, steps_only=True)
    return tuple(
        [
            _status(stream, group, num_calls[stream.address], num_steps[stream.address], is_closed, tells_running)
            for stream in streams
        ]
    )


def _status(
    stream: StepStream, group: ReplicaGroup, num_calls: int, num_steps: int, is_closed: bool, tells_running: bool
) -> WorkerStatus:
    members = group.members(stream.address)
    if stream.is_open:
        said = stream.running if tells_running else ()
        running = tuple([RunningCall(number, name.removeprefix(LOOP_PREFIX), so_far) for number, name, so_far in said])
        state = state_of(running, num_calls)
    else:
        running, state = (), "lost"
    return WorkerStatus(
        address=stream.address,
        replicas=tuple(members),
        devices=tuple([group.replicas[number].device for number in members]),
        state="closed" if is_closed else state,
        running=running,
        num_steps_sent=stream.num_steps,
        num_steps_in_flight=num_steps,
        outstanding_bytes=stream.outbox.num_bytes,
        heartbeat_age_s=time.monotonic() - stream.running_at,
    )


def _num_left(under_way: Collection[Record], *, steps_only: bool) -> Counter[str]:
    # worker -> the number of its unfinished calls.
    return Counter(
        worker
        for record in under_way
        if record.is_step or not steps_only
        for worker in {
            address for address, outcome in zip(record.workers, record.outcomes, strict=True) if outcome is None
        }
    )
