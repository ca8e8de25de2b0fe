"""The splitting of global batches for fewer replicas."""

from __future__ import annotations

from daskdist.execute.callers.submit import Submit
from daskdist.strategy.backend import ResultSource
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.reduce.gather import cut_piece
from daskdist.strategy.values.absent import ABSENT
from daskdist.strategy.values.encoding import for_tasks
from daskdist.strategy.values.refs import GlobalBatch, Refs, TaskResults, row_leaf


def resplit(batch: GlobalBatch, group: ReplicaGroup, submit: Submit, source: ResultSource) -> None:
    """Split a batch again for other replicas, by a task on the worker of each.

    Parameters
    ----------
    batch
        The batch, whose leaves are replaced.
    group
        The replicas.
    submit
        Makes the tasks; Dask computes lost ones again.
    source
        The source of the new leaves.
    """
    size = len(group.replicas)
    present = [number for number, piece in enumerate(batch.pieces(0)) if piece is not ABSENT]
    if len(present) < len(batch) and len(present) <= size:
        absent = [ABSENT] * (size - len(present))
        rows = [batch.pieces(number) for number in range(len(batch.leaves))]
        batch.leaves = [[*[pieces[number] for number in present], *absent] for pieces in rows]
        return
    leaves = [batch.pieces(number) for number in range(len(batch.leaves))]
    pieces, futures = for_tasks(tuple(leaves), {}, source, "resplit")
    arguments = cut_piece, futures, pieces, batch.structure, batch.skips_empty
    cut = [
        submit.call(*arguments, number, size, worker=worker, name="resplit")
        for number, worker in enumerate(group.worker_of)
    ]
    results = TaskResults(cut, group.worker_of)
    batch.leaves = [Refs(source, results, row_leaf(0, number, batch.is_writable)) for number in range(len(leaves))]
