"""`split` and `kfold`: each element is always in the same one part, for any operations before and after."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from itertools import chain

import dask
import dask.bag
import numpy as np
import pytest
from conftest import mirrored
from hypothesis import given, settings
from hypothesis import strategies as st

import daskdist
from daskdist import Dataset, MultiWorkerMirroredStrategy, Options, errors, read_parquet
from daskdist.execute.callers.choose import using
from daskdist.execute.callers.threads import Threads
from daskdist.ops.split import SplitByLabel, parts_in_turns

pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

NUMBER = 200


def rows():
    return Dataset.from_tensor_slices({"a": np.arange(6), "b": np.zeros((6, 2))})


def numbers(number=NUMBER):
    return Dataset.range(number)


def some():
    """Return elements whose number is unknown before they are read."""
    return numbers().filter(lambda x: x % 3 > 0)


def people():
    places = np.arange(NUMBER)
    return Dataset.from_tensor_slices(
        {"x": places, "who": places % 37 // 2, "name": np.array([f"p{k % 11}" for k in places]), "ill": places % 5 == 0}
    )


def ids(part):
    return [int(value["x"] if isinstance(value, dict) else value) for value in part]


HOW = {
    "of known number": lambda: numbers().split([0.7, 0.2, 0.1], seed=3),
    "of unknown number": lambda: some().split([0.7, 0.2, 0.1], seed=3),
    "of a generator": lambda: Dataset.from_generator(lambda: iter(range(50)), daskdist.TensorSpec((), "int64")).split(
        0.5
    ),
    "by a number": lambda: people().split([0.5, 0.3, 0.2], seed=1, by="who"),
    "by text": lambda: people().split(0.5, seed=1, by="name"),
    "by several": lambda: people().split(0.5, seed=1, by=["name", "who"]),
    "by a function": lambda: people().split(0.5, seed=1, by=lambda value: value["x"] // 10),
    "stratified": lambda: people().split([0.6, 0.2, 0.2], seed=1, stratify="ill"),
    "stratified by text": lambda: people().split(0.123, seed=1, stratify="name"),
    "shuffled before": lambda: numbers().shuffle(50).split(0.5),
    "mapped at random before": lambda: numbers().map(lambda x, rng: x, rng=1).split(0.5),
}


@pytest.mark.parametrize("how", HOW)
def test_each_element_is_in_one_part_in_every_pass(how):
    parts = HOW[how]()
    first = [ids(part) for part in parts]
    together = sorted(chain(*first))
    assert all(first)
    assert len(set(together)) == len(together) == {"of unknown number": 133, "of a generator": 50}.get(how, NUMBER)
    # Parts stay the same if they are read again, in another order, in smaller blocks and in threads.
    assert [ids(part) for part in parts[::-1]] == first[::-1]
    with dask.config.set({"daskdist.split-bytes": 24, "daskdist.window-bytes": 200}), using(Threads):
        assert [ids(part) for part in parts] == first


@pytest.mark.parametrize("how", [name for name in HOW if "before" not in name])
def test_parts_are_the_same_in_every_program_and_keep_their_order(how):
    first = [ids(part) for part in HOW[how]()]
    assert [ids(part) for part in HOW[how]()] == first
    assert [sorted(part) for part in first] == first


@pytest.mark.parametrize("fractions", [0.8, [0.7, 0.2, 0.1], [1 / 3, 1 / 3, 1 / 3], 0.015])
def test_sizes_are_exact_where_the_number_is_known(fractions):
    parts = numbers().split(fractions)
    shares = [fractions, 1 - fractions] if isinstance(fractions, float) else fractions
    assert [abs(len(part) - NUMBER * share) < 1 for part, share in zip(parts, shares, strict=True)] == [True] * len(
        parts
    )
    assert [len(part) for part in parts] == [len(ids(part)) for part in parts]
    assert sum(map(len, parts)) == NUMBER


def test_splitting_reads_nothing(parquet_files):
    from daskdist.testing import never_run

    with never_run():
        train, valid = read_parquet(parquet_files([30, 10], row_group=5), "id").split(0.75)
        assert (len(train), len(valid)) == (30, 10)
        some().split(0.5)
        people().kfold(3, by="who")


def test_maps_before_and_after_do_not_change_parts():
    plain = ids(numbers().split(0.5)[1])
    assert ids(numbers().map(lambda x: x + 1).split(0.5)[1].map(lambda x: x - 1)) == plain
    assert ids(numbers().batch(7).unbatch().split(0.5)[1]) != []
    assert ids(numbers().prefetch(2).split(0.5)[1]) == plain
    # Another seed gives another split.
    assert ids(numbers().split(0.5, seed=1)[1]) != plain


@pytest.mark.parametrize("seed", range(3))
def test_a_part_is_a_random_sample(seed):
    part = ids(numbers(10_000).split(0.5, seed=seed)[0])
    unknown = ids(numbers(10_000).filter(lambda x: x >= 0).split(0.5, seed=seed)[0])
    for actual in (part, unknown):
        # Allow five standard deviations: of the number of elements from the first half, of the mean, and of the number
        # of elements whose neighbour is in the part too.
        assert abs(np.sum(np.array(actual) < 5_000) - 2_500) < 5 * 50
        assert abs(np.mean(actual) - 5_000) < 5 * 41
        assert abs(len(set(actual) & {result + 1 for result in actual}) - 2_500) < 5 * 50
    assert abs(len(unknown) - 5_000) < 5 * 50


@pytest.mark.parametrize("by", ["who", "name"])
def test_groups_stay_together(by):
    parts = [
        {value[by].item() if by == "who" else str(value[by]) for value in part} for part in people().split(0.5, by=by)
    ]
    assert not parts[0] & parts[1]


def test_a_key_is_the_same_whatever_elements_it_is_in():
    # A key decides alone: elements may be in a block or one by one, have other leaves, and another dtype.
    plain = ids(numbers().split(0.5, by=lambda x: x // 3)[0])
    assert ids(numbers().map(lambda x: x.astype("int32")).split(0.5, by=lambda x: x // 3)[0]) == plain
    uneven = numbers().map(lambda x: {"x": x, "list": np.zeros(int(x) % 3), "key": x // 3})
    assert ids(uneven.split(0.5, by="key")[0]) == plain
    named = people().map(lambda value: {**value, "list": np.zeros(int(value["x"]) % 3)})
    assert ids(named.split(0.5, by="name")[0]) == ids(people().split(0.5, by="name")[0])
    zeros = Dataset.from_tensor_slices(np.array([0.0, -0.0] * 50 + [np.nan, -np.nan] * 50))
    for part in zeros.split(0.5, by=lambda x: x):
        assert len(list(part)) in (0, 100, 200)


def test_stratified_parts_have_each_label_in_proportion():
    train, valid = people().split(0.8, stratify="ill")
    assert Counter(bool(item["ill"]) for item in valid) == {True: 8, False: 32}
    assert Counter(bool(value["ill"]) for value in train) == {True: 32, False: 128}


def test_numbers_that_hardly_repeat_are_no_labels():
    prices = np.random.default_rng(0).uniform(0, 100, 90)
    ds = Dataset.from_tensor_slices({"price": prices, "part": np.repeat(np.arange(45) / 4, 2)})
    for parts in (ds.split(0.8, stratify="price"), ds.kfold(3, stratify="price")[0]):
        with pytest.raises(errors.UserFunctionError, match=r"(64|90) different numbers for (64|90) rows.*bins"):
            list(parts[0])
    assert len(list(ds.split(0.8, stratify=lambda row: int(row["price"] // 25))[0])) == pytest.approx(72, abs=2)
    assert len(list(ds.split(0.5, stratify="part")[0])) == 45


@given(
    st.lists(st.floats(0.05, 1), min_size=2, max_size=4),
    st.lists(st.integers(0, 3), min_size=1, max_size=300),
    st.integers(0, 5),
)
@settings(max_examples=25, deadline=None)
def test_each_turn_of_a_label_has_the_share_of_each_part(weights, labels, seed):
    shares = tuple(weight / sum(weights) for weight in weights)
    split = SplitByLabel(None, shares, (0,), seed, None)
    hashes = np.array(labels, np.uint64)
    places = np.array([labels[:k].count(label) for k, label in enumerate(labels)])
    parts = parts_in_turns(split, hashes, places)
    for label in set(labels):
        mine = parts[hashes == label]
        whole = len(mine) // split.turn * split.turn
        counts = np.bincount(mine[:whole], minlength=len(shares))
        assert np.abs(counts - whole * np.array(shares)).max(initial=0) <= 1
    # Splitting the elements one by one gives the same parts.
    alone = [int(parts_in_turns(split, hashes[k : k + 1], places[k : k + 1])[0]) for k in range(len(labels))]
    assert alone == parts.tolist()


def test_folds_are_disjoint_and_complete():
    folds = numbers(11).kfold(3, seed=1)
    valid = [ids(part) for _, part in folds]
    assert sorted(map(len, valid)) == [3, 4, 4]
    assert sorted(chain(*valid)) == list(range(11))
    for (train, _), part in zip(folds, valid, strict=True):
        assert ids(train) == [number for number in range(11) if number not in part]
        assert len(train) == 11 - len(part)
    by_group = [{int(item["who"]) for item in part} for _, part in people().kfold(4, by="who")]
    assert not any(one & other for k, one in enumerate(by_group) for other in by_group[:k])
    ill = [sum(bool(value["ill"]) for value in part) for _, part in people().kfold(4, stratify="ill")]
    assert ill == [10, 10, 10, 10]


def test_batches_are_split_as_elements():
    batches = [batch.tolist() for part in numbers(10).batch(3).split(0.5) for batch in part]
    assert sorted(batches) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_what_comes_after_a_split_differs_from_pass_to_pass():
    train = numbers().split(0.5)[0].shuffle(100, seed=1)
    first, second = ids(train), ids(train)
    assert first != second
    assert sorted(first) == sorted(second)
    assert len(ids(train.repeat(2))) == 2 * len(first)


def test_a_warning_about_a_shuffle_before_a_split(caplog):
    with caplog.at_level(logging.WARNING, logger="daskdist"):
        numbers().shuffle(5, reshuffle_each_iteration=False).split(0.5)
        people().shuffle(5).split(0.5, by="who")
        assert not caplog.records
        numbers().shuffle(5).split(0.5)
    assert "split: shuffle before the split draws the same in every iteration" in caplog.text


def empty_part(by=None):
    key = np.repeat([1, 2, 3], [200, 200, 188])
    ds = Dataset.from_tensor_slices({"key": key, "x": np.arange(588)})
    return ds.split(0.8, by="key")[1] if by == "key" else ds.filter(lambda row: row["x"] < 2).split(0.98)[1]


@pytest.mark.parametrize("by", ["key", None])
@pytest.mark.parametrize(
    ("look", "result"),
    [
        (lambda part: len(list(part)), 0),
        (lambda part: len(list(part.map(lambda row: row["x"]).batch(20))), 0),
        (lambda part: len(list(mirrored(2).distribute_dataset(part.batch(20)))), 0),
        (lambda part: part.count(), 0),
        (lambda part: part.describe().to_dict()["x"]["count"], 0),
        (lambda part: len(part.to_pandas()), 0),
    ],
)
def test_a_warning_about_a_part_without_elements(caplog, by, look, result):
    assert look(empty_part(by)) == result
    (record,) = [record for record in caplog.records if record.name == "daskdist"]
    assert record.getMessage().startswith("this pass had no elements. Perhaps split(0.")
    assert ("by key) has none: it puts each key in a part by chance" in record.getMessage()) == (by == "key")


def test_no_warning_about_other_empty_passes(caplog):
    assert list(numbers().split(0.5)[0].filter(lambda x: x < 0)) == []
    part = people().split(0.5, by="who")[0]
    assert len(list(part)) == part.count() > 0
    iterator = iter(part)
    at_the_end = [next(iterator) for _ in range(part.count())]
    state = iterator.state_dict()
    rest = iter(part)
    rest.load_state_dict(state)
    assert at_the_end
    assert list(rest) == []
    assert not caplog.records


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: numbers().split(1.0), ["fractions", "between 0 and 1"]),
        (lambda: numbers().split([0.5, 0.4]), ["sum to 1"]),
        (lambda: numbers().split([1.5, -0.5]), ["between 0 and 1"]),
        (lambda: numbers().split([1]), ["fractions"]),
        (lambda: numbers().split("half"), ["fractions"]),
        (lambda: numbers().split(0.5, seed=1.5), ["seed"]),
        (lambda: numbers().split(0.5, by="a", stratify="b"), ["by", "stratify"]),
        (lambda: numbers().split(0.5, by=1.5), ["by is 1.5"]),
        (lambda: numbers().split(0.5, stratify=[]), ["stratify is []"]),
        (lambda: rows().split(0.5, by="c"), ["split: there is no column 'c'; there are 'a', 'b'"]),
        (lambda: rows().split(0.5, by=["a", "c"]), ["no column 'c'"]),
        (lambda: rows().split(0.5, stratify="c"), ["split: there is no column 'c'; there are 'a', 'b'"]),
        (lambda: rows().kfold(2, by="c"), ["kfold: there is no column 'c'; there are 'a', 'b'"]),
        (lambda: rows().map(lambda row: {"c": row["a"]}).kfold(2, stratify="a"), ["kfold: there is no column 'a'"]),
        (lambda: numbers().split(0.5, by="b"), ["no column 'b'", "lone values"]),
        (lambda: rows().split(0.5, by="b"), ["by is 'b', which holds", "shape=(2,)", "a key is a number or text"]),
        (lambda: rows().split(0.5, stratify="b"), ["stratify is 'b', which holds", "a key is a number or text"]),
        (lambda: numbers().repeat(2).split(0.5), ["repeated", "repeat the parts"]),
        (lambda: Dataset.counter().split(0.5), ["endless"]),
        (lambda: numbers(3).split(0.9), ["3 elements cannot be split in 2 parts", "Give larger fractions"]),
        (lambda: numbers(3).kfold(4), ["kfold", "3 elements", "Give at most 3 folds"]),
        (lambda: numbers(0).kfold(2), ["kfold", "0 elements", "Look at what the dataset reads"]),
        (lambda: numbers(1).split(0.5), ["split", "1 element", "Look at what the dataset reads"]),
        (lambda: numbers(3).kfold(2, seed="a"), ["kfold: seed is 'a'; give a whole number"]),
        (lambda: numbers(9).split(80), ["fractions is 80; give one number between 0 and 1, or a list"]),
        (lambda: numbers(9).split("80%"), ["fractions is '80%'; give one number between 0 and 1, or a list"]),
        (lambda: numbers(9).split([0.7, 0.2, 0.2]), ["whose sum is 1.1; give"]),
        (lambda: numbers(9).split(0.8, 0.2), ["seed is 0.2; give the fractions of several parts as a list"]),
        (lambda: numbers().kfold(1), ["num_folds is 1"]),
    ],
)
def test_datasets_that_cannot_be_split(build, says):
    with pytest.raises(errors.ArgumentError) as caught:
        build()
    for phrase in says:
        assert phrase in str(caught.value)


def test_invalid_keys_are_refused():
    # The columns are known only when elements are computed.
    unknown = Dataset.from_dask(dask.bag.from_sequence([{"a": np.zeros(2)}] * 6, npartitions=2))
    parts = [unknown.split(0.5, by="a")[0], unknown.split(0.5, stratify="a")[0]]
    parts.append(rows().split(0.5, by=lambda row: row["b"])[0])
    for part in parts:
        with pytest.raises(errors.UserFunctionError, match="is an array; a key is a number or text"):
            list(part)
    with pytest.raises(errors.ArgumentError, match="no column 'b'; there are 'a'"):
        list(unknown.split(0.5, by="b")[0])


@pytest.mark.cluster
@pytest.mark.parametrize(("policy", "how"), [("auto", "row"), ("off", "row"), ("auto", "by"), ("data", "stratify")])
def test_parts_are_the_same_on_workers(client, parquet_files, policy, how):
    files = parquet_files([30, 10, 25, 5, 20], row_group=5)
    arguments = {} if how == "row" else {how: lambda item: item["id"] // 3 if how == "by" else item["id"] % 2}
    parts = read_parquet(files).split([0.5, 0.3, 0.2], seed=2, **arguments)
    options = Options(auto_shard_policy=policy)
    with MultiWorkerMirroredStrategy(client) as strategy:
        for part in parts:
            dist = strategy.distribute_dataset(part["id"].batch(16).with_options(options))
            actual = [int(x) for step in dist for batch in strategy.local_results(step) for x in batch]
            times = strategy.num_replicas_in_sync if policy == "off" else 1
            assert Counter(actual) == Counter({int(value["id"]): times for value in part})


def test_elements_that_fail_keep_their_places_in_parts(caplog):
    def bad(x):
        if x in (3, 7):
            raise ValueError("bad")
        return x

    parts = Dataset.range(20).map(bad).split(0.5, seed=0)
    of_all = [ids(part) for part in Dataset.range(20).split(0.5, seed=0)]
    skipping = [ids(part.with_options(Options(on_error="skip"))) for part in parts]
    assert skipping == [[k for k in part if k not in (3, 7)] for part in of_all]
    # Elements that are dropped before the split are not counted.
    caplog.clear()
    for part in [*Dataset.range(20).map(bad).ignore_errors().split(0.5), *Dataset.range(20).split(0.5)]:
        ids(part)
    assert not [record for record in caplog.records if record.getMessage().startswith("split")]


# --- elements in no fixed order ---


class LateOnce:
    """A function of which a call waits once for elements of a later block, if other threads compute any meanwhile."""

    def __init__(self):
        self.is_late, self.others_are_done = True, threading.Event()

    def __call__(self, x, rng=None):
        if x == 100 and self.is_late:
            self.is_late = False
            self.others_are_done.wait(0.5)
        elif x > 110:
            self.others_are_done.set()
        return x


@pytest.fixture
def small_blocks():
    sizes = {"daskdist.split-bytes": 80, "daskdist.bundle-bytes": 80, "daskdist.num-threads": 4}
    with dask.config.set(sizes), using(Threads):
        yield


ANY_ORDER = Options(deterministic=False)
UNORDERED = {
    "map": lambda late: numbers().map(late, num_parallel_calls=4, deterministic=False),
    "map, filter": lambda late: numbers().map(late, deterministic=False).filter(lambda x: x % 3 > 0),
    "random map": lambda late: numbers().map(late, rng=1, deterministic=False),
    "options before": lambda late: numbers().map(late).with_options(ANY_ORDER),
    "batches": lambda late: numbers().map(late, deterministic=False).batch(7).unbatch(),
    "ignore_errors": lambda late: numbers().map(late, deterministic=False).ignore_errors(),
    "concatenated": lambda late: numbers(0).concatenate(numbers().map(late, deterministic=False)).prefetch(2),
}
PARTS = {
    "split": lambda ds: ds.split([0.5, 0.3, 0.2], seed=1),
    "split by class": lambda ds: ds.split(0.5, seed=1, stratify=lambda x: int(x) % 2),
    "split by key": lambda ds: ds.split(0.5, seed=1, by=lambda x: int(x) % 50),
    "kfold": lambda ds: ds.kfold(3, seed=1)[0],
    "kfold by class": lambda ds: ds.kfold(3, seed=1, stratify=lambda x: int(x) % 2)[1],
    "shard": lambda ds: [ds.shard(3, index) for index in range(3)],
    "take, skip": lambda ds: [ds.take(70), ds.skip(70)],
    "take, skip of batches": lambda ds: [part.unbatch() for part in (ds.batch(5).take(9), ds.batch(5).skip(9))],
    "enumerate": lambda ds: [
        ds.enumerate().filter(lambda k, x, part=part: k % 2 == part).map(lambda k, x: x) for part in range(2)
    ],
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("name", "of"), [("map", of) for of in PARTS] + [(name, of) for name in UNORDERED for of in ("split", "shard")]
)
def test_parts_of_elements_that_come_in_any_order(name, of):
    late = LateOnce()
    parts = PARTS[of](UNORDERED[name](late))
    rows = ids(parts[0]) + [x for part in parts[1:] for x in ids(part.with_options(ANY_ORDER))]
    assert Counter(rows) == Counter(ids(UNORDERED[name](lambda x, rng=None: x)))


@pytest.mark.usefixtures("small_blocks")
def test_pairs_of_elements_that_come_in_any_order():
    late = LateOnce()
    pairs = Dataset.zip(numbers().map(late, deterministic=False), numbers().map(lambda x: -x)).with_options(ANY_ORDER)
    assert sorted((int(x), int(y)) for x, y in pairs) == [(x, -x) for x in range(NUMBER)]
    assert not late.is_late
    # Without parts or pairs, later elements may come first: a block that waits for a later one mostly ends after it.
    passes = (ids(numbers().map(LateOnce(), num_parallel_calls=4, deterministic=False)) for _ in range(50))
    assert any(rows != list(range(NUMBER)) for rows in passes)
