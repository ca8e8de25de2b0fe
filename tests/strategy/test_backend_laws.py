"""The laws of backends, for all existing backends."""

from __future__ import annotations

import contextlib

import dask
import pytest
from conftest import mirrored

import daskdist
from daskdist.strategy.replica.contract import internals_of
from daskdist.testing import BackendLaws


class TestLocalBackend(BackendLaws):
    @contextlib.contextmanager
    def opened(self):
        strategy = mirrored(3)
        yield internals_of(strategy).backend, internals_of(strategy).group.now
        internals_of(strategy).backend.close()


class TestClusterBackend(BackendLaws):
    @pytest.fixture(autouse=True)
    def _on_client(self, client):
        self.client = client

    @contextlib.contextmanager
    def opened(self):
        with daskdist.MultiWorkerMirroredStrategy(self.client) as strategy:
            yield internals_of(strategy).backend, internals_of(strategy).group.now


class TestClusterBackendOfTwoReplicasAWorker(BackendLaws):
    @pytest.fixture(autouse=True)
    def _on_client(self, client):
        self.client = client

    @contextlib.contextmanager
    def opened(self):
        with daskdist.MultiWorkerMirroredStrategy(self.client, num_replicas_per_worker=2) as strategy:
            yield internals_of(strategy).backend, internals_of(strategy).group.now


class TestClusterBackendByWayOfTheScheduler(TestClusterBackend):
    @contextlib.contextmanager
    def opened(self):
        with dask.config.set({"daskdist.steps.relay": True}), super().opened() as opened:
            yield opened
