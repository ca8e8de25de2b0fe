"""The contracts between a strategy, the values that it returns, and the backend that calls its replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from daskdist.errors import ClusterError
from daskdist.execute.caller import Handle
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.status import WorkerStatus

# The operation of calls that prepare the remaining replicas after a loss.
RECOVERY: Final = "recovery"


class GenerationEndedError(ClusterError):
    """The replicas are others than those for which a call or a recovery was begun; see `Generations`."""


_T = TypeVar("_T")


class ResultSource(Protocol):
    """The interface that an asynchronous value needs: results of calls, and further calls with them."""

    @property
    def client(self) -> Any:
        """The connection to the cluster with the results; None in this process.

        Sources with the same client accept each other's results.
        """
        ...

    @property
    def live_workers(self) -> Any:
        """The workers that results depend on: their addresses, or the object that knows them; empty in this process."""
        ...

    def usable(self, value: Any) -> Any:
        """Return the reference of an asynchronous value, if it has one that calls accept; None otherwise."""
        ...

    def results(self, refs: Sequence[Any]) -> list[Any]:
        """Wait for several values, by their references, and return them.

        Raise the error of the first call that failed, or whose step failed on another replica.
        """
        ...

    def attempt(self, read: Callable[[], _T]) -> _T:
        """Call a function that waits for results; call it again if calls are made again because workers were lost."""
        ...

    def applied(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of values where one of them is, and return the reference of the result.

        If its worker is lost, the call is made again.

        Raises
        ------
        ArgumentError
            The function or an argument does not pickle.
        """
        ...

    def peek(self, ref: Any) -> tuple[Any] | None:
        """Return a value in a tuple if it is already in this process, or else None."""
        ...

    def as_future(self, ref: Any) -> Any:
        """Return a future of the result that a value is a part of, for a Dask graph."""
        ...


class PresentWorkers:
    """The state of the workers with replicas; this one is of replicas in this process, which cannot be lost."""

    # Whether something failed since `Recovery.recover` last checked them, whether one is known to be lost, and whether
    # one has said that it is going to end.
    in_doubt = has_lost = is_left = False

    @property
    def leaving(self) -> Sequence[str]:
        """The workers that take part and are going to end."""
        return ()


class Recovery:
    """The part that continues with other workers when some are lost; this one is of replicas that cannot be lost."""

    @property
    def in_doubt(self) -> bool:
        """Return whether workers may be lost, which `recover` checks."""
        return False

    def take_handed_over(self) -> Sequence[Mapping[int, Mapping[int, list[Any]]]]:
        """Return the values of workers that have left, once: number of a variable -> number of a replica -> leaves."""
        return ()

    def lost_workers(self, within_s: float) -> list[str]:
        """Return the workers that are lost but still have replicas, waiting up to some seconds for one.

        Raises
        ------
        ClusterError
            The program is not connected to the cluster.
        """
        return []

    def recover(self, group: ReplicaGroup) -> ReplicaGroup:
        """Return the remaining replicas after the loss of workers, or the group itself if none is lost.

        Calls on the remaining workers have finished by then, and those that need the others have failed.

        Raises
        ------
        GenerationEndedError
            More was lost meanwhile; call it again.
        """
        return group

    def with_replacements(self, group: ReplicaGroup) -> ReplicaGroup:
        """Return the replicas with those of workers that take the places of lost ones, or the group itself.

        Earlier calls have finished by then.
        """
        return group

    def waits_for_replacement(self, lost: Collection[str]) -> Iterator[float]:
        """Yield seconds to wait between attempts of `with_replacements`, while Dask may start lost workers again."""
        return iter(())


class CallRepetition:
    """The part that makes calls again that failed with a lost worker; this one is of replicas that cannot be lost."""

    # How often calls were made again, or given up.
    num_made_again = 0
    # Whether calls would have to be made again if workers are lost, or the scheduler is.
    is_needed = False

    def first_to_undo(self) -> int | None:
        """Return the number of the first call to undo, as it is to be made again; None if there is none."""
        return None

    def note_undone(self) -> None:
        """Note that the changes of variables by the calls that are to be made again are undone."""

    def note_aligned(self) -> None:
        """Note that all replicas have the same values of variables."""

    def lost_once(self) -> Collection[str]:
        """Return the workers that were lost with calls that are to be made again, and were made once."""
        return ()

    def make_again(self, group: ReplicaGroup) -> None:
        """Make the calls of steps again that failed because of a lost worker, and those after them."""

    def give_up(self, why: str) -> None:
        """Do not make the calls again that failed because of a lost worker, and log the reason."""


