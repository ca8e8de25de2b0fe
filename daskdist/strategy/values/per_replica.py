"""`PerReplica`: one value for each replica, possibly still being computed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final

from dask.base import tokenize

from daskdist.core.cardinality import counted
from daskdist.display.missing_methods import Advised
from daskdist.display.values import Summary, values_page, values_text
from daskdist.strategy.values.async_value import (
    AsyncValue,
    ValueCollection,
    peek,
    persisted_value,
    workers_needed,
)
from daskdist.strategy.values.distributed_values import DistributedValues
from daskdist.strategy.values.refs import Refs, results_of

# A lock with which two threads that read the same values get the same objects.
_values_lock: Final = threading.Lock()


# In place of a number of rows that is not known.
UNKNOWN_ROWS: Final = frozenset({-1})


class PerReplica(ValueCollection, DistributedValues, Advised):
    """One value for each replica, in replica order.

    Parameters
    ----------
    values
        Arrays or other results of a function; on a cluster, asynchronous ones.

    Notes
    -----
    It is a Dask collection with one key per replica: ``dask.compute(value)`` returns a `PerReplica` of values in this
    process, and ``value.persist()`` one of values computed on their workers. Both hold device arrays as NumPy arrays.

    >>> import numpy as np
    >>> PerReplica([np.array([1, 2]), np.array([3])])
    PerReplica:{
      0: array([1, 2]),
      1: array([3])
    }
    """

    __slots__ = ("_name", "_values", "batch", "batch_leaf", "refs", "rows_of_step")

    def __init__(
        self,
        values: Sequence[Any] | Refs,
        num_rows: frozenset[int] = frozenset(),
        *,
        batch: Any = None,
        batch_leaf: int = 0,
    ) -> None:
        # The attributes are for this package: `__dir__` hides them. References are kept until a value is read.
        self.refs: Refs | None = values if type(values) is Refs else None
        self._values: tuple[Any, ...] | None = tuple(values) if self.refs is None else None
        # The global batch that the values are a leaf of, and the number of the leaf; None if they are of no batch.
        self.batch = batch
        self.batch_leaf = batch_leaf
        # The numbers of rows that replicas have in the step that the values come from, which has an unknown one if
        # `UNKNOWN_ROWS` is among them. Without numbers the values come from no step, or all steps have the same.
        self.rows_of_step = num_rows

    @property
    def values(self) -> tuple[Any, ...]:
        """The value of each replica, in replica order."""
        if self.refs is not None:
            values = values_read_later(self)
            # Two threads that read the values get the same objects.
            with _values_lock:
                self._values = self._values or values
                self.refs = None
        return self._values  # type: ignore[return-value]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__()} - set(PerReplica.__slots__))

    def __reduce__(self) -> tuple[Any, ...]:
        return PerReplica, (self.values,)

    def __repr__(self) -> str:
        return values_text("PerReplica", [value for (value,) in results_by_replica([self])])

    def _repr_html_(self) -> str:
        # Without waiting or fetching: a value that is not in this process is described by its spec.
        workers = [value.worker if isinstance(value, AsyncValue) else None for value in self.values]
        summaries = [
            Summary.of(*known_value) if (known_value := peek(value)) else _known_of(value) for value in self.values
        ]
        note = "Values stay on workers until they are read: print(value)."
        return values_page("PerReplica", summaries, workers, "" if all(map(peek, self.values)) else note)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        # Notebooks show the HTML, but would also call `repr`, which waits.
        known_values = list(map(peek, self.values))
        text = f"<PerReplica of {counted(len(known_values), 'value')} on workers; print(value) fetches them>"
        if all(known_values):
            text = values_text("PerReplica", [value for (value,) in known_values])  # type: ignore[misc]
        return {"text/plain": text, "text/html": self._repr_html_()}

    def _values_by_key(self) -> dict[Any, Any]:
        name = self.__dask_tokenize__()
        return {(name, number): value for number, value in enumerate(self.values)}

    def __dask_tokenize__(self) -> str:
        # Computed once: the arrays may change, but a token must not.
        if not hasattr(self, "_name"):
            self._name = f"per-replica-{tokenize(*self.values)}"
        return self._name

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        return PerReplica, ()

    def __dask_postpersist__(self) -> tuple[Any, tuple[Any, ...]]:
        return _persisted, (self.__dask_keys__(), list(map(workers_needed, self.values)))


def is_uneven(value: PerReplica) -> bool:
    """Return whether the values come from a step in which replicas have different numbers of rows."""
    return len(value.rows_of_step) > 1


def num_rows_of(values: Iterable[Any]) -> frozenset[int]:
    """Return the numbers of rows that replicas have in the steps that values come from; unknown if steps differ."""
    known: set[frozenset[int]] = set()
    for value in values:
        if (type(value) is PerReplica or type(value) is AsyncValue) and value.rows_of_step:
            known.add(value.rows_of_step)
    if len(known) < 2:
        return known.pop() if known else frozenset()
    # Steps of different sizes are not uneven.
    return frozenset().union(*known) if max(map(len, known)) > 1 else UNKNOWN_ROWS


def num_values(value: PerReplica) -> int:
    """Return the number of values."""
    refs = value.refs
    return len(value._values if refs is None else refs.source)  # type: ignore[arg-type]


def values_read_later(value: PerReplica) -> tuple[Any, ...]:
    """Return the value of each replica as `PerReplica.values` does; calls may be made again until they are read."""
    refs = value.refs
    if refs is None:
        return value.values
    num_rows = value.rows_of_step
    return tuple([AsyncValue(refs.caller, refs.ref(number), refs.spec, num_rows) for number in range(len(refs.source))])


def follow_batch(value: PerReplica) -> None:
    """Replace the values by the pieces of their batch, if it was split for another number of replicas."""
    batch = value.batch
    if num_values(value) != len(batch):
        _become(value, batch.leaves[value.batch_leaf])


def _become(value: PerReplica, values: Sequence[Any] | Refs) -> None:
    are_refs = type(values) is Refs
    with _values_lock:
        value._values = None if are_refs else tuple(values)
        value.refs = values if are_refs else None  # type: ignore[assignment]


def can_be_used_by(value: PerReplica | AsyncValue, caller: Any) -> bool:
    """Return whether a call of this caller can use a value, or the values of replicas, which have one source."""
    if isinstance(value, AsyncValue):
        return value.ref is None or value.caller is caller or value.caller.client is caller.client
    refs = value.refs
    if refs is not None:
        return refs.caller is caller or refs.caller.client is caller.client
    values = value.values
    return not values or not isinstance(values[0], AsyncValue) or can_be_used_by(values[0], caller)


def results_by_replica(leaves: Sequence[Any]) -> list[list[Any]]:
    """Wait for values, some of them per replica, and return those of each replica."""

    def read() -> list[list[Any]]:
        # Calls that were made again since may have fewer values.
        columns = [values_read_later(leaf) if isinstance(leaf, PerReplica) else None for leaf in leaves]
        (size, *_) = [len(column) for column in columns if column is not None]
        rows = [
            [leaf if column is None else column[place] for leaf, column in zip(leaves, columns, strict=True)]
            for place in range(size)
        ]
        results = results_of(rows)
        for leaf, column in zip(leaves, columns, strict=True):
            if column is not None:
                _become(leaf, column)
        return results

    refs = next((leaf.refs for leaf in leaves if isinstance(leaf, PerReplica) and leaf.refs), None)
    return read() if refs is None else refs.caller.attempt(read)


def _known_of(value: AsyncValue) -> Summary:
    spec = value.spec
    return Summary("", "", "") if spec is None else Summary(str(spec.shape).replace("None", "?"), str(spec.dtype), "")


def _persisted(
    graph: Any, keys: Sequence[Any], workers: Sequence[Any], *, rename: dict[str, str] | None = None
) -> PerReplica:
    values = [persisted_value(graph, key, allowed, rename=rename) for key, allowed in zip(keys, workers, strict=True)]
    return PerReplica(values)
