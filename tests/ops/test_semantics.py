"""Examples of each operation, with results as in tf.data, and some that differ on purpose."""

from __future__ import annotations

import operator
from pathlib import Path

import dask
import numpy as np
import pytest

from daskdist import Dataset, DatasetSpec, Options, Ragged, RaggedTensorSpec, TensorSpec, errors
from daskdist.testing import afresh

INFINITE, UNKNOWN = -1, -2


def plain(element):
    """Return an element as Python values: numbers, strings, lists, tuples and dicts."""
    if isinstance(element, dict):
        return {key: plain(value) for key, value in element.items()}
    if isinstance(element, tuple):
        return tuple(map(plain, element))
    if isinstance(element, (Dataset, Ragged)):
        return list(map(plain, element))
    return element.tolist() if isinstance(element, (np.ndarray, np.generic)) else element


def check(build, expected):
    """Check the elements of a pipeline, in a second pass too, and for all divisions into blocks."""
    ds = build()
    assert list(map(plain, ds)) == expected
    assert list(map(plain, ds)) == expected
    with dask.config.set({"daskdist.split-bytes": 8, "daskdist.window-bytes": 200}):
        assert list(map(plain, build())) == expected


def count_to(n):
    return Dataset.range(1, n + 1)


def copies(n):
    """Return a function of elements that gives `n` copies of its argument."""
    return lambda x: Dataset.from_tensors(x).repeat(n)


def own_number(x):
    return Dataset.from_tensors(x).repeat(x)


def lengths(*numbers):
    """Return rows of the given lengths; each element of a row is the row's length."""
    return Dataset.from_tensor_slices(np.array(numbers)).map(lambda n: np.full(int(n), n))


def row(number, length):
    """Return a row of `lengths`, padded."""
    return [number] * number + [0] * (length - number)


def batches(*sizes):
    """Return the numbers from 0 on in batches of these sizes."""
    stops = np.cumsum([0, *sizes])
    return Dataset.range(len(sizes)).map(lambda k: np.arange(stops[int(k)], stops[int(k) + 1]))


def slices(values, dtype=np.int64):
    return Dataset.from_tensor_slices(np.array(values, dtype))


# --- constructors ---


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((4,), [0, 1, 2, 3]),
        ((1, 5, 2), [1, 3]),
        ((5, 1, -2), [5, 3]),
        ((5, 1), []),
        ((-2,), []),
        ((0,), []),
        ((3, -3, -3), [3, 0]),
    ],
)
def test_range(args, expected):
    check(lambda: Dataset.range(*args), expected)
    assert len(Dataset.range(*args)) == len(expected)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "float32", "float64"])
def test_range_of_a_dtype(dtype):
    ds = Dataset.range(3, output_type=dtype)
    assert ds.element_spec == TensorSpec((), dtype)
    assert [(x.dtype, float(x)) for x in ds] == [(np.dtype(dtype), k) for k in (0.0, 1.0, 2.0)]


def test_counter_and_random():
    check(lambda: Dataset.counter(10, -5, "int32").take(3), [10, 5, 0])
    assert Dataset.counter().cardinality() == Dataset.random().cardinality() == INFINITE
    numbers = Dataset.random(seed=3).take(1000)
    first, second = list(numbers), list(numbers)
    assert first == second
    assert Dataset.random(seed=3).element_spec == TensorSpec((), "int64")
    assert min(first) >= 0
    assert 2**31 < max(first) < 2**32
    anew = Dataset.random(seed=3, rerandomize_each_iteration=True).take(10)
    assert list(anew) != list(anew)


@pytest.mark.parametrize(
    ("tensors", "element", "spec"),
    [
        ([1, 2, 3], [1, 2, 3], TensorSpec((3,), "int64")),
        (([1.0, 2.0], 3), ([1.0, 2.0], 3), (TensorSpec((2,), "float64"), TensorSpec((), "int64"))),
        ({"a": 2**40, "b": {"c": True}}, {"a": 2**40, "b": {"c": True}}, None),
        (np.zeros((2, 0)), [[], []], TensorSpec((2, 0), "float64")),
        (b"a\0", b"a\0", TensorSpec((), object)),
    ],
)
def test_from_tensors_is_one_element(tensors, element, spec):
    check(lambda: Dataset.from_tensors(tensors), [element])
    assert len(Dataset.from_tensors(tensors)) == 1
    assert spec is None or Dataset.from_tensors(tensors).element_spec == spec


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),
        (([1, 2], {"x": [3.0, 4.0]}), [(1, {"x": 3.0}), (2, {"x": 4.0})]),
        ([], []),
        (Ragged([1, 2, 3], [0, 2, 2, 3]), [[1, 2], [], [3]]),
        (["a", "bc"], ["a", "bc"]),
    ],
)
def test_from_tensor_slices(tensors, expected):
    check(lambda: Dataset.from_tensor_slices(tensors), expected)
    assert len(Dataset.from_tensor_slices(tensors)) == len(expected)


@pytest.mark.parametrize(
    ("yielded", "dtype", "expected"),
    [
        ([1, 2], "int64", [1, 2]),
        ([1, 2], "float32", [1.0, 2.0]),
        ([[1, 2], []], "int64", [[1, 2], []]),
        (["a", "bb"], np.dtypes.StringDType(), ["a", "bb"]),
        ([b"a\0", b""], object, [b"a\0", b""]),
        ([np.float32(1.5)], "float32", [1.5]),
        ([True, False], bool, [True, False]),
    ],
)
def test_from_generator(yielded, dtype, expected):
    shape = (None,) if isinstance(yielded[0], list) else ()
    ds = Dataset.from_generator(lambda: iter(yielded), output_signature=TensorSpec(shape, dtype))
    check(lambda: ds, expected)
    assert {x.dtype for x in ds if isinstance(x, np.generic | np.ndarray)} <= {np.dtype(dtype)}
    assert ds.cardinality() == UNKNOWN


