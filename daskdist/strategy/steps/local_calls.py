"""One call on each replica of this process: in turn while that takes no time, and from then on at the same time."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from daskdist.devices import DeviceStream, are_loaded, named
from daskdist.errors import CollectiveError
from daskdist.strategy.collectives.rendezvous import Rendezvous
from daskdist.strategy.group import Replica
from daskdist.strategy.input.replica_iterator import replica_iterators
from daskdist.strategy.input.replica_plans import ReplicaPlan
from daskdist.strategy.replica.context import ReplicaContext
from daskdist.strategy.steps.remote.call_function import call_on_replica
from daskdist.strategy.values.absent import ABSENT, SKIPPED
from daskdist.strategy.values.per_replica import PerReplica

if TYPE_CHECKING:
    from daskdist.strategy.replica.contract import StrategyContract
    from daskdist.strategy.variables.store import VariableStore

logger: Final = logging.getLogger("daskdist")

# How long others have to come back too, when one has raised, before that is told.
_TELL_AFTER_S: Final = 1.0
# Calls that are seen at two looks in a row take long enough for threads to be worth their while.
_LOOK_EVERY_S: Final = 0.02
# In which another thread can take the interpreter's lock.
_INSTANT_S: Final = 1e-5
# Looks at which there was nothing to see, after which nobody looks until there is another call.
_MOST_IDLE: Final = 50


class Calls:
    """One call on each replica of a strategy of this process.

    They begin one after the other, which for short ones is quickest: a thread takes longer to start than they do. As
    soon as one waits for the others, or the call has taken two looks' time, all that are left begin at once.

    Parameters
    ----------
    strategy
        The strategy that replicas know of.
    places
        For each replica the device that it is called on.
    store
        What the replicas keep.
    fn
        The function.
    leaves, treespec
        What it is given.
    """

    def __init__(
        self,
        strategy: StrategyContract | None,
        places: Sequence[Replica],
        store: VariableStore,
        fn: Callable[..., Any],
        leaves: Sequence[Any],
        treespec: Any,
    ) -> None:
        # As a replica's context has them.
        self._strategy: Callable[[], Any] = lambda: strategy
        self._store: Callable[[], VariableStore] = lambda: store
        self._fn = fn
        self._leaves = leaves
        self._treespec = treespec
        self._places = places
        self._size = len(places)
        self.begun_at = time.monotonic()
        self.num_looks = 0
        self._results: list[Any] = [None] * self._size
        self._errors: dict[int, BaseException] = {}
        self._threads: dict[int, threading.Thread] = {}
        # Of those from here on none has begun.
        self._num_begun = 0
        self._over: set[int] = set()
        self._gang_of_all: Rendezvous | None = None
        self._told: threading.Timer | None = None
        self._lock = threading.Lock()
        # What the caller's other threads do not have by themselves: its context, and its streams on the devices.
        self._context: contextvars.Context | None = None
        self._streams: list[DeviceStream] = []
        if self._size > 1:
            self._context = contextvars.copy_context()
            if are_loaded():
                self._streams = [named(replica.device).current_stream() for replica in self._places]

    def results(self) -> list[Any]:
        """Return the results of the replicas, in order; raise the error of one that failed."""
        if self._size == 1:
            self._num_begun = 1
            self._call(0)
        else:
            _watch.add(self)
            try:
                self._call_all()
            finally:
                _watch.discard(self)
        if self._told is not None:
            self._told.cancel()
            self._told.join()
        # It knows this in turn: what was given is to go without the garbage collector.
        self._gang_of_all = None
        if self._errors:
            # What a replica raised of its own accord, rather than that others miss it.
            errors = [self._errors[number] for number in sorted(self._errors)]
            raise next((error for error in errors if not isinstance(error, CollectiveError)), errors[0])
        return self._results

    def running(self) -> list[int]:
        """Return the replicas that have begun and are not over."""
        with self._lock:
            return [number for number in range(self._num_begun) if number not in self._over]

    def _call_all(self) -> None:
        if self._streams and not all(named(place.device).is_host for place in self._places):
            # A call only queues work on a GPU: one after the other, the last GPU would idle meanwhile.
            self.begin_rest()
        for number in range(self._size):
            with self._lock:
                thread = self._threads.get(number)
                if thread is None:
                    if self._errors and not self._threads:
                        # What nobody waits for need not begin.
                        self._num_begun = self._size
                        return
                    self._num_begun = number + 1
            if thread is None:
                self._call(number)
            else:
                thread.join()

    def begin_rest(self) -> None:
        """Begin the calls on all replicas that have not begun."""
        if self._num_begun == self._size or self._context is None:
            return
        with self._lock:
            while self._num_begun < self._size:
                number = self._num_begun
                run, name = self._context.copy().run, f"daskdist replica {number}"
                thread = threading.Thread(target=run, args=(self._call, number), name=name, daemon=True)
                self._threads[number] = thread
                try:
                    thread.start()
                except RuntimeError:
                    del self._threads[number]
                    raise
                self._num_begun += 1

    def _call(self, number: int) -> None:
        replica = self._places[number]
        context = ReplicaContext(number, self._size, self._strategy, self._rendezvous, self._store, replica.device)
        replica_leaves = [leaf.values[number] if isinstance(leaf, PerReplica) else leaf for leaf in self._leaves]
        error: BaseException | str | None = None
        try:
            if any(leaf is ABSENT for leaf in replica_leaves):
                self._results[number], error = ABSENT, SKIPPED
            elif not self._streams and ReplicaPlan not in map(type, replica_leaves):
                # Neither a stream nor an iterator to open and to close.
                args, kwargs = self._treespec.unflatten(replica_leaves)
                self._results[number] = call_on_replica(self._fn, args, kwargs, replica, context)
            else:
                with (
                    self._callers_stream(number),
                    replica_iterators(replica_leaves, self._treespec, replica, number) as (args, kwargs),
                ):
                    self._results[number] = call_on_replica(self._fn, args, kwargs, replica, context)
        except BaseException as raised:
            error = self._errors[number] = raised
        with self._lock:
            self._over.add(number)
            rendezvous = self._gang_of_all
            if isinstance(error, BaseException) and self._threads and self._told is None:
                # A thread cannot be ended: the program is told of the error when all are back.
                self._told = threading.Timer(_TELL_AFTER_S, self._tell, (number, error))
                self._told.daemon = True
                self._told.start()
        if rendezvous is not None:
            rendezvous.leave(number, error)

    def _callers_stream(self, number: int) -> AbstractContextManager[None]:
        # In which arguments were made and results are used: the replica's goes on after it, and it after that.
        if number not in self._threads or not self._streams:
            return contextlib.nullcontext()
        return named(self._places[number].device).using(self._streams[number])

    def _tell(self, number: int, error: BaseException) -> None:
        rest = [other for other in range(self._size) if other not in self._over]
        if rest:
            who = f"replica{'s' * (len(rest) > 1)} {', '.join(map(str, rest))}"
            logger.warning("replica %d raised %s: %s; waiting for %s", number, type(error).__name__, error, who)

    def _rendezvous(self) -> Rendezvous:
        if self._gang_of_all is None:
            with self._lock:
                if self._gang_of_all is None:
                    rendezvous = Rendezvous(range(self._size), waits=self.begin_rest)
                    for number in self._over:
                        # They were over before anybody waited.
                        rendezvous.leave(number, self._errors.get(number))
                    self._gang_of_all = rendezvous
        return self._gang_of_all


class _Watch:
    """Has the rest of the replicas begin in calls that take long; its thread is there while there are calls."""

    def __init__(self) -> None:
        self._calls: set[Calls] = set()
        self._looks = False
        self._next_look_at = math.inf
        self._lock = threading.Lock()

    def add(self, calls: Calls) -> None:
        """Look after calls."""
        self._calls.add(calls)
        if calls.begun_at > self._next_look_at:
            # The thread waits for the interpreter's lock, which short calls may keep from it for long. Meanwhile each
            # release of the lock, by NumPy say, wakes the thread in vain, and costs more than the call.
            time.sleep(_INSTANT_S)
        if not self._looks:
            with self._lock:
                if not self._looks:
                    threading.Thread(target=self._look, name="daskdist watch", daemon=True).start()
                    self._looks = True

    def discard(self, calls: Calls) -> None:
        """Look after them no more."""
        self._calls.discard(calls)

    def _look(self) -> None:
        num_idle = 0
        while True:
            self._next_look_at = time.monotonic() + _LOOK_EVERY_S
            time.sleep(_LOOK_EVERY_S)
            num_idle = 0 if self._calls else num_idle + 1
            # At a copy, which is made in one go. Between looks nothing is held on to.
            for calls in self._calls.copy():
                calls.num_looks += 1
                if calls.num_looks > 1:
                    # Where the system has no more threads they go on in turn.
                    with contextlib.suppress(RuntimeError):
                        calls.begin_rest()
                del calls
            if num_idle >= _MOST_IDLE:
                with self._lock:
                    # First this: whoever adds one from now on has another look.
                    self._looks = False
                    if not self._calls:
                        return
                    self._looks = True


_watch: Final = _Watch()
