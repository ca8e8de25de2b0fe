"""Conversion of states to nests of NumPy arrays, and back to the types of an object's current state."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final

import numpy as np

from daskdist.cached_property import cached_property
from daskdist.core.json_codec import MOST_DEPTH
from daskdist.errors import ArgumentError

# The types of a state's values besides arrays.
PLAIN: Final = (bool, int, float, complex, str, bytes)

# The package of a class -> the module whose ``asarray`` creates its arrays from NumPy's.
_MAKERS: Final = {"torch": "torch", "jax": "jax.numpy", "cupy": "cupy"}
_WHAT: Final = "give arrays, numbers, text, bytes and None, or dicts, lists and tuples of them"


def as_numpy(nest: Any, path: tuple[Any, ...] = (), *, copied: bool = True) -> Any:
    """Return a state as a nest of NumPy arrays.

    Parameters
    ----------
    nest
        Mappings whose keys are text or whole numbers, lists, tuples and named tuples, in any depth, of arrays of any
        framework, numbers, text, bytes and None.
    path
        The keys of the nest in the whole state, for messages.
    copied
        Whether to copy arrays that would otherwise share memory with the given ones.

    Returns
    -------
    nest
        Dicts, lists and tuples of arrays in memory, NumPy scalars and Python values. A named tuple becomes a dict of
        its fields. An array of a dtype that NumPy lacks, such as bfloat16, becomes float32.

    Raises
    ------
    ArgumentError
        The nest has a value of another type, at the place in the message.

    >>> from collections import OrderedDict
    >>> as_numpy(OrderedDict(step=3, weights=(np.zeros(2), None)))
    {'step': 3, 'weights': (array([0., 0.]), None)}
    """
    check_depth(path)
    items = items_of(nest)
    if items is None:
        return _array_of(nest, path, copied)
    parts = {}
    for key, part in items:
        if type(key) not in (str, int):
            raise ArgumentError(f"{where(path)}: {key!r:.80} is a key; give text or whole numbers")
        parts[key] = as_numpy(part, (*path, key), copied=copied)
    if not _is_sequence(nest):
        return parts
    return list(parts.values()) if isinstance(nest, list) else tuple(parts.values())


def like(present: Any, saved: Any, *, owner: Any = None, copied: bool = True) -> Any:
    """Return a saved state with the array and container types of an object's current state.

    Parameters
    ----------
    present
        The current result of the object's ``state_dict()``.
    saved
        The saved state, as returned by `as_numpy`.
    owner
        The object, if there is one.
    copied
        Whether to copy arrays that would otherwise be those of ``saved``.

    Returns
    -------
    nest
        The values of ``saved`` in the mappings, lists and tuples of ``present``. An array takes the type, dtype and
        device of its counterpart in ``present``.

    Raises
    ------
    ArgumentError
        A key is missing or superfluous, a length or shape differs, or a mapping is in place of a list or array, at the
        place in the message.

    Notes
    -----
    Lists of numbers that have no owner may differ in length, such as those of losses so far.
    None and empty mappings or lists stand for state that does not exist yet, such as that of an optimizer before its
    first step. Below the top level, None may take the place of anything; there, and at the top level of values without
    an owner, an empty container may take the place of any of its kind. Arrays without a counterpart become arrays of
    the framework of other arrays in ``present``, or of the owner's class; NumPy arrays if neither is of a framework.

    >>> like((np.zeros(2), 0), [np.ones(2), 5])
    (array([1., 1.]), 5)
    >>> like({"weights": np.zeros(3)}, {"weights": np.ones(2)})
    Traceback (most recent call last):
    daskdist.errors.ArgumentError: at ['weights']: shape (2,) was saved, and (3,) is there
    """
    return _Like(present, owner, copied).converted(saved, present, ())


def where(path: tuple[Any, ...]) -> str:
    """Return the form in which messages show the path to a part of a nest."""
    return "at " + "".join(f"[{key!r:.80}]" for key in path) if path else "the state"


def items_of(nest: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the keys and parts of a mapping, list, tuple or named tuple; None for any other object."""
    if isinstance(nest, Mapping):
        return nest.items()
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return zip(nest._fields, nest, strict=True)
    if isinstance(nest, (list, tuple)):
        return enumerate(nest)
    return None


def check_depth(path: tuple[Any, ...]) -> None:
    """Check the depth of a nest, which may contain itself.

    Raises
    ------
    ArgumentError
        The path is longer than `MOST_DEPTH`.
    """
    if len(path) > MOST_DEPTH:
        raise ArgumentError(f"{where(path[:4])}...: deeper than {MOST_DEPTH}, or inside itself")


# --- to NumPy ---


