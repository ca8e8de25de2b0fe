"""The messages between a consumer and the worker of a task that it reads; they go over a `Link`, within `OfTask`.

================  =================  ==================================  ===============================================
message           is sent by         is answered by                      if the link is lost
================  =================  ==================================  ===============================================
`JoinTask`        the consumer       `Room`, `SentRows`, an end          it joins again, with what it holds and has used
`Room`            the consumer       `Room`: it is used from now on      the next `JoinTask` has it
`Used`            the consumer       nothing                             the next `JoinTask` has them
`GivenBack`       the consumer       nothing                             the worker knows by the next `JoinTask`
`SentRows`        the worker         `Used`, later                       what has not arrived is sent again
`Recall`          the worker         `GivenBack`                         the worker asks again
`Withdraw`        the worker         nothing                             the worker says so again
`Confirm`         the worker         nothing                             the consumer reports the elements again
`Computing`       the worker         nothing                             nothing: it is a sign of life
`Passed`          the worker         nothing                             nothing: it is a line in the log
`End`             the worker         nothing                             the worker sends it again
`Failure`         the worker         nothing: the consumer fails         the worker sends it again
================  =================  ==================================  ===============================================

Elements of a task are numbered, and meant by pairs of a first number and the one after the last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from daskdist.core.block import Rows
from daskdist.service.intervals import Pairs


class OfTask(NamedTuple):
    """A message about an attempt of a task; those about earlier attempts are ignored."""

    task: str
    attempt: int
    message: Any


class JoinTask(NamedTuple):
    """The request for elements.

    Parameters
    ----------
    consumer
        The arguments of `daskdist.service.worker.delivery.Consumer`.
    held
        The elements that it has from before and has not used up.
    done
        Those that it has used, as far as the dispatcher may not know.
    """

    consumer: dict[str, Any]
    held: Pairs
    done: Pairs


class Room(NamedTuple):
    """The number of elements that may be sent to a consumer and not acknowledged."""

    num_elements: int


class Used(NamedTuple):
    """Elements that a consumer has used."""

    pairs: list[tuple[int, int]]


class GivenBack(NamedTuple):
    """Elements that a consumer gives back after `Recall`."""

    pairs: Pairs


class SentRows(NamedTuple):
    """Elements, and the number of the first."""

    first: int
    rows: Rows


class Computing(NamedTuple):
    """The worker computes elements that the consumer waits for."""


class Recall(NamedTuple):
    """The consumer is to give back the elements that it has not passed to its program."""

    consumer: str


class Withdraw(NamedTuple):
    """The consumer was away, and is to drop elements that went to others meanwhile."""

    consumer: str
    pairs: tuple[tuple[int, int], ...]


class Confirm(NamedTuple):
    """Elements that are recorded at the worker as used, so that the consumer need not report them again."""

    consumer: str
    pairs: tuple[tuple[int, int], ...]


class Passed(NamedTuple):
    """The number of elements that the consumer missed because it was too slow."""

    consumer: str
    num_elements: int


class End(NamedTuple):
    """The consumer gets no more elements from this task."""

    consumer: str
