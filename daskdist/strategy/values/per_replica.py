"""Values that replicas have: one each, and perhaps not there yet."""

from __future__ import annotations

import operator
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any, Final

import numpy as np
import optree
from dask import threaded
from dask.base import DaskMethodsMixin, tokenize
from dask.optimization import cull

from daskdist.core.short_traceback import with_short_traceback
from daskdist.core.spec import TensorSpec
from daskdist.devices import is_on_device
from daskdist.display.values import Summary, shown, table
from daskdist.errors import ArgumentError
from daskdist.execute.caller import Handle
from daskdist.execute.callers.compute_key import is_future
from daskdist.execute.callers.graph import is_unfinished_task, one_task
from daskdist.strategy.backend import Picks, ResultSource
from daskdist.strategy.values.device_arrays import host_array
from daskdist.strategy.values.extract import Applied, Extract, ExtractAll, PerReplicaRef, Remote
from daskdist.strategy.values.flat import LEAVES
from daskdist.strategy.values.no_single_value import NoSingleValue

# An expression of so many operations is evaluated although nobody has looked: a total over a million steps
# must not keep a million steps alive.
_MOST_OPERATIONS = 64


class _Collection(DaskMethodsMixin):  # type: ignore[misc]
    """What values and nests of values have in common as Dask collections: a key for each."""

    __slots__ = ()

    def _tasks(self) -> dict[Any, Any]:
        """By key, each value, which may be asynchronous, in order."""
        raise NotImplementedError

    def __dask_graph__(self) -> Any:
        graph: dict[Any, Any] = {}
        for key, value in self._tasks().items():
            wiring = Wiring()
            wired = wiring.wire(value)
            handles: Sequence[Handle] = wiring.handles
            picks: Picks = wiring.picks
            if wiring.caller is not None:
                handles, picks = wiring.caller.as_futures(handles, picks)
            graph.update(one_task(key, filled_on_host, handles, picks, host_array(wired)))
        return graph

    def __dask_keys__(self) -> list[Any]:
        return list(self._tasks())

    @staticmethod
    def __dask_optimize__(graph: Any, keys: Any, **kwargs: Any) -> Any:
        return cull(dict(graph), keys)[0]

    @property
    def __dask_scheduler__(self) -> Any:
        # Where the values are from, also those that are here by now: several are computed together.
        for value in self._tasks().values():
            client = value._caller.client if isinstance(value, AsyncValue) else None
            if client is not None and client.status == "running":
                return client.get
        return threaded.get


