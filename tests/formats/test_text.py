"""Lines of text: ends of lines, splits of files, encodings and compression."""

from __future__ import annotations

import bz2
import gzip
import lzma
import threading
import zlib
from pathlib import Path

import dask
import numpy as np
import pyarrow as pa
import pytest

from daskdist import TensorSpec, data, errors, read_text
from daskdist.core.dataset_base import node_of
from daskdist.formats.text import Lines, Text
from daskdist.storage import byte_ranges
from daskdist.storage.schema_check import FirstFile
from daskdist.testing import FormatLaws

TEXT = np.dtypes.StringDType()
COMPRESSED = {
    "gz": gzip.compress,
    "zz": zlib.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pa.Codec("zstd").compress(data).to_pybytes(),
}


class TestText(FormatLaws):
    split_bytes = 100

    def make_format(self):
        return Text()

    def write(self, directory):
        written = {}
        lines = [f"line {k} " + "ü" * (k % 7) for k in range(40)]
        for number, (content, expected) in enumerate(
            [("\n".join(lines), lines), ("", []), ("\n\none\r\n\n", ["", "", "one", ""])]
        ):
            path = directory / f"{number}.txt"
            path.write_bytes(content.encode())
            column = np.array(expected, TEXT)
            written[str(path)] = [column[k] for k in range(len(expected))]
        return written


class TestTextCompressed(TestText):
    def write(self, directory):
        written = super().write(directory)
        compressed = {}
        for (path, lines), (end, compress) in zip(written.items(), COMPRESSED.items(), strict=False):
            Path(f"{path}.{end}").write_bytes(compress(Path(path).read_bytes()))
            Path(path).unlink()
            compressed[f"{path}.{end}"] = lines
        return compressed


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\r\n\r\nb\r", ["a", "", "b"]),
        (b"a\n\r", ["a", ""]),
        (b"a\rb\n", ["a\rb"]),
        (b"\n\n\n", ["", "", ""]),
        (b"\xef\xbb\xbfa\nb\n", ["a", "b"]),
        ("\u2028x\x0by\x85z\n".encode(), ["\u2028x\x0by\x85z"]),
    ],
)
@pytest.mark.parametrize("split_bytes", [1, 2, 5, 100])
def test_line_ends(tmp_path, content, lines, split_bytes):
    (tmp_path / "a.txt").write_bytes(content)
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        assert list(read_text(tmp_path / "a.txt")) == lines
        as_bytes = [bytes(line) for line in data.TextLineDataset(str(tmp_path / "a.txt"))]
    assert [line.removeprefix(b"\xef\xbb\xbf").decode() for line in as_bytes] == lines


def test_lines_are_text_or_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes("ü\n".encode("latin-1"))
    assert read_text(tmp_path / "a.txt").element_spec == TensorSpec((), TEXT)
    assert list(read_text(tmp_path / "a.txt", "latin-1")) == ["ü"]
    assert [bytes(x) for x in read_text(tmp_path / "a.txt", None)] == [b"\xfc"]
    with pytest.raises(errors.FileError, match=r"its line 0, b'\\xfc.*give the right encoding"):
        list(read_text(tmp_path / "a.txt"))
    with pytest.raises(errors.ArgumentError, match="newline is not one byte"):
        read_text(tmp_path / "a.txt", "utf-16")
    with pytest.raises(errors.ArgumentError, match="which Python does not know"):
        read_text(tmp_path / "a.txt", "utf-9")


