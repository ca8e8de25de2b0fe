"""Devices: laws of the kinds that exist everywhere, messages for unusable ones, and their assignment to replicas."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import dask
import numpy as np
import pytest
from conftest import TESTS
from strict_device import StrictDevice, StrictStream

import daskdist
from daskdist import Dataset, DeviceAssignment, MirroredStrategy, MultiWorkerMirroredStrategy
from daskdist.core.selection.permutation import Permutation
from daskdist.devices import cuda_streams, nccl, nvidia, present
from daskdist.devices import cupy as cupy_device
from daskdist.devices.cpu import CpuDevice
from daskdist.devices.cupy import CupyDevice
from daskdist.errors import ArgumentError, UnknownDeviceError
from daskdist.strategy.placement.assign_devices import VisibleDevices, assign_devices
from daskdist.strategy.placement.replicas_per_worker import Worker
from daskdist.testing import DeviceLaws


class TestCpu(DeviceLaws):
    def make_device(self):
        return CpuDevice(0)


@pytest.mark.usefixtures("strict")
class TestStrict(DeviceLaws):
    def make_device(self):
        return StrictDevice(1)


@pytest.mark.usefixtures("strict")
class TestStrictAndLate(DeviceLaws):
    @pytest.fixture(autouse=True)
    def _late(self, monkeypatch):
        monkeypatch.setattr(StrictStream, "delay_s", 0.02)

    def make_device(self):
        return StrictDevice(0)


@pytest.mark.usefixtures("strict")
def test_a_wrong_device_breaks_a_law():
    class Early(StrictDevice):
        """A wrong device, which changes the first byte after each copy."""

        def copy(self, source, target, stream):
            super().copy(source, target, stream)
            stream.give(lambda: target._array.__setitem__(0, target._array[0] ^ 1))

    class Broken(DeviceLaws):
        def make_device(self):
            return Early(0)

    with pytest.raises(AssertionError, match="another stream waited and found other ones"):
        Broken().test_copies_are_complete_after_waiting()


# --- messages if CuPy cannot be used ---


class CUDARuntimeError(RuntimeError):
    pass


def cupy_that(count, *, built_for=13020, is_hip=False, compiler=(13, 2)):
    def get_device_count():
        if isinstance(count, str):
            raise CUDARuntimeError(count)
        return count

    def get_version():
        if isinstance(compiler, Exception):
            raise compiler
        return compiler

    runtime = SimpleNamespace(
        getDeviceCount=get_device_count,
        runtimeGetVersion=lambda: built_for,
        is_hip=is_hip,
        CUDARuntimeError=CUDARuntimeError,
    )
    nvrtc = SimpleNamespace(getVersion=get_version)
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, nvrtc=nvrtc), __version__="14.2.0")


@pytest.fixture
def with_cupy(monkeypatch):
    """Return a function that replaces CuPy (None: it is not installed) and sets the driver's CUDA version."""

    def use(cupy, speaks=0):
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(nvidia, "driver_version", lambda: speaks)
        forget()

    def forget():
        for cached in (cupy_device._present, cupy_device._no_compiler, cuda_streams.cupy_module):
            cached.cache_clear()

    yield use
    forget()


