"""Compressed files: parts that are read in order or at once, and files that are damaged."""

from __future__ import annotations

import gzip
import threading

import dask
import numpy as np
import pyarrow as pa
import pytest
from compressed import COMPRESSED

from daskdist import data, errors, read_text
from daskdist.core.dataset_base import node_of
from daskdist.formats.text import Text
from daskdist.storage import byte_ranges
from daskdist.storage.first_file import FirstFile


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
    actual = {}
    threads = [
        threading.Thread(target=lambda k=k: actual.update({k: form.read(splits[k])})) for k in range(len(splits))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [line for k in range(len(splits)) for line in actual[k].leaves[0]] == lines


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


@pytest.mark.parametrize("number", [0x50, 0x5F])
def test_frames_that_zstd_skips_before_those_of_content(tmp_path, number):
    # As pzstd writes them, with the size of the next frame.
    frames = [pa.Codec("zstd").compress(text, asbytes=True) for text in (b"a\nb\n", b"c\n")]
    skipped = bytes([number]) + b"\x2a\x4d\x18\x04\0\0\0"
    content = b"".join(skipped + len(frame).to_bytes(4, "little") + frame for frame in frames)
    for name in ("a.txt.zst", "a.txt"):
        (tmp_path / name).write_bytes(content)
        assert list(read_text(tmp_path / name)) == ["a", "b", "c"]


STREAMS = sorted(set(COMPRESSED) - {"zst"})


@pytest.mark.parametrize("end", STREAMS)
@pytest.mark.parametrize("num_zeros", [0, 8, 100_000])
def test_streams_that_follow_each_other_are_one_file(tmp_path, end, num_zeros):
    lines = [str(k) for k in range(5000)]
    parts = ["\n".join(lines[:2000]) + "\n", "\n".join(lines[2000:])]
    streams = [COMPRESSED[end](part.encode()) for part in parts]
    (tmp_path / f"a.txt.{end}").write_bytes(b"".join(stream + bytes(num_zeros) for stream in streams))
    assert list(read_text(tmp_path)) == lines


@pytest.mark.parametrize("end", STREAMS)
@pytest.mark.parametrize("behind", ["a damaged stream", "text"])
def test_what_follows_a_stream_and_is_none_is_damage(tmp_path, end, behind):
    lines = [f"{k:05}" for k in range(5000)]
    first, second = (COMPRESSED[end]("".join(f"{line}\n" for line in part).encode()) for part in (lines[:2000], lines))
    path = tmp_path / f"a.txt.{end}"
    path.write_bytes(first + (b"\xff" + second[1:] if behind == "a damaged stream" else b"some text"))
    with pytest.raises(errors.DamagedFileError, match=rf"a\.txt\.{end}"):
        list(read_text(path))
    assert list(read_text(path).ignore_errors(log_warning=False)) == lines[:2000]
