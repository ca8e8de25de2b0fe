"""Shapes and dtypes of leaves, before there are any values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from daskdist.core.block import Block, Bundle, from_items
from daskdist.core.ragged import Ragged
from daskdist.core.structure import Leaves, Nested, Structure, as_array, is_plain, spec_of_nested
from daskdist.errors import ArgumentError, UserFunctionError

Shape = tuple[int | None, ...]
# The length of axes that is not known, and the value of all numbers, None where they differ.
MadeUp = tuple[int, float | None]
# Makes a dataset of rows and the spec of its elements.
MakeDataset = Callable[[Block | Bundle, "ElementSpec | None"], Any]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one leaf.

    Parameters
    ----------
    shape
        One length an axis; None where it varies or is not known.
    dtype
        Anything NumPy takes for a dtype.
    name
        For the reader; specs of different names are compatible.

    >>> TensorSpec((None, 3), "float32")
    TensorSpec(shape=(None, 3), dtype=float32, name=None)
    """

    shape: Shape
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float32))
    name: str | None = None

    def __post_init__(self) -> None:
        shape = tuple(None if size is None else int(size) for size in self.shape)
        if any(size is not None and size < 0 for size in shape):
            raise ArgumentError(f"shape {self.shape} has a negative length; write None for one not known")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    @classmethod
    def of(cls, value: Any) -> TensorSpec:
        """Return the spec that fits one leaf."""
        if isinstance(value, Nested):
            return spec_of_nested(value)  # type: ignore[no-any-return]
        if isinstance(value, Ragged):
            return RaggedTensorSpec(value.shape, value.dtype)
        return cls(np.shape(value), value.dtype)

    def is_compatible_with(self, other: Any) -> bool:
        """Return whether an array, or every array of another spec, conforms to this spec.

        >>> TensorSpec((None, 3)).is_compatible_with(np.zeros((5, 3), "float32"))
        True
        """
        if not isinstance(other, TensorSpec):
            if is_plain(other):
                # Python's own numbers are of 64 bits or of 32, as the dataset that they come to has it.
                specs = [TensorSpec.of(as_array(other, narrow=narrow)) for narrow in (False, True)]
                return any(map(self.is_compatible_with, specs))
            other = TensorSpec.of(as_array(other))
        return (
            _common_kind(self, other) is not None
            and other.dtype == self.dtype
            and len(other.shape) == len(self.shape)
            and all(a is None or b is None or a == b for a, b in zip(self.shape, other.shape, strict=True))
        )

    def most_general_common_spec(self, other: TensorSpec) -> TensorSpec | None:
        """Return the narrowest spec that includes both; None where dtype or rank differ.

        >>> TensorSpec((2, 3)).most_general_common_spec(TensorSpec((4, 3)))
        TensorSpec(shape=(None, 3), dtype=float32, name=None)
        """
        kind = _common_kind(self, other)
        if kind is None or self.dtype != other.dtype or len(self.shape) != len(other.shape):
            return None
        shape = tuple(a if a == b else None for a, b in zip(self.shape, other.shape, strict=True))
        return kind(shape, self.dtype, self.name if self.name == other.name else None)

    def grouped(self, size: int | None) -> TensorSpec:
        """Return the spec of ``size`` such leaves stacked along a new first axis."""
        return replace(self, shape=(size, *self.shape))

    def zeros(self, num_rows: int = 0) -> np.ndarray[Any, Any]:
        """Return an array of ``num_rows`` along the first axis; other unknown lengths are 0."""
        return np.zeros((num_rows, *(size or 0 for size in self.shape[1:])), self.dtype)

    def of_any_length(self) -> TensorSpec:
        """Return the spec of such leaves whatever their length along the first axis."""
        return replace(self, shape=(None, *self.shape[1:])) if self.shape else self

    def example(self, unknown: int, value: float | None) -> Any:
        """Return a made-up leaf that fits: unknown lengths are ``unknown``, numbers ``value``, or differ if None."""
        made = np.zeros([unknown if size is None else size for size in self.shape], self.dtype)
        kind = self.dtype.kind
        if kind in "biufc":
            made[...] = _numbers_like(made, value)
        elif kind == "O" or self.dtype == np.dtypes.StringDType():
            text = "a 1 b" if value is None else "" if value in _WITHOUT_TEXT else str(value)
            made[...] = text.encode() if kind == "O" else text
        return made[()]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, name={self.name!r})"


