"""`LoopProgress`: messages about loops that make no progress, and an error at a limit."""

from __future__ import annotations

import logging
from typing import Final

from daskdist.errors import ClusterError

# The seconds without progress after which a message is logged, and the most until the next one.
_LOGGED_AFTER_S: Final = 30.0
_LOGGED_EVERY_S: Final = 600.0
logger: Final = logging.getLogger("daskdist")


class LoopProgress:
    """The messages about loops of some replicas that make no progress.

    Parameters
    ----------
    then
        What becomes of a loop after the error.
    """

    __slots__ = ("_logged_s", "_then")

    def __init__(self, then: str) -> None:
        self._then = then
        # The time without progress that the last message told; 0 if there has been progress since.
        self._logged_s = 0.0

    def check(self, where: str, last_action: str, idle_s: float, most_s: float) -> None:
        """Log that a loop makes no progress, if it has not for long.

        Parameters
        ----------
        where
            The loop.
        last_action
            What it did last; "" if it has done nothing.
        idle_s
            The time since then.
        most_s
            The limit, ``daskdist.timeouts.loop``.

        Raises
        ------
        ClusterError
            The limit is over.
        """
        if idle_s <= min(_LOGGED_AFTER_S, most_s / 2):
            self._logged_s = 0.0
            return
        last = f"its last one was {last_action}" if last_action else "it has made none"
        if idle_s > most_s:
            raise ClusterError(
                f"{where} has taken no batch and made no collective operation or checkpoint for {idle_s:.0f} s, which "
                f"is longer than daskdist.timeouts.loop; {last}; {self._then}"
            )
        if not self._logged_s or idle_s > self._logged_s + min(self._logged_s, _LOGGED_EVERY_S):
            self._logged_s = idle_s
            text = "waiting for the next batch, collective operation or end of %s for %.0f s, up to %g s (%s); %s"
            logger.warning(text, where, idle_s, most_s, "daskdist.timeouts.loop", last)
