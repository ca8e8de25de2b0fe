"""The positions and row counts of the record batches of an Arrow file.

The footer of a file lists its batches, from which pyarrow reads them; their sizes are estimated from their numbers of
rows. A stream has no footer, so its messages are read in turn: only little of a local one, which is mapped into memory,
and all of a remote one, once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final

from daskdist.errors import DamagedFileError, FileError
from daskdist.storage.failures import damage
from daskdist.storage.filesystem import Storage, Version, is_remote
from daskdist.storage.libraries import pa

logger: Final = logging.getLogger("daskdist")

MAGIC: Final = b"ARROW1"
FEATHER_1: Final = b"FEA1"
CONTINUES: Final = b"\xff\xff\xff\xff"
# What follows the last message of a stream: the second is that of old writers.
_ENDS: Final = (CONTINUES + bytes(4), bytes(4))
_BATCH: Final = "record batch"


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a file.

    Parameters
    ----------
    start, stop
        The range of its bytes; for batches of files, one of about their size.
    num_rows
        The number of rows of a record batch; None if unknown.
    is_mapped
        Whether its arrays are parts of the file, which is mapped into memory: it is local and not compressed.
    """

    start: int
    stop: int
    num_rows: int | None = None
    is_mapped: bool = False

    @property
    def num_bytes(self) -> int:
        """The size of the message and its body."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class BatchIndex:
    """The positions and row counts of the messages of a file.

    Parameters
    ----------
    schema
        Its Arrow schema.
    is_stream
        Whether it is a stream.
    batches
        The record batches, in order.
    others
        The schema and the dictionaries of a stream, in order.
    """

    schema: Any
    is_stream: bool
    batches: tuple[Message, ...]
    others: tuple[Message, ...] = ()


@lru_cache(maxsize=64)
def index_of(storage: Storage, version: Version) -> BatchIndex:
    """Return the schema of a file and the positions of its messages.

    Raises
    ------
    FileError
        The file is not an Arrow file, or is damaged: it has no footer, it ends within a message, a message has an
        unknown kind, or bytes follow the end-of-stream marker.

    Notes
    -----
    A stream may end without a marker if its writer closed the connection. A file that was truncated between two
    messages looks the same, so a warning is logged.
    """
    path = version.path
    if not version.num_bytes:
        raise DamagedFileError(f"{path} is empty, while even an Arrow file without rows has a schema")
    with damage(path, "not an Arrow file, or a damaged one"), opened(storage, path) as source:
        head = bytes(source.read(8))
        if head.startswith(FEATHER_1):
            raise FileError(
                f"{path}: Feather version 1 is not supported; write it again: "
                "pyarrow.feather.write_feather(pyarrow.feather.read_table(path), path)"
            )
        return _of_file(source, version) if head.startswith(MAGIC) else _of_stream(source, version)


def opened(storage: Storage, path: str) -> Any:
    """Open a file, mapped into memory if it is local. Its arrays keep the mapping alive."""
    return storage.open(path) if is_remote(path) else pa.memory_map(os.fsencode(path))


def _of_file(source: Any, version: Version) -> BatchIndex:
    with pa.ipc.open_file(source) as reader:
        schema, numbers = reader.schema, range(reader.num_record_batches)
    # A single batch of a remote file is not worth a request for its row count.
    known: list[tuple[int | None, bool]] = [(None, False) for _ in numbers]
    if not is_remote(version.path):
        with pa.ipc.open_file(source, options=_least(schema)) as reader:
            known = [_described(reader.get_batch(number), True) for number in numbers]
    # An unknown number of rows counts as none.
    ends = list(accumulate(((num_rows or 0) + 1 for num_rows, _ in known), initial=0))
    bounds = [version.num_bytes * end // max(ends[-1], 1) for end in ends]
    batches = tuple(Message(*span, *item) for span, item in zip(pairwise(bounds), known, strict=True))
    return BatchIndex(schema, False, batches)


def _of_stream(source: Any, version: Version) -> BatchIndex:
    messages = list(_messages(source))
    stop = messages[-1][1].stop if messages else 0
    source.seek(stop)
    rest = bytes(source.read(9))
    if rest and rest not in _ENDS:
        raise ValueError(
            f"there are {version.num_bytes - stop} bytes after its last message, which ends at byte {stop}: damaged, "
            "or several streams in one file, which must be separate files"
        )
    source.seek(0)
    with pa.ipc.open_stream(source) as reader:
        schema = reader.schema
    source.seek(0)
    positions = [(message.start, message.stop) for kind, message in messages if kind == _BATCH]
    with pa.ipc.open_stream(source, options=_least(schema)) as reader:
        known = [_described(batch, not is_remote(version.path)) for batch in reader]
    batches = tuple(Message(*span, *item) for span, item in zip(positions, known, strict=True))
    if not rest:
        logger.warning(
            "%s has no end-of-stream marker: all %d record batches in it are read, but if its writer was interrupted, "
            "or the file was truncated, others are missing",
            version.path,
            len(batches),
        )
    return BatchIndex(schema, True, batches, tuple(message for kind, message in messages if kind != _BATCH))


def _messages(source: Any) -> Iterator[tuple[str, Message]]:
    # Yield the kinds and positions of messages.
    start = 0
    source.seek(start)
    for message in pa.ipc.MessageReader.open_stream(source):
        yield message.type, Message(start, start := source.tell())


def _least(schema: Any) -> Any:
    # Options for reading one column, which is decompressed fast; any column has the number of rows of its batch.
    numbers = [number for number, kind in enumerate(schema.types) if pa.types.is_primitive(kind)]
    return pa.ipc.IpcReadOptions(use_threads=False, included_fields=(numbers or [*range(len(schema))])[:1])


def _described(batch: Any, is_local: bool) -> tuple[int, bool]:
    # Return the number of rows of a record batch, and whether its arrays are parts of the file.
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None]
    # A decompressed buffer is not a part of another buffer.
    return batch.num_rows, is_local and bool(buffers) and all(buffer.parent is not None for buffer in buffers)
