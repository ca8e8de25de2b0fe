"""No element contradicts the spec, for many functions whose results differ in shape, plain and distributed."""

from __future__ import annotations

import contextlib
import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import dask
import dask.array
import numpy as np
import pytest
from conftest import mirrored

from daskdist import Dataset, MirroredStrategy, PerReplicaSpec, Ragged, RaggedTensorSpec, TensorSpec, errors, read_npy
from daskdist.core.functions.user_function import numbers_in
from daskdist.core.structure import TEXT, Structure

WORDS = np.array(["a b c", "d", "e f", ""], np.dtypes.StringDType())
TABLE = [np.zeros(1), np.zeros(2), np.zeros(3)]
THREE = 3


def scalars():
    return Dataset.range(1, 7)


def vectors():
    return Dataset.from_tensor_slices(np.arange(12.0).reshape(4, 3) - 5)


def batches():
    return Dataset.range(1, 9).map(lambda i: i * 1.0).batch(3)


def lists():
    return scalars().map(lambda n: np.arange(n))


def words():
    return Dataset.from_tensor_slices(WORDS)


OF_SCALARS = [
    lambda n: np.arange(n),
    lambda n: np.zeros(int(n) % 3),
    lambda n: np.repeat(n, n),
    lambda n: np.repeat(np.arange(2), n),
    lambda n: np.tile([1, 2], int(n)),
    lambda n: np.zeros(2) if n <= 3 else np.zeros(5),
    lambda n: np.zeros(2) if n < 5 else np.zeros(5),
    lambda n: np.zeros(2) if n != 4 else np.zeros(5),
    lambda n: np.zeros(2) if n <= THREE else np.zeros(5),
    lambda n: np.zeros(4 if n * 100 > 450 else 1),
    lambda n: np.zeros(3 if n % 2 else 4),
    lambda n: np.array(list(str(n**5))),
    lambda n: np.linspace(0, 1, int(n)),
    lambda n: np.array([d for d in range(1, int(n) + 1) if n % d == 0]),
    lambda n: np.array([int(c) for c in bin(int(n))[2:]]),
    lambda n: np.nonzero(np.arange(4) < n)[0],
    lambda n: np.eye(int(n)),
    lambda n: TABLE[int(n) % 3],
    lambda n: Ragged(np.arange(int(n)), [0, int(n)]),
    lambda n: "x" * int(n),
    lambda n: b"x" * int(n),
    lambda n: np.zeros(min(int(n), 3)),
    lambda n: np.zeros(max(int(n), 3)),
    lambda n: np.zeros(10 // int(n)),
    lambda n: np.zeros(3) if n < 10 else np.zeros(1 // 0),
    lambda n: (n, np.arange(n)),
    lambda n: {"a": np.arange(n), "b": n},
    lambda n: int(n) * 2**30,
    lambda n: np.zeros(abs(int(n) - 3)),
    lambda n: np.zeros(int(np.clip(n, 2, 4))),
    lambda n: np.unique(np.arange(6) % n),
    lambda n: np.arange(n * 2)[n:],
    lambda n: np.diag(np.arange(int(n) + 1)),
    lambda n: np.meshgrid(np.arange(int(n)), np.arange(2))[0],
    lambda n: np.concatenate([np.zeros(2), np.arange(n)]),
    lambda n: np.stack([np.arange(n)] * 3),
    lambda n: np.pad(np.arange(3), (0, int(n))),
    lambda n: np.pad(np.arange(n), (0, 8 - int(n))),
    lambda n: np.arange(6).reshape(-1, 1 if n % 2 else 2),
]
OF_ROWS = [
    lambda x: x[x > 0],
    lambda x: np.nonzero(x)[0],
    lambda x: np.argwhere(x > 1),
    lambda x: np.unique(x),
    lambda x: x[::-1],
    lambda x: x[:2],
    lambda x: x[1:],
    lambda x: x[::4],
    lambda x: np.compress(x > -3, x),
    lambda x: x.sum(),
    lambda x: np.outer(x, x),
    lambda x: x[: int(abs(x[0])) % 3],
    lambda x: np.array(sorted(set(np.round(x).tolist()))),
    lambda x: np.trim_zeros(x),
    lambda x: np.extract(x < 0, x),
    lambda x: np.bincount(np.abs(x).astype(int)),
    lambda x: np.repeat(x, 2),
    lambda x: np.repeat(x, np.abs(x).astype(int)),
    lambda x: np.delete(x, 0),
    lambda x: np.intersect1d(x, [1, 2, 3]),
    lambda x: np.frombuffer(x.tobytes(), np.uint8),
    lambda x: np.diff(x),
    lambda x: np.convolve(x, [1, 1]),
    lambda x: np.zeros((len(x), 2)),
    lambda x: np.zeros(2 + len(x) % 2),
    lambda x: np.zeros(min(len(x), 4)),
    lambda x: x.reshape(-1, 1),
    lambda x: x[None][:, x > -4],
]
OF_WORDS = [
    lambda s: np.array(str(s).split(), np.dtypes.StringDType()),
    lambda s: np.array([len(w) for w in str(s).split(" ")]),
    lambda s: np.frombuffer(str(s).encode(), np.uint8),
    lambda s: len(str(s)),
    lambda s: (str(s).upper(), np.array([ord(c) for c in str(s)], np.int64)),
]
OF_DATASETS = [
    lambda n: Dataset.range(n).map(lambda i: np.arange(i)),
    lambda n: Dataset.from_tensor_slices(np.zeros((2, int(n)))),
    lambda n: Dataset.from_tensors(np.arange(n)),
    lambda n: Dataset.range(n).batch(2),
    lambda n: Dataset.range(n).batch(int(n), drop_remainder=True),
    lambda n: Dataset.from_tensors(np.zeros(2 if n < 4 else 3)),
    lambda n: Dataset.from_list([1] * int(n)),
]
OTHERS = [
    lambda: lists().window(2),
    lambda: scalars().window(4).flat_map(lambda w: w.batch(4)),
    lambda: scalars().window(4).flat_map(lambda w: w.batch(2, drop_remainder=True)),
    lambda: scalars().window(4).flat_map(lambda w: Dataset.from_tensors(np.stack(list(w)))),
    lambda: scalars().group_by_window(lambda n: n % 2, lambda key, w: w.batch(2), 3),
    lambda: scalars().group_by_window(lambda n: n % 2, lambda key, w: w.map(lambda n: np.arange(n)), 3),
    lambda: scalars().scan(1, lambda s, n: (s + 1, np.arange(s))),
    lambda: scalars().scan(0, lambda s, n: (s + 1, np.zeros(int(n)))),
    lambda: lists().padded_batch(2),
    lambda: lists().padded_batch(2, padded_shapes=[7]),
    lambda: lists().ragged_batch(2),
    lambda: lists().ragged_batch(2).map(lambda r: r.values),
    lambda: lists().ragged_batch(2).unbatch(),
    lambda: scalars().map(lambda n: np.zeros((int(n), 2))).unbatch(),
    lambda: scalars().batch(4).unbatch(),
    lambda: batches().rebatch(2),
    lambda: lists().enumerate(),
    lambda: lists().bucket_by_sequence_length(len, [3], [2, 2]),
    lambda: lists().batch_by_size(20, len),
    lambda: lists().batch_by_size(20, len, 3, ragged=True),
    lambda: lists().concatenate(lists()),
    lambda: Dataset.from_list([[1, 2], [1]]),
    lambda: Dataset.range(7).batch(7).map(lambda x: x[: int(x[0]) + 2]),
    lambda: words().flat_map(lambda s: Dataset.from_tensors(np.array(str(s).split(), np.dtypes.StringDType()))),
    lambda: vectors().flat_map(lambda x: Dataset.from_tensors(x[x > -4])),
]


def of_all():
    """Yield all pipelines."""
    yield from (scalars().map(function) for function in OF_SCALARS)
    for rows in (vectors, batches, lists):
        yield from (rows().map(function) for function in OF_ROWS)
    yield from (words().map(function) for function in OF_WORDS)
    yield from (scalars().flat_map(function) for function in OF_DATASETS)
    yield from (scalars().interleave(function, 2) for function in OF_DATASETS)
    yield from (build() for build in OTHERS)


def check(element_spec, elements, what):
    specs, structure = Structure.of(element_spec)
    for element in elements:
        leaves, found = Structure.of(element)
        assert found == structure, what
        for spec, leaf in zip(specs, leaves, strict=True):
            pairs = zip(spec.specs, leaf.values, strict=True) if isinstance(spec, PerReplicaSpec) else [(spec, leaf)]
            for of_one, value in pairs:
                assert of_one.is_compatible_with(value), f"{what}: {of_one} and {value!r}"


def test_specs_of_many_functions_are_right():
    number = 0
    for number, ds in enumerate(of_all()):  # noqa: B007 - counted
        check(ds.element_spec, ds, repr(ds))
    assert number > 150


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_specs_of_distributed_datasets_are_right(num_replicas):
    strategy = MirroredStrategy([f"CPU:{k}" for k in range(num_replicas)])
    for ds in of_all():
        made = [strategy.distribute_datasets_from_function(lambda context, ds=ds: ds)]
        # Only elements with rows can be cut for several replicas.
        has_rows = all(leaf.shape and leaf.dtype != object for leaf in Structure.of(ds.element_spec)[0])
        # Elements whose leaves have different lengths cannot be cut.
        with contextlib.suppress(ValueError):
            made += [strategy.distribute_dataset(ds)] if has_rows or num_replicas == 1 else []
        for distributed in made:
            check(distributed.element_spec, distributed, repr(ds))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: scalars().map(lambda n: np.zeros(4)), (4,)),
        (lambda: vectors().map(lambda x: np.outer(x, x) if x.sum() > 300 else np.eye(3)), (3, 3)),
        (lambda: batches().map(lambda x: x[:, None] * np.ones(5)), (None, 5)),
        (lambda: scalars().flat_map(lambda n: Dataset.from_tensors(np.zeros(4)).repeat(n)), (4,)),
        (lambda: scalars().scan(0, lambda s, n: (s + 1, np.zeros(2))), (2,)),
    ],
)
def test_lengths_that_never_differ_are_in_the_spec(build, expected):
    assert build().element_spec == TensorSpec(expected, "float64")


