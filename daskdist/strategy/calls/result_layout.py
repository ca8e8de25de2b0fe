"""The structure of functions' results, which is learned from the first call of each function."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import optree

from daskdist.cached_property import cached_property
from daskdist.core.functions.reach import references_from
from daskdist.strategy.values.flat import pickled_structure
from daskdist.strategy.values.refs import ResultLeaf, leaves_of_results, list_spec
from daskdist.strategy.values.variable_contract import key_of
from daskdist.strategy.variables.variable import Variable


@dataclass(frozen=True)
class Layout:
    """The structure of a function's result, and which of its leaves are None."""

    treespec: Any
    are_none: tuple[bool, ...]

    @cached_property
    def picks(self) -> tuple[ResultLeaf, ...]:
        """The objects that extract each leaf."""
        return leaves_of_results(pickled_structure(self.treespec))

    @cached_property
    def has_none(self) -> bool:
        """Return whether a leaf is None."""
        return any(self.are_none)

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
    if type(fn) is MethodType:
        return [fn.__self__, *made_of(fn.__func__)]
    if type(fn) is not FunctionType:
        within = getattr(fn, "__wrapped__", None)
        return [fn] if within is None else [type(fn), *made_of(within)]
    parts: list[Any] = [fn.__code__]
    for reference in references_from(fn):
        value = reference.value
        if reference.how == "name":
            parts.append(value.__code__ if type(value) is FunctionType else None)
        elif isinstance(value, Variable):
            # A kept part must not keep alive the copies that a variable has on workers.
            parts.append(key_of(value))
        elif reference.how == "default":
            parts.append(value)
        elif reference.how in ("variable", "assigned"):
            parts.append(reference.holder)
    return parts


def reference(part: Any) -> Callable[[], Any]:
    """Return a function that returns a part while it exists, and None afterwards; for None, a value that is not None.

    The part is referenced weakly if possible, as it may hold variables and other large objects.
    """
    try:
        return weakref.ref(part)
    except TypeError:
        return lambda: (part,)
