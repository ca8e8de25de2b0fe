"""Extension types of Arrow: bools, tensors, those read as they are stored, and those that are refused."""

from __future__ import annotations

import uuid

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from daskdist import Dataset, Ragged, TensorSpec, errors, read_arrow, read_parquet

TEXT = np.dtypes.StringDType()
IMAGES = np.arange(12, dtype=np.float32).reshape(2, 3, 2)


def write_parquet(tmp_path, table):
    pq.write_table(table, tmp_path / "a.parquet")
    return read_parquet(tmp_path / "a.parquet")


def write_arrow(tmp_path, table):
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    return read_arrow(tmp_path / "a.arrow")


def write_stream(tmp_path, table):
    with pa.ipc.new_stream(str(tmp_path / "a.arrows"), table.schema) as writer:
        writer.write_table(table)
    return read_arrow(tmp_path / "a.arrows")


FILES = [write_parquet, write_arrow, write_stream]


def extension(kind, storage):
    return pa.ExtensionArray.from_storage(kind, storage)


def tensors(values=IMAGES):
    return pa.FixedShapeTensorArray.from_numpy_ndarray(values)


def bools(*values):
    return extension(pa.bool8(), pa.array(values, pa.int8()))


@pytest.mark.parametrize("write", FILES)
def test_values_have_their_meaning(tmp_path, write):
    keys = [uuid.UUID(int=k) for k in (1, 2**100)]
    table = pa.table(
        {
            "x": tensors(),
            "b": bools(0, -3),
            "id": extension(pa.uuid(), pa.array([key.bytes for key in keys], pa.binary(16))),
            "j": extension(pa.json_(), pa.array(['{"a": 1}', "[]"])),
            "o": extension(pa.opaque(pa.binary(), "geometry", "postgres"), pa.array([b"a", b""])),
        }
    )
    ds = write(tmp_path, table)
    assert ds.element_spec == {
        "x": TensorSpec((3, 2), "float32"),
        "b": TensorSpec((), "bool"),
        "id": TensorSpec((), object),
        "j": TensorSpec((), TEXT),
        "o": TensorSpec((), object),
    }
    (batch,) = ds.batch(5)
    np.testing.assert_array_equal(batch["x"], IMAGES, strict=True)
    assert batch["b"].tolist() == [False, True]
    assert [uuid.UUID(bytes=key) for key in batch["id"]] == keys
    assert batch["j"].tolist() == ['{"a": 1}', "[]"]
    assert batch["o"].tolist() == [b"a", b""]


@pytest.mark.parametrize("write", FILES)
def test_within_structs_and_lists(tmp_path, write):
    structs = pa.StructArray.from_arrays([tensors(), bools(1, 0)], ["x", "b"])
    lists = pa.ListArray.from_arrays(pa.array([0, 0, 2], pa.int32()), tensors())
    fixed = pa.FixedSizeListArray.from_arrays(bools(0, 1, 1, 0), 2)
    ds = write(tmp_path, pa.table({"s": structs, "l": lists, "f": fixed}))
    assert ds.element_spec == {
        "s": {"x": TensorSpec((3, 2), "float32"), "b": TensorSpec((), "bool")},
        "l": TensorSpec((None, 3, 2), "float32"),
        "f": TensorSpec((2,), "bool"),
    }
    first, second = ds
    np.testing.assert_array_equal(first["s"]["x"], IMAGES[0], strict=True)
    assert (first["s"]["b"], second["s"]["b"]) == (True, False)
    np.testing.assert_array_equal(first["l"], IMAGES[:0], strict=True)
    np.testing.assert_array_equal(second["l"], IMAGES, strict=True)
    np.testing.assert_array_equal([first["f"], second["f"]], [[False, True], [True, False]])


@pytest.mark.parametrize("permutation", [None, [0, 1, 2], [2, 1, 0], [0, 2, 1]])
@pytest.mark.parametrize("write", FILES)
def test_axes_of_tensors_are_permuted(tmp_path, write, permutation):
    kind = pa.fixed_shape_tensor(pa.int16(), [2, 3, 4], permutation=permutation)
    array = extension(kind, pa.FixedSizeListArray.from_arrays(pa.array(np.arange(72, dtype=np.int16)), 24))
    ds = write(tmp_path, pa.table({"x": array}))
    expected = array.to_numpy_ndarray()
    assert ds.element_spec["x"] == TensorSpec(expected.shape[1:], "int16")
    (batch,) = ds.batch(9)
    np.testing.assert_array_equal(batch["x"], expected, strict=True)
    assert [row["x"].tolist() for row in ds.skip(1)] == expected[1:].tolist()


@pytest.mark.parametrize("permutation", [[2, 0, 1], [1, 2, 0]])
def test_permutations_that_libraries_take_for_their_inverses_are_refused(tmp_path, permutation):
    kind = pa.fixed_shape_tensor(pa.int16(), [2, 3, 4], permutation=permutation)
    array = extension(kind, pa.FixedSizeListArray.from_arrays(pa.array(np.arange(24, dtype=np.int16)), 24))
    with pytest.raises(errors.FileError, match=r"column 'x' holds tensors whose axes are permuted as .*leave it out"):
        write_arrow(tmp_path, pa.table({"x": array}))