def test_specs_of_scalars_that_some_replicas_lack():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    distributed = strategy.distribute_datasets_from_function(lambda context: Dataset.range(3))
    *_, last = distributed
    assert [np.shape(value) for value in last.values] == [(), (0,)]
    check(distributed.element_spec, distributed, "scalars")
    even = strategy.distribute_datasets_from_function(lambda context: Dataset.range(4))
    assert even.element_spec == PerReplicaSpec(*[TensorSpec((), "int64")] * 2)


def test_numbers_in_code():
    limit = 7
    assert numbers_in(lambda x, y=5: x[: limit + THREE, -2] * 10**6) == [-2, 3, 5, 7]
    assert numbers_in(len) == []


def _opaque(x):
    # This fails for made-up elements, since none of them is a key of SIZES.
    return np.zeros(SIZES[str(x)])


SIZES = {"0": (3, 2), "1": (3, 2), "2": (5, 2), "3": (3, 2), "4": (3, 2), "5": (3, 4)}
NAMES = np.array(list(SIZES), np.dtypes.StringDType())


def test_specs_hold_for_elements_after_the_inspected_ones():
    for ds in (
        Dataset.from_tensor_slices(NAMES).map(_opaque),
        Dataset.from_tensor_slices(NAMES).map(_opaque).batch(1),
        Dataset.from_tensor_slices(NAMES).flat_map(lambda x: Dataset.from_tensors(_opaque(x))),
        Dataset.from_tensor_slices(NAMES).scan(0, lambda state, x: (state, _opaque(x))),
    ):
        check(ds.element_spec, ds, repr(ds))


