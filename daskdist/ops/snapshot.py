"""``snapshot``, ``save`` and ``cache`` to a path: elements written during a pass, and read in later ones."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from dask.base import tokenize

from daskdist.core.block import Rows
from daskdist.core.cardinality import counted
from daskdist.core.finalizer import Finalizer
from daskdist.core.json_codec import spec_to_json
from daskdist.core.node import Facts, Node, Transformation, counting
from daskdist.core.primitive import (
    Arrange,
    Compute,
    Context,
    Cursor,
    Epoch,
    Exhausted,
    Fact,
    Opener,
    Primitive,
    same,
)
from daskdist.core.randomness.pass_numbers import ResumedPasses, part_of, with_part
from daskdist.core.selection.runs import Run
from daskdist.core.spec import ElementSpec
from daskdist.errors import FileError
from daskdist.formats.saved.abandoned_parts import missing_parts, new_owner, part_name, remove_abandoned
from daskdist.formats.saved.manifest import (
    Manifest,
    SavedPart,
    exists,
    read_manifest,
    remove_unfinished,
    write_manifest,
)
from daskdist.formats.saved.saved_format import Saved
from daskdist.formats.saved.store import write_part
from daskdist.ops.read_files import ReadFiles
from daskdist.storage.atomic_file import located
from daskdist.storage.http_files import check_writable

logger: Final = logging.getLogger("daskdist")


@dataclass(frozen=True, eq=False)
class Snapshot(Transformation):
    """The same elements; the first complete pass writes them to a directory, and later passes read them.

    Parameters
    ----------
    directory
        The directory to write to.
    fingerprint
        The fingerprint of the pipeline, for the manifest.
    element_spec
        The spec of the elements.
    compression
        The name of the compression, or None.
    is_reused
        Whether an existing snapshot is read; otherwise it is written again.
    resumed
        The passes that were resumed in the middle.
    code
        The code of the pipeline's functions when the fingerprint was computed; None if changes of it are ignored.
    """

    directory: str
    fingerprint: str = field(repr=False)
    element_spec: ElementSpec = field(repr=False)
    compression: str | None = None
    is_reused: bool = True
    resumed: ResumedPasses = field(default_factory=ResumedPasses, repr=False)
    code: tuple[str, ...] | None = field(default=None, repr=False)

    name = "snapshot"
    # All workers share one directory.
    facts = Facts(keeps_count=True)
    replays_first_pass = True

    def __post_init__(self) -> None:
        # Refuse elements that cannot be written before anything is written.
        spec_to_json(self.element_spec)
        check_writable(self.directory)

    @property
    def spec(self) -> ElementSpec:
        return self.element_spec

    def of_code(self, code: tuple[str, ...], fingerprint: str) -> Node:
        """Return the operation after a change of its pipeline's functions, with another directory."""
        directory = f"{self.directory.rpartition('/')[0]}/{fingerprint}"
        return replace(self, directory=directory, fingerprint=fingerprint, code=code, resumed=ResumedPasses())

    def on_share(self, index: int, num_shards: int) -> Node:
        return replace(self, directory=f"{self.directory}/shard-{index}-of-{num_shards}")

    def lower(self, inputs: tuple[Primitive, ...]) -> Primitive:
        write = WriteRows(self.directory, self.compression, new_owner(), takes_failed=self.is_reused)
        # Each file has as many rows as a call takes, however short the incoming runs are.
        rows = Compute(inputs[0], same, "gather", factor=1, is_full=True)
        parts = Fact(rows, write, f"{self.name}-write", is_strict=True, is_of_pass=True)
        places = tuple(node.passes.place for node in counting(self.source))
        return Arrange((parts,), SnapshotRows(self, places), grouped=0, name=self.name)


@dataclass(frozen=True)
class WriteRows:
    """A function that writes elements to a new file and returns its `SavedPart`; None if some failed and may fail.

    Parameters
    ----------
    directory
        The directory to write to.
    compression
        The name of the compression, or None.
    owner
        Distinguishes the files of these passes from those of other writers.
    takes_failed
        Whether elements may have failed; otherwise the error of the first is raised.
    """

    directory: str
    compression: str | None
    owner: str
    takes_failed: bool

    def __call__(self, rows: Rows) -> SavedPart | None:
        if self.takes_failed and rows.has_failed:
            return None
        return write_part(rows, self.directory, part_name(self.owner), self.compression)


