"""Waits that say in the log what they wait for, and end with an error at a limit."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from daskdist.call_progress import under_way
from daskdist.config import seconds
from daskdist.errors import WaitTimeoutError

logger: Final = logging.getLogger("daskdist")

# Seconds until a wait is logged for the first time, and the most until the next time.
_LOGGED_AFTER_S: Final = 30.0
_LOGGED_EVERY_S: Final = 600.0


def wait_intervals(
    waited_for: str | Callable[[], str],
    setting: str | None,
    most_s: float = _LOGGED_EVERY_S,
    *,
    progress: Callable[[], Any] = lambda: None,
    limit_s: float | None = None,
) -> Iterator[float]:
    """Yield the seconds of each part of a wait, which the caller waits before it asks for the next one.

    Parameters
    ----------
    waited_for
        The name of what is waited for, in messages.
    setting
        The name of the setting that limits the wait; None for a user's function that may take any time.
    most_s
        The longest part.
    progress
        Returns a value that changes while there is progress, after which the wait counts from its beginning.
    limit_s
        The value of the setting, if it is that of another thread.

    Raises
    ------
    WaitTimeoutError
        The limit is over.

    >>> next(wait_intervals("an element", "timeouts.data", most_s=2.0))
    2.0
    """
    begun_at, reached = time.monotonic(), progress()
    if limit_s is None:
        limit_s = math.inf if setting is None else seconds(setting)
    first_log_at = log_at = min(_LOGGED_AFTER_S, limit_s / 2)
    while True:
        if (reached_now := progress()) != reached:
            begun_at, reached, log_at = time.monotonic(), reached_now, first_log_at
        waited_s = time.monotonic() - begun_at
        if waited_s >= limit_s:
            name = waited_for if isinstance(waited_for, str) else waited_for()
            raise WaitTimeoutError(f"waited {waited_s:.0f} s for {name}, which is longer than daskdist.{setting}")
        if waited_s >= log_at:
            name = waited_for if isinstance(waited_for, str) else waited_for()
            most = "" if setting is None else f", up to {limit_s:g} s (daskdist.{setting})"
            logger.warning("waiting for %s for %.0f s%s", name, waited_s, most)
            log_at = waited_s + min(waited_s, _LOGGED_EVERY_S)
        if under_way.call is not None:
            # This wait has a limit of its own, which comes before that of the call that it is part of.
            under_way.call.num_begun += 1
        yield min(most_s, max(log_at - waited_s, 0.001), limit_s - waited_s)
