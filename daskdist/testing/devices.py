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
        here = self.make_device()
        for what, array in _ARRAYS.items():
            back = here.get(here.put(array))
            check(type(back) is np.ndarray, f"{what}: get gave {type(back).__name__}, not a NumPy array")
            check(back.dtype == array.dtype, f"{what}: went as {array.dtype} and came back as {back.dtype}")
            check(np.array_equal(back, array), f"{what}: came back with other values or another shape")

    def test_put_takes_read_only_arrays(self) -> None:
        here = self.make_device()
        array = np.arange(4.0)
        array.flags.writeable = False
        check(np.array_equal(here.get(here.put(array)), array), "a read-only array did not arrive")

    def test_put_does_not_change_the_array(self) -> None:
        here = self.make_device()
        array = np.arange(4.0)
        here.put(array)
        check(np.array_equal(array, np.arange(4.0)), "put changed the array it was given")

    def test_empty_has_the_requested_shape_and_dtype(self) -> None:
        here = self.make_device()
        for shape in ((), (0, 2), (3, 2)):
            for dtype in (np.float32, np.int64, np.bool_):
                result = here.get(here.empty(shape, dtype))
                check(
                    result.shape == shape and result.dtype == dtype,
                    f"empty({shape}, {dtype}) gave {result.dtype}{result.shape}",
                )

    def test_namespace_computes_on_the_device(self) -> None:
        here = self.make_device()
        array = here.put(np.arange(6.0).reshape(3, 2))
        with here.using():
            total = here.get(here.namespace.sum(array, axis=0))
        check(np.array_equal(total, [6.0, 9.0]), f"the namespace's sum gave {total}")

    def test_get_returns_views_with_gaps(self) -> None:
        here = self.make_device()
        array = np.arange(6.0).reshape(3, 2)
        turned = here.put(array).T
        check(np.array_equal(here.get(turned), array.T), "a transposed array came back with other values")
        large = np.arange(2_500_000.0)
        check(np.array_equal(here.get(here.put(large)), large), "a large array came back with other values")

    def test_put_and_get_copy(self) -> None:
        here = self.make_device()
        if here.is_host:
            return
        array = np.arange(4.0)
        put_array = here.put(array)
        array[:] = -1
        back = here.get(put_array)
        check(np.array_equal(back, np.arange(4.0)), "an array that was put changed with the host's")
        back[:] = -2
        check(np.array_equal(here.get(put_array), np.arange(4.0)), "a device array changed with the result of get")

    def test_put_takes_its_own_arrays(self) -> None:
        here = self.make_device()
        array = here.put(np.arange(3))
        check(np.array_equal(here.get(here.put(array)), np.arange(3)), "its own array changed by put")

    def test_holds_its_own_arrays(self) -> None:
        here = self.make_device()
        array = here.put(np.arange(3))
        check(here.holds(array), f"{name_of(here)} does not hold an array that was put there")
        check(not here.holds([1, 2]) and not here.holds("text"), f"{name_of(here)} holds lists or text")
        check(here.is_host or not here.holds(np.arange(3)), f"{name_of(here)} holds arrays of the host")
        check(is_on_device(array) != here.is_host, "is_on_device is wrong for an array put there")
        check(here.is_host or device_of(array) == here, f"device_of said {device_of(array)} of an array put there")
        back = on_host(array)
        check(type(back) is np.ndarray and np.array_equal(back, np.arange(3)), f"on_host gave {back!r}")

    def test_missing_dtypes_are_refused(self) -> None:
        here = self.make_device()
        for array in _NUMBERS:
            check(not here.lacks(array.dtype), f"{name_of(here)} lacks {array.dtype}")
        for array in () if here.is_host else _NO_NUMBERS:
            check(here.lacks(array.dtype), f"{name_of(here)} does not lack {array.dtype}")
            try:
                here.put(array)
            except ArgumentError as error:
                said = str(array.dtype) in str(error) and name_of(here) in str(error)
                check(said, f"the error does not say dtype and device: {error}")
            else:
                check(False, f"put took an array of {array.dtype}")

    def test_views_share_memory(self) -> None:
        here = self.make_device()
        stream = here.stream()
        buffer = here.empty((512,), np.uint8)
        view = here.view(buffer, 256, (2, 3), np.dtype(np.float32))
        for first in (0, 6):
            array = np.arange(first, first + 6, dtype=np.float32)
            source = here.pinned(512)
            source[256:280] = array.view(np.uint8)
            here.copy(source, buffer, stream)
            stream.synchronize()
            result = here.get(view)
            check(np.array_equal(result, array.reshape(2, 3)), f"a view of a buffer gave {result}")
        inner = here.view(here.view(buffer, 256, (24,), np.dtype(np.uint8)), 4, (2,), np.dtype(np.float32))
        check(np.array_equal(here.get(inner), [7, 8]), "a view of a view begins somewhere else")
        no_rows = here.get(here.view(buffer, 512, (0, 3), np.dtype(np.int64)))
        check(no_rows.shape == (0, 3) and no_rows.dtype == np.int64, "a view of no rows has another shape or dtype")
        del buffer
        here.put(np.zeros(128, np.float32))
        check(np.array_equal(here.get(view).ravel(), np.arange(6, 12)), "a view does not keep its buffer")

    def test_pinned_memory(self) -> None:
        here = self.make_device()
        for num_bytes, is_pooled in ((0, True), (1, True), (4000, False), (4096, True)):
            result = here.pinned(num_bytes, is_pooled=is_pooled)
            what = f"pinned({num_bytes}) gave {type(result).__name__} {result.dtype}{result.shape}"
            check(type(result) is np.ndarray and result.dtype == np.uint8 and result.shape == (num_bytes,), what)
            check(result.flags.writeable and result.flags.c_contiguous, f"pinned({num_bytes}) cannot be written to")
            check(here.is_pinned(result), f"what pinned({num_bytes}) gave is not pinned")
        part = result[256:512].view(np.float64).reshape(4, 8)
        check(here.is_pinned(part), "part of pinned memory is not pinned")
        check(here.is_host or not here.is_pinned(np.zeros(4096, np.uint8)), "any array is pinned")
        check(here.is_host or not here.is_pinned(np.frombuffer(b"abcd", np.uint8)), "any bytes are pinned")

    def test_arrays_that_are_locked_are_pinned(self) -> None:
        here = self.make_device()
        array = np.random.default_rng(0).integers(0, 256, 1 << 25, np.uint8)
        part = array[: 1 << 20].reshape(1024, -1)[1:]
        check(here.lock(part) and here.lock(array), "memory of an array cannot be locked")
        check(here.is_pinned(array) and here.is_pinned(part), "an array that was locked is not pinned")
        target = here.empty((part.nbytes,), np.uint8)
        stream = here.stream()
        here.copy(part.reshape(-1), target, stream)
        stream.synchronize()
        check(np.array_equal(here.get(target), part.reshape(-1)), "a copy from locked memory has other values")
        del array, part
        gc.collect()
        check(here.is_host or not here.is_pinned(np.zeros(1 << 25, np.uint8)), "another array is pinned")

    def test_copies_are_complete_after_waiting(self) -> None:
        here = self.make_device()
        rng = np.random.default_rng(0)
        stream, other = here.stream(), here.stream()
        for num_bytes in (1, 1000, 3_000_000):
            source, target = here.pinned(num_bytes), here.empty((num_bytes,), np.uint8)
            source[:] = rng.integers(0, 256, num_bytes, np.uint8)
            here.copy(source, target, stream)
            event = stream.record()
            other.wait(event)
            with here.using(other):
                result = here.get(target)
            check(np.array_equal(result, source), f"{num_bytes} bytes: another stream waited and found other ones")
            stream.synchronize()
            check(event.is_over, "a stream is done and an event of it is not over")
        back = here.pinned(num_bytes)
        for value in (1, 2, 3):
            # All copies have the same target, so each waits for the one before.
            source = here.pinned(num_bytes)
            source[:] = value
            here.copy(source, target, stream)
            stream.synchronize()
            back[:] = here.get(target)
            check(bool((back == value).all()), "copies in one stream are not done one after the other")

    def test_take_copies_rows(self) -> None:
        here = self.make_device()
        source = np.arange(24, dtype=np.float32).reshape(6, 4)
        numbers = np.array([5, 0, 0, 3], np.int32)
        target = here.put(np.zeros((5, 4), np.float32))
        with here.using():
            here.take(here.put(source), here.put(numbers), target[:4, ...])
        result = here.get(target)
        expected = np.concatenate([source[numbers], np.zeros((1, 4), np.float32)])
        check(np.array_equal(result, expected), f"taking rows {numbers.tolist()} gave {result}")

    def test_copies_of_unequal_sizes_are_refused(self) -> None:
        here = self.make_device()
        try:
            here.copy(here.pinned(8), here.empty((4,), np.uint8), here.stream())
        except ArgumentError as error:
            check("8 bytes" in str(error), f"the error does not say how many: {error}")
        else:
            check(False, "eight bytes were copied to four")

    def test_orders_equal_those_of_the_host(self) -> None:
        here = self.make_device()
        for length in (5, 2**18, 2**18 + 1, 10**6 + 3, 2**33 + 12345, 2**62):
            order = Permutation(length, np.random.default_rng(length), 2**16)
            for start, stop in ((0, min(length, 1000)), (length // 3, length // 3), (max(length - 700, 0), length)):
                result = here.permuted(order, start, stop)
                check(here.holds(result), f"permuted gave {type(result).__name__}, no array of the device")
                result = here.get(result)
                check(result.dtype == np.int64, f"an order of {length}: {result.dtype}, not int64")
                check(
                    np.array_equal(result, order.between(start, stop)),
                    f"an order of {length}, from {start} to {stop}: {result[:5]}, not {order.between(start, stop)[:5]}",
                )

    def test_events_have_an_order(self) -> None:
        here = self.make_device()
        stream, other = here.stream(), here.stream()
        source, target = here.pinned(1 << 20), here.empty((1 << 20,), np.uint8)
        first = stream.record(is_timed=True)
        here.copy(source, target, stream)
        second = stream.record(is_timed=True)
        other.wait(second)
        third = other.record()
        third.synchronize()
        check(not stream.is_capturing, "a stream is said to be captured")
        check(first.is_over and second.is_over, "a later event is over and an earlier one is not")
        lasted = second.seconds_since(first)
        check(0 <= lasted < 60, f"between two events lie {lasted} s")

    def test_using_nests_and_restores(self) -> None:
        here = self.make_device()
        before, one, two = here.current_stream(), here.stream(), here.stream()
        with here.using(one):
            check(here.current_stream() == one, "using(stream) did not make the stream current")
            with here.using(two):
                check(here.current_stream() == two, "using(stream) within another did not make the stream current")
            check(here.current_stream() == one, "the stream before was not made current again")
            with here.using():
                check(here.current_stream() == one, "using() changed the stream")
            try:
                with here.using(two):
                    raise KeyError
            except KeyError:
                pass
            check(here.current_stream() == one, "the stream before was not made current again after an error")
        check(here.current_stream() == before, "the stream before all was not made current again")
        check(stream_of(here) == stream_of(here), "the stream of a replica is not one")

    def test_dlpack_shares(self) -> None:
        here = self.make_device()
        array = here.put(np.arange(6, dtype=np.float32).reshape(2, 3))
        shared = here.from_dlpack(array)
        check(here.holds(shared), f"from_dlpack gave {type(shared).__name__}")
        with here.using():
            array[0, 0] = 7
        result = here.get(shared)
        check(np.array_equal(result, [[7, 1, 2], [3, 4, 5]]), f"from_dlpack does not share memory: {result}")

    def test_allocated_memory_is_returned_with_its_last_view(self) -> None:
        here = self.make_device()
        back: list[int] = []
        owned = here.allocate(64, lambda memory: back.append(1))
        view = here.view(owned, 16, (2, 3), np.float32)
        with here.using():
            view[...] = here.put(np.arange(6, dtype=np.float32).reshape(2, 3))
        cut = view[1, :]
        del owned, view
        gc.collect()
        check(not back, "memory came back while there was a view of it")
        check(np.array_equal(here.get(cut), [3, 4, 5]), f"a view of allocated memory has {here.get(cut)}")
        shared = here.from_dlpack(cut)
        del cut
        gc.collect()
        check(not back, "memory came back while another library's array shared it")
        check(np.array_equal(here.get(shared), [3, 4, 5]), f"an array that shares memory has {here.get(shared)}")
        del shared
        gc.collect()
        check(back == [1], f"allocated memory came back {len(back)} times, not once")
        del back[:]
        nothing = here.allocate(0, lambda memory: back.append(1))
        check(tuple(nothing.shape) == (0,), f"no bytes were allocated as {tuple(nothing.shape)}")
        del nothing
        gc.collect()
        check(back == [1], "no bytes did not come back")

    def test_returned_memory_is_free_when_nothing_refers_to_it(self) -> None:
        here = self.make_device()
        kept: list[Any] = []
        owned = here.allocate(1 << 16, kept.append)
        with here.using():
            here.view(owned, 0, (1 << 16,), np.uint8)[...] = 7
        view = here.view(owned, 0, (2,), np.uint8)
        del owned
        held = here.held_bytes()
        del view
        gc.collect()
        check(len(kept) == 1, f"allocated memory came back {len(kept)} times, not once")
        check(here.is_host or here.held_bytes() >= held, "memory that is kept is not held any more")
        blocks = [here.allocate(1 << 16, lambda memory: None) for _ in range(4)]
        with here.using():
            for other in blocks:
                here.view(other, 0, (1 << 16,), np.uint8)[...] = 1
        result = np.asarray(kept[0]) if hasattr(kept[0], "__array_interface__") else here.get(kept[0])
        check(bool((result == 7).all()), "memory that is kept was had by others")

    def test_sums_of_rows_are_those_of_the_host(self) -> None:
        here = self.make_device()
        for dtype, wide in _SUMMED.items():
            for shape in ((70_000, 5), (65_536, 2, 3), (100_003, 1)):
                array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
                total = here.sum_rows(here.put(array), np.dtype(wide))
                if total is None:
                    return
                result, expected = here.get(total), array.sum(axis=0, dtype=np.float64 if dtype == "f2" else wide)
                check((result.shape, result.dtype) == (shape[1:], wide), f"sums are {result.dtype}, {result.shape}")
                check(np.allclose(result, expected.astype(wide), rtol=1e-6), f"sums of {dtype} differ")

    def test_memory_in_use_is_reported(self) -> None:
        here = self.make_device()
        held = here.held_bytes()
        array = here.put(np.zeros(1 << 20, np.uint8))
        free, total = here.memory_info()
        check(0 <= free <= total and total > 0, f"{free} bytes free of {total}")
        check(here.held_bytes() >= 1 << 20, f"{here.held_bytes()} bytes are held with an array of {1 << 20}")
        del array
        here.free_unused()
        if not here.is_host:
            check(here.held_bytes() <= held, f"{here.held_bytes()} bytes are held where {held} were before")

    def test_too_large_requests_raise_out_of_memory(self) -> None:
        here = self.make_device()
        if here.is_host:
            # Hosts overcommit memory.
            return
        _, total = here.memory_info()
        try:
            here.empty((4 * total,), np.uint8)
        except here.out_of_memory:
            return
        check(False, f"{4 * total} bytes were given out of {total}")

    def test_description_and_missing_are_valid(self) -> None:
        here = self.make_device()
        check(here.missing() is None, f"{name_of(here)} is missing: {here.missing()}")
        check_present([here])
        check(bool(here.description) and type(here.description) is str, f"its description is {here.description!r}")
        uuid = here.uuid
        check(bool(uuid) and here.uuid == uuid, "its uuid is empty, or another each time")
        check(pickle.loads(pickle.dumps(here)).uuid == uuid, "a pickled copy has another uuid")
        uuids = [device(f"{here.kind}:{index}").uuid for index in range(here.num_present())]
        check(len(set(uuids)) == len(uuids), f"two devices have one uuid: {uuids}")
        if not here.is_host:
            why = device(f"{here.kind}:10000").missing()
            check(bool(why), f"{here.kind}:10000 is not missing")

    def test_is_found_by_its_name(self) -> None:
        here = self.make_device()
        result = device(name_of(here))
        check((result.kind, result.index) == (here.kind, here.index), f"{name_of(here)!r} found {name_of(result)!r}")

    def test_hashes_and_pickles(self) -> None:
        here = self.make_device()
        copy = pickle.loads(pickle.dumps(here))
        check(copy == here and hash(copy) == hash(here), f"{name_of(here)}: a pickled copy is not equal to it")
