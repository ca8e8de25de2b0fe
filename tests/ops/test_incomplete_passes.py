"""A pass in which an element failed is not written to a directory, and a cache in memory keeps the failed element."""

from __future__ import annotations

import pytest
from conftest import mirrored

import daskdist
from daskdist import Dataset, TensorSpec, errors


class Flaky:
    """A function that fails for one number while a file is not there."""

    def __init__(self, path):
        self.path = path

    def __call__(self, x):
        if int(x) == 3 and not self.path.exists():
            raise ConnectionError("for a moment")
        return int(x)


def numbers(name, flaky, tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{number}\n" for number in range(8)))
    return {
        "map": lambda: Dataset.range(8).map(flaky),
        "filter": lambda: Dataset.range(8).filter(lambda x: flaky(x) >= 0),
        "generator": lambda: Dataset.from_generator(lambda: map(flaky, range(8)), TensorSpec((), "int64")),
        "text": lambda: daskdist.read_text(tmp_path / "a.txt").map(flaky),
        "flat_map": lambda: Dataset.range(8).flat_map(lambda x: Dataset.from_tensors(x).map(flaky)),
    }[name]()


def drained(ds):
    iterator, found = iter(ds), []
    while True:
        try:
            found.append(int(next(iterator)))
        except StopIteration:
            return found
        except errors.UserFunctionError as error:
            found.append(type(error.__cause__))


SOURCES = ["map", "filter", "generator", "text", "flat_map"]
# A generator that fails is over.
ALL_BUT_ONE = [0, 1, 2, ConnectionError, 4, 5, 6, 7]
FAILING = {name: ALL_BUT_ONE[:4] if name == "generator" else ALL_BUT_ONE for name in SOURCES}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("keep", ["cache in a directory", "snapshot"])
def test_a_pass_with_a_failed_element_is_not_written(tmp_path, name, keep):
    flaky = Flaky(tmp_path / "server_is_up")
    ds = numbers(name, flaky, tmp_path)
    ds = {
        "cache in a directory": lambda: ds.cache(str(tmp_path / "kept")),
        "snapshot": lambda: ds.snapshot(str(tmp_path / "kept")),
    }[keep]()
    for _ in range(2):
        assert drained(ds) == FAILING[name]
    flaky.path.touch()
    for _ in range(2):
        assert sorted(drained(ds)) == [*range(8)]
        # The pass before is read.
    flaky.path.unlink()
    assert sorted(drained(ds)) == [*range(8)]


@pytest.mark.parametrize("name", SOURCES)
def test_a_cache_keeps_a_failed_element_as_any_other(tmp_path, name):
    flaky = Flaky(tmp_path / "server_is_up")
    ds = numbers(name, flaky, tmp_path).cache()
    for _ in range(2):
        assert drained(ds) == FAILING[name]
        flaky.path.touch()


@pytest.mark.parametrize("name", SOURCES)
def test_learning_the_spec_stores_no_pass_with_a_failed_element(tmp_path, name):
    steps = mirrored(2).distribute_dataset(numbers(name, Flaky(tmp_path / "never"), tmp_path).cache().batch(3))
    for _ in range(2):
        with pytest.raises(errors.UserFunctionError, match="for a moment"):
            list(steps)
