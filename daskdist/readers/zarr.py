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
        A directory, an archive (``.zip``) or an fsspec URL of a group or an array, a glob of such, or a list of them,
        which are read one after the other.
    arrays
        Which arrays of the group: None for all that lie in it itself, and a list of names for some, as a dict by name;
        or any structure of names, ``{"x": "images", "y": "train/labels"}`` or ``("x", "y")``, in which a list stands
        for one array of arrays of numbers side by side. Nothing else than None for a store that is one array.
    storage_options
        What the file system takes: credentials, an endpoint.

    Returns
    -------
    Dataset
        An element a row: an index along axis 0 of all arrays, which have one length.

    Raises
    ------
    FileError
        There is no such store, or its arrays differ in length, or hold what no element does. While iterating: a chunk
        is damaged, or a store has other elements than the first.
    ArgumentError
        There is no such array.
    ImportError
        zarr-python 3 is not installed: ``pip install 'daskdist[zarr]'``.

    Notes
    -----
    A split is of whole chunks along axis 0, or shards, of about the setting ``split-bytes``, and each is decoded once.
    Of several arrays it ends where chunks of all do; where such places lie more than 4 splits apart, a chunk that two
    splits share is kept for the second, within 4 times ``split-bytes``, and decoded again where splits are read by
    other processes. A chunk that is missing holds the fill value, as Zarr has it. Text is NumPy's ``StringDType``,
    bytes of any length are objects, structured dtypes dicts by field.
    """
    storage = Storage(storage_options)
    return Dataset(read_node(Zarr(arrays, storage), stores(store, storage)))
