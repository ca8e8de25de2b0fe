"""Passwords of URLs and storage options appear in no message, log, repr or checkpoint."""

from __future__ import annotations

import logging
import pickle
import traceback

import pytest

import daskdist
from daskdist import Checkpoint, CheckpointManager, Dataset, errors

SECRET = "hunter2"
# Port 9 of this machine refuses connections.
FTP = f"ftp://me:{SECRET}@127.0.0.1:9/x"
OPTIONS = {"secret": SECRET, "password": SECRET}


def failing(name, tmp_path):
    checkpoint = Checkpoint(epoch=1)
    calls = {
        "read_text over http": lambda: daskdist.read_text(f"http://me:{SECRET}@127.0.0.1:9/x.txt"),
        "read_parquet over ftp": lambda: daskdist.read_parquet(FTP),
        "an option": lambda: daskdist.read_text("memory://nothing/*.txt", storage_options=OPTIONS),
        "save": lambda: Dataset.range(3).save(FTP),
        "cache": lambda: list(Dataset.range(3).cache(FTP)),
        "Checkpoint.save": lambda: checkpoint.save(FTP),
        "Checkpoint.restore": lambda: checkpoint.restore(FTP),
        "CheckpointManager": lambda: CheckpointManager(FTP).save(checkpoint),
    }
    return calls[name]


@pytest.mark.parametrize(
    "name",
    [
        "read_text over http",
        "read_parquet over ftp",
        "an option",
        "save",
        "cache",
        "Checkpoint.save",
        "Checkpoint.restore",
        "CheckpointManager",
    ],
)
def test_errors_have_no_passwords(name, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "daskdist"), pytest.raises(errors.FileError) as raised:
        failing(name, tmp_path)()
    shown = "".join(traceback.format_exception(raised.value.with_traceback(None)))
    assert "127.0.0.1" in shown or "memory://" in shown
    assert SECRET not in shown + caplog.text
    again = pickle.loads(pickle.dumps(raised.value))
    assert (type(again), str(again)) == (type(raised.value), str(raised.value))


def test_reprs_have_no_passwords(tmp_path):
    (tmp_path / "a.txt").write_text("a\n")
    ds = daskdist.read_text(str(tmp_path / "a.txt"), storage_options={"auto_mkdir": SECRET}).cache(FTP)
    manager = CheckpointManager(FTP, storage_options=OPTIONS)
    for shown in (repr(ds), ds.explain(), repr(manager), str(vars(manager)["_storage"])):
        assert SECRET not in shown
    assert "ftp://me:***@127.0.0.1:9/x" in repr(ds)
    assert "ftp://me:***@127.0.0.1:9/x" in repr(manager)


def test_logs_have_no_passwords(caplog):
    with caplog.at_level(logging.INFO, "daskdist"):
        logging.getLogger("daskdist").info("read %s and %d more", FTP, 3)
        logging.getLogger("daskdist").info("100 % of memory://x")
    assert [record.getMessage() for record in caplog.records] == [
        "read ftp://me:***@127.0.0.1:9/x and 3 more",
        "100 % of memory://x",
    ]


def test_checkpoints_have_no_passwords(tmp_path):
    iterator = iter(Dataset.range(3).cache(FTP.replace("ftp", "memory")))
    Checkpoint(epoch=1).save(tmp_path / "a", storage_options={"auto_mkdir": True})
    assert SECRET.encode() not in (tmp_path / "a").read_bytes()
    assert SECRET not in str(iterator.state_dict())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("http://host:80/x@y", "http://host:80/x@y"),
        ("http://me@host/x", "http://me@host/x"),
        ("http://:secret@host, ftp://a:b@c/d", "http://:***@host, ftp://a:***@c/d"),
        ("'gs://a:b@c' and more: d@e", "'gs://a:***@c' and more: d@e"),
    ],
)
def test_only_passwords_are_replaced(text, shown):
    assert errors.without_passwords(text) == shown
