"""The demo, run as people run it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import dask
import numpy as np
import programs
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from conftest import without_closing
from distributed import LocalCluster

from daskdist.cli import digits, main

ROOT = Path(__file__).parents[2]
# Matplotlib prints this at its first run on a machine.
FONT_CACHE = "building the font cache"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster:
        yield cluster


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def invoke(*args: object) -> Result:
        return CliRunner().invoke(main, ["demo", *map(str, args)])

    return invoke


@pytest.fixture
def summary(demo):
    def invoke(*args: object) -> dict:
        result = demo("--json", "--epochs", 2, "--batch-size", 256, *args)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    return invoke


def check_picture(path: Path) -> None:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(content) > 20_000


@pytest.mark.cluster
@pytest.mark.slow
def test_the_documented_command_works_without_warnings(tmp_path_factory):
    # The names of sockets are files in this directory, and cannot be long.
    folder = tmp_path_factory.mktemp("demo")
    scratch = folder / "scratch"
    scratch.mkdir()
    # The program and its workers are forked, as imports would take most of its CPU time. It takes less than a minute.
    env = {"TMPDIR": str(scratch), **programs.FORKED_WORKERS}
    done = programs.run("-m", "daskdist", "demo", cwd=folder, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [line for line in without_closing(done.stderr).splitlines() if FONT_CACHE not in line] == []
    screen = done.stdout
    assert "2 worker processes" in screen
    assert "1,437 to train on, 360 held out" in screen
    assert "sharding: FILE (8 files for 2 workers)" in screen
    assert screen.count("tcp://127.0.0.1:") == 2
    assert "epoch 12/12  loss " in screen
    accuracy = float(screen.partition("recognises")[2].split("%")[0])
    assert accuracy >= 95
    check_picture(folder / "daskdist-demo.png")
    assert list(scratch.glob("daskdist-demo-*")) == []


def test_summary_alone_on_stdout(tmp_path, demo):
    done = demo("--embedded", "--replicas", 2, "--json", "--output", "curve.png")
    assert done.exit_code == 0, done.output
    actual = json.loads(done.stdout)
    assert actual["accuracy"] >= 0.95
    assert actual["workers"] == 0
    assert actual["replicas"] == 2
    assert actual["steps"] == len(actual["losses"]) == 12 * 12
    assert actual["rows"] == 12 * 1437
    assert actual["rows_per_s"] == pytest.approx(actual["rows"] / actual["seconds"])
    assert actual["final_loss"] < 0.1 < actual["losses"][0]
    assert actual["picture"] == str(tmp_path / "curve.png")
    check_picture(tmp_path / "curve.png")


@pytest.mark.cluster
def test_data_policy_gives_one_loss_anywhere(summary, cluster):
    places = {
        "embedded": ["--embedded"],
        "embedded, 3 replicas": ["--embedded", "--replicas", 3],
        "1 worker": ["--workers", 1],
        "2 workers joined": ["--scheduler", cluster.scheduler_address],
        "3 workers": ["--workers", 3],
    }
    actual = {name: summary("--policy", "data", *args) for name, args in places.items()}
    expected = actual["embedded"]["losses"]
    for name, item in actual.items():
        assert item["losses"] == pytest.approx(expected, abs=1e-6), name
        assert item["final_loss"] == pytest.approx(actual["embedded"]["final_loss"], abs=1e-6), name
        assert item["policy"] == "data"
    assert [value["replicas"] for value in actual.values()] == [1, 3, 1, 2, 3]
    assert [result["workers"] for result in actual.values()] == [0, 0, 1, 2, 3]


@pytest.mark.cluster
def test_policy_file_gives_the_same_losses_again(summary, cluster, tmp_path):
    scheduler_file = tmp_path / "scheduler.json"
    scheduler_file.write_text(json.dumps({"address": cluster.scheduler_address}))
    first = summary("--policy", "file", "--scheduler", cluster.scheduler_address)
    second = summary("--policy", "auto", "--scheduler-file", scheduler_file)
    assert first["policy"] == second["policy"] == "file"
    assert first["losses"] == second["losses"]
    assert first["final_loss"] == second["final_loss"]


@pytest.mark.cluster
def test_policy_off_trains_on_every_row_on_each_worker(summary, cluster):
    actual = summary("--policy", "off", "--epochs", 1, "--scheduler", cluster.scheduler_address)
    assert actual["rows"] == 2 * 1437


@pytest.mark.cluster
@pytest.mark.parametrize("where", ["embedded", "cluster"])
def test_a_loop_on_the_replicas_gives_the_same_losses(summary, cluster, where):
    place = ["--embedded", "--replicas", 3] if where == "embedded" else ["--scheduler", cluster.scheduler_address]
    expected, found = [summary("--loop", loop, *place) for loop in ("driver", "replicas")]
    assert (expected["loop"], found["loop"]) == ("driver", "replicas")
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-6)
    assert found["final_loss"] == pytest.approx(expected["final_loss"], abs=1e-6)
    same = ("policy", "workers", "replicas", "steps", "rows", "accuracy")
    assert [found[name] for name in same] == [expected[name] for name in same]


def test_a_loop_on_the_replicas_shows_its_result(demo, tmp_path):
    result = demo("--embedded", "--replicas", 2, "--epochs", 3, "--loop", "replicas")
    assert result.exit_code == 0, result.output
    assert "epoch 3/3  loss " in result.output
    assert "4,311 rows in " in result.output
    check_picture(tmp_path / "daskdist-demo.png")


def test_the_seed_determines_the_losses(summary):
    one, same, other = [summary("--embedded", "--epochs", 1, "--seed", seed)["losses"] for seed in (1, 1, 2)]
    assert one == same
    assert one != other


def test_files_are_left_where_asked(demo, tmp_path):
    result = demo("--embedded", "--epochs", 1, "--batch-size", 500, "--data", tmp_path / "a" / "b")
    assert result.exit_code == 0, result.output
    paths = sorted((tmp_path / "a" / "b").iterdir())
    assert [path.name for path in paths] == [f"digits-{k}.parquet" for k in range(8)]
    tables = [pq.read_table(path) for path in paths]
    assert sum(map(len, tables)) == 1437
    assert all(table.num_columns == 65 for table in tables)


def test_training_and_test_digits_do_not_overlap():
    train_on, held_out = digits.load()
    assert (len(train_on["y"]), len(held_out["y"])) == (1437, 360)
    assert train_on["x"].dtype == np.float64
    assert (train_on["x"].min(), train_on["x"].max()) == (0, 1)
    assert set(train_on["y"]) == set(held_out["y"]) == set(range(10))


def test_gradients_equal_numerical_derivatives():
    train_on, _ = digits.load()
    batch = {"x": train_on["x"][:20], "y": train_on["y"][:20]}
    weights = digits.fresh_weights(0)
    _, _, slopes = digits.gradients(weights, batch)
    for name, slope in slopes.items():
        nudge = np.zeros_like(slope)
        place = np.unravel_index(np.abs(slope).argmax(), slope.shape)
        nudge[place] = 1e-6
        above, below = [digits.gradients({**weights, name: weights[name] + sign * nudge}, batch)[0] for sign in (1, -1)]
        assert (above - below) / 2e-6 == pytest.approx(slope[place], rel=1e-5)


def test_a_replica_without_rows_adds_nothing():
    loss, num_rows, slopes = digits.gradients(
        digits.fresh_weights(0), {"x": np.zeros((0, 64)), "y": np.zeros(0, np.int64)}
    )
    assert loss == num_rows == 0
    assert not any(slope.any() for slope in slopes.values())


def test_no_server_at_the_address(demo, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    start_s = time.perf_counter()
    with dask.config.set({"daskdist.timeouts.connect": "1 s"}):
        result = demo("--scheduler", "tcp://127.0.0.1:1")
    assert time.perf_counter() - start_s < 25
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("Error: no Dask scheduler answers at 'tcp://127.0.0.1:1' within 1 s")
    assert list(scratch.iterdir()) == []


def test_not_a_scheduler_file(demo, tmp_path):
    (tmp_path / "odd.json").write_text("[1]")
    result = demo("--scheduler-file", "odd.json")
    assert result.exit_code == 1
    assert "Error: 'odd.json' is not a file that 'dask scheduler --scheduler-file' wrote" in result.output


@pytest.mark.parametrize("library", ["sklearn", "matplotlib"])
def test_missing_library(demo, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    result = demo("--embedded")
    assert result.exit_code == 1
    assert "pip install 'daskdist[demo]'" in result.output
    assert {"sklearn": "scikit-learn"}.get(library, library) in result.output


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--workers", "0"], "--workers"),
        (["--policy", "best"], "'auto', 'file', 'data', 'off'"),
        (["--batch-size", "0"], "--batch-size"),
        (["--loop", "worker"], "'driver', 'replicas'"),
        (["--embedded", "--workers", "2"], "--workers and --embedded exclude each other"),
        (["--replicas", "2"], "--replicas needs --embedded"),
        (["--scheduler-file", "nowhere.json"], "nowhere.json"),
        (["--embedded", "--output", "nowhere/curve.png"], "there is no directory"),
    ],
)
def test_bad_arguments(demo, args, says):
    result = demo(*args)
    assert result.exit_code == 2
    assert says in result.output


def test_help():
    runner = CliRunner()
    assert "Train a small network" in runner.invoke(main, ["--help"]).stdout
    help_ = runner.invoke(main, ["demo", "--help"]).stdout
    for option in (
        "--workers",
        "--scheduler",
        "--scheduler-file",
        "--embedded",
        "--policy",
        "--loop",
        "--data",
        "--json",
    ):
        assert option in help_
    assert runner.invoke(main, ["--version"]).stdout.startswith("daskdist ")


def test_the_command_line_imports_no_large_library():
    script = (
        "import sys, daskdist.cli\n"
        "print(sorted({'distributed', 'numpy', 'pyarrow', 'sklearn', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.stdout == "[]\n", done.stderr