class AsyncValue(_Collection, np.lib.mixins.NDArrayOperatorsMixin):
    """An array or number that a cluster may still be computing.

    It is used as what it will be: arithmetic, comparisons, indexing and NumPy's elementwise functions give
    further asynchronous values and wait for nothing. ``float``, ``int``, ``bool``, ``format``,
    ``numpy.asarray``, iterating and printing wait, and raise what the function that was to make it raised.
    It is a Dask collection: ``dask.compute`` gives several such values at once.
    """

    __slots__ = ("_caller", "_name", "_source", "_value", "spec", "worker")

    def __init__(self, caller: ResultSource, source: Remote | Applied, spec: TensorSpec | None = None) -> None:
        self._caller = caller
        # None once the value is here.
        self._source: Remote | Applied | None = source
        self._value: Any = None
        self._name = ""
        self.spec = spec
        # The address of the worker that was asked for it, where that is known.
        self.worker: str | None = None
        if type(source) is Remote:
            self.worker = source.worker
        elif source.num_operations > _MOST_OPERATIONS:  # type: ignore[union-attr]
            self.settle()

    def result(self) -> Any:
        """The value, waited for."""
        return results_of([self])[0]

    @property
    def is_here(self) -> bool:
        """Whether the value is in this process."""
        return self._source is None

    def can_be_given_to(self, caller: ResultSource) -> bool:
        """Whether a call of this caller can have the value."""
        return self._source is None or _is_one_cluster(self._caller, caller)

    def settle(self) -> None:
        """Have what was done to other values done where they are, with calls that go there, or else here."""
        if not isinstance(self._source, Applied):
            return
        wiring = Wiring()
        wired = wiring.wire_leaf(self)
        if wiring.caller is None or not wiring.caller.defers:
            self.result()
            return
        handle = wiring.caller.call(filled, wiring.handles, wiring.picks, wired, worker=wiring.worker, name="apply")
        self._source = Remote(handle, ExtractAll(), wiring.worker)

    def _apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncValue:
        operations = 1
        given = []
        for each in args:
            if type(each) is AsyncValue:
                if type(each._source) is Applied:
                    operations += each._source.num_operations
                given.append(each)
            else:
                given.append(as_it_is_now(each))
        return AsyncValue(self._caller, Applied(function, tuple(given), kwargs, operations))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # `total += value` asks for the result in place; a new value under the old name is the same to its user.
        out = [each for each in kwargs.pop("out", ()) if each is not self]
        if not kwargs and not out and method == "__call__":
            return self._apply(ufunc, *inputs)
        # Of `where`: NumPy asks whoever is in it, and so would come back here from where the values are.
        kwargs = dict(zip(kwargs, map(as_it_is_now, results_of(list(kwargs.values()))), strict=True))
        if out:
            return getattr(ufunc, method)(*results_of(inputs), out=tuple(out), **kwargs)
        return self._apply(getattr(ufunc, method), *inputs, **kwargs)

    def __add__(self, other: Any) -> Any:
        # As the mixin has it, but without asking NumPy, which asks the value; and a sum of many is one operation.
        if type(other) not in _PLAIN:
            return super().__add__(other)
        source = self._source
        if type(source) is Applied and source.function is _added_up:
            more = other._source.num_operations if type(getattr(other, "_source", None)) is Applied else 0
            operations = source.num_operations + 1 + more
            return AsyncValue(self._caller, Applied(_added_up, (*source.args, other), {}, operations))
        return self._apply(_added_up, self, other)

    __iadd__ = __add__

    def __radd__(self, other: Any) -> Any:
        return self._apply(_added_up, other, self) if type(other) in _PLAIN else super().__radd__(other)

    def __getitem__(self, key: Any) -> AsyncValue:
        return self._apply(operator.getitem, self, key)

    def __getattr__(self, name: str) -> Any:
        # What an array or a number has, such as shape, mean and item: waited for. Protocols that others look
        # for by names of their own are not.
        if name.startswith("_") or name == "expr":
            raise AttributeError(name)
        return getattr(self.result(), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.result(), dtype=dtype, copy=copy)

    def __float__(self) -> float:
        return float(self.result())

    def __int__(self) -> int:
        return int(self.result())

    def __index__(self) -> int:
        return operator.index(self.result())

    def __bool__(self) -> bool:
        return bool(self.result())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.result(), digits)

    def __len__(self) -> int:
        return len(self.result())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.result())

    def __format__(self, spec: str) -> str:
        return format(self.result(), spec)

    def __repr__(self) -> str:
        return repr(self.result())

    def __str__(self) -> str:
        return str(self.result())

    def _tasks(self) -> dict[Any, Any]:
        return {(self.__dask_tokenize__(), 0): self}

    def __dask_tokenize__(self) -> str:
        # Its own for as long as it lives: that its result is there by now changes nothing.
        self._name = self._name or f"value-{uuid.uuid4().hex}"
        return self._name

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        return operator.itemgetter(0), ()

    def __dask_postpersist__(self) -> tuple[Any, tuple[Any, ...]]:
        return _persisted_value, (self.__dask_keys__()[0], _workers_of(self))

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, in memory or on disk, is of the value.
        return ExtractAll(), (self.result(),)

    # Equality is elementwise, as an array's is; so, as an array, it does not hash.
    __hash__ = None  # type: ignore[assignment]


def _added_up(*values: Any) -> Any:
    return reduce(np.add, values)


