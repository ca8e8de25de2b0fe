"""Positions in streams as data: they can be taken at any element, and another process can continue from them.

A position is the pass, the seeds that operations drew, the number of elements that were handed out, and the answers
that arithmetic got from calls (`answers`). To continue, the stream is opened again and advanced by arithmetic
(`Interpreter.open_at`). No operation has code for it, but those that can skip elements by arithmetic have ``skip``.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

from daskdist.core.node import Node
from daskdist.core.primitive import Arrange, Chain, Compute, Epoch, Fact, Primitive
from daskdist.errors import ArgumentError
from daskdist.execute.caller import Caller
from daskdist.execute.resume.deferring import Deferred
from daskdist.execute.resume.packing import pack, unpack
from daskdist.execute.resume.recorded_answers import Answers, Known
from daskdist.url_secrets import without_secrets

VERSION: Final = 10


@dataclass(frozen=True)
class StreamPosition:
    """A position in one stream.

    Parameters
    ----------
    epoch
        The pass.
    seeds
        The seeds that operations have drawn for themselves.
    num_elements
        The number of elements that were handed out, with those that failed.
    answers
        The answers that the stream got; None at the beginning of a pass, where it is opened without them.
    """

    epoch: Epoch
    seeds: list[int]
    num_elements: int = 0
    answers: Answers | None = None

    def as_plain(self, caller: Caller) -> list[Any]:
        """Return the position as data; ``caller`` has the values that chains carry."""
        answers = self.answers or Answers()
        plain = answers.as_plain(lambda handle: _value_of(handle, caller))
        return [self.epoch, self.seeds, self.num_elements, plain]

    @classmethod
    def of_plain(cls, content: Sequence[Any]) -> StreamPosition:
        """Return the position that `as_plain` returned."""
        epoch, seeds, num_elements, answers = content
        return cls(epoch, seeds, num_elements, Answers.of_plain(answers))


def _value_of(handle: Any, caller: Caller) -> Any:
    # Values that are not available yet, or need a call to fetch, are recomputed from an earlier one.
    if isinstance(handle, Known):
        return handle.value
    if isinstance(handle, Deferred):
        if handle.make is not None:
            return None
        # The caller may differ from the one that deferred the call.
        handle = handle.handle
    try:
        return caller.result(handle) if caller.is_done(handle) else None
    except Exception:
        return None


@dataclass(frozen=True)
class PipelineIdentity:
    """The identity of a pipeline, by which a position recognises it.

    Parameters
    ----------
    fingerprint
        A token that equal pipelines share in every process.
    operations
        A line for each operation, the most upstream first, for messages.
    order
        The operations in the order in which they run. Operations that are moved after a trial may run in another order
        elsewhere.
    """

    fingerprint: str
    operations: str
    order: str = ""

    @classmethod
    def of(cls, node: Node, token: str, primitive: Primitive) -> PipelineIdentity:
        """Return the identity of a pipeline with a given fingerprint that runs as a primitive."""
        return cls(token, "\n".join(_lines(node)), ", ".join(_names(primitive)))

    def is_like(self, other: PipelineIdentity) -> bool:
        """Return whether a pass over one pipeline may continue over the other."""
        return (self.fingerprint, self.order) == (other.fingerprint, other.order)

    def check(self, state: Mapping[str, Any]) -> None:
        """Check that a state is of this pipeline.

        Raises
        ------
        ArgumentError
            The position is of another pipeline, or runs in another order; the message names the difference.
        """
        if state["fingerprint"] == self.fingerprint:
            self._check_order(state)
            return
        pairs = zip_longest(str(state["pipeline"]).splitlines(), self.operations.splitlines())
        saved, current = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
        differs = f"the first operation that differs is {saved or 'none'} there and {current or 'none'} here"
        if saved is current is None:
            differs = "its operations are alike, and the data or functions that they use differ"
        raise ArgumentError(
            f"load_state_dict: the position is of another pipeline, of fingerprint {state['fingerprint']}; this one's "
            f"is {self.fingerprint}: {differs}"
        )

    def _check_order(self, state: Mapping[str, Any]) -> None:
        order = state.get("order", self.order)
        if order != self.order:
            raise ArgumentError(
                f"load_state_dict: the position was taken where the operations run in the order {order}; here they run "
                f"in the order {self.order}. A function stays after a shuffle if its results may be large, which "
                "another version of Python or of a library can decide otherwise. Continue where the position was "
                "taken, or begin the pass again"
            )


def _names(primitive: Primitive) -> Iterator[str]:
    if isinstance(primitive, Arrange):
        for source in primitive.inputs:
            yield from _names(source)
    elif isinstance(primitive, (Compute, Chain, Fact)):
        yield from _names(primitive.source)
    yield primitive.name


def _lines(node: Node) -> Iterator[str]:
    for source in node.inputs:
        yield from _lines(source)
    yield without_secrets(str(node)).splitlines()[0]


def state_of(
    identity: PipelineIdentity, number: int, positions: Sequence[Sequence[Any]], **others: Any
) -> dict[str, Any]:
    """Return the state of an iterator.

    Parameters
    ----------
    identity
        The pipeline.
    number
        The number of elements or steps that were handed out.
    positions
        The positions of its streams, as data.
    **others
        Further plain values.
    """
    content = {"positions": positions, **others}
    return {
        "version": VERSION,
        "fingerprint": identity.fingerprint,
        "pipeline": identity.operations,
        "order": identity.order,
        "number": number,
        "position": b64encode(pack(content)).decode("ascii"),
    }


def content_of(state: Any, identity: PipelineIdentity) -> dict[str, Any]:
    """Return the content of a state: a list of `StreamPosition` as ``positions``, and what else it was given.

    Raises
    ------
    ArgumentError
        The value is not a state, is damaged, or is of another version or pipeline.
    """
    if not isinstance(state, dict) or not {"version", "fingerprint"} <= set(state):
        raise ArgumentError(
            f"load_state_dict: expected a dict returned by state_dict() of an iterator, got {type(state).__name__} "
            f"{state!r:.80}"
        )
    if state["version"] != VERSION:
        raise ArgumentError(f"load_state_dict: the position is of version {state['version']}, not {VERSION}")
    identity.check(state)
    try:
        content = unpack(b64decode(state["position"], validate=True))
        return {**content, "positions": list(map(StreamPosition.of_plain, content["positions"]))}
    except (ValueError, TypeError, KeyError) as error:
        raise ArgumentError(f"load_state_dict: the position is damaged: {error}") from None
