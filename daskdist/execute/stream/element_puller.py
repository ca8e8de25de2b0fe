"""Elements of a generator, pulled in the thread that needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from time import perf_counter
from typing import Any, Final

from daskdist.core.block import Rows
from daskdist.core.primitive import ElementStream
from daskdist.core.structure import Leaves
from daskdist.execute.stream.element_reader import PATIENCE_S, bytes_of, is_of_next_element, rows_of_items

# The most elements to take at a time.
MOST_PULLED: Final = 1024


class ElementPuller:
    """A reader that pulls elements when they are taken, and none ahead.

    Parameters
    ----------
    start
        Starts the generator; called when the first element is taken.
    limit_bytes
        The most bytes to take at a time. A single element is taken whatever its size.
    """

    def __init__(self, start: Callable[[], ElementStream], limit_bytes: int) -> None:
        self._start = start
        self._limit_bytes = limit_bytes
        self._elements: ElementStream | None = None
        self._iterator: Iterator[Leaves] = iter(())
        self._num_taken = 0
        # Why the generator ended, after the elements that were taken; None at its end.
        self._failure: Exception | None = None
        self._is_over = False

    def take(self, num_rows: int, *, wait: bool) -> Rows:
        """Return the next ``num_rows`` elements, or fewer if the generator is slow or at its end.

        The elements are pulled now whatever ``wait`` is.

        Raises
        ------
        Exhausted
            There are no more.
        """
        return self._taken(num_rows, self._limit_bytes, PATIENCE_S)

    def take_exactly(self, num_rows: int) -> Rows:
        """Return the next ``num_rows`` elements, however long they take; fewer at the end."""
        return self._taken(num_rows, None, None)

    def close(self) -> None:
        """Close the generator."""
        self._is_over = True
        if self._elements is not None:
            with suppress(Exception):
                self._elements.close()

    def __del__(self) -> None:
        self.close()

    def _taken(self, num_rows: int, limit_bytes: int | None, patience_s: float | None) -> Rows:
        items: list[Any] = []
        if not self._is_over:
            try:
                self._pull(items, num_rows, limit_bytes, patience_s)
            except Exception as error:
                self._failure, self._is_over = error, True
        failure = None
        if not items or is_of_next_element(self._failure):
            failure, self._failure = self._failure, None
        first, self._num_taken = self._num_taken, self._num_taken + len(items)
        return rows_of_items(self._elements, items, first, failure)

    def _pull(self, items: list[Leaves], num_rows: int, limit_bytes: int | None, patience_s: float | None) -> None:
        if self._elements is None:
            self._elements = self._start()
            self._iterator = iter(self._elements)
        element_bytes, num_bytes, start = self._elements.element_bytes, 0, perf_counter()
        if limit_bytes is not None and element_bytes:
            num_rows, limit_bytes = max(min(num_rows, limit_bytes // element_bytes), 1), None
        while len(items) < num_rows:
            leaves = next(self._iterator, None)
            if leaves is None:
                self._is_over = True
                return
            items.append(leaves)
            if limit_bytes is not None:
                num_bytes += bytes_of(leaves)
                if num_bytes >= limit_bytes:
                    return
            if patience_s is not None and perf_counter() - start > patience_s:
                return
