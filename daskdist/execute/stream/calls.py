"""Functions in the form that callers need: the first argument is the list of the handles' results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from daskdist.core.block import Rows, merge
from daskdist.core.failing.failed_elements import (
    NO_ELEMENT_FAILED,
    Carried,
    FailedBeforeError,
    FailedElement,
    LeftOut,
    TryEachCarried,
    bundle,
    failed_of,
    raw_item,
)
from daskdist.core.primitive import Exhausted, NotReady, Split
from daskdist.core.selection.runs import RunQueue
from daskdist.errors import ArgumentError


@dataclass(frozen=True)
class ReadGraphValue:
    """A call that reads a split from a value of a Dask graph."""

    function: Callable[..., Any]

    def __call__(self, values: Sequence[Any], split: Split) -> Any:
        return self.function(split, values[0])


@dataclass(frozen=True)
class ReadKeptSplit:
    """A call that reads a split whose payload is kept on a cluster.

    The split is passed without its payload; ``divide`` selects the part to read, or is None to read all.
    """

    function: Callable[[Split], Any]
    divide: Callable[[Split, int, int], Split] | None

    def __call__(self, values: Sequence[Any], split: Split, start: int, stop: Any) -> Any:
        split = replace(split, payload=values[0])
        return self.function(split if self.divide is None else self.divide(split, start, stop))


@dataclass(frozen=True)
class CallWithCarry:
    """A call of a function of rows and a carried value."""

    function: TryEachCarried
    name: str

    def __call__(
        self,
        values: Sequence[Any],
        chain: str,
        call: int,
        left_out: tuple[LeftOut, ...],
        failed_before: frozenset[int] | None,
        num_passed: NumPassed,
        num_before: int,
        num_rows: int | None,
    ) -> tuple[Rows, Carried]:
        """Return the results and the value to carry on.

        Parameters
        ----------
        values
            The rows and the carried value.
        chain, call, left_out
            As in `TryEachCarried`.
        failed_before
            The numbers of other elements that failed when the position was taken; None if the call was not over then.
        num_passed
            The number of the chain's first elements that may be before the position.
        num_before
            The number of its elements before those of this call.
        num_rows
            The number of results before the position was taken, if that is known.
        """
        source_rows, carried = values
        rows, carried = self.function(source_rows, carried, chain, call, left_out)
        if num_rows is not None and len(rows) != num_rows:
            raise changed_length(self.name, rows.label or "some data", num_rows, len(rows))
        if failed_before is None:
            return rows, carried
        may_fail = failed_before | {element.number for element in left_out}
        for number, failed in failed_of(rows):
            if number < num_passed.number - num_before and number not in may_fail:
                raise fails_now(self.name, failed.error) from failed.error
        return rows, carried


@dataclass
class NumPassed:
    """The number of a chain's first elements that may be before the position from which it continues."""

    number: int = 0


@dataclass(frozen=True)
class GetItem:
    """A call that returns one item of a result."""

    number: int

    def __call__(self, values: Sequence[Any]) -> Any:
        return values[0][self.number]


@dataclass(frozen=True, eq=False)
class Constant:
    """A call that returns a constant, which may not be hashable."""

    value: Any

    def __call__(self) -> Any:
        return self.value


@dataclass(frozen=True)
class OfLength:
    """A call that returns rows, checked to be as many as before a position was taken."""

    name: str
    num_rows: int

    def __call__(self, values: Sequence[Any]) -> Rows:
        rows: Rows = values[0]
        if len(rows) == self.num_rows:
            return rows
        for _, failed in failed_of(rows):
            raise fails_now(self.name, failed.error) from failed.error
        raise changed_length(self.name, rows.label or "some data", self.num_rows, len(rows))


@dataclass(frozen=True)
class RepeatedCall:
    """A function of rows that did not fail for them before a position was taken."""

    function: Callable[[Rows], Any]
    name: str

    def __call__(self, rows: Rows) -> Any:
        try:
            return self.function(rows)
        except Exception as error:
            raise fails_now(self.name, error) from error


def changed_length(name: str, label: str, num_before: int, num_now: int) -> ArgumentError:
    """Return the error for a call that makes another number of elements than before a position was taken."""
    return ArgumentError(
        f"load_state_dict: {name} made {num_before} elements of {label} before the position was taken and makes "
        f"{num_now} now; the data or a function has changed"
    )


def fill_again(waiting: RunQueue, pull: Callable[[], Any], num_elements: int, name: str) -> None:
    """Fill a queue with the elements of a call that was made before a position was taken.

    Without one of them, all later elements would take the places of others.
    """
    try:
        waiting.fill(pull, num_elements)
    except (ArgumentError, *NO_ELEMENT_FAILED, FailedBeforeError, NotReady):
        raise
    except Exhausted:
        raise ArgumentError(
            f"load_state_dict: {name} had more elements before the position was taken than there are now; the data or "
            "a function has changed"
        ) from None
    except Exception as error:
        raise fails_now(name, error) from error


def fails_now(name: str, error: Exception) -> ArgumentError:
    """Return the error for an element that a call needs, and that did not fail before a position was taken."""
    return ArgumentError(
        f"load_state_dict: {name} needs an element that it had before the position was taken and that fails "
        f"now: {error}"
    )


def pulled(values: Sequence[Any], num_rows: int, first_needed: int | None = None) -> Rows:
    """Return the next rows of a pass that runs on a worker; called after the call for the rows before."""
    rows: Rows = values[0].pull(num_rows, first_needed)
    return rows


@dataclass(frozen=True)
class PulledAgain:
    """A call that returns the rows of a pass on a worker that it returned before a position was taken.

    Parameters
    ----------
    name
        The name of the operation, for messages.
    left_out, failed
        The numbers of rows that failed: before the position, and after it.
    first
        The number of rows of the calls before; None if these are made, too.
    """

    name: str
    left_out: frozenset[int]
    failed: frozenset[int]
    first: int | None = None

    def __call__(self, values: Sequence[Any], num_rows: int) -> Rows:
        rows = pulled_exactly(values, num_rows) if self.first is None else values[0].pull_from(self.first, num_rows)
        failed_now = dict(failed_of(rows))
        if values[0].carries_state:
            # The pass runs from its start. Later elements depend on what failed in it.
            for number in failed_now.keys() - self.left_out - self.failed:
                raise fails_now(self.name, failed_now[number].error) from failed_now[number].error
            if self.left_out - failed_now.keys():
                raise ArgumentError(
                    f"load_state_dict: an element of {self.name} failed before the position was taken and does not "
                    "fail now; scan would count it in later results"
                )
        if not self.left_out:
            return rows
        items = [
            FailedElement(FailedBeforeError(), "", (0, k)) if k in self.left_out else raw_item(rows, k)
            for k in range(len(rows))
        ]
        return bundle(rows.structure, items, rows.label)


def pulled_exactly(values: Sequence[Any], num_rows: int, first_needed: int | None = None) -> Rows:
    """Return so many rows of a pass that runs on a worker; fewer at its end."""
    parts: list[Rows] = []
    while num_rows > 0:
        parts.append(pulled(values, num_rows, first_needed))
        if not len(parts[-1]):
            break
        num_rows -= len(parts[-1])
    return parts[0] if len(parts) == 1 else merge(parts, parts[0])
