"""Laws of replicas on devices of any kind: they compute on their devices, in their streams, with the CPU's results."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import daskdist
from daskdist import Dataset, DeviceAssignment, MirroredStrategy, MultiWorkerMirroredStrategy, Options, PerReplica
from daskdist.devices import device_of, is_on_device, name_of, named, on_host, stream_of
from daskdist.execute.callers.submit import workers_of
from daskdist.testing import afresh

DTYPES = ["?", "i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]
# From this number of bytes on, a library reduces between devices, if there is one.
LARGE = 2**21


def current_index(kind):
    """Return the index of this thread's current device."""
    if kind == "GPU":
        import cupy

        return cupy.cuda.runtime.getDevice()
    import strict_device

    actual = strict_device.current_device()
    return None if actual is None else actual.index


def check_own(device):
    """Check that this thread is on a device, in the stream of its replica."""
    index, stream = current_index(device.kind), device.current_stream()
    if index != device.index:
        raise RuntimeError(f"expected to be on {name_of(device)}, but on device {index}")
    if stream != stream_of(device):
        raise RuntimeError(f"expected to be in the stream of {name_of(device)}, but in {stream}")


def is_here(x):
    """Return whether an array is on the device of the calling replica."""
    return device_of(x) == named(daskdist.get_replica_context().devices[0])


def checked(x):
    """Add one to an array, checking that the replica is on its device."""
    check_own(named(daskdist.get_replica_context().devices[0]))
    return x + 1


def checked_together(x):
    """Call `checked` before and after an all-reduce, which waits for the other replicas."""
    context = daskdist.get_replica_context()
    checked(x)
    total = context.all_reduce("SUM", x)
    checked(x)
    return total


def checked_loop(iterator):
    """Call `checked` for each element of an iterator."""
    actual = []
    for x in iterator:
        checked(x)
        actual.append(on_host(x).tolist())
    return str(actual)


def checked_plus(a, b):
    """Add two arrays, checking that the call is on their device."""
    device = device_of(a)
    check_own(device)
    if device_of(b) != device:
        raise RuntimeError(f"one array is on {name_of(device)}, and the other is not")
    return a + b


def local(value):
    return list(value.values) if isinstance(value, PerReplica) else [value]


def values_of(value):
    return list(map(on_host, local(value)))


def lists_of(value):
    return [np.asarray(item).tolist() for item in values_of(value)]


def of_dtype(dtype, shape, seed=0):
    rng = np.random.default_rng(seed)
    actual = rng.integers(0, 100, shape)
    return (actual % 2 == 0) if dtype == "?" else actual.astype(dtype)


@contextlib.contextmanager
def own_streams(devices):
    """Enter a new stream of each device, other than those of the replicas."""
    with contextlib.ExitStack() as opened:
        for device in devices:
            opened.enter_context(device.using(device.stream()))
        yield


class StreamLaws:
    """Laws of values that are made in other streams than the replicas'; a subclass defines the replicas."""

    def names(self):
        """Return the names of one device or two."""
        raise NotImplementedError

    def hold_up(self, device):
        """Keep the current stream of a device busy for long."""
        raise NotImplementedError

    def strategy(self):
        return MirroredStrategy(self.names())

    @pytest.mark.parametrize("together", [False, True])
    def test_replicas_see_values_of_the_callers_stream(self, together):
        devices = list(map(named, self.names()))
        pairs = [(device.pinned(1000), device.empty((1000,), np.uint8)) for device in devices]

        def step(x):
            if together:
                daskdist.get_replica_context().all_reduce("SUM", np.float32(1))
            return x + 1

        with own_streams(devices):
            for device, pair in zip(devices, pairs, strict=True):
                self.copied(device, *pair)
            actual = values_of(self.strategy().run(step, args=(PerReplica([target for _, target in pairs]),)))
        assert [np.unique(result).tolist() for result in actual] == [[8]] * len(devices)

    @pytest.mark.parametrize("together", [False, True])
    def test_the_caller_sees_values_of_the_replicas_streams(self, together):
        devices = list(map(named, self.names()))
        pairs = [(device.pinned(1000), device.empty((1000,), np.uint8)) for device in devices]

        def step():
            context = daskdist.get_replica_context()
            if together:
                context.all_reduce("SUM", np.float32(1))
            number = context.replica_id_in_sync_group
            return self.copied(devices[number], *pairs[number])

        with own_streams(devices):
            actual = values_of(self.strategy().run(step))
        assert [np.unique(result).tolist() for result in actual] == [[7]] * len(devices)

    def copied(self, device, source, target, value=7):
        """Return numbers that are copied late in the current stream of a device."""
        source[:] = value
        self.hold_up(device)
        device.copy(source, target, device.current_stream())
        return target


