"""The first elements as a table: text in terminals, HTML with images in notebooks."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image
from test_html import text_of

from daskdist import Dataset, errors
from daskdist.display.preview import Preview


def printed(dataset, capsys, *args):
    dataset.show(*args)
    return capsys.readouterr().out


def test_rows_are_printed(capsys):
    dataset = Dataset.from_tensor_slices({"x": np.arange(20.0), "label": ["one word", "two"] * 10})
    assert printed(dataset, capsys, 2) == (
        "  element  x    label\n        0  0.0  one word\n        1  1.0  two\nthe first 2 elements\n"
    )
    assert len(printed(dataset, capsys).splitlines()) == 10
    assert "all 20 elements" in printed(dataset, capsys, 20)
    assert printed(dataset.take(0), capsys) == "no elements\n"


def test_lone_values_and_batches(capsys):
    assert printed(Dataset.range(3).batch(2), capsys).splitlines()[:2] == [
        "  element  value",
        "        0  [0 1]",
    ]
    assert "float64 (100, 30)" in printed(Dataset.from_tensors(np.zeros((100, 30))), capsys)
    assert "[0. 0. 0. ... 0. 0. 0.] (100,)" in printed(Dataset.from_tensors(np.zeros(100)), capsys)


def test_the_table_fits_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    wide = Dataset.from_tensor_slices({f"column {k}": ["some text " * 40] * 2 for k in range(20)})
    lines = printed(wide, capsys).splitlines()
    assert all(len(line) <= 60 for line in lines[:-1])
    assert len(lines) == 2 + 2 * 4
    assert "17 columns more: column 3, column 4" in lines[-1]


def test_control_characters_are_not_printed(capsys):
    assert "\x1b" not in printed(Dataset.from_list(["\x1b[2J\r\x07"]), capsys)


def test_show_does_not_count_as_a_pass():
    shown, other = (Dataset.range(50).shuffle(50, seed=1) for _ in range(2))
    for _ in range(2):
        shown.show(1)
        assert list(shown) == list(other)


@pytest.mark.parametrize("number", [0, -1, 1.5, "2"])
def test_show_refuses_invalid_numbers(number):
    with pytest.raises(errors.ArgumentError, match="show"):
        Dataset.range(3).show(number)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_are_pictures(channels):
    images = np.random.default_rng(0).integers(0, 256, (6, 5, 7, channels), np.uint8)
    html = Preview([{"image": images[0]}, {"image": images}], is_all=True)._repr_html_()
    files = [base64.b64decode(data) for data in re.findall('src="data:image/png;base64,([^"]*)"', html)]
    decoded = [np.asarray(Image.open(io.BytesIO(file))).reshape(5, 7, channels) for file in files]
    assert np.array_equal(decoded, images[[0, 0, 1, 2, 3]])


def test_large_images_are_made_smaller():
    html = Preview([np.zeros((1000, 400, 3), np.uint8)], is_all=True)._repr_html_()
    assert len(html) < 10_000
    assert 'width="64"' in html


def test_html_of_rows_is_escaped():
    text = text_of(Preview([{"<i>name": "<script>x</script>", "number": np.int64(3)}], is_all=False))
    assert "the first element element <i>name number 0 <script>x</script> 3" in text
