"""The names of ``tf.data.experimental``: older spellings of what are methods of `daskdist.Dataset`.

A function for a transformation returns a function for `Dataset.apply`:

>>> from daskdist.data import Dataset, experimental
>>> list(Dataset.range(4).apply(experimental.take_while(lambda x: x < 2)))
[np.int64(0), np.int64(1)]
"""

from typing import TYPE_CHECKING, Final

from daskdist.core.lazy_imports import lazily
from daskdist.tensorflow.missing_names import DATA_EXPERIMENTAL

if TYPE_CHECKING:
    from daskdist.tensorflow.csv_datasets import CsvDataset as CsvDataset
    from daskdist.tensorflow.csv_datasets import make_csv_dataset as make_csv_dataset
    from daskdist.tensorflow.experimental_functions import *  # noqa: F403
    from daskdist.tensorflow.file_datasets import SqlDataset as SqlDataset
    from daskdist.tensorflow.options import DistributeOptions as DistributeOptions

_NAMES: Final = {
    "AUTOTUNE": "daskdist.core.cardinality:AUTOTUNE",
    "INFINITE_CARDINALITY": "daskdist.core.cardinality:INFINITE",
    "SHARD_HINT": "daskdist.sharding:SHARD_HINT",
    "UNKNOWN_CARDINALITY": "daskdist.core.cardinality:UNKNOWN",
    "AutoShardPolicy": "daskdist.sharding:AutoShardPolicy",
    "Counter": "daskdist.tensorflow.experimental_functions:Counter",
    "CsvDataset": "daskdist.tensorflow.csv_datasets:CsvDataset",
    "DistributeOptions": "daskdist.tensorflow.options:DistributeOptions",
    "Optional": "daskdist.strategy.values.optional:Optional",
    "Options": "daskdist.ops.with_options:Options",
    "RandomDataset": "daskdist.tensorflow.experimental_functions:RandomDataset",
    "SqlDataset": "daskdist.tensorflow.file_datasets:SqlDataset",
    "assert_cardinality": "daskdist.tensorflow.experimental_functions:assert_cardinality",
    "bucket_by_sequence_length": "daskdist.tensorflow.experimental_functions:bucket_by_sequence_length",
    "cardinality": "daskdist.tensorflow.experimental_functions:cardinality",
    "choose_from_datasets": "daskdist.tensorflow.experimental_functions:choose_from_datasets",
    "dense_to_ragged_batch": "daskdist.tensorflow.experimental_functions:dense_to_ragged_batch",
    "enumerate_dataset": "daskdist.tensorflow.experimental_functions:enumerate_dataset",
    "from_list": "daskdist.tensorflow.experimental_functions:from_list",
    "get_single_element": "daskdist.tensorflow.experimental_functions:get_single_element",
    "get_structure": "daskdist.tensorflow.experimental_functions:get_structure",
    "group_by_window": "daskdist.tensorflow.experimental_functions:group_by_window",
    "ignore_errors": "daskdist.tensorflow.experimental_functions:ignore_errors",
    "load": "daskdist.tensorflow.experimental_functions:load",
    "make_csv_dataset": "daskdist.tensorflow.csv_datasets:make_csv_dataset",
    "map_and_batch": "daskdist.tensorflow.experimental_functions:map_and_batch",
    "parallel_interleave": "daskdist.tensorflow.experimental_functions:parallel_interleave",
    "rejection_resample": "daskdist.tensorflow.experimental_functions:rejection_resample",
    "sample_from_datasets": "daskdist.tensorflow.experimental_functions:sample_from_datasets",
    "save": "daskdist.tensorflow.experimental_functions:save",
    "scan": "daskdist.tensorflow.experimental_functions:scan",
    "service": "daskdist.data.experimental.service",
    "shuffle_and_repeat": "daskdist.tensorflow.experimental_functions:shuffle_and_repeat",
    "snapshot": "daskdist.tensorflow.experimental_functions:snapshot",
    "take_while": "daskdist.tensorflow.experimental_functions:take_while",
    "unbatch": "daskdist.tensorflow.experimental_functions:unbatch",
    "unique": "daskdist.tensorflow.experimental_functions:unique",
}

__all__ = [*_NAMES]

__getattr__, __dir__ = lazily(__name__, _NAMES, DATA_EXPERIMENTAL)
