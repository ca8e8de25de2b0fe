"""The pool of arrays: memory of large chunks is reused, but not while anything refers to it."""

import gc
import pickle
import threading
import weakref

import numpy as np
import pytest

import daskdist
from daskdist.core.array_pool import ArrayPool
from daskdist.core.array_pool import pooled_empty as shared

SHAPE = (2**12, 2**11)  # 32 MiB of float32


@pytest.fixture
def pooled_empty():
    return ArrayPool()


def address(array):
    return array.__array_interface__["data"][0]


def test_an_array_is_as_numpy_makes_it(pooled_empty):
    array = pooled_empty(SHAPE, np.float32)
    assert (array.shape, array.dtype) == (SHAPE, np.float32)
    assert all(getattr(array.flags, name) for name in ("c_contiguous", "writeable", "aligned"))
    array[...] = 3
    assert array.sum(dtype=np.float64) == 3 * 2**23


def test_released_memory_is_reused(pooled_empty):
    first = pooled_empty(SHAPE, np.float64)
    first[...] = 7
    del first
    # A request of another shape and a slightly smaller size gets the same memory; new memory would be all zeros.
    assert (pooled_empty((2**12, 2**11 - 1), np.float64) == 7).all()


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array[5:, ::2].T,
        lambda array: array.reshape(-1).view(np.int64)[7:9],
        lambda array: memoryview(array[1]),
        lambda array: np.from_dlpack(array)[3],
        lambda array: np.asarray(array, copy=False)[None],
        lambda array: np.lib.stride_tricks.as_strided(array, (4,), (4,)),
        lambda array: np.ma.masked_array(array)[1:2],
    ],
    ids=["transposed", "of another dtype", "memoryview", "dlpack", "asarray", "strided", "masked"],
)
def test_referenced_memory_is_not_reused(pooled_empty, hold):
    array = pooled_empty(SHAPE, np.float32)
    array[...] = 1
    place, held = address(array), hold(array)
    before = np.array(held)
    del array
    gc.collect()
    others = [pooled_empty(SHAPE, np.float32) for _ in range(3)]
    assert place not in map(address, others)
    for other in others:
        other[...] = 2
    np.testing.assert_array_equal(np.array(held), before)
    del held
    assert address(pooled_empty(SHAPE, np.float32)) == place


def test_idle_memory_is_freed_though_other_chunks_are_in_use():
    pooled_empty = ArrayPool(idle_s=0.1)
    arrays = [pooled_empty(SHAPE, np.float32) for _ in range(3)]
    memory = [weakref.ref(array.base._memory) for array in arrays]
    held = arrays.pop(0)[5]
    del arrays
    pooled_empty._watch.join(30)
    assert [value() is not None for value in memory] == [True, False, False]
    assert held.base.base._memory is memory[0]()
    # Memory that is released later is freed at once.
    del held
    assert memory[0]() is None
    # The next request starts a new pool.
    array = pooled_empty(SHAPE, np.float32)
    place = address(array)
    del array
    assert address(pooled_empty(SHAPE, np.float32)) == place


def test_memory_is_kept_for_as_long_as_some_is_asked_for():
    pooled_empty = ArrayPool(idle_s=1.5)
    array = pooled_empty(SHAPE, np.float32)
    watch, places = pooled_empty._watch, {address(array)}
    for _ in range(9):
        del array
        watch.join(0.2)
        array = pooled_empty(SHAPE, np.float32)
        places.add(address(array))
    assert pooled_empty._watch is watch
    assert len(places) == 1


def test_kept_memory_is_limited(pooled_empty):
    arrays = [pooled_empty((2**26,), np.uint8) for _ in range(12)]
    memory = [weakref.ref(array.base._memory) for array in arrays]
    arrays.clear()
    assert sum(value() is not None for value in memory) == 8  # 512 MiB


def test_a_pass_is_given_the_memory_of_the_one_before():
    rows = np.ones((36 * 2**10, 2**10), np.float32)
    dataset = daskdist.Dataset.from_tensor_slices(rows).shuffle(len(rows)).batch(12 * 2**10)
    passes = []
    for _ in range(3):
        places = set()
        for chunk in dataset:
            places.add(address(chunk))
        passes.append(places)
    assert passes[2] <= passes[0] | passes[1]


def test_text_objects_and_times_are_numpys_own(pooled_empty):
    for dtype in (object, "M8[s]", np.dtypes.StringDType(), "U8", "V8"):
        assert pooled_empty((2**21,), dtype).flags.owndata


def test_small_arrays_are_numpys_own_and_very_large_ones_are_not_kept(pooled_empty):
    assert pooled_empty((10,), np.int64).flags.owndata
    assert isinstance(pooled_empty((2**29,), np.uint8).base, np.ndarray)


def test_memory_that_is_far_too_large_is_left_for_others(pooled_empty):
    large = pooled_empty((2**27,), np.uint8)
    place = address(large)
    del large
    small = pooled_empty((2**25 + 1,), np.uint8)
    assert address(small) != place
    assert address(pooled_empty((2**27,), np.uint8)) == place


def test_threads_never_have_the_same_memory(pooled_empty):
    wrong = []

    def use(number):
        for turn in range(20):
            array = pooled_empty((2**23 + 1,), np.float32)
            mark = number * 100 + turn
            array[:: 2**12] = mark
            if not (array[:: 2**12] == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_that_are_kept_stay_as_they_are(threads):
    rows = np.arange(48 * 2**10, dtype=np.float32)[:, None] * np.ones(2**10, np.float32)
    options = daskdist.Options(num_threads=threads)
    dataset = daskdist.Dataset.from_tensor_slices(rows).shuffle(len(rows), seed=1).batch(10_000).with_options(options)
    kept = list(dataset)
    assert sorted(np.concatenate([chunk[:, 0] for chunk in kept]).tolist()) == rows[:, 0].tolist()
    for chunk, again in zip(kept, dataset.repeat(2).take(len(kept)), strict=True):
        assert (chunk == chunk[:, :1]).all()
        np.testing.assert_array_equal(np.sort(chunk[:, 0]), np.unique(chunk[:, 0]))
        assert chunk.shape == again.shape


def test_a_loop_that_drops_its_chunks_reuses_their_memory():
    rows = np.ones((48 * 2**10, 2**10), np.float32)
    memories = []
    for chunk in daskdist.Dataset.from_tensor_slices(rows).shuffle(len(rows)).repeat(3).batch(12 * 2**10):
        while isinstance(chunk, np.ndarray):
            chunk = chunk.base
        memories.append(chunk._memory)
    assert len(memories) == 12
    assert len(set(map(id, memories))) <= 6


def test_an_unpickled_pool_is_the_pool_of_the_process():
    # Tasks of a graph contain the pool.
    assert pickle.loads(pickle.dumps(shared)) is shared


@pytest.mark.parametrize("num_rows", [2**8, 2**12, 2**20, 2**22 + 1])
def test_large_arrays_begin_where_other_libraries_can_share_them(pooled_empty, num_rows):
    for _ in range(2):
        array = pooled_empty((num_rows, 4), np.float32)
        assert address(array) % 64 == 0
        array[...] = 1
        assert array.flags.c_contiguous
        assert array.flags.writeable
        # In the second round, the array is in memory that was used before.
        del array
