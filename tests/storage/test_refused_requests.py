"""Servers that refuse requests, for a moment or for good, and the number of requests that files take."""

from __future__ import annotations

import collections
import contextlib
import http.server
import io
import itertools
import threading
import time

import dask
import fsspec
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from http_server import serving

import daskdist
from daskdist import Options, errors

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # The client that fsspec keeps warns.


class Server:
    """Files of a server that counts requests, and answers some of them as ``refuse(name, number)`` says."""

    def __init__(self):
        self.files, self.requests, self.tags = {}, collections.Counter(), {}
        self.refuse = lambda name, number: None
        self.lock = threading.Lock()

    def handler(self):
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self):
                self.do_GET()

            def do_GET(self):
                name = self.path[1:]
                with server.lock:
                    server.requests[name] += 1
                    status = server.refuse(name, server.requests[name])
                data, headers = server.files.get(name, b""), {}
                if status == "closed":
                    self.close_connection = True
                    return
                if status == "cut":
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    if self.command == "GET":
                        self.wfile.write(data[: len(data) // 2])
                    self.close_connection = True
                    return
                if status is None and name not in server.files:
                    status = 404
                if status is not None:
                    data = b""
                elif self.headers.get("Range"):
                    start, _, stop = self.headers["Range"].partition("=")[2].partition("-")
                    status, whole = 206, len(data)
                    data = data[int(start) : int(stop or whole) + 1]
                    headers["Content-Range"] = f"bytes {start}-{int(start) + len(data) - 1}/{whole}"
                self.send_response(status or 200)
                if name in server.tags:
                    self.send_header("ETag", server.tags[name])
                for header, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(header, value)
                self.end_headers()
                if self.command == "GET":
                    with contextlib.suppress(ConnectionError):
                        self.wfile.write(data)

        return Handler


@pytest.fixture
def server():
    served = Server()
    with serving(served.handler()) as url, dask.config.set({"daskdist.request-pauses": [0.01, 0.02, 0.03]}):
        served.url = url
        yield served


def csv_of(k):
    return b"x\n" + b"".join(b"%d\n" % (10 * k + i) for i in range(10))


def parquet_of(k):
    file = io.BytesIO()
    pq.write_table(pa.table({"x": range(10 * k, 10 * k + 10)}), file)
    return file.getvalue()


def hdf5_of(k):
    file = io.BytesIO()
    with h5py.File(file, "w") as content:
        content["x"] = np.arange(10 * k, 10 * k + 10)
    return file.getvalue()


def npy_of(k):
    file = io.BytesIO()
    np.save(file, np.arange(10 * k, 10 * k + 10))
    return file.getvalue()


FORMATS = {
    "csv": (csv_of, daskdist.read_csv),
    "parquet": (parquet_of, daskdist.read_parquet),
    "h5": (hdf5_of, daskdist.read_hdf5),
    "npy": (npy_of, daskdist.read_npy),
    "txt": (lambda k: csv_of(k)[2:], daskdist.read_text),
    "jsonl": (lambda k: b"".join(b'{"x": %d}\n' % (10 * k + i) for i in range(10)), daskdist.read_json),
}


@pytest.fixture(params=FORMATS)
def served(request, server):
    """Serve three files with the numbers 0 to 29; return the server, their names, and a reader of them."""
    write, read = FORMATS[request.param]
    names = [f"{k}.{request.param}" for k in range(3)]
    server.files = {name: write(k) for k, name in enumerate(names)}
    return server, names, lambda: read([f"{server.url}/{name}" for name in names])


def numbers_of(elements):
    return [int(element["x"] if isinstance(element, dict) else element) for element in elements]


@pytest.mark.parametrize("status", [403, 500, 503, 401])
def test_a_server_that_refuses_is_an_error_and_no_damage(served, status):
    server, names, read = served
    ds = read().with_options(Options(on_error="skip"))
    server.refuse = lambda name, number: status if name == names[1] else None
    iterator, numbers, raised = iter(ds), [], []
    while len(raised) < 3:
        try:
            numbers += numbers_of([next(iterator)])
        except StopIteration:
            break
        except errors.FileError as error:
            raised.append(error)
    assert numbers == [*range(10), *range(20, 30)]
    assert [type(error) for error in raised] == [errors.FileError]
    assert names[1] in str(raised[0])
    assert str(status) in str(raised[0])


@pytest.mark.parametrize("status", [403, 503])
def test_a_server_that_refuses_from_the_beginning(served, status):
    server, names, read = served
    server.refuse = lambda name, number: status
    with pytest.raises(errors.FileError, match=rf"{names[0]}.*{status}"):
        read()
    server.refuse = lambda name, number: 404
    with pytest.raises(errors.FileError, match=rf"no such file: .*{names[0]}"):
        read()


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, "closed", "cut"])
def test_requests_that_are_refused_for_a_moment_are_made_again(served, status):
    server, _names, read = served
    # Every request is refused twice.
    server.refuse = lambda name, number: status if number % 3 else None
    with dask.config.set({"daskdist.request-pauses": [0.001] * 8}):
        assert numbers_of(read()) == list(range(30))


def test_other_refusals_are_not_asked_again(server):
    server.files["a.csv"] = csv_of(0)
    server.refuse = lambda name, number: 403
    with pytest.raises(errors.FileError, match=r"a\.csv.*403"):
        daskdist.read_csv(f"{server.url}/a.csv")
    assert server.requests["a.csv"] <= 2


