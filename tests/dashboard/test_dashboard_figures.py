"""The figures on the dashboard's page: from reports of workers and programs, and on a real scheduler."""

from __future__ import annotations

import types

import numpy as np
import pytest
from conftest import eventually

from daskdist import Dataset
from daskdist.dashboard.figures import NUM_KEPT, DashboardFigures
from daskdist.dashboard.tables import details, summary
from daskdist.strategy.replica import replica_times
from daskdist.strategy.replica.contract import internals_of
from daskdist.strategy.replica.replica_times import ReplicaTimes, rows_in


def report(at, *replicas):
    """Return the report of a worker: for each replica, its number, steps, rows, and seconds in steps and waiting."""
    return {
        "at": at,
        "replicas": [("s", number, "CPU:0", *totals) for number, *totals in replicas],
        "tasks": {"map": at},
    }


def program(waiting_s, step_s, **values):
    """Return the report of a program."""
    figures = {"num_in_flight": 0, "most_in_flight": 100, "ahead_bytes": 0, "most_ahead_bytes": 1000}
    return {**figures, "waiting_s": waiting_s, "step_s": step_s, **values}


def test_rates_and_shares_are_of_the_time_between_two_reports():
    figures = DashboardFigures()
    figures.observe(100.0, {"a": report(5.0, (0, 10, 640, 1.0, 0.5)), "b": report(70.0, (1, 8, 512, 1.0, 0.5))})
    replica = figures.replicas["s", 0]
    assert (replica.num_steps, replica.num_rows, replica.steps_per_s) == (10, 640, 0.0)
    # Rates are measured by each worker's clock, which starts at another time.
    figures.observe(101.0, {"a": report(7.0, (0, 30, 1920, 2.0, 1.0)), "b": report(70.5, (1, 9, 576, 1.25, 0.75))})
    assert (replica.steps_per_s, replica.rows_per_s, replica.step_share, replica.waiting_share) == (10, 640, 0.5, 0.25)
    assert replica.idle_share == 0.25
    other = figures.replicas["s", 1]
    assert (other.steps_per_s, other.step_share, other.waiting_share) == (2, 0.5, 0.5)
    assert figures.time_shares[-1] == (101.0, 0.5, 0.375, 0.125)
    assert figures.task_s == {"map": 7.0 + 70.5}
    # Worker a has sent nothing new, so its rates stay.
    figures.observe(102.0, {"a": report(7.0, (0, 30, 1920, 2.0, 1.0)), "b": report(71.5, (1, 9, 576, 1.25, 0.75))})
    assert (replica.steps_per_s, other.steps_per_s, other.idle_share) == (10, 0, 1)
    assert [point[1] for point in replica.history] == [0, 10, 10]


def test_replicas_of_closed_strategies_and_lost_workers_are_forgotten():
    figures = DashboardFigures()
    reports = {"a": report(1.0, (0, 1, 1, 0.1, 0.1)), "b": report(1.0, (1, 1, 1, 0.1, 0.1))}
    figures.observe(1.0, reports)
    # Replica 1 is now on another worker, so its figures start again.
    figures.observe(2.0, {"c": report(9.0, (1, 500, 500, 0.1, 0.1)), "a": reports["a"]})
    assert (figures.replicas["s", 1].worker, figures.replicas["s", 1].steps_per_s) == ("c", 0.0)
    assert len(figures.replicas["s", 1].history) == 1
    # Replica 0 is lost, and replica 1 gets its number and keeps its own history.
    figures.observe(2.5, {"c": report(9.5, (0, 1, 1, 0.1, 0.1))})
    assert figures.replicas.keys() == {("s", 0)}
    assert [at for at, _, _ in figures.replicas["s", 0].history] == [2.0, 2.5]
    figures.observe(3.0, {})
    assert not figures.replicas
    for number in range(NUM_KEPT + 50):
        figures.observe(4.0 + number, reports)
        figures.worker_lost(4.0 + number, f"tcp://{number}")
    assert len(figures.time_shares) == len(figures.replicas["s", 0].history) == NUM_KEPT
    assert (figures.num_lost, len(figures.lost)) == (NUM_KEPT + 50, 20)


def test_programs_report_what_they_wait_for_and_how_full_windows_are():
    figures = DashboardFigures()
    figures.program_reported(1.0, "s", program(1.0, 1.0))
    figures.program_reported(2.0, "s", program(1.25, 1.75, num_in_flight=25, ahead_bytes=500))
    figures.program_reported(2.0, "t", program(0.0, 0.0, most_in_flight=300))
    figures.observe(2.0, {})
    # The other program takes no steps, so it does not count here.
    assert figures.program_shares[-1] == (2.0, 0.25)
    assert figures.fill[-1] == (2.0, 0.25, 0.0625)
    figures.observe(12.5, {})
    assert not figures.programs


