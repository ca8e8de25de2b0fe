"""Arrow IPC, files (also called Feather, of version 2) and streams, read by pyarrow; record batches are splits.

Small adjacent batches are combined to a split, and copied once for it. Large ones are cut at rows if that is free: in
uncompressed local files, which are mapped into memory. `tables.from_arrow` lists the conversion of types and nulls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final

from daskdist.config import in_bytes
from daskdist.core.block import Block
from daskdist.core.failing.origin import origin_from
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec
from daskdist.errors import DamagedFileError
from daskdist.formats.arrow.arrow_messages import (
    CONTINUES,
    FEATHER_1,
    MAGIC,
    BatchIndex,
    Message,
    index_of,
    opened,
)
from daskdist.formats.table_files import TableFiles, converted, valid_rows
from daskdist.storage.failures import DamagedPart, damage
from daskdist.storage.filesystem import Storage, Version
from daskdist.storage.first_file import FirstFile
from daskdist.storage.hive_partitions import Partitions
from daskdist.storage.libraries import pa

# A batch of at least this fraction of a split's size is not combined with others.
_LARGE: Final = 1 / 16
# The largest possible ratio of memory to file bytes without dictionaries, as a value takes at least one bit.
_DENSEST: Final = 64
# The assumed ratio of memory to compressed bytes.
_RATIO: Final = 2
# A limit on the size of schema messages.
_LONGEST: Final = 2**28


@dataclass(frozen=True, slots=True)
class ArrowSplit:
    """The record batches of a file that a split reads.

    Parameters
    ----------
    version
        The file, as it was listed.
    types
        Its schema, with the types that columns of nulls have in other files; None if there are none.
    start, stop
        The range of numbers of its record batches.
    rows
        The range of rows of a batch that is cut; None for all.
    """

    version: Version
    types: Any
    start: int
    stop: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Arrow(TableFiles):
    """The reader, with its options.

    Parameters
    ----------
    columns
        The columns and their structure; see `Columns.of`.
    missing
        The replacement of nulls, by column.
    partitions
        The columns encoded in the names of directories.
    storage
        Opens the files.
    """

    columns: Any = None
    missing: Mapping[str, Any] | None = None
    partitions: Partitions = field(default_factory=Partitions)
    storage: Storage = field(default_factory=Storage)

    name = "arrow"
    suffixes = (".arrow", ".feather", ".ipc", ".arrows")
    is_splittable = True

    def guess(self, path: str, head: bytes) -> bool:
        if head.startswith((MAGIC, FEATHER_1)):
            return True
        return head.startswith(CONTINUES) and 0 < int.from_bytes(head[4:8], "little") < _LONGEST

    def schema(self, path: str) -> Any:
        return index_of(self.storage, self.storage.version(path)).schema

    def spec_of_schema(self, schema: Any, path: str) -> ElementSpec:
        with damage(path):
            return self.tables.spec(schema, path)

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        version = self.storage.version(path)
        index = index_of(self.storage, version)
        types, spec = self.types(index.schema, path, first), first.spec
        share = len(self.tables.read_from(index.schema.names)) / max(len(index.schema.names), 1)
        # Text and bytes take more than their dtype says.
        row_bytes = None if any(leaf.dtype.kind in "TO" for leaf in spec.leaves) else spec.num_bytes

        def size_of(batch: Message) -> int:
            if batch.num_rows is not None and row_bytes is not None:
                # A damaged file may state any number of rows.
                return min(batch.num_rows * row_bytes, batch.num_bytes * _DENSEST)
            return int(batch.num_bytes * share * (1 if batch.is_mapped else _RATIO))

        return [
            _split(ArrowSplit(version, types, *part), index, size_of, file)
            for part in _grouped(index, size_of, in_bytes("split-bytes"))
        ]

    def read(self, split: Split) -> Block:
        part: ArrowSplit = split.payload
        with self._opened(split) as batches, damage(split.label):
            table = self._table(batches.batches(part.start, part.stop), part)
            block = self.tables.block(table, split.label, split.path or "")
        if part.rows is not None:
            block.origin = origin_from(_batches_label(part), part.rows[0], len(block))
        return block

    def read_valid_rows(self, split: Split) -> tuple[Block, list[DamagedPart]]:
        part: ArrowSplit = split.payload
        kept: list[Block] = []
        damaged: list[DamagedPart] = []
        counts = [batch.num_rows for batch in index_of(self.storage, part.version).batches]
        place = 0
        with self._opened(split) as batches:
            for number in range(part.start, part.stop):
                try:
                    with damage(split.label):
                        table = self._table(batches.batches(number, number + 1), part)
                except DamagedFileError as error:
                    if part.stop - part.start == 1:
                        raise
                    where = f"record batch {number} of {part.version.path}"
                    num_rows = counts[number]
                    damaged.append(DamagedPart(place, where, str(error), num_rows))
                    place += 1 if num_rows is None else num_rows
                    continue
                block_of = partial(self._block, table, split)
                block, invalid = valid_rows(table.num_rows, block_of, split.label, place)
                kept.append(block)
                damaged += invalid
                place += table.num_rows
        if not kept:
            raise DamagedFileError(f"{split.label}: none of its record batches can be read: {damaged[0].reason}")
        return Block.concat(kept, split.label), damaged

    def _block(self, table: Any, split: Split, start: int, stop: int) -> Block:
        with damage(split.label):
            return self.tables.block(table.slice(start, stop - start), split.label, split.path or "")

    def _table(self, batches: Sequence[Any], part: ArrowSplit) -> Any:
        if part.rows is not None:
            start, stop = part.rows
            batches = [batch.slice(start, stop - start) for batch in batches]
        names = batches[0].schema.names
        selected = self.tables.read_from(names)
        if len(selected) < len(names):
            # Read at least one column, as without any there would be no rows.
            batches = [batch.select(selected or names[:1]) for batch in batches]
        for batch in batches:
            # Invalid offsets, dictionary indices or text would crash the process. Plain numbers are not checked.
            batch.validate(full=True)
        return converted(batches[0] if len(batches) == 1 else pa.Table.from_batches(batches), part.types)

    @contextmanager
    def _opened(self, split: Split) -> Iterator[_Batches]:
        version = split.payload.version
        self.storage.check_unchanged(version, split.label)
        index = index_of(self.storage, version)
        names = index.schema.names
        selected = set(self.tables.read_from(names))
        fields = [number for number, name in enumerate(names) if name in selected] or [0]
        # Removing fields of mapped batches takes longer than keeping them. Without threads, as splits are read in
        # parallel already.
        is_all = all(message.is_mapped for message in index.batches) or len(fields) == len(names)
        options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=[] if is_all else fields)
        with damage(split.label), opened(self.storage, version.path) as source:
            yield _Batches(index, source, options)


class _Batches:
    # The record batches of an open file.
    def __init__(self, index: BatchIndex, source: Any, options: Any) -> None:
        self._index = index
        self._source = source
        self._options = options
        self._reader = None if index.is_stream else pa.ipc.open_file(source, options=options)

    def batches(self, start: int, stop: int) -> list[Any]:
        """Return record batches, with the selected columns or all."""
        if self._reader is not None:
            record_batches = [self._reader.get_batch(number) for number in range(start, stop)]
        else:
            record_batches = self._of_stream(self._index.batches[start:stop])
        for batch in record_batches:
            batch.validate()
        return record_batches

    def _of_stream(self, messages: Sequence[Message]) -> list[Any]:
        if len(self._index.others) == 1 and all(message.is_mapped for message in messages):
            record_batches = []
            for message in messages:
                self._source.seek(message.start)
                record_batches.append(pa.ipc.read_record_batch(pa.ipc.read_message(self._source), self._index.schema))
            return record_batches
        # Read them as a separate stream of the schema, the dictionaries before them, and the batches.
        others = [message for message in self._index.others if message.start < messages[0].start]
        parts = [*others, Message(messages[0].start, messages[-1].stop)]
        data = b"".join(self._bytes_of(message) for message in parts)
        with pa.ipc.open_stream(pa.BufferReader(data), options=self._options) as reader:
            return list(reader)

    def _bytes_of(self, message: Message) -> bytes:
        self._source.seek(message.start)
        return bytes(self._source.read(message.num_bytes))


def _grouped(index: BatchIndex, size_of: Any, split_bytes: int) -> Iterator[tuple[Any, ...]]:
    # Yield the range of batches of each split, and for a batch that is cut, the range of rows.
    start, total, previous = 0, 0, 0
    is_cut = not (index.is_stream and len(index.others) > 1)
    for number, batch in enumerate(index.batches):
        size = size_of(batch)
        is_large = max(size, previous) >= split_bytes * _LARGE
        if number > start and (is_large or total + size > split_bytes):
            yield start, number
            start, total = number, 0
        total, previous = total + size, size
        if is_cut and size > split_bytes and batch.is_mapped and batch.num_rows is not None and batch.num_rows > 1:
            num_parts = min(-(-size // max(split_bytes, 1)), batch.num_rows)
            bounds = [batch.num_rows * k // num_parts for k in range(num_parts + 1)]
            yield from ((number, number + 1, rows) for rows in pairwise(bounds))
            start, total = number + 1, 0
    if start < len(index.batches):
        yield start, len(index.batches)


def _batches_label(part: ArrowSplit) -> str:
    many = f"es {part.start} to {part.stop - 1}" if part.stop - part.start > 1 else f" {part.start}"
    return f"{part.version.path} record batch{many}"


def _split(part: ArrowSplit, index: BatchIndex, size_of: Any, file: int) -> Split:
    path, batches = part.version.path, index.batches[part.start : part.stop]
    label = _batches_label(part)
    num_bytes = sum(map(size_of, batches))
    known = [batch.num_rows for batch in batches if batch.num_rows is not None]
    num_rows = sum(known) if len(known) == len(batches) else None
    if part.rows is not None:
        start, stop = part.rows
        label = f"{label} rows {start} to {stop}"
        num_bytes, num_rows = num_bytes * (stop - start) // max(num_rows or 0, 1), stop - start
    return Split(label, part, num_rows, num_bytes, file, path)
