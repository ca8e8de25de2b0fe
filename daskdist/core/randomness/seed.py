"""Random numbers that depend on their purpose, never on the process or the time."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final

import numpy as np

from daskdist.config import setting


class SeedsInCall:
    """The seeds of operations without a seed that are created during a call of a user's function.

    They depend on the argument of the function and on the order in which the operations are created, so a repeated
    call, here or in another process, creates the same. Set ``argument`` and ``number`` before each call.

    Parameters
    ----------
    argument
        The argument of the function.
    words
        Random words that determine the seeds; None to use the value of the argument.

    Attributes
    ----------
    number
        The number of seeds that were drawn in the call.

    >>> with SeedsInCall(3):
    ...     first = fresh_seed(), fresh_seed()
    >>> with SeedsInCall() as seeds:
    ...     seeds.argument, seeds.number = 3, 0
    ...     (fresh_seed(), fresh_seed()) == first
    True
    """

    __slots__ = ("_token", "argument", "identity", "number", "words")

    def __init__(self, argument: Any = None, words: Sequence[int] | None = None) -> None:
        self.argument, self.words, self.number = argument, words, 0
        # An identifier for objects that outlive the call and must not keep its argument alive.
        self.identity = object()

    def draw(self) -> int:
        """Return the next seed of the call."""
        words = self.words
        if words is None:
            from dask.tokenize import tokenize

            words = [int(tokenize(self.argument), 16)]
        self.number += 1
        return int(np.random.SeedSequence([*words, self.number]).generate_state(1, np.uint64)[0] >> 1)

    def __enter__(self) -> SeedsInCall:
        self._token = _IN_CALL.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _IN_CALL.reset(self._token)


_IN_CALL: Final[ContextVar[SeedsInCall | None]] = ContextVar("_IN_CALL", default=None)


def current_call() -> SeedsInCall | None:
    """Return the seeds of the current call of a user's function in this thread; None if there is no such call."""
    return _IN_CALL.get()


def fresh_seed() -> int:
    """Return a seed for an operation without one.

    It is the setting ``daskdist.seed``, or if that is null, a random one. Within a call of a user's function it is from
    `SeedsInCall`.
    """
    in_call = _IN_CALL.get()
    if in_call is not None:
        return in_call.draw()
    seed = setting("seed")
    return secrets.randbits(63) if seed is None else int(seed)


def generator(seed: int, stream: int, numbers: Sequence[int] = ()) -> np.random.Generator:
    """Return the generator of an operation in a pass.

    Parameters
    ----------
    seed
        The operation's seed.
    stream
        Distinguishes purposes with the same seed.
    numbers
        The pass, from `PassNumber.of`. Empty if every pass draws the same as the first one. Trailing zeros do not
        count, so that the first repetition within a pass draws the same.

    >>> [int(generator(1, 0, numbers).integers(100)) for numbers in [(0,), (1,), (), (1, 0)]]
    [47, 97, 47, 97]
    """
    return np.random.Generator(np.random.PCG64(_entropy(seed, stream, numbers)))


def _entropy(seed: int, stream: int, numbers: Sequence[int]) -> np.random.SeedSequence:
    numbers = list(numbers)
    while numbers and not numbers[-1]:
        del numbers[-1]
    return np.random.SeedSequence([int(seed) % 2**64, stream, *numbers])


# The number of random 64-bit words that seed a generator.
WORDS_PER_GENERATOR: Final = 4
# Distinguishes these words from the numbers of `generator` with the same seed.
_FOR_WORDS: Final = 0x776F726473


def random_words(seed: int, numbers: Sequence[int], start: int, num_rows: int, stream: int = 0) -> np.ndarray[Any, Any]:
    """Return the words that seed the generators of some elements, for `generator_of`.

    Parameters
    ----------
    seed
        The seed of the operation.
    numbers
        The pass, as for `generator`.
    start
        The number of the first element.
    num_rows
        The number of elements.
    stream
        Distinguishes operations with the same seed.

    Returns
    -------
    ndarray
        uint64, shape ``(num_rows, WORDS_PER_GENERATOR)``. A row depends only on its element's number, not on the
        number of rows in a call.
    """
    # Each step of this counter-based generator gives the words of one element.
    philox = np.random.Philox(_entropy(seed, _FOR_WORDS + stream, numbers)).advance(start)
    return philox.random_raw(num_rows * WORDS_PER_GENERATOR).reshape(num_rows, WORDS_PER_GENERATOR)


class _Words(np.random.bit_generator.ISpawnableSeedSequence):
    # A seed sequence that passes the words to a bit generator unchanged, as they are random already.
    def __init__(self, words: Any) -> None:
        self._words = np.ascontiguousarray(words)
        self._sequence: np.random.SeedSequence | None = None

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return self._words

    def spawn(self, n_children: int) -> list[Any]:
        if self._sequence is None:
            self._sequence = np.random.SeedSequence(self._words.tolist())
        return list(self._sequence.spawn(n_children))


def numbers_of(state: Any) -> tuple[int, ...]:
    """Return the state of a generator from `generator`, as numbers."""
    return (state["state"]["state"], state["state"]["inc"], state["has_uint32"], state["uinteger"])


def state_of(like: Any, numbers: tuple[int, ...]) -> dict[str, Any]:
    """Return the state that `numbers_of` returned as numbers; ``like`` is the state of another such generator."""
    state, inc, has_uint32, uinteger = numbers
    return {**like, "state": {"state": state, "inc": inc}, "has_uint32": has_uint32, "uinteger": uinteger}


def generator_of(words: Any) -> np.random.Generator:
    """Return the generator with the words of a row of `random_words`.

    >>> words = random_words(7, (), 0, 3)
    >>> [round(float(generator_of(row).random()), 3) for row in words]
    [0.204, 0.76, 0.625]
    """
    sequence: Any = _Words(words)
    return np.random.Generator(np.random.PCG64(sequence))
