"""Iterators over distributed datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import RLock
from typing import Any, Final

from daskdist.core.array_pool import pooled_empty
from daskdist.core.block import writable
from daskdist.core.failing.failed_elements import ReportedFailures, is_of_element
from daskdist.core.failing.short_traceback import shortened
from daskdist.core.finalizer import Finalizer
from daskdist.core.primitive import Epoch, Exhausted
from daskdist.core.selection.block_ref import BlockRef
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import Leaves
from daskdist.devices import Device
from daskdist.errors import DaskdistError, OutOfRangeError, UserFunctionError
from daskdist.execute.caller import Caller, Handle
from daskdist.execute.stream.bundle_builder import BundleBuilder, Lane
from daskdist.execute.stream.interpreter import Interpreter, logger, stats_of
from daskdist.execute.stream.locked import locked
from daskdist.execute.transfer.copier import pinned_empty
from daskdist.execute.transfer.copy_stats import CopyStats
from daskdist.execute.transfer.gather_on_device import device_gathers
from daskdist.execute.transfer.prefetch import DevicePrefetch
from daskdist.ops.with_options import merged_options
from daskdist.strategy.input.optional import Optional
from daskdist.strategy.input.options import InputOptions
from daskdist.strategy.input.pipeline import Pipeline
from daskdist.strategy.replica.context import TO_REPLICAS, check_in_program
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.extract import PerReplicaRef, Remote, pick_from_rows
from daskdist.strategy.values.per_replica import PerReplica

_NO_ROWS: Final = (Lane(None, ()), -1)
_AT_ITS_END: Final = "the iterator is at its end; iterate over the dataset again for another pass"


class _PipelineCursor:
    """The elements of one pipeline, a step at a time.

    Parameters
    ----------
    builder
        Gives them.
    caller
        Who makes calls.
    """

    def __init__(self, builder: BundleBuilder, caller: Caller) -> None:
        self.builder = builder
        self.caller = caller
        self.lanes: list[Lane] = []
        self.position = self.length = 0

    def next(self) -> list[tuple[Lane, int]] | None:
        """Return each replica's lane and its place in that; None at the end."""
        if self.position == self.length:
            try:
                bundle = self.builder.pull()
            except Exhausted:
                return None
            self.lanes = list(map(self._without_empty, bundle.lanes))
            self.position, self.length = 0, len(bundle)
        step = [(lane, lane.places[self.position]) for lane in self.lanes]
        self.position += 1
        return step

    def _without_empty(self, lane: Lane) -> Lane:
        if lane.lengths is None:
            return lane
        lengths = self.caller.result(lane.lengths)
        return Lane(lane.ref, [place if place >= 0 and lengths[place] else -1 for place in lane.places])


class _JointCursor:
    """The steps of all pipelines, as places in blocks.

    Parameters
    ----------
    feeds
        Of each pipeline.
    num_lanes
        The replicas that each serves.
    drops_uneven
        Whether the end is before the first step in which a replica would have nothing.
    """

    def __init__(self, feeds: list[_PipelineCursor], num_lanes: list[int], *, drops_uneven: bool) -> None:
        self._feeds = feeds
        self._num_lanes = num_lanes
        self._drops_uneven = drops_uneven

    def next(self) -> tuple[list[tuple[Lane, int]], int]:
        """Return each replica's lane and place, and how many have no rows; raise `OutOfRangeError` at the end."""
        while True:
            is_over = True
            places: list[tuple[Lane, int]] = []
            for feed, num_lanes in zip(self._feeds, self._num_lanes, strict=False):
                step = feed.next()
                if step is None:
                    places += [_NO_ROWS] * num_lanes
                else:
                    is_over = False
                    places += step
            if is_over:
                raise OutOfRangeError(_AT_ITS_END)
            num_empty = len([place for _, place in places if place < 0])
            # A step is one if any replica has a row.
            if num_empty < len(places):
                break
        if num_empty and self._drops_uneven:
            raise OutOfRangeError(_AT_ITS_END)
        return places, num_empty

    def close(self) -> None:
        """Drop the blocks that were read; the next step is the end."""
        self._feeds = []


class _HostSteps(Iterator[Any]):
    """Steps in this process: for each replica the leaves, on the host. It knows nothing of the iterator it is for."""

    def __init__(self, feeds: _JointCursor, caller: Caller, empty: Sequence[Any]) -> None:
        self._feeds = feeds
        self._caller = caller
        self._empty = empty

    def __next__(self) -> list[Sequence[Any]]:
        try:
            places, _ = self._feeds.next()
        except OutOfRangeError:
            raise StopIteration from None
        return [
            self._empty if place < 0 else self._caller.result(lane.ref.handle).item(place)  # type: ignore[union-attr]
            for lane, place in places
        ]

    def close(self) -> None:
        """Stop reading ahead, and let go of what was read."""
        self._feeds.close()
        self._caller.close()


