"""The backend of strategies on a Dask cluster: calls are sent to workers in ordered streams, without the scheduler."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, Final

import cloudpickle
import numpy as np
from distributed import Client, Future

from daskdist.config import seconds, to_send
from daskdist.core.finalizer import Finalizer
from daskdist.devices import is_on_device
from daskdist.errors import ClusterError
from daskdist.execute.caller import Handle
from daskdist.execute.callers.cluster_requests import closed_error, run_on_workers
from daskdist.execute.callers.fetch import WithRemoteResults
from daskdist.execute.callers.live_workers import LiveWorkers
from daskdist.execute.callers.submit import Picks, Submit
from daskdist.strategy.backend import RECOVERY
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.input.iterator import DistributedIterator
from daskdist.strategy.placement.replacements import Replacements
from daskdist.strategy.reduce.tree import FoldPartials
from daskdist.strategy.status import WorkerStatus
from daskdist.strategy.steps.calls import Call, Result, checked, workers_in
from daskdist.strategy.steps.captures import current_capture
from daskdist.strategy.steps.outcomes import (
    Failed,
    StaysOnWorker,
    loaded_structure,
    pickled_structure,
    received_outcome,
)
from daskdist.strategy.steps.program_end import ClusterUse, end_unused
from daskdist.strategy.steps.recovery.call_log import LOST, CallLog
from daskdist.strategy.steps.recovery.repeated_calls import RepeatedCalls
from daskdist.strategy.steps.recovery.resplit import resplit
from daskdist.strategy.steps.recovery.scheduler_connection import SchedulerConnection
from daskdist.strategy.steps.recovery.scheduler_recovery import SchedulerRecovery
from daskdist.strategy.steps.remote.on_scheduler import note_in_use
from daskdist.strategy.steps.remote.program_report import ProgramReport
from daskdist.strategy.steps.remote.replica_call import CrossReplica
from daskdist.strategy.steps.remote.worker_streams import install, result_in_memory
from daskdist.strategy.steps.sending.call_arguments import (
    COLUMNS,
    ReplicaCall,
    as_now,
    is_plan,
    name_of_call,
    needed,
    objects_in,
    pickled_value,
    place_of_argument,
    wired_arguments,
)
from daskdist.strategy.steps.sending.sent_objects import SentObject, SentObjects
from daskdist.strategy.steps.stream_set import StreamSet
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.device_arrays import host_array
from daskdist.strategy.values.extract import PerReplicaRef
from daskdist.strategy.values.per_replica import PerReplica, batch_of, follow_batch, reference_of

logger: Final = logging.getLogger("daskdist")
# The time to wait for a step's other replicas once one has failed.
_SOON_S: Final = 0.5


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
    replacements
        Finds workers that take the places of lost ones.
    """

    defers = True

    def __init__(
        self,
        client: Client,
        live_workers: LiveWorkers,
        submit: Submit,
        cross_replica: CrossReplica,
        replacements: Replacements,
    ) -> None:
        self.client = client
        self.connection = SchedulerConnection(client)
        self.cross_replica = cross_replica
        self.live_workers = live_workers
        self.futures = submit.futures
        self._log = CallLog()
        self.streams = StreamSet(client, live_workers, weakref.ref(self._log))
        self.objects = SentObjects(self.streams.dropped_objects)
        self._submit = submit
        self._prepared: weakref.WeakKeyDictionary[Any, SentObject] = weakref.WeakKeyDictionary()
        self._token = ""
        self.repetition = RepeatedCalls(self.streams, self._log, self.connection)
        self.recovery = SchedulerRecovery(
            self.streams, submit, self.objects, cross_replica, replacements, self.repetition
        )

    # --- calls ---

    def call_replicas(
        self,
        operation: str,
        fn: Callable[..., Any],
        leaves: Sequence[Any],
        treespec: Any,
        group: ReplicaGroup,
    ) -> Call:
        """Call a function on every replica; see `Backend`."""
        if operation != RECOVERY:
            self.repetition.raise_failure()
        function = self.objects(fn, lambda: f"{operation}: the function {getattr(fn, '__qualname__', fn)}")
        takes_batch = takes_results = is_loop = False
        packed: list[Any] = []
        # Futures that have to stay on the cluster until the call has ended, since it refers to them by key.
        kept: tuple[Any, ...] = ()
        for leaf in leaves:
            reference = None
            if type(leaf) is PerReplica:
                has_batch = batch_of(leaf) is not None
                takes_batch |= has_batch
                takes_results |= not has_batch
                reference = reference_of(leaf)
                if reference is None:
                    kept += tuple([part.futures for part in leaf.values if type(part) is WithRemoteResults])
                    is_loop |= is_plan(leaf.values[0])
            packed.append(reference or self.packed(leaf, partial(place_of_argument, operation, treespec, len(packed))))
        replica_call = ReplicaCall(
            self,
            function,
            packed,
            pickled_structure(treespec),
            to_send(),
            kept,
            name_of_call(operation, getattr(fn, "__name__", type(fn).__name__), is_loop),
            is_step=operation == "run",
            is_loop=is_loop,
            takes_results=takes_results,
            undo_from=None if operation == RECOVERY else self._log.begin_call(takes_batch=takes_batch),
        )
        call = self._send(replica_call, group)
        if replica_call.undo_from is not None:
            replica_call.leaves = [
                leaf if type(leaf) is PerReplica and batch_of(leaf) is not None else as_now(arg)
                for leaf, arg in zip(leaves, packed, strict=True)
            ]
            self._log.add(call, replica_call, begins_step=takes_batch)
        return call

    def send_again(self, replica_call: ReplicaCall, group: ReplicaGroup) -> Call:
        """Send a call again to given replicas."""
        name = replica_call.name
        if replica_call.is_loop:
            raise ClusterError("a loop on replicas is not made again by itself")
        leaves = [
            self.cut_for(leaf, group) if type(leaf) is PerReplica and batch_of(leaf) is not None else leaf
            for leaf in replica_call.leaves
        ]
        for leaf in leaves:
            parts = leaf.handles if type(leaf) is PerReplicaRef else leaf.values if type(leaf) is PerReplica else None
            if parts is not None and len(parts) != len(group.replicas):
                raise ClusterError(f"{name} needs the values that lost replicas had")
        return self._send(replace(replica_call, leaves=leaves, undo_from=0), group)

    def _send(self, replica_call: ReplicaCall, group: ReplicaGroup) -> Call:
        streams, function, name = self.streams, replica_call.function, replica_call.name
        workers: Any = group.worker_of
        columns, args = wired_arguments(replica_call.leaves, len(workers))
        columns = [self._own_column(column, len(workers)) for column in columns]
        has_objects = bool(objects_in(columns, range(len(workers))))
        if replica_call.is_step:
            streams.wait_for_room()
        with streams.lock:
            streams.check_open(group.workers)
            streams.check_there(columns)
            try:
                call = streams.new_call(
                    workers,
                    needed(columns, replica_call.kept),
                    name,
                    is_step=replica_call.is_step,
                    function=function.number,
                    takes_results=replica_call.takes_results,
                )
                function_fields = call.record.number, function.number, replica_call.structure
                settings = replica_call.settings, name, replica_call.undo_from
                for worker, members in group.members_of.items():
                    objects = objects_in(columns, members) if has_objects else ()
                    # Send the needed objects before making references: a reference may send another worker the number
                    # of this stream's next message, which has to be that of the call.
                    stream = streams.stream_with(worker, (function, *objects))
                    lanes = [(k, streams.references(worker, columns, k), args[k]) for k in members]
                    stream.append("run", *function_fields, lanes, *settings)
                    stream.num_steps += replica_call.is_step
            except BaseException:
                # Some workers have received a part of the call.
                streams.close()
                raise
        self._sent(is_step=replica_call.is_step)
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
        if type(handles) is not Call or handles.streams is not streams.identity:
            handles = list(map(self._own, handles))
        prepared = pickled = None
        if not args and isinstance(function, FoldPartials):
            prepared = self._prepared_object(function)
        else:
            pickled = pickled_value((function, args), lambda: f"{name}: a value")
        with streams.lock:
            streams.check_open(())
            # If the stream breaks from here on, the call fails with it, as that takes the lock.
            if worker is None or not streams.is_open(worker):
                known = (*workers_in(handles), *self.live_workers.present)
                worker = next(filter(streams.is_open, known), None)
                if worker is None:
                    worker = self.live_workers.present[0]
                    streams.check_open((worker,))
            columns = (handles,) if type(handles) is Call else handles
            streams.check_there(columns)
            try:
                call = streams.new_call((worker,), handles, name)
                objects = [handle for handle in columns if type(handle) is SentObject]
                stream = streams.stream_with(worker, objects if prepared is None else (prepared, *objects))
                reference = ("p", pickled) if prepared is None else ("o", prepared.number)
                references = streams.references(worker, columns)
                stream.append("call", call.record.number, reference, to_send(), name, *references)
                if type(handles) is list and handles and all(isinstance(handle, Future) for handle in handles):
                    # Dask recomputes lost data.
                    call.record.again = partial(self.call, function, handles, *args, name=name)
            except BaseException:
                # Another worker may have received a part of the call.
                streams.close()
                raise
        self._sent(is_step=False)
        return Result(call, 0)

    def _prepared_object(self, function: Any) -> SentObject:
        sent_object = self._prepared.get(function)
        if sent_object is None:
            sent_object = SentObject(
                pickled_value((function, ()), lambda: "reduce: the function"), self.streams.dropped_objects
            )
            self._prepared[function] = sent_object
        return sent_object

    def _own(self, handle: Handle) -> Handle:
        # Fetch a result of another strategy, as the numbers of its calls mean other calls here.
        if type(handle) is not Result:
            return handle
        if handle.call.streams is self.streams.identity:
            return checked(handle)
        streams = handle.call.streams()
        if streams is None:
            raise ClusterError("a value is of a strategy that is no longer referenced, and was freed with it")
        return SentObject(cloudpickle.dumps(streams.values([handle])[0]), self.streams.dropped_objects)

    def _own_column(self, column: Any, size: int) -> Any:
        kind = type(column)
        if kind not in COLUMNS:
            return self._own(column)
        if len(column.record.workers if kind is Call else column) != size:
            raise ClusterError(f"values of {len(column)} replicas are given to {size}; make the call again")
        if column.streams is self.streams.identity if kind is Call else Result not in map(type, column):
            return column
        return tuple(map(self._own, column))

    def _sent(self, *, is_step: bool) -> None:
        if (capture := current_capture()) is not None:
            capture.add(self, is_step=is_step)
        self.streams.flush()

    # --- calls that are made again ---

    @property
    def num_made_again(self) -> int:
        """The number of times that calls were made again because workers were lost."""
        return self.repetition.num_made_again

    def made_again_since(self, number: int) -> bool:
        """Continue with the remaining replicas if some are lost; return whether `num_made_again` has changed."""
        return self.repetition.made_again_since(number)

    def logged(self, make: Callable[[Any], Any], group: ReplicaGroup | None = None) -> Any:
        """Make a call on results of a step, by a function that makes it for given replicas; see `ResultSource`."""
        result = make(group)
        self._log.add(result.call, make)
        return result

    def cut_for(self, leaf: PerReplica, group: ReplicaGroup) -> Any:
        """Return the pieces of a leaf of a global batch, cut again if there are fewer replicas than pieces."""
        batch = batch_of(leaf)
        if len(batch) != len(group.replicas):
            resplit(batch, group, self._submit, self)
        follow_batch(leaf)
        return reference_of(leaf) or PerReplica([self.packed(part, lambda: "run: a batch") for part in leaf.values])

    # --- arguments ---

    def packed(self, leaf: Any, name: Callable[[], str]) -> Any:
        """Return an argument as it is sent: large values and objects become handles, whose value is sent once."""
        if type(leaf) is PerReplica:
            return reference_of(leaf) or PerReplica([self.packed(part, name) for part in leaf.values])
        if SentObjects.goes_along(leaf):
            if isinstance(leaf, np.ndarray):
                # Replicas get the array read-only, like values that are sent once.
                leaf = leaf.view()
                leaf.flags.writeable = False
            return leaf
        if type(leaf) is AsyncValue:
            return leaf
        if is_on_device(leaf):
            # Device arrays are sent from the host; each replica copies them to its own device.
            return self.packed(host_array(leaf), name)
        return self.objects(leaf, name)

    # --- results ---

    def results(self, handles: Sequence[Handle]) -> list[Any]:
        """Wait for several results, fetch and return them; raise the error of a failed call."""
        handles = list(map(self._as_result, handles))
        outcomes = self._outcomes(handles, "a result was looked at")
        while again := self._to_call_again(handles, outcomes):
            handles = [again[index]() if index in again else handle for index, handle in enumerate(handles)]
            outcomes = self._outcomes(handles, "a result was looked at")
        return self.streams.values(handles)

    def _to_call_again(self, handles: Sequence[Handle], outcomes: Sequence[Any]) -> dict[int, Callable[[], Result]]:
        # Calls that only use data are repeated on another worker if theirs is lost.
        callable_again = {}
        for index, (handle, (_, payload)) in enumerate(zip(handles, outcomes, strict=True)):
            if (
                type(payload) in (Failed, StaysOnWorker)
                and type(handle) is Result
                and not self.streams.is_there(handle.worker, handle.call.record.number)
            ):
                again = handle.call.record.again
                if again is not None and self.streams.lost() != list(self.live_workers.present):
                    callable_again[index] = again
        return callable_again

    def result(self, handle: Handle) -> Any:
        """Wait for a result, fetch and return it."""
        return self.results([handle])[0]

    def wait(self, handles: Sequence[Handle]) -> None:
        """Wait until calls have ended, successfully or not."""
        self._outcomes(handles, "a result was waited for")

    def wait_for_step(self, step: Sequence[Handle], reason: str = "a result was looked at") -> None:
        """Wait for the calls of one step; raise the error of one of them as soon as it is known."""
        step = list(step)

        def failed() -> list[Failed]:
            outcomes = [result.call.record.outcomes[result.place] for result in step]
            return [outcome[1] for outcome in outcomes if outcome is not None and type(outcome[1]) is Failed]

        self._note_wait(step, reason)
        # The step may be of another strategy.
        streams = step[0].call.streams() or self.streams
        streams.wait(lambda: bool(failed()) or all(result.is_over for result in step))
        if failed():
            # Other failures follow soon, if at all. Raise the first in order, but prefer a replica's own error to one
            # about a missing replica.
            streams.wait(lambda: all(result.is_over for result in step), _SOON_S)
        with streams.lock:
            failures = sorted(failed(), key=lambda failure: failure.is_of_others)
            for result in step if failures else ():
                # Later errors of the step are not raised separately.
                result.call.record.reported_with = failures[0].origin
        streams.raise_first(failures)

    def is_done(self, handle: Handle) -> bool:
        """Return whether a result is known."""
        self.streams.flush()
        return bool(handle.is_over if type(handle) is Result else handle.done())

    def peek(self, handle: Handle) -> tuple[Any] | None:
        """Return a small result in a tuple, if it came with the message that its call has ended; None otherwise."""
        outcome = handle.call.record.outcomes[handle.place] if type(handle) is Result else None
        if outcome is None or type(outcome[1]) in (StaysOnWorker, Failed):
            return None
        return (received_outcome(*outcome),)

    def structures(self, handles: Sequence[Handle]) -> list[tuple[Any, tuple[bool, ...]]]:
        """Wait for a call on replicas and return the structure of each result; raise the error of one that failed."""
        while True:
            number = self.num_made_again
            try:
                self.wait_for_step(handles, "what a function returns had to be learned from its first call")
                return [loaded_structure(structure) for structure, _ in self._outcomes(handles, "")]
            except LOST:
                if not self.made_again_since(number):
                    raise

    def _outcomes(self, handles: Sequence[Handle], reason: str) -> list[tuple[Any, Any]]:
        results = list(map(self._as_result, handles))
        self._note_wait(results, reason)
        self.streams.wait(lambda: all(result.is_over for result in results))
        self.streams.raise_unobserved()
        return [outcome for result in results if (outcome := result.call.record.outcomes[result.place]) is not None]

    def _as_result(self, handle: Handle) -> Result:
        if type(handle) is Result and handle.call.streams is self.streams.identity:
            return checked(handle)
        return self.call(itemgetter(0), [handle], name="look")

    def _note_wait(self, handles: Sequence[Result], reason: str) -> None:
        capture = current_capture()
        if capture is not None and not all(handle.is_over for handle in handles):
            capture.note_wait(reason)

    def as_futures(self, handles: Sequence[Handle], picks: Picks) -> tuple[Sequence[Future], Picks]:
        """Return results as Dask futures: each is put into its worker's memory as the result of a task."""
        futures = []
        for handle in map(self._own, handles):
            if type(handle) is Result:
                # Wait here: otherwise the task would block a thread of the worker.
                self.results([self.call(len, [handle], worker=handle.worker, name="check")])
                handle = self._submit.call(
                    result_in_memory,
                    [],
                    self._token,
                    handle.call.record.number,
                    handle.place,
                    worker=handle.worker,
                    is_pinned=True,
                    again=lambda: None,
                    name="value",
                )
                self._submit.wait([handle])
            elif type(handle) is SentObject:
                value = cloudpickle.loads(handle.value) if type(handle.value) is bytes else handle.value
                handle = self._submit.place(value, self.live_workers.present[0])
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
            run_on_workers(self.client, install, self.cross_replica, workers=group.workers)
            is_noted = note_in_use(self.client, group.token, group.workers)
            self.streams.open(group, group.workers)
            self._report = self.recovery.report = ProgramReport(self.streams, group.token)
            if is_noted:
                self._report.start()
        except BaseException:
            self.close()
            raise

    def note_iterator(self, iterator: DistributedIterator) -> None:
        """Include an iterator over a distributed dataset in what the program reports to the dashboard."""
        self._report.add(iterator)

    def forget(self, variable: int) -> None:
        """Drop a variable on its replicas once earlier calls have ended; sent with other messages."""
        self.streams.dropped_variables.append(variable)

    def status(self, group: ReplicaGroup, *, asks: bool = True) -> tuple[WorkerStatus, ...]:
        """Return the status of each worker, lost ones included; if not ``asks``, as far as the program knows it."""
        return self.streams.status(group, asks=asks)

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """Wait while a condition holds and calls are under way; the end of a call may change the condition."""
        streams, capture = self.streams, current_capture()

        def must_wait() -> bool:
            # The log keeps the batches of complete steps, too, until they are removed.
            self._log.rest()
            return streams.is_busy and condition()

        if must_wait():
            if capture is not None:
                capture.note_wait("steps under way had to end, whose batches fill their part of the workers' memory")
            streams.wait(lambda: not must_wait())

    def end_call(self, handles: Sequence[Handle], why: str) -> None:
        """End the functions of a call at their next batch, collective operation or checkpoint, and wait for that."""
        streams, most = self.streams, seconds("timeouts.step")
        with streams.lock:
            for result in handles:
                self._log.remove(result.call.record)
                if not result.is_over and streams.is_open(result.worker):
                    streams.stream_with(result.worker, ()).append("end", result.call.record.number, why)
        if self.connection.is_lost:
            # The streams to all workers are closed soon.
            return
        streams.wait(lambda: all(result.is_over for result in handles), most)
        if late := [result.worker for result in handles if not result.is_over]:
            raise ClusterError(
                f"run: {why}, but continues on {', '.join(late)} after {most:g} s, which is daskdist.timeouts.step; a "
                "function ends at its next batch, collective operation or checkpoint"
            )

    def finish(self, *, raises_all: bool = False) -> None:
        """Send the pending calls, and wait until all calls have ended; see `Backend`."""
        if self.connection.is_lost:
            raise closed_error(self.client)
        self.streams.finish()
        self.raise_unobserved()
        if raises_all:
            self.streams.raise_first(self.streams.failures.visible())

    def raise_unobserved(self) -> None:
        """Raise the error of a call whose results were not read and no longer can be."""
        self.repetition.raise_failure()
        self.streams.raise_unobserved()
        self._log.rest()

    def check_open(self, operation: str) -> None:
        """Raise an error if the strategy or its client is closed."""
        self.streams.check_open(())

    def close(self) -> None:
        """Close the streams and the strategy's own resources; workers free everything of the strategy."""
        self.objects.clear()
        self._log.clear()
        self.streams.close()
        self._end()
