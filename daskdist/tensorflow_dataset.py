"""`daskdist.data.Dataset`: datasets with TensorFlow's dtypes of Python's own numbers."""

from __future__ import annotations

from typing import Any, ClassVar

from daskdist.core.node import Node
from daskdist.dataset import Dataset
from daskdist.display.missing_methods import DatasetType


class _TensorFlowDatasetType(DatasetType):
    # `isinstance(dataset, tf.data.Dataset)` holds for each dataset, also for one of a strategy or a reader of ours.

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Dataset) if self is TensorFlowDataset else super().__instancecheck__(instance)


class TensorFlowDataset(Dataset, metaclass=_TensorFlowDatasetType):
    """A `Dataset` in which Python's own numbers are int32 and float32, as in TensorFlow: ``daskdist.data.Dataset``.

    `Strategy.experimental_make_numpy_dataset` and `read_tfrecord` return such datasets, too.

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
