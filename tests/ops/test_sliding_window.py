"""`sliding_window`, and functions of windows that are computed in the same way since they give the same."""

from __future__ import annotations

import dask
import numpy as np
import pytest
from conftest import every_pair

import daskdist
from daskdist import Dataset, Options, Ragged, TensorSpec, errors
from daskdist.core.block import Block
from daskdist.core.selection.windows import BlockWindows, RowWindows
from daskdist.core.structure import LONE
from daskdist.execute.stream.gather import Picks, gather
from daskdist.ops.map import MapRows
from daskdist.ops.window import WARNED_OF, OpenWindows
from daskdist.testing import same_elements


def numbers(number=11):
    return Dataset.range(number)


def pairs(number=11):
    return Dataset.from_tensor_slices((np.arange(number), np.arange(2.0 * number).reshape(number, 2)))


def named(number=11):
    return Dataset.from_tensor_slices({"b": np.arange(number), "a": np.arange(2.0 * number).reshape(number, 2)})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((3,), [[0, 1, 2], [1, 2, 3], [2, 3, 4]]),
        ((3, 2), [[0, 1, 2], [2, 3, 4]]),
        ((2, 3), [[0, 1], [3, 4]]),
        ((2, 1, 2), [[0, 2], [1, 3], [2, 4]]),
        ((3, 2, 1, False), [[0, 1, 2], [2, 3, 4], [4]]),
        ((3, 2, 2, False), [[0, 2, 4], [2, 4], [4]]),
        ((6,), []),
        ((1,), [[0], [1], [2], [3], [4]]),
    ],
)
def test_windows(arguments, expected):
    ds = numbers(5).sliding_window(*arguments)
    assert [window.tolist() for window in ds] == expected
    assert ds.cardinality() == len(expected)
    length = None if len(arguments) == 4 else arguments[0]
    assert ds.element_spec == TensorSpec((length,), "int64")


@pytest.mark.parametrize("method", ["sliding_window", "window"])
def test_a_size_for_which_there_is_no_window_is_warned_of_once(method, caplog):
    WARNED_OF.clear()
    for drop_remainder, number in ((True, 30), (False, 20), (True, 20), (True, 20)):
        getattr(numbers(number), method)(30, 1, drop_remainder=drop_remainder)
    (message,) = caplog.messages
    assert message.startswith(f"{method}: a window spans 30 elements, and there are 20")
    assert list(numbers(20).sliding_window(30)) == []


@pytest.mark.parametrize("size", [2, 9, 40])
@pytest.mark.parametrize("shift", [1, 3, 50])
def test_windows_equal_those_of_numpy(size, shift):
    x = np.random.default_rng(0).normal(size=(300, 2, 3)).astype("float32")
    expected = np.lib.stride_tricks.sliding_window_view(x, size, axis=0).transpose(0, 3, 1, 2)[::shift]
    sources = [Dataset.from_tensor_slices(x), Dataset.range(300).map(lambda k: x[int(k)], vectorized=False)]
    for source in sources:
        same_elements(list(source.sliding_window(size, shift)), list(expected), "windows")
        same_elements(
            list(source.sliding_window(size, shift).batch(7)),
            [expected[start : start + 7] for start in range(0, len(expected), 7)],
            "in batches",
        )