_looking: Final = threading.Lock()
# Added to a value without more ado.
_PLAIN: Final = frozenset({AsyncValue, int, float, np.float32, np.float64})


def as_it_is_now(value: Any) -> Any:
    """A value that a later change of the array does not reach: calls are sent after they are made."""
    if isinstance(value, np.ndarray):
        # Also one that is read-only: it may be a view, or become writeable again.
        return value.copy("K")
    if is_on_device(value):
        return host_array(value)
    kind = type(value)
    return kind(map(as_it_is_now, value)) if kind is list or kind is tuple else value


def _is_one_cluster(one: ResultSource, other: ResultSource) -> bool:
    return one is other or one.client is other.client


class Slot:
    """Stands in a nest for a part that is filled in where it is known."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _slot, (self.number,)


@lru_cache(maxsize=256)
def _slot(number: int) -> Slot:
    # One for all steps: in a pickle, what is the same object is there once.
    return Slot(number)


class Expression:
    """Stands in a nest for a function of parts."""

    __slots__ = ("args", "function", "kwargs")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs

    def __reduce__(self) -> tuple[Any, ...]:
        return Expression, (self.function, self.args, self.kwargs)


@dataclass
class Wiring:
    """What nests with asynchronous values in them need, so that they can be filled elsewhere.

    Parameters
    ----------
    handles
        The results needed, each once.
    picks
        For each slot, which result it is part of, and how it is taken out.
    """

    handles: list[Handle] = field(default_factory=list)
    picks: list[tuple[int, Extract]] = field(default_factory=list)
    # Of each result the worker that was asked for it, where that is known.
    workers: list[str | None] = field(default_factory=list)
    caller: ResultSource | None = None
    # Where the first of them is.
    worker: str | None = None
    _numbers: dict[int, int] = field(default_factory=dict)

    def wire(self, nest: Any) -> Any:
        """The nest with slots and expressions for its asynchronous values."""
        if isinstance(nest, AsyncValue):
            return self.wire_leaf(nest)
        return optree.tree_map(self.wire_leaf, nest, none_is_leaf=True)

    def wire_leaf(self, leaf: Any) -> Any:
        """A leaf, or the slot or expression for it."""
        if type(leaf) is not AsyncValue:
            if type(leaf) is Remote:
                return self.slot(leaf.handle, leaf.pick)
            if isinstance(leaf, PerReplica):
                raise ArgumentError("a PerReplica stands here where one value is needed; hand it to run or reduce")
            return leaf
        source = leaf._source
        if source is None:
            return leaf._value
        if self.caller is None or leaf._caller.defers:
            # One that defers takes the handles of others too.
            self.caller = leaf._caller
        if isinstance(source, Applied):
            return Expression(source.function, tuple(map(self._wire_arg, source.args)), source.kwargs)
        self.worker = self.worker or source.worker
        return self.slot(source.handle, source.pick, source.worker)

    def _wire_arg(self, arg: Any) -> Any:
        # An index may be several, and one of them asynchronous.
        kind = type(arg)
        return kind(map(self._wire_arg, arg)) if kind is tuple or kind is list else self.wire_leaf(arg)

    def slot(self, handle: Handle, pick: Any, worker: str | None = None) -> Slot:
        """The slot for a part of a result, which was asked of a worker."""
        handles, picks = self.handles, self.picks
        place = len(handles)
        number = self._numbers.setdefault(id(handle), place)
        if number == place:
            handles.append(handle)
            self.workers.append(worker)
        slot = _slot(len(picks))
        picks.append((number, pick))
        return slot


def filled(results: Sequence[Any], picks: Sequence[tuple[int, Extract]], nest: Any) -> Any:
    """A wired nest, made whole where its parts are."""
    return fill(nest, [pick(results[number]) for number, pick in picks])


def filled_on_host(results: Sequence[Any], picks: Sequence[tuple[int, Extract]], value: Any) -> Any:
    """A wired value; an array of a device as NumPy's, for Dask takes it anywhere."""
    return host_array(filled(results, picks, value))


