"""Secrets of URLs and storage options appear in no message, log, repr or checkpoint."""

from __future__ import annotations

import logging
import pickle
import traceback

import dask
import pytest

import daskdist
from daskdist import Checkpoint, CheckpointManager, Dataset, errors
from daskdist.url_secrets import without_secrets, without_signatures

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
    assert "ftp://***@127.0.0.1:9/x" in repr(ds)
    assert "ftp://***@127.0.0.1:9/x" in repr(manager)


def test_logs_have_no_passwords(caplog):
    with caplog.at_level(logging.INFO, "daskdist"):
        logging.getLogger("daskdist").info("read %s and %d more", FTP, 3)
        logging.getLogger("daskdist").info("100 % of memory://x")
    assert [record.getMessage() for record in caplog.records] == [
        "read ftp://***@127.0.0.1:9/x and 3 more",
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
        # Neither users nor queries.
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("s3://bucket/a?.csv, s3://b/a?[12]/year=2024/b.csv", "s3://bucket/a?.csv, s3://b/a?[12]/year=2024/b.csv"),
        ("s3://arn:aws:s3:us-east-1:1:accesspoint/x@y", "s3://arn:aws:s3:us-east-1:1:accesspoint/x@y"),
        ("http://host:80/x@y and http://[::1]:80/x@y", "http://host:80/x@y and http://[::1]:80/x@y"),
        (
            "github://owner:name@main/x abfs://files@account.host/x",
            "github://owner:name@main/x abfs://files@account.host/x",
        ),
        ("/x/y?sig=1@b a?b=c@d file:///a?b=c@d", "/x/y?sig=1@b a?b=c@d file:///a?b=c@d"),
        # Users and passwords, with any characters.
        ("http://me@host/x", "http://***@host/x"),
        ("http://:secret@host, ftp://a:b@c/d", "http://***@host, ftp://***@c/d"),
        ("'gs://a:b@c' and more: d@e", "'gs://***@c' and more: d@e"),
        ("ftp://me:a@b@host/x", "ftp://***@host/x"),
        ("ftp://me:a/b@host/x?c=d", "ftp://***@host/x?c=***"),
        ("ftp://me:a?b=c#d@host/x", "ftp://***@host/x"),
        # Queries: the names are shown.
        ("http://host/x?sig=a&se=b: damaged", "http://host/x?sig=***&se=***: damaged"),
        ("http://host/x?sig=a:12: damaged", "http://host/x?sig=***:12: damaged"),
        ("(http://host/x?sig=a), [http://b?c=d;e=f]", "(http://host/x?sig=***), [http://b?c=***;e=***]"),
        ("\"http://host/x?sig=a'b c\" and 'http://host/x?a\"b'", "\"http://host/x?sig=***\" and 'http://host/x?***'"),
        ("http://host/x?a=b#c=d", "http://host/x?a=***"),
        # Chains.
        ("zip://a?.csv::https://u:p@h/x?sig=1", "zip://a?.csv::https://***@h/x?sig=***"),
        ("simplecache::zip://a@b::https://t@h/x?sig=1: no", "simplecache::zip://***@b::https://***@h/x?sig=***: no"),
    ],
)
def test_only_secrets_are_replaced(text, shown):
    assert without_secrets(text) == shown
    assert without_secrets(shown) == shown


@pytest.mark.parametrize(
    ("urls", "identity"),
    [
        (["http://h/x?id=7&token=a", "http://t@h/x?id=7&token=b", "http://h/x?id=7"], "http://h/x?id=7"),
        (["https://h/x?sv=1&sr=b&sig=a&se=2", "https://h/x?sig=b&sp=r"], "https://h/x"),
        (["https://h/x?X-Amz-Date=1&X-Amz-Signature=2&versionId=3"], "https://h/x?versionId=3"),
        (["zip://a::https://u:p@h/x?sig=1", "zip://a::https://u:q@h/x?sig=2"], "zip://a::https://u@h/x"),
        (["https://h/x?Expires=1&Signature=2&Key-Pair-Id=3&se=4", "https://h/x?se=4"], "https://h/x?se=4"),
        # What differs between files is kept.
        (["http://h/x?policy=1&expires=2&se=3"], "http://h/x?policy=1&expires=2&se=3"),
        (["ftp://anna:p@h/x", "ftp://anna:q@h/x"], "ftp://anna@h/x"),
        (["abfs://files@account.host/x"], "abfs://files@account.host/x"),
        (["http://h/x?st=1&page_token=2&author=3"], "http://h/x?st=1&page_token=2&author=3"),
        (["/x?token=1", "/x?token=1"], "/x?token=1"),
        (["file:///x?token=1@b"], "file:///x?token=1@b"),
    ],
)
def test_the_identity_of_a_url(urls, identity):
    assert without_signatures(urls) == [identity] * len(urls)


def test_addresses_of_schedulers_have_no_users(monkeypatch):
    for address in (f"tcp://me:{SECRET}@127.0.0.1:9", f"tls://{SECRET}@127.0.0.1", f"me:{SECRET}@127.0.0.1:9"):
        with pytest.raises(errors.ArgumentError, match=r"'127\.0\.0\.1(:9)?' has a user or a password") as raised:
            daskdist.ClusterResolver(address)
        assert SECRET not in "".join(traceback.format_exception(raised.value))
        with (
            dask.config.set({"scheduler-address": address}),
            pytest.raises(errors.ArgumentError, match=r"scheduler-address.* has a user or a password"),
        ):
            daskdist.MultiWorkerMirroredStrategy(daskdist.ClusterResolver())
        with pytest.raises(errors.ArgumentError, match="has a user or a password"):
            daskdist.data.experimental.service.distribute("parallel_epochs", address)(Dataset.range(3))
