"""Arrays converted for PyTorch and JAX, and training by PyTorch, JAX and Keras with datasets.

Keras has one backend in a process: the one that ``KERAS_BACKEND`` names, or JAX.
"""

from __future__ import annotations

import collections
import os
import pickle
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import mirrored
from distributed import Security

import daskdist
from daskdist import Dataset, PerReplica, Ragged, devices
from daskdist.errors import ArgumentError, MissingPackageError, UnknownLengthError, UserFunctionError

# Keras itself causes this warning for tensors of PyTorch.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

README = Path(__file__).parents[2] / "README.md"
ROWS = 240
WEIGHTS = np.array([1.0, -2.0, 0.5], np.float32)

each_number = pytest.mark.parametrize("dtype", [np.dtype(letter).name for letter in "?bBhHiIlLefdFD"])

Point = collections.namedtuple("Point", ["x", "y"])


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax", reason="JAX is not installed")


@pytest.fixture
def keras() -> Any:
    backend = os.environ.setdefault("KERAS_BACKEND", "jax")
    pytest.importorskip(backend, reason=f"Keras' backend {backend} is not installed")
    return pytest.importorskip("keras", reason="Keras is not installed")


@pytest.fixture(params=["to_torch", "to_jax"])
def convert(request: pytest.FixtureRequest) -> Any:
    """Return each of the two functions in turn."""
    name = request.param.removeprefix("to_")
    pytest.importorskip(name, reason=f"{name} is not installed")
    return getattr(daskdist, request.param)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Register a device whose arrays are no NumPy arrays."""
    pytest.importorskip("array_api_strict", reason="array_api_strict is not installed")
    monkeypatch.setitem(devices.KINDS, "STRICT", ("strict_device:StrictDevice", "array_api_strict"))
    return devices.device("STRICT:0")


@pytest.fixture
def no_copies(strict: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if an array is copied from a device to the host."""

    def refused(self: Any, array: Any) -> Any:
        raise AssertionError(f"an array of {array.shape} is copied to the host")

    monkeypatch.setattr(type(strict), "get", refused)


def read_only(array: Any) -> Any:
    """Return a read-only view, as chunks are."""
    view = array.view()
    view.flags.writeable = False
    return view


def aligned(num_items: int, dtype: Any, offset_bytes: int = 0) -> Any:
    """Return an array of ones whose address is a number of bytes after a multiple of 64."""
    num_bytes = num_items * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset_bytes
    array = memory[start : start + num_bytes].view(dtype)
    array[...] = 1
    return array


def line(dtype: Any = np.float32) -> Dataset:
    """Return points of a line, in batches of 60."""
    x = np.random.default_rng(3).normal(size=(ROWS, 3)).astype(dtype)
    return Dataset.from_tensor_slices((x, (x @ WEIGHTS)[:, None])).shuffle(ROWS, seed=5).batch(60)


# --- arrays as tensors ---


@each_number
def test_torch_shares_memory_that_can_be_written_into_and_copies_other(torch, dtype):
    table = np.arange(12).astype(dtype).reshape(6, 2)
    for rows, is_shared in ((table[2:5], True), (read_only(table.copy())[2:5], False)):
        tensor = daskdist.to_torch(rows)
        assert (tensor.data_ptr() == rows.ctypes.data) == is_shared
        assert str(tensor.dtype) == f"torch.{dtype}"
        assert tensor.tolist() == rows.tolist()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_torch_shares_numbers_that_numpy_has_not(torch, name):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    array = np.array([[0.5, 1.0], [2.0, -4.0]], getattr(ml_dtypes, name))
    tensor = daskdist.to_torch(array)
    assert tensor.dtype == getattr(torch, name)
    assert tensor.data_ptr() == array.ctypes.data
    assert tensor.float().tolist() == [[0.5, 1.0], [2.0, -4.0]]


TABLE = np.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "array",
    [TABLE.T, TABLE[1:, ::2], np.array(3.0), TABLE.reshape(2, 2, 6)[:, 1]],
    ids=["transposed", "every-second", "scalar", "slice"],
)
def test_torch_shares_memory_of_any_layout(torch, array):
    tensor = daskdist.to_torch(array)
    assert tensor.data_ptr() == array.ctypes.data
    assert tensor.tolist() == array.tolist()


# PyTorch would end the process for the first two.
@pytest.mark.parametrize(
    "array",
    [
        TABLE[::-1],
        TABLE[:, ::-2],
        TABLE.astype(">f8"),
        np.array([(1, 2.0), (3, 4.0)], [("a", "i1"), ("b", "f4")])["b"],
        np.float64(3),
        TABLE[:0],
        np.broadcast_to(TABLE[0], (3, 6)),
    ],
    ids=["backwards", "backwards-inside", "other-byte-order", "field", "numpy-scalar", "empty", "repeated"],
)
def test_what_cannot_be_shared_is_copied(convert, array):
    converted = convert(array)
    assert converted.shape == np.shape(array)
    assert converted.tolist() == array.tolist()


