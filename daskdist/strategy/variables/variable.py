"""`Variable`: a value that replicas keep between calls."""

from __future__ import annotations

import functools
import itertools
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

import numpy as np
import optree

from daskdist.checkpoint.nests import like
from daskdist.core.spec import TensorSpec
from daskdist.devices import is_on_device
from daskdist.display.pages import state_page
from daskdist.errors import ArgumentError
from daskdist.execute.messages.by_reference import ByReference, VariableKey
from daskdist.strategy.collectives.operations import Agreed, First
from daskdist.strategy.reduce.reductions import ReduceOp
from daskdist.strategy.replica.context import ReplicaContext, current_replica, current_scope_strategy, meet
from daskdist.strategy.replica.contract import StrategyContract, internals_of
from daskdist.strategy.values.async_value import AsyncValue, ReadAsArray
from daskdist.strategy.values.device_arrays import called_on_device, host_array
from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.values.refs import FlatResult
from daskdist.strategy.variables.aggregation import VariableAggregation, VariableSynchronization
from daskdist.strategy.variables.layout import (
    NUMBERS,
    CopyLayout,
    array_of_leaf,
    check,
    leaves_like,
    of_numbers,
    with_dtype,
)
from daskdist.strategy.variables.objects import ADVICE, aggregated
from daskdist.strategy.variables.record import VariableRecord, is_on_read, is_saved_per_replica
from daskdist.strategy.variables.replica_copy import (
    checked_state,
    copy_on_replica,
    equal_part,
    make_on_replica,
    read_on_replica,
    restore_among_replicas,
    restore_on_replica,
    state_among_replicas,
    state_on_replica,
    value_on_replica,
    write_on_replica,
)

_MAKERS: Final = (FunctionType, MethodType, BuiltinFunctionType, functools.partial, type)
# The attributes of a variable that its pickle has.
_SENT: Final = ("_key", "_token", "name", "trainable", "synchronization", "aggregation", "_layout")
_numbers: Final = itertools.count()


