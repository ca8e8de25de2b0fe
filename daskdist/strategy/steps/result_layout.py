"""What functions that are run give: its structure, which is learned from the first call of each."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import CellType
from typing import Any

from daskdist.strategy.reduce.tree import list_spec
from daskdist.strategy.values.extract import ExtractFromResult
from daskdist.strategy.variables.variable import Variable


@dataclass(frozen=True)
class Layout:
    """What a function gives, but for the values: the structure, and which of its leaves are None."""

    treespec: Any
    are_none: tuple[bool, ...]

    @cached_property
    def picks(self) -> tuple[ExtractFromResult, ...]:
        """What takes out each leaf."""
        return tuple(ExtractFromResult(number, self.treespec) for number in range(len(self.are_none)))


# Of a list of one.
LONE = Layout(list_spec(1), (False,))


def made_of(fn: Any) -> list[Any]:
    """What makes a function one of its own.

    One that is defined anew in each step, over the same variables, is still one; a method of another object, other
    defaults and another function that it calls make another.
    """
    code = getattr(fn, "__code__", None)
    if code is None:
        within = getattr(fn, "__wrapped__", None)
        return [fn] if within is None else [type(fn), *made_of(within)]
    variables = getattr(fn, "__globals__", {})
    called = [getattr(variables.get(name), "__code__", None) for name in code.co_names]
    own = [getattr(fn, "__self__", None), *(fn.__closure__ or ()), *(fn.__defaults__ or ())]
    return [code, *map(_without_state, own), *called]


def _without_state(part: Any) -> Any:
    # What is kept of a function must not keep what a variable has on the workers.
    inner = part.cell_contents if type(part) is CellType and part != CellType() else part
    return inner.key if isinstance(inner, Variable) else part


def reference(part: Any) -> Callable[[], Any]:
    """What gives something that a function is made of as long as it is there, and then None; of None something else.

    It does not keep it where that can be told of its end: an object whose method it is may have variables, and more.
    """
    try:
        return weakref.ref(part)
    except TypeError:
        return lambda: (part,)
