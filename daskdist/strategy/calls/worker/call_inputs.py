"""The inputs of calls on a worker, looked up when a call arrives and read when it is made."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Final

from distributed import Worker

from daskdist.core.block import Batches
from daskdist.execute.messages.failure import Failure
from daskdist.strategy.calls.outcomes import Failed
from daskdist.strategy.calls.worker.promises import Promise, SentValue
from daskdist.strategy.values.encoding import Encoded, SteadyFunction

_PROMISES: Final = frozenset({Promise})


class TaskData:
    """The result of a Dask task.

    Parameters
    ----------
    key
        The key of the task.
    worker
        The worker that needs it.
    batches
        Batches in the worker's memory, by key.
    bring
        Returns the promise that will have the result of a key, brought from elsewhere.
    """

    def __init__(
        self, key: Any, worker: Worker, batches: MutableMapping[Any, Batches], bring: Callable[[Any], Promise]
    ) -> None:
        self._key = key
        self._worker = worker
        self._batches = batches
        self._bring = bring
        # The promise with the result or the failure, once it was waited for.
        self._promise: Promise | None = None

    @property
    def is_set(self) -> bool:
        """Return whether the result is in the worker's memory."""
        return self._key in self._worker.data

    def when_set(self, callback: Callable[[], None]) -> None:
        """Call a function when the result is here, or now if it is."""
        if self.is_set:
            callback()
        else:
            self._brought().when_set(callback)

    def _brought(self) -> Promise:
        self._promise = self._promise or self._bring(self._key)
        return self._promise

    def get(self) -> Any:
        """Return the result, waited for; or the failure of one that does not come."""
        value = self._batches.get(self._key)
        if value is not None:
            return value
        try:
            value = self._worker.data[self._key]
        except KeyError:
            return self._brought().get()
        except Exception as error:
            # Dask has spilled the value to disk, and cannot read it again.
            return Failed(Failure.of(error), None)
        if type(value) is Batches:
            self._batches[self._key] = value
        return value


def is_quick(inputs: Sequence[Any], arguments: Encoded) -> bool:
    """Return whether the thread that receives the inputs should make the call.

    Reading them takes less time than waking another thread.
    """
    function, *results = inputs
    if type(function) is not SentValue or function.made is None or not _PROMISES.issuperset(map(type, results)):
        return False
    values = [result.value for result in results]
    if Failed in map(type, values):
        return True
    (prepared,) = function.made
    return isinstance(prepared, SteadyFunction) and prepared.is_quick(values, [pick for _, pick in arguments.inputs])
