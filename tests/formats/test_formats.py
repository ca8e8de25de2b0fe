"""Rules for all formats: each is tested, leaves out what cannot be read, and can come from another package."""

from __future__ import annotations

import gzip
import importlib
import logging
import os
import re
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import dask
import numpy as np
import pytest
from conftest import TESTS

import daskdist
from daskdist import Dataset, errors, read_files, read_parquet, read_text
from daskdist.formats import FORMATS, format_named, installed
from daskdist.storage.filesystem import Storage
from daskdist.testing import FormatLaws


def test_every_one_keeps_the_laws(monkeypatch):
    for path in TESTS.rglob("test_*.py"):
        if "FormatLaws" in path.read_text():
            monkeypatch.syspath_prepend(path.parent)
            importlib.import_module(path.stem)
    tested = {suite().make_format().name for suite in FormatLaws.__subclasses__()}
    assert set(FORMATS) - tested == set()


def test_an_unknown_name_is_an_error_with_the_known_names():
    with pytest.raises(
        errors.ArgumentError, match=r"no format 'parket'; there are .*'parquet'.*did you mean 'parquet'"
    ):
        format_named("parket")


# --- what cannot be read is left out ---


def test_files_that_cannot_be_listed_are_left_out_and_counted(parquet_files, caplog):
    paths = parquet_files(2, files=4)
    for path in paths[1:3]:
        Path(path).write_bytes(b"no table at all")
    ds = read_parquet(paths, "id").with_options(daskdist.Options(on_error="skip"))
    iterator = iter(ds)
    with caplog.at_level(logging.WARNING, "daskdist"):
        assert [int(x) for x in iterator] == [0, 1, 6, 7]
    stats = iterator.stats()
    assert (stats["num_elements"], stats["num_skipped"]) == (4, 2)
    assert stats["skipped_by_file"] == {paths[1]: 1, paths[2]: 1}
    assert sum(paths[1] in message for message in caplog.messages) == 1
    with pytest.raises(errors.FileError, match="part-1"):
        list(read_parquet(paths[:2], "id"))


def test_broken_rows_are_logged_once_per_file(tmp_path, caplog):
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\ntwo\n\xfe\n")
    (tmp_path / "b.txt").write_bytes(b"\xff\nthree")
    ds = read_text(tmp_path).with_options(daskdist.Options(on_error="skip"))
    iterator = iter(ds)
    with caplog.at_level(logging.WARNING, "daskdist"):
        assert list(iterator) == ["one", "two", "three"]
    assert iterator.stats()["skipped_by_file"] == {str(tmp_path / "a.txt"): 2, str(tmp_path / "b.txt"): 1}
    assert len([message for message in caplog.messages if "a.txt" in message]) == 1
    assert caplog.messages[-1] == "left out 3 elements in all"


LONG = b"x" * 5000


def written_with_a_long_record(name, directory):
    """Write a file of three records, the second of which is long."""
    values = [b"one", LONG, b"three"]
    if name.startswith("tfrecord"):
        Dataset.from_list(values).to_tfrecord(directory, compression="gzip" if name.endswith("gz") else None)
    elif name == "tar":
        Dataset.from_list([{"txt": value.decode()} for value in values]).to_webdataset(directory)
    else:
        contents = {
            "txt": b"one\n" + LONG + b"\nthree\n",
            "csv": b'a,b\n1,one\n2,"' + LONG.replace(b"xx", b"x\n") + b'"\n3,three\n',
            "jsonl": b'{"a": "one"}\n{"a": "' + LONG + b'"}\n{"a": "three"}\n',
            "json": b'[{"a": "one"}, {"a": "' + LONG + b'"}]',
        }
        content = contents[name.removesuffix(".gz")]
        directory.mkdir()
        (directory / f"a.{name}").write_bytes(gzip.compress(content) if name.endswith("gz") else content)


@pytest.mark.parametrize(
    "name",
    ["txt", "txt.gz", "csv", "csv.gz", "jsonl", "jsonl.gz", "json", "json.gz", "tfrecord", "tfrecord.gz", "tar"],
)
@pytest.mark.parametrize("split_bytes", [100, 16_000_000])
def test_a_record_that_is_longer_than_one_may_be(tmp_path, name, split_bytes):
    written_with_a_long_record(name, tmp_path / "data")
    (path,) = Storage().expand(tmp_path / "data", ("",))
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        whole = read_files(path)
        num_elements = len(list(whole))
        assert num_elements in (2, 3)
        with dask.config.set({"daskdist.max-record-bytes": 7000}):
            # Every record fits: its value has 5,000 bytes, but in some formats the record is larger.
            assert len(list(read_files(path))) == num_elements
        with dask.config.set({"daskdist.max-record-bytes": 2000}):
            report = rf"{re.escape(path)}.*at byte \d+.* of more than 2000 bytes, .*daskdist\.max-record-bytes"
            with pytest.raises(errors.FileError, match=report):
                list(whole)
            kept = list(whole.with_options(daskdist.Options(on_error="skip")))
            assert len(kept) == (0 if name.startswith("json.") or name == "json" else len(kept))
            assert len(kept) < num_elements


