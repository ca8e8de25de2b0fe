"""``strategy.extended``: devices, and values that are reduced, sent or updated at a destination."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import optree

from daskdist.dataset import Dataset
from daskdist.devices import are_loaded, name_of, named
from daskdist.devices import device as find_device
from daskdist.errors import ArgumentError, UnknownDeviceError
from daskdist.strategy.group import Replica
from daskdist.strategy.reduce.reductions import Op, checked_op
from daskdist.strategy.replica.context import current_replica, let_update_alone
from daskdist.strategy.replica.contract import internals_of
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.device_arrays import placed_nest
from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.values.refs import FlatResult
from daskdist.strategy.values.regroup import component
from daskdist.strategy.values.variable_contract import token_of
from daskdist.strategy.variables.variable import Variable


@dataclass(frozen=True)
class StrategyExtended:
    """The operations that TensorFlow has under ``strategy.extended``.

    Attributes
    ----------
    experimental_require_static_shapes
        False: replicas accept batches of different shapes.
    experimental_between_graph
        False: one program serves all workers.
    experimental_should_init, should_checkpoint, should_save_summary
        True: this program, as the only one, creates the initial values of variables, and writes checkpoints and
        summaries.

    Notes
    -----
    The *destination* of a value is None, a `PerReplica` or a `Variable` for every replica, or one replica, by its name
    in `worker_devices` or as an item of ``strategy.replicas``. A value for every replica is returned as a `PerReplica`,
    even if there is one replica; TensorFlow returns a ``Mirrored``. A value for one replica is returned unwrapped. On a
    cluster both are asynchronous: the value is computed once, on its destination's worker, and other workers fetch it
    once, when a replica there uses it. Unlike in TensorFlow, a destination is never a device without a replica.
    """

    strategy: Any
    experimental_require_static_shapes: ClassVar[bool] = False
    experimental_between_graph: ClassVar[bool] = False
    experimental_should_init: ClassVar[bool] = True
    should_checkpoint: ClassVar[bool] = True
    should_save_summary: ClassVar[bool] = True

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of each replica, in replica order.

        In this process ``"CPU:0"``; on a cluster with the address of the worker, ``"tcp://10.0.0.5:33507/CPU:0"``.

        >>> from daskdist import MirroredStrategy
        >>> MirroredStrategy(["CPU:0", "CPU:1"]).extended.worker_devices
        ('CPU:0', 'CPU:1')
        """
        return tuple(map(_name, self.strategy.replicas))

    @property
    def worker_devices_by_replica(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each replica, one for each."""
        return tuple((name,) for name in self.worker_devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices of variables, as each replica has a copy."""
        return self.worker_devices

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        number: int = self.strategy.num_replicas_in_sync
        return number

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return whether a `Variable` was created in the scope of this strategy.

        Raises
        ------
        ArgumentError
            The value is not a variable.
        """
        return bool(token_of(variable_of("variable_created_in_scope", v)) == internals_of(self.strategy).token)

    def value_container(self, value: Any) -> Any:
        """Return the `PerReplica` or `Variable` that contains a value: the value itself."""
        return value

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Open a scope for new variables next to another one, which is where all variables of this strategy are.

        Raises
        ------
        ArgumentError
            The value is not a variable, or belongs to another strategy.
        """
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ArgumentError("colocate_vars_with: the variable is of another strategy; give one of this strategy's")
        with self.strategy.scope():
            yield

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        """Return the devices for values that do not belong to a single variable: those of all replicas."""
        return self.parameter_devices

    def read_var(self, v: Any) -> Any:
        """Return the value of a `Variable`, as `Variable.read_value` does."""
        return variable_of("read_var", v).read_value()

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> Dataset:
        """Create a dataset as `Strategy.experimental_make_numpy_dataset` does."""
        dataset: Dataset = self.strategy.experimental_make_numpy_dataset(numpy_input)
        return dataset

    def reduce_to(self, reduce_op: Op | str, value: Any, destinations: Any, options: Any = None) -> Any:
        """Reduce the values of all replicas at a destination.

        Parameters
        ----------
        reduce_op
            A reduction, as for `Strategy.reduce`.
        value
            A `PerReplica` or a nest of them, reduced over the replicas only.
        destinations
            The destination; see above.
        options
            Accepted for compatibility and ignored.

        Returns
        -------
        nest
            For all replicas, a `PerReplica` of the result for each `PerReplica`, which `Strategy.run` accepts;
            otherwise the result.

        Raises
        ------
        ArgumentError
            The destination does not exist; and as for `Strategy.reduce`.

        >>> from daskdist import MirroredStrategy, PerReplica
        >>> MirroredStrategy(["CPU:0", "CPU:1"]).extended.reduce_to("SUM", PerReplica([1, 2]), None)
        PerReplica:{
          0: np.int64(3),
          1: np.int64(3)
        }
        """
        return self.batch_reduce_to(reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_to(
        self, reduce_op: Op | str, value_destination_pairs: Sequence[tuple[Any, Any]], options: Any = None
    ) -> list[Any]:
        """Reduce the values of all replicas for several values at once, in one tree.

        Parameters
        ----------
        reduce_op
            A reduction, as for `Strategy.reduce`.
        value_destination_pairs
            Pairs of a value and its destination, as for `reduce_to`.
        options
            Accepted for compatibility and ignored.

        Returns
        -------
        list
            The result of `reduce_to` for each pair.

        Raises
        ------
        ArgumentError
            The argument is not a sequence of pairs; and as for `reduce_to`.
        """
        op = checked_op(reduce_op)
        pairs = _pairs(value_destination_pairs)
        places = [self._destination("reduce_to", destination) for _, destination in pairs]
        # Place the end of the tree on the first destination.
        on = next((place.worker for place in places if place is not None), None)
        reduced = internals_of(self.strategy).reduce(op, [value for value, _ in pairs], None, on)

        def is_there(place: Replica) -> bool:
            is_host = named(place.device).is_host
            return place.worker == on and is_host and (on is not None or not are_loaded())

        return [
            self._everywhere(value) if place is None else value if is_there(place) else self._at(value, place)
            for value, place in zip(reduced, places, strict=True)
        ]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Put a value on every replica.

        Parameters
        ----------
        tensor
            A value or a nest of values, which may be asynchronous; a `Variable` stands for the value that the program
            reads.
        destinations
            The destination; see above.

        Returns
        -------
        nest
            A `PerReplica` of each value, or the value itself for one replica. On a cluster it is sent from this process
            once, and to each worker once, however many replicas and steps use it.

        Raises
        ------
        ArgumentError
            The destination does not exist, or a value is already per replica.

        >>> from daskdist import MirroredStrategy
        >>> MirroredStrategy(["CPU:0", "CPU:1"]).extended.broadcast_to(0.5, None)
        PerReplica:{
          0: 0.5,
          1: 0.5
        }
        """
        place = self._destination("broadcast_to", destinations)
        internals_of(self.strategy).check_values("broadcast_to", optree.tree_leaves(tensor, none_is_leaf=True))
        tensor = optree.tree_map(
            lambda leaf: leaf.read_value() if isinstance(leaf, Variable) else leaf, tensor, none_is_leaf=True
        )
        leaves = optree.tree_leaves(tensor, none_is_leaf=True)
        if any(isinstance(leaf, PerReplica) for leaf in leaves):
            raise ArgumentError(
                "broadcast_to: a value is a PerReplica and already on every replica; give one value, such as the "
                "result of reduce"
            )
        sent = self._at(tensor, place)
        return self._everywhere(sent) if place is None else sent

    def update(
        self, var: Any, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None, group: bool = True
    ) -> Any:
        """Call a function with each replica's part of a value, on that replica.

        Parameters
        ----------
        var
            A `Variable`, a `PerReplica`, or a nest that contains one.
        fn
            Called once per replica with the variable, then ``args`` and ``kwargs``: an assignment to a variable changes
            only the replica's copy and is not aggregated. For a `PerReplica` it gets the replica's part, and returns
            the new value.
        args, kwargs
            Arguments as for `Strategy.run`.
        group
            Whether the result is returned as by `Strategy.run`; otherwise it is a tuple of the replicas' results.

        Returns
        -------
        nest or tuple
            The results of the function. A `PerReplica` argument does not change.

        Raises
        ------
        ArgumentError
            ``var`` has neither a variable nor a `PerReplica` although there are several replicas.

        >>> from daskdist import MirroredStrategy, PerReplica
        >>> extended = MirroredStrategy(["CPU:0", "CPU:1"]).extended
        >>> extended.update(PerReplica([1, 2]), lambda part, x: part * x, args=(10,), group=False)
        (10, 20)
        """
        if self.num_replicas_in_sync > 1 and not any(
            isinstance(leaf, (PerReplica, Variable)) for leaf in optree.tree_leaves(var)
        ):
            raise ArgumentError(
                f"update: var is {type(var).__name__}, which is not per replica; put it on every replica first, with "
                "broadcast_to"
            )
        if not isinstance(args, (list, tuple)):
            raise ArgumentError(f"update: args is a {type(args).__name__}; give a tuple, such as args=(gradient,)")
        with_variables = any(isinstance(leaf, Variable) for leaf in optree.tree_leaves(var))
        return self.update_non_slot(None, Alone(fn) if with_variables else fn, (var, *args), kwargs, group)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        """Call a function on every replica.

        Parameters
        ----------
        colocate_with
            The devices returned by `non_slot_devices`; accepted for compatibility and ignored.
        fn, args, kwargs
            Arguments as for `Strategy.run`.
        group
            Whether the result is returned as by `Strategy.run`; otherwise it is a tuple of the replicas' results.
        """
        results = self.strategy.run(fn, args=args, kwargs=kwargs)
        return results if group else tuple(component(results, k) for k in range(self.num_replicas_in_sync))

    def call_for_each_replica(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Call a function on every replica, as `Strategy.run` does."""
        return self.strategy.run(fn, args=args, kwargs=kwargs)

    def _everywhere(self, nest: Any) -> Any:
        replicas = self.strategy.replicas

        def on_each(leaf: Any) -> PerReplica:
            if isinstance(leaf, AsyncValue) or not are_loaded():
                return PerReplica([leaf] * len(replicas))
            # Values for a worker are put on its device there.
            return PerReplica(
                [placed_nest(leaf, named("CPU:0" if replica.worker else replica.device)) for replica in replicas]
            )

        return optree.tree_map(on_each, nest, none_is_leaf=True)

    def _at(self, nest: Any, place: Replica | None) -> Any:
        # Put a nest on a replica's worker; for all replicas, asynchronous values stay on their workers until fetched.
        strategy = self.strategy
        sent, treespec = optree.tree_flatten(nest, none_is_leaf=True)
        numbers = [k for k, leaf in enumerate(sent) if place is not None or not isinstance(leaf, AsyncValue)]
        if not numbers:
            return nest
        worker = (place or strategy.replicas[0]).worker
        device = place.device if place is not None else None
        arguments = [sent[number] for number in numbers], device
        call = internals_of(strategy).call(put, arguments, worker, "broadcast")
        for number, leaf in zip(numbers, internals_of(strategy).returned.leaves(call, len(numbers)), strict=True):
            sent[number] = leaf
        return optree.tree_unflatten(treespec, sent)

    def _destination(self, operation: str, destination: Any) -> Replica | None:
        # Return a replica, or None for all.
        strategy = self.strategy
        if destination is None:
            return None
        if isinstance(destination, (PerReplica, Variable)):
            internals_of(strategy).check_values(operation, [destination])
            return None
        by_name: dict[str, Replica] = dict(zip(self.worker_devices, strategy.replicas, strict=True))
        if isinstance(destination, str):
            replica = by_name.get(destination) or by_name.get(_canonical(destination))
        else:
            replica = destination if isinstance(destination, Replica) and destination in strategy.replicas else None
        if replica is None:
            raise ArgumentError(
                f"{operation}: {destination!r:.80} is not a destination; give None for all, a PerReplica, a "
                f"Variable, or the device of a replica: {', '.join(by_name)}"
            )
        return replica


@dataclass(frozen=True)
class Alone:
    """A function whose assignments to variables only change the copies of the replica that it is called on."""

    __wrapped__: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        replica = current_replica()
        if replica is not None:
            # The flag is that of the replica's context, which exists for this call only.
            let_update_alone(replica)
        return self.__wrapped__(*args, **kwargs)


def variable_of(operation: str, value: Any) -> Variable:
    """Return a value that is a `Variable`.

    Raises
    ------
    ArgumentError
        The value is not a variable.
    """
    if not isinstance(value, Variable):
        raise ArgumentError(f"{operation}: {type(value).__name__} is not a Variable; give a daskdist.Variable")
    return value


def put(leaves: list[Any], device: str | None) -> FlatResult:
    """Return leaves, on a device if one is named."""
    return FlatResult.listed(leaves if device is None else [placed_nest(leaf, named(device)) for leaf in leaves])


def _name(replica: Replica) -> str:
    return f"{replica.worker}/{replica.device}" if replica.worker else replica.device


def _canonical(name: str) -> str:
    try:
        return name_of(find_device(name))
    except UnknownDeviceError:
        return name


def _pairs(pairs: Any) -> list[tuple[Any, Any]]:
    if not isinstance(pairs, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
    ):
        raise ArgumentError(
            f"batch_reduce_to: value_destination_pairs is {type(pairs).__name__}; give a list of pairs, each of "
            "a value and its destination"
        )
    return [(value, destination) for value, destination in pairs]
