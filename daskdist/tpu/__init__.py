"""The names of ``tf.tpu``."""

from typing import Final

from daskdist.core.lazy_imports import lazily
from daskdist.tensorflow.missing_names import TPU

_NAMES: Final = {"experimental": "daskdist.tpu.experimental"}

__all__ = [*_NAMES]

__getattr__, __dir__ = lazily(__name__, _NAMES, TPU)
