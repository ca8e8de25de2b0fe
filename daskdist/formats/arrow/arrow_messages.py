"""The positions and row counts of the record batches of an Arrow file.

pyarrow reports the number of batches of a file, but not their sizes, and nothing about a stream. So the messages are
read in turn: only little of a local file, which is mapped into memory, and all of a remote stream, once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from daskdist.errors import FileError
from daskdist.storage.filesystem import DAMAGE, Storage, Version, failures, is_remote

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
        The range of its bytes; for batches of remote files, one of the size of an average batch.
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
        The file is not an Arrow file, or is damaged: it ends within a message, a message has an unknown kind, bytes
        follow the end-of-stream marker, or the footer of a local file does not list all batches.

    Notes
    -----
    A stream may end without a marker if its writer closed the connection. A file that was truncated between two
    messages looks the same, so a warning is logged.
    """
    path = version.path
    if not version.num_bytes:
        raise FileError(f"{path} is empty, while even an Arrow file without rows has a schema")
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
    import pyarrow as pa

    return storage.open(path) if is_remote(path) else pa.memory_map(os.fsencode(path))


def damage(label: str, problem: str = "damaged or cut short") -> AbstractContextManager[None]:
    """Turn errors of a damaged file into `FileError` like `failures`, including pyarrow's own classes of errors."""
    import pyarrow as pa

    return failures(label, problem, (*DAMAGE, pa.ArrowException))


def _of_file(source: Any, version: Version) -> BatchIndex:
    import pyarrow as pa

    with pa.ipc.open_file(source) as reader:
        schema, num_batches = reader.schema, reader.num_record_batches
    if is_remote(version.path):
        # A single batch is not worth a request for its position and its row count.
        size = version.num_bytes // max(num_batches, 1)
        return BatchIndex(schema, False, tuple(Message(k * size, (k + 1) * size) for k in range(num_batches)))
    positions = [message for kind, message in _messages(source, 8) if kind == _BATCH]
    if len(positions) != num_batches:
        raise ValueError(f"it has {len(positions)} record batches, but its footer lists {num_batches}")
    with pa.ipc.open_file(source, options=_least(schema)) as reader:
        return BatchIndex(schema, False, _described(positions, map(reader.get_batch, range(num_batches)), True))


def _of_stream(source: Any, version: Version) -> BatchIndex:
    import pyarrow as pa

    messages = list(_messages(source, 0))
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
    positions = [message for kind, message in messages if kind == _BATCH]
    with pa.ipc.open_stream(source, options=_least(schema)) as reader:
        batches = _described(positions, reader, not is_remote(version.path))
    if not rest:
        logger.warning(
            "%s has no end-of-stream marker: all %d record batches in it are read, but if its writer was interrupted, "
            "or the file was truncated, others are missing",
            version.path,
            len(batches),
        )
    return BatchIndex(schema, True, batches, tuple(message for kind, message in messages if kind != _BATCH))


def _messages(source: Any, start: int) -> Iterator[tuple[str, Message]]:
    # Yield the kinds and positions of messages.
    import pyarrow as pa

    source.seek(start)
    for message in pa.ipc.MessageReader.open_stream(source):
        yield message.type, Message(start, start := source.tell())


def _least(schema: Any) -> Any:
    # Options for reading one column, which is decompressed fast; any column has the number of rows of its batch.
    import pyarrow as pa

    numbers = [number for number, kind in enumerate(schema.types) if pa.types.is_primitive(kind)]
    return pa.ipc.IpcReadOptions(use_threads=False, included_fields=(numbers or [*range(len(schema))])[:1])


def _described(positions: Sequence[Message], batches: Iterable[Any], is_local: bool) -> tuple[Message, ...]:
    # Return the messages of record batches with their numbers of rows.
    messages = []
    for message, batch in zip(positions, batches, strict=True):
        buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None]
        # A decompressed buffer is not a part of another buffer.
        is_mapped = is_local and bool(buffers) and all(buffer.parent is not None for buffer in buffers)
        messages.append(replace(message, num_rows=batch.num_rows, is_mapped=is_mapped))
    return tuple(messages)
