"""Steps put on the devices of replicas ahead of use, on a device whose copies are late."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import weakref

import dask
import numpy as np
import pytest
import strict_device
from conftest import eventually, mirrored
from feeding_checks import arrays, device_gather_of, feed_threads, join, taken_bytes
from strict_device import LIMITS, StrictDevice, StrictStream, reads_late

import daskdist
from daskdist import Dataset, DeviceAssignment, InputOptions, MirroredStrategy, Options, errors
from daskdist.core.ragged import Ragged
from daskdist.devices import device, on_host, stream_of
from daskdist.execute.transfer import copier, layout, prefetch
from daskdist.execute.transfer.copier import Channel, channel_of, pinned_empty
from daskdist.execute.transfer.deferred_release import DeferredRelease
from daskdist.execute.transfer.prefetch import DevicePrefetch
from daskdist.sharding import AutoShardPolicy
from daskdist.strategy.input import replica_plans, shared_reader
from daskdist.strategy.input.dataset import feed_for_pass
from daskdist.testing import afresh

pytestmark = pytest.mark.usefixtures("strict_and_fed")

KIB = 2**10
MIB = 2**20


@pytest.fixture
def late():
    StrictStream.delay_s = 0.002


@pytest.fixture
def waits_by_itself(monkeypatch):
    """Make streams wait asynchronously, like those of a GPU."""
    monkeypatch.setattr(StrictStream, "wait", lambda self, event: self.give(event.synchronize))


def told(element):
    """Return a nest as lists of dtypes, shapes and values, with arrays on any device."""
    if isinstance(element, dict):
        return {name: told(value) for name, value in element.items()}
    if isinstance(element, (tuple, list)):
        return [told(value) for value in element]
    if isinstance(element, Ragged):
        return [row.tolist() for row in element]
    array = np.asarray(on_host(element))
    return [array.dtype.name, list(array.shape), array.tolist()]


def steps_of(strategy, distributed, most=None):
    return [
        [told(value) for value in strategy.local_results(step)] for step in itertools.islice(iter(distributed), most)
    ]


# --- the same as on the host ---


def many_dtypes(x):
    return {
        "bool": x % 2 == 0,
        "int8": x.astype(np.int8),
        "uint16": x.astype(np.uint16),
        "float32": x / np.float32(2),
        "complex": x + 1j * x,
        "big": x.astype(">i4"),
        # Dtypes that the device lacks stay on the host.
        "half": x.astype(np.float16),
        "text": x.astype(np.dtypes.StringDType()),
    }


def with_options(dataset, **options):
    return dataset.with_options(Options(**options))


PIPELINES = {
    "plain": lambda: Dataset.from_tensor_slices(np.arange(120, dtype=np.float32).reshape(40, 3)).batch(8),
    "shuffled": lambda: Dataset.range(100).shuffle(16, seed=3).batch(12),
    "dtypes": lambda: Dataset.range(37).batch(6).map(many_dtypes),
    "nested": lambda: Dataset.range(40).map(lambda x: {"x": x, "pair": (x * 2, x / 2)}).batch(6),
    "columns_of_rows": lambda: Dataset.range(40).batch(8).map(lambda x: np.stack([x, -x], axis=1).T),
    "short_last_batch": lambda: Dataset.range(13).batch(10),
    "a_replica_without_rows": lambda: Dataset.range(9).batch(4),
    "rows_left_out": lambda: Dataset.range(40).batch(8).map(lambda x: x[x % 3 == 0]),
    "uneven_dropped": lambda: with_options(Dataset.range(43).batch(10), drop_uneven=True),
    "threads": lambda: with_options(Dataset.range(64).batch(4), num_threads=2),
    "ragged": lambda: Dataset.range(20).map(lambda x: {"n": x, "row": np.arange(x % 4)}).ragged_batch(4),
    "large": lambda: Dataset.from_tensor_slices(np.arange(2**20, dtype=np.float64).reshape(8, -1)).batch(4),
    "empty": lambda: Dataset.range(0).batch(4),
}


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("name", PIPELINES)
def test_values_and_order_are_those_of_the_host(late, name, num_replicas):
    dataset = PIPELINES[name]()
    here, there = mirrored(num_replicas), device_gather_of(num_replicas)
    expected = steps_of(here, here.distribute_dataset(afresh(dataset)))
    distributed = there.distribute_dataset(afresh(dataset))
    # With reshuffling, another pass has another order.
    assert steps_of(there, distributed) == expected
    second = here.distribute_dataset(afresh(dataset))
    steps_of(here, second)
    assert steps_of(there, distributed) == steps_of(here, second)


def test_dtypes_that_a_device_lacks_stay_on_the_host(late):
    strategy = device_gather_of(2)
    (step,) = strategy.distribute_dataset(Dataset.range(4).batch(4).map(many_dtypes))
    where = {name: [StrictDevice.holds(value) for value in item.values] for name, item in step.items()}
    assert where == {name: [name not in ("half", "text")] * 2 for name in where}
    ragged = PIPELINES["ragged"]()
    for step in device_gather_of().distribute_dataset(ragged):
        assert StrictDevice.holds(step["n"])
        assert isinstance(step["row"], Ragged)


def test_plans_name_leaves_that_stay_on_the_host():
    words = "on the host, as devices have no such arrays: ['half'] (float16), ['text'] (StringDType())"
    dataset = Dataset.range(4).batch(4).map(many_dtypes)
    for strategy in (device_gather_of(2), MirroredStrategy(["CPU:0", "STRICT:1"])):
        assert strategy.distribute_dataset(dataset).explain().splitlines()[-1] == words
    lone = Dataset.from_tensor_slices(np.array([None] * 4)).batch(2)
    assert "no such arrays: (the element) (object)" in device_gather_of().distribute_dataset(lone).explain()
    assert "no such arrays: ['row'] (ragged)" in device_gather_of().distribute_dataset(PIPELINES["ragged"]()).explain()
    windows = Dataset.range(4).window(2)
    assert (
        "no such arrays: (the element) (datasets)"
        in device_gather_of().distribute_datasets_from_function(lambda context: windows).explain()
    )
    for strategy, given in ((mirrored(2), dataset), (device_gather_of(2), Dataset.range(4).batch(4))):
        assert "on the host" not in strategy.distribute_dataset(given).explain()


def test_elements_without_an_axis(late):
    strategy = device_gather_of(2)

    def numbers(context):
        return Dataset.range(6).map(lambda x: {"number": x, "half": x / 2})

    steps = list(strategy.distribute_datasets_from_function(numbers))
    actual = [strategy.local_results(step["number"]) for step in steps]
    assert all(StrictDevice.holds(item) and item.shape == () for pair in actual for item in pair)
    assert [[int(value) for value in pair] for pair in actual] == [[0, 1], [2, 3], [4, 5]]


def test_devices_and_the_host_side_by_side(late):
    strategy = MirroredStrategy(["CPU:0", "STRICT:1"])
    steps = list(strategy.distribute_dataset(Dataset.range(11).batch(4)))
    kinds = [[type(value) for value in step.values] for step in steps]
    assert kinds == [[np.ndarray, type(StrictDevice(1).empty((), np.int64))]] * 3
    # A replica without rows gets an empty array on its device.
    assert told(steps[-1].values) == [["int64", [2], [8, 9]], ["int64", [1], [10]]]
    assert told(list(strategy.distribute_dataset(Dataset.range(5).batch(4)))[-1].values)[1] == ["int64", [0], []]


def test_values_stay_on_the_host_if_requested():
    strategy = device_gather_of(2)
    distributed = strategy.distribute_dataset(Dataset.range(8).batch(4), InputOptions(fetch_to_device=False))
    iterator = iter(distributed)
    assert all(type(value) is np.ndarray for step in iterator for value in step.values)
    assert "device" not in iterator.stats()
    assert strategy.run(lambda it: {type(element) for element in it} == {np.ndarray}, args=(distributed,)).values == (
        True,
        True,
    )
    # The arrays do not know that they should stay on the host, so `run` puts them on the devices.
    for step in distributed:
        assert strategy.run(lambda x: StrictDevice.holds(x), args=(step,)).values == (True, True)


def test_an_endless_dataset_left_early(late):
    here, there = mirrored(2), device_gather_of(2)
    dataset = Dataset.range(10).repeat().batch(4)
    distributed = there.distribute_dataset(afresh(dataset))
    assert steps_of(there, distributed, 7) == steps_of(here, here.distribute_dataset(afresh(dataset)), 7)
    gc.collect()
    join(feed_threads())


def fails_at_hundred(x):
    if 100 in x:
        raise ValueError("not a hundred")
    return x


def up_to_the_error(strategy, dataset):
    iterator, found = iter(strategy.distribute_dataset(dataset)), []
    while len(found) < 100:
        try:
            found.append(told(next(iterator).values))
        except errors.UserFunctionError as error:
            return found, str(error)
    return None


def test_an_error_is_raised_after_the_steps_before_it(late):
    dataset = Dataset.range(200).batch(4).map(fails_at_hundred)
    actual = up_to_the_error(device_gather_of(2), dataset)
    assert actual == up_to_the_error(mirrored(2), dataset)
    assert len(actual[0]) > 5
    join(feed_threads())


def test_functions_get_steps_on_their_devices_without_copies(late):
    strategy = device_gather_of(2)
    iterator = iter(strategy.distribute_dataset(Dataset.range(16).batch(8)))

    def double(x):
        return StrictDevice.holds(x), x + x

    are_there, doubled = strategy.run(double, args=(next(iterator),))
    assert are_there.values == (True, True)
    assert told(doubled.values) == [["int64", [4], [0, 2, 4, 6]], ["int64", [4], [8, 10, 12, 14]]]


# --- units, and memory of the host ---


def test_leaves_are_packed_and_copied_together():
    whole = np.arange(64, dtype=np.float64)
    steps = [[whole[8 * k : 8 * k + 8], np.arange(3, dtype=np.int16) + k] for k in range(4)]
    step_layout = layout.layout_of(device("STRICT:0"), steps)
    # Adjacent parts of one array are one piece; each other array is a piece of its own.
    assert [piece.num_bytes for piece in step_layout.packed] == [4 * 64, 6, 6, 6, 6]
    assert all(piece.offset % 256 == 0 for piece in step_layout.packed)
    assert [step[0].offset for step in step_layout.steps] == [0, 64, 128, 192]
    memory = np.zeros(step_layout.num_bytes, np.uint8)
    (span,) = step_layout.spans()
    span.pack(memory)
    for step, placed in zip(steps, step_layout.steps, strict=True):
        for leaf, at in zip(step, placed, strict=True):
            np.testing.assert_array_equal(np.ndarray(at.shape, at.dtype, memory, at.offset), leaf)


def test_pinned_leaves_are_copied_from_where_they_lie(monkeypatch):
    strict = device("STRICT:0")
    whole = pinned_empty(strict)((4, 2**14), np.float64)
    whole[...] = np.random.default_rng(0).random(whole.shape)
    assert strict.is_pinned(whole)
    copied = []
    monkeypatch.setattr(layout.PackedSpan, "pack", lambda self, memory: copied.append(self))
    StrictStream.delay_s = 0.002
    expected = whole.copy()
    actual = list(DevicePrefetch(iter([[[row]] for row in whole]), [strict]))
    for row, ((leaf,),) in zip(expected, actual, strict=True):
        np.testing.assert_array_equal(on_host(leaf), row)
    assert not copied


def memory_of(leaf):
    """Return a weak reference to the memory of a pinned array."""
    while isinstance(leaf, np.ndarray):
        leaf = leaf.base
    return weakref.ref(leaf.obj)


def test_pinned_memory_stays_unchanged_until_it_is_copied():
    strict = device("STRICT:0")
    StrictStream.delay_s = 0.01
    kept = []

    def source():
        for number in range(4):
            leaf = pinned_empty(strict)((2**14,), np.float64)
            leaf[:] = number
            kept.append(memory_of(leaf))
            yield [[leaf]]

    ahead = DevicePrefetch(source(), [strict])
    for number, ((leaf,),) in enumerate(ahead):
        assert on_host(leaf).tolist()[::5000] == [number] * 4
    join(feed_threads())
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4


def test_small_and_other_arrays_are_not_pinned():
    empty = pinned_empty(device("STRICT:0"))
    assert not StrictDevice(0).is_pinned(empty((3,), np.int64))
    assert not StrictDevice(0).is_pinned(empty((2**16,), np.float16))
    assert empty((2**10, 2**5), np.complex64).shape == (2**10, 2**5)


def test_shuffled_rows_are_gathered_into_pinned_memory(monkeypatch):
    seen = []
    layout_of = layout.layout_of

    def noted(device, steps, **options):
        step_layout = layout_of(device, steps, **options)
        seen.append((len(step_layout.direct), len(step_layout.packed)))
        return step_layout

    monkeypatch.setattr(prefetch, "layout_of", noted)
    rows = np.random.default_rng(0).random((256, 2**10))
    strategy = device_gather_of()
    dataset = Dataset.from_tensor_slices(rows).shuffle(64, seed=1).batch(32)
    here = mirrored(1)
    assert steps_of(strategy, strategy.distribute_dataset(afresh(dataset))) == steps_of(
        here, here.distribute_dataset(afresh(dataset))
    )
    assert seen
    assert all(num_direct and not num_packed for num_direct, num_packed in seen)


def test_large_arrays_of_any_layout_are_packed(late):
    wide = np.random.default_rng(0).random((2**10, 2**11))
    # Arrays that are contiguous, that have gaps between elements, and that have one row.
    leaves = [wide, wide[:, ::2], wide.T, wide.reshape(1, -1)[:, ::2]]
    ((actual,),) = DevicePrefetch(iter([[leaves]]), [device("STRICT:0")])
    for leaf, result in zip(leaves, actual, strict=True):
        np.testing.assert_array_equal(on_host(result), leaf)


def values_by(source_steps, **options):
    ahead = DevicePrefetch(iter(source_steps), [device("STRICT:0")], unit_bytes=64 * KIB, **options)
    actual = []
    for ((leaf,),) in ahead:
        actual.append(on_host(leaf))
    return actual


def test_memory_of_the_host_is_written_to_again_only_when_it_is_copied():
    StrictStream.delay_s = 0.01
    steps = arrays((2**13,), num_steps=10)
    for actual, ((leaf,),) in zip(values_by(steps), steps, strict=True):
        np.testing.assert_array_equal(actual, leaf)


def test_early_reuse_of_host_memory_would_be_noticed(monkeypatch):
    StrictStream.delay_s = 0.01
    monkeypatch.setattr(layout.PinnedSlot, "is_free", property(lambda self: not self.is_taken))
    monkeypatch.setattr(layout.PinnedSlot, "wait", lambda self: None)
    monkeypatch.setattr(copier.channel_of("STRICT:0"), "slots", layout.PinnedRing(device("STRICT:0"), 2))
    steps = arrays((2**13,), num_steps=10)
    actual = values_by(steps)
    assert not all(np.array_equal(result, leaf) for result, ((leaf,),) in zip(actual, steps, strict=True))


@pytest.mark.parametrize("leaf_bytes", [100, 3 * MIB, 7 * MIB])
@pytest.mark.parametrize("kind", ["plain", "swapped", "strided"])
def test_large_units_are_packed_and_copied_in_spans(leaf_bytes, kind):
    StrictStream.delay_s = 0.002
    rng = np.random.default_rng(leaf_bytes)
    leaf = rng.integers(0, 100, (leaf_bytes // 40, 5)).astype(">i8" if kind == "swapped" else np.int64)
    step = [leaf[:, ::2] if kind == "strided" else leaf, rng.random(3), np.float32(7), rng.random((3, 2**17))]
    step_layout = layout.layout_of(device("STRICT:0"), [step])
    spans = step_layout.spans()
    assert all(span.num_bytes <= layout.SPAN_BYTES for span in spans)
    assert [span.offset for span in spans] == sorted({span.offset for span in spans})
    assert len(spans) >= leaf_bytes * (0.6 if kind == "strided" else 1) // layout.SPAN_BYTES
    (actual,) = DevicePrefetch(iter([[step]]), [device("STRICT:0")], unit_bytes=64 * MIB)
    for there, expected in zip(actual[0], step, strict=True):
        np.testing.assert_array_equal(on_host(there), expected)


def test_an_error_while_packing_leaves_no_slot_taken(monkeypatch):
    strict = device("STRICT:0")
    copies = copier.Copier(strict, 2)
    steps = [[np.zeros(9 * MIB, np.uint8)]]

    def copy():
        step_layout = layout.layout_of(strict, steps)
        part = copier.ReplicaPart(step_layout.steps)
        copies.copy(step_layout, copies.buffer(step_layout.num_bytes), part)

    copy()
    with monkeypatch.context() as patched:
        patched.setattr(layout.PackedSpan, "pack", lambda self, memory: 1 // 0)
        for _ in range(20):
            with pytest.raises(ZeroDivisionError):
                copy()
    copy()
    slots = copier.channel_of("STRICT:0").slots._slots
    assert 0 < len(slots) <= copier._MOST_SLOTS
    assert not any(slot.is_taken for slot in slots)


# --- captured and destroyed streams ---


@pytest.fixture
def allocated():
    """Return a channel of a device, a stream that uses its memory, and a list with 64 bytes of that memory."""
    strict = device("STRICT:0")
    channel = Channel(strict)
    stream = strict.stream()
    channel.add_consumer(stream)
    return channel, stream, [channel.allocate(strict, channel.stream, 64)]


def test_memory_released_during_a_capture_is_kept_until_its_end(allocated, waits_by_itself):
    channel, stream, memory = allocated
    actual, may_read = [], threading.Event()
    with device("STRICT:0").using(stream):
        reads_late(memory[0], actual, begin=may_read)
    stream.is_captured = True
    # Recording an event now would raise an error.
    memory.clear()
    assert len(channel._kept) == 1
    other = channel.allocate(device("STRICT:0"), channel.stream, 64)
    assert len(channel._kept) == 1
    stream.is_captured = False
    again = channel.allocate(device("STRICT:0"), channel.stream, 64)
    assert not channel._kept
    is_over = channel.stream.record()
    assert not is_over.is_over
    may_read.set()
    is_over.synchronize()
    assert len(actual) == 1
    del again, other


def test_no_step_is_taken_during_a_capture():
    strict = device("STRICT:0")
    ahead = DevicePrefetch(iter(arrays((4,), num_steps=3)), [strict])
    stream = strict.stream()
    with strict.using(stream):
        stream.is_captured = True
        with pytest.raises(errors.ArgumentError, match=r"STRICT:0 is captured as a graph; take the step before"):
            next(ahead)
        stream.is_captured = False
        assert [on_host(leaf)[0] for ((leaf,),) in ahead] == [0, 1000, 2000]
    # Steps that were copied together with earlier ones are not taken either.
    ahead = DevicePrefetch(iter(arrays((4,), num_steps=60)), [strict])
    captured, found = strict.stream(), []
    captured.is_captured = True
    for _ in range(20):
        found.append(on_host(next(ahead)[0][0])[0])
        with strict.using(captured), pytest.raises(errors.ArgumentError, match="is captured as a graph"):
            next(ahead)
    found += [on_host(leaf)[0] for ((leaf,),) in ahead]
    assert found == [1000 * step for step in range(60)]
    # Nor if the stream of the replica is captured, whichever stream asks.
    ahead, replica_stream = DevicePrefetch(iter(arrays((4,), num_steps=1)), [strict]), stream_of(strict)
    replica_stream.is_captured = True
    try:
        with strict.using(strict.stream()), pytest.raises(errors.ArgumentError, match="is captured as a graph"):
            next(ahead)
    finally:
        replica_stream.is_captured = False
    assert [on_host(leaf)[0] for ((leaf,),) in ahead] == [0]


def test_a_destroyed_stream_is_passed_over(allocated, caplog):
    channel, stream, memory = allocated
    other = device("STRICT:0").stream()
    channel.add_consumer(other)
    stream.is_destroyed = True
    memory.clear()
    assert "was destroyed" in caplog.text
    assert channel.consumers[1:] == (other,)


def read_late(num_steps=8, late_s=0.02):
    """Read each step by a kernel that starts only after the next steps have been copied, or could have been."""
    actual = []
    late = threading.Event()
    for ((leaf,),) in DevicePrefetch(iter(arrays((2**12,), num_steps=num_steps)), [device("STRICT:0")], unit_bytes=KIB):
        # The event is never set: the kernel begins after `late_s`.
        device("STRICT:0").current_stream().give(lambda: late.wait(late_s))
        reads_late(leaf, actual)
        del leaf
    device("STRICT:0").current_stream().synchronize()
    return [np.frombuffer(result) for result in actual]


def test_memory_is_reused_only_after_its_last_reader():
    for step, actual in enumerate(read_late()):
        np.testing.assert_array_equal(actual, np.arange(2**12) + 1000.0 * step)


def test_early_reuse_of_device_memory_would_be_noticed(monkeypatch):
    monkeypatch.setattr(Channel, "_reuse", lambda *args: None)
    assert any(actual[0] != 1000 * step for step, actual in enumerate(read_late()))


def read_unknown(strict, is_minded, num_steps=8, late_s=0.02):
    """Read each step in a stream that only a framework knows, after the framework has released the step."""
    actual, late = [], threading.Event()
    unknown = strict.stream()
    if is_minded:
        channel_of(f"STRICT:{strict.index}").add_unknown_consumers(lambda: unknown.record().synchronize())
    for ((leaf,),) in DevicePrefetch(iter(arrays((2**12,), num_steps=num_steps)), [strict], unit_bytes=KIB):
        unknown.give(lambda: late.wait(late_s))
        reads_late(leaf, actual, stream=unknown)
        del leaf
    unknown.synchronize()
    return [np.frombuffer(result) for result in actual]


def test_memory_read_in_an_unknown_stream_is_kept_until_it_is_done():
    copier._channels.clear()
    try:
        # Check that the test can fail: without waiting for unknown streams, a kernel reads the values of a later step.
        assert any(actual[0] != 1000 * step for step, actual in enumerate(read_unknown(device("STRICT:0"), False)))
        for step, actual in enumerate(read_unknown(device("STRICT:0"), True)):
            np.testing.assert_array_equal(actual, np.arange(2**12) + 1000.0 * step)
        held = channel_of("STRICT:0").deferred_release._held
        channel_of("STRICT:0").wait_for_unknown_consumers()
        assert not held.memory
    finally:
        copier._channels.clear()


def test_a_copy_waits_when_too_much_memory_is_held():
    may_go = threading.Event()
    holding = DeferredRelease(lambda: may_go.wait(30))
    for number in range(4):
        holding.hold(number)
    waits = threading.Thread(target=holding.await_room)
    waits.start()
    waits.join(0.05)
    assert waits.is_alive()
    may_go.set()
    waits.join(30)
    assert not waits.is_alive()
    (thread,) = [value for value in threading.enumerate() if value.name == "daskdist holding"]
    del holding
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_a_stream_that_is_forgotten_is_waited_for_first(waits_by_itself):
    strict, actual, may_read = device("STRICT:0"), [], threading.Event()
    channel = Channel(strict)
    mine = strict.stream()
    channel.add_consumer(mine)
    allocated = channel.allocate(strict, channel.stream, 64)
    with strict.using(mine):
        reads_late(allocated, actual, begin=may_read)
    for _ in range(20):
        channel.add_consumer(strict.stream())
    assert mine not in channel.consumers
    del allocated
    is_over = channel.stream.record()
    assert not is_over.is_over
    may_read.set()
    is_over.synchronize()
    assert len(actual) == 1


def test_limit_of_bytes_copied_in_place(waits_by_itself):
    # A program that reads no results requests steps faster than they can be copied.
    StrictStream.delay_s = 0.005
    kept, most = [], 0

    def source():
        for _ in range(30):
            leaf = pinned_empty(device("STRICT:0"))((2**14,), np.float64)
            kept.append(memory_of(leaf))
            yield [[leaf]]

    for step in DevicePrefetch(source(), [device("STRICT:0")], num_units=2, unit_bytes=KIB):
        del step
        most = max(most, sum(ref() is not None for ref in kept))
    # Of the steps, two are being copied, two are ahead, one is being gathered and one waits to be copied.
    assert most <= 6


def test_slots_are_used_again(monkeypatch):
    made = []
    pinned = StrictDevice.pinned
    monkeypatch.setattr(StrictDevice, "pinned", lambda self, size, **_: made.append(size) or pinned(self, size))
    monkeypatch.setattr(channel_of("STRICT:0"), "slots", layout.PinnedRing(device("STRICT:0"), copier._MOST_SLOTS))
    StrictStream.delay_s = 0.002
    values_by(arrays((2**13,), num_steps=20))
    assert 1 <= len(made) <= copier._MOST_SLOTS
    made.clear()
    # A larger unit gets a larger buffer.
    values_by([*arrays((2**13,), num_steps=4), *arrays((2**18,), num_steps=2)])
    assert max(made) == 2 * 2**20
    assert len(made) <= 4


# --- memory of the device ---


def test_chunks_that_are_kept_stay_as_they_are(late):
    ahead = DevicePrefetch(iter(arrays((2**12,), num_steps=12)), [device("STRICT:0")], unit_bytes=KIB)
    kept = [leaf for ((leaf,),) in ahead]
    for step, leaf in enumerate(kept):
        np.testing.assert_array_equal(on_host(leaf), np.arange(2**12) + 1000.0 * step)
    assert ahead.stats()["num_grown"] >= 6


def test_released_chunks_free_their_memory():
    ahead = DevicePrefetch(iter(arrays((2**12,), num_steps=20)), [device("STRICT:0")], unit_bytes=KIB)
    for step in ahead:
        del step
    assert ahead.stats()["num_grown"] == 0
    del ahead
    join(feed_threads())
    assert taken_bytes() == 0


@pytest.mark.parametrize(
    ("options", "num_chunks"),
    [({"num_units": 1}, 1), ({"num_units": 3}, 3), ({"num_units": 9, "num_bytes": 2 * 32 * KIB + 5}, 2)],
    ids=["one", "three", "bytes"],
)
def test_bytes_ahead_are_limited(options, num_chunks):
    num_read = 0

    def source():
        nonlocal num_read
        for step in arrays((2**12,), num_steps=16):
            num_read += 1
            yield step

    chunk_bytes = 32 * KIB
    ahead = DevicePrefetch(source(), [device("STRICT:0")], unit_bytes=KIB, **options)
    for number in range(5):
        first = next(ahead)
        # One unit is on the device, and one has been read but does not fit.
        eventually(lambda number=number: num_read == number + num_chunks + 2)
        # Units that were released stay as well while the consumer's stream may compute with them, at most two.
        assert taken_bytes() // chunk_bytes - (num_chunks + 1) in range(min(number, 2) + 1)
        del first
    ahead.close()
    join(feed_threads())
    assert taken_bytes() == 0


@pytest.mark.parametrize("where", ["on_the_device", "on_the_host"])
def test_arrays_that_are_not_copied_count_as_steps_ahead(where):
    num_read = 0

    def source():
        nonlocal num_read
        for ((leaf,),) in arrays((2**12,), num_steps=100):
            num_read += 1
            yield [(device("STRICT:0").put(leaf) if where == "on_the_device" else leaf.astype("datetime64[s]"),)]

    ahead = DevicePrefetch(source(), [device("STRICT:0")], num_units=2, unit_bytes=KIB)
    for number in range(5):
        next(ahead)
        # Two units of one step each, and one that has been read but does not fit.
        eventually(lambda number=number: num_read == number + 4)
    ahead.close()
    join(feed_threads())


def test_small_steps_share_a_copy():
    ahead = DevicePrefetch(iter(arrays((4,), num_steps=100)), [device("STRICT:0")])
    num_copies = 0
    copy = StrictDevice.copy

    def counted(self, *args):
        nonlocal num_copies
        num_copies += 1
        copy(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StrictDevice, "copy", counted)
        assert [on_host(leaf)[0] for ((leaf,),) in ahead] == [1000 * step for step in range(100)]
    assert num_copies < 30


def test_fewer_steps_are_ahead_when_memory_is_exhausted(late, caplog):
    chunk_bytes = 32 * KIB
    LIMITS[0] = 3 * chunk_bytes
    steps = arrays((2**12,), num_steps=12)
    ahead = DevicePrefetch(iter(steps), [device("STRICT:0")], num_units=4, unit_bytes=4 * chunk_bytes)
    actual = []
    with caplog.at_level(logging.WARNING, "daskdist"):
        for ((leaf,),) in ahead:
            actual.append(on_host(leaf))
            del leaf
    for result, ((leaf,),) in zip(actual, steps, strict=True):
        np.testing.assert_array_equal(result, leaf)
    assert ahead.stats()["is_shrunk"]
    (record,) = caplog.records
    assert "STRICT:0 has no memory for" in record.message
    assert "from here on only one step is copied to it ahead of use" in record.message


def test_released_memory_is_reused_when_nothing_else_is_free():
    # The consumer releases a step only after it has the next one, and two steps just fit.
    LIMITS[0] = 2 * 32 * KIB
    actual = []
    for ((leaf,),) in DevicePrefetch(iter(arrays((2**12,), num_steps=6)), [device("STRICT:0")]):
        actual.append(on_host(leaf)[0])
    assert actual == [1000.0 * step for step in range(6)]


def test_a_step_larger_than_the_device_is_an_error():
    LIMITS[0] = 10 * KIB
    strategy = device_gather_of()
    iterator = iter(strategy.distribute_dataset(Dataset.range(10_000).batch(5_000)))
    words = r"STRICT:0 has no room for the next step: it takes 40192 bytes, and of 10240 bytes \d+ are free.*smaller"
    with pytest.raises(errors.DeviceMemoryError, match=words) as caught:
        next(iterator)
    assert isinstance(caught.value, MemoryError)
    with pytest.raises(errors.DeviceMemoryError, match="has no room"):
        next(iterator)
    join(feed_threads())


def test_earlier_steps_are_handed_out_though_the_next_does_not_fit():
    LIMITS[0] = 4 * 32 * KIB
    ahead = DevicePrefetch(iter(arrays((2**12,), num_steps=12)), [device("STRICT:0")])
    kept = [next(ahead) for _ in range(4)]
    with pytest.raises(errors.DeviceMemoryError, match="keep fewer of them"):
        next(ahead)
    assert [on_host(leaf)[0] for ((leaf,),) in kept] == [0.0, 1000.0, 2000.0, 3000.0]


# --- iterators on replicas ---


def passes_of(iterator, num_passes):
    assert repr(iterator).startswith("<ReplicaIterator of replica")
    actual = []
    for _ in range(num_passes):
        for element in iterator:
            actual.append((StrictDevice.holds(element["x"]), told(element)))
    return repr((actual, iterator.stats()["num_elements"], iterator.stats()["device"]["num_bytes"] > 0))


def on_the_host(iterator, num_passes):
    actual = [(True, told(element)) for _ in range(num_passes) for element in iterator]
    return repr((actual, len(actual) // num_passes, True))


LOOPS = {
    "in_memory": lambda: Dataset.range(50).shuffle(16, seed=3).map(lambda x: {"x": x}).batch(12),
    "threads": lambda: with_options(Dataset.range(50).map(lambda x: {"x": x}).batch(12), num_threads=2),
    "short_last_batch": lambda: Dataset.range(13).map(lambda x: {"x": x, "text": str(1)}).batch(12),
    "uneven": lambda: with_options(Dataset.range(26).map(lambda x: {"x": x}).batch(6), drop_uneven=True),
}


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("name", LOOPS)
def test_loops_in_this_process(late, name, num_replicas):
    here, there = mirrored(num_replicas), device_gather_of(num_replicas)
    dataset = LOOPS[name]()
    expected = here.run(on_the_host, args=(here.distribute_dataset(afresh(dataset)), 2))
    actual = there.run(passes_of, args=(there.distribute_dataset(afresh(dataset)), 2))
    assert there.local_results(actual) == here.local_results(expected)
    assert not feed_threads()


def test_loops_left_early_leave_nothing(late):
    strategy = device_gather_of(2)
    distributed = strategy.distribute_dataset(Dataset.range(10).repeat().batch(4))

    def first_two(iterator):
        return [on_host(element).tolist() for element, _ in zip(iterator, range(2), strict=False)]

    actual = strategy.run(first_two, args=(distributed,))
    assert [value.values for step in actual for value in step] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert not feed_threads()
    assert taken_bytes(0) == taken_bytes(1) == 0


def test_replicas_that_wait_for_each_other_in_a_loop(late):
    strategy = device_gather_of(2)
    distributed = strategy.distribute_dataset(Dataset.range(64).batch(8))

    def totals(iterator):
        context = daskdist.get_replica_context()
        return str([float(context.all_reduce("SUM", float(on_host(x).sum()))) for x in iterator])

    expected = str([float(sum(range(8 * k, 8 * k + 8))) for k in range(8)])
    assert strategy.run(totals, args=(distributed,)).values == (expected, expected)


def test_a_replica_that_ends_waits_for_no_other(monkeypatch):
    monkeypatch.setattr(shared_reader, "_MAX_WAIT_S", 60.0)
    strategy = mirrored(2)
    distributed = strategy.distribute_dataset(Dataset.range(2**16).batch(2**10))
    with dask.config.set({"daskdist.window-bytes": "16 KiB"}):
        feed = feed_for_pass(distributed)
        plans = replica_plans.plans_of(strategy, distributed, feed)
        reader = shared_reader.SharedReader(plans.plans[0].read_plan, [0, 1])
        shared = reader.begin(0, 0)
        # The other replica takes part without elements.
        assert reader.begin(1, 0) is shared
        taken = []
        thread = threading.Thread(target=lambda: taken.extend(shared.parts(0)), daemon=True)
        thread.start()
        eventually(lambda: shared._num_waiting)
        reader.wake(0)
        thread.join(10)
    assert not thread.is_alive()
    assert 0 < sum(len(part.places) for part in taken) < 64


def test_a_loop_that_fails(late):
    def seen_by(strategy):
        distributed = strategy.distribute_dataset(Dataset.range(200).batch(4).map(fails_at_hundred))
        # Record only the first replica's steps, since the second replica may or may not have begun when it fails.
        seen = []

        def all_of(iterator):
            is_first = daskdist.get_replica_context().replica_id_in_sync_group == 0
            for x in iterator:
                if is_first:
                    seen.append(on_host(x).tolist())

        with pytest.raises(errors.UserFunctionError, match="not a hundred"):
            strategy.run(all_of, args=(distributed,))
        return seen

    actual = seen_by(device_gather_of(2))
    assert len(actual) > 5
    assert actual == seen_by(mirrored(2))
    assert not feed_threads()


@pytest.fixture
def on_workers(client):
    """Return a strategy of two replicas, each on a device in a separate process."""
    client.run(strict_device.register)
    with daskdist.MultiWorkerMirroredStrategy(
        client, device_assignment=DeviceAssignment([("0", "STRICT:0"), ("1", "STRICT:1")])
    ) as strategy:
        yield strategy
    client.run(strict_device.unregister)


@pytest.mark.cluster
@pytest.mark.parametrize("name", LOOPS)
def test_loops_on_workers(on_workers, client, name):
    client.run(set_delay, 0.002)
    here = mirrored(2)
    # Use a new dataset for each strategy, since a shuffle counts its passes.
    expected_of, dataset = (with_options(LOOPS[name](), auto_shard_policy=AutoShardPolicy.DATA) for _ in range(2))
    with daskdist.MultiWorkerMirroredStrategy(client) as plain:
        expected = plain.local_results(plain.run(on_the_host, args=(plain.distribute_dataset(expected_of), 2)))
        expected = list(map(str, expected))
    actual = on_workers.run(passes_of, args=(on_workers.distribute_dataset(dataset), 2))
    assert list(map(str, on_workers.local_results(actual))) == expected
    assert here.num_replicas_in_sync == len(expected)
    assert set(client.run(num_feed_threads).values()) == {0}
    client.run(set_delay, 0.0)


@pytest.mark.cluster
def test_steps_given_to_workers_are_on_their_devices(on_workers):
    distributed = on_workers.distribute_dataset(Dataset.range(16).batch(8))
    actual = [
        on_workers.local_results(on_workers.run(lambda x: (StrictDevice.holds(x), x), args=(x,))) for x in distributed
    ]
    assert [[bool(flag) for flag, _ in step] for step in actual] == [[True, True]] * 2


def set_delay(delay_s):
    StrictStream.delay_s = delay_s


def num_feed_threads():
    return len(feed_threads())
