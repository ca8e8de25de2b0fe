"""Attributes of the CF conventions in Zarr stores and HDF5 files, which are not applied: a warning says so."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

from daskdist import Dataset, read_hdf5, read_zarr

h5py = pytest.importorskip("h5py")
xarray = pytest.importorskip("xarray")
zarr = pytest.importorskip("zarr")


def write_hdf5(path, values, attributes):
    with h5py.File(path / "a.h5", "w") as file:
        file["x"] = values
        file["other"] = np.arange(len(values))
        for name, value in attributes.items():
            # As the NetCDF library keeps them.
            file["x"].attrs[name] = value if isinstance(value, str) else np.array([value])
    return lambda arrays=None: read_hdf5(path / "a.h5", arrays)


def write_zarr(path, values, attributes):
    group = zarr.open_group(path / "a.zarr", mode="w")
    array = group.create_array("x", data=values)
    array.update_attributes({name: getattr(value, "item", lambda v=value: v)() for name, value in attributes.items()})
    group.create_array("other", data=np.arange(len(values)))
    return lambda arrays=None: read_zarr(path / "a.zarr", arrays)


PACKED = [
    (np.int16([1, 2]), {"scale_factor": 0.5}, "scale_factor=0.5"),
    (np.int16([1, 2]), {"add_offset": -3.0, "scale_factor": 1.0}, "add_offset=-3.0"),
    (np.uint8([1, 2]), {"_FillValue": np.uint8(255)}, "_FillValue=255"),
    (np.float32([1, 2]), {"missing_value": np.float32(-9999)}, r"missing_value=-9999\.0"),
    (np.int8([1, -2]), {"_Unsigned": "true"}, "_Unsigned='true'"),
    (np.int64([1, 2]), {"units": "hours since 2000-01-01", "calendar": "noleap"}, "units='hours since 2000-01-01'"),
    (np.int8([1, 0]), {"dtype": "bool"}, "dtype='bool'"),
]


@pytest.mark.parametrize("write", [write_hdf5, write_zarr])
@pytest.mark.parametrize(("values", "attributes", "named"), PACKED)
def test_a_warning_names_the_attributes(tmp_path, caplog, write, values, attributes, named):
    read = write(tmp_path, values, attributes)
    ds = read()
    np.testing.assert_array_equal([row["x"] for row in ds], values)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"a.{'h5' if write is write_hdf5 else 'zarr'}: attributes of the CF conventions" in record.message
    assert re.search(f"stored values: 'x' {named}; Dataset.from_dask", record.message)
    # Arrays that are not read do not matter.
    caplog.clear()
    list(read(["other"]))
    assert not caplog.records


@pytest.mark.parametrize("write", [write_hdf5, write_zarr])
@pytest.mark.parametrize(
    ("values", "attributes"),
    [
        (np.float32([1, 2]), {"_FillValue": np.float32("nan"), "units": "m s-1", "long_name": "speed since start"}),
        (np.float64([1, 2]), {"scale_factor": 1.0, "add_offset": 0.0}),
        (np.int16([1, 2]), {"dtype": "int16", "units": "days"}),
        (np.float32([1, 2]), {"_Unsigned": "true"}),
        (np.int16([1, 2]), {}),
    ],
)
def test_attributes_that_change_no_value_are_not_named(tmp_path, caplog, write, values, attributes):
    np.testing.assert_array_equal([row["x"] for row in write(tmp_path, values, attributes)()], values)
    assert not caplog.records


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_stores_of_xarray(tmp_path, caplog, zarr_format):
    values = np.array([1.5, np.nan, 3.0])
    packing = {"scale_factor": 0.5, "add_offset": 10.0, "_FillValue": -99, "dtype": "i2"}
    flags = {"_FillValue": 9999.0, "dtype": "f4"}
    data = {"t": ("k", values, {}, packing), "f": ("k", values, {}, flags), "g": ("k", values), "n": ("k", [1, 2, 3])}
    path = str(tmp_path / "a.zarr")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        xarray.Dataset(data).to_zarr(path, zarr_format=zarr_format, consolidated=False)
        ds = read_zarr(path)
        decoded = Dataset.from_dask(xarray.open_zarr(path, chunks={}, consolidated=False))
    assert [int(row["t"]) for row in ds] == [-17, -99, -14]
    (record,) = caplog.records
    for named in ("'t' _FillValue=-99, scale_factor=0.5, add_offset=10.0", "'f' _FillValue="):
        assert named in record.message
    assert "'g'" not in record.message
    assert "'n'" not in record.message
    # The advice helps.
    np.testing.assert_array_equal([row["t"] for row in decoded], values)
    np.testing.assert_array_equal([row["f"] for row in decoded], np.float32(values))
