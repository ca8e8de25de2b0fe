"""`Variable`: a value that replicas keep from call to call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
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
from daskdist.strategy.reduce.tree import list_spec
from daskdist.strategy.replica.context import ReplicaContext, current_replica, current_scope_strategy
from daskdist.strategy.replica.contract import StrategyContract
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.device_arrays import called_on_device, host_array
from daskdist.strategy.values.extract import FlatResult
from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.variables.aggregation import VariableAggregation, VariableSynchronization
from daskdist.strategy.variables.layout import (
    NUMBERS,
    CopyLayout,
    as_arrays,
    check,
    leaves_like,
    of_numbers,
    with_dtype,
)
from daskdist.strategy.variables.objects import ADVICE, aggregated
from daskdist.strategy.variables.record import VariableRecord
from daskdist.strategy.variables.replica_copy import (
    copy_on_replica,
    make_on_replica,
    read_on_replica,
    restore_on_replica,
    state_on_replica,
    write_on_replica,
)

_MAKERS: Final = (FunctionType, MethodType, BuiltinFunctionType, functools.partial, type)
_numbers: Final = itertools.count()


class Variable(VariableRecord, ByReference, np.lib.mixins.NDArrayOperatorsMixin):
    """A value that replicas keep from call to call: each has its copy, where it is.

    Made in a ``with strategy.scope()`` block, and used by the functions that the strategy runs, which have it from
    around them or among their arguments, and by the program.

    Parameters
    ----------
    initial_value
        An array or number, or a nest of some, for all replicas: each has it on its device; arrays of a framework become
        NumPy's. Or a function without parameters that makes it, called where the replicas are: if it makes arrays, by
        replica 0, and all have what it makes; if it makes anything else, such as a torch module or a nest of JAX's
        arrays, by each replica, for itself.
    trainable
        Taken for compatibility.
    name
        What messages call it; made up if None.
    dtype
        Of its arrays; that of the initial value if None.
    synchronization
        A `VariableSynchronization` or its name.
    aggregation
        A `VariableAggregation` or its name.

    Raises
    ------
    ArgumentError
        No strategy is current; an integer is to be averaged; or the value is neither arrays nor made by a function.
    RuntimeError
        A replica makes it, in a function that is run.

    Notes
    -----
    On a replica it is read as its copy, and arithmetic is that of arrays. What is assigned there is aggregated over all
    replicas, unless it is ``ON_READ``: all replicas assign, as with `ReplicaContext.all_reduce`. What is read is never
    changed in place. An object is what the function made, to be changed in place by each replica for itself. One that
    is assigned is aggregated as arrays are: it is the same on all if aggregation is NONE, by its ``state_dict()`` or
    else its pickle; and what can be summed or averaged is a nest of arrays.

    In the program, in a scope or not, it is read as what all replicas have; an ``ON_READ`` one as the sum or mean of
    what they have, or what replica 0 has. On a cluster that is asynchronous. What is assigned goes to all copies; an
    object is copied for each. Of one that is ``ON_READ`` and to be summed each copy is assigned an equal part, and
    nothing can be added to it.

    Calls that use a variable are made in their order, each when the one before is over; in this process for as long as
    one thread of the program makes them. If one of them fails on some replicas only, as data cannot be read say, copies
    can differ from then on, until the program assigns to all.

    Where a worker is lost, arrays that are the same on all replicas become what the first one has of those that are
    left; what each has for itself stays as it is, and that of the lost replicas is gone.

    >>> import daskdist
    >>> strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     total = Variable(0.0, aggregation="SUM")
    >>> _ = strategy.run(lambda x: total.assign_add(x), args=(daskdist.PerReplica([np.float64(1), np.float64(2)]),))
    >>> float(total)
    3.0
    """

    # A variable on a worker has no strategy of its own.
    _strategy: StrategyContract | None = None
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
        self.key = VariableKey(next(_numbers))
        self.name = str(name) if name is not None else f"Variable_{self.key.number}"
        strategy = self._strategy = self._scope()
        self.token = strategy.internals.token
        self.layout = CopyLayout(None)
        # Before it has a value: if that is refused, what replicas made of it is freed too.
        strategy.internals.register(self)
        self._begin(initial_value, None if dtype is None else np.dtype(dtype))

    def _scope(self) -> StrategyContract:
        replica = current_replica()
        if replica is not None:
            raise RuntimeError(
                f"{self.name}: made by replica {replica.replica_id_in_sync_group}, inside the function that it runs; "
                "make it before, in a `with strategy.scope():` block, and use it there"
            )
        strategy = current_scope_strategy()
        if strategy is None:
            raise ArgumentError(f"{self.name}: no strategy is current; make it in a `with strategy.scope():` block")
        if not strategy.internals.merge_calls.makes_variables:
            raise RuntimeError(
                f"{self.name}: made on a worker, in a function that merge_call calls; make it before, in the program"
            )
        return strategy

    def _begin(self, initial_value: Any, dtype: np.dtype[Any] | None) -> None:
        strategy = self._strategy_in_use()
        if isinstance(initial_value, _MAKERS):
            found = strategy.internals.call_each(
                1, "variable", make_on_replica, self, initial_value, dtype and dtype.str
            )
            layouts = strategy.local_results(found[0])
            self.layout = layouts[0]
            for number, layout in enumerate(layouts):
                if (layout.treespec, layout.kind) != (self.layout.treespec, self.layout.kind):
                    raise ArgumentError(
                        f"{self.name}: the function made {layouts[0].kind} on replica 0 and {layout.kind or 'arrays'} "
                        f"on replica {number}"
                    )
        else:
            value = with_dtype(of_numbers(self._plain(initial_value)), dtype)
            self.layout = CopyLayout.of(value)
            if self.layout.treespec is None:
                raise ArgumentError(
                    f"{self.name}: initial_value is {self.layout.kind}; give arrays and numbers, or a nest of some, "
                    "or a function that makes the object on each replica"
                )
        self._check_layout()
        if not isinstance(initial_value, _MAKERS):
            self._write("put", optree.tree_leaves(value))

    def _plain(self, value: Any) -> Any:
        # The current values of asynchronous values and other variables.
        return optree.tree_map(
            lambda leaf: np.asarray(leaf) if isinstance(leaf, (AsyncValue, Variable)) else _here(host_array(leaf)),
            value,
            none_is_leaf=True,
        )

    def _check_layout(self) -> None:
        layout, aggregation = self.layout, self.aggregation
        if layout.treespec is None and aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
            if not layout.specs:
                raise ArgumentError(
                    f"{self.name}: aggregation {aggregation.name} is for arrays, and the value is {layout.kind}"
                )
            if self.is_on_read:
                raise ArgumentError(
                    f"{self.name}: aggregation {aggregation.name} of what each replica has for itself (ON_READ) is for "
                    f"NumPy's arrays, and the value is {layout.kind} of another framework's"
                )
        if aggregation is VariableAggregation.MEAN and any(spec.dtype.kind in "biu" for spec in layout.specs):
            dtypes = ", ".join(str(spec.dtype) for spec in layout.specs)
            raise ArgumentError(
                f"{self.name}: aggregation MEAN of {dtypes} would be no whole number; give dtype=np.float32, or "
                "another aggregation"
            )

    # --- what it is ---

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its array."""
        return self._spec.shape  # type: ignore[return-value]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its array."""
        return self._spec.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions of its array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of its array."""
        return int(np.prod(self.shape))

    @property
    def _spec(self) -> TensorSpec:
        layout = self.layout
        if layout.treespec is None or not layout.treespec.is_leaf():
            what = "an object" if layout.treespec is None else "a nest of arrays"
            raise AttributeError(f"{self.name} is {what}, and has no shape or dtype of its own; see read_value()")
        return layout.specs[0]

    @property
    def values(self) -> PerReplica:
        """Each replica's copy; a `PerReplica`, or where the variable is a nest of arrays a nest of some."""
        return self._packed_copies()  # type: ignore[no-any-return]

    def values_where(self, is_asked: Sequence[bool]) -> PerReplica:
        """Return each replica's copy as `values` does, but None for replicas that are not asked."""
        return self._packed_copies(PerReplica(is_asked))  # type: ignore[no-any-return]

    def _packed_copies(self, *args: Any) -> Any:
        internals, layout = self._strategy_in_use().internals, self.layout
        return layout.packed(internals.call_each(layout.num_leaves, "variable", read_on_replica, self, *args))

    # --- what is done with it ---

    def read_value(self) -> Any:
        """Return the current value.

        Returns
        -------
        nest
            On a replica of its copy: arrays of its device, which are not to be changed, or numbers, or the object. In
            the program of what all replicas have, of an ``ON_READ`` one aggregated, in arrays of the host; of an object
            a `PerReplica`. Asynchronous on a cluster.

        Raises
        ------
        ArgumentError
            It is ``ON_READ`` and has no aggregation, and this is not on a replica; or it is of another strategy.
        """
        copy = copy_on_replica(self)
        if copy is not None:
            return self.layout.packed(copy.lent)
        strategy, layout = self._strategy_in_use(), self.layout
        found = strategy.internals.call_each(layout.num_leaves, "variable", read_on_replica, self)
        if layout.treespec is None:
            return found[0]
        if self.is_on_read and self.aggregation is VariableAggregation.NONE:
            raise ArgumentError(
                f"{self.name}: each replica has its own value (ON_READ), and aggregation is NONE; give an "
                "aggregation, or see each with values"
            )
        return self._as_one(found)

    value = read_value

    def numpy(self) -> Any:
        """Wait for the current value; return it in arrays of the host."""
        return optree.tree_map(
            lambda leaf: leaf.result() if isinstance(leaf, AsyncValue) else host_array(leaf),
            self.read_value(),
            none_is_leaf=True,
        )

    def assign(self, value: Any) -> Any:
        """Assign another value.

        Parameters
        ----------
        value
            Of its structure and shapes, and of dtypes that can be cast to its own without loss of kind. On a replica
            that replica's, of which aggregation makes one for all. In the program a value for all replicas, or a
            `PerReplica`, of which each has its own. Of an object any other.

        Returns
        -------
        nest
            The new value, as `read_value` gives it.

        Raises
        ------
        ArgumentError
            The structure, a shape or a dtype is another; or on a replica a Python number is to be summed, of which
            it cannot be told whether it is meant for each replica or for all; or it is of another strategy.
        CollectiveError
            On a replica, where aggregation is NONE, another one assigns another value, an object too; and as
            `ReplicaContext.all_reduce` raises it.
        """
        return self._assign("assign", value)

    def assign_add(self, delta: Any) -> Any:
        """Add to it; as `assign`, where what is added is aggregated first.

        Raises
        ------
        ArgumentError
            As `assign`; or the program adds to one that is ``ON_READ`` and to be summed.
        """
        return self._assign("assign_add", delta)

    def assign_sub(self, delta: Any) -> Any:
        """Subtract from it; as `assign_add`."""
        return self._assign("assign_sub", delta)

    def _assign(self, how: str, value: Any) -> Any:
        copy = copy_on_replica(self)
        if copy is None:
            return self._assign_between(how, value)
        leaves = copy.checked(how, value)
        if not copy.is_own and self.layout.treespec is None:
            leaves = [aggregated(f"{self.name}.{how}", self.aggregation, copy.replica, *leaves)]
        elif not copy.is_own:
            leaves = self._aggregated(how, leaves, copy.replica)
        copy.write(how, leaves)
        return self.layout.packed(copy.leaves)

    def _aggregated(self, how: str, leaves: list[Any], replica: ReplicaContext) -> list[Any]:
        aggregation = self.aggregation
        what = f"{self.name}.{how}"
        if aggregation is VariableAggregation.NONE:
            replica.meet(Agreed(what, ADVICE), (leaves, self.layout.treespec))
            return leaves
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            is_first = replica.replica_id_in_sync_group == 0
            return replica.meet(First(what), leaves if is_first else None)  # type: ignore[no-any-return]
        if aggregation is VariableAggregation.SUM and any(type(leaf) in NUMBERS for leaf in leaves):
            raise ArgumentError(
                f"{what}: a Python number on each of {replica.num_replicas_in_sync} replicas is to be summed, and is "
                "the same on all as a rule; give each replica's own as np.float64(x), or divide what is meant for all "
                "by the number of replicas"
            )
        return replica.all_reduce(ReduceOp(aggregation.value), leaves)  # type: ignore[no-any-return]

    def _assign_between(self, how: str, value: Any) -> Any:
        strategy, layout = self._strategy_in_use(), self.layout
        if layout.treespec is None:
            leaves = [value]
        else:
            leaves = list(map(_here, leaves_like(layout, value, f"{self.name}.{how}")))
            # The aggregated value of an ON_READ variable, not that of each replica.
            leaves = [leaf.read_value() if isinstance(leaf, Variable) and leaf.is_on_read else leaf for leaf in leaves]
            if self.synchronization is VariableSynchronization.ON_READ and self.aggregation is VariableAggregation.SUM:
                if how != "assign":
                    raise ArgumentError(
                        f"{self.name}.{how}: what replicas have is summed when it is read (ON_READ), so that there is "
                        "no saying which of them it is added to; add on a replica, or assign the new sum"
                    )
                leaves = self._parts(how, leaves, strategy.num_replicas_in_sync)
        return self._as_one(self._write(how, leaves))

    def _parts(self, how: str, leaves: list[Any], num_replicas: int) -> list[Any]:
        # Equal parts for the replicas, whose sum is the value; of whole numbers some are one more.
        self._check_here(how, leaves)

        def part(leaf: Any, dtype: np.dtype[Any]) -> Any:
            if type(leaf) is PerReplica:
                return leaf
            leaf = host_array(leaf)
            if dtype.kind not in "iu":
                return leaf / num_replicas
            each, rest = leaf // num_replicas, leaf % num_replicas
            return PerReplica([each + (rest > number) for number in range(num_replicas)])

        return [part(leaf, spec.dtype) for leaf, spec in zip(leaves, self.layout.specs, strict=True)]

    def _check_here(self, how: str, leaves: list[Any]) -> None:
        # Seen at once where it can be.
        layout = self.layout
        if layout.treespec is not None and not any(
            isinstance(leaf, (AsyncValue, PerReplica, Variable)) for leaf in leaves
        ):
            check(f"{self.name}.{how}", layout, leaves)

    def _write(self, how: str, leaves: list[Any]) -> list[PerReplica]:
        layout = self.layout
        self._check_here(how, leaves)
        return self._strategy_in_use().internals.call_each(
            layout.num_leaves, "variable", write_on_replica, self, how, leaves
        )

    def _as_one(self, found: list[PerReplica]) -> Any:
        # The program's value, made of those of the replicas.
        layout, aggregation = self.layout, self.aggregation
        if layout.treespec is None:
            return found[0]
        if self.is_on_read and aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
            return self._strategy_in_use().reduce(aggregation.name, layout.packed(found), axis=None)
        return layout.packed([each.values[0] for each in found])

    def state_dict(self) -> dict[str, Any]:
        """Return the current value in arrays that are here, as `Checkpoint` saves it.

        Returns
        -------
        dict
            Under ``"value"`` what all replicas have, of an object its own ``state_dict()``; where each replica has its
            own (``ON_READ``) and they are no sum or mean, under ``"replicas"`` a list of what each has.

        Raises
        ------
        ArgumentError
            It is an object that has no ``state_dict`` and is no nest of arrays.
        """
        strategy = self._strategy_in_use()
        if self.is_saved_per_replica:
            found = strategy.internals.call_each(1, "variable", state_on_replica, self)
            return {"replicas": list(strategy.local_results(found[0]))}
        if self.layout.treespec is not None:
            return {"value": self.numpy()}
        found = strategy.internals.call_each(1, "variable", state_on_replica, self)
        return {"value": strategy.local_results(found[0])[0]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Assign a value that `state_dict` returned.

        Raises
        ------
        ArgumentError
            The value is of another structure or shape; or each replica has its own, and there were not as many.
        """
        strategy = self._strategy_in_use()
        key = "replicas" if self.is_saved_per_replica else "value"
        if not isinstance(state, Mapping) or key not in state:
            raise ArgumentError(f"{self.name}: the state has no {key!r}, and so is of another kind of variable")
        found = state[key]
        if self.is_saved_per_replica and len(found) != strategy.num_replicas_in_sync:
            raise ArgumentError(
                f"{self.name}: each replica has its own value; the state has {len(found)}, and there are "
                f"{strategy.num_replicas_in_sync} replicas"
            )
        if self.layout.treespec is not None and not self.is_saved_per_replica:
            self.assign(like(self.numpy(), found))
            return
        states = found if self.is_saved_per_replica else [found] * strategy.num_replicas_in_sync
        each = PerReplica([FlatResult([state], list_spec(1)) for state in states])
        # Waited for: what does not fit is told now.
        strategy.local_results(strategy.internals.call_each(1, "variable", restore_on_replica, self, each)[0])

    # --- where it is ---

    def _strategy_in_use(self) -> StrategyContract:
        """Return the strategy to use: that of the current scope, or the variable's own."""
        scope = current_scope_strategy()
        # On a worker it is known in what replicas have called between them.
        strategy = scope if scope is not None and scope.internals.token == self.token else self._strategy
        if strategy is None:
            raise ArgumentError(
                f"{self.name}: used outside of its strategy; on a worker it can be used by what run calls on a "
                "replica, and merge_call between them"
            )
        if scope not in (None, strategy):
            raise ArgumentError(
                f"{self.name}: used in the scope of another strategy; a variable is for the strategy in whose scope it "
                "was made"
            )
        return strategy

    def __reduce__(self) -> tuple[Any, ...]:
        return _variable_on_worker, (
            self.key,
            self.token,
            self.name,
            self.synchronization.name,
            self.aggregation.name,
            self.layout,
        )

    def __copy__(self) -> Variable:
        return self

    def __deepcopy__(self, memo: Any) -> Variable:
        return self

    # --- as the value it has ---

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self._spec  # noqa: B018
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # `x += 1` gives the program a new value under the name; `assign_add` changes the variable.
        out = [each for each in kwargs.pop("out", ()) if not isinstance(each, Variable)]
        if out:
            kwargs["out"] = tuple(out)
        given = [each.as_array() if isinstance(each, Variable) else each for each in inputs]
        if method == "__call__" and any(map(is_on_device, given)):
            return called_on_device(ufunc, given, kwargs)
        return getattr(ufunc, method)(*given, **kwargs)

    def as_array(self) -> Any:
        """Return the current value; refuse a variable that is not one array."""
        self._spec  # noqa: B018
        return self.read_value()

    def __getitem__(self, key: Any) -> Any:
        return self.read_value()[key]

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __index__(self) -> int:
        return self.numpy().__index__()  # type: ignore[no-any-return]

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __len__(self) -> int:
        return len(self.numpy())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numpy())

    def __format__(self, spec: str) -> str:
        return format(self.numpy(), spec)

    def _repr_html_(self) -> str | None:
        layout = self.layout
        facts = [self.name, f"synchronization {self.synchronization.name}", f"aggregation {self.aggregation.name}"]
        if layout.treespec is None:
            return state_page("Variable", [*facts, f"a {layout.kind} on each replica"], (), ())
        paths = [accessor.codify("") or "(the value)" for accessor in layout.treespec.accessors()]
        rows = [(path, spec.shape, spec.dtype) for path, spec in zip(paths, layout.specs, strict=True)]
        return state_page("Variable", facts, ("leaf", "shape", "dtype"), rows)

    def __repr__(self) -> str:
        layout = self.layout
        if layout.treespec is None:
            what = layout.kind
        elif layout.treespec.is_leaf():
            what = str(layout.specs[0])
        else:
            what = str(optree.tree_unflatten(layout.treespec, layout.specs))
        return f"<Variable {self.name!r}: {what}, {self.synchronization.name}, {self.aggregation.name}>"

    # Equality is elementwise, as an array's is; so, as an array, it does not hash.
    __hash__ = None  # type: ignore[assignment]


def _here(leaf: Any) -> Any:
    # An array of a framework as NumPy's; what may be on workers as it is.
    return leaf if isinstance(leaf, (AsyncValue, PerReplica, Variable)) else as_arrays([leaf])[0]


def _variable_on_worker(
    key: VariableKey, token: str, name: str, synchronization: str, aggregation: str, layout: CopyLayout
) -> Variable:
    found = Variable.__new__(Variable)
    found.key, found.token, found.name, found.layout = key, token, name, layout
    found.synchronization = VariableSynchronization(synchronization)
    found.aggregation = VariableAggregation(aggregation)
    return found
