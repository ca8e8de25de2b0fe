"""Positions of passes with failed elements: they fail at the same places again, and nothing takes their places."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import mirrored

from daskdist import Dataset, Options, TensorSpec, errors

NUMBER = TensorSpec((), np.int64)
ERROR = "error"


class Reading:
    """A function that returns a number if the file of that number is there; the file of `MISSING` comes and goes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, x):
        return int((self.folder / f"{x}.txt").read_text())


MISSING = 5


@pytest.fixture
def read(tmp_path):
    """Write the numbers 0 to 15 to a file each; return a function that reads them."""
    for number in range(16):
        (tmp_path / f"{number}.txt").write_text(str(number))
    return Reading(tmp_path)


def hide(read):
    (read.folder / f"{MISSING}.txt").rename(read.folder / "hidden")


def bring_back(read):
    (read.folder / "hidden").rename(read.folder / f"{MISSING}.txt")


def stream(read, x, failing_at):
    """Return a generator of two numbers that fails before it begins, at its first number, or at its second."""
    if failing_at == 0:
        read(x)

    def numbers():
        for number in (1, 2):
            if number == failing_at:
                read(x)
            yield 10 * x + number

    return Dataset.from_generator(numbers, NUMBER)


def pair(read, x):
    return Dataset.range(10 * read(x), 10 * x + 2)


def numbers():
    return Dataset.range(12)


def kept(read):
    return numbers().filter(lambda x: read(x) >= 0)


def shuffled(ds):
    return ds.shuffle(4, seed=1, reshuffle_each_iteration=False)


def sums(ds, read=lambda x: x):
    """Return the sum of all elements up to each of them."""
    return ds.scan(np.int64(0), lambda s, x: (s + read(x), s + x))