def _is_sequence(nest: Any) -> bool:
    return isinstance(nest, (list, tuple)) and not hasattr(nest, "_fields")


def _array_of(leaf: Any, path: tuple[Any, ...], copied: bool) -> Any:
    if leaf is None or isinstance(leaf, PLAIN):
        return leaf.item() if isinstance(leaf, (np.str_, np.bytes_)) else leaf
    if isinstance(leaf, np.ma.MaskedArray):
        raise ArgumentError(f"{where(path)}: a masked array; give x.filled(value), and x.mask beside it")
    if not isinstance(leaf, (np.ndarray, np.generic)):
        type_name = type(leaf).__name__
        try:
            leaf = _from_framework(leaf)
        # A framework may raise any exception.
        except Exception as error:
            raise ArgumentError(f"{where(path)}: {type_name} cannot be made a NumPy array: {error}") from error
        if leaf is None:
            raise ArgumentError(f"{where(path)}: {type_name} is no part of a state; {_WHAT}")
    if leaf.dtype.hasobject and leaf.dtype.kind != "T":
        raise ArgumentError(f"{where(path)}: an array of Python objects; {_WHAT}")
    if _is_of_ml_dtypes(leaf.dtype):
        # float32 represents all values of these dtypes.
        return leaf.astype(np.float32)
    if type(leaf) is not np.ndarray and isinstance(leaf, np.ndarray):
        leaf = np.asarray(leaf)
    return leaf.copy() if copied else leaf


def _is_of_ml_dtypes(dtype: np.dtype[Any]) -> bool:
    # NumPy does not classify dtypes of the package ml_dtypes as numbers.
    return dtype.kind == "V" and dtype.type is not np.void


def _from_framework(leaf: Any) -> Any:
    if isinstance(leaf, type):
        return None
    if callable(getattr(leaf, "detach", None)):
        tensor = leaf.detach().cpu()
        try:
            return tensor.numpy()
        except TypeError:
            # NumPy lacks this dtype.
            return tensor.float().numpy()
    if hasattr(leaf, "__cuda_array_interface__") and callable(getattr(leaf, "get", None)):
        return leaf.get()
    if hasattr(leaf, "__array__"):
        return np.asarray(leaf)
    return None


# --- from NumPy ---


class _Like:
    # Converts a saved nest to the types of a state, and arrays without a counterpart to those of its framework.

    def __init__(self, state: Any, owner: Any, copied: bool) -> None:
        self._state = state
        self._owner = owner
        self._copied = copied

    @cached_property
    def _make(self) -> Callable[[Any], Any] | None:
        return _maker_for(self._state, self._owner)

    def converted(self, nest: Any, state: Any, path: tuple[Any, ...]) -> Any:
        check_depth(path)
        is_inside_or_a_value = path or (self._owner is None and nest is not None)
        if is_inside_or_a_value and _one_does_not_exist_yet(nest, state):
            return self._new(nest, state, path)
        saved_items, state_items = items_of(nest), items_of(state)
        if saved_items is None and state_items is None:
            return self._leaf(nest, state, path)
        if saved_items is None or state_items is None or (_is_sequence(nest) and not _is_sequence(state)):
            raise ArgumentError(f"{where(path)}: {_kind(nest)} was saved, and {_kind(state)} is there")
        if self._owner is None and _is_list_of_scalars(nest) and _is_list_of_scalars(state) and len(nest) != len(state):
            return self._new(nest, state, path)
        parts, present = dict(saved_items), dict(state_items)
        _check_keys(parts, present, path)
        return _packed({key: self.converted(part, present[key], (*path, key)) for key, part in parts.items()}, state)

    def _leaf(self, leaf: Any, present: Any, path: tuple[Any, ...]) -> Any:
        if leaf is None and present is None:
            return None
        shapes = [tuple(getattr(value, "shape", ())) for value in (leaf, present)]
        if shapes[0] != shapes[1]:
            raise ArgumentError(f"{where(path)}: shape {shapes[0]} was saved, and {shapes[1]} is there")
        if isinstance(present, (np.ndarray, np.generic)) and _is_of_ml_dtypes(present.dtype):
            return np.asarray(leaf).astype(present.dtype)
        if isinstance(present, (*PLAIN, np.ndarray, np.generic)):
            return self._copied_if_needed(leaf)
        if leaf is None or isinstance(leaf, (str, bytes)):
            raise ArgumentError(f"{where(path)}: {_kind(leaf)} was saved, and {_kind(present)} is there")
        try:
            return _array_like(np.asarray(leaf), present, self._copied)
        # A framework may raise any exception.
        except Exception as error:
            raise ArgumentError(f"{where(path)}: no {type(present).__name__} can be made of it: {error}") from error

    def _copied_if_needed(self, leaf: Any) -> Any:
        return leaf.copy() if self._copied and isinstance(leaf, np.ndarray) else leaf

    def _new(self, nest: Any, state: Any, path: tuple[Any, ...]) -> Any:
        check_depth(path)
        items = items_of(nest)
        if items is not None:
            parts = {key: self._new(part, None, (*path, key)) for key, part in items}
            is_alike = items_of(state) is not None and _is_sequence(state) == _is_sequence(nest)
            # A named tuple cannot take fields other than its own.
            return _packed(parts, state if is_alike and not hasattr(state, "_fields") else nest)
        if not isinstance(nest, np.ndarray):
            return nest
        if self._make is None or nest.dtype.kind not in "biufc":
            return self._copied_if_needed(nest)
        try:
            return self._make(_native(nest, self._copied))
        except Exception as error:
            raise ArgumentError(f"{where(path)}: an array of {nest.dtype} cannot be made one: {error}") from error


