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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import click
import numpy as np

from daskdist.cli import digits as job
from daskdist.display.progress import Progress
from daskdist.errors import ClusterError, DaskdistError, FileError
from daskdist.strategy.mirrored import MirroredStrategy
from daskdist.strategy.strategy import Strategy

# Import name of a library -> the name to install it by.
_NEEDED: Final = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}
_DEFAULT_WORKERS: Final = 2


@dataclass(frozen=True)
class DemoReplicas:
    """The place of the replicas: a new cluster, an existing cluster, or this process."""

    num_workers: int | None
    scheduler: str | None
    scheduler_file: str | None
    embedded: bool
    num_replicas: int | None

    def __post_init__(self) -> None:
        named = [
            option
            for option, value in (
                ("--workers", self.num_workers),
                ("--scheduler", self.scheduler),
                ("--scheduler-file", self.scheduler_file),
                ("--embedded", self.embedded or None),
            )
            if value is not None
        ]
        if len(named) > 1:
            raise click.UsageError(f"{' and '.join(named)} exclude each other; give one of them")
        if self.num_replicas is not None and not self.embedded:
            raise click.UsageError("--replicas needs --embedded; on a cluster, each worker is one replica")

    @property
    def is_joined(self) -> bool:
        """Return whether the demo joins an existing cluster."""
        return self.scheduler is not None or self.scheduler_file is not None

    def __str__(self) -> str:
        if self.embedded:
            return f"none, {_counted(self.num_replicas or 1, 'replica', 'replicas')} in this process ... "
        if self.is_joined:
            return f"joining {self.scheduler or self.scheduler_file} ... "
        count = _counted(self.num_workers or _DEFAULT_WORKERS, "worker process", "worker processes")
        return f"starting {count} ... "

    @contextlib.contextmanager
    def strategy(self) -> Iterator[Strategy]:
        """Provide the strategy; a cluster that the demo started is closed after the block."""
        if self.embedded:
            yield MirroredStrategy([f"CPU:{k}" for k in range(self.num_replicas or 1)])
            return
        # Importing the cluster's library takes a second, and embedded replicas do not need it.
        from distributed import LocalCluster

        from daskdist.strategy.multi_worker import MultiWorkerMirroredStrategy

        with contextlib.ExitStack() as stack:
            target: Any = self.scheduler
            if self.scheduler_file is not None:
                target = _address_in(self.scheduler_file)
            elif target is None:
                target = stack.enter_context(
                    LocalCluster(
                        n_workers=self.num_workers or _DEFAULT_WORKERS,
                        threads_per_worker=1,
                        host="127.0.0.1",
                        dashboard_address="127.0.0.1:0",
                    )
                )
            yield stack.enter_context(MultiWorkerMirroredStrategy(target))


@dataclass(frozen=True)
class Training:
    """The options of the training."""

    policy: str
    num_epochs: int
    batch_size: int
    seed: int
    loop: str


@dataclass(frozen=True)
class TrainingSummary:
    """The outcome of the training; the fields of ``--json``.

    Parameters
    ----------
    policy
        The policy by which the data was sharded, where ``auto`` is resolved.
    workers, replicas
        The numbers of workers and replicas; no workers if the replicas are in this process.
    loop
        The place of the loop: in this program or on the replicas.
    steps, rows
        The number of training steps, and of the rows in all of them.
    final_loss
        The mean loss per row in the last epoch.
    accuracy
        The share of the held-out digits that are recognised.
    seconds
        Time from the first batch to the last.
    rows_per_s
        The number of rows trained on per second.
    losses
        The mean loss of each step.
    picture
        The path of the picture.
    """

    policy: str
    workers: int
    replicas: int
    loop: str
    steps: int
    rows: int
    final_loss: float
    accuracy: float
    seconds: float
    rows_per_s: float
    losses: list[float]
    picture: str


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
    place = DemoReplicas(workers, scheduler, scheduler_file, embedded, replicas)
    _check_libraries()
    if not output.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no directory {output.absolute().parent}", param_hint="--output")
    stream = io.StringIO() if as_json else sys.stdout
    try:
        summary = _run(place, Training(policy, epochs, batch_size, seed, loop), data, output, stream)
    except BrokenPipeError:
        # The reader of the output is gone, which click handles.
        raise
    except (DaskdistError, OSError) as error:
        hint = ""
        if isinstance(error, FileError) and place.is_joined:
            hint = " (workers read the files themselves: give --data DIR, a directory that they can access)"
        raise click.ClickException(" ".join(str(error).split()) + hint) from error
    if as_json:
        click.echo(json.dumps(asdict(summary)))


