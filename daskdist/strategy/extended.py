"""``strategy.extended``: devices, and values that are reduced, sent or changed where they are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import optree

from daskdist.dataset import Dataset
from daskdist.devices import are_loaded, name_of, named
from daskdist.devices import device as find_device
from daskdist.errors import ArgumentError, UnknownDeviceError
from daskdist.strategy.group import Replica
from daskdist.strategy.reduce.reductions import Op, checked_op
from daskdist.strategy.reduce.tree import list_spec
from daskdist.strategy.replica.context import current_replica
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.device_arrays import host_nest, in_stream_of, moved_nest
from daskdist.strategy.values.extract import Extract, FlatResult
from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.values.regroup import component
from daskdist.strategy.values.wiring import Wiring, filled
from daskdist.strategy.variables.variable import Variable


@dataclass(frozen=True)
class StrategyExtended:
    """The operations that TensorFlow has under ``strategy.extended``.

    Parameters
    ----------
    strategy
        The strategy it speaks for.

    Notes
    -----
    Where a value is to go is said as a *destination*: None, or a `PerReplica`, for every replica; or one replica, by
    its name in `worker_devices` or as ``strategy.replicas`` has it. What goes to every replica is a `PerReplica` of the
    value, also where there is one replica; TensorFlow has a ``Mirrored`` there. What goes to one comes as it is. On a
    cluster both are asynchronous: the value is made once, on the worker it is for, and other workers fetch it once,
    when a replica there uses it. Unlike in TensorFlow a destination is never a device that has no replica.
    """

    strategy: Any

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of each replica, in order of their ids.

        In this process ``"CPU:0"``; on a cluster with the address of the worker, ``"tcp://10.0.0.5:33507/CPU:0"``.

        >>> from daskdist import MirroredStrategy
        >>> MirroredStrategy(["CPU:0", "CPU:1"]).extended.worker_devices
        ('CPU:0', 'CPU:1')
        """
        return tuple(map(_name, self.strategy.replicas))

    @property
    def worker_devices_by_replica(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each replica, which is one."""
        return tuple((name,) for name in self.worker_devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices that variables are on: each replica has its copy."""
        return self.worker_devices

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        number: int = self.strategy.num_replicas_in_sync
        return number

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Return whether all replicas need batches of one shape: False, they take any."""
        return False

    @property
    def experimental_between_graph(self) -> bool:
        """Return whether each worker has a program of its own: False, one program serves all."""
        return False

    @property
    def experimental_should_init(self) -> bool:
        """Return whether this program makes the variables' initial values: True, it is the only one."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Return whether this program is to write checkpoints: True, it is the only one."""
        return True

    @property
    def should_save_summary(self) -> bool:
        """Return whether this program is to write summaries: True, it is the only one."""
        return True

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return whether a `Variable` was made in the scope of this strategy.

        Raises
        ------
        ArgumentError
            It is no variable.
        """
        return bool(variable_of("variable_created_in_scope", v).token == self.strategy.internals.token)

    def value_container(self, value: Any) -> Any:
        """Return the `PerReplica` or `Variable` that a value stands for: the value itself, here."""
        return value

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Open a scope in which new variables are where another one is: where all of this strategy's are.

        Raises
        ------
        ArgumentError
            It is no variable, or one of another strategy.
        """
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ArgumentError("colocate_vars_with: the variable is of another strategy; give one of this strategy's")
        with self.strategy.scope():
            yield

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        """Return the devices for values that belong to no one variable: those of all replicas."""
        return self.parameter_devices

    def read_var(self, v: Any) -> Any:
        """Return what a `Variable` has: `Variable.read_value`."""
        return variable_of("read_var", v).read_value()

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> Dataset:
        """Make a dataset as `Strategy.experimental_make_numpy_dataset` does."""
        dataset: Dataset = self.strategy.experimental_make_numpy_dataset(numpy_input)
        return dataset

    def reduce_to(self, reduce_op: Op | str, value: Any, destinations: Any, options: Any = None) -> Any:
        """Make one value of every replica's, where it is wanted.

        Parameters
        ----------
        reduce_op
            As `Strategy.reduce` takes it.
        value
            A `PerReplica` or a nest of them, reduced over the replicas only.
        destinations
            Where to; see above.
        options
            Taken for compatibility.

        Returns
        -------
        nest
            A `PerReplica` of the result for each `PerReplica` where it is for all replicas, so that `Strategy.run`
            takes it; else the result.

        Raises
        ------
        ArgumentError
            There is no such destination; and as `Strategy.reduce` does.

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
        """Make one value of every replica's of several at once, in one tree.

        Parameters
        ----------
        reduce_op
            As `Strategy.reduce` takes it.
        value_destination_pairs
            What to reduce, and where to, as in `reduce_to`.
        options
            Taken for compatibility.

        Returns
        -------
        list
            For each pair what `reduce_to` gives.

        Raises
        ------
        ArgumentError
            It is no sequence of pairs; and as `reduce_to` does.
        """
        op = checked_op(reduce_op)
        pairs = _pairs(value_destination_pairs)
        places = [self._destination("reduce_to", destination) for _, destination in pairs]
        # The tree ends where the first of them wants it.
        on = next((place.worker for place in places if place is not None), None)
        found = self.strategy.internals.reduce(op, [value for value, _ in pairs], None, on)

        def is_there(place: Replica) -> bool:
            is_host = named(place.device).is_host
            return place.worker == on and is_host and (on is not None or not are_loaded())

        return [
            self._everywhere(value) if place is None else value if is_there(place) else self._at(value, place)
            for value, place in zip(found, places, strict=True)
        ]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Put a value on every replica.

        Parameters
        ----------
        tensor
            A value, or a nest of some, asynchronous ones too; of a `Variable` what the program reads.
        destinations
            Where to; see above.

        Returns
        -------
        nest
            A `PerReplica` of the value for each, or where it is for one replica the value. On a cluster it leaves this
            process once, and a worker gets it once, however many replicas and steps use it.

        Raises
        ------
        ArgumentError
            There is no such destination, or a value is per replica already.

        >>> from daskdist import MirroredStrategy
        >>> MirroredStrategy(["CPU:0", "CPU:1"]).extended.broadcast_to(0.5, None)
        PerReplica:{
          0: 0.5,
          1: 0.5
        }
        """
        place = self._destination("broadcast_to", destinations)
        self.strategy.internals.check_values("broadcast_to", optree.tree_leaves(tensor, none_is_leaf=True))
        tensor = optree.tree_map(
            lambda leaf: leaf.read_value() if isinstance(leaf, Variable) else leaf, tensor, none_is_leaf=True
        )
        leaves = optree.tree_leaves(tensor, none_is_leaf=True)
        if any(isinstance(leaf, PerReplica) for leaf in leaves):
            raise ArgumentError(
                "broadcast_to: a value is a PerReplica, and so on every replica; give one value, such as what reduce "
                "returns"
            )
        sent = self._at(tensor, place)
        return self._everywhere(sent) if place is None else sent

    def update(
        self, var: Any, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None, group: bool = True
    ) -> Any:
        """Call a function with each replica's part of a value, where that is.

        Parameters
        ----------
        var
            A `Variable`; or a `PerReplica`, or a nest with some in it.
        fn
            Called once a replica with the variable, then ``args`` and ``kwargs``: what it assigns to a variable is for
            the replica's own copy, and not aggregated. Of a `PerReplica` it is given its part, and returns the new
            value.
        args, kwargs
            As `Strategy.run` takes them.
        group
            Whether what it returns comes as `Strategy.run` gives it; else a tuple of each replica's.

        Returns
        -------
        nest or tuple
            What the function returns. A `PerReplica` stays as it is.

        Raises
        ------
        ArgumentError
            There is no variable and no `PerReplica` in ``var``, of several replicas.

        >>> from daskdist import MirroredStrategy, PerReplica
        >>> extended = MirroredStrategy(["CPU:0", "CPU:1"]).extended
        >>> extended.update(PerReplica([1, 2]), lambda part, x: part * x, args=(10,), group=False)
        (10, 20)
        """
        if self.num_replicas_in_sync > 1 and not any(
            isinstance(leaf, (PerReplica, Variable)) for leaf in optree.tree_leaves(var)
        ):
            raise ArgumentError(
                f"update: var is {type(var).__name__}, and not per replica; put it on every replica first, with "
                "broadcast_to"
            )
        if not isinstance(args, (list, tuple)):
            raise ArgumentError(f"update: args is a {type(args).__name__}; give a tuple, such as args=(gradient,)")
        with_variables = any(isinstance(leaf, Variable) for leaf in optree.tree_leaves(var))
        found = self.strategy.run(Alone(fn) if with_variables else fn, args=(var, *args), kwargs=kwargs)
        return found if group else self._components(found)

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
            The devices that `non_slot_devices` gave; taken for compatibility.
        fn, args, kwargs
            As `Strategy.run` takes them.
        group
            Whether what it returns comes as `Strategy.run` gives it; else a tuple of each replica's.
        """
        found = self.strategy.run(fn, args=args, kwargs=kwargs)
        return found if group else self._components(found)

    def call_for_each_replica(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Call a function on every replica, as `Strategy.run` does."""
        return self.strategy.run(fn, args=args, kwargs=kwargs)

    def _components(self, nest: Any) -> tuple[Any, ...]:
        return tuple(component(nest, number) for number in range(self.num_replicas_in_sync))

    def _everywhere(self, nest: Any) -> Any:
        replicas = self.strategy.replicas

        def on_each(leaf: Any) -> PerReplica:
            if isinstance(leaf, AsyncValue) or not are_loaded():
                return PerReplica([leaf] * len(replicas))
            # In this process; what is to go to a worker is put on its device there.
            return PerReplica([on_its_device(leaf, "CPU:0" if each.worker else each.device) for each in replicas])

        return optree.tree_map(on_each, nest, none_is_leaf=True)

    def _at(self, nest: Any, place: Replica | None) -> Any:
        leaves, treespec = optree.tree_flatten(nest, none_is_leaf=True)
        return optree.tree_unflatten(treespec, self._put(leaves, place))

    def _put(self, leaves: Sequence[Any], place: Replica | None) -> list[Any]:
        # On a replica's worker; where it is for all what is asynchronous stays where it is, to be fetched.
        strategy = self.strategy
        sent = list(leaves)
        numbers = [k for k, leaf in enumerate(sent) if place is not None or not isinstance(leaf, AsyncValue)]
        if not numbers:
            return sent
        wiring = Wiring()
        wired = [wiring.wire(sent[number]) for number in numbers]
        worker = (place or strategy.replicas[0]).worker
        device = place.device if place is not None else None
        handle = strategy.internals.backend.call(
            put, wiring.handles, wiring.picks, wired, device, worker=worker, name="broadcast"
        )
        for number, leaf in zip(numbers, strategy.internals.returned.leaves(handle, len(numbers)), strict=True):
            sent[number] = leaf
        return sent

    def _destination(self, operation: str, given: Any) -> Replica | None:
        # A replica; None for all.
        strategy = self.strategy
        if given is None:
            return None
        if isinstance(given, PerReplica):
            strategy.internals.check_values(operation, [given])
            return None
        by_name: dict[str, Replica] = dict(zip(self.worker_devices, strategy.replicas, strict=True))
        if isinstance(given, str):
            found = by_name.get(given) or by_name.get(_canonical(given))
        else:
            found = given if isinstance(given, Replica) and given in strategy.replicas else None
        if found is None:
            raise ArgumentError(
                f"{operation}: {given!r:.80} is no destination; give None for every replica, a PerReplica, or the "
                f"device of a replica: {', '.join(by_name)}"
            )
        return found


@dataclass(frozen=True)
class Alone:
    """A function that, called on a replica, changes its own copies of variables alone."""

    __wrapped__: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        replica = current_replica()
        if replica is not None:
            # The flag is the replica's, for this call.
            replica.updates_alone = True
        return self.__wrapped__(*args, **kwargs)


def variable_of(operation: str, value: Any) -> Variable:
    """Return a value that is a `Variable`.

    Raises
    ------
    ArgumentError
        It is something else.
    """
    if not isinstance(value, Variable):
        raise ArgumentError(f"{operation}: {type(value).__name__} is no Variable; give a daskdist.Variable")
    return value


def put(
    results: Sequence[Any], picks: Sequence[tuple[int, Extract]], leaves: list[Any], device: str | None
) -> FlatResult:
    """Return wired leaves filled where this is called; on a device if one is named."""
    found = filled(results, picks, leaves) if picks else leaves
    if device is not None:
        found = [on_its_device(leaf, device) for leaf in found]
    return FlatResult(found, list_spec(len(leaves)))


def on_its_device(value: Any, name: str) -> Any:
    """Return a value with its arrays on a device, if that can have them, or on the host."""
    device = named(name)
    if device.is_host:
        return host_nest(value)
    with in_stream_of(device):
        return moved_nest(value, device)


def _name(replica: Replica) -> str:
    return f"{replica.worker}/{replica.device}" if replica.worker else replica.device


def _canonical(name: str) -> str:
    try:
        return name_of(find_device(name))
    except UnknownDeviceError:
        return name


def _pairs(given: Any) -> list[tuple[Any, Any]]:
    if not isinstance(given, (list, tuple)) or not all(
        isinstance(each, (list, tuple)) and len(each) == 2 for each in given
    ):
        raise ArgumentError(
            f"batch_reduce_to: value_destination_pairs is {type(given).__name__}; give a list of pairs, each of "
            "a value and its destination"
        )
    return [(value, destination) for value, destination in given]
