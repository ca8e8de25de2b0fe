"""The inputs of calls on a worker, looked up when a call arrives and read when it is made."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from functools import lru_cache
from typing import Any, Final

from distributed import Worker

from daskdist.core.block import Batches
from daskdist.execute.messages.failure import Failure
from daskdist.execute.messages.pickling import load_sent
from daskdist.strategy.reduce.tree import Prepared
from daskdist.strategy.steps.outcomes import Failed
from daskdist.strategy.steps.remote.promises import Promise, SentValue
from daskdist.strategy.values.extract import Extract, pick_from_rows
from daskdist.strategy.values.placeholders import Placeholder, numbered_placeholders

_PROMISES: Final = frozenset({Promise})
# Many steps refer to the same parts of results.
_loaded_picks: Final = lru_cache(maxsize=1024)(load_sent)


def lanes_of(
    operands: Sequence[Any], num_columns: int, place: int | tuple[int, ...], picks: bytes
) -> list[tuple[int, list[Any], tuple[Any, bytes]]]:
    """Return the number, references and arguments of each replica, from a flat list of numbers and references."""
    lanes = []
    for start in range(0, len(operands), 1 + num_columns):
        replica, *references = operands[start : start + 1 + num_columns]
        lanes.append((replica, references, (place if isinstance(place, int) else place[replica], picks)))
    return lanes


def picks_at(place: int, picks: bytes) -> tuple[list[tuple[int, Extract]], list[Placeholder]]:
    """Return the extractions of a call's arguments, those of batches at a place, and the placeholders for them."""
    loaded = _loaded_picks(picks)
    at_place = [(number, pick_from_rows(place, *rest) if len(rest) > 1 else rest[0]) for number, *rest in loaded]
    return at_place, numbered_placeholders(len(loaded))


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


def is_quick(inputs: Sequence[Any]) -> bool:
    """Return whether the thread that receives the inputs should make the call.

    Reading them takes less time than waking another thread.
    """
    function, *results = inputs
    if type(function) is not SentValue or function.made is None or not _PROMISES.issuperset(map(type, results)):
        return False
    prepared, _ = function.made[0]
    values = [result.value for result in results]
    return Failed in map(type, values) or (isinstance(prepared, Prepared) and prepared.is_quick(values))
