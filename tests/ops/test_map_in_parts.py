"""Functions that are called row by row over large blocks, whose results are converted to arrays in parts."""

from __future__ import annotations

import numpy as np
import pytest

from daskdist import Dataset, errors
from daskdist.core.block import Block
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.structure import LONE
from daskdist.execute.callers.choose import using
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.callers.threads import Threads
from daskdist.ops.map import _PART_ROWS, MapRows

NUM_ROWS = 2 * _PART_ROWS + 100
LATE = _PART_ROWS + 7

FUNCTIONS = {
    "text": lambda x: f"row {x}",
    "longer text in a later part": lambda x: str(x) * (30 if x > LATE else 1),
    "a wider dtype in a later part": lambda x: np.int32(x) if x < LATE else np.int64(x),
    "arrays of another length in a later part": lambda x: np.full(2 if x < LATE else 3, x),
    "text in a later part": lambda x: x if x < LATE else str(x),
    "pairs": lambda x: (str(x), float(x)),
    "nothing": lambda x: {"a": ()},
}


@pytest.mark.parametrize("caller", [Synchronous, Threads])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_elements_are_those_of_a_loop(name, caller):
    function = FUNCTIONS[name]
    with using(caller):
        elements = list(Dataset.range(NUM_ROWS).map(function))
    assert len(elements) == NUM_ROWS
    for number, element in enumerate(elements):
        expected = function(np.int64(number))
        assert np.all(np.equal(element, expected)) if isinstance(expected, np.ndarray) else element == expected
        assert getattr(element, "dtype", None) == getattr(expected, "dtype", getattr(element, "dtype", None))


def test_results_of_one_dtype_are_one_block():
    rows = Block(LONE, [np.arange(NUM_ROWS)], "numbers")
    result = MapRows(UserFunction(FUNCTIONS["text"], "map"))(rows)
    assert isinstance(result, Block)
    assert result.leaves[0].tolist() == [f"row {number}" for number in range(NUM_ROWS)]
    assert result.where(LATE) == rows.where(LATE)


@pytest.mark.parametrize("nest", [lambda x: x, lambda x: (x, x), lambda x: ()])
@pytest.mark.parametrize("row", [3, LATE])
def test_a_failing_row_is_named(nest, row):
    def fails(x):
        if str(x) == str(row):
            raise ValueError("not this one")
        return nest(x)

    with pytest.raises(errors.UserFunctionError, match=rf"row {row} of range$"):
        list(Dataset.range(NUM_ROWS).map(fails))


@pytest.mark.parametrize("row", [3, LATE])
def test_another_structure_names_its_row(row):
    with pytest.raises(errors.UserFunctionError, match=rf"row {row} of range.*before"):
        list(Dataset.range(NUM_ROWS).map(lambda x: (x,) if str(x) == str(row) else x))


@pytest.mark.parametrize("of_array", [lambda array: array, lambda array: array[:2], lambda array: {"x": array, "y": 1}])
@pytest.mark.parametrize("source", [Dataset.range(5), Dataset.range(5).batch(1), Dataset.range(5).shuffle(5)])
def test_a_function_that_fills_one_array_again_is_an_error(source, of_array):
    array = np.full(3, np.nan)

    def filled(x):
        array[:] = np.sum(x)
        return of_array(array)

    def constant(x):
        return of_array(missing)

    missing = np.array([np.nan, 1j, 0])
    with pytest.raises(errors.UserFunctionError, match=r"filled .* changed the array .* return a copy"):
        list(source.map(filled))
    assert len(list(source.map(constant))) == 5
