"""Paths: globs, directories, names with magic characters, and URLs."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from daskdist import errors, read_parquet


def ids(paths, **kwargs):
    return [int(x) for x in read_parquet(paths, "id", **kwargs)]


def test_globs_are_sorted_and_lists_keep_their_order(parquet_files, tmp_path):
    paths = parquet_files(2, files=3)
    everything = list(range(6))
    assert ids(str(tmp_path / "data" / "part-*.parquet")) == everything
    assert ids(str(tmp_path / "data" / "part-[02].parquet")) == [0, 1, 4, 5]
    assert ids(tmp_path / "data") == everything
    assert ids(f"file://{tmp_path}/data/*.parquet") == everything
    assert ids([paths[2], Path(paths[0])]) == [4, 5, 0, 1]
    assert ids([paths[1], str(tmp_path / "data" / "part-*")]) == [2, 3, *everything]


def test_a_directory_is_searched_to_the_bottom_and_other_files_are_left(parquet_files, tmp_path):
    parquet_files(2, files=1, folder="data")
    deep = tmp_path / "data" / "year=2024"
    deep.mkdir()
    pq.write_table(pa.table({"id": [9]}), deep / "part-0.parquet")
    (tmp_path / "data" / "_SUCCESS").write_text("")
    (tmp_path / "data" / "notes.txt").write_text("not rows")
    assert ids(str(tmp_path / "data")) == [0, 1, 9]


def test_names_with_magic_characters(tmp_path):
    folder = tmp_path / "a[1]*"
    folder.mkdir()
    pq.write_table(pa.table({"id": [1, 2]}), folder / "b?.parquet")
    assert ids(folder / "b?.parquet") == [1, 2]
    assert ids(folder) == [1, 2]


def test_relative_paths_and_home(parquet_files, tmp_path, monkeypatch):
    parquet_files(2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    ds = read_parquet("data/part-0.parquet", "id")
    monkeypatch.chdir("/")
    assert [int(x) for x in ds] == [0, 1]
    assert ids("~/data/*.parquet") == [0, 1]


@pytest.mark.parametrize(
    "pattern", ["memory://bucket/a/part-*.parquet", "memory://bucket/a", "memory://bucket/**/*.parquet"]
)
def test_urls(parquet_files, pattern):
    fs = fsspec.filesystem("memory")
    paths = parquet_files(3, files=2, row_group=2)
    try:
        for number, path in enumerate(paths):
            fs.pipe(f"/bucket/a/part-{number}.parquet", Path(path).read_bytes())
        assert ids(pattern) == list(range(6))
        assert ids([paths[1], "memory://bucket/a/part-0.parquet"]) == [3, 4, 5, 0, 1, 2]
        with pytest.raises(errors.FileError, match="memory://bucket/none"):
            read_parquet("memory://bucket/none-*.parquet")
    finally:
        fs.rm("/bucket", recursive=True)


def test_a_file_that_goes_away_is_named(parquet_files):
    paths = parquet_files(files=2)
    ds = read_parquet(paths)
    Path(paths[1]).unlink()
    with pytest.raises(errors.FileError, match="part-1"):
        list(ds)
