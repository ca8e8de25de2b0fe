"""``Strategy.experimental_make_numpy_dataset``: arrays stored on the workers of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from daskdist.core.node import Source
from daskdist.core.primitive import Primitive, Read, Split, value_itself
from daskdist.core.spec import ElementSpec


@dataclass(frozen=True)
class PlacedArray:
    """A block of rows on a worker."""

    key: Any
    future: Any = field(repr=False)
    num_rows: int
    num_bytes: int


@dataclass(frozen=True)
class Placing:
    """All blocks of a dataset, in order."""

    blocks: tuple[PlacedArray, ...]
    token: str

    def __dask_tokenize__(self) -> object:
        return "Placing", self.token


@dataclass(frozen=True, eq=False)
class MakeNumpyDataset(Source):
    """Elements that are the rows of arrays on workers."""

    num_rows: int
    known_spec: ElementSpec = field(repr=False)
    placing: Placing = field(repr=False)

    name = "make_numpy_dataset"
    background = True
    is_cheap = False

    @property
    def spec(self) -> ElementSpec:
        return self.known_spec

    @property
    def cardinality(self) -> int:
        return self.num_rows

    def splits(self) -> Sequence[Split]:
        splits = []
        start = 0
        for block in self.placing.blocks:
            label = f"make_numpy_dataset rows {start} on"
            splits.append(Split(label, block.key, block.num_rows, block.num_bytes))
            start += block.num_rows
        return splits

    def graph(self) -> dict[Any, Any]:
        """Return the future that keeps each block alive, by key."""
        return {block.key: block.future for block in self.placing.blocks}

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        return Read(self.splits, value_itself, self.name, graph=self.graph, kept_for=self)
