"""The positions and row counts of the record batches of an Arrow file, without reading them.

pyarrow knows neither before it reads a batch. The footer of a file has the positions; a stream has no footer and is
scanned from message to message. See https://arrow.apache.org/docs/format/Columnar.html.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any, Final

from daskdist.errors import FileError
from daskdist.storage.filesystem import DAMAGE, Storage, Version, failures, is_remote

logger: Final = logging.getLogger("daskdist")

MAGIC: Final = b"ARROW1"
FEATHER_1: Final = b"FEA1"
CONTINUES: Final = b"\xff\xff\xff\xff"

_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
# The indices of fields in Message.fbs and File.fbs.
_HEADER_TYPE, _HEADER, _BODY_LENGTH = 1, 2, 3
_LENGTH, _COMPRESSION = 0, 3
_ID, _IS_DELTA = 0, 2
_BATCHES: Final = 3
_BLOCK: Final = struct.Struct("<qi4xq")


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a file.

    Parameters
    ----------
    start, stop
        The range of its bytes.
    num_rows
        The number of rows of a record batch; None if unknown.
    is_compressed
        Whether a record batch is compressed.
    dictionary
        The id of the dictionary that it contains or extends; None for other messages.
    is_delta
        Whether it extends a dictionary.
    """

    start: int
    stop: int
    num_rows: int | None = None
    is_compressed: bool = False
    dictionary: int | None = None
    is_delta: bool = False

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

    def needed_by(self, batch: Message) -> list[Message]:
        """Return the schema and the dictionaries that are necessary to read a batch of a stream, in order."""
        messages: dict[int | None, list[Message]] = {}
        for message in self.others:
            if message.start < batch.start:
                earlier = messages.get(message.dictionary, ()) if message.is_delta else ()
                messages[message.dictionary] = [*earlier, message]
        return sorted((message for every in messages.values() for message in every), key=lambda message: message.start)


@lru_cache(maxsize=64)
def index_of(storage: Storage, version: Version) -> BatchIndex:
    """Return the schema of a file and the positions of its messages.

    Raises
    ------
    FileError
        The file is not an Arrow file, or is damaged: it ends within a message, a message has an unknown kind, or bytes
        follow the end-of-stream marker.

    Notes
    -----
    A stream may end without a marker if its writer closed the connection. A file that was truncated between two
    messages looks the same, so a warning is logged.
    """
    import pyarrow as pa

    path = version.path
    if not version.num_bytes:
        raise FileError(f"{path} is empty, while even an Arrow file without rows has a schema")
    with storage.open(path) as file, damage(path, "not an Arrow file, or a damaged one"):
        head = file.read(8)
        if head.startswith(FEATHER_1):
            raise FileError(
                f"{path}: Feather version 1 is not supported; write it again: "
                "pyarrow.feather.write_feather(pyarrow.feather.read_table(path), path)"
            )
        try:
            if head.startswith(MAGIC):
                file.seek(0)
                with pa.ipc.open_file(file) as reader:
                    schema, num_batches = reader.schema, reader.num_record_batches
                batches = _in_footer(file, version)
                if len(batches) != num_batches:
                    raise ValueError(f"there are {num_batches} record batches, but {len(batches)} in the footer")
                return BatchIndex(schema, False, batches)
            messages, is_ended = _in_stream(file, version.num_bytes)
            file.seek(0)
            with pa.ipc.open_stream(file) as reader:
                schema = reader.schema
            _check_dictionaries(messages, schema)
        except struct.error as error:
            raise ValueError(f"its messages are cut short: {error}") from None
    batches = tuple(message for kind, message in messages if kind == _BATCH)
    if not is_ended:
        logger.warning(
            "%s has no end-of-stream marker: all %d record batches in it are read, but if its writer was interrupted, "
            "or the file was truncated, others are missing",
            path,
            len(batches),
        )
    return BatchIndex(schema, True, batches, tuple(message for kind, message in messages if kind != _BATCH))


def damage(label: str, what: str = "damaged or cut short") -> AbstractContextManager[None]:
    """Turn errors of a damaged file into `FileError` like `failures`, including pyarrow's own classes of errors."""
    import pyarrow as pa

    return failures(label, what, (*DAMAGE, pa.ArrowException))


def _in_footer(file: IO[bytes], version: Version) -> tuple[Message, ...]:
    file.seek(-10, os.SEEK_END)
    (length,) = struct.unpack_from("<i", file.read(4))
    file.seek(-10 - length, os.SEEK_END)
    footer = file.read(length)
    place = _Table.root(footer).place(_BATCHES)
    if place is None:
        return ()
    vector = place + _number("<I", footer, place)
    num_batches = _number("<I", footer, vector)
    messages = []
    for number in range(num_batches):
        start, num_bytes, body_bytes = _BLOCK.unpack_from(footer, vector + 4 + number * _BLOCK.size)
        stop = start + num_bytes + body_bytes
        if min(start, num_bytes, body_bytes) < 0 or stop > version.num_bytes:
            raise ValueError(f"the footer lists record batch {number} at bytes {start} to {stop}")
        if is_remote(version.path):
            # A single batch is not worth a request for its row count.
            messages.append(Message(start, stop))
            continue
        file.seek(start)
        messages.append(_described(file.read(num_bytes), start, stop)[1])
    _check_footer(file, max((message.stop for message in messages), default=0))
    return tuple(messages)


