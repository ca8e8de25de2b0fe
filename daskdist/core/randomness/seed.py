"""Random numbers that depend on what they are for, never on who draws them or when."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final

import numpy as np

from daskdist.config import setting


class SeedsInCall:
    """The seeds of operations that are made while a user's function is called, and that are given none.

    They depend on what the function is called with and on the order in which the operations are made: a call that is
    repeated, here or in another process, makes the same. Before each call ``argument`` and ``number`` are set.

    Parameters
    ----------
    argument
        What the function is called with.
    words
        Random words that decide the seeds; if None, the value of the argument does.

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
        # For those who outlive the call, and are not to hold on to what the function was called with.
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
    """Return the seeds of the call of a user's function that is under way in this thread; None where none is."""
    return _IN_CALL.get()


def fresh_seed() -> int:
    """Return a seed for an operation that was given none.

    It is the setting ``daskdist.seed``, or where that is null, any. Within a call of a function of elements, it is that
    of `SeedsInCall`.
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
        Keeps apart what is drawn by one seed for different purposes.
    numbers
        The pass, as `PassNumber.of` gives it. Empty where every pass is to draw what the first pass draws. Zeros at the
        end do not count, so that the first repetition within a pass draws the same.

    >>> [int(generator(1, 0, numbers).integers(100)) for numbers in [(0,), (1,), (), (1, 0)]]
    [47, 97, 47, 97]
    """
    return np.random.Generator(np.random.PCG64(_entropy(seed, stream, numbers)))


def _entropy(seed: int, stream: int, numbers: Sequence[int]) -> np.random.SeedSequence:
    numbers = list(numbers)
    while numbers and not numbers[-1]:
        del numbers[-1]
    return np.random.SeedSequence([int(seed) % 2**64, stream, *numbers])


# Random words of 64 bits that a generator is made of.
WORDS_PER_GENERATOR: Final = 4
# Keeps these words apart from what `generator` draws by the same seed.
_FOR_WORDS: Final = 0x776F726473


def random_words(seed: int, numbers: Sequence[int], start: int, num_rows: int, stream: int = 0) -> np.ndarray[Any, Any]:
    """Return what the generators of some elements are made of, as `generator_of` takes it.

    Parameters
    ----------
    seed
        Decides them.
    numbers
        The pass, as for `generator`.
    start
        The number of the first element.
    num_rows
        The number of elements.
    stream
        Keeps apart what is drawn by one seed for different operations.

    Returns
    -------
    ndarray
        uint64, shape ``(num_rows, WORDS_PER_GENERATOR)``. A row depends on its element's number, and not on how many
        are asked for at a time.
    """
    # A step of this generator, which counts, gives the words of an element.
    philox = np.random.Philox(_entropy(seed, _FOR_WORDS + stream, numbers)).advance(start)
    return philox.random_raw(num_rows * WORDS_PER_GENERATOR).reshape(num_rows, WORDS_PER_GENERATOR)


class _Words(np.random.bit_generator.ISpawnableSeedSequence):
    # Gives a bit generator the words as they are: they are random already.
    def __init__(self, words: Any) -> None:
        self._words = np.ascontiguousarray(words)
        self._sequence: np.random.SeedSequence | None = None

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return self._words

    def spawn(self, n_children: int) -> list[Any]:
        if self._sequence is None:
            self._sequence = np.random.SeedSequence(self._words.tolist())
        return list(self._sequence.spawn(n_children))


def generator_of(words: Any) -> np.random.Generator:
    """Return the generator that a row of `random_words` makes.

    >>> words = random_words(7, (), 0, 3)
    >>> [round(float(generator_of(row).random()), 3) for row in words]
    [0.204, 0.76, 0.625]
    """
    sequence: Any = _Words(words)
    return np.random.Generator(np.random.PCG64(sequence))
