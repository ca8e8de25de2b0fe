"""Batches that a program gives to replicas of a cluster, one by one, on their devices."""

from __future__ import annotations

import gc
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import strict_device
from strict_device import StrictDevice, StrictStream

import daskdist
from daskdist import Dataset, DeviceAssignment, MultiWorkerMirroredStrategy
from daskdist.core.block import Batches, Block
from daskdist.core.structure import LONE
from daskdist.devices import on_host
from daskdist.execute.transfer.copier import channel_of
from daskdist.strategy.input import device_staging
from daskdist.strategy.input.device_staging import DeviceStaging

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("late")]


@pytest.fixture
def late(strict):
    StrictStream.delay_s = 0.002


def batches(num_rows=400, size=4):
    block = Block(LONE, [np.arange(num_rows * 3, dtype=np.float32).reshape(num_rows, 3)])
    return Batches(block, range(0, num_rows + 1, size))


def count_copies(monkeypatch):
    copies = []
    copy = StrictDevice.copy
    monkeypatch.setattr(StrictDevice, "copy", lambda self, *args: (copies.append(len(args[0])), copy(self, *args)))
    return copies


def test_batches_are_copied_together_and_ahead_of_use(monkeypatch):
    copies = count_copies(monkeypatch)
    device, rows = StrictDevice(0), batches()
    arrived = DeviceStaging(device)
    for place in range(len(rows)):
        (leaf,) = arrived(rows).item(place)
        # Up to 64 batches are copied together; asking for the first of them also starts the next copy.
        assert len(copies) == 2
        assert device.holds(leaf)
        assert on_host(leaf).tolist() == rows.item(place)[0].tolist()
    # The 100 batches have 48 bytes each.
    assert copies == [64 * 48, 36 * 48]


def test_threads_that_are_the_first_to_ask_share_what_has_arrived(monkeypatch):
    def slowly(device):
        time.sleep(0.05)
        return DeviceStaging(device)

    monkeypatch.setattr(device_staging, "DeviceStaging", slowly)
    # No other test uses this device.
    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(device_staging.staging_of, ["STRICT:7"] * 4))
    assert len(set(map(id, actual))) == 1


def test_large_batches_are_copied_one_by_one(monkeypatch):
    copies = count_copies(monkeypatch)
    block = Block(LONE, [np.ones((3 * 2**20, 4), np.float32)])
    rows = Batches(block, range(0, 3 * 2**20 + 1, 2**20))
    arrived = DeviceStaging(StrictDevice(0))
    arrived(rows).item(0)
    assert copies == [2**24] * 2
    arrived(rows).item(1)
    assert copies == [2**24] * 3


def test_any_order_of_requests():
    device, rows = StrictDevice(0), batches()
    arrived = DeviceStaging(device)
    for place in [70, 3, 3, 99, 0, 64, 1, 98]:
        (leaf,) = arrived(rows).item(place)
        assert on_host(leaf).tolist() == rows.item(place)[0].tolist()


def test_kept_copies_stay_valid_and_others_are_freed():
    device = StrictDevice(0)
    gc.collect()
    before = device.held_bytes()
    arrived = DeviceStaging(device)
    kept, expected = [], []
    for _ in range(12):
        rows = batches()
        kept += arrived(rows).item(5)
        expected.append(rows.item(5)[0].tolist())
    assert [on_host(leaf).tolist() for leaf in kept] == expected
    # Each kept row keeps the memory of the rows that were copied with it; up to two more groups were copied ahead.
    assert device.held_bytes() - before <= 12 * 64 * 48 + 2 * 64 * 48
    del kept, rows
    # Let copies that are under way arrive first.
    channel_of("STRICT:0").stream.synchronize()
    gc.collect()
    assert device.held_bytes() == before