def _one_does_not_exist_yet(nest: Any, state: Any) -> bool:
    if nest is None or state is None:
        return True
    if items_of(nest) is None or items_of(state) is None or _is_sequence(nest) != _is_sequence(state):
        return False
    # A named tuple is never empty for lack of state: it always has its fields.
    return (not nest) != (not state) and not hasattr(state, "_fields")


def _is_list_of_scalars(nest: Any) -> bool:
    return isinstance(nest, list) and all(items_of(part) is None and not getattr(part, "shape", ()) for part in nest)


def _check_keys(saved: Mapping[Any, Any], present: Mapping[Any, Any], path: tuple[Any, ...]) -> None:
    missing = [key for key in present if key not in saved]
    superfluous = [key for key in saved if key not in present]
    if missing or superfluous:
        raise ArgumentError(f"{where(path)}: {differences(missing, superfluous)}")


def differences(missing: Iterable[Any], superfluous: Iterable[Any]) -> str:
    """Return the part of a message that lists missing and superfluous keys."""
    clauses = [
        f"{', '.join(f'{key!r:.80}' for key in list(keys)[:20])}{' and others' if len(list(keys)) > 20 else ''} {word}"
        for keys, word in ((missing, "missing"), (superfluous, "superfluous"))
        if keys
    ]
    return "; ".join(clauses)


def _packed(parts: dict[Any, Any], state: Any) -> Any:
    if isinstance(state, list):
        return list(parts.values())
    if isinstance(state, tuple):
        return type(state)(**parts) if hasattr(state, "_fields") else tuple(parts.values())
    if type(state) is dict or not isinstance(state, MutableMapping):
        return parts
    # A copy keeps attributes that a mapping may have besides its items, as state dicts of torch do.
    mapping = copy.copy(state)
    mapping.clear()
    mapping.update(parts)
    return mapping


def _kind(nest: Any) -> str:
    if isinstance(nest, Mapping) or hasattr(nest, "_fields"):
        return "a dict"
    return "an array" if hasattr(nest, "shape") else f"a {type(nest).__name__}"


def _native(array: Any, copied: bool) -> Any:
    # Return the array in this machine's byte order, and writable because a tensor that shares its memory is.
    return np.array(array, array.dtype.newbyteorder("="), copy=True if copied or not array.flags.writeable else None)


def _array_like(array: Any, present: Any, copied: bool) -> Any:
    if callable(getattr(present, "new_tensor", None)):
        return present.new_tensor(_native(array, copied=False))
    namespace = getattr(present, "__array_namespace__", None)
    return array if namespace is None else namespace().asarray(_native(array, copied), dtype=present.dtype)


def _maker_for(state: Any, owner: Any) -> Callable[[Any], Any] | None:
    first = _first_of_framework(state, ())
    namespace = getattr(first, "__array_namespace__", None)
    if namespace is not None:
        return namespace().asarray  # type: ignore[no-any-return]
    for cls in type(owner if first is None else first).__mro__:
        # The framework of an existing object has been imported already.
        module = sys.modules.get(_MAKERS.get(cls.__module__.partition(".")[0], ""))
        if module is not None:
            return module.asarray  # type: ignore[no-any-return]
    return None


def _first_of_framework(nest: Any, path: tuple[Any, ...]) -> Any:
    check_depth(path)
    items = items_of(nest)
    if items is None:
        is_ours = nest is None or isinstance(nest, (*PLAIN, np.ndarray, np.generic)) or not hasattr(nest, "shape")
        return None if is_ours else nest
    candidates = (_first_of_framework(part, (*path, key)) for key, part in items)
    return next((candidate for candidate in candidates if candidate is not None), None)
