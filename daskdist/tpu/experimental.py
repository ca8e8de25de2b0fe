"""The names of ``tf.tpu.experimental``."""

from typing import Final

from daskdist.core.lazy_imports import lazily
from daskdist.tensorflow.missing_names import TPU_EXPERIMENTAL

_NAMES: Final = {"DeviceAssignment": "daskdist.strategy.placement.device_assignment:DeviceAssignment"}

__all__ = [*_NAMES]

__getattr__, __dir__ = lazily(__name__, _NAMES, TPU_EXPERIMENTAL)
