"""``unique``: each distinct element once, at its first occurrence."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from daskdist.core.block import Block, Rows
from daskdist.core.node import Facts, Transformation
from daskdist.core.primitive import Arrange, ByCursor, Cursor, Fact, Primitive, gathered
from daskdist.core.ragged import Ragged
from daskdist.core.selection.runs import Run
from daskdist.core.spec import known_spec
from daskdist.core.structure import Nested
from daskdist.errors import ArgumentError
from daskdist.ops.select import columns_of_nest

# The common key of all NaN.
_NAN = "nan"


@dataclass(frozen=True, eq=False)
class Unique(Transformation):
    """The elements that differ from all earlier ones."""

    name = "unique"
    facts = Facts(keeps_spec=True)

    def __post_init__(self) -> None:
        spec = None if self.label is None else known_spec(self.source)
        if spec is not None and self.label in columns_of_nest(spec.packed):
            raise ArgumentError(
                f"unique: the name of the operation is {self.label!r}, which is a column; for the distinct values of "
                f"that, write ds[{self.label!r}].unique()"
            )

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        keys = Fact(gathered(inputs[0]), keys_of, self.name)
        return Arrange((keys,), ByCursor(UniqueCursor), grouped=0, name=self.name)


def keys_of(rows: Rows) -> Any:
    """Return the key of each element: a number or word itself, otherwise a digest of its bytes."""
    if isinstance(rows, Block) and len(rows.leaves) == 1 and rows.leaves[0].ndim == 1:
        column = rows.leaves[0]
        return column.tolist() if column.dtype.kind in "OT" else column
    return [_key(rows.item(index)) for index in range(len(rows))]


def _key(leaves: tuple[Any, ...]) -> Any:
    # A number or word has the same key in a bundle as in a block.
    if len(leaves) > 1 or isinstance(leaves[0], Nested) or leaves[0].ndim:
        return _digest(leaves)
    value = np.asarray(leaves[0]).tolist()
    return _NAN if value != value else value


# Kinds of dtypes whose values may be equal.
_LIKE: Final = {"U": "T", "S": "O"}


def _digest(leaves: tuple[Any, ...]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in leaves:
        if isinstance(leaf, Nested):
            raise ArgumentError("unique: an element contains a dataset, which cannot be compared")
        parts = (leaf.values, leaf.row_splits) if isinstance(leaf, Ragged) else (np.asarray(leaf),)
        for part in parts:
            kind = part.dtype.kind
            digest.update(f"{_LIKE.get(kind, kind)}{part.shape}".encode())
            if kind in "OSTU":
                # Equal words may be of different widths.
                words = part.ravel().tolist()
                digest.update(repr([bytes(word) if isinstance(word, bytes) else word for word in words]).encode())
            else:
                # Adding 0 makes the two zeros equal.
                digest.update((part + part.dtype.type(0) if part.dtype.kind in "fc" else part).tobytes())
    return digest.digest()


@dataclass
class UniqueCursor:
    """A cursor of new elements, of a source with each element's key; ``seen`` has the keys so far."""

    source: Cursor
    seen: set[Any] = field(default_factory=set)

    def pull(self) -> Run:
        while True:
            noted = self.source.pull()
            first: dict[Any, int] = {}
            if isinstance(noted.fact, np.ndarray):
                values, places = np.unique(noted.fact, return_index=True)
                # NaN does not equal itself, but all NaN count as one element.
                keys = [_NAN if value != value else value for value in values.tolist()]
                first = dict(zip(keys, places.tolist(), strict=True))
            else:
                for place, key in enumerate(noted.fact):
                    first.setdefault(key, place)
            new = sorted(place for key, place in first.items() if key not in self.seen)
            self.seen.update(first)
            if new:
                run: Run = noted.run.take(np.array(new))
                return run
