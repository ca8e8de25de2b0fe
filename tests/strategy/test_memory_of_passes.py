"""Objects that remain after many passes over a dataset."""

from __future__ import annotations

import gc
from collections import Counter, deque

import numpy as np
import pytest
from conftest import eventually
from distributed import Future

from daskdist import Dataset
from daskdist.execute.task_times import task_times
from daskdist.strategy.calls.worker.worker_streams import steps_of
from daskdist.strategy.replica.contract import internals_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

NUM_PASSES = 20
# Workers keep the first two for the last 1024 input pipelines, of which another worker may still ask for the steps; the
# program keeps the times of an iterator until its next report to the dashboard.
KEPT_FOR_OTHERS = {"_PipelineSteps", "KnownSteps", "StepTimes"}
# Collections that grow at first, up to a limit.
BOUNDED = {
    ("Account", "_changes"),
    # Until the next report to the dashboard.
    ("ProgramReport", "_iterators"),
    ("ReplicaFigures", "history"),
    ("StepCounts", "_pipelines"),
    ("TaskTimes", "_seconds"),
}


def fill_times(dask_worker):
    """Give a worker as many callers as it keeps the times of."""
    for number in range(64):
        task_times(dask_worker.address, str(number))


def num_objects():
    """Return the numbers of the package's objects and of futures, by type, and of the values that those keep."""
    gc.collect()
    counts = Counter()
    for each in gc.get_objects():
        kind = type(each)
        if is_counted(kind):
            counts[str(kind)] += 1
            # Plain values that one of the package's objects keeps.
            for name, value in getattr(each, "__dict__", {}).items():
                if isinstance(value, (list, dict, set, deque)) and (kind.__name__, name) not in BOUNDED:
                    counts[f"{kind}.{name}"] += len(value)
    return counts


def num_kept(token, dask_worker):
    """Return the number of messages of a worker to the program that are not acknowledged yet."""
    return len(steps_of(dask_worker, token)._link.state.kept)


def is_counted(kind):
    is_ours = str(kind.__module__).startswith("daskdist.") and kind.__name__ not in KEPT_FOR_OTHERS
    return is_ours or kind is Future


def loop(batches):
    return sum(int(rows.sum()) for rows in batches)


@pytest.mark.parametrize("in_loops", [False, True])
def test_many_passes_leave_no_objects(client, on_cluster, in_loops):
    dataset = on_cluster.distribute_dataset(Dataset.range(16).map(abs).shuffle(12, seed=1).batch(8))

    def tasks():
        return set(client.run_on_scheduler(lambda dask_scheduler: list(map(str, dask_scheduler.tasks))))

    # Those of other tests.
    known = tasks()

    def no_tasks():
        gc.collect()
        return tasks() <= known

    def make_passes():
        for _ in range(NUM_PASSES):
            if in_loops:
                on_cluster.run(loop, args=(dataset,))
                continue
            for batch in dataset:
                result = on_cluster.run(np.max, args=(batch,))
            on_cluster.reduce("SUM", result, axis=None)
        batch = result = None
        # A step that is not over keeps its data.
        on_cluster.local_results(on_cluster.run(int))
        eventually(no_tasks)
        # Workers are told with later calls of what was dropped.
        for _ in range(3):
            on_cluster.local_results(on_cluster.run(int))
        # Messages are kept until they are acknowledged.
        streams, token = internals_of(on_cluster).backend.streams, internals_of(on_cluster).token
        eventually(lambda: not any(stream.link.state.kept for stream in streams._streams.values()))
        eventually(lambda: not any(client.run(num_kept, token).values()))
        return {"program": num_objects(), **client.run(num_objects)}

    client.run(fill_times)
    before, after = make_passes(), make_passes()
    for process, counts in after.items():
        grown = counts - before[process]
        assert {name: more for name, more in grown.items() if more > NUM_PASSES // 4} == {}, process
