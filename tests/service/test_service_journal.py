"""The journal of the data service: what another scheduler reads of it."""

from __future__ import annotations

import pytest

from daskdist.errors import FileError
from daskdist.service.dispatcher.journal import Journal


def files(path):
    """Return the files of a journal, in order."""
    return sorted(path.iterdir())


def test_changes_are_read_by_the_next_scheduler(tmp_path):
    journal = Journal(str(tmp_path / "new"))
    assert journal.load() == {}
    journal.write({"a": 1, "b": 2})
    journal.write({"a": None, "c": 3})
    assert Journal(str(tmp_path / "new")).load() == {"b": 2, "c": 3}
    # Loading has written all changes as one file, after which new ones are added.
    again = Journal(str(tmp_path / "new"))
    again.load()
    again.write({"d": 4})
    assert Journal(str(tmp_path / "new")).load() == {"b": 2, "c": 3, "d": 4}
    assert len(files(tmp_path / "new")) == 1


@pytest.mark.parametrize("num_bytes", [0, 5, 12, 40])
def test_an_incomplete_last_file_is_skipped(tmp_path, caplog, num_bytes):
    journal = Journal(str(tmp_path))
    journal.write({"a": 1})
    journal.write({"a": 2, "b": "x" * 100})
    torn = files(tmp_path)[-1]
    torn.write_bytes(torn.read_bytes()[:num_bytes])
    assert Journal(str(tmp_path)).load() == {"a": 1}
    assert "which is incomplete" in caplog.text
    assert Journal(str(tmp_path)).load() == {"a": 1}


def test_another_file_that_is_damaged_is_an_error(tmp_path):
    journal = Journal(str(tmp_path))
    for number in range(3):
        journal.write({number: number})
    damaged = files(tmp_path)[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(FileError, match="damaged file"):
        Journal(str(tmp_path)).load()


def test_many_changes_are_few_files(tmp_path):
    journal = Journal(str(tmp_path))
    for number in range(1000):
        journal.write({"a": number})
    assert len(files(tmp_path)) <= 65
    assert Journal(str(tmp_path)).load() == {"a": 999}


def test_other_file_systems():
    journal = Journal("memory://journal/of/tests")
    journal.write({"a": 1})
    assert Journal("memory://journal/of/tests").load() == {"a": 1}
