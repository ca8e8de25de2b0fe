"""`MirroredStrategy`: replicas in this process."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Final

from daskdist.dataset import Dataset
from daskdist.devices import Stream, are_loaded, check_present, name_of, named, present
from daskdist.devices import devices as find_devices
from daskdist.errors import CollectiveError
from daskdist.execute.callers import Caller, Handle, Now, embedded
from daskdist.execute.ordered import Ordered
from daskdist.strategy.context import ReplicaContext
from daskdist.strategy.from_function import Made
from daskdist.strategy.gang import Gang
from daskdist.strategy.held import made, outlook
from daskdist.strategy.inputs import InputContext
from daskdist.strategy.loops import fed
from daskdist.strategy.on_replica import call_on_replica
from daskdist.strategy.regroup import regroup
from daskdist.strategy.shelf import Shelf
from daskdist.strategy.strategy import Replica, Strategy
from daskdist.strategy.values import PerReplica

logger: Final = logging.getLogger("daskdist")

# How long others have to come back too, when one has raised, before that is told.
_TELL_AFTER_S: Final = 1.0


class MirroredStrategy(Strategy):
    """Replicas in this process, one a device; no cluster.

    Parameters
    ----------
    devices
        Their names, such as ``["CPU:0", "CPU:1"]`` or ``["GPU:0"]``. If None or empty, all GPUs that this process sees,
        as `list_devices` lists them; one CPU replica where it sees none.

    Raises
    ------
    UnknownDeviceError
        There is no such device here, or one is named twice.

    >>> strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    >>> batches = strategy.distribute_dataset(Dataset.range(8).batch(4))
    >>> sums = [strategy.run(lambda x: x.sum(), args=(batch,)) for batch in batches]
    >>> sums[0]
    PerReplica:{
      0: np.int64(1),
      1: np.int64(5)
    }
    """

    def __init__(self, devices: Sequence[str] | None = None) -> None:
        found = find_devices(devices) if devices else present() or find_devices("CPU:0")
        check_present(found)
        super().__init__([Replica(None, name_of(device)) for device in found], Now())
        self._shelf = Shelf(self._token)

    def _on_replicas(self, operation: str, fn: Callable[..., Any], leaves: list[Any], treespec: Any) -> list[Any]:
        return _Calls(self, fn, leaves, treespec).results()

    def _returned(self, fn: Callable[..., Any], handles: Sequence[Handle]) -> Any:
        return handles[0] if len(handles) == 1 else regroup(handles)

    def _values(self, handles: Sequence[Handle]) -> Any:
        return regroup(handles, always=True)

    def _columns(self, handles: Sequence[Handle], num_leaves: int) -> list[PerReplica]:
        return [PerReplica(column) for column in zip(*[each.leaves for each in handles], strict=True)]

    def _leaves_of(self, handle: Handle, num_leaves: int) -> list[Any]:
        return list(handle.leaves)

    def _let_go(self, ordered: Ordered) -> None:
        self._shelf.drop((ordered.number,))

    def _made_where_fed(
        self, dataset_fn: Callable[[InputContext], Any], contexts: Sequence[tuple[str | None, InputContext]]
    ) -> tuple[list[Made], Callable[[], Caller]]:
        datasets = [made(dataset_fn, context) for _, context in contexts]

        def caller() -> Caller:
            found = map(self.reader, datasets)
            # Threads, if any of them gains by those.
            return next((each for each in found if each.num_ahead), Now())

        return [Made(each.node, outlook(each)) for each in datasets], caller

    def reader(self, dataset: Dataset) -> Caller:
        return embedded(dataset.node, dataset.options().num_threads)


class _Calls:
    # One call on each replica: one after the other, or at the same time from where one waits for the others on.
    def __init__(self, strategy: MirroredStrategy, fn: Callable[..., Any], leaves: list[Any], treespec: Any) -> None:
        self._strategy = strategy
        self._fn = fn
        self._leaves = leaves
        self._treespec = treespec
        self._size = strategy.num_replicas_in_sync
        self._num_begun = 0
        self._results: list[Any] = [None] * self._size
        self._errors: dict[int, BaseException] = {}
        self._threads: dict[int, threading.Thread] = {}
        # Those of the caller on the replicas' devices, which its other threads do not have by themselves.
        self._streams: list[Stream] = []
        if self._size > 1 and are_loaded():
            self._streams = [named(each.device).current_stream() for each in strategy.replicas]
        self._over: set[int] = set()
        self._told: threading.Timer | None = None
        self._lock = threading.Lock()

    def results(self) -> list[Any]:
        for number in range(self._size):
            if number in self._threads:
                self._threads[number].join()
            else:
                self._num_begun = number + 1
                self._call(number)
                if self._errors and not self._threads:
                    break
        if self._told is not None:
            self._told.cancel()
            self._told.join()
        if self._errors:
            # What a replica raised of its own accord, rather than that others miss it.
            errors = [self._errors[number] for number in sorted(self._errors)]
            raise next((each for each in errors if not isinstance(each, CollectiveError)), errors[0])
        return self._results

    def _call(self, number: int) -> None:
        strategy = self._strategy
        device = strategy.replicas[number].device
        context = ReplicaContext(
            number, self._size, lambda: strategy, lambda: self._gang, lambda: strategy._shelf, device
        )
        own = [leaf.values[number] if isinstance(leaf, PerReplica) else leaf for leaf in self._leaves]
        error = None
        try:
            replica = strategy.replicas[number]
            with self._callers_stream(number), fed(own, self._treespec, replica, number) as (args, kwargs):
                self._results[number] = call_on_replica(self._fn, args, kwargs, replica, context)
        except BaseException as raised:
            error = self._errors[number] = raised
        with self._lock:
            self._over.add(number)
            if error is not None and self._threads and self._told is None:
                # A thread cannot be ended: the program is told of the error when all are back.
                self._told = threading.Timer(_TELL_AFTER_S, self._tell, (number, error))
                self._told.daemon = True
                self._told.start()
            gang = self.__dict__.get("_gang")
        if gang is not None:
            gang.leave(number, error)

    def _callers_stream(self, number: int) -> AbstractContextManager[None]:
        # In which arguments were made and results are used: the replica's goes on after it, and it after that.
        if number not in self._threads or not self._streams:
            return contextlib.nullcontext()
        return named(self._strategy.replicas[number].device).using(self._streams[number])

    def _tell(self, number: int, error: BaseException) -> None:
        rest = [other for other in range(self._size) if other not in self._over]
        if rest:
            who = f"replica{'s' * (len(rest) > 1)} {', '.join(map(str, rest))}"
            logger.warning("replica %d raised %s: %s; waiting for %s", number, type(error).__name__, error, who)

    @cached_property
    def _gang(self) -> Gang:
        gang = Gang(range(self._size), waits=self._begin_rest)
        for number in range(self._num_begun - 1):
            # They were called before anybody waited.
            gang.leave(number)
        return gang

    def _begin_rest(self) -> None:
        if self._num_begun == self._size:
            return
        with self._lock:
            rest, self._num_begun = range(self._num_begun, self._size), self._size
        for number in rest:
            within = contextvars.copy_context()
            name = f"daskdist replica {number}"
            thread = threading.Thread(target=within.run, args=(self._call, number), name=name, daemon=True)
            self._threads[number] = thread
            thread.start()
