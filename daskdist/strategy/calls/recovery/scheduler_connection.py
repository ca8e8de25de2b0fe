"""The connection to the scheduler of a strategy, which may be lost and come back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from distributed import Client

from daskdist.config import seconds
from daskdist.errors import WaitTimeoutError
from daskdist.execute.callers.cluster_requests import closed_error, wait_for_scheduler
from daskdist.execute.private_names import reconnect_for

logger: Final = logging.getLogger("daskdist")

# Seconds for which the client looks for a scheduler longer than the strategy waits.
_LONGER_S: Final = 5.0


class SchedulerConnection:
    """The connection to the scheduler that the strategy knows of; another one means that its scheduler was lost.

    Parameters
    ----------
    client
        The client, which connects again by itself to a scheduler at the same address.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: Any = client.scheduler_comm
        # The connection to a scheduler that came back, while the strategy has yet to continue with it.
        self._renewed: Any = None
        self._has_given_up = False
        # Otherwise the client would close itself earlier.
        reconnect_for(client, seconds("timeouts.scheduler") + _LONGER_S)

    @property
    def is_lost(self) -> bool:
        """Return whether the scheduler was lost, and may come back or has come back."""
        client = self._client
        if client.status == "connecting":
            return not self._has_given_up
        return client.status == "running" and client.scheduler_comm is not self._known

    @property
    def is_lost_again(self) -> bool:
        """Return whether the scheduler is lost, also the one that `renew` waited for if there is one."""
        # While the client connects again, it has no connection either.
        return self.is_lost and (self._renewed is None or self._client.scheduler_comm is not self._renewed)

    def renew(self, meanwhile: Callable[[], None]) -> None:
        """Wait for a scheduler at the same address.

        Parameters
        ----------
        meanwhile
            Called now and then during the wait.

        Raises
        ------
        ClusterError
            There is none within ``daskdist.timeouts.scheduler``, or the client is closed.
        """
        client = self._client
        address, within_s = client.scheduler.address, seconds("timeouts.scheduler")
        logger.warning(
            "lost the scheduler at %s; it is waited for up to %g s (daskdist.timeouts.scheduler)", address, within_s
        )
        try:
            wait_for_scheduler(client, meanwhile)
        except WaitTimeoutError as error:
            self._has_given_up = True
            raise closed_error(client) from error
        if client.status != "running":
            raise closed_error(client)
        self._renewed = client.scheduler_comm

    def note(self) -> None:
        """Note that the strategy continues with the scheduler that `renew` waited for."""
        self._known, self._renewed, self._has_given_up = self._renewed, None, False