def test_from_generator_is_called_anew_with_its_arguments():
    calls = []

    def numbers(first, stop):
        calls.append((first, stop))
        yield from range(first, stop)

    ds = Dataset.from_generator(numbers, TensorSpec((), "int64"), args=(2, 5))
    assert not calls
    assert [int(x) for x in ds] == [int(x) for x in ds] == [2, 3, 4]
    assert calls == [(2, 5)] * 2


def test_bytes_stay_bytes():
    words = [b"one", b"", b"a\0b\0"]
    check(lambda: Dataset.from_tensor_slices(words), words)
    ds = Dataset.from_tensor_slices(words)
    assert all(type(word) is bytes for word in ds)
    (batch,) = ds.batch(3)
    assert batch.dtype == object
    assert batch.tolist() == words
    check(lambda: ds.map(lambda word: word + b"!").filter(lambda word: len(word) > 1), [b"one!", b"a\0b\0!"])


@pytest.fixture
def three_files(tmp_path):
    for name in ("b.txt", "a.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    return str(tmp_path / "*.txt")


def test_list_files(three_files):
    names = ["a.txt", "b.txt", "c.txt"]
    by_name = lambda ds: [Path(str(path)).name for path in ds]  # noqa: E731
    assert by_name(Dataset.list_files(three_files, shuffle=False)) == names
    shuffled = Dataset.list_files(three_files, seed=1)
    passes = [by_name(shuffled) for _ in range(12)]
    assert all(sorted(item) == names for item in passes)
    assert len({tuple(value) for value in passes}) > 1
    assert [by_name(Dataset.list_files(three_files, seed=1))] == passes[:1]
    assert len(shuffled) == 3


# --- several datasets ---


def test_zip_ends_with_the_shortest():
    a, b = Dataset.range(3), Dataset.range(10, 12)
    check(lambda: Dataset.zip(a, b), [(0, 10), (1, 11)])
    check(lambda: Dataset.zip((a, b)), [(0, 10), (1, 11)])
    check(lambda: Dataset.zip({"x": a, "y": (b, a)}), [{"x": 0, "y": (10, 0)}, {"x": 1, "y": (11, 1)}])
    check(lambda: Dataset.zip(a), [0, 1, 2])
    check(lambda: Dataset.zip((a,)), [(0,), (1,), (2,)])
    check(lambda: Dataset.zip(a, Dataset.range(0)), [])
    check(lambda: Dataset.zip(a, b.repeat()), [(0, 10), (1, 11), (2, 10)])


@pytest.mark.parametrize(
    ("choices", "stop", "expected"),
    [
        ([0, 1, 0, 1], True, [0, 10, 1, 11]),
        ([0, 0, 0, 1, 1], True, [0, 1]),  # At the third choice, dataset 0 has no more elements.
        ([0, 0, 0, 1, 1], False, [0, 1, 10, 11]),
        ([2, 0], True, []),  # The empty dataset is chosen first.
        ([2, 0, 2, 1], False, [0, 10]),
        ([], True, []),
        ([1] * 9, True, [10, 11, 12]),
        ([1] * 9 + [0], False, [10, 11, 12, 0]),
    ],
)
def test_choose_from_datasets(choices, stop, expected):
    sources = [Dataset.range(2), Dataset.range(10, 13), Dataset.range(0)]
    check(lambda: Dataset.choose_from_datasets(sources, slices(choices), stop_on_empty_dataset=stop), expected)


def test_choices_may_be_endless():
    sources = [Dataset.range(3), Dataset.range(10, 12)]
    for stop, expected in ((True, [0, 10, 1, 11, 2]), (False, [0, 10, 1, 11, 2])):
        chosen = Dataset.choose_from_datasets(sources, Dataset.range(2).repeat(), stop_on_empty_dataset=stop)
        check(lambda chosen=chosen: chosen, expected)


def test_sample_from_datasets():
    sources = [Dataset.range(3), Dataset.range(10, 13)]
    mixed = [int(x) for x in Dataset.sample_from_datasets(sources, seed=1)]
    assert sorted(mixed) == [0, 1, 2, 10, 11, 12]
    assert [x for x in mixed if x < 10] == [0, 1, 2]
    assert [x for x in mixed if x >= 10] == [10, 11, 12]
    # A dataset of weight 0 is ignored.
    check(lambda: Dataset.sample_from_datasets(sources, weights=[0, 1]), [10, 11, 12])
    with_empty = [Dataset.range(5), Dataset.range(0)]
    check(lambda: Dataset.sample_from_datasets(with_empty, seed=2), [0, 1, 2, 3, 4])
    stopped = list(Dataset.sample_from_datasets(with_empty, seed=2, stop_on_empty_dataset=True))
    assert len(stopped) < 5


def test_shares_of_sampled_datasets():
    sources = [Dataset.from_tensors(k).repeat() for k in (0, 1)]
    drawn = [int(x) for x in Dataset.sample_from_datasets(sources, weights=[0.2, 0.8], seed=0).take(2000)]
    assert 0.77 < np.mean(drawn) < 0.83


def test_concatenate():
    check(lambda: Dataset.range(2).concatenate(Dataset.range(8, 10)), [0, 1, 8, 9])
    ds = Dataset.from_tensors([1, 2]).concatenate(Dataset.from_tensors([1, 2, 3]))
    assert ds.element_spec == TensorSpec((None,), "int64")
    check(lambda: ds, [[1, 2], [1, 2, 3]])


# --- functions of elements ---


def test_arguments_and_results_of_functions():
    pairs = Dataset.zip(Dataset.range(2), Dataset.range(5, 7))
    check(lambda: pairs.map(lambda a, b: a + b), [5, 7])
    check(lambda: pairs.map(lambda *both: both[::-1]), [(5, 0), (6, 1)])
    named = Dataset.zip({"a": Dataset.range(2), "b": Dataset.range(5, 7)})
    check(lambda: named.map(lambda d: d["a"] + d["b"]), [5, 7])
    check(lambda: Dataset.range(2).map(lambda x: [x, x + 1]), [(0, 1), (1, 2)])
    assert type(next(iter(Dataset.range(2).map(lambda x: [x, x])))) is tuple
    check(lambda: Dataset.range(2).map(lambda x: {"l": [1, 2], "x": x}), [{"l": [1, 2], "x": 0}, {"l": [1, 2], "x": 1}])
    nested = Dataset.zip(pairs, named)
    check(lambda: nested.map(lambda pair, d: pair[0] + d["b"]), [5, 7])
    check(lambda: pairs.filter(lambda a, b: b > 5), [(1, 6)])
    check(lambda: pairs.take_while(lambda a, b: b < 6), [(0, 5)])
    check(lambda: pairs.flat_map(lambda a, b: Dataset.range(a, b, 3)), [0, 3, 1, 4])
    # Functions with a state get a tuple as one argument.
    assert pairs.reduce(np.int64(0), lambda state, pair: state + pair[1]) == 11
    check(lambda: pairs.scan(np.int64(0), lambda s, pair: (s + pair[1], (s, pair[0]))), [(0, 0), (5, 1)])


def test_iteration_continues_after_a_skipped_error():
    elements = iter(Dataset.range(3).map(lambda x: 12 // int(x - 1), vectorized=False).ignore_errors())
    assert [int(x) for x in elements] == [-12, 12]


@pytest.mark.parametrize(
    ("initial", "function", "expected"),
    [
        (np.int64(0), lambda s, x: (s + x, s + x), [0, 1, 3, 6, 10]),
        (np.int64(7), lambda s, x: [x, s], [7, 0, 1, 2, 3]),  # A list of two is a pair too.
        (0, lambda s, x: (s + 1, x * s), [0, 1, 4, 9, 16]),
        ({"a": 0}, lambda s, x: ({"a": s["a"] + 2}, (s["a"], x)), [(0, 0), (2, 1), (4, 2), (6, 3), (8, 4)]),
    ],
)
def test_scan(initial, function, expected):
    check(lambda: Dataset.range(5).scan(initial, function), expected)
    assert Dataset.range(5).scan(initial, function).cardinality() == 5


def test_reduce():
    assert Dataset.range(5).reduce(np.int64(1), lambda s, x: s + x) == 11
    assert Dataset.range(0).reduce(np.int64(1), lambda s, x: s + x) == 1
    state = Dataset.range(4).reduce((0, np.zeros(2)), lambda s, x: (s[0] + 1, s[1] + x))
    assert plain(state) == (4, [6.0, 6.0])


def test_the_result_of_reduce_is_not_an_array_of_the_function():
    buffer = np.zeros(1, np.int64)

    def add(state, x):
        return np.add(state, x, out=buffer)

    first, second = (Dataset.range(number).reduce(np.zeros(1, np.int64), add) for number in (4, 100))
    assert (first.tolist(), second.tolist()) == ([6], [4950])


def test_take_while_ends_at_the_first_false():
    check(lambda: slices([1, 3, 9, 2]).take_while(lambda x: x < 5), [1, 3])
    check(lambda: slices([9, 1]).take_while(lambda x: x < 5), [])
    check(lambda: Dataset.counter().take_while(lambda x: x < 3), [0, 1, 2])


def test_enumerate():
    check(lambda: slices([7, 8]).enumerate(), [(0, 7), (1, 8)])
    check(lambda: slices([7, 8]).enumerate(start=-3), [(-3, 7), (-2, 8)])
    check(lambda: Dataset.zip(slices([7]), slices([8])).enumerate(5), [(5, (7, 8))])
    assert Dataset.range(2).enumerate().element_spec[0] == TensorSpec((), "int64")


# --- which elements ---


def test_repeat_continues_after_an_empty_pass():
    # The source that is drawn first differs between passes; if it is the empty one, the pass has no elements.
    sources = [Dataset.range(1), Dataset.range(0)]
    for seed in range(10):
        drawn = Dataset.sample_from_datasets(sources, [0.5, 0.5], seed=seed, stop_on_empty_dataset=True)
        lengths = [len(list(afresh(drawn).repeat(number))) for number in range(8)]
        assert set(np.diff(lengths)) == {0, 1}
    assert list(Dataset.range(5).filter(lambda x: x > 9).repeat()) == []
    assert list(Dataset.range(5).filter(lambda x: x > 9).repeat(10**9)) == []


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda ds: ds.take(-1), [0, 1, 2, 3, 4]),
        (lambda ds: ds.take(9), [0, 1, 2, 3, 4]),
        (lambda ds: ds.take(0), []),
        (lambda ds: ds.skip(-1), []),
        (lambda ds: ds.skip(9), []),
        (lambda ds: ds.skip(0), [0, 1, 2, 3, 4]),
        (lambda ds: ds.shard(2, 0), [0, 2, 4]),
        (lambda ds: ds.shard(2, 1), [1, 3]),
        (lambda ds: ds.shard(9, 7), []),
        (lambda ds: ds.shard(1, 0), [0, 1, 2, 3, 4]),
        (lambda ds: ds.repeat(0), []),
        (lambda ds: ds.take(2).repeat(2), [0, 1, 0, 1]),
        (lambda ds: ds.take(0).repeat(), []),
        (lambda ds: ds.filter(lambda x: x > 9).repeat(), []),
        (lambda ds: ds.take(2).repeat().take(3), [0, 1, 0]),
        (lambda ds: ds.take(2).repeat(-5).take(3), [0, 1, 0]),
        (lambda ds: ds.repeat().repeat(0), []),
    ],
)
def test_take_skip_shard_repeat(build, expected):
    check(lambda: build(Dataset.range(5)), expected)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([3, 1, 3, 2, 1], "int32"), [3, 1, 2]),
        (np.array([3, 1, 3, 2, 1], "int64"), [3, 1, 2]),
        ([b"b", b"a", b"b"], [b"b", b"a"]),
        (["b", "a", "b"], ["b", "a"]),
        # TensorFlow takes only elements like those above.
        (np.array([0.5, -0.5, 0.5]), [0.5, -0.5]),
        ([[1, 2], [2, 1], [1, 2]], [[1, 2], [2, 1]]),
        ([True, True, False], [True, False]),
        (([1, 1, 1], ["a", "b", "a"]), [(1, "a"), (1, "b")]),
    ],
)
def test_unique(values, expected):
    check(lambda: Dataset.from_tensor_slices(values).unique(), expected)


