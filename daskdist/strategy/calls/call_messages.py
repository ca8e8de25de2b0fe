"""The messages between a program and its workers; they go over one `Link` for each worker of a strategy.

==================  =============================  ==================================  ===============================
message             is sent by                     is answered by                      if the link is lost
==================  =============================  ==================================  ===============================
`KeepObject`        the program, once for all      nothing                             it is sent again to others
                    calls that use the object
`MakeCall`          the program, for each call     a `CallOver` for each result        the call fails, and is made again
                                                                                       if it belongs to a pass
`PassOn`            the program, before a call     a `SentResult` between the workers  the call that needs it fails
                    that needs a result elsewhere
`DropResults`       the program, now and then      nothing                             nothing: all is dropped
`FailResult`        the program, if a result will  nothing                             nothing
                    not come
`FailData`          the program, if data will not  nothing                             nothing
                    come
`LoseWorkers`       the program, if some are lost  nothing                             nothing
`ChangeGroup`       the program, if there are      nothing                             the worker is lost, too
                    other replicas
`EndCall`           the program, to make a call    the call's `CallOver`               the call is over
                    again
`AskRunning`        the program, once a second     `Running`                           the worker is lost
`AskValues`         the program, if the worker     `Leaving`                           it is waited for some seconds
                    leaves
`CallOver`          the worker, for each result    nothing                             the worker's calls are over
`NeedsData`         the worker, while the data of  `FailData`, if the task failed or   the worker's calls are over
                    a task does not come           is gone
`NotPassedOn`       the worker, if another one     `FailResult` to that one            the worker's calls are over
                    is not reached
`Leaving`           the worker, before it ends     nothing                             its values are lost
`Running`           the worker, when asked         nothing                             nothing
==================  =============================  ==================================  ===============================
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from daskdist.strategy.calls.calls import RunningOnReplica
from daskdist.strategy.calls.outcomes import Failed
from daskdist.strategy.group import ReplicaGroup
from daskdist.strategy.values.refs import Pick


class KeepObject(NamedTuple):
    """A function or a large value: its pickle, or a NumPy array."""

    number: int
    value: Any


class MakeCall(NamedTuple):
    """A call, on some replicas of the worker or once.

    Parameters
    ----------
    number
        The number of the call, in the order of the program.
    function
        The reference of the function: ``("o", number)`` for an object, ``("p", pickle)`` for itself.
    structure, leaves
        The arguments, as in `Encoded`.
    inputs
        For each replica, or None for a call that is made once, the number of each leaf that is not in the pickle, its
        reference, and what extracts the leaf from the result. A reference is one of those above, or ``("k", key)`` for
        the data of a task, ``("r", call, replica, worker)`` for a result, which another worker sends unless it is None,
        or ``("f", failed)`` for one that will not come.
    settings
        The settings of the program.
    name
        The name of the call.
    undo_from
        The number of the first call whose changes of variables can still be undone; None if those of this call need not
        be undone.
    """

    number: int
    function: tuple[str, Any]
    structure: bytes
    leaves: bytes
    inputs: Sequence[tuple[int | None, Sequence[tuple[int, tuple[Any, ...], Pick]]]]
    settings: Any
    name: str
    undo_from: int | None


class PassOn(NamedTuple):
    """A request to send the result of a call to another worker, for a message to that worker by its number."""

    number: int
    replica: int
    target: str
    seq: int


class DropResults(NamedTuple):
    """The calls, objects and variables, by their numbers, that nothing in the program refers to any more."""

    results: Sequence[int] = ()
    objects: Collection[int] = ()
    variables: Sequence[int] = ()


class FailResult(NamedTuple):
    """The failure of a result that another worker was to send."""

    number: int
    replica: int
    why: Failed


class FailData(NamedTuple):
    """The failure of the task whose data is waited for."""

    key: Any
    why: Failed


class LoseWorkers(NamedTuple):
    """The loss of other workers; the failure of what they would have sent, and the reason in words."""

    addresses: Sequence[str]
    why: Failed
    reason: str


class ChangeGroup(NamedTuple):
    """The replicas that there are from now on."""

    group: ReplicaGroup


class EndCall(NamedTuple):
    """A request to end the functions of a call at their next batch, collective operation or checkpoint."""

    number: int
    why: str


class AskRunning(NamedTuple):
    """A question for the calls that replicas are making, and its time in the program."""

    asked_at: float


class AskValues(NamedTuple):
    """A question for the values that only replicas of this worker have."""


class CallOver(NamedTuple):
    """The outcome of a call on a replica, or once as that of replica 0, as `outcome_to_send` returns it."""

    number: int
    replica: int
    structure: bytes | None
    payload: Any


class NeedsData(NamedTuple):
    """The key of a task whose data does not come; sent again and again."""

    key: Any


class NotPassedOn(NamedTuple):
    """A result that could not be sent to another worker."""

    number: int
    replica: int
    target: str
    why: str


class Leaving(NamedTuple):
    """The end of the worker, once its calls are over.

    Parameters
    ----------
    values
        Number of a variable -> number of a replica -> leaves, for the values that only its replicas have; None if they
        were not asked for yet.
    """

    values: Mapping[int, Mapping[int, list[Any]]] | None = None


class Running(NamedTuple):
    """The calls that replicas are making, and the time of the question."""

    asked_at: float
    running: Sequence[RunningOnReplica]
