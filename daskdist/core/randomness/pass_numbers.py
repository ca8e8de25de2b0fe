"""The pass that a random operation is in: what it draws depends on it.

Each operation that draws at random counts the iterations over whatever contains it, in the process of the program. An
iteration asks all of them for their numbers when it is opened (`daskdist.passes.numbering.begin_pass`), and hands these
on as the first item of its `Epoch`, to wherever it runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from daskdist.core.primitive import Epoch
from daskdist.core.randomness.seed import current_call


class PassCounter:
    """The number of iterations that were begun over an operation.

    All copies of the operation, in all datasets made from it, share one counter. A pickled copy counts for itself,
    from 0. Within the call of a user's function, iterations over an operation that was made before are not counted:
    how many there were depends on where, and how often, such calls were made. Their number is one of the call.
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
        """Give no number below this one any more."""
        with self._lock:
            self._next = max(self._next, number)

    def __reduce__(self) -> tuple[Any, ...]:
        return PassCounter, ()

    def __dask_tokenize__(self) -> object:
        return "PassCounter"


class JointCounter(PassCounter):
    """The number of iterations that were begun over several operations, which all of them count.

    Parameters
    ----------
    counters
        Those of the operations.

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
    """Tells an operation which pass it is in.

    Parameters
    ----------
    counter
        Counts its iterations.
    place
        Its place among the operations of a pipeline that count their passes, the most upstream first. Set by
        `daskdist.passes.numbering.numbered`, before anything is rewritten.
    stream
        Keeps apart what operations draw that share one seed because none was given to them.
    start
        The number of the pass that iterations count from, of an operation in a dataset that a function has made.
    """

    counter: PassCounter = field(default_factory=PassCounter)
    place: int = 0
    stream: int = 0
    start: int = 0

    def of(self, epoch: Epoch) -> tuple[int, ...]:
        """Return the pass of the operation: its own number, then those of enclosing repetitions, outermost first.

        >>> PassNumber(place=1).of(((4, 7), 2)), PassNumber(place=1).of((3, 2))
        ((7, 2), (3, 2))
        """
        numbers, *repetitions = epoch
        number = numbers if isinstance(numbers, int) else numbers[self.place]
        return (number + self.start, *repetitions)


class ResumedPasses:
    """The passes of operations that keep what comes, where one was resumed half way.

    What came before is not there then, so nothing is kept of such a pass: the next one makes all of it again, and is
    to come in the same order.
    """

    def __init__(self) -> None:
        self._parts: dict[Hashable, Epoch] = {}

    def note(self, key: Hashable, epoch: Epoch, places: Sequence[int]) -> None:
        """Note the pass that was resumed, of the operations at those places."""
        self._parts[key] = part_of(epoch, places)

    def instead_of(self, key: Hashable, epoch: Epoch, places: Sequence[int]) -> Epoch:
        """Return the pass in which the operations at those places are to be: the one that was resumed, if one was."""
        part = self._parts.get(key)
        return epoch if part is None else with_part(epoch, places, part)

    def __reduce__(self) -> tuple[Any, ...]:
        # In another process none was.
        return ResumedPasses, ()

    def __dask_tokenize__(self) -> object:
        return "ResumedPasses"


def later(epoch: Epoch, number: int) -> Epoch:
    """Return the epoch whose operations are all so many passes further.

    >>> later(((4, 7), 2), 1)
    ((5, 8), 2)
    """
    numbers, *repetitions = epoch
    if isinstance(numbers, int):
        return (numbers + number, *repetitions)
    return (tuple(each + number for each in numbers), *repetitions)


def part_of(epoch: Epoch, places: Sequence[int]) -> Epoch:
    """Return the epoch of some operations only, in that order, as `with_part` takes it."""
    numbers, *repetitions = epoch
    return (numbers if isinstance(numbers, int) else tuple(numbers[place] for place in places), *repetitions)


def with_part(epoch: Epoch, places: Sequence[int], part: Epoch) -> Epoch:
    """Return the epoch in which some operations are in the pass that `part_of` gave.

    >>> with_part(((4, 7, 9),), [1, 2], part_of(((0, 1), 5), [0, 1]))
    ((4, 0, 1), 5)
    """
    numbers, *repetitions = part
    if isinstance(numbers, int) or isinstance(epoch[0], int):
        return part
    found = list(epoch[0])
    for place, number in zip(places, numbers, strict=True):
        found[place] = number
    return (tuple(found), *repetitions)
