"""Descriptions that print themselves."""

import pickle

import pytest
from conftest import mirrored

import daskdist
from daskdist import Dataset
from daskdist.display.plain_text import PlainText


@daskdist.function
def nothing():
    return None


@pytest.mark.parametrize(
    "build",
    [
        lambda: Dataset.range(3).map(lambda x: x < 2).explain(),
        lambda: Dataset.range(3).explain("simplified"),
        lambda: mirrored(2).distribute_dataset(Dataset.range(4).batch(2)).explain(),
        lambda: daskdist.explain_slow(iter(mirrored(2).distribute_dataset(Dataset.range(4).batch(2)))),
        nothing.explain,
    ],
)
def test_explanations_show_their_lines_and_are_text(build):
    text = build()
    assert isinstance(text, str)
    assert repr(text) == str(text) == f"{text}" == "" + text
    assert "\\n" not in repr(text)
    assert text._repr_html_().startswith("<pre")
    assert "<lambda>" not in text._repr_html_()
    assert text.splitlines() == str(text).split("\n")
    assert pickle.loads(pickle.dumps(text)) == text
    assert type(text.upper()) is str


def test_what_it_shows_is_no_html():
    page = PlainText("<b>")._repr_html_()
    assert page.startswith("<pre ")
    assert page.endswith(">&lt;b&gt;</pre>")