def test_gathered_chunks_are_shared(torch):
    chunks = list(Dataset.from_tensor_slices(TABLE).shuffle(4, seed=1).batch(2))
    tensors = [daskdist.to_torch(chunk) for chunk in chunks]
    assert [tensor.data_ptr() for tensor in tensors] == [chunk.ctypes.data for chunk in chunks]


@pytest.mark.parametrize(
    "build",
    [
        lambda source: Dataset.from_tensor_slices(source).batch(2),
        lambda source: Dataset.from_tensor_slices(source).shuffle(4, 1, reshuffle_each_iteration=False).batch(2),
        lambda source: Dataset.from_tensors(source),
        lambda source: Dataset.from_tensor_slices(source).batch(2).map(lambda batch: batch + 1).cache(),
        lambda source: Dataset.from_tensor_slices(source).batch(2).map(lambda batch: batch + 1).persist(),
        lambda source: Dataset.range(2).batch(2).map(lambda batch: source),
    ],
    ids=["source", "shuffled", "element", "cached", "persisted", "mapped"],
)
def test_torch_gets_its_own_writable_arrays(torch, build):
    source = TABLE.copy()
    ds = build(source)
    strategy = daskdist.MirroredStrategy(["CPU:0"])
    for look in (list, daskdist.torch_loader, strategy.distribute_dataset):
        expected = [daskdist.to_torch(batch).tolist() for batch in look(ds)]
        for batch in look(ds):
            daskdist.to_torch(batch).mul_(100)
        assert [daskdist.to_torch(batch).tolist() for batch in look(ds)] == expected
    assert np.array_equal(source, TABLE)


def test_tensors_keep_the_memory(convert):
    converted = convert(read_only(np.full(1000, 7.0, np.float32)))
    others = [np.zeros(1000, np.float32) for _ in range(50)]
    assert len(others) == 50
    assert converted.tolist() == [7.0] * 1000


def test_nests_keep_their_structure(convert):
    nest = {"p": Point(np.ones(2, np.float32), [1, 2.5]), "none": None, "each": PerReplica([np.int32([1]), (True, 2)])}
    made = convert(nest)
    assert type(made["p"]) is Point
    assert made["none"] is None
    assert [str(leaf.dtype).removeprefix("torch.") for leaf in made["p"].y] == ["int32", "float32"]
    assert [leaf.tolist() for leaf in (made["p"].x, *made["p"].y)] == [[1.0, 1.0], 1, 2.5]
    first, (second, third) = made["each"].values
    assert [leaf.tolist() for leaf in (first, second, third)] == [[1], True, 2]


def test_converted_values_are_kept(convert):
    once = convert({"x": np.ones(3, np.float32)})
    assert convert(once)["x"] is once["x"]


def test_frameworks_take_from_each_other(torch, jax):
    tensor = daskdist.to_torch(jax.numpy.arange(3))
    assert tensor.tolist() == [0, 1, 2]
    assert daskdist.to_jax(tensor).tolist() == [0, 1, 2]


# --- arrays of devices ---


def address_of(array: Any) -> int:
    return np.from_dlpack(array).ctypes.data


@pytest.mark.parametrize("index", [0, 1])
def test_arrays_of_devices_are_shared(torch, strict, no_copies, index):
    there = devices.device(f"STRICT:{index}").put(TABLE)
    tensors = [daskdist.to_torch(item) for item in (there, there.T, there[:, ::2], there[1:2, 3:])]
    assert [tensor.data_ptr() - address_of(there) for tensor in tensors] == [0, 0, 0, 9 * 8]
    assert tensors[2].tolist() == TABLE[:, ::2].tolist()


@pytest.mark.parametrize(
    "index",
    [np.s_[::-1, :], np.s_[:, ::-2], np.s_[:, ::2], np.s_[::-1, 1:3], np.s_[:0, ::-1], np.s_[2, ::-1]],
    ids=["backwards", "backwards-inside", "gaps", "backwards-with-gaps", "empty", "row-backwards"],
)
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_arrays_of_devices_of_any_layout(convert, strict, no_copies, index, dtype):
    table = TABLE.astype(dtype)
    made = convert({"x": strict.put(table)[index]})["x"]
    assert made.tolist() == table[index].tolist()


def test_tensors_keep_the_memory_of_devices(convert, strict, no_copies):
    converted = convert(strict.put(np.full(1000, 7.0, np.float32)))
    others = [strict.put(np.zeros(1000, np.float32)) for _ in range(50)]
    assert len(others) == 50
    assert converted.tolist() == [7.0] * 1000


