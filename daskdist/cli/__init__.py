"""The command line: ``daskdist``, ``dask daskdist``, or ``python -m daskdist``.

A subcommand's module is imported when the subcommand is used, so that asking for help costs little.
"""

from __future__ import annotations

import importlib
from typing import Final

import click

from daskdist import __version__

# Subcommand -> its module and attribute.
COMMANDS: Final = {
    "bench": "daskdist.cli.bench_files:bench_files",
    "completion": "daskdist.cli.completion:completion",
    "convert": "daskdist.cli.convert_files:convert_files",
    "demo": "daskdist.cli.demo:demo",
    "explain": "daskdist.cli.explain_files:explain_files",
    "inspect": "daskdist.cli.inspect_files:inspect_files",
    "preload": "daskdist.cli.data_service:preload",
    "serve": "daskdist.cli.data_service:serve",
}


class _OnUse(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


@click.group("daskdist", cls=_OnUse, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="daskdist %(version)s")
def main() -> None:
    """Distributed datasets and synchronous replicas on Dask."""
