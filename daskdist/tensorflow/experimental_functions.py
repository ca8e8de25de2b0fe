"""The functions of ``tf.data.experimental``, for what are methods of `daskdist.Dataset`.

A function for a transformation returns a function for `Dataset.apply`:

>>> from daskdist.data import Dataset, experimental
>>> list(Dataset.range(4).apply(experimental.take_while(lambda x: x < 2)))
[np.int64(0), np.int64(1)]
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

from daskdist.core.cardinality import AUTOTUNE
from daskdist.tensorflow_dataset import TensorFlowDataset as Dataset

Transformation = Callable[[Dataset], Dataset]
_P = ParamSpec("_P")


# --- datasets ---

Counter = Dataset.counter
RandomDataset = Dataset.random
from_list = Dataset.from_list
load = Dataset.load
sample_from_datasets = Dataset.sample_from_datasets


def choose_from_datasets(
    datasets: Sequence[Dataset], choice_dataset: Dataset, stop_on_empty_dataset: bool = False
) -> Dataset:
    """Call `Dataset.choose_from_datasets`; here a dataset at its end is skipped unless said otherwise."""
    return Dataset.choose_from_datasets(datasets, choice_dataset, stop_on_empty_dataset)


# --- transformations ---


def _transformation(method: Callable[Concatenate[Any, _P], Any]) -> Callable[_P, Transformation]:
    # Return a function of the arguments of a method; it returns a function for `Dataset.apply`, which calls the method.
    @functools.wraps(method)
    def transformation(*args: _P.args, **kwargs: _P.kwargs) -> Transformation:
        return lambda ds: method(ds, *args, **kwargs)

    # Otherwise the dataset would be the first parameter.
    parameters = list(inspect.signature(method).parameters.values())[1:]
    transformation.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return transformation


assert_cardinality = _transformation(Dataset.assert_cardinality)
bucket_by_sequence_length = _transformation(Dataset.bucket_by_sequence_length)
dense_to_ragged_batch = _transformation(Dataset.ragged_batch)
enumerate_dataset = _transformation(Dataset.enumerate)
group_by_window = _transformation(Dataset.group_by_window)
ignore_errors = _transformation(Dataset.ignore_errors)
rejection_resample = _transformation(Dataset.rejection_resample)
scan = _transformation(Dataset.scan)
snapshot = _transformation(Dataset.snapshot)
take_while = _transformation(Dataset.take_while)
unbatch = _transformation(Dataset.unbatch)
unique = _transformation(Dataset.unique)


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


def shuffle_and_repeat(buffer_size: int, count: int | None = None, seed: int | None = None) -> Transformation:
    """Return a function for `Dataset.apply` that calls `Dataset.shuffle`, then `Dataset.repeat`."""
    return lambda ds: ds.shuffle(buffer_size, seed).repeat(count)


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
