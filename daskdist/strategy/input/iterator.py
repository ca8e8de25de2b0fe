"""Iterators over distributed datasets."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final

from daskdist.core.array_pool import pooled_empty
from daskdist.core.block import writable
from daskdist.core.failing.error_copy import type_and_arguments
from daskdist.core.failing.failed_element import is_of_element, must_raise
from daskdist.core.failing.short_traceback import shortened
from daskdist.core.finalizer import Finalizer
from daskdist.core.functions.current_context import current_context
from daskdist.core.primitive import Epoch
from daskdist.core.structure import Leaves
from daskdist.devices import named
from daskdist.display.step_times import WorkerTimes
from daskdist.errors import ClusterError, OutOfRangeError, RepeatedLossError, UserFunctionError
from daskdist.execute.resume.position import StreamPosition
from daskdist.execute.stream.bundle_builder import BundleBuilder, Lane
from daskdist.execute.stream.interpreter import Interpreter
from daskdist.execute.stream.pass_iterator import PassIterator
from daskdist.execute.stream.step_cursors import (
    AT_ITS_END,
    Mark,
    Step,
    StepCursor,
    StepRun,
    handed_out_at,
    without_blocks,
)
from daskdist.execute.stream.synchronized import synchronized
from daskdist.execute.stream.window import Windows
from daskdist.execute.transfer.copier import pinned_empty
from daskdist.execute.transfer.copy_stats import CopyStats
from daskdist.execute.transfer.gather_on_device import with_device_gathers
from daskdist.execute.transfer.prefetch import DevicePrefetch
from daskdist.ops.with_options import merged_options
from daskdist.passes.numbering import note_pass
from daskdist.passes.rest_of_pass import PassSection
from daskdist.strategy.input.device_staging import HostSteps, ahead_of
from daskdist.strategy.input.options import InputOptions
from daskdist.strategy.input.pipeline import Pipeline
from daskdist.strategy.input.replica_feed import ReplicaFeed
from daskdist.strategy.replica.context import TO_REPLICAS, check_in_program
from daskdist.strategy.replica.contract import StrategyContract, internals_of
from daskdist.strategy.values.absent import ABSENT
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.optional import Optional
from daskdist.strategy.values.per_replica import UNKNOWN_ROWS, PerReplica
from daskdist.strategy.values.refs import GlobalBatch, Ref, Refs, TaskResults, row_leaf

# The part of a worker's memory for batches of steps under way, after which further steps wait.
_STEPS_OF_MEMORY: Final = 4


class DistributedIterator(PassIterator):
    """An iterator over a distributed dataset: each value is a step of all replicas.

    Several threads may take steps from one iterator: each step goes to exactly one of them. Functions that
    `Strategy.run` calls cannot use it: give them the step, or the distributed dataset.
    """

    _unit = "step"

    def __init__(
        self,
        strategy: StrategyContract,
        feed: ReplicaFeed,
        epochs: Sequence[Epoch],
        options: InputOptions,
        after_loss: Callable[[], ReplicaFeed],
    ) -> None:
        super().__init__()
        self.element_spec = feed.known_element_spec
        self._strategy = strategy
        self._internals = internals_of(strategy)
        self._feed = feed
        # Returns the feed for the replicas that are left, after some were lost.
        self._after_loss = after_loss
        pipelines, spec = feed.source.pipelines, feed.source.spec
        self._is_here = pipelines[0].consumers[0] is None
        # The replicas that the feed is for; in this process none can be lost.
        self._replicas = () if self._is_here else self._internals.replicas_left()
        self._caller = caller = feed.reader()
        self._structure, self._pack = spec.structure, spec.structure.packer
        self._specs = spec.leaves
        self._reported: set[str] = set()
        self._is_writable = any(merged_options(pipeline.node).writable for pipeline in pipelines)
        # The backend that fetches values that are looked at.
        self._backend: Any = self._internals.backend
        self._options = options
        self._devices = [named(replica.device) for replica in strategy.replicas if replica.worker is None]
        # Otherwise all replicas have parts of one batch, which fails as a whole.
        self._puts_on_devices = options.fetch_to_device and not all(device.is_host for device in self._devices)
        # The earlier parts of the pass, divided otherwise than the rest.
        self._sections: list[PassSection] = []
        seeds = [pipeline.seeds for pipeline in pipelines]
        self._open(pipelines, list(map(StreamPosition, epochs, seeds)))
        self._skips_empty = any(merged_options(pipeline.node).last_batch == "skip_empty" for pipeline in pipelines)
        # The steps that are read ahead for copies to devices, from the first step on.
        self._host_steps: HostSteps | None = None
        self._ahead: DevicePrefetch | None = None
        # The position after the last step that left `_ahead`.
        self._mark = self._cursor.mark
        # The bytes of the bundles on each worker that were handed out and are still referenced, mostly by steps under
        # way; None without a limit of memory.
        memory_bytes = None if self._is_here else caller.memory_bytes
        limit_bytes = 0 if memory_bytes is None else memory_bytes // _STEPS_OF_MEMORY
        self._in_use = Windows("steps", limit_bytes, limit_bytes) if limit_bytes else None
        # True if a bundle was begun since the last check for room.
        self._has_begun_bundle = False
        self._row_bytes = spec.row_bytes
        # Ends the caller's threads when it is closed or garbage collected.
        self._finalizer = Finalizer(self, caller.close)

    def _open(
        self, pipelines: Sequence[Pipeline], starts: Sequence[StreamPosition], done: frozenset[int] = frozenset()
    ) -> None:
        devices, options = self._devices, self._options
        num_lanes = [len(pipeline.consumers) for pipeline in pipelines]
        # Memory pinned for one device of a kind serves all devices of that kind.
        is_pinned = self._puts_on_devices and len({device.kind for device in devices}) == 1
        fails_by_replica = self._feed.source.share_out is None and not self._feed.drops_uneven
        builders: list[BundleBuilder] = []
        self._interpreters = []
        self._nodes = [pipeline.node for pipeline in pipelines]
        for pipeline, start in zip(pipelines, starts, strict=True):
            interpreter = Interpreter(self._caller, pipeline.readers, pipeline.budget_bytes)
            self._interpreters.append(interpreter)
            first = sum(num_lanes[: len(builders)])
            pipeline_devices = devices[first : first + len(pipeline.consumers)]
            is_wanted = merged_options(pipeline.node).shuffle_on_device if self._puts_on_devices else False
            primitive, gathers = with_device_gathers(pipeline_devices, pipeline.primitive, is_wanted)
            # Only the elements of a ``dataset_fn`` show whether they have rows, and which failed.
            is_unknown = fails_by_replica or (pipeline.varies and not pipeline.primitive.grouped)
            asks_lengths = sum(num_lanes) > 1 and is_unknown
            local_empty = pooled_empty if self._is_here else None
            builder = BundleBuilder(
                interpreter,
                primitive,
                start,
                pipeline.consumers,
                asks_lengths=asks_lengths,
                num_steps_ahead=options.per_replica_buffer_size,
                empty=pinned_empty(devices[0]) if is_pinned else local_empty,
                device_gathers=gathers,
                as_views=self._is_here and not is_pinned,
            )
            builders.append(builder)
        # The numbers of rows of a step without known ones.
        self._without_numbers = UNKNOWN_ROWS if any(item.varies for item in pipelines) else frozenset()
        self._cursor = StepCursor(
            builders, drops_uneven=self._feed.drops_uneven, fails_by_replica=fails_by_replica, done=done
        )
        # The run of the last step, and the tasks that compute its blocks.
        self._run: StepRun | None = None
        self._results = TaskResults((), ())
        self._empty = tuple(leaf.zeros() for leaf in self._specs) if sum(num_lanes) > 1 else ()

    def __iter__(self) -> DistributedIterator:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(f"an iterator over a distributed dataset stays in its program. {TO_REPLICAS}")

    def __next__(self) -> Any:
        try:
            return self.get_next()
        except OutOfRangeError:
            raise StopIteration from None

    def get_next(self) -> Any:
        """Return the values of the next step.

        Returns
        -------
        nest
            The structure of an element with a `PerReplica` for each leaf; with one replica, the element itself. A
            replica for which no rows are left gets arrays without rows. Parts of replicas on devices of this process
            are there, except text, objects, times and ragged values, unless `InputOptions` say otherwise.

        Raises
        ------
        OutOfRangeError
            There are no more steps.
        DeviceMemoryError
            A device has no memory for the step, even without copies ahead of use.
        RuntimeError
            It is called inside a function that `Strategy.run` calls.
        """
        if current_context.get() is not None:
            check_in_program("next")
        try:
            return super().__next__()
        except UserFunctionError as error:
            # Without the frame of the method that this one calls.
            raise shortened(error) from error.__cause__

    def _next(self) -> Any:
        value = self._next_step()
        return value if self._feed.maps_on_replicas is None else self._mapped(value)

    def _has_changed(self, **when: bool) -> bool:
        return not self._is_here and self._internals.replicas_left(**when) is not self._replicas

    def _finish_steps(self) -> None:
        # Wait until all calls of `run` have ended, and raise the error of one whose results were not read.
        self._internals.finish(raises_all=True)

    def _numbers(self) -> tuple[Mark, int]:
        return self._cursor.mark if self._host_steps is None else self._mark, self._number

    def _loses_elements(self) -> bool:
        return self._ahead is not None or super()._loses_elements()

    def _continue_with_replicas(self, failure: Exception | None = None) -> None:
        # Share out the rest of the pass over the replicas that are left, if some were lost; raise the failure of their
        # data if that is not possible.
        if not self._has_changed():
            return
        try:
            # Dask counts how often each task ended a worker, and the tasks of the rest are new ones.
            self._caller.raise_given_up()
        except RepeatedLossError:
            # If a step ended the workers, the task only ran beside it.
            self._internals.raise_unobserved()
            raise
        self._replicas = self._internals.replicas_left()
        feed = self._after_loss()
        if feed.source.follows(self._feed.source):
            state = self._state(*self._numbers())
            self._feed, self.element_spec = feed, feed.known_element_spec
            self._continue_from(state)
        elif failure is not None:
            raise failure

    def _next_step(self, lost: Exception | None = None) -> Any:
        if self._failure:
            # Raise the failure again instead of skipping it silently.
            raise self._failure[0](*self._failure[1])
        try:
            if not self._is_over and self._has_changed():
                self._continue_with_replicas(lost)
            return self._step()
        except OutOfRangeError:
            self._note_end(has_elements=self._number > 0)
            self._close()
            self._internals.raise_unobserved()
            raise
        except Exception as error:
            if is_of_element(error) and not self._puts_on_devices:
                # Only this step failed; others follow it.
                if must_raise(error, self._reported):
                    raise
                return self._next_step()
            is_of_step = isinstance(error, ClusterError) and not self._puts_on_devices
            if is_of_step and self._has_changed(after_error=True):
                # A worker was lost while its data was waited for.
                return self._next_step(error)
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        # Keep no reference to the error: its traceback refers to this iterator.
        self._failure = type_and_arguments(error)
        self._close()

    def _mapped(self, value: Any) -> Any:
        # Let the replicas call their functions with a step; if some are lost, it is divided among the others. If a
        # function fails, other steps follow.
        while (maps := self._feed.maps_on_replicas) is not None:
            replicas = self._replicas
            try:
                return self._strategy.run(maps, args=(value,))
            except ClusterError:
                try:
                    self._continue_with_replicas()
                    if self._replicas is replicas:
                        raise
                except Exception as error:
                    # The rest of the pass lacks this step.
                    self._fail(error)
                    raise
        return value

    def get_next_as_optional(self) -> Optional:
        """Return the values of the next step in an `Optional`, which is empty at the end."""
        try:
            return Optional(self.get_next(), self.element_spec, has_value=True)
        except OutOfRangeError:
            return Optional(None, self.element_spec)

    def stats(self) -> dict[str, Any]:
        """Return statistics of the pass so far.

        Returns
        -------
        dict
            ``num_elements``: the steps handed out. ``num_skipped``: the elements that were skipped because they could
            not be read or computed, and ``skipped_by_file``: their number for each file. If values are copied to
            devices, ``device`` has the bytes, speed and overlap of the copies, see `CopyStats.as_dict`. On a cluster,
            workers copy the arguments of `run`; they are asked for these statistics, which takes some milliseconds and
            covers all copies to the replicas' devices so far. ``ahead_bytes`` and ``most_ahead_bytes`` are the bytes of
            batches that are read ahead, and the most there may be.

            ``waiting_s`` is the time that the program waited for the next step, and ``step_s`` the time between steps,
            which the program spent itself. On a cluster, a step is handed out before its data has arrived, and waiting
            for the data is part of ``step_s``. ``steps_per_s`` counts the steps that were handed out in this time, not
            those before a position that was loaded. ``busy_s`` has the time that reading, functions and gathering took,
            by their names in `explain`, summed over all threads: it exceeds ``waiting_s`` if threads work during steps.

            On a cluster, workers are asked for it: it is the time of their tasks, with ``"transfer"`` for copies
            between workers. ``replicas`` then has the seconds that all replicas were in steps (``step_s``) and waited
            for the input of a step (``waiting_s``), since the strategy was created.
        """
        stats = self._own_stats()
        if (times := self._internals.input.worker_times(self._caller)) is not None:
            stats["busy_s"] = times.busy_s
            stats["replicas"] = {"step_s": times.step_s, "waiting_s": times.waiting_s}
        if self._puts_on_devices:
            return {**stats, "device": CopyStats().as_dict() if self._ahead is None else self._ahead.stats()}
        places = [(replica.worker, replica.device) for replica in self._strategy.replicas]
        copied: CopyStats | None = self._internals.input.copy_stats(places)
        return stats if copied is None else {**stats, "device": copied.as_dict()}

    def _own_stats(self) -> dict[str, Any]:
        ahead_bytes, most_ahead_bytes = self._ahead_bytes()
        return {**super()._own_stats(), "ahead_bytes": ahead_bytes, "most_ahead_bytes": most_ahead_bytes}

    def _ahead_bytes(self) -> tuple[int, int]:
        windows = [window for interpreter in self._interpreters for window in list(interpreter.bundles.values())]
        return sum(window.used_bytes for window in windows), sum(window.limit_bytes for window in windows)

    @synchronized
    def close(self) -> None:
        """Stop reading ahead and drop the data that was read; waits for a thread that is taking a step.

        An iterator that was closed before its end has no position any more.
        """
        self._is_closed = not self._is_over
        self._close()

    def _close(self) -> None:
        self._run, self._results = None, TaskResults((), ())
        if isinstance(self._interrupted_at, tuple):
            mark, number = self._interrupted_at
            self._interrupted_at = without_blocks(mark), number
        if self._ahead is not None:
            self._ahead.close()
        else:
            self._cursor.close()
        self._finalizer()

    @synchronized
    def state_dict(self) -> dict[str, Any]:
        """Return the position, from which `load_state_dict` continues with exactly the remaining rows.

        Returns
        -------
        dict
            Numbers and text, for `Checkpoint` or JSON: some hundred bytes, and what ``unique`` and ``scan`` keep. Steps
            that were copied to devices ahead of use, and not handed out, are part of the remaining rows. Steps that
            were handed out are not, though calls with them may be under way or fail: `Checkpoint` waits for them.

        Raises
        ------
        ArgumentError
            This iterator is closed.
        """
        return self._position()

    def _state(self, mark: Mark, num_steps: int) -> dict[str, Any]:
        handed_out, done = handed_out_at(mark)
        streams = zip(self._interpreters, handed_out, strict=True)
        with nullcontext() if self._host_steps is None else self._host_steps.reading:
            positions = [interpreter.position_at(num_elements) for interpreter, num_elements in streams]
        return self._feed.source.state(positions, self._sections, num_steps, done, is_over=self._is_over)

    @synchronized
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position of an iterator over the same dataset, taken in any process.

        This iterator may have begun. With other numbers of replicas or workers or another global batch size, remaining
        rows are batched again and divided among the present replicas, each row exactly once; an incomplete last batch
        that ``batch`` drops may have another number of rows. Batches that cannot be rebuilt, as of ``padded_batch``,
        stay and are divided, with a warning if the batch size differs. Later passes are divided as usual.

        Raises
        ------
        ArgumentError
            The position is of another dataset or version, or this iterator is closed.
        """
        has_begun = self._number > 0 or self._is_over or any(handed_out_at(self._cursor.mark)[0])
        self._load(state, has_begun=has_begun or self._failure is not None or self._ahead is not None)

    def _continue_from(self, state: dict[str, Any], *, with_new_caller: bool = False) -> None:
        source = self._feed.source
        self._sections, pipelines, positions, epochs, num_steps, is_over, done = source.position_of(state)
        if with_new_caller:
            self._close()
            self._ahead = self._host_steps = self._failure = None
            self._reported, self._caller = set(), self._feed.reader()
            self._finalizer = Finalizer(self, self._caller.close)
        else:
            self._cursor.close()
        self._number, self._is_over = num_steps, is_over
        try:
            self._open(pipelines, positions, done)
        except Exception as error:
            # Some pipelines may be open, and others not.
            self._fail(error)
            raise
        self._mark = self._cursor.mark
        # Later passes get other numbers.
        for pipeline, epoch in zip(source.pipelines, epochs, strict=True):
            note_pass(pipeline.node, epoch)
        if self._is_over:
            self._close()

    def _step(self) -> Any:
        if self._puts_on_devices and self._ahead is None and not self._is_over:
            self._host_steps = HostSteps(self._cursor, self._caller, self._empty)
            self._ahead = ahead_of(self._host_steps, self._devices, self._options)
        if self._ahead is not None:
            rows = self._on_devices(self._ahead)
            return self._step_value(rows, num_rows=_num_rows_of(rows))
        if self._has_begun_bundle:
            self._wait_for_room()
        run, step = self._cursor.next()
        self._number += 1
        if run is not self._run and not self._is_here:
            self._note_bundles(run)
        if len(step.places) == 1:
            return self._pack(self._leaves(run.lanes[0], step.places[0], step.num_rows))
        if not step.num_empty and not self._is_here:
            return self._pack(self._references(step))
        parts = zip(run.lanes, step.places, strict=True)
        rows = [self._empty if place < 0 else self._leaves(lane, place, step.num_rows) for lane, place in parts]
        return self._step_value(rows, num_rows=step.num_rows)

    def _note_bundles(self, run: StepRun) -> None:
        # All steps of one run share their references.
        refs = [lane.ref for lane in run.lanes]
        before = [] if self._run is None else [lane.ref for lane in self._run.lanes]
        new = [(lane, ref) for lane in run.lanes if (ref := lane.ref) and not ref.is_kept and ref not in before]
        self._run = run
        futures = tuple([None if ref is None else ref.handle for ref in refs])
        self._results = TaskResults(futures, tuple([None if ref is None else ref.worker for ref in refs]))
        in_use = self._in_use
        if in_use is not None:
            for lane, ref in new:
                window = in_use[ref.worker]
                # The size of the first bundles may not be known yet.
                num_rows = len(lane.places) if lane.num_rows is None else int(lane.num_rows.sum())
                num_bytes = max(ref.nbytes, num_rows * self._row_bytes)
                window.acquire(num_bytes)
                weakref.finalize(ref.handle, window.release, num_bytes).atexit = False
            self._has_begun_bundle = True

    def _wait_for_room(self) -> None:
        # Batches of too many steps under way would fill the workers' memory. Wait before a step is taken, since an
        # interrupt of a later wait would lose its rows.
        in_use = self._in_use
        if in_use is not None:
            self._internals.backend.wait_while(lambda: not in_use.has_room())
            self._has_begun_bundle = False

    def _on_devices(self, ahead: DevicePrefetch) -> list[Sequence[Any]]:
        rows = next(ahead, None)
        if rows is None:
            raise OutOfRangeError(AT_ITS_END)
        self._number += 1
        self._mark = self._host_steps.marks.popleft()  # type: ignore[union-attr]
        # Make the leaves that stay on the host writable.
        return [list(map(writable, leaves)) for leaves in rows] if self._is_writable else rows

    def _step_value(self, rows: Sequence[Sequence[Any]], *, num_rows: frozenset[int]) -> Any:
        # Return the elements of all replicas in the form for the program.
        if len(rows) == 1:
            return self._pack(rows[0])
        if len(num_rows) > 1 and self._skips_empty:
            rows = [
                (ABSENT,) * len(leaves) if leaves is self._empty or _is_empty(leaves) else leaves for leaves in rows
            ]
        return self._pack(self._per_replica(list(zip(*rows, strict=True)), num_rows))

    def _per_replica(self, columns: Sequence[Any], num_rows: frozenset[int]) -> list[PerReplica]:
        # Return the leaves of a step, of which each column has the values of all replicas.
        batch = None
        if not self._is_here:
            batch = GlobalBatch(self._structure, columns, is_writable=self._is_writable, skips_empty=self._skips_empty)
        return [PerReplica(column, num_rows, batch=batch, batch_leaf=leaf) for leaf, column in enumerate(columns)]

    def _references(self, step: Step) -> list[PerReplica]:
        # Return references to the elements of all replicas, like `_leaves` for one replica.
        places = step.places
        first = places[0]
        are_alike = places.count(first) == len(places)
        values = []
        for leaf, spec in enumerate(self._specs):
            alike = row_leaf(first, leaf, self._is_writable)
            picks = alike if are_alike else tuple([row_leaf(place, leaf, self._is_writable) for place in places])
            values.append(Refs(self._backend, self._results, picks, spec))
        return self._per_replica(values, step.num_rows)

    def _leaves(self, lane: Lane, place: int, num_rows: frozenset[int]) -> Sequence[Any]:
        ref = lane.ref
        if self._is_here:
            leaves: Leaves = self._caller.result(ref.handle).item(place)  # type: ignore[union-attr]
            return list(map(writable, leaves)) if self._is_writable else leaves
        # Keep the future only: through the block, the data would still count as read ahead.
        results = TaskResults((ref.handle,), (ref.worker,))  # type: ignore[union-attr]
        known = num_rows or self._without_numbers
        return [
            AsyncValue(self._backend, Ref(results, 0, row_leaf(place, number, self._is_writable)), spec, known)
            for number, spec in enumerate(self._specs)
        ]


def _num_rows_of(rows: Sequence[Sequence[Any]]) -> frozenset[int]:
    return frozenset(leaf.shape[0] for leaves in rows for leaf in leaves if getattr(leaf, "shape", ()))


def _is_empty(leaves: Sequence[Any]) -> bool:
    # On a cluster, values that are not on a worker are the element without rows.
    return any(not isinstance(leaf, AsyncValue) and getattr(leaf, "shape", ())[:1] == (0,) for leaf in leaves)


def is_local(iterator: DistributedIterator) -> bool:
    """Return whether the replicas are in this process."""
    return iterator._is_here


def worker_times_of(iterator: DistributedIterator) -> WorkerTimes | None:
    """Ask workers how they spend their time on a pass; None in one process, or if they are not connected."""
    times: WorkerTimes | None = iterator._internals.input.worker_times(iterator._caller)
    return times


def ahead_bytes_of(iterator: DistributedIterator) -> tuple[int, int]:
    """Return the bytes of batches that a pass has read ahead, and the most there may be."""
    return iterator._ahead_bytes()
