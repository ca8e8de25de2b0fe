"""Iteration over a pipeline's elements in this process."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from daskdist.core.array_pool import pooled_empty
from daskdist.core.block import Block, Bundle, Rows, writable_element
from daskdist.core.failing.failed_element import is_of_element, must_raise
from daskdist.core.finalizer import Finalizer
from daskdist.core.node import Node
from daskdist.core.primitive import Epoch, Exhausted, Primitive
from daskdist.core.ragged import Ragged
from daskdist.core.spec import DatasetSpec, ElementSpec
from daskdist.core.structure import Leaves, Structure
from daskdist.display.step_times import StepTimes
from daskdist.errors import ArgumentError, StackError
from daskdist.execute.caller import Caller
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.resume.position import PipelineIdentity, StreamPosition, content_of, state_of
from daskdist.execute.stream.bundle_builder import BundleBuilder, Lane, StepBundle
from daskdist.execute.stream.interpreter import Interpreter
from daskdist.execute.stream.pass_iterator import PassIterator
from daskdist.execute.stream.synchronized import synchronized
from daskdist.long_work import LongWork

logger: Final = logging.getLogger("daskdist")


@dataclass(frozen=True)
class Identity:
    """The identity of a pipeline, by which its positions differ from those of others.

    Parameters
    ----------
    pipeline
        Returns the identity of the pipeline.
    planned
        Returns its primitive for given seeds.
    note_pass
        Called with the pass of a position that is resumed, so that later iterations are later passes.
    """

    pipeline: Callable[[], PipelineIdentity]
    planned: Callable[[list[int]], Primitive]
    note_pass: Callable[[Epoch], None]


class ElementIterator(PassIterator):
    """An iterator over the elements of a pipeline, in order, in this process.

    Several threads may take elements from one iterator: each element goes to exactly one of them.

    Parameters
    ----------
    make_caller
        Returns what makes the calls; closed at the end, or when the iterator is collected.
    primitive
        The primitive of the pipeline.
    start
        The position at which it begins; the order of a shuffle depends on its pass.
    empty
        Creates an element without rows, if the pipeline can have such elements.
    budget_bytes
        The limit of bytes read ahead; the setting ``window-bytes`` if None.
    identity
        The identity of the pipeline, for positions.
    is_writable
        Whether read-only arrays are copied before they are handed out.
    reported_spec
        Returns the ``element_spec`` that the program has read, which elements are checked against; None if it has not
        read it.
    work
        Shows how many elements were handed out, if the program has asked for it.
    node
        The last operation of the pipeline, if a program may ask how its time is spent.
    """

    def __init__(
        self,
        make_caller: Callable[[], Caller],
        primitive: Primitive,
        start: StreamPosition,
        empty: Callable[[], Any] | None = None,
        budget_bytes: int | None = None,
        identity: Identity | None = None,
        is_writable: bool = False,
        reported_spec: Callable[[], ElementSpec | None] = lambda: None,
        work: LongWork | None = None,
        node: Node | None = None,
    ) -> None:
        super().__init__()
        self._nodes = [] if node is None else [node]
        self._budget_bytes = budget_bytes
        self._make_caller = make_caller
        self._primitive = primitive
        self._identity = identity or Identity(
            lambda: PipelineIdentity("", ""), lambda seeds: primitive, lambda epoch: None
        )
        self._caller = make_caller()
        self._open(start)
        self._empty = empty
        self._is_writable = is_writable
        self._reported_spec = reported_spec
        self._work = work

    def _open(self, start: StreamPosition) -> None:
        interpreter = Interpreter(self._caller, budget_bytes=self._budget_bytes)
        # The caller is closed even if iteration never began.
        Finalizer(self, interpreter.close)
        self._builder: BundleBuilder | None = BundleBuilder(interpreter, self._primitive, start, empty=pooled_empty)
        self._interpreters = [interpreter]
        # The number of elements in the bundles before the current one, with those that failed.
        self._num_passed = start.num_elements
        # The bundle being handed out, the place of its next element, and an iterator over the elements from there on.
        self._bundle: StepBundle | None = None
        self._place = 0
        self._elements: Iterator[Any] | None = None
        self._reported: set[str] = set()

    def _next(self) -> Any:
        while self._builder is not None:
            if self._elements is not None:
                try:
                    element = next(self._elements)
                    self._place += 1
                    element = writable_element(element) if self._is_writable else element
                    self._number += 1
                    return element
                except StopIteration:
                    # Drop the finished bundle even if no other follows.
                    self._bundle = self._elements = None
                except Exception as error:
                    self._elements = None
                    # A batch that is a view of its block is stacked here.
                    self._place += is_of_element(error) or isinstance(error, StackError)
                    if must_raise(error, self._reported):
                        raise
                    continue
            elif self._bundle is not None:
                self._elements = self._from_here(self._bundle)
                continue
            self._num_passed += self._place
            if self._work is not None:
                self._work.add(self._place)
            self._place = 0
            try:
                self._bundle = self._builder.pull()
            except Exhausted:
                self._note_end(has_elements=self._num_passed > 0)
                self._close()
                break
        raise StopIteration

    def _numbers(self) -> tuple[int, int]:
        return self._num_passed + self._place, self._number

    def _from_here(self, bundle: StepBundle) -> Iterator[Any]:
        (lane,) = bundle.lanes
        places, caller, spec = lane.places[self._place :], self._interpreters[0].caller, self._reported_spec()
        elements = _elements(lane, places, caller, self._empty)
        if spec is None or any(isinstance(leaf, DatasetSpec) for leaf in spec.leaves):
            return elements
        rows = caller.result(lane.ref.handle) if _is_contiguous(lane, places) else None  # type: ignore[union-attr]
        return _checked(spec, elements, rows)

    @synchronized
    def close(self) -> None:
        """Stop reading ahead and drop the elements that were read; a closed iterator has no elements and no position.

        Waits for a thread that is taking an element.
        """
        self._close()
        self._is_closed, self._builder, self._bundle, self._elements = True, None, None, None

    def _close(self) -> None:
        self._interpreters[0].close()
        if self._work is not None:
            self._work.close()

    def stats(self) -> dict[str, Any]:
        """Return statistics of the pass so far.

        Returns
        -------
        dict
            ``num_elements``: the number handed out. ``num_skipped``: the number left out because reading or computing
            them failed, and ``skipped_by_file``: the number of unreadable units by the path of their file. A unit is
            the smallest one known to be damaged, such as a record, or else the rest of the file.

            ``waiting_s`` is the time that the program waited for the next element, and ``step_s`` the time between,
            which the program spent itself. ``steps_per_s`` is the rate of elements in this time. ``busy_s`` has the
            time that reading, functions and gathering took, by their names in `Dataset.explain`, summed over all
            threads; it is missing where other processes compute.
        """
        return self._own_stats()

    @synchronized
    def state_dict(self) -> dict[str, Any]:
        """Return the position, from which `load_state_dict` continues with exactly the remaining elements.

        Returns
        -------
        dict
            A version, the identity of the pipeline, the number of elements, and the position as text, for `Checkpoint`
            or JSON, without any pickled object. It has no data of the elements, except the value that ``scan`` carries
            over and what operations such as ``unique`` and ``group_by_window`` keep.

        Raises
        ------
        ArgumentError
            This iterator is closed.

        Notes
        -----
        Resuming reads only splits whose rows are still needed; a generator is run again from its start. An element
        whose error was raised is an element like others. Functions are taken to be pure: where ``filter``,
        ``flat_map``, ``interleave`` and others make another number of elements now, iterating raises `ArgumentError`.
        """
        return self._position()

    def _state(self, num_elements: int, number: int) -> dict[str, Any]:
        return state_of(self._identity.pipeline(), number, [self._interpreters[0].position_at(num_elements)])

    @synchronized
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position of an iterator over the same pipeline, taken in any process.

        This iterator may have begun, or be at its end.

        Raises
        ------
        ArgumentError
            The position is of another pipeline or version, or this iterator is closed.
        """
        has_begun = self._number or self._num_passed or self._is_over or self._bundle is not None
        self._load(state, has_begun=bool(has_begun))
        self._is_over = False

    def _continue_from(self, state: dict[str, Any], *, with_new_caller: bool = False) -> None:
        (position,) = content_of(state, self._identity.pipeline())["positions"]
        if with_new_caller:
            self._interpreters[0].close()
            self._caller = self._make_caller()
        if position.seeds != self._builder.start.seeds:  # type: ignore[union-attr]
            # Operations without a given seed drew their own, which the position replaces.
            self._primitive = self._identity.planned(position.seeds)
        self._open(position)
        self._number = state["number"]
        self._identity.note_pass(position.epoch)


