"""Parquet files in which few texts are repeated, which are read as dictionaries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import daskdist
from daskdist import Options, errors
from daskdist.formats.parquet import Footer

NUM_ROWS = 3000


def written(path: Path, words: list[str | None], kind: pa.DataType | None = None) -> tuple[str, list[str | None]]:
    values = [words[row * row % len(words)] for row in range(NUM_ROWS)]
    table = pa.table({"number": np.arange(NUM_ROWS), "text": pa.array(values, kind or pa.string())})
    pq.write_table(table, path / "a.parquet", row_group_size=NUM_ROWS // 2)
    return str(path / "a.parquet"), values


def texts_of(path: str, **options: object) -> list[str]:
    batches = list(daskdist.read_parquet(path, **options).batch(700))
    assert all(batch["text"].dtype == np.dtypes.StringDType() for batch in batches)
    return [text for batch in batches for text in batch["text"].tolist()]


@pytest.mark.parametrize(
    "words",
    [
        ["alpha", "beta", "gamma"],
        ["one"],
        ["", "a"],
        [""],
        ["größer", "日本語", "x"],
        ["ends with zero\0", "b"],
        ["short", "long " * 30],
    ],
)
def test_text_is_the_same_as_it_was_written(tmp_path: Path, words: list[str]) -> None:
    path, values = written(tmp_path, list(words))
    assert Footer.of(pa.OSFile(str(path))).repeated_texts(0) == ["text"]
    assert texts_of(path) == values


def test_nulls_are_replaced_by_the_given_text(tmp_path: Path) -> None:
    path, values = written(tmp_path, ["a", None, "b"])
    assert texts_of(path, missing={"text": "none"}) == [value or "none" for value in values]
    with pytest.raises(errors.FileError, match="nulls, the first in row"):
        texts_of(path)


def test_filters_compare_texts(tmp_path: Path) -> None:
    path, values = written(tmp_path, ["a", "b", "c", "d"])
    assert texts_of(path, filters=[("text", "in", ["a", "b"])]) == [value for value in values if value in ("a", "b")]


def test_text_of_which_most_comes_once_is_not_read_as_a_dictionary(tmp_path: Path) -> None:
    path, values = written(tmp_path, [f"text number {row}" for row in range(2 * NUM_ROWS)])
    assert Footer.of(pa.OSFile(str(path))).repeated_texts(0) == []
    assert texts_of(path) == values


def test_rows_of_a_word_that_is_not_utf8_are_left_out_and_no_others(tmp_path: Path) -> None:
    words = [b"good", b"fine", b"\xff\xfe", b"well"]
    values = [words[row * row % 4 if row % 100 else 2] for row in range(NUM_ROWS)]
    offsets = np.cumsum([0, *map(len, values)]).astype(np.int32)
    text = pa.StringArray.from_buffers(NUM_ROWS, pa.py_buffer(offsets), pa.py_buffer(b"".join(values)))
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": text}), path)
    assert Footer.of(pa.OSFile(str(path))).repeated_texts(0) == ["text"]
    with pytest.raises(errors.FileError, match=r"its row 0, .* is not UTF-8"):
        texts_of(path)
    kept = daskdist.read_parquet(path).with_options(Options(on_error="skip"))
    assert [str(row["text"]) for row in kept] == [value.decode() for value in values if value != b"\xff\xfe"]
