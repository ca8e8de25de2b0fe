"""Datasets of NumPy's files."""

from __future__ import annotations

from typing import Any

from daskdist.dataset import Dataset
from daskdist.formats.npy import Npy
from daskdist.ops.read_files import read_node
from daskdist.storage.filesystem import Paths, Storage, StorageOptions


def read_npy(
    paths: Paths, columns: Any = None, *, check_crc: bool = True, storage_options: StorageOptions = None
) -> Dataset:
    """Read the rows of arrays in ``.npy`` and ``.npz`` files, in the order of the files.

    Parameters
    ----------
    paths
        A path, glob, directory or fsspec URL, or a list of them. What one pattern matches is sorted.
    columns
        Of ``.npz`` files, which arrays, and how they make up an element: None for all and a list of names for some,
        as a dict by name; or any structure of names, in which a list stands for one array of arrays of numbers
        side by side: ``{"x": ["f0", "f1"], "y": "label"}``.
    check_crc
        Whether each process that reads from a local ``.npz`` file compares the checksum of each array once: see Notes.
    storage_options
        What the file system takes: credentials, an endpoint.

    Returns
    -------
    Dataset
        An element a row, which is what an index along axis 0 gives; of a structured dtype a dict by field. A range of
        rows of about the setting ``split-bytes`` is the unit of reading.

    Raises
    ------
    FileError
        No file matches, or the first is damaged, holds Python objects, or arrays that have no axis or differ in
        length. While iterating: a file is damaged, or has other elements than the first.
    ArgumentError
        There is no such array.

    >>> import numpy as np
    >>> path = getfixture("tmp_path") / "x.npy"
    >>> np.save(path, np.arange(6).reshape(3, 2))
    >>> [row.tolist() for row in read_npy(path)]
    [[0, 1], [2, 3], [4, 5]]

    Notes
    -----
    Local files are mapped into memory: nothing is copied but by ``batch``, and a file is not to be cut short while
    it is in use. Its size and time are compared whenever a split is read; who truncates it between then and the use of
    the rows has the process killed by the system, as with every mapping. Fields, values in another byte order, and
    arrays of archives that are not aligned are copied, a split at a time.

    In Fortran order the values of a row lie far from each other: local files are mapped all the same, remote ones
    are fetched whole. A compressed ``.npz`` (``numpy.savez_compressed``) cannot be entered in the middle and is
    decoded whole, as one split, and its checksum is compared then. Of an array that is mapped, the first read in each
    process goes over all of it for that: 0.25 s for a GB in memory, or the time that a disk takes. Of a remote file,
    of which ranges are fetched, no checksum is compared but of arrays that are fetched whole.
    Files side by side are ``Dataset.zip`` of a dataset each.
    """
    storage = Storage(storage_options)
    return Dataset(read_node(Npy(columns, storage, check_crc), storage.expand(paths, Npy.suffixes)))
