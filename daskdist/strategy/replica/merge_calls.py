"""The contract of what a strategy does for functions between its replicas, and its implementation in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol


class MergeCalls(Protocol):
    """Brings variables to a function that `ReplicaContext.merge_call` calls, and its changes to the replicas."""

    @property
    def makes_variables(self) -> bool:
        """Return whether variables can be made with the strategy: the program hears of them."""
        ...

    def collect(self, arguments: Any) -> Any:
        """Return what a replica sends along with the arguments that it gives."""
        ...

    def open(self, along: Sequence[Any]) -> contextlib.AbstractContextManager[Callable[[], Sequence[Any]]]:
        """Let the function use what replicas sent, in a ``with`` block; give a getter of each replica's changes."""
        ...

    def apply(self, changes: Any, replica: Any) -> None:
        """Apply a replica's changes to it."""
        ...


class LocalMergeCalls:
    """Functions between replicas of one process, which find the variables themselves."""

    makes_variables = True

    def collect(self, arguments: Any) -> None:
        """Return None."""

    @contextlib.contextmanager
    def open(self, along: Sequence[Any]) -> Iterator[Callable[[], Sequence[Any]]]:
        """Give a getter of no changes."""
        yield lambda: [()] * len(along)

    def apply(self, changes: Any, replica: Any) -> None:
        """Do nothing: the function has changed the variables."""
