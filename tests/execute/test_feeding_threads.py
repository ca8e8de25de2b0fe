"""The threads that copy to devices, their figures, and what they share."""

from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import strict_device
from conftest import eventually
from feeding_checks import arrays, device_gather_of, feed_threads, join, taken_bytes
from strict_device import LIMITS, StrictDevice, StrictStream, reads_late

import daskdist
from daskdist import Dataset, InputOptions
from daskdist.devices import device, on_host
from daskdist.execute.transfer import gather_on_device, layout, prefetch
from daskdist.execute.transfer.copier import Channel, Copier, channel_of
from daskdist.execute.transfer.prefetch import DevicePrefetch

pytestmark = pytest.mark.usefixtures("strict_and_fed")

# --- the thread ---


def test_a_thread_that_cannot_be_started_is_started_by_a_later_call(monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    ahead = DevicePrefetch(iter(arrays((3,), (3,))), [device("STRICT:0")])
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                next(ahead)
    next(ahead)
    ahead.close()


def test_no_second_thread_is_started_after_an_interrupt_while_the_first_one_was():
    def interrupt(frame, event, argument):
        # The caller waits until the new thread runs.
        if frame.f_code is threading.Event.wait.__code__ and frame.f_back.f_code.co_name == "start":
            sys.settrace(before)
            raise KeyboardInterrupt

    ahead, before = DevicePrefetch(iter(arrays((3,), num_steps=20)), [device("STRICT:0")]), sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(ahead)
    finally:
        sys.settrace(before)
    (thread,) = feed_threads()
    values = [leaf[0] for ((leaf,),) in map(list, ahead)]
    assert values == [1000.0 * step for step in range(20)]
    assert feed_threads() in ([thread], [])
    ahead.close()


def test_the_source_is_used_and_closed_by_one_thread():
    threads = set()

    class Source:
        def __init__(self):
            self.rest = iter(arrays((3,)))

        def __iter__(self):
            return self

        def __next__(self):
            threads.add(threading.current_thread())
            return next(self.rest)

        def close(self):
            threads.add((threading.current_thread(), "closed"))

    ahead = DevicePrefetch(Source(), [device("STRICT:0")])
    next(ahead)
    ahead.close()
    (thread,) = (value for value in threads if not isinstance(value, tuple))
    assert thread is not threading.current_thread()
    assert (thread, "closed") in threads
    assert not thread.is_alive()
    with pytest.raises(StopIteration):
        next(ahead)


def test_a_prefetch_that_never_began_closes_its_source():
    closed = []

    class Source:
        def __next__(self):
            raise AssertionError

        def close(self):
            closed.append(1)

    DevicePrefetch(Source(), [device("STRICT:0")]).close()
    assert closed == [1]
    DevicePrefetch(Source(), [device("STRICT:0")])
    gc.collect()
    eventually(lambda: closed == [1, 1])


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
def test_a_thread_ends_without_a_consumer(is_closed):
    strategy = device_gather_of(2)
    iterator = iter(strategy.distribute_dataset(Dataset.range(10).repeat().batch(4)))
    next(iterator)
    threads = feed_threads()
    assert len(threads) == 1
    if is_closed:
        iterator.close()
    del iterator
    gc.collect()
    join(threads)
    assert taken_bytes(0) == taken_bytes(1) == 0


def test_closing_does_not_wait_for_a_source_that_waits(monkeypatch):
    monkeypatch.setattr(prefetch, "_JOIN_TIMEOUT_S", 0.05)
    waits, release, then = threading.Event(), threading.Event(), threading.Event()

    def source():
        yield [[np.arange(3)]]
        waits.set()
        release.wait(20)

    ahead = DevicePrefetch(source(), [device("STRICT:0")])
    next(ahead)
    (thread,) = feed_threads()
    assert waits.wait(10)
    ahead.close(then.set)
    assert thread.is_alive()
    assert not then.is_set()
    release.set()
    assert then.wait(10)
    join([thread])


def test_a_ready_step_does_not_wait_for_the_next():
    taken = [threading.Event() for _ in range(6)]

    def source():
        for number, before in enumerate([None, *taken[:-1]]):
            # Give no further step before the last one is used.
            assert before is None or before.wait(10)
            yield [[np.array([number])]]

    for number, ((leaf,),) in enumerate(DevicePrefetch(source(), [device("STRICT:0")])):
        assert on_host(leaf).tolist() == [number]
        taken[number].set()
    assert number == 5


def test_a_generator_that_waits_does_not_hold_up_closing(monkeypatch):
    monkeypatch.setattr(prefetch, "_JOIN_TIMEOUT_S", 0.05)
    release = threading.Event()

    def numbers():
        yield 0
        release.wait(20)

    dataset = Dataset.from_generator(numbers, output_signature=daskdist.TensorSpec((), np.int64)).batch(1)
    iterator = iter(device_gather_of().distribute_dataset(dataset))
    assert on_host(next(iterator)).tolist() == [0]
    threads = feed_threads()
    iterator.close()
    release.set()
    join(threads)


# --- figures ---


def test_figures_of_the_copies(monkeypatch):
    has_arrived = threading.Event()
    record_arrival = Copier.record_arrival

    def recorded(self):
        events = record_arrival(self)
        for event in events:
            event.synchronize()
        has_arrived.set()
        return events

    def numbers():
        # The consumer waits for all of the first copy.
        assert has_arrived.wait(20)
        yield from range(4096)

    def of_all_copies(num_bytes):
        # A copy is timed only once it is over.
        figures = iterator.stats()["device"]
        return figures if figures["gb_per_s"] * figures["copy_s"] == pytest.approx(num_bytes / 1e9) else None

    monkeypatch.setattr(Copier, "record_arrival", recorded)
    StrictStream.delay_s = 0.005
    dataset = Dataset.from_generator(numbers, output_signature=daskdist.TensorSpec((), np.int64)).batch(512)
    iterator = iter(device_gather_of().distribute_dataset(dataset, InputOptions(device_buffer_size=8)))
    assert iterator.stats()["device"]["num_bytes"] == 0
    next(iterator)
    first = eventually(lambda: of_all_copies(512 * 8))
    # The thread ends once all other copies are over, before they are requested.
    join(feed_threads())
    assert sum(1 for _ in iterator) == 7
    actual = eventually(lambda: of_all_copies(4096 * 8))
    assert actual["num_bytes"] == 4096 * 8
    assert first["overlap"] == pytest.approx(0)
    assert actual["copy_s"] - first["copy_s"] >= 0.005
    assert actual["overlap"] == pytest.approx(1 - first["copy_s"] / actual["copy_s"])
    assert (actual["num_grown"], actual["is_shrunk"]) == (0, False)


def test_waiting_consumers_count_as_stalls():
    may_begin = threading.Event()

    def source():
        assert may_begin.wait(10)
        yield from arrays((4,), num_steps=3)

    ahead = DevicePrefetch(source(), [device("STRICT:0")])
    threading.Timer(0.05, may_begin.set).start()
    next(ahead)
    actual = ahead.stats()
    assert actual["num_stalls"] == 1
    assert 0.03 < actual["stall_s"] < 5
    ahead.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_buffer_size": 0}, "device_buffer_size is 0; give 1 or more"),
        ({"device_buffer_size": 2.5}, "device_buffer_size is 2.5; give a whole number"),
        ({"device_buffer_bytes": 0}, "device_buffer_bytes is 0; give 1 or more"),
    ],
    ids=["size", "no_size", "bytes"],
)
def test_options_that_are_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        InputOptions(**options)


