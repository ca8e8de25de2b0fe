"""`ReplicaContext`: the current replica or cross-replica scope, and its collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
import optree

from daskdist.cached_property import cached_property
from daskdist.checkpoint.checkpoint_manager import CheckpointManager
from daskdist.context_variables import changed
from daskdist.core.arguments import whole_number
from daskdist.core.functions.current_context import current_context
from daskdist.devices import are_loaded, named, stream_of
from daskdist.errors import ArgumentError
from daskdist.strategy.collectives.operations import AllGather, AllReduce, Merge, all_reduce_of
from daskdist.strategy.collectives.rendezvous import Collective, Rendezvous
from daskdist.strategy.reduce.reductions import Op
from daskdist.strategy.replica.call_end import NEVER, CallEnd
from daskdist.strategy.replica.checkpoints import ReplicaCheckpoints
from daskdist.strategy.replica.contract import StrategyContract, internals_of
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.device_arrays import catch_up, in_stream_of, own_copy, placed_nest
from daskdist.strategy.values.encoding import NUMBERS
from daskdist.strategy.values.flat import flattened
from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.values.variable_contract import VariableContract, token_of

# The advice for a distributed dataset that is iterated over inside a function that replicas run.
TO_REPLICAS: Final = (
    "Pass the batch to run, run(fn, args=(next(iterator),)), or the distributed dataset itself, "
    "run(fn, args=(dataset,)): then fn gets an iterator over the part of its replica"
)


class ReplicaContext:
    """The replica that a function runs on, and its collectives with the other replicas.

    It is not created directly: `get_replica_context` returns it.

    Parameters
    ----------
    replica_id_in_sync_group
        The number of the replica, from 0.
    strategy
        Returns the strategy of the replica.
    num_replicas_in_sync
        The number of replicas.
    rendezvous
        Returns the rendezvous of the replicas in this process; by default that of a single replica.
    store
        Returns the store of the replicas in this process.
    device
        The name of the replica's device.
    end
        Returns whether the call is to end; by default nothing ends it.
    """

    def __init__(
        self,
        replica_id_in_sync_group: int,
        num_replicas_in_sync: int,
        strategy: Callable[[], Any],
        rendezvous: Callable[[], Rendezvous] = lambda: Rendezvous((0,)),
        store: Callable[[], Any] = lambda: None,
        device: str = "CPU:0",
        end: CallEnd = NEVER,
    ) -> None:
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync
        self._strategy = strategy
        self._rendezvous = rendezvous
        self._store = store
        self._device = device
        self._end = end
        # The checkpoints of the call, once there are some.
        self._checkpoints: ReplicaCheckpoints | None = None
        # True if assignments to variables only change this replica's copy.
        self._updates_alone = False

    @cached_property
    def strategy(self) -> Any:
        """The strategy of the replica. On a worker it describes the replicas and works in cross-replica functions."""
        return self._strategy()

    @property
    def devices(self) -> tuple[str, ...]:
        """The name of the replica's device, such as ``("CPU:0",)``."""
        return (self._device,)

    def all_reduce(self, reduce_op: Op | str, value: Any, options: Any = None) -> Any:
        """Reduce the values of all replicas and return the result on all of them.

        Parameters
        ----------
        reduce_op
            A reduction, as for `Strategy.reduce`.
        value
            An array or number, or a nest of those, with the same structure and shapes on all replicas. A `Variable`
            stands for this replica's copy.
        options
            Accepted for compatibility and ignored.

        Returns
        -------
        nest
            The result, the same on all replicas to the last bit: NumPy arrays and numbers; for a device array, an array
            on that device. Each replica gets its own copy.

        Raises
        ------
        CollectiveError
            Another replica has finished, does not make the call within ``daskdist.timeouts.collective`` seconds, makes
            another call, or contributes other shapes; or a worker is lost.
        ArgumentError
            The reduction is unknown, or a value cannot be reduced.

        Notes
        -----
        All replicas must call it. Data goes directly between workers, and through memory within a process. Values are
        combined in the order of the replicas.

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
        results = self._meet(collective, (leaves, treespec))
        return optree.tree_unflatten(treespec, results)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenate the values of all replicas along an axis, in replica order, and return the result on all of them.

        Parameters
        ----------
        value
            An array, or a nest of arrays with the same structure on all replicas. A `Variable` stands for this
            replica's copy.
        axis
            The axis; 0 for the rows. Values may differ in length along it.
        options
            Accepted for compatibility and ignored.

        Returns
        -------
        nest
            An array for each leaf, placed as by `all_reduce`.

        Raises
        ------
        CollectiveError
            As for `all_reduce`.
        ArgumentError
            A value is a scalar or lacks the axis, shapes differ along another axis, or the axis is negative.
        """
        along = AllGather(whole_number("all_gather", "axis", axis, at_least=0))
        leaves, treespec = _given("all_gather", value)
        return optree.tree_unflatten(treespec, self._meet(along, (leaves, treespec)))

    def merge_call(self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Call a function once for all replicas, in the cross-replica context.

        Parameters
        ----------
        merge_fn
            Called as ``merge_fn(strategy, *args, **kwargs)`` in the process of the first replica, on its device, once
            all replicas have made this call. Each leaf of its arguments is a `PerReplica` of the replicas' values; text
            and None that are the same on all replicas are passed unwrapped, and so is a `Variable`, which is read and
            assigned as in the program, or passed to ``strategy.extended.update``.
        args, kwargs
            The arguments of this replica.

        Returns
        -------
        nest
            This replica's part of the function's result: its value of a `PerReplica`, anything else unchanged. Arrays
            are copies on its device.

        Raises
        ------
        CollectiveError
            As for `all_reduce`.

        Notes
        -----
        On a cluster, variables change on all replicas when the function returns, and not at all if it raises. Variables
        with a separate value on each replica (``ON_READ``) and objects are only available to the function if they are
        among its arguments. A variable that is the same on all replicas has the first replica's value there, whatever
        `extended.update` changed. If an object changes, all object arguments are replaced on the replicas, together
        with the parts that they share.
        """
        if not isinstance(args, (list, tuple)):
            raise ArgumentError(f"merge_call: args is a {type(args).__name__}; give a tuple, such as args=(x,)")
        strategy, device = self.strategy, named(self._device)
        merge_calls = internals_of(strategy).merge_calls

        def call(fn: Callable[..., Any], merged: Any, along: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
            args, by_name = merged
            stream = contextlib.nullcontext() if device.is_host else in_stream_of(device)
            with merge_calls.open(along) as changes, cross_replica_scope(strategy, is_merge_call=True), stream:
                return fn(strategy, *args, **by_name), changes()

        call_args = _with_own_copies((tuple(args), dict(kwargs or {})), but_of=internals_of(strategy).token)
        merge = Merge(merge_fn, call)
        result, changes = self._meet(merge, (call_args, merge_calls.collect(call_args)))[self.replica_id_in_sync_group]
        merge_calls.apply(changes, self)
        # Copy arrays, as `all_reduce` does; other objects are shared within a process.
        return optree.tree_map(_own_array, placed_nest(result, device), none_is_leaf=True)

    def checkpoint(self, manager: CheckpointManager, /, **objects: Any) -> None:
        """Save one checkpoint of all replicas at this step, in the background.

        All replicas must call it at the same step.

        Parameters
        ----------
        manager
            The `CheckpointManager`, an argument of the function. The process of replica 0 writes to its directory.
        **objects
            By name, the iterator that replaced a distributed dataset, variables, other objects with ``state_dict()``
            and ``load_state_dict(state)``, and values: numbers, text, bytes, None, and arrays or nests of arrays.
            Numbers, text, bytes and None must be the same on all replicas; of other values and objects the state of
            replica 0 is saved.

        Raises
        ------
        CollectiveError
            Another replica does not call it, as for `all_reduce`.
        ArgumentError
            Replicas are at different steps or give different values; or a state contains something that cannot be
            saved, at the place in the message.
        FileError
            The save before this one failed.
        ClusterError
            The program that runs this call is gone, and its checkpoints are refused.

        Notes
        -----
        It takes as long as copying the states, and waits for the save before it if that is still being written. The
        call ends when the last one is written. Checkpoints are numbered upwards. `restore` reads them on replicas,
        and `Checkpoint` with an iterator of the distributed dataset in the program.

        From the first use of a manager in a call on, checkpoints of earlier calls with that directory are refused, such
        as those of a program that was killed while its replicas continued. A check comes before a file gets its name.

        >>> import daskdist
        >>> def loop(iterator, manager):
        ...     context = daskdist.get_replica_context()
        ...     saved = context.restore(manager, iterator=iterator, total=0)
        ...     total = saved["total"]
        ...     for batch in iterator:
        ...         total += int(context.all_reduce("SUM", batch.sum()))
        ...         context.checkpoint(manager, iterator=iterator, total=total)
        ...     return total
        >>> strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> batches = strategy.distribute_dataset(daskdist.Dataset.range(8).batch(4))
        >>> manager = daskdist.CheckpointManager("memory://run/loop")
        >>> strategy.run(loop, args=(batches, manager)), strategy.run(loop, args=(batches, manager))
        (PerReplica:{
          0: 28,
          1: 28
        }, PerReplica:{
          0: 28,
          1: 28
        })
        """
        self._own_checkpoints.save(manager, objects)

    def restore(self, manager: CheckpointManager, /, **objects: Any) -> dict[str, Any]:
        """Restore all replicas from the newest complete checkpoint of a manager.

        All replicas must call it, before they take steps from an iterator among the objects.

        Parameters
        ----------
        manager
            The `CheckpointManager`, an argument of the function. The process of replica 0 reads its directory.
        **objects
            The objects and values of `checkpoint`, by the same names; values are those to begin with.

        Returns
        -------
        dict
            The saved values by name, arrays as NumPy arrays; the given ones if there is no checkpoint. Objects with a
            state are not among them.

        Raises
        ------
        CollectiveError
            Another replica does not call it, as for `all_reduce`.
        ArgumentError
            Names, structures or shapes differ from those of the objects, or an object rejects its state.
        FileError
            There are checkpoints, but all of them are damaged.
        """
        return self._own_checkpoints.restore(manager, objects)

    @property
    def _own_checkpoints(self) -> ReplicaCheckpoints:
        self._end.check()
        if self._checkpoints is None:
            self._checkpoints = ReplicaCheckpoints(self._meet, self.replica_id_in_sync_group, self._end)
        return self._checkpoints

    def _meet(self, collective: Collective, contribution: Any) -> Any:
        self._end.check()
        number = self.replica_id_in_sync_group
        if are_loaded():
            self._let_look(collective)
        rendezvous = self._rendezvous()
        self._end.note(number, collective.name, begins=True)
        try:
            result, is_own = rendezvous.meet(number, collective, contribution)
        finally:
            self._end.note(number, collective.name)
        if not isinstance(collective, (AllReduce, AllGather)):
            return result
        # Place the results on the device of the replica's values, where it can change them in place.
        return [own_copy(value, leaf, is_own=is_own) for value, leaf in zip(result, contribution[0], strict=True)]

    def _let_look(self, collective: Collective) -> None:
        # Other replicas read this replica's contribution in their own streams.
        device = named(self._device)
        if device.is_host:
            return
        catch_up(device)
        if isinstance(collective, Merge):
            # The function may read it in any stream.
            stream_of(device).synchronize()

    def __repr__(self) -> str:
        return f"<ReplicaContext: replica {self.replica_id_in_sync_group} of {self.num_replicas_in_sync}>"


def meet(replica: ReplicaContext, collective: Collective, contribution: Any) -> Any:
    """Take part in a collective operation with a replica's contribution; return its result."""
    return replica._meet(collective, contribution)


def finish_checkpoints(replica: ReplicaContext, *, is_failed: bool) -> None:
    """Wait until a replica's checkpoints are written, after its function has returned or raised an error."""
    if replica._checkpoints is not None:
        replica._checkpoints.close(is_failed=is_failed)


def store_of(replica: ReplicaContext) -> Any:
    """Return the `VariableStore` of the replicas in this process, or None."""
    return replica._store()


def updates_alone(replica: ReplicaContext) -> bool:
    """Return whether assignments to variables only change the replica's own copy."""
    return replica._updates_alone


def let_update_alone(replica: ReplicaContext) -> None:
    """Let assignments to variables only change the replica's own copy."""
    replica._updates_alone = True


def _own_array(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _given(operation: str, value: Any) -> tuple[list[Any], Any]:
    leaves, treespec = flattened(value)
    if NUMBERS.issuperset(map(type, leaves)):
        return leaves, treespec
    copied = _with_own_copies(value)
    if copied is not value:
        leaves, treespec = flattened(copied)
    for leaf in leaves:
        if leaf is None or isinstance(leaf, (PerReplica, AsyncValue)):
            raise ArgumentError(
                f"{operation}: a value is {type(leaf).__name__}; give the value of this replica, an array or a number"
            )
    return leaves, treespec


def _with_own_copies(nest: Any, but_of: str | None = None) -> Any:
    # Read variables now: the operation runs on one replica, which would read its own copy for all. Variables of the
    # strategy itself stay, as they can be used in the cross-replica context.
    leaves, treespec = optree.tree_flatten(nest, none_is_leaf=True)

    def is_read(leaf: Any) -> bool:
        return isinstance(leaf, VariableContract) and token_of(leaf) != but_of

    if not any(map(is_read, leaves)):
        return nest
    return optree.tree_unflatten(treespec, [leaf.read_value() if is_read(leaf) else leaf for leaf in leaves])


class CrossReplicaScope:
    """A scope in which a strategy is current and no function runs on a replica."""

    replica_id_in_sync_group = None

    def __init__(self, strategy: Any, *, is_merge_call: bool = False) -> None:
        self.strategy = strategy
        self.is_merge_call = is_merge_call


def cross_replica_scope(strategy: StrategyContract, *, is_merge_call: bool = False) -> AbstractContextManager[None]:
    """Make a strategy current in a ``with`` block, for a scope or a function called by `merge_call`."""
    return changed(current_context, CrossReplicaScope(strategy, is_merge_call=is_merge_call))


def current_replica() -> ReplicaContext | None:
    """Return the replica whose function is running in this thread, if any."""
    context = current_context.get()
    return context if type(context) is ReplicaContext else None


def check_in_program(operation: str) -> None:
    """Raise an error if a distributed dataset is iterated over inside a function that replicas run.

    Raises
    ------
    RuntimeError
        It is called in a function run by `Strategy.run` or `ReplicaContext.merge_call`, where each replica would take
        steps that the others would never get.
    """
    context = current_context.get()
    if context is None or (type(context) is CrossReplicaScope and not context.is_merge_call):
        return
    if type(context) is CrossReplicaScope:
        caller = "a function called by merge_call"
    else:
        caller = f"replica {context.replica_id_in_sync_group}, inside the function that it runs"
    raise RuntimeError(
        f"{operation}: a distributed dataset is iterated over by {caller}; each replica would take steps from the "
        f"others. {TO_REPLICAS}"
    )


def is_free_for(strategy: Any) -> bool:
    """Return whether no replica's function runs in this thread and no scope of another strategy is open."""
    context = current_context.get()
    return context is None or (type(context) is CrossReplicaScope and context.strategy is strategy)


_defaults: Final[list[Callable[[], StrategyContract]]] = []


def set_default_strategy(make: Callable[[], StrategyContract]) -> None:
    """Set what returns the strategy of a program without one."""
    _defaults.append(make)


def current_scope_strategy(*, or_default: bool = False) -> Any:
    """Return the strategy of the current scope, if any; or the default one."""
    context = current_context.get()
    if type(context) is CrossReplicaScope:
        return context.strategy
    return _defaults[-1]() if or_default else None
