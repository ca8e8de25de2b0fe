"""Calls that are made again if a worker is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVarTuple

from daskdist.errors import ClusterError, CollectiveError, RepeatedLossError
from daskdist.execute.caller import Handle
from daskdist.strategy.internals import StrategyInternals

_Others = TypeVarTuple("_Others")

logger: Final = logging.getLogger("daskdist")

# Seconds to wait for the loss of a worker after a replica failed. The error may be a consequence of a loss that is not
# known yet, for example that of a library whose own connection broke.
_KNOWN_WITHIN_S: Final = 0.5
# The same after an error that names a lost worker, as that loss is certain.
_CERTAIN_WITHIN_S: Final = 5.0


def call_with_restarts(
    internals: StrategyInternals, call: Callable[[], tuple[Sequence[Handle], *_Others]], most: int
) -> tuple[Sequence[Handle], *_Others]:
    """Make a call on all replicas and wait for it; make it again while workers are lost.

    Parameters
    ----------
    internals
        The internal parts of the strategy.
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
    RepeatedLossError
        Each attempt ended with the loss of workers, and only one is left, which might be lost, too.
    """
    backend, num_restarts, all_lost = internals.backend, 0, list[str]()
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
            failed = error
        num_restarts += 1
        all_lost += lost
        why = f"lost {', '.join(lost)}, on which there were replicas of this call; it is made again"
        logger.warning("run: %s (%d of %d times)", why, num_restarts, most)
        backend.end_call(handles, why)
        internals.recover()
        if not internals.spare_last(all_lost) and num_restarts > 1:
            raise RepeatedLossError(
                f"run: the call was being made each time that {', '.join(all_lost)} were lost, and is not made on the "
                "last worker, with which the strategy continues"
            ) from failed