def test_options_bound_the_steps_and_bytes_ahead():
    LIMITS[0] = 2**21
    num_rows = 2**13
    options = InputOptions(device_buffer_size=8, device_buffer_bytes=3 * 8 * num_rows)
    iterator = iter(device_gather_of().distribute_dataset(Dataset.range(20 * num_rows).batch(num_rows), options))
    step = next(iterator)
    eventually(lambda: taken_bytes() == 4 * 8 * num_rows)
    assert StrictDevice.holds(step)
    iterator.close()


# --- what all copies to a device share ---


def gatherer_of(name):
    return gather_on_device.device_gather_of(device(name))


@pytest.mark.parametrize(("of", "name"), [(channel_of, "STRICT:7"), (gatherer_of, "STRICT:8")], ids=["copies", "rows"])
def test_threads_that_come_at_once_share_it(monkeypatch, of, name):
    # No other test uses these devices, so their queues do not exist yet.
    made = StrictDevice.stream
    is_second = threading.Event()

    def stream(self):
        # The first use of a device takes some time.
        is_second.wait(0.05)
        return made(self)

    monkeypatch.setattr(StrictDevice, "stream", stream)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(of, [name] * 2)
    assert one is other


def test_consumers_that_are_added_at_the_same_time_are_all_kept():
    class Slow:
        """A stream that adds another one to the channel while it is compared with a third."""

        other = None

        def __ne__(self, stream):
            if self.other is not None:
                thread = threading.Thread(target=channel.add_consumer, args=(self.other,))
                self.other = None
                thread.start()
                threads.append(thread)
                thread.join(0.05)
            return self is not stream

    threads = []
    channel = Channel(StrictDevice(1))
    first, second, third = Slow(), Slow(), Slow()
    channel.add_consumer(first)
    first.other = third
    channel.add_consumer(second)
    join(threads)
    assert {first, second, third} <= set(channel.consumers)


@pytest.mark.parametrize("locks", [False, True])
def test_large_arrays_that_steps_are_views_of_are_pinned_if_asked_for(locks, monkeypatch):
    monkeypatch.setattr(layout, "_LEAST_LOCKED_BYTES", 2**20)
    packed = []
    pack = layout.PackedSpan.pack
    monkeypatch.setattr(layout.PackedSpan, "pack", lambda self, memory: packed.append(1) or pack(self, memory))
    array = np.random.default_rng(0).random((64, 2**13))
    small = np.arange(64.0 * 2**10).reshape(64, -1)[:32]
    dataset = Dataset.from_tensor_slices(array).batch(8)
    strategy = device_gather_of()
    for _ in range(2):
        steps = strategy.distribute_dataset(dataset, InputOptions(pin_arrays=locks))
        np.testing.assert_array_equal(np.concatenate([on_host(step) for step in steps]), array)
    assert bool(packed) != locks
    assert (id(array) in strict_device.LOCKED) == locks
    # Arrays that may share memory pages with others, or are no views of a large array, are packed.
    (actual,) = DevicePrefetch(iter([[[small, small.copy()]]]), [device("STRICT:0")], locks=True)
    assert packed
    np.testing.assert_array_equal(on_host(actual[0][0]), small)
    assert id(small.base) not in strict_device.LOCKED


