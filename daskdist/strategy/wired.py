"""What a function is called with on all replicas, wired: once where that is alike, or else for each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

from daskdist.execute.noting import Column
from daskdist.execute.parcels import Parcel
from daskdist.strategy.picks import PickAll, Spread
from daskdist.strategy.values import PerReplica, Wiring

# Results for all replicas; arguments that are the same on all; and those of each that are not.
Wired: TypeAlias = tuple[list[Column], tuple[Any, ...], list[tuple[Any, ...]] | None]


def wire_all(function: Parcel, leaves: Sequence[Any], workers: tuple[str, ...]) -> Wired:
    """Wire leaves, for a call whose first result is the function, and whose last arguments are picks and leaves."""
    if any(type(leaf) is PerReplica for leaf in leaves):
        return _wire_each(function, leaves, workers)
    wiring = Wiring([function.on_each(workers)])
    wired = []
    for leaf in leaves:
        if type(leaf) is Spread:
            spread: Any = leaf
            wired.append(wiring.slot(spread.handles, spread.picks))
        elif type(leaf) is Parcel:
            wired.append(wiring.slot(leaf.on_each(workers), PickAll()))
        else:
            wired.append(wiring.wire_leaf(leaf))
    picks: list[tuple[int, Any]] = wiring.picks
    if not any(type(pick) is tuple for _, pick in picks):
        return wiring.handles, (picks, wired), None
    each = [
        [(number, pick[lane] if type(pick) is tuple else pick) for number, pick in picks]
        for lane in range(len(workers))
    ]
    return wiring.handles, (), [(own, wired) for own in each]


def _wire_each(function: Parcel, leaves: Sequence[Any], workers: tuple[str, ...]) -> Wired:
    handles, own = [], []
    for lane, worker in enumerate(workers):
        wiring = Wiring([function.on(worker)])
        wired = []
        for leaf in leaves:
            part = leaf
            if type(leaf) is PerReplica:
                part = leaf.values[lane]
            elif type(leaf) is Spread:
                part = leaf.part(lane)
            is_parcel = type(part) is Parcel
            wired.append(wiring.slot(part.on(worker), PickAll()) if is_parcel else wiring.wire_leaf(part))
        handles.append(wiring.handles)
        own.append((wiring.picks, wired))
    return list(zip_longest(*handles)), (), own