def test_with_little_memory_elements_are_copied_on_request(caplog, monkeypatch):
    tries = []
    monkeypatch.setattr(StrictDevice, "free_unused", lambda self: tries.append(1))
    device, rows = StrictDevice(0), batches()
    gc.collect()
    # There is memory for one and a half of the copies of 64 batches, and then only for a few single batches.
    for num_bytes in (64 * 48 * 3 // 2, 3 * 256):
        strict_device.LIMITS[0] = device.held_bytes() + num_bytes
        caplog.clear()
        tries.clear()
        try:
            arrived = DeviceStaging(device)
            with caplog.at_level(logging.WARNING, "daskdist"):
                for place in range(len(rows)):
                    (leaf,) = arrived(rows).item(place)
                    assert device.holds(leaf)
                    assert on_host(leaf).tolist() == rows.item(place)[0].tolist()
        finally:
            del strict_device.LIMITS[0]
        (record,) = caplog.records
        assert re.search(r"STRICT:0 has no memory for another \d+ bytes: .* when they are used", record.message)
        # After memory was short, it is not requested again for every row.
        assert 1 <= len(tries) <= len(rows) // 16
        del leaf, arrived


def test_kept_copies_are_reported_as_growth():
    arrived = DeviceStaging(StrictDevice(0))
    large = batches(num_rows=2**12, size=4)
    kept = [arrived(large).item(place)[0] for place in range(0, 1024, 64)]
    actual = arrived.stats()
    assert len(kept) == 16
    assert actual.num_grown >= 5
    assert actual.num_bytes >= 16 * 64 * 48
    assert not actual.is_shrunk


def test_exhausted_memory_is_reported():
    strict_device.LIMITS[0] = StrictDevice(0).held_bytes() + 200
    try:
        with pytest.raises(daskdist.errors.DeviceMemoryError, match="STRICT:0 has no room for the next step"):
            DeviceStaging(StrictDevice(0))(batches()).item(0)
    finally:
        del strict_device.LIMITS[0]


def test_other_results_are_as_they_are():
    value = object()
    assert DeviceStaging(StrictDevice(0))(value) is value


# --- on workers ---


@pytest.fixture
def on_workers(client):
    client.run(strict_device.register, delay_s=0.002)
    with MultiWorkerMirroredStrategy(
        client, device_assignment=DeviceAssignment([("0", "STRICT:0"), ("1", "STRICT:1")])
    ) as strategy:
        yield strategy
    client.run(strict_device.unregister)


def told(batch):
    return repr({name: (StrictDevice.holds(leaf), on_host(leaf).tolist()) for name, leaf in batch.items()})


@pytest.mark.cluster
def test_each_step_equals_that_on_the_host(on_workers, client):
    rows = {"x": np.arange(3000, dtype=np.float32).reshape(1000, 3), "y": np.arange(1000), "t": np.arange(1000) * 1j}
    dataset = Dataset.from_tensor_slices(rows).shuffle(100, seed=3, reshuffle_each_iteration=False).batch(8)
    with MultiWorkerMirroredStrategy(client) as plain:
        expected = [plain.local_results(plain.run(told, args=(step,))) for step in plain.distribute_dataset(dataset)]
        expected = [tuple(str(value).replace("False", "True") for value in step) for step in expected]
    actual = [on_workers.run(told, args=(step,)) for step in on_workers.distribute_dataset(dataset)]
    assert [tuple(map(str, on_workers.local_results(step))) for step in actual] == expected


@pytest.mark.cluster
def test_statistics_of_copies_on_workers(on_workers):
    rows = np.arange(1024, dtype=np.float64).reshape(256, 4)
    iterator = iter(on_workers.distribute_dataset(Dataset.from_tensor_slices(rows).batch(8)))
    before = iterator.stats()["device"]
    results = [on_workers.run(told, args=({"x": step},)) for step in iterator]
    on_workers.local_results(results[-1])
    actual = iterator.stats()
    assert actual["num_elements"] == 32
    actual = {name: value - before[name] for name, value in actual["device"].items()}
    # All rows are copied; pieces may be padded to multiples of 256 bytes.
    assert rows.nbytes <= actual["num_bytes"] <= rows.nbytes + 2 * 256 * 32
    assert actual["copy_s"] > 0
    assert actual["num_stalls"] >= 2
    assert actual["stall_s"] > 0
    assert iterator.stats()["device"]["gb_per_s"] > 0


@pytest.mark.cluster
def test_text_stays_on_the_host(on_workers):
    words = Dataset.from_tensor_slices({"n": np.arange(8), "w": np.array(list("abcdefgh"), np.dtypes.StringDType())})

    def kinds(batch):
        return repr([type(batch["n"]).__name__, type(batch["w"]).__name__, batch["w"].tolist()])

    (step,) = on_workers.distribute_dataset(words.batch(8))
    actual = list(map(str, on_workers.local_results(on_workers.run(kinds, args=(step,)))))
    assert actual == ["['Array', 'ndarray', ['a', 'b', 'c', 'd']]", "['Array', 'ndarray', ['e', 'f', 'g', 'h']]"]


@pytest.mark.cluster
def test_steps_in_a_captured_function_give_the_right_total(on_workers):
    dataset = Dataset.from_tensor_slices(np.arange(4000.0).reshape(1000, 4)).batch(10)

    @daskdist.function
    def total(steps):
        actual = 0.0
        for step in steps:
            sums = on_workers.run(lambda x: x.__array_namespace__().sum(x), args=(step,))
            actual = actual + on_workers.reduce("SUM", sums, axis=None)
        return actual

    assert float(total(on_workers.distribute_dataset(dataset))) == sum(range(4000))