@pytest.mark.parametrize("how", [Dataset.flat_map, Dataset.interleave])
def test_elements_of_several_dtypes_have_no_spec(how):
    ds = how(Dataset.range(4), lambda x: Dataset.from_tensors(np.int32(x) if str(x) == "3" else np.int64(x)))
    with pytest.raises(errors.ArgumentError, match=r"element 3 is .*Convert them with map"):
        str(ds.element_spec)
    assert "types are known once they are computed" in repr(ds)
    with pytest.raises(errors.ArgumentError, match="element 3 is"):
        MirroredStrategy(["CPU:0"]).distribute_dataset(ds)
    # Operations that need no spec still work.
    assert len(list(ds)) == 4


@pytest.mark.parametrize("place", [1, 2, 3])
def test_elements_of_several_ranks_have_a_spec_without_shape(place):
    def inner(x):
        return Dataset.from_tensors((np.zeros(x) if str(x) == str(place) else np.zeros((2, 2)), x))

    ds = Dataset.range(4).flat_map(inner)
    assert ds.element_spec[0].shape is None
    assert ds.element_spec[1] == TensorSpec((), np.int64)
    check(ds.element_spec, ds, repr(ds))
    distributed = MirroredStrategy(["CPU:0"]).distribute_dataset(ds)
    check(distributed.element_spec, distributed, repr(ds))


