"""The commands about files: what they print, as text and as JSON, and how they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import dask
import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from conftest import eventually
from programs import FORKED_WORKERS, Program

import daskdist
from daskdist.cli import COMMANDS, main
from daskdist.execute.callers.submit import workers_of
from daskdist.testing.never_run import never_run

ROOT = Path(__file__).parents[2]


def run(*args, code=0):
    result = CliRunner().invoke(main, list(map(str, args)))
    assert result.exit_code == code, result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def as_json(*args, code=0):
    return json.loads(run(*args, "--json", code=code))


def test_inspect(parquet_files):
    paths = parquet_files(rows=[4, 6])
    with never_run():
        text = run("inspect", *paths)
    assert text.splitlines()[0].startswith("parquet, 2 files, 2 splits, 10 rows, ")
    assert "id         ()    int64" in text
    report = as_json("inspect", Path(paths[0]).parent)
    assert (report["format"], report["files"], report["rows"], report["damage"]) == ("parquet", 2, 10, {})
    assert report["columns"][0] == {"path": "['id']", "shape": [], "dtype": "int64"}


def test_inspect_names_facts_that_need_check(tmp_path):
    (tmp_path / "words.txt").write_text("a\nb\nc\n")
    assert "rows not counted: use --check to read all" in run("inspect", tmp_path / "words.txt")
    assert as_json("inspect", tmp_path / "words.txt")["rows"] is None
    assert as_json("inspect", tmp_path / "words.txt", "--check")["rows"] == 3


def test_damaged_files_end_with_exit_code_1(parquet_files):
    paths = parquet_files(rows=[4, 6, 8])
    Path(paths[1]).write_bytes(b"PAR1 no more")
    assert f"damaged: {paths[1]}: " in run("inspect", *paths, code=1)
    report = as_json("inspect", *paths, "--check", code=1)
    assert list(report["damage"]) == [paths[1]]
    assert report["rows"] == 12


def test_damage_inside_of_a_file_is_found_by_reading(tmp_path):
    (path,) = daskdist.Dataset.from_list([b"a" * 1000] * 3).to_tfrecord(tmp_path / "data")
    data = bytearray(Path(path).read_bytes())
    data[500] ^= 1
    Path(path).write_bytes(data)
    assert as_json("inspect", path)["damage"] == {}
    report = as_json("inspect", path, "--check", code=1)
    assert (list(report["damage"]), report["rows"]) == ([path], 2)


@pytest.mark.parametrize(("policy", "rows"), [("file", [18, 12]), ("off", [30, 30])])
def test_explain(parquet_files, policy, rows):
    paths = parquet_files(rows=[10, 5, 8, 7])
    with never_run():
        report = as_json("explain", *paths, "--workers", 2, "--policy", policy)
    assert report["policy"] == policy.upper()
    assert [worker["num_rows"] for worker in report["workers"]] == rows
    text = run("explain", *paths, "--workers", 2, "--policy", policy, "--batch-size", 4)
    assert f"sharding: {policy.upper()} (" in text
    assert "0 worker 0" in text
    assert "batch(batch_size=4)" in text


def test_explain_agrees_with_a_cluster(parquet_files):
    paths = parquet_files(rows=[10, 5])
    report = as_json("explain", *paths, "--workers", 1)
    strategy = daskdist.MirroredStrategy(["CPU:0"])
    distributed = strategy.distribute_dataset(daskdist.read_parquet(paths).batch(1024))
    assert report["reason"] == distributed.sharding.reason
    assert report["workers"][0]["num_rows"] == 15


def test_a_policy_that_cannot_be_followed(parquet_files):
    text = run("explain", *parquet_files(rows=[10]), "--workers", 4, "--policy", "file", code=1)
    assert text.startswith("Error: FILE: read_parquet has 1 file")


def test_bench(parquet_files):
    paths = parquet_files(rows=[500, 500])
    stages = as_json("bench", *paths, "--batch-size", 100)["stages"]
    assert [stage["stage"] for stage in stages] == ["read", "read, batch", "read, shuffle, batch"]
    for stage in stages:
        assert (stage["rows"], stage["num_bytes"], stage["is_all"]) == (1000, 12_000, True)
        assert stage["rows_per_s"] == pytest.approx(1000 / stage["seconds"])
    assert "read, shuffle, batch" in run("bench", *paths)


@pytest.mark.cluster
def test_bench_on_a_cluster(parquet_files, client):
    report = as_json("bench", *parquet_files(rows=[500, 500]), "--scheduler", client.scheduler.address)
    assert report["workers"] == len(workers_of(client))
    assert [stage["stage"] for stage in report["stages"]] == ["read", "read, batch", "read, shuffle, batch"]
    assert [(stage["rows"], stage["num_bytes"], stage["is_all"]) for stage in report["stages"]] == [
        (1000, 12_000, True)
    ] * 3
    run("bench", "x", "--workers", 2, "--scheduler", client.scheduler.address, code=2)


def test_bench_ends_after_its_time(parquet_files):
    stages = as_json("bench", *parquet_files(rows=[500] * 4), "--seconds", 1e-9, "--batch-size", 10)["stages"]
    assert [stage["is_all"] for stage in stages] == [False] * 3
    assert [stage["rows"] for stage in stages][1:] == [10, 10]


@pytest.mark.parametrize("target", ["parquet", "tfrecord", "npy", "zarr"])
def test_convert(parquet_files, tmp_path, target):
    paths = parquet_files(rows=[4, 6])
    first = list(daskdist.read_parquet(paths, columns="id"))
    report = as_json("convert", *paths, tmp_path / "new", "--to", target, "--rows-per-file", 5)
    assert report["format"] == target
    if target == "parquet":
        assert [pq.read_metadata(path).num_rows for path in report["files"]] == [5, 5]
        assert list(daskdist.read_parquet(report["files"], columns="id")) == first
    if target != "npy":
        assert as_json("inspect", tmp_path / "new", "--check")["rows"] == 10
    again = run("convert", *paths, tmp_path / "new", "--to", target, code=1)
    assert again.startswith("Error: ")
    assert "--overwrite" in again
    run("convert", *paths, tmp_path / "new", "--to", target, "--overwrite")


def test_convert_continues_after_it_was_killed(tmp_path):
    (tmp_path / "rows.csv").write_text("id\n" + "".join(f"{number}\n" for number in range(500)))
    args = ["convert", str(tmp_path / "rows.csv"), str(tmp_path / "new"), "--rows-per-file", "1"]
    with Program("-m", "daskdist", *args) as command:
        eventually(lambda: sum(1 for _ in (tmp_path / "new").glob(".convert-*/*.done")) > 20, within_s=60)
        command.kill()
    kept = {path.name.split("-")[0]: path.stat().st_ino for path in (tmp_path / "new").glob(".convert-*/*.done")}
    report = as_json(*args)
    assert 5 < report["kept"] < 500
    # The files were kept, and not written again.
    for number in range(report["kept"]):
        assert Path(report["files"][number]).stat().st_ino == kept[str(number)]
    assert [int(row) for row in daskdist.read_parquet(tmp_path / "new", columns="id")] == list(range(500))
    assert not list((tmp_path / "new").glob(".convert-*"))


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_convert_to_zarr_continues_after_it_was_killed(tmp_path):
    rows = "".join(f"{number},{number}\n" for number in range(200))
    (tmp_path / "rows.csv").write_text("id,text\n" + rows)
    args = ["convert", str(tmp_path / "rows.csv"), "--to", "zarr", "--rows-per-file", "1"]
    run(*args, tmp_path / "whole.zarr")
    args.append(str(tmp_path / "new.zarr"))
    num_done = 0
    for _ in range(2):
        with Program("-m", "daskdist", *args) as command:
            eventually(lambda n=num_done: len(list(tmp_path.glob(".new.zarr.*/*.done"))) > n + 5, within_s=60)
            command.kill()
        num_done = len(list(tmp_path.glob(".new.zarr.*/*.done")))
        with pytest.raises(daskdist.errors.FileError, match="no such store"):
            daskdist.read_zarr(tmp_path / "new.zarr")
    (store,) = (path for path in tmp_path.glob(".new.zarr.*") if (path / "zarr.json").exists())
    first = (store / "id" / "c" / "0").stat()
    # As Zarr leaves it when it is killed while it writes a chunk.
    (store / "id" / "c" / f"6.{'0' * 32}.partial").write_bytes(b"")
    report = as_json(*args)
    assert 5 < report["kept"] < 200
    # The same chunk, not written again.
    now = (tmp_path / "new.zarr" / "id" / "c" / "0").stat()
    assert (now.st_ino, now.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert files_of(tmp_path / "new.zarr") == files_of(tmp_path / "whole.zarr")
    assert [int(row) for row in daskdist.read_zarr(tmp_path / "new.zarr", "id")] == list(range(200))
    assert not list(tmp_path.glob(".new.zarr*"))


def test_a_conversion_of_changed_files_begins_again(tmp_path):
    rows = daskdist.Dataset.from_list([b"a", b"b", b"c"])
    paths = rows.to_tfrecord(tmp_path / "old", rows_per_file=1)
    whole = Path(paths[2]).read_bytes()
    Path(paths[2]).write_bytes(whole[:-1])
    args = ["convert", *paths, tmp_path / "new", "--rows-per-file", 1, "--to", "tfrecord"]
    for _ in range(2):
        assert run(*args, code=1).startswith(f"Error: {paths[2]} ")
        assert list((tmp_path / "new").glob(".convert-*"))
    Path(paths[2]).write_bytes(whole)
    assert as_json(*args)["kept"] == 0
    assert list(daskdist.read_tfrecord(tmp_path / "new")) == [b"a", b"b", b"c"]
    assert not list((tmp_path / "new").glob(".convert-*"))


@pytest.mark.parametrize("command", ["inspect", "explain", "bench"])
def test_missing_files_end_with_exit_code_1_and_wrong_calls_with_2(command, tmp_path):
    assert "Error: no such file" in run(command, tmp_path / "nothing", code=1)
    assert "Missing argument 'FILES...'" in run(command, code=2)
    assert "csv" in run(command, "--format", "cvs", tmp_path, code=1)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "completion"])
def test_every_command_has_help(command):
    assert "--json" in run(command, "--help")


def test_dask_has_the_commands():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"]["dask_cli"].items()
    command = EntryPoint(*entry, "dask_cli").load()
    assert isinstance(command, click.Group)
    # Dask finds a command by its own name.
    assert command.name == entry[0] == "daskdist"
    assert command.list_commands(click.Context(command)) == sorted(COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_the_shell(shell):
    script = run("completion", shell)
    assert "_DASKDIST_COMPLETE" in script
    assert f"{shell}_complete" in script


def test_bash_completes_commands_and_options():
    words = {"inspect": "daskdist insp", "--batch-size": "daskdist bench --batch"}
    for expected, line in words.items():
        env = {"_DASKDIST_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        result = CliRunner().invoke(main, [], prog_name="daskdist", env=env)
        assert result.exit_code == 0, result.output
        assert f"plain,{expected}" in result.output.split()


def test_preload_needs_a_scheduler():
    with dask.config.set({"daskdist.timeouts.connect": 1}):
        assert "Error: " in run("preload", "tcp://127.0.0.1:9", code=1)


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_is_started_and_read(number, tmp_path):
    command = ["-m", "daskdist", "serve", "--workers", "1", "--port", "0", "--json"]
    command += ["--dashboard-address", "127.0.0.1:0"]
    # New workers ignore the Ctrl-C, as the command does when it starts them.
    environment = FORKED_WORKERS if number == signal.SIGTERM else {}
    options = {"stdout": subprocess.PIPE, "env": environment, "start_new_session": True}
    with open(tmp_path / "errors", "w") as written, Program(*command, stderr=written, **options) as started:
        try:
            report = json.loads(started.stdout.readline())
            assert report["workers"] == 1
            batches = daskdist.Dataset.range(10).batch(4).serve(report["address"])
            assert sorted(np.concatenate(list(batches)).tolist()) == list(range(10))
            assert len(as_json("preload", report["address"])["workers"]) == 1
            # A terminal sends Ctrl-C to all processes of the command.
            send = os.killpg if number == signal.SIGINT else os.kill
            send(started.pid, number)
            assert started.wait(30) == 0
        finally:
            started.kill()
    assert (tmp_path / "errors").read_text() == ""
