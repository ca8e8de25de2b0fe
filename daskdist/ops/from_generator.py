"""``Dataset.from_generator``: the elements that a Python generator yields."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import optree

from daskdist.call_progress import note_call
from daskdist.core.block import Block, Bundle, from_items
from daskdist.core.cardinality import UNKNOWN
from daskdist.core.failing.origin import origin_from
from daskdist.core.functions.kept_values import keep_as_they_are, kept
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.node import Source
from daskdist.core.primitive import Epoch, Primitive, Stream
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import LeafText, Leaves, Structure
from daskdist.errors import ArgumentError, UserFunctionError


class GeneratorFunction(UserFunction):
    """A user's function that returns an iterable."""

    stays_in_program = True


def _suggested(generator: Callable[..., Any], args: Sequence[Any]) -> str:
    # Return the end of a message about a missing signature: that of the first element.
    try:
        elements = iter(generator(*args))
        try:
            spec = ElementSpec.of(next(elements))
        finally:
            if isinstance(elements, Generator):
                elements.close()
    except Exception:
        return ', such as output_signature={"x": TensorSpec((None, 3), "float32")}'
    leaves = [LeafText(f"{type(leaf).__name__}({leaf.shape}, {_dtype_text(leaf.dtype)})") for leaf in spec.leaves]
    return (
        f", which for the first is output_signature={spec.structure.pack(leaves)!r}; write None for lengths that "
        "vary, as in TensorSpec((None, 3), 'float32')"
    )


def _dtype_text(dtype: Any) -> str:
    if isinstance(dtype, np.dtypes.StringDType):
        return "str"
    return f"numpy.{dtype!r}" if dtype.names else repr(str(dtype))


@dataclass(frozen=True, eq=False)
class FromGenerator(Source):
    """The elements of a generator, which is started again for each pass."""

    generator: UserFunction
    args: tuple[Any, ...]
    signature: ElementSpec = field(repr=False)

    name = "from_generator"
    is_listed = False
    is_cheap = False
    is_repeatable = False

    def __post_init__(self) -> None:
        if not self.signature.leaves:
            raise ArgumentError("from_generator: output_signature has no leaves; give a nest of TensorSpec")

    @classmethod
    def of(cls, generator: Callable[..., Any], args: Any, signature: Any, label: str | None) -> Self:
        """Create the source from a user's function.

        Raises
        ------
        ArgumentError
            The generator is not a function, or the signature is no nest of specs.
        """
        if not callable(generator):
            raise ArgumentError(
                f"from_generator: expected a function that returns an iterable, got {type(generator).__name__}; "
                "a generator itself can run only once, so give the function that creates it"
            )
        if not isinstance(args, Sequence):
            raise ArgumentError(f"from_generator: args is {args!r:.80}; give a tuple of arguments")
        if signature is None:
            raise ArgumentError(f"from_generator: give the spec of each element{_suggested(generator, args)}")
        leaves, structure = Structure.of(signature)
        for path, leaf in zip(structure.paths, leaves, strict=True):
            if not isinstance(leaf, TensorSpec):
                raise ArgumentError(
                    f"from_generator: leaf {path or '(the element)'} of output_signature is {leaf!r}; give a "
                    'TensorSpec(shape, dtype), such as TensorSpec((), "int64") for a number, or TensorSpec((None, 3), '
                    '"float32") for an array, with None for a length that varies'
                )
        spec = ElementSpec(structure, leaves)
        return cls(GeneratorFunction(generator, "from_generator"), tuple(args), spec, label=label)

    def with_own_arrays(self) -> Self:
        return replace(self, args=optree.tree_map(kept, self.args, none_is_leaf=True))

    @property
    def may_have_ragged_rows(self) -> bool:
        return self.signature.has_ragged_rows

    @property
    def spec(self) -> ElementSpec:
        return self.signature

    @property
    def cardinality(self) -> int:
        return UNKNOWN

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Stream(self._start, self.name)

    def _start(self, epoch: Epoch) -> Generated:
        return Generated(self.generator, self.args, self.signature)


class Generated:
    """The elements of a running generator, checked against the signature."""

    def __init__(self, generator: UserFunction, args: tuple[Any, ...], signature: ElementSpec) -> None:
        self.location = generator.location
        self.signature = signature
        self.iterator = self._checked(generator, args)
        # Objects and text take memory beside their places in an array.
        has_objects = any(leaf.dtype.hasobject for leaf in signature.leaves)
        self.element_bytes = None if has_objects else signature.num_bytes

    def __iter__(self) -> Iterator[Leaves]:
        """Return an iterator over the leaves of each element."""
        return self.iterator

    def close(self) -> None:
        """Close the generator."""
        self.iterator.close()

    def rows(self, items: Sequence[Leaves], first: int) -> Block | Bundle:
        """Return elements as rows; ``first`` is the number of the first one."""
        origin = origin_from("from_generator", first, len(items))
        return from_items(self.signature.structure, items, f"from_generator elements {first} on", origin)

    def _checked(self, generator: UserFunction, args: tuple[Any, ...]) -> Generator[Leaves, None, None]:
        note_call(generator)
        try:
            iterable = generator.function(*args)
        except Exception as error:
            raise UserFunctionError(
                f"from_generator: {self.location} raised {type(error).__name__}: {error}"
            ) from error
        try:
            elements = iter(iterable)
        except TypeError:
            raise UserFunctionError(
                f"from_generator: {self.location} returned {type(iterable).__name__} {iterable!r:.80}; "
                "it must return an iterable"
            ) from None
        conform = self.signature.conform
        for number in itertools.count():
            note_call(generator)
            try:
                element = next(elements)
            except StopIteration:
                return
            except Exception as error:
                message = f"from_generator: {self.location} raised {type(error).__name__}: {error}, at element {number}"
                raise UserFunctionError(message) from error
            try:
                leaves = list(conform(element))
            except ArgumentError as error:
                raise UserFunctionError(
                    f"from_generator: {self.location} yielded {error}, at element {number}"
                ) from None
            del element
            keep_as_they_are(leaves)
            yield tuple(leaves)
