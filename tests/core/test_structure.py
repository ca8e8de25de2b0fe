"""Structures and specs: flattening and packing nests, and converting their leaves."""

from __future__ import annotations

import collections
import pickle
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskdist import Dataset, TensorSpec
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import Structure, as_array
from daskdist.errors import ArgumentError
from daskdist.testing import check, same_element, same_elements

# Hypothesis warns if other threads draw random numbers meanwhile, as those of other tests' clusters do.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

Point = collections.namedtuple("Point", "x y")

leaves = st.one_of(
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False, width=32),
    st.booleans(),
    st.text(max_size=3),
    st.lists(st.integers(0, 9), max_size=3),
    st.builds(np.arange, st.integers(0, 4)),
)
nests = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner),
        st.tuples(inner),
        st.builds(Point, inner, inner),
        st.dictionaries(st.sampled_from("zyxab"), inner, max_size=3),
    ),
    max_leaves=6,
)


@given(nests)
@settings(max_examples=60, deadline=None)
def test_packing_is_the_inverse_of_flattening(nest):
    actual, structure = Structure.flatten(nest)
    packed = structure.pack(actual)
    again, same = Structure.flatten(packed)
    assert structure == same
    assert hash(structure) == hash(same)
    assert all(a is b for a, b in zip(actual, again, strict=True))
    assert len(structure.paths) == structure.num_leaves == len(actual)
    assert _shape(packed) == _shape(nest)


def _shape(nest):
    # This keeps the types of containers, and ignores the order of dicts, which is no part of a structure.
    if isinstance(nest, dict):
        return {name: _shape(item) for name, item in nest.items()}
    if isinstance(nest, tuple):
        return type(nest), [_shape(value) for value in nest]
    return "*"


@given(nests)
@settings(max_examples=60, deadline=None)
def test_structures_travel(nest):
    _, structure = Structure.flatten(nest)
    assert pickle.loads(pickle.dumps(structure)) == structure


@given(nests)
@settings(max_examples=60, deadline=None)
def test_paths_lead_to_leaves(nest):
    actual, structure = Structure.flatten(nest)
    packed = structure.pack(actual)
    for leaf, path in zip(actual, structure.paths, strict=True):
        assert eval(f"element{path}", {"element": packed}) is leaf


@pytest.mark.parametrize(
    ("leaf", "dtype", "narrow", "shape"),
    [
        (1, "int64", "int32", ()),
        (2**31 - 1, "int64", "int32", ()),
        (2**31, "int64", "int64", ()),
        (-(2**31), "int64", "int32", ()),
        (True, "bool", "bool", ()),
        (0.5, "float64", "float32", ()),
        (1j, "complex128", "complex128", ()),
        ([1, 2], "int64", "int32", (2,)),
        ([1, 2**40], "int64", "int64", (2,)),
        ([[1.0], [2.0]], "float64", "float32", (2, 1)),
        ([], "float64", "float32", (0,)),
        ([1, 2.5], "float64", "float32", (2,)),
        ([True, False], "bool", "bool", (2,)),
        ("a", np.dtypes.StringDType(), np.dtypes.StringDType(), ()),
        (b"ab", object, object, ()),
        ([np.float64(1), np.float64(2)], "float64", "float64", (2,)),
        (np.float64(1), "float64", "float64", ()),
        (np.int8(1), "int8", "int8", ()),
        (np.zeros((2, 3), "uint16"), "uint16", "uint16", (2, 3)),
        ([np.arange(2), np.arange(2)], "int64", "int64", (2, 2)),
    ],
)
def test_leaves_become_arrays(leaf, dtype, narrow, shape):
    for array, expected in ((as_array(leaf), dtype), (as_array(leaf, narrow=True), narrow)):
        assert array.dtype == np.dtype(expected)
        assert np.shape(array) == shape


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (2**63, np.uint64),
        ([2**63, 2**63 + 1], np.uint64),
        (np.array([2**63]), np.uint64),
        (np.array([[2**63]]), np.uint64),
        (np.array(2**63), np.uint64),
        (np.ulonglong(5), np.uint64),
        (np.longlong(5), np.int64),
        (np.array([5], np.longlong), np.int64),
        (np.array([5], np.dtype(np.longlong).newbyteorder()), np.int64),
    ],
)
def test_integers_of_64_bits_have_the_type_of_that_name(value, kind):
    # NumPy has other types that are as long, and equal, but which other libraries do not know.
    assert as_array(value).dtype.type is kind
    for element in Dataset.range(3).map(lambda i: value if type(value) is int else (value,)):
        leaf = element[0] if isinstance(element, tuple) else element
        assert leaf.dtype.type is kind
        assert leaf.dtype == kind
    for row in Dataset.range(3).map(lambda i: np.array([2**63] * (1 + int(i)))):
        assert row.dtype.type is np.uint64


@pytest.mark.parametrize("leaf", [None, object(), [1, [2]], {1, 2}])
def test_values_that_are_not_leaves_are_refused(leaf):
    with pytest.raises(ArgumentError):
        as_array(leaf)


def test_none_in_a_nest_is_refused():
    with pytest.raises(ArgumentError, match="None is not an element"):
        Dataset.from_tensors({"a": 1, "b": None})


def test_lists_are_arrays_and_not_structure():
    actual, structure = Structure.flatten([[1, 2], [3, 4]])
    assert structure.num_leaves == 1
    assert actual[0].shape == (2, 2)


def test_types_of_containers_are_kept():
    point = next(iter(Dataset.from_tensor_slices(Point([1, 2], [3, 4]))))
    assert type(point) is Point
    assert next(iter(Dataset.from_tensor_slices({"b": [1], "a": [2]}))) == {"b": 1, "a": 2}
    ordered = next(iter(Dataset.from_tensor_slices(collections.OrderedDict(b=[1], a=[2]))))
    assert isinstance(ordered, dict)


