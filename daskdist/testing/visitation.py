"""Runs of a pipeline with faults, which count how often completed steps visited each row."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import optree

from daskdist.checkpoint.numbered_checkpoints import CheckpointManager
from daskdist.errors import ArgumentError, ClusterError, CollectiveError
from daskdist.strategy.current import get_replica_context
from daskdist.strategy.function import function
from daskdist.strategy.values.device_arrays import host_nest
from daskdist.testing.faults import Fault

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
        The faults that were inflicted.
    failed_steps
        The errors of steps that are not complete.
    longest_gap_s
        The longest time between two completed steps; 0 in a `daskdist.function`, whose steps are seen together.
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
    faults: tuple[Fault, ...]
    failed_steps: tuple[str, ...]
    longest_gap_s: float
    seconds: float
    error: str | None = None

    @property
    def holds(self) -> bool:
        """Return whether the pass was complete and visited every row as often as without faults."""
        return self.error is None and not self.lost and not self.doubled

    def __str__(self) -> str:
        lines = {
            "rows": f"{self.num_rows:,}",
            "visited": f"{self.num_visited:,}",
            "lost": _listed(self.lost),
            "doubled": _listed(self.doubled),
            "completed steps": f"{self.num_steps:,}",
            "failed steps": _listed(self.failed_steps),
            "longest gap": f"{self.longest_gap_s:.1f} s",
            "faults": "; ".join(map(str, self.faults)) or "none",
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
    with tempfile.TemporaryDirectory() as temporary:
        faults = _Faults(strategy, workers, chaos)
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
    visited = Counter(row for _, rows in visits for row in rows)
    times = [at for at, _ in visits]
    return VisitationReport(
        expected.total(),
        visited.total(),
        tuple((expected - visited).elements()),
        tuple((visited - expected).elements()),
        len(visits),
        tuple(chaos),
        tuple(failures),
        max((after - before for before, after in pairwise(times)), default=0.0),
        time.monotonic() - begun_at,
        error,
    )


@dataclass(frozen=True)
class _Visitor:
    # The step: it returns the rows of its batch as text, one leaf.
    keys: Callable[[Any], Sequence[str]] | None

    __name__ = "visit"

    def __call__(self, batch: Any) -> str:
        return json.dumps(list((self.keys or row_keys)(batch)))


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


@dataclass
class _Faults:
    # Faults that come at their steps, each once.
    strategy: Any
    workers: Sequence[str]
    chaos: Sequence[Fault]
    inflicted: set[Fault] = field(default_factory=set)

    def at(self, step: int) -> None:
        for fault in self.chaos:
            if fault.step == step and fault not in self.inflicted:
                self.inflicted.add(fault)
                fault.inflict(self.strategy.client, self.workers[fault.worker])


def _rows_of(texts: Sequence[str | None]) -> list[str]:
    return [row for text in texts if text is not None for row in json.loads(text)]


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
        yield time.monotonic(), _rows_of(texts)


def _visits_of_function(strategy: Any, distributed: Any, visit: _Visitor, faults: _Faults) -> Iterator[_Visit]:
    @function
    def iterate(batches: Any) -> list[Any]:
        steps = []
        for step, batch in enumerate(batches):
            faults.at(step)
            steps.append(strategy.run(visit, args=(batch,)))
        return steps

    for rows in [_rows_of(strategy.local_results(texts)) for texts in iterate(distributed)]:
        yield 0.0, rows


# The faults that this process has suffered in loops on replicas, by the directory of the loop.
_suffered: Final[set[tuple[str, Fault]]] = set()


def _iterate(
    batches: Any,
    visit: _Visitor,
    manager: CheckpointManager,
    directory: str,
    checkpoint_every: int,
    faults: Sequence[tuple[str, Fault]],
) -> int:
    # The loop on a replica. Each attempt records the rows of its steps in a separate file for each replica.
    context: Any = get_replica_context()
    number = context.replica_id_in_sync_group
    step = int(context.restore(manager, iterator=batches, step=0)["step"])
    own_faults = [fault for address, fault in faults if address == context.strategy.replicas[number].worker]
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
            for fault in own_faults:
                if fault.step == step and (directory, fault) not in _suffered:
                    _suffered.add((directory, fault))
                    fault.suffer()
            step += 1
            print(json.dumps([step, time.time(), json.loads(visit(batch))]), file=notes, flush=True)
            # All replicas are in this step, or none is.
            context.all_reduce("SUM", 1)
            if step % checkpoint_every == 0:
                context.checkpoint(manager, iterator=batches, step=step)
    return step


def _visits_of_loop(
    strategy: Any, distributed: Any, visit: _Visitor, faults: _Faults, directory: Path, checkpoint_every: int
) -> Iterator[_Visit]:
    addressed = [(faults.workers[fault.worker], fault) for fault in faults.chaos]
    manager = CheckpointManager(str(directory / "checkpoints"))
    args = distributed, visit, manager, str(directory), checkpoint_every, addressed
    num_kills = sum(fault.kind == "kill" for fault in faults.chaos)
    strategy.local_results(strategy.run(_iterate, args=args, restart=num_kills))
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
