"""Whole numbers that are larger than any array is long."""

from __future__ import annotations

import pytest
from test_operations_bad_input import NUMBERS, WHOLE, WHOLE_OR_NONE

from daskdist import Dataset, errors

SIZES = [case for case in WHOLE + WHOLE_OR_NONE if case[1] not in ("seed", "stop")]


@pytest.mark.parametrize(("operation", "argument", "build"), SIZES)
@pytest.mark.parametrize("number", [2**63, 2**70])
def test_sizes_beyond_int64_are_refused(operation, argument, build, number):
    with pytest.raises(errors.ArgumentError) as caught:
        build(number)
    assert str(caught.value).startswith(f"{operation}: {argument} is {number}, beyond int64; give a number from ")


@pytest.mark.parametrize(
    ("build", "argument"),
    [
        (lambda x: NUMBERS.head(x), "head: n"),
        (lambda x: NUMBERS.show(x), "show: n"),
        (lambda x: NUMBERS.kfold(x), "kfold: num_folds"),
        (lambda x: NUMBERS.at_epoch(x), "at_epoch: epoch"),
    ],
)
def test_so_are_those_of_looks_and_parts(build, argument):
    with pytest.raises(errors.ArgumentError, match=f"{argument} is {2**70}, beyond int64"):
        build(2**70)


@pytest.mark.parametrize("seed", [2**70, -(2**70)])
def test_seeds_have_any_size(seed):
    first, second = (list(NUMBERS.shuffle(10, seed=seed)) for _ in range(2))
    assert first == second
    assert sorted(map(int, first)) == list(map(int, NUMBERS))
    assert len(list(Dataset.random(seed=seed).take(2))) == 2


def test_the_stop_of_a_range_is_no_element():
    assert list(Dataset.range(2**63 - 2, 2**63)) == [2**63 - 2, 2**63 - 1]
    assert list(Dataset.range(1 - 2**63, -(2**63) - 1, -1)) == [1 - 2**63, -(2**63)]
    with pytest.raises(errors.ArgumentError, match=r"range: .* is out of the range of int64"):
        Dataset.range(2**63 - 2, 2**63 + 1)
