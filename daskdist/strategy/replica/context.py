"""`ReplicaContext`: the current replica or cross-replica scope, and its collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import optree

from daskdist.core.arguments import whole_number
from daskdist.core.functions.current_context import current_context
from daskdist.devices import are_loaded, named, stream_of
from daskdist.errors import ArgumentError
from daskdist.strategy.collectives.operations import AllGather, AllReduce, Merge, all_reduce_of
from daskdist.strategy.collectives.rendezvous import Collective, Rendezvous
from daskdist.strategy.reduce.reductions import Op
from daskdist.strategy.replica.contract import StrategyContract
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.device_arrays import catch_up, host_nest, in_stream_of, moved_nest, own_copy
from daskdist.strategy.values.flat import LEAVES, flattened
from daskdist.strategy.values.per_replica import PerReplica

# The advice for a distributed dataset that is iterated over inside a function that replicas run.
TO_REPLICAS: Final = (
    "Give run the batch, run(fn, args=(next(iterator),)), or the distributed dataset itself, "
    "run(fn, args=(dataset,)): then fn gets an iterator over its replica's own part"
)
# Types of values that need no conversion.
_GIVEN: Final = LEAVES - {type(None)}


class ReplicaContext:
    """The replica that a function runs on, and its collectives with the other replicas.

    Not made directly: `get_replica_context` gives it.

    Parameters
    ----------
    replica_id_in_sync_group
        Which of the replicas it is, from 0 on.
    strategy
        Gives the strategy whose replicas these are.
    num_replicas_in_sync
        How many there are.
    rendezvous
        Gives the rendezvous of those that meet in this process.
    store
        Gives what replicas of this process keep.
    device
        The name of its device.
    """

    def __init__(
        self,
        replica_id_in_sync_group: int,
        num_replicas_in_sync: int,
        strategy: Callable[[], Any],
        rendezvous: Callable[[], Rendezvous] | None = None,
        store: Callable[[], Any] = lambda: None,
        device: str = "CPU:0",
    ) -> None:
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync
        self._strategy = strategy
        self._rendezvous = rendezvous
        self.store = store
        self._device = device
        # True if assignments to variables are for this replica's copy alone.
        self.updates_alone = False

    @cached_property
    def strategy(self) -> Any:
        """The strategy whose replicas these are. On a worker it tells of them, and is of use between them."""
        return self._strategy()

    @property
    def devices(self) -> tuple[str, ...]:
        """The name of the replica's device, such as ``("CPU:0",)``."""
        return (self._device,)

    def all_reduce(self, reduce_op: Op | str, value: Any, options: Any = None) -> Any:
        """Make one value of every replica's, and give it to all.

        Parameters
        ----------
        reduce_op
            As `Strategy.reduce` takes it.
        value
            An array or number, or a nest of some: of one structure and of the same shapes on all replicas. A `Variable`
            stands for this replica's copy.
        options
            Taken for compatibility.

        Returns
        -------
        nest
            The same on all replicas, to the last bit: NumPy arrays and numbers, and for a replica that gave an array of
            a device, one of that, its own.

        Raises
        ------
        CollectiveError
            Another replica has ended, does not call it within ``daskdist.timeouts.collective`` seconds, calls something
            else, or gives other shapes; or a worker is lost.
        ArgumentError
            There is no such reduction, or a value is nothing to reduce.

        Notes
        -----
        All replicas call it. It goes from worker to worker, past the scheduler; inside of a process in memory. Values
        combine in the order of the replicas.

        >>> import daskdist
        >>> def step(x):
        ...     return daskdist.get_replica_context().all_reduce("SUM", x)
        >>> daskdist.MirroredStrategy(["CPU:0", "CPU:1"]).run(step, args=(daskdist.PerReplica([1.0, 2.0]),))
        PerReplica:{
          0: np.float64(3.0),
          1: np.float64(3.0)
        }
        """
        collective = all_reduce_of(reduce_op)
        leaves, treespec = _given("all_reduce", value)
        results = self.meet(collective, (leaves, treespec))
        return optree.tree_unflatten(treespec, results)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Put every replica's values together along an axis, in replica order, and give that to all.

        Parameters
        ----------
        value
            An array, or a nest of some, of one structure on all replicas. A `Variable` stands for this replica's copy.
        axis
            The axis, 0 being the rows. Along it values may differ in length.
        options
            Taken for compatibility.

        Returns
        -------
        nest
            An array for each, where `all_reduce` has it.

        Raises
        ------
        CollectiveError
            As `all_reduce` raises it.
        ArgumentError
            A value is a scalar or has no such axis, or shapes differ along another; or the axis is negative.
        """
        along = AllGather(whole_number("all_gather", "axis", axis, at_least=0))
        leaves, treespec = _given("all_gather", value)
        return optree.tree_unflatten(treespec, self.meet(along, (leaves, treespec)))

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Call a function once for all replicas, between them.

        Parameters
        ----------
        merge_fn
            Called as ``merge_fn(strategy, *args, **kwargs)`` in the process of the first replica, on its device, when
            all replicas have called this. Each leaf of its arguments is a `PerReplica` of what replicas give; text and
            None come bare where they are the same on all, and so does a `Variable`, which is read and assigned there as
            in the program, or given to ``strategy.extended.update``.
        args, kwargs
            What this replica gives.

        Returns
        -------
        nest
            This replica's part of what the function returns: of a `PerReplica` its value, of anything else that. Arrays
            are its own, on its device.

        Raises
        ------
        CollectiveError
            As `all_reduce` raises it.

        Notes
        -----
        On a cluster variables change on all replicas when the function is over, and not at all if it raises. One of
        which each replica has its own, ``ON_READ`` or an object, goes to the function only from among its arguments;
        one that is to be the same on all is there what the first replica has, whatever `extended.update` made of it.
        If an object changes there, all that are among them are others afterwards, with what they have in common.
        """
        if not isinstance(args, (list, tuple)):
            raise ArgumentError(f"merge_call: args is a {type(args).__name__}; give a tuple, such as args=(x,)")
        strategy, device = self.strategy, named(self._device)
        merge_calls = strategy.internals.merge_calls

        def call(fn: Callable[..., Any], merged: Any, along: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
            args, by_name = merged
            stream = contextlib.nullcontext() if device.is_host else in_stream_of(device)
            with merge_calls.open(along) as changes, cross_replica_scope(strategy, is_merge_call=True), stream:
                return fn(strategy, *args, **by_name), changes()

        call_args = _with_own_copies((tuple(args), dict(kwargs or {})), but_of=strategy.internals.token)
        merge = Merge(merge_fn, call)
        result, changes = self.meet(merge, (call_args, merge_calls.collect(call_args)))[self.replica_id_in_sync_group]
        merge_calls.apply(changes, self)
        if not device.is_host:
            with in_stream_of(device):
                return moved_nest(result, device)
        result = host_nest(result)
        # Copies, as with `all_reduce`; objects that are no arrays are shared in a process.
        return optree.tree_map(_own_array, result, none_is_leaf=True) if self.num_replicas_in_sync > 1 else result

    def meet(self, collective: Collective, contribution: Any) -> Any:
        """Take part in a collective with what this replica gives; return its result."""
        number = self.replica_id_in_sync_group
        if are_loaded():
            self._let_look(collective)
        if self._rendezvous is None:
            result, is_own = collective.final(collective.partial({number: contribution})), False
        else:
            result, is_own = self._rendezvous().meet(number, collective, contribution)
        if not isinstance(collective, (AllReduce, AllGather)):
            return result
        if are_loaded():
            # Results are on the device on which the replica gave its value.
            return [own_copy(value, leaf, is_own=is_own) for value, leaf in zip(result, contribution[0], strict=True)]
        if is_own:
            return result
        # Nobody else's: what one changes in place is its own.
        return [value.copy() if isinstance(value, np.ndarray) else value for value in result]

    def _let_look(self, collective: Collective) -> None:
        # Others look at what this replica gives in their own streams.
        device = named(self._device)
        if device.is_host:
            return
        catch_up(device)
        if isinstance(collective, Merge):
            # In whichever stream its function looks at it.
            stream_of(device).synchronize()

    def __repr__(self) -> str:
        return f"<ReplicaContext: replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync}>"


def _own_array(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _given(operation: str, value: Any) -> tuple[list[Any], Any]:
    leaves, treespec = flattened(value)
    if _GIVEN.issuperset(map(type, leaves)):
        return leaves, treespec
    copied = _with_own_copies(value)
    if copied is not value:
        leaves, treespec = flattened(copied)
    for leaf in leaves:
        if leaf is None or isinstance(leaf, (PerReplica, AsyncValue)):
            raise ArgumentError(
                f"{operation}: a value is {type(leaf).__name__}; give this replica's own, an array or a number"
            )
    return leaves, treespec


def _with_own_copies(nest: Any, but_of: str | None = None) -> Any:
    # Variables are read here: one replica goes on for the others, and would read its own copy for theirs. But what
    # knows its strategy is of use between replicas too.
    leaves, treespec = optree.tree_flatten(nest, none_is_leaf=True)

    def is_read(leaf: Any) -> bool:
        return hasattr(type(leaf), "read_value") and (but_of is None or getattr(leaf, "token", None) != but_of)

    if not any(map(is_read, leaves)):
        return nest
    return optree.tree_unflatten(treespec, [leaf.read_value() if is_read(leaf) else leaf for leaf in leaves])


class CrossReplicaScope:
    """A scope in which a strategy is current and no replica's function runs."""

    replica_id_in_sync_group = None

    def __init__(self, strategy: Any, *, is_merge_call: bool = False) -> None:
        self.strategy = strategy
        self.is_merge_call = is_merge_call


@contextlib.contextmanager
def cross_replica_scope(strategy: StrategyContract, *, is_merge_call: bool = False) -> Iterator[None]:
    """Make a strategy current in a ``with`` block: that of a scope, or of a function that `merge_call` calls."""
    token = current_context.set(CrossReplicaScope(strategy, is_merge_call=is_merge_call))
    try:
        yield
    finally:
        current_context.reset(token)


def current_replica() -> ReplicaContext | None:
    """Return the replica whose function is running here, if any."""
    context = current_context.get()
    return context if type(context) is ReplicaContext else None


def check_in_program(operation: str) -> None:
    """Refuse to iterate over a distributed dataset inside a function that replicas run.

    Raises
    ------
    RuntimeError
        A replica calls it, in a function that `Strategy.run` or `ReplicaContext.merge_call` calls. Each replica would
        take a step of its own there, and the others would never see that step.
    """
    context = current_context.get()
    if context is None or (type(context) is CrossReplicaScope and not context.is_merge_call):
        return
    if type(context) is CrossReplicaScope:
        who = "a function that merge_call calls"
    else:
        who = f"replica {context.replica_id_in_sync_group}, inside the function that it runs"
    raise RuntimeError(
        f"{operation}: a distributed dataset is iterated over by {who}; each replica would take steps from the others. "
        f"{TO_REPLICAS}"
    )


def is_free_for(strategy: Any) -> bool:
    """Return whether no replica's function runs here, and no scope of another strategy is open."""
    context = current_context.get()
    return context is None or (type(context) is CrossReplicaScope and context.strategy is strategy)


def current_scope_strategy() -> StrategyContract | None:
    """Return the strategy of the current scope, if any."""
    context = current_context.get()
    return context.strategy if type(context) is CrossReplicaScope else None
