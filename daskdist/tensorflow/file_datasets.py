"""TensorFlow's datasets of files and databases."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, cast

from daskdist.core.structure import Nested
from daskdist.errors import ArgumentError
from daskdist.formats import Format, OpensFiles, endings
from daskdist.formats.fixed_length import FixedLength
from daskdist.formats.sql.login import path_of
from daskdist.formats.sql.sql_format import Sql, nothing_of
from daskdist.formats.text import Text
from daskdist.formats.tfrecord.tfrecord_format import TFRecord
from daskdist.ops.read_files import ReadFiles, read_node
from daskdist.storage.compression import compression_of
from daskdist.storage.filesystem import Storage
from daskdist.tensorflow_dataset import TensorFlowDataset


class _RecordDataset(TensorFlowDataset):
    # The records of files of one format as bytes.

    @staticmethod
    @abstractmethod
    def _format(compression: str | None) -> Format:
        """Return the format of files with a compression."""

    def __init__(
        self,
        filenames: Any,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        """Read files.

        Parameters
        ----------
        filenames
            A path or a list of them, or a dataset of paths.
        compression_type
            None, ``""``, ``"ZLIB"`` or ``"GZIP"``.
        buffer_size, num_parallel_reads
            Accepted for compatibility: the setting ``window-bytes`` limits reading ahead, and the order is fixed.
        """
        form = self._format(compression_of(compression_type))
        super().__init__(read_node(form, expand_filenames(filenames, form), name))


class TextLineDataset(_RecordDataset):
    """The lines of text files as bytes, as in TensorFlow."""

    @staticmethod
    def _format(compression: str | None) -> Format:
        return Text(None, compression)


class TFRecordDataset(_RecordDataset):
    """The records of TFRecord files as bytes, as in TensorFlow."""

    @staticmethod
    def _format(compression: str | None) -> Format:
        return TFRecord(compression=compression)


class FixedLengthRecordDataset(TensorFlowDataset):
    """The records of files of fixed-length records as bytes, as in TensorFlow.

    Parameters
    ----------
    record_bytes
        The length of a record in bytes.
    header_bytes, footer_bytes
        The number of bytes before the first record of a file and after the last; None for 0.
    filenames, buffer_size, compression_type, num_parallel_reads
        As for `TFRecordDataset`.
    """

    def __init__(
        self,
        filenames: Any,
        record_bytes: int,
        header_bytes: int | None = None,
        footer_bytes: int | None = None,
        buffer_size: int | None = None,
        compression_type: str | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        compression = compression_of(compression_type)
        form = FixedLength(record_bytes, None, header_bytes or 0, footer_bytes or 0, compression)
        super().__init__(read_node(form, expand_filenames(filenames, form), name))


def SqlDataset(  # noqa: N802
    driver_name: str, data_source_name: str, query: str, output_types: Sequence[Any]
) -> TensorFlowDataset:
    """Read the rows of a query of a SQLite file as tuples, in the query's order; `daskdist.read_sql` has more options.

    Types are those of NumPy, ``bytes`` and ``str``. A null becomes 0, False or empty. A value that does not fit its
    type is an error, where TensorFlow returns another value.
    """
    if driver_name != "sqlite":
        raise ArgumentError(f"SqlDataset: driver_name is {driver_name!r}; give 'sqlite', or use daskdist.read_sql")
    path, login = path_of(data_source_name)
    names = Sql(query, login=login).names(path)
    if not isinstance(output_types, Sequence) or isinstance(output_types, str) or len(output_types) != len(names):
        number = len(output_types) if isinstance(output_types, (list, tuple)) else repr(output_types)
        raise ArgumentError(f"SqlDataset: the query has {len(names)} columns, and output_types has {number}")
    dtypes = dict(zip(names, output_types, strict=True))
    missing = {name: nothing_of(dtype) for name, dtype in dtypes.items()}
    form = Sql(query, columns=tuple(names), missing=missing, dtypes=dtypes, login=login)
    return TensorFlowDataset(ReadFiles((path,), form))


def expand_filenames(filenames: Any, form: Format) -> tuple[str, ...]:
    """Return the files of an argument as for TensorFlow's datasets: a path, a list of paths, or a dataset of paths."""
    if isinstance(filenames, Nested):
        filenames = [str(path) for path in cast(Iterable[Any], filenames)]
    storage = form.storage if isinstance(form, OpensFiles) else Storage()
    return storage.expand(filenames, endings(form))
