"""Devices that worker processes see: their assignment, messages about unusable ones, and their list."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import strict_device
from distributed import WorkerPlugin

import daskdist
from daskdist import DeviceAssignment, MirroredStrategy, MultiWorkerMirroredStrategy
from daskdist.devices.cupy import CupyDevice
from daskdist.errors import ArgumentError, UnknownDeviceError
from daskdist.execute.callers.submit import workers_of
from daskdist.strategy.placement.probe import probe_devices
from daskdist.strategy.placement.replicas_per_worker import Worker


@pytest.fixture
def see(client):
    """Return a function that lets each worker process see strict devices with given UUIDs."""
    addresses = [client.run(lambda dask_worker: dask_worker.name)]
    by_name = {str(name): address for address, name in addresses[0].items()}
    strict_device.register(2)

    def make(*uuids):
        for name, own in enumerate(uuids):
            client.run(strict_device.register, uuids=own, workers=[by_name[str(name)]])

    yield make
    client.run(strict_device.unregister)
    strict_device.unregister()


def kind_and_sum(x):
    import array_api_strict

    return type(x).__name__, float(array_api_strict.sum(x))


ON_CLUSTER = {
    "each its own": ([["s-0"], ["s-1"]], {}, [["STRICT:0"], ["STRICT:0"]]),
    "two each": ([["s-0", "s-1"], ["s-2", "s-3"]], {}, [["STRICT:0", "STRICT:1"]] * 2),
    "two each, one wanted": (
        [["s-0", "s-1"], ["s-2", "s-3"]],
        {"num_replicas_per_worker": 1},
        [["STRICT:0"], ["STRICT:0"]],
    ),
    "the same": ([["s-0", "s-1"]] * 2, {}, [["STRICT:0"], ["STRICT:1"]]),
    "turned": ([["s-0", "s-1"], ["s-1", "s-0"]], {}, [["STRICT:0"], ["STRICT:0"]]),
    "one has none": ([["s-0"], []], {}, [["STRICT:0"], ["CPU:0"]]),
    "shared": ([["s-0"]] * 2, {"share_devices": True}, [["STRICT:0"]] * 2),
    "one takes no part": ([["s-0"]] * 2, {"num_replicas_per_worker": [0, 1]}, [[], ["STRICT:0"]]),
}


@pytest.mark.cluster
@pytest.mark.parametrize("case", ON_CLUSTER)
def test_replicas_are_on_visible_devices(case, client, see):
    seen, options, expected = ON_CLUSTER[case]
    see(*seen)
    with MultiWorkerMirroredStrategy(client, **options) as strategy:
        actual = [
            [replica.device for replica in strategy.replicas if replica.worker == worker] for worker in strategy.workers
        ]
        assert actual == [value for value in expected if value]
        kinds = [item.partition(":")[0] for own in expected for item in own]
        values = strategy.experimental_distribute_values_from_function(
            lambda context: np.full(2, context.replica_id_in_sync_group, np.float32)
        )
        if "CPU" not in kinds:
            results = strategy.experimental_local_results(strategy.run(kind_and_sum, args=(values,)))
            assert [(str(kind), float(total)) for kind, total in results] == [
                ("Array", 2.0 * number) for number in range(len(kinds))
            ]


@pytest.mark.cluster
def test_too_few_visible_devices_are_an_error(client, see):
    see(["s-0"], ["s-0"])
    with pytest.raises(ArgumentError, match=r"workers 0, 1 on .* 2 devices, and see 1 of kind STRICT .*\(s-0\)"):
        MultiWorkerMirroredStrategy(client)
    with pytest.raises(ArgumentError, match="worker '0' should have 2 replicas and sees STRICT:0"):
        MultiWorkerMirroredStrategy(client, num_replicas_per_worker=2)


@pytest.mark.cluster
def test_a_device_that_a_worker_lacks_is_named(client, see):
    see(["s-0"], ["s-1", "s-2"])
    with pytest.raises(UnknownDeviceError, match=r"'STRICT:1' cannot be used on worker '0' \(tcp://.*\): there are 1"):
        MultiWorkerMirroredStrategy(client, DeviceAssignment([("0", "STRICT:1"), ("1", "STRICT:1")]))
    with MultiWorkerMirroredStrategy(client, DeviceAssignment([("0", "STRICT:0"), ("1", "STRICT:1")])) as strategy:
        assert [replica.device for replica in strategy.replicas] == ["STRICT:0", "STRICT:1"]


@pytest.mark.cluster
def test_one_device_named_for_two_workers_is_refused_or_shared(client, see):
    see(["s-0", "s-1"], ["s-1", "s-2"])
    assignment = DeviceAssignment([("0", "CPU:0"), ("0", "STRICT:1"), ("1", "CPU:0"), ("1", "STRICT:0")])
    said = r"replica 1 on STRICT:1 of worker '0' and replica 3 on STRICT:0 of worker '1' are on one device, s-1; give"
    with pytest.raises(ArgumentError, match=said):
        MultiWorkerMirroredStrategy(client, assignment)
    with MultiWorkerMirroredStrategy(client, assignment, share_devices=True) as strategy:
        assert [value.device for value in strategy.replicas] == ["CPU:0", "STRICT:1", "CPU:0", "STRICT:0"]
    with MultiWorkerMirroredStrategy(client, DeviceAssignment([("0", "STRICT:0"), ("1", "STRICT:0")])) as strategy:
        assert strategy.num_replicas_in_sync == 2


def _lacks_them():
    import strict_device

    kind = strict_device.StrictDevice
    kind.before, kind.missing = kind.missing, lambda self: "nothing compiles its kernels"


def _has_them():
    import strict_device

    strict_device.StrictDevice.missing = strict_device.StrictDevice.before


@pytest.mark.cluster
def test_visible_but_unusable_devices_are_named(client, see):
    see(["s-0"], ["s-1"])
    client.run(_lacks_them)
    try:
        with pytest.raises(UnknownDeviceError, match=r"'STRICT:0' cannot be used on worker '0' .*compiles its kernels"):
            MultiWorkerMirroredStrategy(client)
    finally:
        client.run(_has_them)


def _imports_dask_cuda():
    sys.modules["dask_cuda.initialize"] = None


def _is_dask_cudas(dask_worker):
    # The workers of dask-cuda have this plugin besides Dask's.
    kind = type("CPUAffinity", (WorkerPlugin,), {"__module__": "dask_cuda.plugins"})
    dask_worker.plugins["CPUAffinity-0"] = kind()


def _is_plain_again(dask_worker):
    sys.modules.pop("dask_cuda.initialize", None)
    dask_worker.plugins.pop("CPUAffinity-0", None)


@pytest.mark.cluster
def test_workers_of_dask_cuda_differ_from_workers_that_import_it(client, see):
    see(["s-0", "s-1"], ["s-0", "s-1"])
    workers = [Worker(address, "") for address in workers_of(client)]
    try:
        client.run(_imports_dask_cuda)
        assert [value.has_first for value in probe_devices(client, workers)] == [False, False]
        client.run(_is_dask_cudas, workers=[workers[1].address])
        assert [device.has_first for device in probe_devices(client, workers)] == [False, True]
    finally:
        client.run(_is_plain_again)


@pytest.mark.cluster
@pytest.mark.skipif(bool(CupyDevice.num_present()), reason="there is a GPU here")
def test_a_gpu_that_a_worker_lacks_is_named(client):
    with pytest.raises(UnknownDeviceError, match=r"'GPU:0' cannot be used on worker '1' \(tcp://.*\): .*pip install"):
        MultiWorkerMirroredStrategy(client, DeviceAssignment([("1", "GPU:0")]))


# --- the list of all devices ---


@pytest.mark.usefixtures("strict")
def test_devices_of_this_process_are_listed():
    assert [value.name for value in daskdist.list_devices() if value.name[:3] != "GPU"] == ["CPU:0"]
    strict_device.register(uuids=["s-7", "s-8"])
    *_, first, second, last = daskdist.list_devices()
    assert [(item.name, item.uuid, item.worker) for item in (first, second)] == [
        ("STRICT:0", "s-7", None),
        ("STRICT:1", "s-8", None),
    ]
    assert (first.total_bytes, last.name) == (2**30, "CPU:0")
    assert 0 <= last.free_bytes <= last.total_bytes
    assert all(replica.device.startswith(("STRICT", "GPU")) for replica in MirroredStrategy().replicas)


@pytest.mark.cluster
@pytest.mark.parametrize("of", ["client", "cluster", "address", "resolver"])
def test_devices_of_workers_are_listed(of, client, see):
    see(["s-0", "s-1"], ["s-1"])
    address = client.scheduler.address
    given = {
        "client": client,
        "cluster": client.cluster,
        "address": address,
        "resolver": daskdist.ClusterResolver(address, num_workers=2),
    }[of]
    actual = [device for device in daskdist.list_devices(given) if device.name[:3] != "GPU"]
    assert [(item.worker, item.name, item.uuid) for item in actual if item.name != "CPU:0"] == [
        ("0", "STRICT:0", "s-0"),
        ("0", "STRICT:1", "s-1"),
        ("1", "STRICT:0", "s-1"),
    ]
    assert [value.worker for value in actual if value.name == "CPU:0"] == ["0", "1"]
    assert {result.address for result in actual} == set(workers_of(client))


@pytest.mark.usefixtures("strict")
def test_devices_print_as_a_table():
    strict_device.register(uuids=["s-7"])
    header, *rows = str(daskdist.list_devices()).splitlines()
    assert header.split() == ["name", "free", "total", "uuid", "description"]
    row = next(value for value in rows if value.startswith("STRICT:0"))
    assert row.split()[2:] == ["GiB", "1.0", "GiB", "s-7", "arrays", "of", "array_api_strict"]
    assert rows[-1].startswith("CPU:0  ")
    assert row.index("s-7") == header.index("uuid")