class ReplicaLaws(StreamLaws):
    """Laws of replicas on devices."""

    def cpus(self):
        return MirroredStrategy([f"CPU:{k}" for k, _ in enumerate(self.names())])

    def placed(self, values):
        return PerReplica([named(name).put(value) for name, value in zip(self.names(), values, strict=True)])

    def test_functions_run_on_the_device_in_its_stream(self):
        strategy = self.strategy()
        given = [np.full(2, k) for k, _ in enumerate(self.names())]
        actual = strategy.run(checked, args=(self.placed(given),))
        assert lists_of(actual) == [(value + 1).tolist() for value in given]
        distributed = strategy.distribute_dataset(Dataset.range(8).batch(4))
        assert len([strategy.run(checked, args=(x,)) for x in distributed]) == 2

    def test_functions_with_collectives_run_on_the_device(self):
        given = [np.full(2, k + 1) for k, _ in enumerate(self.names())]
        actual = self.strategy().run(checked_together, args=(self.placed(given),))
        assert lists_of(actual) == [sum(given).tolist()] * len(given)

    def test_loops_run_on_the_device(self):
        dataset = Dataset.range(8).batch(4).map(checked, device=True)
        strategy, cpus = self.strategy(), self.cpus()
        actual = strategy.run(checked_loop, args=(strategy.distribute_dataset(dataset),))
        plain = Dataset.range(8).batch(4).map(lambda x: x + 1)
        wanted = cpus.run(lambda value: str([x.tolist() for x in value]), args=(cpus.distribute_dataset(plain),))
        assert list(map(str, values_of(actual))) == list(map(str, values_of(wanted)))

    def test_device_maps_run_on_the_device(self):
        dataset = Dataset.range(8).batch(4).map(checked, device=True)
        steps = list(self.strategy().distribute_dataset(dataset))
        assert all(is_on_device(item) for x in steps for item in self.strategy().local_results(x))
        assert np.concatenate([value for x in steps for value in values_of(x)]).tolist() == list(range(1, 9))

    def test_updates_run_on_the_device(self):
        values = [np.ones(2), np.zeros(2)][: len(self.names())]
        actual = self.strategy().extended.update(self.placed(values), checked, group=False)
        assert [on_host(result).tolist() for result in actual] == [(value + 1).tolist() for value in values]

    @pytest.mark.parametrize("batch_size", [1, 7, 64])
    @pytest.mark.parametrize("epochs", [1, 2])
    def test_shuffled_on_the_device_is_as_on_the_host(self, batch_size, epochs):
        columns = {dtype: of_dtype(dtype, (200, 3)) for dtype in DTYPES}
        dataset = Dataset.from_tensor_slices(columns).shuffle(50, seed=3).batch(batch_size, drop_remainder=False)
        there = self.strategy().distribute_dataset(dataset.with_options(Options(shuffle_on_device=True)))
        here = self.cpus().distribute_dataset(afresh(dataset))
        for _ in range(epochs):
            for one, other in zip(there, here, strict=True):
                for dtype in DTYPES:
                    for name, actual, wanted in zip(
                        self.names(), local(one[dtype]), values_of(other[dtype]), strict=True
                    ):
                        assert is_on_device(actual) != named(name).lacks(wanted.dtype)
                        actual = on_host(actual)
                        assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
                        assert actual.tobytes() == wanted.tobytes()

    def test_every_dtype_is_copied(self):
        device = named(self.names()[0])
        for dtype in DTYPES:
            values = [of_dtype(dtype, (5, 2), seed) for seed, _ in enumerate(self.names())]
            actual = self.strategy().run(lambda x: x, args=(PerReplica(values),))
            for one, other in zip(local(actual), values, strict=True):
                assert is_on_device(one) != device.lacks(other.dtype)
                assert on_host(one).dtype == other.dtype
                assert np.array_equal(on_host(one), other)

    @pytest.mark.cluster
    def test_replicas_on_workers_run_on_their_devices(self, client):
        with self.on_workers(client) as strategy:
            dataset = strategy.distribute_dataset(Dataset.range(8).batch(4).map(checked, device=True))
            assert [lists_of(x) for x in dataset] == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
            actual = strategy.run(checked_loop, args=(dataset,))
            assert list(map(str, values_of(actual))) == ["[[1, 2], [5, 6]]", "[[3, 4], [7, 8]]"]
            values = PerReplica([np.ones(2), np.zeros(2)])
            assert lists_of(strategy.run(checked_together, args=(values,))) == [[1, 1]] * 2
            # Arrays of two workers are gathered on the host.
            assert lists_of(strategy.reduce("SUM", strategy.run(checked, args=(values,)), axis=0)) == [6]

    def test_values_assigned_between_replicas_are_on_their_devices(self):
        self.check_between(self.strategy())

    @pytest.mark.cluster
    def test_values_assigned_between_replicas_of_workers_are_on_their_devices(self, client):
        with self.on_workers(client) as strategy:
            self.check_between(strategy)

    def check_between(self, strategy):
        size = strategy.num_replicas_in_sync
        with strategy.scope():
            same = daskdist.Variable(np.ones(3, np.float32))
            own = daskdist.Variable(np.zeros(2), synchronization="ON_READ", aggregation="SUM")

        def merged(strategy, own, x):
            same.assign_add(strategy.reduce("SUM", x, axis=None))
            strategy.extended.update(own, lambda own, x: own.assign_add(checked(x[:2])), args=(x,))

        def step(x):
            daskdist.get_replica_context().merge_call(merged, args=(own, x))
            return str([is_here(item.read_value()) for item in (same, own)])

        values = PerReplica([np.full(3, k, np.float32) for k in range(size)]) if size > 1 else np.ones(3, np.float32)
        actual = strategy.local_results(strategy.run(step, args=(values,)))
        assert list(actual) == ["[True, True]"] * size
        each = list(range(size)) if size > 1 else [1]
        assert same.numpy().tolist() == [1 + sum(each)] * 3
        assert [on_host(copy).tolist() for copy in strategy.local_results(own)] == [[k + 1] * 2 for k in each]

    def on_workers(self, client):
        workers = list(workers_of(client))
        name = self.names()[0]
        assignment = DeviceAssignment([(worker, name) for worker in workers])
        # There may be only one device.
        return MultiWorkerMirroredStrategy(client, assignment, share_devices=True)


