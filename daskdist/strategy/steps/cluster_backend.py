"""The backend of strategies on a Dask cluster: calls go to workers by ordered streams, past the scheduler."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, repeat, zip_longest
from typing import Any, Final

import cloudpickle
import numpy as np
from distributed import Client, Future

from daskdist.config import to_send
from daskdist.core.finalizer import Finalizer
from daskdist.devices import is_on_device
from daskdist.errors import ArgumentError, ClusterError
from daskdist.execute.caller import Handle
from daskdist.execute.callers.cluster_requests import run_on_workers
from daskdist.execute.callers.fetch import WithRemoteResults
from daskdist.execute.callers.live_workers import LiveWorkers
from daskdist.execute.callers.submit import Picks, Submit
from daskdist.execute.messages.pickling import describe_unpicklable, dumps_on_host, type_name
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.input.iterator import DistributedIterator
from daskdist.strategy.input.replica_plans import ReplicaPlan
from daskdist.strategy.reduce.tree import Prepared
from daskdist.strategy.status import WorkerStatus
from daskdist.strategy.steps.calls import Call, Result
from daskdist.strategy.steps.captures import current_capture
from daskdist.strategy.steps.outcomes import Failed, Held, loaded_structure, pickled_structure, received
from daskdist.strategy.steps.program_end import ClusterUse, end_unused
from daskdist.strategy.steps.remote.on_scheduler import note_in_use
from daskdist.strategy.steps.remote.program_report import ProgramReport
from daskdist.strategy.steps.remote.replica_call import LOOP, CrossReplica
from daskdist.strategy.steps.remote.worker_streams import install, result_in_memory
from daskdist.strategy.steps.replicated_kinds import reachable
from daskdist.strategy.steps.sent_objects import SentObject, SentObjects
from daskdist.strategy.steps.stream_set import StreamSet
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.device_arrays import host_array
from daskdist.strategy.values.extract import ExtractAll, ExtractFromRows, PerReplicaRef
from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.values.wiring import Slot, Wiring

# How long other replicas of a step are waited for, once one has failed.
_SOON_S: Final = 0.5
# Calls of a function that wait before they are sent though it goes on.
_MOST_UNSENT: Final = 64


class ClusterBackend:
    """Calls on the replicas and workers of a cluster.

    Parameters
    ----------
    client
        The connection to the cluster.
    live_workers
        The workers that take part.
    submit
        Makes tasks of Dask's own.
    cross_replica
        Makes the strategy for functions between replicas, on a worker.
    """

    defers = True

    def __init__(self, client: Client, live_workers: LiveWorkers, submit: Submit, cross_replica: CrossReplica) -> None:
        self.client = client
        self._cross_replica = cross_replica
        self.live_workers = live_workers
        self.futures = submit.futures
        self.streams = StreamSet(client, live_workers)
        self.objects = SentObjects(self.streams.dropped_objects)
        self._submit = submit
        self._prepared: weakref.WeakKeyDictionary[Any, SentObject] = weakref.WeakKeyDictionary()
        self._num_unsent = 0
        self._token = ""

    # --- calls ---

    def call_replicas(
        self,
        operation: str,
        fn: Callable[..., Any],
        leaves: Sequence[Any],
        treespec: Any,
        group: ReplicaGroup,
    ) -> Call:
        """Call a function on every replica.

        Parameters
        ----------
        operation
            The name of the call in messages.
        fn
            The function.
        leaves, treespec
            Those of its positional and keyword arguments; each `PerReplica` stands for the replica's own value.
        group
            The replicas.

        Returns
        -------
        Call
            With a result for each replica.

        Raises
        ------
        ArgumentError
            The function or an argument does not pickle.
        ClusterError
            A worker is lost.
        """
        is_step = operation == "run"
        streams = self.streams
        # None of them is None on a cluster.
        workers: Any = group.worker_of
        function = self.objects(fn, lambda: f"{operation}: the function {getattr(fn, '__qualname__', fn)}")
        packed = [
            (type(leaf) is PerReplica and leaf.reference)
            or self.packed(leaf, partial(_place_of, operation, treespec, number))
            for number, leaf in enumerate(leaves)
        ]
        columns, args = _wired(packed, len(group.replicas))
        columns = list(map(self._own_column, columns))
        needs = [column if type(column) in _COLUMNS else repeat(column, len(workers)) for column in columns]
        lanes = list(zip(*needs, strict=True)) or [()] * len(workers)
        structure, settings = pickled_structure(treespec), to_send()
        here = [leaf.values for leaf in leaves if type(leaf) is PerReplica and not leaf.reference]
        # What has to stay on the cluster until the call is over, which is told of it by key.
        kept = [part.futures for values in here for part in values if type(part) is WithRemoteResults]
        is_loop = any(_is_plan(values[0]) for values in here)
        name = _name_of(operation, getattr(fn, "__name__", type(fn).__name__), is_loop)
        # In a function, before its first step: it may be called as often as a step.
        if is_step and ((capture := current_capture()) is None or not capture.num_steps):
            streams.wait_for_room()
        with streams.lock:
            streams.check_open(group.workers)
            streams.check_there(columns)
            try:
                call = streams.new_call(workers, (*columns, *kept), name, is_step=is_step)
                number = call.record.number
                for worker in group.workers:
                    members = group.members(worker)
                    # Before a message to another worker that tells the place of the one that needs them.
                    streams.send_objects(worker, function, *chain.from_iterable([lanes[number] for number in members]))
                    worker_lanes = [
                        (
                            number,
                            [streams.reference(worker, need) for need in lanes[number] if need is not None],
                            args[number],
                        )
                        for number in members
                    ]
                    streams.append(worker, "run", number, function.number, structure, worker_lanes, settings, name)
            except BaseException:
                # Some workers have a part of the call.
                streams.close()
                raise
        self._sent(is_step=is_step)
        return call

    def call(
        self,
        function: Callable[..., Any],
        handles: Sequence[Handle],
        *args: Any,
        worker: str | None = None,
        name: str,
    ) -> Result:
        """Call ``function(results of the handles, *args)`` on a worker, or on another if that is lost."""
        streams = self.streams
        handles = list(map(self._own, handles))
        if worker is None or not streams.is_open(worker):
            worker = self._worker_of(handles)
        prepared = pickled = kind = None
        if not args and isinstance(function, Prepared):
            prepared = self._prepared_object(function)
            kind = function if function.is_same_everywhere else None
        else:
            pickled = _pickled((function, args), lambda: f"{name}: a value")
        workers = self._workers_of(kind, worker, handles)
        with streams.lock:
            streams.check_open((worker,))
            streams.check_there(handles)
            try:
                call = streams.new_call(workers, handles, name, kind=kind)
                for place, worker in enumerate(workers):
                    streams.send_objects(worker, prepared, *handles)
                    reference = ("p", pickled) if prepared is None else streams.reference(worker, prepared)
                    what = reference, [streams.reference(worker, handle) for handle in handles], to_send(), name
                    streams.append(worker, "call", call.record.number, place, len(workers) > 1, *what)
                if handles and all(isinstance(handle, Future) for handle in handles):
                    # Dask computes what was lost again.
                    call.record.again = partial(self.call, function, handles, *args, name=name)
            except BaseException:
                # Another worker may have a part of the call.
                streams.close()
                raise
        self._sent(is_step=False)
        return Result(call, 0)

    def _workers_of(self, kind: Any, worker: str, handles: Sequence[Handle]) -> tuple[str, ...]:
        # Those that make a call: one, or all where each has a part of what it needs.
        workers = tuple({worker: None} | dict.fromkeys([handle.worker for handle in handles if type(handle) is Result]))
        num_workers = len(self.live_workers.present)
        if self.streams.replicated.has(kind, num_workers) and len(workers) == num_workers:
            return workers if all(map(self.streams.is_open, workers)) else (worker,)
        return (worker,)

    def _prepared_object(self, function: Any) -> SentObject:
        sent_object = self._prepared.get(function)
        if sent_object is None:
            sent_object = SentObject(
                _pickled((function, ()), lambda: "reduce: the function"), self.streams.dropped_objects
            )
            self._prepared[function] = sent_object
        return sent_object

    def _own(self, handle: Handle) -> Handle:
        # A result of another strategy is brought here: its streams have calls of the same numbers.
        if type(handle) is not Result or handle.call.streams is self.streams.identity:
            return handle
        streams = handle.call.streams()
        if streams is None:
            raise ClusterError("a value is of a strategy that nobody has any more, and is gone with it")
        return SentObject(cloudpickle.dumps(streams.values([handle])[0]), self.streams.dropped_objects)

    def _own_column(self, column: Any) -> Any:
        if type(column) is Call and column.streams is self.streams.identity:
            return column
        return tuple(map(self._own, column)) if type(column) in _COLUMNS else self._own(column)

    def _worker_of(self, handles: Sequence[Handle]) -> str:
        workers = [handle.worker for handle in handles if type(handle) is Result]
        return next(filter(self.streams.is_open, (*workers, *self.live_workers.present)), self.live_workers.present[0])

    def _sent(self, *, is_step: bool) -> None:
        capture = current_capture()
        if capture is None:
            self.streams.kick()
            return
        capture.add(self, is_step=is_step)
        self._num_unsent += 1
        if self._num_unsent >= _MOST_UNSENT:
            self.flush()
            self.streams.wait_for_room()

    def flush(self) -> None:
        """Send what waits."""
        self._num_unsent = 0
        self.streams.kick()

    # --- arguments ---

    def packed(self, leaf: Any, name: Callable[[], str]) -> Any:
        """Return an argument as it is wired: large ones and objects as what is sent once."""
        if type(leaf) is PerReplica:
            return leaf.reference or PerReplica([self.packed(part, name) for part in leaf.values])
        if SentObjects.goes_along(leaf):
            if isinstance(leaf, np.ndarray):
                # There too, as what is sent once.
                leaf = leaf.view()
                leaf.flags.writeable = False
            return leaf
        if type(leaf) is AsyncValue:
            return leaf
        if is_on_device(leaf):
            # What leaves the process leaves the device: each replica puts it on its own.
            return self.packed(host_array(leaf), name)
        return self.objects(leaf, name)

    def known_function(self, fn: Callable[..., Any]) -> SentObject | None:
        """Return what stands for a function as it was when it was sent last; None where that is not known."""
        return self.objects.last_of(fn)

    # --- results ---

    def results(self, handles: Sequence[Handle]) -> list[Any]:
        """Return several results, waited for and brought here; raise what a call raised."""
        handles = list(map(self._as_result, handles))
        outcomes = self._outcomes(handles, "a result was looked at")
        while again := self._to_call_again(handles, outcomes):
            handles = [again[index]() if index in again else handle for index, handle in enumerate(handles)]
            outcomes = self._outcomes(handles, "a result was looked at")
        return self.streams.values(handles)

    def _to_call_again(self, handles: Sequence[Handle], outcomes: Sequence[Any]) -> dict[int, Callable[[], Result]]:
        # Calls on data alone whose worker is lost; while there are others.
        callable_again = {}
        for index, (handle, (_, payload)) in enumerate(zip(handles, outcomes, strict=True)):
            if type(payload) in (Failed, Held) and type(handle) is Result and not self.streams.is_open(handle.worker):
                again = handle.call.record.again
                if again is not None and self.streams.lost() != list(self.live_workers.present):
                    callable_again[index] = again
        return callable_again

    def result(self, handle: Handle) -> Any:
        """Return a result, waited for and brought here."""
        return self.results([handle])[0]

    def wait(self, handles: Sequence[Handle]) -> None:
        """Wait until calls are over, however they end."""
        self._outcomes(handles, "a result was waited for")

    def see(self, step: Sequence[Handle], reason: str = "a result was looked at") -> None:
        """Wait for the calls of one step; raise what one of them raised as soon as it did."""

        def failed() -> list[Failed]:
            outcomes = [result.call.record.outcomes[result.place] for result in step]
            return [outcome[1] for outcome in outcomes if outcome is not None and type(outcome[1]) is Failed]

        def are_over() -> bool:
            return all(result.is_over for result in step)

        self._note_wait(step, reason)
        # Of another strategy, it may be.
        streams = step[0].call.streams() or self.streams
        streams.wait(lambda: are_over() or bool(failed()))
        if failed():
            # The others come soon, if at all: the first in order is raised, but what one raised of its own accord
            # rather than that another is missed.
            streams.wait(are_over, _SOON_S)
        streams.raise_first(sorted(failed(), key=lambda failure: failure.is_of_others))

    def is_done(self, handle: Handle) -> bool:
        """Return whether a result is there."""
        self.flush()
        return bool(handle.is_over if type(handle) is Result else handle.done())

    def at_hand(self, handle: Handle) -> tuple[Any] | None:
        """Return a small result in a tuple, if it came along with the news that its call is over; None otherwise."""
        outcome = handle.call.record.outcomes[handle.place] if type(handle) is Result else None
        if outcome is None or type(outcome[1]) in (Held, Failed):
            return None
        return (received(*outcome),)

    def structures(self, handles: Sequence[Handle]) -> list[tuple[Any, tuple[bool, ...]]]:
        """Return the structure of each result of a call on replicas, waited for; raise what one raised."""
        results = list(handles)
        self.see(results, "what a function returns had to be learned from its first call")
        return [loaded_structure(structure) for structure, _ in self._outcomes(results, "")]

    def _outcomes(self, handles: Sequence[Handle], reason: str) -> list[tuple[Any, Any]]:
        results = list(map(self._as_result, handles))
        self._note_wait(results, reason)
        self.streams.wait(lambda: all(result.is_over for result in results))
        self.streams.raise_unseen()
        return [outcome for result in results if (outcome := result.call.record.outcomes[result.place]) is not None]

    def _as_result(self, handle: Handle) -> Result:
        if type(handle) is Result and handle.call.streams is self.streams.identity:
            return reachable(handle, self.streams.is_open)
        return self.call(_whole, [handle], name="look")

    def _note_wait(self, handles: Sequence[Result], reason: str) -> None:
        self._num_unsent = 0
        capture = current_capture()
        if capture is not None and not all(handle.is_over for handle in handles):
            capture.note_wait(reason)

    def as_futures(self, handles: Sequence[Handle], picks: Picks) -> tuple[Sequence[Future], Picks]:
        """Return results as what Dask knows: each is put into its worker's memory as the result of a task."""
        futures = []
        for handle in map(self._own, handles):
            if type(handle) is Result:
                # Waited for: the task would hold up a thread of the worker.
                self.results([self.call(_nothing, [handle], worker=handle.worker, name="see")])
                handle = self._submit.call(
                    result_in_memory,
                    [],
                    self._token,
                    handle.call.record.number,
                    handle.place,
                    worker=handle.worker,
                    is_pinned=True,
                    name="value",
                )
                self._submit.wait([handle])
            elif type(handle) is SentObject:
                handle = self._submit.place(_loaded(handle.value), self.live_workers.present[0])
            futures.append(handle)
        return self._submit.as_futures(futures, picks)

    # --- life ---

    def open(self, group: ReplicaGroup, opened: contextlib.ExitStack) -> None:
        """Open the streams to the workers of a group.

        Parameters
        ----------
        group
            The replicas.
        opened
            Closes what belongs to the strategy: the connection and the cluster, if it made those.
        """
        self._token = group.token
        self._end = Finalizer(self, end_unused, ClusterUse(self.streams, self._submit, group.token, opened))
        try:
            run_on_workers(self.client, install, self._cross_replica, workers=group.workers)
            is_told = note_in_use(self.client, group.token, group.workers)
            self.streams.open(group)
            self._report = ProgramReport(self.streams, group.token)
            if is_told:
                self._report.start()
        except BaseException:
            self.close()
            raise

    @property
    def in_doubt(self) -> bool:
        """Return whether something failed since it was last seen which workers are there."""
        return self.live_workers.in_doubt and self.client.status == "running"

    def recover(self, group: ReplicaGroup) -> ReplicaGroup:
        """Go on with the workers that are left, once what was sent before is over; return the replicas there."""
        live_workers = self.live_workers
        while len(lost := self._missing()) < len(live_workers.present):
            live_workers.drop(lost)
            left = replace(
                group, replicas=tuple([replica for replica in group.replicas if replica.worker in live_workers.present])
            )
            if left == group:
                break
            try:
                self.streams.end_waiting_for(live_workers.lost)
                # What is under way changes variables.
                self.streams.become(left)
                self.objects.clear()
                note_in_use(self.client, group.token, left.workers)
                return left
            except (ClusterError, OSError):
                if not self._missing():
                    raise
                # Another one is lost meanwhile.
        # All are there; or nobody is left, and calls say so.
        live_workers.in_doubt = False
        return group

    def _missing(self) -> list[str]:
        # Those that take part, and are not there or were started anew.
        return list(dict.fromkeys((*self.streams.lost(), *self._submit.missing())))

    def note_iterator(self, iterator: DistributedIterator) -> None:
        """Include an iterator over a distributed dataset in what the program reports to the dashboard."""
        self._report.add(iterator)

    def forget(self, variable: int) -> None:
        """Drop a variable on its replicas once the calls before are over; sent along with other messages."""
        self.streams.dropped_variables.append(variable)

    def status(self, group: ReplicaGroup, *, asks: bool = True) -> tuple[WorkerStatus, ...]:
        """Return the status of each worker, lost ones included; if not ``asks``, as far as the program knows it."""
        return self.streams.status(group, asks=asks)

    def finish(self) -> None:
        """Send what waits, and wait until all is over."""
        self.streams.finish()
        self.streams.raise_unseen()

    def raise_unseen(self) -> None:
        """Raise an error that is known by now and that nobody has looked at, nor can."""
        self.streams.raise_unseen()

    def close(self) -> None:
        """Close the streams, and what belongs to the strategy; workers free everything of it."""
        self.objects.clear()
        self.streams.close()
        self._end()


