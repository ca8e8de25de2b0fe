"""Python numbers in elements have 64 bits in `daskdist.Dataset`, and 32 bits in TensorFlow's `data.Dataset`."""

from __future__ import annotations

import pickle

import dask
import dask.bag
import numpy as np
import pytest

import daskdist
from daskdist import Dataset, Options, TensorSpec, data
from daskdist.core.structure import Structure
from daskdist.errors import ArgumentError, UserFunctionError

TIME = 1732377645.123

OURS = (Dataset, np.int64, np.float64)
TENSORFLOW = (data.Dataset, np.int32, np.float32)
KINDS = pytest.mark.parametrize(("kind", "integer", "real"), [OURS, TENSORFLOW], ids=["numpy", "tensorflow"])


def dtypes(ds):
    """Return the dtypes of the first element's leaves, and check that the spec has the same."""
    actual = [leaf.dtype for leaf in Structure.of(next(iter(ds)))[0]]
    assert actual == [spec.dtype for spec in Structure.of(ds.element_spec)[0]]
    return actual


def test_datasets_of_daskdist_lose_no_digits():
    (element,) = Dataset.from_list([{"t": TIME}])
    assert float(element["t"]) == TIME
    assert [float(x) for x in Dataset.range(1).map(lambda x: TIME)] == [TIME]
    assert Dataset.range(200_000).skip(199_998).reduce(0, lambda s, e: s + int(e) ** 2) == 199_998**2 + 199_999**2


@KINDS
@pytest.mark.parametrize(
    "build",
    [
        lambda kind: kind.from_list([(1, 2.5)]),
        lambda kind: kind.from_tensors((1, 2.5)),
        lambda kind: kind.from_tensor_slices(([1, 2], [2.5, 3.5])),
        lambda kind: kind.from_dask(dask.bag.from_sequence([(1, 2.5)], npartitions=1)),
        lambda kind: kind.range(3).map(lambda x: (1, 2.5)),
        lambda kind: kind.range(3).map(lambda x: (1, 2.5), vectorized=False),
        lambda kind: kind.range(3).map(lambda x: (int(x), float(x))),
        lambda kind: kind.range(3).batch(3).map(lambda x: ([1, 2], [2.5])),
        lambda kind: kind.range(3).scan(0, lambda s, x: (s + 1, (s, s / 2))),
        lambda kind: kind.range(4).window(2).flat_map(lambda w: w).map(lambda x: (1, 2.5)),
        lambda kind: kind.range(4).window(2).flat_map(lambda w: w.map(lambda x: (1, 2.5))),
        lambda kind: kind.zip(kind.range(2), kind.range(2)).map(lambda x, y: (1, 2.5)),
        lambda kind: kind.range(3).shuffle(3).repeat(2).take(2).map(lambda x: (1, 2.5)),
        lambda kind: kind.range(3).batch(2).persist().map(lambda x: (1, 2.5)),
        lambda kind: pickle.loads(pickle.dumps(kind.from_tensors((1, 2.5)))),
    ],
)
def test_derived_datasets_keep_the_choice(build, kind, integer, real):
    ds = build(kind)
    assert dtypes(ds) == [integer, real]
    assert isinstance(ds, Dataset)
    assert isinstance(ds, kind)


def test_combined_datasets_have_the_class_that_combines_them():
    ours, theirs = Dataset.range(2), data.Dataset.range(2)
    assert dtypes(data.Dataset.zip(ours, ours).map(lambda x, y: 1)) == [np.int32]
    assert dtypes(Dataset.zip(theirs, theirs).map(lambda x, y: 1)) == [np.int64]
    assert dtypes(theirs.concatenate(ours).map(lambda x: 1)) == [np.int32]
    assert dtypes(ours.concatenate(theirs).map(lambda x: 1)) == [np.int64]


@KINDS
def test_options_apply_to_later_operations(kind, integer, real):
    for choice, expected in (("numpy", np.int64), ("tensorflow", np.int32)):
        ds = kind.from_tensors(1).with_options(Options(python_numbers=choice))
        assert dtypes(ds) == [integer]
        assert dtypes(ds.map(lambda x: 1)) == [expected]
        assert dtypes(ds.batch(1).persist().map(lambda x: 1)) == [expected]
    with pytest.raises(ArgumentError, match="python_numbers is 32; give 'numpy' or 'tensorflow'"):
        Options(python_numbers=32)


