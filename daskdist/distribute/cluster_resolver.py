"""The names of ``tf.distribute.cluster_resolver``."""

from typing import Final

from daskdist.core.lazy_imports import lazily
from daskdist.tensorflow.missing_names import CLUSTER_RESOLVER

_NAMES: Final = {
    "ClusterResolver": "daskdist.strategy.placement.cluster_resolver:ClusterResolver",
    "TPUClusterResolver": "daskdist.tensorflow.tpu:TPUClusterResolver",
}

__all__ = [*_NAMES]

__getattr__, __dir__ = lazily(__name__, _NAMES, CLUSTER_RESOLVER)
