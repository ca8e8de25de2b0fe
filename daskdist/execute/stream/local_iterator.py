"""A pipeline's elements in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, Final

from daskdist.core.array_pool import pooled_empty
from daskdist.core.block import Block, Bundle, Rows, writable_element
from daskdist.core.failures import ReportedFailures, is_of_element
from daskdist.core.finalizer import Finalizer
from daskdist.core.primitive import Epoch, Exhausted, Primitive
from daskdist.core.ragged import Ragged
from daskdist.core.short_traceback import shortened
from daskdist.core.spec import DatasetSpec, ElementSpec
from daskdist.core.structure import Leaves, Structure
from daskdist.errors import ArgumentError, UserFunctionError
from daskdist.execute.caller import Caller
from daskdist.execute.callers.now import Now
from daskdist.execute.stream.bundle_builder import BundleBuilder, Lane, StepBundle
from daskdist.execute.stream.interpreter import Interpreter, stats_of
from daskdist.execute.stream.iterator_state import StateRecorder, StateRestorer
from daskdist.execute.stream.locked import locked

logger: Final = logging.getLogger("daskdist")

_VERSION: Final = 3


@dataclass(frozen=True)
class Identity:
    """What tells positions of one pipeline from those of others.

    Parameters
    ----------
    fingerprint
        Gives its token.
    seeds
        The seeds that its operations have drawn for themselves.
    planned
        Gives what it comes down to with such seeds.
    note_pass
        Told of the pass that a position is in, so that iterations to come are later ones.
    """

    fingerprint: Callable[[], str]
    seeds: list[int]
    planned: Callable[[list[int]], Primitive]
    note_pass: Callable[[Epoch], None]


class ElementIterator(Iterator[Any]):
    """The elements of a pipeline, in order, brought here.

    Several threads may take elements from one iterator: each element goes to exactly one of them.

    Parameters
    ----------
    caller
        Who makes the calls; closed at the end, or when the iterator is let go of.
    primitive
        What the pipeline comes down to.
    epoch
        Which pass: the order of a shuffle depends on it.
    empty
        Makes an element without rows, where a pipeline can have such.
    budget_bytes
        Bytes that may be read ahead; the setting ``window-bytes`` if None.
    identity
        Tells positions of this pipeline from those of others.
    is_writable
        Whether arrays that cannot be written into are copied.
    told_spec
        Gives the spec that the elements were said to have, which they are held against; None where nobody asked for it.
    """

    def __init__(
        self,
        caller: Caller,
        primitive: Primitive,
        epoch: Epoch,
        empty: Callable[[], Any] | None = None,
        budget_bytes: int | None = None,
        identity: Identity | None = None,
        is_writable: bool = False,
        told_spec: Callable[[], ElementSpec | None] = lambda: None,
    ) -> None:
        self._interpreter = Interpreter(caller, budget_bytes=budget_bytes)
        self._primitive = primitive
        self._epoch = epoch
        self._identity = identity or Identity(lambda: "", [], lambda seeds: primitive, lambda epoch: None)
        self._builder: BundleBuilder | None = BundleBuilder(self._interpreter, primitive, epoch, empty=pooled_empty)
        self._current = _Current()
        self._empty = empty
        self._is_writable = is_writable
        self._told_spec = told_spec
        self._number = 0
        self._is_over = False
        self.lock = RLock()
        # Also where it was never begun.
        Finalizer(self, self._interpreter.close)

    def __next__(self) -> Any:
        with self.lock:
            try:
                element = self._next()
            except UserFunctionError as error:
                raise shortened(error) from error.__cause__
            self._number += 1
        return writable_element(element) if self._is_writable else element

    def _next(self) -> Any:
        builder, current, interpreter = self._builder, self._current, self._interpreter
        while builder is not None:
            if current.bundle is not None:
                with suppress(StopIteration):
                    return current.take(interpreter.caller, self._empty, self._told_spec)
            try:
                current.begin(builder.pull())
            except Exhausted:
                if interpreter.num_skipped and not self._is_over:
                    logger.warning("left out %d elements in all", interpreter.num_skipped)
                self._is_over = True
                interpreter.close()
                break
        raise StopIteration

    @locked
    def close(self) -> None:
        """Stop reading ahead and let go of what was read; nothing comes after it, and it has no position.

        A thread that is taking an element is waited for.
        """
        self._interpreter.close()
        self._builder, self._current = None, _Current()

    @property
    def num_skipped(self) -> int:
        """Elements left out so far because their computation failed."""
        return self._interpreter.num_skipped

    def stats(self) -> dict[str, Any]:
        """What came of the pass so far.

        Returns
        -------
        dict
            ``num_elements``, those handed out; ``num_skipped``, what was left out because it could not be read or
            its computation failed; and ``skipped_by_file``, of it what is of files, by their paths: the
            smallest units that are broken, such as a record, or the rest of a file where there is no telling.
        """
        return stats_of([self._interpreter], self._number)

    @locked
    def state_dict(self) -> dict[str, Any]:
        """The position: what `load_state_dict` takes to go on with exactly the elements that are still to come.

        Returns
        -------
        dict
            Data that can be pickled: numbers, and for rows that a shuffle or the like holds which rows of which
            splits those are. No data of the elements, but for what ``scan`` carries on.

        Raises
        ------
        ArgumentError
            This iterator is closed.

        Notes
        -----
        Going on reads the splits of which rows are still to come and no others; a generator is run again from
        its start.
        """
        builder = self._open_builder("state_dict")
        recorder = StateRecorder(self._interpreter)
        current = self._current
        rest = [] if current.bundle is None else [recorder.bundle(current.bundle, current.place)]
        return {
            "version": _VERSION,
            "fingerprint": self._identity.fingerprint(),
            "seeds": self._identity.seeds,
            "epoch": self._epoch,
            "number": self._number,
            "current": rest,
            "builder": recorder.builder(builder),
        }

    @locked
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position, taken of an iterator over the same pipeline, in any process.

        Raises
        ------
        ArgumentError
            It is of another pipeline, or of another version, or this iterator has begun or is closed.
        """
        builder = self._open_builder("load_state_dict")
        if self._number:
            raise ArgumentError("load_state_dict: this iterator has begun already; take a new one")
        if not isinstance(state, dict) or "fingerprint" not in state:
            raise ArgumentError(
                f"load_state_dict: expected the dict that state_dict() of an iterator gave, got {type(state).__name__} "
                f"{state!r:.80}"
            )
        if state.get("version") != _VERSION:
            raise ArgumentError(f"load_state_dict: the position is of version {state.get('version')}, not {_VERSION}")
        own = self._identity.fingerprint()
        if state["fingerprint"] != own:
            raise ArgumentError(
                f"load_state_dict: the position is of another pipeline, of fingerprint {state['fingerprint']}; "
                f"this one's is {own}"
            )
        if state["seeds"] != self._identity.seeds:
            # Operations without a seed of their own have drawn others.
            self._identity = replace(self._identity, seeds=state["seeds"])
            self._primitive = self._identity.planned(state["seeds"])
            builder.source = self._interpreter.open(self._primitive)(state["epoch"])
        resumer = StateRestorer(self._interpreter, self._primitive)
        resumer.streams([state["current"], state["builder"]])
        self._epoch, self._number = state["epoch"], state["number"]
        self._identity.note_pass(self._epoch)
        resumer.builder(builder, state["builder"])
        for lanes in reversed(state["current"]):
            builder.ready.appendleft(resumer.bundle(lanes))

    def _open_builder(self, operation: str) -> BundleBuilder:
        if self._builder is None:
            raise ArgumentError(f"{operation}: this iterator is closed; take the position of one before it is closed")
        return self._builder


