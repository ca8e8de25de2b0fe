"""Conversion of nests, dtypes, structures and specs to JSON and back, for saved datasets and state files.

A container is an object with one key, its kind. Callers encode the leaves.

===================  ================================================================
``dict``             pairs of a key, which is text or a whole number, and its value
``list``, ``tuple``  the items
===================  ================================================================
"""

from __future__ import annotations

import collections
import importlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Final

import numpy as np
import optree

from daskdist.core.spec import AnyRankSpec, DatasetSpec, ElementSpec, RaggedRowSpec, RaggedTensorSpec, TensorSpec
from daskdist.core.structure import FIXED_SIZE_KINDS, TEXT, Structure
from daskdist.errors import ArgumentError

# The largest depth of a nest; a deeper one probably contains itself.
MOST_DEPTH: Final = 100

Path = tuple[Any, ...]

_ANY_RANK: Final = "tensor of any rank"
_SPECS: Final[dict[str, type[TensorSpec]]] = {
    "tensor": TensorSpec,
    _ANY_RANK: AnyRankSpec,
    "ragged": RaggedTensorSpec,
    "row of ragged": RaggedRowSpec,
}
# The dtypes without a portable short name in NumPy.
_DTYPES: Final[dict[str, np.dtype[Any]]] = {"text": TEXT, "bytes": np.dtype(object)}


