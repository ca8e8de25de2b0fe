"""`AsyncValue`: an array or number that a cluster may still be computing."""

from __future__ import annotations

import operator
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from dask import threaded
from dask.base import DaskMethodsMixin, dont_optimize

from daskdist.core.spec import TensorSpec
from daskdist.errors import ArgumentError
from daskdist.execute.callers.compute_key import is_future
from daskdist.execute.callers.graph import is_unfinished_task, one_task
from daskdist.strategy.backend import ResultSource
from daskdist.strategy.values.device_arrays import host_array
from daskdist.strategy.values.distributed_values import ONE_OF_EACH, DistributedValues
from daskdist.strategy.values.encoding import TINY_BYTES, called_on_host, is_small, operation
from daskdist.strategy.values.refs import Pending, Pick, Ref, TaskResults, results_of, whole
from daskdist.strategy.values.variable_contract import VariableContract


class ValueCollection(DaskMethodsMixin):  # type: ignore[misc]
    """The base of values and nests of values as Dask collections, with a key for each value."""

    __slots__ = ()

    def _values_by_key(self) -> dict[Any, Any]:
        """Return the values, some of them asynchronous, by key and in order."""
        raise NotImplementedError

    def __dask_graph__(self) -> Any:
        graph: dict[Any, Any] = {}
        for key, value in self._values_by_key().items():
            ref = value.ref if isinstance(value, AsyncValue) else None
            if ref is None:
                graph.update(one_task(key, _in_task, (), value.known if isinstance(value, AsyncValue) else value))
            else:
                graph.update(one_task(key, _from_task, (value.caller.as_future(ref),), ref.pick))
        return graph

    def __dask_keys__(self) -> list[Any]:
        return list(self._values_by_key())

    # All keys of the graph are asked for.
    __dask_optimize__ = staticmethod(dont_optimize)

    @property
    def __dask_scheduler__(self) -> Any:
        # Use the scheduler of the values' source, even if they are here already, so that several are computed together.
        for value in self._values_by_key().values():
            client = value.caller.client if isinstance(value, AsyncValue) else None
            if client is not None and client.status == "running":
                return client.get
        return threaded.get


class ReadAsArray(np.lib.mixins.NDArrayOperatorsMixin):
    """The base of values that are used like the array or number that reading them returns."""

    __slots__ = ()

    def _read(self) -> Any:
        """Return the array or number, in this process."""
        raise NotImplementedError

    def __float__(self) -> float:
        return float(self._read())

    def __int__(self) -> int:
        return int(self._read())

    def __index__(self) -> int:
        return operator.index(self._read())

    def __bool__(self) -> bool:
        return bool(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())

    def __format__(self, spec: str) -> str:
        return format(self._read(), spec)


# Dask may send results anywhere, so they are on the host.
def _in_task(_: Sequence[Any], value: Any) -> Any:
    return host_array(value)


def _from_task(results: Sequence[Any], pick: Pick) -> Any:
    return host_array(pick(results[0]))


