"""Conversion of nested elements to leaves and back.

Tuples, named tuples and dicts are structure. Everything else is a leaf, and a leaf is an array: a list is stacked into
one, a Python float becomes float64 and an int int64, as in NumPy, but integers that would be rounded to floats are an
error; with ``narrow``, float32 and int32 (int64 if it does not fit), as in TensorFlow. NumPy arrays and scalars keep
their dtype, in the byte order of this machine, and so do arrays on devices, which are copied to the host. Text is
NumPy's ``StringDType``, and bytes are objects. Two kinds of leaves are not NumPy arrays: rows of different lengths
(`Ragged`) and datasets (`Nested`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

import numpy as np
import optree

from daskdist.core.ragged import Ragged
from daskdist.core.to_numpy import HOST_CONVERTERS, PLAIN, native, plain_array, to_numpy
from daskdist.errors import ArgumentError

Leaves = tuple[Any, ...]

# The dtype of text.
TEXT: Final = np.dtype(np.dtypes.StringDType())
# The kinds of dtypes whose values are bytes of one length, without references to objects.
FIXED_SIZE_KINDS: Final = "biufcmMSU"
# Kinds of dtypes of text, and of bytes: of some width, and of any.
ONE_KIND: Final = ({"T"}, {"U"}, {"T", "U"}, {"S"}, {"S", "O"})
# The most characters of a nesting in a message.
_MOST_CHARACTERS: Final = 300


class Nested:
    """A dataset that is a leaf of an element, such as a window."""

    def _spec_of_leaf(self) -> Any:
        raise NotImplementedError

    def _with_own_arrays(self) -> Any:
        raise NotImplementedError


def spec_of_nested(dataset: Nested) -> Any:
    """Return the `DatasetSpec` of a dataset that is a leaf."""
    return dataset._spec_of_leaf()


def with_own_arrays(dataset: Nested) -> Any:
    """Return a dataset with copies of the arrays that it is made of and that something else could change."""
    return dataset._with_own_arrays()


class Structure:
    """The nesting of the leaves of an element; equal structures compare equal.

    >>> leaves, structure = Structure.flatten({"y": 1, "x": (2.0, [3, 4])})
    >>> structure.pack([leaf * 10 for leaf in leaves])
    {'y': np.int64(10), 'x': (np.float64(20.0), array([30, 40]))}
    >>> structure.paths
    ("['x'][0]", "['x'][1]", "['y']")
    """

    __slots__ = ("_pack", "treespec")

    def __init__(self, treespec: Any) -> None:
        self.treespec = treespec
        self._pack = _packer(treespec)

    @staticmethod
    def flatten(element: Any, *, narrow: bool = False) -> tuple[Leaves, Structure]:
        """Return the leaves of an element, as arrays, and their structure; ``narrow`` as in `as_array`."""
        leaves, treespec = optree.tree_flatten(element, is_leaf=_is_leaf, none_is_leaf=True)
        structure = Structure(treespec)
        arrays: list[Any] = []
        try:
            # Extend leaf by leaf, so that the number of arrays at a failure is the number of its leaf.
            arrays.extend(map(narrow_array if narrow else as_array, leaves))
        except ArgumentError as error:
            path = structure.paths[len(arrays)]
            if not path:
                raise
            raise ArgumentError(f"{error} (leaf {path})") from None
        return tuple(arrays), structure

    @staticmethod
    def of(nest: Any) -> tuple[Leaves, Structure]:
        """Flatten a nest to its leaves, unchanged, and its structure."""
        leaves, treespec = optree.tree_flatten(nest, is_leaf=_is_leaf, none_is_leaf=True)
        return tuple(leaves), Structure(treespec)

    def nest(self, parts: Iterable[Structure]) -> Structure:
        """Return the structure with a part in place of each leaf."""
        return Structure.of(self.pack([part.pack(range(part.num_leaves)) for part in parts]))[1]

    def pack(self, leaves: Sequence[Any]) -> Any:
        """Return the element with these leaves."""
        return self._pack(leaves)

    @property
    def packer(self) -> Callable[[Sequence[Any]], Any]:
        """The function that `pack` calls, for direct use with many elements."""
        return self._pack

    def leaves_of(self, element: Any) -> list[Any]:
        """Return the leaves of an element of this structure, unchanged."""
        return list(self.treespec.flatten_up_to(element))

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each leaf in an element, as Python would write it; ``""`` for a lone leaf."""
        return tuple(accessor.codify("") for accessor in self.treespec.accessors())

    def in_order(self, leaves: Iterable[Any]) -> list[tuple[str, Any]]:
        """Return the path and the value of each leaf, in the order of the element: dicts keep that of their keys.

        >>> leaves, structure = Structure.of({"y": 1, "x": (2, 3)})
        >>> structure.in_order(leaves)
        [("['y']", 1), ("['x'][0]", 2), ("['x'][1]", 3)]
        """
        pairs = list(zip(self.paths, leaves, strict=True))
        return [pairs[place] for place in self.places]

    @property
    def places(self) -> tuple[int, ...]:
        """The numbers of the leaves in the order of the element, which differs between some equal structures."""
        return tuple(_places(self.pack(range(self.num_leaves))))

    @property
    def num_leaves(self) -> int:
        return int(self.treespec.num_leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and bool(self.treespec == other.treespec)

    def __hash__(self) -> int:
        return hash(self.treespec)

    def __repr__(self) -> str:
        return describe_nesting(self.treespec)

    def __reduce__(self) -> tuple[Any, ...]:
        return Structure, (self.treespec,)

    def __dask_tokenize__(self) -> object:
        return "Structure", str(self.treespec)


@dataclass(frozen=True)
class LeafText:
    """A text as its repr, to show in place of a leaf of a nest."""

    text: str

    def __repr__(self) -> str:
        return self.text


def describe_nesting(treespec: Any) -> str:
    """Return the nesting of values as Python would print it, with the word value for each; the start of a long one.

    >>> describe_nesting(optree.tree_structure({"a": 1, "b": (2, 3)}))
    "{'a': value, 'b': (value, value)}"
    """
    text = str(treespec.unflatten([LeafText("value")] * treespec.num_leaves))
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}... ({treespec.num_leaves:,} values)"


