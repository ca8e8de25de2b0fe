"""Laws of devices."""

from __future__ import annotations

import gc
import pickle
from typing import Any, Final

import numpy as np

from daskdist.core.selection.permutation import Permutation
from daskdist.devices import Device, check_present, device, device_of, is_on_device, name_of, on_host, stream_of
from daskdist.errors import ArgumentError
from daskdist.testing.equality import check

_ARRAYS: Final[dict[str, Any]] = {
    "floats": np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4),
    "integers": np.arange(5),
    "bools": np.array([True, False]),
    "a scalar": np.array(2.5),
    "no rows": np.zeros((0, 3)),
    "every other row": np.arange(12.0).reshape(6, 2)[::2],
    "columns first": np.asfortranarray(np.arange(6).reshape(2, 3)),
}
_NUMBERS: Final = [np.zeros(2, kind) for kind in ("?", "i1", "i4", "i8", "u1", "u2", "f4", "f8", "c8", "c16")]
_NO_NUMBERS: Final[list[Any]] = [
    np.array(["a", "b"]),
    np.array([b"a", b"b"]),
    np.array([None, "b"], object),
    np.array(["2020-01-01"], "M8[D]"),
    np.array([1], "m8[s]"),
    np.zeros(2, [("x", "f4"), ("y", "i4")]),
]


# Dtypes of arrays, and the dtypes in which they are added up.
_SUMMED: Final = {
    "?": "i8",
    "i1": "i8",
    "u4": "u8",
    "i8": "f8",
    "f2": "f2",
    "f4": "f4",
    "f8": "f8",
    "c8": "c8",
    "c16": "c16",
}