@pytest.mark.parametrize(("size", "shift", "split_bytes"), every_pair([1, 2, 9, 40], [1, 3, 9, 50], [8, 100, 400]))
def test_windows_across_blocks(size, shift, split_bytes):
    x = np.random.default_rng(0).normal(size=150)
    expected = [x[start : start + size] for start in range(0, 151 - size, shift)]
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        ds = Dataset.from_tensor_slices(x).sliding_window(size, shift)
        batches = [np.stack(expected[start : start + 4]) for start in range(0, len(expected), 4)]
        same_elements(list(ds), expected, "windows")
        same_elements(list(ds.batch(4)), batches, "in batches")
        pairs = ds.batch(2, drop_remainder=True)
        same_elements(
            list(pairs.batch(2, drop_remainder=True).unbatch()), list(pairs)[: len(expected) // 4 * 2], "back"
        )
        same_elements(list(ds.skip(5).take(3)), expected[5:8], "some")
        mixed = Dataset.range(1).batch(1).map(lambda k: x[:size]).concatenate(ds)
        same_elements(list(mixed.batch(3).unbatch()), [x[:size], *expected], "after others")
        same_elements([rows for _, rows in ds.batch(4).enumerate()], batches, "enumerated")
        shuffled = sorted(map(tuple, ds.batch(2).shuffle(7, seed=0).unbatch()))
        assert shuffled == sorted(map(tuple, expected))
    # The windows of a replica are those of every second batch.
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        strategy = daskdist.MirroredStrategy(["CPU:0", "CPU:1"])
        halves = [strategy.local_results(batch) for batch in strategy.distribute_dataset(ds.batch(4))]
    same_elements([np.concatenate(half) for half in halves], batches, "on replicas")


@pytest.mark.parametrize(("size", "shift"), [(9, 1), (3, 2), (5, 5), (2, 7)])
def test_windows_on_a_cluster(on_cluster, tmp_path, size, shift):
    # The files are read by two workers, so that rows of windows come from blocks of both.
    x = np.random.default_rng(0).normal(size=(120, 2))
    for number, part in enumerate(np.split(x, [30, 35, 90])):
        np.save(tmp_path / f"{number}.npy", part)
    expected = [x[start : start + size] for start in range(0, 121 - size, shift)]
    ds = daskdist.read_npy(str(tmp_path / "*.npy")).sliding_window(size, shift).batch(8)
    actual = [
        window
        for batch in on_cluster.distribute_dataset(ds)
        for part in on_cluster.local_results(batch)
        for window in np.asarray(part)
    ]
    same_elements(actual, expected, "on a cluster")
    recorded = [window for batch in ds.compute() for window in batch]
    same_elements(recorded, expected, "as a graph")


def test_writing_into_a_window_changes_no_other():
    x = np.arange(200.0)
    writable = Options(writable=True)
    for ds in (numbers(200).sliding_window(5), Dataset.from_tensor_slices(x).sliding_window(5).batch(4)):
        windows = list(ds.with_options(writable))
        before = [window.copy() for window in windows]
        windows[3][...] = -1
        same_elements(windows[:3] + windows[4:], before[:3] + before[4:], "others")
    assert x.tolist() == list(range(200))


def test_of_batches_and_of_several_leaves():
    assert [value.tolist() for value in numbers(6).batch(2).sliding_window(2)] == [[[0, 1], [2, 3]], [[2, 3], [4, 5]]]
    last = list(named().sliding_window(3, 4))[-1]
    same_elements([last], [{"b": np.array([8, 9, 10]), "a": np.arange(16.0, 22).reshape(3, 2)}], "last")


def test_elements_that_do_not_stack():
    with pytest.raises(errors.StackError):
        list(numbers().map(lambda x: np.zeros(int(x) % 3)).sliding_window(2))


@pytest.mark.parametrize("argument", ["size", "shift", "stride"])
def test_numbers_below_1(argument):
    with pytest.raises(errors.ArgumentError, match=f"sliding_window: {argument} is 0"):
        numbers().sliding_window(**{"size": 2, argument: 0})


# --- functions of windows ---


def by_zip(x, y):
    return Dataset.zip((x.batch(3), y.batch(3)))


def zipped_first(x, y):
    return Dataset.zip((x, y)).batch(4)


def of_dict(window):
    return Dataset.zip(window).batch(3)


def of_dict_by_name(window):
    return Dataset.zip({"b": window["b"].batch(3), "a": window["a"].batch(3)})


FAST = {
    "lone": (numbers, lambda w: w.batch(3)),
    "larger": (numbers, lambda w: w.batch(100)),
    "whole only": (numbers, lambda w: w.batch(3, drop_remainder=True)),
    "zip of batches": (pairs, by_zip),
    "batch of a zip": (pairs, zipped_first),
    "dict": (named, of_dict),
    "dict by name": (named, of_dict_by_name),
}


def swapped(x, y):
    return Dataset.zip((y.batch(3), x.batch(3)))


def of_different_sizes(x, y):
    return Dataset.zip((x.batch(3), y.batch(4)))


def by_length(window):
    return window.batch(3 if window.cardinality() == 3 else 1)


def by_length_too(x, y):
    return Dataset.zip((x, y)).batch(3 if x.cardinality() != 2 else 4)


def by_elements(window):
    return window.batch(3 + sum(1 for _ in window))


SLOW = {
    "smaller": (numbers, lambda w: w.batch(2)),
    "larger, whole only": (numbers, lambda w: w.batch(4, drop_remainder=True)),
    "mapped": (numbers, lambda w: w.map(lambda x: x + 1).batch(3)),
    "taken": (numbers, lambda w: w.take(2).batch(3)),
    "batched twice": (numbers, lambda w: w.batch(3).batch(1)),
    "not batched": (numbers, lambda w: w),
    "swapped": (pairs, swapped),
    "a leaf only": (pairs, lambda x, y: x.batch(3)),
    "twice the same": (pairs, lambda x, y: Dataset.zip((x.batch(3), x.batch(3)))),
    "of different sizes": (pairs, of_different_sizes),
    "by length": (numbers, by_length),
    "by length of a zip": (pairs, by_length_too),
    "by elements": (numbers, by_elements),
    "another dataset": (numbers, lambda w: Dataset.range(5).batch(3)),
    "with options": (numbers, lambda w: w.batch(3).with_options(Options(writable=True))),
}


def opened(monkeypatch):
    """Return a list that has an item for each call that makes datasets of windows."""
    calls = []
    make = OpenWindows.__call__
    monkeypatch.setattr(OpenWindows, "__call__", lambda self, batches: calls.append(1) or make(self, batches))
    return calls


@pytest.mark.parametrize("how", [*FAST, *SLOW])
@pytest.mark.parametrize("window", [(3, 1, 1, False), (3, 2, 2, True), (3, 4, 1, False)])
def test_functions_of_windows(how, window, monkeypatch):
    source, function = {**FAST, **SLOW}[how]
    windows = source().window(*window)
    # The expected results are those with a dataset for each window.
    expected = [element for value in windows for element in call(function, value)]
    calls = opened(monkeypatch)
    ds = windows.flat_map(function)
    same_elements(list(ds), expected, how)
    assert bool(calls) == (how in SLOW)
    assert ("windows stacked" in ds.explain("pipeline")) == (how in FAST)


def call(function, element):
    return function(*element) if type(element) is tuple else function(element)


def test_rows_of_ragged_are_not_stacked():
    ragged = Dataset.from_tensor_slices(Ragged(np.arange(6), [0, 1, 3, 3, 6]))
    windows = ragged.window(2, 1, drop_remainder=True).flat_map(lambda w: w.batch(2))
    assert [window.tolist() for window in windows] == [[[0], [1, 2]], [[1, 2], []], [[], [3, 4, 5]]]


def test_a_function_that_fails_says_where():
    with pytest.raises(errors.UserFunctionError, match="flat_map"):
        list(numbers().window(3).flat_map(lambda w: w.batch(1 // 0)))


def test_a_window_is_gathered_by_one_copy_of_its_blocks(monkeypatch):
    # The rows of windows are not selected by a number for each row.
    taken = []
    take = Block.take
    monkeypatch.setattr(Block, "take", lambda self, rows: taken.append(1) or take(self, rows))
    assert len(list(Dataset.from_tensor_slices(np.zeros((500, 4))).sliding_window(16).batch(8))) == 61
    assert not taken


def test_small_windows_are_mapped_many_in_a_call(monkeypatch):
    num_rows = []
    call = MapRows.__call__
    monkeypatch.setattr(MapRows, "__call__", lambda self, rows: num_rows.append(len(rows)) or call(self, rows))
    means = Dataset.range(20_000).sliding_window(24).map(lambda window: window.mean())
    assert np.array_equal(list(means), np.arange(20_000 - 23) + 11.5)
    assert sum(num_rows) == 20_000 - 23
    assert len(num_rows) <= 50


def test_windows_of_a_block_of_one_row_are_copied():
    # NumPy gives a single row a stride of any size.
    one, others = np.arange(12)[::6][:1], np.arange(1, 9)
    windows = RowWindows((BlockWindows(0, 0, 1, 1, 1), BlockWindows(1, 0, 4, 2, 1)))
    rows = gather([Block(LONE, [one]), Block(LONE, [others])], Picks(windows, None, None, None))
    assert rows.leaves[0].tolist() == [0, 1, 2, 2, 3, 3, 4, 4, 5]
