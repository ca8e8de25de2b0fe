"""Laws of devices."""

from __future__ import annotations

import pickle
from typing import Any, Final

import numpy as np

from daskdist.devices import Device, device, name_of
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


class DeviceLaws:
    """Laws of a device. Subclass it, and say how one is made."""

    def make_device(self) -> Device:
        """A device that is here."""
        raise NotImplementedError

    def test_arrays_come_back_as_they_went(self) -> None:
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

    def test_put_leaves_the_array(self) -> None:
        here = self.make_device()
        array = np.arange(4.0)
        here.put(array)
        check(np.array_equal(array, np.arange(4.0)), "put changed the array it was given")

    def test_empty_is_as_asked_for(self) -> None:
        here = self.make_device()
        for shape in ((), (0, 2), (3, 2)):
            for dtype in (np.float32, np.int64, np.bool_):
                found = here.get(here.empty(shape, dtype))
                check(
                    found.shape == shape and found.dtype == dtype,
                    f"empty({shape}, {dtype}) gave {found.dtype}{found.shape}",
                )

    def test_namespace_computes_on_it(self) -> None:
        here = self.make_device()
        array = here.put(np.arange(6.0).reshape(3, 2))
        total = here.get(here.namespace.sum(array, axis=0))
        check(np.array_equal(total, [6.0, 9.0]), f"the namespace's sum gave {total}")

    def test_memory_is_told(self) -> None:
        free, total = self.make_device().memory_info()
        check(0 <= free <= total and total > 0, f"{free} bytes free of {total}")

    def test_is_found_by_its_name(self) -> None:
        here = self.make_device()
        found = device(name_of(here))
        check((found.kind, found.index) == (here.kind, here.index), f"{name_of(here)!r} found {name_of(found)!r}")

    def test_hashes_and_pickles(self) -> None:
        here = self.make_device()
        there = pickle.loads(pickle.dumps(here))
        check(there == here and hash(there) == hash(here), f"{name_of(here)}: a pickled copy is not equal to it")
