"""The results of calls on replicas, as the program gets them: nests of `PerReplica`, plain or asynchronous."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import optree

from daskdist.cached_property import cached_property
from daskdist.errors import DaskdistError
from daskdist.execute.caller import Handle
from daskdist.strategy.backend import Backend
from daskdist.strategy.calls.captures import current_capture
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.flat import pickled_structure
from daskdist.strategy.values.per_replica import UNKNOWN_ROWS, PerReplica
from daskdist.strategy.values.refs import Ref, Refs, ResultLeaf, leaves_of_list, leaves_of_results
from daskdist.strategy.values.regroup import regroup

# Functions whose layouts are kept.
_MOST_LAYOUTS: Final = 256


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


# The layout if all replicas skipped the function, so that its structure is unknown.
_LONE_ABSENT = Layout(optree.tree_structure(0), (False,))


class ReturnedValues:
    """The results of a backend's calls.

    Those of an asynchronous backend are asynchronous values in structures that were learned before.

    Parameters
    ----------
    backend
        Makes the calls.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # The same object, if it is one.
        self._source: Any = backend
        # The numbers of rows, and the ids of the structure of the arguments and of a function's parts -> the layout of
        # its first result, and weak references to those.
        self._layouts: dict[Any, tuple[Layout, list[Callable[[], Any]]]] = {}

    def of_run(
        self, fn: Callable[..., Any], handles: Sequence[Handle], structure: Any, num_rows: frozenset[int]
    ) -> Any:
        """Return the result of `Strategy.run`: a nest of `PerReplica`, the value of a single replica, or None.

        Parameters
        ----------
        fn
            The function.
        handles
            The results of the call.
        structure
            The structure of the arguments.
        num_rows
            The numbers of rows of the arguments. Results for the same structure and numbers have the same structure.
            If some are unknown, nests are waited for.
        """
        if not self._backend.defers:
            return handles[0] if len(handles) == 1 else regroup(handles, num_rows)
        layout = self._layout(fn, handles, structure, num_rows)
        leaves, is_single = list[Any](), len(handles) == 1
        # Plain loops, here and in `leaves`: each step runs them, and Python 3.11 calls list comprehensions.
        for pick, is_none in zip(layout.picks, layout.are_none, strict=True):
            value = None if is_none else PerReplica(Refs(self._source, handles, pick), num_rows)
            leaves.append(value.values[0] if is_single and value is not None else value)
        return leaves[0] if layout.is_leaf else layout.treespec.unflatten(leaves)

    def of_all(self, handles: Sequence[Handle]) -> Any:
        """Return a nest in which each leaf is a `PerReplica`, even if all values are equal or there is one replica."""
        if not self._backend.defers:
            return regroup(handles, always=True)
        layout = self._learned(handles)
        return layout.treespec.unflatten([PerReplica(Refs(self._source, handles, pick)) for pick in layout.picks])

    def columns(self, handles: Sequence[Handle], num_leaves: int) -> list[PerReplica]:
        """Return the leaves of calls that return a `FlatResult` list of a known length on each replica."""
        if not self._backend.defers:
            return [PerReplica(column) for column in zip(*[leaf.leaves for leaf in handles], strict=True)]
        return [PerReplica(Refs(self._source, handles, pick)) for pick in leaves_of_list(num_leaves)]

    def leaves(self, call: Sequence[Handle], num_leaves: int) -> list[Any]:
        """Return the leaves of a single call that returns a `FlatResult` list of a known length."""
        if not self._backend.defers:
            return list(call[0].leaves)
        leaves = list[Any]()
        for pick in leaves_of_list(num_leaves):
            leaves.append(AsyncValue(self._source, Ref(call, 0, pick)))
        return leaves

    def _layout(
        self, fn: Callable[..., Any], handles: Sequence[Handle], structure: Any, num_rows: frozenset[int]
    ) -> Layout:
        parts = [structure, *self._source.objects.parts_of(fn)]
        key = (num_rows, *map(id, parts))
        known = self._layouts.get(key)
        for part in () if known is None else known[1]:
            if part() is None:
                # The id is that of a freed object, and has been reused.
                known = None
        if known is not None and not known[0].has_none:
            return known[0]
        capture = current_capture.get()
        if known is None or capture is None or capture.is_over:
            layout = self._learned(handles)
            if layout is _LONE_ABSENT or (num_rows >= UNKNOWN_ROWS and not layout.is_leaf):
                return layout
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[key] = layout, list(map(_reference, parts))
            return layout
        # A failure of a call without results would go unnoticed.
        capture.wait_for(partial(self._check_none, known[0], handles))
        return known[0]

    def _check_none(self, layout: Layout, handles: Sequence[Handle]) -> None:
        for treespec, are_none in self._backend.structures(handles):
            if treespec == layout.treespec and any(
                was and not now for was, now in zip(layout.are_none, are_none, strict=True)
            ):
                raise DaskdistError(
                    "run: the function returned a value instead of None as in its first call, and the value is "
                    "lost; a function must always return the same structure"
                )

    def _learned(self, handles: Sequence[Handle]) -> Layout:
        # This waits for the calls.
        layouts = [Layout(*structure) for structure in self._backend.structures(handles) if structure[0] is not None]
        if not layouts:
            return _LONE_ABSENT
        # Raise if the structures differ.
        regroup([optree.tree_unflatten(layout.treespec, layout.are_none) for layout in layouts])
        are_none = tuple(map(all, zip(*[layout.are_none for layout in layouts], strict=True)))
        return Layout(layouts[0].treespec, are_none)


def _reference(part: Any) -> Callable[[], Any]:
    # Return a function that returns a part while it exists, and None afterwards; for None, a value that is not None.
    # The part is referenced weakly if possible, as it may hold variables and other large objects.
    try:
        return weakref.ref(part)
    except TypeError:
        return lambda: (part,)
