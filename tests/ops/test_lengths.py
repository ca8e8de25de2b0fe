"""Numbers of elements, known and unknown, and batches of ragged elements."""

from __future__ import annotations

import itertools

import dask
import numpy as np
import pytest

from daskdist import Dataset, MirroredStrategy, Options, Ragged, TensorSpec, errors

INFINITE, UNKNOWN = -1, -2


def lengths(*numbers):
    """Return rows of the given lengths; each element of a row is the row's length."""
    return Dataset.from_tensor_slices(np.array(numbers)).map(lambda n: np.full(int(n), n))


# --- cardinality ---


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda ds: ds.filter(lambda x: x > 0), UNKNOWN),
        (lambda ds: ds.flat_map(Dataset.range), UNKNOWN),
        (lambda ds: ds.interleave(Dataset.range), UNKNOWN),
        (lambda ds: ds.unique(), UNKNOWN),
        (lambda ds: ds.take_while(lambda x: x < 3), UNKNOWN),
        (lambda ds: ds.ignore_errors(), UNKNOWN),
        (lambda ds: Dataset.sample_from_datasets([ds, ds]), UNKNOWN),
        (lambda ds: Dataset.choose_from_datasets([ds, ds], ds), UNKNOWN),
        (lambda ds: ds.batch(2).unbatch(), 5),
        (lambda ds: ds.batch(2, drop_remainder=True).unbatch(), 4),
        (lambda ds: Dataset.from_tensor_slices(np.ones((3, 4))).unbatch(), 12),
        (lambda ds: ds.batch(2).rebatch(3), UNKNOWN),
        (lambda ds: ds.group_by_window(lambda x: x, lambda key, window: window, 2), UNKNOWN),
        (lambda ds: ds.rejection_resample(lambda x: 0, [1.0]), UNKNOWN),
        (lambda ds: ds.scan(np.int64(0), lambda s, x: (s, x)), 5),
        (lambda ds: ds.map(lambda x: x), 5),
        (lambda ds: ds.shuffle(3), 5),
        (lambda ds: ds.prefetch(1), 5),
        (lambda ds: ds.enumerate(), 5),
        (lambda ds: ds.shard(2, 1), 2),
        (lambda ds: ds.shard(2, 0), 3),
        (lambda ds: ds.batch(2), 3),
        (lambda ds: ds.batch(2, drop_remainder=True), 2),
        (lambda ds: ds.padded_batch(2), 3),
        (lambda ds: ds.ragged_batch(2, drop_remainder=True), 2),
        (lambda ds: ds.window(2), 3),
        (lambda ds: ds.window(2, shift=1), 5),
        (lambda ds: ds.window(2, shift=1, drop_remainder=True), 4),
        (lambda ds: ds.take(3), 3),
        (lambda ds: ds.take(-1), 5),
        (lambda ds: ds.skip(3), 2),
        (lambda ds: ds.skip(-1), 0),
        (lambda ds: ds.repeat(3), 15),
        (lambda ds: ds.repeat(), INFINITE),
        (lambda ds: ds.repeat(-7), INFINITE),
        (lambda ds: ds.repeat().repeat(0), 0),
        (lambda ds: ds.filter(lambda x: x > 0).repeat(0), 0),
        (lambda ds: ds.take(0).repeat(), 0),
        (lambda ds: ds.repeat().take(3), 3),
        (lambda ds: ds.repeat().skip(3), INFINITE),
        (lambda ds: ds.repeat().take(-1), INFINITE),
        (lambda ds: ds.repeat().skip(-1), 0),
        (lambda ds: ds.filter(lambda x: x > 0).take(3), UNKNOWN),
        (lambda ds: ds.concatenate(ds), 10),
        (lambda ds: ds.concatenate(ds.repeat()), INFINITE),
        (lambda ds: ds.concatenate(ds.filter(lambda x: x > 0)), UNKNOWN),
        (lambda ds: Dataset.zip(ds, ds.take(2)), 2),
        (lambda ds: Dataset.zip(ds, ds.repeat()), 5),
        (lambda ds: Dataset.zip(ds, ds.filter(lambda x: x > 0)), UNKNOWN),
        (lambda ds: ds.filter(lambda x: x > 0).assert_cardinality(4), 4),
        (lambda ds: Dataset.sample_from_datasets([ds.repeat(), ds]), INFINITE),
        (lambda ds: Dataset.sample_from_datasets([ds.repeat(), ds], stop_on_empty_dataset=True), UNKNOWN),
        (lambda ds: Dataset.sample_from_datasets([ds.repeat(), ds.repeat()], stop_on_empty_dataset=True), INFINITE),
        (lambda ds: Dataset.sample_from_datasets([ds.repeat(), ds], weights=[0, 1]), UNKNOWN),
        # These operations keep an empty dataset empty.
        (lambda ds: ds.take(0).filter(lambda x: x > 0), 0),
        (lambda ds: ds.take(0).flat_map(Dataset.range), 0),
    ],
)
def test_cardinality(build, expected):
    ds = build(Dataset.range(5))
    assert ds.cardinality() == expected
    assert bool(ds) is True
    if expected < 0:
        with pytest.raises(TypeError, match=r"cardinality\(\)"):
            len(ds)
    else:
        assert len(ds) == expected == len(list(ds))