def test_numbers_beyond_32_bits_are_int64_in_both_classes():
    for kind in (Dataset, data.Dataset):
        assert dtypes(kind.from_tensors(2**31)) == [np.int64]
        assert [int(x) for x in kind.from_list([1, 2**40]).batch(2).unbatch()] == [1, 2**40]
        assert dtypes(kind.from_list([1, 2**40])) == [np.int64]


def test_readers_of_tensorflow_are_of_its_kind(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert dtypes(data.TextLineDataset(str(tmp_path / "a.txt")).map(lambda line: len(line))) == [np.int32]
    assert dtypes(daskdist.read_text(str(tmp_path / "a.txt")).map(lambda line: len(str(line)))) == [np.int64]


def test_a_generator_yields_python_numbers_of_its_signature():
    def times():
        yield TIME

    assert [float(x) for x in Dataset.from_generator(times, TensorSpec((), "float64"))] == [TIME]


# --- states ---


@KINDS
@pytest.mark.parametrize(
    ("initial", "step", "expected"),
    [
        (0, lambda s, x: s + int(x) * 2**40, 6 * 2**40),
        (1, lambda s, x: s * 2**30, 2**120),
        (0, lambda s, x: s + x, 6),
        (0.0, lambda s, x: s + x / 2, 3.0),
        (0.0, lambda s, x: int(s) + int(x), 6.0),
        (0j, lambda s, x: s + x, 6 + 0j),
        (False, lambda s, x: s or x > 2, True),
        ("", lambda s, x: s + str(x), "0123"),
        (b"", lambda s, x: s + b"a", b"aaaa"),
        (TIME, lambda s, x: s, TIME),
    ],
)
def test_a_state_keeps_its_python_type(kind, integer, real, initial, step, expected):
    total = kind.range(4).reduce(initial, step)
    assert total == expected
    assert type(total) is type(initial)
    types = list(kind.range(4).scan(initial, lambda s, x: (step(s, x), str(type(s)))))
    assert {str(value) for value in types} == {str(type(initial))}


@pytest.mark.parametrize(
    ("initial", "step"),
    [
        (0, lambda s, x: s + 0.5),
        (0, lambda s, x: np.array([1])),
        (0, lambda s, x: "a"),
        (0, lambda s, x: None),
        (True, lambda s, x: 2),
        ("", lambda s, x: 1),
        ({"n": 0}, lambda s, x: {"n": 1.5}),
        (np.int8(0), lambda s, x: 1000),
    ],
)
def test_a_state_of_another_type_is_refused(initial, step):
    with pytest.raises(UserFunctionError, match=r"must stay the same|returned|cannot hold that number"):
        Dataset.range(3).reduce(initial, step)


def test_states_are_nests():
    count, total = Dataset.range(4).reduce((0, np.zeros(2)), lambda s, x: (s[0] + 1, s[1] + x))
    assert (count, type(count), total.tolist()) == (4, int, [6.0, 6.0])


def test_a_function_that_writes_into_its_state_spoils_no_other_pass():
    def add(state, x):
        state += x
        return state, state

    initial = np.zeros(2)
    ds = Dataset.range(4).scan(initial, add)
    for _ in range(2):
        assert [row.tolist() for row in ds] == [[0.0, 0.0], [1.0, 1.0], [3.0, 3.0], [6.0, 6.0]]
    assert Dataset.range(4).reduce(initial, lambda s, x: add(s, x)[0]).tolist() == [6.0, 6.0]
    assert initial.tolist() == [0.0, 0.0]


def test_datasets_of_numpy_arrays_and_of_records_have_the_numbers_of_tensorflow(two, tmp_path):
    Dataset.from_list([b"a", b"b"]).to_tfrecord(tmp_path / "records")
    sources = [
        two.experimental_make_numpy_dataset(np.ones(3, np.float64)),
        daskdist.read_tfrecord(tmp_path / "records"),
    ]
    for source in sources:
        rows = source.map(lambda row: (1.5, 2, [3], 2**40, np.float64(1))).batch(2).skip(0)
        dtypes = [str(leaf.dtype) for leaf in next(iter(rows))]
        assert dtypes == ["float32", "int32", "int32", "int64", "float64"]
    assert next(iter(sources[0])).dtype == np.float64
    ours = sources[1].with_options(Options(python_numbers="numpy")).map(lambda row: 1.5)
    assert next(iter(ours)).dtype == np.float64