def test_pauses_grow(server):
    server.files["a.txt"] = b"1\n"
    times = []
    server.refuse = lambda name, number: times.append(time.monotonic()) or 503
    pauses = [0.02, 0.1, 0.5]
    with dask.config.set({"daskdist.request-pauses": pauses}), pytest.raises(errors.FileError, match="503"):
        daskdist.read_text(f"{server.url}/a.txt")
    gaps = [after - before for before, after in itertools.pairwise(times)]
    for pause in pauses:
        assert any(gap >= pause for gap in gaps)
    assert max(times) - min(times) >= sum(pauses)


def test_large_files_are_read_by_ranges_that_are_asked_for_again(server):
    lines = [f"{k} {'x' * 90}" for k in range(60_000)]
    server.files["a.txt"] = "\n".join(lines).encode()
    server.refuse = lambda name, number: 503 if number % 2 else None
    # Requests of several threads are mixed.
    with dask.config.set({"daskdist.split-bytes": "2 MiB", "daskdist.request-pauses": [0.001] * 20}):
        assert list(daskdist.read_text(f"{server.url}/a.txt")) == lines


def test_small_files_take_few_requests(served):
    server, _names, read = served
    assert numbers_of(read()) == list(range(30))
    assert max(server.requests.values()) <= 3
    server.requests.clear()
    # One request tells whether the file is still the same.
    ds = read()
    assert numbers_of(itertools.chain(ds, ds)) == [*range(30)] * 2
    assert max(server.requests.values()) <= 4


def test_other_content_of_a_small_file_is_noticed(served):
    server, names, read = served
    server.tags = dict.fromkeys(names, '"1"')
    ds = read()
    assert numbers_of(ds) == list(range(30))
    server.files[names[1]], server.tags[names[1]] = server.files[names[2]], '"2"'
    with pytest.raises(errors.FileError, match=rf"{names[1]}.*changed since it was listed"):
        list(ds)
    assert numbers_of(read()) == [*range(10), *range(20, 30), *range(20, 30)]


class Failing(MemoryFileSystem):
    """A file system that raises errors of its own."""

    protocol = "failing"
    store, pseudo_dirs = {}, [""]
    error = None

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("failing://", "memory://"))

    def _open(self, path, mode="rb", **options):
        if Failing.error is not None and path.endswith("1.csv"):
            raise Failing.error
        return super()._open(path, mode, **options)


class TokenError(Exception):
    """An error of no library that is known."""


@pytest.mark.parametrize("error", [TokenError("expired"), RuntimeError("expired"), KeyError("expired")], ids=repr)
def test_errors_of_any_file_system_are_no_damage(error, monkeypatch):
    fsspec.register_implementation("failing", Failing, clobber=True)
    for number in range(3):
        fsspec.filesystem("failing").pipe(f"/t/{number}.csv", b"x\n1\n2\n")
    rows = daskdist.read_csv([f"failing://t/{number}.csv" for number in range(3)])
    assert len(list(rows)) == 6
    monkeypatch.setattr(Failing, "error", error)
    with pytest.raises(errors.FileError, match=r"1\.csv: cannot be read: .*expired") as raised:
        list(rows.with_options(Options(on_error="skip")))
    assert not isinstance(raised.value, errors.DamagedFileError)


class Busy(MemoryFileSystem):
    """A file system whose requests are refused for a moment, as by Google's library."""

    protocol = "busy"
    store, pseudo_dirs = {}, [""]
    refused = ()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("busy://", "memory://"))

    def info(self, path, **options):
        self._refuse("info")
        return super().info(path, **options)

    def open(self, path, mode="rb", **options):
        self._refuse("open")
        return super().open(path, mode, **options)

    def glob(self, path, **options):
        self._refuse("glob")
        return super().glob(path, **options)

    def _refuse(self, request):
        if request in Busy.refused:
            Busy.refused = [other for other in Busy.refused if other != request]
            error = OSError("try again later")
            error.code = 503
            raise error


def test_other_file_systems(server):
    fsspec.register_implementation("busy", Busy, clobber=True)
    Busy().pipe_file("/folder/a.txt", b"1\n2\n")
    for path in ("busy://folder/a.txt", "busy://folder/*.txt", "busy://folder"):
        Busy.refused = ["info", "open", "glob"]
        assert list(daskdist.read_text(path)) == ["1", "2"]
        assert "info" not in Busy.refused
        assert "open" not in Busy.refused


def test_other_ways_to_read_a_small_file_take_few_requests(server):
    server.files["a.txt"] = b"one\ntwo\n"
    assert list(daskdist.data.TextLineDataset(f"{server.url}/a.txt")) == [b"one", b"two"]
    assert server.requests["a.txt"] <= 3
    server.files["a.csv"] = csv_of(0)
    # The server does not tell whether it is a page, which a directory would be, so it is looked into.
    assert numbers_of(daskdist.read_files(f"{server.url}/a.csv")) == list(range(10))
    assert server.requests["a.csv"] <= 6
    server.files["b.csv"] = csv_of(0)
    batches = daskdist.data.experimental.make_csv_dataset(f"{server.url}/b.csv", 10, num_epochs=1, shuffle=False)
    assert [batch["x"].tolist() for batch in batches] == [list(range(10))]
    # It is read twice: for the types of its columns, and for its rows.
    assert server.requests["b.csv"] <= 4
    assert set(server.requests) == {"a.txt", "a.csv", "b.csv"}
