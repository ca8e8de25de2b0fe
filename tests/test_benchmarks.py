"""Benchmarks run, whatever the time they take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SPINE = Path(__file__).parents[1] / "benchmarks" / "spine.py"
NAMES = ["memory", "parquet", "import", pytest.param("cluster", marks=[pytest.mark.cluster, pytest.mark.slow])]


def run(*args: str) -> str:
    done = subprocess.run(
        [sys.executable, str(SPINE), "--size", "small", *args],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_it_gives_figures(name: str) -> None:
    figures = json.loads(run("--only", name, "--json"))["figures"]
    assert figures
    assert all(figure["ours"] >= 0 for figure in figures)


def test_the_table_has_a_line_for_each_figure() -> None:
    header, *lines = run("--only", "memory").splitlines()
    assert header.split() == ["what", "ours", "floor", "or", "peer", "ratio", "target", "holds"]
    assert sum(line.startswith("in memory") for line in lines) == 2


def test_an_unknown_benchmark_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, str(SPINE), "--only", "nothing"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "memory" in done.stderr
