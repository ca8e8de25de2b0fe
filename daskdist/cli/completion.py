"""``daskdist completion``: the script with which a shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command("completion", short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes daskdist's commands and options in a shell.

    For bash, add to ~/.bashrc: eval "$(daskdist completion bash)"
    """
    script = get_completion_class(shell)
    if script is None:
        raise click.ClickException(f"this version of click has no completion for {shell}")
    group = click.get_current_context().find_root().command
    click.echo(script(group, {}, "daskdist", "_DASKDIST_COMPLETE").source())
