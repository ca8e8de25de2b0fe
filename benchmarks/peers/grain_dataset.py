"""The cases in Grain, read in this thread: more threads would contend for the interpreter's lock."""

from __future__ import annotations

import grain
import numpy as np
from serving import BATCH, Data, serve


class Sequences:
    """A random-access source."""

    def __init__(self, data: Data) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int) -> np.ndarray:
        return self.data.sequence(number)


def padded(sequences):
    out = np.zeros((len(sequences), max(map(len, sequences))), np.int32)
    for row, sequence in zip(out, sequences, strict=True):
        row[: len(sequence)] = sequence
    return out


def cases_of(data: Data) -> dict:
    here = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    numbers = grain.MapDataset.range(len(data))
    rows = grain.MapDataset.source(data.rows)
    sequences = grain.MapDataset.source(Sequences(data))
    return {
        "map_range": lambda: numbers.map(lambda x: x * 2 + 1).batch(BATCH).to_iter_dataset(here),
        "map_rows": lambda: rows.map(lambda x: x * 2 + 1).batch(BATCH).to_iter_dataset(here),
        "filter_range": lambda: numbers.filter(lambda x: x % 3 != 0).to_iter_dataset(here).batch(BATCH),
        "filter_rows": lambda: rows.filter(lambda x: x[0] > 0.5).to_iter_dataset(here).batch(BATCH),
        "padded_batch": lambda: sequences.batch(BATCH, batch_fn=padded).to_iter_dataset(here),
        "global_shuffle": lambda: rows.shuffle(seed=0).batch(BATCH).to_iter_dataset(here),
    }


serve(grain.__version__ if hasattr(grain, "__version__") else "", cases_of)