class AsyncValue(Pending, ValueCollection, ReadAsArray):
    """An array or number that a cluster may still be computing.

    It is used like its result: arithmetic, comparisons, indexing and NumPy's elementwise functions are computed where
    the value is, and return further asynchronous values without waiting. ``float``, ``int``, ``bool``, ``format``,
    ``numpy.asarray``, iterating and printing wait, and raise the error of the function that computes it. It is a Dask
    collection: ``dask.compute`` computes several such values at once.
    """

    __slots__ = ("_name", "rows_of_step", "spec")

    def __init__(
        self,
        caller: ResultSource,
        ref: Ref | None,
        spec: TensorSpec | None = None,
        num_rows: frozenset[int] = frozenset(),
    ) -> None:
        self.caller = caller
        self.ref = ref
        self.known = self.worker_before = None
        self.spec = spec
        # The numbers of rows in the step that the value comes from, as those of a `PerReplica`.
        self.rows_of_step = num_rows
        self._name = ""

    def __dir__(self) -> list[str]:
        # What users call; the attributes belong to this package.
        return sorted({*super().__dir__()} - {*AsyncValue.__slots__, *Pending.__slots__, "worker"})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "at":
            # It changes its first operand.
            return NotImplemented if isinstance(inputs[0], AsyncValue) else ufunc.at(*results_of(inputs))
        # `total += value` asks for the result in place; binding a new value to the name looks the same to the user.
        out = [output for output in kwargs.pop("out", ()) if output is not inputs[0] or output is not self]
        if any(isinstance(output, AsyncValue) for output in out):
            raise TypeError(f"{ufunc.__name__}: out is an asynchronous value, which does not change")
        if not kwargs and not out and method == "__call__":
            return _apply(ufunc, inputs)
        # Resolve `where` and the like now: NumPy would call this method again for them on the workers.
        kwargs = dict(zip(kwargs, results_of(list(kwargs.values())), strict=True))
        if out:
            return getattr(ufunc, method)(*results_of(inputs), out=tuple(out), **kwargs)
        return _apply(getattr(ufunc, method), inputs, kwargs)

    def __getitem__(self, key: Any) -> AsyncValue:
        return _apply(operator.getitem, (self, key))

    def __getattr__(self, name: str) -> Any:
        # Attributes of arrays and numbers, such as shape, mean and item, wait for the value. Lookups of protocols, by
        # names with an underscore, do not.
        if name.startswith("_") or name == "expr":
            raise AttributeError(name)
        return getattr(self.result(), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.result(), dtype=dtype, copy=copy)

    _read = Pending.result

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.result(), digits)

    def __repr__(self) -> str:
        return repr(self.result())

    def __str__(self) -> str:
        return str(self.result())

    def _values_by_key(self) -> dict[Any, Any]:
        return {(self.__dask_tokenize__(), 0): self}

    def __dask_tokenize__(self) -> str:
        # The same during the life of the object, also after the result has arrived.
        self._name = self._name or f"value-{uuid.uuid4().hex}"
        return self._name

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        return operator.itemgetter(0), ()

    def __dask_postpersist__(self) -> tuple[Any, tuple[Any, ...]]:
        return persisted_value, (self.__dask_keys__()[0], workers_needed(self))

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles hold the value itself.
        return whole, (self.result(),)


def _apply(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> AsyncValue:
    args = tuple([arg.read_value() if isinstance(arg, VariableContract) else arg for arg in args])
    if any(isinstance(arg, DistributedValues) for arg in args):
        raise ArgumentError(ONE_OF_EACH)
    pending = [arg for arg in args if isinstance(arg, AsyncValue)]
    known = list(map(peek, args))
    if None not in known:
        # Nothing has to be waited for.
        return _here(pending[0].caller, function, [value for (value,) in known], kwargs)  # type: ignore[misc]
    # Values of other sources are waited for. Another thread may have read one meanwhile.
    unread = [arg for arg in pending if arg.ref is not None] or pending
    callers = [arg.caller for arg in unread if None not in [arg.caller.usable(other) for other in unread]]
    caller = (callers or [unread[0].caller])[0]
    try:
        if isinstance(function, np.ufunc) and not kwargs and all(map(_is_plain, args)):
            return AsyncValue(caller, caller.applied(operation(function), args, {}))
        return AsyncValue(caller, caller.applied(called_on_host, (function, *args), kwargs or {}))
    except ArgumentError:
        # Something does not pickle.
        return _here(caller, function, results_of(args), kwargs)


def _is_plain(arg: Any) -> bool:
    return isinstance(arg, AsyncValue) or is_small(arg, TINY_BYTES)


def _here(
    caller: ResultSource, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None
) -> AsyncValue:
    value = AsyncValue(caller, None)
    value.known = called_on_host(function, *args, **kwargs or {})
    return value


def peek(value: Any) -> tuple[Any] | None:
    """Return a value in a tuple if it is in this process, or else None, without waiting or computing."""
    if not isinstance(value, AsyncValue):
        return (value,)
    ref = value.ref
    return (value.known,) if ref is None else value.caller.peek(ref)


def workers_needed(value: Any) -> Any:
    """Return the workers that a value depends on, or the object that knows them; ``()`` if it is in this process."""
    return () if not isinstance(value, AsyncValue) or value.ref is None else value.caller.live_workers


def persisted_value(graph: Any, key: Any, workers: Any, *, rename: dict[str, str] | None = None) -> Any:
    """Return a value that Dask's ``persist`` left in a graph: a future, or without a cluster the value itself."""
    name, number = key
    persisted = graph[(rename or {}).get(name, name), number]
    if is_unfinished_task(persisted):
        raise ArgumentError("values of replicas can be computed and persisted; Dask does not rewrite their graphs")
    if not is_future(persisted):
        return persisted
    from daskdist.strategy.values.persisted import PersistedValues

    return AsyncValue(PersistedValues(persisted.client, workers), Ref(TaskResults((persisted,), (None,)), 0))
