"""Progress of a pass, the time of its steps, and what is slow in it."""

from __future__ import annotations

import io
import re
import sys
import time

import numpy as np
import pytest
import strict_device
from test_html import text_of

import daskdist
from daskdist import Dataset, Options, errors
from daskdist.display.step_times import StepTimes
from daskdist.strategy.values.async_value import AsyncValue, peek


class Terminal(io.StringIO):
    def isatty(self):
        return True


def distributed(dataset, num_replicas=2):
    return daskdist.MirroredStrategy([f"CPU:{k}" for k in range(num_replicas)]).distribute_dataset(dataset)


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that replaces standard error by a terminal for the rest of a test."""

    def begin():
        monkeypatch.setattr(sys, "stderr", Terminal())
        monkeypatch.setenv("COLUMNS", "120")
        return sys.stderr

    return begin


def test_progress_is_shown_in_a_terminal(terminal):
    terminal = terminal()
    steps = distributed(Dataset.range(6).batch(2)).progress("epoch 1")
    for number, batch in enumerate(steps):
        assert len(batch.values) == 2
        steps.report(loss=np.float64(0.123456), step=number)
    last = re.split("[\r\n]", terminal.getvalue().rstrip())[-1]
    assert re.search(r"epoch 1.*3/3", last)
    assert re.search(r"[\d.,]+ steps/s  [\d,]+ rows/s  \d+% waiting  loss 0.1235  step 2", last)


def test_nothing_is_written_elsewhere(capfd):
    assert len(list(distributed(Dataset.range(6).batch(2)).progress())) == 3
    assert capfd.readouterr() == ("", "")


def test_an_error_ends_the_line(terminal):
    terminal = terminal()
    steps = distributed(Dataset.range(6).map(lambda x: 1 // (x - 3)).batch(2)).progress()
    with pytest.raises(errors.UserFunctionError):
        list(steps)
    assert terminal.getvalue().endswith("\n")


def test_a_pass_that_is_left_early(terminal):
    terminal = terminal()
    steps = distributed(Dataset.range(6).batch(2)).progress()
    next(steps)
    steps.close()
    assert "1/3" in terminal.getvalue()
    assert steps.stats()["num_elements"] == 1


def test_steps_of_unknown_number(terminal):
    terminal = terminal()
    list(distributed(Dataset.range(40).filter(lambda x: x % 2 == 0).batch(2)).progress())
    assert re.search(r"\b10 steps", terminal.getvalue())


@pytest.mark.cluster
def test_progress_does_not_wait_for_figures(on_cluster, terminal):
    terminal = terminal()
    large = on_cluster.run(lambda: np.zeros(100_000))
    steps = on_cluster.distribute_dataset(Dataset.range(6).batch(2)).progress()
    steps.report(loss=1.5)
    for _ in steps:
        (value, _) = large.values
        assert isinstance(value, AsyncValue)
        steps.report(loss=value)
    assert "loss 1.5" in terminal.getvalue()
    assert peek(value) is None


def test_times_are_of_steps_and_between_them():
    times = StepTimes()
    for begun_at, ended_at in [(10, 11), (14, 14.5), (15, 15.5)]:
        times.note(begun_at, ended_at)
    assert (times.waiting_s, times.step_s, times.total_s) == (2.0, 3.5, 5.5)
    assert times.waiting_share == pytest.approx(2 / 5.5)
    assert times.rate(11) == 2


def slow(row):
    time.sleep(0.002)
    return row


def slower(row):
    # Transfers between workers take some tenths of a second on a busy machine.
    time.sleep(0.01)
    return row


def test_slow_input_and_slow_steps_are_distinguished():
    steps = iter(distributed(Dataset.range(40).map(slow).batch(8)))
    for _ in steps:
        pass
    stats = steps.stats()
    assert stats["waiting_s"] >= 0.08
    assert stats["most_ahead_bytes"] >= stats["ahead_bytes"] == 0
    assert next(iter(stats["busy_s"])) == "range-map"
    assert 0.08 <= stats["busy_s"]["range-map"] <= stats["waiting_s"]
    report = daskdist.explain_slow(steps)
    assert re.search(r"^5 steps in .* s, .* per second: \d+% of the time waiting for input", report)
    assert "Work for input: range-map" in report
    assert "the program's own thread" in report
    assert re.search(r"map\(function=slow .*\) is called row by row: it calls sleep", report)
    assert "waiting for input" in text_of(steps)
    assert "5 steps" in repr(steps)

    steps = iter(distributed(Dataset.range(40).batch(8)))
    for _ in steps:
        # On a busy machine, a wait for input takes as long as it likes: let the step take many times as long.
        time.sleep(max(0.1, 20 * steps.stats()["waiting_s"]))
    assert "The steps themselves take nearly all of the time" in daskdist.explain_slow(steps)


def test_a_function_of_batches_is_not_said_to_be_called_row_by_row():
    steps = iter(distributed(Dataset.range(40).batch(2).map(slow)))
    list(steps)
    report = daskdist.explain_slow(steps)
    assert "Work for input" in report
    assert "row by row" not in report


def test_threads_that_read_ahead():
    steps = iter(distributed(Dataset.range(4000).map(slow).take(40).batch(8).prefetch(2)))
    list(steps)
    # Whether they are always busy depends on what else runs on the machine.
    assert re.search(r"The \d+ threads? that compute input (are|is) (always )?busy", daskdist.explain_slow(steps))


@pytest.mark.cluster
def test_on_a_cluster_the_times_of_tasks_and_replicas_are_described(on_cluster):
    dataset = Dataset.range(40).map(slower).shuffle(40, seed=1).batch(8)
    steps = iter(on_cluster.distribute_dataset(dataset))
    for batch in steps:
        last = on_cluster.run(np.sum, args=(batch,))
    assert on_cluster.reduce("SUM", last, axis=None) >= 0
    stats = steps.stats()
    assert next(iter(stats["busy_s"])) == "range-map"
    assert stats["busy_s"]["range-map"] >= 0.4
    assert stats["busy_s"].keys() > {"gather", "transfer"}
    assert stats["replicas"]["waiting_s"] > 0
    report = daskdist.explain_slow(steps)
    assert "On a cluster, steps are handed out before their data has arrived" in report
    assert re.search(r"Replicas have waited [\d.]+ s for the input of steps", report)
    assert "Work for input: range-map" in report
    assert re.search(r"The \d threads? of the workers are", report)
    assert re.search(r"map\(function=slower .*\) is called row by row: it calls sleep", report)
    assert "5 steps" in text_of(steps)
    # Each pass has its own times.
    other = iter(on_cluster.distribute_dataset(Dataset.range(40).batch(8)))
    next(other)
    assert "range-map" not in other.stats()["busy_s"]


def test_passes_that_are_not_distributed():
    batches = iter(Dataset.range(40).map(slow).batch(8))
    list(batches)
    stats = batches.stats()
    assert stats["num_elements"] == 5
    assert 0.08 <= stats["busy_s"]["range-map"] <= stats["waiting_s"]
    assert stats["steps_per_s"] == pytest.approx(5 / (stats["waiting_s"] + stats["step_s"]))
    report = daskdist.explain_slow(batches)
    assert re.search(r"^5 steps in .* s, .* per second: \d+% of the time waiting for input", report)
    assert "the program's own thread" in report
    assert re.search(r"map\(function=slow .*\) is called row by row: it calls sleep", report)
    assert "waiting for input" in text_of(batches)
    assert re.search(r"^<ElementIterator: 5 elements, .* a second, waiting \d+ % of the time>$", repr(batches))

    batches = iter(Dataset.range(40).batch(8))
    for _ in batches:
        time.sleep(0.1)
    assert batches.stats()["step_s"] >= 0.4
    assert "The steps themselves take nearly all of the time" in daskdist.explain_slow(batches)

    batches = iter(Dataset.range(40).map(slow).batch(8).with_options(Options(num_processes=2)))
    list(batches)
    assert "Input is computed by 2 processes" in daskdist.explain_slow(batches)


def test_copies_to_devices_are_described(monkeypatch, strict):
    strategy = daskdist.MirroredStrategy(["STRICT:0"])
    # Copies that take long.
    monkeypatch.setattr(strict_device.StrictStream, "delay_s", 0.15)
    steps = iter(strategy.distribute_dataset(Dataset.range(40).batch(8)))
    for step in steps:
        strict_device.StrictDevice(0).get(step)
    report = daskdist.explain_slow(steps)
    assert re.search(r"Copies to devices take \d+% of the time, at [\d.]+ GB/s", report)
    assert "with InputOptions(pin_arrays=True)" in report
    assert "the program's own thread" not in report

    monkeypatch.setattr(strict_device.StrictStream, "delay_s", 0.0)
    steps = iter(strategy.distribute_dataset(Dataset.range(40).map(slower).batch(8)))
    for step in steps:
        strict_device.StrictDevice(0).get(step)
    report = daskdist.explain_slow(steps)
    assert "Input is computed by the thread that copies to devices" in report
    assert "pin_arrays" not in report


def test_values_that_are_not_iterators():
    with pytest.raises(errors.ArgumentError, match=r"got Dataset; give an iterator that has taken steps, as from iter"):
        daskdist.explain_slow(Dataset.range(3))


def last_line(terminal):
    return re.split("[\r\n]", terminal.getvalue().rstrip())[-1]


LONG_WORK = {
    "save": lambda rows, path: rows.save(path),
    "to_parquet": lambda rows, path: rows.to_parquet(path, rows_per_file=10),
    "to_zarr": lambda rows, path: rows.to_zarr(path, chunk_rows=10),
    "statistics": lambda rows, path: rows.describe(),
    "cache": lambda rows, path: list(rows.cache()),
}


@pytest.mark.parametrize("title", LONG_WORK)
def test_long_work_is_shown_where_asked_for(title, terminal, tmp_path):
    rows = Dataset.range(40).map(lambda x: {"x": x})
    terminal = terminal()
    LONG_WORK[title](rows, str(tmp_path / "silent"))
    assert terminal.getvalue() == ""
    with daskdist.progress():
        LONG_WORK[title](rows, str(tmp_path / "shown"))
    assert re.search(rf"{title}: 100%.*40/40 elements \[.*, [\d,]+ elements/s\]", last_line(terminal))
    assert terminal.getvalue().endswith("\n")


def test_listing_of_many_files_is_shown(terminal, tmp_path):
    Dataset.range(70).to_parquet(tmp_path, rows_per_file=1)
    terminal = terminal()
    with daskdist.progress():
        assert len(list(daskdist.read_parquet(tmp_path))) == 70
    assert re.search(r"list files: 100%.*70/70 files", terminal.getvalue())
    assert re.search(r"read_parquet: 100%.*70/70 elements", last_line(terminal))


@pytest.mark.cluster
def test_work_of_workers_is_shown(on_cluster, terminal, tmp_path):
    terminal = terminal()
    with daskdist.progress():
        Dataset.range(40).to_npy(tmp_path, rows_per_file=10, strategy=on_cluster)
    assert "40/40 elements" in last_line(terminal)


def test_a_pass_that_continues_from_a_position_knows_its_times():
    ds = Dataset.range(40).map(slow).batch(8)
    elements = iter(ds)
    next(elements)
    resumed = iter(ds)
    resumed.load_state_dict(elements.state_dict())
    assert len(list(resumed)) == 4
    assert next(iter(resumed.stats()["busy_s"])) == "range-map"
