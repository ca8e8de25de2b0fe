"""Files dealt by their sizes: the largest first, each to the worker that has the least so far."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, Any]


def largest_first(sizes: Numbers, num_workers: int) -> Numbers:
    """Assign each unit to a worker, the largest first; int64, shape ``(num_units,)``.

    Parameters
    ----------
    sizes
        Bytes of each unit, shape ``(num_units,)``.
    num_workers
        Workers to deal them to.

    Notes
    -----
    The rule of Graham (Bounds on multiprocessing timing anomalies, 1969). No worker has more than the mean and the
    largest unit; none more than 4/3 of the least that is possible. Equal ones go to the worker of the lower number.

    >>> largest_first(np.array([5, 3, 3, 1, 2]), 2)
    array([0, 1, 1, 1, 0])
    """
    # An empty file counts a little, so that not all of them go to one worker.
    weights = np.maximum(sizes, 1)
    order = np.argsort(-weights, kind="stable")
    loads = [(0, worker) for worker in range(num_workers)]
    owners = []
    for weight in weights[order].tolist():
        load, worker = loads[0]
        heapq.heapreplace(loads, (load + weight, worker))
        owners.append(worker)
    found = np.empty(len(sizes), np.int64)
    found[order] = owners
    return found


def excess(sizes: Numbers, owners: Numbers, num_workers: int) -> float:
    """Return the most bytes a worker has, as a multiple of the mean.

    >>> excess(np.array([5, 3, 3, 1, 2]), np.array([0, 1, 1, 1, 0]), 2)
    1.0
    """
    loads = np.bincount(owners, weights=sizes, minlength=num_workers)
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean else 1.0