@pytest.mark.parametrize(("dtype", "value"), [("int64", 2**31), ("int64", -(2**31) - 1), ("uint64", 2**32)])
def test_jax_loses_no_numbers_of_devices_in_silence(jax, strict, no_copies, dtype, value):
    there = strict.put(np.array([[1, 2], [value, 3]], dtype))
    with pytest.raises(
        ArgumentError, match=rf"leaf \['id'\] has numbers that do not fit in u?int32, .* converts {dtype}: set"
    ):
        daskdist.to_jax({"id": there})
    assert daskdist.to_jax(there[0, ::-1]).tolist() == [2, 1]
    assert daskdist.to_jax(there[:0, :]).shape == (0, 2)
    jax.config.update("jax_enable_x64", True)
    try:
        assert daskdist.to_jax(there).tolist() == [[1, 2], [value, 3]]
    finally:
        jax.config.update("jax_enable_x64", False)


def test_jax_makes_32_bits_of_floats_of_devices(jax, strict, no_copies):
    for dtype in ("float64", "complex128"):
        assert daskdist.to_jax(strict.put(np.ones(3, dtype))).dtype.name == NARROWED[dtype]


def test_jax_takes_tensors_of_any_layout(torch, jax):
    table = torch.arange(24).reshape(4, 6)
    assert daskdist.to_jax(table[:, ::2]).tolist() == table[:, ::2].tolist()
    assert daskdist.to_jax(table[0].expand(2, 6)).tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    for dtype in (torch.int64, torch.uint64):
        with pytest.raises(ArgumentError, match=r"leaf \[0\] has numbers that do not fit in u?int32"):
            daskdist.to_jax([torch.tensor([2**40], dtype=dtype)])


def test_tensors_that_are_not_shared_are_named(torch, jax):
    with pytest.raises(ArgumentError, match=r"^to_jax: leaf \['y'\] is of type Tensor, which JAX .*use tensor.detach"):
        daskdist.to_jax({"x": torch.ones(2), "y": torch.ones(2, requires_grad=True)})
    with pytest.raises(ArgumentError, match=r"which JAX does not accept: .* other than torch\.strided"):
        daskdist.to_jax(torch.eye(3).to_sparse())


WORDS = np.array(["a", "b"])
REFUSED = {
    "text": ({"x": (1, WORDS)}, r"leaf \['x'\]\[1\] is text \(<U1\): map it to numbers first"),
    "string": ("a", r"leaf \(the value\) is text \(StringDType\(\)\)"),
    "bytes": (
        {"x": b"a"},
        r"leaf \['x'\] has Python objects, as bytes are: map it to numbers first, such as np",
    ),
    "dates": ([np.array(["2024-02-29"], "M8[D]")], r"leaf \[0\] is datetime64\[D\]: .* such as x.astype\('int64'\)"),
    "structured": (np.zeros(2, "i4,f4"), "is of dtype .*'f0'.*: map it to numbers first"),
    "long": (np.longdouble(1), r"is float128: map it to x.astype\('float64'\)"),
    "ragged": (
        {"x": Ragged.of([WORDS])},
        r"leaf \['x'\] has rows of different lengths: use padded_batch, map it to",
    ),
    "dataset": (Dataset.range(3), "is a dataset: iterate over it"),
    "masked": (np.ma.array([1, 2]), r"is a masked array: map it to x.filled\(value\)"),
    "object": ({"x": print}, r"leaf \['x'\] is of type builtin_function_or_method, which is neither an array"),
    "huge": (2**70, r"cannot be converted: the number \d+ does not fit into 64 bits"),
    "replica": ({"x": PerReplica([1, WORDS])}, r"leaf \['x'\] of replica 1 is text"),
    "inside": ({"x": PerReplica([{"y": 1}, {"y": WORDS}])}, r"leaf \['x'\]\['y'\] is text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_are_not_numbers_are_refused(convert, case):
    value, message = REFUSED[case]
    with pytest.raises(ArgumentError, match=message) as caught:
        convert(value)
    assert str(caught.value).startswith(f"{convert.__name__}: leaf ")


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("to_torch", "torch", r"to_torch needs PyTorch: pip install 'daskdist\[torch\]'"),
        ("torch_loader", "torch", r"torch_loader needs PyTorch: pip install 'daskdist\[torch\]'"),
        ("to_jax", "jax", r"to_jax needs JAX: pip install 'daskdist\[jax\]'"),
        ("keras_data", "keras", r"keras_data needs Keras 3.7 or later: pip install 'daskdist\[keras\]'"),
    ],
)
def test_missing_libraries_are_named(monkeypatch, name, missing, message):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingPackageError, match=message):
        getattr(daskdist, name)(Dataset.range(3).batch(2))


