"""Shapes and dtypes of leaves, known before there are values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final

import numpy as np

from daskdist.core.block import Block, Bundle, from_items
from daskdist.core.ragged import Ragged
from daskdist.core.structure import TEXT, Leaves, Nested, Structure, as_array, common_dtype, is_plain, spec_of_nested
from daskdist.core.to_numpy import without_loss
from daskdist.errors import ArgumentError, UserFunctionError

Shape = tuple[int | None, ...]
# For a made-up element: the length of axes of unknown length, and the value of all numbers, or None for varying ones.
MadeUp = tuple[int, float | None]
# Creates a dataset from rows and the spec of its elements.
MakeDataset = Callable[[Block | Bundle, "ElementSpec | None"], Any]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape and dtype of one leaf.

    Parameters
    ----------
    shape
        The length of each axis; None if it varies or is unknown. None instead of a shape is an `AnyRankSpec`, of
        arrays with any number of axes.
    dtype
        Anything that NumPy accepts as a dtype; ``str`` is text of any length.
    name
        For information only; specs with different names are compatible.

    >>> TensorSpec((None, 3), "float32")
    TensorSpec(shape=(None, 3), dtype=float32, name=None)
    """

    shape: Shape
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float32))
    name: str | None = None

    def __new__(cls, shape: Shape | None = (), *args: Any, **options: Any) -> TensorSpec:
        return object.__new__(AnyRankSpec if cls is TensorSpec and shape is None else cls)

    def __post_init__(self) -> None:
        if not isinstance(self, AnyRankSpec):
            shape = tuple(None if size is None else int(size) for size in self.shape)
            if any(size is not None and size < 0 for size in shape):
                raise ArgumentError(f"shape {self.shape} has a negative length; write None for an unknown length")
            object.__setattr__(self, "shape", shape)
        # Elements are in the byte order of this machine, with text of any length, and bytes as objects.
        dtype = np.dtype(self.dtype)
        dtype = dtype if dtype.isnative else dtype.newbyteorder("=")
        like: Any = {"<U0": TEXT, "|S0": object}.get(dtype.str, dtype)
        object.__setattr__(self, "dtype", np.dtype(like))

    @classmethod
    def of(cls, value: Any) -> TensorSpec:
        """Return the spec that fits one leaf."""
        if isinstance(value, Nested):
            return spec_of_nested(value)  # type: ignore[no-any-return]
        if isinstance(value, Ragged):
            return RaggedTensorSpec(value.shape, value.dtype)
        shape = np.shape(value)
        # The dtype of a single text of NumPy has the width of this text only.
        return cls(shape, TEXT if not shape and value.dtype.kind == "U" else value.dtype)

    def is_compatible_with(self, other: Any) -> bool:
        """Return whether an array, or every array of another spec, conforms to this spec.

        NumPy's text of any width is of one kind with its ``StringDType``, and its bytes of any width with Python's.

        >>> TensorSpec((None, 3)).is_compatible_with(np.zeros((5, 3), "float32"))
        True
        """
        if not isinstance(other, TensorSpec):
            if is_plain(other):
                # Python numbers have 64 or 32 bits, depending on the dataset.
                specs = [TensorSpec.of(as_array(other, narrow=narrow)) for narrow in (False, True)]
                return any(map(self.is_compatible_with, specs))
            other = TensorSpec.of(as_array(other))
        if isinstance(other, AnyRankSpec):
            return other.is_compatible_with(self)
        return (
            _common_kind(self, other) is not None
            and common_dtype(self.dtype, other.dtype) is not None
            and len(other.shape) == len(self.shape)
            and all(a is None or b is None or a == b for a, b in zip(self.shape, other.shape, strict=True))
        )

    def most_general_common_spec(self, other: TensorSpec) -> TensorSpec | None:
        """Return the narrowest spec that includes both; None if rank or dtype differ, but for the width of text.

        >>> TensorSpec((2, 3)).most_general_common_spec(TensorSpec((4, 3)))
        TensorSpec(shape=(None, 3), dtype=float32, name=None)
        >>> TensorSpec((), "U3").most_general_common_spec(TensorSpec((), "U5"))
        TensorSpec(shape=(), dtype=<U5, name=None)
        """
        if isinstance(other, AnyRankSpec):
            return other.most_general_common_spec(self)
        kind, dtype = _common_kind(self, other), common_dtype(self.dtype, other.dtype)
        if kind is None or dtype is None or len(self.shape) != len(other.shape):
            return None
        shape = tuple(a if a == b else None for a, b in zip(self.shape, other.shape, strict=True))
        return kind(shape, dtype, self.name if self.name == other.name else None)

    def grouped(self, size: int | None) -> TensorSpec:
        """Return the spec of ``size`` such leaves stacked along a new first axis."""
        return replace(self, shape=(size, *self.shape))

    def zeros(self, num_rows: int = 0) -> np.ndarray[Any, Any]:
        """Return an array of ``num_rows`` along the first axis; other unknown lengths are 0."""
        return np.zeros((num_rows, *(size or 0 for size in self.shape[1:])), self.dtype)

    def of_any_length(self) -> TensorSpec:
        """Return the spec with any length along the first axis."""
        return replace(self, shape=(None, *self.shape[1:])) if self.shape else self

    def example(self, unknown: int, value: float | None) -> Any:
        """Return a made-up leaf of this spec; see `ElementSpec.example`."""
        array = np.zeros([unknown if size is None else size for size in self.shape], self.dtype)
        kind = self.dtype.kind
        if kind in "biufc":
            array[...] = _numbers_like(array, value)
        elif kind == "O" or self.dtype == TEXT:
            text = "a 1 b" if value is None else "" if value in _WITHOUT_TEXT else str(value)
            array[...] = text.encode() if kind == "O" else text
        return array[()]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, name={self.name!r})"


