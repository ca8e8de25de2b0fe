"""Strategies for elements of all kinds that can be saved, and comparisons of elements."""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from daskdist.core.block import Bundle
from daskdist.core.ragged import Ragged
from daskdist.core.spec import ElementSpec, RaggedTensorSpec, TensorSpec
from daskdist.core.structure import Structure, as_array

TEXT = np.dtypes.StringDType()
LONE = Structure.of(0)[1]
PAIR = Structure.of((0, 0))[1]
Point = collections.namedtuple("Point", "x y")


class Typed(NamedTuple):
    a: int
    b: float


def bundle(*leaves):
    """Return a bundle of elements that are single leaves."""
    return Bundle(LONE, [(leaf,) for leaf in leaves])


numbers = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?"),
    npst.complex_number_dtypes(sizes=(64, 128), endianness="?"),
    npst.datetime64_dtypes(endianness="?"),
    npst.timedelta64_dtypes(endianness="?"),
    npst.byte_string_dtypes(min_len=1, max_len=5),
    npst.unicode_string_dtypes(min_len=1, max_len=5, endianness="?"),
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@st.composite
def arrays(draw, shape, dtype=None):
    """Draw arrays of a shape, of any dtype that can be saved."""
    dtype = dtype or draw(st.one_of(numbers, st.just(np.dtype(TEXT)), st.just(np.dtype(object))))
    if dtype.kind not in "TO":
        return draw(npst.arrays(dtype, shape))
    size = int(np.prod(shape))
    values = draw(st.lists(texts if dtype.kind == "T" else st.binary(max_size=20), min_size=size, max_size=size))
    made = np.empty(size, dtype)
    made[:] = values
    return made.reshape(shape)


shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)


@st.composite
def columns(draw, num_rows, depth=2):
    """Draw columns of ``num_rows`` rows, all of one length or of different lengths."""
    if depth and draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows))
        splits = np.cumsum([0, *lengths]).astype(draw(st.sampled_from(["i4", "i8"])))
        return Ragged(draw(columns(int(splits[-1]), depth - 1)), splits)
    return draw(arrays((num_rows, *draw(shapes))))


leaves = st.one_of(
    shapes.flatmap(arrays).map(lambda array: as_array(array[()])),
    st.integers(0, 3).flatmap(columns),
    texts.map(np.str_),
    st.binary(max_size=5).map(np.bytes_),
)
keys = st.one_of(st.text(max_size=3), st.integers(-5, 5))
nests = st.recursive(
    st.just(0),
    lambda inner: st.one_of(
        st.tuples(inner, inner),
        st.tuples(inner),
        st.builds(Point, inner, inner),
        st.builds(Typed, inner, inner),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=4,
)


# --- manifests ---

SPEC = ElementSpec(
    Structure.of({"y": 0, "x": (0, Point(0, 0))})[1],
    (
        TensorSpec((None, 3), "float32", "pixels"),
        RaggedTensorSpec((None, None, 2), ">i4"),
        TensorSpec((), TEXT),
        TensorSpec((2,), "datetime64[25s]"),
    ),
)
