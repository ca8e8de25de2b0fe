"""Descriptions for notebooks: a title, facts and sections, made into HTML by Jinja templates.

The templates escape every text. They have no scripts, and their colours follow the notebook's or the browser's theme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from daskdist.display.pictures import Picture

_TEMPLATES: Final = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Box:
    """A cell of a table.

    Parameters
    ----------
    text
        The text.
    style
        ``"number"`` to align the text to the right, ``"wide"`` to wrap it.
    is_code
        Whether to set the text as code.
    share
        A percentage to show as a bar instead of the text.
    pictures
        Images to show above the text.
    """

    text: str = ""
    style: str = ""
    is_code: bool = False
    share: float | None = None
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True)
class PageTable:
    """A table: the cells of its heading and of its rows."""

    heading: Sequence[Box]
    rows: Sequence[Sequence[Box]]


@dataclass(frozen=True)
class TimePart:
    """A part of a bar that shows how time was spent."""

    text: str
    percent: float
    style: str


@dataclass(frozen=True)
class Section:
    """A part of a description.

    Parameters
    ----------
    kind
        ``"plan"`` for a drawing of a pipeline, ``"table"``, ``"shares"`` for a bar of `TimePart`, ``"text"``, or
        ``"lines"`` for preformatted text.
    content
        The content, according to ``kind``.
    title
        The title; empty for none.
    is_folded
        Whether only the title is visible until it is clicked.
    """

    kind: str
    content: Any
    title: str = ""
    is_folded: bool = False


def page(title: str, facts: Sequence[str], sections: Sequence[Section] = ()) -> str:
    """Return a description as HTML."""
    template = _environment().get_template("page.html")
    html: str = template.render(title=title, facts=facts, sections=sections, style=_style())
    return html


@cache
def _environment() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _style() -> str:
    return (_TEMPLATES / "style.css").read_text()


def texts(*columns: str) -> list[Box]:
    """Return the cells of a heading."""
    return [Box(column) for column in columns]
