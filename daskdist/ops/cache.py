"""``cache``: elements kept in memory as they pass, and given from there afterwards."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskdist.core.node import Facts, Transformation, walk
from daskdist.core.primitive import Arrange, Context, Cursor, Epoch, Exhausted, Opener, Primitive
from daskdist.core.selection import Run


class Kept:
    """What complete passes left: runs of elements, by what made them and where they lie."""

    def __init__(self) -> None:
        self.runs: dict[Hashable, list[Run]] = {}
        # Of passes that were gone on from half way: which they were, for the order of those after them.
        self.epochs: dict[Hashable, Epoch] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # In another process there is nothing yet.
        return Kept, ()

    def __dask_tokenize__(self) -> object:
        return "Kept"


@dataclass(frozen=True, eq=False)
class Cache(Transformation):
    """The same elements; after a first complete pass, those of that pass, in its order.

    Parameters
    ----------
    kept
        What was kept.
    """

    kept: Kept = field(default_factory=Kept, repr=False)

    name = "cache"
    facts = Facts(keeps_count=True, keeps_spec=True, per_worker=True)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        # Rewritten for a worker's share, the same node keeps other elements.
        key = "\n".join(map(str, walk(self.source)))
        return Arrange(inputs, CacheRows(self.kept, key), inputs[0].grouped, name=self.name)


@dataclass(frozen=True)
class CacheRows:
    """Which way a pass goes."""

    kept: Kept
    key: str

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        home = context.home
        if home is None:
            return inputs[0](epoch)
        found = self.kept.runs.get((self.key, home))
        if found is not None:
            return ReplayCursor(found)
        key = (self.key, home)
        return KeepCursor(inputs[0](self.kept.epochs.get(key, epoch)), self.kept, key)


@dataclass
class KeepCursor:
    """What has come so far; kept when all has, if it came from the start."""

    source: Cursor
    kept: Kept
    key: Hashable
    is_whole: bool = True
    _runs: list[Run] = field(default_factory=list)

    def pull(self) -> Run:
        try:
            run: Run = self.source.pull()
        except Exhausted:
            if self.is_whole:
                self.kept.runs.setdefault(self.key, self._runs)
            raise
        if self.is_whole:
            run.keep()
            self._runs.append(run)
        return run

    def resumed(self, saved: None) -> None:
        """What came before is not here, so that the next pass is made again, in the order of this one."""
        self.is_whole = False
        self.kept.epochs[self.key] = self.born[1]  # type: ignore[attr-defined]  # of every cursor


@dataclass
class ReplayCursor:
    """``number`` runs were given."""

    runs: list[Run]
    number: int = 0

    def pull(self) -> Run:
        if self.number == len(self.runs):
            raise Exhausted
        self.number += 1
        return self.runs[self.number - 1]