def test_time_is_counted_for_the_current_activity(monkeypatch):
    now = 0.0
    monkeypatch.setattr(replica_times, "monotonic", lambda: now)
    times = ReplicaTimes()
    for turn, seconds in (("rest", 5), ("wait", 2), ("work", 3), ("rest", 7), ("wait", 0.5), ("work", 1)):
        getattr(times, turn)()
        now += seconds
        if turn == "work":
            times.count(np.zeros((32, 1)))
    # The step that has not ended counts too.
    assert times.totals() == (2, 64, 4, 2.5)
    assert times.totals() == (2, 64, 4, 2.5)


@pytest.mark.parametrize(
    ("element", "num_rows"),
    [
        (np.zeros((4, 2)), 4),
        ({"x": (np.zeros((3, 1)), np.zeros(9)), "y": np.zeros(3)}, 3),
        ((np.float32(1.0), np.zeros(5)), 1),
        ("text", 1),
        ((), 1),
    ],
)
def test_the_rows_of_a_batch(element, num_rows):
    assert rows_in(element) == num_rows


def test_the_page_has_numbers_and_tables():
    figures = DashboardFigures()
    assert "No strategy" in summary(figures)
    assert not details(figures)
    figures.observe(1.0, {"tcp://a:1": report(1.0, (0, 10, 640, 1.0, 0.5))})
    figures.observe(2.0, {"tcp://a:1": report(2.0, (0, 1244, 79_000, 1.75, 0.75))})
    figures.worker_lost(2.0, "tcp://b:2")
    columns = {"unit": "tasks", "num_pending": None, "num_leased": 1, "num_done": 2, "num_used": 1234}
    job = types.SimpleNamespace(
        name="<b>",
        iteration=3,
        mode="DATA",
        state="running",
        elements_per_s=10.0,
        workers=(),
        consumers=("c",),
        **columns,
    )
    figures.service = types.SimpleNamespace(num_used={}, jobs=lambda: [job])
    html = summary(figures)
    for text in ("1 replica", "1,234.0 steps/s", "78,360 rows/s", "1 worker lost", "1 service job", "in steps 75%"):
        assert text in html
    html = details(figures)
    for text in ("tcp://a:1", "1,244", "tcp://b:2", "&lt;b&gt; #3", "2 tasks", "1,234"):
        assert text in html


def figures_now(dask_scheduler):
    """Return the scheduler's figures as plain values."""
    figures = dask_scheduler.plugins["daskdist-dashboard"].figures
    replicas = {
        key: (replica.num_steps, replica.num_rows, replica.step_s, replica.waiting_s)
        for key, replica in figures.replicas.items()
    }
    used = dict(figures.service.num_used) if figures.service is not None else {}
    return replicas, {token: vars(program) for token, program in figures.programs.items()}, used


@pytest.mark.cluster
def test_steps_and_rows_are_counted_where_they_are_taken(client, on_cluster):
    token = internals_of(on_cluster).token
    dataset = on_cluster.distribute_dataset(Dataset.range(96).batch(12))

    def totals():
        replicas, _, _ = client.run_on_scheduler(figures_now)
        return [replicas.get((token, number), (0, 0))[:2] for number in range(2)]

    steps = iter(dataset)
    for batch in steps:
        on_cluster.run(lambda x: x.sum(), args=(batch,))
    eventually(lambda: totals() == [(8, 48), (8, 48)])

    def loop(batches):
        return sum(len(batch) for batch in batches)

    assert on_cluster.local_results(on_cluster.run(loop, args=(dataset,))) == (48, 48)
    # The call with the loop is not counted as a step.
    eventually(lambda: totals() == [(16, 96), (16, 96)])

    def reported():
        program_figures = client.run_on_scheduler(figures_now)[1].get(token)
        return program_figures if program_figures and program_figures["step_s"] else None

    program_figures = eventually(reported)
    assert program_figures["most_in_flight"] > 0
    assert program_figures["waiting_s"] == pytest.approx(steps.stats()["waiting_s"])
    on_cluster.close()
    eventually(lambda: token not in client.run_on_scheduler(figures_now)[1])
    eventually(lambda: totals() == [(0, 0), (0, 0)])


@pytest.mark.cluster
def test_elements_of_the_service_are_counted_by_job(client):
    dataset = Dataset.range(1000).batch(10)
    list(dataset.serve(client, job_name="counted"))
    before = client.run_on_scheduler(figures_now)[2]
    list(dataset.serve(client))

    def used():
        after = client.run_on_scheduler(figures_now)[2]
        # Elements of earlier jobs may be counted only now.
        return after.get("", 0) - before.get("", 0) >= 100 and after.get("counted") == 100

    eventually(used)
