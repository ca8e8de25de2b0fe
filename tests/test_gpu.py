"""GPUs with CuPy: the laws of devices, and a training loop whose results are compared with those on CPUs.

``python -m pytest -m gpu tests`` runs all tests for GPUs, and reports why tests are skipped. Besides CuPy it needs
pytest and the required dependencies of daskdist: NumPy, Dask, distributed, optree and pyarrow.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from functools import partial
from inspect import signature

import dask
import nccl_stand_in
import numpy as np
import pytest
from replica_laws import DTYPES, LARGE, PairLaws, ReplicaLaws, StreamLaws, of_dtype

import daskdist
from daskdist import Dataset, DeviceAssignment, MirroredStrategy, MultiWorkerMirroredStrategy, Variable
from daskdist.devices import device_of, nccl, nvidia, on_host, stream_of
from daskdist.devices.cupy import _PIECE_BYTES, CupyDevice
from daskdist.execute.callers.submit import workers_of
from daskdist.execute.transfer import layout
from daskdist.execute.transfer.copier import channel_of
from daskdist.execute.transfer.prefetch import DevicePrefetch
from daskdist.strategy.collectives.mailbox import mailbox_of
from daskdist.strategy.values.device_arrays import catch_up, in_stream_of
from daskdist.tables.device_column import DeviceColumn
from daskdist.testing import DeviceLaws

with warnings.catch_warnings():
    # CuPy is first loaded here, and warns if several versions are installed.
    warnings.simplefilter("ignore")
    WHY_NOT = CupyDevice(0).missing()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WHY_NOT is not None, reason=f"no GPU: {WHY_NOT}")]

needs_two = pytest.mark.skipif(CupyDevice.num_present() < 2, reason=f"two GPUs are needed, {WHY_NOT or 'one is here'}")


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


# A kernel that runs for a number of cycles of the GPU's clock.
SPIN = """
extern "C" __global__ void spin(long long turns) {
    long long start = clock64();
    while (clock64() - start < turns) {}
}
"""


def spin(turns=200_000_000):
    """Keep the current stream of the current GPU busy for about a tenth of a second."""
    import cupy

    cupy.RawKernel(SPIN, "spin")((1,), (1,), (np.int64(turns),))


class OnGpus(ReplicaLaws):
    def hold_up(self, device):
        if device.is_host:
            return
        with device.using():
            spin()

    def test_streams_are_delayed(self):
        # The laws of streams prove little if streams are not delayed.
        device = CupyDevice(0)
        with device.using(device.stream()):
            self.hold_up(device)
            assert not device.current_stream().record().is_over
            device.current_stream().synchronize()


class TestReplica(OnGpus):
    def names(self):
        return ["GPU:0"]


@needs_two
class TestReplicas(OnGpus, PairLaws):
    def names(self):
        return ["GPU:0", "GPU:1"]


class TestReplicaAfterAProcessor(StreamLaws):
    hold_up = OnGpus.hold_up

    def names(self):
        return ["CPU:0", "GPU:0"]


def test_no_dtype_of_numbers_is_left_out():
    assert not any(CupyDevice.lacks(np.dtype(value)) for value in DTYPES)
    half = np.linspace(-1, 1, 11, dtype=np.float16)
    assert CupyDevice(0).put(half).dtype == np.float16
    assert np.array_equal(CupyDevice(0).get(CupyDevice(0).put(half)), half)


def test_new_streams_do_not_wait_for_the_default_one(cupy):
    device = CupyDevice(0)
    for stream in (device.stream(), stream_of(device)):
        assert stream.stream.is_non_blocking
        source, target = device.pinned(1000), device.empty((1000,), np.uint8)
        source[:] = 7
        with cupy.cuda.Device(0), cupy.cuda.Stream.null:
            # Compiling and loading the kernel waits for all streams, so do it first.
            spin(1)
            cupy.cuda.Stream.null.synchronize()
            spin(1_000_000_000)
            held_up = cupy.cuda.Stream.null.record()
        device.copy(source, target, stream)
        stream.synchronize()
        assert not held_up.done
        held_up.synchronize()
        assert np.array_equal(device.get(target), source)


@needs_two
@pytest.mark.parametrize("dtype", ["f4", "i8", "f2"])
def test_nccl_reduces_between_gpus(dtype):
    if nccl._library() is None:
        pytest.skip("CuPy finds no NCCL")
    values = [of_dtype(dtype, LARGE, seed) for seed in range(CupyDevice.num_present())]
    arrays = [CupyDevice(number).put(value) for number, value in enumerate(values)]
    with in_stream_of(CupyDevice(0)):
        for device in map(CupyDevice, range(1, len(arrays))):
            catch_up(device)
        actual = CupyDevice(0).combined("SUM", arrays)
    assert device_of(actual) == CupyDevice(0)
    # Sums of small whole numbers are the same in any order.
    assert np.array_equal(CupyDevice(0).get(actual), np.sum(values, axis=0, dtype=values[0].dtype))


def test_nccl_has_the_interface_of_its_stand_in():
    library = nccl._library()
    if library is None:
        pytest.skip("CuPy finds no NCCL")
    for name in (name for name in vars(nccl_stand_in) if name.startswith("NCCL_")):
        assert getattr(library, name) == getattr(nccl_stand_in, name), name
    # The first line of the docstring has the arguments, each after its type.
    said = library.NcclCommunicator.reduce.__doc__.splitlines()[0].partition("(")[2].rstrip(")").split(", ")
    assert [item.split()[-1] for item in said] == list(signature(nccl_stand_in.NcclCommunicator.reduce).parameters)
    said = library.NcclCommunicator.broadcast.__doc__.splitlines()[0].partition("(")[2].rstrip(")").split(", ")
    expected = ["self", "sendbuff", "recvbuff", "count", "datatype", "root", "stream"]
    assert [value.split()[-1] for value in said] == expected
    assert len(library.get_unique_id()) == 128
    assert callable(library.NcclCommunicator.initAll)
    assert callable(library.groupStart)
    assert callable(library.groupEnd)


class TestCupy(DeviceLaws):
    def make_device(self):
        return CupyDevice(0)


@needs_two
class TestCupySecond(DeviceLaws):
    """The device laws for a GPU that is not the thread's current one."""

    def make_device(self):
        return CupyDevice(1)


