"""The backend of strategies on a Dask cluster: calls are sent to workers in ordered streams, without the scheduler."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
from distributed import Client

from daskdist.config import seconds, to_send
from daskdist.core.finalizer import Finalizer
from daskdist.devices import is_on_device
from daskdist.errors import ClusterError
from daskdist.execute.caller import Handle
from daskdist.execute.callers.cluster_requests import closed_error, run_on_workers
from daskdist.execute.callers.fetch import WithRemoteResults
from daskdist.execute.callers.live_workers import LiveWorkers
from daskdist.execute.callers.submit import Submit
from daskdist.strategy.backend import RECOVERY
from daskdist.strategy.calls.call_arguments import (
    PreparedCall,
    is_plan,
    name_of_call,
    objects_of,
    place_of_argument,
    size_of_column,
)
from daskdist.strategy.calls.call_messages import EndCall, MakeCall
from daskdist.strategy.calls.call_results import CallResults, is_over
from daskdist.strategy.calls.calls import APPLY, LOOK, Call, Record
from daskdist.strategy.calls.captures import current_capture
from daskdist.strategy.calls.outcomes import Failed, StaysOnWorker
from daskdist.strategy.calls.program_end import ClusterUse, end_unused
from daskdist.strategy.calls.program_report import ProgramReport
from daskdist.strategy.calls.recovery.call_log import CallLog
from daskdist.strategy.calls.recovery.repeated_calls import RepeatedCalls
from daskdist.strategy.calls.recovery.resplit import resplit
from daskdist.strategy.calls.recovery.scheduler_recovery import SchedulerRecovery
from daskdist.strategy.calls.sent_objects import SentObject, SentObjects
from daskdist.strategy.calls.stream_set import StreamSet
from daskdist.strategy.calls.worker.on_scheduler import note_in_use
from daskdist.strategy.calls.worker.replica_call import CrossReplica
from daskdist.strategy.calls.worker.worker_streams import install
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.input.iterator import DistributedIterator
from daskdist.strategy.placement.replacements import Replacements
from daskdist.strategy.status import WorkerStatus
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.device_arrays import host_array
from daskdist.strategy.values.encoding import SteadyFunction, encoded, pickled_value
from daskdist.strategy.values.flat import pickled_structure
from daskdist.strategy.values.per_replica import PerReplica, follow_batch, values_read_later
from daskdist.strategy.values.refs import Pick, Ref, Refs, TaskResults, whole

_T = TypeVar("_T")

logger: Final = logging.getLogger("daskdist")
# The types of packed arguments that are not part of the pickle of a call.
_INPUTS: Final = frozenset({Ref, SentObject})


class ClusterBackend(CallResults):
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
    recovery: SchedulerRecovery

    def __init__(
        self,
        client: Client,
        live_workers: LiveWorkers,
        submit: Submit,
        cross_replica: CrossReplica,
        replacements: Replacements,
    ) -> None:
        self.client = client
        self.cross_replica = cross_replica
        self.futures = submit.futures
        log = CallLog()
        streams = StreamSet(client, live_workers, weakref.ref(log))
        super().__init__(streams, log, RepeatedCalls(streams, log), submit)
        self.objects = SentObjects(streams.dropped_objects)
        # Functions that do not change -> what workers have of them.
        self._sent_once: weakref.WeakKeyDictionary[Any, SentObject] = weakref.WeakKeyDictionary()
        self.recovery = SchedulerRecovery(streams, submit, self.objects, cross_replica, replacements, self.repetition)

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
        if self.repetition.failed is not None and operation != RECOVERY:
            self.repetition.raise_failure()
        function = self.objects.of_function(fn, lambda: f"{operation}: the function {getattr(fn, '__qualname__', fn)}")
        takes_batch = takes_results = is_loop = False
        sent, inputs = list(leaves), []
        # Futures that have to stay on the cluster until the call has ended, since it refers to them by key.
        kept: tuple[Any, ...] = ()
        for number, leaf in enumerate(leaves):
            if type(leaf) is PerReplica:
                is_batch = leaf.batch is not None
                takes_batch |= is_batch
                takes_results |= not is_batch
                if leaf.refs is None:
                    kept += tuple([part.futures for part in leaf.values if type(part) is WithRemoteResults])
                    is_loop |= is_plan(leaf.values[0])
                packed = leaf if is_batch else self._column(leaf, place_of_argument, operation, treespec, number)
            else:
                packed = self._packed(leaf, place_of_argument, operation, treespec, number)
                if type(packed) not in _INPUTS:
                    sent[number] = packed
                    continue
            sent[number] = None
            inputs.append((number, packed))
        prepared = PreparedCall(
            self,
            function,
            pickled_structure(treespec),
            # Values are pickled now, since they may change later.
            pickled_value(sent, lambda: f"{operation}: an argument") if len(inputs) < len(sent) else b"",
            inputs,
            to_send(),
            name_of_call(operation, getattr(fn, "__name__", type(fn).__name__), is_loop),
            kept=kept,
            is_of_replicas=True,
            is_step=operation == "run",
            is_loop=is_loop,
            takes_results=takes_results,
            undo_from=None if operation == RECOVERY else self._log.begin_call(takes_batch=takes_batch),
        )
        call = self._send(prepared, group)
        if prepared.undo_from is not None:
            self._log.add(call, prepared, begins_step=takes_batch)
        return call

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], *, worker: str | None = None, name: str
    ) -> Call:
        """Call ``function(*args)`` on a worker, or on another if that is lost."""
        return self._send(self._prepared_call(function, args, {}, worker, name), None)

    def _prepared_call(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], worker: str | None, name: str
    ) -> PreparedCall:
        structure, leaves, inputs = encoded(args, kwargs, self, name)
        sent: Any = self._sent_once.get(function) if isinstance(function, SteadyFunction) else None
        if sent is None:
            sent = pickled_value(function, lambda: f"{name.partition('-')[0]}: the function")
            if isinstance(function, SteadyFunction):
                sent = self._sent_once[function] = SentObject(sent, self.streams.dropped_objects)
        return PreparedCall(self, sent, structure, leaves, inputs, to_send(), name, worker)

    def applied(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ref:
        """Call a function of values on the worker of one of them; see `ResultSource`."""
        prepared = self._prepared_call(function, args, kwargs, None, APPLY)
        return Ref(self.attempt(lambda: self.logged(prepared)), 0)

    def send_again(self, prepared: PreparedCall, group: ReplicaGroup) -> Call:
        """Send a call again, to given replicas."""
        if prepared.is_loop:
            raise ClusterError("a loop on replicas is not made again by itself")
        if prepared.is_of_replicas:
            prepared = replace(prepared, undo_from=0)
            for _, leaf in prepared.inputs:
                if type(leaf) is PerReplica:
                    self.cut_for(leaf, group)
                elif size_of_column(leaf) not in (None, len(group.replicas)):
                    raise ClusterError(f"{prepared.name} needs the values that lost replicas had")
        return self._send(prepared, group)

    def _send(self, prepared: PreparedCall, group: ReplicaGroup | None) -> Call:
        streams, function, of_replicas = self.streams, prepared.function, prepared.is_of_replicas
        if prepared.is_step:
            streams.wait_for_room()
        # The number of each leaf, and its values; and what the calls of all replicas need for them.
        columns, sources, objects = [], list[Any](), [function] if type(function) is SentObject else []
        has_parts, sizes = False, set[int]()
        for number, leaf in prepared.inputs:
            column = self._column(leaf, _of_batch) if type(leaf) is PerReplica else leaf
            columns.append((number, column))
            kind = type(column)
            if kind is SentObject:
                objects.append(column)
            elif kind is tuple:
                has_parts = True
                sizes.add(len(column))
                refs = [part for part in column if type(part) is Ref]
                sources += [ref.source for ref in refs]
                for ref in refs:
                    if type(ref.source) is Call:
                        # Raise if it was made again without the replica.
                        ref.source.outcome(ref.place)
            else:
                source = column.source
                if kind is Refs:
                    sizes.add(len(source.workers))
                elif type(source) is Call:
                    outcomes = source.record.outcomes
                    outcome = outcomes[column.place] if column.place < len(outcomes) else source.outcome(column.place)
                    if outcome is not None and type(outcome[1]) in (StaysOnWorker, Failed):
                        self.check_there(column)
                if source not in sources:
                    sources.append(source)
        are_of_tasks = not of_replicas and {*map(type, sources)} == {TaskResults}
        with streams.lock:
            if group is None or not of_replicas:
                streams.check_open((), sources)
                workers: Sequence[str] = (self._worker_for(prepared),)
                lanes_of: Any = {workers[0]: (None,)}
            else:
                workers, lanes_of = group.worker_of, group.members_of  # type: ignore[assignment]
                streams.check_open(workers, sources)
                if group is not streams.group:
                    raise streams.changed_error()
                for size in sizes:
                    if size != len(workers):
                        raise ClusterError(
                            f"values of {size} replicas are given to {len(workers)}; make the call again"
                        )
            try:
                call = streams.new_call(
                    workers,
                    # Mostly one, which all steps of a bundle share.
                    sources[0] if len(sources) == 1 and not prepared.kept else (*sources, *prepared.kept),
                    prepared.name,
                    is_step=prepared.is_step,
                    is_of_replicas=of_replicas,
                    takes_results=prepared.takes_results,
                    again=prepared if are_of_tasks or prepared.name == APPLY else None,
                    is_of_tasks=are_of_tasks,
                    is_final=of_replicas and prepared.undo_from is None and not prepared.name.startswith(RECOVERY),
                )
                reference = ("p", function) if isinstance(function, bytes) else ("o", function.number)
                about = call.record.number, reference, prepared.structure, prepared.leaves
                settings = prepared.settings, prepared.name, prepared.undo_from
                for worker, lanes in lanes_of.items():
                    # Send the needed objects before making references: a reference may send another worker the number
                    # of this stream's next message, which has to be that of the call.
                    stream = streams.stream_with(worker, objects_of(objects, columns, lanes) if has_parts else objects)
                    inputs = _inputs_of(columns, lanes, partial(streams.result_reference, worker))
                    stream.link.append(MakeCall(*about, inputs, *settings))
                    stream.num_steps += prepared.is_step
            except BaseException:
                # Some workers may have received a part of the call.
                streams.close()
                raise
        if prepared.name != LOOK and (capture := current_capture.get()) is not None:
            capture.add(self, is_step=prepared.is_step)
        streams.flush()
        return call

    def _worker_for(self, prepared: PreparedCall) -> str:
        # If the stream breaks from here on, the call fails with it, as that takes the streams' lock.
        streams, worker = self.streams, prepared.worker
        if worker is not None and streams.is_open(worker):
            return worker
        present, leaving = self.live_workers.present, self.live_workers.leaving
        for _, leaf in prepared.inputs:
            worker = leaf.worker if type(leaf) is Ref else None
            if worker in present and worker not in leaving and streams.is_open(worker):
                return worker
        there = sorted(filter(streams.is_open, present), key=leaving.__contains__)
        if not there:
            streams.check_open(present)
        return there[0] if there else present[0]

    def usable(self, value: AsyncValue) -> Ref | None:
        """Return the reference of a value of this strategy, or of the result of a task on its cluster."""
        # Another thread may read the value meanwhile.
        ref = value.ref
        is_of_task = ref is not None and type(ref.source) is TaskResults and value.caller.client is self.client
        return ref if value.caller is self or is_of_task else None

    # --- calls that are made again ---

    def logged(self, make: Callable[[Any], Any]) -> Any:
        """Make a call on results of a step, by a function that makes it for given replicas; see `Backend`."""
        call = make(self.generations.now)
        self._log.add(call, make)
        return call

    def cut_for(self, leaf: PerReplica, group: ReplicaGroup) -> None:
        """Cut a leaf of a global batch again if there are fewer replicas than pieces."""
        batch = leaf.batch
        if len(batch) != len(group.replicas):
            resplit(batch, group, self._submit, self)
        follow_batch(leaf)

    # --- arguments ---

    def _packed(self, leaf: Any, name: Callable[..., str], *args: Any) -> Any:
        # Return an argument as it is sent. Large values and objects become handles, whose value is sent once.
        if SentObjects.goes_along(leaf):
            if isinstance(leaf, np.ndarray):
                # Replicas get the array read-only, like values that are sent once.
                leaf = leaf.view()
                leaf.flags.writeable = False
            return leaf
        if type(leaf) is AsyncValue:
            return self.usable(leaf) or self._packed(leaf.result(), name, *args)
        if is_on_device(leaf):
            # Device arrays are sent from the host; each replica copies them to its own device.
            return self._packed(host_array(leaf), name, *args)
        return self.objects.of_function(leaf, partial(name, *args))

    def _column(self, leaf: PerReplica, name: Callable[..., str], *args: Any) -> Any:
        # Return the values of replicas as they are sent: as in `PreparedCall.inputs`.
        refs = leaf.refs
        if refs is not None and (
            refs.caller is self or (type(refs.source) is TaskResults and refs.caller.client is self.client)
        ):
            return refs
        parts = [self._packed(part, name, *args) for part in values_read_later(leaf)]
        return tuple(
            [part if type(part) in _INPUTS else pickled_value(part, lambda: "run: an argument") for part in parts]
        )

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
            self.streams.announce(group)
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
        streams, capture = self.streams, current_capture.get()

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
            for ref in handles:
                self._log.remove(ref.source.record)
                if not is_over(ref) and streams.is_open(ref.worker):
                    streams.stream_with(ref.worker, ()).link.append(EndCall(ref.source.record.number, why))
        if self.streams.connection.is_lost:
            # The streams to all workers are closed soon.
            return
        streams.wait(lambda: all(map(is_over, handles)), most)
        if late := [ref.worker for ref in handles if not is_over(ref)]:
            raise ClusterError(
                f"run: {why}, but continues on {', '.join(late)} after {most:g} s, which is daskdist.timeouts.step; a "
                "function ends at its next batch, collective operation or checkpoint"
            )

    def finish(self, *, raises_all: bool = False) -> None:
        """Send the pending calls, and wait until all calls have ended; see `Backend`."""
        if self.streams.connection.is_lost:
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


def _of_batch() -> str:
    return "run: a batch"


def _inputs_of(
    columns: Sequence[tuple[int, Any]], lanes: Sequence[Any], result_reference: Callable[[Record, int], tuple[Any, ...]]
) -> list[tuple[Any, list[tuple[int, tuple[Any, ...], Pick]]]]:
    # Return the inputs of a call for a worker, as in `MakeCall`, from the number and the values of each leaf.
    inputs_of_lanes = []
    for lane in lanes:
        inputs: list[tuple[int, tuple[Any, ...], Pick]] = []
        for number, column in columns:
            kind, place, pick = type(column), lane, whole
            source = column[lane] if kind is tuple else column
            if kind is Refs:
                picks = column.picks
                source, pick = column.source, picks[lane] if type(picks) is tuple else picks
            elif type(source) is Ref:
                source, place, pick = source.source, source.place, source.pick
            reference: tuple[Any, ...]
            if type(source) is Call:
                reference = result_reference(source.record, place)
            elif type(source) is TaskResults:
                reference = ("k", source.futures[place].key)
            else:
                reference = ("o", source.number) if type(source) is SentObject else ("p", source)
            inputs.append((number, reference, pick))
        inputs_of_lanes.append((lane, inputs))
    return inputs_of_lanes
