"""Arrays of devices in sources and in results of functions: elements on the host are made of them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import dask
import dask.array
import numpy as np
import pytest
import strict_device
from strict_device import StrictDevice

from daskdist import Dataset, Ragged, TensorSpec, devices
from daskdist.core.structure import Structure, as_array
from daskdist.errors import ArgumentError, UserFunctionError
from daskdist.testing import same_elements

# Arrays of the first device can be converted to NumPy's by accident, so use the second one.
HERE = StrictDevice(1)

pytestmark = pytest.mark.usefixtures("strict")


@pytest.fixture
def gets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of arrays that are copied from devices."""
    actual: list[int] = []
    get = StrictDevice.get

    def noted(self: StrictDevice, array: Any) -> Any:
        here = get(self, array)
        actual.append(here.nbytes)
        return here

    monkeypatch.setattr(StrictDevice, "get", noted)
    return actual


class Tensor:
    """An array of another library, on a device with a number of DLPack."""

    def __init__(self, array: Any, number: int) -> None:
        self.array = array
        self.number = number

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise TypeError("can't convert a tensor of a device to numpy")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.number, 1

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


class OfRawMemory:
    __cuda_array_interface__: Any = None


def put(*shape: int) -> Any:
    return HERE.put(np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape))


def test_slices_of_one_are_copied_to_the_host_once(gets: list[int]) -> None:
    ds = Dataset.from_tensor_slices({"x": put(4, 2), "y": np.arange(4)})
    assert ds.element_spec == {"x": TensorSpec((2,), np.float32), "y": TensorSpec((), np.int64)}
    wanted = Dataset.from_tensor_slices({"x": np.arange(8, dtype=np.float32).reshape(4, 2), "y": np.arange(4)})
    for _ in range(2):
        same_elements(ds.shuffle(4, seed=1).batch(2), wanted.shuffle(4, seed=1).batch(2))
    assert gets == [32]


def test_one_element() -> None:
    (actual,) = Dataset.from_tensors(put(2))
    assert type(actual) is np.ndarray
    assert actual.tolist() == [0, 1]


def test_a_list_of_device_arrays_is_stacked() -> None:
    actual = as_array([put(2), [5.0, HERE.put(np.float64(6))]])
    assert (actual.dtype, actual.tolist()) == (np.float64, [[0, 1], [5, 6]])
    with pytest.raises(ArgumentError, match="the parts of this one differ in shape"):
        as_array([put(2), put(3)])


def test_a_number_is_a_scalar_of_its_dtype() -> None:
    actual = as_array(HERE.put(np.int8(3)))
    assert type(actual) is np.int8


def test_functions_may_return_device_arrays() -> None:
    ds = Dataset.range(3)
    for vectorized in (False, None):
        mapped = ds.map(lambda x: {"x": HERE.put(np.full(2, x)), "y": x}, vectorized=vectorized)
        assert [(item["x"].tolist(), int(item["y"])) for item in mapped] == [([k, k], k) for k in range(3)]
        assert all(type(value["x"]) is np.ndarray for value in mapped)
    at_once = ds.map(lambda x: HERE.put(np.asarray(x) * 2), vectorized=True)
    assert [int(entry) for entry in at_once] == [0, 2, 4]
    assert [part.tolist() for part in ds.batch(2).map(lambda x: HERE.put(x))] == [[0, 1], [2]]


def test_predicates_keys_and_states() -> None:
    ds = Dataset.range(6)
    assert list(ds.filter(lambda x: HERE.put(np.asarray(x % 2 == 0)))) == [0, 2, 4]
    assert list(ds.take_while(lambda x: HERE.put(np.asarray(x < 2)))) == [0, 1]
    groups = ds.group_by_window(lambda x: HERE.put(np.asarray(x % 2)), lambda key, rows: rows.batch(3), window_size=3)
    assert [group.tolist() for group in groups] == [[0, 2, 4], [1, 3, 5]]
    scanned = ds.scan(HERE.put(np.int64(0)), lambda total, x: (HERE.put(np.asarray(total + x)), total))
    assert [int(value) for value in scanned] == [0, 0, 1, 3, 6, 10]


