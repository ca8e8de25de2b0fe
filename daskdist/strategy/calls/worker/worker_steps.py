"""One worker's end of a stream of steps: makes the calls that the program sends, in order, and sends the outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from distributed import Worker
from distributed.comm import Comm
from distributed.worker import _worker_cvar

from daskdist.config import sent
from daskdist.core.block import Batches
from daskdist.errors import ClusterError, CollectiveError
from daskdist.execute.messages.failure import Failure, release_frames
from daskdist.execute.messages.link import Link
from daskdist.strategy.calls.call_messages import (
    AskRunning,
    AskValues,
    CallOver,
    ChangeGroup,
    DropResults,
    EndCall,
    FailData,
    FailResult,
    KeepObject,
    Leaving,
    LoseWorkers,
    MakeCall,
    NeedsData,
    NotPassedOn,
    PassOn,
    Running,
)
from daskdist.strategy.calls.calls import LOOK, RunningOnReplica
from daskdist.strategy.calls.outcomes import (
    SMALL_AWAITED_BYTES,
    SMALL_BYTES,
    Failed,
    outcome_to_send,
    received_outcome,
)
from daskdist.strategy.calls.worker.call_inputs import TaskData, is_quick
from daskdist.strategy.calls.worker.data_keys import DataKeys
from daskdist.strategy.calls.worker.executor import Executor, run_ready
from daskdist.strategy.calls.worker.promises import Promise, SentValue
from daskdist.strategy.calls.worker.replica_call import STEP, CrossReplica, ReplicaSlot, call_once, call_replica
from daskdist.strategy.calls.worker.waiting_call import WaitingCall
from daskdist.strategy.collectives.mailbox import Mailbox
from daskdist.strategy.collectives.messages import SentResult
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.replica.call_end import CallEnd
from daskdist.strategy.values.device_arrays import host_array
from daskdist.strategy.values.encoding import Encoded
from daskdist.strategy.variables.store import VariableStore

# An input of a call of one of these types holds the value; an input of another type is the value.
_INPUTS: Final = frozenset({Promise, SentValue, TaskData})


class StepsOnWorker:
    """One strategy's steps on one worker, for as long as its stream is open.

    Messages are handled in the event loop, in the order of the program. The inputs of a call are looked up then, so
    that a later message may drop them. Each replica has a thread that makes its calls. The attributes belong to the
    event loop, but for those that say something else.

    Parameters
    ----------
    mailbox
        The worker's state of collectives.
    group
        The replicas of the strategy.
    comm, is_relayed
        The connection, and whether the scheduler relays it.
    keys
        The table of data.
    cross_replica
        Makes the strategy for functions between replicas.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        group: ReplicaGroup,
        comm: Comm,
        is_relayed: bool,
        keys: DataKeys,
        cross_replica: CrossReplica,
    ) -> None:
        self.worker: Worker = mailbox.worker
        self._mailbox = mailbox
        self._token = group.token
        self._comm = comm
        self._keys = keys
        self._cross_replica = cross_replica
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._is_relayed = is_relayed
        self._link = Link(self._handle)
        self._is_closed = False
        # The states that were handed over last.
        self._handed_over: dict[int, dict[int, Any]] = {}
        # Call number -> replica, or 0 for a call of one worker -> promise. Other threads only look a call up.
        self._promises: dict[int, dict[int, Promise]] = {}
        self._objects: dict[int, SentValue] = {}
        # Key -> promise of the data of a task; in any thread, under the lock.
        self._awaited: dict[Any, Promise] = {}
        # Key -> batches in the worker's memory, since many steps use the same ones and looking them up takes long.
        self.batches: WeakValueDictionary[Any, Batches] = WeakValueDictionary()
        # Held while the promises of task data are looked up.
        self._lock = threading.Lock()
        # The executors in the order of this worker's replicas, which does not change when others are lost.
        self._executors: list[Executor] = []
        self._slots: dict[int, tuple[ReplicaSlot, Executor]] = {}
        # (call, replica) -> the name of the running call, its start and its end; set by the thread that makes it.
        self._running: dict[tuple[int, int], tuple[str, float, CallEnd]] = {}
        self._combiner = Executor("daskdist combine", self._enter)
        self._handlers: dict[type, Callable[[Any], Any]] = {
            MakeCall: self._call,
            KeepObject: self._keep,
            PassOn: self._pass_on,
            DropResults: self._drop,
            LoseWorkers: self._lose,
            ChangeGroup: lambda message: self._set_team(message.group),
            FailData: self._fail_data,
            FailResult: self._fail,
            EndCall: self._end,
            AskRunning: lambda message: self._send(Running(message.asked_at, self.running())),
            AskValues: lambda message: self.hand_over(),
        }
        self._set_team(group)

    async def serve(self) -> None:
        """Handle messages until the stream is closed."""
        try:
            await self._link.run(self._comm, is_direct=not self._is_relayed)
        except OSError:
            pass
        finally:
            self._comm.abort()
            self._link.close()

    def _handle(self, messages: Sequence[Any]) -> None:
        for message in messages:
            self._handlers[type(message)](message)

    def _enter(self) -> None:
        # Let `distributed.get_worker` and `get_client` find the worker, as in a task.
        _worker_cvar.set(self.worker)

    def close(self) -> None:
        """End the calls, and free everything of the strategy."""
        # Other workers learn of the end from the program, and not from this worker.
        self._is_closed = True
        why = f"{self.worker.address}: the program that made this call is gone, or has closed the strategy"
        unfinished = [promise for promises in self._promises.values() for promise in promises.values()]
        self._promises.clear()
        with self._lock:
            awaited = list(self._awaited.values())
        for end in [*(end for _, _, end in list(self._running.values())), *(promise.end for promise in unfinished)]:
            if end is not None:
                end.end(why, refuses_saves=True)
        self._mailbox.forget(self._token)
        closed = Failed(Failure.of(ClusterError("the strategy is closed")), None)
        for promise in (*unfinished, *awaited):
            promise.set(closed)
        for executor in (*self._executors, self._combiner):
            executor.close()
        self._objects.clear()

    # --- messages of the program ---

    def _set_team(self, group: ReplicaGroup) -> None:
        members = group.members(self.worker.address)
        while len(self._executors) < len(members):
            executor = Executor(f"daskdist replica {members[len(self._executors)]}", self._enter)
            self._executors.append(executor)
        self._mailbox.register(group, lambda token: VariableStore(token, group.lost_with))
        self._slots = {
            number: (
                ReplicaSlot(group.token, group.replicas[number], number, len(group.replicas), self._cross_replica),
                executor,
            )
            for number, executor in zip(members, self._executors, strict=True)
        }

    def _call(self, message: MakeCall) -> None:
        number, function, structure, leaves, inputs_of, settings, name, undo_from = message
        end = CallEnd()
        for replica, inputs in inputs_of:
            arguments = Encoded(structure, leaves, [(leaf, pick) for leaf, _, pick in inputs])
            if replica is None:
                promise = self._new_promise(number, 0)
                inputs_there = [self._input(function), *[self._input(reference) for _, reference, _ in inputs]]
                WaitingCall(self, number, promise, inputs_there, arguments, settings, name).begin()
                continue
            promise = self._new_promise(number, replica, end=end)
            if replica not in self._slots:
                # A thread of the program made the call for the replicas before some were lost.
                error = CollectiveError(
                    f"run: a call for replica {replica}, of which there are fewer now; make it again"
                )
                promise.set(Failed(Failure.of(error), None))
                self._send_outcome(number, replica, promise.get(), SMALL_BYTES)
                continue
            slot, executor = self._slots[replica]
            loaded = self._objects[function[1]].made
            values = [self._input(function) if loaded is None else loaded[0]]
            values += [self._run_input(reference) for _, reference, _ in inputs]
            # Bound methods would be further objects of each step under way.
            about = undo_from, settings, name, end
            executor.put(partial(StepsOnWorker._make_run, self, slot, number, promise, values, arguments, *about))

    def make_soon(self, call: WaitingCall) -> None:
        """Make a call whose inputs have arrived."""
        # The event loop must not be busy for long, as it receives the results of other calls, too.
        make = partial(self._make_call, call)
        if threading.get_ident() != self._loop_thread or is_quick(call.inputs, call.arguments):
            run_ready(make)
        else:
            self._combiner.put(make)

    def _keep(self, message: KeepObject) -> None:
        self._objects[message.number] = SentValue(message.value)

    def _pass_on(self, message: PassOn) -> None:
        promise = self._promises[message.number][message.replica]
        promise.when_set(partial(StepsOnWorker._pass_on_now, self, promise, message))

    def _pass_on_now(self, promise: Promise, message: PassOn) -> None:
        if self._is_closed:
            return
        number, replica, target, seq = message
        result = SentResult(self._token, number, replica, seq, *outcome_to_send(promise.value, math.inf))
        self._mailbox.links.send(target, result, partial(StepsOnWorker._report_unsent, self, message))

    def _report_unsent(self, message: PassOn, why: str | None) -> None:
        if why is not None:
            self._send(NotPassedOn(message.number, message.replica, message.target, why))

    def value(self, number: int, replica: int) -> Any:
        """Return a result; raise what its call raised."""
        value = self._promises[number][replica].get()
        if type(value) is Failed:
            raise value.failure.error()
        return value

    def _drop(self, message: DropResults) -> None:
        for number in message.results:
            self._promises.pop(number, None)
        for number in message.objects:
            self._objects.pop(number, None)
        store = self._mailbox.store(self._token)
        for replica, (_, executor) in self._slots.items():
            if store is not None and message.variables:
                # An earlier call may need them.
                executor.put(partial(store.drop_of, replica, message.variables))

    def _lose(self, message: LoseWorkers) -> None:
        self._mailbox.end_waiting_for(self._token, message.addresses, message.reason)
        for promises in list(self._promises.values()):
            for promise in promises.values():
                if promise.origin in message.addresses:
                    promise.set(message.why)

    def _fail_data(self, message: FailData) -> None:
        # A call that is made again waits for data that was submitted again.
        with self._lock:
            promise = self._awaited.pop(message.key, None)
        if promise is not None:
            promise.set(message.why)

    def _fail(self, message: FailResult) -> None:
        promise = self._promises.get(message.number, {}).get(message.replica)
        if promise is not None:
            promise.set(message.why)

    def _end(self, message: EndCall) -> None:
        for promise in self._promises.get(message.number, {}).values():
            if promise.end is not None:
                promise.end.end(message.why)

    @property
    def slots(self) -> list[ReplicaSlot]:
        """The replicas on this worker."""
        return [slot for slot, _ in self._slots.values()]

    def announce_leaving(self) -> None:
        """Notify the program that this worker is going to end, so that it sends no more calls."""
        self._send(Leaving())

    def end_stream(self) -> None:
        """Take no further calls, and let the program know at once."""
        self._is_closed = True
        self._comm.abort()

    def hand_over(self, *, only_new: bool = False) -> bool:
        """Send the program the values that only replicas of this worker have; return whether they were new."""
        store = self._mailbox.store(self._token)
        states = {} if store is None else store.own_states()
        is_new = _identities(states) != _identities(self._handed_over)
        if is_new or not only_new:
            self._handed_over = states
            on_host = {
                number: {k: [*map(host_array, state)] for k, state in of_number.items()}
                for number, of_number in states.items()
            }
            self._send(Leaving(on_host))
        return is_new

    @property
    def is_at_rest(self) -> bool:
        """Return whether no call is being made or waits, and the program knows the results of all."""
        return not self._running and self._link.is_written and not any(lane.has_more for lane in self._executors)

    def running(self) -> list[RunningOnReplica]:
        """Return the calls that replicas are making."""
        now = time.monotonic()
        return [(number, name, now - at, end.last(number)) for (_, number), (name, at, end) in [*self._running.items()]]

    def validate(self) -> None:
        """Check what holds between the attributes; called in the event loop."""
        self._link.validate()
        group = self._mailbox.groups.get(self._token)
        if group is None or self._is_closed:
            return
        unknown = [replica for _, replica in list(self._running) if replica not in self._slots]
        if unknown or self._slots.keys() != set(group.members(self.worker.address)):
            raise AssertionError(f"calls run on replicas {unknown}, and {[*self._slots]} are here, of {group}")
        if any(slot.num_replicas != len(group.replicas) for slot in self.slots):
            raise AssertionError(f"{self.slots} are replicas of another group than {group}")

    # --- results ---

    def arrive(self, result: SentResult) -> None:
        """Take a result of another worker."""
        _, number, replica, seq, structure, payload = result
        promise: Promise | None = self._promises.get(number, {}).get(replica)
        if promise is None:
            if seq <= self._link.state.num_arrived:
                # The result was dropped meanwhile.
                return
            promise = self._new_promise(number, replica)
        try:
            value = payload if type(payload) is Failed else received_outcome(structure, payload)
        except BaseException as error:
            value = Failed(Failure.of(error), None)
        promise.set(value)

    def awaited(self, key: Any) -> Promise:
        """Return the promise of the data of a Dask task."""
        with self._lock:
            promise = self._awaited.get(key)
            if promise is None:
                promise = self._awaited[key] = Promise()
                # The worker may be closing.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._bring(key, promise)))
            return promise

    async def _bring(self, key: Any, promise: Promise) -> None:
        def is_wanted() -> bool:
            # The program knows whether the task has failed, or is gone.
            self._send(NeedsData(key))
            return not promise.is_set

        value: Any
        try:
            value = await self._keys.bring(key, is_wanted)
        except Exception as error:
            value = Failed(Failure.of(error), None)
        with self._lock:
            if self._awaited.get(key) is promise:
                del self._awaited[key]
        promise.set(value)

    def _input(self, reference: Any) -> Any:
        kind = reference[0]
        if kind == "k":
            return TaskData(reference[1], self.worker, self.batches, self.awaited)
        if kind == "o":
            return self._objects[reference[1]]
        if kind == "p":
            return SentValue(reference[1])
        if kind == "f":
            promise = Promise()
            promise.set(reference[1])
            return promise
        _, number, replica, origin = reference
        known = self._promises.get(number, {}).get(replica)
        return self._new_promise(number, replica, origin) if known is None else known

    def _run_input(self, reference: Any) -> Any:
        # Return the promise of the input, or the input itself if it is a batch that is here.
        batches = self.batches.get(reference[1]) if reference[0] == "k" else None
        return self._input(reference) if batches is None else batches

    def _new_promise(self, number: int, replica: int, origin: str | None = None, end: CallEnd | None = None) -> Promise:
        promise = Promise(origin, end)
        promises = self._promises.get(number)
        if promises is None:
            self._promises[number] = {replica: promise}
        else:
            promises[replica] = promise
        return promise

    def _make_run(
        self,
        slot: ReplicaSlot,
        number: int,
        promise: Promise,
        inputs: Sequence[Any],
        arguments: Encoded,
        undo_from: int | None,
        settings: Any,
        name: str,
        end: CallEnd,
    ) -> None:
        outcome: Any
        values = inputs
        if not _INPUTS.isdisjoint(map(type, inputs)):
            slot.times.wait()
            values = [call_input.get() if type(call_input) in _INPUTS else call_input for call_input in inputs]
        if Failed in map(type, values):
            outcome = next(value for value in values if type(value) is Failed)
            slot.leave(self._mailbox, number, outcome.failure.error())
        else:
            call = (number, slot.number)
            self._running[call] = name, time.monotonic(), end
            store = self._mailbox.store(self._token)
            undo_log = None if undo_from is None or store is None else store.undo_log(slot.number)
            try:
                if self._is_closed:
                    # The call began after running calls were asked to end.
                    raise ClusterError("the strategy is closed")
                if undo_log is not None and undo_from is not None:
                    undo_log.begin(number, undo_from)
                is_step = name.startswith(STEP)
                # Entering a context that changes nothing takes a while, too.
                if settings is None:
                    outcome = call_replica(self._mailbox, slot, number, values, arguments, end, is_step=is_step)
                else:
                    with sent(settings):
                        outcome = call_replica(self._mailbox, slot, number, values, arguments, end, is_step=is_step)
            except BaseException as error:
                outcome = Failed(Failure.of(error), number)
                release_frames(error)
            finally:
                del self._running[call]
                if undo_log is not None:
                    undo_log.end()
        is_awaited = promise.is_awaited
        promise.set(outcome)
        self._send_outcome(number, slot.number, outcome, SMALL_AWAITED_BYTES if is_awaited else SMALL_BYTES)

    def _make_call(self, call: WaitingCall) -> None:
        outcome: Any = None
        values = [
            call_input.value if type(call_input) is Promise and call_input.is_set else call_input.get()
            for call_input in call.inputs
        ]
        if Failed in map(type, values):
            outcome = next(value for value in values if type(value) is Failed)
        else:
            # The call counts as one of the worker's first replica.
            running = call.number, next(iter(self._slots))
            self._running[running] = call.name, time.monotonic(), CallEnd()
            try:
                with contextlib.nullcontext() if call.settings is None else sent(call.settings):
                    outcome = call_once(call.arguments, *values)
            except BaseException as error:
                outcome = Failed(Failure.of(error), call.number)
            finally:
                del self._running[running]
        self.finish(call, outcome)

    def finish(self, call: WaitingCall, outcome: Any) -> None:
        """Set the result of a call, and send it to the program."""
        call.promise.set(outcome)
        self._send_outcome(call.number, 0, outcome, math.inf if call.name == LOOK else SMALL_BYTES)

    def _send_outcome(self, number: int, replica: int, outcome: Any, most_bytes: float) -> None:
        is_wanted = number in self._promises or type(outcome) is Failed
        content = outcome_to_send(outcome, most_bytes) if is_wanted else (None, None)
        self._send(CallOver(number, replica, *content))

    def _send(self, message: Any) -> None:
        self._link.append(message)
        self._link.flush()


def _identities(states: dict[int, dict[int, Any]]) -> set[tuple[int, int, int]]:
    # A state is replaced as a whole if it changes.
    return {
        (number, replica, id(state)) for number, of_number in states.items() for replica, state in of_number.items()
    }