def test_the_uuid_equals_that_of_nvidia_smi(cupy):
    if cupy.cuda.runtime.is_hip:
        pytest.skip("of AMD's GPUs it is another")
    uuid = CupyDevice(0).uuid
    # CuPy returns the identifier up to its first zero byte.
    report = bytes(cupy.cuda.runtime.getDeviceProperties(0)["uuid"])
    assert bytes.fromhex(uuid.removeprefix("GPU-").replace("-", "")).startswith(report[:16])
    assert len(uuid) == len("GPU-00010203-0405-0607-0809-0a0b0c0d0e0f")


def test_memory_is_told_without_a_context(cupy):
    if cupy.cuda.runtime.is_hip:
        pytest.skip("AMD's driver is not asked")
    cupy.zeros(1)
    assert nvidia.is_in_use(0)
    report = nvidia.memory_of(CupyDevice(0).uuid)
    _, total = CupyDevice(0).memory_info()
    # The driver uses some of the memory, so the numbers differ.
    assert report is None or 0.9 * total < report[1] < 1.2 * total


def test_large_arrays_come_back_piece_by_piece():
    device = CupyDevice(0)
    for num_bytes in (_PIECE_BYTES - 1, _PIECE_BYTES, _PIECE_BYTES + 1, 3 * _PIECE_BYTES + 5):
        array = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
        assert np.array_equal(device.get(device.put(array)), array)


