"""The names of ``tf.data``."""

from typing import Final

from daskdist.core.lazy_imports import lazily
from daskdist.tensorflow.missing_names import DATA

_NAMES: Final = {
    "AUTOTUNE": "daskdist.core.cardinality:AUTOTUNE",
    "AutoShardPolicy": "daskdist.sharding:AutoShardPolicy",
    "Dataset": "daskdist.tensorflow_dataset:TensorFlowDataset",
    "DatasetSpec": "daskdist.core.spec:DatasetSpec",
    "FixedLengthRecordDataset": "daskdist.tensorflow.file_datasets:FixedLengthRecordDataset",
    "INFINITE_CARDINALITY": "daskdist.core.cardinality:INFINITE",
    "Iterator": "daskdist.execute.stream.local_iterator:ElementIterator",
    "Options": "daskdist.ops.with_options:Options",
    "TFRecordDataset": "daskdist.tensorflow.file_datasets:TFRecordDataset",
    "TextLineDataset": "daskdist.tensorflow.file_datasets:TextLineDataset",
    "UNKNOWN_CARDINALITY": "daskdist.core.cardinality:UNKNOWN",
    "experimental": "daskdist.data.experimental",
    "service": "daskdist.data.service",
}

__all__ = [*_NAMES]

__getattr__, __dir__ = lazily(__name__, _NAMES, DATA)
