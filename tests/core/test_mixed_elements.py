"""A batch of elements of several dtypes, shapes or structures is an error that names them."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from conftest import eventually, threads_of_passes

from daskdist import Dataset, TensorSpec, errors
from daskdist.execute.callers.choose import using
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.callers.threads import Threads

NARROW, WIDE = Dataset.from_tensor_slices(np.arange(3, dtype=np.int32)), Dataset.range(3)


def of_either(x):
    return NARROW if x % 2 else WIDE


def stream(name, number):
    """Return a dataset that is read element by element."""
    spec = {name: TensorSpec((), np.int64)}
    return Dataset.from_generator(lambda: [{name: np.int64(number)}] * 2, spec)


def of_either_name(x):
    return stream("a" if str(x) in "01" else "b", 10 + int(x))


DTYPES = {
    "flat_map": lambda ds: ds.flat_map(of_either).batch(5),
    "interleave": lambda ds: ds.interleave(of_either, 2).batch(5),
    "group_by_window": lambda ds: ds.group_by_window(lambda x: x, lambda key, w: of_either(key), 1).batch(5),
    "shuffled": lambda ds: ds.flat_map(of_either).shuffle(12, seed=1).batch(12),
    "mapped": lambda ds: ds.flat_map(of_either).map(lambda x: x + np.int32(1)).batch(12),
    "map": lambda ds: ds.map(lambda x: np.int32(x) if str(x) == "2" else np.int64(x)).batch(4),
    "scan": lambda ds: ds.scan(0, lambda s, x: (s, np.int32(x) if str(x) == "2" else np.int64(x))).batch(4),
}
STRUCTURES = {
    "flat_map": lambda ds: ds.flat_map(of_either_name).batch(3),
    "interleave": lambda ds: ds.interleave(of_either_name, 4).batch(3),
    "shuffled": lambda ds: ds.flat_map(of_either_name).shuffle(8, seed=1).batch(8),
    "shuffled, then mapped": lambda ds: ds.flat_map(of_either_name).shuffle(8, seed=1).map(lambda d: d),
    "padded_batch": lambda ds: ds.flat_map(of_either_name).padded_batch(3),
    "cache": lambda ds: ds.flat_map(of_either_name).cache().batch(3),
    "of other numbers of leaves": lambda ds: ds.flat_map(
        lambda x: stream("a", 1) if str(x) in "01" else Dataset.zip(stream("a", 1), stream("b", 2))
    ).batch(3),
}


@pytest.mark.parametrize("caller", [Synchronous, Threads])
@pytest.mark.parametrize("name", DTYPES)
def test_the_error_about_other_dtypes_gives_advice(name, caller):
    with using(caller), pytest.raises(errors.StackError, match=r"int64\[\].*dtype first.*astype") as raised:
        list(DTYPES[name](Dataset.range(4)))
    assert "int32[]" in str(raised.value)
    assert "padded_batch" not in str(raised.value)


@pytest.mark.parametrize("caller", [Synchronous, Threads])
@pytest.mark.parametrize("name", STRUCTURES)
def test_different_names_of_leaves_are_an_error(name, caller):
    with using(caller), pytest.raises(errors.StackError, match="differ in structure") as raised:
        list(STRUCTURES[name](Dataset.range(4)))
    assert "'a'" in str(raised.value) or "(value, value)" in str(raised.value)
    assert "'b'" in str(raised.value)


def test_the_threads_of_a_failed_pass_end():
    before = threads_of_passes()
    with using(Threads), pytest.raises(errors.StackError):
        list(STRUCTURES["cache"](Dataset.range(4)))
    gc.collect()
    eventually(lambda: not threads_of_passes() - before)


def test_elements_of_other_structures_that_never_meet_stay_what_they_are():
    actual = list(Dataset.range(4).flat_map(of_either_name))
    assert [list(element) for element in actual] == [["a"]] * 4 + [["b"]] * 4


@pytest.mark.parametrize(
    ("elements", "says"),
    [
        ([np.int32(1), np.int64(2)], "element 1 is int64, but of element 0 it is int32"),
        ([{"a": np.zeros(2)}, {"a": np.zeros(0, int)}, {"a": np.zeros(3, "f4")}], "['a'] of element 2 is float32"),
        ([1, 2.5, np.float32(3)], "element 1 is float64, but of element 0 it is int64"),
    ],
)
def test_lists_of_several_dtypes_are_refused_when_built(elements, says):
    with pytest.raises(errors.ArgumentError) as raised:
        Dataset.from_list(elements)
    assert says in str(raised.value)
    assert "one dtype" in str(raised.value)


def test_lists_of_numbers_and_words_of_any_width_are_taken():
    assert [x.tolist() for x in Dataset.from_list([1, 2.5]).batch(2)] == [[1.0, 2.5]]
    assert [x.tolist() for x in Dataset.from_list([np.array(["a"]), np.array(["bcd"])]).batch(2)] == [[["a"], ["bcd"]]]


def test_other_numbers_of_axes_are_an_error():
    ds = Dataset.range(2).map(lambda x: np.zeros(2) if str(x) == "0" else np.zeros((2, 2))).batch(2)
    with pytest.raises(errors.StackError, match=r"float64\[2\], float64\[2, 2\]. Give them one number of axes first"):
        list(ds)


@pytest.mark.cluster
def test_on_a_cluster(on_cluster):
    def run(ds):
        return list(map(on_cluster.local_results, on_cluster.distribute_dataset(ds)))

    with pytest.raises(errors.StackError, match="dtype first"):
        run(Dataset.range(8).flat_map(of_either).batch(3).batch(2))
    with pytest.raises(errors.StackError, match="differ in structure"):
        run(STRUCTURES["flat_map"](Dataset.range(4)))
