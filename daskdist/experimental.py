"""The names of ``tf.experimental``."""

from typing import Final

from daskdist.core.lazy_imports import lazily
from daskdist.tensorflow.missing_names import EXPERIMENTAL

_NAMES: Final = {"Optional": "daskdist.strategy.values.optional:Optional"}

__all__ = [*_NAMES]

__getattr__, __dir__ = lazily(__name__, _NAMES, EXPERIMENTAL)