# --- lengths that are not known before the data is read ---


def evens():
    return Dataset.range(7).filter(lambda x: x % 2 == 0)


@pytest.mark.parametrize(
    "build",
    [
        lambda: evens().assert_cardinality(4).batch(2),
        lambda: evens().batch(2).assert_cardinality(2),
        lambda: evens().batch(2).persist(),
        lambda: evens().batch(2).with_options(Options(num_threads=1)).persist(),
    ],
)
def test_a_length_that_was_found_or_stated(build):
    ds = build()
    assert len(ds) == 2
    assert ds.to_dask_array().compute().tolist() == [0, 2, 4, 6]


def test_the_length_of_what_is_cached():
    ds = evens().batch(2).cache()
    with pytest.raises(errors.UnknownLengthError, match="filter determines it only when the data is read"):
        len(ds)
    assert [batch.tolist() for batch in ds] == [[0, 2], [4, 6]]
    assert len(ds) == ds.cardinality() == 2
    assert ds.to_dask_array().compute().tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("build", "cause"),
    [
        (lambda: evens().batch(2), "filter"),
        (lambda: Dataset.range(3).flat_map(Dataset.range).map(lambda x: x + 1).batch(2), "flat_map"),
        (lambda: Dataset.range(3).unique().batch(2), "unique"),
    ],
)
def test_a_length_that_is_not_known_says_why(build, cause):
    for look in (len, lambda ds: ds.to_dask_array()):
        with pytest.raises(errors.UnknownLengthError, match=rf"{cause} determines it only .* assert_cardinality\(n\)"):
            look(build())
    with pytest.raises(errors.UnknownLengthError, match=r"endless; use take\(n\)"):
        len(Dataset.range(3).repeat())


def test_zip_of_one_length():
    three = Dataset.range(3)
    assert len(list(Dataset.zip(three, three, strict=True))) == 3
    assert len(list(Dataset.zip(three.repeat(), three.repeat(), strict=True).take(5))) == 5
    for other in (Dataset.range(4), three.repeat()):
        with pytest.raises(errors.ArgumentError, match=r"strict=True, but the datasets have 3, (4|endless) elements"):
            Dataset.zip(three, other, strict=True)
        assert len(Dataset.zip(three, other)) == 3
    for pair in ((evens(), three), (three, evens()), (evens(), evens().skip(1))):
        elements = iter(Dataset.zip(*pair, strict=True))
        for _ in range(3):
            next(elements)
        with pytest.raises(errors.CardinalityError, match=r"strict=True, but dataset [01] is shorter"):
            next(elements)
    assert len(list(Dataset.zip(evens(), evens(), strict=True))) == 4


