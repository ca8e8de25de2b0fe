"""Workers whose memory is full: waits for those that stay paused are ended, and those that Dask ended are named."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from dask.utils import format_bytes
from distributed import Client, Scheduler, Status, Worker
from distributed.scheduler import KilledWorker
from distributed.spill import MaxSpillExceeded, SpillBuffer

from daskdist.config import seconds
from daskdist.errors import ClusterError, RepeatedLossError, WaitTimeoutError
from daskdist.execute.callers.cluster_requests import run_on_scheduler, run_on_workers
from daskdist.execute.private_names import handles_topic

Connected = Mapping[str, Mapping[str, Any]]

# Seconds without a check after which the time starts again.
_LOOKS_WITHIN_S: Final = 10.0
# The fall of a worker's memory, as a share of its limit, that counts as progress.
_FREED_SHARE: Final = 0.01
# States of tasks that a paused worker leaves as they are.
_HELD_UP: Final = ("ready", "constrained", "fetch")
# The topic of Dask's events about ended workers, and the seconds after such an event within which the loss is noticed.
_TOPIC: Final = "worker-restart-memory"
_ENDED_WITHIN_S: Final = 60.0
# Seconds within which such an event comes after the loss: it goes by way of the scheduler, the loss does not.
_COMES_WITHIN_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.01
# Client -> worker -> the time at which Dask ended it, and its memory then.
_ended: Final[WeakKeyDictionary[Client, dict[str, tuple[float, int]]]] = WeakKeyDictionary()
# The most workers that a message describes.
_MOST_NAMED: Final = 3
# Dask's setting for how often workers may be lost that run the same task; steps follow it, too.
MOST_LOSSES: Final = "distributed.scheduler.allowed-failures"


class PausedWorkers:
    """The time since when a cluster has made no progress because workers are paused.

    Dask pauses a worker at 80 % of its memory limit: it begins no task until results were moved to its disk or dropped.
    If nothing runs on any worker, nothing is dropped; if the disk is full, nothing can be moved.
    """

    def __init__(self) -> None:
        # The state of the workers at the first check without progress since, the time of that check, and that of the
        # last one; None with progress.
        self._unchanged: tuple[Any, float, float] | None = None
        # Whether a worker was paused at the last check.
        self._had_paused = False

    def check(self, client: Client, connected: Connected) -> None:
        """Check the workers again during a wait.

        Parameters
        ----------
        client
            The connection to the cluster.
        connected
            The scheduler's description of each connected worker, by address.

        Raises
        ------
        WaitTimeoutError
            There was no progress for ``daskdist.timeouts.paused`` seconds, and paused workers cannot free memory.
        """
        waited_s, most_s = self._look(connected), seconds("timeouts.paused")
        has_paused = any(its["status"] == "paused" for its in connected.values())
        asks, self._had_paused = has_paused or self._had_paused, has_paused
        if asks:
            # A scheduler without daskdist serves programs without strategies.
            with contextlib.suppress(ImportError):
                run_on_scheduler(client, run_elsewhere, waited_s > most_s / 2)
        if waited_s > most_s:
            # Start the time again, for the next wait or since memory was freed.
            self._unchanged = None
            paused = [address for address, its in connected.items() if its["status"] == "paused"]
            reasons = run_on_workers(client, free_memory, workers=paused, on_error="return")
            if reasons and None not in reasons.values():
                raise _error(waited_s, connected, reasons)

    def _look(self, connected: Connected) -> float:
        # Return the seconds without progress.
        now, before, figures = time.monotonic(), self._unchanged, _stuck(connected)
        if figures is None:
            self._unchanged = None
            return 0.0
        if before is None or now - before[2] > _LOOKS_WITHIN_S or _has_progress(before[0], figures):
            self._unchanged = figures, now, now
            return 0.0
        self._unchanged = before[0], before[1], now
        return now - before[1]


def note_ended(client: Client) -> None:
    """Record from now on which workers Dask ends because they exceed their memory limit, for `ended_for_memory`."""
    # The program may have a handler of its own.
    if client not in _ended and not handles_topic(client, _TOPIC):
        ended = _ended[client] = {}

        def note(event: tuple[float, Mapping[str, Any]]) -> None:
            ended[event[1]["worker"]] = time.monotonic(), event[1]["rss"]

        client.subscribe_topic(_TOPIC, note)


def ended_for_memory(client: Client, workers: Sequence[str], *, waits: bool = False) -> str:
    """Return a text about those of the lost workers that Dask has ended; empty if there are none.

    Parameters
    ----------
    client
        The connection to the cluster.
    workers
        Their addresses.
    waits
        Whether to wait for Dask's event about each, for a final error; not in the event loop, which takes the events.
    """
    now, ended = time.monotonic(), _ended.get(client, {})
    while waits and not ended.keys() >= {*workers} and time.monotonic() < now + _COMES_WITHIN_S:
        time.sleep(_LOOK_EVERY_S)
    # Another worker may have had the address before.
    since = now - _ENDED_WITHIN_S
    sizes = [f"{worker} with {format_bytes(ended[worker][1])}" for worker in workers if worker in ended]
    if not sizes or max(ended[worker][0] for worker in workers if worker in ended) < since:
        return ""
    return f"; Dask ended {', '.join(sizes)}, which exceeded the memory limit"


def add_reason(error: BaseException, client: Client, workers: Sequence[str], *, is_last: bool) -> None:
    """Add to the error of lost workers that Dask has ended them; if no worker is left, wait for Dask to say so."""
    why = ended_for_memory(client, workers, waits=is_last)
    if isinstance(error, ClusterError) and why not in str(error):
        error.args = (f"{error}{why}",)


def after_repeated_losses(client: Client, workers: Sequence[str]) -> str:
    """Return a text about lost workers that were making the same call or task: the reason, and what to do.

    Parameters
    ----------
    client
        The connection to the cluster.
    workers
        Their addresses; none if they are unknown.
    """
    workers = workers or list(_ended.get(client, ()))
    if why := ended_for_memory(client, workers, waits=True):
        return f"{why}. Give workers more memory (memory_limit), or make batches and splits of the data smaller"
    return f"; the logs of the workers may have the reason. {MOST_LOSSES} says how often that may happen"


def error_of_task(client: Client, error: BaseException) -> BaseException:
    """Return the error of a task, with the reason if Dask gave the task up because its workers were lost."""
    if not isinstance(error, KilledWorker):
        return error
    last = error.last_worker.address
    loss = RepeatedLossError(
        f"{error.task} ran each of {error.allowed_failures + 1} times that a worker was lost, the last time {last}"
        f"{after_repeated_losses(client, ())}"
    )
    loss.__cause__ = error
    return loss


def run_elsewhere(takes_all: bool, *, dask_scheduler: Scheduler) -> None:
    """Give tasks of other workers that any worker may run to running workers.

    Dask does not do so itself for tasks that became ready when no worker was running, if another worker continues
    first, nor for tasks that a worker got before it was paused.

    Parameters
    ----------
    takes_all
        Whether paused workers also lose the tasks that they have got, as they have begun none for long.
    """
    if not dask_scheduler.running:
        return
    stimulus = f"daskdist-paused-{time.time()}"
    loose = [task for task in dask_scheduler.unrunnable if task.loose_restrictions]
    # Recommendations are processed from the last to the first.
    loose.sort(key=lambda task: task.priority, reverse=True)
    dask_scheduler.transitions({task.key: "processing" for task in loose}, stimulus)
    paused = [worker for worker in dask_scheduler.workers.values() if worker.status is Status.paused]
    not_begun = itertools.chain.from_iterable(worker.processing for worker in paused) if takes_all else ()
    anywhere = [task for task in not_begun if task.loose_restrictions or not task.worker_restrictions]
    # The paused worker is asked to drop them.
    dask_scheduler.transitions({task.key: "released" for task in anywhere}, stimulus)


def free_memory(dask_worker: Worker) -> str | None:
    """Move a result from this worker's memory to its disk, as Dask does; return the reason if that is impossible."""
    manager = dask_worker.memory_manager
    data = manager.data
    if manager.memory_spill_fraction is False or not isinstance(data, SpillBuffer):
        return "its results are not moved to the disk (distributed.worker.memory.spill)"
    if not data.fast:
        return "it has no results in memory that could be moved to the disk; functions, libraries or variables hold it"
    try:
        # Unlike `data.evict`, this raises the error.
        data.fast.evict()
    except MaxSpillExceeded:
        return "as many results as distributed.worker.memory.max-spill allows are on its disk"
    except OSError as error:
        return f"no result can be moved to its disk: {error}"
    except Exception as error:
        return f"a result cannot be moved to its disk: {error}: {error.__cause__}"
    return None


