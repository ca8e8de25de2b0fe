"""The messages between a consumer and the worker of a task that it reads; they go over a `Link`, within `OfTask`.

================  =================  ==================================  ===============================================
message           is sent by         is answered by                      if the link breaks, it is opened again; if the
                                                                         worker is lost
================  =================  ==================================  ===============================================
`JoinTask`        the consumer       an end, if there is nothing left    another worker gets it, with what the consumer
                                                                         holds and has used
`Ask`             the consumer       `SentRows`, an end                  the next `JoinTask` has what was used
`SentRows`        the worker         `Ask`, once they are used           another worker produces them again, but for
                                                                         those that have arrived
`Computing`       the worker         nothing                             nothing: it is a sign of life
`Passed`          the worker         nothing                             nothing: it is a line in the log
`End`             the worker         nothing                             another worker sends it
`Failure`         the worker         nothing: the consumer fails         another worker sends it
================  =================  ==================================  ===============================================

Elements of a task are numbered, and meant by pairs of a first number and the one after the last. Those that are sent
are one consumer's until it says in its next `Ask` that they are used; if it is lost, they go to others.
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
    """The consumer takes part; it asks for elements next.

    Parameters
    ----------
    consumer
        The arguments of `daskdist.service.worker.delivery.Consumer`.
    held
        The elements that it has from earlier attempts and has not used up.
    done
        Those that it has used, as far as the dispatcher may not know.
    """

    consumer: dict[str, Any]
    held: Pairs
    done: Pairs


class Ask(NamedTuple):
    """The request for more elements, and those that the consumer has used since the last one."""

    used: Pairs
    num_elements: int


class SentRows(NamedTuple):
    """Elements, and the number of the first."""

    first: int
    rows: Rows


class Computing(NamedTuple):
    """The worker computes elements that the consumer waits for."""


class Passed(NamedTuple):
    """The number of elements that the consumer missed because it was too slow."""

    consumer: str
    num_elements: int


class End(NamedTuple):
    """The consumer gets no more elements from this task, unless another one is lost with some."""

    consumer: str