def test_get_single_element():
    assert plain(Dataset.range(3).batch(3).get_single_element()) == [0, 1, 2]
    for count in (0, 2):
        with pytest.raises(errors.ArgumentError, match="get_single_element"):
            Dataset.range(count).get_single_element()


def test_assert_cardinality():
    evens = Dataset.range(6).filter(lambda x: x % 2 == 0)
    assert len(evens.assert_cardinality(3)) == 3
    check(lambda: evens.assert_cardinality(3), [0, 2, 4])
    assert evens.assert_cardinality(INFINITE).cardinality() == INFINITE
    for number in (2, 4, INFINITE):
        with pytest.raises(errors.CardinalityError, match="assert_cardinality"):
            list(evens.assert_cardinality(number))
    check(lambda: Dataset.range(5).repeat().assert_cardinality(INFINITE).take(2), [0, 1])


def test_fingerprint():
    build = lambda n=3: Dataset.range(n).map(lambda x: x + 1).batch(2)  # noqa: E731
    assert isinstance(build().fingerprint(), np.uint64)
    assert Dataset.range(3).batch(2).fingerprint() == Dataset.range(3).batch(2).fingerprint()
    different = [
        Dataset.range(3),
        Dataset.range(4),
        Dataset.range(3).batch(2),
        Dataset.range(3).batch(2, drop_remainder=True),
    ]
    assert len({ds.fingerprint() for ds in different}) == len(different)