@pytest.mark.cluster
def test_asynchronous_values_are_waited_for(convert, on_cluster):
    for batch in on_cluster.distribute_dataset(Dataset.range(6).batch(6)):
        result = on_cluster.run(lambda x: {"x": x * 2, "sum": x.sum()}, args=(batch,))
        total = on_cluster.reduce("SUM", result["sum"], axis=None)
        made = convert({"batch": batch, "result": result, "total": total + 1})
    assert [part.tolist() for part in made["batch"].values] == [[0, 1, 2], [3, 4, 5]]
    assert [part.tolist() for part in made["result"]["x"].values] == [[0, 2, 4], [6, 8, 10]]
    assert made["total"].tolist() == 16
    assert type(made["total"]) is type(convert(1))


@pytest.mark.cluster
def test_replicas_share_what_was_gathered_for_them_alone(torch, on_cluster):
    def is_shared(x):
        return daskdist.to_torch(x).data_ptr() == x.ctypes.data

    def is_shared_in_a_loop(batches):
        return {is_shared(x) for x in batches}

    ds = on_cluster.distribute_dataset(Dataset.from_tensor_slices(np.ones((8, 3))).shuffle(8).batch(4))
    assert on_cluster.local_results(on_cluster.run(is_shared_in_a_loop, args=(ds,))) == ({True}, {True})
    # The program has these batches too and may pass them to other functions, so replicas get copies.
    for batch in ds:
        assert on_cluster.local_results(on_cluster.run(is_shared, args=(batch,))) == (False, False)


# --- what steps give that compute with a framework ---


@pytest.fixture
def is_strict(strict: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the strict device have DLPack's number of the host, so that frameworks take its arrays."""
    monkeypatch.setitem(devices.OF_DLPACK, 1, "STRICT")
    return strict


BATCH = PerReplica([np.arange(3, dtype=np.float32), np.arange(3, 6, dtype=np.float32)])


def with_gradients(x):
    return daskdist.to_torch(x) * daskdist.to_torch(np.float32(2)).clone().requires_grad_()


def as_jax(x):
    return daskdist.to_jax(x) * 2


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MAX", np.logaddexp, lambda a, b: a + b])
@pytest.mark.parametrize(("framework", "step"), [("torch", with_gradients), ("jax", as_jax)])
def test_what_steps_give_is_reduced_and_gathered(framework, step, op):
    pytest.importorskip(framework)
    strategy = mirrored(2)
    given, wanted = strategy.run(step, args=(BATCH,)), strategy.run(lambda x: x * 2, args=(BATCH,))
    for axis in (None, 0):
        actual, should = strategy.reduce(op, given, axis=axis), strategy.reduce(op, wanted, axis=axis)
        assert type(actual) is type(should)
        assert actual.dtype == should.dtype
        assert actual.tolist() == should.tolist()
    assert strategy.gather(given, axis=0).tolist() == [0, 2, 4, 6, 8, 10]


def test_replicas_reduce_losses(torch):
    strategy = mirrored(2)

    def step(x):
        loss = with_gradients(x).sum()
        context = daskdist.get_replica_context()
        return loss, context.all_reduce("MEAN", loss), context.all_gather(loss[None], axis=0)

    losses, mean, each = strategy.run(step, args=(BATCH,))
    assert [float(part) for part in mean.values] == [15.0, 15.0]
    assert [part.tolist() for part in each.values] == [[6.0, 24.0]] * 2
    assert strategy.reduce("SUM", losses, axis=None) == 30
    # The program gets the values as the replicas returned them, with gradients.
    assert all(part.requires_grad for part in strategy.local_results(losses))


def test_variables_are_assigned_tensors(torch, jax):
    strategy = mirrored(2)
    with strategy.scope():
        variable = daskdist.Variable(np.zeros(2, np.float32), aggregation="MEAN")

    def step(x):
        variable.assign(with_gradients(x[:2]) * 0 + 1)
        variable.assign_add(jax.numpy.full(2, 2.0))

    strategy.run(step, args=(BATCH,))
    assert variable.numpy().tolist() == [3.0, 3.0]


def test_tensors_of_a_dtype_that_numpy_lacks_say_what_to_write(torch):
    tensor = torch.ones(3, 2, dtype=torch.bfloat16)
    for build in (
        lambda: Dataset.from_tensor_slices({"x": tensor}),
        lambda: list(Dataset.range(2).map(lambda k: [tensor, tensor])),
        lambda: list(Dataset.range(2).map(lambda k: {"x": tensor})),
    ):
        with pytest.raises((ArgumentError, UserFunctionError), match=r"Tensor of bfloat16, .* with \.float\(\)"):
            build()


def test_tensors_that_make_no_array_are_named(torch):
    strategy = mirrored(2)
    given = strategy.run(lambda x: daskdist.to_torch(x).bfloat16(), args=(BATCH,))
    for call in (lambda: strategy.reduce("SUM", given, axis=None), lambda: strategy.gather(given, axis=0)):
        with pytest.raises(ArgumentError, match=r"a value is a Tensor of bfloat16, .* with \.float\(\)"):
            call()


@pytest.mark.parametrize(("framework", "step"), [("torch", with_gradients), ("jax", as_jax)])
def test_tensors_on_a_device_are_reduced_there(is_strict, no_copies, framework, step):
    pytest.importorskip(framework)
    strategy = mirrored(2)
    given = strategy.run(step, args=(BATCH,))
    for axis, wanted in ((None, [6, 8, 10]), (0, 10)):
        actual = strategy.reduce("MAX", given, axis=axis)
        assert devices.device_of(actual) == is_strict
        assert np.from_dlpack(actual).tolist() == wanted
    actual = strategy.gather(given, axis=0)
    assert devices.device_of(actual) == is_strict
    assert np.from_dlpack(actual).tolist() == [0, 2, 4, 6, 8, 10]


def test_tensors_on_a_device_share_its_memory(torch, is_strict, no_copies):
    tensor = torch.arange(3.0)
    actual = devices.adopted(tensor)
    assert devices.device_of(actual) == is_strict
    assert address_of(actual) == tensor.data_ptr()
    assert devices.adopted(actual) is actual


def test_tensors_come_to_the_host_where_arrays_of_their_device_are_not_loaded(torch, monkeypatch):
    monkeypatch.setitem(devices.OF_DLPACK, 1, "GPU")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    tensor = torch.ones(3, requires_grad=True)
    assert type(devices.adopted(tensor)) is torch.Tensor
    assert np.asarray(devices.adopted(tensor)).tolist() == [1.0] * 3


# --- JAX's own rules ---


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "uint32", "float16", "float32", "complex64"])
def test_jax_shares_memory_that_is_aligned(jax, dtype):
    array = read_only(aligned(64, dtype)).reshape(8, 8)
    made = daskdist.to_jax(array)
    assert made.unsafe_buffer_pointer() == array.ctypes.data
    assert made.dtype == array.dtype
    assert made.tolist() == array.tolist()


