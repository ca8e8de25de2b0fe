"""Runs of a pipeline with faults, which count how often completed steps visited each row."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import optree

from daskdist.checkpoint.checkpoint_manager import CheckpointManager
from daskdist.errors import ArgumentError, ClusterError, CollectiveError
from daskdist.strategy.current import get_replica_context
from daskdist.strategy.function import function
from daskdist.strategy.values.device_arrays import host_nest
from daskdist.testing.faults import Fault, num_stops, worker_process

# Longer texts of rows are replaced by a digest.
_MOST_CHARS: Final = 60
# Rows that the table shows.
_MOST_SHOWN: Final = 5
# The time at which the program or a replica had the rows of a completed step, and those of the replicas.
_Visit = tuple[float, list[str]]


@dataclass(frozen=True)
class VisitationReport:
    """The rows that completed steps of a pass visited, compared with a pass without faults.

    Parameters
    ----------
    num_rows
        The rows of the pass without faults.
    num_visited
        The rows in completed steps of the pass with faults.
    lost
        Rows that were visited less often than without faults, as text, once for each time.
    doubled
        Rows that were visited more often, as text, once for each time.
    num_steps
        The completed steps.
    faults
        The faults that happened, as text: the process of a killed worker has ended, and one to be stopped or slowed
        was seen stopped.
    missed_faults
        The faults that did not happen during the pass, as text with the reason.
    failed_steps
        The errors of steps that are not complete.
    longest_gap_s
        The longest time between two completed steps: by the program's clock in a plain loop, else by those of workers.
        In a `daskdist.function` also between a fault and the next completed step, as earlier ones may be made again.
    seconds
        The time of the pass with faults.
    error
        The error that ended the pass; None if it was complete.
    """

    num_rows: int
    num_visited: int
    lost: tuple[str, ...]
    doubled: tuple[str, ...]
    num_steps: int
    faults: tuple[str, ...]
    missed_faults: tuple[str, ...]
    failed_steps: tuple[str, ...]
    longest_gap_s: float
    seconds: float
    error: str | None = None

    @property
    def holds(self) -> bool:
        """Return whether all faults happened, and the pass was complete, each row as often as without faults."""
        return self.error is None and not (self.lost or self.doubled or self.missed_faults)

    def __str__(self) -> str:
        lines = {
            "rows": f"{self.num_rows:,}",
            "visited": f"{self.num_visited:,}",
            "lost": _listed(self.lost),
            "doubled": _listed(self.doubled),
            "completed steps": f"{self.num_steps:,}",
            "failed steps": _listed(self.failed_steps),
            "longest gap": f"{self.longest_gap_s:.1f} s",
            "faults": "; ".join(self.faults) or "none",
            "missed faults": "; ".join(self.missed_faults) or "none",
            "ended by": self.error or "the end of the pass",
        }
        return "\n".join(f"{name:<16} {text}" for name, text in lines.items())


def _listed(texts: Sequence[str]) -> str:
    more = ", ..." if len(texts) > _MOST_SHOWN else ""
    return f"{len(texts):,}" + (f": {', '.join(texts[:_MOST_SHOWN])}{more}" if texts else "")


def verify_visitation(
    dataset: Any,
    strategy: Any,
    chaos: Sequence[Fault] = (),
    *,
    loop: Literal["plain", "function", "replicas"] = "plain",
    keys: Callable[[Any], Sequence[str]] | None = None,
    checkpoint_every: int = 5,
    directory: str | None = None,
) -> VisitationReport:
    """Iterate over a dataset on the replicas of a strategy while workers fail; report rows lost and doubled.

    There is a pass without faults first, with which the one with faults is compared.

    Parameters
    ----------
    dataset
        A batched dataset with the same rows in each pass, in any order.
    strategy
        The strategy. Faults need one on a Dask cluster that may lose workers.
    chaos
        The faults.
    loop
        The loop: ``"plain"`` calls `run` for each step, ``"function"`` does so in a `daskdist.function`, and
        ``"replicas"`` is one call of `run` whose replicas iterate, with checkpoints, and which is made again after the
        loss of a worker.
    keys
        A function of a batch of one replica that returns a text for each of its rows; by default the values of the row,
        or a digest of long ones. Use it if other leaves are random.
    checkpoint_every
        The steps between two checkpoints, for a loop on replicas.
    directory
        A directory that the program and all workers share, for a loop on replicas; a temporary one by default.

    Returns
    -------
    VisitationReport
        The report, which prints as a table.

    Raises
    ------
    ArgumentError
        A fault is for a worker that the strategy does not have, or the dataset is endless.

    >>> import daskdist
    >>> strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> report = verify_visitation(daskdist.Dataset.range(10).batch(4), strategy)
    >>> report.num_visited, report.lost, report.doubled
    (10, (), ())
    """
    workers = [worker for worker in dict.fromkeys(replica.worker for replica in strategy.replicas) if worker]
    for fault in chaos:
        if fault.worker >= len(workers):
            raise ArgumentError(f"verify_visitation: {fault}, but the strategy has {len(workers)} worker processes")
    if dataset.cardinality() == -1:
        raise ArgumentError("verify_visitation: the dataset is endless; give one with an end, for example by take")
    distributed = strategy.distribute_dataset(dataset)
    visit = _Visitor(keys)
    expected = Counter(row for _, rows in _visits(strategy, distributed, visit, []) for row in rows)
    failures: list[str] = []
    error: str | None = None
    visits: list[_Visit] = []
    begun_at = time.monotonic()
    faults = _Faults(strategy, workers, chaos)
    with tempfile.TemporaryDirectory() as temporary:
        passes = {
            "plain": lambda: _visits(strategy, distributed, visit, failures, faults),
            "function": lambda: _visits_of_function(strategy, distributed, visit, faults),
            "replicas": lambda: _visits_of_loop(
                strategy, distributed, visit, faults, Path(directory or temporary), checkpoint_every
            ),
        }
        try:
            visits.extend(passes[loop]())
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.monotonic() - begun_at
        happened, missed = faults.outcomes()
    visited = Counter(row for _, rows in visits for row in rows)
    # A function's steps may all be made again after a fault, so that only its own time shows how long that took.
    times = sorted([*[at for at, _ in visits], *(faults.times if loop == "function" else ())])
    return VisitationReport(
        expected.total(),
        visited.total(),
        tuple((expected - visited).elements()),
        tuple((visited - expected).elements()),
        len(visits),
        happened,
        missed,
        tuple(failures),
        max((after - before for before, after in pairwise(times)), default=0.0),
        seconds,
        error,
    )


@dataclass(frozen=True)
class _Visitor:
    # The step: it returns the time and the rows of its batch as text, one leaf.
    keys: Callable[[Any], Sequence[str]] | None

    __name__ = "visit"

    def __call__(self, batch: Any) -> str:
        return json.dumps([time.time(), list((self.keys or row_keys)(batch))])


def row_keys(batch: Any) -> list[str]:
    """Return a text for each row of a batch: its values, or a digest of long ones.

    >>> import numpy as np
    >>> row_keys({"x": np.arange(2), "y": np.ones((2, 2))})
    ['[0, [1.0, 1.0]]', '[1, [1.0, 1.0]]']
    """
    leaves = [leaf.tolist() for leaf in optree.tree_leaves(host_nest(batch))]
    return [
        text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}... {hashlib.sha256(text.encode()).hexdigest()}"
        for text in (str(row[0] if len(leaves) == 1 else list(row)) for row in zip(*leaves, strict=True))
    ]


class _Faults:
    # Faults that come at their steps, each once. Each is recorded in a file: on its worker's machine, or in a directory
    # that all share.
    def __init__(self, strategy: Any, workers: Sequence[str], chaos: Sequence[Fault]) -> None:
        self._strategy, self.chaos = strategy, chaos
        self.workers = [workers[fault.worker] for fault in chaos]
        self.records = [f"daskdist-fault-{uuid.uuid4().hex}" for _ in chaos]
        self._processes = {address: worker_process(strategy.client, address) for address in dict.fromkeys(self.workers)}
        self.reached: set[int] = set()
        self.times: list[float] = []

    def at(self, step: int) -> None:
        for number, fault in enumerate(self.chaos):
            if fault.step == step and number not in self.reached:
                self.reached.add(number)
                self.times.append(time.time())
                fault.inflict(self._strategy.client, self.workers[number], self.records[number])

    def outcomes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        # Return the faults that happened, and those that did not.
        happened: list[str] = []
        missed: list[str] = []
        for number, (fault, address) in enumerate(zip(self.chaos, self.workers, strict=True)):
            reason = self._missed(number, fault, address)
            if reason is None:
                happened.append(f"{fault} ({address})")
            else:
                missed.append(f"{fault} ({address}): {reason}")
        return tuple(happened), tuple(missed)

    def _missed(self, number: int, fault: Fault, address: str) -> str | None:
        # Return the reason why a fault did not happen; None if it did.
        if number not in self.reached:
            return "the pass did not come to this step on this worker"
        client = self._strategy.client
        if fault.kind == "kill":
            process = worker_process(client, address)
            return f"process {process[0]} still runs" if process and process == self._processes[address] else None
        return None if num_stops(client, self.records[number]) else "the process was not seen stopped during the pass"


def _visit_of(texts: Sequence[str | None]) -> _Visit:
    parts = [json.loads(text) for text in texts if text is not None]
    return max((at for at, _ in parts), default=0.0), [row for _, rows in parts for row in rows]


def _visits(
    strategy: Any, distributed: Any, visit: _Visitor, failures: list[str], faults: _Faults | None = None
) -> Iterator[_Visit]:
    for step, batch in enumerate(distributed):
        if faults is not None:
            faults.at(step)
        try:
            texts = strategy.local_results(strategy.run(visit, args=(batch,)))
        except (ClusterError, CollectiveError) as error:
            failures.append(f"step {step}: {error}")
            continue
        yield time.monotonic(), _visit_of(texts)[1]


def _visits_of_function(strategy: Any, distributed: Any, visit: _Visitor, faults: _Faults) -> Iterator[_Visit]:
    @function
    def iterate(batches: Any) -> list[Any]:
        steps = []
        for step, batch in enumerate(batches):
            faults.at(step)
            steps.append(strategy.run(visit, args=(batch,)))
        return steps

    for texts in iterate(distributed):
        yield _visit_of(strategy.local_results(texts))


def _iterate(
    batches: Any,
    visit: _Visitor,
    manager: CheckpointManager,
    directory: str,
    checkpoint_every: int,
    faults: Sequence[tuple[str, Fault, str]],
) -> int:
    # The loop on a replica. Each attempt records the rows of its steps in a separate file for each replica.
    context: Any = get_replica_context()
    number = context.replica_id_in_sync_group
    step = int(context.restore(manager, iterator=batches, step=0)["step"])
    worker = context.strategy.replicas[number].worker
    own_faults = [(fault, record) for address, fault, record in faults if address == worker]
    attempts = list(Path(directory).glob("attempt-*-replica-0"))
    attempt = int(context.all_reduce("MAX", len(attempts)))
    with open(f"{directory}/attempt-{attempt:04d}-replica-{number}", "w") as notes:
        print(json.dumps([step, 0, []]), file=notes, flush=True)
        if step == 0:
            # Without a checkpoint, fewer replicas would begin another pass, which has fewer rows if each reads all.
            context.checkpoint(manager, iterator=batches, step=step)
            manager.wait()
            context.all_reduce("SUM", 0)
        for batch in batches:
            for fault, record in own_faults:
                begun = Path(f"{record}-begun")
                # Several replicas may have this worker.
                if fault.step == step and not begun.exists():
                    with contextlib.suppress(FileExistsError):
                        begun.touch(exist_ok=False)
                        fault.suffer(record)
            step += 1
            print(json.dumps([step, *json.loads(visit(batch))]), file=notes, flush=True)
            # All replicas are in this step, or none is.
            context.all_reduce("SUM", 1)
            if step % checkpoint_every == 0:
                context.checkpoint(manager, iterator=batches, step=step)
    return step


def _visits_of_loop(
    strategy: Any, distributed: Any, visit: _Visitor, faults: _Faults, directory: Path, checkpoint_every: int
) -> Iterator[_Visit]:
    chaos = faults.chaos
    faults.records = [str(directory / record) for record in faults.records]
    addressed = list(zip(faults.workers, chaos, faults.records, strict=True))
    manager = CheckpointManager(str(directory / "checkpoints"))
    args = distributed, visit, manager, str(directory), checkpoint_every, addressed
    num_kills = sum(fault.kind == "kill" for fault in chaos)
    try:
        strategy.local_results(strategy.run(_iterate, args=args, restart=num_kills))
    finally:
        faults.reached |= {number for number, record in enumerate(faults.records) if Path(f"{record}-begun").exists()}
    # An attempt counts up to the step from which the next one continued.
    attempts: dict[str, list[list[list[Any]]]] = {}
    for path in sorted(directory.glob("attempt-*-replica-*")):
        notes = [json.loads(line) for line in path.read_text().splitlines()]
        attempts.setdefault(path.name.split("-")[1], []).append(notes)
    firsts = [replicas[0][0][0] for replicas in attempts.values()]
    for replicas, last in zip(attempts.values(), [*firsts[1:], float("inf")], strict=True):
        steps: dict[int, _Visit] = {}
        for step, at, rows in (note for notes in replicas for note in notes[1:]):
            if step <= last:
                before, others = steps.get(step, (at, []))
                steps[step] = max(at, before), others + rows
        yield from (steps[step] for step in sorted(steps))