# --- while the device computes ---


def test_copies_continue_while_the_host_is_ahead_of_the_device():
    may_compute, found = threading.Event(), []
    stream = channel_of("STRICT:0").stream
    ahead = DevicePrefetch(iter(arrays((2**12,), num_steps=5)), [device("STRICT:0")], num_units=1, unit_bytes=2**10)
    for _ in range(2):
        ((leaf,),) = next(ahead)
        reads_late(leaf, found, begin=may_compute)
        del leaf
    # The device has not computed with the steps that were released: the third has memory of its own.
    ((leaf,),) = next(ahead)
    is_copied = stream.record()
    try:
        eventually(lambda: is_copied.is_over)
        assert not found
    finally:
        may_compute.set()
    assert on_host(leaf)[0] == 2000
    del leaf
    assert [on_host(leaf)[0] for ((leaf,),) in ahead] == [3000, 4000]
    device("STRICT:0").current_stream().synchronize()
    assert [np.frombuffer(result)[0] for result in found] == [0, 1000]
    assert not channel_of("STRICT:0")._returning


def test_a_copy_does_not_wait_for_the_step_that_is_computed():
    is_given, is_done = threading.Event(), threading.Event()
    steps = arrays((2**12,), num_steps=4)

    def source():
        yield from steps[:2]
        # The third step can be copied only after a step is being computed.
        assert is_given.wait(10)
        yield from steps[2:]

    ahead = DevicePrefetch(source(), [device("STRICT:0")], num_units=1, unit_bytes=2**10)
    actual = []
    ((leaf,),) = next(ahead)
    reads_late(leaf, actual)
    ((leaf,),) = next(ahead)
    reads_late(leaf, actual, begin=is_done)
    is_given.set()
    # The third step is copied while the second is still being computed, into the memory of the first.
    ((leaf,),) = next(ahead)
    assert not is_done.is_set()
    assert on_host(leaf)[0] == 2000
    is_done.set()
    ((leaf,),) = next(ahead)
    assert on_host(leaf)[0] == 3000
    device("STRICT:0").current_stream().synchronize()
    assert [np.frombuffer(result)[0] for result in actual] == [0, 1000]


def test_memory_of_a_full_device_returns_at_once(monkeypatch):
    strict, may_compute, failures = device("STRICT:0"), threading.Event(), []
    allocate = StrictDevice.allocate

    def counted(self, num_bytes, back):
        try:
            return allocate(self, num_bytes, back)
        except strict_device.StrictMemoryError as error:
            failures.append(str(error))
            raise

    # As on a GPU, the host does not wait for the device.
    monkeypatch.setattr(StrictStream, "wait", lambda self, event: self.give(event.synchronize))
    monkeypatch.setattr(StrictDevice, "allocate", counted)
    gc.collect()
    LIMITS[0] = taken_bytes() + 3 * 2**10
    channel = Channel(strict)
    channel.begin_ahead()
    with strict.using(channel.consumers[0]):
        # The device does not reach these computations.
        for _ in range(10):
            memory, other = (channel.allocate(strict, channel.stream, 2**10) for _ in range(2))
            reads_late(memory, [], begin=may_compute)
            del memory, other
    assert len(failures) == 1
    may_compute.set()
    channel.end_ahead()
    assert not channel._returning


def test_counts_of_iterators_that_copy_ahead_are_in_step(monkeypatch):
    channel = channel_of("STRICT:0")
    num_ahead = channel._num_ahead
    ahead = DevicePrefetch(iter(arrays((4,), num_steps=3)), [device("STRICT:0")])
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lambda self: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            next(ahead)
    assert channel._num_ahead == num_ahead
    for num_taken in (0, 1, 3):
        ahead = DevicePrefetch(iter(arrays((4,), num_steps=3)), [device("STRICT:0")])
        for _ in range(num_taken):
            next(ahead)
        ahead.close()
    join(feed_threads())
    assert channel._num_ahead == num_ahead


def test_rows_that_are_larger_than_a_span_are_packed_in_parts():
    numbers = np.arange(2**22, dtype=">i8").reshape(1, 2, -1)
    spans = layout.layout_of(device("STRICT:0"), [[numbers]]).spans()
    assert all(span.num_bytes <= layout.SPAN_BYTES for span in spans)
    (((leaf,),),) = DevicePrefetch(iter([[[numbers]]]), [device("STRICT:0")])
    np.testing.assert_array_equal(on_host(leaf), numbers)
