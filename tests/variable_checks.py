"""Helpers for tests of variables on two replicas."""

from __future__ import annotations

import numpy as np

from daskdist import PerReplica, Variable


def variable(strategy, *args, **options):
    with strategy.scope():
        return Variable(*args, **options)


def numbers(strategy):
    return PerReplica([np.float64(number) for number in range(strategy.num_replicas_in_sync)])


def copies(strategy, made):
    return [np.asarray(value).tolist() for value in strategy.local_results(made)]
