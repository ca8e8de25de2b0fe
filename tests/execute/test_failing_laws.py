"""A failed element is an element: a pipeline has the same elements as one in which none fails, but for those."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from conftest import mirrored
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import daskdist
from daskdist import Dataset, Options, errors

ERROR = "error"
# Rows have these numbers, unlike those that `enumerate` gives.
FIRST, NUM_ROWS = 1000, 17
OTHERS = Dataset.range(2000, 2011)


def is_kept(x):
    return x % 7 != 1


def one(x):
    return Dataset.from_tensors(x)


def streamed(x):
    return Dataset.from_generator(lambda: iter([x]), output_signature=Dataset.range(1).element_spec)


# Operations that hold or change places, on numbers.
STEPS = {
    "shuffle": lambda ds: ds.shuffle(5, seed=3, reshuffle_each_iteration=False),
    "skip": lambda ds: ds.skip(3),
    "take": lambda ds: ds.take(11),
    "shard": lambda ds: ds.shard(2, 1),
    "repeat": lambda ds: ds.repeat(2),
    "split": lambda ds: ds.split(0.6, seed=1)[0],
    "cache": lambda ds: ds.cache(),
    "prefetch": lambda ds: ds.prefetch(2),
    "concatenate": lambda ds: ds.concatenate(OTHERS).concatenate(ds),
    "filter": lambda ds: ds.filter(is_kept),
    "map": lambda ds: ds.map(lambda x: x),
    "flat_map": lambda ds: ds.flat_map(one),
    "interleave": lambda ds: ds.interleave(one, 3),
    "flat_map of streams": lambda ds: ds.flat_map(streamed),
    "interleave of streams": lambda ds: ds.interleave(streamed, 3),
    "unbatch": lambda ds: ds.batch(1).unbatch(),
    "scan": lambda ds: ds.scan(np.int64(0), lambda s, x: (s, x)),
    "unique": lambda ds: ds.unique(),
    "take_while": lambda ds: ds.take_while(lambda x: x >= 0),
    "choose": lambda ds: Dataset.choose_from_datasets([ds, OTHERS], Dataset.range(2).repeat()),
}
# Operations that join, count and group, at the end.
ENDS = {
    "nothing": lambda ds: ds,
    "zip": lambda ds: Dataset.zip(ds, OTHERS.repeat()),
    "zip behind": lambda ds: Dataset.zip(OTHERS, ds),
    "enumerate": lambda ds: ds.enumerate(),
    "batch": lambda ds: ds.batch(3),
    "window": lambda ds: ds.sliding_window(3),
    "enumerate, shuffle": lambda ds: ds.enumerate().shuffle(4, seed=2, reshuffle_each_iteration=False),
}
PLACES = {
    "plain": lambda ds: ds,
    "threads": lambda ds: ds.with_options(Options(num_threads=2)),
    "a replica": lambda ds: mirrored(1).distribute_dataset(ds),
}


class Checked:
    """A function that fails for some numbers."""

    def __init__(self, bad):
        self.bad = bad

    def __call__(self, x):
        if int(x) in self.bad:
            raise ValueError(int(x))
        return x


class IsChecked(Checked):
    """The same for `filter`, where no row is dropped."""

    def __call__(self, x):
        return super().__call__(x) >= 0


def built(steps, end, bad, kind):
    ds = Dataset.range(FIRST, FIRST + NUM_ROWS)
    for step in steps:
        if step == "fails":
            ds = ds.map(Checked(bad)) if kind == "map" else ds.filter(IsChecked(bad))
        else:
            ds = STEPS[step](ds)
    return ENDS[end](ds)


def plain(element):
    if isinstance(element, tuple):
        return tuple(map(plain, element))
    return np.asarray(element).tolist()


def numbers_in(element):
    if isinstance(element, (tuple, list)):
        return {number for part in element for number in numbers_in(part)}
    return {element}


def taken(iterator, most=300):
    actual = []
    while len(actual) < most:
        try:
            actual.append(plain(next(iterator)))
        except StopIteration:
            break
        except errors.UserFunctionError:
            actual.append(ERROR)
    return actual


def in_places(elements, bad):
    """Return elements of which none failed, with those in error that are made of bad numbers."""
    return [ERROR if numbers_in(element) & bad else element for element in elements]


@st.composite
def pipelines(draw):
    steps = draw(st.lists(st.sampled_from(sorted(STEPS)), min_size=0, max_size=3))
    # A split of repeated elements is refused, and elements that failed have no value that could be the same.
    assume(not {"split", "unique"} & {*steps} or not {"choose", "repeat", "concatenate"} & {*steps})
    steps.insert(draw(st.integers(0, len(steps))), "fails")
    # A filter cannot drop what failed before.
    bad = draw(st.frozensets(st.integers(FIRST, FIRST + NUM_ROWS - 1).filter(is_kept), max_size=4))
    return steps, draw(st.sampled_from(sorted(ENDS))), bad, draw(st.sampled_from(["map", "filter"]))


@pytest.mark.parametrize("where", PLACES)
@settings(max_examples=60, deadline=None)
@given(pipelines(), st.data())
def test_an_element_that_fails_holds_its_place(where, pipeline, data):
    steps, end, bad, kind = pipeline
    of_all = taken(iter(built(steps, end, frozenset(), kind)))
    expected = in_places(of_all, bad)
    ds = PLACES[where](built(steps, end, bad, kind))
    assert taken(iter(ds)) == expected
    # A second pass, as of a cache.
    iterator = iter(ds)
    number = data.draw(st.integers(0, len(expected)))
    assert taken(iterator, number) == expected[:number]
    again = iter(ds)
    again.load_state_dict(iterator.state_dict())
    assert taken(again) == expected[number:]


@pytest.mark.parametrize("is_option", [False, True])
@settings(max_examples=60, deadline=None)
@given(pipelines(), st.data())
def test_leaving_out_is_a_filter_at_the_end(is_option, pipeline, data):
    steps, _, bad, kind = pipeline
    end = data.draw(st.sampled_from(["nothing", "zip", "enumerate"]))
    expected = in_places(taken(iter(built(steps, end, frozenset(), kind))), bad)
    if "scan" in steps or "unbatch" in steps:
        # They are left out before these, and places are counted without them.
        expected = [element for element in expected if element != ERROR] if end == "nothing" else None
    ds = built(steps, end, bad, kind)
    ds = ds.with_options(Options(on_error="skip")) if is_option else ds.ignore_errors()
    iterator = iter(ds)
    actual = taken(iterator)
    if expected is not None and not {"take", "skip", "shard", "split", "choose", "unbatch"} & {*steps}:
        assert actual == [element for element in expected if element != ERROR]
    number = data.draw(st.integers(0, len(actual)))
    iterator, again = iter(ds), iter(ds)
    taken(iterator, number)
    again.load_state_dict(iterator.state_dict())
    assert taken(again) == actual[number:]


def test_an_element_without_a_class_changes_no_choice_but_its_own():
    def class_of(x):
        return Checked({1003})(x) % 3

    def classes(function):
        ds = Dataset.range(FIRST, FIRST + 600).rejection_resample(function, [0.2, 0.5, 0.3], [0.4, 0.3, 0.3], seed=1)
        return ds.map(lambda number, x: np.stack([number, x]))

    ds = classes(class_of)
    with_error = taken(iter(ds), 600)
    at = with_error.index(ERROR)
    assert with_error.count(ERROR) == 1
    assert [x % 3 for number, x in with_error[:at] + with_error[at + 1 :]] == [
        number for number, x in with_error[:at] + with_error[at + 1 :]
    ]
    counts = np.bincount([number for number, _ in with_error[:at] + with_error[at + 1 :]])
    of_all = np.bincount([number for number, _ in taken(iter(classes(lambda x: x % 3)), 600)])
    assert np.abs(counts - of_all).max() < 60
    for number in (0, 5, at, at + 1, len(with_error)):
        # Each iteration over a dataset draws anew.
        iterator, again = iter(classes(class_of)), iter(classes(class_of))
        taken(iterator, number)
        again.load_state_dict(iterator.state_dict())
        assert taken(again, 600) == with_error[number:]


def test_counting_raises_the_error_of_an_element_that_stands_for_others(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"1\n\xff\n3\n")
    lines = daskdist.read_text(str(tmp_path / "a.txt"))
    with pytest.raises(errors.DamagedFileError):
        lines.count()
    assert lines.ignore_errors().count() == 2
    with pytest.raises(errors.UserFunctionError):
        Dataset.range(9).filter(IsChecked({3})).count()


@pytest.mark.parametrize("is_option", [False, True])
def test_batches_are_filled_with_the_elements_that_do_not_fail(is_option):
    ds = built(["shuffle", "fails"], "batch", {1003, 1004, 1009}, "map")
    ds = ds.with_options(Options(on_error="skip")) if is_option else ds.ignore_errors()
    assert list(map(len, ds)) == [3, 3, 3, 3, 2]


@pytest.mark.cluster
@pytest.mark.parametrize("end", sorted(ENDS))
@pytest.mark.parametrize("step", ["shuffle", "interleave", "filter", "scan", "flat_map of streams"])
def test_an_element_that_fails_holds_its_place_on_a_cluster(on_cluster, step, end):
    bad = frozenset({1002, 1009})

    def distributed(bad):
        ds = built([step, "fails"], end, bad, "filter")
        return on_cluster.distribute_dataset(ds if end in ("batch", "window") else ds.batch(1))

    def rows(iterator):
        actual = []
        while len(actual) < 100:
            try:
                actual.append([plain(part) for part in on_cluster.local_results(next(iterator))])
            except StopIteration:
                break
            except errors.UserFunctionError:
                actual.append(ERROR)
        return actual

    expected = in_places(rows(iter(distributed(frozenset()))), bad)
    ds = distributed(bad)
    iterator = iter(ds)
    assert rows(iterator) == expected
    iterator, again = iter(ds), iter(ds)
    for _ in range(4):
        with contextlib.suppress(errors.UserFunctionError):
            next(iterator)
    again.load_state_dict(iterator.state_dict())
    assert rows(again) == expected[4:]
