"""The names of ``tf.distribute``."""

from typing import Final

from daskdist.core.lazy_imports import lazily
from daskdist.tensorflow.missing_names import DISTRIBUTE

_NAMES: Final = {
    "ClusterResolver": "daskdist.strategy.placement.cluster_resolver:ClusterResolver",
    "DeviceAssignment": "daskdist.strategy.placement.device_assignment:DeviceAssignment",
    "DistributedDataset": "daskdist.strategy.input.dataset:DistributedDataset",
    "DistributedIterator": "daskdist.strategy.input.iterator:DistributedIterator",
    "DistributedValues": "daskdist.strategy.values.distributed_values:DistributedValues",
    "InputContext": "daskdist.strategy.input.options:InputContext",
    "InputOptions": "daskdist.strategy.input.options:InputOptions",
    "InputReplicationMode": "daskdist.strategy.input.options:InputReplicationMode",
    "MirroredStrategy": "daskdist.strategy.mirrored:MirroredStrategy",
    "MultiWorkerMirroredStrategy": "daskdist.strategy.multi_worker:MultiWorkerMirroredStrategy",
    "PerReplica": "daskdist.strategy.values.per_replica:PerReplica",
    "PerReplicaSpec": "daskdist.core.spec:PerReplicaSpec",
    "ReduceOp": "daskdist.strategy.reduce.reductions:ReduceOp",
    "Reduction": "daskdist.strategy.reduce.reductions:Reduction",
    "ReplicaContext": "daskdist.strategy.replica.context:ReplicaContext",
    "Strategy": "daskdist.strategy.strategy:Strategy",
    "StrategyExtended": "daskdist.strategy.extended:StrategyExtended",
    "TPUStrategy": "daskdist.tensorflow.tpu:TPUStrategy",
    "ValueContext": "daskdist.strategy.input.options:ValueContext",
    "cluster_resolver": "daskdist.distribute.cluster_resolver",
    "experimental": "daskdist.distribute.experimental",
    "get_replica_context": "daskdist.strategy.current:get_replica_context",
    "get_strategy": "daskdist.strategy.current:get_strategy",
    "has_strategy": "daskdist.strategy.current:has_strategy",
    "in_cross_replica_context": "daskdist.strategy.current:in_cross_replica_context",
}

__all__ = [*_NAMES]

__getattr__, __dir__ = lazily(__name__, _NAMES, DISTRIBUTE)