# --- batches of ragged elements ---


def rising(*lengths):
    return Dataset.from_tensor_slices(np.array(lengths)).map(lambda n: np.arange(n))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: rising(0, 1, 2, 3, 1).ragged_batch(2).batch(2), [[[[], [0]], [[0, 1], [0, 1, 2]]], [[[0]]]]),
        (lambda: rising(1, 2, 1, 2).ragged_batch(2).batch(2), [[[[0], [0, 1]], [[0], [0, 1]]]]),
        (
            lambda: Dataset.range(1, 4).map(lambda n: Ragged(np.arange(int(n)), [0, int(n)])).batch(2),
            [[[[0]], [[0, 1]]], [[[0, 1, 2]]]],
        ),
        (
            lambda: Dataset.from_tensor_slices(Ragged(Ragged(np.arange(4), [0, 1, 3, 4]), [0, 2, 3])).batch(2),
            [[[[0], [1, 2]], [[3]]]],
        ),
        (lambda: Dataset.from_tensors(Ragged(np.arange(3), [0, 1, 3])).repeat(2).batch(2), [[[[0], [1, 2]]] * 2]),
        (
            lambda: rising(1, 2, 3).ragged_batch(1).window(2).flat_map(lambda w: w.batch(2)),
            [[[[0]], [[0, 1]]], [[[0, 1, 2]]]],
        ),
        (lambda: rising(1, 2, 3).ragged_batch(1).shuffle(3, seed=1).batch(3).map(lambda x: x[:0]), [[]]),
        (
            lambda: rising(1, 2, 3, 1).ragged_batch(1).batch(1).batch(2),
            [[[[[0]]], [[[0, 1]]]], [[[[0, 1, 2]]], [[[0]]]]],
        ),
    ],
)
def test_ragged_elements_make_ragged_batches(build, expected):
    ds = build()
    assert [batch.tolist() for batch in ds] == expected
    assert [batch.tolist() for batch in dask.compute(ds)[0]] == expected
    for batch in ds:
        assert isinstance(batch, Ragged)
        assert ds.element_spec.is_compatible_with(batch)


def test_pieces_of_ragged_batches_of_ragged_elements():
    ds = rising(1, 2, 3, 1, 2).ragged_batch(1).batch(3)
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    steps = [[piece.tolist() for piece in step.values] for step in strategy.distribute_dataset(ds)]
    assert steps == [[[[[0]], [[0, 1]]], [[[0, 1, 2]]]], [[[[0]]], [[[0, 1]]]]]


def test_dense_rows_of_different_lengths_do_not_stack():
    with pytest.raises(errors.StackError, match="ragged_batch"):
        list(rising(1, 2).batch(2))


# --- empty lists ---

KINDS = {
    "int64": lambda x: list(range(x % 3)),
    "text": lambda x: ["a", "bb"][: x % 3],
    "float32": lambda x: np.arange(x % 3, dtype=np.float32) if x % 3 else [],
    # Whole blocks are empty.
    "blocks": lambda x: [1, 2] if x > 6000 else [],
}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_empty_lists_have_the_dtype_of_the_others(kind, num_threads):
    rows_of = KINDS[kind]
    expected = [rows_of(x) for x in range(9000)]
    dtype = {"text": np.dtypes.StringDType(), "blocks": np.int64}.get(kind, kind)
    options = Options(num_threads=num_threads, vectorize=False)
    rows = Dataset.range(9000).map(lambda x: {"x": rows_of(int(x))}).with_options(options)

    (batch,) = rows.ragged_batch(9000)
    assert batch["x"].dtype == dtype
    assert batch["x"].tolist() == [list(row) for row in expected]
    (batch,) = rows.padded_batch(9000)
    assert batch["x"].dtype == dtype
    fill = "" if kind == "text" else 0
    assert batch["x"].tolist() == [[*row, *[fill] * (2 - len(row))] for row in expected]
    assert list(rows.map(lambda row: row["x"]).unbatch()) == [value for row in expected for value in row]
    if kind != "blocks":
        assert rows.element_spec["x"].dtype == dtype
        assert {row["x"].dtype for row in rows} == {np.dtype(dtype)}