class DeviceLaws:
    """Laws of a device; a subclass defines `make_device`."""

    def make_device(self) -> Device:
        """Return a device that is present."""
        raise NotImplementedError

    def test_get_returns_what_was_put(self) -> None:
        tested = self.make_device()
        for name, array in _ARRAYS.items():
            back = tested.get(tested.put(array))
            check(type(back) is np.ndarray, f"{name}: get gave {type(back).__name__}, not a NumPy array")
            check(back.dtype == array.dtype, f"{name}: went as {array.dtype} and came back as {back.dtype}")
            check(np.array_equal(back, array), f"{name}: came back with other values or another shape")

    def test_put_takes_read_only_arrays(self) -> None:
        tested = self.make_device()
        array = np.arange(4.0)
        array.flags.writeable = False
        check(np.array_equal(tested.get(tested.put(array)), array), "a read-only array did not arrive")

    def test_put_does_not_change_the_array(self) -> None:
        tested = self.make_device()
        array = np.arange(4.0)
        tested.put(array)
        check(np.array_equal(array, np.arange(4.0)), "put changed the array it was given")

    def test_empty_has_the_requested_shape_and_dtype(self) -> None:
        tested = self.make_device()
        for shape in ((), (0, 2), (3, 2)):
            for dtype in (np.float32, np.int64, np.bool_):
                result = tested.get(tested.empty(shape, dtype))
                check(
                    result.shape == shape and result.dtype == dtype,
                    f"empty({shape}, {dtype}) gave {result.dtype}{result.shape}",
                )

    def test_namespace_computes_on_the_device(self) -> None:
        tested = self.make_device()
        array = tested.put(np.arange(6.0).reshape(3, 2))
        with tested.using():
            total = tested.get(tested.namespace.sum(array, axis=0))
        check(np.array_equal(total, [6.0, 9.0]), f"the namespace's sum gave {total}")

    def test_get_returns_views_with_gaps(self) -> None:
        tested = self.make_device()
        array = np.arange(6.0).reshape(3, 2)
        turned = tested.put(array).T
        check(np.array_equal(tested.get(turned), array.T), "a transposed array came back with other values")
        large = np.arange(2_500_000.0)
        check(np.array_equal(tested.get(tested.put(large)), large), "a large array came back with other values")

    def test_put_and_get_copy(self) -> None:
        tested = self.make_device()
        if tested.is_host:
            return
        array = np.arange(4.0)
        put_array = tested.put(array)
        array[:] = -1
        back = tested.get(put_array)
        check(np.array_equal(back, np.arange(4.0)), "an array that was put changed with the host's")
        back[:] = -2
        check(np.array_equal(tested.get(put_array), np.arange(4.0)), "a device array changed with the result of get")

    def test_put_takes_its_own_arrays(self) -> None:
        tested = self.make_device()
        array = tested.put(np.arange(3))
        check(np.array_equal(tested.get(tested.put(array)), np.arange(3)), "its own array changed by put")

    def test_holds_its_own_arrays(self) -> None:
        tested = self.make_device()
        array = tested.put(np.arange(3))
        check(tested.holds(array), f"{name_of(tested)} does not hold an array that was put there")
        check(not tested.holds([1, 2]) and not tested.holds("text"), f"{name_of(tested)} holds lists or text")
        check(tested.is_host or not tested.holds(np.arange(3)), f"{name_of(tested)} holds arrays of the host")
        check(is_on_device(array) != tested.is_host, "is_on_device is wrong for an array put there")
        check(tested.is_host or device_of(array) == tested, f"device_of said {device_of(array)} of an array put there")
        back = on_host(array)
        check(type(back) is np.ndarray and np.array_equal(back, np.arange(3)), f"on_host gave {back!r}")

    def test_missing_dtypes_are_refused(self) -> None:
        tested = self.make_device()
        for array in _NUMBERS:
            check(not tested.lacks(array.dtype), f"{name_of(tested)} lacks {array.dtype}")
        for array in () if tested.is_host else _NO_NUMBERS:
            check(tested.lacks(array.dtype), f"{name_of(tested)} does not lack {array.dtype}")
            try:
                tested.put(array)
            except ArgumentError as error:
                is_named = str(array.dtype) in str(error) and name_of(tested) in str(error)
                check(is_named, f"the error does not say dtype and device: {error}")
            else:
                check(False, f"put took an array of {array.dtype}")

    def test_views_share_memory(self) -> None:
        tested = self.make_device()
        stream = tested.stream()
        buffer = tested.empty((512,), np.uint8)
        view = tested.view(buffer, 256, (2, 3), np.dtype(np.float32))
        for first in (0, 6):
            array = np.arange(first, first + 6, dtype=np.float32)
            source = tested.pinned(512)
            source[256:280] = array.view(np.uint8)
            tested.copy(source, buffer, stream)
            stream.synchronize()
            result = tested.get(view)
            check(np.array_equal(result, array.reshape(2, 3)), f"a view of a buffer gave {result}")
        inner = tested.view(tested.view(buffer, 256, (24,), np.dtype(np.uint8)), 4, (2,), np.dtype(np.float32))
        check(np.array_equal(tested.get(inner), [7, 8]), "a view of a view begins somewhere else")
        no_rows = tested.get(tested.view(buffer, 512, (0, 3), np.dtype(np.int64)))
        check(no_rows.shape == (0, 3) and no_rows.dtype == np.int64, "a view of no rows has another shape or dtype")
        del buffer
        tested.put(np.zeros(128, np.float32))
        check(np.array_equal(tested.get(view).ravel(), np.arange(6, 12)), "a view does not keep its buffer")

    def test_pinned_memory(self) -> None:
        tested = self.make_device()
        for num_bytes, is_pooled in ((0, True), (1, True), (4000, False), (4096, True)):
            result = tested.pinned(num_bytes, is_pooled=is_pooled)
            problem = f"pinned({num_bytes}) gave {type(result).__name__} {result.dtype}{result.shape}"
            check(type(result) is np.ndarray and result.dtype == np.uint8 and result.shape == (num_bytes,), problem)
            check(result.flags.writeable and result.flags.c_contiguous, f"pinned({num_bytes}) cannot be written to")
            check(tested.is_pinned(result), f"what pinned({num_bytes}) gave is not pinned")
        part = result[256:512].view(np.float64).reshape(4, 8)
        check(tested.is_pinned(part), "part of pinned memory is not pinned")
        check(tested.is_host or not tested.is_pinned(np.zeros(4096, np.uint8)), "any array is pinned")
        check(tested.is_host or not tested.is_pinned(np.frombuffer(b"abcd", np.uint8)), "any bytes are pinned")

    def test_arrays_that_are_locked_are_pinned(self) -> None:
        tested = self.make_device()
        array = np.random.default_rng(0).integers(0, 256, 1 << 25, np.uint8)
        part = array[: 1 << 20].reshape(1024, -1)[1:]
        check(tested.lock(part) and tested.lock(array), "memory of an array cannot be locked")
        check(tested.is_pinned(array) and tested.is_pinned(part), "an array that was locked is not pinned")
        target = tested.empty((part.nbytes,), np.uint8)
        stream = tested.stream()
        tested.copy(part.reshape(-1), target, stream)
        stream.synchronize()
        check(np.array_equal(tested.get(target), part.reshape(-1)), "a copy from locked memory has other values")
        del array, part
        gc.collect()
        check(tested.is_host or not tested.is_pinned(np.zeros(1 << 25, np.uint8)), "another array is pinned")

    def test_copies_are_complete_after_waiting(self) -> None:
        tested = self.make_device()
        rng = np.random.default_rng(0)
        stream, other = tested.stream(), tested.stream()
        for num_bytes in (1, 1000, 3_000_000):
            source, target = tested.pinned(num_bytes), tested.empty((num_bytes,), np.uint8)
            source[:] = rng.integers(0, 256, num_bytes, np.uint8)
            tested.copy(source, target, stream)
            event = stream.record()
            other.wait(event)
            with tested.using(other):
                result = tested.get(target)
            check(np.array_equal(result, source), f"{num_bytes} bytes: another stream waited and found other ones")
            stream.synchronize()
            check(event.is_over, "a stream is done and an event of it is not over")
        back = tested.pinned(num_bytes)
        for value in (1, 2, 3):
            # All copies have the same target, so each waits for the one before.
            source = tested.pinned(num_bytes)
            source[:] = value
            tested.copy(source, target, stream)
            stream.synchronize()
            back[:] = tested.get(target)
            check(bool((back == value).all()), "copies in one stream are not done one after the other")

    def test_take_copies_rows(self) -> None:
        tested = self.make_device()
        source = np.arange(24, dtype=np.float32).reshape(6, 4)
        numbers = np.array([5, 0, 0, 3], np.int32)
        target = tested.put(np.zeros((5, 4), np.float32))
        with tested.using():
            tested.take(tested.put(source), tested.put(numbers), target[:4, ...])
        result = tested.get(target)
        expected = np.concatenate([source[numbers], np.zeros((1, 4), np.float32)])
        check(np.array_equal(result, expected), f"taking rows {numbers.tolist()} gave {result}")

    def test_copies_of_unequal_sizes_are_refused(self) -> None:
        tested = self.make_device()
        try:
            tested.copy(tested.pinned(8), tested.empty((4,), np.uint8), tested.stream())
        except ArgumentError as error:
            check("8 bytes" in str(error), f"the error does not say how many: {error}")
        else:
            check(False, "eight bytes were copied to four")

    def test_orders_equal_those_of_the_host(self) -> None:
        tested = self.make_device()
        for length in (5, 2**18, 2**18 + 1, 10**6 + 3, 2**33 + 12345, 2**62):
            order = Permutation(length, np.random.default_rng(length), 2**16)
            for start, stop in ((0, min(length, 1000)), (length // 3, length // 3), (max(length - 700, 0), length)):
                result = tested.permuted(order, start, stop)
                check(tested.holds(result), f"permuted gave {type(result).__name__}, no array of the device")
                result = tested.get(result)
                check(result.dtype == np.int64, f"an order of {length}: {result.dtype}, not int64")
                check(
                    np.array_equal(result, order.between(start, stop)),
                    f"an order of {length}, from {start} to {stop}: {result[:5]}, not {order.between(start, stop)[:5]}",
                )

    def test_events_have_an_order(self) -> None:
        tested = self.make_device()
        stream, other = tested.stream(), tested.stream()
        source, target = tested.pinned(1 << 20), tested.empty((1 << 20,), np.uint8)
        first = stream.record(is_timed=True)
        tested.copy(source, target, stream)
        second = stream.record(is_timed=True)
        other.wait(second)
        third = other.record()
        third.synchronize()
        check(not stream.is_capturing, "a stream is said to be captured")
        check(first.is_over and second.is_over, "a later event is over and an earlier one is not")
        lasted = second.seconds_since(first)
        check(0 <= lasted < 60, f"between two events lie {lasted} s")

    def test_using_nests_and_restores(self) -> None:
        tested = self.make_device()
        before, one, two = tested.current_stream(), tested.stream(), tested.stream()
        with tested.using(one):
            check(tested.current_stream() == one, "using(stream) did not make the stream current")
            with tested.using(two):
                check(tested.current_stream() == two, "using(stream) within another did not make the stream current")
            check(tested.current_stream() == one, "the stream before was not made current again")
            with tested.using():
                check(tested.current_stream() == one, "using() changed the stream")
            try:
                with tested.using(two):
                    raise KeyError
            except KeyError:
                pass
            check(tested.current_stream() == one, "the stream before was not made current again after an error")
        check(tested.current_stream() == before, "the stream before all was not made current again")
        check(stream_of(tested) == stream_of(tested), "the stream of a replica is not one")

    def test_dlpack_shares(self) -> None:
        tested = self.make_device()
        array = tested.put(np.arange(6, dtype=np.float32).reshape(2, 3))
        shared = tested.from_dlpack(array)
        check(tested.holds(shared), f"from_dlpack gave {type(shared).__name__}")
        with tested.using():
            array[0, 0] = 7
        result = tested.get(shared)
        check(np.array_equal(result, [[7, 1, 2], [3, 4, 5]]), f"from_dlpack does not share memory: {result}")

    def test_allocated_memory_is_returned_with_its_last_view(self) -> None:
        tested = self.make_device()
        back: list[int] = []
        owned = tested.allocate(64, lambda memory: back.append(1))
        view = tested.view(owned, 16, (2, 3), np.float32)
        with tested.using():
            view[...] = tested.put(np.arange(6, dtype=np.float32).reshape(2, 3))
        cut = view[1, :]
        del owned, view
        gc.collect()
        check(not back, "memory came back while there was a view of it")
        check(np.array_equal(tested.get(cut), [3, 4, 5]), f"a view of allocated memory has {tested.get(cut)}")
        shared = tested.from_dlpack(cut)
        del cut
        gc.collect()
        check(not back, "memory came back while another library's array shared it")
        check(np.array_equal(tested.get(shared), [3, 4, 5]), f"an array that shares memory has {tested.get(shared)}")
        del shared
        gc.collect()
        check(back == [1], f"allocated memory came back {len(back)} times, not once")
        del back[:]
        nothing = tested.allocate(0, lambda memory: back.append(1))
        check(tuple(nothing.shape) == (0,), f"no bytes were allocated as {tuple(nothing.shape)}")
        del nothing
        gc.collect()
        check(back == [1], "no bytes did not come back")

    def test_returned_memory_is_free_when_nothing_refers_to_it(self) -> None:
        tested = self.make_device()
        kept: list[Any] = []
        owned = tested.allocate(1 << 16, kept.append)
        with tested.using():
            tested.view(owned, 0, (1 << 16,), np.uint8)[...] = 7
        view = tested.view(owned, 0, (2,), np.uint8)
        del owned
        held = tested.held_bytes()
        del view
        gc.collect()
        check(len(kept) == 1, f"allocated memory came back {len(kept)} times, not once")
        check(tested.is_host or tested.held_bytes() >= held, "memory that is kept is not held any more")
        blocks = [tested.allocate(1 << 16, lambda memory: None) for _ in range(4)]
        with tested.using():
            for other in blocks:
                tested.view(other, 0, (1 << 16,), np.uint8)[...] = 1
        result = np.asarray(kept[0]) if hasattr(kept[0], "__array_interface__") else tested.get(kept[0])
        check(bool((result == 7).all()), "memory that is kept was had by others")

    def test_sums_of_rows_are_those_of_the_host(self) -> None:
        tested = self.make_device()
        for dtype, wide in _SUMMED.items():
            for shape in ((70_000, 5), (65_536, 2, 3), (100_003, 1)):
                array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
                total = tested.sum_rows(tested.put(array), np.dtype(wide))
                if total is None:
                    return
                result, expected = tested.get(total), array.sum(axis=0, dtype=np.float64 if dtype == "f2" else wide)
                check((result.shape, result.dtype) == (shape[1:], wide), f"sums are {result.dtype}, {result.shape}")
                check(np.allclose(result, expected.astype(wide), rtol=1e-6), f"sums of {dtype} differ")

    def test_memory_in_use_is_reported(self) -> None:
        tested = self.make_device()
        held = tested.held_bytes()
        array = tested.put(np.zeros(1 << 20, np.uint8))
        free, total = tested.memory_info()
        check(0 <= free <= total and total > 0, f"{free} bytes free of {total}")
        check(tested.held_bytes() >= 1 << 20, f"{tested.held_bytes()} bytes are held with an array of {1 << 20}")
        del array
        tested.free_unused()
        if not tested.is_host:
            check(tested.held_bytes() <= held, f"{tested.held_bytes()} bytes are held where {held} were before")

    def test_too_large_requests_raise_out_of_memory(self) -> None:
        tested = self.make_device()
        if tested.is_host:
            # Hosts overcommit memory.
            return
        _, total = tested.memory_info()
        try:
            tested.empty((4 * total,), np.uint8)
        except tested.out_of_memory:
            return
        check(False, f"{4 * total} bytes were given out of {total}")

    def test_description_and_missing_are_valid(self) -> None:
        tested = self.make_device()
        check(tested.missing() is None, f"{name_of(tested)} is missing: {tested.missing()}")
        check_present([tested])
        check(
            bool(tested.description) and type(tested.description) is str, f"its description is {tested.description!r}"
        )
        uuid = tested.uuid
        check(bool(uuid) and tested.uuid == uuid, "its uuid is empty, or another each time")
        check(pickle.loads(pickle.dumps(tested)).uuid == uuid, "a pickled copy has another uuid")
        uuids = [device(f"{tested.kind}:{index}").uuid for index in range(tested.num_present())]
        check(len(set(uuids)) == len(uuids), f"two devices have one uuid: {uuids}")
        if not tested.is_host:
            why = device(f"{tested.kind}:10000").missing()
            check(bool(why), f"{tested.kind}:10000 is not missing")

    def test_is_found_by_its_name(self) -> None:
        tested = self.make_device()
        result = device(name_of(tested))
        check(
            (result.kind, result.index) == (tested.kind, tested.index), f"{name_of(tested)!r} found {name_of(result)!r}"
        )

    def test_hashes_and_pickles(self) -> None:
        tested = self.make_device()
        copy = pickle.loads(pickle.dumps(tested))
        check(copy == tested and hash(copy) == hash(tested), f"{name_of(tested)}: a pickled copy is not equal to it")