def _check_footer(file: IO[bytes], stop: int) -> None:
    # Raise if a record batch follows the last one that the footer lists.
    file.seek(stop)
    prefix = file.read(8)
    if stop and prefix.startswith(CONTINUES) and (length := _number("<i", prefix, 4)) > 0:
        metadata = prefix + file.read(length)
        if _Table.root(metadata[8:]).byte(_HEADER_TYPE) == _BATCH:
            raise ValueError(f"there is a record batch at byte {stop} that the footer does not list")


def _check_dictionaries(messages: Sequence[tuple[int, Message]], schema: Any) -> None:
    # A record batch with a damaged kind may look like a dictionary that no column uses.
    num_ids = len({message.dictionary for kind, message in messages if kind == _DICTIONARY})
    if num_ids > (most := sum(map(_num_dictionaries, schema.types))):
        raise ValueError(f"there are dictionaries with {num_ids} ids, but {most} columns with dictionaries")


def _num_dictionaries(kind: Any) -> int:
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _num_dictionaries(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return 1 + _num_dictionaries(kind.value_type)
    if pa.types.is_run_end_encoded(kind):
        return _num_dictionaries(kind.value_type)
    return sum(_num_dictionaries(kind.field(number).type) for number in range(kind.num_fields))


def _in_stream(file: IO[bytes], num_bytes: int) -> tuple[list[tuple[int, Message]], bool]:
    # Return the messages of a stream with their kinds, and whether there is an end-of-stream marker.
    at, messages, is_ended = 0, list[tuple[int, Message]](), False
    while at < num_bytes:
        file.seek(at)
        prefix = file.read(8)
        begin = 8 if prefix.startswith(CONTINUES) else 4
        if len(prefix) < begin:
            raise ValueError(f"a message is cut short at byte {at}")
        length = _number("<i", prefix, begin - 4)
        if length == 0:
            rest = num_bytes - at - begin
            if rest:
                raise ValueError(
                    f"there are {rest} bytes after the end-of-stream marker at byte {at}: damaged, or several streams "
                    "in one file, which must be separate files"
                )
            is_ended = True
            break
        if not 0 < length <= num_bytes - at:
            raise ValueError(f"a message is expected at byte {at}, not {prefix!r}")
        file.seek(at)
        metadata = file.read(begin + length)
        body_bytes = _Table.root(metadata[begin:]).long(_BODY_LENGTH)
        stop = at + begin + length + body_bytes
        if body_bytes < 0 or stop > num_bytes:
            raise ValueError(f"the message at byte {at} states its end as byte {stop} of {num_bytes}")
        kind, message = _described(metadata, at, stop)
        if kind not in ((_BATCH, _DICTIONARY) if messages else (_SCHEMA,)):
            expected = "a record batch or a dictionary" if messages else "a schema"
            raise ValueError(f"the message at byte {at} is of kind {kind}, but {expected} is expected")
        messages.append((kind, message))
        at = stop
    if not messages:
        raise ValueError("it does not begin with a schema")
    return messages, is_ended


def _described(metadata: bytes, start: int, stop: int) -> tuple[int, Message]:
    # Return the kind of a message, and its position and for a batch its number of rows.
    begin = 8 if metadata.startswith(CONTINUES) else 4
    message = _Table.root(metadata[begin:])
    kind, place = message.byte(_HEADER_TYPE), message.place(_HEADER)
    if kind not in (_BATCH, _DICTIONARY) or place is None:
        return kind, Message(start, stop)
    batch = _Table(message.data, place + _number("<I", message.data, place))
    if kind == _DICTIONARY:
        return kind, Message(start, stop, dictionary=batch.long(_ID), is_delta=bool(batch.byte(_IS_DELTA)))
    num_rows = batch.long(_LENGTH)
    if num_rows < 0:
        raise ValueError(f"the record batch at byte {start} states {num_rows} rows")
    return kind, Message(start, stop, num_rows, batch.place(_COMPRESSION) is not None)


@dataclass(frozen=True, slots=True)
class _Table:
    # A flatbuffers table in some data, at a position.
    data: bytes
    at: int

    @staticmethod
    def root(data: bytes) -> _Table:
        return _Table(data, _number("<I", data, 0))

    def place(self, field: int) -> int | None:
        """Return the position of a field; None if it is absent."""
        index = self.at - _number("<i", self.data, self.at)
        entry = 4 + 2 * field
        if entry >= _number("<H", self.data, index):
            return None
        offset = _number("<H", self.data, index + entry)
        return self.at + offset if offset else None

    def long(self, field: int) -> int:
        place = self.place(field)
        return 0 if place is None else _number("<q", self.data, place)

    def byte(self, field: int) -> int:
        place = self.place(field)
        return 0 if place is None else _number("<B", self.data, place)


def _number(form: str, data: bytes, at: int) -> int:
    if at < 0:
        raise ValueError("its messages point to positions before them")
    return int(struct.unpack_from(form, data, at)[0])
