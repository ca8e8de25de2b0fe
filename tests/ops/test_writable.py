"""Arrays that users may write to, without a change of other elements or passes."""

from __future__ import annotations

import pickle

import dask
import numpy as np
import optree
import pandas as pd
import pytest

from daskdist import Dataset, MirroredStrategy, Options, PerReplica, Ragged, TensorSpec
from daskdist.core.block import Block, Bundle, writable
from daskdist.core.functions.user_function import UserFunction
from daskdist.core.spec import ElementSpec
from daskdist.core.structure import LONE
from daskdist.errors import ArgumentError
from daskdist.ops.from_generator import Generated

SOURCE = np.arange(24.0).reshape(12, 2)
CONSTANT = np.ones(2)


def arrays_of(value):
    """Return the arrays of an element, or of a step of several replicas."""
    actual = []
    for leaf in optree.tree_leaves(value, none_is_leaf=True):
        if isinstance(leaf, PerReplica):
            actual += [array for part in leaf.values for array in arrays_of(part)]
        elif isinstance(leaf, Ragged):
            actual += [*arrays_of(leaf.values), leaf.row_splits]
        elif isinstance(leaf, np.ndarray):
            actual.append(leaf)
    return actual


def write_into(values):
    """Write into all arrays that allow it; return the number of those that do not."""
    arrays = arrays_of(values)
    for array in arrays:
        if array.flags.writeable:
            array[...] = 99
    return sum(not array.flags.writeable for array in arrays)


def plain(values):
    return [array.tolist() for array in arrays_of(values)]


def two_replicas(ds):
    return list(MirroredStrategy(["CPU:0", "CPU:1"]).distribute_dataset(ds.batch(2)))


def in_a_loop(ds):
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def loop(batches):
        given = [batch.copy() if isinstance(batch, np.ndarray) else batch for batch in batches]
        for batch in batches:
            write_into(batch)
        return np.concatenate(given)

    return strategy.run(loop, args=(strategy.distribute_dataset(ds.batch(2)),))