def test_tensors_in_several_record_batches_and_row_groups(tmp_path):
    numbers = np.arange(60, dtype=np.int32).reshape(10, 2, 3)
    table = pa.table({"x": tensors(numbers)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    for ds in (read_parquet(tmp_path / "a.parquet", "x"), read_arrow(tmp_path / "a.arrow", "x")):
        np.testing.assert_array_equal(list(ds), numbers)


def test_dataframes():
    frame = pd.DataFrame(
        {"x": pd.arrays.ArrowExtensionArray(tensors()), "b": pd.arrays.ArrowExtensionArray(bools(0, 1))}
    )
    ds = Dataset.from_dask(dd.from_pandas(frame, npartitions=2))
    assert ds.element_spec == {"x": TensorSpec((3, 2), "float32"), "b": TensorSpec((), "bool")}
    np.testing.assert_array_equal([row["x"] for row in ds], IMAGES)
    slices = Dataset.from_tensor_slices({"x": frame["x"], "y": tensors(), "b": bools(0, 1)})
    for row, image, flag in zip(slices, IMAGES, [False, True], strict=True):
        np.testing.assert_array_equal(row["x"], image, strict=True)
        np.testing.assert_array_equal(row["y"], image, strict=True)
        assert row["b"] == flag


class Degrees(pa.ExtensionType):
    """Degrees, which are stored as hundredths."""

    def __init__(self):
        super().__init__(pa.int32(), "test.degrees")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type, serialized):
        return cls()


def named(name, array):
    """Return a table as of a type that this process does not know."""
    field = pa.field("c", array.type, metadata={"ARROW:extension:name": name, "ARROW:extension:metadata": "{}"})
    return pa.table({"c": array}, schema=pa.schema([field]))


PLAIN = pa.array([[1, 2, 3, 4, 5, 6]], pa.list_(pa.int64()))
SHAPED = pa.array(
    [{"data": [1, 2], "shape": [1, 2]}], pa.struct({"data": PLAIN.type, "shape": pa.list_(pa.int32(), 2)})
)


@pytest.mark.parametrize("write", FILES)
@pytest.mark.parametrize(
    ("name", "array", "advice"),
    [
        ("arrow.variable_shape_tensor", SHAPED, "with their shapes in another column, or leave it out"),
        ("ray.data.arrow_tensor_v2", PLAIN, "or leave it out"),
        ("test.unknown", pa.array([1]), "or leave it out"),
        ("test.unknown", pa.array([1.5], pa.float32()), "or leave it out"),
    ],
)
def test_unknown_types_are_refused(tmp_path, write, name, array, advice):
    with pytest.raises(errors.FileError, match=f"column 'c' is of the extension type '{name}', which .*{advice}"):
        write(tmp_path, named(name, array))


@pytest.mark.parametrize("write", FILES)
def test_unknown_types_within_others_are_refused(tmp_path, write):
    field = pa.field("x", pa.int64(), metadata={"ARROW:extension:name": "test.unknown"})
    for array, where in (
        (pa.array([{"x": 1}], pa.struct([field])), "column 'c', 'x'"),
        (pa.array([[1]], pa.list_(field)), "column 'c'"),
    ):
        with pytest.raises(errors.FileError, match=f"{where} is of the extension type 'test.unknown'"):
            write(tmp_path, pa.table({"c": array}))


def test_a_type_of_the_program_is_refused():
    array = extension(Degrees(), pa.array([100, 200], pa.int32()))
    frame = pd.DataFrame({"c": pd.arrays.ArrowExtensionArray(array)})
    message = (
        "column 'c' is of the extension type 'test.degrees', which is not known, stored as int32: .*or leave it out"
    )
    with pytest.raises(errors.ArgumentError, match=message):
        Dataset.from_dask(dd.from_pandas(frame, npartitions=1)).element_spec  # noqa: B018
    with pytest.raises(errors.ArgumentError, match=r"extension type 'test\.degrees'"):
        Dataset.from_tensor_slices(array)


@pytest.mark.parametrize("write", FILES)
@pytest.mark.parametrize(
    ("name", "array", "expected"),
    [
        ("geoarrow.wkb", pa.array([b"\x01"]), b"\x01"),
        ("test.text", pa.array(["a"], pa.large_string()), "a"),
        ("geoarrow.point", pa.array([{"x": 1.0, "y": 2.0}]), {"x": 1.0, "y": 2.0}),
        ("datasets.features.features.Array2DExtensionType", pa.array([[[1, 2], [3]]]), [[1, 2], [3]]),
    ],
)
def test_stored_values_that_say_all_are_read(tmp_path, write, name, array, expected):
    (row,) = write(tmp_path, named(name, array))
    value = row["c"].tolist() if isinstance(row["c"], (Ragged, np.ndarray)) else row["c"]
    assert value == expected


@pytest.mark.parametrize("write", FILES)
def test_other_columns_beside_an_unknown_type_are_read(tmp_path, write):
    table = named("test.unknown", pa.array([1, 2])).append_column("n", pa.array([3, 4]))
    with pytest.raises(errors.FileError, match=r"test\.unknown"):
        write(tmp_path, table)
    for reader, name in ((read_parquet, "a.parquet"), (read_arrow, "a.arrow"), (read_arrow, "a.arrows")):
        if (tmp_path / name).exists():
            assert [int(n) for n in reader(tmp_path / name, "n")] == [3, 4]


def test_text_of_an_extension_type_is_checked(tmp_path):
    array = extension(pa.json_(), pa.array(["{}", "abcdefgh"]))
    write_parquet(tmp_path, pa.table({"j": array}))
    path = tmp_path / "a.parquet"
    path.write_bytes(path.read_bytes().replace(b"abcdefgh", b"abc\xffefgh"))
    with pytest.raises(errors.FileError, match=r"column 'j': its row 1, .*is not UTF-8"):
        list(read_parquet(path))
