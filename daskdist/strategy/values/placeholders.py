"""`Placeholders` of asynchronous values in nests, which are filled on the workers that hold the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn

import optree

from daskdist.core.failing.short_traceback import with_short_traceback
from daskdist.errors import ArgumentError, ClusterError, CollectiveError
from daskdist.execute.caller import Handle
from daskdist.strategy.backend import ResultSource
from daskdist.strategy.values.device_arrays import host_array
from daskdist.strategy.values.extract import Applied, Extract, Remote
from daskdist.strategy.values.flat import LEAVES


class PendingValue:
    """The state of the result of a call, which may or may not be in this process.

    Parameters
    ----------
    caller
        The source of the result.
    source
        A part of a call's result, or a function of other values.
    """

    __slots__ = ("caller", "known", "source")

    def __init__(self, caller: ResultSource, source: Remote | Applied) -> None:
        self.caller = caller
        # None once the value is known.
        self.source: Remote | Applied | None = source
        # The value, once it is in this process.
        self.known: Any = None


class NoSingleValue:
    """Base of objects that raise an error when used as an array or a number, and say how to get one."""

    __slots__ = ()

    def _refuse(self, operation: str) -> NoReturn:
        raise TypeError(
            f"{operation}: a {type(self).__name__} has one value for each replica. Combine them into one with "
            "strategy.reduce(...) or strategy.gather(...), or get all of them with strategy.local_results(...)"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self._refuse("numpy.asarray")

    def __float__(self) -> float:
        self._refuse("float")

    def __int__(self) -> int:
        self._refuse("int")

    def __complex__(self) -> complex:
        self._refuse("complex")

    def __format__(self, spec: str) -> str:
        if spec:
            self._refuse(f"format with {spec!r}")
        return str(self)


class Placeholder:
    """The place of a part in a nest, filled in later."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return placeholder_of, (self.number,)


@lru_cache(maxsize=256)
def placeholder_of(number: int) -> Placeholder:
    """Return the placeholder of a number; cached, as a pickle stores one object once."""
    return Placeholder(number)


class Expression:
    """The place of a function of parts in a nest."""

    __slots__ = ("args", "function", "kwargs")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs

    def __reduce__(self) -> tuple[Any, ...]:
        return Expression, (self.function, self.args, self.kwargs)


@dataclass(slots=True)
class Placeholders:
    """The placeholders in nests, and the results that fill them in another process.

    Parameters
    ----------
    handles
        The results, without duplicates.
    picks
        For each placeholder, the index of its result and the extraction from it.
    """

    handles: list[Handle] = field(default_factory=list)
    picks: list[tuple[int, Extract]] = field(default_factory=list)
    # The worker that computes each result, if known.
    workers: list[str | None] = field(default_factory=list)
    caller: ResultSource | None = None
    # The worker of the first result.
    worker: str | None = None
    _numbers: dict[int, int] = field(default_factory=dict)

    def template(self, nest: Any) -> Any:
        """Return the nest with placeholders and expressions for its asynchronous values."""
        if isinstance(nest, PendingValue):
            return self.leaf(nest)
        return optree.tree_map(self.leaf, nest, none_is_leaf=True)

    def leaf(self, leaf: Any) -> Any:
        """Return a leaf, or the placeholder or expression for it."""
        if not isinstance(leaf, PendingValue):
            if type(leaf) is Remote:
                return self.add(leaf.handle, leaf.pick)
            if isinstance(leaf, NoSingleValue):
                raise ArgumentError("a PerReplica was given where a single value is needed; pass it to run or reduce")
            return leaf
        source = leaf.source
        if source is None:
            return leaf.known
        if self.caller is None or leaf.caller.defers:
            # A caller that defers calls accepts the handles of others too.
            self.caller = leaf.caller
        if isinstance(source, Applied):
            return Expression(source.function, tuple(map(self._argument, source.args)), source.kwargs)
        self.worker = self.worker or source.worker
        return self.add(source.handle, source.pick, source.worker)

    def _argument(self, arg: Any) -> Any:
        # The operand may be an index: a tuple with asynchronous parts.
        kind = type(arg)
        return kind(map(self._argument, arg)) if kind is tuple or kind is list else self.leaf(arg)

    def add(self, handle: Handle, pick: Any, worker: str | None = None) -> Placeholder:
        """Return the placeholder for a part of the result of a worker."""
        handles, picks = self.handles, self.picks
        place = len(handles)
        number = self._numbers.setdefault(id(handle), place)
        if number == place:
            handles.append(handle)
            self.workers.append(worker)
        placeholder = placeholder_of(len(picks))
        picks.append((number, pick))
        return placeholder