def _stuck(connected: Connected) -> dict[str, tuple[Any, float]] | None:
    # Return what each worker has and does, and its memory; None if there may be progress.
    figures, num_paused, has_held_up = {}, 0, False
    for address, its in connected.items():
        metrics = its["metrics"]
        counts = metrics.get("task_counts", {})
        transfer = metrics.get("transfer", {})
        # A step or loop may take any time, and frees memory at its end.
        if counts.get("executing") or counts.get("long-running") or metrics.get("daskdist_running"):
            return None
        is_paused = its["status"] == "paused"
        num_paused += is_paused
        has_held_up |= is_paused and any(counts.get(state) for state in _HELD_UP)
        moved = transfer.get("incoming_count_total"), transfer.get("outgoing_count_total")
        has = its["status"], metrics.get("managed_bytes"), metrics.get("spilled_bytes"), counts, moved
        figures[address] = has, metrics.get("memory", 0) / (its["memory_limit"] or 1)
    # Other workers get the tasks that a paused worker does not have yet.
    return figures if num_paused and (has_held_up or num_paused == len(connected)) else None


def _has_progress(before: Mapping[str, tuple[Any, float]], now: Mapping[str, tuple[Any, float]]) -> bool:
    return before.keys() != now.keys() or any(
        now[address][0] != has or now[address][1] < memory - _FREED_SHARE for address, (has, memory) in before.items()
    )


def _error(waited_s: float, connected: Connected, reasons: Mapping[str, str | None]) -> WaitTimeoutError:
    reports = [
        f"{address} at {format_bytes(connected[address]['metrics']['memory'])} of "
        f"{format_bytes(connected[address]['memory_limit'])}, {format_bytes(_spilled(connected[address]))} on its disk "
        f"({connected[address]['local_directory']}): {reason}"
        for address, reason in list(reasons.items())[:_MOST_NAMED]
    ]
    more = "" if len(reasons) <= _MOST_NAMED else f"; and {len(reasons) - _MOST_NAMED} more"
    return WaitTimeoutError(
        f"waited {waited_s:.0f} s for workers that are paused, as their memory is full, and cannot free any, which "
        f"is longer than daskdist.timeouts.paused: {'; '.join(reports)}{more}. Give workers more memory (memory_limit) "
        "or disk (local_directory); or keep less in memory: caches in files, cache(path), and smaller batches"
    )


def _spilled(its: Mapping[str, Any]) -> int:
    return int(its["metrics"].get("spilled_bytes", {}).get("disk", 0))
