"""Where the record batches of an Arrow file lie, and how many rows they have, without reading them.

pyarrow tells neither before it reads a batch. The places are in the footer of a file; of a stream, which has none,
they are found by going from message to message. See https://arrow.apache.org/docs/format/Columnar.html.
"""

from __future__ import annotations

import os
import struct
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any, Final

from daskdist.errors import FileError
from daskdist.files.storage import DAMAGE, Storage, Version, failures, is_remote

MAGIC: Final = b"ARROW1"
FEATHER_1: Final = b"FEA1"
CONTINUES: Final = b"\xff\xff\xff\xff"

_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
# Of the fields of flatbuffers: their places in Message.fbs and File.fbs.
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
        Where its bytes are.
    num_rows
        Of a record batch; None where that is not known.
    is_compressed
        Whether a record batch is.
    dictionary
        Which dictionary it has, or adds to; None where it has none.
    is_delta
        Whether it adds to a dictionary.
    """

    start: int
    stop: int
    num_rows: int | None = None
    is_compressed: bool = False
    dictionary: int | None = None
    is_delta: bool = False

    @property
    def num_bytes(self) -> int:
        """Of it and its body."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Index:
    """What is in a file.

    Parameters
    ----------
    schema
        Its Arrow schema.
    is_stream
        Whether it is a stream.
    batches
        The record batches, in order.
    others
        Of a stream its schema and its dictionaries, in order.
    """

    schema: Any
    is_stream: bool
    batches: tuple[Message, ...]
    others: tuple[Message, ...] = ()

    def needed_by(self, batch: Message) -> list[Message]:
        """What of the others a batch of a stream cannot be read without, in order."""
        found: dict[int | None, list[Message]] = {}
        for each in self.others:
            if each.start < batch.start:
                found[each.dictionary] = [*found.get(each.dictionary, ()), each] if each.is_delta else [each]
        return sorted((each for every in found.values() for each in every), key=lambda each: each.start)


@lru_cache(maxsize=64)
def index_of(storage: Storage, version: Version) -> Index:
    """What is in a file.

    Raises
    ------
    FileError
        It is no Arrow file, or is damaged.
    """
    import pyarrow as pa

    path = version.path
    if not version.num_bytes:
        raise FileError(f"{path} has no bytes, where even an Arrow file without rows has a schema")
    with storage.open(path) as file, damage(path, "not an Arrow file, or one that is damaged"):
        head = file.read(8)
        if head.startswith(FEATHER_1):
            raise FileError(
                f"{path}: Feather of version 1, which is not read here; write it anew: "
                "pyarrow.feather.write_feather(pyarrow.feather.read_table(path), path)"
            )
        try:
            if head.startswith(MAGIC):
                file.seek(0)
                with pa.ipc.open_file(file) as reader:
                    schema, num_batches = reader.schema, reader.num_record_batches
                batches = _in_footer(file, version)
                if len(batches) != num_batches:
                    raise ValueError(f"there are {num_batches} record batches, and {len(batches)} in the footer")
                return Index(schema, False, batches)
            found = _in_stream(file, version.num_bytes)
            file.seek(0)
            with pa.ipc.open_stream(file) as reader:
                schema = reader.schema
        except struct.error as error:
            raise ValueError(f"its messages are cut short: {error}") from None
    batches = tuple(message for kind, message in found if kind == _BATCH)
    return Index(schema, True, batches, tuple(message for kind, message in found if kind != _BATCH))


def damage(label: str, what: str = "damaged or cut short") -> AbstractContextManager[None]:
    """As `failures`, also for those errors of pyarrow that are of no kind of Python's."""
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
    made = []
    for number in range(num_batches):
        start, num_bytes, body_bytes = _BLOCK.unpack_from(footer, vector + 4 + number * _BLOCK.size)
        stop = start + num_bytes + body_bytes
        if min(start, num_bytes, body_bytes) < 0 or stop > version.num_bytes:
            raise ValueError(f"record batch {number} is said to be at bytes {start} to {stop}")
        if is_remote(version.path):
            # Not worth a question each.
            made.append(Message(start, stop))
            continue
        file.seek(start)
        made.append(_described(file.read(num_bytes), start, stop)[1])
    return tuple(made)


def _in_stream(file: IO[bytes], num_bytes: int) -> list[tuple[int, Message]]:
    at, found = 0, list[tuple[int, Message]]()
    while at < num_bytes:
        file.seek(at)
        prefix = file.read(8)
        begin = 8 if prefix.startswith(CONTINUES) else 4
        if len(prefix) < begin:
            raise ValueError(f"a message is cut short at byte {at}")
        length = _number("<i", prefix, begin - 4)
        if length == 0:
            break
        if not 0 < length <= num_bytes - at:
            raise ValueError(f"a message is expected at byte {at}, and there is {prefix!r}")
        file.seek(at)
        metadata = file.read(begin + length)
        body_bytes = _Table.root(metadata[begin:]).long(_BODY_LENGTH)
        stop = at + begin + length + body_bytes
        if body_bytes < 0 or stop > num_bytes:
            raise ValueError(f"the message at byte {at} is said to end at byte {stop} of {num_bytes}")
        found.append(_described(metadata, at, stop))
        at = stop
    if not found or found[0][0] != _SCHEMA:
        raise ValueError("it does not begin with a schema")
    return found


def _described(metadata: bytes, start: int, stop: int) -> tuple[int, Message]:
    # The kind of a message, and what is to be known of it.
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
        raise ValueError(f"the record batch at byte {start} is said to have {num_rows} rows")
    return kind, Message(start, stop, num_rows, batch.place(_COMPRESSION) is not None)


@dataclass(frozen=True, slots=True)
class _Table:
    # A table of flatbuffers: at each place in the data, how far back its index is.
    data: bytes
    at: int

    @staticmethod
    def root(data: bytes) -> _Table:
        return _Table(data, _number("<I", data, 0))

    def place(self, field: int) -> int | None:
        """Where a field is; None where it is left out."""
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
        raise ValueError("its messages point to what is before them")
    return int(struct.unpack_from(form, data, at)[0])