NO_DRIVER = "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version"
CASES = {
    "not installed": (None, 0, ["CuPy is not installed", r"daskdist\[cuda13\]", r"daskdist\[cuda12\]"]),
    "not installed, driver of 12": (None, 12040, [r"CuPy is not installed; pip install 'daskdist\[cuda12\]'\. For "]),
    "no driver": (
        cupy_that(NO_DRIVER),
        0,
        ["CuPy 14.2.0 is installed", "no NVIDIA driver is installed", NO_DRIVER, "nvidia-smi"],
    ),
    "older driver": (
        cupy_that(NO_DRIVER),
        12080,
        ["built for CUDA 13.2, but the driver supports CUDA 12.8", r"'daskdist\[cuda12\]' in place of this CuPy"],
    ),
    "no GPU": (cupy_that("cudaErrorNoDevice"), 13000, ["it finds no GPU", "cudaErrorNoDevice", r"daskdist\[cuda13\]"]),
    "none is visible": (cupy_that(0), 13000, ["it finds no GPU", "CUDA_VISIBLE_DEVICES is ''"]),
    "no GPU of AMD's": (cupy_that("hipErrorNoDevice", is_hip=True), 0, ["for ROCm, but no GPU is visible", "rocm-smi"]),
    "one": (cupy_that(1), 13000, ["sees only GPU:0, as CUDA_VISIBLE_DEVICES= has it"]),
    "two": (cupy_that(2), 13000, ["this process sees 2, GPU:0 to GPU:1"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_missing_gpu_is_an_error_with_the_reason(case, with_cupy, monkeypatch):
    cupy, speaks, said = CASES[case]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with_cupy(cupy, speaks)
    for words in said:
        with pytest.raises(UnknownDeviceError, match=f"^'GPU:7' cannot be used here: .*{words}"):
            MirroredStrategy(["CPU:0", "GPU:7"])
    assert len(present()) == CupyDevice.num_present() == (cupy_device._present()[0])


def test_cpus_stand_in_for_missing_gpus_if_a_setting_says_so(with_cupy, caplog):
    with_cupy(cupy_that("cudaErrorNoDevice"), 13000)
    with pytest.raises(UnknownDeviceError, match=r"write \['CPU:0', 'CPU:1'\], or set daskdist.devices.cpu-stand-in"):
        MirroredStrategy(["GPU:0", "GPU:1"])
    assert "cannot be used" not in caplog.text
    with dask.config.set({"daskdist.devices.cpu-stand-in": True}):
        strategy = MirroredStrategy(["GPU:1", "CPU:0", "/gpu:0"])
        assert [replica.device for replica in strategy.replicas] == ["CPU:1", "CPU:0", "CPU:2"]
        assert "GPU:1, GPU:0 cannot be used here; the replicas are on CPU:1, CPU:0, CPU:2" in caplog.text
        (step,) = strategy.distribute_dataset(Dataset.range(6).batch(6))
        assert [part.tolist() for part in strategy.local_results(step)] == [[0, 1], [2, 3], [4, 5]]
        with pytest.raises(UnknownDeviceError, match="are one device"):
            MirroredStrategy(["GPU:0", "/gpu:0"])


NO_COMPILER = 'Failure finding "libnvrtc.so.13": No such file:\n libnvrtc.so.13'


@pytest.mark.parametrize("kind", [RuntimeError, ImportError])
@pytest.mark.parametrize("cuda", [12, 13])
def test_a_cupy_that_compiles_nothing_is_told(kind, cuda, with_cupy):
    with_cupy(cupy_that(1, built_for=1000 * cuda + 80, compiler=kind(NO_COMPILER)), 13000)
    said = (
        rf"^'GPU:0' cannot be used here: CuPy 14.2.0 is installed, built for CUDA {cuda}.8, .* NVRTC, is missing "
        rf'\(Failure finding "libnvrtc.so.13": No such file: libnvrtc.so.13\); pip install .daskdist\[cuda{cuda}\]'
    )
    # Even if no device is named, processors are not used instead.
    for names in (["GPU:0"], None):
        with pytest.raises(UnknownDeviceError, match=said):
            MirroredStrategy(names)


def test_a_cupy_that_compiles_is_asked_once(with_cupy):
    asked = []
    cupy = cupy_that(2)
    cupy.cuda.nvrtc.getVersion = lambda: asked.append(1)
    with_cupy(cupy, 13000)
    assert [CupyDevice(index).missing() for index in (0, 1, 0)] == [None] * 3
    assert asked == [1]
    # AMD's compiler is a part of its driver, so it is not asked.
    with_cupy(cupy_that(1, is_hip=True, compiler=RuntimeError("no")))
    assert CupyDevice(0).missing() is None


@pytest.mark.parametrize(("value", "is_refused"), [("1", True), ("0", False), ("", False)])
def test_default_streams_of_threads_are_refused(value, is_refused, with_cupy, monkeypatch):
    with_cupy(cupy_that(1), 13000)
    monkeypatch.setenv("CUPY_CUDA_PER_THREAD_DEFAULT_STREAM", value)
    why = CupyDevice(0).missing()
    assert (why is not None) == is_refused
    if is_refused:
        assert "CUPY_CUDA_PER_THREAD_DEFAULT_STREAM is set" in why


@pytest.mark.parametrize("resource", ["PoolMemoryResource", "CudaMemoryResource"])
@pytest.mark.parametrize("is_chosen", [False, True])
def test_the_pool_of_rmm_is_shared(resource, is_chosen, with_cupy, monkeypatch):
    # The real RMM and CuPy would need a GPU.
    chosen = []

    class Pool:
        def malloc(self, num_bytes):
            raise AssertionError

        def free_all_blocks(self):
            pass

    pool = Pool()
    cupy = cupy_that(1)
    cupy.get_default_memory_pool = lambda: pool
    cupy.cuda.get_allocator = lambda: (lambda num_bytes: None) if is_chosen else pool.malloc
    cupy.cuda.set_allocator = chosen.append
    rmm = SimpleNamespace(mr=SimpleNamespace(get_current_device_resource=type(resource, (), {})))
    monkeypatch.setitem(sys.modules, "rmm", rmm)
    monkeypatch.setitem(sys.modules, "rmm.allocators", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "rmm.allocators.cupy", SimpleNamespace(rmm_cupy_allocator="the pool of RMM"))
    with_cupy(cupy, 13000)
    assert CupyDevice(0).missing() is None
    assert chosen == (["the pool of RMM"] if resource == "PoolMemoryResource" and not is_chosen else [])


def test_a_gpu_can_be_named_in_a_process_without_gpus(with_cupy):
    with_cupy(None)
    assert DeviceAssignment([("0", "GPU:3")]).replicas == (("0", "GPU:3"),)
    assert MirroredStrategy().replicas[0].device == "CPU:0"


def test_a_failed_import_is_reported(monkeypatch, with_cupy, tmp_path):
    (tmp_path / "cupy.py").write_text("raise ImportError('libcudart.so is\\n not to be found')")
    with_cupy(None)
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownDeviceError, match=r"CuPy cannot be imported \(libcudart.so is not to be found\); pip"):
        MirroredStrategy(["GPU:0"])


def test_cupy_is_not_imported_without_a_driver(monkeypatch, with_cupy, tmp_path):
    (tmp_path / "cupy.py").write_text("raise SystemError('imported')")
    with_cupy(None)
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cupy_device, "_OF_AMD", str(tmp_path / "kfd"))
    assert MirroredStrategy().replicas[0].device == "CPU:0"
    assert [value.name for value in daskdist.list_devices()] == ["CPU:0"]
    # If AMD's driver exists, there may be a GPU, so CuPy is imported.
    (tmp_path / "kfd").touch()
    with pytest.raises(SystemError, match="imported"):
        MirroredStrategy()


NOT_NEEDED = ["array_api_strict", "hypothesis", "matplotlib", "pandas", "pyarrow", "pytest_timeout", "xarray", "xdist"]


def test_tests_of_gpus_are_found_with_little_installed(tmp_path):
    (tmp_path / "with_little.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({NOT_NEEDED}))\n")
    root = TESTS.parent
    within = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "with_little", "-m", "gpu", "--collect-only", "-q", "tests"],
        cwd=root,
        env={**os.environ, **within},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/test_gpu.py::TestCupy::test_get_returns_what_was_put" in done.stdout
    assert "error" not in done.stdout


