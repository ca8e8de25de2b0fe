"""When elements are the same: structure, dtypes, shapes and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from daskdist.core.structure import Structure


def check(holds: object, message: str) -> None:
    """Raise `AssertionError` with the message unless something holds; also where Python runs with ``-O``."""
    if not holds:
        raise AssertionError(message)


def same_element(a: Any, b: Any) -> bool:
    """Whether two elements are the same; NaN is the same as NaN.

    >>> same_element({"x": np.float32(1)}, {"x": np.float64(1)})
    False
    """
    (leaves, structure), (others, other) = Structure.flatten(a), Structure.flatten(b)
    return structure == other and all(map(_same_leaf, leaves, others))


def same_elements(given: Sequence[Any], expected: Sequence[Any], what: str = "elements") -> None:
    """Check that two lists hold the same elements in the same order."""
    for place, (a, b) in enumerate(zip(given, expected, strict=False)):
        check(same_element(a, b), f"{what}: element {place} is {a!r} and should be {b!r}")
    check(len(given) == len(expected), f"{what}: there are {len(given)}, and should be {len(expected)}")


def same_multiset(given: Sequence[Any], expected: Sequence[Any], what: str = "elements") -> None:
    """Check that two lists hold the same elements, each as often, in any order."""
    missing = Counter(map(_key, expected))
    missing.subtract(map(_key, given))
    wrong = {element: number for element, number in missing.items() if number}
    check(not wrong, f"{what}: missing (or, negative, too many): {wrong}")


def _same_leaf(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or np.shape(a) != np.shape(b):
        return False
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM"))


def _key(element: Any) -> tuple[Any, ...]:
    leaves, structure = Structure.flatten(element)
    return structure, *((str(leaf.dtype), np.shape(leaf), repr(leaf.tolist())) for leaf in leaves)
