"""Elements before one that fails are delivered, then its error is raised, and the iterator continues after it."""

from __future__ import annotations

import ast

import numpy as np
import pytest
from conftest import mirrored

import daskdist
from daskdist import Dataset, InputOptions, Options, TensorSpec
from daskdist.errors import StackError, UserFunctionError

NUMBER = TensorSpec((), np.int64)
ERROR = "error"


def fails_at(number):
    """Return a function that is called for each element, and fails for one."""

    def function(x):
        if x == number:
            raise ValueError(f"no {number}")
        return x

    return function


def is_at_least_40(x):
    if x < 40:
        raise ValueError("below 40")
    return True


def vectorised(x):
    """Fail if an element is 5; may be called for many elements at once."""
    return x + 0 * (7 % (x - 5))


def gives(x):
    fails_at(3)(x)
    return Dataset.range(x * 10, x * 10 + 2)


def generates(x):
    fails_at(3)(x)
    return Dataset.from_generator(lambda: iter([x * 10, x * 10 + 1]), output_signature=NUMBER)


def raises_at_5():
    for number in range(8):
        yield fails_at(5)(np.int64(number))


def taken(it, limit=100):
    """Return the elements of an iterator, with its errors in their places."""
    actual = []
    for _ in range(limit):
        try:
            value = next(it)
        except StopIteration:
            return actual
        except (UserFunctionError, StackError, daskdist.errors.FileError):
            actual.append(ERROR)
            continue
        parts = value.values if isinstance(value, daskdist.PerReplica) else [value]
        parts = [np.asarray(part).tolist() for part in parts]
        actual.append([row for part in parts for row in part] if isinstance(parts[0], list) else parts[0])
    raise AssertionError("it does not end")


def numbers(number=8):
    return Dataset.range(number)


