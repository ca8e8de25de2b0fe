"""Calls on all replicas of this process: short ones one after the other, longer ones in threads."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from daskdist.call_threads import CALL_THREADS, CallInThread
from daskdist.config import seconds
from daskdist.core.functions.kept_values import is_unshared, keep_as_they_are
from daskdist.devices import DeviceStream, are_loaded, named
from daskdist.errors import ClusterError, CollectiveError
from daskdist.strategy.calls.call_on_replica import call_on_replica
from daskdist.strategy.collectives.rendezvous import Rendezvous
from daskdist.strategy.group import Replica, named_replicas
from daskdist.strategy.input.replica_iterator import replica_iterators
from daskdist.strategy.input.replica_plans import ReplicaPlan
from daskdist.strategy.replica.call_end import NEVER, CallEnd
from daskdist.strategy.replica.context import ReplicaContext
from daskdist.strategy.replica.loop_progress import LoopProgress
from daskdist.strategy.values.absent import ABSENT, SKIPPED
from daskdist.strategy.values.flat import LEAVES
from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.values.refs import FlatResult
from daskdist.waiting import wait_intervals

if TYPE_CHECKING:
    from daskdist.strategy.replica.contract import StrategyContract
    from daskdist.strategy.variables.store import VariableStore

logger: Final = logging.getLogger("daskdist")

# Seconds after an error on one replica until a warning that others are still running.
_WARN_AFTER_S: Final = 1.0
# Calls that run at two checks in a row are long enough to use threads.
_LOOK_EVERY_S: Final = 0.02
# Seconds in which another thread can take the interpreter's lock.
_INSTANT_S: Final = 1e-5
# The number of checks without calls after which the watching thread ends.
_MOST_IDLE: Final = 50
# The types of results of which nothing is copied.
_UNCHANGEABLE: Final = (LEAVES - {np.ndarray}) | {FlatResult}


class Calls:
    """A call of one function on every replica of this process.

    Loops over datasets begin on all replicas at once. In other calls the replicas begin one after the other, which is
    fastest for short calls: starting a thread takes longer. As soon as a replica waits for the others, or the call runs
    at two checks in a row, all remaining replicas begin at once.

    Parameters
    ----------
    strategy
        The strategy, for the replicas' contexts.
    places
        The worker and device of each replica.
    store
        The variables of the replicas.
    fn
        The function.
    leaves, treespec
        Its arguments.
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
        # Functions, as replicas' contexts expect.
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
        # The id of an array that replicas returned and something else refers to -> the array, and its copy.
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._errors: dict[int, BaseException] = {}
        self._threads: dict[int, CallInThread] = {}
        # Replicas from this number on have not begun.
        self._num_begun = 0
        # The progress of loops over distributed datasets; None if the function gets none.
        is_loop = any(type(leaf) is PerReplica and type(leaf.values[0]) is ReplicaPlan for leaf in leaves)
        self._loops = _Loops(fn) if is_loop else None
        self._over: set[int] = set()
        self._rendezvous_of_all: Rendezvous | None = None
        self._warning_timer: threading.Timer | None = None
        self._lock = threading.Lock()
        # The caller's context variables and device streams, which other threads do not inherit.
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
            try:
                self._call_all()
            except BaseException:
                with self._lock:
                    # The watcher, which may be looking at this call, must begin no other replica.
                    self._num_begun = self._size
                if self._loops is not None:
                    self._loops.end.end("the call was interrupted")
                raise
            finally:
                _watch.discard(self)
        if self._warning_timer is not None:
            self._warning_timer.cancel()
            self._warning_timer.join()
        # Break the reference cycle, so that arguments are freed without the garbage collector.
        self._rendezvous_of_all = None
        self._copies = {}
        if self._errors:
            # Prefer a replica's own error to errors of others that waited for it, or whose loops it ended.
            errors = [self._errors[number] for number in sorted(self._errors)]
            raise min(errors, key=lambda error: (isinstance(error, Exception), isinstance(error, CollectiveError)))
        if self._loops is not None:
            self._loops.end.check()
        return self._results

    def running(self) -> list[int]:
        """Return the replicas that have begun and not ended."""
        with self._lock:
            return [number for number in range(self._num_begun) if number not in self._over]

    def _call_all(self) -> None:
        is_on_devices = self._streams and not all(named(place.device).is_host for place in self._places)
        if self._loops is not None and not is_on_devices:
            # The first loop is made in this thread. From the next line on, the watcher may begin those that are left.
            self._num_begun = 1
        _watch.add(self)
        if is_on_devices:
            # Calls only queue work on GPUs. If replicas began one after the other, the last GPU would be idle
            # meanwhile.
            self.begin_rest()
        elif self._loops is not None:
            # Loops are long, and a limit holds for those in threads.
            with contextlib.suppress(RuntimeError):
                self.begin_rest()
        for number in range(self._size):
            with self._lock:
                thread = self._threads.get(number)
                if thread is None:
                    if self._errors and not self._threads:
                        # The other replicas need not begin.
                        self._num_begun = self._size
                        return
                    self._num_begun = max(self._num_begun, number + 1)
            if thread is None:
                self._call(number)
            else:
                self._join(thread, number)

    def _join(self, thread: CallInThread, number: int) -> None:
        if self._loops is not None:
            # Loops may take any time, for as long as they make progress.
            while thread.is_alive() and not self._loops.end.is_over:
                thread.join(_LOOK_EVERY_S)
            return
        name = f"replica {number} in {getattr(self._fn, '__qualname__', self._fn)}"
        for within_s in wait_intervals(name, "timeouts.step"):
            thread.join(within_s)
            if not thread.is_alive():
                return

    def check_progress(self) -> None:
        """End loops of which one makes no progress for longer than ``daskdist.timeouts.loop``."""
        if self._loops is not None:
            self._loops.check(self.running())

    def begin_rest(self) -> None:
        """Begin the calls on all replicas that have not begun."""
        if self._num_begun == self._size or self._context is None:
            return
        with self._lock:
            while self._num_begun < self._size:
                number = self._num_begun
                call = CallInThread(functools.partial(self._context.copy().run, self._call, number))
                self._threads[number] = call
                try:
                    CALL_THREADS.start(call)
                except RuntimeError:
                    del self._threads[number]
                    raise
                self._num_begun += 1

    def _call(self, number: int) -> None:
        replica = self._places[number]
        end = NEVER if self._loops is None else self._loops.begin(number)
        context = ReplicaContext(number, self._size, self._strategy, self._rendezvous, self._store, replica.device, end)
        replica_leaves = [leaf.values[number] if type(leaf) is PerReplica else leaf for leaf in self._leaves]
        error: BaseException | str | None = None
        try:
            if True in [leaf is ABSENT for leaf in replica_leaves]:
                self._results[number], error = ABSENT, SKIPPED
            elif not self._streams and self._loops is None:
                # Without device streams and iterators, there is nothing to close.
                args, kwargs = self._treespec.unflatten(replica_leaves)
                self._results[number] = self._result(args, kwargs, replica, context)
            else:
                iterators = replica_iterators(replica_leaves, self._treespec, replica, number, end)
                with self._callers_stream(number), iterators as (args, kwargs):
                    self._results[number] = self._result(args, kwargs, replica, context)
        except BaseException as raised:
            error = self._errors[number] = raised
            if self._loops is not None and not isinstance(raised, Exception):
                end.end("the call was interrupted")
        with self._lock:
            self._over.add(number)
            rendezvous = self._rendezvous_of_all
            if isinstance(error, BaseException) and self._threads and self._warning_timer is None:
                # Threads cannot be ended: the error is raised when all replicas have returned.
                self._warning_timer = threading.Timer(_WARN_AFTER_S, self._warn, (number, error))
                self._warning_timer.daemon = True
                self._warning_timer.start()
        if rendezvous is not None:
            rendezvous.leave(number, error)

    def _result(self, *call: Any) -> Any:
        # Return the result of the function, with arrays that no later call can change.
        results = [call_on_replica(self._fn, *call)]
        if type(results[0]) in _UNCHANGEABLE or is_unshared(results):
            return results[0]
        flat = FlatResult.of(results.pop())
        leaves = flat.leaves
        if self._size == 1:
            keep_as_they_are(leaves)
            return leaves[0] if len(leaves) == 1 and flat.treespec.is_leaf() else flat.treespec.unflatten(leaves)
        originals = list(leaves)
        keep_as_they_are(leaves, num_others=1)
        for place, (original, leaf) in enumerate(zip(originals, leaves, strict=True)):
            if leaf is not original and type(leaf) is np.ndarray:
                # One array that all replicas return unchanged stays one.
                known = self._copies.setdefault(id(original), (original, leaf))[1]
                leaves[place] = known if known.tobytes() == leaf.tobytes() else leaf
        return leaves[0] if len(leaves) == 1 and flat.treespec.is_leaf() else flat

    def _callers_stream(self, number: int) -> AbstractContextManager[None]:
        # The caller's stream, in which arguments were computed and results will be used: the replica's stream waits for
        # it at the beginning, and it waits for the replica's at the end.
        if number not in self._threads or not self._streams:
            return contextlib.nullcontext()
        return named(self._places[number].device).using(self._streams[number])

    def _warn(self, number: int, error: BaseException) -> None:
        rest = [other for other in range(self._size) if other not in self._over]
        if rest:
            logger.warning(
                "replica %d raised %s: %s; waiting for %s", number, type(error).__name__, error, named_replicas(rest)
            )

    def _rendezvous(self) -> Rendezvous:
        if self._rendezvous_of_all is None:
            with self._lock:
                if self._rendezvous_of_all is None:
                    rendezvous = Rendezvous(range(self._size), waits=self.begin_rest)
                    for number in self._over:
                        # These replicas had ended before any replica waited.
                        rendezvous.leave(number, self._errors.get(number))
                    self._rendezvous_of_all = rendezvous
        return self._rendezvous_of_all


