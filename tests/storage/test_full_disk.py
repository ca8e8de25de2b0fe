"""Writes without space on the disk raise an error that names the file, or continue without it."""

from __future__ import annotations

import contextlib
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from conftest import mirrored

import daskdist
from daskdist import CheckpointManager, Dataset, errors
from daskdist.execute.messages.failure import Packed
from daskdist.execute.messages.shared_memory import MemoryConnection, unnamed_memory

if sys.platform == "win32":
    pytest.skip("sizes of files are limited on POSIX only", allow_module_level=True)
import resource

ROWS = Dataset.range(50_000).map(lambda x: {"x": x * 1.5})


@contextlib.contextmanager
def files_of_at_most(num_bytes):
    """Let the system refuse to write more to a file of this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: ROWS.save(path),
        lambda path: ROWS.to_parquet(path),
        lambda path: sum(1 for _ in ROWS.cache(path)),
        lambda path: sum(1 for _ in ROWS.snapshot(path)),
        lambda path: daskdist.Checkpoint(weights=np.random.default_rng(0).random(50_000)).save(path),
    ],
    ids=["save", "to_parquet", "cache", "snapshot", "Checkpoint.save"],
)
def test_writing_to_a_full_disk_is_an_error(tmp_path, write):
    path = str(tmp_path / "written")
    with files_of_at_most(100_000), pytest.raises(errors.FileError, match=r"written.*: cannot be written: .*too large"):
        write(path)
    # The files of the failed write do not count as a complete dataset, so a second write is not refused.
    write(path)


def test_a_save_in_the_background_without_room_keeps_the_one_before(tmp_path):
    manager = CheckpointManager(str(tmp_path))
    with mirrored(1).scope():
        weights = daskdist.Variable(np.zeros(50_000))
    checkpoint = daskdist.Checkpoint(weights=weights)
    manager.save(checkpoint)
    manager.wait()
    weights.assign(np.random.default_rng(0).random(50_000))
    with files_of_at_most(100_000):
        manager.save(checkpoint)
        with pytest.raises(errors.FileError, match=r"step-00000001.*too large"):
            manager.wait()
    assert manager.restore(checkpoint) == 0
    assert not np.any(weights)


def test_arrays_for_which_shared_memory_has_no_room_travel_with_the_message():
    value = {"a": np.arange(50_000), "b": np.ones(50_000)}
    memory, sockets = unnamed_memory(), socket.socketpair()
    first, second = (MemoryConnection(end.detach(), memory) for end in sockets)
    with first, second, ThreadPoolExecutor(1) as threads, files_of_at_most(500_000):
        received = threads.submit(second.recv)
        first.send(Packed.of(value))
        np.testing.assert_equal(received.result(60).value(), value)
