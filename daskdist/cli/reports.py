"""Arguments, errors and reports of the commands that read files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import click

from daskdist.dataset import Dataset
from daskdist.display.progress_bar import progress
from daskdist.errors import DaskdistError
from daskdist.readers.files import read_files
from daskdist.strategy.strategy import Strategy
from daskdist.url_secrets import without_secrets

_Command = TypeVar("_Command", bound=Callable[..., Any])


def of_files(command: _Command) -> _Command:
    """Add the arguments of commands that read files."""
    for add in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else."),
        click.option(
            "--format",
            "format_name",
            metavar="NAME",
            help="The format of the files.  [default: recognised by the first file]",
        ),
        click.argument("files", nargs=-1, required=True),
    ):
        command = add(command)
    return command


def dataset_of(files: Sequence[str], format_name: str | None) -> Dataset:
    """Return a dataset of the rows of files."""
    return read_files(files[0] if len(files) == 1 else list(files), format_name)


@contextlib.contextmanager
def short_errors() -> Iterator[None]:
    """Report errors of files and arguments in one line, and end the command with exit code 1; show progress."""
    try:
        with progress():
            yield
    except BrokenPipeError:
        # The reader of the output is gone, which click handles.
        raise
    except (DaskdistError, OSError) as error:
        # Messages name the options of methods.
        text = " ".join(str(error).split()).replace("overwrite=True", "--overwrite")
        raise click.ClickException(without_secrets(text)) from error


def write(report: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print a report as text or JSON, without the secrets of URLs."""
    click.echo(without_secrets(json.dumps(report) if as_json else text))


@contextlib.contextmanager
def strategy_on(scheduler: Any, num_workers: int | None) -> Iterator[Strategy]:
    """Provide a strategy on the cluster of a scheduler, or if that is None, on new processes that end after the block.

    Parameters
    ----------
    scheduler
        The address of the scheduler, or the path of its file.
    num_workers
        The number of new worker processes.
    """
    # Importing the cluster's library takes a second, and not all commands need it.
    from distributed import LocalCluster

    from daskdist.strategy.multi_worker import MultiWorkerMirroredStrategy

    with contextlib.ExitStack() as stack:
        target = scheduler or stack.enter_context(
            LocalCluster(n_workers=num_workers, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0")
        )
        yield stack.enter_context(MultiWorkerMirroredStrategy(target))