def fill(nest: Any, parts: Sequence[Any]) -> Any:
    """A wired nest with its parts in place."""
    kind = type(nest)
    if kind is Slot:
        return parts[nest.number]
    if kind is Expression:
        # An asynchronous value is NumPy's for who does something with it, wherever that is done.
        return nest.function(*[host_array(fill(each, parts)) for each in nest.args], **nest.kwargs)
    if kind is list:
        return [fill(each, parts) for each in nest]
    if kind in LEAVES:
        return nest
    return optree.tree_map(
        lambda leaf: fill(leaf, parts) if isinstance(leaf, (Slot, Expression)) else leaf, nest, none_is_leaf=True
    )


@with_short_traceback
def results_of(values: Sequence[Any]) -> list[Any]:
    """The values of several, of which asynchronous ones are waited for and fetched together."""
    wiring = Wiring()
    wired = wiring.wire(list(values))
    if wiring.caller is not None:
        _see_steps(values)
        wired = fill(wired, _fetch(wiring, wiring.caller))
    for value, result in zip(values, wired, strict=True):
        if isinstance(value, AsyncValue):
            value._value, value._source = result, None
    return list(wired)


def _see_steps(values: Sequence[Any]) -> None:
    # A step that failed on one replica has no result on any.
    seen: set[int] = set()
    for value in values:
        if isinstance(value, AsyncValue) and isinstance(value._source, Remote):
            step = value._source.step
            if step and id(step) not in seen:
                seen.add(id(step))
                value._caller.see(step)


def _fetch(wiring: Wiring, caller: ResultSource) -> list[Any]:
    # A small part of a large result is taken out where that lies; the result itself does not travel.
    at_worker: dict[int, list[int]] = {}
    for slot, (number, pick) in enumerate(wiring.picks):
        if pick.is_small_part:
            at_worker.setdefault(number, []).append(slot)
    handles = list(wiring.handles)
    for number, slots in at_worker.items():
        picks = [wiring.picks[slot][1] for slot in slots]
        handles[number] = caller.call(pick_all, [handles[number]], picks, worker=wiring.workers[number], name="pick")
    results = caller.results(handles)
    parts: list[Any] = [None if number in at_worker else pick(results[number]) for number, pick in wiring.picks]
    for number, slots in at_worker.items():
        for slot, part in zip(slots, results[number], strict=True):
            parts[slot] = part
    return parts


def pick_all(results: Sequence[Any], picks: Sequence[Extract]) -> list[Any]:
    """Some parts of the one result there is."""
    return [pick(results[0]) for pick in picks]


class DistributedValues(NoSingleValue):
    """Values of which each replica has one."""

    __slots__ = ()

    @property
    def values(self) -> tuple[Any, ...]:
        """One for each replica, in replica order."""
        raise NotImplementedError