class Backend:
    """The interface that makes the calls of a strategy, on its replicas or once for all.

    Methods that have a body are those of calls in this process, which are made at once, and of which nothing is lost.

    ====================  =====================  ================================================================
    backend               replicas               calls
    ====================  =====================  ================================================================
    `LocalBackend`        in this process        made at once; a handle is the result, an error is raised at once
    `ClusterBackend`      on workers             sent in order; a handle stands for the result, an error is raised
                                                 where the result is looked at
    ====================  =====================  ================================================================

    Notes
    -----
    All backends pass `daskdist.testing.BackendLaws`. Calls on one replica are made one after the other in the order of
    the program (of each of its threads), and see the changes of earlier calls. A handle may be passed to any later
    call. An error of a call does not end others; its results fail wherever they are needed, with the same error. At
    most ``daskdist.max-steps-in-flight`` calls of ``run`` are in flight; then the program waits. A result without
    handles is dropped on its worker.
    """

    # Whether handles are references to results elsewhere, and the backend is a `ResultSource`.
    defers: bool = False
    # The connection to the cluster with the results; None in this process.
    client: Any = None
    # The workers with replicas: what `PresentWorkers` has.
    live_workers: Any = PresentWorkers()
    # What continues with other workers when some are lost, and what makes calls again.
    recovery: Recovery = Recovery()
    repetition: CallRepetition = CallRepetition()
    # The `Generations` of the strategy, once there is one.
    generations: Any = None

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], *, worker: str | None = None, name: str
    ) -> Sequence[Handle]:
        """Call ``function(*args)`` once: on a worker, or in this process if it is None.

        Parameters
        ----------
        function
            The function.
        args
            Nests, in which handles and asynchronous values stand for the values.
        worker
            The address of the worker.
        name
            The name of the call in messages.

        Returns
        -------
        Sequence
            One handle, that of the result.
        """
        raise NotImplementedError

    def logged(self, make: Callable[[Any], Any]) -> Any:
        """Make a call on results of a step for the current replicas, by a function that makes it for given ones.

        If a worker is lost before the step is complete, the call is made again for the remaining replicas.
        """
        return make(self.generations.now)

    def wait_for_step(self, handles: Sequence[Handle]) -> None:
        """Wait for the results of one call on all replicas; raise an error as soon as one replica fails."""

    def is_done(self, handle: Handle) -> bool:
        """Return whether a call has finished."""
        return True

    def call_replicas(
        self, operation: str, fn: Callable[..., Any], leaves: Sequence[Any], treespec: Any, group: ReplicaGroup
    ) -> Sequence[Handle]:
        """Call a function on every replica.

        Parameters
        ----------
        operation
            The name of the call in messages; calls of ``run`` count as steps.
        fn
            The function.
        leaves, treespec
            The leaves and structure of the positional and keyword arguments; each `PerReplica` stands for the replica's
            value.
        group
            The replicas.

        Returns
        -------
        Sequence
            The handle of each replica's result, which is a `FlatResult` on a cluster.

        Raises
        ------
        ArgumentError
            The function or an argument cannot be sent.
        ClusterError
            The backend is closed, or a worker is lost.
        """
        raise NotImplementedError

    def results(self, handles: Sequence[Handle]) -> list[Any]:
        """Wait for several results and return them in this process; raise the error of the first that failed."""
        return list(handles)

    def structures(self, handles: Sequence[Handle]) -> list[tuple[Any, tuple[bool, ...]]]:
        """Wait for the results of a call on replicas; return the structure of each, and which leaves are None."""
        raise NotImplementedError

    def finish(self, *, raises_all: bool = False) -> None:
        """Wait until all calls have finished.

        Raise the error of a call whose results were not read and no longer can be, or, if ``raises_all``, that were not
        read yet.
        """

    def raise_unobserved(self) -> None:
        """Raise the error of a call whose results were not read and no longer can be; called at the end of a pass."""

    def note_iterator(self, iterator: Any) -> None:
        """Show the figures of an iterator over a distributed dataset on the dashboard, if there is one."""

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """Wait while a condition holds and calls are under way; the end of a call may change the condition."""

    def forget(self, variable: int) -> None:
        """Drop the copies of a variable, by its number, once earlier calls have finished.

        The garbage collector calls this, in any thread and at any time.
        """
        raise NotImplementedError

    def cut_for(self, leaf: Any, group: ReplicaGroup) -> None:
        """Split the global batch of a leaf for replicas, if it was split for another number of them."""

    def end_call(self, handles: Sequence[Handle], why: str) -> None:
        """End the functions of a call at their next batch, collective operation or checkpoint, and wait for that.

        Raises
        ------
        ClusterError
            They do not end within ``daskdist.timeouts.step`` seconds.
        """

    def status(self, group: ReplicaGroup, *, asks: bool = True) -> tuple[WorkerStatus, ...]:
        """Return the status of each worker, lost ones included; the others are asked, for a second at most.

        If not ``asks``, it is the program's knowledge, without the running calls.
        """
        raise NotImplementedError

    def check_open(self, operation: str) -> None:
        """Raise a `ClusterError` if the backend is closed."""
        raise NotImplementedError

    def close(self) -> None:
        """Drop unfinished calls and free all resources of the strategy; later calls raise `ClusterError`."""
        raise NotImplementedError
