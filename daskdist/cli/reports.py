"""Datasets of files, errors and reports for all commands."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import click

from daskdist.dataset import Dataset
from daskdist.errors import DaskdistError
from daskdist.readers.files import read_files

_Command = TypeVar("_Command", bound=Callable[..., Any])


def of_files(command: _Command) -> _Command:
    """Add the arguments of commands that read files."""
    for add in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else."),
        click.option(
            "--format", "format_name", metavar="NAME", help="Their format.  [default: recognised by the first file]"
        ),
        click.argument("files", nargs=-1, required=True),
    ):
        command = add(command)
    return command


def dataset_of(files: Sequence[str], format_name: str | None) -> Dataset:
    """Return the dataset of files."""
    return read_files(files[0] if len(files) == 1 else list(files), format_name)


@contextlib.contextmanager
def told_shortly() -> Iterator[None]:
    """Raise errors of files and arguments as errors of the command, which ends with exit code 1."""
    try:
        yield
    except BrokenPipeError:
        # Nobody reads the output any more; click knows how to end then.
        raise
    except (DaskdistError, OSError) as error:
        raise click.ClickException(" ".join(str(error).split())) from error


def write(report: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print a report, as text or as JSON."""
    click.echo(json.dumps(report) if as_json else text)
