"""`AsyncValue`: an array or number that a cluster may still be computing."""

from __future__ import annotations

import operator
import uuid
from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any, Final

import numpy as np

from daskdist.core.spec import TensorSpec
from daskdist.devices import is_on_device
from daskdist.errors import ArgumentError
from daskdist.execute.callers.compute_key import is_future
from daskdist.execute.callers.graph import is_unfinished_task
from daskdist.strategy.backend import ResultSource
from daskdist.strategy.values.collection import ValueCollection
from daskdist.strategy.values.device_arrays import host_array
from daskdist.strategy.values.extract import Applied, ExtractAll, Remote
from daskdist.strategy.values.placeholders import PendingValue, Placeholders, filled, results_of

# The number of operations from which an expression is evaluated before it is read: a total over a million steps would
# keep a million steps alive.
_MOST_OPERATIONS = 64


class AsyncValue(PendingValue, ValueCollection, np.lib.mixins.NDArrayOperatorsMixin):
    """An array or number that a cluster may still be computing.

    It is used like its result: arithmetic, comparisons, indexing and NumPy's elementwise functions return further
    asynchronous values without waiting. ``float``, ``int``, ``bool``, ``format``, ``numpy.asarray``, iterating and
    printing wait, and raise the error of the function that computes it. It is a Dask collection: ``dask.compute``
    computes several such values at once.
    """

    __slots__ = ("_name", "_num_rows", "spec", "worker")

    def __init__(
        self,
        caller: ResultSource,
        source: Remote | Applied,
        spec: TensorSpec | None = None,
        num_rows: frozenset[int] = frozenset(),
    ) -> None:
        # Inlined from the constructor of `PendingValue`, as every step creates values.
        self.caller = caller
        self.source = source
        self.known = None
        self._name = ""
        self.spec = spec
        # The numbers of rows in the step that the value comes from, as those of a `PerReplica`.
        self._num_rows = num_rows
        # The address of the worker that computes the value, if known.
        self.worker: str | None = None
        if type(source) is Remote:
            self.worker = source.worker
        elif source.num_operations > _MOST_OPERATIONS:  # type: ignore[union-attr]
            send_operations(self)

    def result(self) -> Any:
        """Wait for the value and return it."""
        return results_of([self])[0]

    def __dir__(self) -> list[str]:
        # What users call; the attributes belong to this package.
        return sorted({*super().__dir__()} - set(AsyncValue.__slots__) - set(PendingValue.__slots__))

    def _apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncValue:
        operations = 1
        operands = []
        for operand in args:
            if type(operand) is AsyncValue:
                if type(operand.source) is Applied:
                    operations += operand.source.num_operations
                operands.append(operand)
            else:
                operands.append(as_it_is_now(operand))
        return AsyncValue(self.caller, Applied(function, tuple(operands), kwargs, operations))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # `total += value` asks for the result in place; binding a new value to the name looks the same to the user.
        out = [output for output in kwargs.pop("out", ()) if output is not self]
        if not kwargs and not out and method == "__call__":
            return self._apply(ufunc, *inputs)
        # Resolve `where` and the like now: NumPy would call this method again for them on the workers.
        kwargs = dict(zip(kwargs, map(as_it_is_now, results_of(list(kwargs.values()))), strict=True))
        if out:
            return getattr(ufunc, method)(*results_of(inputs), out=tuple(out), **kwargs)
        return self._apply(getattr(ufunc, method), *inputs, **kwargs)

    def __add__(self, other: Any) -> Any:
        # This is faster than the mixin, which uses NumPy, and a sum of many values is one operation.
        if type(other) not in _PLAIN:
            return super().__add__(other)
        source = self.source
        if type(source) is Applied and source.function is _added_up:
            more = other.source.num_operations if isinstance(other, AsyncValue) and type(other.source) is Applied else 0
            operations = source.num_operations + 1 + more
            return AsyncValue(self.caller, Applied(_added_up, (*source.args, other), {}, operations))
        return self._apply(_added_up, self, other)

    __iadd__ = __add__

    def __radd__(self, other: Any) -> Any:
        return self._apply(_added_up, other, self) if type(other) in _PLAIN else super().__radd__(other)

    def __getitem__(self, key: Any) -> AsyncValue:
        return self._apply(operator.getitem, self, key)

    def __getattr__(self, name: str) -> Any:
        # Attributes of arrays and numbers, such as shape, mean and item, wait for the value. Lookups of protocols, by
        # names with an underscore, do not.
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
        return ExtractAll(), (self.result(),)

    # Equality is elementwise, as for arrays, so the value is not hashable.
    __hash__ = None  # type: ignore[assignment]


def peek(value: Any) -> tuple[Any] | None:
    """Return a value in a tuple if it is in this process, or else None, without waiting or computing."""
    if not isinstance(value, AsyncValue):
        return (value,)
    source = value.source
    if source is None:
        return (value.known,)
    known_result = value.caller.peek(source.handle) if type(source) is Remote else None
    return known_result and (source.pick(known_result[0]),)  # type: ignore[union-attr]


def send_operations(value: AsyncValue) -> None:
    """Replace operations on other values by the result of a call, on their cluster or in this process."""
    if not isinstance(value.source, Applied):
        return
    placeholders = Placeholders()
    placeholders.leaf(value)
    if placeholders.caller is None or not placeholders.caller.defers:
        results_of([value])
        return
    handle = placeholders.caller.logged(partial(_apply_on_worker, placeholders.caller, value.source))
    value.source = Remote(handle, ExtractAll(), placeholders.worker)


def _apply_on_worker(caller: ResultSource, source: Applied, _: Any) -> Any:
    placeholders = Placeholders()
    template = placeholders.leaf(PendingValue(caller, source))
    caller = placeholders.caller or caller
    return caller.call(
        filled, placeholders.handles, placeholders.picks, template, worker=placeholders.worker, name="apply"
    )


def _added_up(*values: Any) -> Any:
    return reduce(np.add, values)


# Types that can be added without further checks.
_PLAIN: Final = frozenset({AsyncValue, int, float, np.float32, np.float64})


def as_it_is_now(value: Any) -> Any:
    """Return a copy of an array, as a call is sent some time after it is made and the array may change until then."""
    if isinstance(value, np.ndarray):
        # A read-only array is copied too: it may be a view, or become writeable again.
        return value.copy("K")
    if is_on_device(value):
        return host_array(value)
    kind = type(value)
    return kind(map(as_it_is_now, value)) if kind is list or kind is tuple else value


def are_on_one_cluster(one: ResultSource, other: ResultSource) -> bool:
    """Return whether calls of either source can use results of the other."""
    return one is other or one.client is other.client


def workers_needed(value: Any) -> Any:
    """Return the workers that a value depends on, or the object that knows them; ``()`` if it is in this process."""
    if not isinstance(value, AsyncValue) or value.source is None:
        return ()
    return value.caller.live_workers


def persisted_value(graph: Any, key: Any, workers: Any, *, rename: dict[str, str] | None = None) -> Any:
    """Return a value that Dask's ``persist`` left in a graph: a future, or without a cluster the value itself."""
    name, number = key
    persisted = graph[(rename or {}).get(name, name), number]
    if is_unfinished_task(persisted):
        raise ArgumentError("values of replicas can be computed and persisted; Dask does not rewrite their graphs")
    if not is_future(persisted):
        return persisted
    from daskdist.execute.callers.submit import Submit

    return AsyncValue(Submit(persisted.client, workers), Remote(persisted, ExtractAll()))
