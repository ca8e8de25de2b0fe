"""Files that are not read, remote files, archives, and servers with and without requests for ranges."""

from __future__ import annotations

import contextlib
import http.server
import io
import re
import zipfile
from pathlib import Path

import dask
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from http_server import serving

import daskdist
from daskdist import Dataset, errors, read_parquet, read_text
from daskdist.storage.filesystem import Storage

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
    with pytest.raises(errors.FileError, match=r"ends in '\.csv' or '\.tsv' or '\.tab', also compressed; names"):
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
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            path = Path(self.translate_path(self.path))
            if match is None or not path.is_file():
                return super().send_head()
            content = path.read_bytes()
            start, stop = int(match[1]), min(int(match[2] or len(content) - 1) + 1, len(content))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            return io.BytesIO(content[start:stop])

    with serving(Handler) as url:
        yield url


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

    with serving(Handler) as url:
        yield url, sent


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
