"""`ReplicaIterator`: a replica's part of a distributed dataset that is an argument of `Strategy.run`."""

from __future__ import annotations

import contextlib
import contextvars
import json
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import Any, Final, NamedTuple

import optree

from daskdist.core.block import writable_element
from daskdist.core.dataset_base import node_of
from daskdist.core.failing.failed_elements import FailedElement, PartlyFailed, ReportedFailures, raw_item
from daskdist.core.structure import Structure
from daskdist.devices import Device, named
from daskdist.errors import ArgumentError
from daskdist.execute.callers.compute_key import Fetch
from daskdist.execute.callers.now import Now
from daskdist.execute.stream.locked import locked
from daskdist.execute.transfer.prefetch import DevicePrefetch
from daskdist.ops.with_options import merged_options
from daskdist.strategy.collectives.step_counts import AskSteps, PeerPipelines, StepCounts
from daskdist.strategy.group import Replica
from daskdist.strategy.input.iterator import ahead_of
from daskdist.strategy.input.optional import Optional
from daskdist.strategy.input.replica_plans import DatasetArgument, ReplicaPlan, in_pass, pinned, shared_reader
from daskdist.strategy.input.shared_reader import SharedReader

_OVER: Final = object()


class ReplicaIterator(Iterator[Any]):
    """An iterator over a replica's part of a distributed dataset, inside a function that `Strategy.run` calls.

    Several threads of the function may take steps from it: each step goes to exactly one of them.

    Its elements are the replica's parts of the steps, as arrays on the replica's device, or as NumPy arrays if
    `InputOptions` say so. After its end, iterating again makes another pass:
    ``for epoch in range(3): for batch in iterator: ...`` makes three. A loop that was left early continues where it
    was left. A shuffled dataset has another order in each pass. In the first call the orders are those of loops in the
    program; each later call begins with an order that no pass had before.

    Not created directly. It can be used until the function returns.

    Attributes
    ----------
    element_spec
        The spec of its elements; the first length is None if it varies.
    """

    def __init__(self, plan: ReplicaPlan, reader: SharedReader, lane: int, device: Device) -> None:
        self.element_spec = plan.element_spec
        self._plan = plan
        self._shared_reader = reader
        self._lane = lane
        # The number of the pass within the call.
        self._iteration = 0
        self._device = device
        # Copies the elements of this pass to the device.
        self._ahead: DevicePrefetch | None = None
        self._num_elements = 0
        self._is_over = False
        self._told = ReportedFailures()
        # True if the raised error is of one element and others follow it.
        self._goes_on = False
        self.lock = RLock()
        self._elements: Iterator[Any] = self._pass()

    @locked
    def __iter__(self) -> ReplicaIterator:
        if self._is_over:
            self._is_over = False
            self._iteration += 1
            self._elements = self._pass()
        return self

    @locked
    def __next__(self) -> Any:
        try:
            element = self._next_good()
            if self._plan.maps:
                replica = self._plan.first_replica + self._lane
                element = self._plan.maps(element, replica, self._device)
        except StopIteration:
            self._is_over = True
            raise
        except Exception as error:
            # Raise the failure again at the next call, unless other elements follow it.
            if not self._goes_on:
                self._elements = _Failed(error)
            self._goes_on = False
            raise
        self._num_elements += 1
        return element

    def _next_good(self) -> Any:
        while isinstance(element := next(self._elements), FailedElement):
            error = element.again()
            if self._told.is_new(error):
                self._goes_on = True
                raise error
        return element

    def get_next(self) -> Any:
        """Return the value of the next step.

        Raises
        ------
        StopIteration
            The pass has no more steps.
        """
        return next(self)

    def get_next_as_optional(self) -> Optional:
        """Return the value of the next step in an `Optional`, which is empty at the end of the pass."""
        value = next(self, _OVER)
        if value is _OVER:
            return Optional(None, self.element_spec)
        return Optional(value, self.element_spec, has_value=True)

    def stats(self) -> dict[str, Any]:
        """Return statistics of this pass so far.

        Returns
        -------
        dict
            ``num_elements``: the elements handed out. If they are copied to a device, ``device`` has the bytes, speed
            and overlap of the copies, see `DevicePrefetch.stats`.
        """
        stats: dict[str, Any] = {"num_elements": self._num_elements}
        return stats if self._ahead is None else {**stats, "device": self._ahead.stats()}

    def close(self) -> None:
        """Stop reading ahead and drop the data that was read; no step follows."""
        if not self.lock.acquire(blocking=False):
            # Another thread is taking a step, and may wait for other replicas.
            self._shared_reader.wake(self._lane)
            self.lock.acquire()
        try:
            self._close()
        finally:
            self.lock.release()

    def _close(self) -> None:
        if isinstance(self._elements, Generator):
            self._elements.close()
        self._elements = _Failed(ArgumentError("this iterator is closed: it can be used until its function returns"))
        self._is_over = False
        leave = partial(self._shared_reader.leave, self._lane)
        if self._ahead is None:
            leave()
        else:
            # Leave the pass after the copying thread has stopped.
            self._ahead.close(leave)

    def _pass(self) -> Iterator[Any]:
        self._num_elements = 0
        which = self._plan, self._shared_reader, self._lane, self._iteration
        if self._device.is_host or not self._plan.options.fetch_to_device:
            return _elements(*which)
        self._ahead = ahead_of(
            _steps(*which),
            [self._device],
            self._plan.options,
            Now.bundle_bytes,
            interrupt=partial(self._shared_reader.wake, self._lane),
        )
        return _packed(self._ahead, self._plan.spec.structure)

    def __repr__(self) -> str:
        replica = self._plan.first_replica + self._lane
        return f"<ReplicaIterator of replica {replica}, pass {self._iteration}: {self.element_spec}>"