class _Loops:
    # The loops over distributed datasets of one call, which end if one of them makes no progress.
    def __init__(self, fn: Callable[..., Any]) -> None:
        self.end = CallEnd()
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._begun_at: dict[int, float] = {}
        self._progress = LoopProgress("it continues in its thread")
        self._most_s = seconds("timeouts.loop")

    def begin(self, number: int) -> CallEnd:
        self._begun_at[number] = time.monotonic()
        return self.end

    def check(self, running: Sequence[int]) -> None:
        idle = ("", 0.0, 0)
        for number in running:
            begun_at = self._begun_at.get(number, math.inf)
            last_action, idle_s = self.end.last(number) or ("", time.monotonic() - begun_at)
            if idle_s > idle[1]:
                idle = last_action, idle_s, number
        last_action, idle_s, number = idle
        try:
            self._progress.check(f"{self._name} of replica {number}", last_action, idle_s, self._most_s)
        except ClusterError as error:
            self.end.end(str(error))


class _Watch:
    """A watcher of long calls, which begins their remaining replicas; its thread runs while there are calls."""

    def __init__(self) -> None:
        self._calls: set[Calls] = set()
        self._looks = False
        self._next_look_at = math.inf
        self._lock = threading.Lock()

    def add(self, calls: Calls) -> None:
        """Watch a call."""
        self._calls.add(calls)
        if calls.begun_at > self._next_look_at:
            # Let the new thread take the interpreter's lock now. Otherwise each time that a short call releases the
            # lock, as NumPy does, the thread would wake for nothing, which costs more than the call.
            time.sleep(_INSTANT_S)
        if not self._looks:
            with self._lock:
                if not self._looks:
                    threading.Thread(target=self._look, name="daskdist watch", daemon=True).start()
                    self._looks = True

    def discard(self, calls: Calls) -> None:
        """Stop watching a call."""
        self._calls.discard(calls)

    def _look(self) -> None:
        num_idle = 0
        while True:
            self._next_look_at = time.monotonic() + _LOOK_EVERY_S
            time.sleep(_LOOK_EVERY_S)
            num_idle = 0 if self._calls else num_idle + 1
            # Iterate over a copy, which is taken atomically. Keep no references between checks.
            for calls in self._calls.copy():
                calls.num_looks += 1
                if calls.num_looks > 1:
                    # If the system has no more threads, the replicas continue one after the other.
                    with contextlib.suppress(RuntimeError):
                        calls.begin_rest()
                    calls.check_progress()
                del calls
            if num_idle >= _MOST_IDLE:
                with self._lock:
                    # Set this before the last check: a call that is added later starts another thread.
                    self._looks = False
                    if not self._calls:
                        return
                    self._looks = True


_watch: Final = _Watch()
