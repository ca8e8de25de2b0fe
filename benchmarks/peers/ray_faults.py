"""Passes of Ray Data and Ray Train in which a worker is killed: prints the rows that came, as JSON by the case's name.

The arguments are the number of rows, of rows of a batch, and of the step before which a worker is killed.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_TRAIN_V2_ENABLED"] = "1"

import numpy as np
import ray
import ray.train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from serving import COSTLY_PRODUCTS, COSTLY_SIZE

# A pass that takes longer has hung.
_HANGS_AFTER_S = 40.0


class Expensive:
    """A function of batches that takes some milliseconds a row, and notes its process."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def __call__(self, batch: dict) -> dict:
        Path(self._directory, f"pid-{os.getpid()}").touch()
        matrix = np.full((COSTLY_SIZE, COSTLY_SIZE), 1 / COSTLY_SIZE, np.float32)
        for _ in batch["id"]:
            for _ in range(COSTLY_PRODUCTS):
                matrix = matrix @ matrix
        return {"id": batch["id"] + np.int64(matrix[0, 0] * 0.5)}


def dataset_of(num_rows: int, batch_rows: int, directory: str) -> ray.data.Dataset:
    rows = ray.data.range(num_rows, override_num_blocks=num_rows // batch_rows)
    return rows.map_batches(Expensive(directory).__call__, batch_size=batch_rows)


def steps_of(batches, batch_rows: int, directory: str, name: str, kill_at: int | None) -> None:
    """Record the rows of each step, and die before one of them, once."""
    killed = Path(directory, "killed")
    with Path(directory, f"rows-{name}-{time.time_ns()}").open("w") as notes:
        for step, batch in enumerate(batches.iter_batches(batch_size=batch_rows)):
            if step == kill_at and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            print(json.dumps([time.time(), batch["id"].tolist()]), file=notes, flush=True)


@ray.remote(num_cpus=0)
class Consumer:
    def iterate(self, *args) -> None:
        steps_of(*args)


def outcome_of(directory: str, error: str | None) -> dict:
    """Return the rows of all steps, and the longest time between two of them."""
    steps = [json.loads(line) for path in Path(directory).glob("rows-*") for line in path.read_text().splitlines()]
    times = sorted(at for at, _ in steps)
    longest_gap_s = max((after - before for before, after in itertools.pairwise(times)), default=0.0)
    visited = list(itertools.chain.from_iterable(rows for _, rows in steps))
    return {"visited": visited, "longest_gap_s": longest_gap_s, "error": error, "num_times": 1}


def a_task_killed(num_rows: int, batch_rows: int, kill_at: int, directory: str) -> str | None:
    """Iterate here while a process that makes the rows is killed."""
    batches = dataset_of(num_rows, batch_rows, directory).iter_batches(batch_size=batch_rows)
    with Path(directory, "rows-0").open("w") as notes:
        for step, batch in enumerate(batches):
            if step == kill_at:
                # The last one to begin a block is making it.
                latest = max(Path(directory).glob("pid-*"), key=lambda path: path.stat().st_mtime)
                os.kill(int(latest.name.split("-")[1]), signal.SIGKILL)
            print(json.dumps([time.time(), batch["id"].tolist()]), file=notes, flush=True)
    return None


def a_consumer_killed(num_rows: int, batch_rows: int, kill_at: int, directory: str) -> str | None:
    """Let two actors iterate over parts of a dataset, one of which is killed."""
    parts = dataset_of(num_rows, batch_rows, directory).streaming_split(2)
    consumers = [Consumer.remote() for _ in parts]
    steps = [
        consumer.iterate.remote(part, batch_rows, directory, str(number), (kill_at // 2, None)[number])
        for number, (consumer, part) in enumerate(zip(consumers, parts, strict=True))
    ]
    done, left = ray.wait(steps, num_returns=2, timeout=_HANGS_AFTER_S)
    errors = []
    for step in done:
        try:
            ray.get(step)
        except Exception as error:
            errors.append(f"{type(error).__name__}")
    return "; ".join([*errors, *["a consumer hangs" for _ in left]]) or None


def a_trainer_killed(num_rows: int, batch_rows: int, kill_at: int, directory: str) -> str | None:
    """Let two workers of a trainer iterate, one of which is killed; the trainer starts them again."""

    def train() -> None:
        rank = ray.train.get_context().get_world_rank()
        part = ray.train.get_dataset_shard("train")
        steps_of(part, batch_rows, directory, str(rank), (kill_at // 2, None)[rank])

    trainer = DataParallelTrainer(
        train,
        datasets={"train": dataset_of(num_rows, batch_rows, directory)},
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.01}),
        run_config=ray.train.RunConfig(storage_path=directory, failure_config=ray.train.FailureConfig(max_failures=3)),
    )
    trainer.fit()
    return None


def main(num_rows: int, batch_rows: int, kill_at: int) -> None:
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    cases = {
        "Ray Data, iter_batches, a task's process killed": a_task_killed,
        "Ray Data, streaming_split, a consumer killed": a_consumer_killed,
        "Ray Train, a worker killed": a_trainer_killed,
    }
    outcomes = {}
    for name, case in cases.items():
        with tempfile.TemporaryDirectory() as directory:
            try:
                error = case(num_rows, batch_rows, kill_at, directory)
            except Exception as raised:
                error = f"{type(raised).__name__}: {str(raised)[:100]}"
            outcomes[name] = outcome_of(directory, error)
    print(json.dumps(outcomes), flush=True)
    os._exit(0)


main(*map(int, sys.argv[1:]))