def test_a_line_without_end_does_not_take_all_memory(tmp_path):
    path = tmp_path / "a.txt.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(64):
            file.write(b"x" * 2**20)
    with dask.config.set({"daskdist.max-record-bytes": "1 MiB"}):
        tracemalloc.start()
        try:
            with pytest.raises(errors.FileError, match="of more than 1048576 bytes"):
                list(read_text(path))
            assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
        finally:
            tracemalloc.stop()


@pytest.mark.cluster
def test_broken_rows_are_skipped_on_a_cluster(tmp_path, on_cluster):
    for number in range(4):
        (tmp_path / f"{number}.txt").write_bytes(b"1\n\xff\n2\n")
    ds = read_text(tmp_path).map(int).with_options(daskdist.Options(on_error="skip")).batch(4)
    iterator = iter(on_cluster.distribute_dataset(ds))
    steps = [on_cluster.local_results(batch) for batch in iterator]
    assert iterator.stats()["skipped_by_file"] == {str(tmp_path / f"{number}.txt"): 1 for number in range(4)}
    assert sorted(int(x) for step in steps for part in step for x in np.asarray(part)) == [1] * 4 + [2] * 4


# --- formats of others ---

_THEIRS = """
from dataclasses import dataclass

import numpy as np

from daskdist import TensorSpec
from daskdist.core.block import Block
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import LONE


@dataclass(frozen=True)
class Counts:
    name = "counts"
    suffixes = (".counts",)
    is_splittable = False

    def guess(self, path, head):
        return head.startswith(b"counts")

    def spec(self, path):
        return ElementSpec(LONE, (TensorSpec((), "int64"),))

    def list_splits(self, path, file, first):
        return [Split(path, path, None, None, file, path)]

    def read(self, split):
        with open(split.payload) as file:
            _, number = file.read().split()
        return Block(LONE, [np.arange(int(number))], split.label)
"""


def test_a_format_that_is_installed_later_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    os.utime(tmp_path, (0, 0))
    assert "counts" not in installed()
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[daskdist.formats]\ncounts = theirs:Counts\n")
    assert installed()["counts"] == "theirs:Counts"


def test_a_format_of_others_is_installed_and_read(tmp_path):
    wheel = tmp_path / "theirs-1.0-py3-none-any.whl"
    info = "theirs-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("theirs.py", _THEIRS)
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/entry_points.txt", "[daskdist.formats]\ncounts = theirs:Counts\n")
        file.writestr(f"{info}/RECORD", "")
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(pip, check=True, timeout=100)
    (tmp_path / "a.counts").write_text("counts 3")
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import daskdist\n"
        f"print([int(x) for x in daskdist.read_files({str(tmp_path / 'a.counts')!r})])\n"
        f"print([int(x) for x in daskdist.read_files({str(tmp_path)!r}, 'counts').batch(2).unbatch()])\n"
        "try:\n    daskdist.read_files('x', 'count')\n"
        "except daskdist.errors.ArgumentError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=100)
    first, second, third = done.stdout.splitlines()
    assert first == second == "[0, 1, 2]"
    assert "'counts'" in third
    assert "did you mean 'counts'" in third


@pytest.mark.parametrize("policy", ["FILE", "DATA", "OFF", "AUTO"])
def test_a_broken_file_is_skipped_for_replicas(parquet_files, policy):
    paths = parquet_files(4, files=4)
    Path(paths[1]).write_bytes(b"no table at all")
    options = daskdist.Options(on_error="skip", auto_shard_policy=policy.lower())
    ds = read_parquet(paths, "id").batch(4).with_options(options)
    strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    distributed = strategy.distribute_dataset(ds)
    assert distributed.cardinality() == daskdist.data.UNKNOWN_CARDINALITY
    iterator = iter(distributed)
    actual = [int(x) for batch in iterator for part in strategy.local_results(batch) for x in part]
    assert sorted(actual) == [0, 1, 2, 3, *range(8, 16)]
    assert iterator.stats()["skipped_by_file"] == {paths[1]: 1}
    assert iterator.stats()["num_elements"] > 0