# --- nested datasets ---


@pytest.mark.parametrize(
    ("function", "num_inputs", "cycle", "block", "expected"),
    [
        (copies(4), 3, 2, 1, [1, 2, 1, 2, 1, 2, 1, 2, 3, 3, 3, 3]),
        (copies(4), 3, 2, 3, [1, 1, 1, 2, 2, 2, 1, 2, 3, 3, 3, 3]),
        (own_number, 4, 2, 1, [1, 2, 2, 3, 3, 4, 3, 4, 4, 4]),
        (copies(3), 3, None, None, [1, 2, 1, 2, 1, 2, 3, 3, 3]),
        (copies(3), 3, -1, None, [1, 2, 1, 2, 1, 2, 3, 3, 3]),
        (copies(2), 3, 1, 1, [1, 1, 2, 2, 3, 3]),
        (copies(2), 3, 9, 1, [1, 2, 3, 1, 2, 3]),
        (copies(5), 3, 3, 2, [1, 1, 2, 2, 3, 3, 1, 1, 2, 2, 3, 3, 1, 2, 3]),
        (copies(0), 3, 2, 1, []),
        # An empty dataset gives its turn away, and the next one is opened only when the turn comes back.
        (lambda x: Dataset.range(10 * x, 10 * x + x % 3), 5, 2, 1, [10, 20, 21, 40, 50, 51]),
        (lambda x: Dataset.range(10 * x, 10 * x + x % 3), 5, 3, 2, [10, 20, 21, 40, 50, 51]),
        (lambda x: Dataset.range(x % 3).map(lambda y: 10 * x + y), 8, 2, 2, [10, 20, 21, 40, 50, 51, 70, 80, 81]),
    ],
)
@pytest.mark.parametrize("num_parallel_calls", [None, 1])
def test_interleave(function, num_inputs, cycle, block, expected, num_parallel_calls):
    check(lambda: count_to(num_inputs).interleave(function, cycle, block, num_parallel_calls), expected)


def test_interleave_of_endless_datasets():
    ds = count_to(3).interleave(lambda x: Dataset.from_tensors(x).repeat(), cycle_length=2, block_length=2)
    check(lambda: ds.take(7), [1, 1, 2, 2, 1, 1, 2])
    assert ds.cardinality() == UNKNOWN


def test_flat_map():
    check(lambda: Dataset.range(4).flat_map(Dataset.range), [0, 0, 1, 0, 1, 2])
    check(
        lambda: Dataset.range(3).flat_map(lambda x: Dataset.range(x).flat_map(lambda y: Dataset.range(y + 1))),
        [0, 0, 0, 1],
    )
    check(lambda: Dataset.range(3).flat_map(lambda x: Dataset.from_tensors(x).repeat()).take(4), [0, 0, 0, 0])
    check(lambda: batches(2, 1).flat_map(Dataset.from_tensor_slices), [0, 1, 2])


