"""Saved datasets: the directories that ``save`` writes; a part is a split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from daskdist.core.block import Block, Bundle
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec
from daskdist.formats.saved.manifest import MANIFEST, is_manifest, read_manifest
from daskdist.formats.saved.store import read_part
from daskdist.storage.first_file import FirstFile, differs_from_first


@dataclass(frozen=True)
class Saved:
    """The reader, without options."""

    name = "saved"
    suffixes: ClassVar[tuple[str, ...]] = ()
    marks = (MANIFEST,)
    is_splittable = True

    def guess(self, path: str, head: bytes) -> bool:
        # Other programs use this file name too.
        return path.endswith(f"/{MANIFEST}") and is_manifest(head)

    def spec(self, path: str) -> ElementSpec:
        return read_manifest(path).spec

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        manifest = read_manifest(path)
        if manifest.spec.most_general_common_spec(first.spec) is None:
            raise differs_from_first(path, manifest.spec, first)
        return [
            Split(
                f"{path} part {number}",
                (path, part, manifest.spec.structure),
                part.num_rows,
                part.num_bytes,
                file,
                path,
            )
            for number, part in enumerate(manifest.parts)
        ]

    def read(self, split: Split) -> Block | Bundle:
        path, part, structure = split.payload
        rows = read_part(path, part, structure)
        rows.label = split.label
        return rows
