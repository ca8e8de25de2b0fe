"""Calls of CuPy that would break a capture of a graph in another thread, on a stand-in that refuses them."""

from __future__ import annotations

import contextlib
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from daskdist.devices import cuda_streams
from daskdist.devices.cuda_streams import CupyEvent, CupyStream
from daskdist.devices.cupy import CupyDevice

# The capture mode of each thread, and the recorded calls of CUDA.
modes = threading.local()
calls: list[str] = []


def unsafe(name: str) -> None:
    """Note a call that CUDA forbids while any other thread captures, unless this thread's mode is relaxed."""
    assert getattr(modes, "mode", 0) == cuda_streams._RELAXED, f"{name} would invalidate a capture"
    calls.append(name)


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        calls.append("create event")
        self.disable_timing = disable_timing

    @property
    def done(self):
        unsafe("query")
        return True

    def synchronize(self):
        unsafe("synchronize event")


class Stream:
    def __init__(self, ptr=7, capturing=False):
        self.ptr, self._capturing = ptr, capturing

    def is_capturing(self):
        if isinstance(self._capturing, Exception):
            raise self._capturing
        return self._capturing

    def record(self, event=None):
        calls.append("record")
        return event

    def synchronize(self):
        unsafe("synchronize stream")


class CUDARuntimeError(RuntimeError):
    status = 400


def host_register(pointer, size, flags):
    unsafe("register")
    if size < 4096:
        raise CUDARuntimeError("cudaErrorInvalidValue: invalid argument")


class PinnedMemory:
    def __init__(self, size, flags=0):
        unsafe("allocate")
        self.size = size


@pytest.fixture(autouse=True)
def _cupy(monkeypatch):
    def exchange(mode):
        before, modes.mode = getattr(modes, "mode", 0), mode
        return before

    runtime = SimpleNamespace(
        getDevice=lambda: 0,
        hostAllocPortable=1,
        hostRegister=host_register,
        hostUnregister=lambda pointer: unsafe("unregister"),
        CUDARuntimeError=CUDARuntimeError,
        is_hip=False,
    )
    cuda = SimpleNamespace(
        Event=Event,
        runtime=runtime,
        Device=lambda index: contextlib.nullcontext(),
        PinnedMemory=PinnedMemory,
        PinnedMemoryPointer=lambda memory, offset: bytearray(memory.size),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(cuda_streams, "_capture_mode", lambda: exchange)
    monkeypatch.setattr(cuda_streams, "_free_events", CupyEvent.__del__.__defaults__[0])
    cuda_streams.cupy_module.cache_clear()
    calls.clear()
    yield
    cuda_streams._free_events.clear()
    cuda_streams.cupy_module.cache_clear()


def test_queries_and_waits_do_not_break_captures_of_other_threads():
    stream = CupyStream(Stream(), 0)
    event = stream.record()
    assert event.is_over
    event.synchronize()
    stream.synchronize()
    assert calls == ["create event", "record", "query", "synchronize event", "synchronize stream"]
    # The thread's own capture mode is restored.
    assert getattr(modes, "mode", 0) == 0


def test_pinned_memory_does_not_break_captures_of_other_threads():
    assert len(CupyDevice(0).pinned(4096, is_pooled=False)) == 4096
    array = np.zeros(8192, np.uint8)
    assert CupyDevice(0).lock(array[5:])
    assert CupyDevice(0).lock(array)
    del array
    assert calls == ["allocate", "register", "unregister"]


def test_memory_that_cannot_be_locked_is_asked_for_once(caplog):
    array = np.zeros(8, np.uint8)
    assert [CupyDevice(0).lock(array) for _ in range(3)] == [False] * 3
    assert caplog.text.count("is not page-locked") == 1
    del array
    assert calls == ["register"]


@pytest.mark.parametrize(
    ("capturing", "expected"),
    [(False, False), (True, True), (RuntimeError("an error has invalidated the capture sequence"), True)],
)
def test_a_capture_that_failed_lasts_until_its_end(capturing, expected):
    assert CupyStream(Stream(capturing=capturing), 0).is_capturing is expected
    # Default streams cannot be captured, so CuPy is not asked.
    assert not CupyStream(Stream(ptr=0, capturing=CUDARuntimeError()), 0).is_capturing


def test_errors_of_cuda_about_a_capture_are_raised():
    with pytest.raises(CUDARuntimeError):
        _ = CupyStream(Stream(capturing=CUDARuntimeError("cudaErrorContextIsDestroyed")), 0).is_capturing


def test_events_are_created_once_and_without_times():
    stream = CupyStream(Stream(), 0)
    for _ in range(5):
        assert stream.record().event.disable_timing
    assert not stream.record(is_timed=True).event.disable_timing
    assert calls.count("create event") == 2
