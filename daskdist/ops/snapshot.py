"""``snapshot``, ``save`` and ``cache`` to a path: elements written as they pass, and read from there afterwards."""

from __future__ import annotations

import contextlib
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from daskdist.core.block import Rows
from daskdist.core.node import Facts, Node, Transformation
from daskdist.core.primitive import Arrange, Compute, Context, Cursor, Epoch, Exhausted, Fact, Opener, Primitive, same
from daskdist.core.selection import Run
from daskdist.core.spec import ElementSpec
from daskdist.files.manifest import Manifest, Part, exists, located, remove_unfinished, spec_to_json, write_manifest
from daskdist.files.store import write_part
from daskdist.formats.saved import Saved
from daskdist.ops.read_files import ReadFiles


@dataclass(frozen=True, eq=False)
class Snapshot(Transformation):
    """The same elements; the first complete pass writes them to a directory, and later ones read them there.

    Parameters
    ----------
    directory
        Where they are written.
    fingerprint
        Of the pipeline that makes them, for the manifest.
    element_spec
        The spec of the elements.
    compression
        How they are compressed.
    is_reused
        Whether what is there already is read; else it is written anew.
    """

    directory: str
    fingerprint: str = field(repr=False)
    element_spec: ElementSpec = field(repr=False)
    compression: str | None = None
    is_reused: bool = True

    name = "snapshot"
    # There is one directory for all workers.
    facts = Facts(keeps_count=True)

    def __post_init__(self) -> None:
        # What cannot be written is refused before anything is.
        spec_to_json(self.element_spec)

    @property
    def spec(self) -> ElementSpec:
        return self.element_spec

    def on_share(self, index: int, num_shards: int) -> Node:
        return replace(self, directory=f"{self.directory}/shard-{index}-of-{num_shards}")

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        write = WriteRows(self.directory, self.compression)
        # A file for as much as a call takes, however little the runs are that come.
        rows = Compute(inputs[0], same, "gather", factor=1, is_full=True)
        parts = Fact(rows, write, f"{self.name}-write", is_strict=True)
        return Arrange((parts,), SnapshotRows(self), grouped=0, name=self.name)


@dataclass(frozen=True)
class WriteRows:
    """Elements written to a file of their own, which is the fact of them."""

    directory: str
    compression: str | None

    def __call__(self, rows: Rows) -> Part:
        return write_part(rows, self.directory, f"part-{uuid.uuid4().hex}", self.compression)


@dataclass(frozen=True)
class SnapshotRows:
    """Which way a pass goes; its input notes the part each run was written to.

    Parameters
    ----------
    snapshot
        Where, and of what.
    epochs
        The pass that was gone on from half way, if one was, for the order of those after it.
    """

    snapshot: Snapshot
    epochs: list[Epoch] = field(default_factory=list)

    def primitive_of(self, key: None) -> Primitive:
        """The reading of what was written."""
        return ReadFiles(Saved(), (self.snapshot.directory,)).lower(())

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        if self.snapshot.is_reused and exists(self.snapshot.directory):
            return context.open(None)(epoch)
        return SnapshotCursor(inputs[0](self.epochs[0] if self.epochs else epoch), self.snapshot, self.epochs)


@dataclass(eq=False)
class SnapshotCursor:
    """The parts written; they go if the pass ends early."""

    source: Cursor
    snapshot: Snapshot
    _epochs: list[Epoch]
    _parts: list[Part] = field(default_factory=list)
    _finalizer: Any = None

    def __post_init__(self) -> None:
        self._finalizer = weakref.finalize(self, _remove, self.snapshot.directory, self._parts)

    def resumed(self, saved: None) -> None:
        """What was written before is not here: nothing is left of this pass, and the next is in its order."""
        self._parts, self._finalizer = [], None
        self._epochs[:] = [self.born[1]]  # type: ignore[attr-defined]  # of every cursor

    def pull(self) -> Run:
        try:
            noted = self.source.pull()
        except Exhausted:
            self._finish()
            raise
        self._parts.append(noted.fact)
        run: Run = noted.run
        return run

    def _finish(self) -> None:
        if self._finalizer is None or not self._finalizer.alive:
            return
        directory = self.snapshot.directory
        if self.snapshot.is_reused and exists(directory):
            # Another pass was done first: one of them is enough.
            self._finalizer()
            return
        self._finalizer.detach()
        snapshot, number = self.snapshot, sum(part.num_rows for part in self._parts)
        parts = tuple(self._parts)
        write_manifest(
            directory, Manifest(snapshot.fingerprint, snapshot.element_spec, number, parts, snapshot.compression)
        )
        if not self.snapshot.is_reused:
            remove_unfinished(directory)


def _remove(directory: str, parts: Sequence[Part]) -> None:
    # Best effort: what stays is not in the manifest, and so is not read.
    with contextlib.suppress(OSError, ValueError):
        filesystem, root = located(directory)
        for part in parts:
            with contextlib.suppress(FileNotFoundError):
                filesystem.rm_file(f"{root}/{part.name}")
