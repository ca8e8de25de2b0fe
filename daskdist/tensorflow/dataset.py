"""`daskdist.data.Dataset`: datasets with TensorFlow's dtypes of Python's own numbers."""

from __future__ import annotations

from typing import ClassVar

from daskdist.core.node import Node
from daskdist.dataset import Dataset


class TensorFlowDataset(Dataset):
    """A `Dataset` in which Python's own numbers are int32 and float32, as in TensorFlow: ``daskdist.data.Dataset``.

    An integer that needs more than 32 bits is int64. Methods of such a dataset return datasets of this class; a
    constructor for several datasets, such as `zip`, returns its own class.
    ``Options(python_numbers="numpy")`` makes the numbers int64 and float64.

    >>> TensorFlowDataset.from_tensors((1, 2.5)).element_spec
    (TensorSpec(shape=(), dtype=int32, name=None), TensorSpec(shape=(), dtype=float32, name=None))
    """

    _is_narrow: ClassVar[bool] = True

    @classmethod
    def _of(cls, node: Node) -> TensorFlowDataset:
        return TensorFlowDataset(node)
