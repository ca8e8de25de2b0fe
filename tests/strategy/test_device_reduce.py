"""Arrays of devices are reduced, gathered and passed between replicas on their devices, with NumPy's results."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import threading
import time
from types import SimpleNamespace

import dask
import numpy as np
import pytest

import daskdist
from daskdist import PerReplica, PerReplicaSpec, Reduction, devices, errors
from daskdist.devices import device_of, named, stream_of
from daskdist.execute.messages.pickling import dumps_on_host, futures_in
from daskdist.frameworks.keras import joined
from daskdist.strategy.values.device_arrays import in_stream_of, moved
from daskdist.strategy.values.refs import FlatResult

xp = pytest.importorskip("array_api_strict")

import strict_device  # noqa: E402

NAMES = ["STRICT:0", "STRICT:1", "STRICT:2"]
OPS = ["SUM", "MEAN", "MIN", "MAX", "PROD"]
# The dtypes that the device has.
DTYPES = ["bool", "int8", "uint8", "int32", "int64", "uint64", "float32", "float64", "complex64", "complex128"]
TOLERANCE = {"float32": 1e-5, "complex64": 1e-5, "float64": 1e-12, "complex128": 1e-12}


@pytest.fixture(autouse=True)
def kind(monkeypatch):
    monkeypatch.setitem(devices.KINDS, "STRICT", ("strict_device:StrictDevice", "array_api_strict"))
    monkeypatch.setattr(strict_device.StrictDevice, "num_devices", 3)


@pytest.fixture
def no_copies(monkeypatch):
    """Record the bytes that are copied from devices."""
    taken = []
    get = strict_device.StrictDevice.get

    def counted(self, array):
        actual = get(self, array)
        taken.append(actual.nbytes)
        return actual

    monkeypatch.setattr(strict_device.StrictDevice, "get", counted)
    return taken


def on(name, value):
    array = np.asarray(value)
    device = named(name)
    return array if device.is_host else device.put(array)


def placed(values, names=NAMES):
    return PerReplica([on(name, value) for name, value in zip(names, values, strict=False)])


def here(value):
    return devices.on_host(value)


def where(value):
    actual = device_of(value)
    return None if actual is None else devices.name_of(actual)


def check_same(found, wanted):
    """Check that two results have the same dtype and shape, and equal values up to rounding."""
    found, wanted = np.asarray(here(found)), np.asarray(wanted)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    tolerance = TOLERANCE.get(str(wanted.dtype), 0)
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def of_dtype(rng, shape, dtype):
    if dtype == "bool":
        return rng.random(shape) < 0.5
    actual = rng.integers(0 if dtype[0] == "u" else -4, 5, shape)
    if dtype[0] == "c":
        return (actual + 1j * rng.integers(-4, 5, shape)).astype(dtype)
    return (actual / 4 if dtype[0] == "f" else actual).astype(dtype)


def both(op, values, axis, names=NAMES):
    """Return the result on devices and the result on CPUs."""
    size = len(values)
    cpu = daskdist.MirroredStrategy([f"CPU:{k}" for k in range(size)])
    there = daskdist.MirroredStrategy(names[:size])
    return there.reduce(op, placed(values, names), axis), cpu.reduce(op, PerReplica(values), axis)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_equal_those_on_the_cpu(op, dtype, no_copies):
    rng = np.random.default_rng([OPS.index(op), DTYPES.index(dtype)])
    for inner, axis in itertools.product([(), (2,), (3, 2)], [None, 0, -1, (0, 1), (1,)]):
        if axis is not None and not isinstance(axis, int) and len(inner) + 1 <= max(axis):
            continue
        rows = [3] * 3 if axis is None else [3, 1, 4]
        if axis in (-1, (1,)) and inner:
            rows = [3] * 3
        actual, wanted = both(op, [of_dtype(rng, (n, *inner), dtype) for n in rows], axis)
        assert where(actual) == "STRICT:0"
        assert not no_copies, "a copy to the host"
        check_same(actual, wanted)
        no_copies.clear()


@pytest.mark.parametrize("seed", range(60))
def test_random_cases(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 4))
    inner = [(), (2,), (3, 2), (0,)][rng.integers(4)]
    ndim = 1 + len(inner)
    axis = None if rng.random() < 0.2 else tuple(rng.permutation(ndim)[: rng.integers(1, ndim + 1)].tolist())
    has_rows = axis is not None and 0 in axis
    rows = rng.integers(0, 4, size) if has_rows else [int(rng.integers(0, 3))] * size
    dtypes = rng.choice(DTYPES, size)
    values = [of_dtype(rng, (n, *inner), str(dtype)) for n, dtype in zip(rows, dtypes, strict=True)]
    names = rng.permutation([*NAMES[: max(1, size - 1)], "CPU:0", "CPU:1"])[:size].tolist()
    op = str(rng.choice(OPS))
    outcomes = []
    cpu = daskdist.MirroredStrategy([f"CPU:{k}" for k in range(size)])
    for strategy, given in [
        (daskdist.MirroredStrategy(names), placed(values, names)),
        (cpu, PerReplica(values)),
    ]:
        try:
            outcomes.append(strategy.reduce(op, given, axis))
        except Exception as error:
            outcomes.append(error)
    actual, wanted = outcomes
    if isinstance(wanted, Exception):
        assert (type(actual), str(actual)) == (type(wanted), str(wanted))
        return
    check_same(actual, wanted)
    sizes = [1 if axis is None else math.prod(value.shape[item] for item in axis) for value in values]
    with_rows = [name for name, size in zip(names, sizes, strict=True) if size] or names
    if all(name.startswith("STRICT") for name in with_rows):
        assert where(actual) == with_rows[0]
    else:
        assert where(actual) is None


@pytest.mark.parametrize("op", OPS)
def test_nan_makes_everything_nan(op):
    for dtype in ("float32", "complex64"):
        values = [np.array([1, 2], dtype), np.array([np.nan, 3], dtype), np.array([2, 0], dtype)]
        for axis in (None, 0):
            check_same(*both(op, values, axis))


def test_reduce_with_one_replica():
    actual, wanted = both("SUM", [np.array([[1, 2], [3, 4]], np.int8)], 0)
    check_same(actual, wanted)
    assert where(actual) == "STRICT:0"


def test_the_result_is_a_number():
    actual, _ = both("MEAN", [np.ones(3, np.float32), np.zeros(1, np.float32)], 0)
    assert actual.shape == ()
    assert float(actual) == 0.75


@pytest.mark.parametrize("op", OPS)
def test_no_rows_at_all(op):
    values = [np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32)]
    if op in ("MIN", "MAX"):
        with pytest.raises(errors.ArgumentError, match=f"no replica has a row along axis 0, and {op} of no rows"):
            both(op, values, 0)
        return
    actual, wanted = both(op, values, 0)
    check_same(actual, wanted)
    assert where(actual) == "STRICT:0"


def test_the_result_is_on_the_first_device_with_rows():
    actual, wanted = both("SUM", [np.zeros((0, 2), np.float32), np.ones((3, 2), np.float32)], 0)
    check_same(actual, wanted)
    assert where(actual) == "STRICT:1"


def test_float16_is_as_on_the_cpu_where_devices_lack_it():
    values = [np.full(3, 0.1, np.float16), np.full(2, 0.3, np.float16)]
    strategy = daskdist.MirroredStrategy(NAMES[:2])
    given = strategy.run(lambda x: x, args=(PerReplica(values),))
    cpu = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
    check_same(strategy.reduce("MEAN", given, axis=0), cpu.reduce("MEAN", PerReplica(values), axis=0))


def test_a_nest_in_one_tree():
    strategy = daskdist.MirroredStrategy(NAMES[:2])

    def step(x):
        return {"a": x * 2, "b": (xp.sum(x), 3)}

    actual = strategy.reduce("SUM", strategy.run(step, args=(PerReplica([np.ones(2), np.ones(2)]),)), axis=None)
    assert where(actual["a"]) == where(actual["b"][0]) == "STRICT:0"
    assert here(actual["a"]).tolist() == [4, 4]
    assert (float(actual["b"][0]), int(actual["b"][1])) == (4, 6)


def test_a_function_is_given_arrays_of_the_device():
    seen = []

    def larger(a, b):
        seen.append((where(a), where(b), a.shape))
        return xp.where(a > b, a, b)

    values = [np.arange(6.0).reshape(3, 2), np.ones((2, 2))]
    actual = daskdist.MirroredStrategy(NAMES[:2]).reduce(larger, placed(values), axis=0)
    check_same(actual, np.array([4.0, 5.0]))
    assert seen == [("STRICT:0",) * 2 + ((2,),)] * 2 + [("STRICT:1",) * 2 + ((2,),)] + [("STRICT:0",) * 2 + ((2,),)]


@pytest.mark.parametrize("function", [np.logaddexp, np.logical_and, np.bitwise_xor, np.add, np.hypot], ids=str)
@pytest.mark.parametrize("axis", [None, 0])
def test_functions_of_numpy(function, axis):
    dtype = "int32" if function is np.bitwise_xor else "float64"
    rng = np.random.default_rng(3)
    for size in (1, 3):
        check_same(*both(function, [of_dtype(rng, (3, 2), dtype) for _ in range(size)], axis))


def test_a_function_of_numpy_that_the_device_lacks():
    with pytest.raises(errors.ArgumentError, match="arrays of STRICT devices have no gcd; give a function of two"):
        both(np.gcd, [np.ones(2, int)] * 2, 0)


def norm():
    return Reduction(
        lambda x, axis: {"squares": xp.sum(x * x, axis=axis)},
        lambda a, b: {"squares": a["squares"] + b["squares"]},
        lambda partial: xp.sqrt(partial["squares"]),
        identity={"squares": 0},
    )


def test_a_custom_reduction_gets_arrays_of_the_device():
    strategy = daskdist.MirroredStrategy(NAMES[:2])
    actual = strategy.reduce(norm(), placed([np.array([2.0, 4.0]), np.array([4.0])]), axis=0)
    assert (where(actual), float(actual)) == ("STRICT:0", 6.0)
    actual = strategy.reduce(norm(), placed([np.zeros((0, 2)), np.zeros((0, 2))]), axis=0)
    assert (where(actual), here(actual).tolist()) == ("STRICT:0", [0, 0])


@pytest.mark.parametrize(
    ("op", "values", "axis", "words"),
    [
        ("MIN", [np.ones(2), np.ones(3)], None, "shapes differ over the replicas: \\(2,\\), \\(3,\\)"),
        ("SUM", [np.ones((2, 2)), np.ones((2, 3))], 0, "after the reduction along axis 0, the values' shapes differ"),
        ("SUM", [np.ones(2), np.ones(2)], 1, "axis 1 of a value of shape \\(2,\\)"),
        ("SUM", [np.ones((2, 2))] * 2, (0, -2), "names an axis twice"),
    ],
    ids=["rows", "columns", "axis", "twice"],
)
def test_errors_are_those_of_the_cpu(op, values, axis, words, no_copies):
    with pytest.raises(errors.ArgumentError, match=words):
        both(op, values, axis)
    assert not no_copies


def test_the_same_bits_in_every_run():
    rng = np.random.default_rng(0)
    given = placed([rng.random((1000, 3)).astype(np.float32) for _ in range(3)])
    strategy = daskdist.MirroredStrategy(NAMES)
    runs = {here(strategy.reduce("SUM", given, axis=0)).tobytes() for _ in range(5)}
    assert len(runs) == 1


def test_a_library_for_transfers_between_devices_is_used(monkeypatch):
    calls = []

    def combined(self, how, arrays):
        calls.append((self.index, how, [where(array) for array in arrays]))
        return self.put(sum(map(here, arrays)))

    monkeypatch.setattr(strict_device.StrictDevice, "combined", combined)
    values = [np.arange(3, dtype=np.float32) + k for k in range(3)]
    for op in ("SUM", "MEAN"):
        check_same(*both(op, values, None))
    assert calls == [(0, "SUM", NAMES)] * 2


@pytest.mark.parametrize("dtype", ["bool", "int8", "float32", "float64"])
@pytest.mark.parametrize("op", OPS)
def test_tall_and_narrow_arrays(op, dtype):
    rng = np.random.default_rng(0)
    for num_rows in (2**16, 2**16 + 1, 100_001):
        value = rng.integers(0, 3, (num_rows, 2, 1)).astype(dtype)
        if op == "PROD":
            value[...] = 1
            value[num_rows - 1] = 2
        check_same(*both(op, [value, value[:7]], 0))


def test_results_of_another_library_are_waited_for(monkeypatch):
    strict = named("STRICT:0")
    other, may_compute = strict.stream(), threading.Event()
    monkeypatch.setitem(strict_device._current.__dict__, "outer_streams", (other,))
    value = strict.put(np.zeros(3))

    def compute():
        assert may_compute.wait(30)
        value[...] = 5

    # The library computes the array in its own stream, some time after it returned the array.
    other.give(compute)
    threading.Timer(0.05, may_compute.set).start()
    total = daskdist.MirroredStrategy(NAMES[:2]).reduce("SUM", PerReplica([value, on(NAMES[1], np.ones(3))]), axis=None)
    assert here(total).tolist() == [6, 6, 6]
    other.synchronize()


def test_memory_that_a_library_still_reads_is_not_reused(monkeypatch):
    read = []

    def combined(self, how, arrays):
        # Like NCCL, compute later, in the stream of each device.
        for device, array in zip(map(device_of, arrays), arrays, strict=True):
            with device.using(stream_of(device)):
                device.current_stream().give(functools.partial(time.sleep, 0.1))
                strict_device.reads_late(array, read)
        return self.put(sum(map(here, arrays)))

    monkeypatch.setattr(strict_device.StrictDevice, "combined", combined)
    given = placed([np.full(3, k, np.float32) for k in range(3)])
    daskdist.MirroredStrategy(NAMES).reduce("SUM", given, axis=None)
    for name in NAMES:
        # The copies that overwrite released memory are in this stream.
        named(name).current_stream().synchronize()
    assert sorted(read) == sorted(here(value).tobytes() for value in given.values)


# --- gathered ---


def test_gathered_on_the_first_device(no_copies):
    strategy = daskdist.MirroredStrategy(NAMES)
    values = [np.arange(3, dtype=np.int32), np.zeros(0, np.int32), np.arange(2.0)]
    actual = strategy.gather(placed(values), axis=0)
    assert not no_copies
    check_same(actual, np.concatenate(values))
    assert where(actual) == "STRICT:0"
    mixed = daskdist.MirroredStrategy(["STRICT:1", "CPU:0"])
    actual = mixed.gather(placed([np.ones((2, 1)), np.zeros((2, 2))], ["STRICT:1", "CPU:0"]), axis=1)
    assert type(actual) is np.ndarray
    assert actual.tolist() == [[1, 0, 0]] * 2


@pytest.mark.parametrize(
    ("values", "axis", "words"),
    [
        ([np.float64(1), np.float64(2)], 0, r"a scalar, which has no axis 0; give x\[None\], or"),
        ([np.ones(2)] * 2, 1, r"axis 1 of a value of shape \(2,\), which replica 0 gives; give 0"),
        ([np.ones((2, 2)), np.ones((2, 3))], 0, "they may differ along axis 0 only"),
    ],
    ids=["scalar", "axis", "shapes"],
)
def test_errors_of_gather_are_those_of_the_cpu(values, axis, words):
    with pytest.raises(errors.ArgumentError, match=words):
        daskdist.MirroredStrategy(NAMES[:2]).gather(placed(values), axis=axis)


# --- together ---


def context():
    return daskdist.get_replica_context()


@pytest.mark.parametrize("names", [NAMES[:1], NAMES, ["CPU:0", "STRICT:0"], ["STRICT:1", "CPU:0"]], ids="-".join)
def test_all_reduce_and_gather_give_each_replica_its_own_arrays(names):
    strategy = daskdist.MirroredStrategy(names)
    size = len(names)
    values = [np.array([k + 0.1, 2], np.float32) for k in range(size)]

    def step(x):
        both = context().all_reduce("SUM", {"x": x, "mean": xp.mean(x) if device_of(x) else x.mean()})
        return {**both, "max": context().all_reduce("MAX", x), "all": context().all_gather(x, 0)}

    actual = strategy.local_results(strategy.run(step, args=(PerReplica(values),)))
    cpu = daskdist.MirroredStrategy([f"CPU:{k}" for k in range(size)])
    wanted = cpu.local_results(cpu.run(step, args=(PerReplica(values),)))
    for name, own, plain in zip(names, actual, wanted, strict=True):
        assert {where(item) for item in own.values()} == {None if name.startswith("CPU") else name}
        for key, value in own.items():
            check_same(value, plain[key])
    for key in ("x", "mean", "max", "all"):
        assert len({np.asarray(here(own[key])).tobytes() for own in actual}) == 1
        arrays = [own[key]._array if device_of(own[key]) else np.asarray(own[key]) for own in actual]
        for one, other in itertools.combinations(arrays, 2):
            assert not np.shares_memory(one, other)


def test_differences_are_reported_as_on_the_cpu():
    strategy = daskdist.MirroredStrategy(NAMES[:2])
    with pytest.raises(errors.CollectiveError, match="replica 0 gives \\(1,\\), replica 1 gives \\(2,\\)"):
        strategy.run(lambda x: context().all_reduce("SUM", x), args=(placed([np.ones(1), np.ones(2)]),))


def test_merge_call_on_devices():
    strategy = daskdist.MirroredStrategy(NAMES[:2])
    seen = []

    def merged(strategy, x):
        seen.append([where(value) for value in x.values])
        return strategy.reduce("SUM", x, axis=None), PerReplica([np.ones(1), np.zeros(1)]), x

    actual = strategy.run(lambda x: context().merge_call(merged, args=(x,)), args=(placed([np.ones(2), np.ones(2)]),))
    assert seen == [["STRICT:0", "STRICT:1"]]
    for number, own in enumerate(strategy.local_results(actual)):
        assert [where(item) for item in own] == [f"STRICT:{number}"] * 3
        assert [here(value).tolist() for value in own] == [[2, 2], [1 - number], [1, 1]]


def test_arrays_of_one_device_are_given_to_all():
    strategy = daskdist.MirroredStrategy(["STRICT:0", "STRICT:1", "CPU:0"])
    total = strategy.reduce("SUM", placed([np.ones(2)] * 3, NAMES), axis=None)
    actual = strategy.run(lambda x, total: (x + total, total), args=(PerReplica([np.ones(2)] * 3), total))
    for name, (result, given) in zip(["STRICT:0", "STRICT:1", None], strategy.local_results(actual), strict=True):
        assert where(result) == where(given) == name
        assert here(result).tolist() == [4, 4]


# --- extended ---


def test_reduced_to_a_destination():
    strategy = daskdist.MirroredStrategy(["STRICT:0", "STRICT:1", "CPU:0"])
    extended = strategy.extended
    value = placed([np.ones(2)] * 3, ["STRICT:0", "STRICT:1", "CPU:0"])
    for name in ("STRICT:0", "STRICT:1"):
        assert where(extended.reduce_to("SUM", value, name)) == name
    assert type(extended.reduce_to("SUM", value, "CPU:0")) is np.ndarray
    actual = extended.reduce_to("SUM", value, None)
    assert [where(part) for part in actual.values] == ["STRICT:0", "STRICT:1", None]
    assert [here(item).tolist() for item in actual.values] == [[3, 3]] * 3


def test_broadcast_and_update():
    strategy = daskdist.MirroredStrategy(NAMES[:2])
    extended = strategy.extended
    sent = extended.broadcast_to({"w": named("STRICT:1").put(np.ones(2)), "name": "x"}, None)
    assert [where(value) for value in sent["w"].values] == NAMES[:2]
    assert sent["name"].values == ("x", "x")
    actual = extended.update(sent["w"], lambda w, x: w * x, args=(2.0,), group=False)
    assert [where(result) for result in actual] == NAMES[:2]
    assert where(extended.broadcast_to(np.ones(2), "STRICT:1")) == "STRICT:1"


# --- variables ---


def test_variables_stay_on_the_device(no_copies):
    strategy = daskdist.MirroredStrategy(NAMES[:2])
    with strategy.scope():
        total = daskdist.Variable(np.zeros(3, np.float32), aggregation="SUM")
        own = daskdist.Variable(np.zeros(3), synchronization="ON_READ", aggregation="SUM")
        same = daskdist.Variable(named("STRICT:1").put(np.zeros(3, np.float32)))
        first = daskdist.Variable(np.zeros(3, np.float32), aggregation="ONLY_FIRST_REPLICA")
    no_copies.clear()

    def step(x):
        total.assign_add(x)
        own.assign_add(xp.astype(x, xp.float64))
        first.assign(x)
        kept = total.read_value()
        before = list(no_copies)
        same.assign(total)
        return before, where(kept), where(total + x), where(total * 2.0), float(total[0])

    actual = strategy.local_results(strategy.run(step, args=(placed([np.ones(3, np.float32)] * 2),)))
    # Only the value that has to be equal on all replicas is copied, since the host compares it.
    assert actual[0][0] == []
    assert [result[1:] for result in actual] == [("STRICT:0",) * 3 + (2.0,), ("STRICT:1",) * 3 + (2.0,)]
    for variable, wanted in [(total, 2), (own, 2), (same, 2), (first, 1)]:
        value = variable.state_dict()["value"]
        assert type(value) is np.ndarray
        assert value.tolist() == [wanted] * 3
    assert [type(item) for item in total.values.values] == [np.ndarray] * 2
    total.assign(named("STRICT:0").put(np.full(3, 7, np.float32)))
    own.assign(named("STRICT:1").put(np.full(3, 8, np.float32)))
    assert total.numpy().tolist() == [7] * 3
    assert np.asarray(own).tolist() == [8] * 3


def test_assigned_arrays_are_not_shared():
    strategy = daskdist.MirroredStrategy(NAMES[:1])
    with strategy.scope():
        var = daskdist.Variable(np.zeros(2))

    def step(x):
        var.assign(x)
        x[...] = 5.0

    strategy.run(step, args=(np.ones(2),))
    assert var.numpy().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("value", "words"),
    [(np.ones(2), "has shape \\(2,\\); the variable has \\(3,\\)"), (np.ones(3, complex), "has dtype complex128")],
    ids=["shape", "dtype"],
)
def test_mismatches_are_reported_without_a_copy(value, words, no_copies):
    strategy = daskdist.MirroredStrategy(NAMES[:1])
    with strategy.scope():
        var = daskdist.Variable(np.zeros(3))
    no_copies.clear()
    with pytest.raises(errors.ArgumentError, match=words):
        strategy.run(lambda x: var.assign(x), args=(value,))
    assert not no_copies


@pytest.mark.parametrize("dtype", [np.float16, np.longdouble])
def test_variables_of_dtypes_that_the_device_lacks_stay_on_the_host(dtype):
    strategy = daskdist.MirroredStrategy(NAMES[:2])
    with strategy.scope():
        var = daskdist.Variable(np.zeros(3, dtype), aggregation="SUM")

    def step(x):
        var.assign_add(x)
        return type(var.read_value())

    for given in (np.ones(3, dtype), placed([np.ones(3, np.float32)] * 2)):
        assert set(strategy.local_results(strategy.run(step, args=(given,)))) == {np.ndarray}
    assert var.numpy().dtype == dtype
    assert var.numpy().tolist() == [4] * 3


# --- what leaves a device ---


def test_keras_is_given_arrays_of_the_host():
    values = [np.arange(3), np.arange(2)]
    actual = joined({"x": placed(values), "y": placed(values[:1])})
    assert [type(result) for result in actual.values()] == [np.ndarray] * 2
    assert (actual["x"].tolist(), actual["y"].tolist()) == ([0, 1, 2, 0, 1], [0, 1, 2])


def test_arrays_of_devices_are_of_a_signature():
    strategy = daskdist.MirroredStrategy(NAMES[:2])
    spec = daskdist.TensorSpec((None,), np.float64)
    total = daskdist.function(lambda x: strategy.reduce("SUM", x, 0), input_signature=[PerReplicaSpec(spec, spec)])
    check_same(total(placed([np.ones(2), np.ones(3)], NAMES[1:])), np.float64(5))
    with pytest.raises(errors.ArgumentError, match=r"has shape \(2,\) and dtype int32; input_signature has"):
        total(placed([np.ones(2, np.int32)] * 2, NAMES[1:]))


def test_results_are_fetched_in_the_stream_that_computed_them(monkeypatch):
    device, get = named("STRICT:1"), strict_device.StrictDevice.get
    streams = []

    def seen(self, array):
        streams.append(device.current_stream())
        return get(self, array)

    monkeypatch.setattr(strict_device.StrictDevice, "get", seen)
    array = device.put(np.arange(3))
    deep = SimpleNamespace(array=[array])
    for actual in (
        pickle.loads(pickle.dumps(FlatResult.of(array))).leaves[0],
        pickle.loads(dumps_on_host(deep)).array[0],
        pickle.loads(dumps_on_host(deep, by_value=True)).array[0],
    ):
        assert type(actual) is np.ndarray
        assert actual.tolist() == [0, 1, 2]
    assert streams == [devices.stream_of(device)] * 3


def test_copies_between_devices_are_in_the_computing_stream(monkeypatch):
    one, other, put = named("STRICT:0"), named("STRICT:1"), strict_device.StrictDevice.put
    array, streams = one.put(np.arange(3)), []

    def seen(self, array):
        # `put` is called to make the array contiguous.
        streams.append(one.current_stream())
        return put(self, array)

    monkeypatch.setattr(strict_device.StrictDevice, "put", seen)
    with in_stream_of(other):
        assert where(moved(array, other)) == "STRICT:1"
    assert streams == [devices.stream_of(one)]


# --- printed ---


def test_printing_large_arrays_copies_nothing(no_copies):
    value = placed([np.zeros((100, 100), np.float32), np.arange(2)])
    text = repr(value)
    assert "0: <array of shape (100, 100), float32, on STRICT:0>" in text
    assert "1: Array([0," in text
    assert "(100, 100)" in value._repr_html_()
    assert not no_copies


# --- on worker processes ---


@pytest.fixture
def on_workers(client):
    """Return a strategy of three replicas on two workers; this process does not know their kind of device."""
    client.run(strict_device.register)
    slots = [("0", "STRICT:0"), ("0", "STRICT:1"), ("1", "STRICT:0")]
    strategy = daskdist.MultiWorkerMirroredStrategy(client, daskdist.DeviceAssignment(slots))
    devices.KINDS.pop("STRICT")
    yield strategy
    strategy.close()
    client.run(strict_device.unregister)


def doubled(x):
    return x * 2


def place_of(x):
    return where(x)


def all_here(nest):
    """Return the leaves of results, and check that all are NumPy arrays."""
    actual = np.asarray(nest.result() if hasattr(nest, "result") else nest)
    assert actual.dtype != object
    return actual


@pytest.mark.cluster
@pytest.mark.parametrize("op", OPS)
def test_as_on_the_cpu_between_workers(on_workers, op):
    rng = np.random.default_rng(1)
    for dtype, axis in itertools.product(["bool", "int32", "float32", "complex64"], [None, 0, (0, 1)]):
        values = [of_dtype(rng, (3 if axis is None else n, 2), dtype) for n in (3, 0, 2)]
        moved = on_workers.run(lambda x: x, args=(PerReplica(values),))
        actual = on_workers.reduce(op, moved, axis).result()
        cpu = daskdist.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
        assert isinstance(actual, (np.ndarray, np.generic))
        check_same(actual, cpu.reduce(op, PerReplica(values), axis))


@pytest.mark.cluster
def test_arrays_leave_a_worker_on_the_host(on_workers):
    batch = PerReplica([np.full(2, float(k)) for k in range(3)])
    value = on_workers.run(doubled, args=(batch,))
    assert on_workers.local_results(on_workers.run(place_of, args=(value,))) == ("STRICT:0", "STRICT:1", "STRICT:0")
    total = on_workers.reduce("SUM", value, axis=None)
    places = on_workers.local_results(on_workers.run(place_of, args=(total,)))
    assert places == ("STRICT:0", "STRICT:1", "STRICT:0")
    for actual in (*on_workers.local_results(value), total.result(), on_workers.gather(value, 0).result()):
        assert type(actual) is np.ndarray
    assert total.result().tolist() == [6, 6]
    assert on_workers.gather(value, 0).result().tolist() == [0, 0, 2, 2, 4, 4]
    assert "0: array([0., 0.])" in repr(on_workers.run(doubled, args=(batch,)))


@pytest.mark.cluster
def test_values_that_are_used_are_numpy_arrays(on_workers):
    batch = PerReplica([np.full(2, float(k)) for k in range(3)])
    first, _, last = on_workers.run(doubled, args=(batch,)).values
    actual = (np.sqrt(last) + first * 2.0 + np.ones(2)).result()
    assert type(actual) is np.ndarray
    np.testing.assert_allclose(actual, 3)
    (computed,) = dask.compute(on_workers.run(doubled, args=(batch,)))
    assert [type(item) for item in computed.values] == [np.ndarray] * 3
    (kept,) = dask.persist(on_workers.run(doubled, args=(batch,)))
    assert [all_here(value).tolist() for value in kept.values] == [[0, 0], [2, 2], [4, 4]]


@pytest.mark.cluster
def test_all_reduce_between_workers(on_workers):
    def step(x):
        both = context().all_reduce("SUM", {"x": x, "mean": xp.mean(x)})
        actual = {**both, "all": context().all_gather(x, 0), "min": context().all_reduce("MIN", x)}
        return {key: (where(value), value) for key, value in actual.items()}

    large = 2**17
    for size in (2, large):
        values = [np.arange(size, dtype=np.float32) + k for k in range(3)]
        actual = on_workers.local_results(on_workers.run(step, args=(PerReplica(values),)))
        for own, name in zip(actual, ["STRICT:0", "STRICT:1", "STRICT:0"], strict=True):
            assert {where for where, _ in own.values()} == {name}
            check_same(own["x"][1], sum(values))
            check_same(own["all"][1], np.concatenate(values))
            check_same(own["min"][1], values[0])
            assert float(own["mean"][1]) == pytest.approx(sum(map(np.mean, values)))
        assert len({own["mean"][1].tobytes() for own in actual}) == 1


def _merged(strategy, x):
    return sum(map(np.asarray, map(here, x.values))), PerReplica([np.full(1, k) for k in range(3)])


@pytest.mark.cluster
def test_merge_call_between_workers(on_workers):
    def step(x):
        total, own = context().merge_call(_merged, args=(x,))
        return where(total), where(own), total, own

    actual = on_workers.local_results(on_workers.run(step, args=(PerReplica([np.ones(2)] * 3),)))
    for number, (total_is, own_is, total, own) in enumerate(actual):
        assert total_is == own_is == ("STRICT:1" if number == 1 else "STRICT:0")
        assert (total.tolist(), own.tolist()) == ([3, 3], [number])


@pytest.mark.cluster
def test_variables_on_workers(on_workers):
    with on_workers.scope():
        total = daskdist.Variable(np.zeros(2, np.float32), aggregation="SUM")
        own = daskdist.Variable(np.zeros(2, np.float32), synchronization="ON_READ", aggregation="SUM")
        first = daskdist.Variable(np.zeros(2, np.float32), aggregation="ONLY_FIRST_REPLICA")
        same = daskdist.Variable(np.zeros(2, np.float32))

    def step(x):
        total.assign_add(x)
        own.assign_add(x)
        first.assign(x)
        same.assign(total)
        return [where(item.read_value()) for item in (total, own, first, same)]

    batch = PerReplica([np.full(2, k + 1, np.float32) for k in range(3)])
    actual = on_workers.local_results(on_workers.run(step, args=(batch,)))
    assert actual == tuple([name] * 4 for name in ("STRICT:0", "STRICT:1", "STRICT:0"))
    for variable, wanted in [(total, 6), (own, 6), (first, 1), (same, 6)]:
        state = variable.state_dict()
        assert type(state["value"]) is np.ndarray
        assert state["value"].tolist() == [wanted] * 2
        variable.load_state_dict({"value": np.full(2, 9, np.float32)})
        assert variable.numpy().tolist() == [9, 9]
    assert [type(item) for item in on_workers.local_results(total.values)] == [np.ndarray] * 3


@pytest.mark.cluster
def test_destinations_on_workers(on_workers, monkeypatch):
    monkeypatch.setitem(devices.KINDS, "STRICT", ("strict_device:StrictDevice", "array_api_strict"))
    extended = on_workers.extended
    value = on_workers.run(doubled, args=(PerReplica([np.full(2, float(k)) for k in range(3)]),))
    for name in extended.worker_devices:
        actual = extended.reduce_to("SUM", value, name)
        assert all_here(actual).tolist() == [6, 6]
    sent = extended.broadcast_to(np.ones(2), None)
    places = on_workers.local_results(on_workers.run(place_of, args=(sent,)))
    assert places == ("STRICT:0", "STRICT:1", "STRICT:0")


@pytest.mark.cluster
def test_arrays_deep_in_objects_and_errors_leave_the_device(on_workers):
    batch = PerReplica([np.full(2, float(k)) for k in range(3)])
    actual = on_workers.local_results(on_workers.run(lambda x: SimpleNamespace(x=[x]), args=(batch,)))
    assert [type(item.x[0]) for item in actual] == [np.ndarray] * 3
    assert [result.x[0].tolist() for result in actual] == [[0, 0], [1, 1], [2, 2]]

    def fail(x):
        raise ValueError("no", x + 1)

    with pytest.raises(ValueError, match="no") as raised:
        on_workers.local_results(on_workers.run(fail, args=(batch,)))
    assert type(raised.value.args[1]) is np.ndarray
    assert raised.value.args[1].tolist() == [1, 1]


@pytest.mark.cluster
def test_device_arrays_of_the_program_are_sent_as_numpy_arrays(on_workers, monkeypatch):
    monkeypatch.setitem(devices.KINDS, "STRICT", ("strict_device:StrictDevice", "array_api_strict"))
    own = named("STRICT:1").put(np.arange(3.0))

    def leaves(self, protocol):
        raise TypeError("an array of a device leaves the process")

    monkeypatch.setattr(type(own), "__reduce_ex__", leaves)
    places = ("STRICT:0", "STRICT:1", "STRICT:0")
    assert on_workers.local_results(on_workers.run(place_of, args=(own,))) == places
    each = PerReplica([own] * 3)
    assert on_workers.local_results(on_workers.run(place_of, args=(each,))) == places
    assert all_here(on_workers.reduce("SUM", each, axis=None)).tolist() == [0, 3, 6]
    assert all_here(on_workers.gather(each, 0)).tolist() == [0, 1, 2] * 3
    with on_workers.scope():
        var = daskdist.Variable(own)
    var.assign(own + 1)
    assert var.numpy().tolist() == [1, 2, 3]
    sent = on_workers.extended.broadcast_to(own, None)
    assert on_workers.local_results(on_workers.run(place_of, args=(sent,))) == places


# --- arrays in what replicas call and are given ---


class Model:
    """An object with weights."""

    def __init__(self, weights):
        self.weights = weights


@pytest.fixture
def leaving(on_workers, monkeypatch):
    """Return the same strategy in a process that has such devices, whose arrays cannot be pickled."""

    def refused(self, protocol):
        raise TypeError("leaves as it is")

    monkeypatch.setitem(devices.KINDS, "STRICT", ("strict_device:StrictDevice", "array_api_strict"))
    monkeypatch.setattr(type(named("STRICT:0").put(np.ones(1))), "__reduce_ex__", refused)
    return on_workers


@pytest.mark.cluster
@pytest.mark.parametrize("size", [3, 2**18], ids=["small", "large"])
def test_arrays_in_functions_and_objects_come_to_each_replicas_device(leaving, size):
    weights = named("STRICT:1").put(np.full(size, 2.0))
    batch = PerReplica([np.full(size, float(k)) for k in range(3)])
    model = Model({"w": [weights]})
    here = Model(np.ones(size))

    def step(x, model, factor=weights):
        actual = (factor, weights, model.weights["w"][0])
        total = x * factor + weights * model.weights["w"][0]
        return [where(result) for result in actual], type(here.weights).__name__, total, id(factor)

    given = [leaving.local_results(leaving.run(step, args=(batch, model))) for _ in range(2)]
    for actual in given:
        for number, (places, of_the_host, total, _) in enumerate(actual):
            assert places == [["STRICT:0", "STRICT:1", "STRICT:0"][number]] * 3
            assert of_the_host == "ndarray"
            np.testing.assert_array_equal(total, np.full(size, 2.0 * number + 4))
    # Arrays that stay unchanged are sent once.
    assert [part[3] for part in given[0]] == [item[3] for item in given[1]]
    # Arrays that changed since are sent again.
    weights[...] = 3.0
    assert [value[2][0] for value in leaving.local_results(leaving.run(step, args=(batch, model)))] == [9, 12, 15]


@pytest.mark.cluster
def test_arrays_in_per_replica_arguments(leaving):
    models = PerReplica([Model(named("STRICT:0").put(np.full(2, float(k)))) for k in range(3)])
    actual = leaving.local_results(leaving.run(lambda model: (where(model.weights), model.weights), args=(models,)))
    assert [place for place, _ in actual] == ["STRICT:0", "STRICT:1", "STRICT:0"]
    assert [weights.tolist() for _, weights in actual] == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.cluster
def test_arrays_in_arguments_of_cpus_are_on_the_host(client, leaving):
    weights = named("STRICT:0").put(np.arange(3))
    with daskdist.MultiWorkerMirroredStrategy(client) as on_cpus:
        actual = on_cpus.run(lambda model: (type(weights), type(model.weights)), args=(Model(weights),))
        assert on_cpus.local_results(actual) == ((np.ndarray, np.ndarray),) * 2


@pytest.mark.cluster
def test_arrays_are_not_reported_as_unpicklable(leaving):
    lock = threading.Lock()
    weights = named("STRICT:0").put(np.arange(3))
    with pytest.raises(errors.ArgumentError, match=r"does not pickle.*because of lock \(_thread.lock\)"):
        leaving.run(lambda: (weights, lock))
    with pytest.raises(errors.ArgumentError, match=r"args\[0\].*because of weights\['lock'\]"):
        leaving.run(lambda model: None, args=(Model({"w": weights, "lock": lock}),))


@pytest.mark.cluster
def test_objects_sent_from_devices_have_host_arrays_in_the_program(leaving):
    sent = leaving.extended.broadcast_to(Model(named("STRICT:1").put(np.arange(3))), None)
    (first, *_) = leaving.local_results(sent)
    actual = first.result() if hasattr(first, "result") else first
    assert type(actual.weights) is np.ndarray


def test_looking_for_futures_copies_nothing(no_copies):
    assert futures_in(Model(named("STRICT:1").put(np.arange(3)))) == {}
    assert not no_copies