@pytest.mark.parametrize(
    ("size", "shift", "stride", "drop", "expected"),
    [
        (3, None, 1, False, [[0, 1, 2], [3, 4, 5], [6]]),
        (3, None, 1, True, [[0, 1, 2], [3, 4, 5]]),
        (3, 1, 1, True, [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]),
        (3, 1, 1, False, [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6], [5, 6], [6]]),
        (3, 1, 2, True, [[0, 2, 4], [1, 3, 5], [2, 4, 6]]),
        (3, 1, 2, False, [[0, 2, 4], [1, 3, 5], [2, 4, 6], [3, 5], [4, 6], [5], [6]]),
        (2, 3, 1, False, [[0, 1], [3, 4], [6]]),
        (2, 3, 1, True, [[0, 1], [3, 4]]),
        (1, 7, 1, False, [[0]]),
        (9, None, 1, False, [[0, 1, 2, 3, 4, 5, 6]]),
        (9, None, 1, True, []),
        (9, 3, 1, False, [[0, 1, 2, 3, 4, 5, 6], [3, 4, 5, 6], [6]]),
        (2, 2, 9, False, [[0], [2], [4], [6]]),
    ],
)
def test_window(size, shift, stride, drop, expected):
    build = lambda: Dataset.range(7).window(size, shift, stride, drop)  # noqa: E731
    check(build, expected)
    assert len(build()) == len(expected)
    check(
        lambda: build().flat_map(lambda window: window.batch(size)),
        [batch for batch in expected if batch],
    )


def test_windows_have_the_structure_of_elements():
    both = Dataset.zip({"a": Dataset.range(3), "b": (Dataset.range(5, 8), slices([b"x", b"y", b"z"], object))})
    check(lambda: both.window(2), [{"a": [0, 1], "b": ([5, 6], [b"x", b"y"])}, {"a": [2], "b": ([7], [b"z"])}])
    spec = both.window(2).element_spec
    assert isinstance(spec["a"], DatasetSpec)
    assert spec["a"].element_spec == TensorSpec((), "int64")
    again = both.window(2).flat_map(lambda window: Dataset.zip((window["a"], window["b"][0])))
    check(lambda: again, [(0, 5), (1, 6), (2, 7)])
    check(
        lambda: Dataset.range(5).window(2).map(lambda window: window.reduce(np.int64(0), operator.add)),
        [1, 5, 4],
    )


# --- batches ---


@pytest.mark.parametrize(
    ("size", "drop", "expected"),
    [(2, False, [[0, 1], [2, 3], [4]]), (2, True, [[0, 1], [2, 3]]), (9, False, [[0, 1, 2, 3, 4]]), (9, True, [])],
)
def test_batch(size, drop, expected):
    check(lambda: Dataset.range(5).batch(size, drop_remainder=drop), expected)
    ds = Dataset.range(5).batch(size, drop_remainder=drop)
    assert ds.element_spec == TensorSpec((size if drop else None,), "int64")
    assert len(ds) == len(expected)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: Dataset.range(5).batch(2).unbatch(), [0, 1, 2, 3, 4]),
        (lambda: Dataset.range(8).batch(2).batch(2).unbatch(), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (lambda: Dataset.from_tensors(([1, 2], {"w": ["a", "b"]})).unbatch(), [(1, {"w": "a"}), (2, {"w": "b"})]),
        (lambda: lengths(2, 0, 1).unbatch(), [2, 2, 1]),
        (lambda: Dataset.range(5).batch(2).unbatch().batch(4), [[0, 1, 2, 3], [4]]),
        (lambda: lengths(2, 0, 1).ragged_batch(2).unbatch(), [[2, 2], [], [1]]),
        (lambda: lengths(0, 0).batch(2).batch(1).unbatch(), [[[], []]]),
        (lambda: lengths(0, 0, 0).batch(2).batch(1).unbatch().unbatch(), [[], [], []]),
        (lambda: lengths(0, 0).batch(2).group_by_window(len, lambda n, w: w, 1).unbatch(), [[], []]),
    ],
)
def test_unbatch(build, expected):
    check(build, expected)