@pytest.mark.cluster
def test_elements_of_several_kinds_have_no_spec_on_a_cluster(on_cluster):
    ds = Dataset.range(4).flat_map(lambda x: Dataset.from_tensors(np.int32(x) if str(x) == "3" else np.int64(x)))
    with pytest.raises(errors.ArgumentError, match="element 3 is"):
        on_cluster.distribute_dataset(ds)


# Functions are not tried on numbers as large as this.
FAR = 2000


@pytest.mark.parametrize(
    "build",
    [
        lambda ds: ds.map(lambda n: np.zeros(2 + (n >= FAR))),
        lambda ds: ds.map(lambda n: np.zeros((2, 3) if n >= FAR else 2)),
        lambda ds: ds.map(lambda n: np.float64(n) if n >= FAR else np.float32(n)),
        lambda ds: ds.map(lambda n: (n, "" if n >= FAR else 7)),
        lambda ds: ds.map(lambda n: np.zeros(2 + (n >= FAR))).filter(lambda x: True),
        lambda ds: ds.zip(ds.map(lambda n: np.zeros(2 + (n >= FAR)))),
        lambda ds: ds.scan(0, lambda state, n: (state, np.zeros(2 + (n >= FAR)))),
        # Results for made-up elements differ in dtype, so the spec is that of the first elements.
        lambda ds: ds.map(lambda n: np.float32(n) if 10 < n < FAR else np.float64(n)).skip(11),
    ],
)
@pytest.mark.parametrize("split_bytes", [80, 2**24])
def test_an_element_of_another_spec_than_was_told_is_an_error(build, split_bytes):
    with dask.config.set({"daskdist.split-bytes": split_bytes}):
        ds = build(Dataset.range(FAR - 20, FAR + 20))
        num_elements = len(list(ds))
        spec = str(ds.element_spec)
        elements, found = iter(ds), []
        with pytest.raises(errors.ArgumentError, match="element_spec is") as error:
            found.extend(elements)
        assert spec in str(error.value)
    # The elements before it are delivered.
    assert len(found) == num_elements - 20
    # A dataset whose spec was not read raises no error.
    assert len(list(ds.take(-1))) == num_elements


def in_memory(path):
    return Dataset.from_tensor_slices(np.load(path))


def of_objects(path):
    return Dataset.from_tensor_slices(np.load(path).astype(object))


def of_dask(path):
    return Dataset.from_dask(dask.array.from_array(np.load(path), chunks=2))


