"""Ranges for profilers, by NVIDIA's own package, which needs no GPU."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import strict_device

from daskdist import Dataset, MirroredStrategy, Options
from daskdist.devices import profiling

nvtx = pytest.importorskip("nvtx")


@pytest.fixture
def _strict():
    strict_device.register(1)
    profiling._annotate.cache_clear()
    yield
    profiling._annotate.cache_clear()
    strict_device.unregister()


def run_a_pass():
    strategy = MirroredStrategy(["STRICT:0"])
    dataset = Dataset.from_tensor_slices(np.arange(100.0)).shuffle(50, seed=1).batch(10)
    for option in (False, True):
        for batch in strategy.distribute_dataset(dataset.with_options(Options(shuffle_on_device=option))):
            strategy.run(lambda x: x, args=(batch,))


@pytest.mark.usefixtures("_strict")
def test_copies_gathers_and_steps_are_ranges(monkeypatch):
    ranges = []

    class Annotate(nvtx.annotate):
        def __init__(self, message, domain):
            super().__init__(message, domain=domain)
            self.told = domain, message

        def __enter__(self):
            ranges.append(("begin", *self.told))
            return super().__enter__()

        def __exit__(self, *error):
            ranges.append(("end", *self.told))
            return super().__exit__(*error)

    monkeypatch.setattr(nvtx, "annotate", Annotate)
    run_a_pass()
    for name in ("copy", "gather", "step: run_a_pass.<locals>.<lambda>"):
        num_begun = ranges.count(("begin", "daskdist", name))
        assert num_begun == ranges.count(("end", "daskdist", name)) > 0, name
    assert ranges.count(("begin", "daskdist", "step: run_a_pass.<locals>.<lambda>")) == 20


@pytest.mark.usefixtures("_strict")
def test_without_the_package_nothing_is_called(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    run_a_pass()
    assert profiling.profiled("copy") is profiling.profiled("step")
