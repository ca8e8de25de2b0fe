"""TFRecord: records of bytes, each preceded by its length, with checksums of both.

Splits are byte ranges, whose first record is found by following records from the beginning; with an index that is done
once, when they are listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import IO, Any, Final

import numpy as np

from daskdist.core.block import Block, Rows
from daskdist.core.failing.origin import Origin, SelectedOrigins
from daskdist.core.primitive import Split
from daskdist.core.spec import ElementSpec, TensorSpec
from daskdist.core.structure import LONE
from daskdist.errors import ArgumentError, DamagedFileError, FileError
from daskdist.formats.tfrecord.checksums import crc32c, record_checksums
from daskdist.formats.tfrecord.example import Examples, Feature, RefusedRecord
from daskdist.formats.tfrecord.example_writer import block_of, check_example, examples_of
from daskdist.formats.tfrecord.record_framing import FOOTER_BYTES, HEADER_BYTES, Records, framed, headers_of, is_plain
from daskdist.storage.byte_ranges import ByteRanges, RangeRecords
from daskdist.storage.compression import compressed, has_suffix, inferred, suffix_of
from daskdist.storage.failures import DamagedPart
from daskdist.storage.filesystem import Storage
from daskdist.storage.first_file import FirstFile
from daskdist.tables.byte_rows import objects_at, rows_at

Array = np.ndarray[Any, Any]

_WRITTEN_ROWS: Final = 4096
_NAMES: Final = (".tfrecord", ".tfrecords", ".tfrec")


@dataclass(frozen=True)
class TFRecord:
    """The reader, with its options, and the writer.

    Parameters
    ----------
    features
        The features to read from ``tf.train.Example`` records; None for the records as bytes.
    check_crc
        Whether to verify checksums.
    index
        Whether to scan files once for an index of their records.
    compression
        The compression of the files: ``"infer"``, a name, or None; for writing, a name or None.
    storage
        Opens the files.
    """

    features: Mapping[str, Feature] | None = None
    check_crc: bool = True
    index: bool = False
    compression: str | None = "infer"
    storage: Storage = field(default_factory=Storage)

    name = "tfrecord"
    is_splittable = True

    def __post_init__(self) -> None:
        if self.features is not None:
            Examples(self.features)

    @property
    def suffixes(self) -> tuple[str, ...]:
        if self.compression in (None, "infer"):
            return _NAMES
        return (_NAMES[0] + suffix_of(self.compression), *_NAMES)

    def guess(self, path: str, head: bytes) -> bool:
        return is_plain(head) or has_suffix(path, _NAMES)

    def spec(self, path: str) -> ElementSpec:
        if self.check_crc:
            crc32c()
        self.storage.version(path)
        return (
            ElementSpec(LONE, (TensorSpec((), np.dtype(object)),))
            if self.features is None
            else Examples(self.features).spec
        )

    def list_splits(self, path: str, file: int, first: FirstFile) -> Sequence[Split]:
        ranges = self._ranges(path)
        splits = ranges.list(path, file)
        if not self.index or ranges.compression is not None:
            return splits
        return [_counted(split, self.storage, self.check_crc) for split in splits]

    def read(self, split: Split) -> Block:
        block, refused = self._block(split, self._piece(split))
        for damaged in refused:
            raise DamagedFileError(f"{damaged.where}: {damaged.reason}")
        return block

    def read_valid_rows(self, split: Split) -> tuple[Block, list[DamagedPart]]:
        piece = self._piece(split, is_lenient=True)
        block, refused = self._block(split, piece)
        return block, piece.with_rest(refused, len(block), split)

    def _compression_of(self, path: str) -> str | None:
        if self.compression != "infer":
            return self.compression
        # A length may look like the beginning of a gzip file; its checksum decides.
        head = self.storage.read(path, 0, HEADER_BYTES)
        return None if is_plain(head) else inferred(path, head[:8])

    def _ranges(self, path: str) -> ByteRanges:
        return ByteRanges(Records(self.check_crc), self.storage, self._compression_of(path))

    def _piece(self, split: Split, *, is_lenient: bool = False) -> RangeRecords:
        return ByteRanges(Records(self.check_crc), self.storage).read(split, is_lenient=is_lenient)

    def _block(self, split: Split, piece: RangeRecords) -> tuple[Block, list[DamagedPart]]:
        # Return the valid records of a piece, and the others.
        headers = headers_of(piece.data, check=False)
        starts, lengths = headers.starts, headers.lengths.astype(np.int64)
        rows, refused = np.arange(len(starts)), list[RefusedRecord]()
        raw = objects_at(piece.data, starts, lengths) if self.check_crc or self.features is None else None
        if raw is not None and self.check_crc:
            stated = rows_at(piece.data, starts + lengths, FOOTER_BYTES).view("<u4").reshape(-1)
            wrong = np.flatnonzero(record_checksums(raw) != stated)
            if len(wrong):
                refused = [RefusedRecord(row, "its checksum is not that of its bytes", True) for row in wrong.tolist()]
                rows, raw = np.delete(rows, wrong), np.delete(raw, wrong)
        if self.features is None:
            columns, structure = [raw], LONE
        else:
            examples = Examples(self.features)
            structure = examples.spec.structure
            columns, kept, more = examples.parse(piece.data, starts[rows], lengths[rows])
            refused += [record._replace(row=int(rows[record.row])) for record in more]
            rows = rows[kept]

        def name_of(row: int) -> str:
            return f"record {row} of {split.label}, {lengths[row]} bytes at {piece.offset + int(starts[row])}"

        for record in refused:
            # A sound record with other features is no damage: the file has another schema, or the user asked for one.
            if not record.is_damage:
                raise FileError(f"{name_of(record.row)}: {record.reason}")
        origin = Origin(split.label) if len(rows) == len(starts) else SelectedOrigins([Origin(split.label)], rows)
        damaged = [DamagedPart(record.row, name_of(record.row), record.reason) for record in sorted(refused)]
        return Block(structure, columns, split.label, origin), damaged

    def check(self, spec: ElementSpec) -> None:
        crc32c()
        leaf = spec.leaves[0] if spec.leaves else None
        if spec.structure == LONE and leaf is not None and (leaf.shape, leaf.dtype.kind) in (((), "O"), ((), "S")):
            return
        check_example(spec)

    def write(self, rows: Rows, file: IO[bytes]) -> None:
        rows = block_of(rows)
        # A few at a time, so that intermediate data stays in the processor's cache.
        parts = [_framed(rows.slice(at, at + _WRITTEN_ROWS)) for at in range(0, len(rows), _WRITTEN_ROWS)]
        file.write(compressed(b"".join(parts), None if self.compression == "infer" else self.compression))


@lru_cache(maxsize=4096)
def _counted(split: Split, storage: Storage, check_crc: bool) -> Split:
    # A split with the number of its records and the offset of the first, unless a record up to its end is damaged.
    piece = ByteRanges(Records(check_crc), storage).read(split, is_lenient=True)
    if piece.broken is not None:
        return split
    num_rows = len(headers_of(piece.data, check=False).starts)
    return replace(split, payload=replace(split.payload, begin=piece.offset), num_rows=num_rows)


def _framed(rows: Rows) -> bytes:
    if rows.structure != LONE:
        return framed(*examples_of(rows))
    raw = [value for (value,) in map(rows.item, range(len(rows)))]
    raw = [value.item() if isinstance(value, np.ndarray) else value for value in raw]
    invalid = [value for value in raw if not isinstance(value, bytes)]
    if invalid:
        raise ArgumentError(f"records must be bytes, but one is {invalid[0]!r:.80}")
    return framed(np.frombuffer(b"".join(raw), np.uint8), np.fromiter(map(len, raw), np.int64, len(raw)))
