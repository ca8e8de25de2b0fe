"""CPU replicas: NumPy arrays in this process's memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np


@dataclass(frozen=True)
class CpuDevice:
    """One slot on this machine's processors; several share them and the memory."""

    index: int
    kind: ClassVar[str] = "CPU"

    @property
    def namespace(self) -> Any:
        return np

    def put(self, array: Any) -> Any:
        return np.asarray(array)

    def get(self, array: Any) -> Any:
        return np.asarray(array)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.empty(shape, dtype)

    def memory_info(self) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
