"""Waits for data and replicas in this process end with an error at a limit."""

from __future__ import annotations

import itertools
import threading

import dask
import pytest
from conftest import mirrored

from daskdist import CheckpointManager, Dataset, TensorSpec, errors, get_replica_context, waiting
from daskdist.execute.callers.threads import Threads
from daskdist.execute.transfer.deferred_release import DeferredRelease
from daskdist.waiting import wait_intervals


def test_a_wait_is_logged_and_ends(caplog):
    with (
        dask.config.set({"daskdist.timeouts.data": 0.05}),
        pytest.raises(errors.WaitTimeoutError, match=r"waited 0 s for a thing, .* longer than daskdist.timeouts.data"),
    ):
        all(threading.Event().wait(within_s) is False for within_s in wait_intervals("a thing", "timeouts.data"))
    assert "waiting for a thing for 0 s, up to 0.05 s (daskdist.timeouts.data)" in caplog.text


def test_a_wait_without_limit_continues():
    with dask.config.set({"daskdist.timeouts.data": float("inf")}):
        assert all(0 < within_s <= 30 for within_s in itertools.islice(wait_intervals("it", "timeouts.data"), 3))


def test_data_that_does_not_come_is_an_error():
    gate = threading.Event()
    late = Dataset.from_generator(lambda: (gate.wait(5) for _ in range(2)), output_signature=TensorSpec((), "bool"))
    caller = Threads(1)
    handle = caller.call(lambda handles: gate.wait(5), [], name="late")
    try:
        with dask.config.set({"daskdist.timeouts.data": 0.2}):
            for wait in (lambda: list(late), lambda: caller.result(handle), lambda: caller.wait_for_one([handle])):
                with pytest.raises(errors.WaitTimeoutError, match=r"daskdist\.timeouts\.data"):
                    wait()
        caller.close()
        assert not handle.done()
    finally:
        gate.set()


def test_a_replica_that_does_not_end_is_an_error():
    gate = threading.Event()

    def step():
        return get_replica_context().replica_id_in_sync_group and gate.wait(5)

    try:
        with (
            dask.config.set({"daskdist.timeouts.step": 0.3}),
            pytest.raises(errors.WaitTimeoutError, match=r"replica 1 in .*daskdist\.timeouts\.step"),
        ):
            mirrored(2).run(lambda: (get_replica_context().all_reduce("SUM", 1), step()))
    finally:
        gate.set()


def test_a_wait_without_setting_is_logged(caplog, monkeypatch):
    monkeypatch.setattr(waiting, "_LOGGED_AFTER_S", 0.0)
    assert next(wait_intervals("a loop", None)) > 0
    assert "waiting for a loop for 0 s" in caplog.text


def test_memory_that_a_framework_does_not_release_is_an_error():
    gate = threading.Event()
    held = DeferredRelease(lambda: gate.wait(5) and None)
    held.hold(None)
    try:
        with (
            dask.config.set({"daskdist.timeouts.step": 0.1}),
            pytest.raises(errors.WaitTimeoutError, match=r"earlier steps.*daskdist\.timeouts\.step"),
        ):
            held.await_room(0)
    finally:
        gate.set()
    held.await_room(0)


def test_a_save_that_is_not_written_is_an_error(tmp_path):
    gate = threading.Event()
    manager = CheckpointManager(str(tmp_path))
    manager._save_states({}, 0, check=lambda: gate.wait(5) and None)
    try:
        with (
            dask.config.set({"daskdist.timeouts.data": 0.1}),
            pytest.raises(errors.WaitTimeoutError, match=r"save of a checkpoint to .*daskdist\.timeouts\.data"),
        ):
            manager.wait()
    finally:
        gate.set()
    # The save continues in the background.
    manager.wait()
    assert manager.steps == [0]
