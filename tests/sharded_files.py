"""Helpers for tests of sharding: readers of files, and rows of elements."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np

from daskdist import Dataset, Options, read_parquet

ROWS = [5, 3, 6, 2, 4]


def first(node, number):
    return list(itertools.islice(Dataset(node), number))


def read(path):
    return read_parquet(str(path), "id")


def policy(name, **options):
    return Options(auto_shard_policy=name, **options)


def flat(element):
    """Return the numbers in an element of any structure."""
    if isinstance(element, Dataset):
        return [number for item in element for number in flat(item)]
    if isinstance(element, tuple):
        return (
            [tuple(map(int, element))]
            if all(np.ndim(value) == 0 for value in element)
            else [*zip(*element, strict=True)]
        )
    return [int(part) for part in np.ravel(element)]


def rows_of(elements):
    return Counter(number for element in elements for number in flat(element))
