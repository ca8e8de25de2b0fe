"""The pass number of a random operation, on which its random numbers depend.

Each random operation counts the iterations over whatever contains it, in the process of the program. An iteration takes
the numbers of all of them when it is opened (`daskdist.passes.numbering.begin_pass`), and passes them on as the first
item of its `Epoch`, wherever it runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from daskdist.core.primitive import Epoch
from daskdist.core.randomness.seed import current_call


class PassCounter:
    """A counter of the iterations over an operation.

    Notes
    -----
    All copies of the operation, in all datasets made from it, share one counter. A pickled copy counts separately, from
    0 on. Within a call of a user's function, iterations over an operation that was created before do
    not count, because their number depends on where and how often such calls are made; they have a number of the call.
    """

    def __init__(self) -> None:
        self._next = 0
        self._lock = Lock()
        call = current_call()
        self._made_in = None if call is None else call.identity

    def draw(self) -> int:
        """Return the number of a new iteration."""
        number = self._of_call()
        if number is not None:
            return number
        with self._lock:
            self._next += 1
            return self._next - 1

    def _of_call(self) -> int | None:
        call = current_call()
        return None if call is None or call.identity is self._made_in else call.draw()

    def skip_to(self, number: int) -> None:
        """Return no number below this one from now on."""
        with self._lock:
            self._next = max(self._next, number)

    def __reduce__(self) -> tuple[Any, ...]:
        return PassCounter, ()

    def __dask_tokenize__(self) -> object:
        return "PassCounter"


class JointCounter(PassCounter):
    """A counter of iterations over several operations, each of which counts them too.

    Parameters
    ----------
    counters
        The counters of the operations.

    >>> one, other = PassCounter(), PassCounter()
    >>> one.draw(), one.draw(), JointCounter([one, other]).draw(), other.draw()
    (0, 1, 2, 3)
    """

    def __init__(self, counters: Sequence[PassCounter]) -> None:
        super().__init__()
        self._counters = tuple(counters)

    def draw(self) -> int:
        of_call = self._of_call()
        if of_call is not None:
            return of_call
        number = max([super().draw(), *[counter.draw() for counter in self._counters]])
        self.skip_to(number + 1)
        return number

    def skip_to(self, number: int) -> None:
        super().skip_to(number)
        for counter in self._counters:
            counter.skip_to(number)


@dataclass(frozen=True)
class PassNumber:
    """The pass number of an operation in an epoch.

    Parameters
    ----------
    counter
        Counts the iterations over the operation.
    place
        Its place among the operations of a pipeline that count their passes, the most upstream first. Set by
        `daskdist.passes.numbering.numbered`, before anything is rewritten.
    stream
        Distinguishes operations that share a seed because the user gave them none.
    start
        The number of its first pass, from which the counter counts: that of `Dataset.at_epoch`, and for an operation in
        a dataset that a function returned also the pass of that function.
    is_at_epoch
        Whether `Dataset.at_epoch` gave it this number and its counter.
    """

    counter: PassCounter = field(default_factory=PassCounter)
    place: int = 0
    stream: int = 0
    start: int = 0
    is_at_epoch: bool = False

    def of(self, epoch: Epoch) -> tuple[int, ...]:
        """Return the pass of the operation: its own number, then those of enclosing repetitions, outermost first.

        An epoch with one number for all operations counts from the first pass of each.

        >>> PassNumber(place=1).of(((4, 7), 2)), PassNumber(place=1, start=5).of((3, 2))
        ((7, 2), (8, 2))
        """
        numbers, *repetitions = epoch
        return (numbers + self.start if isinstance(numbers, int) else numbers[self.place], *repetitions)


class ResumedPasses:
    """The resumed passes of operations that store elements.

    The earlier elements of a resumed pass are missing, so it is not stored: the next pass computes all of them again,
    and must have the same order.
    """

    def __init__(self) -> None:
        self._parts: dict[Hashable, Epoch] = {}

    def note(self, key: Hashable, part: Epoch) -> None:
        """Record a resumed pass, as returned by `part_of`."""
        self._parts[key] = part

    def instead_of(self, key: Hashable, epoch: Epoch, places: Sequence[int]) -> Epoch:
        """Return the epoch with the resumed pass, if there is one, for the operations at some places."""
        part = self._parts.get(key)
        return epoch if part is None else with_part(epoch, places, part)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has no resumed passes.
        return ResumedPasses, ()

    def __dask_tokenize__(self) -> object:
        return "ResumedPasses"


def later(epoch: Epoch, number: int) -> Epoch:
    """Return the epoch with all operations ``number`` passes later.

    >>> later(((4, 7), 2), 1)
    ((5, 8), 2)
    """
    numbers, *repetitions = epoch
    if isinstance(numbers, int):
        return (numbers + number, *repetitions)
    return (tuple(pass_number + number for pass_number in numbers), *repetitions)


def part_of(epoch: Epoch, places: Sequence[int]) -> Epoch:
    """Return the epoch of some operations only, in that order, for `with_part`."""
    numbers, *repetitions = epoch
    return (numbers if isinstance(numbers, int) else tuple(numbers[place] for place in places), *repetitions)


def with_part(epoch: Epoch, places: Sequence[int], part: Epoch) -> Epoch:
    """Return the epoch with some operations in the pass that `part_of` returned.

    >>> with_part(((4, 7, 9),), [1, 2], part_of(((0, 1), 5), [0, 1]))
    ((4, 0, 1), 5)
    """
    numbers, *repetitions = part
    if isinstance(numbers, int) or isinstance(epoch[0], int):
        return part
    pass_numbers = list(epoch[0])
    for place, number in zip(places, numbers, strict=True):
        pass_numbers[place] = number
    return (tuple(pass_numbers), *repetitions)