class _Failed(Iterator[Any]):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __next__(self) -> Any:
        raise self._error


def _elements(plan: ReplicaPlan, reader: SharedReader, lane: int, iteration: int) -> Iterator[Any]:
    # A function rather than a method: a generator with a reference to the iterator would delay its release.
    structure: Structure = plan.spec.structure
    is_writable = bool(merged_options(reader.node).writable)
    # Keep no reference to a part longer than needed.
    parts = reader.begin(lane, iteration).parts(lane)
    try:
        for part in parts:
            places, rows = part.places, part.rows
            del part
            is_row = min(places[0], places[-1]) >= 0 and places[-1] - places[0] == len(places) - 1
            if rows is not None and is_row and not isinstance(rows, PartlyFailed):
                elements = rows.elements(places[0], places[-1] + 1)
                yield from map(writable_element, elements) if is_writable else elements
            else:
                for place in places:
                    item = None if place < 0 else raw_item(rows, place)
                    if isinstance(item, FailedElement):
                        yield item
                        continue
                    element = plan.empty if item is None else structure.pack(item)
                    yield writable_element(element) if is_writable else element
    finally:
        parts.close()  # type: ignore[attr-defined]


def _steps(plan: ReplicaPlan, reader: SharedReader, lane: int, iteration: int) -> Iterator[Any]:
    # The same as `_elements`, as leaves.
    parts = reader.begin(lane, iteration).parts(lane)
    try:
        for part in parts:
            places, rows = part.places, part.rows
            del part
            for place in places:
                yield [plan.no_rows if place < 0 else rows.item(place)]
    finally:
        parts.close()  # type: ignore[attr-defined]


def _packed(ahead: DevicePrefetch, structure: Structure) -> Iterator[Any]:
    return (structure.pack(leaves) for (leaves,) in ahead)


class WorkerServices(NamedTuple):
    """The services of a worker that a replica's iterators use.

    Parameters
    ----------
    fetch
        Gets data from the cluster.
    step_counts
        Answers other workers about the steps of this worker's pipelines.
    ask
        Asks other workers about theirs.
    """

    fetch: Fetch
    step_counts: StepCounts
    ask: AskSteps


def replica_iterators(
    leaves: list[Any],
    treespec: Any,
    replica: Replica,
    number: int,
    services: Callable[[], WorkerServices] | None = None,
) -> contextlib.AbstractContextManager[Any]:
    """Return a context with the arguments of a function on a replica: iterators replace plans, and are closed at exit.

    On a worker, ``services`` returns the parts of the worker that iterators use.
    """
    nest = treespec.unflatten(leaves)
    is_plain = ReplicaPlan not in map(type, leaves)
    return contextlib.nullcontext(nest) if is_plain else _open_iterators(nest, replica, number, services)


@contextlib.contextmanager
def _open_iterators(
    nest: Any, replica: Replica, number: int, services: Callable[[], WorkerServices] | None
) -> Iterator[Any]:
    with contextlib.ExitStack() as opened:

        def iterator(argument: Any) -> Any:
            if type(argument) is not DatasetArgument:
                return argument
            replica_iterator = _iterator(argument, replica, number, None if services is None else services())
            opened.callback(replica_iterator.close)
            return replica_iterator

        yield optree.tree_map(iterator, nest, is_leaf=lambda leaf: type(leaf) is DatasetArgument, none_is_leaf=True)


def _iterator(
    argument: DatasetArgument, replica: Replica, number: int, services: WorkerServices | None
) -> ReplicaIterator:
    plan: ReplicaPlan = argument.plan
    token, _, numbers = argument.turn.partition(":")
    read_plan = in_pass(plan, [(tuple(pass_numbers), *rest) for pass_numbers, *rest in json.loads(numbers)])
    if services is not None:
        # Questions are asked in other threads, with the settings of the call.
        within = contextvars.copy_context()
        ask = services.ask
        peers = PeerPipelines(token, plan.number, services.step_counts, lambda *args: within.copy().run(ask, *args))
        read_plan = replace(read_plan, fetch=services.fetch, peers=peers)
    if argument.held is not None:
        pipeline = replace(read_plan.pipeline, node=node_of(argument.held))
        # The number of the one operation that stands for the whole dataset.
        (((number_of_all,), *rest), *others) = read_plan.epochs
        read_plan = replace(read_plan, pipeline=pipeline, epochs=((number_of_all, *rest), *others))
    device = named(replica.device)
    reader = shared_reader(token, replica.worker, plan, pinned(plan, read_plan, [device]))
    return ReplicaIterator(plan, reader, number - plan.first_replica, device)
