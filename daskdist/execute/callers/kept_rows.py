"""Rows that a local process keeps, so that further calls take parts of them without sending them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import cloudpickle

from daskdist.core.block import Rows
from daskdist.core.primitive import same
from daskdist.execute.caller import Report, report_of
from daskdist.execute.stream.gather import Picks, gather

# The most functions and rows that a process keeps. Dropped rows are computed again.
_MOST_FUNCTIONS: Final = 64
_MOST_KEPT: Final = 2

_functions: Final[OrderedDict[str, Callable[..., Any]]] = OrderedDict()
_kept: Final[OrderedDict[str, Rows]] = OrderedDict()


@dataclass(frozen=True)
class KeptRows:
    """A description of rows that a process can compute, and then keeps.

    Parameters
    ----------
    key
        Distinguishes them from others.
    function, args
        The file of the pickled function that computes them, and its arguments.
    report
        The report on them; None before they were computed.
    """

    key: str
    function: str
    args: tuple[Any, ...]
    report: Report | None = None


def function_of(path: str) -> Callable[..., Any]:
    """Return the pickled function of a file, which is read once."""
    if path not in _functions:
        with open(path, "rb") as file:
            _functions[path] = cloudpickle.loads(file.read())
        while len(_functions) > _MOST_FUNCTIONS:
            _functions.popitem(last=False)
    return _functions[path]


def rows_of(kept: KeptRows) -> Rows:
    """Return rows, computed if this process does not have them."""
    if kept.key not in _kept:
        _kept[kept.key] = function_of(kept.function)(*kept.args)
        while len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)
    _kept.move_to_end(kept.key)
    return _kept[kept.key]


def report_of_kept(kept: KeptRows) -> Report:
    """Return the report on rows, which are kept."""
    return report_of(rows_of(kept))


def call_with_part(kept: KeptRows, picks: Picks, unstacked: bool, function: str) -> Any:
    """Call the pickled function of a file with some of the rows."""
    return function_of(function)(gather([rows_of(kept)], picks, same, unstacked))
