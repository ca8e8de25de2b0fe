"""Benchmarks run, whatever the time they take."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import programs
import pytest

from daskdist.devices.cupy import CupyDevice

WHY_NO_GPU = CupyDevice(0).missing()
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SPINE = BENCHMARKS / "spine.py"
OPERATIONS = BENCHMARKS / "operations.py"
READERS = BENCHMARKS / "readers.py"
SCALE = BENCHMARKS / "scale.py"
SOAK = BENCHMARKS / "soak.py"
STEPS = BENCHMARKS / "steps.py"
SERVICE = BENCHMARKS / "service.py"
LOOPS = BENCHMARKS / "loops.py"
FAULTS = BENCHMARKS / "faults.py"
PASSES = BENCHMARKS / "passes.py"
COLLECTIVES = BENCHMARKS / "collectives.py"
GPU = BENCHMARKS / "gpu.py"
PROCESSES = BENCHMARKS / "processes.py"
TORCH_DDP = BENCHMARKS / "torch_ddp.py"
DIGITS = BENCHMARKS / "digits.py"
# The test of the table runs the part "memory".
NAMES = ["parquet", "import", pytest.param("cluster", marks=[pytest.mark.cluster, pytest.mark.slow])]


def start(script: Path, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return programs.run(script, "--size", "small", *args, timeout=110, env=env)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[dict[str, Any]]]:
    """Run a benchmark and return its figures; in this process, as a new one takes longer than most benchmarks."""

    def figures_of(script: Path, *args: str) -> list[dict[str, Any]]:
        monkeypatch.syspath_prepend(BENCHMARKS)
        monkeypatch.setattr(sys, "argv", [str(script), "--size", "small", "--json", *args])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        assert ended.value.code == 0
        return json.loads(capsys.readouterr().out)["figures"]

    return figures_of


@pytest.mark.parametrize("name", NAMES)
def test_the_main_benchmark_gives_figures(run, name: str) -> None:
    figures = run(SPINE, "--only", name)
    assert figures
    assert all(figure["ours"] >= 0 for figure in figures)


def test_the_table_has_a_line_for_each_figure() -> None:
    # Run the benchmark as a separate program, as users do.
    done = start(SPINE, "--only", "memory")
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    assert header.split() == ["what", "ours", "floor", "or", "peer", "ratio", "target", "holds"]
    assert sum(line.startswith("in memory") for line in lines) == 2


def test_operations_give_figures(run) -> None:
    figures = run(OPERATIONS)
    assert all(figure["ours"] >= 0 for figure in figures)
    whats = [figure["what"] for figure in figures]
    for word in ("map", "filter", "padded_batch", "zip", "interleave", "repeat", "shard", "global_shuffle", "load"):
        assert any(word in what for what in whats), word
    assert any(figure["what"].startswith("memory of shuffle") and figure["target"] == 3 for figure in figures)


def test_readers_give_figures(run) -> None:
    figures = run(READERS)
    assert all(figure["ours"] >= 0 for figure in figures)
    whats = [figure["what"].lower() for figure in figures]
    formats = {path.stem for path in (BENCHMARKS / "formats").glob("*.py")} - {"__init__"}
    assert len(formats) >= 12
    for word in ("parquet", "csv", "json", "lines of text", "records", "arrow", "npy", "zarr", "hdf5", "webdataset"):
        assert any(word in what for what in whats), word
    assert any("list and plan" in what for what in whats)
    assert sum("first batch" in what for what in whats) == 5


def test_what_a_large_cluster_costs_gives_figures(run) -> None:
    only = [word for name in ("planning", "first-graph", "stepping", "tasks") for word in ("--only", name)]
    figures = run(SCALE, *only)
    assert all(figure["ours"] >= 0 for figure in figures)
    whats = [figure["what"] for figure in figures]
    for word in ("FILE", "DATA", "plan", "calls", "bytes sent", "a step and worker", "1,000 batches"):
        assert any(word in what for what in whats), word
    # These figures are not timings, so they hold on any machine.
    assert all(figure["holds"] for figure in figures if figure["unit"] in ("calls", "bytes", "tasks"))


@pytest.mark.cluster
@pytest.mark.slow
def test_a_real_cluster_gives_the_tasks_that_were_counted(run) -> None:
    (file, data) = run(SCALE, "--only", "cluster")
    assert file["holds"]
    assert data["holds"]


@pytest.mark.parametrize("name", ["embedded", pytest.param("cluster", marks=[pytest.mark.cluster, pytest.mark.slow])])
def test_a_soak_records_memory(run, name: str) -> None:
    figures = run(SOAK, "--only", name)
    assert figures[0]["unit"] == "steps/s"
    assert figures[0]["ours"] > 0
    assert any("growth of the driver" in figure["what"] and figure["target"] == 5 for figure in figures)


@pytest.mark.cluster
@pytest.mark.slow
def test_many_passes_record_memory(run) -> None:
    figures = run(SOAK, "--only", "passes")
    assert [figure["unit"] for figure in figures] == ["MiB/pass"] * 3


@pytest.mark.cluster
@pytest.mark.slow
def test_steps_give_figures(run) -> None:
    figures = run(STEPS)
    whats = [figure["what"] for figure in figures]
    for word in (
        "embedded: steps",
        "a step at a time",
        "functions of 100",
        "each awaited",
        "second half",
        "tasks left",
        "a round trip of 1 kB, relayed",
    ):
        assert any(word in what for what in whats), word
    assert all(figure["holds"] for figure in figures if figure["unit"] == "tasks")
    (captured,) = [figure for figure in figures if figure["what"] == "cluster: functions of 100"]
    # The other calls are a reduction for each of the 100 steps, and additions of what has not arrived by then.
    assert re.search(r"100 steps and [12]\d\d other calls", captured["note"])
    assert captured["note"].endswith("waited nowhere")


@pytest.mark.cluster
@pytest.mark.slow
def test_the_service_gives_figures(run) -> None:
    figures = run(SERVICE, "--only", "batches", "--only", "rows", "--only", "killed")
    assert all(figure["ours"] > 0 and figure["peer"] > 0 for figure in figures[:2])
    assert {figure["what"] for figure in figures if figure["unit"] == "elements" and figure["holds"]} == {
        "a worker killed: elements lost",
        "a worker killed: elements doubled",
    }


@pytest.mark.cluster
@pytest.mark.slow
def test_loops_give_figures(run) -> None:
    figures = run(LOOPS)
    assert [figure["unit"] for figure in figures] == ["batches/s"] * 10 + ["transitions"]
    assert all(figure["ours"] > 0 for figure in figures[:-1])
    # The scheduler's work for a loop does not depend on the number of batches.
    assert figures[-1]["holds"]


@pytest.mark.cluster
@pytest.mark.slow
def test_faults_lose_no_rows(run) -> None:
    # The first three parts share a cluster, whose workers the last one kills.
    parts = ("programs", "memory", "workers", "schedulers", "states")
    arguments = chain.from_iterable(("--only", part) for part in parts)
    figures = {figure["what"]: figure for figure in run(FAULTS, *arguments)}
    assert figures["killed programs"]["ours"] == 1
    assert figures["passes with a killed scheduler"]["ours"] == 2
    assert figures["passes with a killed worker"]["ours"] == 3
    # Only times depend on the machine.
    failed = [figure for figure in figures.values() if figure["holds"] is False and figure["unit"] not in {"s", "ms"}]
    assert not failed


@pytest.mark.cluster
@pytest.mark.slow
def test_passes_over_arrays_give_figures(run) -> None:
    figures = run(PASSES)
    assert [figure["target"] for figure in figures] == [4_000] * 7
    assert all(min(figure["ours"], figure["peer"]) > 0 for figure in figures)


@pytest.mark.cluster
@pytest.mark.slow
def test_collectives_give_figures(run) -> None:
    figures = run(COLLECTIVES)
    assert [figure["unit"] for figure in figures] == ["us", "ms", "MB/s", "MB/s"]
    assert all(figure["ours"] > 0 for figure in figures)


@pytest.mark.parametrize("name", ["embedded", pytest.param("cluster", marks=[pytest.mark.cluster, pytest.mark.slow])])
def test_digits_give_figures(run, name: str) -> None:
    speed, difference = run(DIGITS, "--only", name)
    assert speed["unit"] == "steps/s"
    assert min(speed["ours"], speed["peer"]) > 0
    # This figure is not a timing, so it holds on any machine.
    assert difference["target"] == 1e-6
    assert difference["holds"]


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_figures"), [("small", 4), ("large", 1)])
def test_training_with_torch_gives_figures(run, name: str, num_figures: int) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    figures = run(TORCH_DDP, "--only", name)
    assert len(figures) == num_figures
    assert all(figure["ours"] > 0 for figure in figures)
    assert figures[-1]["peer_name"].startswith("DataLoader")


@pytest.mark.parametrize(("name", "num_figures"), [("images", 3), ("text", 4)])
def test_processes_give_figures(run, name: str, num_figures: int) -> None:
    figures = run(PROCESSES, "--only", name)
    assert len(figures) == num_figures
    assert all(figure["ours"] > 0 for figure in figures)


def test_without_torch_it_says_what_to_install(tmp_path: Path) -> None:
    Path(tmp_path, "torch.py").write_text("raise ImportError('there is none')")
    done = start(TORCH_DDP, env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(BENCHMARKS.parent)])})
    assert done.returncode == 1
    assert done.stderr == "benchmarks/torch_ddp.py needs PyTorch: pip install 'daskdist[torch]' (there is none)\n"


def test_without_cupy_it_says_what_it_needs(tmp_path: Path) -> None:
    Path(tmp_path, "cupy.py").write_text("raise ImportError('there is none')")
    done = start(GPU, env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(BENCHMARKS.parent)])})
    assert done.returncode == 1
    assert done.stderr == (
        "benchmarks/gpu.py needs CuPy and a GPU that it sees (ImportError: there is none); for CuPy: "
        "pip install 'daskdist[cuda13]'\n"
    )


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(WHY_NO_GPU is not None, reason=f"no GPU: {WHY_NO_GPU}")
@pytest.mark.parametrize(
    ("name", "num_figures"),
    [("feeding", 4), ("small-chunks", 3), ("during-steps", 4), ("shuffling", 6), ("reducing", 6)],
)
def test_a_gpu_gives_figures(run, name: str, num_figures: int) -> None:
    figures = run(GPU, "--only", name)
    assert len(figures) >= num_figures
    # The last two figures are of memory, which may not change with such small sizes.
    assert all(figure["ours"] > 0 for figure in figures[:-2] if not figure["what"].startswith("share"))


def test_a_peer_that_does_not_start_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho there is no such library >&2\nexit 3\n")
    python.chmod(0o755)
    done = start(OPERATIONS, "--only", "map_range", "--peer", "tf", "--python", str(python))
    assert done.returncode == 1
    assert "tf.data ended with 3:\nthere is no such library" in done.stderr


@pytest.mark.parametrize(
    ("script", "known"),
    [
        (SPINE, "memory"),
        (OPERATIONS, "memory"),
        (READERS, "parquet"),
        (SCALE, "planning"),
        (SOAK, "embedded"),
        (STEPS, "growth"),
        (SERVICE, "first"),
        (LOOPS, "loops"),
        (COLLECTIVES, "embedded"),
        (DIGITS, "cluster"),
    ],
)
def test_an_unknown_benchmark_is_refused(
    script: Path, known: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Run in this process, since starting another one takes longer than the whole test.
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [str(script), "--only", "nothing"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 2
    assert known in capsys.readouterr().err