GENERATOR = Dataset.from_generator(raises_at_5, output_signature=NUMBER)
# A failed element holds its place everywhere, unlike in TensorFlow, where one of `flat_map` does not.
CASES = {
    "map": (numbers().map(fails_at(5)).batch(2), [[0, 1], [2, 3], ERROR, [6, 7]]),
    "the first of a batch": (numbers().map(fails_at(4)).batch(2), [[0, 1], [2, 3], ERROR, [6, 7]]),
    "row by row": (numbers().map(fails_at(5), vectorized=False).batch(2), [[0, 1], [2, 3], ERROR, [6, 7]]),
    "two maps": (numbers().map(fails_at(5)).map(lambda x: x + 1).batch(2), [[1, 2], [3, 4], ERROR, [7, 8]]),
    "two fail": (numbers().map(fails_at(3)).map(fails_at(6)).batch(2), [[0, 1], ERROR, [4, 5], ERROR]),
    "map of batches": (numbers().batch(2).map(lambda x: fails_at(4)(x[0]) * 0 + x), [[0, 1], [2, 3], ERROR, [6, 7]]),
    "filter": (numbers().filter(lambda x: fails_at(5)(x) >= 0).batch(2), [[0, 1], [2, 3], ERROR, [6, 7]]),
    "flat_map": (numbers(6).flat_map(gives).batch(2), [[0, 1], [10, 11], [20, 21], ERROR, [41, 50], [51]]),
    "generators": (numbers(6).flat_map(generates).batch(2), [[0, 1], [10, 11], [20, 21], ERROR, [41, 50], [51]]),
    "generator": (GENERATOR.batch(2), [[0, 1], [2, 3], ERROR]),
    "scan": (numbers(6).scan(np.int64(0), lambda s, x: (s + fails_at(3)(x), s + x)).batch(1),
             [[0], [1], [3], ERROR, [7], [12]]),
    "zip": (Dataset.zip(numbers().map(fails_at(3)), numbers()).map(lambda x, y: y).batch(1),
            [[0], [1], [2], ERROR, [4], [5], [6], [7]]),
    "unique": (numbers().map(fails_at(3)).map(lambda x: x // 2).unique().batch(1), [[0], [1], ERROR, [2], [3]]),
    "take_while": (numbers().take_while(lambda x: fails_at(3)(x) < 6).batch(1), [[0], [1], [2], ERROR, [4], [5]]),
    "groups": (numbers().map(fails_at(3)).group_by_window(lambda x: x % 2, lambda k, d: d.batch(2), 2),
               [[0, 2], ERROR, [1, 5], [4, 6], [7]]),
    "stack": (numbers(6).map(lambda x: np.full(1 + int(x == 3), x), vectorized=False).padded_batch(2, padded_shapes=[1])
              .map(np.ravel), [[0, 1], ERROR, [4, 5]]),
    "many left out": (numbers(44).take_while(is_at_least_40).ignore_errors().batch(2),
                      [[40, 41], [42, 43]]),
    "left out": (numbers().map(fails_at(5)).batch(2).ignore_errors(), [[0, 1], [2, 3], [4, 6], [7]]),
}  # fmt: skip
PLACES = {
    "plain": lambda ds: ds,
    "threads": lambda ds: ds.with_options(Options(num_threads=2)),
    "one replica": lambda ds: mirrored(1).distribute_dataset(ds),
    "two replicas": lambda ds: mirrored(2).distribute_dataset(ds),
}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_iteration_continues_after_a_failed_element(case, where):
    ds, expected = CASES[case]
    assert taken(iter(PLACES[where](ds))) == expected


@pytest.mark.parametrize("where", ["plain", "threads"])
def test_unbatched_elements_after_a_failed_one_are_delivered(where):
    ds = PLACES[where](numbers(5).map(fails_at(2)))
    assert taken(iter(ds)) == [0, 1, ERROR, 3, 4]


def test_an_error_in_one_row_of_a_block_fails_no_other_row():
    with np.errstate(all="raise"):
        ds = numbers().map(lambda x: fails_at(5)(x), vectorized=False).batch(3)
        assert taken(iter(ds)) == [[0, 1, 2], ERROR, [6, 7]]
    blocks = numbers().map(lambda x: 1 // 0 if (x == 5).any() else x, vectorized=True).batch(2)
    assert taken(iter(blocks)) == [[0, 1], [2, 3], ERROR, [6, 7]]


@pytest.mark.parametrize("where", ["plain", "threads"])
def test_a_shuffle_keeps_all_others(where):
    actual = taken(iter(PLACES[where](numbers(50).map(fails_at(7)).shuffle(10, seed=3))))
    assert actual.count(ERROR) == 1
    assert sorted(x for x in actual if x != ERROR) == [x for x in range(50) if x != 7]


@pytest.mark.parametrize("where", ["plain", "threads"])
@pytest.mark.parametrize("name", ["map", "filter", "flat_map", "generator", "scan", "unique"])
def test_a_position_after_an_error_skips_the_failed_element(name, where):
    ds, expected = CASES[name]
    ds = PLACES[where](ds)
    for number in range(len(expected) + 1):
        it = iter(ds)
        actual = [taken_one(it) for _ in range(number)]
        state = it.state_dict()
        again = iter(ds)
        again.load_state_dict(state)
        assert actual + taken(again) == expected


def taken_one(it):
    try:
        return np.asarray(next(it)).tolist()
    except UserFunctionError:
        return ERROR


def test_the_message_names_the_row():
    it = iter(numbers().map(fails_at(5)).batch(2))
    next(it), next(it)
    with pytest.raises(UserFunctionError, match=r"map: .*fails_at.*_elements.py:\d+\) raised ValueError: no 5"):
        next(it)


@pytest.mark.parametrize("where", PLACES)
def test_an_unreadable_file_is_reported_once(tmp_path, where):
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.arange(6) + 10 * number)
    ds = daskdist.read_npy(str(tmp_path / "*.npy"))
    assert len(ds) == 18
    (tmp_path / "1.npy").unlink()
    actual = taken(iter(PLACES[where](ds.batch(2))))
    assert actual.count(ERROR) == 1
    assert [x for x in actual if x != ERROR] == [[0, 1], [2, 3], [4, 5], [20, 21], [22, 23], [24, 25]]


def in_loops(strategy, distributed, number=None, state=None):
    """Return the elements and errors of each replica's loop; after ``number`` of them, and a state, if it is given."""

    def loop(it):
        if state is not None:
            it.load_state_dict(state)
        if number is None:
            return repr((taken(it), None))
        return repr(([taken_one(it) for _ in range(number)], it.state_dict()))

    results = strategy.local_results(strategy.run(loop, args=(distributed,)))
    return [ast.literal_eval(str(result)) for result in results]


@pytest.mark.parametrize("case", CASES)
def test_replicas_loops_continue(case):
    ds, expected = CASES[case]
    strategy = mirrored(1)
    assert in_loops(strategy, strategy.distribute_dataset(ds)) == [(expected, None)]


UNKNOWN = ["filter", "flat_map", "generator", "unique"]


def rows_of_all(replicas):
    """Return the elements of loops as those of an iterator, whose step fails if the part of any replica does."""
    return [ERROR if ERROR in parts else [x for part in parts for x in part] for parts in zip(*replicas, strict=True)]


@pytest.mark.parametrize("case", UNKNOWN)
@pytest.mark.parametrize("where", [2, 3, pytest.param("cluster", marks=pytest.mark.cluster)])
def test_loops_get_the_error_of_a_row_in_its_step(case, where, request):
    strategy = request.getfixturevalue("on_cluster") if where == "cluster" else mirrored(where)
    ds, expected = CASES[case]
    replicas = [elements for elements, _ in in_loops(strategy, strategy.distribute_dataset(ds))]
    assert rows_of_all(replicas) == expected
    # Rows of other replicas do not fail.
    assert sum(elements.count(ERROR) for elements in replicas) == 1


@pytest.mark.parametrize("case", UNKNOWN)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_position_of_a_loop_after_an_error_skips_the_failed_element(case, num_replicas):
    strategy, (ds, expected) = mirrored(num_replicas), CASES[case]
    distributed = strategy.distribute_dataset(ds)
    for number in range(len(expected) + 1):
        before = in_loops(strategy, distributed, number)
        after = in_loops(strategy, distributed, state=before[0][1])
        replicas = [begin + rest for (begin, _), (rest, _) in zip(before, after, strict=True)]
        assert rows_of_all(replicas) == expected
        again = iter(distributed)
        again.load_state_dict(before[0][1])
        assert taken(again) == expected[number:]


def test_a_position_of_a_loop_after_a_failed_element_of_one_replica():
    strategy = mirrored(2)
    distributed = strategy.distribute_datasets_from_function(
        lambda _: numbers(9).filter(lambda x: fails_at(3)(x) >= 0).batch(1)
    )
    expected = [[[0], [2], [4], [6], [8]], [[1], ERROR, [5], [7], []]]
    for number in range(6):
        before = in_loops(strategy, distributed, number)
        after = in_loops(strategy, distributed, state=before[0][1])
        assert [begin + rest for (begin, _), (rest, _) in zip(before, after, strict=True)] == expected


def test_loops_over_datasets_of_their_own_continue():
    strategy = mirrored(2)

    def made(context):
        bad = [3, 5][context.input_pipeline_id]
        return numbers(8).filter(lambda x: fails_at(bad)(x) >= 0).batch(2)

    distributed = strategy.distribute_datasets_from_function(made, InputOptions(replication_mode="PER_REPLICA"))
    assert [elements for elements, _ in in_loops(strategy, distributed)] == [
        [[0, 1], ERROR, [4, 5], [6, 7]],
        [[0, 1], [2, 3], ERROR, [6, 7]],
    ]


def test_a_loop_over_files_that_are_gone_ends(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"{number}\n")
    strategy = mirrored(2)
    distributed = strategy.distribute_dataset(daskdist.read_text(str(tmp_path / "*.txt")).map(int).batch(2))
    for path in tmp_path.iterdir():
        path.unlink()
    for elements, _ in in_loops(strategy, distributed):
        failed = [element for element in elements if element != []]
        assert failed == [ERROR] * len(failed) != []


@pytest.mark.cluster
@pytest.mark.parametrize("case", ["map", "two maps", "filter", "flat_map", "map of batches", "generator", "unique"])
def test_iteration_on_a_cluster_continues_after_a_failed_element(on_cluster, case):
    ds, expected = CASES[case]
    it = iter(on_cluster.distribute_dataset(ds))
    actual = []
    for _ in range(30):
        try:
            parts = on_cluster.local_results(next(it))
            actual.append([int(x) for part in parts for x in np.asarray(part)])
        except StopIteration:
            break
        except UserFunctionError:
            actual.append(ERROR)
    assert actual == expected


def test_a_dataset_whose_fourth_element_fails_has_a_spec_and_is_distributed():
    def checked(x):
        if x < 10 or x == 13:
            raise KeyError(int(x))
        return x

    ds = Dataset.range(10, 20).map(checked).batch(2)
    assert ds.element_spec.dtype == np.int64
    steps = iter(mirrored(2).distribute_dataset(ds))
    assert [int(x[0]) for x in next(steps).values] == [10, 11]
    with pytest.raises(UserFunctionError, match="KeyError: 13"):
        next(steps)


def test_a_dataset_whose_first_elements_fail_has_the_spec_of_those_that_do_not():
    def checked(x):
        if x < 12:
            raise KeyError(int(x))
        return x

    ds = Dataset.range(10, 20).map(checked).batch(2)
    assert ds.element_spec.dtype == np.int64
    steps = iter(mirrored(2).distribute_dataset(ds))
    with pytest.raises(UserFunctionError, match="KeyError: 10"):
        next(steps)
    assert [int(x[0]) for x in next(steps).values] == [12, 13]
    with pytest.raises(UserFunctionError, match="KeyError: 10"):
        str(ds.take(1).element_spec)


@pytest.mark.parametrize("rest", [lambda ds: ds, lambda ds: ds.skip(0).take(-1), lambda ds: ds.prefetch(2)])
def test_a_batch_that_does_not_stack_fails_no_other_batch(rest):
    ds = rest(Dataset.range(8).map(lambda x: np.full(2 if x == 3 else 1, x)).batch(2))
    expected = [[[0], [1]], ERROR, [[4], [5]], [[6], [7]]]
    assert taken(iter(ds)) == expected
    elements, again = iter(ds), iter(ds)
    next(elements)
    with pytest.raises(StackError):
        next(elements)
    again.load_state_dict(elements.state_dict())
    assert taken(again) == expected[2:]
    assert [batch.tolist() for batch in ds.ignore_errors()] == [value for value in expected if value != ERROR]


@pytest.mark.parametrize("keep", ["snapshot", "cache"])
@pytest.mark.parametrize("leave_out", ["ignore_errors", "skip"])
def test_what_is_left_out_further_down_is_not_missing_in_files(tmp_path, keep, leave_out):
    mapped = Dataset.range(6).map(fails_at(3))
    kept = getattr(mapped, keep)(tmp_path)
    without = kept.ignore_errors() if leave_out == "ignore_errors" else kept.with_options(Options(on_error="skip"))
    assert [int(x) for _ in range(2) for x in without] == [0, 1, 2, 4, 5] * 2
    assert taken(iter(kept)) == [0, 1, 2, ERROR, 4, 5]
    # Files are of whole passes: of the elements that are left.
    of_others = getattr(mapped.ignore_errors(), keep)(tmp_path)
    assert [int(x) for x in of_others] == [0, 1, 2, 4, 5]
    assert taken(iter(kept)) == [0, 1, 2, ERROR, 4, 5]
