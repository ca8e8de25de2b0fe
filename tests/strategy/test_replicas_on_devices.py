"""Replicas on devices that stand in for GPUs: on their devices, in their streams, with the CPU's results."""

from __future__ import annotations

import functools
import time

import pytest
import strict_device
from replica_laws import PairLaws, ReplicaLaws, StreamLaws

pytestmark = pytest.mark.usefixtures("strict")


class OnStrict:
    def hold_up(self, device):
        if not device.is_host:
            device.current_stream().give(functools.partial(time.sleep, 0.05))

    def on_workers(self, client):
        client.run(strict_device.register)
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
