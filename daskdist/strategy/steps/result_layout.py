"""The structure of functions' results, which is learned from the first call of each function."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType
from typing import Any

import optree

from daskdist.cached_property import cached_property
from daskdist.strategy.reduce.tree import list_spec
from daskdist.strategy.values.extract import ExtractFromResult
from daskdist.strategy.values.variable_contract import key_of
from daskdist.strategy.variables.variable import Variable


@dataclass(frozen=True)
class Layout:
    """The structure of a function's result, and which of its leaves are None."""

    treespec: Any
    are_none: tuple[bool, ...]

    @cached_property
    def picks(self) -> tuple[ExtractFromResult, ...]:
        """The objects that extract each leaf."""
        return tuple(ExtractFromResult(number, self.treespec) for number in range(len(self.are_none)))

    @cached_property
    def is_leaf(self) -> bool:
        """Return whether the result is one value instead of a nest."""
        return bool(self.treespec.is_leaf())


# The layout of a list with one item.
LONE = Layout(list_spec(1), (False,))
# The layout if all replicas skipped the function, so that its structure is unknown.
LONE_ABSENT = Layout(optree.tree_structure(0), (False,))


def made_of(fn: Any) -> list[Any]:
    """Return the parts that identify a function.

    A function that is defined again in each step, with the same variables in its closure, has the same parts. Methods
    of different objects differ, and so do functions with other defaults or other callees.
    """
    code = getattr(fn, "__code__", None)
    if code is None:
        within = getattr(fn, "__wrapped__", None)
        return [fn] if within is None else [type(fn), *made_of(within)]
    variables = getattr(fn, "__globals__", {})
    called = [getattr(variables.get(name), "__code__", None) for name in code.co_names]
    bound = [getattr(fn, "__self__", None), *(fn.__closure__ or ()), *(fn.__defaults__ or ())]
    return [code, *map(_without_state, bound), *called]


def _without_state(part: Any) -> Any:
    # A kept part must not keep alive the copies that a variable has on workers.
    inner = part.cell_contents if type(part) is CellType and part != CellType() else part
    return key_of(inner) if isinstance(inner, Variable) else part


def reference(part: Any) -> Callable[[], Any]:
    """Return a function that returns a part while it exists, and None afterwards; for None, a value that is not None.

    The part is referenced weakly if possible, as it may hold variables and other large objects.
    """
    try:
        return weakref.ref(part)
    except TypeError:
        return lambda: (part,)