@pytest.mark.parametrize(
    ("sizes", "drop", "expected"),
    [
        ([2, 1, 0], False, [[0, 1], [2], [], [3, 4], [5], [], [6, 7], [8], [], [9]]),
        (4, False, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        (4, True, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([3, 4], True, [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9]]),
        ([3, 5], True, [[0, 1, 2], [3, 4, 5, 6, 7]]),
        (20, False, [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]),
        (20, True, []),
        ([0, 4], False, [[], [0, 1, 2, 3], [], [4, 5, 6, 7], [], [8, 9]]),
        # A batch of size 0 follows the batch before it at once, also when no rows are left.
        ([10, 0, 0], False, [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [], []]),
        ([0, 5], False, [[], [0, 1, 2, 3, 4], [], [5, 6, 7, 8, 9], []]),
        ([0, 4], True, [[], [0, 1, 2, 3], [], [4, 5, 6, 7], []]),
        ([0, 0, 20], True, [[], []]),
    ],
)
@pytest.mark.parametrize("cut", [(4, 4, 2), (10,), (1, 0, 9), (5, 5), (3, 3, 3, 1)])
def test_rebatch(sizes, drop, expected, cut):
    check(lambda: batches(*cut).rebatch(sizes, drop_remainder=drop), expected)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_batches_of_matrices_have_two_axes_as_any_matrix():
    for shape, size in [((6, 1), 3), ((6, 2), 3), ((12, 2), 4), ((6, 2), 1)]:
        matrix = np.matrix(np.arange(np.prod(shape)).reshape(shape))
        batches = list(Dataset.from_tensor_slices(matrix).batch(size))
        assert [batch.shape for batch in batches] == [(size, shape[1])] * (shape[0] // size)
        np.testing.assert_array_equal(np.concatenate(batches), matrix)


def test_rebatch_keeps_the_structure_and_accepts_empty_datasets():
    ds = Dataset.from_tensor_slices({"a": [1, 2, 3], "b": [[1.0], [2.0], [3.0]]}).batch(2).rebatch([0, 3])
    first, second = list(ds)[:2]
    assert plain(second) == {"a": [1, 2, 3], "b": [[1.0], [2.0], [3.0]]}
    assert (first["a"].dtype, first["a"].shape) == (np.int64, (0,))
    assert (first["b"].dtype, first["b"].shape) == (np.float64, (0, 1))
    check(lambda: Dataset.range(0).batch(2).rebatch([0, 2]), [])
    check(lambda: Dataset.range(4).batch(4).rebatch(np.array([1, 2])), [[0], [1, 2], [3]])


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda ds: ds.take(1), [[]]),
        (lambda ds: ds.shard(2, 0), [[], [], []]),
        (lambda ds: ds.shard(2, 0).map(lambda x: x + 1), [[], [], []]),
        (lambda ds: ds.enumerate(), [(0, []), (1, [0]), (2, []), (3, [1]), (4, [])]),
        (lambda ds: ds.filter(lambda x: len(x) == 0).enumerate(), [(0, []), (1, []), (2, [])]),
        (lambda ds: ds.take(1).padded_batch(2), [[[]]]),
        (lambda ds: ds.padded_batch(2), [[[0], [0]], [[0], [1]], [[]]]),
        (lambda ds: ds.rebatch(2), [[0, 1]]),
        (lambda ds: ds.batch(1), [[[]], [[0]], [[]], [[1]], [[]]]),
        (lambda ds: ds.batch(1).unbatch(), [[], [0], [], [1], []]),
        (lambda ds: ds.unbatch(), [0, 1]),
    ],
)
def test_batches_without_rows_are_elements_like_others(build, expected):
    check(lambda: build(Dataset.range(2).batch(2).rebatch([0, 1])), expected)


# --- batches of different lengths ---


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [[[0, 0], [1, 0], [2, 2]], [[3, 3, 3]]]),
        ({"padding_values": -1}, [[[-1, -1], [1, -1], [2, 2]], [[3, 3, 3]]]),
        ({"padded_shapes": [None]}, [[[0, 0], [1, 0], [2, 2]], [[3, 3, 3]]]),
        ({"padded_shapes": [-1]}, [[[0, 0], [1, 0], [2, 2]], [[3, 3, 3]]]),
        ({"padded_shapes": [4]}, [[[0, 0, 0, 0], [1, 0, 0, 0], [2, 2, 0, 0]], [[3, 3, 3, 0]]]),
        ({"padded_shapes": (3,), "drop_remainder": True}, [[[0, 0, 0], [1, 0, 0], [2, 2, 0]]]),
    ],
)
def test_padded_batch(arguments, expected):
    check(lambda: lengths(0, 1, 2, 3).padded_batch(3, **arguments), expected)


@pytest.mark.parametrize(
    ("element", "expected"),
    [
        ([1, 2], [[1, 2, 0]]),
        ([1.5], [[1.5, 0.0, 0.0]]),
        ([True], [[True, False, False]]),
        (["ab"], [["ab", "", ""]]),
        ([b"ab"], [[b"ab", b"", b""]]),
        (np.array([1 + 2j]), [[1 + 2j, 0, 0]]),
    ],
)
def test_default_padding(element, expected):
    check(lambda: Dataset.from_tensors(element).padded_batch(1, padded_shapes=[3]), [expected])


def test_padding_of_nests():
    ds = Dataset.range(1, 3).map(lambda x: {"v": np.full(int(x), x), "m": (np.ones((int(x), 2)), x)})
    shapes = {"v": [3], "m": ([None, 3], [])}
    values = {"v": -1, "m": (0.5, None)}
    check(
        lambda: ds.padded_batch(2, shapes, values),
        [
            {
                "v": [[1, -1, -1], [2, 2, -1]],
                "m": ([[[1.0, 1.0, 0.5], [0.5, 0.5, 0.5]], [[1.0, 1.0, 0.5], [1.0, 1.0, 0.5]]], [1, 2]),
            }
        ],
    )
    # One padding value may be given for all leaves.
    check(
        lambda: Dataset.from_tensors(([1], [2.5])).padded_batch(1, ([2], [2]), padding_values=7),
        [([[1, 7]], [[2.5, 7.0]])],
    )
    assert ds.padded_batch(2, shapes).element_spec == {
        "v": TensorSpec((None, 3), "int64"),
        "m": (TensorSpec((None, None, 3), "float64"), TensorSpec((None,), "int64")),
    }


def test_ragged_batch():
    check(lambda: lengths(2, 0, 1).ragged_batch(2), [[[2, 2], []], [[1]]])
    check(lambda: lengths(2, 0, 1).ragged_batch(2, drop_remainder=True), [[[2, 2], []]])
    first = next(iter(lengths(2, 0, 1).ragged_batch(2, row_splits_dtype="int32")))
    assert isinstance(first, Ragged)
    assert first.row_splits.dtype == np.int32
    assert lengths(2, 1).ragged_batch(2).element_spec == RaggedTensorSpec((None, None), "int64")
    # Arrays of one shape are stacked.
    check(lambda: Dataset.range(3).ragged_batch(2), [[0, 1], [2]])
    assert isinstance(next(iter(Dataset.range(3).ragged_batch(2))), np.ndarray)
    assert Dataset.from_tensor_slices(np.ones((3, 2))).ragged_batch(2).element_spec == TensorSpec((None, 2), "float64")


