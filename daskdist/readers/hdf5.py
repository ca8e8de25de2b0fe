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
        A path, glob, directory or fsspec URL, or a list of them. What one pattern matches is sorted.
    arrays
        Which arrays, by their paths in the file: None for all that lie in no group, and a list of names for some, as a
        dict by name; or any structure of names, ``{"x": "train/images", "y": "train/labels"}`` or ``("x", "y")``, in
        which a list stands for one array of arrays of numbers side by side.
    storage_options
        What the file system takes: credentials, an endpoint.

    Returns
    -------
    Dataset
        An element a row: an index along axis 0 of all arrays, which have one length.

    Raises
    ------
    FileError
        No file matches, or the first is damaged, or its arrays differ in length, or hold what no element does. While
        iterating: a file is damaged, or has other elements than the first.
    ArgumentError
        There is no such array.
    ImportError
        h5py is not installed: ``pip install 'daskdist[hdf5]'``.

    Notes
    -----
    A split is of whole chunks along axis 0 of about the setting ``split-bytes``, and each chunk is decoded once. Of
    several arrays a split ends where chunks of all do; where such places lie more than 4 splits apart, a chunk that two
    splits share is kept for the second, within 4 times ``split-bytes``, and decoded again where splits are read by
    other processes. A chunk that was never written holds the fill value.

    Numbers of a local file that lie there in one piece (neither chunked nor compressed) are mapped into memory, with
    what `read_npy` says of that. Anything else the library reads for one thread at a time: threads gain nothing,
    processes do. Compound types are dicts by field,
    text of any length is NumPy's ``StringDType`` where it is marked as UTF-8, else bytes, lists of numbers are arrays
    whose length differs. Soft links within the file are followed; links to other files, and arrays whose values are in
    them, are refused. Other compressions than the library's own are had by ``import hdf5plugin``.
    The library does not expect damage: a file from where nobody is trusted is better read in a process of its own.
    """
    storage = Storage(storage_options)
    return Dataset(read_node(Hdf5(arrays, storage), storage.expand(paths, Hdf5.suffixes)))
