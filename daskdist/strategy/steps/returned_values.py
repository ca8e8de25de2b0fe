"""The results of calls on replicas, as the program gets them: nests of `PerReplica`, plain or asynchronous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final

import optree

from daskdist.errors import DaskdistError
from daskdist.execute.caller import Handle
from daskdist.strategy.backend import Backend
from daskdist.strategy.reduce.tree import list_spec
from daskdist.strategy.steps.captures import current_capture
from daskdist.strategy.steps.result_layout import LONE, LONE_ABSENT, Layout, made_of, reference
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.extract import ExtractFromResult, PerReplicaRef, Remote
from daskdist.strategy.values.per_replica import UNKNOWN_ROWS, PerReplica
from daskdist.strategy.values.regroup import regroup

# Functions whose layouts are kept.
_MOST_LAYOUTS: Final = 256


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
        leaves: list[Any] = [
            None if is_none else self._picked(handles, pick, num_rows)
            for pick, is_none in zip(layout.picks, layout.are_none, strict=True)
        ]
        if len(handles) == 1:
            leaves = [None if leaf is None else leaf.values[0] for leaf in leaves]
        return leaves[0] if layout.is_leaf else layout.treespec.unflatten(leaves)

    def of_all(self, handles: Sequence[Handle]) -> Any:
        """Return a nest in which each leaf is a `PerReplica`, even if all values are equal or there is one replica."""
        if not self._backend.defers:
            return regroup(handles, always=True)
        layout = self._learned(handles)
        return layout.treespec.unflatten([self._picked(handles, pick) for pick in layout.picks])

    def columns(self, handles: Sequence[Handle], num_leaves: int) -> list[PerReplica]:
        """Return the leaves of calls that return a `FlatResult` list of a known length on each replica."""
        if not self._backend.defers:
            return [PerReplica(column) for column in zip(*[leaf.leaves for leaf in handles], strict=True)]
        return [self._picked(handles, pick) for pick in _list_layout(num_leaves).picks]

    def leaves(self, handle: Handle, num_leaves: int) -> list[Any]:
        """Return the leaves of a call that returns a `FlatResult` list of a known length."""
        if not self._backend.defers:
            return list(handle.leaves)
        return [AsyncValue(self._backend, Remote(handle, pick)) for pick in _list_layout(num_leaves).picks]

    def _picked(
        self, handles: Sequence[Handle], pick: ExtractFromResult, num_rows: frozenset[int] = frozenset()
    ) -> PerReplica:
        return PerReplica(PerReplicaRef(self._backend, handles, pick, is_step=True), num_rows)

    def _layout(
        self, fn: Callable[..., Any], handles: Sequence[Handle], structure: Any, num_rows: frozenset[int]
    ) -> Layout:
        parts = [structure, *made_of(fn)]
        key = (num_rows, *map(id, parts))
        known = self._layouts.get(key)
        if known is not None and any(part() is None for part in known[1]):
            # The id is that of a freed object, and has been reused.
            known = None
        capture = current_capture()
        if known is None or (capture is None and any(known[0].are_none)):
            layout = self._learned(handles)
            if layout is LONE_ABSENT or (num_rows >= UNKNOWN_ROWS and not layout.is_leaf):
                return layout
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            self._layouts[key] = layout, list(map(reference, parts))
            return layout
        layout = known[0]
        if capture is not None and any(layout.are_none):
            # A failure of a call without results would go unnoticed.
            capture.wait_for(partial(self._check_none, layout, handles))
        return layout

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
            return LONE_ABSENT
        # Raise if the structures differ.
        regroup([optree.tree_unflatten(layout.treespec, layout.are_none) for layout in layouts])
        are_none = tuple(map(all, zip(*[layout.are_none for layout in layouts], strict=True)))
        return Layout(layouts[0].treespec, are_none)


@lru_cache(maxsize=64)
def _list_layout(num_leaves: int) -> Layout:
    return LONE if num_leaves == 1 else Layout(list_spec(num_leaves), (False,) * num_leaves)
