"""How far input pipelines have come whose workers alone can tell: told to those who ask at the end of their own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

# Pipelines of calls that are remembered.
_MOST_KNOWN: Final = 1024

# Which call's distributed dataset, and which of its input pipelines.
Which: TypeAlias = tuple[str, int]


@dataclass(frozen=True)
class Unseen:
    """An input pipeline that only its own worker can tell of.

    Parameters
    ----------
    worker
        The address of the worker.
    number
        Which of the input pipelines it is.
    replicas
        The numbers of those it serves.
    """

    worker: str
    number: int
    replicas: tuple[int, ...]


class News(NamedTuple):
    """What is known of a pass over a pipeline.

    Parameters
    ----------
    num_steps
        Steps that are known.
    uneven
        Of those that were asked for, the ones in which some replica has no rows, and which have.
    is_over
        Whether there are no more.
    """

    num_steps: int
    uneven: dict[int, list[bool]]
    is_over: bool

    def tells(self, step: int) -> bool:
        """Whether a step is known, or that there is none."""
        return self.is_over or step < self.num_steps


@dataclass
class _Pass:
    num_steps: int = 0
    uneven: dict[int, list[bool]] = field(default_factory=dict)
    is_over: bool = False


@dataclass
class _Known:
    passes: dict[int, _Pass] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    is_left: bool = False


class Board:
    """What the pipelines of one worker have come to."""

    def __init__(self) -> None:
        self._known: OrderedDict[Which, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, which: Which, iteration: int, first: int, full: Any, *, is_over: bool = False) -> None:
        """Tell in which steps from one on each replica has rows, as ``(step, replica)``; also of known ones again."""
        with self._lock:
            found = self._of(which).passes.setdefault(iteration, _Pass())
            for number in np.flatnonzero(~full.all(axis=1)).tolist():
                found.uneven[first + number] = full[number].tolist()
            found.num_steps = max(found.num_steps, first + len(full))
            found.is_over |= is_over

    def leave(self, which: Which, lane: int, num_lanes: int) -> None:
        """Tell that one of so many replicas here takes no further part; with the last the pipeline is over."""
        with self._lock:
            found = self._of(which)
            found.left.add(lane)
            found.is_left = len(found.left) >= num_lanes

    def since(self, which: Which, iteration: int, first: int) -> News:
        """What is known of the steps from one on."""
        with self._lock:
            known = self._known.get(which, _Known())
            found = known.passes.get(iteration, _Pass())
            uneven = {step: full for step, full in found.uneven.items() if step >= first}
            return News(found.num_steps, uneven, found.is_over or known.is_left)

    def _of(self, which: Which) -> _Known:
        found = self._known.get(which)
        if found is None:
            found = self._known[which] = _Known()
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return found


# Gives what is known of a pipeline of a pass, from a step on: with that step, or that there is none; waits for it.
Ask: TypeAlias = Callable[[Unseen, Which, int, int], News]


@dataclass(frozen=True)
class Outside:
    """What the workers of one loop tell each other.

    Parameters
    ----------
    token
        Which call's distributed dataset.
    number
        Which of its input pipelines is read here.
    board
        Where this worker's are told of.
    ask
        Asks others.
    """

    token: str
    number: int
    board: Board
    ask: Ask

    def add(self, iteration: int, first: int, full: Any, *, is_over: bool = False) -> None:
        """As of `Board`, of the pipeline that is read here."""
        self.board.add((self.token, self.number), iteration, first, full, is_over=is_over)

    def leave(self, lane: int, num_lanes: int) -> None:
        """As of `Board`, of the pipeline that is read here."""
        self.board.leave((self.token, self.number), lane, num_lanes)


class Told:
    """In which steps a pipeline of another worker has rows, as that tells."""

    def __init__(self, unseen: Unseen, iteration: int, outside: Outside) -> None:
        self._unseen = unseen
        self._iteration = iteration
        self._outside = outside
        self._news = News(0, {}, False)

    def tells(self, step: int) -> bool:
        """Whether a step is known, or that there is none."""
        return self._news.tells(step)

    def num_told(self, first: int, most: int) -> int:
        """How many steps from one on are known, at most so many."""
        return most if self._news.is_over else min(self._news.num_steps - first, most)

    def ask(self, step: int) -> None:
        """Have a step known; waits for the other worker to come to it, or to its end."""
        which = self._outside.token, self._unseen.number
        self._news = self._outside.ask(self._unseen, which, self._iteration, step)

    def full(self, first: int, stop: int) -> Any:
        """Whether each of some steps that are known has rows for each of its replicas, as ``(step, replica)``."""
        found = np.zeros((stop - first, len(self._unseen.replicas)), bool)
        found[: max(self._news.num_steps - first, 0)] = True
        for step, full in self._news.uneven.items():
            if first <= step < stop:
                found[step - first] = full
        return found

    def is_over(self, step: int) -> bool:
        """Whether there are no rows from a step on that is known."""
        return self._news.is_over and step >= self._news.num_steps