def _run(place: DemoReplicas, training: Training, data: Path | None, output: Path, stream: TextIO) -> TrainingSummary:
    def say(text: str, *, ends: bool = True) -> None:
        click.echo(text, file=stream, nl=ends)

    with contextlib.ExitStack() as stack:
        if data is None:
            # Created before the cluster, so that workers have closed the files when they are removed.
            data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="daskdist-demo-")))
        say(f"{_bold('Cluster')}  {place}", ends=False)
        start_s = time.perf_counter()
        try:
            strategy = stack.enter_context(place.strategy())
        except BaseException:
            say("failed")
            raise
        say(f"ready in {time.perf_counter() - start_s:.1f} s")
        train_on, held_out = job.load()
        paths = job.write_files(train_on, data)
        say(f"{_bold('Digits')}   {len(train_on):,} to train on, {len(held_out):,} held out")
        say(f"         {len(paths)} Parquet files in {data}")
        batches = strategy.distribute_dataset(
            job.read_batches(paths, training.batch_size, training.seed, training.policy)
        )
        say(f"\n{_bold('Plan')}\n{textwrap.indent(batches.explain(), '  ')}\n\n{_bold('Training')}")

        copies = len(strategy.workers) if batches.sharding.policy.name == "OFF" else 1
        num_rows = len(train_on) * copies * training.num_epochs
        steps, weights, seconds = _train(strategy, batches, training, Progress(num_rows, stream))

    predicted = job.predict(weights, held_out)
    rows = sum(step.num_rows for step in steps)
    summary = TrainingSummary(
        policy=training.policy if training.policy != "auto" else batches.sharding.policy.name.lower(),
        workers=0 if place.embedded else len(strategy.workers),
        replicas=strategy.num_replicas_in_sync,
        loop=training.loop,
        steps=len(steps),
        rows=rows,
        final_loss=job.means_of_epochs(steps)[-1],
        accuracy=float((predicted == held_out.y).mean()),
        seconds=seconds,
        rows_per_s=rows / seconds,
        losses=[step.loss for step in steps],
        picture=str(output.absolute()),
    )
    draw(output, steps, summary, held_out, predicted)
    num_right = int((predicted == held_out.y).sum())
    say(f"\n{_bold('Result')}")
    say(f"  recognises  {summary.accuracy:.1%} of the held-out digits ({num_right} of {len(held_out)})")
    say(f"  loss        {summary.losses[0]:.3f} in the first step, {summary.final_loss:.3f} in the last epoch")
    say(f"  speed       {rows:,} rows in {seconds:.1f} s, {summary.rows_per_s:,.0f} rows/s, {len(steps)} steps")
    say(f"  picture     {output}")
    return summary


def _train(
    strategy: Strategy, batches: Any, training: Training, progress: Progress
) -> tuple[list[job.TrainingStep], job.Weights, float]:
    steps: list[job.TrainingStep] = []
    rows = 0

    def tell(new: Sequence[job.TrainingStep]) -> None:
        nonlocal rows
        steps.extend(new)
        rows += sum(step.num_rows for step in new)
        progress.update(rows, loss=steps[-1].loss, note=f"epoch {steps[-1].epoch + 1}/{training.num_epochs}")

    start_s = time.perf_counter()
    try:
        weights = job.LOOPS[training.loop](strategy, batches, training.num_epochs, training.seed, tell)
    finally:
        progress.close()
    return steps, weights, time.perf_counter() - start_s


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _bold(text: str) -> str:
    return click.style(text, bold=True)


def _check_libraries() -> None:
    missing = [name for library, name in _NEEDED.items() if importlib.util.find_spec(library) is None]
    if missing:
        raise click.ClickException(
            f"the demo needs {' and '.join(missing)}; install with: pip install 'daskdist[demo]'"
        )


def _address_in(scheduler_file: str) -> str:
    try:
        return str(json.loads(Path(scheduler_file).read_text())["address"])
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterError(
            f"{scheduler_file!r} is not a scheduler file; create one with: dask scheduler --scheduler-file FILE"
        ) from error


def draw(
    output: Path,
    steps: Sequence[job.TrainingStep],
    summary: TrainingSummary,
    held_out: job.Digits,
    predicted: job.Array,
) -> None:
    """Save a picture of the loss of every step and epoch, and of some held-out digits with their predictions."""
    from matplotlib.figure import Figure

    ink, right, wrong = "#1f3b57", "#2b7a4b", "#c0392b"
    figure = Figure(figsize=(9, 6), layout="constrained")
    grid = figure.add_gridspec(2, 1, height_ratios=[2.6, 1])
    upper, lower = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    axes = upper.subplots()
    means = job.means_of_epochs(steps)
    # Space the steps evenly, so that the axis counts epochs.
    places = np.linspace(0, len(means), len(steps) + 1)[1:]
    axes.plot(places, summary.losses, color=ink, alpha=0.35, linewidth=1, label="each step")
    axes.plot(np.arange(len(means)) + 0.5, means, "o-", color=ink, markersize=4, label="mean of the epoch")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(0, len(means))
    axes.set_xlabel("epochs")
    axes.set_ylabel("cross-entropy a row")
    axes.grid(which="both", axis="y", alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    sharded = f", policy {summary.policy}" if summary.workers > 1 else ""
    axes.set_title(
        f"{summary.accuracy:.1%} of held-out digits recognised "
        f"({_counted(summary.replicas, 'replica', 'replicas')}{sharded})"
    )
    # Show mistakes first, since they tell more.
    is_wrong = predicted != held_out.y
    shown = np.argsort(~is_wrong, kind="stable")[:20]
    lower.suptitle(f"Held-out digits and their predictions, the {is_wrong.sum()} mistakes first", fontsize=10)
    # Use one set of axes: laying out twenty takes longer than the training.
    cells = lower.subplots()
    cells.set_axis_off()
    for place, example in enumerate(shown):
        row, column = divmod(place, 10)
        left, bottom = 1.3 * column, -1.4 * row
        cells.imshow(held_out.x[example].reshape(8, 8), cmap="gray_r", extent=(left, left + 1, bottom, bottom + 1))
        color = wrong if is_wrong[example] else right
        cells.plot(
            [left, left + 1, left + 1, left, left], [bottom, bottom, bottom + 1, bottom + 1, bottom], color=color
        )
        text = f"{predicted[example]}, is {held_out.y[example]}" if is_wrong[example] else str(predicted[example])
        cells.text(left + 0.5, bottom + 1.05, text, fontsize=8, color=color, ha="center", va="bottom")
    cells.set(xlim=(-0.05, 12.75), ylim=(-1.45, 1.35))
    figure.savefig(output, dpi=130, format="png")
