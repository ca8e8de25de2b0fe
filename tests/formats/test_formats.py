"""Rules for all formats: each is tested, is recognised by its files, and can come from another package."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import importlib
import io
import logging
import os
import re
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from pathlib import Path

import dask
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import TESTS
from fsspec.implementations.memory import MemoryFileSystem

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


def test_a_format_is_recognised_by_its_file(parquet_files, tmp_path):
    (path,) = parquet_files(3)
    assert [int(row["id"]) for row in read_files(path)] == [0, 1, 2]
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert list(read_files(tmp_path / "a.txt")) == ["one", "two"]
    (tmp_path / "a.strange").write_bytes(b"\x00\x01")
    with pytest.raises(errors.FileError, match=r"a\.strange: the format is not recognised; give format="):
        read_files(tmp_path / "a.strange")


def test_files_of_other_formats_in_a_directory_are_not_read(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.csv").write_text("1,2\n")
    (tmp_path / ".hidden.txt").write_text("no\n")
    assert list(read_text(tmp_path)) == ["one"]


HIDDEN = ["_temporary/0/x.txt", "_delta_log/x.txt", "a/_x/y/x.txt", ".cache/x.txt", "_x.txt", ".x.txt", "_k=1/x.txt"]


@pytest.fixture(params=["", "memory://hidden"])
def with_hidden(request, tmp_path):
    """Write two files of one line and many hidden ones into a directory whose own name is hidden, and return it."""
    root = f"{request.param or tmp_path}/_data"
    fs, inner = fsspec.core.url_to_fs(root)
    for name in ("a/k=1/x.txt", "x.txt", *HIDDEN):
        fs.makedirs(f"{inner}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{inner}/{name}", f"{name}\n".encode())
    yield root
    fs.rm(inner, recursive=True)


def test_hidden_files_are_skipped_unless_they_are_named(with_hidden):
    def lines(pattern):
        return [str(line) for line in daskdist.read_text(f"{with_hidden}{pattern}")]

    assert lines("") == lines("/") == lines("/**/*.txt") == ["a/k=1/x.txt", "x.txt"]
    assert lines("/*.txt") == lines("/*") == ["x.txt"]
    assert lines("/_*/*.txt") == lines("/[_]*/*.txt") == ["_delta_log/x.txt", "_k=1/x.txt"]
    assert lines("/_temporary") == lines("/_temporary/0/*") == lines("/_t*/**/*.txt") == ["_temporary/0/x.txt"]
    assert lines("/_x.txt") == lines("/_*.txt") == ["_x.txt"]
    assert lines("/.x.txt") == lines("/.*.txt") == [".x.txt"]
    with pytest.raises(errors.FileError, match=r"no file matches"):
        lines("/*/*/*.csv")


@pytest.mark.parametrize(
    "name", ["_SUCCESS", "_temporary/0/part-0.parquet", "_delta_log/0.json", ".crc/part-0.parquet"]
)
def test_other_files_of_spark_are_not_read(tmp_path, name):
    Dataset.range(3).to_parquet(tmp_path / "table")
    other = tmp_path / "table" / name
    other.parent.mkdir(exist_ok=True, parents=True)
    other.write_bytes((tmp_path / "table" / "part-00000.parquet").read_bytes())
    for place in (tmp_path / "table", tmp_path, f"{tmp_path}/*/*", f"{tmp_path}/**/*"):
        assert len(daskdist.read_parquet(place)) == len(daskdist.read_files(place)) == 3
    with pytest.raises(errors.FileError, match=r"has none whose name ends in .*begin with '_' or '.'.*are skipped"):
        daskdist.read_csv(tmp_path)


class NoCredentialsError(Exception):
    """An error like botocore's, whose base is not one of Python's errors for files."""

    __module__ = "botocore.exceptions"


class EndpointConnectionError(NoCredentialsError):
    __module__ = "botocore.exceptions"


class Locked(MemoryFileSystem):
    """A file system that fails like its library when files are listed; for some names, only when they are read."""

    protocol = "locked"
    store, pseudo_dirs = {}, [""]

    def info(self, path, **options):
        if "late" in path:
            return {"name": self._strip_protocol(path), "size": 5, "type": "file"}
        raise (PermissionError("Forbidden") if "no-entry" in path else NoCredentialsError("Unable to locate"))

    def open(self, path, mode="rb", **options):
        raise EndpointConnectionError("Could not connect")


def test_errors_of_libraries_of_remote_files_say_what_to_set():
    fsspec.register_implementation("locked", Locked, clobber=True)
    for path in ("locked://a.txt", "locked://no-entry.txt"):
        with pytest.raises(errors.FileError, match=rf"{path}.*(locate|Forbidden); give credentials by storage_options"):
            read_text(path)
    with pytest.raises(errors.FileError, match=r"locked://late.txt.*: Could not connect; check that .* the endpoint"):
        list(read_text("locked://late.txt"))


def test_files_in_an_archive(tmp_path):
    archive = tmp_path / "texts.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("b.txt", "three\n")
        file.writestr("a.txt", "one\ntwo\n")
    assert list(read_text(f"zip://*.txt::{archive}")) == ["one", "two", "three"]
    assert list(read_text(f"zip://b.txt::{archive}")) == ["three"]


@pytest.fixture
def served(tmp_path):
    """Return the URL of a server of the test's directory, which supports requests for ranges of bytes."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def send_head(self):
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            path = Path(self.translate_path(self.path))
            if found is None or not path.is_file():
                return super().send_head()
            content = path.read_bytes()
            start, stop = int(found[1]), min(int(found[2] or len(content) - 1) + 1, len(content))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            return io.BytesIO(content[start:stop])

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # The client that fsspec keeps warns.
def test_files_of_a_web_server(parquet_files, tmp_path, served):
    parquet_files(5, files=2, row_group=2)
    ids = [f"{served}/data/part-{number}.parquet" for number in range(2)]
    assert sorted(int(x) for x in read_parquet(ids, "id")) == list(range(10))
    (tmp_path / "a.txt").write_text("\n".join(map(str, range(1000))))
    with dask.config.set({"daskdist.split-bytes": 500}):
        assert list(read_text(f"{served}/a.txt")) == list(map(str, range(1000)))
    with pytest.raises(errors.FileError, match=r"none\.txt"):
        read_text(f"{served}/none.txt")


