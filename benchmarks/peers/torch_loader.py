"""The cases in PyTorch's DataLoader, without worker processes: they would cost more than such elements do."""

from __future__ import annotations

import torch
from serving import BATCH, Data, serve
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Mapped(Dataset):
    def __init__(self, rows, function) -> None:
        self.rows = rows
        self.function = function

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int):
        return self.function(self.rows[number])


class Filtered(IterableDataset):
    def __init__(self, rows, predicate) -> None:
        self.rows = rows
        self.predicate = predicate

    def __iter__(self):
        return (row for row in self.rows if self.predicate(row))


class Sequences(Dataset):
    def __init__(self, data: Data) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, number: int):
        return torch.from_numpy(self.data.sequence(number))


def cases_of(data: Data) -> dict:
    # Rows are NumPy arrays, since functions of one row are faster with these than with tensors.
    rows = data.rows
    numbers = range(len(data))

    def padded(sequences):
        return pad_sequence(sequences, batch_first=True)

    return {
        "map_range": lambda: DataLoader(Mapped(numbers, lambda x: x * 2 + 1), BATCH),
        "map_rows": lambda: DataLoader(Mapped(rows, lambda x: x * 2 + 1), BATCH),
        "filter_range": lambda: DataLoader(Filtered(numbers, lambda x: x % 3 != 0), BATCH),
        "filter_rows": lambda: DataLoader(Filtered(rows, lambda x: x[0] > 0.5), BATCH),
        "padded_batch": lambda: DataLoader(Sequences(data), BATCH, collate_fn=padded),
        "global_shuffle": lambda: DataLoader(Mapped(rows, lambda x: x), BATCH, shuffle=True),
    }


serve(torch.__version__, cases_of)
