"""Tables, one for each module, of TensorFlow's names that this package lacks and of what to use instead."""

from typing import Final

_ONE_STRATEGY: Final = "daskdist.MirroredStrategy, for one process, or daskdist.MultiWorkerMirroredStrategy"
_REDUCTION: Final = "strategy.reduce and ReplicaContext.all_reduce; how replicas communicate is chosen for you"
_RESOLVER: Final = (
    "daskdist.ClusterResolver, which takes a Dask cluster of any kind, or its scheduler's address or file"
)
_NO_SERVER: Final = "`dask scheduler` and `dask worker`"
_NO_COORDINATOR: Final = "a Dask client: client.submit"

# Functions of TensorFlow that NumPy has under the same name, and those that it has under another.
_OF_NUMPY: Final = """
    abs add argmax argmin argsort broadcast_to cos cumsum divide einsum equal exp expand_dims eye floor greater
    greater_equal less less_equal linalg linspace logical_and logical_not logical_or matmul maximum meshgrid minimum
    multiply negative not_equal ones ones_like pad pow repeat roll round searchsorted sign sin size sort split sqrt
    squeeze subtract tan tanh tensordot tile transpose unique where zeros_like
""".split()  # noqa: SIM905 - a list would take a line for each
_OTHERWISE_OF_NUMPY: Final = {
    "clip_by_value": "clip",
    "complex64": "complex64",
    "complex128": "complex128",
    "fill": "full",
    "gather": "take",
    "reduce_all": "all",
    "reduce_any": "any",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reverse": "flip",
}
_FRAMEWORK: Final = "PyTorch, JAX or Keras in the functions that strategy.run calls"

TOP: Final = {
    **{name: f"numpy.{name}" for name in _OF_NUMPY},
    **{name: f"numpy.{other}" for name, other in _OTHERWISE_OF_NUMPY.items()},
    "AUTOTUNE": "daskdist.data.AUTOTUNE; without num_parallel_calls, the number is chosen for you too",
    "DType": "numpy.dtype",
    "GradientTape": _FRAMEWORK,
    "Graph": "plain Python: functions are always called as they are written",
    "IndexedSlices": "numpy.ndarray",
    "Module": "any Python object; daskdist.Variable holds what replicas keep",
    "OptionalSpec": "the element_spec of daskdist.experimental.Optional",
    "RaggedTensor": "daskdist.Ragged",
    "Session": "plain Python: functions are always called as they are written",
    "SparseTensor": "daskdist.Ragged, or arrays",
    "SparseTensorSpec": "daskdist.RaggedTensorSpec",
    "Tensor": "numpy.ndarray",
    "TensorArray": "a Python list",
    "TensorShape": "a tuple",
    "TypeSpec": "daskdist.TensorSpec, daskdist.RaggedTensorSpec, daskdist.PerReplicaSpec or daskdist.DatasetSpec",
    "as_dtype": "numpy.dtype",
    "autograph": "plain Python: functions are always called as they are written",
    "bfloat16": "ml_dtypes.bfloat16",
    "bool": "numpy.bool_",
    "case": "Python's if",
    "cast": "array.astype",
    "compat": "the names of this package, which are those of TensorFlow 2",
    "concat": "numpy.concatenate, or Dataset.concatenate for datasets",
    "cond": "Python's if",
    "constant": "numpy.asarray, or a NumPy number such as numpy.float32(0.1)",
    "constant_initializer": "numpy.full",
    "control_dependencies": "plain Python: statements are executed in their order",
    "convert_to_tensor": "numpy.asarray",
    "debugging": "Python's assert",
    "device": "daskdist.MirroredStrategy with the names of the devices",
    "dtypes": "numpy.dtype",
    "estimator": _FRAMEWORK,
    "executing_eagerly": "plain Python: functions are always called as they are written",
    "feature_column": _FRAMEWORK,
    "float": "Python's float",
    "float16": "numpy.float16",
    "float32": "numpy.float32",
    "float64": "numpy.float64",
    "gradients": _FRAMEWORK,
    "group": "the calls one after the other",
    "identity": "the value itself",
    "image": "daskdist.read_images, and PIL or your framework in Dataset.map",
    "init_scope": "plain Python: functions are always called as they are written",
    "initializers": _FRAMEWORK,
    "int16": "numpy.int16",
    "int32": "numpy.int32",
    "int64": "numpy.int64",
    "int8": "numpy.int8",
    "io": "the readers, such as daskdist.read_tfrecord(files, features=...) and daskdist.read_images",
    "is_tensor": "isinstance(value, numpy.ndarray)",
    "keras": "keras itself, with daskdist.keras_data",
    "logging": "Python's logging",
    "lookup": "a Python dict",
    "losses": _FRAMEWORK,
    "map_fn": "numpy.stack([function(x) for x in array])",
    "math": "numpy",
    "metrics": _FRAMEWORK,
    "name_scope": "the argument name of operations",
    "nest": "optree",
    "nn": _FRAMEWORK,
    "no_op": "Python's pass",
    "numpy_function": "the function itself: functions of datasets are plain Python",
    "one_hot": "numpy.eye(depth)[indices]",
    "optimizers": _FRAMEWORK,
    "print": "Python's print",
    "profiler": "daskdist.explain_slow",
    "py_function": "the function itself: functions of datasets are plain Python",
    "ragged": "daskdist.Ragged",
    "random": "numpy.random.default_rng(seed)",
    "range": "Python's range, or numpy.arange",
    "reduce_mean": "numpy.mean",
    "reduce_sum": "numpy.sum",
    "reshape": "numpy.reshape",
    "saved_model": _FRAMEWORK,
    "shape": "array.shape",
    "sparse": "arrays, or scipy.sparse in the functions of datasets",
    "square": "numpy.square",
    "stack": "numpy.stack",
    "stop_gradient": _FRAMEWORK,
    "string": "str",
    "strings": "numpy.strings",
    "summary": "the logger of your framework",
    "switch_case": "Python's if",
    "test": "pytest, and daskdist.list_devices",
    "timestamp": "time.time",
    "train": "daskdist.Checkpoint",
    "uint16": "numpy.uint16",
    "uint32": "numpy.uint32",
    "uint64": "numpy.uint64",
    "uint8": "numpy.uint8",
    "vectorized_map": "numpy.stack([function(x) for x in array])",
    "version": "daskdist.__version__",
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
