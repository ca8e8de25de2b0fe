"""The names of ``tf.data``."""

from typing import Final

from daskdist.core.names import lazily

_NAMES: Final = {
    "Dataset": "daskdist.dataset:Dataset",
    "INFINITE_CARDINALITY": "daskdist.core.cardinality:INFINITE",
    "Options": "daskdist.ops.with_options:Options",
    "UNKNOWN_CARDINALITY": "daskdist.core.cardinality:UNKNOWN",
    "experimental": "daskdist.data_experimental",
}

__all__ = [*_NAMES]

__getattr__ = lazily(__name__, _NAMES)
