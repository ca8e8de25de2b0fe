"""Checks after each message between programs and workers, in all tests and in the workers that they start."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from daskdist.strategy.calls.stream_set import StreamSet
from daskdist.strategy.calls.worker.worker_steps import StepsOnWorker


def _then_validated(event: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(event)
    def validated(self: Any, *args: Any) -> None:
        event(self, *args)
        self.validate()

    return validated


StreamSet._handle = _then_validated(StreamSet._handle)
StreamSet._broken = _then_validated(StreamSet._broken)
StepsOnWorker._handle = _then_validated(StepsOnWorker._handle)
