"""Saved datasets: directories that ``save`` wrote; a part is a split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daskdist.core.block import Block, Bundle
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec
from daskdist.errors import FileError
from daskdist.formats.manifest import read_manifest
from daskdist.formats.store import read_part


@dataclass(frozen=True)
class Saved:
    """The reader; it has no options."""

    name = "saved"
    is_splittable = True

    def spec(self, path: str) -> ElementSpec:
        return read_manifest(path).spec

    def list_splits(self, path: str, file: int, like: str) -> Sequence[Split]:
        manifest = read_manifest(path)
        expected = self.spec(like) if path != like else manifest.spec
        if manifest.spec.most_general_common_spec(expected) is None:
            raise FileError(f"{path}: its elements are {manifest.spec.packed}, those of {like} are {expected.packed}")
        return [
            Split(f"{path} part {number}", (path, part, manifest.spec.structure), part.num_rows, part.num_bytes, file)
            for number, part in enumerate(manifest.parts)
        ]

    def __dask_tokenize__(self) -> object:
        return "Saved"

    def read(self, split: Split) -> Block | Bundle:
        path, part, structure = split.payload
        rows = read_part(path, part, structure)
        rows.label = split.label
        return rows
