"""The cases in Ray Data, on a Ray of this machine that has been started before."""

from __future__ import annotations

import logging
import os

import numpy as np
import pyarrow as pa
import ray
from serving import BATCH, Data, serve


def padded(batches):
    for batch in batches:
        sequences = batch["x"]
        out = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
        for row, sequence in zip(out, sequences, strict=True):
            row[: len(sequence)] = sequence
        yield out


def cases_of(data: Data) -> dict:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(include_dashboard=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    numbers = ray.data.range(len(data))
    rows = ray.data.from_numpy(data.rows)
    lists = pa.ListArray.from_arrays(pa.array(data.row_splits.astype(np.int32)), pa.array(data.values))
    sequences = ray.data.from_arrow(pa.table({"x": lists}))

    def batches(dataset):
        return dataset.iter_batches(batch_size=BATCH, batch_format="numpy")

    return {
        "map_range": lambda: batches(numbers.map(lambda row: {"id": row["id"] * 2 + 1})),
        "map_rows": lambda: batches(rows.map(lambda row: {"data": row["data"] * 2 + 1})),
        "filter_range": lambda: batches(numbers.filter(lambda row: row["id"] % 3 != 0)),
        "filter_rows": lambda: batches(rows.filter(lambda row: row["data"][0] > 0.5)),
        "padded_batch": lambda: padded(batches(sequences)),
        "global_shuffle": lambda: batches(rows.random_shuffle(seed=0)),
    }


serve(ray.__version__, cases_of)