@pytest.mark.parametrize(
    ("boundaries", "sizes", "arguments", "expected"),
    [
        # A boundary is the first length of the next bucket.
        ([2], [2, 2], {}, [[[2, 2, 0], [3, 3, 3]], [[1], [1]], [[4, 4, 4, 4]]]),
        ([3], [2, 2], {}, [[[1, 0], [2, 2]], [[3, 3, 3, 0], [4, 4, 4, 4]], [[1]]]),
        ([], [3], {}, [[[1, 0, 0], [2, 2, 0], [3, 3, 3]], [[1, 0, 0, 0], [4, 4, 4, 4]]]),
        ([2], [3, 9], {"drop_remainder": True}, []),
        ([2], [2, 3], {"padding_values": -1}, [[[1], [1]], [[2, 2, -1, -1], [3, 3, 3, -1], [4, 4, 4, 4]]]),
        ([2], [1, 3], {"padded_shapes": [5]}, [[row(1, 5)], [row(1, 5)], [row(2, 5), row(3, 5), row(4, 5)]]),
        ([2, 7], [2, 2, 9], {"pad_to_bucket_boundary": True}, [[row(2, 6), row(3, 6)], [[1], [1]], [row(4, 6)]]),
        ([2, 3, 4], [2, 1, 1, 1], {"no_padding": True}, [[[2, 2]], [[3, 3, 3]], [[1], [1]], [[4, 4, 4, 4]]]),
    ],
)
def test_bucket_by_sequence_length(boundaries, sizes, arguments, expected):
    build = lambda: lengths(1, 2, 3, 1, 4).bucket_by_sequence_length(len, boundaries, sizes, **arguments)  # noqa: E731
    check(build, expected)
    assert build().cardinality() == UNKNOWN


@pytest.mark.parametrize(
    ("budget", "arguments", "expected"),
    [
        # The size of a padded batch is the number of elements times the greatest length.
        (6, {}, [[[1, 0], [2, 2]], [[3, 3, 3], row(1, 3)], [[4, 4, 4, 4]], [[1]]]),
        (6, {"padding_values": -1}, [[[1, -1], [2, 2]], [[3, 3, 3], [1, -1, -1]], [[4, 4, 4, 4]], [[1]]]),
        # The size of a ragged batch is the sum of the lengths.
        (6, {"ragged": True}, [[[1], [2, 2], [3, 3, 3]], [[1], [4, 4, 4, 4], [1]]]),
        (99, {"ragged": True}, [[[1], [2, 2], [3, 3, 3], [1], [4, 4, 4, 4], [1]]]),
        (6, {"buffer_size": 99}, [[[1], [1], [1]], [[2, 2, 0], [3, 3, 3]], [[4, 4, 4, 4]]]),
        (6, {"buffer_size": 3}, [[[1, 0], [2, 2]], [[3, 3, 3]], [[1], [1]], [[4, 4, 4, 4]]]),
        (6, {"buffer_size": 99, "ragged": True}, [[[1], [1], [1], [2, 2]], [[3, 3, 3]], [[4, 4, 4, 4]]]),
        # Each buffer gives a multiple of `round_size` batches, for which the largest batches are split.
        (6, {"buffer_size": 99, "round_size": 2}, [[[1], [1]], [[1]], [[2, 2, 0], [3, 3, 3]], [[4, 4, 4, 4]]]),
        (4, {"buffer_size": 3, "round_size": 2}, [[[1]], [[1]], [[2, 2]], [[3, 3, 3]], [[1]], [[4, 4, 4, 4]]]),
    ],
)
def test_batch_by_size(budget, arguments, expected):
    build = lambda: lengths(1, 2, 3, 1, 4, 1).batch_by_size(budget, len, **arguments)  # noqa: E731
    check(build, expected)
    assert build().cardinality() == UNKNOWN


def test_the_spec_of_batches_by_size():
    ds = lengths(1, 2).map(lambda x: {"x": x, "n": len(x)})
    length = lambda value: value["n"]  # noqa: E731
    assert ds.batch_by_size(4, length).element_spec == {
        "x": TensorSpec((None, None), "int64"),
        "n": TensorSpec((None,), "int64"),
    }
    ragged = ds.batch_by_size(4, length, ragged=True)
    assert ragged.element_spec == {"x": RaggedTensorSpec((None, None), "int64"), "n": TensorSpec((None,), "int64")}
    assert [batch["x"].tolist() for batch in ragged] == [[[1], [2, 2]]]
    # An element of length 0 counts as 1; otherwise a batch could have any number of them.
    check(lambda: lengths(0, 0, 0).batch_by_size(2, len), [[[], []], [[]]])


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ({"window_size": 2}, [[5, 3], [2, 4], [1, 7], [6]]),
        ({"window_size": 1}, [[5], [2], [3], [4], [1], [6], [7]]),
        # A full window comes right after its last element; incomplete ones come at the end, ordered by key.
        ({"window_size": 3}, [[5, 3, 1], [2, 4, 6], [7]]),
        ({"window_size": 9}, [[2, 4, 6], [5, 3, 1, 7]]),
        ({"window_size_func": lambda key: key + 1}, [[2], [5, 3], [4], [6], [1, 7]]),
    ],
)
def test_group_by_window(size, expected):
    numbers = slices([5, 2, 3, 4, 1, 6, 7])
    check(lambda: numbers.group_by_window(lambda x: x % 2, lambda key, window: window.batch(9), **size), expected)