def test_unknown_and_unexpected_encodings(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n")
    for encoding in (5, "undefined", "utf-8\0"):
        with pytest.raises(errors.ArgumentError, match="which Python does not know for text"):
            read_text(tmp_path / "a.txt", encoding)
    for split_bytes in (1, 1000):
        with dask.config.set({"daskdist.split-bytes": split_bytes}):
            assert list(read_text(tmp_path / "a.txt", "utf-8-sig")) == ["a", "\ufeffb"]


def test_a_line_longer_than_many_ranges_is_read_once(tmp_path, monkeypatch):
    path, looked_at, boundary = tmp_path / "a.txt", [], Lines.boundary
    path.write_bytes(b"a\n" + b"x" * 3_000_000 + b"\nb\n")

    def counted(self, data, at_least, *, is_end):
        looked_at.append(len(data))
        return boundary(self, data, at_least, is_end=is_end)

    monkeypatch.setattr(Lines, "boundary", counted)
    with dask.config.set({"daskdist.split-bytes": 120_000}):
        assert list(map(len, read_text(path))) == [1, 3_000_000, 1]
    # A hundred ranges begin within the long line, and each examines only its own surroundings.
    assert sum(looked_at) < 30_000_000


@pytest.mark.parametrize("end", COMPRESSED)
@pytest.mark.parametrize("split_bytes", ["10 kB", "16 MiB"])
def test_compressed_files_are_read_in_parts(tmp_path, end, split_bytes):
    draws = np.random.default_rng(0)
    lines = [f"{k} {draws.integers(1 << 60)}" for k in range(10_000)]
    path = tmp_path / f"a.txt.{end}"
    path.write_bytes(COMPRESSED[end]("\n".join(lines).encode()))
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        ds = read_text(path)
        assert list(ds) == lines
        num_splits = len(node_of(ds).splits())
        assert num_splits == -(-path.stat().st_size // (10_000 // 8)) if split_bytes == "10 kB" else num_splits == 1
        # Two passes run at the same time, at different places.
        pairs = list(data.Dataset.zip(ds, ds.skip(3)))
    assert [a for a, _ in pairs] == lines[:-3]
    assert [b for _, b in pairs] == lines[3:]


def test_parts_are_read_once_where_they_come_in_order(tmp_path, monkeypatch):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(np.random.default_rng(0).bytes(3_000_000).hex().encode().replace(b"0", b"\n")))
    read = []
    whole = byte_ranges.Storage.read
    monkeypatch.setattr(byte_ranges.Storage, "read", lambda *args: read.append(args[2]) or whole(*args))
    with dask.config.set({"daskdist.split-bytes": "1 MiB", "daskdist.num-threads": 4}):
        list(read_text(path))
    pieces = [start for start in read if 0 < start < path.stat().st_size]
    assert len(pieces) > 5
    assert len(set(pieces)) == len(pieces)


def test_one_stream_is_waited_for(tmp_path):
    # If several parts are requested together, each starts where the one before ended.
    path = tmp_path / "a.txt.gz"
    lines = [str(k) for k in range(100_000)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    with dask.config.set({"daskdist.split-bytes": "100 kB"}):
        form = Text()
        splits = form.list_splits(str(path), 0, FirstFile(str(path), form.spec(str(path))))
    found = {}
    threads = [threading.Thread(target=lambda k=k: found.update({k: form.read(splits[k])})) for k in range(len(splits))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [line for k in range(len(splits)) for line in found[k].leaves[0]] == lines


def test_a_name_that_says_another_compression(tmp_path):
    # The content decides if it is recognised; otherwise the error says what to do.
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"one\n"))
    (tmp_path / "b.txt.bz2").write_bytes(gzip.compress(b"two\n"))
    (tmp_path / "c.txt.gz").write_bytes(b"three\n")
    assert list(read_text([tmp_path / "a.txt", tmp_path / "b.txt.bz2"])) == ["one", "two"]
    with pytest.raises(errors.FileError, match=r"c\.txt\.gz: its name says gzip.*give compression=None"):
        list(read_text(tmp_path / "c.txt.gz"))
    assert list(read_text(tmp_path / "c.txt.gz", compression=None)) == ["three"]
    with pytest.raises(errors.ArgumentError, match="compression is 'rar'"):
        read_text(tmp_path / "a.txt", compression="rar")


@pytest.mark.parametrize("end", COMPRESSED)
def test_a_compressed_file_cut_short(tmp_path, end):
    lines = [str(k) for k in range(5000)]
    whole = COMPRESSED[end]("\n".join(lines).encode())
    path = tmp_path / f"a.txt.{end}"
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(errors.FileError, match=r"a\.txt.*damaged or cut short: after \d+ bytes when decompressed"):
        list(read_text(path))
    with dask.config.set({"daskdist.split-bytes": "8 kB"}):
        kept = list(iterator := iter(read_text(path).ignore_errors()))
    assert kept == lines[: len(kept)]
    assert iterator.stats()["skipped_by_file"] == {str(path): 1}


def test_a_file_that_was_changed_since(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n")
    ds = read_text(path)
    assert list(ds) == ["one"]
    path.write_text("one\ntwo\n")
    with pytest.raises(errors.FileError, match="was changed since it was listed"):
        list(ds)


def test_datasets_of_names(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"{number}\n")
    names = data.Dataset.list_files(str(tmp_path / "*.txt"), shuffle=False)
    assert [bytes(x) for x in data.TextLineDataset(names)] == [b"0", b"1", b"2"]
    assert [bytes(x) for x in data.TextLineDataset([str(tmp_path / "2.txt")])] == [b"2"]
    assert [bytes(x) for x in names.flat_map(lambda name: data.TextLineDataset(str(name)))] == [b"0", b"1", b"2"]
