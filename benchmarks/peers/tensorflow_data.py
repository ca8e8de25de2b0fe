"""The cases in tf.data."""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import tensorflow as tf
from serving import BATCH, BOUNDARIES, NUM_KEYS, WINDOW, Data, serve


def cases_of(data: Data) -> dict:
    Dataset = tf.data.Dataset  # noqa: N806
    numbers = Dataset.range(len(data))
    rows = Dataset.from_tensor_slices(data.rows)
    ragged = tf.RaggedTensor.from_row_splits(data.values, data.row_splits)
    # `padded_batch` takes no ragged tensors; this map converts each row to a plain one.
    sequences = Dataset.from_tensor_slices(ragged).map(lambda sequence: sequence)
    sizes = [BATCH] * (len(BOUNDARIES) + 1)
    keyed = rows.enumerate()
    return {
        "map_range": lambda: numbers.map(lambda x: x * 2 + 1).batch(BATCH),
        "map_rows": lambda: rows.map(lambda x: x * 2 + 1).batch(BATCH),
        "filter_range": lambda: numbers.filter(lambda x: x % 3 != 0).batch(BATCH),
        "filter_rows": lambda: rows.filter(lambda x: x[0] > 0.5).batch(BATCH),
        "padded_batch": lambda: sequences.padded_batch(BATCH),
        "ragged_batch": lambda: Dataset.from_tensor_slices(ragged).ragged_batch(BATCH),
        "bucket_by_sequence_length": lambda: sequences.bucket_by_sequence_length(tf.size, BOUNDARIES, sizes),
        "window": lambda: rows.window(WINDOW).flat_map(lambda window: window.batch(WINDOW)),
        "group_by_window": lambda: keyed.group_by_window(
            lambda number, row: number % NUM_KEYS, lambda key, window: window.batch(BATCH), BATCH
        ),
        "global_shuffle": lambda: rows.shuffle(len(data), seed=0).batch(BATCH),
    }


serve(tf.__version__, cases_of)
