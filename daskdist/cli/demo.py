"""``daskdist demo``: train a network by synchronous steps on a cluster, with digits in Parquet files."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from daskdist.cli import digits as job
from daskdist.cli.reports import strategy_on
from daskdist.core.cardinality import counted
from daskdist.errors import DaskdistError, FileError
from daskdist.strategy.mirrored import MirroredStrategy
from daskdist.strategy.strategy import Strategy

# Import name of a library -> the name to install it by.
_NEEDED: Final = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}


@click.command(short_help="Train a small network on real digits, on a cluster.")
@click.option(
    "--workers", metavar="N", type=click.IntRange(1), help="Worker processes to start on this machine.  [default: 2]"
)
@click.option("--scheduler", metavar="ADDRESS", help="Join the cluster of this scheduler instead.")
@click.option(
    "--scheduler-file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="Join the cluster of the scheduler that wrote this file instead.",
)
@click.option("--embedded", is_flag=True, help="Use no cluster: replicas in this process instead.")
@click.option(
    "--replicas", metavar="N", type=click.IntRange(1), help="Replicas in this process, with --embedded.  [default: 1]"
)
@click.option(
    "--policy",
    type=click.Choice(["auto", "file", "data", "off"]),
    default="auto",
    show_default=True,
    help="How the data is sharded over workers.",
)
@click.option(
    "--epochs", metavar="N", type=click.IntRange(1), default=12, show_default=True, help="Passes over the data."
)
@click.option(
    "--batch-size",
    metavar="N",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Rows per step, of all replicas together.",
)
@click.option(
    "--loop",
    type=click.Choice(list(job.LOOPS)),
    default="driver",
    show_default=True,
    help="Where the training loop runs: in this program, which sends each step to the replicas, or on each replica.",
)
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="The seed of the order of the rows and of the initial weights.",
)
@click.option(
    "--data",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to write the Parquet files, which are kept.  [default: a temporary directory]",
)
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("daskdist-demo.png"),
    show_default=True,
    help="Where to save the picture (PNG).",
)
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON, and nothing else.")
def demo(
    workers: int | None,
    scheduler: str | None,
    scheduler_file: str | None,
    embedded: bool,
    replicas: int | None,
    policy: str,
    epochs: int,
    batch_size: int,
    loop: str,
    seed: int,
    data: Path | None,
    output: Path,
    as_json: bool,
) -> None:
    """Train a small network on handwritten digits, by synchronous steps on all workers of a Dask cluster.

    Writes the 1,797 digits that come with scikit-learn as 8 Parquet files, starts a cluster of two worker
    processes on this machine, reads, shuffles, batches and shards the files there, and trains a network of one
    hidden layer by synchronous data-parallel gradient descent. Shows how the data was sharded, the loss, and
    how many held-out digits are recognised, and saves a picture of it.

    The loop of the training is in this program; with --loop replicas it is on each replica, which sum their
    gradients among themselves. The losses are the same, and on a cluster it takes a fraction of the time.

    The workers of an existing cluster read the files themselves. If they do not share this machine's file
    system, give a directory with --data that they can access by the same path.
    """
    places = {
        "--workers": workers,
        "--scheduler": scheduler,
        "--scheduler-file": scheduler_file,
        "--embedded": embedded or None,
    }
    named = [option for option, value in places.items() if value is not None]
    if len(named) > 1:
        raise click.UsageError(f"{' and '.join(named)} exclude each other; give one of them")
    if replicas is not None and not embedded:
        raise click.UsageError("--replicas needs --embedded; on a cluster, each worker is one replica")
    _check_libraries()
    if not output.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {output.absolute().parent}", param_hint="--output")
    num_embedded = (replicas or 1) if embedded else 0
    stream = io.StringIO() if as_json else sys.stdout

    def say(text: str, *, ends: bool = True) -> None:
        click.echo(text, file=stream, nl=ends)

    try:
        with contextlib.ExitStack() as stack:
            if data is None:
                # Created before the cluster, so that workers have closed the files when they are removed.
                data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="daskdist-demo-")))
            no_cluster = f"none, {counted(num_embedded, 'replica')} in this process"
            joined = f"joining {scheduler or scheduler_file}"
            started = f"starting {counted(workers or 2, 'worker process')}"
            place = no_cluster if num_embedded else joined if scheduler or scheduler_file else started
            say(f"{_bold('Cluster')}  {place} ... ", ends=False)
            start_s = time.perf_counter()
            try:
                if num_embedded:
                    strategy: Strategy = MirroredStrategy([f"CPU:{k}" for k in range(num_embedded)])
                else:
                    target = scheduler or (scheduler_file and Path(scheduler_file))
                    strategy = stack.enter_context(strategy_on(target, workers or 2))
            except BaseException:
                say("failed")
                raise
            say(f"ready in {time.perf_counter() - start_s:.1f} s")
            train_on, held_out = job.load()
            paths = job.write_files(train_on, data)
            say(f"{_bold('Digits')}   {len(train_on['y']):,} to train on, {len(held_out['y']):,} held out")
            say(f"         {len(paths)} Parquet files in {data}")
            batches = strategy.distribute_dataset(job.read_batches(paths, batch_size, seed, policy))
            say(f"\n{_bold('Plan')}\n{textwrap.indent(batches.explain(), '  ')}\n\n{_bold('Training')}")
            start_s = time.perf_counter()
            steps, weights = job.LOOPS[loop](strategy, batches, epochs, seed)
            seconds = time.perf_counter() - start_s
            for epoch, loss in enumerate(job.means_of_epochs(steps)):
                say(f"  epoch {epoch + 1}/{epochs}  loss {loss:.4f}")
    except BrokenPipeError:
        # The reader of the output is gone, which click handles.
        raise
    except (DaskdistError, OSError) as error:
        hint = ""
        if isinstance(error, FileError) and (scheduler or scheduler_file):
            hint = " (workers read the files themselves: give --data DIR, a directory that they can access)"
        raise click.ClickException(" ".join(str(error).split()) + hint) from error

    is_right = job.predict(weights, held_out) == held_out["y"]
    rows = sum(step.num_rows for step in steps)
    summary: dict[str, Any] = {
        "policy": policy if policy != "auto" else batches.sharding.policy.name.lower(),
        # No workers if the replicas are in this process.
        "workers": 0 if embedded else len(strategy.workers),
        "replicas": strategy.num_replicas_in_sync,
        "loop": loop,
        "steps": len(steps),
        "rows": rows,
        "final_loss": job.means_of_epochs(steps)[-1],
        "accuracy": float(is_right.mean()),
        "seconds": seconds,
        "rows_per_s": rows / seconds,
        "losses": [step.loss for step in steps],
        "picture": str(output.absolute()),
    }
    draw(output, steps, summary, held_out, job.predict(weights, held_out))
    say(f"\n{_bold('Result')}")
    say(f"  recognises  {is_right.mean():.1%} of the held-out digits ({is_right.sum()} of {len(is_right)})")
    say(f"  loss        {steps[0].loss:.3f} in the first step, {summary['final_loss']:.3f} in the last epoch")
    say(f"  speed       {rows:,} rows in {seconds:.1f} s, {rows / seconds:,.0f} rows/s, {len(steps)} steps")
    say(f"  picture     {output}")
    if as_json:
        click.echo(json.dumps(summary))


def _bold(text: str) -> str:
    return click.style(text, bold=True)


def _check_libraries() -> None:
    missing = [name for library, name in _NEEDED.items() if importlib.util.find_spec(library) is None]
    if missing:
        raise click.ClickException(
            f"the demo needs {' and '.join(missing)}; install with: pip install 'daskdist[demo]'"
        )


def draw(
    output: Path,
    steps: Sequence[job.TrainingStep],
    summary: dict[str, Any],
    held_out: job.Digits,
    predicted: job.Array,
) -> None:
    """Save a picture of the loss of every step and epoch, and of some held-out digits with their predictions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes, cells = figure.subplots(2, 1, height_ratios=[2.2, 1])
    means = job.means_of_epochs(steps)
    # Space the steps evenly, so that the axis counts epochs.
    places = np.linspace(0, len(means), len(steps) + 1)[1:]
    axes.plot(places, summary["losses"], alpha=0.4, label="each step")
    axes.plot(np.arange(len(means)) + 0.5, means, "o-", label="mean of the epoch")
    sharded = f", policy {summary['policy']}" if summary["workers"] > 1 else ""
    title = (
        f"{summary['accuracy']:.1%} of held-out digits recognised ({counted(summary['replicas'], 'replica')}{sharded})"
    )
    axes.set(yscale="log", xlim=(0, len(means)), xlabel="epochs", ylabel="cross-entropy a row", title=title)
    axes.grid(which="both", axis="y", alpha=0.2)
    axes.legend()
    # Show mistakes first, as they are more interesting.
    is_wrong = predicted != held_out["y"]
    shown = np.argsort(~is_wrong, kind="stable")[:20]
    images = np.pad(held_out["x"][shown].reshape(2, 10, 8, 8), ((0, 0), (0, 0), (4, 1), (1, 1)))
    cells.imshow(images.transpose(0, 2, 1, 3).reshape(26, 100), cmap="gray_r")
    for place, example in enumerate(shown):
        text = f"{predicted[example]}, is {held_out['y'][example]}" if is_wrong[example] else str(predicted[example])
        x, y = 10 * (place % 10) + 4.5, 13 * (place // 10) + 1.5
        cells.text(x, y, text, fontsize=8, color="firebrick" if is_wrong[example] else "green", ha="center")
    cells.set_title(f"Held-out digits and their predictions, the {is_wrong.sum()} mistakes first", fontsize=10)
    cells.set_axis_off()
    figure.savefig(output, dpi=130, format="png")