def _places(nest: Any) -> Iterator[int]:
    if isinstance(nest, int):
        yield nest
        return
    for part in nest.values() if isinstance(nest, dict) else optree.tree_flatten_one_level(nest)[0]:
        yield from _places(part)


def _packer(treespec: Any) -> Callable[[Sequence[Any]], Any]:
    # Unflattening takes half a microsecond, which common structures can avoid.
    if treespec.is_leaf():
        return itemgetter(0)
    if treespec.type is tuple and all(child.is_leaf() for child in treespec.children()):
        return tuple
    if treespec.type is dict and all(child.is_leaf() for child in treespec.children()):
        order = treespec.unflatten(range(treespec.num_leaves))
        if list(order.values()) == list(range(treespec.num_leaves)):
            keys = tuple(order)
            return lambda leaves: dict(zip(keys, leaves, strict=True))
    return treespec.unflatten  # type: ignore[no-any-return]


def _is_leaf(node: object) -> bool:
    return isinstance(node, list)


def call_with(function: Callable[..., Any], element: Any) -> Any:
    """Call a user's function with an element: a tuple's items one by one, anything else whole."""
    return function(*element) if type(element) is tuple else function(element)


def narrow_array(leaf: Any) -> Any:
    """Return a leaf like `as_array`, with Python numbers as int32 and float32."""
    return as_array(leaf, narrow=True)