def filled(results: Sequence[Any], picks: Sequence[tuple[int, Extract]], nest: Any) -> Any:
    """Return a template with its placeholders filled from results."""
    parts = [pick(results[number]) for number, pick in picks]
    return fill(nest, parts)


def filled_on_host(results: Sequence[Any], picks: Sequence[tuple[int, Extract]], value: Any) -> Any:
    """Return a filled template with device arrays as NumPy arrays, since Dask may send them anywhere."""
    return host_array(filled(results, picks, value))


def fill(nest: Any, parts: Sequence[Any]) -> Any:
    """Return a template with its placeholders replaced by parts."""
    kind = type(nest)
    if kind is Placeholder:
        return parts[nest.number]
    if kind is Expression:
        # Operations on asynchronous values use NumPy arrays on every machine.
        return nest.function(*[host_array(fill(arg, parts)) for arg in nest.args], **nest.kwargs)
    if kind is list:
        return [fill(child, parts) for child in nest]
    if kind in LEAVES:
        return nest
    return optree.tree_map(
        lambda leaf: fill(leaf, parts) if isinstance(leaf, (Placeholder, Expression)) else leaf, nest, none_is_leaf=True
    )


@with_short_traceback
def results_of(values: Sequence[Any]) -> list[Any]:
    """Return several values; wait for the asynchronous ones and fetch them together."""
    while True:
        placeholders = Placeholders()
        template = placeholders.template(list(values))
        if placeholders.caller is None:
            break
        number = placeholders.caller.num_made_again
        try:
            _wait_for_steps(values)
            template = fill(template, _fetch(placeholders, placeholders.caller))
            break
        except (ClusterError, CollectiveError):
            if not placeholders.caller.made_again_since(number):
                raise
    for value, result in zip(values, template, strict=True):
        if isinstance(value, PendingValue):
            value.known, value.source = result, None
    return list(template)


def _wait_for_steps(values: Sequence[Any]) -> None:
    # A step that failed on one replica has no results.
    seen: set[int] = set()
    for value in values:
        if isinstance(value, PendingValue) and isinstance(value.source, Remote):
            step = value.source.step
            if step and id(step) not in seen:
                seen.add(id(step))
                value.caller.wait_for_step(step)


def _fetch(placeholders: Placeholders, caller: ResultSource) -> list[Any]:
    # A small part of a large result is extracted on its worker, so that the result is not transferred.
    at_worker: dict[int, list[int]] = {}
    for place, (number, pick) in enumerate(placeholders.picks):
        if pick.is_small_part:
            at_worker.setdefault(number, []).append(place)
    handles, workers = list(placeholders.handles), placeholders.workers
    for number, places in at_worker.items():
        picks = [placeholders.picks[place][1] for place in places]
        handles[number] = caller.call(pick_all, [handles[number]], picks, worker=workers[number], name="pick")
    results = caller.results(handles)
    parts: list[Any] = [None if number in at_worker else pick(results[number]) for number, pick in placeholders.picks]
    for number, places in at_worker.items():
        for place, part in zip(places, results[number], strict=True):
            parts[place] = part
    return parts


def pick_all(results: Sequence[Any], picks: Sequence[Extract]) -> list[Any]:
    """Return several parts of a single result."""
    return [pick(results[0]) for pick in picks]
