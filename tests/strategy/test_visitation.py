"""Passes with faults, and reports about the rows that complete steps have visited."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import eventually, mirrored, new_cluster, running_workers
from distributed import Client

import daskdist
from daskdist import Dataset, Options, TensorSpec, errors
from daskdist.testing import Fault, verify_visitation
from daskdist.testing.visitation import row_keys

NUMBER = TensorSpec((), "int64")
LOOPS = ["plain", "function", "replicas"]


@pytest.fixture(scope="module")
def own_client() -> Iterator[Client]:
    """Return a client of two workers that may be killed: each is started again."""
    with new_cluster() as client:
        yield client


@pytest.mark.parametrize("loop", ["plain", "function"])
def test_rows_that_a_pass_lacks_or_has_twice_are_reported(loop):
    passes = iter([range(10), [*range(4), *range(4, 9), 8]])
    dataset = Dataset.from_generator(lambda: map(np.int64, next(passes)), output_signature=NUMBER).batch(4)
    report = verify_visitation(dataset, mirrored(2), loop=loop)
    assert (report.num_rows, report.num_visited, report.num_steps) == (10, 10, 3)
    assert (report.lost, report.doubled, report.error) == (("9",), ("8",), None)
    assert not report.holds
    lines = dict(line.split(maxsplit=1) for line in str(report).splitlines())
    assert (lines["rows"], lines["lost"], lines["doubled"]) == ("10", "1: 9", "1: 8")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_pass_without_faults_visits_each_row_once(loop):
    rows = {"x": np.arange(30).reshape(10, 3), "name": np.array([f"row {number} " * 20 for number in range(10)])}
    report = verify_visitation(Dataset.from_tensor_slices(rows).shuffle(10).batch(4), mirrored(2), loop=loop)
    assert report.holds
    assert report.num_visited == 10
    by_name = verify_visitation(
        Dataset.from_tensor_slices(rows).batch(5), mirrored(1), keys=lambda batch: batch["name"].tolist()
    )
    assert by_name.num_rows == 10


def test_an_error_that_ends_a_pass_is_reported():
    passes = iter([range(6), iter(lambda: 1 // 0, 1)])
    dataset = Dataset.from_generator(lambda: map(np.int64, next(passes)), output_signature=NUMBER).batch(2)
    report = verify_visitation(dataset, mirrored(1))
    assert report.num_visited == 0
    assert "ZeroDivisionError" in report.error
    assert not report.holds


def test_what_cannot_be_verified_is_refused():
    rows = Dataset.range(10).batch(2)
    with pytest.raises(errors.ArgumentError, match="kill worker 0 at step 3, but the strategy has 0 worker processes"):
        verify_visitation(rows, mirrored(2), [Fault("kill", 3)])
    with pytest.raises(errors.ArgumentError, match="endless"):
        verify_visitation(rows.repeat(), mirrored(2))
    with pytest.raises(errors.ArgumentError, match="'stop'; give one of 'kill', 'pause', 'slow'"):
        Fault("stop", 3)
    with pytest.raises(errors.ArgumentError, match="at least 0"):
        Fault("kill", -1)


def process(dask_worker):
    return os.getpid(), dask_worker.id


def slow_keys(batch):
    """Return the rows, after a time in which faults can come: a process is stopped in a moment only."""
    time.sleep(0.03)
    return row_keys(batch)


@pytest.mark.cluster
@pytest.mark.parametrize("loop", LOOPS)
def test_every_row_is_visited_once_though_a_worker_is_killed(own_client, loop):
    eventually(lambda: len(running_workers(own_client)) == 2, 60)
    before, begun_at = own_client.run(process), time.monotonic()
    with daskdist.MultiWorkerMirroredStrategy(own_client) as strategy:
        killed = strategy.replicas[0].worker
        report = verify_visitation(Dataset.range(2_000).map(np.abs).batch(40), strategy, [Fault("kill", 13)], loop=loop)
    # Nothing waits until Dask no longer tries to reach the killed worker, 30 seconds.
    assert time.monotonic() < begun_at + 25
    assert report.holds, report
    assert report.num_visited == 2_000
    assert report.faults == (f"kill worker 0 at step 13 ({killed})",)
    assert 0 < report.longest_gap_s < report.seconds
    after = own_client.run(process)
    assert before[killed] not in after.values()
    assert set(before.values()) - {before[killed]} <= set(after.values())


class Harmless(Fault):
    def suffer(self, record):
        pass


@pytest.mark.cluster
@pytest.mark.parametrize("loop", LOOPS)
def test_faults_that_do_not_come_are_reported(own_client, loop):
    eventually(lambda: len(running_workers(own_client)) == 2, 60)
    before = own_client.run(process)
    chaos = [Fault("kill", 99), Harmless("kill", 2), Harmless("pause", 3, worker=1)]
    with daskdist.MultiWorkerMirroredStrategy(own_client) as strategy:
        first, second = [replica.worker for replica in strategy.replicas]
        report = verify_visitation(Dataset.range(400).batch(40), strategy, chaos, loop=loop)
    assert not report.holds
    assert (report.num_visited, report.lost, report.doubled, report.error) == (400, (), (), None)
    assert report.faults == ()
    assert report.missed_faults == (
        f"kill worker 0 at step 99 ({first}): the pass did not come to this step on this worker",
        f"kill worker 0 at step 2 ({first}): process {before[first][0]} still runs",
        f"pause worker 1 at step 3 for 5 s ({second}): the process was not seen stopped during the pass",
    )
    assert all(line in str(report) for line in report.missed_faults)
    assert own_client.run(process) == before


@pytest.mark.cluster
def test_the_rows_of_both_replicas_are_visited_though_one_is_lost_at_the_beginning(own_client):
    eventually(lambda: len(running_workers(own_client)) == 2, 60)
    # Each replica reads all rows.
    dataset = Dataset.range(400).batch(40).with_options(Options(auto_shard_policy="OFF"))
    with daskdist.MultiWorkerMirroredStrategy(own_client) as strategy:
        report = verify_visitation(dataset, strategy, [Fault("kill", 1)], loop="replicas")
    assert report.holds, report
    assert report.num_visited == 800


@pytest.mark.cluster
@pytest.mark.parametrize("loop", LOOPS)
def test_workers_that_are_paused_and_slowed_are_waited_for(own_client, loop):
    eventually(lambda: len(running_workers(own_client)) == 2, 60)
    dataset = Dataset.range(2_000).map(np.abs).shuffle(100).batch(40)
    chaos = [Fault("pause", 10, worker=0, seconds=0.5), Fault("slow", 15, worker=1, seconds=1)]
    with daskdist.MultiWorkerMirroredStrategy(own_client) as strategy:
        addresses = [replica.worker for replica in strategy.replicas]
        report = verify_visitation(dataset, strategy, chaos, loop=loop, keys=slow_keys)
    assert report.holds, report
    assert report.num_visited == 2_000
    assert report.faults == (
        f"pause worker 0 at step 10 for 0.5 s ({addresses[0]})",
        f"slow worker 1 at step 15 for 1 s ({addresses[1]})",
    )
