"""The variables of functions called by `ReplicaContext.merge_call`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class MergeCalls:
    """Transfers variables to a function called by `ReplicaContext.merge_call`, and its changes to the replicas.

    The functions of replicas of one process access the variables directly, so that there is nothing to transfer; on a
    cluster a subclass does.
    """

    # Whether the function can create variables, which the program must learn of.
    makes_variables = True

    def collect(self, arguments: Any) -> Any:
        """Return the extra data that a replica sends with its arguments."""

    @contextlib.contextmanager
    def open(self, along: Sequence[Any]) -> Iterator[Callable[[], Sequence[Any]]]:
        """Make the extra data of replicas available in a ``with`` block, as a getter of each replica's changes."""
        yield lambda: [()] * len(along)

    def apply(self, changes: Any, replica: Any) -> None:
        """Apply a replica's changes to it."""