class PerReplica(_Collection, DistributedValues):
    """One value for each replica, in replica order.

    Parameters
    ----------
    values
        Arrays, or whatever a function returned; asynchronous ones on a cluster.

    Notes
    -----
    It is a Dask collection with a key a replica: ``dask.compute(value)`` gives a `PerReplica` of values that are here,
    and ``value.persist()`` one of values that are computed where they are; arrays of devices are NumPy's in both.

    >>> PerReplica([np.array([1, 2]), np.array([3])])
    PerReplica:{
      0: array([1, 2]),
      1: array([3])
    }
    """

    __slots__ = ("_name", "_values", "spread")

    def __init__(self, values: Sequence[Any]) -> None:
        self._values: tuple[Any, ...] | None = tuple(values)
        # Where they are, for as long as nobody has asked for one of them.
        self.spread: PerReplicaRef | None = None

    @classmethod
    def of(cls, spread: PerReplicaRef) -> PerReplica:
        """What a call gave on each replica."""
        made = cls.__new__(cls)
        made._values, made.spread = None, spread
        return made

    @property
    def values(self) -> tuple[Any, ...]:
        """One for each replica, in replica order."""
        spread = self.spread
        if spread is not None:
            parts = map(spread.part, range(len(spread.workers)))
            values = tuple([AsyncValue(spread.caller, part, spread.spec) for part in parts])
            # Two threads that look are given the same.
            with _looking:
                self._values = self._values or values
                self.spread = None
        return self._values  # type: ignore[return-value]

    def __reduce__(self) -> tuple[Any, ...]:
        return PerReplica, (self.values,)

    def _lines(self, show: Callable[[Any], str]) -> str:
        values = results_of(self.values)
        return "PerReplica:{\n" + ",\n".join(f"  {k}: {show(value)}" for k, value in enumerate(values)) + "\n}"

    def __repr__(self) -> str:
        return self._lines(shown)

    def __str__(self) -> str:
        return self._lines(shown)

    def _repr_html_(self) -> str:
        workers = [value.worker if isinstance(value, AsyncValue) else None for value in self.values]
        return table(_summaries(self.values), workers)

    def _tasks(self) -> dict[Any, Any]:
        name = self.__dask_tokenize__()
        return {(name, number): value for number, value in enumerate(self.values)}

    def __dask_tokenize__(self) -> str:
        # Arrays may be changed, and a token is for good.
        if not hasattr(self, "_name"):
            self._name = f"per-replica-{tokenize(*self.values)}"
        return self._name

    def number(self) -> int:
        """How many there are."""
        spread = self.spread
        return len(self.values if spread is None else spread.workers)

    def can_be_given_to(self, caller: ResultSource) -> bool:
        """Whether a call of this caller can have the values, which come from one place."""
        spread = self.spread
        if spread is not None:
            return _is_one_cluster(spread.caller, caller)
        first = self.values[0] if self.values else None
        return first.can_be_given_to(caller) if isinstance(first, AsyncValue) else True

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        return PerReplica, ()

    def __dask_postpersist__(self) -> tuple[Any, tuple[Any, ...]]:
        return _persisted, (self.__dask_keys__(), list(map(_workers_of, self.values)))


def _summaries(values: Sequence[Any]) -> list[Summary]:
    # Made where the values are: what is shown of them is little.
    caller: ResultSource | None = None
    asked: list[Handle | None] = []
    for value in values:
        wiring = Wiring()
        wired = wiring.wire(value)
        caller = wiring.caller or caller
        if wiring.caller is None:
            asked.append(None)
        else:
            asked.append(wiring.caller.call(summary, wiring.handles, wiring.picks, wired, name="summary"))
    given = iter(() if caller is None else caller.results([each for each in asked if each is not None]))
    here = [value._value if isinstance(value, AsyncValue) else value for value in values]
    return [Summary.of(value) if handle is None else next(given) for handle, value in zip(asked, here, strict=True)]


def summary(results: Sequence[Any], picks: Sequence[tuple[int, Extract]], nest: Any) -> Summary:
    """The summary of a wired value."""
    return Summary.of(filled(results, picks, nest))


def _workers_of(value: Any) -> Any:
    # Those without which it does not come; what tells them, for as long as there is one.
    if not isinstance(value, AsyncValue) or value._source is None:
        return ()
    return value._caller.live_workers


def _persisted_value(graph: Any, key: Any, workers: Any, *, rename: dict[str, str] | None = None) -> Any:
    # What Dask's `persist` leaves: a future, or where it had no cluster the value.
    name, number = key
    found = graph[(rename or {}).get(name, name), number]
    if is_unfinished_task(found):
        raise ArgumentError("values of replicas can be computed and persisted; Dask does not rewrite their graphs")
    if not is_future(found):
        return found
    from daskdist.execute.callers.submit import Submit

    return AsyncValue(Submit(found.client, workers), Remote(found, ExtractAll()))


def _persisted(
    graph: Any, keys: Sequence[Any], workers: Sequence[Any], *, rename: dict[str, str] | None = None
) -> PerReplica:
    values = [_persisted_value(graph, key, own, rename=rename) for key, own in zip(keys, workers, strict=True)]
    return PerReplica(values)