def test_put_does_not_wait_for_what_the_stream_computes(cupy):
    device = CupyDevice(0)
    array = np.arange(1000.0)
    device.put(array)
    with device.using(device.stream()):
        spin(1)
        cupy.cuda.get_current_stream().synchronize()
        spin(1_000_000_000)
        actual = device.put(array)
        array[:] = 0
        assert not device.current_stream().record().is_over
        # Pinned memory is read without a copy in between, so `put` returns only after it has been read.
        pinned = device.pinned(8000).view(np.float64)
        pinned[:] = 7
        other = device.put(pinned)
        pinned[:] = 0
        assert np.array_equal(device.get(actual), np.arange(1000.0))
        assert np.array_equal(device.get(other), np.full(1000, 7.0))


def test_a_graph_is_captured_while_steps_are_copied(cupy):
    device = CupyDevice(0)
    rows = np.random.default_rng(0).random((400, 2**14)).astype(np.float32)
    ahead = DevicePrefetch(([[row]] for row in rows), [device], unit_bytes=2**17)
    ((target,),) = next(ahead)
    target = target.copy()
    stream = device.stream()
    with device.using(stream):
        # The strictest mode: allocations and queries of any other thread in its default mode would be errors.
        stream.stream.begin_capture(0)
        cupy.multiply(target, 2, out=target)
        graph = stream.stream.end_capture()
        for number, ((row,),) in zip(range(1, 400), ahead, strict=False):
            target[...] = row
            if number % 40 == 0:
                stream.stream.begin_capture(0)
                cupy.multiply(target, 2, out=target)
                graph = stream.stream.end_capture()
            graph.launch(stream.stream)
            assert np.array_equal(device.get(target), rows[number] * 2)
    ahead.close()


def test_pinned_memory_outside_of_the_pool_is_as_large_as_asked_for(cupy):
    device, pool = CupyDevice(0), cupy.get_default_pinned_memory_pool()
    before = pool.n_free_blocks()
    array = device.pinned(5 * 2**20, is_pooled=False)
    assert device.is_pinned(array)
    assert len(array) == 5 * 2**20
    del array
    assert pool.n_free_blocks() == before


def test_events_are_used_again(cupy):
    stream = CupyDevice(0).stream()
    first = stream.record()
    address = first.event.ptr
    del first
    assert stream.record().event.ptr == address
    assert stream.record(is_timed=True).event.ptr != address


def test_tall_and_narrow_arrays_are_reduced_by_the_whole_gpu(cupy):
    if hasattr(cupy, "is_stand_in"):
        pytest.skip("the stand-in says nothing about speed")
    device = CupyDevice(0)
    strategy = daskdist.MirroredStrategy(["GPU:0"])
    array = device.put(np.ones((2**22, 16), np.float32))
    with device.using():
        total = strategy.reduce("SUM", array, axis=0)
        times = []
        for _ in range(5):
            start = stream_of(device).record(is_timed=True)
            total = strategy.reduce("SUM", array, axis=0)
            end = stream_of(device).record(is_timed=True)
            end.synchronize()
            times.append(end.seconds_since(start))
    assert device.get(total).tolist() == [2**22] * 16
    # A single block of threads would take some 60 ms for 256 MB.
    assert min(times) < 0.01


def test_get_is_after_what_the_stream_computes(cupy):
    device = CupyDevice(0)
    stream = device.stream()
    with device.using(stream):
        array = cupy.zeros((2000, 2000), np.float32)
        for _ in range(2 if hasattr(cupy, "is_stand_in") else 50):
            array = array @ array + 1
            array /= array.max()
        actual = device.get(array)
    assert np.array_equal(actual, np.ones((2000, 2000), np.float32))


def test_memory_comes_from_the_allocator_of_the_user(cupy):
    pool = cupy.cuda.MemoryPool()
    device = CupyDevice(0)
    with cupy.cuda.using_allocator(pool.malloc):
        array = device.put(np.zeros(1 << 20, np.uint8))
        buffer = device.empty((1 << 20,), np.uint8)
        assert pool.used_bytes() >= 2 << 20
        assert device.held_bytes() == pool.total_bytes()
        del array, buffer
        device.free_unused()
        assert pool.total_bytes() == 0


