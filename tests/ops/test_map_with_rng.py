"""``map(fn, rng=seed)``: each element has a random generator in each pass, which is the same wherever it runs."""

from __future__ import annotations

import numpy as np
import pytest

import daskdist
from daskdist import Dataset
from daskdist.errors import ArgumentError, UserFunctionError


def drawn(x, rng):
    return x, rng.random()


def build(rng=7, n=40):
    return Dataset.range(n).map(drawn, rng=rng)


def rows(ds):
    return [(int(x), float(y)) for x, y in ds]


def test_each_element_of_each_pass_has_its_own_generator():
    ds = build()
    first, second = rows(ds), rows(ds)
    assert len({y for _, y in first + second}) == 80
    assert [x for x, _ in first] == list(range(40))
    again = build()
    assert [rows(again), rows(again)] == [first, second]
    assert rows(build(rng=8)) != first


def test_drawn_numbers_are_uniform_and_uncorrelated():
    values = np.array([y for _, y in rows(build(n=20_000))])
    assert abs(values.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.03
    assert abs(np.histogram(values, 10, (0, 1))[0] - 2000).max() < 200


def test_a_seed_decides_whatever_comes_before():
    plain = rows(build())
    assert rows(Dataset.range(40).map(lambda x: x).filter(lambda x: x >= 0).map(drawn, rng=7)) == plain
    assert [y for _, y in rows(Dataset.range(100, 140).map(drawn, rng=7))] == [y for _, y in plain]


def test_repetitions_are_passes_of_their_own():
    assert len({y for _, y in rows(build().repeat(2))}) == 80


@pytest.mark.parametrize("size", [1, 7, 64])
def test_batches(size):
    ds = build().batch(size)
    actual = [(int(x), float(y)) for xs, ys in ds for x, y in zip(xs, ys, strict=True)]
    assert actual == rows(build())
    whole = [float(y) for _, y in Dataset.range(40).batch(size).map(drawn, rng=7)]
    assert whole == [y for _, y in rows(build())][: len(whole)]


def test_resumed():
    ds = build().shuffle(10, seed=1)
    iterator = iter(ds)
    for _ in range(13):
        next(iterator)
    state = iterator.state_dict()
    rest = rows(iterator)
    resumed = iter(build().shuffle(10, seed=1))
    resumed.load_state_dict(state)
    assert rows(resumed) == rest


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_distributed_in_one_process(num_replicas):
    strategy = daskdist.MirroredStrategy([f"CPU:{number}" for number in range(num_replicas)])
    actual = []
    for xs, ys in strategy.distribute_dataset(build().batch(6)):
        for part in zip(strategy.local_results(xs), strategy.local_results(ys), strict=True):
            actual += [(int(x), float(y)) for x, y in zip(*part, strict=True)]
    assert actual == rows(build())


def test_on_a_cluster(on_cluster, tmp_path):
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", np.arange(10) + 10 * number)

    def read():
        return daskdist.read_npy(str(tmp_path / "*.npy")).map(drawn, rng=7)

    expected = [y for _, y in rows(read())]
    distributed = on_cluster.distribute_dataset(read().batch(4))
    # Generators depend on an element's place in the whole dataset, so files are not sharded.
    assert distributed.sharding.policy.name == "DATA"
    actual = []
    for _, ys in distributed:
        for part in on_cluster.local_results(ys):
            actual += np.asarray(part).tolist()
    assert actual == expected


def test_recorded_as_a_graph(client):
    ((xs, ys),) = build().batch(40).compute(scheduler=client)
    assert list(zip(xs.tolist(), ys.tolist(), strict=True)) == rows(build())


def test_items_of_tuples_and_dicts():
    pairs = Dataset.from_tensor_slices((np.arange(3), np.arange(3)))
    assert [int(c) for c in pairs.map(lambda a, b, rng: a + b + 0 * rng.integers(5), rng=0)] == [0, 2, 4]
    (row,) = Dataset.from_tensors({"a": 1}).map(lambda row, rng: {**row, "b": rng.integers(9, size=2)}, rng=0)
    assert row["b"].shape == (2,)


def test_generators_can_be_kept_and_spawned():
    kept = []
    list(Dataset.range(3).map(lambda x, rng: kept.append(rng) or x, rng=0))
    values = [value.random() for value in kept]
    assert len(set(values)) == len(values)
    child, other = kept[0].spawn(2)
    assert child.random() != other.random()


def test_by_name():
    def drawn_by_name(x, *, rng):
        return drawn(x, rng)

    assert rows(Dataset.range(40).map(drawn_by_name, rng=7)) == rows(build())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda ds: ds.map(drawn),
            r"'rng', on row 0 of range\. map\(drawn, rng=seed\) gives it a random generator for",
        ),
        (lambda ds: ds.map(lambda x, rng: x), r"map\(fn, rng=seed\) gives it"),
        (lambda ds: ds.filter(drawn), "Only map gives functions a random generator.*: draw before filter"),
        (lambda ds: ds.map(lambda x: x, rng=0), "called with a random generator after the items of the element"),
    ],
)
def test_a_message_about_a_generator_that_is_missing_or_not_taken(make, message):
    with pytest.raises(UserFunctionError, match=message):
        list(make(Dataset.range(3)))


def test_other_missing_arguments_get_no_advice():
    def inner(x, rngs):
        return x

    with pytest.raises(UserFunctionError, match=r"argument: 'rngs', on row 0 of range$"):
        list(Dataset.range(3).map(lambda x: inner(x), vectorized=False))


def test_bad_input():
    with pytest.raises(ArgumentError, match="rng is 'a'; give a whole number"):
        Dataset.range(3).map(drawn, rng="a")
    for argument in ("vectorized", "device"):
        with pytest.raises(ArgumentError, match=f"{argument}=True conflicts with rng"):
            Dataset.range(3).map(drawn, rng=0, **{argument: True})
    with pytest.raises(UserFunctionError, match="raised ZeroDivisionError"):
        list(Dataset.range(4).map(lambda x, rng: 1 // (2 - int(x)), rng=0))
