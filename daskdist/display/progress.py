"""A progress line for training."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Final, TextIO

# The least time between two redraws on a terminal, in seconds.
_REDRAW_S: Final = 0.1


class Progress:
    """A bar with loss and speed: one line that is redrawn on a terminal, a few plain lines elsewhere.

    Parameters
    ----------
    num_rows
        The total number of rows.
    stream
        The stream to write to.
    num_lines
        The number of lines to write if the stream is not a terminal.
    clock
        Returns the time in seconds.

    >>> import io
    >>> progress = Progress(200, stream := io.StringIO(), num_lines=2, clock=iter([0, 1, 2]).__next__)
    >>> progress.update(100, loss=1.5, note="epoch 1/2")
    >>> progress.update(200, loss=0.5, note="epoch 2/2")
    >>> print(stream.getvalue(), end="")
       50 %  epoch 1/2  loss 1.5000  100 rows/s
      100 %  epoch 2/2  loss 0.5000  100 rows/s
    """

    def __init__(
        self,
        num_rows: int,
        stream: TextIO,
        num_lines: int = 5,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._num_rows = num_rows
        self._stream = stream
        self._num_lines = num_lines
        self._clock = clock
        self._redraws = stream.isatty()
        self._start_s = clock()
        self._drawn_s = float("-inf")
        self._lines_written = 0
        self._is_open = False

    def update(self, rows: int, *, loss: float, note: str = "") -> None:
        """Show that ``rows`` rows in total are done."""
        now_s = self._clock()
        share = min(rows / self._num_rows, 1.0) if self._num_rows else 1.0
        rate = rows / max(now_s - self._start_s, 1e-9)
        parts = [f"{100 * share:3.0f} %", note, f"loss {loss:.4f}", f"{rate:,.0f} rows/s"]
        text = "  ".join(part for part in parts if part)
        if not self._redraws:
            if int(share * self._num_lines) > self._lines_written:
                self._lines_written = int(share * self._num_lines)
                self._stream.write(f"  {text}\n")
        elif share == 1.0 or now_s - self._drawn_s >= _REDRAW_S:
            self._drawn_s, self._is_open = now_s, True
            room = shutil.get_terminal_size().columns - len(text) - 4
            bar = _bar(share, min(room, 30), (self._stream.encoding or "").lower().startswith("utf"))
            self._stream.write(f"\r  {bar}{text}\x1b[K")
        self._stream.flush()

    def close(self) -> None:
        """End the line; what was shown stays."""
        if self._is_open:
            self._is_open = False
            self._stream.write("\n")
            self._stream.flush()


def _bar(share: float, width: int, has_blocks: bool) -> str:
    if width < 5:
        return ""
    full = round(share * width)
    done, open_ = ("█", "░") if has_blocks else ("#", "-")
    return done * full + open_ * (width - full) + " "
