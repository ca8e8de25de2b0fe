"""Elements of a generator, pulled by a separate thread, so that the consumer waits only for those that it needs."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, Final

from daskdist.call_progress import CallProgress, under_way
from daskdist.core.block import Rows, bundle
from daskdist.core.failing.failed_element import NO_ELEMENT_FAILED, FailedElement
from daskdist.core.finalizer import Finalizer
from daskdist.core.primitive import ElementStream, Exhausted, NotReady
from daskdist.core.structure import LONE, Leaves
from daskdist.waiting import wait_intervals

# Seconds after which the available elements are handed out, though more were requested.
PATIENCE_S: Final = 0.01
# The most elements to take at a time, and to pull ahead of use, whatever their size.
MOST_ROWS: Final = 16_384
# Seconds to wait for a stopped thread to end. A thread inside the generator ends when that yields an element.
_END_S: Final = 1.0


class _ElementBuffer:
    """The buffer between the thread that pulls elements and the one consumer that takes them.

    The thread refers to the buffer and not to the reader, so that the reader can be collected while the thread runs.
    """

    def __init__(self, start: Callable[[], ElementStream], limit_bytes: int) -> None:
        self.start = start
        self.elements: ElementStream | None = None
        # The size of each element; None if sizes differ.
        self.element_bytes: int | None = None
        # Elements that were not taken.
        self.items: deque[Leaves] = deque()
        self.limit_bytes = limit_bytes
        self.changed = threading.Condition()
        # The total number of elements that may be pulled, and that were pulled; total bytes pulled and taken.
        self.num_allowed = self.num_pulled = 0
        self.pulled_bytes = self.taken_bytes = 0
        # The number of elements that the consumer is waiting for; 0 if it is not waiting.
        self.num_wanted = 0
        # Why the generator ended, after those elements; None at its end.
        self.failure: BaseException | None = None
        self.is_over = self.is_stopped = self.is_waiting = False
        self.progress = CallProgress("an element of a generator")

    def run(self) -> None:
        """Pull elements while they are wanted."""
        elements = None
        under_way.call = self.progress
        try:
            elements = self.elements = self.start()
            self.element_bytes = elements.element_bytes
            pull = iter(elements)
            while self._may_pull() and self._pull_some(pull):
                pass
        except BaseException as error:
            self.failure = error
        if elements is not None:
            with suppress(Exception):
                elements.close()
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    def _pull_some(self, pull: Iterator[Leaves]) -> bool:
        # Pull as many elements as are currently allowed; return whether the generator may have more.
        items, element_bytes, number, count = self.items, self.element_bytes, 1, 0
        if element_bytes is not None:
            number = self.num_allowed - self.num_pulled
            room_bytes = self.limit_bytes - self.pulled_bytes + self.taken_bytes
            number = max(min(number, -(-room_bytes // max(element_bytes, 1))), 1)
        for item in islice(pull, number):
            if element_bytes is None:
                self.pulled_bytes += bytes_of(item)
            items.append(item)
            count += 1
            if self.num_wanted and self.num_wanted <= len(items):
                with self.changed:
                    self.changed.notify_all()
            if self.is_stopped:
                break
        self.num_pulled += count
        self.pulled_bytes += count * (element_bytes or 0)
        return count == number

    def _may_pull(self) -> bool:
        if self.num_pulled < self.num_allowed and self.has_room() and not self.is_stopped:
            return True
        with self.changed:
            self.is_waiting = True
            # If the consumer waits for more than fits in the buffer, it takes the elements there are.
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.is_stopped or (self.num_pulled < self.num_allowed and self.has_room()))
            self.is_waiting = False
        return not self.is_stopped

    def has_room(self) -> bool:
        """Return whether one more element may be held."""
        return not self.items or self.pulled_bytes - self.taken_bytes < self.limit_bytes


class ElementReader:
    """A reader that pulls elements ahead of use: as many as were taken the last time, up to a number of bytes.

    Parameters
    ----------
    start
        Starts the generator; called in the thread that pulls elements.
    limit_bytes
        The most bytes to hold. A single element is held whatever its size.
    is_ahead
        Whether elements are pulled while nobody waits for them.
    """

    def __init__(self, start: Callable[[], ElementStream], limit_bytes: int, *, is_ahead: bool) -> None:
        self._buffer = buffer = _ElementBuffer(start, limit_bytes)
        self._is_ahead = is_ahead
        self._num_taken = 0
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(buffer.run,), name="daskdist-generator", daemon=True)
        # An interrupt may come while the thread starts.
        self.close = Finalizer(self, _stop, buffer, thread)
        thread.start()

    def take(self, num_rows: int, *, wait: bool) -> Rows:
        """Return the next ``num_rows`` elements, or fewer if the generator is slow or at its end.

        Parameters
        ----------
        num_rows
            The most elements to take.
        wait
            Whether to wait: for the first element as long as needed, and a short time for the rest.

        Raises
        ------
        Exhausted
            There are no more.
        NotReady
            ``wait`` is False, and not all elements are available yet.
        """
        self._allow(num_rows)
        if wait:
            self._wait(num_rows)
        elif not self._has_enough(num_rows):
            raise NotReady
        return self._taken(num_rows)

    def take_exactly(self, num_rows: int) -> Rows:
        """Return the next ``num_rows`` elements, however long they take; fewer at the end."""
        buffer = self._buffer
        while True:
            self._allow(num_rows)
            self._wait(num_rows)
            if len(buffer.items) >= num_rows or buffer.is_over:
                return self._taken(num_rows)
            if not buffer.has_room():
                # These elements were taken together before, and must be again, whatever their size.
                buffer.limit_bytes = 2 * max(buffer.limit_bytes, 1)

    def _allow(self, num_more: int) -> None:
        buffer = self._buffer
        with buffer.changed:
            buffer.num_allowed = max(buffer.num_allowed, self._num_taken + num_more)
            buffer.changed.notify_all()

    def _has_enough(self, num_rows: int) -> bool:
        buffer = self._buffer
        return len(buffer.items) >= num_rows or buffer.is_over or not buffer.has_room()

    def _wait(self, num_rows: int) -> None:
        buffer = self._buffer
        with buffer.changed:
            try:
                buffer.num_wanted = num_rows
                if buffer.changed.wait_for(lambda: self._has_enough(num_rows), PATIENCE_S):
                    return
                buffer.num_wanted = 1
                progress = buffer.progress
                for within_s in wait_intervals(progress.__str__, "timeouts.data", progress=progress.look):
                    if buffer.changed.wait_for(lambda: self._has_enough(1), within_s):
                        return
            finally:
                buffer.num_wanted = 0

    def _taken(self, num_rows: int) -> Rows:
        buffer = self._buffer
        is_over = buffer.is_over
        items = [buffer.items.popleft() for _ in range(min(num_rows, len(buffer.items)))]
        failure = None
        if is_over and len(items) < num_rows and (not items or is_of_next_element(buffer.failure)):
            failure, buffer.failure = buffer.failure, None
        size = buffer.element_bytes
        buffer.taken_bytes += sum(map(bytes_of, items)) if size is None else size * len(items)
        first, self._num_taken = self._num_taken, self._num_taken + len(items)
        if self._is_ahead:
            self._allow(min(num_rows, MOST_ROWS))
        return rows_of_items(buffer.elements, items, first, failure)


def bytes_of(item: Leaves) -> int:
    """Return the bytes of an element."""
    return sum([getattr(leaf, "nbytes", 0) for leaf in item])


def is_of_next_element(failure: BaseException | None) -> bool:
    """Return whether an error of a generator is that of its next element, which is handed out as one that failed."""
    return isinstance(failure, Exception) and not isinstance(failure, NO_ELEMENT_FAILED)


def rows_of_items(
    elements: ElementStream | None, items: list[Leaves], first: int, failure: BaseException | None
) -> Rows:
    """Return elements of a stream as rows, and one that failed after them.

    Parameters
    ----------
    elements
        The stream; None if it failed to start.
    items, first
        The elements, and the number of the first one.
    failure
        Why the stream ended after them; None if it did not, or is at its end.

    Raises
    ------
    Exhausted
        There are no elements.
    """
    if not is_of_next_element(failure):
        if items:
            return elements.rows(items, first)  # type: ignore[union-attr]
        raise failure or Exhausted
    failed: Any = FailedElement(failure)  # type: ignore[arg-type]
    if not items:
        return bundle(LONE, [failed])
    rows = elements.rows(items, first)  # type: ignore[union-attr]
    return bundle(rows.structure, [*[rows.raw(index) for index in range(len(rows))], failed], rows.label)


def _stop(buffer: _ElementBuffer, thread: threading.Thread) -> None:
    buffer.is_stopped = True
    with buffer.changed:
        buffer.changed.notify_all()
        is_waiting = buffer.is_waiting
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(_END_S if is_waiting else 0.01)