def test_a_named_tuple_goes_whole_to_a_function():
    ds = Dataset.from_tensor_slices(Point([1, 2], [3, 4]))
    assert [int(item) for item in ds.map(lambda point: point.x + point.y)] == [4, 6]
    pairs = Dataset.from_tensor_slices(([1, 2], [3, 4]))
    assert [int(value) for value in pairs.map(lambda x, y: x + y)] == [4, 6]


# --- specs ---

dims = st.one_of(st.none(), st.integers(0, 4))
specs = st.builds(
    TensorSpec,
    st.lists(dims, max_size=3).map(tuple),
    st.sampled_from(["float32", "int64", "bool"]),
)


@given(specs, specs)
@settings(max_examples=60, deadline=None)
def test_common_spec_holds_what_both_hold(a, b):
    common = a.most_general_common_spec(b)
    if common is None:
        assert a.dtype != b.dtype or len(a.shape) != len(b.shape)
        return
    assert common == b.most_general_common_spec(a)
    for item in (a, b):
        array = np.zeros([2 if size is None else size for size in item.shape], item.dtype)
        assert item.is_compatible_with(array)
        assert common.is_compatible_with(array)


@given(specs)
@settings(max_examples=30, deadline=None)
def test_specs_are_values(spec):
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(pickle.loads(pickle.dumps(spec))) == hash(spec)
    assert spec.most_general_common_spec(spec) == spec
    if spec.shape:
        assert spec.zeros().shape == (0, *(size or 0 for size in spec.shape[1:]))
        assert spec.zeros().dtype == spec.dtype
    assert spec.grouped(None).shape == (None, *spec.shape)


def test_specs_refuse_negative_sizes():
    with pytest.raises(ArgumentError, match="negative"):
        TensorSpec((-1,))


@given(nests)
@settings(max_examples=60, deadline=None)
def test_spec_of_an_element_fits_it(nest):
    actual, structure = Structure.flatten(nest)
    spec = ElementSpec.of(nest)
    assert spec.structure == structure
    assert all(leave.is_compatible_with(leaf) for leave, leaf in zip(spec.leaves, actual, strict=True))


@given(nests, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_one_element_survives_a_pipeline(nest, size):
    actual, structure = Structure.flatten(nest)
    if not actual:
        return
    ds = Dataset.from_tensors(nest).repeat(3).batch(size)
    whole = list(ds)
    assert sum(len(Structure.flatten(batch)[0][0]) for batch in whole) == 3
    first = structure.pack([leaf[0] for leaf in Structure.flatten(whole[0])[0]])
    assert same_element(first, structure.pack(actual))
    assert same_element(next(iter(Dataset.from_tensors(nest))), structure.pack(actual))


def test_equality_of_elements():
    assert same_element((1, [2.0]), (np.int64(1), np.array([2.0])))
    assert same_element(np.array([np.nan]), np.array([np.nan]))
    assert not same_element((1, 2), {"a": 1, "b": 2})
    assert not same_element(np.zeros(1), np.zeros((1, 1)))
    with pytest.raises(AssertionError, match="there are 1, and should be 2"):
        same_elements([1], [1, 2])
    with pytest.raises(AssertionError, match="never"):
        check(False, "never")


# --- text ---


@pytest.mark.parametrize(
    "words",
    [
        np.array(["a", "bbb", ""]),
        np.array(["a", "bbb", ""], np.dtypes.StringDType()),
        np.array([b"a", b"bbb", b""]),
    ],
    ids=["unicode", "strings", "bytes"],
)
def test_words_of_different_lengths_stack(words):
    ds = Dataset.from_tensor_slices(words)
    for item in (ds, ds.map(lambda word: word), ds.shuffle(3, seed=0), ds.persist()):
        (batch,) = item.batch(3)
        assert sorted(batch.tolist()) == sorted(words.tolist())


def test_words_a_function_returns_stack():
    (batch,) = Dataset.range(3).map(lambda x: "ab" * int(x)).batch(3)
    assert batch.tolist() == ["", "ab", "abab"]
    (batch,) = Dataset.range(3).map(lambda x: {"w": b"ab" * int(x)}).batch(3)
    assert batch["w"].tolist() == [b"", b"ab", b"abab"]


def test_words_keep_their_dtype():
    words = np.array(["a", "bbb"], np.dtypes.StringDType())
    ds = Dataset.from_tensor_slices(words)
    assert ds.element_spec.dtype == words.dtype
    for element in ds:
        assert ds.element_spec.is_compatible_with(element), (ds.element_spec, repr(element))


def test_text_keeps_the_zeros_that_it_ends_with():
    assert as_array("a\0").item() == "a\0"
    assert as_array(["a\0", "b"]).tolist() == ["a\0", "b"]


def test_arrays_are_told_from_masked_ones_while_another_thread_imports_those(monkeypatch):
    # As at the beginning of the import.
    monkeypatch.setitem(sys.modules, "numpy.ma", types.ModuleType("numpy.ma"))
    assert as_array(np.float32(3)) == 3


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (2**70, f"the number {2**70} does not fit into 64 bits"),
        ([1, 2**64], f"the number {2**64} does"),
        ([[1], [2], [-(2**63) - 1]], f"the number {-(2**63) - 1} does"),
    ],
)
def test_integers_beyond_64_bits_are_named(leaf, message):
    with pytest.raises(ArgumentError, match=message):
        as_array(leaf)
    assert as_array(2**64 - 1).dtype == np.uint64
    # A user's array of objects stays one.
    assert as_array(np.array([2**70], object)).tolist() == [2**70]
