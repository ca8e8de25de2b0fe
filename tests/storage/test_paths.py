"""Paths: globs, directories, names with magic characters, and URLs."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import zlib
from pathlib import Path

import fsspec
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import daskdist
from daskdist import Dataset, errors, read_parquet


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


def _write_both(folder, ends):
    # Write a row of 0 as a file with a suffix, and a row of 1 as one with its suffix in capitals.
    table = [pa.table({"id": [number]}) for number in (0, 1)]
    for number, end in enumerate((ends, ends.upper())):
        path = folder / f"{'aB'[number]}{end}"
        plain = end.lower().partition(".gz")[0]
        if plain == ".parquet":
            pq.write_table(table[number], path)
        elif plain == ".arrow":
            with pa.ipc.new_file(path, table[number].schema) as writer:
                writer.write_table(table[number])
        elif plain == ".npz":
            with path.open("wb") as file:
                np.savez(file, id=np.array([number]))
        elif plain == ".h5":
            with h5py.File(path, "w") as file:
                file["id"] = np.array([number])
        else:
            lines = {".tsv": f"id\tb\n{number}\t2\n", ".jsonl": f'{{"id": {number}}}\n'}
            text = lines.get(plain, f"id\n{number}\n").encode()
            path.write_bytes(gzip.compress(text) if end.lower().endswith(".gz") else text)


@pytest.mark.parametrize("root", ["", "memory://capitals"])
@pytest.mark.parametrize(
    ("end", "read"),
    [
        (".csv.gz", daskdist.read_csv),
        (".tsv", daskdist.read_csv),
        (".jsonl.gz", daskdist.read_json),
        (".parquet", read_parquet),
        (".arrow", daskdist.read_arrow),
        (".npz", daskdist.read_npy),
        (".h5", daskdist.read_hdf5),
        (".parquet", daskdist.read_files),
        (".csv.gz", daskdist.read_files),
    ],
)
def test_suffixes_in_capitals(tmp_path, end, read, root):
    _write_both(tmp_path, end)
    fs = fsspec.filesystem("memory")
    if root:
        for path in tmp_path.iterdir():
            fs.pipe(f"/capitals/{path.name}", path.read_bytes())
    try:
        assert sorted(int(row["id"]) for row in read(root or tmp_path)) == [0, 1]
    finally:
        if root:
            fs.rm("/capitals", recursive=True)


def test_suffixes_of_compression_in_capitals_without_known_first_bytes(tmp_path):
    (tmp_path / "A.TXT.ZZ").write_bytes(zlib.compress(b"one\n"))
    assert list(daskdist.read_text(tmp_path)) == ["one"]


def test_a_write_replaces_files_with_suffixes_in_capitals(tmp_path):
    pq.write_table(pa.table({"id": [7]}), tmp_path / "OLD.PARQUET")
    rows = daskdist.Dataset.from_tensor_slices({"id": [1, 2]})
    with pytest.raises(errors.ArgumentError, match=r"has 'OLD\.PARQUET' already"):
        rows.to_parquet(tmp_path)
    rows.to_parquet(tmp_path, overwrite=True)
    assert ids(tmp_path) == [1, 2]


def test_files_left_out_for_their_names_are_logged(parquet_files, tmp_path, caplog):
    parquet_files(2, files=1, folder="data")
    (tmp_path / "data" / "part-1.parquet.tmp").write_text("")
    (tmp_path / "data" / "_SUCCESS").write_text("")
    with caplog.at_level(logging.INFO, "daskdist"):
        assert ids(tmp_path / "data") == [0, 1]
    assert caplog.messages == [
        f"{tmp_path / 'data'}: left out 1 of 2 files for the suffixes of their names, such as "
        f"{tmp_path / 'data' / 'part-1.parquet.tmp'}"
    ]


def test_directories_that_a_glob_matches_are_logged(parquet_files, tmp_path, caplog):
    parquet_files(2, files=1, folder="data")
    parquet_files(2, files=1, folder="data/x.parquet")
    pattern = str(tmp_path / "data" / "*.parquet")
    assert ids(pattern) == [0, 1]
    assert caplog.messages == [
        f"{pattern}: left out 1 directories that it matches, such as {tmp_path / 'data' / 'x.parquet'}; give "
        "directories as a list of their paths"
    ]
    caplog.clear()
    assert ids(str(tmp_path / "data" / "**" / "*.parquet")) == [0, 1, 0, 1]
    assert not caplog.messages


def test_links_to_directories_are_followed_and_circles_are_not(tmp_path):
    other = tmp_path / "other"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    other.mkdir()
    pq.write_table(pa.table({"id": [1]}), other / "1.parquet")
    pq.write_table(pa.table({"id": [0]}), tmp_path / "a" / "0.parquet")
    (tmp_path / "a" / "linked").symlink_to(other)
    (tmp_path / "a" / "self").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "there").symlink_to(tmp_path / "b")
    (tmp_path / "b" / "back").symlink_to(tmp_path / "a")
    assert ids(tmp_path / "a") == [0, 1]
    assert ids(f"{tmp_path}/a/**/*.parquet") == [0, 1]
    # A link that the path itself spells out is followed.
    assert ids(tmp_path / "a" / "self") == ids(f"{tmp_path}/a/self/**/*.parquet") == [0, 1]
    (tmp_path / "a" / "gone.parquet").symlink_to(tmp_path / "nothing")
    for pattern in (tmp_path / "a", f"{tmp_path}/a/*.parquet"):
        with pytest.raises(errors.FileError, match=r"gone\.parquet: not found"):
            ids(pattern)


def test_a_write_covers_files_behind_links_to_directories(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "table").mkdir()
    pq.write_table(pa.table({"id": [1]}), tmp_path / "other" / "1.parquet")
    (tmp_path / "table" / "linked").symlink_to(tmp_path / "other")
    with pytest.raises(errors.ArgumentError, match=r"has 'linked/1\.parquet' in a directory below it"):
        daskdist.Dataset.from_tensor_slices({"id": [2]}).to_parquet(tmp_path / "table", overwrite=True)


@pytest.mark.parametrize("read", [read_parquet, daskdist.read_arrow, daskdist.read_csv, daskdist.read_hdf5])
def test_names_that_are_not_utf8(tmp_path, read):
    end = {read_parquet: ".parquet", daskdist.read_arrow: ".arrow", daskdist.read_csv: ".csv"}.get(read, ".h5")
    (tmp_path / "plain").mkdir()
    _write_both(tmp_path / "plain", end)
    folder = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(folder)
    for path in (tmp_path / "plain").iterdir():
        shutil.copy(path, folder + b"/\xfe" + path.name.encode())
    ds = read(os.fsdecode(folder))
    assert sorted(int(row["id"]) for row in ds) == [0, 1]
    state = iter(ds).state_dict()
    it = iter(read(os.fsdecode(folder)))
    it.load_state_dict(state)
    assert len(list(it)) == 2
    with pytest.raises(errors.FileError, match=r"udcfe.*the name is not UTF-8.*give its directory to a reader"):
        Dataset.list_files(os.fsdecode(folder))


@pytest.mark.parametrize("read", [read_parquet, daskdist.read_csv])
@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (["day=2020-01-01%2000%3A00", "day=__HIVE_DEFAULT_PARTITION__"], [("day", "2020-01-01 00:00"), ("day", "?")]),
        (["start%20time=1", "start%20time=2"], [("start time", 1), ("start time", 2)]),
        (["a%3Db=%2F", "a%3Db=%25"], [("a=b", "/"), ("a=b", "%")]),
        (["caf%C3%A9=%E4%BD%A0", "café=x"], [("café", "你"), ("café", "x")]),
    ],
)
def test_percents_in_partitions(tmp_path, read, folders, expected):
    for number, folder in enumerate(folders):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table({"id": [number]}), tmp_path / folder / "x.parquet")
        (tmp_path / folder / "x.csv").write_text(f"id\n{number}\n")
    paths = [str(tmp_path / folder) for folder in folders]
    rows = list(read(paths, missing={"day": "?"} if folders[0].startswith("day") else None))
    assert [next((name, value) for name, value in row.items() if name != "id") for row in rows] == expected


@pytest.mark.parametrize("folder", [b"k=%FF", b"k=\xff", b"k%FE=1", b"k\xfe=1"])
def test_partitions_that_are_not_utf8(tmp_path, folder):
    place = os.fsencode(tmp_path) + b"/" + folder
    os.mkdir(place)
    with open(place + b"/x.csv", "w") as file:
        file.write("id\n1\n")
    with pytest.raises(errors.FileError, match=r"x\.csv: the name of a directory with = is not UTF-8"):
        daskdist.read_csv(tmp_path)
    assert [int(row["id"]) for row in daskdist.read_csv(tmp_path, partitioned=False)] == [1]


@pytest.mark.parametrize("way", ["save", "snapshot", "cache"])
def test_a_local_directory_may_have_the_signs_of_a_chain_of_urls(tmp_path, way):
    directory = tmp_path / "a::b"
    rows = Dataset.range(5)
    if way == "save":
        rows.save(str(directory))
        again = Dataset.load(str(directory))
    else:
        again = getattr(rows, way)(str(directory))
    assert [int(x) for x in again] == [int(x) for x in again] == [0, 1, 2, 3, 4]
    assert any(directory.rglob("*"))
    assert not (tmp_path / "a").exists()