@dataclass(frozen=True, slots=True, repr=False)
class AnyRankSpec(TensorSpec):
    """Dtype of one leaf that has no axes, or one without length where a replica has run out of elements.

    >>> spec = AnyRankSpec(dtype="int64")
    >>> spec, spec.is_compatible_with(np.int64(1)), spec.is_compatible_with(np.zeros(0, "int64"))
    (AnyRankSpec(shape=None, dtype=int64, name=None), True, True)
    """

    shape: Shape = None  # type: ignore[assignment]  # as TensorFlow has it where the rank is not known

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    def is_compatible_with(self, other: Any) -> bool:
        dtype = getattr(other, "dtype", None)
        return bool(self.dtype == (as_array(other).dtype if dtype is None else dtype))

    def most_general_common_spec(self, other: TensorSpec) -> TensorSpec | None:
        is_array = isinstance(other, AnyRankSpec) or type(other) is TensorSpec
        return self if is_array and other.dtype == self.dtype else None


@dataclass(frozen=True, slots=True, repr=False)
class RaggedTensorSpec(TensorSpec):
    """Shape and dtype of one leaf that is `Ragged`: a batch of rows of different lengths.

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
    """Shape and dtype of one leaf that is a row of a `Ragged`: an array, and batches of such are `Ragged` again.

    >>> RaggedRowSpec((None,), "int64").grouped(2)
    RaggedTensorSpec(shape=(2, None), dtype=int64, name=None)
    """

    def grouped(self, size: int | None) -> TensorSpec:
        return RaggedTensorSpec((size, None, *self.shape[1:]), self.dtype, self.name)


def _common_kind(a: TensorSpec, b: TensorSpec) -> type[TensorSpec] | None:
    if type(a) is type(b):
        return type(a)
    # Both are of arrays.
    return RaggedRowSpec if {type(a), type(b)} == {TensorSpec, RaggedRowSpec} else None


@dataclass(frozen=True, slots=True, repr=False)
class DatasetSpec(TensorSpec):
    """The spec of a leaf that is a dataset, as a window is.

    Parameters
    ----------
    shape, dtype, name
        Of one object.
    element
        The spec of its elements.
    make
        Makes such a dataset of rows and the spec of its elements, or None for that of the rows.
    draws
        Whether such datasets draw at random by seeds that they were not given.
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
            raise SpecUnknown("the elements of its windows are not known")
        leaves, structure = Structure.flatten(self.element.example(unknown, value))
        return self.make(from_items(structure, [leaves] * unknown), self.element)

    def __repr__(self) -> str:
        return f"DatasetSpec({self.element_spec})"


