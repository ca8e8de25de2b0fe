"""The names of ``tf.distribute.experimental``."""

from typing import Final

from daskdist.core.lazy_imports import lazily
from daskdist.tensorflow.missing_names import DISTRIBUTE_EXPERIMENTAL

_NAMES: Final = {
    "DeviceAssignment": "daskdist.strategy.placement.device_assignment:DeviceAssignment",
    "MultiWorkerMirroredStrategy": "daskdist.strategy.multi_worker:MultiWorkerMirroredStrategy",
    "TPUStrategy": "daskdist.tensorflow.tpu:TPUStrategy",
    "ValueContext": "daskdist.strategy.input.options:ValueContext",
}

__all__ = [*_NAMES]

__getattr__, __dir__ = lazily(__name__, _NAMES, DISTRIBUTE_EXPERIMENTAL)