@pytest.mark.parametrize(
    "array",
    [aligned(64, "float32", 16), aligned(64, "float32").reshape(8, 8).T, aligned(64, "float32").reshape(8, 8)[:, :4]],
    ids=["unaligned", "transposed", "gaps"],
)
def test_jax_copies_other_memory(jax, array):
    made = daskdist.to_jax(read_only(array))
    assert made.unsafe_buffer_pointer() != array.ctypes.data
    assert made.tolist() == array.tolist()


NARROWED = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


@pytest.mark.parametrize("dtype", NARROWED)
def test_jax_makes_32_bits_of_64(jax, dtype):
    assert daskdist.to_jax(np.ones(3, dtype)).dtype.name == NARROWED[dtype]
    jax.config.update("jax_enable_x64", True)
    try:
        assert daskdist.to_jax(np.ones(3, dtype)).dtype.name == dtype
    finally:
        jax.config.update("jax_enable_x64", False)


def test_jax_loses_no_numbers_in_silence(jax):
    assert daskdist.to_jax(np.array([2**31 - 1, -(2**31)])).tolist() == [2**31 - 1, -(2**31)]
    with pytest.raises(ArgumentError, match=r"leaf \['id'\] has numbers that do not fit in int32, .*jax_enable_x64"):
        daskdist.to_jax({"id": np.array([1, 2**31])})
    with pytest.raises(ArgumentError, match="numbers that do not fit in uint32, to which JAX converts uint64"):
        daskdist.to_jax(np.array([2**32], np.uint64))


def test_jax_does_not_write_into_what_it_shares(jax):
    array = aligned(64, "float32")
    given = daskdist.to_jax(read_only(array))
    assert given.unsafe_buffer_pointer() == array.ctypes.data
    added = jax.jit(lambda x: x + 1, donate_argnums=0)(given)
    assert added.tolist() == [2.0] * 64
    assert array.tolist() == [1.0] * 64


def test_jax_trains(jax):
    def loss(weights, x, y):
        return ((x @ weights - y) ** 2).mean()

    step = jax.jit(jax.value_and_grad(loss))
    weights = jax.numpy.zeros((3, 1))
    losses = []
    for x, y in line().repeat(5):
        value, gradient = step(weights, *daskdist.to_jax((x, y)))
        weights -= 0.2 * gradient
        losses.append(float(value))
    assert losses[-1] < losses[0] / 100
    assert np.abs(np.asarray(weights)[:, 0] - WEIGHTS).max() < 0.1