@dataclass(frozen=True, slots=True, repr=False)
class AnyRankSpec(TensorSpec):
    """The dtype of a leaf with any number of axes, such as one that a replica without elements has as an empty array.

    >>> spec = TensorSpec(None, "int64")
    >>> spec, spec.is_compatible_with(np.int64(1)), spec.is_compatible_with(np.zeros((0, 3), "int64"))
    (AnyRankSpec(shape=None, dtype=int64, name=None), True, True)
    """

    shape: Shape = None  # type: ignore[assignment]  # as in TensorFlow for an unknown rank

    def is_compatible_with(self, other: Any) -> bool:
        if not isinstance(other, TensorSpec):
            return TensorSpec.of(as_array(other)).is_compatible_with(self)
        is_array = isinstance(other, AnyRankSpec | RaggedRowSpec) or type(other) is TensorSpec
        return is_array and bool(other.dtype == self.dtype or {other.dtype.kind, self.dtype.kind} <= {"T", "U"})

    def most_general_common_spec(self, other: TensorSpec) -> TensorSpec | None:
        is_array = isinstance(other, AnyRankSpec) or type(other) is TensorSpec
        return self if is_array and other.dtype == self.dtype else None

    def grouped(self, size: int | None) -> TensorSpec:
        return self

    def zeros(self, num_rows: int = 0) -> np.ndarray[Any, Any]:
        return np.zeros(num_rows, self.dtype)

    def example(self, unknown: int, value: float | None) -> Any:
        raise SpecUnknown("the number of axes of its elements is unknown")


@dataclass(frozen=True, slots=True, repr=False)
class RaggedTensorSpec(TensorSpec):
    """The shape and dtype of one leaf that is `Ragged`: a batch of rows of different lengths.

    >>> RaggedTensorSpec.of(Ragged(np.array([1, 2, 3]), [0, 2, 3]))
    RaggedTensorSpec(shape=(2, None), dtype=int64, name=None)
    """

    def grouped(self, size: int | None) -> TensorSpec:
        # Ragged elements of a group may differ in their number of rows, so that axis has no fixed length.
        return replace(self, shape=(size, None, *self.shape[1:]))

    def zeros(self, num_rows: int = 0) -> Any:
        """Return ``num_rows`` rows without values."""
        inner = [size or 0 for size in self.shape[2:]]
        return Ragged(np.zeros((0, *inner), self.dtype), np.zeros(num_rows + 1, np.int64))

    def example(self, unknown: int, value: float | None) -> Any:
        num_rows = unknown if self.shape[0] is None else self.shape[0]
        inner = TensorSpec((num_rows * unknown, *self.shape[2:]), self.dtype)
        return Ragged(inner.example(unknown, value), np.arange(num_rows + 1) * unknown)


