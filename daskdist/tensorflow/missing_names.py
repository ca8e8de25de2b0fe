"""Tables, one for each module, of TensorFlow's names that this package lacks and of what to use instead."""

from typing import Final

_ONE_STRATEGY: Final = "daskdist.MirroredStrategy, for one process, or daskdist.MultiWorkerMirroredStrategy"
_REDUCTION: Final = "strategy.reduce and ReplicaContext.all_reduce; how replicas communicate is chosen for you"
_RESOLVER: Final = (
    "daskdist.ClusterResolver, which takes a Dask cluster of any kind, or its scheduler's address or file"
)
_NO_SERVER: Final = "`dask scheduler` and `dask worker`"
_NO_COORDINATOR: Final = "a Dask client: client.submit"

TOP: Final = {
    "IndexedSlices": "numpy.ndarray",
    "Module": "any Python object; daskdist.Variable holds what replicas keep",
    "RaggedTensor": "daskdist.Ragged",
    "Tensor": "numpy.ndarray",
    "TypeSpec": "daskdist.TensorSpec, daskdist.RaggedTensorSpec, daskdist.PerReplicaSpec or daskdist.DatasetSpec",
    "bfloat16": "ml_dtypes.bfloat16",
    "bool": "numpy.bool_",
    "cast": "array.astype",
    "concat": "numpy.concatenate, or Dataset.concatenate for datasets",
    "cond": "Python's if",
    "constant": "numpy.asarray, or a NumPy number such as numpy.float32(0.1)",
    "convert_to_tensor": "numpy.asarray",
    "executing_eagerly": "plain Python: functions are always called as they are written",
    "float16": "numpy.float16",
    "float32": "numpy.float32",
    "float64": "numpy.float64",
    "int16": "numpy.int16",
    "int32": "numpy.int32",
    "int64": "numpy.int64",
    "int8": "numpy.int8",
    "io": "the readers, such as daskdist.read_tfrecord(files, features=...) and daskdist.read_images",
    "keras": "keras itself, with daskdist.keras_data",
    "math": "numpy",
    "nest": "optree",
    "print": "Python's print",
    "py_function": "the function itself: functions of datasets are plain Python",
    "numpy_function": "the function itself: functions of datasets are plain Python",
    "random": "numpy.random.default_rng(seed)",
    "range": "Python's range, or numpy.arange",
    "reduce_mean": "numpy.mean",
    "reduce_sum": "numpy.sum",
    "reshape": "numpy.reshape",
    "shape": "array.shape",
    "square": "numpy.square",
    "stack": "numpy.stack",
    "string": "str",
    "strings": "numpy.strings",
    "summary": "the logger of your framework",
    "train": "daskdist.Checkpoint",
    "uint16": "numpy.uint16",
    "uint32": "numpy.uint32",
    "uint64": "numpy.uint64",
    "uint8": "numpy.uint8",
    "while_loop": "Python's while",
    "zeros": "numpy.zeros",
}

DATA: Final = {
    "NumpyIterator": "Dataset.as_numpy_iterator()",
    "ThreadingOptions": "daskdist.Options(num_threads=...)",
}

