"""``cache``: elements stored in memory during a pass, and replayed in later ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from daskdist.core.cardinality import UNKNOWN
from daskdist.core.functions.user_function import code_of
from daskdist.core.node import CountingNode, Facts, Transformation, counting, walk
from daskdist.core.primitive import Arrange, Context, Cursor, Epoch, Exhausted, Opener, Primitive
from daskdist.core.randomness.pass_numbers import ResumedPasses, part_of, with_part
from daskdist.core.selection.runs import Run


class CachedElements:
    """The elements of complete passes, as runs, by node and location of the data."""

    def __init__(self) -> None:
        self.runs: dict[Any, list[Run]] = {}
        # For each key, the pass in which its runs were stored.
        self.parts: dict[Any, Epoch] = {}
        self.resumed = ResumedPasses()

    def __reduce__(self) -> tuple[Any, ...]:
        # A cache starts empty in another process.
        return CachedElements, ()

    def __dask_tokenize__(self) -> object:
        return "CachedElements"


@dataclass(frozen=True, eq=False)
class Cache(Transformation):
    """The same elements; after a first complete pass, that pass is replayed in its order."""

    kept: CachedElements = field(default_factory=CachedElements, repr=False)

    name = "cache"
    facts = Facts(keeps_count=True, keeps_spec=True, per_worker=True)
    replays_first_pass = True

    @property
    def cardinality(self) -> int:
        number = self.source.cardinality
        if number != UNKNOWN or not self.kept.runs:
            return number
        # A complete pass on any worker has recorded the number of elements.
        key_here = self._key()
        counts = {sum(map(len, runs)) for key, runs in list(self.kept.runs.items()) if key[0] == key_here}
        return counts.pop() if len(counts) == 1 else UNKNOWN

    def _key(self) -> tuple[Hashable, Hashable]:
        # The same node, rewritten for a worker's share, has other elements.
        nodes = list(walk(self.source))
        sources = tuple(_identity(node) for node in nodes if not node.inputs)
        return (tuple(map(str, nodes)), sources), code_of(self.source)

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        places = tuple(node.passes.place for node in counting(self.source))
        return Arrange(inputs, CacheRows(self.kept, self._key(), places), inputs[0].grouped, name=self.name)


def _identity(source: Any) -> object:
    # A random source becomes another node when its place is set, but keeps its pass counter.
    return source.passes.counter if isinstance(source, CountingNode) else source


@dataclass(frozen=True)
class CacheRows:
    """The choice between a pass that fills the cache and one that replays it.

    Parameters
    ----------
    kept
        The stored elements.
    key
        Identifies the share and the code of the functions, so that elements of another share or of changed functions
        are not replayed.
    places
        The places of the upstream operations that count their passes.
    """

    kept: CachedElements
    key: tuple[Hashable, Hashable]
    places: tuple[int, ...]

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        home = context.home
        if home is None:
            return inputs[0](epoch)
        key = (self.key, home)
        stored = self.kept.runs.get(key)
        if stored is None:
            kept_keys = [
                kept_key for kept_key in self.kept.runs if kept_key[0][0] == self.key[0] and kept_key[1] == home
            ]
            for outdated in kept_keys:
                del self.kept.runs[outdated]
            epoch = self.kept.resumed.instead_of(key, epoch, self.places)
        # This is the pass whose order the elements have.
        now = part_of(epoch, self.places) if stored is None else self.kept.parts[key]
        part: Epoch = context.recall(lambda: now)
        if stored is not None and part == now:
            return CacheCursor(None, self.kept, key, stored)
        epoch = with_part(epoch, self.places, part)
        return CacheCursor(inputs[0](epoch), self.kept, key, None, part)


@dataclass
class CacheCursor:
    """A pass that is stored when it is complete, if it began at the start; or a stored one again."""

    source: Cursor | None
    kept: CachedElements
    key: tuple[Hashable, Hashable]
    replayed: list[Run] | None = None
    part: Epoch = ()
    number: int = 0
    is_whole: bool = True
    runs: list[Run] = field(default_factory=list)

    def pull(self) -> Run:
        if self.source is None:
            return self._replay(self.replayed or [])
        try:
            run: Run = self.source.pull()
        except Exhausted:
            if self.is_whole:
                for stored in self.runs:
                    stored.stay()
                if self.key not in self.kept.runs:
                    self.kept.parts[self.key], self.kept.runs[self.key] = self.part, self.runs
            raise
        if self.is_whole:
            run.keep()
            self.runs.append(run)
        return run

    def _replay(self, runs: list[Run]) -> Run:
        if self.number == len(runs):
            raise Exhausted
        self.number += 1
        return runs[self.number - 1]

    def resume(self, *, is_trial: bool) -> None:
        """Go on in the middle: earlier elements are missing, so the pass is not stored unless it is a replay."""
        if self.source is not None:
            self.is_whole = False
        if self.source is not None and not is_trial:
            self.kept.resumed.note(self.key, self.part)
