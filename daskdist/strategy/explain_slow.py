"""`explain_slow`: a description of how a pass spends its time, and what would make it faster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from daskdist.core.cardinality import counted
from daskdist.core.node import Node, walk
from daskdist.display.plain_text import PlainText
from daskdist.errors import ArgumentError
from daskdist.execute.callers.processes import Processes
from daskdist.execute.stream.local_iterator import ConvertedIterator, ElementIterator, caller_of, nodes_of, times_of
from daskdist.ops.read_files import ReadFiles
from daskdist.passes.remainders import level
from daskdist.strategy.input.iterator import DistributedIterator, is_local, worker_times_of

_FEWEST_STEPS: Final = 3
# Waiting for less than this share of the time is not worth a change.
_LITTLE_WAITING: Final = 0.1
# Threads that are busy for more than this share of the time are at their limit.
_BUSY: Final = 0.8
# Copies that take more than this share of the time are worth a change.
_MUCH_COPYING: Final = 0.5
_ADVICE: Final = (
    "Called after batch(), with a whole batch, it takes less; written with NumPy's functions it may be vectorised."
)


def explain_slow(iterator: DistributedIterator | ElementIterator | ConvertedIterator) -> PlainText:
    """Describe how a pass spends its time, and what would make it faster.

    Parameters
    ----------
    iterator
        An iterator over a dataset, a distributed dataset or a `torch_loader`, after some steps. Of a dataset that is
        not distributed, each element is a step.

    Returns
    -------
    str
        Sentences, one per line, that print themselves, about the measurements in its ``stats()``.

    Raises
    ------
    ArgumentError
        It is not such an iterator.

    >>> import daskdist
    >>> batches = iter(daskdist.Dataset.range(100).batch(10))
    >>> print(explain_slow(batches))
    0 steps so far: take some steps first.
    """
    if isinstance(iterator, ConvertedIterator):
        iterator = iterator.source
    if not isinstance(iterator, (DistributedIterator, ElementIterator)):
        raise ArgumentError(
            f"explain_slow: got {type(iterator).__name__}; give an iterator that has taken steps, as from "
            "iter(dataset) or iter(strategy.distribute_dataset(dataset))"
        )
    return PlainText("\n".join(_sentences(iterator)))


def _sentences(iterator: DistributedIterator | ElementIterator) -> Iterator[str]:
    stats = iterator.stats()
    times = times_of(iterator)
    num_steps = times.num_steps
    if num_steps < _FEWEST_STEPS:
        yield f"{counted(num_steps, 'step')} so far: take some steps first."
        return
    yield (
        f"{counted(num_steps, 'step')} in {times.total_s:.2f} s, {stats['steps_per_s']:,.1f} per second: "
        f"{times.waiting_share:.0%} of the time waiting for input, the rest in the program's steps."
    )
    if stats["num_skipped"]:
        yield f"{counted(stats['num_skipped'], 'element')} left out because reading or computing them failed."
    if isinstance(iterator, DistributedIterator) and not is_local(iterator):
        yield from _on_cluster(iterator)
        return
    if times.waiting_share < _LITTLE_WAITING:
        yield (
            "The steps themselves take nearly all of the time: faster input would gain "
            f"{times.waiting_share:.0%} at most."
        )
        return
    copies = stats.get("device", {})
    yield from _of_copies(copies, times.total_s)
    yield from _of_input(iterator, stats.get("busy_s", {}), copies_ahead=bool(copies))


def _of_copies(copies: dict[str, float], total_s: float) -> Iterator[str]:
    if not copies or not copies["copy_s"]:
        return
    share = copies["copy_s"] / total_s
    yield (
        f"Copies to devices take {share:.0%} of the time, at {copies['gb_per_s']:.1f} GB/s, with the packing in pinned "
        "memory before them."
    )
    if share > _MUCH_COPYING:
        yield (
            "If batches are views of arrays in memory, devices copy from these directly, two to four times as fast, "
            "with InputOptions(pin_arrays=True); of small batches, larger ones are copied faster."
        )


def _on_cluster(iterator: DistributedIterator) -> Iterator[str]:
    yield (
        "On a cluster, steps are handed out before their data has arrived: the time in steps includes waiting for data."
    )
    workers = worker_times_of(iterator)
    if workers is None:
        return
    if replicas_s := workers.step_s + workers.waiting_s:
        share = workers.waiting_s / replicas_s
        yield (
            f"Replicas have waited {workers.waiting_s:.2f} s for the input of steps, and taken {workers.step_s:.2f} s "
            "for the steps, in all passes of the strategy."
        )
        if share < _LITTLE_WAITING:
            yield f"The steps themselves take nearly all of that time: faster input would gain {share:.0%} at most."
            return
    all_s = sum(workers.busy_s.values())
    if all_s:
        yield _work(workers.busy_s)
        # Copies between workers take no thread.
        tasks_s = all_s - workers.busy_s.get("transfer", 0.0)
        busy_share = tasks_s / max(workers.num_threads * times_of(iterator).total_s, 1e-9)
        threads = counted(workers.num_threads, "thread")
        yield (
            f"The {threads} of the workers are always busy with it: add workers, or reduce the work."
            if busy_share > _BUSY
            else f"The {threads} of the workers are busy with it {busy_share:.0%} of the time: more workers would not "
            "help, since these have too little work at a time."
        )
    yield from _of_plan(nodes_of(iterator))


def _work(busy_s: dict[str, float]) -> str:
    all_s = sum(busy_s.values())
    parts = [f"{name} {seconds / all_s:.0%}" for name, seconds in busy_s.items() if seconds >= 0.01 * all_s]
    return f"Work for input: {', '.join(parts)}."


def _of_input(
    iterator: DistributedIterator | ElementIterator, busy_s: dict[str, float], *, copies_ahead: bool
) -> Iterator[str]:
    all_s = sum(busy_s.values())
    if all_s:
        yield _work(busy_s)
    caller = caller_of(iterator)
    if isinstance(caller, Processes):
        number = caller.num_processes
        yield (
            f"Input is computed by {number:,} process{'es' * (number != 1)}: use more, with "
            "Options(num_processes=...), if there are idle cores, or reduce the work."
        )
    elif not caller.num_ahead and copies_ahead:
        if all_s > _BUSY * times_of(iterator).total_s:
            yield (
                "Input is computed by the thread that copies to devices, which is busy with it: add prefetch(2) at the "
                "end of the dataset, or Options(num_threads=...), to compute it in other threads."
            )
    elif not caller.num_ahead:
        yield (
            "Input is computed by the program's own thread, when it asks for a step: add prefetch(2) at the end of the "
            "dataset, or Options(num_threads=...), to compute it during steps."
        )
    elif all_s:
        threads = counted(caller.num_ahead, "thread")
        share = all_s / max(caller.num_ahead * times_of(iterator).total_s, 1e-9)
        yield (
            f"The {threads} that compute input are always busy: use more threads, with Options(num_threads=...), if "
            "there are idle cores, or reduce the work."
            if share > _BUSY
            else f"The {threads} that compute input are busy {share:.0%} of the time: more threads would not help, "
            "since these have too little work at a time."
        )
    yield from _of_plan(nodes_of(iterator))


def _of_plan(nodes: Iterable[Node]) -> Iterator[str]:
    advice: dict[str, None] = {}
    for last in nodes:
        for node in walk(last):
            # A function of whole batches has enough to do in each call.
            if node.note.startswith("row by row") and not level(node):
                advice[f"{node} is called {node.note}. {_ADVICE}"] = None
            if isinstance(node, ReadFiles):
                packed = [path for path in node.paths if path.endswith(".gz")]
                if packed:
                    advice[
                        f"{counted(len(packed), 'gzip file')} of {len(node.paths):,}: each can only be read from its "
                        "start, by one thread. More and smaller files, or Parquet, are read in parallel."
                    ] = None
    yield from advice
