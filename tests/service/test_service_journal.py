"""The journal of the data service: what another scheduler reads of it."""

from __future__ import annotations

import pytest

from daskdist.errors import FileError
from daskdist.service.dispatcher.journal import Journal


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
