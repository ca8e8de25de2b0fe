"""Values that ``persist`` left on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from daskdist.execute.callers.submit import Submit
from daskdist.strategy.values.encoding import applied, for_tasks
from daskdist.strategy.values.refs import Pending, Ref, TaskResults

_T = TypeVar("_T")


class PersistedValues:
    """The source of values that outlive their strategy: tasks of Dask compute with them.

    It implements `daskdist.strategy.backend.ResultSource`.

    Parameters
    ----------
    client
        The connection to the cluster.
    workers
        The addresses of the workers that take part, or the object that knows them.
    """

    def __init__(self, client: Any, workers: Any) -> None:
        self.client = client
        self._submit = Submit(client, workers)
        self.live_workers = self._submit.live_workers

    def usable(self, value: Pending) -> Ref | None:
        """Return the reference of a value, if it is the result of a task on this cluster."""
        ref = value.ref
        is_usable = ref is not None and type(ref.source) is TaskResults and value.caller.client is self.client
        return ref if is_usable else None

    def results(self, refs: Sequence[Ref]) -> list[Any]:
        """Wait for values and return them."""
        results = self._submit.results(list(map(_future_of, refs)))
        return [ref.pick(result) for ref, result in zip(refs, results, strict=True)]

    def attempt(self, read: Callable[[], _T]) -> _T:
        """Call a function that waits for results: Dask computes lost ones again."""
        return read()

    def peek(self, ref: Ref) -> tuple[Any] | None:
        """Return None: values are on workers until they are read."""
        return None

    def applied(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ref:
        """Call a function of values in a task."""
        arguments, futures = for_tasks((function, *args), kwargs, self, "apply")
        future = self._submit.call(applied, futures, arguments, name="apply")
        return Ref(TaskResults((future,), (None,)), 0)

    def as_future(self, ref: Ref) -> Any:
        """Return the future of a value."""
        future = _future_of(ref)
        self._submit.check([future])
        return future


def _future_of(ref: Ref) -> Any:
    return ref.source.futures[ref.place]
