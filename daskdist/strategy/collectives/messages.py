"""The messages between workers; they go over `WorkerLinks`.

==============  ===========================  ================================  ========================================
message         is sent by                   is answered by                    if the link is lost
==============  ===========================  ================================  ========================================
`SentResult`    the worker of a replica, if  nothing                           the program is told (``unsent``), and
                the program says ``push``                                      the call that needs it fails
`Contribution`  a worker in a collective     nothing                           its collective fails
`StatusAsked`   a worker that waits in one   `Answer` with a `StepStatus`      its collective fails
`StepsAsked`    a loop whose rows are over   `Answer` with a `KnownSteps`      the loop fails
`Answer`        the worker that was asked    nothing                           nothing: the other one notices by itself
==============  ===========================  ================================  ========================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from daskdist.execute.messages.failure import Packed
from daskdist.strategy.collectives.rendezvous import CallSignature
from daskdist.strategy.collectives.step_counts import PipelineKey
from daskdist.strategy.group import Step


class SentResult(NamedTuple):
    """A result that a call on another worker needs.

    Parameters
    ----------
    token
        The token of the strategy.
    number, replica
        The call, and the replica that made it.
    seq
        The place, in the program's stream to the receiver, of the message that needs it.
    structure, payload
        The result, as `outcome_to_send` returns it.
    """

    token: str
    number: int
    replica: int
    seq: int
    structure: bytes | None
    payload: Any


class Turn(NamedTuple):
    """A collective operation on a worker.

    Parameters
    ----------
    key, number
        The call, and the number of the operation in it.
    signature
        The operation of a replica of the worker, which must be the same on all.
    """

    key: Step
    number: int
    signature: CallSignature


class Contribution(NamedTuple):
    """The contribution of a worker to a collective operation.

    Parameters
    ----------
    turn
        The operation.
    part
        The part of it.
    data
        The contribution.
    """

    turn: Turn
    part: str
    data: Packed


class StatusAsked(NamedTuple):
    """The question for the status of a call on a worker.

    Parameters
    ----------
    request
        The number of the question on the asking worker.
    key, turn
        The call, and the number of the operation in it.
    """

    request: int
    key: Step
    turn: int


class StepStatus(NamedTuple):
    """The status of a call on a worker. Whatever replicas there have sent about the call arrives before.

    Parameters
    ----------
    left
        The replicas there that have left the call, with their exit reasons.
    absent
        The replicas there that have not yet made the collective call in question.
    failed
        The reason if that call failed there, or None.
    """

    left: Mapping[int, str]
    absent: Sequence[int]
    failed: str | None


class StepsAsked(NamedTuple):
    """The question for the known steps of a pipeline that a worker reads.

    Parameters
    ----------
    request
        The number of the question on the asking worker.
    key
        The call.
    pipeline, iteration
        The pipeline, and the number of the pass.
    first
        The first step in question.
    replicas
        The replicas that read the pipeline.
    """

    request: int
    key: Step
    pipeline: PipelineKey
    iteration: int
    first: int
    replicas: Sequence[int]


class Answer(NamedTuple):
    """The answer to a question.

    Parameters
    ----------
    request
        The number of the question.
    content
        The answer.
    """

    request: int
    content: Any
