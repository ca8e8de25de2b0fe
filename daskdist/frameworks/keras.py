"""Keras 3: datasets for ``model.fit``, ``evaluate`` and ``predict``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import optree

from daskdist.errors import ArgumentError, MissingPackageError
from daskdist.frameworks.convert import check_spec, checked_source, needs
from daskdist.frameworks.torch import to_torch
from daskdist.strategy.reduce.gather import concatenated
from daskdist.strategy.values.async_value import AsyncValue
from daskdist.strategy.values.device_arrays import host_array
from daskdist.strategy.values.per_replica import PerReplica
from daskdist.strategy.values.refs import results_of


def keras_data(dataset: Any) -> Any:
    """Make a dataset usable as ``x`` in Keras 3: ``model.fit(daskdist.keras_data(dataset), epochs=2)``.

    Parameters
    ----------
    dataset
        A `Dataset` of batches, or a `DistributedDataset`, whose replicas' parts are joined in order, so that Keras gets
        whole batches. An element is ``(x, y)``, ``(x, y, sample_weight)`` or ``(x,)``, or anything else, which is x;
        each of these may be a nest, as the model expects.

    Returns
    -------
    keras.src.trainers.data_adapters.data_adapter.DataAdapter
        For ``fit``, ``evaluate``, ``predict`` and ``validation_data``, on the JAX and PyTorch backends. Each epoch is
        a new pass over the dataset, reshuffled if the dataset shuffles.

    Raises
    ------
    ArgumentError
        An element is a tuple of more than three, or a leaf is not an array of numbers or has no rows. When used: the
        backend is TensorFlow.
    MissingPackageError
        Keras is not installed (``pip install 'daskdist[keras]'``) or cannot be imported, for example because its
        backend is missing.

    Notes
    -----
    Keras knows the number of steps if that of the dataset is known. Otherwise it counts them in the first epoch and
    warns at its end; state the number with `Dataset.assert_cardinality`. An endless dataset needs ``steps_per_epoch``,
    and each epoch then continues where the previous one ended, as for any dataset with ``steps_per_epoch``. Keras
    ignores ``shuffle`` and ``class_weight`` here: shuffle the dataset, and give weights as the third part of an
    element. To build a model, Keras takes one batch of a separate pass.
    """
    data_adapter = _data_adapter()
    element_spec = checked_source("keras_data", dataset).element_spec
    if isinstance(element_spec, tuple) and not 1 <= len(element_spec) <= 3:
        raise ArgumentError(
            f"keras_data: an element is a tuple of {len(element_spec)}; Keras takes (x, y), (x, y, sample_weight) or "
            "(x,): map it to one of these, with several inputs as a tuple or dict in the place of x"
        )
    check_spec("keras_data", element_spec, needs_rows=True)
    return _class_from(data_adapter)(dataset)


def joined(step: Any) -> Any:
    """Join the steps of all replicas in one nest of NumPy arrays, one replica's part after the other.

    >>> import numpy as np
    >>> joined({"x": PerReplica([np.array([1, 2]), np.array([3])])})
    {'x': array([1, 2, 3])}
    """
    leaves, treespec = optree.tree_flatten(step, none_is_leaf=True)
    groups = [leaf.values if isinstance(leaf, PerReplica) else (leaf,) for leaf in leaves]
    values = [value for group in groups for value in group]
    arrays = iter(results_of(values) if any(isinstance(value, AsyncValue) for value in values) else values)
    parts = [[host_array(next(arrays)) for _ in group] for group in groups]
    return optree.tree_unflatten(treespec, [part[0] if len(part) == 1 else concatenated(part, 0) for part in parts])


def _data_adapter() -> Any:
    try:
        # Keras has no public name for this class, but accepts its instances as data.
        from keras.src.trainers.data_adapters.data_adapter import DataAdapter
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "keras":
            raise needs("keras_data", "Keras 3.7 or later", "keras", error) from None
        raise MissingPackageError(
            f"keras_data: Keras cannot be imported ({error}); install its backend, and name that in the environment "
            "variable KERAS_BACKEND, 'jax' or 'torch', before Keras is imported"
        ) from None
    return DataAdapter


@functools.cache
def _class_from(data_adapter: Any) -> Any:
    import keras

    class KerasData(data_adapter):  # type: ignore[misc]
        """The elements of a dataset, for Keras."""

        # Keras also asks for iterators that it does not use: nothing is read before the first element is taken.

        def __init__(self, dataset: Any) -> None:
            self._dataset = dataset

        def get_numpy_iterator(self) -> Iterator[Any]:
            """Iterate over batches of NumPy arrays."""
            for element in self._dataset:
                batch = joined(element)
                yield batch if isinstance(batch, tuple) else (batch,)

        def get_jax_iterator(self) -> Iterator[Any]:
            """Iterate over batches of arrays for JAX."""
            # JAX copies NumPy arrays to its device when it computes with them.
            return self.get_numpy_iterator()

        def get_torch_dataloader(self) -> Iterator[Any]:
            """Return an iterable of batches of tensors."""
            # Keras moves tensors to its device.
            for batch in self.get_numpy_iterator():
                yield optree.tree_map(keras.ops.convert_to_tensor, to_torch(batch))

        def get_tf_dataset(self) -> Any:
            """Raise, as there is no conversion to a dataset of TensorFlow."""
            raise ArgumentError(
                "keras_data: it feeds Keras on JAX and PyTorch, and the backend is TensorFlow; set the environment "
                "variable KERAS_BACKEND to 'jax' or 'torch' before Keras is imported"
            )

        @property
        def num_batches(self) -> int | None:
            """The number of batches; None where it is not known."""
            number = int(self._dataset.cardinality())
            return None if number < 0 else number

        @property
        def batch_size(self) -> int | None:
            """The size of a batch; None, as batches may differ."""
            return None

        @property
        def has_partial_batch(self) -> bool | None:
            """True if the last batch may be smaller; it is not known here."""
            return None

        @property
        def partial_batch_size(self) -> int | None:
            """The size of the last batch where it is smaller."""
            return None

        def __repr__(self) -> str:
            return f"keras_data({self._dataset!r})"

    return KerasData
