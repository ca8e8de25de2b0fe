"""Comparison of elements by structure, dtypes, shapes and values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from daskdist.core.ragged import Ragged
from daskdist.core.structure import Nested, Structure


def check(holds: object, message: str) -> None:
    """Raise `AssertionError` with the message unless ``holds`` is true; this also works with ``python -O``."""
    if not holds:
        raise AssertionError(message)


def same_element(a: Any, b: Any) -> bool:
    """Return whether two elements are the same; NaN equals NaN, and windows are compared as lists of elements.

    >>> same_element({"x": np.float32(1)}, {"x": np.float64(1)})
    False
    """
    (leaves, structure), (others, other) = Structure.flatten(a), Structure.flatten(b)
    return structure == other and all(map(_same_leaf, leaves, others))


def same_elements(actual: Sequence[Any], expected: Sequence[Any], name: str = "elements") -> None:
    """Check that two lists hold the same elements in the same order."""
    for place, (a, b) in enumerate(zip(actual, expected, strict=False)):
        # The message is built only if needed: formatting arrays is slow.
        if not same_element(a, b):
            check(False, f"{name}: element {place} is {a!r} and should be {b!r}")
    check(len(actual) == len(expected), f"{name}: there are {len(actual)}, and should be {len(expected)}")


def same_multiset(actual: Sequence[Any], expected: Sequence[Any], name: str = "elements") -> None:
    """Check that two lists hold the same elements, each as often, in any order."""
    missing = Counter(map(_key, expected))
    missing.subtract(map(_key, actual))
    wrong = {element: number for element, number in missing.items() if number}
    check(not wrong, f"{name}: missing (or, negative, too many): {wrong}")


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, Nested) or isinstance(b, Nested):
        return isinstance(a, Nested) and isinstance(b, Nested) and _same_lists(list(a), list(b))  # type: ignore[call-overload]
    if isinstance(a, Ragged) or isinstance(b, Ragged):
        return (
            isinstance(a, Ragged)
            and isinstance(b, Ragged)
            and _same_lists([a.values, a.row_splits], [b.values, b.row_splits])
        )
    if a.dtype != b.dtype or np.shape(a) != np.shape(b):
        return False
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM"))


def _same_lists(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(same_element, a, b))


def _key(element: Any) -> tuple[Any, ...]:
    leaves, structure = Structure.flatten(element)
    return structure, *map(_leaf_key, leaves)


def _leaf_key(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, Nested):
        return tuple(map(_key, leaf))  # type: ignore[call-overload]
    return str(leaf.dtype), np.shape(leaf), repr(leaf.tolist())