def _whole(results: Sequence[Any]) -> Any:
    (result,) = results
    return result


def _nothing(results: Sequence[Any]) -> None:
    """Give nothing: that it is over tells that there is a result."""


def _loaded(value: Any) -> Any:
    return cloudpickle.loads(value) if type(value) is bytes else value


def _wired(packed: Sequence[Any], num_replicas: int) -> tuple[list[Any], list[Any]]:
    # What calls need, a column of handles each; and the arguments of each replica, one object where they are the same.
    if any(type(leaf) is PerReplica for leaf in packed):
        wirings = [Wiring() for _ in range(num_replicas)]
        args = [
            _sendable(wiring.picks, [_wire_part(wiring, leaf, lane) for leaf in packed])
            for lane, wiring in enumerate(wirings)
        ]
        columns = zip_longest(*[wiring.handles for wiring in wirings])
        return list(columns), args
    wiring = Wiring()
    leaves = [
        wiring.slot(leaf.handles, leaf.picks) if type(leaf) is PerReplicaRef else _wire(wiring, leaf) for leaf in packed
    ]
    picks: list[tuple[int, Any]] = wiring.picks
    if not any(type(pick) is tuple for _, pick in picks):
        return wiring.handles, [_sendable(picks, leaves)] * num_replicas
    return wiring.handles, [
        _sendable([(number, pick[lane] if type(pick) is tuple else pick) for number, pick in picks], leaves)
        for lane in range(num_replicas)
    ]


