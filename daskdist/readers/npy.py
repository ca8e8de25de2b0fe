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
        A path, glob, directory or fsspec URL, or a list of them. Files that match one pattern are sorted.
    columns
        For ``.npz`` files the arrays of an element: None for all, or a list of names for some, as a dict by name; or
        any structure of names, in which a list stands for one array of numeric arrays side by side: ``{"x": ["f0",
        "f1"], "y": "label"}``.
    check_crc
        Whether each process that reads a local ``.npz`` file verifies the checksum of each array once: see Notes.
    storage_options
        Options of the file system, such as credentials or an endpoint.

    Returns
    -------
    Dataset
        An element for each index along axis 0; a dict by field for a structured dtype. The unit of reading is a range
        of rows of about the setting ``split-bytes``.

    Raises
    ------
    FileError
        No file matches, or the first is damaged, has Python objects, or arrays without axes or of different lengths.
        While iterating: a file is damaged, or its elements differ from those of the first.
    ArgumentError
        An array does not exist.

    >>> import numpy as np
    >>> path = getfixture("tmp_path") / "x.npy"
    >>> np.save(path, np.arange(6).reshape(3, 2))
    >>> [row.tolist() for row in read_npy(path)]
    [[0, 1], [2, 3], [4, 5]]

    Notes
    -----
    Text and bytes may be of other widths in other files: ``element_spec`` has the width of the first.

    Local files are mapped into memory: only ``batch`` copies, and a file must not be truncated while it is in use. Its
    size and time are checked whenever a split is read; if it is truncated between the check and the use of the rows,
    the system kills the process, as with every memory mapping. Fields, values in another byte order, and unaligned
    arrays of archives are copied, a split at a time.

    In Fortran order the values of a row are far apart: local files are mapped all the same, remote ones are fetched
    whole. A compressed ``.npz`` (``numpy.savez_compressed``) cannot be entered in the middle: it is decoded as a whole,
    as one split, with a check of its checksum. To verify a mapped array, the first read in each process scans all of
    it: 0.25 s for a GB in memory, or the time that a disk takes. In a remote file, of which ranges are fetched, only
    arrays that are fetched whole are verified. To read files side by side, use ``Dataset.zip``.
    """
    storage = Storage(storage_options)
    return Dataset(read_node(Npy(columns, storage, check_crc), storage.expand(paths, Npy.suffixes)))