def nest_to_json(nest: Any, encode_leaf: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """Encode a nest as JSON.

    Parameters
    ----------
    nest
        Dicts, lists and tuples, exactly of these classes, and leaves.
    encode_leaf
        Returns the JSON of a leaf, given the path to it.
    path
        The path to the nest.
    """
    if type(nest) is dict:
        return {"dict": [[key, nest_to_json(part, encode_leaf, (*path, key))] for key, part in nest.items()]}
    if type(nest) not in (list, tuple):
        return encode_leaf(nest, path)
    items = [nest_to_json(part, encode_leaf, (*path, number)) for number, part in enumerate(nest)]
    return {"list" if type(nest) is list else "tuple": items}


def nest_from_json(content: Any, decode_leaf: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """Decode a nest that `nest_to_json` encoded.

    Raises
    ------
    LookupError, TypeError, ValueError
        The content is damaged.
    """
    if len(path) > MOST_DEPTH:
        raise ValueError(f"a nest is deeper than {MOST_DEPTH}")
    kind = next(iter(content)) if isinstance(content, dict) and len(content) == 1 else None
    if kind == "dict":
        named = {_checked_key(key): nest_from_json(part, decode_leaf, (*path, key)) for key, part in content[kind]}
        if len(named) != len(content[kind]):
            raise ValueError(f"a key is duplicated in {list(named)!r:.80}")
        return named
    if kind not in ("list", "tuple"):
        return decode_leaf(content, path)
    parts = typed(content[kind], list)
    items = [nest_from_json(part, decode_leaf, (*path, number)) for number, part in enumerate(parts)]
    return items if kind == "list" else tuple(items)


def typed(value: Any, kind: type[Any]) -> Any:
    """Return a value that was read from JSON, or raise a TypeError if it has another type."""
    if type(value) is not kind:
        raise TypeError(f"{value!r:.80} where {kind.__name__} is expected")
    return value


def _checked_key(key: Any) -> Any:
    if type(key) not in (str, int):
        raise TypeError(f"{key!r:.80} is not a key")
    return key


def spec_to_json(spec: ElementSpec) -> Any:
    """Encode the spec of an element as JSON.

    Raises
    ------
    ArgumentError
        The spec has a leaf that is a dataset, a dtype that cannot be saved, or a container of another class.
    """
    kinds = {kind: name for name, kind in _SPECS.items()}
    leaves = []
    for path, leaf in zip(spec.structure.paths, spec.leaves, strict=True):
        if isinstance(leaf, DatasetSpec):
            raise ArgumentError(no_dataset(path))
        leaves.append([kinds[type(leaf)], list(leaf.shape or ()), dtype_to_json(leaf.dtype), leaf.name])
    return {"structure": structure_to_json(spec.structure), "leaves": leaves}


def no_dataset(path: str) -> str:
    """Return the message for a leaf that cannot be saved because it is a dataset."""
    return (
        f"save: leaf {path or '(the element)'} is a dataset, such as a window, but files hold arrays; "
        "convert it to arrays first, with flat_map(lambda window: window.batch(...))"
    )


def _spec(kind: str, shape: Any, dtype: np.dtype[Any], name: str | None) -> TensorSpec:
    return AnyRankSpec(dtype=dtype, name=name) if kind == _ANY_RANK else _SPECS[kind](shape, dtype, name)


def spec_from_json(content: Any) -> ElementSpec:
    """Decode a spec that `spec_to_json` encoded."""
    structure = structure_from_json(content["structure"])
    leaves = tuple(
        _spec(kind, tuple(shape), dtype_from_json(dtype), None if name is None else typed(name, str))
        for kind, shape, dtype, name in content["leaves"]
    )
    if len(leaves) != structure.num_leaves:
        raise ValueError(f"{len(leaves)} leaves for a structure of {structure.num_leaves}")
    return ElementSpec(structure, leaves)


def dtype_to_json(dtype: np.dtype[Any]) -> str:
    """Encode a dtype as JSON, in native byte order.

    Raises
    ------
    ArgumentError
        The dtype cannot be saved.

    >>> dtype_to_json(np.dtype(">f4")), dtype_to_json(np.dtype("datetime64[25s]")), dtype_to_json(np.dtype("O"))
    ('<f4', '<M8[25s]', 'bytes')
    """
    for name, known in _DTYPES.items():
        if dtype == known:
            return name
    if dtype.kind not in FIXED_SIZE_KINDS:
        raise ArgumentError(
            f"save: dtype {dtype!r} cannot be saved; numbers, bools, times, text and bytes can, but not text that "
            "may be missing"
        )
    return dtype.newbyteorder("=").str


def dtype_from_json(content: Any) -> np.dtype[Any]:
    """Decode a dtype that `dtype_to_json` encoded."""
    dtype = _DTYPES.get(typed(content, str))
    if dtype is None:
        dtype = np.dtype(content).newbyteorder("=")
        if dtype.kind not in FIXED_SIZE_KINDS:
            raise ValueError(f"dtype {content!r}")
    return dtype


def structure_to_json(structure: Structure) -> Any:
    """Encode a structure as JSON: a leaf is null, and a container is an object of its kind.

    Raises
    ------
    ArgumentError
        A container has another class, or a name in a dict is neither text nor a whole number.

    >>> structure_to_json(Structure.of({"b": 0, "a": (0, 0)})[1])
    {'dict': [['b', None], ['a', {'tuple': [None, None]}]]}
    """
    _check_containers(structure.treespec)
    # Packed, because only a dict has the order of its names.
    return nest_to_json(structure.pack([None] * structure.num_leaves), _leaf_to_json)


def _leaf_to_json(leaf: Any, path: Path) -> Any:
    if leaf is None:
        return None
    kind = type(leaf)
    return {
        "namedtuple": f"{kind.__module__}:{kind.__qualname__}",
        "fields": list(kind._fields),
        "items": [nest_to_json(part, _leaf_to_json, (*path, number)) for number, part in enumerate(leaf)],
    }


def _check_containers(treespec: Any) -> None:
    if treespec.is_leaf():
        return
    kind = treespec.type
    if kind not in (tuple, dict) and treespec.kind != optree.PyTreeKind.NAMEDTUPLE:
        raise ArgumentError(
            f"save: {kind.__name__} cannot be saved; convert it to a tuple, named tuple or dict with map"
        )
    odd = next((name for name in treespec.entries() if type(name) not in (str, int)), None)
    if odd is not None:
        raise ArgumentError(f"save: {odd!r} is a name in a dict; give text or whole numbers")
    for child in treespec.children():
        _check_containers(child)


def structure_from_json(content: Any) -> Structure:
    """Decode a structure that `structure_to_json` encoded."""
    return Structure.of(nest_from_json(content, _leaf_from_json))[1]


def _leaf_from_json(content: Any, path: Path) -> Any:
    if content is None:
        return 0
    kind = _named_tuple(content["namedtuple"], tuple(content["fields"]))
    return kind(*[nest_from_json(part, _leaf_from_json, (*path, k)) for k, part in enumerate(content["items"])])


def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    module, _, qualname = name.partition(":")
    cls: Any = None
    # A module may raise anything when it is imported.
    with suppress(Exception):
        cls = importlib.import_module(module)
        for part in qualname.split("."):
            cls = getattr(cls, part)
    if isinstance(cls, type) and optree.is_namedtuple_class(cls) and getattr(cls, "_fields", ()) == fields:
        return cls
    return _stand_in(module, qualname, fields)


@cache
def _stand_in(module: str, qualname: str, fields: tuple[str, ...]) -> Any:
    # Cached, as structures of two classes are never equal.
    stand_in: Any = collections.namedtuple(qualname.rpartition(".")[2], fields, module=module)  # type: ignore[misc]
    stand_in.__qualname__ = qualname
    return stand_in
