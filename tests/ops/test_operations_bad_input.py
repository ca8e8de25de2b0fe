"""Bad input to operations: an error says as early as possible what was given and what is allowed."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import dask.array as da
import numpy as np
import pytest

from daskdist import Dataset, Options, Ragged, TensorSpec, errors
from daskdist.core.dataset_base import node_of

INT = TensorSpec((), "int64")
NUMBERS = Dataset.range(4)
ROWS = Dataset.from_tensor_slices(np.arange(12).reshape(4, 3))
NAMED = Dataset.from_tensor_slices({"a": [1, 2, 3], "b": [1.0, 2.0, 3.0]})


def of_length_of_value(x):
    return np.full(int(x), x)


LENGTHS = NUMBERS.map(of_length_of_value)


def same(x):
    return x


def to_window(key, window):
    return window


def bucket(boundaries=(2,), sizes=(1, 1), **arguments):
    return LENGTHS.bucket_by_sequence_length(len, boundaries, sizes, **arguments)


def group(**arguments):
    return NUMBERS.group_by_window(same, to_window, **arguments)


def resample(target, initial=None, **arguments):
    return NUMBERS.rejection_resample(same, target, initial, **arguments)


def refused(build, says, error=errors.ArgumentError, builtin=ValueError):
    """Check that building raises an error of ours and of a builtin class, with these phrases in its message."""
    with pytest.raises(error) as caught:
        build()
    assert isinstance(caught.value, errors.DaskdistError)
    assert isinstance(caught.value, builtin)
    for phrase in says:
        assert phrase in str(caught.value)


# --- numbers ---

WHOLE = [
    ("range", "stop", lambda x: Dataset.range(x)),
    ("range", "step", lambda x: Dataset.range(0, 9, x)),
    ("counter", "start", lambda x: Dataset.counter(x)),
    ("counter", "step", lambda x: Dataset.counter(0, x)),
    ("enumerate", "start", lambda x: NUMBERS.enumerate(x)),
    ("take", "count", lambda x: NUMBERS.take(x)),
    ("skip", "count", lambda x: NUMBERS.skip(x)),
    ("shard", "num_shards", lambda x: NUMBERS.shard(x, 0)),
    ("shard", "index", lambda x: NUMBERS.shard(2, x)),
    ("shuffle", "buffer_size", lambda x: NUMBERS.shuffle(x)),
    ("prefetch", "buffer_size", lambda x: NUMBERS.prefetch(x)),
    ("batch", "batch_size", lambda x: NUMBERS.batch(x)),
    ("padded_batch", "batch_size", lambda x: NUMBERS.padded_batch(x)),
    ("ragged_batch", "batch_size", lambda x: NUMBERS.ragged_batch(x)),
    ("rebatch", "batch_size", lambda x: ROWS.rebatch(x)),
    ("rebatch", "batch_size[1]", lambda x: ROWS.rebatch([1, x])),
    ("window", "size", lambda x: NUMBERS.window(x)),
    ("window", "stride", lambda x: NUMBERS.window(2, 1, x)),
    ("bucket_by_sequence_length", "bucket_boundaries[0]", lambda x: bucket([x])),
    ("bucket_by_sequence_length", "bucket_batch_sizes[1]", lambda x: bucket(sizes=[1, x])),
    ("assert_cardinality", "expected_cardinality", lambda x: NUMBERS.assert_cardinality(x)),
]
# These arguments may also be None, for a default.
WHOLE_OR_NONE = [
    ("random", "seed", lambda x: Dataset.random(x)),
    ("shuffle", "seed", lambda x: NUMBERS.shuffle(2, seed=x)),
    ("rejection_resample", "seed", lambda x: resample([1.0], seed=x)),
    ("sample_from_datasets", "seed", lambda x: Dataset.sample_from_datasets([NUMBERS], seed=x)),
    ("repeat", "count", lambda x: NUMBERS.repeat(x)),
    ("window", "shift", lambda x: NUMBERS.window(2, x)),
    ("interleave", "cycle_length", lambda x: NUMBERS.interleave(Dataset.range, x)),
    ("interleave", "block_length", lambda x: NUMBERS.interleave(Dataset.range, 2, x)),
    ("interleave", "num_parallel_calls", lambda x: NUMBERS.interleave(Dataset.range, 2, 1, x)),
    ("map", "num_parallel_calls", lambda x: NUMBERS.map(same, num_parallel_calls=x)),
    ("batch", "num_parallel_calls", lambda x: NUMBERS.batch(2, num_parallel_calls=x)),
    ("group_by_window", "window_size", lambda x: group(window_size=x)),
]


@pytest.mark.parametrize(("operation", "argument", "build"), WHOLE + WHOLE_OR_NONE)
def test_arguments_that_must_be_whole_numbers(operation, argument, build):
    for given in ("3", 1.5, True, np.float64(2)):
        refused(lambda given=given: build(given), [f"{operation}: {argument} is {given!r}", "whole number"])


@pytest.mark.parametrize(("operation", "argument", "build"), WHOLE)
def test_none_is_refused_as_a_number(operation, argument, build):
    refused(lambda: build(None), [f"{operation}: {argument} is None"])


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Dataset.range(), ["range", "1 to 3", "got 0", "range(stop)"]),
        (lambda: Dataset.range(1, 2, 3, 4), ["range", "1 to 3", "got 4"]),
        (lambda: Dataset.range(1, 2, 0), ["range: step is 0"]),
        (lambda: Dataset.range(200, output_type="int8"), ["range: 199", "int8", "127"]),
        (lambda: Dataset.range(-1, 3, output_type="uint8"), ["range: -1", "uint8", "0"]),
        (lambda: Dataset.range(2**70), ["range", "int64"]),
        (lambda: Dataset.counter(300, dtype="uint8"), ["counter: 300", "uint8", "255"]),
        (lambda: NUMBERS.shard(0, 0), ["shard: num_shards is 0", "1 or more"]),
        (lambda: NUMBERS.shard(2, 2), ["shard: index is 2", "2 shards"]),
        (lambda: NUMBERS.shard(2, -1), ["shard: index is -1", "0 or more"]),
        (lambda: NUMBERS.shuffle(0), ["shuffle: buffer_size is 0", "1 or more"]),
        (lambda: NUMBERS.shuffle(-1), ["shuffle: buffer_size is -1", "1 or more"]),
        (lambda: NUMBERS.prefetch(-2), ["prefetch: buffer_size is -2", "-1 or more"]),
        (lambda: NUMBERS.batch(0), ["batch: batch_size is 0", "1 or more"]),
        (lambda: NUMBERS.padded_batch(0), ["padded_batch: batch_size is 0", "1 or more"]),
        (lambda: NUMBERS.ragged_batch(-1), ["ragged_batch: batch_size is -1", "1 or more"]),
        (lambda: ROWS.rebatch(0), ["rebatch: batch_size is 0", "1 or more"]),
        (lambda: ROWS.rebatch([0]), ["rebatch: batch_size is 0", "1 or more"]),
        (lambda: ROWS.rebatch([0, 0]), ["rebatch: batch_size is [0, 0]", "at least one"]),
        (lambda: ROWS.rebatch([]), ["rebatch: batch_size is []", "at least one"]),
        (lambda: ROWS.rebatch([2, -1]), ["rebatch: batch_size", "-1", "0 or more"]),
        (lambda: NUMBERS.window(0), ["window: size is 0", "1 or more"]),
        (lambda: NUMBERS.window(2, 0), ["window: shift is 0", "1 or more"]),
        (lambda: NUMBERS.window(2, 1, 0), ["window: stride is 0", "1 or more"]),
        (lambda: NUMBERS.interleave(Dataset.range, 0), ["interleave: cycle_length is 0", "1 or more"]),
        (lambda: NUMBERS.interleave(Dataset.range, 1, 0), ["interleave: block_length is 0", "1 or more"]),
        (lambda: NUMBERS.interleave(Dataset.range, 1, 1, 0), ["interleave: num_parallel_calls is 0", "1 or more"]),
        (lambda: NUMBERS.map(same, num_parallel_calls=-2), ["map: num_parallel_calls is -2", "1 or more"]),
        (lambda: group(window_size=0), ["group_by_window: window_size is 0", "1 or more"]),
        (lambda: group(), ["group_by_window", "window_size", "window_size_func"]),
        (lambda: group(window_size=2, window_size_func=same), ["group_by_window", "window_size", "window_size_func"]),
        (lambda: NUMBERS.assert_cardinality(-2), ["assert_cardinality: expected_cardinality is -2", "-1 or more"]),
        (lambda: bucket(sizes=[1]), ["bucket_by_sequence_length", "1 bucket_batch_sizes", "1 bucket_boundaries"]),
        (lambda: bucket(sizes=[1, 0]), ["bucket_by_sequence_length: bucket_batch_sizes[1] is 0", "1 or more"]),
        (lambda: bucket([2, 2], [1, 1, 1]), ["bucket_boundaries [2, 2] do not ascend"]),
        (lambda: bucket([3, 2], [1, 1, 1]), ["bucket_boundaries [3, 2] do not ascend"]),
        (lambda: bucket(3), ["bucket_by_sequence_length: bucket_boundaries is 3", "list"]),
        (lambda: bucket(sizes="ab"), ["bucket_by_sequence_length: bucket_batch_sizes is 'ab'", "list"]),
        (lambda: bucket([], [1], pad_to_bucket_boundary=True), ["pad_to_bucket_boundary", "bucket_boundaries"]),
        (lambda: resample([0.5, 0.4]), ["rejection_resample: target_dist is [0.5, 0.4]", "sum to 1"]),
        (lambda: resample([-0.5, 1.5]), ["rejection_resample: target_dist", "0 or more"]),
        (lambda: resample([]), ["rejection_resample: target_dist is []"]),
        (lambda: resample(0.5), ["rejection_resample: target_dist is 0.5", "list of numbers"]),
        (lambda: resample(["a", "b"]), ["rejection_resample: target_dist is ['a', 'b']", "list of numbers"]),
        (lambda: resample([0.5, 0.5], [1.0]), ["initial_dist has 1", "target_dist 2"]),
        (lambda: resample([0.5, 0.5], [1.0, 0.0]), ["class 1", "0.5"]),
        (lambda: resample([0.5, 0.5], [0.2, 0.2]), ["initial_dist is [0.2, 0.2]", "sum to 1"]),
    ],
)
def test_an_argument_out_of_range_is_refused_when_built(build, says):
    refused(build, says)


def sample(weights):
    return Dataset.sample_from_datasets([NUMBERS, NUMBERS], weights)


@pytest.mark.parametrize(
    "weights",
    [[1], [1, 2, 3], [-1, 1], [0, 0], [np.nan, 1], [np.inf, 1], "ab", ["a", "b"], 0.5, [[1, 2]], NUMBERS],
    ids=repr,
)
def test_invalid_weights_are_refused(weights):
    refused(lambda: sample(weights), ["sample_from_datasets: weights is"])


# --- True or False ---


@pytest.mark.parametrize(
    ("operation", "argument", "build"),
    [
        ("batch", "drop_remainder", lambda x: NUMBERS.batch(2, drop_remainder=x)),
        ("padded_batch", "drop_remainder", lambda x: NUMBERS.padded_batch(2, drop_remainder=x)),
        ("ragged_batch", "drop_remainder", lambda x: NUMBERS.ragged_batch(2, drop_remainder=x)),
        ("rebatch", "drop_remainder", lambda x: ROWS.rebatch(2, drop_remainder=x)),
        ("window", "drop_remainder", lambda x: NUMBERS.window(2, drop_remainder=x)),
        ("bucket_by_sequence_length", "drop_remainder", lambda x: bucket(drop_remainder=x)),
        ("bucket_by_sequence_length", "no_padding", lambda x: bucket(no_padding=x)),
        ("bucket_by_sequence_length", "pad_to_bucket_boundary", lambda x: bucket(pad_to_bucket_boundary=x)),
        ("shuffle", "reshuffle_each_iteration", lambda x: NUMBERS.shuffle(2, reshuffle_each_iteration=x)),
        ("random", "rerandomize_each_iteration", lambda x: Dataset.random(rerandomize_each_iteration=x)),
        ("list_files", "shuffle", lambda x: Dataset.list_files(__file__, shuffle=x)),
        ("map", "deterministic", lambda x: NUMBERS.map(same, deterministic=x)),
        ("map", "vectorized", lambda x: NUMBERS.map(same, vectorized=x)),
        (
            "choose_from_datasets",
            "stop_on_empty_dataset",
            lambda x: Dataset.choose_from_datasets([NUMBERS], NUMBERS, stop_on_empty_dataset=x),
        ),
        (
            "sample_from_datasets",
            "stop_on_empty_dataset",
            lambda x: Dataset.sample_from_datasets([NUMBERS], stop_on_empty_dataset=x),
        ),
        (
            "sample_from_datasets",
            "rerandomize_each_iteration",
            lambda x: Dataset.sample_from_datasets([NUMBERS], rerandomize_each_iteration=x),
        ),
    ],
)
@pytest.mark.parametrize("given", ["yes", 2, [True]], ids=repr)
def test_arguments_that_must_be_bools(operation, argument, build, given):
    refused(lambda: build(given), [f"{operation}: {argument} is {given!r}", "True or False"])


# --- functions ---


@pytest.mark.parametrize(
    ("operation", "build"),
    [
        ("map", lambda f: NUMBERS.map(f)),
        ("filter", lambda f: NUMBERS.filter(f)),
        ("flat_map", lambda f: NUMBERS.flat_map(f)),
        ("interleave", lambda f: NUMBERS.interleave(f)),
        ("take_while", lambda f: NUMBERS.take_while(f)),
        ("scan", lambda f: NUMBERS.scan(0, f)),
        ("reduce", lambda f: NUMBERS.reduce(0, f)),
        ("rejection_resample", lambda f: NUMBERS.rejection_resample(f, [1.0])),
        ("group_by_window", lambda f: NUMBERS.group_by_window(f, to_window, 2)),
        ("group_by_window", lambda f: NUMBERS.group_by_window(same, f, 2)),
        ("bucket_by_sequence_length", lambda f: LENGTHS.bucket_by_sequence_length(f, [2], [1, 1])),
        ("batch_by_size", lambda f: LENGTHS.batch_by_size(4, f)),
        ("from_generator", lambda f: Dataset.from_generator(f, INT)),
        ("apply", lambda f: NUMBERS.apply(f)),
    ],
)
@pytest.mark.parametrize("given", [3, "len", None, NUMBERS], ids=["3", "'len'", "None", "a dataset"])
def test_arguments_that_must_be_functions(operation, build, given):
    refused(lambda: build(given), [f"{operation}: expected a function", type(given).__name__])


def test_a_generator_is_no_function_that_makes_one():
    refused(lambda: Dataset.from_generator(iter([1]), INT), ["from_generator", "only once"])


def test_a_function_to_apply_returns_a_dataset():
    refused(lambda: NUMBERS.apply(len), ["apply", "int", "Dataset"])


# --- structures ---


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Dataset.from_tensors(None), ["from_tensors: None"]),
        (lambda: Dataset.from_tensors(({"a": 1}, None)), ["from_tensors: None"]),
        (lambda: Dataset.from_tensors(object()), ["from_tensors: object"]),
        (lambda: Dataset.from_tensors([1, [2, 3]]), ["from_tensors", "one array", "shape"]),
        (lambda: Dataset.from_tensors(()), ["from_tensors: ()", "at least one"]),
        (lambda: Dataset.from_tensor_slices({}), ["from_tensor_slices: {}", "at least one"]),
        (lambda: Dataset.from_tensor_slices(None), ["from_tensor_slices: None"]),
        (lambda: Dataset.from_tensor_slices({"a": [1], "b": 2}), ["from_tensor_slices", "['b']", "from_tensors"]),
        (
            lambda: Dataset.from_tensor_slices(([1, 2], {"x": [1]})),
            ["from_tensor_slices", "'[0]': 2", "\"[1]['x']\": 1"],
        ),
        (lambda: Dataset.from_generator(same, 3), ["from_generator", "output_signature", "3", "TensorSpec"]),
        (lambda: Dataset.from_generator(same, {"a": INT, "b": int}), ["from_generator", "['b']", "TensorSpec"]),
        (
            lambda: Dataset.from_generator(lambda: iter([{"x": np.zeros((3, 2)), "y": "a"}])),
            ["output_signature={'x': TensorSpec((3, 2), 'float64'), 'y': TensorSpec((), str)}", "None for lengths"],
        ),
        (lambda: Dataset.from_generator(lambda: 1 // 0), ["from_generator: give the spec", "output_signature={"]),
        (lambda: Dataset.from_generator(same, ()), ["from_generator", "output_signature", "no leaves"]),
        (lambda: Dataset.from_generator(same, INT, args=3), ["from_generator: args is 3", "tuple"]),
        (lambda: Dataset.from_dask(3), ["from_dask", "int"]),
        (lambda: Dataset.from_dask(np.ones(3)), ["from_dask", "ndarray"]),
        (lambda: Dataset.from_dask([3]), ["from_dask", "int"]),
        (lambda: Dataset.zip(), ["zip", "no datasets"]),
        (lambda: Dataset.zip(()), ["zip", "no datasets"]),
        (lambda: Dataset.zip([NUMBERS, NUMBERS]), ["zip", "list", "tuple or dict"]),
        (lambda: Dataset.zip(NUMBERS, 3), ["zip: [1] is int"]),
        (lambda: Dataset.zip({"a": NUMBERS, "b": None}), ["zip: ['b'] is NoneType"]),
        (lambda: NUMBERS.concatenate(3), ["concatenate: dataset is int"]),
        (lambda: NUMBERS.concatenate([NUMBERS]), ["concatenate: dataset is list"]),
        (
            lambda: NUMBERS.concatenate(NAMED),
            ["concatenate", "dataset 1", "{'a': value, 'b': value}", "but earlier ones value"],
        ),
        (
            lambda: NAMED.concatenate(NAMED.map(lambda d: {"a": d["a"]})),
            ["concatenate", "dataset 1", "{'a': value}", "{'a': value, 'b': value}"],
        ),
        (
            lambda: NAMED.concatenate(NAMED.map(lambda d: {"a": d["a"], "b": d["a"]})),
            ["concatenate", "['b']", "dataset 1", "int64", "float64"],
        ),
        (lambda: NUMBERS.concatenate(ROWS), ["concatenate", "dataset 1", "(3,)", "()", "rank"]),
        (lambda: NUMBERS.concatenate(Dataset.range(2, output_type="int32")), ["int32", "int64", "dtype"]),
        (lambda: Dataset.choose_from_datasets([], NUMBERS), ["choose_from_datasets", "no datasets"]),
        (lambda: Dataset.choose_from_datasets(None, NUMBERS), ["choose_from_datasets: datasets is NoneType", "list"]),
        (lambda: Dataset.choose_from_datasets(NUMBERS, NUMBERS), ["choose_from_datasets: datasets is Dataset", "list"]),
        (lambda: Dataset.choose_from_datasets([NUMBERS, 3], NUMBERS), ["choose_from_datasets: dataset 1 is int"]),
        (lambda: Dataset.choose_from_datasets([NUMBERS], 3), ["choose_from_datasets: choice_dataset is int"]),
        (lambda: Dataset.choose_from_datasets([NUMBERS, NAMED], NUMBERS), ["choose_from_datasets", "dataset 1", "'a'"]),
        (lambda: Dataset.choose_from_datasets([NUMBERS, ROWS], NUMBERS), ["choose_from_datasets", "dataset 1", "(3,)"]),
        (lambda: Dataset.choose_from_datasets([NUMBERS], NAMED), ["choices are", "'a'", "integer scalars"]),
        (lambda: Dataset.choose_from_datasets([NUMBERS], ROWS), ["choices are", "(3,)", "integer scalars"]),
        (
            lambda: Dataset.choose_from_datasets([NUMBERS], Dataset.range(2, output_type="float32")),
            ["choices are", "float32", "integer scalars"],
        ),
        (lambda: Dataset.sample_from_datasets([]), ["sample_from_datasets", "no datasets"]),
        (lambda: Dataset.sample_from_datasets(3), ["sample_from_datasets: datasets is int", "list"]),
        (lambda: Dataset.sample_from_datasets([NUMBERS, NAMED]), ["sample_from_datasets", "dataset 1", "'a'"]),
        (lambda: NUMBERS.unbatch(), ["unbatch", "no rows"]),
        (lambda: Dataset.from_tensors({"a": [1], "b": 3}).unbatch(), ["unbatch", "['b']", "no rows"]),
        (lambda: Dataset.from_tensors(([1, 2], [1])).unbatch(), ["unbatch", "'[0]': 2", "'[1]': 1"]),
        (lambda: NUMBERS.rebatch(2), ["rebatch", "no rows"]),
        (lambda: NUMBERS.window(2).rebatch(2), ["rebatch", "no rows"]),
        (lambda: NUMBERS.window(2).padded_batch(2), ["padded_batch", "a dataset", "flat_map"]),
        (lambda: NUMBERS.window(2).ragged_batch(2), ["ragged_batch", "a dataset", "flat_map"]),
        (lambda: NAMED.window(2).padded_batch(2), ["padded_batch", "['a']", "a dataset"]),
        (lambda: NUMBERS.ragged_batch(2, row_splits_dtype="int8"), ["row_splits_dtype is 'int8'", "int32 or int64"]),
        (lambda: NUMBERS.ragged_batch(2, row_splits_dtype="bogus"), ["ragged_batch: row_splits_dtype is 'bogus'"]),
        (lambda: Dataset.range(3, output_type="bogus"), ["range: output_type is 'bogus'", "dtype"]),
        (lambda: Dataset.range(3, output_type=bool), ["range: output_type is bool"]),
        (lambda: Dataset.counter(dtype=str), ["counter: dtype is"]),
        (lambda: NUMBERS.scan(None, to_window), ["scan: initial_state: None"]),
        (lambda: NUMBERS.reduce(None, to_window), ["reduce: initial_state: None"]),
        (lambda: NUMBERS.with_options({"seed": 1}), ["with_options", "dict", "Options"]),
        (lambda: NUMBERS.explain("plan"), ["explain", "'plan'", "pipeline"]),
        (lambda: Dataset.list_files(3), ["int", "path"]),
        (lambda: Dataset.list_files([3]), ["3", "path"]),
        (lambda: Ragged([1, 2], [0, 1]), ["row_splits", "1", "2 values"]),
    ],
)
def test_a_structure_that_does_not_fit_is_refused_when_built(build, says):
    refused(build, says)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("deterministic", "yes", "True or False"),
        ("num_threads", 0, "1 or more"),
        ("memory_budget_bytes", "much", "64 MiB"),
        ("on_error", "stop", "'raise' or 'skip'"),
        ("seed", 1.5, "whole number"),
        ("auto_shard_policy", "ring", "DATA"),
    ],
)
def test_options(field, value, says):
    refused(lambda: Options(**{field: value}), [repr(value), says])
    options = Options()
    refused(lambda: setattr(options, field, value), [repr(value), says])


def test_no_file_matches(tmp_path):
    pattern = str(tmp_path / "*.none")
    refused(lambda: Dataset.list_files(pattern), [pattern], errors.FileError, OSError)
    refused(lambda: Dataset.list_files([]), ["empty"], errors.FileError, OSError)


# --- padding ---


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"padded_shapes": 3}, ["padded_shapes", "is 3"]),
        ({"padded_shapes": "a"}, ["padded_shapes", "is 'a'"]),
        ({"padded_shapes": [1.5]}, ["padded_shapes", "is [1.5]", "None or -1"]),
        ({"padded_shapes": [-2]}, ["padded_shapes", "is [-2]", "None or -1"]),
        ({"padded_shapes": [2, 2]}, ["padded_shapes", "2 axes", "has 1"]),
        ({"padded_shapes": []}, ["padded_shapes", "0 axes", "has 1"]),
        ({"padding_values": "a"}, ["padding_values", "'a'", "int64"]),
        ({"padding_values": 1.5}, ["padding_values", "1.5", "int64"]),
        ({"padding_values": True}, ["padding_values", "True", "int64"]),
        ({"padding_values": np.int32(1)}, ["padding_values", "int32", "int64"]),
        ({"padding_values": [0]}, ["padding_values", "[0]", "one value"]),
        ({"padding_values": 2**70}, ["padding_values", "int64"]),
    ],
)
@pytest.mark.parametrize(
    ("operation", "build"),
    [("padded_batch", lambda **arguments: LENGTHS.padded_batch(2, **arguments)), ("bucket_by_sequence_length", bucket)],
)
def test_padding_that_does_not_fit(operation, build, arguments, says):
    refused(lambda: build(**arguments), [operation, "(the element)", *says])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"padded_shapes": {"a": []}}, ["padded_shapes", "{'a': []}", "{'a': value, 'b': value}"]),
        ({"padded_shapes": ([], [])}, ["padded_shapes", "{'a': value, 'b': value}"]),
        ({"padded_shapes": {"a": [], "b": [3]}}, ["padded_shapes", "['b']", "1 axes", "has 0"]),
        ({"padding_values": {"a": 1}}, ["padding_values", "{'a': 1}", "{'a': value, 'b': value}"]),
        ({"padding_values": {"a": 1.5, "b": 1}}, ["padding_values", "['a']", "1.5", "int64"]),
    ],
)
def test_padding_of_another_nest(arguments, says):
    refused(lambda: NAMED.padded_batch(2, **arguments), ["padded_batch", *says])


def test_padding_beyond_what_a_dtype_holds():
    refused(lambda: Dataset.range(4, output_type="int8").padded_batch(2, padding_values=300), ["300", "int8"])
    refused(lambda: Dataset.range(4, output_type="uint8").padded_batch(2, padding_values=-1), ["-1", "uint8"])


def test_a_shape_that_is_shorter_than_a_known_one():
    refused(lambda: ROWS.padded_batch(2, padded_shapes=[2]), ["padded_batch", "[2]", "longer", "(3,)"])


UNKNOWN_SPEC = NUMBERS.map(lambda x: (x, x) if int(x) == 1 else x)


def test_padding_of_elements_without_a_spec():
    refused(lambda: UNKNOWN_SPEC.padded_batch(2, padding_values=1), ["padded_batch", "padding_values", "known spec"])


# --- functions that raise or return invalid values ---


def reciprocal(x):
    return 1 // int(x - 2)


def raises(x):
    return Dataset.range(1 // int(x - 2))


def none(*arguments):
    return None


def a_list(x):
    return [Dataset.range(2)]


def number_or_pair(x):
    return Dataset.range(2) if int(x) < 2 else Dataset.from_tensors((1, 2))


def number_or_named(key, window):
    return window if key < 2 else NAMED


def reduce_that_raises(key, window):
    return window.take(1 // int(key - 2))


def state_and_more(state, x):
    return state, x, x


def state_that_raises(state, x):
    return state + 1 // int(x - 2), x


def other_state(state, x):
    return (state, state) if int(x) == 2 else state, x


def other_dtype(state, x):
    return np.float32(state) if int(x) == 2 else state, x


def no_state(state, x):
    return (None if int(x) == 2 else state), x


def other_output(state, x):
    return state, (x, x) if int(x) == 2 else x


def too_few(x):
    return 0 if int(x) == 2 else 1


def too_high(x):
    return 7 if int(x) == 2 else 0


def half(x):
    return 0.5 if int(x) == 2 else 0


def a_word(x):
    return "two" if int(x) == 2 else 0


def two_keys(x):
    return np.array([1, 2]) if int(x) == 2 else 0


def length_that_raises(x):
    return 1 // int(x.sum() != 4)


def half_of_length(x):
    return 0.5 if len(x) == 2 else len(x)


def bucketed(function):
    return LENGTHS.bucket_by_sequence_length(function, [2], [1, 1])


def is_small(x):
    return 1 // int(x - 2) < 5


def no_bool(x):
    return x if int(x) == 2 else True


ZERO = np.int64(0)


@pytest.mark.parametrize(
    ("operation", "build", "function", "says"),
    [
        ("flat_map", lambda f: NUMBERS.flat_map(f), raises, ["ZeroDivisionError"]),
        ("flat_map", lambda f: NUMBERS.flat_map(f), reciprocal, ["returned int", "Dataset"]),
        ("flat_map", lambda f: NUMBERS.flat_map(f), none, ["returned NoneType", "Dataset"]),
        ("flat_map", lambda f: NUMBERS.flat_map(f), a_list, ["returned list", "Dataset"]),
        ("flat_map", lambda f: NUMBERS.flat_map(f), number_or_pair, ["(value, value)", "value before"]),
        ("interleave", lambda f: NUMBERS.interleave(f, 2), raises, ["ZeroDivisionError"]),
        ("interleave", lambda f: NUMBERS.interleave(f, 2), none, ["returned NoneType", "Dataset"]),
        ("interleave", lambda f: NUMBERS.interleave(f, 2), number_or_pair, ["(value, value)", "value before"]),
        ("take_while", lambda f: NUMBERS.take_while(f), is_small, ["ZeroDivisionError"]),
        ("scan", lambda f: NUMBERS.scan(ZERO, f), state_that_raises, ["ZeroDivisionError"]),
        ("scan", lambda f: NUMBERS.scan(ZERO, f), state_and_more, ["returned", "(state, output)"]),
        ("scan", lambda f: NUMBERS.scan(ZERO, f), none, ["returned None", "(state, output)"]),
        ("scan", lambda f: NUMBERS.scan(ZERO, f), other_state, ["(value, value)", "it was value"]),
        ("scan", lambda f: NUMBERS.scan(ZERO, f), other_dtype, ["float32", "it was int64"]),
        ("scan", lambda f: NUMBERS.scan(ZERO, f), no_state, ["None"]),
        ("scan", lambda f: NUMBERS.scan(ZERO, f), other_output, ["(value, value)", "value before"]),
        ("group_by_window", lambda f: NUMBERS.group_by_window(f, to_window, 2), reciprocal, ["ZeroDivisionError"]),
        ("group_by_window", lambda f: NUMBERS.group_by_window(f, to_window, 2), half, ["0.5", "a key is one integer"]),
        ("group_by_window", lambda f: NUMBERS.group_by_window(f, to_window, 2), a_word, ["'two'", "a key"]),
        ("group_by_window", lambda f: NUMBERS.group_by_window(f, to_window, 2), none, ["None", "a key"]),
        ("group_by_window", lambda f: NUMBERS.group_by_window(f, to_window, 2), two_keys, ["[1, 2]", "a key"]),
        (
            "group_by_window",
            lambda f: NUMBERS.group_by_window(same, f, 2),
            reduce_that_raises,
            ["ZeroDivisionError", "the window of key 2"],
        ),
        ("group_by_window", lambda f: NUMBERS.group_by_window(same, f, 2), none, ["returned NoneType", "Dataset"]),
        (
            "group_by_window",
            lambda f: NUMBERS.group_by_window(same, f, 2),
            number_or_named,
            ["{'a': value, 'b': value}", "value before", "the window of key 2"],
        ),
        ("bucket_by_sequence_length", bucketed, length_that_raises, ["ZeroDivisionError"]),
        ("batch_by_size", lambda f: LENGTHS.batch_by_size(4, f), length_that_raises, ["ZeroDivisionError"]),
        ("batch_by_size", lambda f: LENGTHS.batch_by_size(4, f), half_of_length, ["0.5", "a length is one integer"]),
        ("bucket_by_sequence_length", bucketed, half_of_length, ["0.5", "a length is one integer"]),
        ("rejection_resample", lambda f: NUMBERS.rejection_resample(f, [0.5, 0.5]), reciprocal, ["-1", "0 to 1"]),
        ("rejection_resample", lambda f: NUMBERS.rejection_resample(f, [0.5, 0.5]), too_high, ["7", "0 to 1"]),
        ("rejection_resample", lambda f: NUMBERS.rejection_resample(f, [0.5, 0.5]), half, ["0.5", "0 to 1"]),
        ("rejection_resample", lambda f: NUMBERS.rejection_resample(f, [0.5, 0.5]), none, ["None", "0 to 1"]),
    ],
)
def test_errors_of_functions_name_operation_place_and_row(operation, build, function, says):
    ds = build(function)  # The error is raised only when the function is called with an element.
    with pytest.raises(errors.UserFunctionError) as caught:
        list(ds)
    message = str(caught.value)
    assert message.startswith(f"{operation}: {function.__name__} (")
    assert line_of(function) in message
    row = int(re.search(r"row (\d)", message)[1])
    # Functions that fail for every element fail on the first row; the others fail on the third.
    is_first = function in (none, a_list, state_and_more) or (says[0], operation) in FIRST or "Dataset" in says
    assert row == (0 if is_first else 2)
    assert isinstance(caught.value, RuntimeError)
    for phrase in says:
        assert phrase in message


# The result for the first element is invalid already.
FIRST = {("-1", "rejection_resample")}


def line_of(function):
    return f"{Path(__file__).name}:{inspect.getsourcelines(function)[1]}"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (no_bool, ["returned", "np.int64(2)", "row 2", "one bool"]),
        (none, ["returned", "None", "row 0", "one bool"]),
        (lambda x: np.array([True, True]), ["returned", "[ True,  True]", "row 0", "one bool"]),
    ],
)
def test_a_predicate_that_gives_no_bool(function, says):
    for ds in (NUMBERS.take_while(function), NUMBERS.filter(function)):
        with pytest.raises(errors.UserFunctionError) as caught:
            list(ds)
        for phrase in [*says, line_of(function)]:
            assert phrase in str(caught.value)


def test_take_while_says_that_it_is_take_while():
    with pytest.raises(errors.UserFunctionError, match=r"^take_while: "):
        list(NUMBERS.take_while(none))


@pytest.mark.parametrize(
    ("size", "says"),
    [
        (lambda key: 0, ["returned", "0", "1 or more"]),
        (lambda key: -3, ["returned", "-3", "1 or more"]),
        (lambda key: "two", ["returned", "'two'", "integer"]),
        (lambda key: None, ["returned", "None", "integer"]),
        (lambda key: 2.0, ["returned", "2.0", "integer"]),
        (lambda key: 1 // int(key), ["ZeroDivisionError"]),
    ],
)
def test_invalid_window_sizes(size, says):
    with pytest.raises(errors.UserFunctionError) as caught:
        list(group(window_size_func=size))
    for phrase in ["group_by_window: ", line_of(size), "the key 0", *says]:
        assert phrase in str(caught.value)


@pytest.mark.parametrize(
    ("initial", "function", "says"),
    [
        (ZERO, lambda s, x: s + 1 // int(x - 2), ["ZeroDivisionError", "element 2"]),
        (ZERO, lambda s, x: s if int(x) < 2 else (s, s), ["(value, value)", "it was value", "element 2"]),
        (ZERO, lambda s, x: s if int(x) < 2 else np.float32(s), ["float32", "it was int64", "element 2"]),
        (0, lambda s, x: s + float(x), ["float", "it was int", "element 0"]),
        (ZERO, none, ["None", "element 0"]),
        ({"a": ZERO}, lambda s, x: {"b": s["a"]}, ["{'b': value}", "{'a': value}", "element 0"]),
        (ZERO, lambda s: s, ["TypeError", "2 were given", "element 0"]),
    ],
)
def test_reduce(initial, function, says):
    with pytest.raises(errors.UserFunctionError) as caught:
        NUMBERS.reduce(initial, function)
    for phrase in ["reduce: ", line_of(function), *says]:
        assert phrase in str(caught.value)


def test_an_error_in_an_inner_pipeline_names_its_row_there():
    ds = NUMBERS.flat_map(lambda x: Dataset.range(5, 9).map(lambda y: y // (y - 7 if int(y) == 7 else 1)))
    with pytest.raises(errors.UserFunctionError, match=r"map: .*row 2 of range"):
        list(ds.map(lambda x: 1 // int(x != 7)))


# --- generators ---


def yields(*elements):
    def generate():
        yield from elements

    return generate


PAIR = {"a": INT, "b": TensorSpec((2,), "float32")}


@pytest.mark.parametrize(
    ("signature", "elements", "says"),
    [
        (INT, [1, 2.5], ["float64", "int64", "element 1"]),
        (INT, [1, "two"], ["StringDType", "int64", "element 1"]),
        (INT, [1, b"two"], ["object", "int64", "element 1"]),
        (INT, [1, None], ["None", "int64", "element 1"]),
        (INT, [1, object()], ["object", "int64", "element 1"]),
        (TensorSpec((), "int32"), [1, np.int64(2**31)], ["2147483648", "int32", "element 1"]),
        (TensorSpec((None,), "float64"), [[1, 2**53 + 1]], ["9007199254740993", "float64", "element 0"]),
        (TensorSpec((), "float32"), [np.float64(1e300)], ["1e+300", "float32", "element 0"]),
        (TensorSpec(None, "float32"), [np.int8([1]), [1.5], "a"], ["StringDType", "float32", "element 2"]),
        (INT, [1, [2]], ["(1,)", "shape=()", "element 1"]),
        (INT, [1, {"a": 2}], ["{'a': 2}", "shape=()", "element 1"]),
        (TensorSpec((), "int8"), [1, 300], ["300", "int8", "element 1"]),
        (TensorSpec((), "uint8"), [1, -1], ["-1", "uint8", "element 1"]),
        (TensorSpec((2,), "int64"), [[1, 2], [1, 2, 3]], ["(3,)", "(2,)", "element 1"]),
        (TensorSpec((None,), "int64"), [[1, 2], 3], ["shape=()", "(None,)", "element 1"]),
        (TensorSpec((None,), "int64"), [[1, [2]]], ["shape", "element 0"]),
        (TensorSpec((), bool), [1], ["int64", "bool", "element 0"]),
        ((INT, INT), [(1, 2), (1, 2, 3)], ["(value, value, value)", "(value, value)", "element 1"]),
        ((INT, INT), [(1, 2), 3], ["structure value", "(value, value)", "element 1"]),
        (PAIR, [{"a": 1, "b": [1.0, 2.0]}, {"a": 1}], ["{'a': value}", "{'a': value, 'b': value}", "element 1"]),
        (PAIR, [{"a": 1, "b": [1.0, 2.0, 3.0]}], ["['b']", "(3,)", "(2,)", "element 0"]),
        (PAIR, [{"a": 1.5, "b": [1.0, 2.0]}], ["['a']", "float64", "int64", "element 0"]),
    ],
)
def test_a_generator_that_yields_what_its_signature_does_not_allow(signature, elements, says):
    function = yields(*elements)
    given = iter(Dataset.from_generator(function, signature))
    for _ in elements[:-1]:
        next(given)  # The elements before the wrong one are given.
    with pytest.raises(errors.UserFunctionError) as caught:
        next(given)
    for phrase in ["from_generator: ", "generate (", line_of(function), "yielded", *says]:
        assert phrase in str(caught.value)


def raises_late():
    yield 1
    yield 1 // 0


def raises_at_once():
    raise OSError("no such sensor")


def returns_a_number():
    return 3


def needs_an_argument(n):
    yield n


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (raises_late, ["ZeroDivisionError", "element 1"]),
        (raises_at_once, ["OSError", "no such sensor"]),
        (returns_a_number, ["returned int 3", "iterable"]),
        (needs_an_argument, ["TypeError", "'n'"]),
    ],
)
def test_a_generator_that_raises(function, says):
    with pytest.raises(errors.UserFunctionError) as caught:
        list(Dataset.from_generator(function, INT))
    for phrase in ["from_generator: ", function.__name__, line_of(function), *says]:
        assert phrase in str(caught.value)


# --- elements that do not fit, which only the data tells ---


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: LENGTHS.padded_batch(2, padded_shapes=[2]), ["padded_batch", "row 3", "[3]", "[2]"]),
        (lambda: LENGTHS.padded_batch(4, padded_shapes=[2]), ["padded_batch", "row 3", "[3]", "[2]"]),
        (
            lambda: LENGTHS.map(lambda v: {"v": v}).padded_batch(2, padded_shapes={"v": [1]}),
            ["padded_batch", "['v']", "row 2", "[2]", "[1]"],
        ),
        (lambda: bucket(padded_shapes=[1]), ["bucket_by_sequence_length", "row 2", "[2]", "[1]"]),
        (lambda: bucket(sizes=[1, 2], no_padding=True), ["int64[2]", "int64[3]", "do not stack"]),
        (lambda: LENGTHS.batch(2), ["batch", "int64[0]", "int64[1]", "padded_batch"]),
        (
            lambda: NUMBERS.map(lambda x: np.zeros((1,) * int(x))).padded_batch(4),
            ["padded_batch", "0 axes", "1 axes"],
        ),
        (
            lambda: NUMBERS.map(lambda x: (np.zeros(int(x)), np.zeros(2))).unbatch(),
            ["unbatch", "row 0", "'[0]': 0", "'[1]': 2"],
        ),
        (lambda: NUMBERS.window(2).batch(2), ["batch", "a dataset"]),
    ],
)
def test_elements_that_do_not_stack(build, says):
    ds = build()
    with pytest.raises(errors.StackError) as caught:
        list(ds)
    assert isinstance(caught.value, ValueError)
    for phrase in says:
        assert phrase in str(caught.value)


def test_a_length_beyond_the_last_boundary():
    ds = LENGTHS.bucket_by_sequence_length(len, [1, 3], [1, 1, 1], pad_to_bucket_boundary=True)
    with pytest.raises(
        errors.UserFunctionError, match=r"bucket_by_sequence_length: len returned 3 on row 3 .*boundary, 3"
    ):
        list(ds)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"budget": 0}, ["budget is 0"]),
        ({"budget": 1.5}, ["budget is 1.5"]),
        ({"buffer_size": 0}, ["buffer_size is 0"]),
        ({"round_size": 0, "buffer_size": 4}, ["round_size is 0"]),
        ({"round_size": 2}, ["round_size is 2", "buffer_size"]),
        ({"ragged": 1}, ["ragged is 1"]),
        ({"ragged": True, "padding_values": 0}, ["padding_values", "ragged=True"]),
        ({"padding_values": 1.5}, ["padding_values", "1.5", "int64"]),
    ],
)
def test_invalid_arguments_of_batch_by_size(arguments, says):
    refused(lambda: LENGTHS.batch_by_size(**{"budget": 4, "length_fn": len} | arguments), ["batch_by_size", *says])


@pytest.mark.parametrize(
    ("length", "advice"), [(lambda x: len(x) - 1, "return the number of"), (lambda x: len(x) + 1, r"filter\(\.\.\.\)")]
)
def test_a_length_that_no_batch_has_room_for(length, advice):
    ds = LENGTHS.batch_by_size(3, length)
    message = rf"batch_by_size: .* returned (-1|4) on row \d .*the budget, 3; .*{advice}"
    with pytest.raises(errors.UserFunctionError, match=message):
        list(ds)


@pytest.mark.parametrize("choice", [2, -1])
def test_a_choice_of_no_dataset(choice):
    chosen = Dataset.choose_from_datasets([NUMBERS, NUMBERS], Dataset.from_tensor_slices([0, choice]))
    elements = iter(chosen)
    assert next(elements) == 0
    with pytest.raises(errors.ArgumentError, match=rf"choose_from_datasets: a choice is {choice}.*0 to 1"):
        next(elements)


def test_unique_of_datasets():
    with pytest.raises(errors.ArgumentError, match=r"unique: .*dataset"):
        list(NUMBERS.window(2).unique())


# --- endless where it has to end ---


@pytest.mark.parametrize(
    "endless",
    [
        NUMBERS.repeat(),
        Dataset.counter(),
        Dataset.random(seed=1),
        NUMBERS.repeat().batch(2),
        Dataset.zip(Dataset.counter(), NUMBERS.repeat()),
        Dataset.range(2).concatenate(NUMBERS.repeat()),
        NUMBERS.repeat().window(2),
        Dataset.sample_from_datasets([NUMBERS.repeat(), NUMBERS.repeat()], seed=1),
    ],
    ids=lambda ds: node_of(ds).name,
)
@pytest.mark.parametrize(
    ("use", "says"),
    [
        (len, "endless"),
        (lambda ds: ds.reduce(0, lambda s, x: s), "reduce.*endless.*take"),
        (lambda ds: ds.to_dask_array(), "endless.*take"),
        (lambda ds: ds.__dask_graph__(), "endless.*take"),
        (lambda ds: ds.shuffle(-2), "shuffle.*endless"),
    ],
    ids=["len", "reduce", "to_dask_array", "graph", "shuffle"],
)
def test_what_needs_an_end_refuses_an_endless_dataset(endless, use, says):
    with pytest.raises(errors.UnknownLengthError, match=says) as caught:
        use(endless)
    assert isinstance(caught.value, TypeError)


def test_an_unknown_number_of_elements():
    some = NUMBERS.filter(lambda x: x > 0)
    with pytest.raises(errors.UnknownLengthError, match=r"unknown.*cardinality\(\)"):
        len(some)
    with pytest.raises(errors.UnknownLengthError, match="to_dask_array"):
        some.batch(2).to_dask_array()


def test_an_endless_dataset_of_one_element_where_others_end():
    # Functions are tried on zeros, for which this one returns an endless dataset, so that this is known. The second
    # function returns an endless dataset only for a text that is not tried.
    known = NUMBERS.flat_map(lambda x: NUMBERS if int(x) else NUMBERS.repeat())
    num = len(list(NUMBERS))
    assert len(list(known.take(5 * num))) == 5 * num
    ds = Dataset.from_tensor_slices(["finite", "endless"]).flat_map(
        lambda x: NUMBERS.repeat() if x == "endless" else NUMBERS
    )
    with pytest.raises(errors.UserFunctionError, match=r"flat_map: .*endless.*take\(n\)"):
        list(ds)


# --- no error ---


def test_zip_of_unequal_lengths_ends_with_the_shortest():
    assert len(list(Dataset.zip(Dataset.range(2), Dataset.range(5), Dataset.counter()))) == 2
    assert list(Dataset.zip(Dataset.range(0), Dataset.counter())) == []


def test_numbers_of_other_kinds_are_numbers():
    assert len(NUMBERS.batch(np.int32(2))) == 2
    assert len(ROWS.rebatch(np.array([1, 3]), drop_remainder=np.bool_(True)).take(1).assert_cardinality(1)) == 1
    assert len(list(bucket(np.array([2]), (1, np.int64(1))))) == 4
    assert len(list(sample(np.array([0.5, 0.5])))) == 8
    assert len(Dataset.from_dask(da.ones(4, chunks=2))) == 4
