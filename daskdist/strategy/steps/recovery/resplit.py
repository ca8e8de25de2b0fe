"""The splitting of global batches for fewer replicas."""

from __future__ import annotations

from daskdist.execute.callers.submit import Submit
from daskdist.strategy.backend import ResultSource
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.reduce.gather import cut_piece
from daskdist.strategy.values.absent import ABSENT
from daskdist.strategy.values.extract import GlobalBatch, PerReplicaRef, pick_from_rows
from daskdist.strategy.values.placeholders import Placeholders


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
    placeholders = Placeholders()
    leaves = [list(map(placeholders.leaf, batch.pieces(number))) for number in range(len(batch.leaves))]
    arguments = cut_piece, placeholders.handles, placeholders.picks, leaves, batch.structure, batch.skips_empty
    pieces = [
        submit.call(*arguments, number, size, worker=worker, name="resplit")
        for number, worker in enumerate(group.worker_of)
    ]
    batch.leaves = [
        PerReplicaRef(source, tuple(pieces), pick_from_rows(0, number, batch.is_writable), group.worker_of)
        for number in range(len(leaves))
    ]