class SpecUnknown(Exception):  # noqa: N818 - a signal between layers
    """A spec that only the data tells; the message says why."""


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
        """Return the spec of elements that are the rows of arrays, a row of nested `Ragged` being ragged itself."""
        return cls(structure, tuple(map(_spec_of_rows, columns)))

    @staticmethod
    def nest(structure: Structure, parts: Sequence[ElementSpec]) -> ElementSpec:
        """Return the spec of elements made of one element of each part, nested like ``structure``."""
        nested = structure.nest([part.structure for part in parts])
        return ElementSpec(nested, tuple(leaf for part in parts for leaf in part.leaves))

    @property
    def has_ragged_rows(self) -> bool:
        """Return whether batches of a leaf are ragged because it is a row of a `Ragged`."""
        return any(isinstance(leaf, RaggedRowSpec) for leaf in self.leaves)

    @property
    def packed(self) -> Any:
        """The specs in the structure of an element, as users see them."""
        return self.structure.pack(self.leaves)

    def conform(self, element: Any) -> Leaves:
        """Convert the leaves of an element to this spec.

        Python's own numbers, and lists of them, become arrays of the dtype asked for.

        Raises
        ------
        ArgumentError
            It is not of this spec; the message says which leaf, what was given and what is expected.
        """
        try:
            given = self.structure.leaves_of(element)
        except (ValueError, TypeError):
            _, found = Structure.of(element)
            raise ArgumentError(f"the structure {found}, where {self.structure} is expected") from None
        leaves = []
        for path, spec, value in zip(self.structure.paths, self.leaves, given, strict=True):
            try:
                leaf = as_array(value)
            except ArgumentError as error:
                raise ArgumentError(
                    f"{value!r:.80} for leaf {path or '(the element)'}, where {spec} is expected: {error}"
                ) from None
            # A list without numbers is of any dtype.
            is_open = isinstance(leaf, np.ndarray | np.generic) and is_plain(value)
            if is_open and (is_safe(leaf.dtype, spec.dtype) or not leaf.size):
                try:
                    leaf = np.asarray(value, spec.dtype)[()]
                except OverflowError:
                    raise ArgumentError(
                        f"{value!r:.80} for leaf {path or '(the element)'}, where {spec} is expected, "
                        "which holds no such number"
                    ) from None
            if not spec.is_compatible_with(leaf):
                raise ArgumentError(
                    f"{TensorSpec.of(leaf)} for leaf {path or '(the element)'}, where {spec} is expected"
                )
            leaves.append(leaf)
        return tuple(leaves)

    def with_leaves(self, leaves: Sequence[TensorSpec]) -> ElementSpec:
        """Return the spec with other leaves."""
        return ElementSpec(self.structure, tuple(leaves))

    def of_any_shape(self) -> ElementSpec:
        """Return the spec of such elements whatever the lengths of their axes."""
        return self.with_leaves(
            [replace(leaf, shape=(None,) * len(leaf.shape)) if leaf.shape else leaf for leaf in self.leaves]
        )

    def grouped(self, size: int | None) -> ElementSpec:
        """Return the spec of ``size`` such elements stacked."""
        return self.with_leaves([leaf.grouped(size) for leaf in self.leaves])

    def example(self, unknown: int, value: float | None) -> Any:
        """Return a made-up element that fits.

        Parameters
        ----------
        unknown
            The length of axes whose length is not known.
        value
            The value of all its numbers; None for numbers that differ.
        """
        return self.structure.pack([leaf.example(unknown, value) for leaf in self.leaves])

    def most_general_common_spec(self, other: ElementSpec) -> ElementSpec | None:
        """Return the narrowest spec that includes the elements of both; None where structure, rank or dtype differ."""
        if self.structure != other.structure:
            return None
        leaves = [a.most_general_common_spec(b) for a, b in zip(self.leaves, other.leaves, strict=True)]
        return None if None in leaves else self.with_leaves([leaf for leaf in leaves if leaf is not None])


def _spec_of_rows(column: Any) -> TensorSpec:
    shape = column.shape[1:]
    if isinstance(column, Ragged) and isinstance(column.values, Ragged):
        return RaggedTensorSpec(shape, column.dtype)
    return TensorSpec(shape, column.dtype)


