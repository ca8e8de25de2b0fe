"""`CsvDataset` and `make_csv_dataset`: rows of CSV files with TensorFlow's types and defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, Final

import numpy as np

from daskdist.core.structure import as_array
from daskdist.dataset import Dataset
from daskdist.errors import ArgumentError
from daskdist.formats import endings
from daskdist.formats.csv.csv_format import Csv
from daskdist.formats.csv.dialect import Dialect
from daskdist.ops.read_files import read_node
from daskdist.storage.compression import compression_of
from daskdist.storage.listing import as_text
from daskdist.tensorflow.file_datasets import expand_filenames
from daskdist.tensorflow_dataset import TensorFlowDataset

_TYPES: Final = {"float32", "float64", "int32", "int64"}
# The number of bytes of a file from which the number of columns is learned.
_SAMPLE_BYTES: Final = 2**12


class CsvDataset(TensorFlowDataset):
    """The rows of CSV files as tuples, as in TensorFlow: text is bytes.

    Parameters
    ----------
    filenames
        A path or a list of them, or a dataset of paths.
    record_defaults
        For each selected column the value of an empty field; or the column's type, if an empty field is an error: one
        of float32, float64, int32, int64, ``str`` and ``bytes``, or an empty array of it.
    compression_type
        None, ``""``, ``"ZLIB"`` or ``"GZIP"``.
    buffer_size
        Accepted for compatibility.
    header
        Whether to skip the first row of each file.
    field_delim
        The character between fields.
    use_quote_delim
        Whether fields may be in double quotes.
    na_value
        Another text of an empty field.
    select_cols, exclude_cols
        The numbers of the columns to read, or of those not to read.

    Raises
    ------
    FileError
        No file matches. While iterating: a field is empty and has no default, or does not have its type, or a row has
        too many or too few fields.
    ArgumentError
        A type or the number of a column is invalid.

    Notes
    -----
    TensorFlow raises an error for quotes inside an unquoted field; here they are text. Blank lines are skipped if there
    are several columns. All rows must have the same number of fields, even if few are selected.
    """

    def __init__(
        self,
        filenames: Any,
        record_defaults: Sequence[Any],
        compression_type: str | None = None,
        buffer_size: int | None = None,
        header: bool = False,
        field_delim: str = ",",
        use_quote_delim: bool = True,
        na_value: str = "",
        select_cols: Sequence[int] | None = None,
        exclude_cols: Sequence[int] | None = None,
    ) -> None:
        if select_cols is not None and exclude_cols is not None:
            raise ArgumentError("CsvDataset: select_cols and exclude_cols are both given; give one of them")
        fields = _field_list(record_defaults, "record_defaults")
        names: tuple[str, ...] = ()
        if select_cols is not None:
            numbers = _increasing(select_cols, "select_cols")
            if len(numbers) != len(fields):
                raise ArgumentError(
                    f"CsvDataset: select_cols has {len(numbers)} columns, but record_defaults {len(fields)}; give one "
                    "default for each"
                )
        else:
            left_out = _increasing(exclude_cols or (), "exclude_cols")
            num_columns = len(fields) + len(left_out)
            names = tuple(f"c{number}" for number in range(num_columns))
            numbers = [number for number in range(num_columns) if number not in left_out]
        chosen = [f"c{number}" for number in numbers]
        dialect = Dialect(
            field_delim,
            '"' if use_quote_delim else None,
            has_header=header,
            names=names,
            keeps_blank=len(names) == 1,
            **_nulls(na_value),
        )
        reader = Csv(dialect=dialect, sample_bytes=_SAMPLE_BYTES, compression=compression_of(compression_type))
        form = _of_fields(tuple(chosen), dict(zip(chosen, fields, strict=True)), reader)
        paths = expand_filenames(filenames, form)
        super().__init__(read_node(form.learned(paths), paths))


def make_csv_dataset(
    file_pattern: str | Sequence[str],
    batch_size: int,
    column_names: Sequence[str] | None = None,
    column_defaults: Sequence[Any] | None = None,
    label_name: str | None = None,
    select_columns: Sequence[int | str] | None = None,
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    header: bool = True,
    num_epochs: int | None = None,
    shuffle: bool = True,
    shuffle_buffer_size: int = 10000,
    shuffle_seed: int | None = None,
    prefetch_buffer_size: int | None = None,
    num_parallel_reads: int | None = None,
    sloppy: bool = False,
    num_rows_for_inference: int | None = 100,
    compression_type: str | None = None,
    ignore_errors: bool = False,
    encoding: str = "utf-8",
) -> Dataset:
    """Return batches of the rows of CSV files as dicts by column, as in TensorFlow; see also `read_csv`.

    Parameters
    ----------
    file_pattern
        A path or glob, or a list of them.
    batch_size
        The number of rows of a batch.
    column_names
        The names of all columns; None to take them from the header of the first file.
    column_defaults
        For each selected column the value of an empty field, or its type if that is an error: see `CsvDataset`. By
        default types are inferred, and an empty field is 0 or ``b""``.
    label_name
        The column of labels: elements become pairs of the dict of the other columns, and its values.
    select_columns
        The names or numbers of columns to read; they come in the order of the file.
    field_delim, use_quote_delim, na_value, compression_type
        As in `CsvDataset`.
    header
        Whether each file begins with a header.
    num_epochs
        The number of passes over all rows; None for an endless dataset, which has full batches only.
    shuffle, shuffle_buffer_size, shuffle_seed
        Whether to shuffle rows, differently in each epoch; the number of rows in the buffer; and the seed.
    prefetch_buffer_size
        0 for no prefetching.
    num_parallel_reads
        The number of files whose rows are interleaved.
    sloppy
        Whether rows of several files may come in any order.
    num_rows_for_inference
        The number of rows from which types are inferred; None for all. A type is the first of int32, int64, float32,
        float64 and bytes that fits all of them.
    ignore_errors
        Whether to skip rows that cannot be read.
    encoding
        Accepted for compatibility: text is bytes.

    Raises
    ------
    FileError
        No file matches, or one has no header. While iterating: as for `CsvDataset`.
    ArgumentError
        A column does not exist, or the number of defaults differs from the number of columns.

    Notes
    -----
    Files come in the order of their names, even if rows are shuffled.
    """
    if not header and column_names is None:
        raise ArgumentError("make_csv_dataset: there is neither a header nor column_names; give column_names=[...]")
    dialect = Dialect(
        field_delim,
        '"' if use_quote_delim else None,
        has_header=header,
        names=None if column_names is None else tuple(column_names),
        **_nulls(na_value),
    )
    reader = Csv(dialect=dialect, sample_bytes=_SAMPLE_BYTES, compression=compression_of(compression_type))
    paths = reader.storage.expand(file_pattern, endings(reader))
    every = reader.learned(paths)
    names = every.schema.names if every.schema is not None else ()
    chosen = _selected(select_columns, names)
    if label_name is not None and label_name not in chosen:
        raise ArgumentError(
            f"make_csv_dataset: label_name is {label_name!r}; give one of {', '.join(map(repr, chosen))}"
        )
    if column_defaults is None:
        sampled = _of_fields(tuple(chosen), dict.fromkeys(chosen, ("bytes", b"")), reader)
        looked_at = Dataset(read_node(sampled.learned(paths), paths))
        rows = list(islice(looked_at.ignore_errors() if ignore_errors else looked_at, num_rows_for_inference))
        fields = [_inferred((bytes(row[place]) for row in rows), na_value) for place in range(len(chosen))]
    else:
        fields = _field_list(column_defaults, "column_defaults")
        if len(fields) != len(chosen):
            raise ArgumentError(
                f"make_csv_dataset: column_defaults has {len(fields)} values for {len(chosen)} columns; give one for "
                f"each of {', '.join(map(repr, chosen))}"
            )
    features = {name: name for name in chosen if name != label_name}
    columns = features if label_name is None else (features, label_name)
    form = _of_fields(columns, dict(zip(chosen, fields, strict=True)), reader).learned(paths)
    ds: Dataset = TensorFlowDataset(read_node(form, paths))
    if num_parallel_reads is not None and num_parallel_reads != 1 and len(paths) > 1:
        names_of_files = TensorFlowDataset.from_tensor_slices(as_text(paths))
        cycle = None if num_parallel_reads < 1 else num_parallel_reads
        ds = names_of_files.interleave(
            lambda path: Dataset(read_node(form, (str(path),))), cycle, 1, deterministic=not sloppy
        )
    if ignore_errors:
        ds = ds.ignore_errors()
    if shuffle:
        ds = ds.shuffle(shuffle_buffer_size, shuffle_seed)
    if num_epochs != 1:
        ds = ds.repeat(num_epochs)
    ds = ds.batch(batch_size, drop_remainder=num_epochs is None)
    return (
        ds if prefetch_buffer_size == 0 else ds.prefetch(-1 if prefetch_buffer_size is None else prefetch_buffer_size)
    )


def _nulls(na_value: str) -> dict[str, Any]:
    # An empty field of text is missing even if it is quoted.
    values = tuple(dict.fromkeys(("", na_value)))
    return {"null_values": values, "text_null_values": values, "quoted_nulls": True}


# The type of a column, and the value of an empty field; None if that is an error.
_Field = tuple[str, Any]


def _of_fields(columns: Any, fields: Mapping[str, _Field], reader: Csv) -> Csv:
    dtypes = {name: kind for name, (kind, _) in fields.items()}
    missing = {name: default for name, (_, default) in fields.items() if default is not None}
    return replace(reader, columns=columns, dtypes=dtypes, missing=missing, is_strict=True)


def _field_list(defaults: Sequence[Any], label: str) -> list[_Field]:
    if not isinstance(defaults, (list, tuple)) or not defaults:
        raise ArgumentError(f"{label} is {defaults!r:.80}; give a list of a default or type for each column")
    return [_field(default, f"{label}[{number}]") for number, default in enumerate(defaults)]


def _field(default: Any, label: str) -> _Field:
    if isinstance(default, (type, np.dtype)) or (isinstance(default, str) and default in (*_TYPES, "string")):
        # Python numbers have 32 bits, as in TensorFlow's elements.
        kind = {"string": str, int: np.int32, float: np.float32}.get(default, default)
        return _type_named(np.dtype(kind), label), None
    value = np.asarray(as_array(default, narrow=True))
    kind_name = _type_named(value.dtype, label)
    if value.size > 1:
        raise ArgumentError(f"{label} is {default!r:.80}; give one default, or a type")
    if not value.size:
        return kind_name, None
    only = value.reshape(-1)[0]
    if kind_name == "bytes":
        return kind_name, only if isinstance(only, bytes) else str(only).encode()
    return kind_name, only.item()


def _type_named(dtype: np.dtype[Any], label: str) -> str:
    if dtype.kind in "SUTO":
        return "bytes"
    if dtype.name not in _TYPES:
        raise ArgumentError(f"{label} is of {dtype}; there are {', '.join(sorted(_TYPES))}, str and bytes")
    return dtype.name


def _increasing(numbers: Iterable[int], label: str) -> list[int]:
    column_numbers = list(numbers)
    if any(number < 0 for number in column_numbers) or any(b <= a for a, b in pairwise(column_numbers)):
        raise ArgumentError(f"CsvDataset: {label} is {column_numbers}; give increasing numbers of columns, from 0 on")
    return column_numbers


def _selected(select: Sequence[int | str] | None, names: Sequence[str]) -> list[str]:
    if select is None:
        return list(names)
    chosen = []
    for selected in select:
        if isinstance(selected, int) and not 0 <= selected < len(names):
            raise ArgumentError(f"select_columns: no column {selected}; there are {len(names)}, from 0 on")
        name = names[selected] if isinstance(selected, int) else selected
        if name not in names:
            raise ArgumentError(f"select_columns: no column {name!r}; there are {', '.join(map(repr, names))}")
        if name in chosen:
            raise ArgumentError(f"select_columns has {name!r} twice; give each column once")
        chosen.append(name)
    return sorted(chosen, key=list(names).index)


# Types from narrow to wide.
_ORDER: Final = ("int32", "int64", "float32", "float64")


def _inferred(texts: Iterable[bytes], na_value: str) -> _Field:
    widest = -1
    for text in texts:
        if text in (b"", na_value.encode()):
            continue
        place = next((place for place in range(max(widest, 0), len(_ORDER)) if _is_of(text, _ORDER[place])), None)
        if place is None:
            return "bytes", b""
        widest = place
    return (_ORDER[widest], 0) if widest >= 0 else ("bytes", b"")


def _is_of(text: bytes, kind: str) -> bool:
    # Python accepts these numbers, but the decoder does not.
    if b"_" in text or (kind.startswith("int") and b"+" in text):
        return False
    try:
        if kind.startswith("int"):
            limits = np.iinfo(kind)
            return bool(limits.min <= int(text) <= limits.max)
        with np.errstate(over="ignore"):
            return bool(np.dtype(kind).type(text.decode()) < np.inf)
    except ValueError:
        return False