class PairLaws(ReplicaLaws):
    """Laws of replicas on two devices."""

    # Use other values each time, since reused memory has the previous ones.
    @pytest.mark.parametrize(("how", "value"), [("gather", 1), ("reduce", 2), ("run", 3)])
    def test_the_other_device_sees_values_of_the_callers_stream(self, how, value):
        devices = list(map(named, self.names()))
        pairs = [(device.pinned(1000), device.empty((1000,), np.uint8)) for device in devices]
        strategy = self.strategy()
        with own_streams(devices):
            # Only the second is late, so that waiting for the first is not enough.
            pairs[0][0][:] = value
            devices[0].copy(*pairs[0], devices[0].current_stream())
            self.copied(devices[1], *pairs[1], value)
            targets = PerReplica([target for _, target in pairs])
            actual = {
                "gather": lambda: strategy.gather(targets, axis=0),
                "reduce": lambda: strategy.reduce("MAX", targets, axis=None),
                # Nothing is called on the other device.
                "run": lambda: MirroredStrategy(self.names()[:1]).run(lambda x: x, args=(pairs[1][1],)),
            }[how]()
            assert np.unique(on_host(actual)).tolist() == [value]

    def test_functions_that_reduce_run_on_the_device(self):
        actual = self.strategy().reduce(checked_plus, self.placed([np.arange(4), np.arange(4) * 2]), axis=0)
        assert lists_of(actual) == [18]

    @pytest.mark.parametrize("how", ["SUM", "MEAN", "MAX", "MIN", "PROD"])
    @pytest.mark.parametrize("dtype", ["i4", "u8", "f4", "f8"])
    def test_large_arrays_are_reduced_as_on_the_host(self, how, dtype):
        values = [of_dtype(dtype, LARGE // np.dtype(dtype).itemsize, seed) % 7 for seed in (1, 2)]
        actual = self.strategy().reduce(how, self.placed(values), axis=None)
        assert device_of(actual) == named(self.names()[0])
        wanted = self.cpus().reduce(how, PerReplica(values), axis=None)
        assert on_host(actual).dtype == wanted.dtype
        # Two values have only one order of summation, so the bits are equal.
        assert np.array_equal(on_host(actual), wanted)