def test_structure_of_windows():
    key_of = lambda x: x % 3 - 1  # noqa: E731 - keys may be negative
    group = lambda reduce: Dataset.range(7).group_by_window(key_of, reduce, window_size=2)  # noqa: E731
    check(lambda: group(lambda key, window: window.map(lambda x: 100 * key + x)), [-100, -97, 1, 4, 102, 105, -94])
    check(lambda: group(lambda key, window: window.filter(lambda x: x < 0)), [])
    check(lambda: group(lambda key, window: window.take(1).enumerate(10)), [(10, 0), (10, 1), (10, 2), (10, 6)])
    check(lambda: group(lambda key, window: Dataset.from_tensors(key)), [-1, 0, 1, -1])


# --- pipelines ---


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: Dataset.range(8).batch(2).batch(4), [[[0, 1], [2, 3], [4, 5], [6, 7]]]),
        (
            lambda: lengths(0, 1, 2, 3).padded_batch(4).map(lambda x: x.T),
            [[[0, 1, 2, 3], [0, 0, 2, 3], [0, 0, 0, 3]]],
        ),
        (
            lambda: slices([0, 10]).flat_map(lambda x: Dataset.range(x, x + 5).batch(4)),
            [[0, 1, 2, 3], [4], [10, 11, 12, 13], [14]],
        ),
        (
            lambda: slices([0, 10]).interleave(lambda x: Dataset.range(x, x + 5).batch(4), cycle_length=2),
            [[0, 1, 2, 3], [10, 11, 12, 13], [4], [14]],
        ),
        (lambda: Dataset.range(4).batch(4).map(lambda x: np.concatenate([x, x])), [[0, 1, 2, 3, 0, 1, 2, 3]]),
        (
            lambda: Dataset.range(4).batch(2).concatenate(Dataset.range(6).batch(3)),
            [[0, 1], [2, 3], [0, 1, 2], [3, 4, 5]],
        ),
        (
            lambda: Dataset.zip(Dataset.range(4).batch(2), Dataset.range(6).batch(3)),
            [([0, 1], [0, 1, 2]), ([2, 3], [3, 4, 5])],
        ),
        (
            lambda: Dataset.range(4).batch(2).scan(np.int64(0), lambda s, x: (s + x.sum(), x + s)),
            [[0, 1], [3, 4]],
        ),
        (
            lambda: Dataset.range(10).shard(3, 1).window(2, shift=1).flat_map(lambda w: w.batch(2)),
            [[1, 4], [4, 7], [7]],
        ),
        (lambda: Dataset.range(3).repeat(2).unique().enumerate(1), [(1, 0), (2, 1), (3, 2)]),
        (lambda: Dataset.range(6).window(3).flat_map(lambda w: w.shard(2, 1)), [1, 4]),
    ],
)
def test_pipelines(build, expected):
    check(build, expected)


def test_options_merge_and_later_ones_override():
    ds = Dataset.range(4).with_options(Options(seed=1, deterministic=True)).batch(2).with_options(Options(seed=2))
    assert (ds.options().seed, ds.options().deterministic, ds.options().on_error) == (2, True, None)
    with pytest.raises(AttributeError, match="bogus"):
        ds.options().bogus = 1


def test_shuffle_passes():
    ds = Dataset.range(20).shuffle(20, seed=5)
    first, second = [int(x) for x in ds], [int(x) for x in ds]
    assert first != second
    assert sorted(first) == sorted(second) == list(range(20))
    again = Dataset.range(20).shuffle(20, seed=5)
    assert [int(x) for x in again] == first
    assert [int(x) for x in again] == second
    kept = Dataset.range(20).shuffle(20, seed=5, reshuffle_each_iteration=False)
    assert [int(x) for x in kept] == [int(x) for x in kept]
    # A shuffle before the repeat keeps epochs apart, a shuffle after it mixes them.
    both = [int(x) for x in Dataset.range(20).shuffle(20, seed=5).repeat(2)]
    assert sorted(both[:20]) == sorted(both[20:]) == list(range(20))
    mixed = [int(x) for x in Dataset.range(20).repeat(2).shuffle(40, seed=5)]
    assert sorted(mixed[:20]) != list(range(20))
    assert sorted(map(int, Dataset.range(20).shuffle(UNKNOWN, seed=1))) == list(range(20))


@pytest.mark.parametrize("initial", [[0.75, 0.25], None])
def test_rejection_resample(initial):
    ds = Dataset.range(4000).rejection_resample(lambda x: int(x % 4 == 0), [0.5, 0.5], initial, seed=1)
    assert ds.element_spec == (TensorSpec((), "int32"), TensorSpec((), "int64"))
    kept = [(int(number), int(x)) for number, x in ds]
    assert all(number == (x % 4 == 0) for number, x in kept)
    assert [x for _, x in kept] == sorted(x for _, x in kept)
    assert 0.45 < np.mean([number for number, _ in kept]) < 0.55
    # The class that is rarest compared with its target is kept completely, except at the start if shares are estimated.
    assert sum(number for number, _ in kept) > 990


def test_strings_of_batches_in_new_batches():
    # Text of different lengths cannot be one array, so that rows go through `rebatch` one by one.
    ds = Dataset.range(3).map(lambda x: "ab"[: int(x)], vectorized=False).padded_batch(1).rebatch(2)
    assert [batch.tolist() for batch in ds] == [["", "a"], ["ab"]]


# --- lengths that are not known before the data is read ---


def evens():
    return Dataset.range(7).filter(lambda x: x % 2 == 0)
