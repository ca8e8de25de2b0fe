"""Tracebacks of users' functions: the call, one line of the package, and the function."""

from __future__ import annotations

import traceback

import numpy as np
import pytest
from conftest import mirrored

from daskdist import Dataset, errors


def divide(x):
    return 1 // (int(x) - 3)


def called(x):
    return divide(x)


def careful(x):
    try:
        return {}[int(x)]
    except KeyError:
        return divide(3)


def frames_of(error):
    """Return the functions of an error's traceback."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def chain_of(error):
    """Return the errors that a traceback prints, the last one first."""
    actual = []
    while error is not None:
        actual.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return actual


def iterated(dataset):
    return list(dataset)


@pytest.mark.parametrize(
    "source", [lambda ds: ds, pytest.param(lambda ds: mirrored(2).distribute_dataset(ds), id="distributed")]
)
def test_the_users_frames_and_one_line(source):
    with pytest.raises(errors.UserFunctionError, match="raised ZeroDivisionError") as caught:
        iterated(source(Dataset.range(6).map(called).batch(2)))
    error, cause = chain_of(caught.value)
    assert frames_of(cause) == ["called", "divide"]
    own = [name for name in frames_of(error) if name not in ("iterated", "test_the_users_frames_and_one_line")]
    assert own in (["__next__"], ["__next__", "get_next"])


@pytest.mark.cluster
def test_on_a_cluster(on_cluster):
    batches = on_cluster.distribute_dataset(Dataset.range(6).map(called).batch(6))
    with pytest.raises(errors.UserFunctionError, match="raised ZeroDivisionError") as caught:
        iterated(map(on_cluster.local_results, batches))
    error, cause = chain_of(caught.value)
    assert frames_of(cause) == ["called", "divide"]
    assert not {"wait", "result", "__call__"} & set(frames_of(error))


def test_errors_that_the_users_function_caught_stay():
    with pytest.raises(errors.UserFunctionError) as caught:
        iterated(Dataset.range(2).map(careful))
    assert [type(error) for error in chain_of(caught.value)] == [errors.UserFunctionError, ZeroDivisionError, KeyError]


def test_errors_of_functions_in_run_have_short_tracebacks():
    strategy = mirrored(2)
    with pytest.raises(ZeroDivisionError) as caught:
        strategy.run(called, args=(np.int64(3),))
    assert frames_of(caught.value)[1:] == ["call", "called", "divide"]
    assert chain_of(caught.value) == [caught.value]


def test_an_error_without_frames_of_the_user():
    with pytest.raises(errors.UserFunctionError, match="TypeError") as caught:
        iterated(Dataset.range(2).map(lambda: 1))
    assert isinstance(caught.value.__cause__, TypeError)