DATA_EXPERIMENTAL: Final = {
    "AutotuneAlgorithm": "daskdist.Options(memory_budget_bytes=...), which bounds what is read ahead",
    "AutotuneOptions": "daskdist.Options(memory_budget_bytes=...)",
    "CheckpointInputPipelineHook": "the iterator's state_dict()",
    "ExternalStatePolicy": "nothing in its place: functions of datasets are plain Python",
    "OptimizationOptions": "nothing in its place: pipelines are always optimized",
    "OptionalStructure": "daskdist.experimental.Optional",
    "SparseTensorStructure": "daskdist.RaggedTensorSpec",
    "StatsAggregator": "the iterator's stats()",
    "StatsOptions": "the iterator's stats()",
    "TFRecordWriter": "Dataset.to_tfrecord",
    "TensorStructure": "daskdist.TensorSpec",
    "ThreadingOptions": "daskdist.Options(num_threads=...)",
    "bytes_produced_stats": "the iterator's stats()",
    "copy_to_device": "strategy.distribute_dataset, which copies ahead of use",
    "index_table_from_dataset": "a Python dict made of the dataset",
    "latency_stats": "the iterator's stats()",
    "make_batched_features_dataset": "daskdist.read_tfrecord(files, features=...), then Dataset.batch",
    "make_saveable_from_iterator": "the iterator's state_dict()",
    "map_and_batch_with_legacy_function": "Dataset.map, then Dataset.batch",
    "parse_example_dataset": "daskdist.read_tfrecord(files, features=...)",
    "prefetch_to_device": "strategy.distribute_dataset, which copies ahead of use",
    "table_from_dataset": "a Python dict made of the dataset",
}

DATA_SERVICE: Final = {
    "save": "Dataset.save",
    "snapshot": "Dataset.snapshot",
}

DISTRIBUTE: Final = {
    "CrossDeviceOps": _REDUCTION,
    "HierarchicalCopyAllReduce": _REDUCTION,
    "NcclAllReduce": _REDUCTION,
    "OneDeviceStrategy": 'daskdist.MirroredStrategy(["CPU:0"]), with the name of the device',
    "ParameterServerStrategy": _ONE_STRATEGY,
    "ReductionToOneDevice": _REDUCTION,
    "RunOptions": "strategy.run without options",
    "Server": _NO_SERVER,
    "coordinator": _NO_COORDINATOR,
    "experimental_set_strategy": "`with strategy.scope():`",
}

DISTRIBUTE_EXPERIMENTAL: Final = {
    "CentralStorageStrategy": _ONE_STRATEGY,
    "CollectiveCommunication": _REDUCTION,
    "CollectiveHints": _REDUCTION,
    "CommunicationImplementation": _REDUCTION,
    "CommunicationOptions": _REDUCTION,
    "ParameterServerStrategy": _ONE_STRATEGY,
    "PreemptionCheckpointHandler": "daskdist.Checkpoint",
    "PreemptionWatcher": "daskdist.Checkpoint",
    "TerminationConfig": "daskdist.Checkpoint",
    "coordinator": _NO_COORDINATOR,
    "partitioners": "nothing in its place: each replica has a variable whole",
    "rpc": _NO_COORDINATOR,
}

CLUSTER_RESOLVER: Final = {
    "GCEClusterResolver": _RESOLVER,
    "KubernetesClusterResolver": f"{_RESOLVER}; dask-kubernetes makes one on Kubernetes",
    "SimpleClusterResolver": _RESOLVER,
    "SlurmClusterResolver": f"{_RESOLVER}; dask-jobqueue makes one on Slurm",
    "TFConfigClusterResolver": _RESOLVER,
    "UnionResolver": _RESOLVER,
}

TPU: Final = {
    "XLAOptions": "strategy.run without options",
}

TPU_EXPERIMENTAL: Final = {
    "HardwareFeature": "daskdist.list_devices",
    "TPUSystemMetadata": "daskdist.list_devices",
    "Topology": "daskdist.list_devices, and daskdist.DeviceAssignment with the devices that replicas are to have",
    "embedding": "your framework's embeddings",
    "initialize_tpu_system": "the strategy alone: a Dask cluster needs no initialization",
    "shutdown_tpu_system": "strategy.close()",
}

EXPERIMENTAL: Final = {
    "async_scope": "the strategy as it is: results are asynchronous on a cluster",
    "dispatch_on_types": "plain Python",
    "dlpack": "numpy.from_dlpack, daskdist.to_torch or daskdist.to_jax",
    "dtensor": "daskdist.MultiWorkerMirroredStrategy",
    "numpy": "numpy",
}