# --- a dataset as loader ---


def test_loader_gives_tensors(torch):
    loader = daskdist.torch_loader(Dataset.range(10).map(lambda x: {"x": x, "y": (x * 0.5, x > 2)}).batch(4))
    assert len(loader) == 3
    batches = list(loader)
    assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches[0]["y"][0].dtype == torch.float64
    assert batches[0]["y"][1].tolist() == [False, False, False, True]


def test_loader_is_a_dataset_of_a_data_loader(torch):
    loader = daskdist.torch_loader(line())
    outer = torch.utils.data.DataLoader(loader, batch_size=None, num_workers=0)
    assert isinstance(loader, torch.utils.data.IterableDataset)
    assert len(outer) == len(loader) == 4
    assert [(x.shape, y.shape) for x, y in outer] == [((60, 3), (60, 1))] * 4


def test_each_pass_of_a_loader_is_shuffled_anew(torch):
    loader = daskdist.torch_loader(Dataset.range(50).shuffle(50, seed=1).batch(10))
    first, second = ([x for batch in loader for x in batch.tolist()] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))


def test_passes_of_a_loader_have_positions_and_times(torch):
    loader = daskdist.torch_loader(Dataset.range(50).shuffle(50, seed=1).batch(5))
    batches, again = iter(loader), iter(loader)
    for _ in range(4):
        next(batches)
    again.load_state_dict(batches.state_dict())
    assert [x.tolist() for x in again] == [x.tolist() for x in batches]
    assert batches.stats()["num_elements"] == 10
    assert "10 steps in" in daskdist.explain_slow(batches)
    batches.close()
    assert list(batches) == []


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Dataset.range(6).filter(lambda x: x > 2), "the number of batches is not known before they are read"),
        (Dataset.range(6).repeat(), "the number of batches is endless"),
    ],
    ids=["unknown", "endless"],
)
def test_loader_of_unknown_length_has_none(torch, dataset, words):
    loader = daskdist.torch_loader(dataset)
    assert loader
    with pytest.raises(UnknownLengthError, match=words):
        len(loader)
    with pytest.raises(TypeError, match="state it with assert_cardinality or take"):
        len(torch.utils.data.DataLoader(loader, batch_size=None))
    assert next(iter(loader)).ndim == 0


def test_torch_loader_refuses_unsupported_elements(torch):
    words = Dataset.from_tensor_slices({"x": np.arange(2), "word": WORDS}).batch(2)
    with pytest.raises(ArgumentError, match=r"torch_loader: leaf \['word'\] is text"):
        daskdist.torch_loader(words)
    with pytest.raises(ArgumentError, match=r"torch_loader: leaf \['word'\] is text"):
        daskdist.torch_loader(mirrored(2).distribute_dataset(words))
    ragged = Dataset.range(4).map(lambda x: np.arange(x)).ragged_batch(2)
    with pytest.raises(ArgumentError, match=r"torch_loader: leaf \(the element\) has rows of different lengths"):
        daskdist.torch_loader(ragged)
    with pytest.raises(ArgumentError, match=r"torch_loader: leaf .the element. is a dataset: iterate over it"):
        daskdist.torch_loader(Dataset.range(4).window(2))
    with pytest.raises(ArgumentError, match="torch_loader: give a Dataset or a DistributedDataset, not list"):
        daskdist.torch_loader([1, 2])


def test_worker_processes_are_refused(torch):
    loader = pickle.loads(pickle.dumps(daskdist.torch_loader(Dataset.range(6).batch(2))))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    outer = torch.utils.data.DataLoader(loader, batch_size=None, num_workers=1, multiprocessing_context="forkserver")
    with pytest.raises(ArgumentError, match=r"used in worker processes of a DataLoader.* give num_workers=0"):
        next(iter(outer))


def test_torch_trains(torch):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loader = torch.utils.data.DataLoader(daskdist.torch_loader(line()), batch_size=None)
    losses = []
    for _ in range(5):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 100
    assert np.abs(model.weight.detach().numpy()[0] - WEIGHTS).max() < 0.1


def gives_parts(strategy: Any) -> None:
    loader = daskdist.torch_loader(strategy.distribute_dataset(Dataset.range(10).batch(4)))
    assert len(loader) == 3
    steps = [[part.tolist() for part in step.values] for step in loader]
    assert steps == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]


def test_loader_gives_each_replica_its_part(torch):
    gives_parts(mirrored(2))


@pytest.mark.cluster
def test_loader_gives_each_replica_its_part_on_a_cluster(torch, on_cluster):
    gives_parts(on_cluster)


