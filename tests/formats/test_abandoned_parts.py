"""Parts of caches that killed passes leave are removed, and those of running passes are not."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta

import fsspec
import numpy as np
import programs
import pytest

from daskdist import Dataset, TensorSpec, errors
from daskdist.formats.saved.abandoned_parts import LEASE_S

# An element has 1 MiB, and a file a few elements.
WIDTH = 2**17
KILLED = """
import os, sys
import numpy as np
from daskdist import Dataset
for x in getattr(Dataset.range(24).map(lambda x: np.full(2**17, x)), sys.argv[2])(sys.argv[1]):
    if x[0] == 20:
        os._exit(9)
"""


def dataset(path, number=24):
    return Dataset.range(number).map(lambda x: np.full(WIDTH, x)).cache(path)


def killed(path, method="cache"):
    """Leave the parts of a pass that was killed."""
    done = programs.run("-c", KILLED, path, method)
    assert done.returncode == 9
    assert len(parts(path)) > 2
    assert not manifests(path)


def parts(path):
    return sorted(path.rglob("*part-*"))


def manifests(path):
    return sorted(path.rglob("manifest.json"))


def make_older(paths, seconds=LEASE_S + 3600):
    at = time.time() - seconds
    for path in paths:
        os.utime(path, (at, at))


def begun(ds, number=15):
    """Return a pass that has written some parts, and the elements that it gave."""
    it = iter(ds)
    return it, [int(next(it)[0]) for _ in range(number)]


def fill(ds):
    return rest(iter(ds))


def rest(it):
    return [int(x[0]) for x in it]


@pytest.mark.parametrize("method", ["cache", "snapshot"])
def test_parts_of_a_killed_pass_are_removed_by_the_next_pass_over_the_path(tmp_path, method):
    killed(tmp_path, method)
    left = parts(tmp_path)
    # The parts are kept for now, since another process may still be writing them.
    fill(dataset(tmp_path))
    assert set(left) < set(parts(tmp_path))
    make_older(left)
    # Another pipeline, as after a change of the program, also removes the old pipeline's directory.
    fill(dataset(tmp_path, 20))
    assert not set(left) & set(parts(tmp_path))
    assert len(os.listdir(tmp_path)) == 2


def test_a_pass_that_only_reads_removes_abandoned_parts_too(tmp_path):
    ds = dataset(tmp_path)
    it, _ = begun(ds)
    (directory,) = tmp_path.iterdir()
    # Like a killed process, this pass never reports its end.
    left = [
        part.rename(part.with_name(f"part-{'0' * 12}-{number:032x}.arrow"))
        for number, part in enumerate(parts(directory))
    ]
    it.close()
    whole = fill(ds)
    kept = set(parts(directory)) - set(left)
    assert left
    make_older(parts(directory))
    assert fill(ds) == whole == list(range(24))
    assert set(parts(directory)) == kept


def test_parts_of_a_running_pass_are_kept_however_old_the_first_is(tmp_path):
    ds = dataset(tmp_path)
    it, found = begun(ds)
    running = parts(tmp_path)
    assert len(running) > 2
    make_older(running[:-1])
    other, begun_by_other = begun(dataset(tmp_path))
    assert set(running) <= set(parts(tmp_path))
    found += rest(it)
    begun_by_other += rest(other)
    assert found == begun_by_other == list(range(24))
    # One of the two passes is kept as the cache; the other removed its own parts.
    assert len(manifests(tmp_path)) == 1
    assert fill(ds) == found


def test_a_pass_that_lost_parts_keeps_nothing_and_gives_all(tmp_path, caplog):
    ds = dataset(tmp_path)
    it, found = begun(ds)
    make_older(parts(tmp_path))
    # The first pass paused for more than a day, so the next pass takes it for killed and removes its parts.
    whole = fill(ds)
    (manifest,) = manifests(tmp_path)
    manifest.unlink()
    found += rest(it)
    assert found == whole
    assert "missing (part-" in caplog.text
    assert not manifests(tmp_path)
    assert fill(ds) == whole
    assert fill(ds) == whole
    assert len(manifests(tmp_path)) == 1


def test_two_saves_at_the_same_time_never_leave_half_a_dataset(tmp_path):
    def rows():
        for number in range(24):
            if number == 20:
                Dataset.range(3).save(tmp_path)
            yield np.full(WIDTH, number)

    # The save may notice the other one at its end, or already when it writes a file.
    with pytest.raises(errors.FileError, match=r"no other process saves|cannot be written"):
        Dataset.from_generator(rows, TensorSpec((WIDTH,), np.int64)).save(tmp_path)
    assert [int(x) for x in Dataset.load(tmp_path)] == [0, 1, 2]


def test_files_of_others_stay(tmp_path):
    ds = dataset(tmp_path)
    fill(ds)
    (directory,) = tmp_path.iterdir()
    names = ["theirs.arrow", "part-0.arrow", "notes.txt", f".manifest.json.{'a' * 31}.tmp"]
    others = [place / name for place in (tmp_path, directory) for name in names]
    for path in others:
        path.write_text("keep")
    (tmp_path / ("b" * 32)).write_text("keep")
    temporaries = [directory / f".manifest.json.{'a' * 32}.tmp", directory / f"part-{'c' * 32}.arrow"]
    for path in temporaries:
        path.write_text("left")
    make_older(tmp_path.rglob("*"))
    assert fill(ds) == list(range(24))
    assert all(path.exists() for path in others)
    assert not any(path.exists() for path in temporaries)


class RemovedWhileListed(dict):
    """The files of a store; whenever they are listed, a part of a pass is removed, as by another thread."""

    def __iter__(self):
        names = list(super().__iter__())
        for name in [name for name in names if name.startswith("/kept") and "/part-" in name][:1]:
            del self[name]
        return iter(names)


def test_a_part_removed_while_parts_are_listed_is_no_error(monkeypatch):
    fs = fsspec.filesystem("memory")
    monkeypatch.setattr(type(fs), "store", RemovedWhileListed(fs.store))
    it, found = begun(dataset("memory://kept/here"))
    # A part is gone, so the pass is not kept as the cache; but it does not fail.
    assert found + rest(it) == list(range(24))
    assert not any(name.endswith("manifest.json") for name in fs.store)


def test_in_an_object_store():
    fs = fsspec.filesystem("memory")

    def names():
        # The method `find` would fail if a pass that was closed removed its parts meanwhile.
        return [name for name in list(fs.store) if name.startswith("/kept")]

    try:
        ds = dataset("memory://kept/here")
        it, _ = begun(ds)
        written = names()
        assert len(written) > 2
        # These copies look like the parts of another process that was killed.
        left = [f"{path.rpartition('/')[0]}/part-{'0' * 12}-{number:032x}.arrow" for number, path in enumerate(written)]
        for path, copied in zip(written, left, strict=True):
            fs.cp_file(path, copied)
        it.close()
        whole = fill(ds)
        assert set(left) <= set(names())
        for path in left:
            fs.store[path].created = datetime.now(tz=UTC) - timedelta(seconds=LEASE_S + 60)
        assert fill(ds) == whole
        assert not set(left) & set(names())
        np.testing.assert_array_equal(fill(ds), whole)
    finally:
        if fs.exists("/kept"):
            fs.rm("/kept", recursive=True)