@dataclass(frozen=True, slots=True, repr=False)
class RaggedRowSpec(TensorSpec):
    """The shape and dtype of one leaf that is a row of a `Ragged`: an array whose batches are `Ragged` again.

    >>> RaggedRowSpec((None,), "int64").grouped(2)
    RaggedTensorSpec(shape=(2, None), dtype=int64, name=None)
    """

    def grouped(self, size: int | None) -> TensorSpec:
        return RaggedTensorSpec((size, None, *self.shape[1:]), self.dtype, self.name)


def _common_kind(a: TensorSpec, b: TensorSpec) -> type[TensorSpec] | None:
    if type(a) is type(b):
        return type(a)
    # Both are specs of arrays.
    return RaggedRowSpec if {type(a), type(b)} == {TensorSpec, RaggedRowSpec} else None


@dataclass(frozen=True, slots=True, repr=False)
class DatasetSpec(TensorSpec):
    """The spec of a leaf that is a dataset, such as a window.

    Parameters
    ----------
    shape, dtype, name
        The shape ``()``, the dtype object, and the name of the leaf.
    element
        The spec of its elements.
    make
        Creates such a dataset from rows and the spec of its elements; None for the spec of the rows.
    draws
        Whether such datasets draw random numbers without a seed from the user.
    """

    shape: Shape = ()
    dtype: np.dtype[Any] = np.dtype(object)  # noqa: RUF009 - immutable
    element: ElementSpec | None = None
    make: MakeDataset | None = field(default=None, compare=False)
    draws: bool = field(default=False, compare=False)

    @property
    def element_spec(self) -> Any:
        """The specs of an element, in its structure."""
        return self.element.packed if self.element is not None else None

    def is_compatible_with(self, other: Any) -> bool:
        if isinstance(other, Nested):
            other = spec_of_nested(other)
        return isinstance(other, DatasetSpec) and self.most_general_common_spec(other) is not None

    def most_general_common_spec(self, other: TensorSpec) -> TensorSpec | None:
        if not isinstance(other, DatasetSpec) or self.element is None or other.element is None:
            return None
        element = self.element.most_general_common_spec(other.element)
        return None if element is None else replace(self, element=element)

    def example(self, unknown: int, value: float | None) -> Any:
        if self.element is None or self.make is None:
            raise SpecUnknown("the elements of its windows are unknown")
        leaves, structure = Structure.flatten(self.element.example(unknown, value))
        return self.make(from_items(structure, [leaves] * unknown), self.element)

    def __repr__(self) -> str:
        return f"DatasetSpec({self.element_spec})"


class SpecUnknown(Exception):  # noqa: N818 - a signal between layers
    """A spec that depends on the data; the message says why."""


class PerReplicaSpec:
    """The specs of one leaf on every replica, in replica order."""

    __slots__ = ("specs",)

    def __init__(self, *specs: TensorSpec) -> None:
        self.specs = specs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerReplicaSpec) and self.specs == other.specs

    def __hash__(self) -> int:
        return hash(self.specs)

    def __repr__(self) -> str:
        if len(self.specs) > 4 and len(set(self.specs)) == 1:
            return f"PerReplicaSpec({len(self.specs)} x {self.specs[0]})"
        return f"PerReplicaSpec({', '.join(map(repr, self.specs))})"


