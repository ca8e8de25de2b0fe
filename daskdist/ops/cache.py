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
        nodes = list(walk(self.source))
        key = tuple(map(str, nodes)), tuple(each for each in nodes if not each.inputs)
        return Arrange(inputs, CacheRows(self.kept, key), inputs[0].grouped, name=self.name)


@dataclass(frozen=True)
class CacheRows:
    """Which way a pass goes."""

    kept: Kept
    key: Hashable

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        home = context.home
        if home is None:
            return inputs[0](epoch)
        key = (self.key, home)
        replayed = self.kept.runs.get(key)
        source = None if replayed is not None else inputs[0](self.kept.epochs.get(key, epoch))
        return CacheCursor(source, self.kept, key, replayed)


@dataclass
class CacheCursor:
    """A pass that is kept when it is over, if it came from the start; or one that gives what another left."""

    source: Cursor | None
    kept: Kept
    key: Hashable
    replayed: list[Run] | None = None
    number: int = 0
    is_whole: bool = True
    _runs: list[Run] = field(default_factory=list)

    def pull(self) -> Run:
        if self.source is None:
            return self._replay(self.replayed or [])
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

    def _replay(self, runs: list[Run]) -> Run:
        if self.number == len(runs):
            raise Exhausted
        self.number += 1
        return runs[self.number - 1]

    def resumed(self, saved: None) -> None:
        """Of a pass half way, what came before is not here: the next is made again, in the order of this one."""
        if self.replayed is not None:
            self.kept.runs.setdefault(self.key, self.replayed)
            return
        self.is_whole = False
        self.kept.epochs[self.key] = self.born[1]  # type: ignore[attr-defined]  # of every cursor
