"""`StrategyInternals`: the parts of a strategy that other modules use, and users do not."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import optree

from daskdist.core.functions.current_context import current_context
from daskdist.errors import ArgumentError, ClusterError, CollectiveError, NotMadeAgainError
from daskdist.execute.caller import Handle
from daskdist.strategy.backend import RECOVERY, Backend
from daskdist.strategy.calls.recovery.generations import Generations
from daskdist.strategy.calls.returned_values import ReturnedValues
from daskdist.strategy.group import Replica, ReplicaGroup
from daskdist.strategy.input.input_backend import InputBackend
from daskdist.strategy.reduce.reductions import NAMED, Axis, Op, ReduceOp, name_of
from daskdist.strategy.reduce.tree import FoldTree
from daskdist.strategy.replica.context import (
    ReplicaContext,
    cross_replica_scope,
    current_replica,
    is_free_for,
)
from daskdist.strategy.replica.contract import StrategyContract
from daskdist.strategy.replica.merge_calls import MergeCalls
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.flat import LEAVES, flattened_call
from daskdist.strategy.values.per_replica import (
    PerReplica,
    can_be_used_by,
    is_uneven,
    num_values,
)
from daskdist.strategy.values.variable_contract import variable_number
from daskdist.strategy.variables.read_copies import has_variables, with_copies
from daskdist.strategy.variables.record import check_is_of, is_mirrored, layout_of
from daskdist.strategy.variables.replica_copy import (
    align_on_replica,
    inherit_on_replica,
    join_on_replica,
    undo_on_replica,
)
from daskdist.strategy.variables.variable import Variable

_T = TypeVar("_T")
logger: Final = logging.getLogger("daskdist")

# Types of arguments of a step that are certainly leaves.
ARGUMENT_LEAVES: Final = LEAVES | {PerReplica, AsyncValue, Variable}


class StrategyInternals:
    """The internal parts of a strategy; lower modules get them by `daskdist.strategy.replica.contract.internals_of`."""

    def __init__(
        self,
        strategy: StrategyContract,
        group: ReplicaGroup,
        backend: Backend,
        input_backend: InputBackend,
        merge_calls: MergeCalls,
    ) -> None:
        self._strategy = weakref.ref(strategy)
        self.token = group.token
        self.backend = backend
        # The same object, if it is the source of asynchronous values.
        self._source: Any = backend
        self.input = input_backend
        self.merge_calls = merge_calls
        self.returned = ReturnedValues(backend)
        self.has_warned_of_uneven = False
        # The values that replicas which left had of their own, by the number of the variable, until others have them.
        self._handed_over: list[tuple[int, Mapping[int, list[Any]]]] = []
        # number -> variable, for the variables that the program still references.
        self._variables: weakref.WeakValueDictionary[int, Variable] = weakref.WeakValueDictionary()
        self.group = backend.generations = Generations(group, backend, weakref.WeakMethod(self._align))
        self.recover, self.recover_soon = self.group.recover, self.group.recover_soon

    def register(self, variable: Variable) -> None:
        """Register a new variable; its copies on replicas are freed when the program drops it."""
        number = variable_number(variable)
        self._variables[number] = variable
        weakref.finalize(variable, self.backend.forget, number).atexit = False

    def _variables_now(self) -> list[Variable]:
        # The references are listed at once: other threads may create variables meanwhile.
        variables = [reference() for reference in self._variables.valuerefs()]
        return [variable for variable in variables if variable is not None]

    def take_replacements(self) -> None:
        """Give replicas to workers that can take the places of lost ones, or further ones, before a pass."""
        self.recover_soon()
        self._grow()

    def _can_grow(self) -> bool:
        # Objects of a replica may have parts in common, and so cannot be copied separately.
        return all(layout_of(variable).treespec is not None for variable in self._variables_now())

    def _grow(self) -> bool:
        variables = self._variables_now()
        if not self._can_grow() or not self.group.grow():
            return False
        strategy: Any = self._strategy()

        def join() -> None:
            with cross_replica_scope(strategy):
                joined = [self.call_each(1, RECOVERY, join_on_replica, variable) for variable in variables]
                for (outcome,) in joined:
                    strategy.local_results(outcome)

        self.group.call(join, settles=True)
        return True

    def spare_last(self, lost: Collection[str]) -> bool:
        """Return whether a call may be made again that was being made when workers were lost.

        If one is left, wait for a lost one that Dask starts again; return False if none comes.
        """
        if not lost or len(self.group.now.workers) > 1:
            return True
        for within_s in self.backend.recovery.waits_for_replacement(lost) if self._can_grow() else ():
            if self._grow():
                return True
            time.sleep(within_s)
        return False

    def replicas_left(self, *, after_error: bool = False) -> tuple[Replica, ...]:
        """Return the replicas, without those that are known to be lost; after an error also if the scheduler is."""
        self.recover_soon()
        if after_error:
            self.recover()
        return self.group.now.replicas

    def raise_unobserved(self) -> None:
        """Raise the error of a call whose results were not read and no longer can be.

        Make calls again that need lost workers.
        """
        self.recover_soon()
        self.group.call(self.backend.raise_unobserved, lambda: None, settles=True)

    def finish(self, *, raises_all: bool = False) -> None:
        """Wait for all calls, repeating those that failed because of a lost worker.

        Raise errors like `Backend.finish`.
        """
        # At the end of a strategy, nothing is left that needs another scheduler.
        recover = None if raises_all else lambda: None
        self.group.call(partial(self.backend.finish, raises_all=raises_all), recover, settles=True)

    def _align(self, some_remain: bool) -> None:
        if some_remain:
            self._align_variables()
            self.spare_last(self.backend.repetition.lost_once())
        # Without any earlier replica, variables have no values until they are assigned.
        self.backend.repetition.make_again(self.group.now)

    def _align_variables(self) -> None:
        strategy: Any = self._strategy()
        variables = self._variables_now()
        first = self.backend.repetition.first_to_undo()
        if first is not None and variables:
            self._undo(first, variables)
        # Some copies of a mirrored variable may already have the next value, and others not.
        with cross_replica_scope(strategy):
            mirrored = [variable for variable in variables if is_mirrored(variable)]
            aligned = [self.call_each(1, RECOVERY, align_on_replica, variable) for variable in mirrored]
        are_aligned = True
        for (outcome,) in aligned:
            try:
                with cross_replica_scope(strategy):
                    strategy.local_results(outcome)
            except ArgumentError:
                # A variable whose creation failed has no value.
                pass
            except CollectiveError:
                # The same, or a worker is lost, which the calls that are made again notice.
                are_aligned = False
        if are_aligned:
            self.backend.repetition.note_aligned()
        for handed_over in self.backend.recovery.take_handed_over():
            self._handed_over += handed_over.items()
        while self._handed_over:
            # If a worker is lost meanwhile, the others are not taken over twice.
            self._inherit(*self._handed_over.pop())

    def _inherit(self, number: int, values: Mapping[int, list[Any]]) -> None:
        # Replicas that left had values of their own of a variable.
        strategy: Any = self._strategy()
        variable = self._variables.get(number)
        if variable is not None:
            with cross_replica_scope(strategy):
                (outcome,) = self.call_each(1, RECOVERY, inherit_on_replica, variable, values)
                strategy.local_results(outcome)

    def _undo(self, first: int, variables: Sequence[Variable]) -> None:
        # Calls that failed on a lost replica may have changed variables on others.
        apart = [variable.name for variable in variables if not is_mirrored(variable)]
        if apart:
            self.backend.repetition.give_up(f"{', '.join(apart)} had values on lost workers that no other has")
            return
        strategy: Any = self._strategy()
        with cross_replica_scope(strategy):
            (outcome,) = self.call_each(1, RECOVERY, undo_on_replica, first)
            are_undone = all(strategy.local_results(outcome))
        # Those that were complete fail, too, until they are made again, or for good.
        self.backend.repetition.note_undone()
        if not are_undone:
            self.backend.repetition.give_up("they changed variables whose earlier values are not kept")

    def check_scope(self, operation: str) -> None:
        """Raise an error on a replica or in the scope of another strategy; otherwise recover from lost workers.

        Raises
        ------
        RuntimeError
            It is called on a replica or in the scope of another strategy.
        """
        if current_context.get() is None or is_free_for(self._strategy()):
            if self.backend.live_workers.in_doubt or self.group.is_recovering:
                self.recover()
            return
        replica = current_replica()
        if replica is not None:
            raise _called_by(replica, operation)
        raise RuntimeError(f"{operation}: a scope of another strategy is open; leave it first")

    def close(self, *, waits: bool = True) -> None:
        """Close the backend, if ``waits`` after the calls; raise an error on one of the strategy's replicas.

        Raises
        ------
        RuntimeError
            It is called on one of the strategy's replicas.
        """
        replica = current_replica()
        if replica is not None and replica.strategy is self._strategy():
            raise _called_by(replica, "close")
        try:
            if waits:
                self.finish()
        except NotMadeAgainError:
            raise
        except ClusterError:
            # After a loss of the worker or the connection, there is nothing to wait for.
            pass
        finally:
            self.backend.close()

    def check_values(self, operation: str, leaves: Sequence[Any], num_replicas: int | None = None) -> None:
        """Raise an error for values of another strategy or of another number of replicas.

        With ``num_replicas``, values may be of as many replicas as there were; those whose calls were just made again
        are of the remaining ones.

        Raises
        ------
        ArgumentError
            There is such a value.
        """
        self.check_scope(operation)
        group, backend = self.group, self.backend
        sizes = {len(group.now.replicas)}
        if num_replicas is not None and group.had(num_replicas):
            sizes.add(num_replicas)
        for leaf in leaves:
            if type(leaf) in LEAVES:
                continue
            if isinstance(leaf, PerReplica):
                if not group.has_changed and (refs := leaf.refs) is not None and refs.caller is self._source:
                    continue
                if leaf.batch is None:
                    # All have one size.
                    sizes &= {num_values(leaf)}
                    if not sizes:
                        raise group.wrong_size(operation, num_values(leaf))
            elif isinstance(leaf, Variable):
                check_is_of(leaf, self.token, operation)
                continue
            elif not isinstance(leaf, AsyncValue):
                continue
            if not can_be_used_by(leaf, backend):
                raise ArgumentError(
                    f"{operation}: a value belongs to a strategy on another cluster; fetch it "
                    "first, for example with np.asarray"
                )

    def call_replicas(
        self, operation: str, fn: Callable[..., Any], leaves: list[Any], treespec: Any
    ) -> Sequence[Handle]:
        """Call a function on every replica; return the handles of its results."""
        batches, takes_values, live_workers = list[PerReplica](), False, self.backend.live_workers
        for leaf in leaves:
            if type(leaf) is PerReplica:
                if leaf.batch is None:
                    takes_values = True
                else:
                    batches.append(leaf)
        if live_workers.is_left and not takes_values and live_workers.leaving:
            # Continue now without the workers that are going to leave, but not if arguments have a value for each of
            # the present replicas.
            live_workers.in_doubt = True
        if batches:
            self.recover_soon()
        elif live_workers.in_doubt:
            self.recover()
        # Without a batch, a call may need what steps change that are under way; these are made again first.
        recover = None if batches else self.group.recover_steps

        def send() -> Sequence[Handle]:
            group = self.group.now
            if self.group.has_changed:
                for leaf in batches:
                    self.backend.cut_for(leaf, group)
                for leaf in leaves:
                    if type(leaf) is PerReplica and num_values(leaf) != len(group.replicas):
                        # A worker was lost since `check_values`.
                        raise self.group.wrong_size(operation, num_values(leaf))
            return self.backend.call_replicas(operation, fn, leaves, treespec, group)

        return self.group.call(send, recover)

    def leaves_of(self, make: Callable[[ReplicaGroup], Sequence[Handle]], num_leaves: int) -> list[Any]:
        """Return the leaves of a call on results of steps that returns a `FlatResult` list of a known length.

        It is made as `Backend.logged` does, also if the scheduler is lost before it is sent.
        """
        call = self.group.call(partial(self.backend.logged, make), self.recover)
        return self.returned.leaves(call, num_leaves)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], worker: str | None, name: str) -> Any:
        """Make a call once as `Backend.call` does, also if the scheduler is lost before it is sent."""
        return self.group.call(partial(self.backend.call, function, args, worker=worker, name=name))

    def call_each(self, num_leaves: int, operation: str, fn: Callable[..., Any], *args: Any) -> list[PerReplica]:
        """Call a function that returns a list of ``num_leaves`` leaves on each replica; return each leaf's values."""
        leaves, treespec = flattened_call(args, {}, ARGUMENT_LEAVES)
        self.check_values(operation, leaves)
        return self.returned.columns(self.call_replicas(operation, fn, leaves, treespec), num_leaves)

    def reduce(self, op: Op, value: Any, axis: Axis, on: str | None = None, weights: Any = None) -> Any:
        """Reduce the values of all replicas as `Strategy.reduce` does, with the result on a given worker."""
        if weights is not None:
            return self._reduce_weighted(op, value, axis, weights)
        if op is ReduceOp.MEAN and axis is None and not self.has_warned_of_uneven:
            self._warn_of_uneven(value)
        if type(value) is PerReplica and (value.refs is not None or not has_variables(value)):
            self.check_values("reduce", (value,))
            return self.leaves_of(FoldTree(self.backend, op, axis, [value], on), 1)[0]
        leaves, treespec = self._to_reduce(value)
        self.check_values("reduce", leaves)
        per_replica = [leaf for leaf in leaves if isinstance(leaf, PerReplica)]
        if len(per_replica) < len(leaves) and not (isinstance(op, ReduceOp) and NAMED[op].keeps_equal):
            raise ArgumentError(
                f"reduce: {name_of(op)} over {len(self.group.now.replicas)} replicas of a value that is not per "
                "replica; reduce what run returns, or use MEAN"
            )
        tree = FoldTree(self.backend, op, axis, per_replica, on)
        results = iter(self.leaves_of(tree, len(per_replica)) if per_replica else ())
        reduced = [next(results) if isinstance(leaf, PerReplica) else leaf for leaf in leaves]
        return optree.tree_unflatten(treespec, reduced)

    def _to_reduce(self, value: Any) -> tuple[list[Any], Any]:
        # The leaves, and their structure; those of a single replica are of each replica, too.
        leaves, treespec = with_copies("reduce", self.token, value)
        self.recover()
        if len(self.group.now.replicas) == 1:
            leaves = [leaf if isinstance(leaf, PerReplica) else PerReplica((leaf,)) for leaf in leaves]
        return leaves, treespec

    def _warn_of_uneven(self, value: Any) -> None:
        leaves = [value] if type(value) is PerReplica else optree.tree_leaves(value)
        if any(type(leaf) is PerReplica and is_uneven(leaf) for leaf in leaves):
            self.has_warned_of_uneven = True
            logger.warning(
                "reduce: MEAN with axis=None counts replicas, not rows, and the replicas of this step have different "
                "numbers of rows. Give weights, such as run(len, args=(batch,)), or return a value for each row and "
                "give axis=0"
            )

    def _reduce_weighted(self, op: Op, value: Any, axis: Axis, weights: Any) -> Any:
        if not isinstance(op, ReduceOp) or NAMED[op].weighted is None:
            raise ArgumentError(f"reduce: {name_of(op)} takes no weights; MEAN and SUM do")
        if axis not in (None, 0, (0,)):
            raise ArgumentError(f"reduce: weights are of replicas or rows, but axis is {axis}; give axis=None or 0")
        leaves, treespec = self._to_reduce((value, weights))
        if treespec.child(1).num_leaves != 1 or not isinstance(leaves[-1], PerReplica):
            raise ArgumentError(
                f"reduce: weights is {weights!r:.80}; give a PerReplica with a number for each replica, as "
                "run(len, args=(batch,)) returns, or with axis=0 an array of numbers, one for each row"
            )
        if not all(isinstance(leaf, PerReplica) for leaf in leaves):
            raise ArgumentError(
                "reduce: weights are given for a value that is not per replica; reduce what run returns"
            )
        self.check_values("reduce", leaves)
        tree = FoldTree(self.backend, op, axis, leaves, is_weighted=True)
        results = self.leaves_of(tree, len(leaves) - 1)
        return optree.tree_unflatten(treespec.child(0), results)


def _called_by(replica: ReplicaContext, operation: str) -> RuntimeError:
    return RuntimeError(
        f"{operation}: called by replica {replica.replica_id_in_sync_group}, inside the function that it runs; "
        "a strategy can only be used in the program that passes that function to run"
    )
