"""The names of ``tf.data``, those under its ``experimental`` too."""

from typing import Final

from daskdist.core.names import lazily

_NAMES: Final = {
    "AutoShardPolicy": "daskdist.sharding:AutoShardPolicy",
    "Dataset": "daskdist.dataset:Dataset",
    "INFINITE_CARDINALITY": "daskdist.core.cardinality:INFINITE",
    "Options": "daskdist.ops.with_options:Options",
    "UNKNOWN_CARDINALITY": "daskdist.core.cardinality:UNKNOWN",
    "experimental": "daskdist.data",
}

__all__ = [*_NAMES]

__getattr__ = lazily(__name__, _NAMES)


def __dir__() -> list[str]:
    return sorted(_NAMES)