# --- Keras ---


class Recorded:
    """A dataset that records the elements of each pass."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.passes: list[list[Any]] = []

    @property
    def element_spec(self) -> Any:
        return self.dataset.element_spec

    def cardinality(self) -> int:
        return self.dataset.cardinality()

    def __iter__(self) -> Any:
        noted: list[Any] = []
        self.passes.append(noted)
        for element in self.dataset:
            noted.append(element)
            yield element


def kernel(keras: Any, model: Any) -> list[float]:
    """Return the weights of a model of one layer with one unit."""
    return keras.ops.convert_to_numpy(model.weights[0].value)[:, 0].tolist()


def linear(keras: Any) -> Any:
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.2), "mse")
    return model


def test_keras_trains(keras):
    model = linear(keras)
    recorded = Recorded(line())
    history = model.fit(daskdist.keras_data(recorded), epochs=4, verbose=0)
    assert history.params["steps"] == 4
    losses = history.history["loss"]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 20
    # Keras takes one batch to build the model; then each epoch is a pass, with another order.
    assert [len(value) for value in recorded.passes] == [1, 4, 4, 4, 4]
    orders = [np.concatenate([x for x, _ in item]).tolist() for item in recorded.passes[1:]]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_keras_builds_a_model_by_the_data(keras):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.2), "mse")
    losses = model.fit(daskdist.keras_data(line(np.float64)), epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]


def test_keras_weighs_samples(keras):
    x = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    y, weights = x.sum(1, keepdims=True), np.arange(10, dtype=np.float32)
    model = linear(keras)

    def loss(*elements):
        data = Dataset.from_tensor_slices(elements).batch(5)
        return float(model.evaluate(daskdist.keras_data(data), verbose=0))

    of_arrays = model.evaluate(x, y, sample_weight=weights, batch_size=5, verbose=0)
    assert loss(x, y, weights) == pytest.approx(float(of_arrays))
    assert loss(x, y) != pytest.approx(float(of_arrays), rel=0.05)


def test_keras_predicts_and_validates(keras):
    model = linear(keras)
    model.set_weights([WEIGHTS[:, None], np.zeros(1)])
    x = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    for elements in (x, (x,)):
        predicted = model.predict(daskdist.keras_data(Dataset.from_tensor_slices(elements).batch(4)), verbose=0)
        assert predicted[:, 0] == pytest.approx(x @ WEIGHTS, abs=1e-5)
    data = daskdist.keras_data(line())
    history = model.fit(data, validation_data=data, epochs=2, verbose=0).history
    assert history["val_loss"] == pytest.approx([0, 0], abs=1e-6)


def test_keras_takes_nests(keras):
    a, b = keras.Input((3,), name="a"), keras.Input((1,), name="b")
    model = keras.Model({"a": a, "b": b}, keras.layers.Dense(1)(keras.layers.Concatenate()([a, b])))
    model.compile("sgd", "mse")
    pairs = line().map(lambda x, y: ({"a": x, "b": y}, y))
    losses = model.fit(daskdist.keras_data(pairs), epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]


def fits_the_same(keras: Any, strategy: Any) -> None:
    models = [linear(keras) for _ in range(2)]
    for model, data in zip(models, (line(), strategy.distribute_dataset(line())), strict=True):
        model.fit(daskdist.keras_data(data), epochs=2, verbose=0)
    one, other = (kernel(keras, model) for model in models)
    assert one == pytest.approx(other, abs=1e-6)
    assert one[1] < -1


def test_keras_joins_the_parts_of_replicas(keras):
    fits_the_same(keras, mirrored(3))


@pytest.mark.cluster
def test_keras_joins_the_parts_of_replicas_of_a_cluster(keras, on_cluster):
    fits_the_same(keras, on_cluster)


def test_the_last_step_of_keras_may_be_short(keras):
    batches = mirrored(3).distribute_dataset(Dataset.range(7).map(lambda x: (x, x * 2)).batch(6))
    actual = list(daskdist.keras_data(batches).get_numpy_iterator())
    assert [[part.tolist() for part in step] for step in actual] == [
        [[0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 10]],
        [[6], [12]],
    ]


def test_keras_counts_steps_that_are_not_known(keras):
    some = Recorded(Dataset.range(10).filter(lambda x: x < 6).map(lambda x: (np.ones(3) * x, np.ones(1))).batch(2))
    data = daskdist.keras_data(some)
    assert data.num_batches is None
    with pytest.warns(UserWarning, match="ran out of data"):
        history = linear(keras).fit(data, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2
    assert [len(value) for value in some.passes] == [1, 3, 3]


def test_keras_continues_in_an_endless_dataset(keras):
    endless = Recorded(Dataset.counter().map(lambda x: (np.ones(3), np.ones(1) * x)).batch(1))
    data = daskdist.keras_data(endless)
    linear(keras).fit(data, epochs=2, steps_per_epoch=3, verbose=0)
    assert [[y[0, 0] for _, y in value] for value in endless.passes] == [[0], [0, 1, 2, 3, 4, 5]]


def test_keras_data_refuses_unsupported_elements(keras):
    with pytest.raises(ArgumentError, match=r"keras_data: an element is a tuple of 4; Keras takes \(x, y\), "):
        daskdist.keras_data(Dataset.from_tensors((1, 2, 3, 4)).batch(1))
    with pytest.raises(ArgumentError, match=r"keras_data: leaf \[1\] is a scalar: batch the dataset"):
        daskdist.keras_data(Dataset.from_tensor_slices((np.ones((4, 3)), np.ones(4))))
    with pytest.raises(ArgumentError, match=r"keras_data: leaf \[0\] is text"):
        daskdist.keras_data(Dataset.from_tensor_slices((WORDS, np.ones(2))).batch(2))
    with pytest.raises(ArgumentError, match="keras_data: give a Dataset or a DistributedDataset, not ndarray"):
        daskdist.keras_data(np.ones(3))
    with pytest.raises(ArgumentError, match=r"keras_data: .* the backend is TensorFlow; set the environment"):
        daskdist.keras_data(line()).get_tf_dataset()


def test_a_missing_backend_is_named(keras):
    if find_spec("tensorflow"):
        pytest.skip("TensorFlow is installed")
    program = "import daskdist; daskdist.keras_data(daskdist.Dataset.range(3).batch(2))"
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    last = done.stderr.splitlines()[-1]
    assert (
        "MissingPackageError: keras_data: Keras cannot be imported (No module named 'tensorflow'); install its" in last
    )
    assert "KERAS_BACKEND, 'jax' or 'torch', before Keras is imported" in last


# --- the README ---


@pytest.mark.cluster
def test_readme_example_of_a_process_group_runs(torch, on_cluster):
    (block,) = re.findall(r"```python no-run\n(import torch\n\n\ndef train.*?)```", README.read_text(), re.DOTALL)
    x = np.random.default_rng(0).normal(size=(800, 3))
    batches = on_cluster.distribute_dataset(Dataset.from_tensor_slices({"x": x, "y": x @ WEIGHTS}).batch(20))
    names: dict[str, Any] = {"daskdist": daskdist, "strategy": on_cluster, "batches": batches}
    exec(compile(block, "README.md", "exec"), names)
    first, second = on_cluster.local_results(names["weights"])
    assert first.tolist() == second.tolist()
    assert first[0].tolist() == pytest.approx(WEIGHTS.tolist(), abs=0.1)


def listening_addresses():
    """Return the addresses at which sockets of this process listen."""
    connections = psutil.Process().net_connections("tcp")
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


def test_a_process_group_on_an_encrypted_cluster_has_to_be_allowed(torch):
    def join(**options):
        with daskdist.torch_process_group(**options) as distributed:
            total = torch.ones(1)
            distributed.all_reduce(total)
            return float(total), listening_addresses()

    resolver = daskdist.ClusterResolver(security=Security.temporary(), num_workers=2)
    with daskdist.MultiWorkerMirroredStrategy(resolver) as strategy:
        with pytest.raises(ArgumentError, match=r"neither encrypted nor authenticated.*insecure=True"):
            strategy.local_results(strategy.run(join))
        for total, addresses in strategy.local_results(strategy.run(join, kwargs={"insecure": True})):
            assert total == 2
            # No socket listens on an address that Dask does not listen on.
            assert addresses == {"127.0.0.1"}
        assert listening_addresses() <= {"127.0.0.1"}


@pytest.mark.parametrize("framework", ["torch", "jax", "keras"])
def test_readme_examples_run(request, framework):
    request.getfixturevalue(framework)
    section = README.read_text().split("## Frameworks\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```python no-run\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 4
    x = np.random.default_rng(0).normal(size=(200, 3))
    dataset = Dataset.from_tensor_slices({"x": x, "y": x @ WEIGHTS}).batch(20)
    names: dict[str, Any] = {"daskdist": daskdist, "dataset": dataset}
    exec(compile(next(block for block in blocks if f"import {framework}" in block), "README.md", "exec"), names)
    actual = {
        "torch": lambda: names["line"].weight.tolist()[0],
        "jax": lambda: names["weights"].tolist(),
        "keras": lambda: kernel(names["keras"], names["model"]),
    }[framework]()
    assert actual == pytest.approx(WEIGHTS.tolist(), abs=0.2)