COMPILER = shutil.which("cc") or shutil.which("gcc")


@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_the_kernel_of_permutations_is_right_when_compiled_for_the_cpu(tmp_path):
    # Compile the kernel's text as a loop in C, as there is no GPU to run it.
    kinds = {"int64": "long long", "int32": "int", "uint32": "unsigned int"}
    args = ", ".join(f"{kinds[kind]} {name}" for kind, name in map(str.split, cupy_device.PERMUTED_ARGS.split(",")))
    (tmp_path / "kernel.c").write_text(
        f"#define __device__ static\n{cupy_device.PERMUTED_BEFORE}\n"
        f"void run({args}, long long *all, long long num) {{\n"
        f"for (long long i = 0; i < num; i++) {{ long long found; {cupy_device.PERMUTED} all[i] = found; }} }}\n"
    )
    subprocess.run([COMPILER, "-O1", "-shared", "-fPIC", "kernel.c", "-o", "kernel.so"], cwd=tmp_path, check=True)
    run = ctypes.CDLL(str(tmp_path / "kernel.so")).run
    for length in (2**18 + 1, 2**20, 10**6 + 3, 2**33 + 12345, 2**62):
        order = Permutation(length, np.random.default_rng(length), 0)
        for start in (0, length // 3, length - 1000):
            actual = np.empty(1000, np.int64)
            run(
                ctypes.c_longlong(start),
                ctypes.c_longlong(length),
                ctypes.c_int(order.low_bits),
                *map(ctypes.c_uint, [order.num_high, *order.keys.tolist()]),
                ctypes.c_void_p(actual.ctypes.data),
                ctypes.c_longlong(1000),
            )
            assert np.array_equal(actual, order.between(start, start + 1000))


@pytest.mark.parametrize("how", ["MIN", "MAX"])
def test_nccl_does_not_compute_minima_of_floats(how, monkeypatch):
    # NCCL's minimum and maximum would ignore NaN.
    asked = []
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setattr(nccl, "_library", lambda: asked.append(how))
    for dtype, is_asked in [("float16", False), ("float32", False), ("float64", False), ("int32", True)]:
        asked.clear()
        arrays = [
            SimpleNamespace(nbytes=2**24, dtype=np.dtype(dtype), device=SimpleNamespace(id=number))
            for number in range(2)
        ]
        assert nccl.combined(how, arrays) is None
        assert bool(asked) == is_asked, dtype


def test_what_the_driver_does_not_tell(monkeypatch):
    monkeypatch.setattr(nvidia, "_library", lambda name: None)
    assert nvidia.driver_version() == 0
    assert nvidia.uuid_of(0) is None
    assert nvidia.memory_of("GPU-1") is None
    # If the driver cannot be asked, a GPU counts as in use, so that CuPy may be asked.
    assert nvidia.is_in_use(0)


# --- the assignment of the devices that workers see ---


def seeing(*uuids, host="a", has_first=False):
    return VisibleDevices(host, tuple(f"GPU:{k}" for k in range(len(uuids))), uuids, has_first)


NONE = VisibleDevices("a")
FOUR = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
TURNED = [seeing(*FOUR[k:], *FOUR[:k]) for k in range(4)]
BOTH = seeing("GPU-a", "GPU-b")
DEALT = {
    "nobody sees one": ([NONE, NONE], None, [["CPU:0"], ["CPU:0"]]),
    "nobody sees one, two each": ([NONE, NONE], 2, [["CPU:0", "CPU:1"]] * 2),
    "one sees two": ([BOTH], None, [["GPU:0", "GPU:1"]]),
    "one sees two, one wanted": ([BOTH], 1, [["GPU:0"]]),
    "one sees some, the other none": ([BOTH, NONE], None, [["GPU:0", "GPU:1"], ["CPU:0"]]),
    "one sees some, the other none, one wanted": ([NONE, BOTH], 1, [["CPU:0"], ["GPU:0"]]),
    "each has its own": ([seeing("GPU-a"), seeing("GPU-b")], None, [["GPU:0"]] * 2),
    "two hosts of two": ([BOTH, seeing("GPU-c", "GPU-d", host="b")], None, [["GPU:0", "GPU:1"]] * 2),
    "two see the same two": ([BOTH, BOTH], None, [["GPU:0"], ["GPU:1"]]),
    "two see the same two, one wanted": ([BOTH, BOTH], 1, [["GPU:0"], ["GPU:1"]]),
    "two see the same four": ([seeing(*FOUR)] * 2, None, [["GPU:0", "GPU:2"], ["GPU:1", "GPU:3"]]),
    "two see the same four, one wanted": ([seeing(*FOUR)] * 2, 1, [["GPU:0"], ["GPU:1"]]),
    "two see the same four, two wanted": ([seeing(*FOUR)] * 2, 2, [["GPU:0", "GPU:2"], ["GPU:1", "GPU:3"]]),
    "numbers of their own": ([seeing(*FOUR)] * 3, [1, 0, 3], [["GPU:0"], [], ["GPU:1", "GPU:2", "GPU:3"]]),
    "two see three": ([seeing(*FOUR[:3])] * 2, None, [["GPU:0", "GPU:2"], ["GPU:1"]]),
    "one gives way": ([BOTH, seeing("GPU-a")], 1, [["GPU:1"], ["GPU:0"]]),
    "one gives way to who gives way": (
        [BOTH, seeing("GPU-b", "GPU-c"), seeing("GPU-a")],
        None,
        [["GPU:1"], ["GPU:1"], ["GPU:0"]],
    ),
    "dask-cuda": (TURNED, None, [["GPU:0"]] * 4),
    "dask-cuda, one wanted": (TURNED, 1, [["GPU:0"]] * 4),
    "dask-cuda of two of four": (TURNED[:2], None, [["GPU:0"]] * 2),
    "dask-cuda of two of four, two wanted": (TURNED[:2], 2, [["GPU:0", "GPU:2"], ["GPU:0", "GPU:2"]]),
    "dask-cuda of one of four": ([seeing(*FOUR, has_first=True)], None, [["GPU:0"]]),
    "dask-cuda in another order": ([TURNED[2], TURNED[0], TURNED[3]], None, [["GPU:0"]] * 3),
    "dask-cuda on two hosts": (
        [*TURNED[:2], seeing("GPU-e", "GPU-f", host="b"), seeing("GPU-f", "GPU-e", host="b")],
        None,
        [["GPU:0"]] * 4,
    ),
}


def workers_of(visible_devices):
    return [Worker(f"tcp://{visible.host}:{number}", str(number)) for number, visible in enumerate(visible_devices)]


def counts(wanted, visible_devices):
    return wanted if isinstance(wanted, list) else [wanted] * len(visible_devices)


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("case", DEALT)
def test_visible_devices_are_assigned_to_replicas(case, share):
    visible_devices, wanted, expected = DEALT[case]
    actual = assign_devices(workers_of(visible_devices), visible_devices, counts(wanted, visible_devices), share)
    assert actual == list(map(tuple, expected))


def test_no_device_is_dealt_twice():
    rng = np.random.default_rng(3)
    for _ in range(300):
        uuids = [f"GPU-{k}" for k in range(6)]
        visible_devices = [seeing(*rng.permutation(uuids)[: rng.integers(0, 5)]) for _ in range(rng.integers(1, 5))]
        wanted = [
            None if rng.random() < 0.5 else int(rng.integers(0, max(2, len(device.names))))
            for device in visible_devices
        ]
        try:
            actual = assign_devices(workers_of(visible_devices), visible_devices, wanted)
        except ArgumentError:
            # With sharing, there is an assignment.
            actual = assign_devices(workers_of(visible_devices), visible_devices, wanted, True)
            assert len(set(_uuids(visible_devices, actual))) < len(_uuids(visible_devices, actual))
        else:
            assert len(set(_uuids(visible_devices, actual))) == len(_uuids(visible_devices, actual))
        for visible, own, count in zip(visible_devices, actual, wanted, strict=True):
            assert len(own) == count or (count is None and len(own) >= 1)
            assert len(set(own)) == len(own)
            assert set(own) <= set(visible.names or own)


def _uuids(visible_devices, found):
    return [
        s.uuids[s.names.index(name)] for s, own in zip(visible_devices, found, strict=True) for name in own if s.names
    ]


REFUSED = {
    "three see two": (
        [BOTH] * 3,
        None,
        r"workers 0, 1, 2 on a should have 3 devices, and see 2 of kind GPU between them \(GPU-a, GPU-b\); start one "
        r"worker per device, .*share_devices=True",
    ),
    "two see two, two wanted": ([BOTH] * 2, 2, "workers 0, 1 on a should have 4 devices, and see 2"),
    "dask-cuda, two wanted": (TURNED, 2, "workers 0, 1, 2, 3 on a should have 8 devices, and see 4"),
    "more than it sees": (
        [NONE, BOTH],
        3,
        "worker '1' should have 3 replicas and sees GPU:0, GPU:1; give num_replicas_per_worker 2 or less",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_too_few_devices_are_told(case):
    visible_devices, wanted, said = REFUSED[case]
    with pytest.raises(ArgumentError, match=said):
        assign_devices(workers_of(visible_devices), visible_devices, counts(wanted, visible_devices))


SHARED = {
    "four see one": ([seeing("GPU-a")] * 4, None, [["GPU:0"]] * 4),
    "four see two": ([BOTH] * 4, None, [["GPU:0"], ["GPU:1"], ["GPU:0"], ["GPU:1"]]),
    "two see two, two wanted": ([BOTH] * 2, 2, [["GPU:0", "GPU:1"]] * 2),
}


@pytest.mark.parametrize("case", SHARED)
def test_devices_are_shared(case):
    visible_devices, wanted, expected = SHARED[case]
    assert assign_devices(workers_of(visible_devices), visible_devices, counts(wanted, visible_devices), True) == list(
        map(tuple, expected)
    )


def test_more_replicas_than_visible_devices_are_refused_even_if_shared():
    with pytest.raises(ArgumentError, match="should have 3 replicas and sees GPU:0, GPU:1"):
        assign_devices(workers_of([BOTH]), [BOTH], [3], True)


def test_share_devices_is_true_or_false():
    with pytest.raises(ArgumentError, match="share_devices is 1; give True or False"):
        MultiWorkerMirroredStrategy("", share_devices=1)


def test_a_number_of_devices_is_not_their_names():
    with pytest.raises(UnknownDeviceError, match=r"devices is 2; give their names, such as \['CPU:0', 'CPU:1'\]"):
        daskdist.MirroredStrategy(2)
