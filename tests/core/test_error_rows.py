"""Errors of functions name the row that they were called with."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from daskdist import Dataset, errors
from daskdist.core.block import Bundle
from daskdist.core.failing.failed_elements import TryEach
from daskdist.core.failing.origin import JoinedOrigin, Origin, SelectedOrigins
from daskdist.core.structure import Structure
from daskdist.execute.callers.choose import using
from daskdist.execute.callers.synchronous import Synchronous
from daskdist.execute.callers.threads import Threads


class _FailsOn:
    """A function that draws at random, and fails for one number only."""

    def __call__(self, x, *others):
        if str(x) == "4":
            raise ValueError("not this one")
        return Dataset.range(3).shuffle(3)


def _fails(*items):
    raise ValueError("never")


@pytest.mark.parametrize(
    ("build", "row"),
    [
        (lambda ds: ds.flat_map(_fails), "row 0"),
        (lambda ds: ds.interleave(_fails, 2), "row 0"),
        (lambda ds: ds.shuffle(6, seed=1).flat_map(_FailsOn()), "row 4"),
        (lambda ds: ds.flat_map(_FailsOn()), "row 4"),
        (lambda ds: ds.interleave(_FailsOn(), 2), "row 4"),
        (lambda ds: ds.group_by_window(lambda x: x, _FailsOn(), 1), "row 4"),
        (lambda ds: ds.map(lambda x, rng: 1 // (int(x) - 4), rng=3), "row 4"),
        (lambda ds: Dataset.zip(ds, ds.skip(1)).map(lambda x, y: 1 // (int(x) - 4)), "row 4"),
        (lambda ds: ds.enumerate().map(lambda n, x: 1 // (int(x) - 4)), "row 4"),
    ],
)
@pytest.mark.parametrize("caller", [Synchronous, Threads])
def test_the_row_is_named_also_where_elements_were_paired(build, row, caller):
    with using(caller), pytest.raises(errors.UserFunctionError) as raised:
        list(build(Dataset.range(6)))
    assert f"{row} of range" in str(raised.value)
    assert "generators" not in str(raised.value)


@pytest.mark.parametrize(
    "source",
    [
        Dataset.range(9000),
        Dataset.range(9000).global_shuffle(seed=1),
        Dataset.range(9000).shuffle(9000, seed=1),
        Dataset.from_tensor_slices(list(range(9000))),
        Dataset.counter().take(9000),
    ],
    ids=str,
)
@pytest.mark.parametrize("number", [7, 4103])
def test_rows_are_counted_from_the_beginning_of_the_source(source, number):
    def fails(x):
        if str(x) == str(number):
            raise ValueError("not this one")
        return x

    with pytest.raises(errors.UserFunctionError, match=rf"on row {number} of [a-z_]*$"):
        list(source.map(fails))


@pytest.mark.cluster
def test_the_row_is_named_on_a_cluster(on_cluster):
    ds = Dataset.range(6).flat_map(_FailsOn()).batch(2)
    distributed = on_cluster.distribute_dataset(ds)
    with pytest.raises(errors.UserFunctionError, match=r"row 4 of range"):
        list(map(on_cluster.local_results, distributed))


def test_pickled_origins_have_no_rows_but_their_own():
    random = np.random.default_rng(0)

    def origin(depth, num_rows):
        kind = random.integers(4) if depth else 0
        if kind == 0:
            return Origin(f"file {random.integers(1000)}", bool(random.integers(2)))
        if kind == 1:
            return JoinedOrigin([origin(depth - 1, num_rows) for _ in range(random.integers(1, 3))])
        size, num_blocks = random.integers(1, 9), random.integers(1, 5)
        if kind == 2:
            rows = range(num_rows) if size >= num_rows else random.integers(0, size, num_rows)
            return SelectedOrigins([origin(depth - 1, size)], rows)
        blocks = [origin(depth - 1, size) for _ in range(num_blocks)]
        return SelectedOrigins(blocks, random.integers(0, size, num_rows), random.integers(0, num_blocks, num_rows))

    for _ in range(300):
        num_rows = int(random.integers(9))
        whole = origin(4, num_rows)
        part = pickle.loads(pickle.dumps(whole))
        assert [part.where(row) for row in range(num_rows)] == [whole.where(row) for row in range(num_rows)]
    files = [SelectedOrigins([Origin(f"file {k} {n}") for n in range(64)], range(64), range(64)) for k in range(64)]
    row = pickle.loads(pickle.dumps(SelectedOrigins(files, [7], [3])))
    assert row.origins == [Origin("file 3 7")]


@pytest.mark.parametrize(("num_blocks", "num_rows"), [(40, 100), (3, 1000)])
def test_pickled_origins_are_the_same_for_few_and_many_rows_of_a_block(num_blocks, num_rows):
    random = np.random.default_rng(0)
    files = [
        SelectedOrigins([Origin(f"file {k} {n}") for n in range(8)], range(8), range(8)) for k in range(num_blocks)
    ]
    origin = SelectedOrigins(files, random.integers(0, 8, num_rows), random.integers(0, num_blocks, num_rows))
    again = pickle.loads(pickle.dumps(origin))
    assert [again.where(k) for k in range(num_rows)] == [origin.where(k) for k in range(num_rows)]
    assert len(again.origins) <= num_blocks * 8


@pytest.mark.parametrize(
    ("function", "advice"),
    [
        (lambda date: date > "2024-02-29", r"instead of text$"),
        (lambda date: date.hour > 3, r"date\.astype\('datetime64\[us\]'\)\.item\(\) is one of datetime$"),
    ],
)
def test_functions_that_take_dates_for_others_are_advised(function, advice):
    dates = Dataset.from_tensor_slices(np.array(["2024-02-28T01", "2024-03-01T05"], "datetime64[s]"))
    with pytest.raises(errors.UserFunctionError, match=advice):
        list(dates.filter(function))
    assert len(list(dates.filter(lambda date: date > np.datetime64("2024-02-29")))) == 1
    assert len(list(dates.filter(lambda date: date.astype("datetime64[us]").item().hour > 3))) == 1


def test_many_failing_rows_keep_the_frames_of_few():
    rows = TryEach(lambda rows: [1 // 0])(Bundle(Structure.of(0)[1], [(k,) for k in range(1000)]))
    errors_of_rows = [rows.raw(k).error for k in range(1000)]
    assert 0 < sum(error.__traceback__ is not None for error in errors_of_rows) <= 100
    assert all(isinstance(error, ZeroDivisionError) for error in errors_of_rows)