def test_generators_may_yield_device_arrays() -> None:
    ds = Dataset.from_generator(lambda: iter([put(2), put(3)]), output_signature=TensorSpec((None,), np.float32))
    assert [element.tolist() for element in ds] == [[0, 1], [0, 1, 2]]
    other = Dataset.from_generator(lambda: iter([put(2, 2)]), output_signature=TensorSpec((None,), np.float32))
    with pytest.raises(UserFunctionError, match=r"yielded TensorSpec\(shape=\(2, 2\)"):
        list(other)


def test_dask_collections_may_contain_device_arrays() -> None:
    parts = [dask.delayed(put)(2, 3), dask.delayed(put)(1, 3)]
    arrays = [dask.array.from_delayed(part, (n, 3), np.float32) for part, n in zip(parts, (2, 1), strict=True)]
    ds = Dataset.from_dask(dask.array.concatenate(arrays))
    assert [element.tolist() for element in ds] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


def test_rows_of_different_lengths() -> None:
    ragged = Ragged(put(3), HERE.put(np.array([0, 1, 3])))
    assert [row.tolist() for row in ragged] == [[0], [1, 2]]
    assert [row.tolist() for row in Ragged.of([put(1), put(2)])] == [[0], [0, 1]]


def test_an_unexpected_dtype() -> None:
    ds = Dataset.from_generator(lambda: iter([put(2)]), output_signature=TensorSpec((2,), np.int64))
    with pytest.raises(UserFunctionError, match=r"dtype=float32.*dtype=int64"):
        list(ds)


def test_another_librarys_are_taken_by_dlpack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.OF_DLPACK, 99, strict_device.KIND)
    actual = as_array(Tensor(np.arange(3), 99))
    assert type(actual) is np.ndarray
    assert actual.tolist() == [0, 1, 2]
    assert as_array([Tensor(np.arange(3), 99)]).tolist() == [[0, 1, 2]]
    strict_device.register(1)
    with pytest.raises(ArgumentError, match=r"Tensor on STRICT:1 cannot be copied from there \(there are 1; .*NumPy"):
        as_array(Tensor(np.arange(3), 99))


def test_a_leaf_on_a_missing_device_is_named() -> None:
    message = r"Tensor on GPU:1 cannot be copied from there \(.*\); give it as a NumPy array \(leaf \['a'\]\[1\]\)"
    with pytest.raises(ArgumentError, match=rf"from_tensor_slices: {message}"):
        Dataset.from_tensor_slices({"a": (1, Tensor(np.arange(3), 2))})
    with pytest.raises(UserFunctionError, match=rf"returned no element: {message}"):
        list(Dataset.range(2).map(lambda x: {"a": (x, Tensor(np.arange(3), 2))}))


def test_arrays_with_only_an_address_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"OfRawMemory is on a GPU; give it as cupy.asarray\(x\).*\(leaf \['a'\]\)"):
        Structure.flatten({"a": OfRawMemory()})


def test_others_are_refused_as_they_are() -> None:
    # A type that is on the host and still refuses has the best error message of its own.
    with pytest.raises(TypeError, match="can't convert a tensor"):
        as_array(Tensor(np.arange(3), 1))
    with pytest.raises(ArgumentError, match=r"object is not an array, a number or a string \(leaf \['y'\]\)"):
        Structure.flatten({"x": 1, "y": object()})


def test_importing_an_operation_registers_the_conversion() -> None:
    # A worker that received a pickled operation has imported only this much.
    program = (
        "import daskdist.ops.map; from daskdist import devices; from daskdist.core.to_numpy import HOST_CONVERTERS;"
        "print(HOST_CONVERTERS.known is devices.on_host)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "True"