def ahead_of(
    source: Iterator[Any], devices: Sequence[Device], options: InputOptions, unit_bytes: int, **when: Any
) -> DevicePrefetch:
    """Return an iterator that puts steps on devices ahead of use, as the options say."""
    return DevicePrefetch(
        source,
        devices,
        num_units=options.device_buffer_size,
        num_bytes=options.device_buffer_bytes,
        unit_bytes=unit_bytes,
        **when,
    )


class DistributedIterator:
    """A place in a distributed dataset: each value is one step's, for all replicas.

    Several threads may take steps from one iterator: each step goes to exactly one of them. A function that
    `Strategy.run` calls may not: it is given the step, or the distributed dataset.
    """

    def __init__(
        self,
        pipelines: Sequence[Pipeline],
        spec: ElementSpec,
        element_spec: Any,
        caller: Caller,
        epochs: Sequence[Epoch],
        *,
        options: InputOptions,
        devices: Sequence[Device] = (),
        drops_uneven: bool = False,
        mapped: Callable[[Any], Any] | None = None,
        copied: Callable[[], CopyStats | None] | None = None,
        at_end: Callable[[], None],
    ) -> None:
        self.element_spec = element_spec
        # Tells what came of copies that the replicas' workers make.
        self._copied = copied
        # Calls the functions of `map` with a step's elements on their replicas; None if there are none.
        self._mapped = mapped
        # Raises the failure of a call at which nobody has looked.
        self._at_end = at_end
        self._caller = caller
        self._structure = spec.structure
        self._specs = spec.leaves
        self._told = ReportedFailures()
        self._failure: tuple[type[Exception], tuple[Any, ...]] | None = None
        feeds: list[_PipelineCursor] = []
        self._interpreters: list[Interpreter] = []
        self._num_steps = 0
        self.lock = RLock()
        num_lanes = [len(pipeline.consumers) for pipeline in pipelines]
        num_replicas = sum(num_lanes)
        self._is_writable = any(merged_options(pipeline.node).writable for pipeline in pipelines)
        self._is_here = pipelines[0].consumers[0] is None
        # The backend that fetches values that are looked at.
        self._backend = caller.backend
        is_fed = options.fetch_to_device and not all(device.is_host for device in devices)
        # Any device of a kind copies from what is pinned for one of them.
        is_pinned = is_fed and len({device.kind for device in devices}) == 1
        for pipeline, epoch in zip(pipelines, epochs, strict=True):
            interpreter = Interpreter(caller, pipeline.readers, pipeline.budget_bytes)
            self._interpreters.append(interpreter)
            first = sum(num_lanes[: len(feeds)])
            own = devices[first : first + len(pipeline.consumers)]
            is_gathered_there = is_fed and bool(merged_options(pipeline.node).shuffle_on_device)
            # For datasets of a function, only the elements tell whether a step has rows.
            asks_lengths = num_replicas > 1 and pipeline.varies and not pipeline.primitive.grouped
            here = pooled_empty if self._is_here else None
            builder = BundleBuilder(
                interpreter,
                pipeline.primitive,
                epoch,
                pipeline.consumers,
                asks_lengths=asks_lengths,
                num_steps_ahead=options.per_replica_buffer_size,
                empty=pinned_empty(devices[0]) if is_pinned else here,
                device_gathers=device_gathers(own, pipeline.primitive) if is_gathered_there else (),
                as_views=self._is_here and not is_pinned,
            )
            feeds.append(_PipelineCursor(builder, caller))
        self._feeds = _JointCursor(feeds, num_lanes, drops_uneven=drops_uneven)
        # The blocks of the last step's parts, and their handles and workers.
        self._refs: list[BlockRef | None] = [None] * num_replicas
        self._handles: tuple[Handle, ...] = ()
        self._workers: tuple[str | None, ...] = ()
        self._empty = tuple(leaf.zeros() for leaf in spec.leaves) if num_replicas > 1 else ()
        self._ahead: DevicePrefetch | None = None
        if is_fed:
            self._ahead = ahead_of(_HostSteps(self._feeds, caller, self._empty), devices, options, caller.bundle_bytes)
        else:
            # The threads of a caller end with its iterator, closed or dropped.
            self._finalizer = Finalizer(self, caller.close)

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
        """Return the next step's values.

        Returns
        -------
        nest
            In the structure of an element, a `PerReplica` a leaf; with one replica the plain value. A replica
            for which no rows are left has zero rows. In this process, what is for a replica on a device is there,
            unless `InputOptions` say otherwise, but for text, objects, times and rows of different lengths.

        Raises
        ------
        OutOfRangeError
            There are no more.
        DeviceMemoryError
            A device has no room for it, though nothing is copied there ahead of use any more.
        RuntimeError
            A replica calls it, in a function that `Strategy.run` calls.
        """
        check_in_program("next")
        with self.lock:
            try:
                return self._next()
            except UserFunctionError as error:
                raise shortened(error) from error.__cause__

    def _next(self) -> Any:
        if self._failure:
            # Raise the failure again, rather than pass over it in silence.
            raise self._failure[0](*self._failure[1])
        try:
            value = self._step()
            return value if self._mapped is None else self._mapped(value)
        except OutOfRangeError:
            if num_skipped := self.stats()["num_skipped"]:
                logger.warning("left out %d elements in all", num_skipped)
            self.close()
            self._at_end()
            raise
        except Exception as error:
            if is_of_element(error) and self._ahead is None:
                # The step is over; the next one is behind it.
                if self._told.is_new(error):
                    raise
                return self._next()
            # Not the error itself: the frames of its traceback hold on to this iterator.
            self._failure = _made_of(error)
            self.close()
            raise

    def get_next_as_optional(self) -> Optional:
        """Return the next step's values in an `Optional`, which is empty at the end."""
        try:
            return Optional(self.get_next(), self.element_spec, has_value=True)
        except OutOfRangeError:
            return Optional(None, self.element_spec)

    def stats(self) -> dict[str, Any]:
        """Return the figures of the pass so far.

        Returns
        -------
        dict
            ``num_elements``, the steps handed out; ``num_skipped``, what was left out because it could not be read or
            its computation failed; and ``skipped_by_file``, of it what is of files, by their paths. Where values are
            put on devices, ``device`` too, as `CopyStats.told` has it: bytes, speed and overlap of the copies. Workers
            copy what is given to `run`, and are asked for that, which takes some milliseconds: it is of all that was
            copied to the replicas' devices so far.
        """
        found = stats_of(self._interpreters, self._num_steps)
        if self._ahead is not None:
            return {**found, "device": self._ahead.stats()}
        there = None if self._copied is None else self._copied()
        return found if there is None else {**found, "device": there.as_dict()}

    @locked
    def close(self) -> None:
        """Stop reading ahead and let go of what was read. A thread that is taking a step is waited for."""
        self._refs, self._handles = [None] * len(self._refs), ()
        if self._ahead is not None:
            self._ahead.close()
            return
        self._feeds.close()
        self._finalizer()

    def _step(self) -> Any:
        if self._ahead is not None:
            return self._handed_out(self._on_devices(self._ahead))
        places, num_empty = self._feeds.next()
        self._num_steps += 1
        if len(places) == 1:
            return self._structure.pack(self._leaves(*places[0]))
        if not num_empty and not self._is_here:
            return self._structure.pack(self._spread(places))
        return self._handed_out([self._empty if place[1] < 0 else self._leaves(*place) for place in places])

    def _on_devices(self, ahead: DevicePrefetch) -> list[Sequence[Any]]:
        rows = next(ahead, None)
        if rows is None:
            raise OutOfRangeError(_AT_ITS_END)
        self._num_steps += 1
        # The leaves that are not put on devices.
        return [list(map(writable, leaves)) for leaves in rows] if self._is_writable else rows

    def _handed_out(self, rows: Sequence[Sequence[Any]]) -> Any:
        # The elements of all replicas in the form that the program gets.
        if len(rows) == 1:
            return self._structure.pack(rows[0])
        return self._structure.pack([PerReplica(column) for column in zip(*rows, strict=True)])

    def _spread(self, places: Sequence[tuple[Lane, int]]) -> list[PerReplica]:
        # The same as `_leaves`, for all replicas.
        refs = [lane.ref for lane, _ in places]
        # The references of one bundle are the same objects.
        if refs != self._refs:
            self._refs = refs
            self._handles = tuple([ref.handle for ref in refs])  # type: ignore[union-attr]
            self._workers = tuple([ref.worker for ref in refs])  # type: ignore[union-attr]
        numbers = [place for _, place in places]
        first = numbers[0]
        are_alike = numbers.count(first) == len(numbers)
        found = []
        for leaf, spec in enumerate(self._specs):
            alike = pick_from_rows(first, leaf, self._is_writable)
            picks = alike if are_alike else tuple([pick_from_rows(place, leaf, self._is_writable) for place in numbers])
            found.append(PerReplica.of(PerReplicaRef(self._backend, self._handles, picks, self._workers, spec)))
        return found

    def _leaves(self, lane: Lane, place: int) -> Sequence[Any]:
        ref = lane.ref
        if self._is_here:
            leaves: Leaves = self._caller.result(ref.handle).item(place)  # type: ignore[union-attr]
            return list(map(writable, leaves)) if self._is_writable else leaves
        # Not the reference, but its handle: what was handed out is the consumer's, and counts no longer as read ahead.
        handle, worker = ref.handle, ref.worker  # type: ignore[union-attr]
        return [
            AsyncValue(self._backend, Remote(handle, pick_from_rows(place, number, self._is_writable), worker), spec)
            for number, spec in enumerate(self._specs)
        ]


def _made_of(error: Exception) -> tuple[type[Exception], tuple[Any, ...]]:
    # The type and arguments of an equal error, without the traceback.
    try:
        type(error)(*error.args)
    except Exception:
        return DaskdistError, (f"{type(error).__name__}: {error}",)
    return type(error), error.args
