"""``scan``: a function of each element and a state that it carries on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from daskdist.core.block import Block, Bundle, Rows, from_items
from daskdist.core.function import UserFunction
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Chain, Primitive
from daskdist.core.spec import ElementSpec, SpecUnknown, learned_spec
from daskdist.core.structure import Leaves, Structure
from daskdist.errors import UserFunctionError


@dataclass(frozen=True, eq=False)
class Scan(Transformation):
    """What ``function(state, element) -> (state, output)`` outputs, the state carried on from element to element.

    Parameters
    ----------
    structure, initial
        The state before the first element.
    function
        Makes the next state and the output.
    """

    structure: Structure
    initial: tuple[Any, ...] = field(repr=False)
    function: UserFunction

    name = "scan"
    facts = Facts(keeps_count=True)

    @cached_property
    def _spec(self) -> ElementSpec | SpecUnknown:
        try:
            return learned_spec(self._tried)
        except SpecUnknown as unknown:
            return unknown

    def _tried(self, unknown: int, value: int) -> ElementSpec:
        example = self.source.spec.example(unknown, value)
        scan = ScanRows(self.structure, self.function)
        _, leaves, structure = scan.step(self.initial, example, lambda: "a made-up element")
        return ElementSpec.of(structure.pack(leaves))

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
        for index, element in enumerate(rows.elements()):
            state, leaves, found = self.step(state, element, lambda index=index: rows.where(index))  # type: ignore[misc]
            if structure is not None and found != structure:
                raise UserFunctionError(
                    f"scan: {self.function} output the structure {found} on {rows.where(index)}, and {structure} before"
                )
            structure = found
            items.append(leaves)
        if structure is None:
            return Bundle(rows.structure, [], rows.label), state
        if isinstance(rows, Block):
            return from_items(structure, items, rows.label, rows.origin), state
        return Bundle(structure, items, rows.label), state

    def step(self, state: Leaves, element: Any, where: Callable[[], str]) -> tuple[Leaves, Leaves, Structure]:
        """The next state, and the output as leaves and structure."""
        result = self.function.of((self.structure.pack(state), element), where)
        if type(result) not in (tuple, list) or len(result) != 2:
            raise UserFunctionError(
                f"scan: {self.function} returned {result!r:.80}, on {where()}; it is to return (state, output)"
            )
        output, structure = self.function.flattened(result[1], where)
        return next_state(self.function, self.structure, state, result[0], where), output, structure


def next_state(
    function: UserFunction, structure: Structure, state: Leaves, given: Any, where: Callable[[], str]
) -> Leaves:
    """A state that a function gave as leaves, checked to be of the structure and dtypes of the one before."""
    leaves, found = function.flattened(given, where)
    if found != structure:
        raise UserFunctionError(
            f"{function.operation}: {function} gave a state of the structure {found}, on {where()}; "
            f"it was {structure}, and stays so"
        )
    for path, old, new in zip(structure.paths, state, leaves, strict=True):
        if np.asarray(old).dtype != np.asarray(new).dtype:
            raise UserFunctionError(
                f"{function.operation}: {function} gave a state whose leaf {path or '(the state)'} is "
                f"{np.asarray(new).dtype}, on {where()}; it was {np.asarray(old).dtype}, and stays so"
            )
    return leaves