@needs_two
def test_an_array_of_another_gpu_is_copied(cupy):
    first, second = CupyDevice(0), CupyDevice(1)
    array = first.put(np.arange(1000.0))
    with first.using(first.stream()):
        for _ in range(100):
            array = array + 1
        moved = second.put(array)
    assert moved.device.id == 1
    assert np.array_equal(second.get(moved), np.arange(1000.0) + 100)
    # CuPy itself does not copy arrays between GPUs that are not contiguous.
    assert np.array_equal(second.get(second.put(first.put(np.arange(1000.0))[::2])), np.arange(0.0, 1000, 2))


# --- a training loop, on a GPU and on a processor ---

X = np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32)
LABELS = np.arange(96) % 3


def batches(num_rows=16):
    return Dataset.from_tensor_slices({"x": X, "label": LABELS, "name": LABELS.astype(str)}).batch(num_rows)


def sums(batch):
    x = batch["x"]
    return {"squares": (x * x).sum(axis=0), "labels": batch["label"].sum()}


def steps(strategy):
    return [strategy.run(sums, args=(batch,)) for batch in strategy.distribute_dataset(batches())]


def totals(strategy):
    return [
        {name: np.asarray(on_host(strategy.reduce("SUM", value, axis=None))) for name, value in step.items()}
        for step in steps(strategy)
    ]


def check_close(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5)


def test_run_gives_cupy_arrays_and_the_numbers_of_processors(cupy):
    strategy = MirroredStrategy(["GPU:0"])
    results = steps(strategy)
    assert all(isinstance(leaf, cupy.ndarray) for result in results for leaf in result.values())
    check_close(totals(strategy), totals(MirroredStrategy(["CPU:0"])))


def test_gpu_and_processor_are_replicas_of_one_strategy():
    check_close(totals(MirroredStrategy(["GPU:0", "CPU:0"])), totals(MirroredStrategy(["CPU:0", "CPU:1"])))


@needs_two
def test_two_gpus_are_replicas_of_one_strategy():
    check_close(totals(MirroredStrategy(["GPU:0", "GPU:1"])), totals(MirroredStrategy(["CPU:0", "CPU:1"])))


def test_all_gpus_are_replicas_if_none_is_named():
    names = [replica.device for replica in MirroredStrategy().replicas]
    assert names == [f"GPU:{k}" for k in range(CupyDevice.num_present())]


def test_a_distributed_dataset_gives_cupy_arrays_that_stay_as_they_are(cupy):
    kept = list(MirroredStrategy(["GPU:0"]).distribute_dataset(batches(5)))
    for part in kept:
        assert isinstance(part["x"], cupy.ndarray)
        assert isinstance(part["label"], cupy.ndarray)
        # Text stays on the host.
        assert isinstance(part["name"], np.ndarray)
    assert np.array_equal(np.concatenate([item["x"].get() for item in kept]), X)
    assert np.array_equal(np.concatenate([value["label"].get() for value in kept]), LABELS)