@pytest.fixture(params=["no ranges", "ranges refused", "no ranges and no sizes"])
def served_whole(request, tmp_path):
    """Return the URL of a server of the test's directory that sends whole files only, and a list of the sent files."""
    sent = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def do_HEAD(self):
            if request.param == "no ranges and no sizes":
                self.send_error(405)
            else:
                super().do_HEAD()

        def do_GET(self):
            content = (tmp_path / self.path[1:]).read_bytes()
            self.send_response(200)
            self.end_headers()
            # Clients that need no more of the file disconnect.
            with contextlib.suppress(ConnectionError):
                self.wfile.write(content)
                sent.append(self.path[1:])

        def end_headers(self):
            if request.param == "ranges refused":
                self.send_header("Accept-Ranges", "none")
            if request.param != "no ranges and no sizes" and self.command == "GET":
                self.send_header("Content-Length", str((tmp_path / self.path[1:]).stat().st_size))
            super().end_headers()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", sent
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # The client that fsspec keeps warns.
def test_a_web_server_that_serves_no_ranges(parquet_files, tmp_path, served_whole):
    url, sent = served_whole
    # The file is larger than one read of fsspec.
    lines = [f"{k} {'x' * 90}" for k in range(80_000)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    with dask.config.set({"daskdist.split-bytes": "2 MiB"}):
        assert list(read_text(f"{url}/a.txt")) == lines
    # Clients that requested ranges may have received the whole file before they disconnected.
    assert len(sent) <= 8
    parquet_files(5, files=1, row_group=2)
    assert [int(x) for x in read_parquet(f"{url}/data/part-0.parquet", "id")] == list(range(5))
    (tmp_path / "b.txt").write_text("\n".join(lines))
    message = r"b\.txt: the server does not support range requests.*whole-file-bytes, 5 MiB"
    with dask.config.set({"daskdist.whole-file-bytes": "5 MiB"}), pytest.raises(errors.FileError, match=message):
        list(read_text(f"{url}/b.txt"))


def test_storage_options_are_used_and_not_shown(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    inside = tmp_path / "inside"
    # This file system has an option: the directory below which all paths are.
    ds = read_text("dir://a.txt", storage_options={"path": str(tmp_path), "target_protocol": "file"})
    assert list(ds) == ["one"]
    assert str(tmp_path) not in repr(Storage({"path": str(tmp_path)}))
    with pytest.raises(errors.FileError):
        read_text("dir://a.txt", storage_options={"path": str(inside), "target_protocol": "file"})


def test_options_of_wrong_kinds(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    with pytest.raises(errors.ArgumentError, match="storage_options is int; give a dict by name"):
        read_text(tmp_path / "a.txt", storage_options=5)
    with pytest.raises(errors.ArgumentError, match="read_files: format is 5; give a format, its name, or None"):
        read_files(tmp_path / "a.txt", 5)


# --- what cannot be read is left out ---


def test_files_that_cannot_be_listed_are_left_out_and_counted(parquet_files, caplog):
    paths = parquet_files(2, files=4)
    Path(paths[1]).write_bytes(b"no table at all")
    ds = read_parquet(paths, "id").with_options(daskdist.Options(on_error="skip"))
    Path(paths[2]).unlink()
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
            told = rf"{re.escape(path)}.*at byte \d+.* of more than 2000 bytes, .*daskdist\.max-record-bytes"
            with pytest.raises(errors.FileError, match=told):
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
    assert installed()["counts"].where == "theirs:Counts"


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
    found = [int(x) for batch in iterator for part in strategy.local_results(batch) for x in part]
    assert sorted(found) == [0, 1, 2, 3, *range(8, 16)]
    assert iterator.stats()["skipped_by_file"] == {paths[1]: 1}
    assert iterator.stats()["num_elements"] > 0


def test_columns_have_the_order_of_the_first_file(tmp_path):
    for number, names in enumerate(["ba", "ab"]):
        table = pa.table({name: [10 * number + (name == "b")] for name in names})
        pq.write_table(table, tmp_path / f"{number}.parquet")
        np.savez(tmp_path / f"{number}.npz", **{name: table[name].to_numpy() for name in names})
        table.to_pandas().to_csv(tmp_path / f"{number}.csv", index=False)
        table.to_pandas().to_json(tmp_path / f"{number}.jsonl", orient="records", lines=True)
        with pa.ipc.new_file(tmp_path / f"{number}.arrow", table.schema) as writer:
            writer.write_table(table)
    readers = [daskdist.read_parquet, daskdist.read_npy, daskdist.read_csv, daskdist.read_json, daskdist.read_arrow]
    for reader in readers:
        ds = reader(tmp_path)
        assert [list(map(int, row.values())) for row in ds] == [[1, 0], [11, 10]], reader
        assert [list(map(int, row)) for row in ds.map(lambda row: np.stack(list(row.values())))] == [[1, 0], [11, 10]]


def test_files_of_other_formats_in_a_directory_are_told(tmp_path, caplog):
    for name, text in {"a.csv": "x\n1\n", "b.json": '{"x": 2}\n', "c.csv": "x\n3\n", "notes.md": "none\n"}.items():
        (tmp_path / name).write_text(text)
    assert [int(row["x"]) for row in read_files(str(tmp_path))] == [1, 3]
    (message,) = caplog.messages
    assert message == (
        f"read_files: the format is csv, as that of the first file; left out 1 file of other formats, such as "
        f"{tmp_path / 'b.json'}; give format= to choose one"
    )
    caplog.clear()
    assert [int(row["x"]) for row in read_files(str(tmp_path), "json")] == [2]
    (tmp_path / "b.json").unlink()
    assert len(list(read_files(str(tmp_path)))) == 2
    assert not caplog.messages