def as_array(leaf: Any, *, narrow: bool = False) -> Any:
    """Return a leaf as a NumPy array or scalar, by the rules at the top of this file.

    Parameters
    ----------
    leaf
        The leaf.
    narrow
        Whether Python numbers, and lists of them, become int32 (int64 if one does not fit) and float32.

    >>> as_array([[1.5], [2.5]]).dtype, as_array([[1.5]], narrow=True).dtype, as_array(np.float32(1)).dtype
    (dtype('float64'), dtype('float32'), dtype('float32'))
    >>> as_array(3).dtype, as_array(3, narrow=True).dtype, as_array(2**40, narrow=True).dtype
    (dtype('int64'), dtype('int32'), dtype('int64'))
    """
    if isinstance(leaf, np.ndarray):
        return native(leaf if type(leaf) is np.ndarray else plain_array(leaf))
    if isinstance(leaf, np.generic):
        return native(leaf)
    if isinstance(leaf, (Ragged, Nested)):
        return leaf
    if leaf is None:
        raise ArgumentError("None is not an element: give arrays, numbers, strings, or nests of them")
    if type(leaf) is not list and type(leaf) not in PLAIN:
        leaf = HOST_CONVERTERS.columns(leaf)
        if isinstance(leaf, np.ndarray):
            return native(leaf)
        if isinstance(leaf, Ragged):
            return leaf
    try:
        array = to_numpy(leaf)
    except ArgumentError:
        raise
    except ValueError as error:
        advice = ""
        if not isinstance(leaf, (list, tuple)) and hasattr(leaf, "__getitem__"):
            advice = "; for a map-style dataset write Dataset.range(len(data)).map(data.__getitem__)"
        name = type(leaf).__name__
        raise ArgumentError(
            f"a {name} becomes one array, but the parts of this one differ in shape: {error}{advice}"
        ) from None
    if array.dtype == object:
        if not isinstance(leaf, (list, int)):
            raise ArgumentError(f"{type(leaf).__name__} is not an array, a number or a string")
        _refuse_objects(array)
    if array.dtype.kind == "U":
        # Variable-length text, so that elements of different lengths stack. A scalar would be a Python string without
        # a dtype, and NumPy's fixed-width text loses trailing zeros.
        text = leaf if isinstance(leaf, (str, list)) else array
        return np.array(text, TEXT)
    if array.dtype.kind == "S":
        # NumPy's bytes lose trailing zeros.
        return np.array(leaf, object)
    if narrow and array.dtype.kind in "fi" and is_plain(leaf):
        kind: type[Any] = np.float32 if array.dtype.kind == "f" else np.int32
        if kind is np.float32 or array.size == 0 or (array.min() >= -(2**31) and array.max() < 2**31):
            array = array.astype(kind)
    return array[()]


def _refuse_objects(array: Any) -> None:
    # Only text and bytes are elements.
    kinds = set(map(type, array.flat))
    if type(None) in kinds:
        raise ArgumentError(
            "a leaf has missing values (None), which arrays do not have: write float('nan') for a number, \"\" for text"
            " and numpy.datetime64('NaT') for a date, or leave these elements out"
        )
    refused = [kind for kind in kinds if not issubclass(kind, bytes | str)]
    large = [number for number in array.flat if type(number) is int and not -(2**63) <= number < 2**64]
    if int in refused and large:
        raise ArgumentError(f"the number {large[0]} does not fit into 64 bits; give a float, or text")
    if refused:
        raise ArgumentError(
            f"a leaf has values of {refused[0].__name__}: give numbers of NumPy's dtypes, text or bytes"
        )


def is_plain(leaf: Any) -> bool:
    """Return whether a value is a Python number or a list of them, so that its dtype can be chosen."""
    if isinstance(leaf, (list, tuple)):
        return all(map(is_plain, leaf))
    return isinstance(leaf, (int, float)) and not isinstance(leaf, np.generic)


# The structure of an element that is a single leaf.
LONE: Final = Structure.of(0)[1]


def common_dtype(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the dtype that holds values of both, if they are equal or differ only in the width of text or bytes.

    >>> common_dtype(np.dtype("U3"), np.dtype("U5")), common_dtype(np.dtype("S3"), np.dtype(object))
    (dtype('<U5'), dtype('O'))
    """
    if a == b:
        return a
    return np.result_type(a, b) if {a.kind, b.kind} in ONE_KIND else None