class ConvertedIterator(Iterator[Any]):
    """An iterator over the converted elements of another one.

    Parameters
    ----------
    convert
        Called with each element.
    source
        The iterator over the elements: an `ElementIterator` or a `DistributedIterator`.
    """

    def __init__(self, convert: Callable[[Any], Any], source: Any) -> None:
        self._convert = convert
        self.source = source

    def __next__(self) -> Any:
        return self._convert(next(self.source))

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the source, see `ElementIterator.stats`."""
        return dict(self.source.stats())

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the source, see `ElementIterator.state_dict`."""
        return dict(self.source.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position, see `ElementIterator.load_state_dict`."""
        self.source.load_state_dict(state)

    def close(self) -> None:
        """Stop reading ahead and drop the elements that were read."""
        self.source.close()

    def __repr__(self) -> str:
        return repr(self.source)


def _checked(spec: ElementSpec, elements: Iterator[Any], rows: Rows | None) -> Iterator[Any]:
    if isinstance(rows, Block) and not any(isinstance(leaf, Ragged) for leaf in rows.leaves):
        # All rows have one type, which is not the array's dtype for objects and for text of a fixed width.
        _check(spec, spec.check, ElementSpec.of_rows(rows.structure, rows.leaves))
        yield from elements
        return
    for element in elements:
        _check(spec, partial(spec.conform, casts=False), element)
        yield element


def _check(spec: ElementSpec, check: Callable[[Any], object], value: Any) -> None:
    try:
        check(value)
    except ArgumentError as error:
        raise ArgumentError(
            f"element_spec is {spec.packed}, as inferred by trying functions on sample elements, and an "
            f"element is {error}. Make elements alike with map, or do not ask for element_spec"
        ) from None


def _elements(lane: Lane, places: Sequence[int], caller: Caller, empty: Callable[[], Any] | None) -> Iterator[Any]:
    if _is_contiguous(lane, places):
        yield from caller.result(lane.ref.handle).elements(places[0], places[-1] + 1)  # type: ignore[union-attr]
        return
    for place in places:
        if place >= 0:
            yield from caller.result(lane.ref.handle).elements(place, place + 1)  # type: ignore[union-attr]
        elif empty is not None:
            yield empty()


def _is_contiguous(lane: Lane, places: Any) -> bool:
    if lane.ref is None or not len(places):
        return False
    return bool(min(places[0], places[-1]) >= 0 and places[-1] - places[0] == len(places) - 1)


def iterate(caller: Caller, primitive: Primitive, iteration: int) -> ElementIterator:
    """Return an iterator over the elements of a pipeline in one iteration, which no operation counts as a pass."""
    return ElementIterator(lambda: caller, primitive, StreamPosition((iteration,), []))


def first_elements(primitive: Primitive, number: int) -> list[Any]:
    """Return the first elements of a pipeline, computed in this thread; no operation counts it as a pass."""
    elements = iterate(Synchronous(), primitive, 0)
    try:
        return list(itertools.islice(elements, number))
    finally:
        elements.close()


def good_elements(elements: Iterator[Any], number: int) -> Iterator[Any]:
    """Yield those of the next elements that do not fail; if all fail, raise the error of the first."""
    num_computed, first_error = 0, None
    for _ in range(number):
        try:
            element = next(elements)
        except StopIteration:
            break
        except Exception as error:
            first_error = first_error or error
            if not is_of_element(error):
                break
        else:
            num_computed += 1
            yield element
    if first_error is not None and not num_computed:
        raise first_error


def rows_of(primitive: Primitive, caller: Caller | None = None, epoch: Epoch = (0,)) -> Iterator[Rows]:
    """Yield the elements as rows, computed by a caller, or in this thread if None; the caller is closed at the end."""
    return rows_by(Interpreter(caller or Synchronous()), primitive, StreamPosition(epoch, []))


def rows_by(
    interpreter: Interpreter,
    primitive: Primitive,
    start: StreamPosition,
    empty: Callable[[], tuple[Structure, Leaves]] | None = None,
) -> Iterator[Rows]:
    """Yield the elements of a pass as rows; the interpreter is closed at the end.

    Parameters
    ----------
    interpreter, primitive, start
        The interpreter, the primitive that it runs, and the position at which the pass begins.
    empty
        Creates an element without rows, if the pipeline can have such elements; if None they are left out.
    """
    try:
        builder, caller = BundleBuilder(interpreter, primitive, start), interpreter.caller
        for bundle in builder:
            (lane,) = bundle.lanes
            places = [place for place in lane.places if place >= 0]
            rows: Rows | None = None
            if lane.ref is not None:
                # Elements without rows are in no block; the others are consecutive in theirs.
                rows = caller.result(lane.ref.handle)
                first, stop = places[0], places[-1] + 1
                rows = rows if stop - first == len(rows) else rows.slice(first, stop)
            if empty is not None and len(places) < len(lane.places):
                structure, leaves = empty()
                items = iter([] if rows is None else map(rows.item, range(len(rows))))
                rows = Bundle(structure, [leaves if place < 0 else next(items) for place in lane.places])
            if rows is not None:
                yield rows
    finally:
        interpreter.close()


# --- internals of iterators, also of distributed ones ---


def times_of(iterator: Any) -> StepTimes:
    """Return the times of the steps of an iterator."""
    return iterator._times  # type: ignore[no-any-return]


def nodes_of(iterator: Any) -> list[Node]:
    """Return the last operation of each pipeline of an iterator; none if it does not know."""
    return iterator._nodes  # type: ignore[no-any-return]


def caller_of(iterator: Any) -> Caller:
    """Return the caller that computes the elements of an iterator."""
    return iterator._caller  # type: ignore[no-any-return]
