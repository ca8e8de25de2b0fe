"""`PlainText`: text that shows its lines wherever it is displayed."""

from __future__ import annotations

import html


class PlainText(str):
    r"""A string that prompts and notebooks show as its lines, not as a quoted string.

    >>> PlainText("two\nlines")
    two
    lines
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f'<pre style="text-align: left; white-space: pre-wrap; word-break: normal">{html.escape(self)}</pre>'
