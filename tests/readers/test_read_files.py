"""Functions that read files: formats recognised by the first file, other files, and the order of columns."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import daskdist
from daskdist import errors, read_files, read_text


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


def test_options_of_wrong_kinds(tmp_path):
    (tmp_path / "a.txt").write_text("one\n")
    with pytest.raises(errors.ArgumentError, match="storage_options is int; give a dict by name"):
        read_text(tmp_path / "a.txt", storage_options=5)
    with pytest.raises(errors.ArgumentError, match="read_files: format is 5; give a format, its name, or None"):
        read_files(tmp_path / "a.txt", 5)


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
