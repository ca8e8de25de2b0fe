"""Calls that are made again if a worker is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVarTuple

from daskdist.errors import ClusterError, CollectiveError
from daskdist.execute.caller import Handle
from daskdist.strategy.backend import Backend

_Others = TypeVarTuple("_Others")

logger: Final = logging.getLogger("daskdist")

# Seconds to wait for the loss of a worker after a replica failed. The error may be a consequence of a loss that is not
# known yet, for example that of a library whose own connection broke.
_KNOWN_WITHIN_S: Final = 0.5
# The same after an error that names a lost worker, as that loss is certain.
_CERTAIN_WITHIN_S: Final = 5.0


def call_with_restarts(
    backend: Backend, call: Callable[[], tuple[Sequence[Handle], *_Others]], most: int
) -> tuple[Sequence[Handle], *_Others]:
    """Make a call on all replicas and wait for it; make it again while workers are lost.

    Parameters
    ----------
    backend
        The backend that makes the call.
    call
        Makes the call on the current replicas; returns the handles of its results, and anything else.
    most
        The most times that it is made again.

    Returns
    -------
    tuple
        The result of ``call``.

    Raises
    ------
    Exception
        The error of a replica, if no worker was lost, or the call was made again that often.
    """
    num_restarts = 0
    while True:
        handles: Sequence[Handle] = ()
        try:
            called = call()
            handles = called[0]
            backend.wait_for_step(handles)
            return called
        except Exception as error:
            is_certain = isinstance(error, (ClusterError, CollectiveError))
            lost = backend.recovery.lost_workers(_CERTAIN_WITHIN_S if is_certain else _KNOWN_WITHIN_S)
            if num_restarts == most or not lost:
                raise
        num_restarts += 1
        why = f"lost {', '.join(lost)}, on which there were replicas of this call; it is made again"
        logger.warning("run: %s (%d of %d times)", why, num_restarts, most)
        backend.end_call(handles, why)
