"""Replicas on devices that stand in for GPUs: on their devices, in their streams, with the CPU's results."""

from __future__ import annotations

import functools
import sys
import time

import pytest
import strict_device
from conftest import TESTS
from replica_laws import PairLaws, ReplicaLaws, StreamLaws


def _register(path):
    if path not in sys.path:
        sys.path.insert(0, path)
    import strict_device

    strict_device.register(2)


@pytest.fixture(autouse=True)
def _strict():
    strict_device.register(2)
    yield
    strict_device.unregister()


class OnStrict:
    def hold_up(self, device):
        if not device.is_host:
            device.current_stream().give(functools.partial(time.sleep, 0.05))

    def on_workers(self, client):
        client.run(_register, str(TESTS))
        return super().on_workers(client)


class TestOne(OnStrict, ReplicaLaws):
    def names(self):
        return ["STRICT:0"]


class TestTwo(OnStrict, PairLaws):
    def names(self):
        return ["STRICT:0", "STRICT:1"]


class TestAfterAProcessor(OnStrict, StreamLaws):
    """The first replica waits for no stream, so that another cannot depend on that wait."""

    def names(self):
        return ["CPU:0", "STRICT:0"]
