"""The results of calls on a cluster: waiting for them, and looking at them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from daskdist.errors import NotMadeAgainError
from daskdist.execute.caller import Handle
from daskdist.execute.callers.live_workers import LiveWorkers
from daskdist.execute.callers.submit import Submit
from daskdist.strategy.backend import RECOVERY, Backend
from daskdist.strategy.calls.calls import LOOK, LOST, Call, lost_calls
from daskdist.strategy.calls.captures import current_capture
from daskdist.strategy.calls.outcomes import Failed, StaysOnWorker, received_outcome
from daskdist.strategy.calls.recovery.call_log import CallLog
from daskdist.strategy.calls.recovery.repeated_calls import RepeatedCalls
from daskdist.strategy.calls.stream_set import StreamSet
from daskdist.strategy.calls.worker.worker_streams import result_in_memory
from daskdist.strategy.values.encoding import look
from daskdist.strategy.values.flat import loaded_structure
from daskdist.strategy.values.refs import Ref, TaskResults

_T = TypeVar("_T")
# The time to wait for a step's other replicas once one has failed.
_SOON_S: Final = 0.5


class CallResults(Backend):
    """The part of a backend on a cluster that waits for results, and returns them to the program.

    Parameters
    ----------
    streams
        The streams to the workers.
    log
        The calls that may have to be made again.
    repetition
        Makes them again after a loss.
    submit
        Makes tasks of Dask's own.
    """

    repetition: RepeatedCalls
    live_workers: LiveWorkers

    def __init__(self, streams: StreamSet, log: CallLog, repetition: RepeatedCalls, submit: Submit) -> None:
        self.streams = streams
        self._log = log
        self.repetition = repetition
        self.live_workers = streams.live_workers
        self._submit = submit
        # That of the strategy, once it is open.
        self._token = ""

    def results(self, refs: Sequence[Ref]) -> list[Any]:
        """Wait for several values and return them; see `ResultSource`."""
        looks = list[Call]()
        return self.attempt(partial(self._results, refs, looks), refs, looks)

    def _results(self, refs: Sequence[Ref], looks: list[Call]) -> list[Any]:
        # ``looks`` gets the calls of this attempt that look at results on workers.
        looks.clear()
        calls = list[Call]()
        for ref in refs:
            if type(ref.source) is Call:
                calls.append(ref.source)
        self._wait_for(calls)
        # What stays on a worker is looked at by one call there.
        there: dict[str | None, list[int]] = {}
        results: list[Any] = [None] * len(refs)
        # (call, place) -> the result, as several references may be to parts of it.
        received: dict[Any, Any] = {}
        for index, ref in enumerate(refs):
            if type(ref.source) is Call:
                outcome = ref.source.outcome(ref.place)
                if outcome is None or type(outcome[1]) is Failed:
                    # Another thread has made the call again meanwhile.
                    return self._results(refs, looks)
                if type(outcome[1]) is not StaysOnWorker:
                    place = ref.source, ref.place
                    if place not in received:
                        received[place] = received_outcome(*outcome)
                    results[index] = ref.pick(received[place])
                    continue
                if not self.streams.is_there(ref.source.workers[ref.place], ref.source.record.number):
                    self.streams.check_open(())
                    raise self.streams.lost_with(ref.source.workers[ref.place])
            there.setdefault(ref.worker, []).append(index)
        for worker, indices in there.items():
            arguments = tuple([refs[index] for index in indices])
            looks.append(self.call(look, arguments, worker=worker, name=LOOK))  # type: ignore[arg-type]
        if looks:
            self._wait_for(looks, None)
            for call, indices in zip(looks, there.values(), strict=True):
                for index, value in zip(indices, received_outcome(*call.outcome(0)), strict=True):
                    results[index] = value
        return results

    def _made_on_another(self, refs: Sequence[Ref], looks: Sequence[Call] = ()) -> bool:
        # Make calls again that were made once, on lost workers, with those that they need. Return whether there are
        # any, also among the looks.
        is_there = self.streams.is_there
        if self.streams.lost() == list(self.live_workers.present):
            return False
        lost = lost_calls([ref.source for ref in refs], is_there)
        for call in lost:
            # Another thread may do the same.
            if (again := call.record.again) is not None:
                before, new = call.record, again(None)
                call.become(new)
                self._log.replace(before, call.record)
        is_again = bool(lost) or not all(is_there(look.record.workers[0], look.record.number) for look in looks)
        if is_again:
            self.repetition.note_made_again()
        return is_again

    def check_there(self, ref: Ref) -> None:
        """Raise an error if a result is lost with its worker, and its call cannot be made again on another.

        Otherwise calls with it would fail, and stay in the log as ones that need a lost worker.

        Raises
        ------
        ClusterError
            It is lost.
        """

        def is_gone() -> bool:
            record = ref.source.record
            _, payload = record.outcomes[ref.place] or (None, None)
            is_lost = record.has_failed or type(payload) is StaysOnWorker
            return is_lost and not self.streams.is_there(record.workers[ref.place], record.number)

        if is_gone() and not self._made_on_another([ref]) and not ref.source.record.has_failed and is_gone():
            self.streams.check_open(())
            raise self.streams.lost_with(ref.source.workers[ref.place])

    def attempt(self, read: Callable[[], _T], refs: Sequence[Ref] = (), looks: Sequence[Call] = ()) -> _T:
        """Call a function that waits for results; call it again if calls are made again; see `ResultSource`.

        These are also the calls of some references, if they were made once on lost workers, and calls that look at
        results on lost workers.
        """

        def recover() -> None:
            if not self._made_on_another(refs, looks):
                self.generations.recover_steps()

        try:
            return self.generations.call(read, recover)  # type: ignore[no-any-return]
        except NotMadeAgainError:
            raise
        except LOST as error:
            # The recovery may have given up what was read, and says why.
            self.repetition.raise_failure()
            self.streams.note_final(error)
            raise

    def wait_for_step(self, handles: Sequence[Handle], reason: str = "a result was looked at") -> None:
        """Wait for the calls of one step; raise the error of one of them as soon as it is known."""
        self._wait_for(list(dict.fromkeys(ref.source for ref in handles)), reason)

    def _wait_for(self, calls: Sequence[Call], reason: str | None = "a result was looked at") -> None:
        # Wait for calls, on all replicas; raise the error of one of them as soon as it is known.
        def are_over() -> bool:
            for call in calls:
                record = call.record
                if record.num_left and not record.has_failed:
                    return False
            return True

        streams = self.streams
        if not are_over():
            if reason is not None and (capture := current_capture.get()) is not None:
                capture.note_wait(reason)
            streams.wait(are_over)
        has_failed = False
        for call in calls:
            has_failed |= call.record.has_failed
        if has_failed:
            # Other failures follow soon, if at all. Raise the first in order, but prefer a replica's own error to one
            # about a missing replica.
            streams.wait(lambda: not any(call.record.num_left for call in calls), _SOON_S)
            with streams.lock:
                outcomes = [outcome for call in calls for outcome in call.record.outcomes if outcome is not None]
                failures = [failed for _, failed in outcomes if type(failed) is Failed]
                failures.sort(key=lambda failure: failure.is_of_others)
                for call in calls if failures else ():
                    # Later errors of the step are not raised separately.
                    call.record.reported_with = failures[0].origin
            streams.raise_first(failures)
            # Another thread has made them again meanwhile.
            self._wait_for(calls, reason)
        # A recovery has to go on; the next look raises it.
        if not calls or not calls[0].record.name.startswith(RECOVERY):
            streams.raise_unobserved()

    def is_done(self, handle: Handle) -> bool:
        """Return whether a result is known."""
        self.streams.flush()
        return is_over(handle)

    def peek(self, ref: Ref) -> tuple[Any] | None:
        """Return a value in a tuple, if it came with the message that its call has ended; None otherwise."""
        outcome = ref.source.outcome(ref.place) if type(ref.source) is Call else None
        if outcome is None or type(outcome[1]) in (StaysOnWorker, Failed):
            return None
        return (ref.pick(received_outcome(*outcome)),)

    def structures(self, handles: Sequence[Handle]) -> list[tuple[Any, tuple[bool, ...]]]:
        """Wait for a call on replicas and return the structure of each result; raise the error of one that failed."""

        def read() -> list[tuple[Any, tuple[bool, ...]]]:
            outcomes: list[Any] = []
            # Another thread may make the call again meanwhile.
            while not outcomes or any(outcome is None or type(outcome[1]) is Failed for outcome in outcomes):
                self.wait_for_step(handles, "what a function returns had to be learned from its first call")
                outcomes = [ref.source.outcome(ref.place) for ref in handles]
            return [loaded_structure(structure) for structure, _ in outcomes]

        return self.attempt(read)

    def as_future(self, ref: Ref) -> Any:
        """Return a future of a result, which is put into its worker's memory as the result of a task."""
        if type(ref.source) is TaskResults:
            future = ref.source.futures[ref.place]
        else:
            # Wait here: otherwise the task would block a thread of the worker.
            self.check_there(ref)
            self.attempt(lambda: self._wait_for([ref.source]), [ref])
            ref.source.outcome(ref.place)
            future = self._submit.call(
                result_in_memory,
                [],
                self._token,
                ref.source.record.number,
                ref.place,
                worker=ref.worker,
                is_pinned=True,
                again=lambda: None,
                name="value",
            )
            self._submit.wait([future])
        self._submit.check([future])
        return future


def is_over(ref: Ref) -> bool:
    """Return whether a result is known, or does not exist as its call was made again for fewer replicas."""
    outcomes = ref.source.record.outcomes
    return ref.place >= len(outcomes) or outcomes[ref.place] is not None