def is_safe(given: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Return whether a Python value of one dtype may become another: an integer a float, but a float no integer."""
    order = "biufc"
    if given.kind in order and wanted.kind in order:
        return given.kind == wanted.kind or (given.kind != "b" and order.index(given.kind) <= order.index(wanted.kind))
    return given.kind in "TSUO" and wanted.kind in "TSUO"


# Made-up elements on which functions are tried: the length of axes not known, and the value of all numbers, or None for
# values that differ. With the first ones the function must do something; the others may be such as it does not take.
_MADE_UP: Final = ((2, 1), (3, 2))
_MORE_MADE_UP: Final[tuple[MadeUp, ...]] = ((2, 0), (1, 3), (4, None), (5, 7))
# With these values text is empty, as it was always.
_WITHOUT_TEXT: Final = (0, 1, 2)
_DIFFERENT: Final = (3, -1, 0, 2, -4, 1, 5)
# The most axes of a made-up leaf that are as long as a number in the code of a function says, and how long.
_LONGEST: Final = {0: 1024, 1: 1024, 2: 64}
_MOST_NUMBERS: Final = 6


def _numbers_like(made: Any, value: float | None) -> Any:
    numbers = np.resize(np.array(_DIFFERENT), made.shape) if value is None else np.array(value)
    if made.dtype.kind in "iu":
        limits = np.iinfo(made.dtype)
        numbers = np.clip(np.abs(numbers) if made.dtype.kind == "u" else numbers, max(limits.min, -(2**53)), limits.max)
    return numbers.astype(made.dtype)


def learned_spec(
    try_one: Callable[[int, float | None], ElementSpec],
    numbers: Sequence[float] = (),
    source: ElementSpec | None = None,
) -> ElementSpec:
    """Return the spec of what a function makes of elements, tried on made-up ones.

    An axis whose length differs between two tries is not known, nor is one of which nothing is left, as of a selection
    that no made-up value is in.

    Parameters
    ----------
    try_one
        ``try_one(unknown, value)`` is the spec of what it makes of `ElementSpec.example`.
    numbers
        Numbers in the function's code: what it makes may be another from there on.
    source
        The spec of the elements it is given.

    Raises
    ------
    SpecUnknown
        It failed on the first ones, or made things that have no spec in common.
    """
    common: ElementSpec | None = None
    for unknown, value in _MADE_UP:
        try:
            common = common_or_raise(common, try_one(unknown, value))
        except UserFunctionError as error:
            raise SpecUnknown(str(error)) from None
    for made_up in (*_MORE_MADE_UP, *_around(numbers, source)):
        # Many a function has nothing to say of zeros, or of lengths that it does not go by.
        with contextlib.suppress(UserFunctionError), np.errstate(all="ignore"):
            common = common_or_raise(common, try_one(*made_up))
    return without_empty_axes(common)  # type: ignore[arg-type]


def common_or_raise(common: ElementSpec | None, found: ElementSpec) -> ElementSpec:
    """Return the spec of elements of two specs, the first of which may be none yet.

    Raises
    ------
    SpecUnknown
        They have none in common.
    """
    if common is None:
        return found
    wider = common.most_general_common_spec(found)
    if wider is not None:
        return wider
    if any(0 in (leaf.shape or ()) for each in (common, found) for leaf in each.leaves):
        # An array made of nothing need not be of the dtype and rank of others; and its length is up to the values.
        kept = min(common, found, key=lambda each: sum(0 in (leaf.shape or ()) for leaf in each.leaves))
        return kept.of_any_shape()
    raise SpecUnknown("the structure, rank or dtype of its result depends on the element")


def of_any_rank(common: ElementSpec | None, found: ElementSpec) -> ElementSpec | None:
    """Return the spec of elements of two specs that may differ in rank; None where they differ in more than that."""
    if common is None or common.structure != found.structure:
        return None
    leaves = []
    for a, b in zip(common.leaves, found.leaves, strict=True):
        leaf = a.most_general_common_spec(b) or AnyRankSpec(dtype=a.dtype, name=a.name).most_general_common_spec(b)
        if leaf is None or (isinstance(leaf, AnyRankSpec) and type(a) not in (TensorSpec, AnyRankSpec)):
            return None
        leaves.append(leaf)
    return common.with_leaves(leaves)


def _around(numbers: Sequence[float], source: ElementSpec | None) -> list[MadeUp]:
    # Elements with these numbers, and the next ones, as values and as lengths.
    num_axes = 0 if source is None else max([leaf.shape.count(None) for leaf in source.leaves], default=0)
    longest = _LONGEST.get(num_axes, 16)
    found: list[MadeUp] = []
    for number in numbers[:_MOST_NUMBERS]:
        length = min(max(abs(int(number)), 1), longest)
        found += [(min(length + 1, longest), number), (max(length - 1, 1), number + (1 if number > 0 else -1))]
    return found


def without_empty_axes(spec: ElementSpec) -> ElementSpec:
    """Return the spec with axes of length 0 not known."""
    return spec.with_leaves([_without_empty_axes(leaf) for leaf in spec.leaves])


def _without_empty_axes(leaf: TensorSpec) -> TensorSpec:
    return replace(leaf, shape=tuple(size or None for size in leaf.shape)) if leaf.shape and 0 in leaf.shape else leaf


def known_spec(node: Any) -> ElementSpec | None:
    """Return the spec of a node's elements; None where only the data tells."""
    try:
        spec: ElementSpec = node.spec
    except SpecUnknown:
        return None
    return spec


def common_spec(operation: str, inputs: Sequence[Any], *, must_be_known: bool = False) -> ElementSpec:
    """Return the spec of elements that come from any of several nodes.

    Raises
    ------
    ArgumentError
        Their structures, dtypes or ranks differ; the message says how.
    SpecUnknown
        One is not known, and ``must_be_known``.
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
                f"{operation}: elements of dataset {number} are {spec.structure}, of those before {common.structure}"
            )
        for path, a, b in zip(spec.structure.paths, common.leaves, spec.leaves, strict=True):
            if a.most_general_common_spec(b) is None:
                raise ArgumentError(
                    f"{operation}: leaf {path or '(the element)'} of dataset {number} is {b}, and of those before {a}; "
                    "dtype and rank must be the same"
                )
        common = common.most_general_common_spec(spec)
    if common is None:
        raise SpecUnknown(f"{operation}: the spec of no input is known")
    return common
