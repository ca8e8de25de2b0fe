"""Distribution of files by size: the largest first, each to the worker with the fewest bytes so far."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, Any]


def largest_first(sizes: Numbers, num_workers: int) -> Numbers:
    """Return the worker of each unit, assigned from the largest down; int64, shape ``(num_units,)``.

    Parameters
    ----------
    sizes
        The bytes of each unit, shape ``(num_units,)``.
    num_workers
        The number of workers.

    Notes
    -----
    Graham's rule (Bounds on multiprocessing timing anomalies, 1969). No worker has more than the mean plus the largest
    unit, nor more than 4/3 of the optimum. Ties go to the worker of the lower number.

    >>> largest_first(np.array([5, 3, 3, 1, 2]), 2)
    array([0, 1, 1, 1, 0])
    """
    # Count empty files as one byte, so that they do not all go to one worker.
    weights = np.maximum(sizes, 1)
    order = np.argsort(-weights, kind="stable")
    loads = [(0, worker) for worker in range(num_workers)]
    owners = []
    for weight in weights[order].tolist():
        load, worker = loads[0]
        heapq.heapreplace(loads, (load + weight, worker))
        owners.append(worker)
    workers = np.empty(len(sizes), np.int64)
    workers[order] = owners
    return workers


def excess(sizes: Numbers, owners: Numbers, num_workers: int) -> float:
    """Return the bytes of the largest share as a multiple of the mean.

    >>> excess(np.array([5, 3, 3, 1, 2]), np.array([0, 1, 1, 1, 0]), 2)
    1.0
    """
    loads = np.bincount(owners, weights=sizes, minlength=num_workers)
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean else 1.0
