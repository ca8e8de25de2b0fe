"""Steps of two Ray actors, a sum of half a batch on each: prints steps a second, as JSON by the name of the case."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import deque

import numpy as np
import ray
from ray.dag import InputNode, MultiOutputNode

_AHEAD = 32


@ray.remote
class Replica:
    """One of the two workers, with its own rows."""

    def __init__(self) -> None:
        self._rows = np.random.default_rng(0).random((2**16, 16), np.float32)

    def total(self, number: int) -> float:
        """Sum half a batch of 128 rows."""
        start = number * 64 % len(self._rows)
        return float(self._rows[start : start + 64].sum())


def awaited(replicas: list, num_steps: int) -> None:
    for number in range(num_steps):
        sum(ray.get([replica.total.remote(number) for replica in replicas]))


def pipelined(replicas: list, num_steps: int) -> None:
    under_way = deque()
    for number in range(num_steps):
        under_way.append([replica.total.remote(number) for replica in replicas])
        if len(under_way) > _AHEAD:
            sum(ray.get(under_way.popleft()))
    for each in under_way:
        sum(ray.get(each))


def compiled(graph: object, num_steps: int) -> None:
    for number in range(num_steps):
        sum(ray.get(graph.execute(number)))


def main(num_steps: int) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    replicas = [Replica.remote() for _ in range(2)]
    with InputNode() as number:
        graph = MultiOutputNode([replica.total.bind(number) for replica in replicas])
    ways = {"Ray actors, awaited": awaited, "Ray actors, ahead": pipelined}
    rates = {}
    for name, way in ways.items():
        rates[name] = rate(lambda num_steps, way=way: way(replicas, num_steps), num_steps)
    graph = graph.experimental_compile()
    rates["Ray compiled graphs, awaited"] = rate(lambda num_steps: compiled(graph, num_steps), num_steps)
    graph.teardown()
    ray.shutdown()
    print(json.dumps(rates))


def rate(way: object, num_steps: int) -> float:
    way(num_steps // 10 + 1)
    start = time.perf_counter()
    way(num_steps)
    return num_steps / (time.perf_counter() - start)


main(int(sys.argv[1]))
