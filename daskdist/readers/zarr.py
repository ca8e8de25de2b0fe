"""Datasets of Zarr stores."""

from __future__ import annotations

from typing import Any

from daskdist.dataset import Dataset
from daskdist.formats.zarr import Zarr, stores
from daskdist.ops.read_files import read_node
from daskdist.storage.filesystem import Paths, Storage, StorageOptions


def read_zarr(store: Paths, arrays: Any = None, *, storage_options: StorageOptions = None) -> Dataset:
    """Read the rows of the arrays in Zarr stores, v2 or v3.

    Parameters
    ----------
    store
        A directory, an archive (``.zip``) or an fsspec URL of a group or an array, a glob of these, or a list of them,
        to be read in order.
    arrays
        The arrays of an element: None for all directly in the group, or a list of names for some, as a dict by name; or
        any structure of names, ``{"x": "images", "y": "train/labels"}`` or ``("x", "y")``, in which a list stands for
        one array of numeric arrays side by side. Must be None for a store that is a single array.
    storage_options
        Options of the file system, such as credentials or an endpoint.

    Returns
    -------
    Dataset
        An element for each index along axis 0 of the arrays, which have equal lengths.

    Raises
    ------
    FileError
        The store does not exist, or its arrays differ in length or have types that no element can hold. While
        iterating: a chunk is damaged, or the elements of a store differ from those of the first.
    ArgumentError
        An array does not exist.
    MissingPackageError
        zarr-python 3 is not installed: ``pip install 'daskdist[zarr]'``.

    Notes
    -----
    A split has whole chunks or shards along axis 0 of about the setting ``split-bytes``, and each is decoded once. With
    several arrays a split ends where chunks of all end; if such places are more than 4 splits apart, a chunk that two
    splits share is kept for the second, up to 4 times ``split-bytes``, and decoded again if other processes read the
    splits. A missing chunk has the fill value, as in Zarr. Text is NumPy's ``StringDType``, variable-length bytes are
    objects, and structured dtypes are dicts by field. Fixed-width text and bytes may be of other widths in other
    stores: ``element_spec`` has the width of the first.

    Attributes of the CF conventions (``scale_factor``, ``add_offset``, ``_FillValue``, ``missing_value``,
    ``_Unsigned``, ``units`` such as "days since 2000-01-01") are not applied: elements have the stored values, and a
    warning is logged. ``Dataset.from_dask(xarray.open_zarr(store))`` applies them.
    """
    storage = Storage(storage_options)
    return Dataset(read_node(Zarr(arrays, storage), stores(store, storage)))