def test_a_variable_is_on_the_gpu(cupy):
    strategy = MirroredStrategy(["GPU:0"])
    with strategy.scope():
        weights = Variable(np.zeros(4, np.float32))

    def step(batch):
        assert isinstance(weights.read_value(), cupy.ndarray)
        weights.assign_add(batch["x"].sum(axis=0))

    for batch in strategy.distribute_dataset(batches()):
        strategy.run(step, args=(batch,))
    np.testing.assert_allclose(weights.numpy(), X.sum(axis=0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("option", [None, True])
def test_partitions_of_dask_stay_on_the_gpu(cupy, option, monkeypatch):
    da = pytest.importorskip("dask.array")
    rows = np.random.default_rng(0).random((4000, 8))
    put = partial(on_gpu, 0)
    there = da.from_array(rows, chunks=(500, 8)).map_blocks(put, dtype=rows.dtype, meta=put(np.empty((0, 0))))
    monkeypatch.setattr(DeviceColumn, "host", property(lambda self: pytest.fail("a column came to the host")))
    pipelines = [
        Dataset.from_dask(item).shuffle(1000, seed=1).batch(64) for item in (there, da.from_array(rows, (500, 8)))
    ]
    options = daskdist.Options(shuffle_on_device=option)
    actual = list(MirroredStrategy(["GPU:0"]).distribute_dataset(pipelines[0].with_options(options)))
    assert all(isinstance(value, cupy.ndarray) for value in actual)
    assert [result.get().tolist() for result in actual] == [pipeline.tolist() for pipeline in pipelines[1]]


def on_gpu(number, block):
    return CupyDevice(number).put(block)


def test_arrays_that_are_pinned_are_copied_from_directly(monkeypatch):
    monkeypatch.setattr(layout.PackedSpan, "pack", lambda self, memory: pytest.fail("rows were packed"))
    rows = np.random.default_rng(0).random((2**19, 16), np.float32)
    dataset = Dataset.from_tensor_slices(rows).batch(2**16)
    for _ in range(2):
        steps = MirroredStrategy(["GPU:0"]).distribute_dataset(dataset, daskdist.InputOptions(pin_arrays=True))
        assert np.array_equal(np.concatenate([on_host(step) for step in steps]), rows)
    assert CupyDevice(0).is_pinned(rows)


@needs_two
def test_replicas_on_gpus_begin_at_once():
    together = threading.Barrier(2, timeout=20)
    assert MirroredStrategy(["GPU:0", "GPU:1"]).run(lambda: together.wait() >= 0).values == (True, True)


# --- PyTorch on the same GPU ---


@pytest.fixture
def torch():
    actual = pytest.importorskip("torch")
    if not actual.cuda.is_available():
        pytest.skip("this PyTorch has no GPU")
    return actual


@pytest.mark.parametrize("index", [np.s_[::-1], np.s_[:, ::-2], np.s_[:, ::2], np.s_[3, ::-1]])
def test_torch_takes_arrays_of_any_layout(cupy, torch, index):
    there = CupyDevice(0).put(X)
    tensor = daskdist.to_torch(there[index])
    assert tensor.is_cuda
    assert np.array_equal(tensor.cpu().numpy(), X[index])
    assert daskdist.to_torch(there).data_ptr() == there.data.ptr


def test_memory_is_not_used_again_before_torch_is_done(cupy, torch):
    dataset = MirroredStrategy(["GPU:0"]).distribute_dataset(batches().repeat(50))
    stream, found = torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for batch in dataset:
            # Keep the stream busy, so that it reads the batch late.
            torch.cuda._sleep(2_000_000)
            found.append(daskdist.to_torch(batch["x"]).double().sum())
            del batch
        stream.synchronize()
    assert stream.cuda_stream in [consumer.stream.ptr for consumer in channel_of("GPU:0").consumers]
    total = sum(float(result) for result in found)
    assert total == pytest.approx(50 * X.astype(np.float64).sum(), rel=1e-6)


def test_losses_are_reduced_on_the_gpu(cupy, torch):
    strategy = MirroredStrategy(["GPU:0"])

    def step(batch):
        weights = torch.ones(X.shape[1], device="cuda", requires_grad=True)
        return daskdist.to_torch(batch["x"]) @ weights

    actual = []
    for batch in strategy.distribute_dataset(batches()):
        given = strategy.run(step, args=(batch,))
        total = strategy.reduce("SUM", given, axis=0)
        assert isinstance(total, cupy.ndarray)
        # The value of a single replica is gathered already.
        assert strategy.gather(given, axis=0) is given
        actual.append(float(total))
    assert sum(actual) == pytest.approx(X.sum(dtype=np.float64), rel=1e-4)


def test_torch_captures_a_graph_in_the_middle_of_an_epoch(cupy, torch):
    rows = np.random.default_rng(0).random((2**14, 64)).astype(np.float32)
    steps = iter(MirroredStrategy(["GPU:0"]).distribute_dataset(Dataset.from_tensor_slices(rows).batch(128)))
    static = daskdist.to_torch(next(steps)).clone()
    graph, found = None, []
    torch.cuda.synchronize()
    for number, batch in enumerate(steps, 1):
        static.copy_(daskdist.to_torch(batch))
        if number % 40 == 1:
            # This captures in the strictest mode, which is the default.
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                total = static.double().sum()
        graph.replay()
        found.append(float(total))
    expected = rows.reshape(-1, 128 * 64).sum(axis=1, dtype=np.float64)
    np.testing.assert_allclose(found, expected[1:], rtol=1e-6)


FIRST_IN_A_STEP = """
import sys
import numpy as np
import daskdist

def step(x):
    import torch
    torch.cuda.init()
    torch.cuda._sleep(200_000_000)
    return daskdist.to_torch(x) * 2

strategy = daskdist.MirroredStrategy(["GPU:0"])
assert "torch" not in sys.modules
print(strategy.reduce("SUM", strategy.run(step, args=(np.ones(4, np.float32),)), axis=0))
"""


def test_a_step_may_be_the_first_to_import_torch(torch):
    done = subprocess.run([sys.executable, "-c", FIRST_IN_A_STEP], capture_output=True, text=True, timeout=120)
    assert done.stdout == "8.0\n", done.stderr


@pytest.mark.cluster
def test_values_leave_a_worker_as_numpy_arrays(start_cluster):
    client = start_cluster(1, 1)
    expected = totals(MirroredStrategy(["CPU:0"]))
    with MultiWorkerMirroredStrategy(client, DeviceAssignment([("0", "GPU:0")])) as strategy:
        on_gpu = strategy.run(lambda: type(np.asarray(0)).__name__)
        assert str(on_gpu) == "ndarray"
        check_close(totals(strategy), expected)
    with MultiWorkerMirroredStrategy(client) as strategy:
        assert [replica.device for replica in strategy.replicas] == [
            f"GPU:{k}" for k in range(CupyDevice.num_present())
        ]


def sum_of_gpus():
    context = daskdist.get_replica_context()
    number = context.replica_id_in_sync_group
    array = CupyDevice(int(context.devices[0].rpartition(":")[2])).put(np.full(2**20, number + 1.5, np.float32))
    total = context.all_reduce("SUM", array)
    return device_of(total) == device_of(array), set(on_host(total).tolist())


def failures_of_links(dask_worker):
    return [links._has_failed for links in mailbox_of(dask_worker).device_links.values()]


@needs_two
@pytest.mark.cluster
def test_workers_are_connected_by_nccl(start_cluster):
    if nccl._library() is None:
        pytest.skip("CuPy finds no NCCL")
    client = start_cluster(2, 1)
    client.run(dask.config.set, {"daskdist.nccl": True})
    first, second = workers_of(client)
    with MultiWorkerMirroredStrategy(client, DeviceAssignment([(first, "GPU:0"), (second, "GPU:1")])) as strategy:
        for _ in range(3):
            assert list(strategy.local_results(strategy.run(sum_of_gpus))) == [(True, {4.0})] * 2
        assert list(client.run(failures_of_links).values()) == [[False], [False]]


@pytest.mark.cluster
def test_gpus_of_a_worker_are_listed(start_cluster):
    here = [entry for entry in daskdist.list_devices() if entry.name != "CPU:0"]
    there = [device for device in daskdist.list_devices(start_cluster(1, 1)) if device.name != "CPU:0"]
    assert [(part.name, part.uuid) for part in there] == [(value.name, value.uuid) for value in here]
    assert all(item.total_bytes > 0 and item.free_bytes <= item.total_bytes for item in (*here, *there))
