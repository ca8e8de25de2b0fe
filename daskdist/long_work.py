"""Long operations whose progress a program may ask to see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from time import perf_counter
from typing import Any, Protocol, TypeVar

_Part = TypeVar("_Part")


class ProgressDisplay(Protocol):
    """A display of how much is done."""

    def update(self, number: int, text: str) -> None:
        """Show how much is done, and a text."""
        ...

    def close(self) -> None:
        """End the display; what was shown stays."""
        ...


# Returns a display for a total, a title and a unit, or None if there is nowhere to show it.
displays: ContextVar[Callable[[int | None, str, str], ProgressDisplay | None] | None] = ContextVar(
    "daskdist displays", default=None
)


class LongWork:
    """A piece of work that is shown if the program has asked for it; also a context that ends it.

    Parameters
    ----------
    title
        The name of the work.
    total
        Returns the total, or a negative number if it is unknown; called only if the work is shown.
    unit
        What is counted.
    """

    def __init__(self, title: str, total: Callable[[], int], unit: str = "elements") -> None:
        make = displays.get()
        self._display = None
        if make is not None:
            number = total()
            self._display = make(number if number >= 0 else None, title, unit)
        self._unit = unit
        self._number = 0
        self._begun_at = perf_counter()

    def add(self, number: int) -> None:
        """Record that so much more is done."""
        if self._display is not None:
            self._number += number
            rate = self._number / max(perf_counter() - self._begun_at, 1e-9)
            self._display.update(self._number, f"{rate:,.0f} {self._unit}/s")

    def close(self) -> None:
        """End the display."""
        if self._display is not None:
            self._display.close()
            self._display = None

    def __enter__(self) -> LongWork:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def shown(
    parts: Iterable[_Part], title: str, total: Callable[[], int], size: Callable[[_Part], int], unit: str = "elements"
) -> Iterator[_Part]:
    """Yield the parts of a piece of work, see `LongWork`; ``size`` returns how much one part is."""
    with LongWork(title, total, unit) as work:
        for part in parts:
            work.add(size(part))
            yield part
