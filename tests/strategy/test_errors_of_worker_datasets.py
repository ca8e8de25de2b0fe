"""Datasets of a function on workers leave out what fails, and continue from a position where other elements fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from daskdist import Dataset, MultiWorkerMirroredStrategy, errors

pytestmark = pytest.mark.cluster
NUM_ROWS = 12
FAILING = (2, 3)
# The first eight numbers that do not fail.
LEFT = (0, 1, *range(4, 10))


@pytest.fixture(scope="module")
def strategy(client):
    with MultiWorkerMirroredStrategy(client) as opened:
        yield opened


class Reading:
    """A function that fails for the numbers of which there is a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, x):
        if (self.folder / f"{x}").exists():
            raise OSError(f"{x} cannot be read")
        return x


def pair(reading, x):
    return Dataset.range(reading(x), x + 1).concatenate(Dataset.range(100 + x, 101 + x))


def with_sums(ds):
    return ds.scan(np.int64(0), lambda total, x: (total + x, (total + x, x)))


PIPELINES = {
    "map": lambda ds, reading: ds.map(reading),
    "interleave": lambda ds, reading: ds.interleave(lambda x: pair(reading, x), 3),
    "repeat": lambda ds, reading: ds.map(reading).ignore_errors().take(8).repeat(2),
    "scan": lambda ds, reading: with_sums(ds.filter(lambda x: reading(x) >= 0)),
}


def fail_for(reading, *numbers):
    for path in reading.folder.iterdir():
        path.unlink()
    for number in numbers:
        (reading.folder / f"{number}").touch()


def taken(strategy, steps):
    """Return the numbers of the first worker in steps, with their sums."""
    steps = [values if isinstance(values, tuple) else (values, values) for values in steps]
    return [tuple(int(strategy.local_results(leaf)[0]) for leaf in values) for values in steps]


@pytest.mark.parametrize(
    ("before", "after"),
    [(FAILING, FAILING), (FAILING, ()), ((), FAILING)],
    ids=["the same fail", "none fails later", "none fails before"],
)
@pytest.mark.parametrize("name", PIPELINES)
def test_each_element_comes_once_though_others_fail_after_a_resume(strategy, name, before, after, tmp_path):
    reading = Reading(tmp_path)
    ds = strategy.distribute_datasets_from_function(
        lambda context: PIPELINES[name](Dataset.range(NUM_ROWS), reading).ignore_errors()
    )
    fail_for(reading, *before)
    iterator = iter(ds)
    actual = [next(iterator) for _ in range(6)]
    state = iterator.state_dict()
    whole = taken(strategy, actual + list(iterator))
    fail_for(reading, *after)
    iterator = iter(ds)
    try:
        iterator.load_state_dict(state)
        actual = taken(strategy, actual + list(iterator))
    except errors.ArgumentError:
        # As many elements as before are needed again, as behind any filter.
        assert before != after
        return
    numbers = [number for _, number in actual]
    if before == after:
        assert actual == whole
    elif name == "repeat":
        # What was pulled ahead of the position stays left out, too.
        assert numbers[:8] == [*(LEFT if before else range(8))]
        assert numbers[8:] in ([*LEFT], [*range(8)])
    else:
        assert len(set(numbers)) == len(numbers)
        assert {*range(NUM_ROWS)} - {*numbers} <= {*FAILING}
    if name == "scan":
        assert [total for total, _ in actual] == np.cumsum(numbers).tolist()
