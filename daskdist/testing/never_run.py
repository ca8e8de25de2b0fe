"""A check that building a pipeline runs none of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import dask.config

from daskdist.errors import DaskdistError
from daskdist.execute.callers.choose import NeverRun, using


@contextlib.contextmanager
def never_run() -> Iterator[None]:
    """Make every pipeline that is run inside a ``with`` block raise `DaskdistError`.

    Notes
    -----
    Covers pipelines that run in this process, and whatever Dask computes by ``dask.compute`` and the methods
    of its collections. Calls that a strategy on a cluster makes are not stopped.

    >>> from daskdist import Dataset
    >>> with never_run():
    ...     print(Dataset.range(3).map(lambda x: x / 2).element_spec)
    ...     next(iter(Dataset.range(3)))
    Traceback (most recent call last):
    ...
    daskdist.errors.DaskdistError: a call was made where none may be
    """
    with using(NeverRun), dask.config.set(scheduler=_refuse):
        yield


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise DaskdistError("Dask was to compute something where nothing may be computed")
