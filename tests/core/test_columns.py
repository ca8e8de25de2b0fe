"""Values converted together to a column are the same as those values converted one by one."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from daskdist import Dataset, errors
from daskdist.core.block import Block, from_items
from daskdist.core.columns import column_of, plain_leaves_of, stacked
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.ragged import Ragged
from daskdist.core.structure import Structure, as_array
from daskdist.ops.map import MapRows
from daskdist.testing import same_elements

COLUMNS = {
    "arrays": [np.arange(3.0) + k for k in range(4)],
    "columns of arrays": [np.asfortranarray(np.arange(6).reshape(2, 3) + k) for k in range(3)],
    "reversed": [np.arange(5, dtype=">i4")[::-1], np.arange(5, dtype=">i4")],
    "arrays without axes": [np.array(1.5), np.array(2.5)],
    "empty arrays": [np.zeros((0, 2)), np.zeros((0, 2))],
    "times": [np.arange(2).astype("M8[s]"), np.arange(2).astype("M8[s]")],
    "words": [np.array(["a", "b"]), np.array(["c", "d"])],
    "objects": [np.array([b"a", b"bc"], object), np.array([b"d", b""], object)],
    "text": ["", "a\0", "grüße" * 100],
    "floats": [1.5, float("nan"), -0.0, 1e30],
    "integers": [0, -(2**31), 2**31 - 1],
    "wide integers": [2**31, 2**40],
    "bools": [True, False],
    **{kind.__name__: [kind(1), kind(0)] for kind in (np.bool_, np.int8, np.uint64, np.float16, np.complex64)},
}
OTHERS = {
    "two shapes": [np.zeros(2), np.zeros((2, 1))],
    "words of two lengths": [np.array(["a"]), np.array(["b", "c"])],
    "numbers of axes": [np.array(1.5), np.zeros(2)],
    "two dtypes": [np.zeros(2), np.zeros(2, np.float32)],
    "two types": [1, 1.5],
    "integers of two widths": [1, 2**40],
    "integers of more than 64 bits": [1, 2**64],
    "bytes": [b"a", b"bc"],
    "lists": [[1, 2], [3, 4]],
    "masked": [np.ma.masked_array([1, 2], [True, False])] * 2,
}


@pytest.mark.parametrize("arrays", [[np.zeros(2), np.arange(3.0)], [np.ones((0, 4)), np.ones((2, 4)), np.ones((0, 4))]])
def test_arrays_that_differ_in_length_are_ragged(arrays):
    column = column_of(arrays)
    assert isinstance(column, Ragged)
    same_elements(list(column), arrays, "rows of a column")


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_equals_its_separately_converted_values(name, narrow):
    values = COLUMNS[name]
    items = [(as_array(value, narrow=narrow),) for value in values]
    expected = from_items(Structure.of(0)[1], items)
    actual = column_of(values, narrow=narrow)
    if actual is None:
        # These values have no common column, as integers of different widths, so each is converted by itself.
        assert (name, narrow) == ("wide integers", True)
        return
    assert isinstance(expected, Block)
    (column,) = expected.leaves
    assert (actual.dtype, actual.shape) == (column.dtype, column.shape)
    if actual.dtype.kind in "biufcmM":
        assert actual.tobytes() == column.tobytes()
    else:
        assert actual.tolist() == column.tolist()
    assert not any(np.shares_memory(actual, value) for value in values if isinstance(value, np.ndarray))


def test_a_number_beyond_32_bits_is_warned_of():
    with pytest.warns(RuntimeWarning, match="overflow encountered in cast"):
        assert column_of([1.0, 1e300], narrow=True)[1] == np.inf


@pytest.mark.parametrize("name", OTHERS)
def test_a_column_of_values_that_take_a_closer_look(name):
    assert column_of(OTHERS[name], narrow=True) is None


# A signalling NaN, which loses a bit where it is computed with.
BITS = np.array([0x7FA00001, 0x7FC00123, 0], np.uint32)
ROWS = {
    "numbers": list,
    "arrays without axes": lambda column: [column[k : k + 1].reshape(()) for k in range(len(column))],
    "both": lambda column: [column[0], *(column[k : k + 1].reshape(()) for k in range(1, len(column)))],
    "arrays": lambda column: [column[:2], column[1:]],
    "masked": lambda column: [np.ma.masked_array(number, True) for number in column],
}


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "u1", "?", "c8", ">f8", ">i4", "g", "m8[s]", "U3", "V4"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_are_stacked_as_by_numpy(name, dtype):
    column = BITS.view(dtype) if dtype in ("f4", "V4") else (BITS % 99).astype(dtype)
    rows = ROWS[name](column)
    actual, expected = stacked(rows), np.stack(rows)
    assert (type(actual), actual.dtype, actual.shape) == (type(expected), expected.dtype, expected.shape)
    assert actual.tobytes() == expected.tobytes()
    assert actual.flags.writeable


def test_leaves_of_nests():
    leaves = plain_leaves_of(Structure.of({"b": 0, "a": 0})[1])
    assert leaves({"b": 1, "a": "x"}) == ["x", 1]
    assert [leaves(nest) for nest in ({"a": 1}, {"a": 1, "c": 2}, {"a": 1, "b": None}, [1, 2], 1)] == [None] * 5
    assert leaves(collections.OrderedDict(a=1, b=2)) is None
    leaves = plain_leaves_of(Structure.of((0, 0))[1])
    assert list(leaves([1, 2.0])) == list(leaves((1, 2.0))) == [1, 2.0]
    assert [leaves(nest) for nest in ((1,), (1, [2]), (1, (2,)), 1)] == [None] * 4
    assert plain_leaves_of(Structure.of((0, (0, 0)))[1])((1, (2, 3))) is None
    assert plain_leaves_of(Structure.of(0)[1])((1,)) is None


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x, float(x)),
        lambda x: {"b": x, "a": str(x)},
        lambda x: [x, [x, x]],
        lambda x: ((x, x), {"y": x}),
        lambda x: np.arange(int(x)),
        lambda x: int(x) if x < 3 else 2**40,
        lambda x: 1 if x < 3 else 1.5,
        lambda x: b"a" * int(x),
        lambda x: (),
    ],
)
def test_results_are_those_of_each_call(function):
    rows = Block(Structure.of(0)[1], [np.arange(6)])
    expected = [as_element(function(x)) for x in np.arange(6)]
    actual = list(MapRows(UserFunction(function, "map"))(rows).elements())
    same_elements(actual, expected)


def as_element(result):
    """Return an element as the rules for results of functions convert it."""
    leaves, structure = Structure.flatten(tuple(result) if type(result) is list else result)
    return structure.pack(leaves)


def test_a_result_that_is_no_element_is_told_with_its_row():
    with pytest.raises(errors.UserFunctionError, match=r"None is not an element.*on row 2 of"):
        list(Dataset.range(4).map(lambda x: float(x) if x != 2 else None))
    with pytest.raises(errors.UserFunctionError, match=r"returned the structure .*\(value, value\).* on row 3 of"):
        list(Dataset.range(4).map(lambda x: float(x) if x != 3 else (1.0, 2.0)))
    with pytest.raises(
        errors.UserFunctionError,
        match=r"the number 1180591620717411303424 does not fit.* on row 1 of",
    ):
        list(Dataset.range(4).map(lambda x: 2**70 if x == 1 else int(x)))


@pytest.mark.parametrize("dtype", ["u1", "f4", ">i2"])
@pytest.mark.parametrize(
    "cut", [np.s_[:, ::-1], np.s_[::-1], np.s_[1:, 1:], np.s_[:, :, ::-1], np.s_[:, ::2], np.s_[:0]]
)
def test_images_are_stacked_with_all_their_values(dtype, cut):
    pixels = np.arange(20 * 4 * 6 * 3).reshape(20, 4, 6, 3).astype(dtype)
    images = [image[cut] if number % 2 else np.ascontiguousarray(image[cut]) for number, image in enumerate(pixels)]
    column = column_of(images)
    assert column.dtype == np.dtype(dtype).newbyteorder("=")
    assert column.shape == (20, *images[0].shape)
    assert all(np.array_equal(row, image) for row, image in zip(column, images, strict=True))
