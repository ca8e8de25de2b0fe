"""Values that users' functions hand over, kept beyond the call: arrays that something else could change are copied.

A function may fill one array again and again, and yield or return it each time. An array is kept without a copy only if
nothing else refers to its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from sys import getrefcount
from typing import Any, Final

import numpy as np

from daskdist.core.ragged import Ragged
from daskdist.core.structure import Nested, with_own_arrays

# Types whose values cannot change.
_UNCHANGEABLE: Final = frozenset(
    {np.float32, np.float64, np.int32, np.int64, np.bool_, int, float, complex, bool, str, bytes, type(None)}
)


def keep_as_they_are(
    leaves: list[Any], start: int = 0, private: Callable[[], Container[int]] | None = None, *, num_others: int = 0
) -> None:
    """Replace arrays that something else could change by copies.

    Parameters
    ----------
    leaves
        The values. The caller refers to them in this list only, and to no nest of them.
    start
        The place of the first value to look at.
    private
        Returns the ids of objects, as `owners_of` does, whose read-only views nobody can change.
    num_others
        The number of other references to each value that cannot change it.

    Notes
    -----
    PyTorch tensors do not show what shares their memory, so those on the host are always copied.
    """
    for place in range(start, len(leaves)):
        kind = type(leaves[place])
        if kind in _UNCHANGEABLE:
            continue
        if kind is np.ndarray:
            # Two references are always there: from the list, and from the argument of `getrefcount`.
            is_shared = getrefcount(leaves[place]) > 2 + num_others or (
                leaves[place].base is not None and _has_shared_base(leaves[place])
            )
            if _may_hold_arrays(leaves[place]) or (is_shared and not _is_private(leaves[place], private)):
                leaves[place] = kept(leaves[place])
        elif issubclass(kind, (np.ndarray, np.void, Ragged, Nested)) or kind.__module__.partition(".")[0] in _COPIES:
            leaves[place] = kept(leaves[place])


def is_unshared(nests: list[Any]) -> bool:
    """Return whether a nest, the only item of a list, is certainly one that nothing else could change.

    It is an array, or a dict, tuple or list of arrays and numbers; for other nests the result is False.
    """
    if getrefcount(nests[0]) > 2:
        return False
    kind = type(nests[0])
    if kind is np.ndarray:
        return nests[0].base is None and not _may_hold_arrays(nests[0])
    if kind is not dict and kind is not tuple and kind is not list:
        return False
    leaves = list(nests[0].values() if kind is dict else nests[0])
    for place, leaf_kind in enumerate(map(type, leaves)):
        if leaf_kind in _UNCHANGEABLE:
            continue
        # The nest, the list and the argument of `getrefcount` refer to it. Local variables would not count in 3.14.
        if leaf_kind is not np.ndarray or leaves[place].base is not None or getrefcount(leaves[place]) > 3:
            return False
        if _may_hold_arrays(leaves[place]):
            return False
    return True


def kept(value: Any) -> Any:
    """Return a value, or a copy if it is or contains an array."""
    if isinstance(value, np.ndarray):
        copied = value.copy("K")
        if _may_hold_arrays(value):
            for number, item in enumerate(value.flat):
                copied.flat[number] = kept(item)
        return copied
    if isinstance(value, np.void):
        # A row of a structured array is a view of it.
        return value.copy()
    if isinstance(value, Ragged):
        return Ragged(kept(value.values), kept(value.row_splits))
    if isinstance(value, Nested):
        return with_own_arrays(value)
    copy = _COPIES.get(type(value).__module__.partition(".")[0])
    return value if copy is None else copy(value)


def owners_of(leaves: Iterable[Any]) -> frozenset[int]:
    """Return the ids of the objects that have the memory of arrays, valid as long as the arrays exist."""
    return frozenset({id(_owner_of(leaf)) for leaf in leaves})


def _owner_of(array: Any) -> Any:
    # The object at the end of the chain of bases.
    while getattr(array, "base", None) is not None:
        array = array.base
    return array


def _may_hold_arrays(array: Any) -> bool:
    return array.dtype.kind == "O" and not _UNCHANGEABLE.issuperset(map(type, array.flat))


def _is_private(array: Any, private: Callable[[], Container[int]] | None) -> bool:
    return private is not None and not array.flags.writeable and id(_owner_of(array)) in private()


def _has_shared_base(view: Any) -> bool:
    # Return whether anything but the view refers to its memory.
    while view.base is not None:
        if type(view.base) is bytes:
            return False
        # The view and the argument of `getrefcount` refer to it.
        if not isinstance(view.base, np.ndarray) or getrefcount(view.base) > 2:
            return True
        view = view.base
    return False


def _host_clone(tensor: Any) -> Any:
    # Most classes of PyTorch are not tensors.
    is_on_host = hasattr(type(tensor), "__dlpack__") and tensor.device.type == "cpu"
    return tensor.clone() if is_on_host else tensor


# Library -> a function that copies its arrays.
_COPIES: Final = {"torch": _host_clone}
