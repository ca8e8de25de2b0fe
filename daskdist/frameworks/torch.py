"""PyTorch: tensors of arrays, and datasets as what a training loop or a ``DataLoader`` iterates over."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from daskdist.errors import ArgumentError
from daskdist.frameworks.leaves import OF_ML_DTYPES, as_numbers, check_spec, checked_source, converted, length_of, needs


def to_torch(x: Any) -> Any:
    """A nest of arrays as one of PyTorch tensors, which share their memory.

    Parameters
    ----------
    x
        A nest (tuples, named tuples, lists, dicts) of arrays of NumPy, CuPy or anything else that has DLPack, numbers,
        `PerReplica` and asynchronous values. Asynchronous values are waited for; None stays.

    Returns
    -------
    nest
        The same structure, with a tensor for each leaf, and a `PerReplica` of tensors for a `PerReplica`. Python's
        numbers become what they are in an element of a dataset: float32, and int32 where that holds them.

    Raises
    ------
    ArgumentError
        A leaf is no array of numbers (text, Python objects, dates, rows of different lengths, datasets), or PyTorch
        is not installed: ``pip install 'daskdist[torch]'``.

    Notes
    -----
    Arrays go over by DLPack, read-only ones too, and are not copied. PyTorch knows no read-only tensors, and what
    datasets hand out are views of what was read: write into ``tensor.clone()``, not into such a tensor. Copied are
    arrays that run backwards along an axis, whose bytes are in the other order, or whose steps are no whole numbers of
    items, as in a field of a structured array: there are no such tensors.
    """
    torch = _torch("to_torch")

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf
        if not isinstance(leaf, (np.ndarray, np.generic)) and hasattr(leaf, "__dlpack__"):
            return torch.from_dlpack(leaf)
        array = as_numbers(leaf)
        itemsize = array.itemsize
        # Strides below 0 end the whole process in PyTorch.
        if any(stride < 0 or stride % itemsize for stride in array.strides):
            array = array.copy()
        # What NumPy has not of its own; the name is slow to ask for.
        if array.dtype.isbuiltin != 1 and array.dtype.name in OF_ML_DTYPES:
            return torch.from_dlpack(array.view(f"u{itemsize}")).view(getattr(torch, array.dtype.name))
        return torch.from_dlpack(array)

    return converted("to_torch", x, convert)


def torch_loader(dataset: Any) -> Any:
    """A dataset as PyTorch tensors: iterate over it as over a ``torch.utils.data.DataLoader``.

    Parameters
    ----------
    dataset
        A `Dataset`, or a `DistributedDataset`, of which each step gives a `PerReplica` of tensors a leaf.

    Returns
    -------
    torch.utils.data.IterableDataset
        Each pass over it is one over the dataset, shuffled anew where that is, and gives its elements as `to_torch`
        makes them; ``len`` is their number, and a `TypeError` where it is not known.

    Raises
    ------
    ArgumentError
        The elements are no arrays of numbers, or PyTorch is not installed: ``pip install 'daskdist[torch]'``.

    Notes
    -----
    Where a ``DataLoader`` is asked for: ``DataLoader(loader, batch_size=None)``. Its own worker processes
    (``num_workers``) are refused: each would read everything. What reads ahead here are threads, or a cluster.
    """
    _torch("torch_loader")
    check_spec("torch_loader", checked_source("torch_loader", dataset).element_spec)
    return _loader()(dataset)


def _torch(operation: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise needs(operation, "PyTorch", "torch", error) from None
    return torch


@functools.cache
def _loader() -> Any:
    from torch.utils.data import IterableDataset, get_worker_info

    class TorchLoader(IterableDataset):  # type: ignore[misc]
        """The elements of a dataset as tensors."""

        def __init__(self, dataset: Any) -> None:
            self._dataset = dataset

        def __iter__(self) -> Iterator[Any]:
            if get_worker_info() is not None:
                raise ArgumentError(
                    "torch_loader: in a worker process of a DataLoader, each of which would read everything; give "
                    "num_workers=0: daskdist reads ahead by itself"
                )
            return map(to_torch, self._dataset)

        def __len__(self) -> int:
            return length_of(self._dataset)

        def __bool__(self) -> bool:
            return True

        def __reduce__(self) -> tuple[Any, ...]:
            return torch_loader, (self._dataset,)

        def __repr__(self) -> str:
            return f"torch_loader({self._dataset!r})"

    return TorchLoader