OF_TEXT = {
    "as it is": lambda ds: ds,
    "map": lambda ds: ds.map(lambda text: {"text": text, "longer": text + "x"}),
    "map by NumPy": lambda ds: ds.map(lambda text: np.strings.upper(text)),
    "map to batches": lambda ds: ds.map(lambda text: {"text": text}).batch(2),
    "filter": lambda ds: ds.filter(lambda text: text != "b"),
    "shuffle": lambda ds: ds.shuffle(4, seed=1).batch(2),
    "interleave": lambda ds: ds.interleave(Dataset.from_tensors, cycle_length=2),
    "cache": lambda ds: ds.cache().unique(),
}


@pytest.mark.parametrize("source", [in_memory, of_objects, of_dask, read_npy])
@pytest.mark.parametrize("operation", list(OF_TEXT))
def test_texts_of_several_lengths_are_as_their_spec_says(tmp_path, source, operation):
    path = tmp_path / "texts.npy"
    np.save(path, np.array(["a", "ccc", "b", "", "dd", "b"]))

    def elements(*, asks):
        ds = OF_TEXT[operation](source(path))
        if asks:
            assert ds.element_spec
        return [str(list(map(np.ndarray.tolist, map(np.asarray, Structure.of(element)[0])))) for element in ds]

    assert elements(asks=True) == elements(asks=False)


def test_objects_of_several_types_are_as_their_spec_says():
    values = [1, "a", None, b"x", {"a": 1}]
    array = np.array(values, object)
    ds = Dataset.from_tensor_slices(array)
    assert ds.element_spec == TensorSpec((), object)
    assert list(ds) == values


def test_python_strings_that_are_no_unicode_text_stay_objects():
    texts = ["a", "\ud800"]
    assert list(Dataset.from_tensor_slices(np.array(texts, object))) == texts


def test_an_array_of_python_strings_is_text():
    texts = ["a", "", "é"]
    ds = Dataset.from_tensor_slices({"text": np.array(texts, object)})
    assert ds.element_spec == {"text": TensorSpec((), np.dtypes.StringDType())}
    assert ds.filter(lambda row: row["text"] != "").to_pandas()["text"].tolist() == ["a", "é"]


# --- elements that a generator yields in another dtype, and of any rank ---


@pytest.mark.parametrize(
    ("spec", "values", "expected"),
    [
        (TensorSpec((2,), "float32"), [np.array([0.5, 1.5]), [1, 2], np.array([3, 4], np.uint8)], "float32"),
        (TensorSpec((), "int32"), [np.int64(5), np.uint64(2**31 - 1), np.int8(-1)], "int32"),
        (TensorSpec((), "uint8"), [np.int64(255), 7], "uint8"),
        (TensorSpec((), "float64"), [np.int64(2**53), np.int64(2**60), np.float32(0.5)], "float64"),
        (TensorSpec((), "float16"), [np.int32(2048), np.float64(np.inf)], "float16"),
        (TensorSpec((1,), "complex64"), [np.array([1.0]), np.array([2])], "complex64"),
        (TensorSpec(None, "float32"), [np.float64(1), np.zeros((2, 3)), [1, 2]], "float32"),
        (TensorSpec((None,), str), [np.array(["a"]), np.array(["bb", "c"]), ["d"]], TEXT),
        (TensorSpec((None,), bytes), [np.array([b"a"]), [b"bb", b"c"]], object),
    ],
)
def test_a_generator_may_yield_numbers_and_text_that_become_those_of_its_signature(spec, values, expected):
    ds = Dataset.from_generator(lambda: iter(values), output_signature=spec)
    elements = list(ds)
    assert [element.dtype for element in elements] == [expected] * len(values)
    assert all(ds.element_spec.is_compatible_with(element) for element in elements)
    assert [element.tolist() for element in elements] == [np.asarray(value).tolist() for value in values]


