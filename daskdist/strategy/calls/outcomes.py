"""Outcomes of calls in the form in which they are sent: values with their structure, and failures with their origin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from daskdist.errors import ArgumentError, CollectiveError
from daskdist.execute.messages.failure import Failure, Packed
from daskdist.execute.messages.pickling import describe_unpicklable
from daskdist.execute.messages.sizes import size_of
from daskdist.strategy.values.flat import loaded_structure, pickled_structure
from daskdist.strategy.values.refs import FlatResult

# Results of at most this many bytes are sent to the program with the message that their call has ended.
SMALL_BYTES: Final = 2**16
# The same limit for results that a later call was waiting for: the program reads at most numbers of these.
SMALL_AWAITED_BYTES: Final = 2**10
# Types of immutable values, which pickle as they are.
_PLAIN: Final = frozenset({int, float, bool, complex, type(None), np.float32, np.float64, np.int32, np.int64, np.bool_})
# The kinds of dtypes of arrays of numbers.
_NUMBERS: Final = "biufcmM"


class Failed(NamedTuple):
    """The outcome of a call that failed, or whose argument is a result of one that failed.

    Parameters
    ----------
    failure
        The error.
    origin
        The number of the call that raised it; None where it was raised by no call.
    """

    failure: Failure
    origin: int | None

    @property
    def is_of_others(self) -> bool:
        """Return whether the error only says that other replicas failed or are missing."""
        return isinstance(self.failure.error(), CollectiveError)


class StaysOnWorker(NamedTuple):
    """A placeholder for a value that stays on its worker until it is fetched.

    Parameters
    ----------
    num_bytes
        Its size.
    """

    num_bytes: int


def packed_value(value: Any) -> Packed | Failed:
    """Return a value in the form in which it is sent, or a failure if it does not pickle."""
    try:
        return Packed.of(value)
    except Exception as error:
        return _not_pickled(value, error)


def _not_pickled(value: Any, error: Exception) -> Failed:
    text = ArgumentError(
        f"what a replica returned does not pickle, and so cannot leave its worker{describe_unpicklable(value)}: {error}"
    )
    return Failed(Failure.of(text), None)


def outcome_to_send(outcome: Any, most_bytes: float = SMALL_BYTES) -> tuple[bytes | None, Any]:
    """Return an outcome in the form in which it is sent.

    Parameters
    ----------
    outcome
        A `FlatResult`, another value or a `Failed`.
    most_bytes
        The size of the largest value to send; a larger value stays on the worker, and a `StaysOnWorker` is sent
        instead.

    Returns
    -------
    tuple
        The pickled structure with the places of None, or None for a value without a structure; and the tuple of leaves,
        `Packed`, `StaysOnWorker` or `Failed`.
    """
    if type(outcome) is Failed:
        return None, outcome
    send = packed_value if most_bytes == math.inf else partial(_small, most_bytes)
    if type(outcome) is not FlatResult:
        return None, send(outcome)
    leaves: Sequence[Any] = outcome.leaves
    try:
        structure = pickled_structure(outcome.treespec, tuple([leaf is None for leaf in leaves]))
    except Exception as error:
        # The structure contains the keys of dicts, which may be any objects.
        return None, _not_pickled(outcome.treespec, error)
    if _PLAIN.issuperset(map(type, leaves)):
        return structure, tuple(leaves)
    num_bytes = _num_plain_bytes(leaves)
    if 0 < num_bytes <= SMALL_BYTES:
        # Arrays of a small message are part of its pickle.
        if num_bytes > most_bytes:
            return structure, StaysOnWorker(num_bytes)
        # Copy now, as the replica may change it before it is sent.
        return structure, tuple(leaves if most_bytes == math.inf else map(_copied, leaves))
    return structure, send(leaves)


def _copied(leaf: Any) -> Any:
    if type(leaf) is not np.ndarray:
        return leaf
    copied = leaf.copy("K")
    copied.flags.writeable = leaf.flags.writeable
    return copied


def _num_plain_bytes(leaves: Sequence[Any]) -> int:
    # Return the size of arrays of numbers; 0 if there are others.
    num_bytes = 0
    for leaf in leaves:
        if type(leaf) is np.ndarray and leaf.dtype.kind in _NUMBERS:
            num_bytes += leaf.nbytes
        elif type(leaf) not in _PLAIN:
            return 0
    return num_bytes


def _small(most_bytes: float, value: Any) -> Any:
    try:
        num_bytes = size_of(value)
    except Exception:
        # A user's object failed to return its size.
        return StaysOnWorker(0)
    if num_bytes > most_bytes:
        return StaysOnWorker(num_bytes)
    packed = packed_value(value)
    if type(packed) is Packed:
        # Copy now, as the replica may change it before it is sent.
        return packed.copied()
    # The value cannot be pickled, but calls on its worker can use it.
    return StaysOnWorker(num_bytes)


def received_outcome(structure: bytes | None, payload: Any) -> Any:
    """Return a received value: a `FlatResult` if it has a structure."""
    leaves = payload.value() if type(payload) is Packed else payload
    return leaves if structure is None else FlatResult(list(leaves), loaded_structure(structure)[0])