PIPELINES = {
    "source": lambda: Dataset.from_tensor_slices(SOURCE.copy()),
    "source in batches": lambda: Dataset.from_tensor_slices(SOURCE.copy()).batch(5),
    "shuffled": lambda: Dataset.from_tensor_slices(SOURCE).shuffle(12, 1, reshuffle_each_iteration=False).batch(4),
    "one element": lambda: Dataset.from_tensors(SOURCE.copy()),
    "one ragged element": lambda: Dataset.from_tensors(Ragged(np.arange(3), [0, 1, 3])),
    "ragged": lambda: Dataset.from_tensor_slices(Ragged(np.arange(12), np.arange(13))).ragged_batch(4),
    "list": lambda: Dataset.from_list([np.zeros(2), np.zeros((2, 2))]),
    "constant": lambda: Dataset.range(4).batch(2).map(lambda x: CONSTANT),
    "constant by row": lambda: Dataset.range(4).map(lambda x: CONSTANT if x > 1 else CONSTANT[:1]),
    "cached": lambda: Dataset.range(8).batch(4).map(lambda x: x * 2).cache(),
    "cached rows": lambda: Dataset.from_tensor_slices(SOURCE.copy()).cache().batch(5),
    "persisted": lambda: Dataset.range(8).batch(3).map(lambda x: x * 1.0).persist(),
    "repeated": lambda: Dataset.from_tensor_slices(SOURCE.copy()).repeat(2).batch(7),
    "windows": lambda: Dataset.from_tensor_slices(SOURCE.copy()).window(3, 1).flat_map(lambda w: w.batch(3)),
    "generator": lambda: Dataset.from_generator(lambda: iter([CONSTANT] * 2), TensorSpec((2,), "float64")),
}
WAYS = {
    "plain": list,
    "numpy": lambda ds: list(ds.as_numpy_iterator()),
    "computed": lambda ds: dask.compute(ds)[0],
    "one replica": lambda ds: list(MirroredStrategy(["CPU:0"]).distribute_dataset(ds)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_writable_arrays_are_not_shared(pipeline, way):
    ds, look = PIPELINES[pipeline](), WAYS[way]
    first = look(ds)
    expected = plain(first)
    write_into(first)
    assert plain(look(ds)) == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_with_writable_all_can_be_written_into(pipeline, way):
    ds, look = PIPELINES[pipeline]().with_options(Options(writable=True)), WAYS[way]
    first = look(ds)
    expected = plain(first)
    assert write_into(first) == 0
    assert plain(look(ds)) == expected


@pytest.mark.parametrize("look", [two_replicas, in_a_loop], ids=["steps", "loop"])
def test_with_writable_replicas_write_into_what_they_are_given(look):
    for build in (lambda: Dataset.from_tensor_slices(SOURCE.copy()), lambda: Dataset.range(9).cache()):
        ds = build().with_options(Options(writable=True))
        first = look(ds)
        expected = plain(first)
        assert write_into(first) == 0
        assert plain(look(ds)) == expected


def test_arrays_gathered_for_one_consumer_are_not_copied():
    shuffled = Dataset.from_tensor_slices(SOURCE).shuffle(12).batch(4)
    assert all(batch.flags.writeable for batch in shuffled)
    across_blocks = Dataset.range(4).concatenate(Dataset.range(4)).batch(6)
    assert next(iter(across_blocks)).flags.writeable
    # The batches are slices of one gathered array, which is not copied.
    assert all(batch.base is not None for batch in shuffled.with_options(Options(writable=True)))
    assert not next(iter(Dataset.from_tensor_slices(SOURCE).batch(4))).flags.writeable


def test_functions_are_given_read_only_arrays():
    def function(row):
        seen.append(row.flags.writeable)
        return row.sum()

    seen: list[bool] = []
    for ds in (Dataset.from_tensor_slices(SOURCE).shuffle(12), Dataset.from_tensor_slices(SOURCE).batch(5)):
        list(ds.map(function, vectorized=False).with_options(Options(writable=True)))
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("make", [lambda leaf: Block(LONE, [leaf]), lambda leaf: Bundle(LONE, [(leaf,)])])
@pytest.mark.parametrize("leaf", [SOURCE, Ragged(np.arange(3), [0, 1, 3]), Ragged(Ragged(SOURCE, [0, 4, 12]), [0, 2])])
def test_unpickled_rows_are_read_only(make, leaf):
    for rows in (make(leaf), pickle.loads(pickle.dumps(make(leaf))), pickle.loads(pickle.dumps(make(leaf), 5))):
        (actual,) = rows.leaves if isinstance(rows, Block) else rows.item(0)
        assert not any(array.flags.writeable for array in arrays_of(actual))
        assert plain(actual) == plain(leaf)
        assert all(array.flags.writeable for array in arrays_of(writable(actual)))


def test_the_option_is_checked():
    with pytest.raises(ArgumentError, match="writable is 1; give True or False"):
        Options(writable=1)


def test_on_a_cluster(on_cluster):
    def double(batch):
        was_writable = batch.flags.writeable
        if was_writable:
            batch *= 2
        return np.append(batch[:, 0], was_writable)

    def loop(batches):
        return np.concatenate([double(batch) for batch in batches])

    for is_writable in (False, True):
        ds = Dataset.from_tensor_slices(SOURCE).batch(6).with_options(Options(writable=is_writable))
        distributed = on_cluster.distribute_dataset(ds)
        expected = [SOURCE[:3, 0], SOURCE[3:6, 0]]
        if is_writable:
            expected = [rows * 2 for rows in expected]
        batch = next(iter(distributed))
        for _ in range(2):
            actual = on_cluster.run(double, args=(batch,)).values
            assert [part.tolist() for part in map(np.asarray, actual)] == [[*rows, is_writable] for rows in expected]
        assert [np.asarray(part).flags.writeable for part in batch.values] == [is_writable] * 2
        loops = [np.asarray(part).tolist() for part in on_cluster.run(loop, args=(distributed,)).values]
        if is_writable:
            assert loops == [np.asarray(part).tolist() for part in on_cluster.run(loop, args=(distributed,)).values]
            assert loops[0][:4] == [*expected[0], True]


# --- arrays that a user's function fills again ---

# A function fills the array and returns what is made of it.
MADE_OF_ARRAY = {
    "itself": lambda array: array,
    "a view": lambda array: array[::-1],
    "a read-only view": lambda array: np.broadcast_to(array, (3, 2)),
    "windows": lambda array: np.lib.stride_tricks.sliding_window_view(array, 2),
    "a memoryview": memoryview,
    "of its bytes": lambda array: np.frombuffer(memoryview(array).cast("B"), np.float64),
    "a series": lambda array: pd.Series(array, copy=False),
    "a dict": lambda array: {"x": array, "y": (array[:1], 1)},
    "a Ragged": lambda array: Ragged(array, [0, 1, 2]),
}


def first_numbers(elements):
    """Return the first number of each element, which all its arrays of floats begin with."""
    numbers = []
    for element in elements:
        leaves = [leaf.values if isinstance(leaf, Ragged) else leaf for leaf in optree.tree_leaves(element)]
        (number,) = {float(np.ravel(leaf)[0]) for leaf in leaves if leaf.dtype == np.float64}
        numbers.append(number)
    return numbers


@pytest.mark.parametrize("made", MADE_OF_ARRAY.values(), ids=MADE_OF_ARRAY)
@pytest.mark.parametrize("is_held", [True, False])
def test_a_generator_may_yield_one_array_again(made, is_held):
    def generate():
        array = np.zeros(2)
        held = made(array)
        for number in range(1, 40):
            array[:] = number
            yield held if is_held else made(array)

    spec = Dataset.from_tensors(made(np.zeros(2))).element_spec
    assert first_numbers(Dataset.from_generator(generate, output_signature=spec)) == list(range(1, 40))


@pytest.mark.parametrize("made", MADE_OF_ARRAY.values(), ids=MADE_OF_ARRAY)
def test_scan_may_return_one_array_again_as_output_and_as_state(made):
    array = np.zeros(2)

    def add(state, number):
        array[:] = state + number
        return array, made(array)

    dataset = Dataset.from_tensor_slices(np.arange(1, 30)).scan(np.zeros(2), add)
    expected = np.cumsum(np.arange(1, 30)).tolist()
    with dask.config.set({"daskdist.split-bytes": 32}):
        assert first_numbers(dataset) == expected
        iterator = iter(dataset)
        for _ in range(9):
            next(iterator)
        state = iterator.state_dict()
        next(iterator)
        other = iter(dataset)
        other.load_state_dict(state)
        assert first_numbers(other) == expected[9:]


def rows_of(array, nest):
    return array + nest["rows"][0] - array


@pytest.mark.parametrize(
    "of_array",
    [
        Dataset.from_tensor_slices,
        Dataset.from_tensors,
        lambda array: Dataset.from_list([array, np.zeros((1, 2))]).take(1),
        lambda array: Dataset.from_tensor_slices({"a": array}).concatenate(
            Dataset.from_tensor_slices({"a": array[1:]})
        ),
        lambda array: Dataset.zip((Dataset.from_tensors(array), Dataset.range(1))),
        lambda array: Dataset.from_generator(rows_of, TensorSpec((), "f8"), args=(array, {"rows": [array]})),
    ],
)
def test_a_function_may_return_datasets_of_one_array(of_array):
    array = np.zeros(2)

    def filled(number, *window):
        array[:] = number
        return of_array(array)

    source = Dataset.range(1, 6)
    expected = [number for number in range(1, 6) for _ in of_array(array)]
    assert first_numbers(source.flat_map(filled)) == expected
    assert sorted(first_numbers(source.interleave(filled, cycle_length=3))) == expected
    assert first_numbers(source.group_by_window(lambda x: x, filled, 1)) == expected
    assert first_numbers(next(iter(dataset)) for dataset in source.map(filled)) == list(range(1, 6))


def test_objects_may_hold_one_array_again():
    array = np.zeros(2)

    def holder(number):
        array[:] = number
        objects = np.empty((1, 2), object)
        objects[0] = array, b"bytes"
        return objects

    def values(elements):
        return [element[0, 0].tolist() for element in elements]

    expected = [[float(number)] * 2 for number in range(6)]
    yielded = Dataset.from_generator(lambda: map(holder, range(6)), TensorSpec((1, 2), object))
    assert values(yielded) == values(yielded.batch(4).unbatch()) == expected
    assert values(Dataset.range(6).scan(0, lambda state, x: (state, holder(x)))) == expected
    strategy = MirroredStrategy(["CPU:0"])
    for step in (holder, lambda x: {"held": holder(x)}):
        results = [strategy.run(step, args=(float(number),)) for number in range(6)]
        assert values(result["held"] if isinstance(result, dict) else result for result in results) == expected


@pytest.mark.parametrize("kind", [np.dtypes.StringDType(), object])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_function_of_map_may_return_one_array_of_text_or_bytes_again(kind, batch_size):
    array = np.zeros(1, kind)

    def filled(batch):
        array[0] = str(batch[0]) if array.dtype.kind == "T" else str(batch[0]).encode()
        return array

    # Numbers and dates are an error, as parts of a dataset may be mapped in several threads.
    elements = [element[0] for element in Dataset.range(6).batch(batch_size).map(filled)]
    assert list(map(int, elements)) == list(range(0, 6, batch_size))


def test_a_function_of_many_rows_may_return_one_array_again():
    array = np.zeros(100)

    def filled(rows):
        array[: len(rows)] = rows
        return {"filled": array[: len(rows)], "same": rows}

    with dask.config.set({"daskdist.split-bytes": 80}):
        elements = list(Dataset.from_tensor_slices(np.arange(60.0)).map(filled, vectorized=True))
    assert [float(element["filled"]) for element in elements] == list(range(60))


def test_arrays_without_other_references_are_not_copied():
    addresses = []

    def generate():
        for number in range(5):
            yield noted(np.full(2**15, number).reshape(2, -1))

    def noted(array):
        addresses.append(array.__array_interface__["data"][0])
        return array

    elements = [leaves[0] for leaves in Generated(UserFunction(generate, "from_generator"), (), WIDE)]
    assert [array.__array_interface__["data"][0] for array in elements] == addresses
    batches = Dataset.from_tensor_slices({"x": SOURCE, "y": SOURCE}).batch(3)
    for before, after in zip(batches, batches.map(lambda batch: batch["x"][:, ::-1]), strict=True):
        assert not after.flags.writeable
        assert np.array_equal(after, before["x"][:, ::-1])


WIDE = ElementSpec.of(np.zeros((2, 2**14), int))