@pytest.mark.parametrize("operation", ["ragged_batch", "padded_batch"])
def test_numbers_of_several_kinds_are_refused(operation):
    rows = Dataset.range(3).map(lambda x: {"x": [2**60 + 1, 2] if x == 0 else [1.5]})
    with pytest.raises(errors.StackError, match=f"{operation}: leaf .* comes as int64 of 1 axes, float64 of 1 axes"):
        next(iter(getattr(rows, operation)(3)))


@pytest.mark.parametrize("kind", ["U", "S"])
@pytest.mark.parametrize("is_one_array", [True, False])
def test_words_are_padded_with_whole_words(kind, is_one_array):
    if is_one_array:
        rows = Dataset.from_tensor_slices(np.array([["a", "b"]], kind))
    else:
        rows = Dataset.from_list([np.array(["a", "b"], kind), np.array(["c"], kind)])
    word = np.array("padding", kind)
    (batch,) = rows.padded_batch(2, padded_shapes=[3], padding_values=word[()])
    assert batch[-1, -1] == word
    assert batch[0, :2].tolist() == np.array(["a", "b"], kind).tolist()


@pytest.mark.parametrize("kind", ["U", "S"])
def test_padded_words_have_the_width_that_the_spec_says(kind):
    rows = [np.array(["ab"] * length, f"{kind}2") for length in (0, 1, 2, 2)]
    ds = Dataset.from_generator(lambda: iter(rows), output_signature=TensorSpec((None,), np.dtype(f"{kind}2")))
    words = np.array(["ab", "padding"], kind)
    batches = list(ds.padded_batch(2, padding_values=words[1]))
    assert [batch.tolist() for batch in batches] == [[[words[1]], [words[0]]], [[words[0]] * 2] * 2]
    # Batches without padding have it, too.
    assert {batch.dtype for batch in batches} == {words.dtype}


def test_bytes_are_padded_with_bytes():
    (batch,) = Dataset.from_list([[b"a"], [b"b", b"c"]]).padded_batch(2, padding_values="-")
    assert batch.tolist() == [[b"a", b"-"], [b"b", b"c"]]


@pytest.mark.parametrize(("dtype", "value"), [("float16", 70_000), ("float32", 1e300), ("complex64", 1e300 + 0j)])
def test_padding_is_no_infinity_unless_it_is_given(dtype, value):
    rows = Dataset.from_list([np.array([1], dtype), np.array([1, 2], dtype)])
    with pytest.raises(errors.ArgumentError, match=f"padding_values .* {dtype} cannot hold"):
        rows.padded_batch(2, padding_values=value)
    (batch,) = rows.padded_batch(2, padding_values=np.dtype(dtype).type(np.inf))
    assert np.isinf(batch[0, 1])


def test_more_numbers_than_can_be_counted_are_refused():
    with pytest.raises(errors.ArgumentError, match="range: there are more than 9223372036854775807 numbers"):
        Dataset.range(-(2**62), 2**63)


# --- skipping without reading ---

