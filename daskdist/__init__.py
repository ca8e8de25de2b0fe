"""Distributed datasets and synchronous replicas on Dask.

>>> import daskdist
>>> strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
>>> for batch in strategy.distribute_dataset(daskdist.Dataset.range(6).batch(4)):
...     total = strategy.reduce("SUM", strategy.run(lambda x: x.sum(), args=(batch,)), axis=None)
...     print(batch, total)
PerReplica:{
  0: array([0, 1]),
  1: array([2, 3])
} 6
PerReplica:{
  0: array([4]),
  1: array([5])
} 9
"""

from typing import TYPE_CHECKING, Final

from daskdist.core.lazy_imports import lazily
from daskdist.display.missing_methods import AS_FUNCTIONS, OF_CONSTRUCTORS
from daskdist.tensorflow.missing_names import TOP

if TYPE_CHECKING:
    from daskdist import config as config
    from daskdist import data as data
    from daskdist import distribute as distribute
    from daskdist import errors as errors
    from daskdist import experimental as experimental
    from daskdist import tpu as tpu
    from daskdist.checkpoint.checkpoint import Checkpoint as Checkpoint
    from daskdist.checkpoint.checkpoint_manager import CheckpointManager as CheckpointManager
    from daskdist.core.ragged import Ragged as Ragged
    from daskdist.core.spec import DatasetSpec as DatasetSpec
    from daskdist.core.spec import PerReplicaSpec as PerReplicaSpec
    from daskdist.core.spec import RaggedRowSpec as RaggedRowSpec
    from daskdist.core.spec import RaggedTensorSpec as RaggedTensorSpec
    from daskdist.core.spec import TensorSpec as TensorSpec
    from daskdist.dataset import Dataset as Dataset
    from daskdist.display.progress_bar import progress as progress
    from daskdist.formats.tfrecord.example import FixedLenFeature as FixedLenFeature
    from daskdist.formats.tfrecord.example import FixedLenSequenceFeature as FixedLenSequenceFeature
    from daskdist.formats.tfrecord.example import VarLenFeature as VarLenFeature
    from daskdist.frameworks.jax import to_jax as to_jax
    from daskdist.frameworks.keras import keras_data as keras_data
    from daskdist.frameworks.torch import to_torch as to_torch
    from daskdist.frameworks.torch import torch_loader as torch_loader
    from daskdist.frameworks.torch import torch_process_group as torch_process_group
    from daskdist.ops.with_options import Options as Options
    from daskdist.readers.arrow import read_arrow as read_arrow
    from daskdist.readers.csv import read_csv as read_csv
    from daskdist.readers.files import read_files as read_files
    from daskdist.readers.fixed_length import read_fixed_length as read_fixed_length
    from daskdist.readers.hdf5 import read_hdf5 as read_hdf5
    from daskdist.readers.images import class_names_of as class_names_of
    from daskdist.readers.images import read_images as read_images
    from daskdist.readers.json import read_json as read_json
    from daskdist.readers.npy import read_npy as read_npy
    from daskdist.readers.parquet import read_parquet as read_parquet
    from daskdist.readers.sql import read_sql as read_sql
    from daskdist.readers.text import read_text as read_text
    from daskdist.readers.tfrecord import read_tfrecord as read_tfrecord
    from daskdist.readers.webdataset import read_webdataset as read_webdataset
    from daskdist.readers.zarr import read_zarr as read_zarr
    from daskdist.sharding import SHARD_HINT as SHARD_HINT
    from daskdist.sharding import AutoShardPolicy as AutoShardPolicy
    from daskdist.strategy.current import Variable as Variable
    from daskdist.strategy.current import get_replica_context as get_replica_context
    from daskdist.strategy.current import get_strategy as get_strategy
    from daskdist.strategy.current import has_strategy as has_strategy
    from daskdist.strategy.current import in_cross_replica_context as in_cross_replica_context
    from daskdist.strategy.explain_slow import explain_slow as explain_slow
    from daskdist.strategy.function import function as function
    from daskdist.strategy.input.dataset import DistributedDataset as DistributedDataset
    from daskdist.strategy.input.iterator import DistributedIterator as DistributedIterator
    from daskdist.strategy.input.options import InputContext as InputContext
    from daskdist.strategy.input.options import InputOptions as InputOptions
    from daskdist.strategy.input.options import InputReplicationMode as InputReplicationMode
    from daskdist.strategy.input.options import ValueContext as ValueContext
    from daskdist.strategy.input.replica_iterator import ReplicaIterator as ReplicaIterator
    from daskdist.strategy.mirrored import MirroredStrategy as MirroredStrategy
    from daskdist.strategy.multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from daskdist.strategy.placement.cluster_resolver import ClusterResolver as ClusterResolver
    from daskdist.strategy.placement.device_assignment import DeviceAssignment as DeviceAssignment
    from daskdist.strategy.placement.list_devices import list_devices as list_devices
    from daskdist.strategy.reduce.reductions import ReduceOp as ReduceOp
    from daskdist.strategy.reduce.reductions import Reduction as Reduction
    from daskdist.strategy.replica.context import ReplicaContext as ReplicaContext
    from daskdist.strategy.values.distributed_values import DistributedValues as DistributedValues
    from daskdist.strategy.values.per_replica import PerReplica as PerReplica
    from daskdist.strategy.variables.aggregation import VariableAggregation as VariableAggregation
    from daskdist.strategy.variables.aggregation import VariableSynchronization as VariableSynchronization

