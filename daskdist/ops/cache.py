"""``cache``: elements kept in memory as they pass, and given from there afterwards."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskdist.core.cardinality import UNKNOWN
from daskdist.core.functions.user_function import code_of
from daskdist.core.node import Facts, Transformation, counting, walk
from daskdist.core.primitive import Arrange, Context, Cursor, Epoch, Exhausted, Opener, Primitive
from daskdist.core.randomness.pass_numbers import ResumedPasses
from daskdist.core.selection.runs import Run


class CachedElements:
    """The elements of complete passes, as runs: by the node that gave them and where they lie."""

    def __init__(self) -> None:
        self.runs: dict[Any, list[Run]] = {}
        self.resumed = ResumedPasses()

    def __reduce__(self) -> tuple[Any, ...]:
        # In another process there is nothing yet.
        return CachedElements, ()

    def __dask_tokenize__(self) -> object:
        return "CachedElements"


@dataclass(frozen=True, eq=False)
class Cache(Transformation):
    """The same elements; after a first complete pass, those of that pass, in its order.

    Parameters
    ----------
    kept
        What was kept.
    """

    kept: CachedElements = field(default_factory=CachedElements, repr=False)

    name = "cache"
    facts = Facts(keeps_count=True, keeps_spec=True, per_worker=True)

    @property
    def cardinality(self) -> int:
        number = self.source.cardinality
        if number != UNKNOWN or not self.kept.runs:
            return number
        # As many as complete passes have left, wherever they were made.
        own = self._key()
        counts = {sum(map(len, runs)) for key, runs in list(self.kept.runs.items()) if key[0] == own}
        return counts.pop() if len(counts) == 1 else UNKNOWN

    def _key(self) -> tuple[Hashable, Hashable]:
        # Rewritten for a worker's share, the same node keeps other elements.
        nodes = list(walk(self.source))
        sources = tuple(_identity(each) for each in nodes if not each.inputs)
        return (tuple(map(str, nodes)), sources), code_of(self.source)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        places = tuple(each.passes.place for each in counting(self.source))
        return Arrange(inputs, CacheRows(self.kept, self._key(), places), inputs[0].grouped, name=self.name)


def _identity(source: Any) -> object:
    # A random source is another node once it was told its place; its counter stays.
    passes = getattr(source, "passes", None)
    return source if passes is None else passes.counter


@dataclass(frozen=True)
class CacheRows:
    """The choice between a pass that fills the cache and one that replays it.

    Parameters
    ----------
    kept
        What was kept.
    key
        Tells what is cached here from what the same operation keeps on other shares; and what its functions are, for
        what others made is not replayed.
    places
        The places of the operations below that count their passes.
    """

    kept: CachedElements
    key: tuple[Hashable, Hashable]
    places: tuple[int, ...]

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        home = context.home
        if home is None:
            return inputs[0](epoch)
        key = (self.key, home)
        replayed = self.kept.runs.get(key)
        source: Cursor | None = None
        if replayed is None:
            for made in [each for each in self.kept.runs if each[0][0] == self.key[0] and each[1] == home]:
                del self.kept.runs[made]
            source = inputs[0](self.kept.resumed.instead_of(key, epoch, self.places))
        return CacheCursor(source, self.kept, key, replayed, _places=self.places)


@dataclass
class CacheCursor:
    """A pass that is kept when it is over, if it came from the start; or one that gives what another left."""

    source: Cursor | None
    kept: CachedElements
    key: tuple[Hashable, Hashable]
    replayed: list[Run] | None = None
    number: int = 0
    is_whole: bool = True
    _runs: list[Run] = field(default_factory=list)
    _places: tuple[int, ...] = ()

    def pull(self) -> Run:
        if self.source is None:
            return self._replay(self.replayed or [])
        try:
            run: Run = self.source.pull()
        except Exhausted:
            if self.is_whole:
                for made in self._runs:
                    made.stay()
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
        """Go on half way: what came before is not here, so nothing is kept of a pass that is not a replay."""
        if self.replayed is not None:
            self.kept.runs.setdefault(self.key, self.replayed)
        elif self.source is not None:
            self.is_whole = False
            epoch: Epoch = self.source.opened_at[1]  # type: ignore[attr-defined]  # of every cursor
            self.kept.resumed.note(self.key, epoch, self._places)