class Variable(VariableRecord, ByReference, ReadAsArray):
    """A value that replicas keep between calls; each replica has a copy in its process.

    It is created in a ``with strategy.scope()`` block, or else belongs to the default strategy, which has one replica
    in this process (`get_strategy`). The program uses it, and so do functions that the strategy runs, as a captured
    variable or an argument.

    Parameters
    ----------
    initial_value
        An array or number, or a nest of those, which each replica copies to its device; arrays of a framework become
        NumPy arrays. Or a function without parameters that creates the value in the replicas' processes: if it returns
        arrays, replica 0 calls it for all; if it returns any other object, such as a torch module or a nest of JAX
        arrays, each replica calls it for itself.
    trainable
        Accepted for compatibility and ignored.
    name
        The name in messages; generated if None.
    dtype
        The dtype of the arrays. If None, that of the initial value; Python numbers are int32, or int64 if they do not
        fit, and float32, as in TensorFlow.
    synchronization
        A `VariableSynchronization` or its name.
    aggregation
        A `VariableAggregation` or its name.

    Raises
    ------
    ArgumentError
        The mean of integers is requested, or the value is an object that is not created by a function.
    RuntimeError
        A replica creates it, in a function that is run.

    Notes
    -----
    On a replica, the variable reads as the replica's copy and supports the arithmetic of arrays. Assigned values are
    aggregated over all replicas unless it is ``ON_READ``: all replicas must assign, as for
    `ReplicaContext.all_reduce`. Values that were read are never changed in place. An object is the one that the
    function created, which each replica may change in place. Assigned objects are aggregated like arrays: with
    aggregation NONE they must be equal on all replicas, compared by ``state_dict()`` or else by pickle; only nests of
    arrays can be summed or averaged.

    In the program, in a scope or not, the variable reads as the common value of all replicas; if it is ``ON_READ``, as
    the sum or mean of the replicas' values, or as the value of replica 0. On a cluster this is asynchronous. An
    assignment changes all copies; an object is copied for each. For a variable that is ``ON_READ`` with aggregation
    SUM, each copy is assigned an equal part, and adding to it is an error.

    Calls that use a variable run in order, each after the previous one has finished; in this process only if a single
    thread of the program makes them. If a call fails on some replicas only, for example because data cannot be read,
    the copies may differ until the program assigns to all.

    If a worker is lost, arrays that are the same on all replicas get the value of the first remaining replica; values
    of single replicas stay as they are, and those of lost replicas are gone. A worker that is retired hands over those
    that are summed, and those of replica 0. A mean is that of the replicas that are left, whether the others are lost
    or retired: if each value has to count, keep a sum and a number, both with aggregation SUM.

    >>> import daskdist
    >>> strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     total = Variable(0.0, aggregation="SUM")
    >>> _ = strategy.run(lambda x: total.assign_add(x), args=(daskdist.PerReplica([np.float64(1), np.float64(2)]),))
    >>> float(total)
    3.0
    """

    _strategy: StrategyContract | None = None  # None for a variable on a worker.
    trainable = True

    def __init__(
        self,
        initial_value: Any,
        trainable: bool = True,
        *,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
    ) -> None:
        self.aggregation = VariableAggregation.of(aggregation)
        self.synchronization = VariableSynchronization.of(synchronization)
        self.trainable = trainable
        self._key = VariableKey(next(_numbers))
        self.name = str(name) if name is not None else f"Variable_{self._key.number}"
        strategy = self._strategy = self._scope()
        self._token = internals_of(strategy).token
        self._layout = CopyLayout(None)
        # Register before the value is set, so that the copies are freed if that fails.
        internals_of(strategy).register(self)
        self._begin(initial_value, None if dtype is None else np.dtype(dtype))

    def _scope(self) -> StrategyContract:
        replica = current_replica()
        if replica is not None:
            raise RuntimeError(
                f"{self.name}: created by replica {replica.replica_id_in_sync_group}, in the function that it runs; "
                "create it before, in a `with strategy.scope():` block, and use it there"
            )
        strategy: StrategyContract = current_scope_strategy(or_default=True)
        if not internals_of(strategy).merge_calls.makes_variables:
            raise RuntimeError(
                f"{self.name}: created on a worker, in a function of merge_call; create it before, in the program"
            )
        return strategy

    def _begin(self, initial_value: Any, dtype: np.dtype[Any] | None) -> None:
        strategy = self._strategy_in_use()
        if isinstance(initial_value, _MAKERS):
            results = internals_of(strategy).call_each(
                1, "variable", make_on_replica, self, initial_value, dtype and dtype.str
            )
            layouts = strategy.local_results(results[0])
            self._layout = layouts[0]
            for number, layout in enumerate(layouts):
                if (layout.treespec, layout.kind) != (self._layout.treespec, self._layout.kind):
                    raise ArgumentError(
                        f"{self.name}: the function returned {layouts[0].kind} on replica 0, but "
                        f"{layout.kind or 'arrays'} on replica {number}"
                    )
        else:
            value = with_dtype(of_numbers(self._plain(initial_value), narrow=dtype is None), dtype)
            self._layout = CopyLayout.of(value)
            if self._layout.treespec is None:
                raise ArgumentError(
                    f"{self.name}: initial_value is {self._layout.kind}; give arrays and numbers, or a nest of those, "
                    "or a function that creates the object on each replica"
                )
        self._check_layout()
        if not isinstance(initial_value, _MAKERS):
            self._write("put", optree.tree_leaves(value))

    def _plain(self, value: Any) -> Any:
        # Replace asynchronous values and other variables by their current values.
        return optree.tree_map(
            lambda leaf: np.asarray(leaf) if isinstance(leaf, (AsyncValue, Variable)) else _here(host_array(leaf)),
            value,
            none_is_leaf=True,
        )

    def _check_layout(self) -> None:
        layout, aggregation = self._layout, self.aggregation
        if layout.treespec is None and aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
            if not layout.specs:
                raise ArgumentError(
                    f"{self.name}: aggregation {aggregation.name} is for arrays, and the value is {layout.kind}"
                )
            if is_on_read(self):
                raise ArgumentError(
                    f"{self.name}: aggregation {aggregation.name} of each replica's own value (ON_READ) is for "
                    f"NumPy arrays, and the value is {layout.kind} of another framework"
                )
        if aggregation is VariableAggregation.MEAN and any(spec.dtype.kind in "biu" for spec in layout.specs):
            dtypes = ", ".join(str(spec.dtype) for spec in layout.specs)
            raise ArgumentError(
                f"{self.name}: aggregation MEAN of {dtypes} would not be a whole number; give dtype=np.float32, or "
                "another aggregation"
            )

    # --- properties ---

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self._spec.shape  # type: ignore[return-value]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the array."""
        return self._spec.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions of the array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the array."""
        return int(np.prod(self.shape))

    @property
    def _spec(self) -> TensorSpec:
        layout = self._layout
        if layout.treespec is None or not layout.treespec.is_leaf():
            kind = "an object" if layout.treespec is None else "a nest of arrays"
            raise AttributeError(f"{self.name} is {kind}, which has no shape or dtype; see read_value()")
        return layout.specs[0]

    @property
    def values(self) -> PerReplica:
        """The replicas' copies as a `PerReplica`, or a nest of those if the variable is a nest of arrays."""
        internals, layout = internals_of(self._strategy_in_use()), self._layout
        copies = internals.call_each(layout.num_leaves, "variable", read_on_replica, self)
        return layout.packed(copies)  # type: ignore[no-any-return]

    # --- reading and assigning ---

    def read_value(self) -> Any:
        """Return the current value.

        Returns
        -------
        nest
            On a replica, the value of its copy: arrays on its device, which must not be changed, numbers, or the
            object. In the program, the common value of all replicas, or the aggregated value if ``ON_READ``, in NumPy
            arrays; for an object, a `PerReplica`. On a cluster it is asynchronous.

        Raises
        ------
        ArgumentError
            The variable is ``ON_READ`` without aggregation and is not read on a replica; or it belongs to another
            strategy.
        """
        copy = copy_on_replica(self)
        if copy is not None:
            return self._layout.packed(copy.mutable_leaves)
        strategy, layout = self._strategy_in_use(), self._layout
        columns = internals_of(strategy).call_each(layout.num_leaves, "variable", read_on_replica, self)
        if layout.treespec is not None and is_saved_per_replica(self):
            raise ArgumentError(
                f"{self.name}: each replica has its own value (ON_READ), and aggregation is NONE; give an "
                "aggregation, or read the values of all replicas with values"
            )
        return self._as_one(columns)

    value = read_value

    def numpy(self) -> Any:
        """Wait for the current value and return it in NumPy arrays."""
        return optree.tree_map(
            lambda leaf: leaf.result() if isinstance(leaf, AsyncValue) else host_array(leaf),
            self.read_value(),
            none_is_leaf=True,
        )

    def assign(self, value: Any) -> Any:
        """Assign a new value.

        Parameters
        ----------
        value
            A value with the variable's structure and shapes, and dtypes that can be cast to its own without changing
            kind. On a replica, the value of that replica, which is aggregated over all. In the program, one value for
            all replicas or a `PerReplica` with one for each. If the variable is an object, any other object.

        Returns
        -------
        nest
            The new value, as `read_value` returns it.

        Raises
        ------
        ArgumentError
            The structure, a shape or a dtype does not fit; a replica assigns a Python number that is to be summed, as
            it is unclear whether it is meant per replica or in total; or the variable belongs to another strategy.
        CollectiveError
            On a replica, another one assigns a different value or object while aggregation is NONE; also as for
            `ReplicaContext.all_reduce`.
        """
        return self._assign("assign", value)

    def assign_add(self, delta: Any) -> Any:
        """Add to the value; like `assign`, but the added values are aggregated first.

        Raises
        ------
        ArgumentError
            As for `assign`; or the program adds to a variable that is ``ON_READ`` with aggregation SUM.
        """
        return self._assign("assign_add", delta)

    def assign_sub(self, delta: Any) -> Any:
        """Subtract from the value; see `assign_add`."""
        return self._assign("assign_sub", delta)

    def _assign(self, method: str, value: Any) -> Any:
        copy = copy_on_replica(self)
        if copy is None:
            return self._assign_between(method, value)
        leaves = copy.checked(method, value)
        if not copy.is_own and self._layout.treespec is None:
            leaves = [aggregated(f"{self.name}.{method}", self.aggregation, copy.replica, *leaves)]
        elif not copy.is_own:
            leaves = self._aggregated(method, leaves, copy.replica)
        copy.write(method, leaves)
        return self._layout.packed(copy.leaves)

    def _aggregated(self, method: str, leaves: list[Any], replica: ReplicaContext) -> list[Any]:
        aggregation = self.aggregation
        operation = f"{self.name}.{method}"
        if aggregation is VariableAggregation.NONE:
            meet(replica, Agreed(operation, ADVICE), (leaves, self._layout.treespec))
            return leaves
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            is_first = replica.replica_id_in_sync_group == 0
            return meet(replica, First(operation), leaves if is_first else None)  # type: ignore[no-any-return]
        if aggregation is VariableAggregation.SUM and any(type(leaf) in NUMBERS for leaf in leaves):
            raise ArgumentError(
                f"{operation}: a Python number on each of {replica.num_replicas_in_sync} replicas would be summed, but "
                "is usually the same on all; give the value of each replica as np.float64(x), or divide a total for "
                "all by the number of replicas"
            )
        return replica.all_reduce(ReduceOp(aggregation.value), leaves)  # type: ignore[no-any-return]

    def _assign_between(self, method: str, value: Any) -> Any:
        strategy, layout = self._strategy_in_use(), self._layout
        if layout.treespec is None:
            leaves = [value]
        else:
            leaves = list(map(_here, leaves_like(layout, value, f"{self.name}.{method}")))
            # The aggregated value of an ON_READ variable, not that of each replica.
            leaves = [leaf.read_value() if isinstance(leaf, Variable) and is_on_read(leaf) else leaf for leaf in leaves]
            if self.synchronization is VariableSynchronization.ON_READ and self.aggregation is VariableAggregation.SUM:
                if method != "assign":
                    raise ArgumentError(
                        f"{self.name}.{method}: the replicas' values are summed when they are read (ON_READ), so there "
                        "is no single value to change; change it on a replica, or assign the new sum"
                    )
                leaves = self._parts(method, leaves, strategy.num_replicas_in_sync)
        return self._as_one(self._write(method, leaves))

    def _parts(self, method: str, leaves: list[Any], num_replicas: int) -> list[Any]:
        # Split the value into equal parts for the replicas; parts of whole numbers may differ by one.
        self._check_here(method, leaves)

        def part(leaf: Any, dtype: np.dtype[Any]) -> Any:
            if type(leaf) is PerReplica:
                return leaf
            leaf = host_array(leaf)
            if dtype.kind not in "iu":
                return leaf / num_replicas
            return PerReplica([equal_part(leaf, dtype, number, num_replicas) for number in range(num_replicas)])

        return [part(leaf, spec.dtype) for leaf, spec in zip(leaves, self._layout.specs, strict=True)]

    def _check_here(self, method: str, leaves: list[Any]) -> None:
        # Raise errors in this process if the value is known here.
        layout = self._layout
        if layout.treespec is not None and not any(
            isinstance(leaf, (AsyncValue, PerReplica, Variable)) for leaf in leaves
        ):
            check(f"{self.name}.{method}", layout, leaves)

    def _write(self, method: str, leaves: list[Any]) -> list[PerReplica]:
        layout = self._layout
        self._check_here(method, leaves)
        return internals_of(self._strategy_in_use()).call_each(  # type: ignore[no-any-return]
            layout.num_leaves, "variable", write_on_replica, self, method, leaves
        )

    def _as_one(self, columns: list[PerReplica]) -> Any:
        # Return the program's value from those of the replicas.
        layout, aggregation = self._layout, self.aggregation
        if layout.treespec is None:
            return columns[0]
        if is_on_read(self) and aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
            return self._strategy_in_use().reduce(aggregation.name, layout.packed(columns), axis=None)
        return layout.packed([column.values[0] for column in columns])

    def state_dict(self) -> dict[str, Any]:
        """Return the current value in NumPy arrays, as `Checkpoint` saves it.

        Returns
        -------
        dict
            The common value of all replicas under ``"value"``; for an object, its ``state_dict()``. If each replica has
            its own value (``ON_READ``) without a sum or mean, the list of values under ``"replicas"``.

        Raises
        ------
        ArgumentError
            The value is an object that has no ``state_dict`` and is not a nest of arrays.
        """
        if copy_on_replica(self) is not None:
            return state_among_replicas(self)
        strategy, are_apart = self._strategy_in_use(), is_saved_per_replica(self)
        if self._layout.treespec is not None and not are_apart:
            return {"value": self.numpy()}
        (column,) = internals_of(strategy).call_each(1, "variable", state_on_replica, self)
        states = strategy.local_results(column)
        return {"replicas": list(states)} if are_apart else {"value": states[0]}

    def __daskdist_state_form__(self) -> dict[str, Any]:
        # A state with any values, as those of now may be lost.
        if self._layout.treespec is None or copy_on_replica(self) is not None:
            return self.state_dict()
        if is_saved_per_replica(self):
            return {"replicas": [self._layout.zeros] * self._strategy_in_use().num_replicas_in_sync}
        return {"value": self._layout.zeros}

    def load_state_dict(self, state: Any) -> None:
        """Assign a value that `state_dict` returned.

        Raises
        ------
        ArgumentError
            The value has another structure or shape; or the number of replicas differs although each has its own
            value.
        """
        copy = copy_on_replica(self)
        if copy is not None:
            restore_among_replicas(self, checked_state(self, state, copy.replica.num_replicas_in_sync))
            return
        strategy = self._strategy_in_use()
        saved = checked_state(self, state, strategy.num_replicas_in_sync)
        if self._layout.treespec is not None and not is_saved_per_replica(self):
            self.assign(like(self._layout.zeros, saved))
            return
        states = saved if is_saved_per_replica(self) else [saved] * strategy.num_replicas_in_sync
        per_replica = PerReplica([FlatResult.listed([state]) for state in states])
        # Wait, to raise the errors of values that do not fit.
        strategy.local_results(
            internals_of(strategy).call_each(1, "variable", restore_on_replica, self, per_replica)[0]
        )

    # --- strategy ---

    def _strategy_in_use(self) -> StrategyContract:
        """Return the strategy to use: that of the current scope, or the variable's own."""
        scope = current_scope_strategy()
        # On a worker, a strategy is known only in functions called by merge_call.
        strategy = scope if scope is not None and internals_of(scope).token == self._token else self._strategy
        if strategy is None:
            raise ArgumentError(
                f"{self.name}: used outside of its strategy; on a worker, use it in functions called by run on a "
                "replica, and by merge_call"
            )
        if scope not in (None, strategy):
            raise ArgumentError(
                f"{self.name}: used in the scope of another strategy; use a variable with the strategy in whose "
                "scope it was created"
            )
        return strategy

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SENT}

    def __copy__(self) -> Variable:
        return self

    def __deepcopy__(self, memo: Any) -> Variable:
        return self

    # --- use as a value ---

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self._spec  # noqa: B018
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # `x += 1` binds the name to a new value; `assign_add` changes the variable.
        out = [output for output in kwargs.pop("out", ()) if not isinstance(output, Variable)]
        if out:
            kwargs["out"] = tuple(out)
        operands = [operand._as_array() if isinstance(operand, Variable) else operand for operand in inputs]
        if method == "__call__" and any(map(is_on_device, operands)):
            return called_on_device(ufunc, operands, kwargs)
        return getattr(ufunc, method)(*operands, **kwargs)

    def _as_array(self) -> Any:
        """Return the current value; raise an error if it is not a single array."""
        self._spec  # noqa: B018
        return self.read_value()

    def __getitem__(self, key: Any) -> Any:
        return self.read_value()[key]

    def _read(self) -> Any:
        return self.numpy()

    def _repr_html_(self) -> str:
        layout = self._layout
        facts = [self.name, f"synchronization {self.synchronization.name}", f"aggregation {self.aggregation.name}"]
        if layout.treespec is None:
            return state_page("Variable", [*facts, f"a {layout.kind} on each replica"], (), ())
        paths = [accessor.codify("") or "(the value)" for accessor in layout.treespec.accessors()]
        rows = [(path, spec.shape, spec.dtype) for path, spec in zip(paths, layout.specs, strict=True)]
        return state_page("Variable", facts, ("leaf", "shape", "dtype"), rows)

    def __repr__(self) -> str:
        layout = self._layout
        if layout.treespec is None:
            contents = layout.kind
        elif layout.treespec.is_leaf():
            contents = str(layout.specs[0])
        else:
            contents = str(optree.tree_unflatten(layout.treespec, layout.specs))
        return f"<Variable {self.name!r}: {contents}, {self.synchronization.name}, {self.aggregation.name}>"


def _here(leaf: Any) -> Any:
    # Return arrays of frameworks as NumPy arrays, and values that may be on workers unchanged.
    return leaf if isinstance(leaf, (AsyncValue, PerReplica, Variable)) else array_of_leaf(leaf)


def with_copies_in(values: PerReplica) -> PerReplica:
    """Return values of replicas, some of them variables, with the replica's copy in place of each variable."""
    strategy = next(value for value in values.values if isinstance(value, Variable))._strategy_in_use()
    # In a cross-replica scope the copies of other replicas may be unavailable.
    return internals_of(strategy).call_each(1, "variable", value_on_replica, values)[0]  # type: ignore[no-any-return]