class _Current:
    # What is being handed out: a bundle, the place of the next of its elements, and those from there on.
    def __init__(self) -> None:
        self.bundle: StepBundle | None = None
        self.place = 0
        self.elements: Iterator[Any] | None = None
        self.told = ReportedFailures()

    def begin(self, bundle: StepBundle) -> None:
        """Hand out another bundle."""
        self.bundle, self.place, self.elements = bundle, 0, None

    def take(self, caller: Caller, empty: Callable[[], Any] | None, told_spec: Callable[[], ElementSpec | None]) -> Any:
        """Return the next element; raise `StopIteration` where the bundle is over.

        An element that failed is passed over when its error is raised.
        """
        if self.elements is None:
            self.elements = self._from_here(caller, empty, told_spec())
        try:
            element = next(self.elements)
        except StopIteration:
            # Nothing of it is still to come, also where no other follows.
            self.bundle = self.elements = None
            raise
        except Exception as error:
            self.elements = None
            self.place += is_of_element(error)
            if self.told.is_new(error):
                raise
            return self.take(caller, empty, told_spec)
        self.place += 1
        return element

    def _from_here(self, caller: Caller, empty: Callable[[], Any] | None, spec: ElementSpec | None) -> Iterator[Any]:
        (lane,) = self.bundle.lanes  # type: ignore[union-attr]
        places = lane.places[self.place :]
        elements = _elements(lane, places, caller, empty)
        if spec is None or any(isinstance(leaf, DatasetSpec) for leaf in spec.leaves):
            return elements
        is_alike = _is_contiguous(lane, places) and _is_alike(caller.result(lane.ref.handle))  # type: ignore[union-attr]
        return _held_against(spec, elements, is_alike=is_alike)


def _is_alike(rows: Rows) -> bool:
    # Whether all elements are of one shape and dtype.
    return isinstance(rows, Block) and not any(isinstance(leaf, Ragged) for leaf in rows.leaves)


def _held_against(spec: ElementSpec, elements: Iterator[Any], *, is_alike: bool) -> Iterator[Any]:
    for number, element in enumerate(elements):
        if number == 0 or not is_alike:
            try:
                spec.conform(element)
            except ArgumentError as error:
                raise ArgumentError(
                    f"element_spec is {spec.packed}, by what functions made of the elements they were tried on, and an "
                    f"element is {error}. Make elements alike with map, or do not ask for element_spec"
                ) from None
        yield element


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
    """The elements of a pipeline in an iteration, in order, brought here; no operation counts it."""
    return ElementIterator(caller, primitive, (iteration,))


def rows_of(primitive: Primitive, caller: Caller | None = None) -> Iterator[Rows]:
    """The elements as rows, computed in this thread unless by a caller, which is closed at the end."""
    return rows_by(Interpreter(caller or Now()), primitive, (0,))


def rows_by(
    interpreter: Interpreter,
    primitive: Primitive,
    epoch: Epoch,
    empty: Callable[[], tuple[Structure, Leaves]] | None = None,
) -> Iterator[Rows]:
    """The elements of a pass as rows; the interpreter's caller is closed at the end.

    Parameters
    ----------
    interpreter, primitive, epoch
        Who runs what, and which pass.
    empty
        Makes an element without rows, where a pipeline can have such; else they are left out.
    """
    caller = interpreter.caller
    try:
        for bundle in BundleBuilder(interpreter, primitive, epoch):
            (lane,) = bundle.lanes
            places = [place for place in lane.places if place >= 0]
            rows: Rows | None = None
            if lane.ref is not None:
                # Elements without rows are in no block; the others are there one after the other.
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