@dataclass(frozen=True)
class SnapshotRows:
    """The choice between a pass that writes the elements and one that reads them; the input's facts are the parts.

    Parameters
    ----------
    snapshot
        The operation.
    places
        The places of the upstream operations that count their passes.
    """

    snapshot: Snapshot
    places: tuple[int, ...]

    def primitive_of(self, key: str) -> Primitive:
        """Return the primitive that reads the snapshot, which must be the one that ``key`` identifies.

        Raises
        ------
        FileError
            The snapshot is missing or was replaced.
        """
        directory = self.snapshot.directory
        contents = _contents(directory)
        if contents != key:
            state = "no longer there" if contents is None else "has been replaced"
            raise FileError(
                f"load_state_dict: the position is in a pass that read the snapshot {directory}, which {state}; begin "
                "a new pass, or load a position from before the snapshot was complete"
            )
        return ReadFiles((directory,), Saved()).lower(())

    def open(self, inputs: Sequence[Opener], epoch: Epoch, context: Context) -> Cursor:
        snapshot = self.snapshot
        # A resumed pass reads the same snapshot, or makes the same elements, as before.
        part, read = context.recall(lambda: self._begin(epoch))
        if read is not None:
            return SnapshotCursor(None, context.open(read)(epoch), snapshot, part)
        return SnapshotCursor(inputs[0](with_part(epoch, self.places, part)), None, snapshot, part)

    def _begin(self, epoch: Epoch) -> tuple[Epoch, str | None]:
        # Return the pass whose order this one has, and the snapshot that it reads, if there is one.
        snapshot = self.snapshot
        written = _contents(snapshot.directory) if snapshot.is_reused else None
        if snapshot.is_reused:
            remove_abandoned(snapshot.directory, with_others=written is None)
        return part_of(snapshot.resumed.instead_of(snapshot.directory, epoch, self.places), self.places), written


@dataclass(eq=False)
class SnapshotCursor:
    """A pass that reads with ``reader``, or one that writes parts, which are deleted if it fails or is resumed."""

    source: Cursor | None
    reader: Cursor | None
    _snapshot: Snapshot
    _part: Epoch
    is_whole: bool = True
    _parts: list[SavedPart] = field(default_factory=list)
    _finalizer: Any = None

    def __post_init__(self) -> None:
        self._finalizer = Finalizer(self, _remove, self._snapshot.directory, self._parts)

    def resume(self, *, is_trial: bool) -> None:
        """Go on in the middle: earlier parts are missing, so a pass that writes leaves no snapshot."""
        if self.source is not None:
            self.is_whole = False
        if self.source is not None and not is_trial:
            self._snapshot.resumed.note(self._snapshot.directory, self._part)

    def pull(self) -> Run:
        if self.source is None:
            read: Run = self.reader.pull()  # type: ignore[union-attr]
            return read
        try:
            noted = self.source.pull()
        except Exhausted:
            self._finish()
            raise
        if noted.fact is None:
            # It was written before a position, or some elements failed.
            self.is_whole = False
        else:
            self._parts.append(noted.fact)
        run: Run = noted.run
        return run

    def _finish(self) -> None:
        if not self._finalizer.alive:
            return
        snapshot = self._snapshot
        directory = snapshot.directory
        if not self.is_whole or (snapshot.is_reused and exists(directory)):
            # Another pass finished first, or this one is incomplete: delete its parts.
            self._finalizer()
            return
        missing = missing_parts(directory, self._parts)
        if missing:
            self._finalizer()
            self._tell_missing(missing)
            return
        self._finalizer.detach()
        number = sum(part.num_rows for part in self._parts)
        parts = tuple(self._parts)
        write_manifest(
            directory, Manifest(snapshot.fingerprint, snapshot.element_spec, number, parts, snapshot.compression)
        )
        if snapshot.is_reused:
            remove_abandoned(directory, with_others=True)
        else:
            remove_unfinished(directory)

    def _tell_missing(self, missing: Sequence[str]) -> None:
        reason = (
            f"{self._snapshot.directory}: {len(missing)} of {counted(len(self._parts), 'file')} missing ({missing[0]})"
        )
        if not self._snapshot.is_reused:
            raise FileError(
                f"save: {reason}; check that no other process saves to this directory, and that all workers and this "
                "process share it, and save again"
            )
        logger.warning("%s; this pass leaves no snapshot, and the next one writes it again", reason)


def _contents(directory: str) -> str | None:
    # Return an identifier of the snapshot in a directory; None if there is none.
    if not exists(directory):
        return None
    return str(tokenize([part.name for part in read_manifest(directory).parts]))


def _remove(directory: str, parts: Sequence[SavedPart]) -> None:
    # Best effort: parts that remain are not in the manifest, so they are not read, and later passes remove them.
    if not parts:
        return
    with contextlib.suppress(OSError, ValueError):
        filesystem, root = located(directory)
        for part in parts:
            with contextlib.suppress(FileNotFoundError):
                filesystem.rm_file(f"{root}/{part.name}")
