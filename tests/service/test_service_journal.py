"""The journal of the data service: what another scheduler reads of it."""

from __future__ import annotations

import asyncio
import os
import pickle
import stat
import threading

import pytest
from distributed import Scheduler

from daskdist.errors import FileError
from daskdist.service.dispatcher.journal import Journal
from daskdist.service.dispatcher.scheduler_plugin import ServiceOnScheduler


def test_changes_are_read_by_the_next_scheduler(tmp_path):
    journal = Journal(str(tmp_path / "new"))
    assert journal.load() == {}
    journal.write({("job", "a"): 1, ("job", "b"): 2})
    journal.write({("job", "a"): None, ("job", "c"): 3, ("job", "never written"): None})
    again = Journal(str(tmp_path / "new"))
    assert again.load() == {("job", "b"): 2, ("job", "c"): 3}
    again.write({("job", "b"): 4})
    assert Journal(str(tmp_path / "new")).load() == {("job", "b"): 4, ("job", "c"): 3}
    assert len(list((tmp_path / "new").iterdir())) == 2


@pytest.mark.parametrize("num_bytes", [0, 5, 40])
def test_a_damaged_file_is_an_error(tmp_path, num_bytes):
    Journal(str(tmp_path)).write({"a": "x" * 100})
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(FileError, match="damaged file"):
        Journal(str(tmp_path)).load()


@pytest.mark.parametrize("content", [(("job", "a"), {"number": 0}), (1, ("job", "a"), {"number": 0}), 7])
def test_a_file_of_another_version_is_an_error(tmp_path, content):
    Journal(str(tmp_path)).write({("job", "a"): {"number": 0}})
    (path,) = tmp_path.iterdir()
    path.write_bytes(pickle.dumps(content))

    async def start():
        async with Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler:
            await ServiceOnScheduler(str(tmp_path)).start(scheduler)

    with pytest.raises(FileError, match=rf"of another version of daskdist, {path}.*with that version, or delete"):
        asyncio.run(start())
    # Nothing of it is overwritten.
    assert pickle.loads(path.read_bytes()) == content


def test_a_file_that_a_killed_process_has_not_finished_is_ignored(tmp_path):
    Journal(str(tmp_path)).write({"a": 1})
    (path,) = tmp_path.iterdir()
    (tmp_path / f".{path.name}.{'0' * 32}.tmp").write_bytes(b"unfinished")
    assert Journal(str(tmp_path)).load() == {"a": 1}


def test_other_file_systems():
    journal = Journal("memory://journal/of/tests")
    journal.write({"a": 1, "b": 2})
    journal.write({"a": None})
    assert Journal("memory://journal/of/tests").load() == {"b": 2}


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_write_comes_after_one_that_is_under_way(tmp_path, monkeypatch, fails):
    begun, may_go_on, write = threading.Event(), threading.Event(), Journal.write

    def slow_write(journal, changes):
        if not begun.is_set():
            begun.set()
            may_go_on.wait(10)
            if fails:
                raise FileError("the disk is full")
        write(journal, changes)

    async def close_while_writing():
        async with Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler:
            service = ServiceOnScheduler(str(tmp_path))
            await service.start(scheduler)
            monkeypatch.setattr(service.dispatcher, "_changed", {("job", "a"): "old", ("job", "b"): "old"})
            service._has_changes.set()
            await asyncio.to_thread(begun.wait, 10)
            service.dispatcher._changed[("job", "a")] = "new"
            closing = asyncio.ensure_future(service.before_close())
            # Time in which a last write that does not wait would end.
            await asyncio.sleep(0.2)
            may_go_on.set()
            await closing

    monkeypatch.setattr(Journal, "write", slow_write)
    asyncio.run(close_while_writing())
    assert Journal(str(tmp_path)).load() == {("job", "a"): "new", ("job", "b"): "old"}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_only_the_user_can_read_the_state(tmp_path, umask):
    before = os.umask(umask)
    try:
        journal = Journal(str(tmp_path / "above" / "state"))
        journal.write({"a": 1, "b": 2})
        journal.write({"a": 3})
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "above" / "state").iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE((tmp_path / "above" / "state").stat().st_mode) == 0o700
    assert Journal(str(tmp_path / "above" / "state")).load() == {"a": 3, "b": 2}
