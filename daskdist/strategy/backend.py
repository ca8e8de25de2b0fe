"""The contracts between a strategy, the values that it gives, and where its replicas are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from daskdist.execute.caller import Handle
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.status import WorkerStatus

# For each slot of a wired nest, which result it is part of, and what takes it out.
Picks = Sequence[tuple[int, Callable[[Any], Any]]]


class ResultSource(Protocol):
    """Has the results of calls, and makes further calls with them: all that an asynchronous value needs."""

    @property
    def defers(self) -> bool:
        """Return whether calls take handles of results that are still to come, also of other sources of the cluster."""
        ...

    @property
    def client(self) -> Any:
        """The connection to the cluster where results are; None in this process.

        Sources of one client take each other's results.
        """
        ...

    @property
    def live_workers(self) -> Any:
        """The workers without which results do not come: their addresses, or what tells them; empty in this process."""
        ...

    def call(
        self, function: Callable[..., Any], handles: Sequence[Handle], *args: Any, worker: str | None = None, name: str
    ) -> Handle:
        """Call ``function(results of the handles, *args)`` once: on a worker, or in this process if it is None."""
        ...

    def result(self, handle: Handle) -> Any:
        """Return a result, waited for and brought here; raise what its call raised."""
        ...

    def results(self, handles: Sequence[Handle]) -> list[Any]:
        """Return several results, waited for and brought here; raise what the first of them that failed raised."""
        ...

    def see(self, step: Sequence[Handle]) -> None:
        """Wait for the results of one call on all replicas; raise what one of them raised as soon as it did."""
        ...

    def is_done(self, handle: Handle) -> bool:
        """Return whether a call is over."""
        ...

    def at_hand(self, handle: Handle) -> tuple[Any] | None:
        """Return a result in a tuple, if it is in this process already; None otherwise."""
        ...

    def as_futures(self, handles: Sequence[Handle], picks: Picks) -> tuple[Sequence[Any], Picks]:
        """Return what stands for results in a graph of Dask's, and the picks that take parts out of those."""
        ...


class Backend(ResultSource, Protocol):
    """Makes the calls of a strategy, on its replicas or between them.

    ====================  =====================  ================================================================
    backend               replicas               calls
    ====================  =====================  ================================================================
    `LocalBackend`        in this process        made at once; a handle is the result, an error is raised at once
    `ClusterBackend`      on workers             sent in order; a handle stands for the result, an error is raised
                                                 where the result is looked at
    ====================  =====================  ================================================================

    Notes
    -----
    `daskdist.testing.BackendLaws` holds for all of them. Calls on one replica are made in the order of the program,
    each thread's in its own, one after the other, and see what the ones before them changed. A handle may be given to
    any later call. A call that raises does not end others; what it was to give fails wherever it is needed, with the
    same error. At most ``daskdist.max-steps-in-flight`` calls of ``run`` are under way: then the program waits. A
    result whose handles are gone is dropped where it is.
    """

    def call_replicas(
        self, operation: str, fn: Callable[..., Any], leaves: Sequence[Any], treespec: Any, group: ReplicaGroup
    ) -> Sequence[Handle]:
        """Call a function on every replica.

        Parameters
        ----------
        operation
            The name of the call in messages; calls of ``run`` are the steps that are counted.
        fn
            The function.
        leaves, treespec
            Those of its positional and keyword arguments; each `PerReplica` stands for the replica's own value.
        group
            The replicas.

        Returns
        -------
        Sequence
            For each replica the handle of what the function returns, as it is or flat as a `FlatResult`.

        Raises
        ------
        ArgumentError
            The function or an argument cannot be sent.
        ClusterError
            It is closed, or a worker is lost.
        """
        ...

    def structures(self, handles: Sequence[Handle]) -> list[tuple[Any, tuple[bool, ...]]]:
        """Return for each result of a call on replicas its structure, and which of its leaves are None; waited for."""
        ...

    def known_function(self, fn: Callable[..., Any]) -> Any:
        """Return what stands for a function as it was last called on replicas, a new object if it changed.

        It may be referred to weakly. None where nothing stands for the function.
        """
        ...

    def wait(self, handles: Sequence[Handle]) -> None:
        """Wait until calls are over, however they end."""
        ...

    def finish(self) -> None:
        """Wait until all calls are over; raise an error that nobody has looked at."""
        ...

    def raise_unseen(self) -> None:
        """Raise an error that is known by now and that nobody has looked at, nor can; the end of a pass asks."""
        ...

    def forget(self, variable: int) -> None:
        """Drop what replicas keep of a variable, by its number, once the calls before are over.

        The garbage collector calls it, in any thread and at any time.
        """
        ...

    @property
    def in_doubt(self) -> bool:
        """Return whether workers may be lost; `recover` tells."""
        ...

    def recover(self, group: ReplicaGroup) -> ReplicaGroup:
        """Return the replicas to go on with: those on the workers that are left, or the group itself if none is lost.

        Calls on the workers that are left are over by then, and what needs the others has failed.
        """
        ...

    def status(self, group: ReplicaGroup, *, asks: bool = True) -> tuple[WorkerStatus, ...]:
        """Return the status of each worker, lost ones included; the others are asked, for a second at most.

        If not ``asks``, it is as far as the program knows it, and which calls are running is left out.
        """
        ...

    def close(self) -> None:
        """Drop what is under way, and free all that the strategy has; a call after it is a `ClusterError`."""
        ...
