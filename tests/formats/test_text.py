"""Lines of text: ends of lines, splits of files, encodings and compression."""

from __future__ import annotations

import gzip
from pathlib import Path

import dask
import numpy as np
import pytest
from compressed import COMPRESSED

from daskdist import TensorSpec, data, errors, read_csv, read_text
from daskdist.formats.text import Lines, Text
from daskdist.testing import FormatLaws

TEXT = np.dtypes.StringDType()


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


@pytest.mark.parametrize("compression", ["infer", None])
def test_text_of_one_byte_a_character_may_begin_like_a_mark(tmp_path, compression):
    path = tmp_path / "a.txt"
    path.write_bytes("ÿþabc\n".encode("latin-1"))
    assert list(read_text(path, encoding="latin-1", compression=compression)) == ["ÿþabc"]


def test_a_damaged_file_that_is_compressed_is_left_out_whatever_its_name_is(tmp_path):
    for number in range(3):
        content = gzip.compress(b"x\n" + b"1\n" * 100)
        (tmp_path / f"log{number}.gz").write_bytes(content[:20] if number == 1 else content)
    rows = read_csv([str(tmp_path / f"log{number}.gz") for number in range(3)])
    assert 200 <= len(list(rows.ignore_errors())) < 300
