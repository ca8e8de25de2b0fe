"""The status of workers and of running calls, from their streams."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from daskdist.config import seconds
from daskdist.errors import ClusterError
from daskdist.strategy.calls.calls import LOOP_PREFIX, Record
from daskdist.strategy.calls.stream import StepStream
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.status import RunningCall, WorkerStatus, state_of

# Seconds for which a call that runs too long is waited for more: by then its worker has reported it, and the error says
# which one it is.
_REPORTED_WITHIN_S: Final = 4.0


def names_of(records: Iterable[Record]) -> list[str]:
    """Return the names of calls."""
    return [record.name.removeprefix(LOOP_PREFIX) for record in records]


def check_running_calls(streams: Iterable[StepStream], under_way: Mapping[int, Record], silent_s: float) -> bool:
    """Check that calls continue; return whether a replica runs a loop.

    Parameters
    ----------
    streams
        The streams to the workers.
    under_way
        The unfinished calls.
    silent_s
        The seconds for which no call has ended.

    Raises
    ------
    ClusterError
        A call that is no loop has been running for longer than ``daskdist.timeouts.step``, or none has ended; or a loop
        has made no progress for longer than ``daskdist.timeouts.loop``.
    """
    most_s, now, is_loop = seconds("timeouts.step"), time.monotonic(), False
    for stream in streams:
        since_s, idle_s, idle = now - stream.running_at, 0.0, (0, "", "")
        for replica, name, running_s, last in stream.running if stream.is_open else ():
            if name.startswith(LOOP_PREFIX):
                is_loop = True
                last_action, loop_idle_s = last or ("", running_s)
                if loop_idle_s + since_s > idle_s:
                    idle_s, idle = loop_idle_s + since_s, (replica, name.removeprefix(LOOP_PREFIX), last_action)
            elif running_s + since_s > most_s:
                raise ClusterError(
                    f"{name} has been running on {stream.address} for {running_s + since_s:.0f} s, which is longer "
                    "than daskdist.timeouts.step; it continues there, and delays later calls"
                )
        replica, name, last_action = idle
        where = f"{name} of replica {replica} on {stream.address}"
        stream.loop_progress.check(where, last_action, idle_s, seconds("timeouts.loop"))
    if silent_s > most_s + _REPORTED_WITHIN_S and not is_loop:
        names = ", ".join(sorted(set(names_of(list(under_way.values()))))[:4])
        raise ClusterError(f"no call has ended for {silent_s:.0f} s, longer than daskdist.timeouts.step: {names}")
    return is_loop


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
    num_calls, num_steps = _num_left(under_way), _num_left([record for record in under_way if record.is_step])
    statuses = []
    for stream in streams:
        said = stream.running if tells_running and stream.is_open else ()
        running = tuple(
            [RunningCall(number, name.removeprefix(LOOP_PREFIX), so_far) for number, name, so_far, _ in said]
        )
        state = state_of(running, num_calls[stream.address]) if stream.is_open else "lost"
        members = group.members(stream.address)
        statuses.append(
            WorkerStatus(
                address=stream.address,
                replicas=members,
                devices=tuple([group.replicas[number].device for number in members]),
                state="closed" if is_closed else state,
                running=running,
                num_steps_sent=stream.num_steps,
                num_steps_in_flight=num_steps[stream.address],
                outstanding_bytes=stream.link.num_bytes,
                heartbeat_age_s=time.monotonic() - stream.running_at,
            )
        )
    return tuple(statuses)


def _num_left(records: Iterable[Record]) -> Counter[str]:
    # worker -> the number of its unfinished calls.
    return Counter(
        worker
        for record in records
        for worker in {
            address for address, outcome in zip(record.workers, record.outcomes, strict=True) if outcome is None
        }
    )
