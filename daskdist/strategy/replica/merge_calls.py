"""The contract for variables in functions called by `ReplicaContext.merge_call`, and its local implementation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol


class MergeCalls(Protocol):
    """Transfers variables to a function called by `ReplicaContext.merge_call`, and its changes to the replicas."""

    @property
    def makes_variables(self) -> bool:
        """Return whether the function can create variables, which the program must learn of."""
        ...

    def collect(self, arguments: Any) -> Any:
        """Return the extra data that a replica sends with its arguments."""
        ...

    def open(self, along: Sequence[Any]) -> contextlib.AbstractContextManager[Callable[[], Sequence[Any]]]:
        """Make the extra data of replicas available in a ``with`` block, as a getter of each replica's changes."""
        ...

    def apply(self, changes: Any, replica: Any) -> None:
        """Apply a replica's changes to it."""
        ...


class LocalMergeCalls:
    """The implementation for replicas of one process, whose functions access the variables directly."""

    makes_variables = True

    def collect(self, arguments: Any) -> None:
        """Return None."""

    @contextlib.contextmanager
    def open(self, along: Sequence[Any]) -> Iterator[Callable[[], Sequence[Any]]]:
        """Provide a getter of no changes."""
        yield lambda: [()] * len(along)

    def apply(self, changes: Any, replica: Any) -> None:
        """Do nothing, as the function has changed the variables itself."""