PIPELINES = {
    "map": lambda read: numbers().map(read).batch(2),
    "filter": kept,
    "filter that drops": lambda read: numbers().filter(lambda x: read(x) % 2 == 0),
    "map, filter": lambda read: numbers().map(read).filter(lambda x: x % 2 == 0),
    "filter of a shuffle": lambda read: shuffled(numbers()).filter(lambda x: read(x) >= 0),
    "flat_map": lambda read: numbers().flat_map(lambda x: pair(read, x)),
    "flat_map of streams": lambda read: numbers().flat_map(lambda x: stream(read, x, 0)),
    "interleave": lambda read: numbers().interleave(lambda x: pair(read, x), 3),
    "interleave of mapped": lambda read: numbers().map(read).interleave(Dataset.range, 3),
    "interleave of streams": lambda read: numbers().interleave(lambda x: stream(read, x, 0), 3),
    "interleave of failing streams": lambda read: numbers().interleave(lambda x: stream(read, x, 2), 3),
    "interleave of streams that fail at once": lambda read: numbers().interleave(lambda x: stream(read, x, 1), 3),
    "generator": lambda read: Dataset.from_generator(lambda: map(read, range(9)), NUMBER).concatenate(numbers()),
    "zip": lambda read: Dataset.zip(kept(read), numbers()).map(lambda a, b: a * 100 + b),
    "choose": lambda read: Dataset.choose_from_datasets([kept(read), numbers()], Dataset.range(2).repeat(12)),
    "sample": lambda read: Dataset.sample_from_datasets(
        [kept(read), numbers()], seed=1, rerandomize_each_iteration=False
    ),
    "concatenate": lambda read: kept(read).concatenate(numbers()),
    "unique": lambda read: numbers().map(read).map(lambda x: x // 2).unique(),
    "take_while": lambda read: numbers().take_while(lambda x: read(x) < 11),
    "group_by_window": lambda read: numbers().group_by_window(lambda x: read(x) % 2, lambda k, w: w.batch(2), 2),
    "groups of mapped": lambda read: numbers().map(read).group_by_window(lambda x: x % 2, lambda k, w: w.batch(2), 2),
    "shuffle": lambda read: shuffled(kept(read)),
    "sliding_window": lambda read: kept(read).sliding_window(2),
    "batch": lambda read: kept(read).batch(3).map(lambda x: x + 1),
    "scan": lambda read: sums(numbers(), read),
    "scan of mapped": lambda read: sums(numbers().map(read)),
    "scan of a shuffle": lambda read: sums(shuffled(numbers()).map(read)),
    "scan of an interleave": lambda read: sums(numbers().map(read).interleave(lambda x: pair(int, x), 3)),
    "scan of batches": lambda read: numbers().map(read).batch(2).scan(0, lambda s, x: (s + int(x.sum()), s)),
    "scan, map": lambda read: sums(numbers(), read).map(lambda x: x + 1),
    "scan, filter": lambda read: sums(numbers(), read).filter(lambda x: x % 2 == 0),
    "scan, batch, filter": lambda read: sums(numbers(), read).batch(2).filter(lambda x: x[0] >= 0),
    "scan, flat_map": lambda read: sums(numbers(), read).flat_map(lambda x: pair(int, x)),
    "scan of a scan": lambda read: sums(sums(numbers(), read)),
    "failing scan of a scan": lambda read: sums(sums(numbers()).map(lambda x: x % 16), read),
    "scan, unique": lambda read: sums(numbers(), read).map(lambda x: x // 2).unique(),
    "scan, groups": lambda read: sums(numbers(), read).group_by_window(lambda x: x % 2, lambda k, w: w.batch(2), 2),
    "scan, shuffle": lambda read: shuffled(sums(numbers(), read)),
    "scan, windows": lambda read: sums(numbers(), read).sliding_window(2, shift=2),
    "scan, shuffle, filter": lambda read: shuffled(sums(numbers(), read)).filter(lambda x: x % 2 == 0),
    "scan, skip": lambda read: sums(numbers(), read).skip(3),
    "interleave of one each": lambda read: numbers().interleave(lambda x: Dataset.range(20 + read(x), 21 + x), 3),
    "zip of scans": lambda read: Dataset.zip(sums(numbers().map(read)), sums(numbers(), read)).map(lambda x, y: x + y),
}  # fmt: skip
PLACES = {
    "plain": lambda ds: ds,
    "threads": lambda ds: ds.with_options(Options(num_threads=2)),
    "a replica": lambda ds: mirrored(1).distribute_dataset(ds),
}


def taken(iterator, most=200):
    """Return the next elements, with errors in their places."""
    actual = []
    while len(actual) < most:
        try:
            actual.append(np.asarray(next(iterator)).tolist())
        except StopIteration:
            break
        except errors.UserFunctionError:
            actual.append(ERROR)
    return actual


def elements_and_positions(iterator):
    """Return all elements, with errors in their places, and the positions before each of them and at the end."""
    actual, states = [], [iterator.state_dict()]
    while element := taken(iterator, 1):
        actual += element
        states.append(iterator.state_dict())
    return actual, states


def rows_of(elements):
    """Return how often each row is among elements or batches."""
    return Counter(np.concatenate([np.ravel(element) for element in elements if element != ERROR] or [[]]).tolist())


def continued(ds, state):
    """Return an iterator at a position."""
    iterator = iter(ds)
    iterator.load_state_dict(state)
    return iterator


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pass_fails_at_the_same_places_from_every_position(read, name, where):
    ds = PLACES[where](PIPELINES[name](read))
    hide(read)
    with_error, states = elements_and_positions(iter(ds))
    assert ERROR in with_error
    assert len(states) == len(with_error) + 1
    # Threads and replicas change what is read ahead, near the failed element.
    at = with_error.index(ERROR)
    numbers = range(len(states)) if where == "plain" else {0, at, at + 1, len(with_error)}
    for number in numbers:
        # Read the rest with the position of a position, too.
        again = continued(ds, states[number])
        assert taken(continued(ds, again.state_dict())) == with_error[number:], f"from {number}"
        assert taken(again) == with_error[number:], f"from {number}"


@pytest.mark.parametrize("where", ["plain", "threads"])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_place_that_failed_and_yields_now_is_delivered_or_ends_the_pass(read, name, where):
    ds = PLACES[where](PIPELINES[name](read))
    whole = taken(iter(ds))
    hide(read)
    with_error, states = elements_and_positions(iter(ds))
    bring_back(read)
    at = with_error.index(ERROR)
    num_delivered = 0
    for number in sorted({0, 1, *range(at - 2, at + 4), len(with_error)} & {*range(len(states))}):
        try:
            rest = taken(continued(ds, states[number]))
        except errors.ArgumentError:
            assert number, "nothing was there before"
            continue
        num_delivered += 1
        if "scan" in name:
            # The sums count it, or they do not.
            assert rest in (with_error[number:], whole[number:]), f"from {number}"
            continue
        before, after, of_all = rows_of(with_error[:number]), rows_of(rest), rows_of(whole)
        # At most five elements are made of it.
        num_failed = rest.count(ERROR) + with_error[:number].count(ERROR)
        assert (of_all - before - after).total() <= 5 * num_failed, f"from {number}"
        if "window" not in name:
            assert not after - of_all, f"from {number}"
    assert num_delivered


@pytest.mark.parametrize("where", ["plain", "threads"])
@pytest.mark.parametrize("name", PIPELINES)
def test_an_element_that_fails_only_after_a_resume_is_missing_alone_or_ends_the_pass(read, name, where):
    ds = PLACES[where](PIPELINES[name](read))
    whole, states = elements_and_positions(iter(ds))
    hide(read)
    with_error = taken(iter(ds))
    at = with_error.index(ERROR)
    # Far from the error, what was read before is the same for many positions.
    near = range(at - 1, at + 2) if where == "threads" else (0, 1, *range(at - 2, at + 4), len(whole) - 1, len(whole))
    for number in sorted({*near} & {*range(len(states))}):
        try:
            rest = taken(continued(ds, states[number]))
        except (errors.ArgumentError, errors.UserFunctionError):
            assert number, "nothing was there before"
            continue
        if number > at or rest != with_error[number:]:
            actual = [str(element) for element in rest if element != ERROR]
            missing = Counter(map(str, whole[number:])) - Counter(actual)
            assert not Counter(actual) - Counter(map(str, whole[number:])), f"from {number}"
            assert missing.total() <= rest.count(ERROR), f"from {number}"


@pytest.mark.parametrize("where", ["plain", "threads"])
def test_a_later_pass_of_a_repetition_is_tried_again(read, where):
    ds = PLACES[where](kept(read).repeat(2))
    hide(read)
    iterator = iter(ds)
    actual = taken(iterator, 7)
    bring_back(read)
    again = iter(ds)
    again.load_state_dict(iterator.state_dict())
    assert actual + taken(again) == [0, 1, 2, 3, 4, ERROR, *range(6, 12), *range(12)]


class FailsOnce:
    """A function whose first call finds no file, and which then returns its argument."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, x):
        if not self.path.exists():
            self.path.touch()
            raise FileNotFoundError(self.path)
        return x


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", ["map", "filter", "flat_map", "interleave", "take_while", "group_by_window", "scan"])
def test_an_error_of_one_call_for_many_elements_is_none(tmp_path, name, where):
    once = FailsOnce(tmp_path / "first")
    once.path.touch()
    ds = {
        "map": numbers().map(once),
        "filter": numbers().filter(lambda x: once(x) >= 0),
        "flat_map": numbers().flat_map(lambda x: Dataset.range(once(x), x + 1)),
        "interleave": numbers().interleave(lambda x: Dataset.range(once(x), x + 1), 3),
        "take_while": numbers().take_while(lambda x: once(x) >= 0),
        "group_by_window": numbers().group_by_window(lambda x: once(x) * 0, lambda k, w: w, 20),
        "scan": numbers().scan(np.int64(0), lambda s, x: (s + once(1), s)),
    }[name]
    iterator = iter(PLACES[where](ds))
    once.path.unlink()
    assert taken(iterator) == list(range(12))


@pytest.mark.parametrize("where", ["plain", "threads"])
@pytest.mark.parametrize("cycle_length", [1, 3])
@pytest.mark.parametrize("failing_at", [None, 0, 2])
def test_elements_before_an_error_after_many_datasets_are_there(where, cycle_length, failing_at):
    def nested(x):
        def checked():
            if x == 400:
                raise OSError("not there")

        def stream():
            yield 10 * x
            if failing_at:
                checked()
            yield 10 * x + 1

        if not failing_at:
            checked()
        return Dataset.range(10 * x, 10 * x + 2) if failing_at is None else Dataset.from_generator(stream, NUMBER)

    actual = taken(iter(PLACES[where](Dataset.range(500).interleave(nested, cycle_length))), 2000)
    missing = {4001} if failing_at else {4000, 4001}
    assert actual.count(ERROR) == 1
    assert sorted(set(actual) - {ERROR}) == [
        10 * x + k for x in range(500) for k in (0, 1) if 10 * x + k not in missing
    ]
    assert len(actual) == 1001 - len(missing)


@pytest.mark.parametrize("where", ["plain", "threads"])
@pytest.mark.parametrize("operation", ["filter", "interleave"])
def test_a_function_that_gives_another_number_of_elements_is_an_error(tmp_path, operation, where):
    path = tmp_path / "limit"
    path.write_text("8")

    def is_below(x):
        return x < int(path.read_text())

    ds = {
        "filter": numbers().filter(is_below),
        "interleave": numbers().interleave(lambda x: Dataset.range(x, x + 1).take(int(is_below(x))), 3),
    }[operation]
    iterator = iter(PLACES[where](ds))
    assert taken(iterator, 3) == [0, 1, 2]
    path.write_text("2")
    again = iter(PLACES[where](ds))
    again.load_state_dict(iterator.state_dict())
    with pytest.raises(
        errors.ArgumentError, match=r"made \d elements of .* before the position was taken and makes \d now"
    ):
        list(again)


@pytest.mark.parametrize("where", ["plain", "threads"])
def test_an_element_that_fails_after_a_resume_does_not_move_those_of_later_calls(tmp_path, where):
    def checked(x):
        if (tmp_path / str(int(x))).exists():
            raise FileNotFoundError
        return int(x)

    ds = Dataset.range(60).interleave(lambda x: Dataset.range(checked(x), x + 1), 3)
    ds = PLACES[where](ds.scan(0, lambda s, x: (s + 1, x)).unique())
    iterator = iter(ds)
    assert taken(iterator, 30) == list(range(30))
    state = iterator.state_dict()
    for number in range(30, 60, 3):
        path = tmp_path / str(number)
        path.touch()
        try:
            rest = taken(continued(ds, state))
        except errors.ArgumentError:
            rest = None
        assert rest is None or [x for x in rest if x != ERROR] == [x for x in range(30, 60) if x != number]
        path.unlink()
    assert taken(continued(ds, state)) == list(range(30, 60))


@pytest.mark.parametrize("where", ["plain", "threads"])
@pytest.mark.parametrize("name", ["filter", "flat_map", "interleave", "unique", "group_by_window", "scan"])
def test_positions_of_a_pass_that_leaves_elements_out_are_those_of_a_filter(read, name, where):
    ds = PLACES[where](PIPELINES[name](read).ignore_errors())
    hide(read)
    whole, states = elements_and_positions(iter(ds))
    assert ERROR not in whole
    for number, state in enumerate(states):
        assert taken(continued(ds, state)) == whole[number:]


@pytest.mark.parametrize("where", ["plain", "threads"])
@pytest.mark.parametrize("name", ["scan", "scan, map", "scan of mapped", "scan of a scan", "scan, ignore_errors"])
def test_a_sum_of_elements_that_fail_after_they_were_counted_is_an_error(read, name, where):
    ds = sums(numbers(), read).ignore_errors() if name == "scan, ignore_errors" else PIPELINES[name](read)
    ds = PLACES[where](ds)
    iterator = iter(ds)
    taken(iterator, MISSING + 2)
    state = iterator.state_dict()
    rest = taken(iterator)
    hide(read)
    with pytest.raises(errors.ArgumentError, match="before the position was taken"):
        next(continued(ds, state))
    bring_back(read)
    assert taken(continued(ds, state)) == rest


def rows_and_positions(strategy, iterator):
    """Return the rows of each step, with errors in their places, and the positions before them and at the end."""
    actual, states = [], [iterator.state_dict()]
    while len(actual) < 40:
        try:
            values = strategy.local_results(next(iterator))
            actual.append([np.asarray(value).ravel().tolist() for value in values])
        except StopIteration:
            break
        except errors.UserFunctionError:
            actual.append(ERROR)
        states.append(iterator.state_dict())
    return actual, states


@pytest.mark.cluster
@pytest.mark.parametrize(
    "name",
    ["filter", "flat_map", "interleave", "interleave of streams", "unique", "batch", "scan", "scan, filter", "zip"],
)
def test_a_cluster_fails_at_the_same_places_from_every_position(on_cluster, read, name):
    ds = on_cluster.distribute_dataset(PIPELINES[name](read).map(lambda x: x).batch(2))
    hide(read)
    with_error, states = rows_and_positions(on_cluster, iter(ds))
    at = with_error.index(ERROR)
    for number in (0, at, at + 1, len(with_error)):
        assert rows_and_positions(on_cluster, continued(ds, states[number]))[0] == with_error[number:]


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["map", "scan", "filter"])
def test_datasets_on_workers_fail_at_the_same_places_from_every_position(on_cluster, read, name):
    make = PIPELINES[name]
    ds = on_cluster.distribute_datasets_from_function(lambda context: make(read))
    hide(read)
    with_error, states = rows_and_positions(on_cluster, iter(ds))
    # Each worker has the element.
    assert with_error.count(ERROR) == 2
    at = with_error.index(ERROR)
    for number in (0, at, at + 1, at + 2, len(with_error)):
        assert rows_and_positions(on_cluster, continued(ds, states[number]))[0] == with_error[number:]


@pytest.mark.cluster
@pytest.mark.parametrize(("name", "num_steps"), [("scan", 3), ("scan, shuffle", 2)])
def test_a_sum_on_a_cluster_of_elements_that_fail_after_they_were_counted_is_an_error(
    on_cluster, read, name, num_steps
):
    ds = on_cluster.distribute_dataset(PIPELINES[name](read).batch(2))
    iterator = iter(ds)
    for _ in range(num_steps):
        on_cluster.local_results(next(iterator))
    state = iterator.state_dict()
    hide(read)
    with pytest.raises(errors.ArgumentError, match="before the position was taken"):
        list(map(on_cluster.local_results, continued(ds, state)))