SKIPS_FAR = {
    "a range": (Dataset.range(10**12).skip(10**12 - 3), [10**12 - 3, 10**12 - 2, 10**12 - 1]),
    "passes": (Dataset.range(7).repeat().skip(7 * 10**9 + 5), [5, 6, 0, 1]),
    "the end of passes": (Dataset.range(7).repeat(10**9).skip(7 * 10**9 - 2), [5, 6]),
    "all passes": (Dataset.range(7).repeat(10**9).skip(7 * 10**9), []),
    "more than all": (Dataset.range(7).repeat(10**9).skip(10**12), []),
    "passes of passes": (Dataset.range(5).repeat(3).repeat().skip(15 * 10**9 + 6), [1, 2, 3]),
    "of a part": (Dataset.range(10**12).take(10**11).skip(10**11 - 2), [10**11 - 2, 10**11 - 1]),
    "twice": (Dataset.range(10**12).skip(10**11).skip(10**11), [2 * 10**11]),
    "arrays": (Dataset.from_tensor_slices(np.arange(6)).prefetch(1).repeat().skip(6 * 10**8 + 4), [4, 5, 0]),
    "a function after it": (Dataset.range(7).repeat().map(lambda x: x * 2).skip(7 * 10**9 + 5), [10, 12, 0]),
    "concatenated": (Dataset.range(10**12).concatenate(Dataset.range(3)).skip(10**12 - 1), [10**12 - 1, 0, 1, 2]),
    "in a shard": (Dataset.range(10**12).shard(7, 3).skip(10**11), [7 * 10**11 + 3, 7 * 10**11 + 10]),
    "in a shard of passes": (Dataset.range(10).repeat().shard(3, 1).skip(10**10), [1, 4, 7, 0]),
    "a shard": (Dataset.range(10**12).skip(10**11).shard(7, 3), [10**11 + 3, 10**11 + 10]),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", SKIPS_FAR)
def test_elements_far_ahead_come_at_once_and_so_does_the_rest_after_a_position(name):
    dataset, expected = SKIPS_FAR[name]
    assert [int(element) for element in dataset.take(len(expected))] == expected
    iterator = iter(dataset)
    for number in expected[:1]:
        assert int(next(iterator)) == number
        other = iter(dataset)
        other.load_state_dict(iterator.state_dict())
        rest = [int(element) for element in itertools.islice(other, len(expected) - 1)]
        assert rest == expected[1:]


@pytest.mark.timeout(20)
def test_batches_far_ahead_come_at_once():
    batches = Dataset.range(10).batch(4)
    for dataset in (batches.repeat(), batches.shuffle(3, seed=1, reshuffle_each_iteration=False).repeat()):
        expected = [batch.tolist() for batch in dataset.take(6)]
        for num_passes in (2, 10**11):
            ahead = dataset.skip(3 * num_passes + 2).take(4)
            assert [batch.tolist() for batch in ahead] == expected[2:]


def test_batches_of_elements_that_are_left_out_are_not_skipped_by_arithmetic():
    def failing(x):
        return 1 // (0 if str(x) in "234" else 1) + x

    batches = Dataset.range(10).map(failing).batch(3).repeat(4).ignore_errors()
    elements = [batch.tolist() for batch in batches]
    for count in range(0, len(elements), 3):
        assert [batch.tolist() for batch in batches.skip(count)] == elements[count:]


def test_skipped_passes_of_a_shuffle_are_those_that_are_not_skipped():
    dataset = Dataset.range(10).shuffle(10, seed=1).repeat(40)
    elements = [int(element) for element in dataset.at_epoch(0)]
    for count in (0, 9, 10, 123, 399, 400):
        assert [int(element) for element in dataset.skip(count).at_epoch(0)] == elements[count:]
    assert len({tuple(elements[start : start + 10]) for start in range(0, 400, 10)}) > 30


def test_passes_with_failing_elements_or_a_cache_are_not_skipped_by_arithmetic():
    failing = Dataset.range(10).map(lambda x: 1 // (0 if str(x) == "3" else 1) + x).repeat(5).ignore_errors()
    elements = [int(element) for element in failing]
    assert len(elements) == 45
    kept = Dataset.range(10).shuffle(10, seed=2).cache().repeat(4)
    assert [int(element) for element in kept.skip(25).at_epoch(0)] == [int(element) for element in kept.at_epoch(0)][
        25:
    ]