@dataclass(frozen=True, slots=True)
class ElementSpec:
    """The structure of a dataset's elements and the spec of each leaf."""

    structure: Structure
    leaves: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, element: Any) -> ElementSpec:
        """Return the spec that fits one element."""
        leaves, structure = Structure.flatten(element)
        return cls(structure, tuple(map(TensorSpec.of, leaves)))

    @classmethod
    def of_rows(cls, structure: Structure, columns: Sequence[Any]) -> ElementSpec:
        """Return the spec of elements that are the rows of arrays; a row of a nested `Ragged` is ragged itself."""
        return cls(structure, tuple(map(_spec_of_rows, columns)))

    @staticmethod
    def nest(structure: Structure, parts: Sequence[ElementSpec]) -> ElementSpec:
        """Return the spec of elements made of one element of each part, nested like ``structure``."""
        nested = structure.nest([part.structure for part in parts])
        return ElementSpec(nested, tuple(leaf for part in parts for leaf in part.leaves))

    @property
    def has_ragged_rows(self) -> bool:
        """Return whether a leaf is a row of a `Ragged`, so that its batches are ragged."""
        return any(isinstance(leaf, RaggedRowSpec) for leaf in self.leaves)

    @property
    def num_bytes(self) -> int | None:
        """The bytes of an element by its shapes and dtypes; None if a size is unknown."""
        if any(leaf.shape is None or None in leaf.shape for leaf in self.leaves):
            return None
        return sum(prod(size or 0 for size in leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves)

    @property
    def row_bytes(self) -> int:
        """The bytes of one row of a batch by its shapes and dtypes; unknown sizes count as 1."""
        return sum(prod(size or 1 for size in (leaf.shape or ())[1:]) * leaf.dtype.itemsize for leaf in self.leaves)

    @property
    def packed(self) -> Any:
        """The specs in the structure of an element, as shown to users."""
        return self.structure.pack(self.leaves)

    def conform(self, element: Any, *, casts: bool = True) -> Leaves:
        """Convert the leaves of an element to this spec.

        Numbers become numbers of the spec's dtype if no integer changes: floats do not become integers, and a number
        that the dtype does not have is an error. Text becomes text of any length if the spec says so. Without ``casts``
        only Python numbers, lists of them and empty arrays are converted.

        Raises
        ------
        ArgumentError
            The element does not conform; the message names the leaf, its value and the expected spec.
        """
        try:
            element_leaves = self.structure.leaves_of(element)
        except (ValueError, TypeError):
            _, structure = Structure.of(element)
            raise self._other_structure(structure) from None
        leaves = []
        for path, spec, value in zip(self.structure.paths, self.leaves, element_leaves, strict=True):
            try:
                leaf = as_array(value)
            except ArgumentError as error:
                raise ArgumentError(
                    f"{value!r:.80} for leaf {path or '(the element)'}, where {spec} is expected: {error}"
                ) from None
            is_array = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype != spec.dtype
            if is_array and (casts or is_plain(value) or not leaf.size):
                try:
                    # An empty list conforms to any dtype, also as the array of floats that NumPy makes of it.
                    is_open = not leaf.size and (is_plain(value) or leaf.dtype.kind == "f")
                    leaf = np.asarray(value, spec.dtype) if is_open else without_loss(leaf, spec.dtype)
                except (OverflowError, FloatingPointError):
                    raise ArgumentError(
                        f"{value!r:.80} for leaf {path or '(the element)'}, where {spec} is expected, "
                        "which cannot hold that number"
                    ) from None
            if not spec.is_compatible_with(leaf):
                raise ArgumentError(_other_spec(path, TensorSpec.of(leaf), spec))
            leaves.append(leaf)
        return tuple(leaves)

    def check(self, other: ElementSpec) -> None:
        """Raise an `ArgumentError` that names the leaf unless all elements of another spec conform to this one."""
        if other.structure != self.structure:
            raise self._other_structure(other.structure)
        for path, spec, leaf in zip(self.structure.paths, self.leaves, other.leaves, strict=True):
            if not spec.is_compatible_with(leaf):
                raise ArgumentError(_other_spec(path, leaf, spec))

    def _other_structure(self, structure: Structure) -> ArgumentError:
        return ArgumentError(f"the structure {structure}, where {self.structure} is expected")

    def with_leaves(self, leaves: Sequence[TensorSpec]) -> ElementSpec:
        """Return the spec with other leaves."""
        return ElementSpec(self.structure, tuple(leaves))

    def of_any_shape(self) -> ElementSpec:
        """Return the spec with any lengths of axes."""
        return self.with_leaves(
            [replace(leaf, shape=(None,) * len(leaf.shape)) if leaf.shape else leaf for leaf in self.leaves]
        )

    def grouped(self, size: int | None) -> ElementSpec:
        """Return the spec of ``size`` stacked elements."""
        return self.with_leaves([leaf.grouped(size) for leaf in self.leaves])

    def example(self, unknown: int, value: float | None) -> Any:
        """Return a made-up element of this spec.

        Parameters
        ----------
        unknown
            The length of axes of unknown length.
        value
            The value of all numbers; None for varying numbers.
        """
        return self.structure.pack([leaf.example(unknown, value) for leaf in self.leaves])

    def most_general_common_spec(self, other: ElementSpec) -> ElementSpec | None:
        """Return the narrowest spec that includes both; None if structure, rank or dtype differ."""
        if self.structure != other.structure:
            return None
        leaves = [a.most_general_common_spec(b) for a, b in zip(self.leaves, other.leaves, strict=True)]
        return None if None in leaves else self.with_leaves([leaf for leaf in leaves if leaf is not None])


def _other_spec(path: str, leaf: TensorSpec, spec: TensorSpec) -> str:
    return f"{leaf} for leaf {path or '(the element)'}, where {spec} is expected"


def _spec_of_rows(column: Any) -> TensorSpec:
    shape = column.shape[1:]
    if isinstance(column, Ragged) and isinstance(column.values, Ragged):
        return RaggedTensorSpec(shape, column.dtype)
    return TensorSpec(shape, column.dtype)


def is_safe(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Return whether a Python value may change its dtype: an integer may become a float, but not the reverse."""
    order = "biufc"
    if source.kind in order and target.kind in order:
        return source.kind == target.kind or (
            source.kind != "b" and order.index(source.kind) <= order.index(target.kind)
        )
    return source.kind in "TSUO" and target.kind in "TSUO"


# Made-up elements to try functions on: the length of axes of unknown length, and the value of all numbers, or None for
# varying ones. The function must accept the first ones; it may reject the others.
_MADE_UP: Final = ((2, 1), (3, 2))
_MORE_MADE_UP: Final[tuple[MadeUp, ...]] = ((2, 0), (1, 3), (4, None), (5, 7))
# With these values, text is empty.
_WITHOUT_TEXT: Final = (0, 1, 2)
_DIFFERENT: Final = (3, -1, 0, 2, -4, 1, 5)
# Number of axes of a made-up leaf -> the largest length to take from a number in the code of a function.
_LONGEST: Final = {0: 1024, 1: 1024, 2: 64}
_MOST_NUMBERS: Final = 6


def _numbers_like(made_up: Any, value: float | None) -> Any:
    numbers = np.resize(np.array(_DIFFERENT), made_up.shape) if value is None else np.array(value)
    if made_up.dtype.kind in "iu":
        limits = np.iinfo(made_up.dtype)
        numbers = np.abs(numbers) if made_up.dtype.kind == "u" else numbers
        numbers = np.clip(numbers, max(limits.min, -(2**53)), limits.max)
    return numbers.astype(made_up.dtype)


def learned_spec(
    try_one: Callable[[int, float | None], ElementSpec],
    numbers: Sequence[float],
    source: ElementSpec,
) -> ElementSpec:
    """Return the spec of a function's results, learned by trying it on made-up elements.

    An axis is unknown if its length differs between two tries, or if it is 0, as after a selection that drops all
    made-up values.

    Parameters
    ----------
    try_one
        ``try_one(unknown, value)`` returns the spec of the result for `ElementSpec.example`.
    numbers
        The numbers in the function's code, at which its result may change.
    source
        The spec of its arguments.

    Raises
    ------
    SpecUnknown
        The function failed on the first elements, or its results have no common spec.
    """
    common: ElementSpec | None = None
    for unknown, value in _MADE_UP:
        try:
            common = common_or_raise(common, try_one(unknown, value))
        except UserFunctionError as error:
            raise SpecUnknown(str(error)) from None
    for made_up in (*_MORE_MADE_UP, *_around(numbers, source)):
        # Many functions reject zeros, or lengths that do not suit them.
        with contextlib.suppress(UserFunctionError), np.errstate(all="ignore"):
            common = common_or_raise(common, try_one(*made_up))
    return without_empty_axes(common)  # type: ignore[arg-type]


def common_or_raise(common: ElementSpec | None, spec: ElementSpec) -> ElementSpec:
    """Return the common spec of elements with either spec; the first may be None.

    Raises
    ------
    SpecUnknown
        There is no common spec.
    """
    if common is None:
        return spec
    wider = common.most_general_common_spec(spec)
    if wider is not None:
        return wider
    if any(0 in (leaf.shape or ()) for either in (common, spec) for leaf in either.leaves):
        # The dtype and rank of an empty result may differ from others, and its length depends on the values.
        kept = min(common, spec, key=lambda candidate: sum(0 in (leaf.shape or ()) for leaf in candidate.leaves))
        return kept.of_any_shape()
    raise SpecUnknown("the structure, rank or dtype of its result depends on the element")


def of_any_rank(common: ElementSpec | None, spec: ElementSpec) -> ElementSpec | None:
    """Return the common spec of two specs that may differ in rank; None if they differ in more than that."""
    if common is None or common.structure != spec.structure:
        return None
    leaves = []
    for a, b in zip(common.leaves, spec.leaves, strict=True):
        leaf = a.most_general_common_spec(b) or AnyRankSpec(dtype=a.dtype, name=a.name).most_general_common_spec(b)
        if leaf is None or (isinstance(leaf, AnyRankSpec) and type(a) not in (TensorSpec, AnyRankSpec)):
            return None
        leaves.append(leaf)
    return common.with_leaves(leaves)


def _around(numbers: Sequence[float], source: ElementSpec) -> list[MadeUp]:
    # Return made-up elements with these numbers and their neighbours as values and as lengths.
    num_axes = max([(leaf.shape or ()).count(None) for leaf in source.leaves], default=0)
    longest = _LONGEST.get(num_axes, 16)
    made_up: list[MadeUp] = []
    for number in numbers[:_MOST_NUMBERS]:
        length = min(max(abs(int(number)), 1), longest)
        made_up += [(min(length + 1, longest), number), (max(length - 1, 1), number + (1 if number > 0 else -1))]
    return made_up


def without_empty_axes(spec: ElementSpec) -> ElementSpec:
    """Return the spec with axes of length 0 as unknown ones."""
    return spec.with_leaves([_without_empty_axes(leaf) for leaf in spec.leaves])


def _without_empty_axes(leaf: TensorSpec) -> TensorSpec:
    return replace(leaf, shape=tuple(size or None for size in leaf.shape)) if leaf.shape and 0 in leaf.shape else leaf


def check_ranks(operation: str, spec: ElementSpec) -> None:
    """Raise an `ArgumentError` that names a leaf with an unknown number of axes, if there is one."""
    for path, leaf in zip(spec.structure.paths, spec.leaves, strict=True):
        if isinstance(leaf, AnyRankSpec):
            raise ArgumentError(
                f"{operation}: the number of axes of leaf {path or '(the element)'} is unknown, {leaf}; give its "
                f"shape, such as TensorSpec((None,), {str(leaf.dtype)!r})"
            )


def known_spec(node: Any) -> ElementSpec | None:
    """Return the spec of a node's elements; None if it depends on the data."""
    try:
        spec: ElementSpec = node.spec
    except SpecUnknown:
        return None
    return spec


def common_spec(operation: str, inputs: Sequence[Any], *, must_be_known: bool = False) -> ElementSpec:
    """Return the common spec of the elements of several nodes.

    Raises
    ------
    ArgumentError
        Their structures, dtypes or ranks differ; the message says how.
    SpecUnknown
        A spec is unknown, and ``must_be_known``.
    """
    common: ElementSpec | None = None
    for number, node in enumerate(inputs):
        spec = node.spec if must_be_known else known_spec(node)
        if spec is None:
            continue
        if common is None:
            common = spec
            continue
        if spec.structure != common.structure:
            raise ArgumentError(
                f"{operation}: elements of dataset {number} are {spec.structure}, but earlier ones {common.structure}"
            )
        for path, a, b in zip(spec.structure.paths, common.leaves, spec.leaves, strict=True):
            if a.most_general_common_spec(b) is None:
                raise ArgumentError(
                    f"{operation}: leaf {path or '(the element)'} of dataset {number} is {b}, but of earlier ones {a}; "
                    "dtype and rank must be the same"
                )
        common = common.most_general_common_spec(spec)
    if common is None:
        raise SpecUnknown(f"{operation}: the specs of all inputs are unknown")
    return common