def test_text_of_a_signature_is_padded_batched_and_put_in_windows():
    words = [{"w": np.array(row)} for row in (["a"], ["bb", "c"], ["ddd"])]
    ds = Dataset.from_generator(lambda: iter(words), output_signature={"w": TensorSpec((None,), str)})
    assert next(iter(ds.padded_batch(3)))["w"].tolist() == [["a", ""], ["bb", "c"], ["ddd", ""]]
    assert [row.tolist() for row in next(iter(ds.ragged_batch(3)))["w"]] == [["a"], ["bb", "c"], ["ddd"]]
    assert [row.tolist() for row in next(iter(ds.window(2)))["w"]] == [["a"], ["bb", "c"]]
    assert next(iter(ds.filter(lambda row: len(row["w"]) == 1).batch(2)))["w"].tolist() == [["a"], ["ddd"]]
    scalars = Dataset.from_generator(lambda: iter([np.str_("x"), "yy"]), output_signature=TensorSpec((), str))
    assert next(iter(scalars.batch(2))).dtype == TEXT


def test_a_spec_of_unknown_rank(tmp_path):
    spec = TensorSpec(None, "float32", name="x")
    assert spec == pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec)
    assert repr(spec) == "AnyRankSpec(shape=None, dtype=float32, name='x')"
    assert spec != TensorSpec((), "float32", name="x")
    for other in (TensorSpec(()), TensorSpec((None, 3)), spec):
        assert spec.is_compatible_with(other)
        assert other.is_compatible_with(spec)
        assert other.most_general_common_spec(TensorSpec(None)).shape is None
    assert not spec.is_compatible_with(np.zeros(2))
    assert not TensorSpec(None, "int64").is_compatible_with(spec)
    assert TensorSpec(None, str).is_compatible_with(np.array(["a"]))

    arrays = [np.full((2, 3), number, np.float32) for number in range(6)]
    ds = Dataset.from_generator(lambda: iter(arrays), output_signature=spec)
    assert ds.batch(2).element_spec.shape is None
    assert next(iter(ds.batch(2).unbatch().map(lambda x: x[0]).batch(6))).shape == (6, 3)
    assert next(iter(ds.unbatch())).shape == (3,)
    assert next(iter(ds.padded_batch(2, padded_shapes=(4, None)))).shape == (2, 4, 3)
    (step, *_) = mirrored(2).distribute_dataset(ds.batch(3))
    assert [value.shape for value in step.values] == [(2, 2, 3), (1, 2, 3)]
    ds.save(tmp_path / "saved")
    assert Dataset.load(tmp_path / "saved").element_spec == spec
    for group in (lambda: ds.padded_batch(2), lambda: ds.ragged_batch(2), ds.to_pandas):
        with pytest.raises(errors.ArgumentError, match=r"of its axes|of axes of leaf"):
            group()
    shapes = [np.zeros(1, np.float32), np.zeros((2, 2), np.float32)]
    assert [x.ndim for x in Dataset.from_generator(lambda: iter(shapes), output_signature=spec)] == [1, 2]


def test_the_signature_that_an_error_suggests_is_that_of_the_elements():
    element = Ragged(np.arange(3), [0, 1, 3]), np.zeros(2, [("a", "i4"), ("b", "f8")]), "text"
    with pytest.raises(errors.ArgumentError) as caught:
        Dataset.from_generator(lambda: iter([element]))
    signature = str(caught.value).partition("output_signature=")[2].partition("; write None")[0]
    names = {"TensorSpec": TensorSpec, "RaggedTensorSpec": RaggedTensorSpec, "numpy": np}
    ds = Dataset.from_generator(lambda: iter([element]), eval(signature, names))
    (actual,) = ds
    assert actual[0].values.tolist() == [0, 1, 2]
    assert actual[1].dtype == element[1].dtype


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: scalars().flat_map(lambda n: Dataset.range(2).map(lambda x: x + n)), ()),
        (lambda: scalars().window(3).flat_map(lambda window: window.batch(3)), (None,)),
        (lambda: scalars().map(lambda n: np.zeros(Dataset.range(4).map(lambda x: x * 2).batch(2).cardinality())), (2,)),
        (lambda: scalars().map(lambda n: np.zeros(len(Dataset.range(3).batch(3).element_spec.shape))), (1,)),
    ],
)
def test_functions_that_use_specs_of_datasets_are_called_in_any_thread(build, shape):
    with dask.config.set({"daskdist.timeouts.data": 5}), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: build().element_spec.shape).result(60) == shape
