"""``scan``: a function of each element and a state that it carries on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np

from daskdist.core.block import Block, Bundle, Rows, from_items
from daskdist.core.functions.user_function import UserFunction, numbers_in
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Chain, Primitive
from daskdist.core.randomness.seed import SeedsInCall
from daskdist.core.spec import ElementSpec, SpecUnknown, is_safe, learned_spec
from daskdist.core.structure import LONE, Leaves, Structure, as_array, is_plain
from daskdist.core.to_numpy import to_numpy
from daskdist.errors import ArgumentError, UserFunctionError

_NUM_STEPS_TRIED: Final = 3


@dataclass(frozen=True, eq=False)
class Scan(Transformation):
    """The outputs of ``function(state, element) -> (state, output)``, the state carried on from element to element.

    Parameters
    ----------
    structure, initial
        The state before the first element, as `first_state` gives it.
    function
        Makes the next state and the output.
    """

    structure: Structure
    initial: tuple[Any, ...] = field(repr=False)
    function: UserFunction

    name = "scan"
    facts = Facts(keeps_count=True)
    may_have_ragged_rows = False

    @cached_property
    def _spec(self) -> ElementSpec | SpecUnknown:
        try:
            return learned_spec(self._tried, numbers_in(self.function.function), self.source.spec)
        except SpecUnknown as unknown:
            return unknown

    def _tried(self, unknown: int, value: float | None) -> ElementSpec:
        example = self.source.spec.example(unknown, value)
        scan = ScanRows(self.structure, self.function)
        state, common = own_state(self.initial), None
        for _ in range(_NUM_STEPS_TRIED):
            # Outputs may depend on the state, which differs from step to step.
            state, leaves, structure = scan.step(state, example, lambda: "a made-up element")
            found = ElementSpec.of(structure.pack(leaves))
            common = found if common is None else common.most_general_common_spec(found)
            if common is None:
                raise SpecUnknown("the structure, rank or dtype of its output depends on the state")
        return common  # type: ignore[return-value]

    @property
    def spec(self) -> ElementSpec:
        if isinstance(self._spec, SpecUnknown):
            raise self._spec
        return self._spec

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Chain(inputs[0], ScanRows(self.structure, self.function), self.initial, self.name)


@dataclass(frozen=True)
class ScanRows:
    """The function over the elements of a block or bundle, one after the other."""

    structure: Structure
    function: UserFunction

    def __call__(self, rows: Rows, state: Leaves) -> tuple[Rows, Leaves]:
        items: list[Leaves] = []
        structure: Structure | None = None
        # Others have the state too: the next pass, and the positions that were taken down.
        state = own_state(state)
        for index, element in enumerate(rows.elements()):
            state, leaves, found = self.step(state, element, lambda index=index: rows.where(index))  # type: ignore[misc]
            if structure is not None and found != structure:
                raise UserFunctionError(
                    f"scan: {self.function} output the structure {found} on {rows.where(index)}, and {structure} before"
                )
            structure = found
            items.append(_without_state(leaves, state))
        if structure is None:
            return Bundle(rows.structure, [], rows.label), state
        if isinstance(rows, Block):
            return from_items(structure, items, rows.label, rows.origin), state
        return Bundle(structure, items, rows.label), state

    def step(self, state: Leaves, element: Any, where: Callable[[], str]) -> tuple[Leaves, Leaves, Structure]:
        """Return the next state, and the output as leaves and structure."""
        arguments = self.structure.pack(state), element
        with SeedsInCall(arguments):
            result = self.function.of(arguments, where)
        if type(result) not in (tuple, list) or len(result) != 2:
            raise UserFunctionError(
                f"scan: {self.function} returned {result!r:.80}, on {where()}; it is to return (state, output)"
            )
        output, structure = self.function.flattened(result[1], where)
        return next_state(self.function, self.structure, state, result[0], where), output, structure


def _without_state(output: Leaves, state: Leaves) -> Leaves:
    # The next call may write into the state, which is not to change what was output.
    arrays = [leaf for leaf in state if isinstance(leaf, np.ndarray)]
    if not arrays:
        return output
    return tuple(
        [
            leaf.copy()
            if isinstance(leaf, np.ndarray) and any(np.may_share_memory(leaf, array) for array in arrays)
            else leaf
            for leaf in output
        ]
    )


# What stays of its Python type in a state; the first that a value is an instance of.
_PYTHON_TYPES: Final = (bool, int, float, complex, str, bytes)


def first_state(function: UserFunction, initial: Any) -> tuple[Leaves, Structure]:
    """Return the state before the first element as leaves and structure.

    Python's own numbers and strings stay what they are; anything else becomes an array.

    Raises
    ------
    ArgumentError
        A leaf is none of these, and no array can be made of it.
    """
    try:
        leaves, structure = Structure.flatten(initial, narrow=function.narrow)
    except ArgumentError as error:
        raise ArgumentError(f"{function.operation}: initial_state: {error}") from None
    given = structure.leaves_of(initial)
    state = [old if type(old) in _PYTHON_TYPES else leaf for old, leaf in zip(given, leaves, strict=True)]
    return own_state(state), structure


def own_state(state: Sequence[Any]) -> Leaves:
    """Return the leaves of a state with arrays copied: a function may write into what it is given."""
    return tuple([leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in state])


def next_state(
    function: UserFunction, structure: Structure, state: Leaves, given: Any, where: Callable[[], str]
) -> Leaves:
    """Return a state that a function gave as leaves, checked to be like the one before.

    Raises
    ------
    UserFunctionError
        It is of another structure, dtype or Python type.
    """
    if type(given) is list and structure != LONE:
        given = tuple(given)
    leaves, of_state = Structure.of(given)
    if of_state != structure:
        raise UserFunctionError(
            f"{function.operation}: {function} gave a state of the structure {of_state}, on {where()}; "
            f"it was {structure}, and stays so"
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
                f"{function.operation}: {function} gave a state whose leaf {path or '(the state)'} is {new!r:.80}, on "
                f"{where()}; it is {old.dtype}, which holds no such number"
            ) from None
        except ArgumentError as error:
            raise UserFunctionError(f"{function.operation}: {function} returned {error}, on {where()}") from None
        if np.asarray(old).dtype == np.asarray(leaf).dtype:
            return leaf
        was, now = np.asarray(old).dtype, np.asarray(leaf).dtype
    raise UserFunctionError(
        f"{function.operation}: {function} gave a state whose leaf {path or '(the state)'} is {now}, on {where()}; "
        f"it was {was}, and stays so"
    )


def _of_type(kind: type[Any], value: Any) -> Any:
    # A value as one of Python's own types, where that loses nothing of its kind; else a TypeError.
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


# A number of one type is one of a later type too.
_RANK: Final = {bool: 0, int: 1, float: 2, complex: 3}
