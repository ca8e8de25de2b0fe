"""The functions of ``tf.data.experimental``, for what are methods of `daskdist.Dataset`.

A function for a transformation returns a function for `Dataset.apply`:

>>> from daskdist.data import Dataset, experimental
>>> list(Dataset.range(4).apply(experimental.take_while(lambda x: x < 2)))
[np.int64(0), np.int64(1)]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from daskdist.core.cardinality import AUTOTUNE
from daskdist.tensorflow.dataset import TensorFlowDataset as Dataset

Transformation = Callable[[Dataset], Dataset]


# --- datasets ---


def Counter(start: int = 0, step: int = 1, dtype: Any = np.int64) -> Dataset:  # noqa: N802 - TensorFlow's name
    """Call `Dataset.counter`."""
    return Dataset.counter(start, step, dtype)


def RandomDataset(seed: int | None = None, rerandomize_each_iteration: bool | None = None) -> Dataset:  # noqa: N802
    """Call `Dataset.random`."""
    return Dataset.random(seed, rerandomize_each_iteration)


def choose_from_datasets(
    datasets: Sequence[Dataset], choice_dataset: Dataset, stop_on_empty_dataset: bool = False
) -> Dataset:
    """Call `Dataset.choose_from_datasets`; here a dataset at its end is skipped unless said otherwise."""
    return Dataset.choose_from_datasets(datasets, choice_dataset, stop_on_empty_dataset)


def sample_from_datasets(
    datasets: Sequence[Dataset],
    weights: Sequence[float] | None = None,
    seed: int | None = None,
    stop_on_empty_dataset: bool = False,
) -> Dataset:
    """Call `Dataset.sample_from_datasets`."""
    return Dataset.sample_from_datasets(datasets, weights, seed, stop_on_empty_dataset)


def from_list(elements: Sequence[Any], name: str | None = None) -> Dataset:
    """Create a dataset of the items of a list: nests of one structure, whose leaves stack.

    >>> list(from_list([(1, "a"), (2, "b")]))
    [(np.int32(1), 'a'), (np.int32(2), 'b')]
    """
    return Dataset.from_list(elements, name)


def load(path: str, element_spec: Any = None) -> Dataset:
    """Call `Dataset.load`."""
    return Dataset.load(path, element_spec)


# --- transformations ---


def assert_cardinality(expected_cardinality: int) -> Transformation:
    """Return a function for `Dataset.apply` that calls `Dataset.assert_cardinality`."""
    return lambda ds: ds.assert_cardinality(expected_cardinality)


def bucket_by_sequence_length(
    element_length_func: Callable[..., Any],
    bucket_boundaries: Sequence[int],
    bucket_batch_sizes: Sequence[int],
    padded_shapes: Any = None,
    padding_values: Any = None,
    pad_to_bucket_boundary: bool = False,
    no_padding: bool = False,
    drop_remainder: bool = False,
) -> Transformation:
    """Return a function for `Dataset.apply` that calls `Dataset.bucket_by_sequence_length`."""
    return lambda ds: ds.bucket_by_sequence_length(
        element_length_func,
        bucket_boundaries,
        bucket_batch_sizes,
        padded_shapes,
        padding_values,
        pad_to_bucket_boundary,
        no_padding,
        drop_remainder,
    )


def dense_to_ragged_batch(
    batch_size: int, drop_remainder: bool = False, row_splits_dtype: Any = np.int64
) -> Transformation:
    """Return a function for `Dataset.apply` that calls `Dataset.ragged_batch`."""
    return lambda ds: ds.ragged_batch(batch_size, drop_remainder, row_splits_dtype)


def enumerate_dataset(start: int = 0) -> Transformation:
    """Return a function for `Dataset.apply` that calls `Dataset.enumerate`."""
    return lambda ds: ds.enumerate(start)


def group_by_window(
    key_func: Callable[..., Any],
    reduce_func: Callable[[Any, Dataset], Dataset],
    window_size: int | None = None,
    window_size_func: Callable[[Any], int] | None = None,
) -> Transformation:
    """Return a function for `Dataset.apply` that calls `Dataset.group_by_window`."""
    return lambda ds: ds.group_by_window(key_func, reduce_func, window_size, window_size_func)


def ignore_errors(log_warning: bool = True) -> Transformation:
    """Return a function for `Dataset.apply` that calls `Dataset.ignore_errors`."""
    return lambda ds: ds.ignore_errors(log_warning)


def map_and_batch(
    map_func: Callable[..., Any],
    batch_size: int,
    num_parallel_batches: int | None = None,
    drop_remainder: bool = False,
    num_parallel_calls: int | None = None,
) -> Transformation:
    """Return a function for `Dataset.apply` that calls `Dataset.map`, then `Dataset.batch`."""
    calls = num_parallel_calls if num_parallel_batches is None else num_parallel_batches * batch_size
    return lambda ds: ds.map(map_func, calls).batch(batch_size, drop_remainder)


def parallel_interleave(
    map_func: Callable[..., Dataset], cycle_length: int, block_length: int = 1, sloppy: bool | None = False
) -> Transformation:
    """Return a function for `Dataset.apply` that calls `Dataset.interleave`, read ahead by threads."""
    return lambda ds: ds.interleave(map_func, cycle_length, block_length, AUTOTUNE, not sloppy)


def rejection_resample(
    class_func: Callable[..., Any],
    target_dist: Sequence[float],
    initial_dist: Sequence[float] | None = None,
    seed: int | None = None,
) -> Transformation:
    """Return a function for `Dataset.apply` that calls `Dataset.rejection_resample`."""
    return lambda ds: ds.rejection_resample(class_func, target_dist, initial_dist, seed)


def scan(initial_state: Any, scan_func: Callable[[Any, Any], tuple[Any, Any]]) -> Transformation:
    """Return a function for `Dataset.apply` that calls `Dataset.scan`."""
    return lambda ds: ds.scan(initial_state, scan_func)


def shuffle_and_repeat(buffer_size: int, count: int | None = None, seed: int | None = None) -> Transformation:
    """Return a function for `Dataset.apply` that calls `Dataset.shuffle`, then `Dataset.repeat`."""
    return lambda ds: ds.shuffle(buffer_size, seed).repeat(count)


def snapshot(path: str, compression: str | None = None) -> Transformation:
    """Return a function for `Dataset.apply` that calls `Dataset.snapshot`."""
    return lambda ds: ds.snapshot(path, compression)


def take_while(predicate: Callable[..., Any]) -> Transformation:
    """Return a function for `Dataset.apply` that calls `Dataset.take_while`."""
    return lambda ds: ds.take_while(predicate)


def unbatch() -> Transformation:
    """Return a function for `Dataset.apply` that calls `Dataset.unbatch`."""
    return lambda ds: ds.unbatch()


def unique() -> Transformation:
    """Return a function for `Dataset.apply` that calls `Dataset.unique`."""
    return lambda ds: ds.unique()


# --- properties of datasets ---


def cardinality(dataset: Dataset) -> int:
    """Call `Dataset.cardinality`."""
    return dataset.cardinality()


def get_single_element(dataset: Dataset) -> Any:
    """Call `Dataset.get_single_element`."""
    return dataset.get_single_element()


def get_structure(dataset: Dataset) -> Any:
    """Return `Dataset.element_spec`."""
    return dataset.element_spec


def save(dataset: Dataset, path: str, compression: str | None = None) -> None:
    """Call `Dataset.save`."""
    dataset.save(path, compression)
