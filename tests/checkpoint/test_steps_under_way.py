"""Checkpoints of iterators count complete steps only."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import daskdist
from daskdist import Checkpoint, Dataset

pytestmark = pytest.mark.cluster


def test_a_checkpoint_of_an_iterator_counts_complete_steps_only(on_cluster, tmp_path):
    release = tmp_path / "release"

    def write(rows):
        # The program waits for the first call, to learn what the function returns.
        until = time.monotonic() + 10
        path = tmp_path / f"rows-{daskdist.get_replica_context().replica_id_in_sync_group}"
        while path.exists() and not release.exists() and time.monotonic() < until:
            time.sleep(0.005)
        with open(path, "a") as file:
            file.write("".join(f"{row}\n" for row in rows.tolist()))
        return len(rows)

    def written():
        return sorted(int(line) for path in tmp_path.glob("rows-*") for line in path.read_text().split())

    steps = iter(on_cluster.distribute_dataset(Dataset.range(400).batch(4)))
    for _ in range(40):
        on_cluster.run(write, args=(next(steps),))
    assert len(written()) == 4
    threading.Timer(0.3, release.touch).start()
    Checkpoint(steps=steps).save(tmp_path / "a.ckpt")
    assert written() == list(range(160))
    resumed = Checkpoint(steps=iter(on_cluster.distribute_dataset(Dataset.range(400).batch(4))))
    resumed.restore(tmp_path / "a.ckpt")
    assert np.concatenate(on_cluster.local_results(next(resumed.steps))).tolist() == [160, 161, 162, 163]


@pytest.mark.parametrize("is_kept", [False, True])
def test_no_checkpoint_is_written_after_a_step_that_failed(on_cluster, tmp_path, is_kept):
    def fail(rows):
        if 20 in rows:
            raise ValueError("twenty")
        return rows.sum()

    steps, kept = iter(on_cluster.distribute_dataset(Dataset.range(400).batch(4))), []
    for _ in range(20):
        result = on_cluster.run(fail, args=(next(steps),))
        if is_kept:
            kept.append(result)
    with pytest.raises(ValueError, match="twenty"):
        Checkpoint(steps=steps, epoch=1).save(tmp_path / "a.ckpt")
    assert not list(tmp_path.iterdir())
    # The error was seen, so that the program decides.
    Checkpoint(steps=steps, epoch=1).save(tmp_path / "a.ckpt")