def _sendable(picks: list[tuple[int, Any]], leaves: list[Any]) -> Any:
    # References go along as they are; anything else is pickled now, as it is now.
    if set(map(type, leaves)) == _SLOTS:
        if _SIMPLE.issuperset([type(pick) for _, pick in picks]):
            return picks, leaves
        return _pickled_references(tuple(picks), tuple(leaves))
    return _pickled((picks, leaves), lambda: "run: an argument")


@lru_cache(maxsize=1024)
def _pickled_references(picks: tuple[tuple[int, Any], ...], leaves: tuple[Any, ...]) -> bytes:
    return _pickled((picks, list(leaves)), lambda: "run: an argument")


_SLOTS: Final = frozenset({Slot})
# What takes parts out of results and pickles for certain.
_SIMPLE: Final = frozenset({ExtractFromRows, ExtractAll})


def _wire(wiring: Wiring, leaf: Any) -> Any:
    return wiring.slot(leaf, ExtractAll()) if type(leaf) is SentObject else wiring.wire_leaf(leaf)


def _wire_part(wiring: Wiring, leaf: Any, lane: int) -> Any:
    if type(leaf) is PerReplica:
        return _wire(wiring, leaf.values[lane])
    if type(leaf) is PerReplicaRef:
        return wiring.slot(leaf.handles[lane], leaf.pick(lane))
    return _wire(wiring, leaf)


_COLUMNS: Final = frozenset({tuple, Call})


def _pickled(value: Any, name: Callable[[], str]) -> bytes:
    try:
        pickled = dumps_on_host(value)
        if b"__main__" not in pickled:
            return pickled
    except Exception:
        # Another way may do.
        pass
    try:
        return dumps_on_host(value, by_value=True)
    except Exception as error:
        raise ArgumentError(
            f"{name()} ({type_name(value)}) does not pickle, and so cannot be sent to a worker"
            f"{describe_unpicklable(value)}: {error}"
        ) from error


@lru_cache(maxsize=256)
def _name_of(operation: str, function: str, is_loop: bool) -> str:
    # One object for all calls of a function: among messages that are sent together it is there once.
    return f"{LOOP if is_loop else ''}{operation}-{function}"


def _is_plan(value: Any) -> bool:
    return type(value.value if type(value) is WithRemoteResults else value) is ReplicaPlan


def _place_of(operation: str, treespec: Any, number: int) -> str:
    # Where among its arguments a leaf of a call is.
    (which, *path) = treespec.paths()[number]
    return f"{operation}: " + ("args" if which == 0 else "kwargs") + "".join(f"[{key!r}]" for key in path)