__version__ = "0.1.0"

_NAMES: Final = {
    "AutoShardPolicy": "daskdist.sharding:AutoShardPolicy",
    "Checkpoint": "daskdist.checkpoint.checkpoint:Checkpoint",
    "CheckpointManager": "daskdist.checkpoint.checkpoint_manager:CheckpointManager",
    "ClusterResolver": "daskdist.strategy.placement.cluster_resolver:ClusterResolver",
    "Dataset": "daskdist.dataset:Dataset",
    "DatasetSpec": "daskdist.core.spec:DatasetSpec",
    "DeviceAssignment": "daskdist.strategy.placement.device_assignment:DeviceAssignment",
    "DistributedDataset": "daskdist.strategy.input.dataset:DistributedDataset",
    "DistributedIterator": "daskdist.strategy.input.iterator:DistributedIterator",
    "DistributedValues": "daskdist.strategy.values.distributed_values:DistributedValues",
    "FixedLenFeature": "daskdist.formats.tfrecord.example:FixedLenFeature",
    "FixedLenSequenceFeature": "daskdist.formats.tfrecord.example:FixedLenSequenceFeature",
    "InputContext": "daskdist.strategy.input.options:InputContext",
    "InputOptions": "daskdist.strategy.input.options:InputOptions",
    "InputReplicationMode": "daskdist.strategy.input.options:InputReplicationMode",
    "MirroredStrategy": "daskdist.strategy.mirrored:MirroredStrategy",
    "MultiWorkerMirroredStrategy": "daskdist.strategy.multi_worker:MultiWorkerMirroredStrategy",
    "Options": "daskdist.ops.with_options:Options",
    "PerReplica": "daskdist.strategy.values.per_replica:PerReplica",
    "PerReplicaSpec": "daskdist.core.spec:PerReplicaSpec",
    "Ragged": "daskdist.core.ragged:Ragged",
    "RaggedRowSpec": "daskdist.core.spec:RaggedRowSpec",
    "RaggedTensorSpec": "daskdist.core.spec:RaggedTensorSpec",
    "ReduceOp": "daskdist.strategy.reduce.reductions:ReduceOp",
    "Reduction": "daskdist.strategy.reduce.reductions:Reduction",
    "ReplicaContext": "daskdist.strategy.replica.context:ReplicaContext",
    "ReplicaIterator": "daskdist.strategy.input.replica_iterator:ReplicaIterator",
    "SHARD_HINT": "daskdist.sharding:SHARD_HINT",
    "TensorSpec": "daskdist.core.spec:TensorSpec",
    "ValueContext": "daskdist.strategy.input.options:ValueContext",
    "VarLenFeature": "daskdist.formats.tfrecord.example:VarLenFeature",
    "Variable": "daskdist.strategy.current:Variable",
    "VariableAggregation": "daskdist.strategy.variables.aggregation:VariableAggregation",
    "VariableSynchronization": "daskdist.strategy.variables.aggregation:VariableSynchronization",
    "class_names_of": "daskdist.readers.images:class_names_of",
    "config": "daskdist.config",
    "data": "daskdist.data",
    "distribute": "daskdist.distribute",
    "errors": "daskdist.errors",
    "experimental": "daskdist.experimental",
    "explain_slow": "daskdist.strategy.explain_slow:explain_slow",
    "function": "daskdist.strategy.function:function",
    "get_replica_context": "daskdist.strategy.current:get_replica_context",
    "get_strategy": "daskdist.strategy.current:get_strategy",
    "has_strategy": "daskdist.strategy.current:has_strategy",
    "in_cross_replica_context": "daskdist.strategy.current:in_cross_replica_context",
    "keras_data": "daskdist.frameworks.keras:keras_data",
    "list_devices": "daskdist.strategy.placement.list_devices:list_devices",
    "progress": "daskdist.display.progress_bar:progress",
    "read_arrow": "daskdist.readers.arrow:read_arrow",
    "read_csv": "daskdist.readers.csv:read_csv",
    "read_files": "daskdist.readers.files:read_files",
    "read_fixed_length": "daskdist.readers.fixed_length:read_fixed_length",
    "read_hdf5": "daskdist.readers.hdf5:read_hdf5",
    "read_images": "daskdist.readers.images:read_images",
    "read_json": "daskdist.readers.json:read_json",
    "read_npy": "daskdist.readers.npy:read_npy",
    "read_parquet": "daskdist.readers.parquet:read_parquet",
    "read_sql": "daskdist.readers.sql:read_sql",
    "read_text": "daskdist.readers.text:read_text",
    "read_tfrecord": "daskdist.readers.tfrecord:read_tfrecord",
    "read_webdataset": "daskdist.readers.webdataset:read_webdataset",
    "read_zarr": "daskdist.readers.zarr:read_zarr",
    "to_jax": "daskdist.frameworks.jax:to_jax",
    "to_torch": "daskdist.frameworks.torch:to_torch",
    "torch_loader": "daskdist.frameworks.torch:torch_loader",
    "torch_process_group": "daskdist.frameworks.torch:torch_process_group",
    "tpu": "daskdist.tpu",
}

__all__ = [*_NAMES]

__getattr__, __dir__ = lazily(__name__, _NAMES, {**OF_CONSTRUCTORS, **AS_FUNCTIONS, **TOP})
