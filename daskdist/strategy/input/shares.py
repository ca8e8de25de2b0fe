"""The parts of the data that workers read, for display."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from daskdist.core.node import walk
from daskdist.display.drawing import is_at_hand
from daskdist.display.plan import Share
from daskdist.ops.read_files import ReadFiles
from daskdist.strategy.group import Replica
from daskdist.strategy.input.pipeline import Pipeline


def shares_of(pipelines: Sequence[Pipeline], replicas: Sequence[Replica]) -> list[Share]:
    """Return what each worker reads, by the indexes of the files, which are read if they have not been."""
    return [share for pipeline in pipelines for share in _shares(pipeline, replicas, reads_indexes=True)]


def known_shares_of(pipelines: Sequence[Pipeline], replicas: Sequence[Replica]) -> list[Share]:
    """Return what is known of what each worker reads; nothing is read for it."""
    return [share for pipeline in pipelines for share in _shares(pipeline, replicas, reads_indexes=False)]


def _shares(pipeline: Pipeline, replicas: Sequence[Replica], *, reads_indexes: bool) -> Iterator[Share]:
    devices = {
        reader: [replica.device for replica in replicas if replica.worker == reader] for reader in pipeline.readers
    }
    if reads_indexes or is_at_hand(pipeline.node):
        for reader, splits in pipeline.splits_by_reader():
            yield Share.of(reader or "this process", devices[reader], splits, is_all=pipeline.is_listed)
        return
    # Readers that share a pipeline take its splits in turn, whose files are not known yet.
    files = sum(len(node.files) for node in walk(pipeline.node) if isinstance(node, ReadFiles))
    for reader in pipeline.readers:
        yield Share(reader or "this process", devices[reader], files if len(pipeline.readers) == 1 else None)
