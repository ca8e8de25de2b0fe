"""``scan``: a function of each element and a state that is carried from element to element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from daskdist.core.block import Block, Bundle, Rows, from_items
from daskdist.core.functions.kept_values import keep_as_they_are, kept
from daskdist.core.functions.user_function import UserFunction, numbers_in
from daskdist.core.node import Facts, SpecFromCalls
from daskdist.core.primitive import Chain, Primitive
from daskdist.core.randomness.seed import SeedsInCall
from daskdist.core.spec import ElementSpec, SpecUnknown, is_safe, learned_spec
from daskdist.core.structure import LONE, Leaves, Structure, as_array, common_dtype, is_plain
from daskdist.core.to_numpy import to_numpy
from daskdist.errors import ArgumentError, UserFunctionError

_NUM_STEPS_TRIED: Final = 3


@dataclass(frozen=True, eq=False)
class Scan(SpecFromCalls):
    """The outputs of ``function(state, element) -> (state, output)``."""

    structure: Structure
    initial: tuple[Any, ...] = field(repr=False)
    function: UserFunction

    name = "scan"
    facts = Facts(keeps_count=True)
    may_have_ragged_rows = False

    def learn_spec(self) -> ElementSpec:
        return learned_spec(self._tried, numbers_in(self.function.function), self.source.spec)

    def _tried(self, unknown: int, value: float | None) -> ElementSpec:
        example = self.source.spec.example(unknown, value)
        scan = ScanRows(self.structure, self.function)
        state, common = own_state(self.initial), None
        for _ in range(_NUM_STEPS_TRIED):
            # Try several steps: outputs may depend on the state.
            state, leaves, structure = scan.step(state, example, lambda: "a made-up element")
            output_spec = ElementSpec.of(structure.pack(leaves))
            common = output_spec if common is None else common.most_general_common_spec(output_spec)
            if common is None:
                raise SpecUnknown("the structure, rank or dtype of its output depends on the state")
        return common  # type: ignore[return-value]

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        rows = ScanRows(self.structure, self.function)
        return Chain(inputs[0], rows, self.initial, self.name, may_be_large=True)


@dataclass(frozen=True)
class ScanRows:
    """A function that scans the elements of a block or bundle in order."""

    structure: Structure
    function: UserFunction

    def __call__(self, rows: Rows, state: Leaves) -> tuple[Rows, Leaves]:
        items: list[Leaves] = []
        structure: Structure | None = None
        # Copy the state, which the next pass and saved positions use too.
        state = own_state(state)
        for index, element in enumerate(rows.elements()):
            state, leaves, output_structure = self.step(state, element, lambda index=index: rows.where(index))  # type: ignore[misc]
            if structure is not None and output_structure != structure:
                raise UserFunctionError(
                    f"scan: {self.function} output the structure {output_structure} on {rows.where(index)}, "
                    f"but {structure} before"
                )
            structure = output_structure
            # The state refers to outputs that share memory with it, so these are copied too.
            keep_as_they_are(leaves)
            items.append(tuple(leaves))
        state = own_state(state)
        if structure is None:
            return Bundle(rows.structure, [], rows.label), state
        if isinstance(rows, Block):
            return from_items(structure, items, rows.label, rows.origin), state
        return Bundle(structure, items, rows.label), state

    def step(self, state: Leaves, element: Any, where: Callable[[], str]) -> tuple[Leaves, list[Any], Structure]:
        """Return the next state, and the output as leaves and structure."""
        arguments = self.structure.pack(state), element
        with SeedsInCall(arguments):
            result = self.function.of(arguments, where)
        if type(result) not in (tuple, list) or len(result) != 2:
            raise UserFunctionError(
                f"scan: {self.function} returned {result!r:.80}, on {where()}; it must return (state, output)"
            )
        output, structure = self.function.flattened(result[1], where)
        return next_state(self.function, self.structure, state, result[0], where), list(output), structure


# The types whose values keep their Python type in a state; the first match counts.
_PYTHON_TYPES: Final = (bool, int, float, complex, str, bytes)


def first_state(function: UserFunction, initial: Any) -> tuple[Leaves, Structure]:
    """Return the state before the first element as leaves and structure.

    Python numbers and strings keep their type; anything else becomes an array.

    Raises
    ------
    ArgumentError
        A leaf is neither of these and cannot be converted to an array.
    """
    try:
        leaves, structure = Structure.flatten(initial, narrow=function.narrow)
    except ArgumentError as error:
        raise ArgumentError(f"{function.operation}: initial_state: {error}") from None
    initial_leaves = structure.leaves_of(initial)
    state = [old if type(old) in _PYTHON_TYPES else leaf for old, leaf in zip(initial_leaves, leaves, strict=True)]
    return own_state(state), structure


def own_state(state: Sequence[Any]) -> Leaves:
    """Return the leaves of a state with arrays copied, because a function may write into its arguments."""
    return tuple(map(kept, state))


def next_state(
    function: UserFunction, structure: Structure, state: Leaves, returned: Any, where: Callable[[], str]
) -> Leaves:
    """Return the leaves of a state that a function returned, checked to match the previous state.

    Raises
    ------
    UserFunctionError
        The structure, a dtype or a Python type differs.
    """
    if type(returned) is list and structure != LONE:
        returned = tuple(returned)
    leaves, of_state = Structure.of(returned)
    if of_state != structure:
        raise UserFunctionError(
            f"{function.operation}: {function} returned a state of the structure {of_state}, on {where()}; "
            f"it was {structure} and must stay the same"
        )
    return tuple(
        _next_leaf(function, path, old, new, where)
        for path, old, new in zip(structure.paths, state, leaves, strict=True)
    )


def _next_leaf(function: UserFunction, path: str, old: Any, new: Any, where: Callable[[], str]) -> Any:
    kind = type(old)
    was: Any
    now: Any
    if kind in _PYTHON_TYPES:
        try:
            return _of_type(kind, new)
        except TypeError:
            was, now = kind.__name__, getattr(new, "dtype", type(new).__name__)
    else:
        try:
            leaf = as_array(new, narrow=function.narrow)
            if is_plain(new) and isinstance(old, np.ndarray | np.generic) and is_safe(leaf.dtype, old.dtype):
                leaf = np.asarray(new, old.dtype)[()]
        except OverflowError:
            raise UserFunctionError(
                f"{function.operation}: {function} returned a state whose leaf {path or '(the state)'} is {new!r:.80} "
                f"on {where()}; its dtype is {old.dtype}, which cannot hold that number"
            ) from None
        except ArgumentError as error:
            raise UserFunctionError(f"{function.operation}: {function} returned {error}, on {where()}") from None
        if common_dtype(np.asarray(old).dtype, np.asarray(leaf).dtype) is not None:
            return leaf
        was, now = np.asarray(old).dtype, np.asarray(leaf).dtype
    raise UserFunctionError(
        f"{function.operation}: {function} returned a state whose leaf {path or '(the state)'} is {now}, on {where()}; "
        f"it was {was} and must stay the same"
    )


def _of_type(kind: type[Any], value: Any) -> Any:
    # Convert a value to a Python type if that is lossless; otherwise raise TypeError.
    if type(value) is kind:
        return value
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array__"):
        value = to_numpy(value)
        if value.ndim:
            raise TypeError
        value = value.item()
    if isinstance(value, kind) or (_RANK.get(type(value), 9) <= _RANK.get(kind, -1)):
        return kind(value)
    raise TypeError


# A number of one type can become one of a later type.
_RANK: Final = {bool: 0, int: 1, float: 2, complex: 3}
