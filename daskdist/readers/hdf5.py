"""Datasets of HDF5 files."""

from __future__ import annotations

from typing import Any

from daskdist.dataset import Dataset
from daskdist.formats.hdf5 import Hdf5
from daskdist.ops.read_files import read_node
from daskdist.storage.filesystem import Paths, Storage, StorageOptions


def read_hdf5(paths: Paths, arrays: Any = None, *, storage_options: StorageOptions = None) -> Dataset:
    """Read the rows of the arrays (HDF5's datasets) in HDF5 files, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them. Files that match one pattern are sorted.
    arrays
        The arrays of an element, by their paths in the file: None for all that are in no group, or a list of names for
        some, as a dict by name; or any structure of names, ``{"x": "train/images", "y": "train/labels"}`` or
        ``("x", "y")``, in which a list stands for one array of numeric arrays side by side.
    storage_options
        Options of the file system, such as credentials or an endpoint.

    Returns
    -------
    Dataset
        An element for each index along axis 0 of the arrays, which have equal lengths.

    Raises
    ------
    FileError
        No file matches, or the first is damaged, or its arrays differ in length or have types that no element can hold.
        While iterating: a file is damaged, or its elements differ from those of the first.
    ArgumentError
        An array does not exist.
    MissingPackageError
        h5py is not installed: ``pip install 'daskdist[hdf5]'``.

    Notes
    -----
    A split has whole chunks along axis 0 of about the setting ``split-bytes``, and each chunk is decoded once. With
    several arrays a split ends where chunks of all end; if such places are more than 4 splits apart, a chunk that two
    splits share is kept for the second, up to 4 times ``split-bytes``, and decoded again if other processes read the
    splits. A chunk that was never written holds the fill value.

    Attributes of the CF conventions, which NetCDF 4 files have (``scale_factor``, ``add_offset``, ``_FillValue``,
    ``missing_value``, ``_Unsigned``, ``units`` such as "days since 2000-01-01") are not applied: elements have the
    stored values, and a warning is logged. ``Dataset.from_dask(xarray.open_dataset(path, chunks={}))`` applies them.

    Contiguous numbers in a local file (neither chunked nor compressed) are mapped into memory, with the limits that
    `read_npy` describes. The library reads everything else in one thread at a time: threads gain nothing, processes do.
    Compound types are dicts by field, variable-length text is NumPy's ``StringDType`` if it is marked as UTF-8, else
    bytes, and lists of numbers are arrays of varying length. Soft links within the file are followed; links to other
    files, and arrays whose values are in them, are refused. ``import hdf5plugin`` adds compressions. The library is not
    robust against malicious files: read untrusted ones in a separate process. Fixed-width bytes may be of other widths
    in other files: ``element_spec`` has the width of the first.
    """
    storage = Storage(storage_options)
    return Dataset(read_node(Hdf5(arrays, storage), storage.expand(paths, Hdf5.suffixes)))
