"""Ranges that profilers of GPUs show, such as Nsight Systems: of copies, gathers and steps, by the package ``nvtx``."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any, Final

_NOTHING: Final = contextlib.nullcontext()


def profiled(name: str) -> AbstractContextManager[Any]:
    """Return a context that is shown under a name by a profiler; it does nothing if ``nvtx`` is not installed."""
    annotate = _annotate()
    return _NOTHING if annotate is None else annotate(name, domain="daskdist")


@functools.cache
def _annotate() -> Any:
    try:
        from nvtx import annotate
    except ImportError:
        return None
    return annotate
